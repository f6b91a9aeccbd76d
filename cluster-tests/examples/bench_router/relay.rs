//! A process that passes bytes on between a client and the nodes: what any process in between costs on this machine.
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use anyhow::Context;
use tokio::net::{TcpListener, TcpStream};

/// A running one; ended on drop.
pub struct Relay {
    child: Child,
    /// Of its ports, in the order of the nodes.
    urls: [String; 2],
}

impl Relay {
    /// In front of the nodes at these addresses: this program again.
    pub async fn start(nodes: &[&str; 2]) -> anyhow::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        let child = command.args(nodes.map(|node| format!("--relay={node}"))).stdout(Stdio::piped()).spawn();
        let child = child.context("the relay does not start")?;
        let mut relay = Self { child, urls: [String::new(), String::new()] };
        let mut lines = BufReader::new(relay.child.stdout.take().context("no stdout")?).lines();
        for url in &mut relay.urls {
            *url = format!("http://{}", lines.next().context("the relay ended")??);
        }
        Ok(relay)
    }

    pub fn urls(&self) -> [String; 2] {
        self.urls.clone()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The relay's process: prints a port for each of `nodes`, and passes on until it is killed.
pub async fn run(nodes: &[SocketAddr]) -> anyhow::Result<()> {
    for node in nodes.iter().copied() {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        println!("{}", listener.local_addr()?);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(pass_on(client, node));
            }
        });
    }
    std::future::pending().await
}

async fn pass_on(mut client: TcpStream, node: SocketAddr) -> std::io::Result<()> {
    let mut node = TcpStream::connect(node).await?;
    client.set_nodelay(true)?;
    node.set_nodelay(true)?;
    tokio::io::copy_bidirectional(&mut client, &mut node).await.map(drop)
}
