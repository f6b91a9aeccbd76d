//! A process that passes bytes on between a client and the nodes: what any process in between costs on this machine.
use std::net::SocketAddr;

use anyhow::Context;
use tandem_cluster_tests::{Cluster, Process};
use tokio::net::{TcpListener, TcpStream};

/// Keys of its ready line, in the order in which it is given the nodes.
pub const NODES: [&str; 2] = ["prefill", "decode"];

/// One in front of the nodes of `cluster`: this program again.
pub async fn start(cluster: &Cluster) -> anyhow::Result<Process> {
    let own = std::env::current_exe()?;
    let nodes = [&cluster.prefill, &cluster.decode].map(|node| format!("--relay={}", node.ready("grpc")));
    Process::start("relay", own.to_str().context("this program's path is not UTF-8")?, &nodes, cluster.dir()).await
}

/// The relay's process: prints a ready line with a port for each of `nodes`, and passes on until it is killed.
pub async fn run(nodes: &[SocketAddr]) -> anyhow::Result<()> {
    let mut ready = "ready".to_owned();
    for (name, node) in NODES.into_iter().zip(nodes.iter().copied()) {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        ready += &format!(" {name}={}", listener.local_addr()?);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(pass_on(client, node));
            }
        });
    }
    println!("{ready}");
    std::future::pending().await
}

async fn pass_on(mut client: TcpStream, node: SocketAddr) -> std::io::Result<()> {
    let mut node = TcpStream::connect(node).await?;
    client.set_nodelay(true)?;
    node.set_nodelay(true)?;
    tokio::io::copy_bidirectional(&mut client, &mut node).await.map(drop)
}
