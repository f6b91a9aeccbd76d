//! A TCP link between two programs that can be cut, slowed and healed. Cut means silence: bytes wait, nobody is told,
//! as when a cable is pulled. Whoever connects meanwhile waits, too.
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// What one read takes; at a slow link's rate, also its grain.
const CHUNK_BYTES: usize = 16 << 10;

/// How a link is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quality {
    /// As fast as the machine.
    Good,
    /// So many bytes a second and connection, each way.
    Slow(u32),
    /// Nothing arrives.
    Cut,
}

/// A port that leads to another one. Dropping it ends its connections.
pub struct Link {
    address: SocketAddr,
    quality: watch::Sender<Quality>,
    target: watch::Sender<Option<SocketAddr>>,
    accepting: JoinHandle<()>,
}

impl Link {
    /// A good link that leads nowhere yet: who connects waits for [`Link::leads_to`].
    ///
    /// # Errors
    /// The system has no port.
    pub async fn new() -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let (quality, target) = (watch::Sender::new(Quality::Good), watch::Sender::new(None));
        let state = Arc::new((quality.clone(), target.clone()));
        let accepting = tokio::spawn(async move {
            // Connections end with the link: they are tasks of this set.
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(forward(stream, state.clone()));
                while connections.try_join_next().is_some() {}
            }
        });
        Ok(Self { address, quality, target, accepting })
    }

    /// Where it begins.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where it ends from now on; connections that stand keep their end.
    pub fn leads_to(&self, target: SocketAddr) {
        self.target.send_replace(Some(target));
    }

    /// Changes it for connections that stand and those to come.
    pub fn becomes(&self, quality: Quality) {
        self.quality.send_replace(quality);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

type State = (watch::Sender<Quality>, watch::Sender<Option<SocketAddr>>);

async fn forward(near: TcpStream, state: Arc<State>) {
    let (mut quality, mut target) = (state.0.subscribe(), state.1.subscribe());
    let Ok(target) = target.wait_for(Option::is_some).await.map(|target| *target) else { return };
    if quality.wait_for(|quality| *quality != Quality::Cut).await.is_err() {
        return;
    }
    let Some(target) = target else { return };
    let Ok(far) = TcpStream::connect(target).await else { return };
    let _ = (near.set_nodelay(true), far.set_nodelay(true));
    let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
    let there = carry(near_in, far_out, state.0.subscribe());
    let back = carry(far_in, near_out, state.0.subscribe());
    tokio::join!(there, back);
}

/// One direction, until either side is gone.
async fn carry(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut quality: watch::Receiver<Quality>) {
    let mut chunk = vec![0; CHUNK_BYTES];
    while let Ok(bytes @ 1..) = from.read(&mut chunk).await {
        let Ok(now) = quality.wait_for(|quality| *quality != Quality::Cut).await.map(|now| *now) else { return };
        if let Quality::Slow(bytes_per_s) = now {
            tokio::time::sleep(Duration::from_secs_f64(bytes as f64 / f64::from(bytes_per_s.max(1)))).await;
        }
        if to.write_all(&chunk[..bytes]).await.is_err() {
            return;
        }
    }
    let _ = to.shutdown().await;
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn echo() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let (mut read, mut write) = stream.split();
                    tokio::io::copy(&mut read, &mut write).await
                });
            }
        });
        address
    }

    async fn round_trip(stream: &mut TcpStream) -> [u8; 4] {
        let mut back = [0; 4];
        stream.write_all(b"ping").await.expect("sent");
        stream.read_exact(&mut back).await.expect("received");
        back
    }

    #[tokio::test]
    async fn a_cut_link_is_silent_and_heals() {
        let link = Link::new().await.expect("a link");
        let mut stream = TcpStream::connect(link.address()).await.expect("connected");
        link.leads_to(echo().await);
        assert_eq!(&round_trip(&mut stream).await, b"ping");
        link.becomes(Quality::Cut);
        let silent = tokio::time::timeout(Duration::from_millis(100), round_trip(&mut stream)).await;
        assert!(silent.is_err(), "nothing arrives");
        link.becomes(Quality::Good);
        let mut back = [0; 4];
        stream.read_exact(&mut back).await.expect("what was under way arrives");
        assert_eq!(&back, b"ping");
        link.becomes(Quality::Slow(1 << 20));
        assert_eq!(&round_trip(&mut stream).await, b"ping");
        drop(link);
        assert_eq!(stream.read(&mut back).await.unwrap_or(0), 0, "the connection ended with its link");
    }
}
