//! Strangers at the doors of a process: bytes that mean nothing, and the beginning of a frame with nonsense behind it.
//! UCX's own sockets are not tested: a peer that reaches them can write memory, as docs/limits.md says.
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context;
use rand::rngs::StdRng;
use rand::{RngCore, SeedableRng};
use tandem_cluster_tests::process::Process;
use tandem_kvtransfer::wire::{HEADER_BYTES, Header};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// At each door.
const STRANGERS: u64 = 8;
/// One says so much, and more than a header of anything.
const BYTES: usize = 64 << 10;
/// A door may leave a stranger waiting: that is its right.
const PATIENCE: Duration = Duration::from_millis(500);

/// Connects to every door of `process` but those, and talks nonsense.
pub async fn meets(process: &Process, but: &BTreeSet<u16>) -> anyhow::Result<()> {
    let mut ports = process.listening_ports()?;
    ports.retain(|port| !but.contains(port));
    let strangers = ports.iter().flat_map(|port| (0..STRANGERS).map(move |seed| stranger(*port, seed)));
    let outcomes = futures::future::join_all(strangers).await;
    outcomes.into_iter().collect::<anyhow::Result<()>>().with_context(|| format!("strangers of {}", process.name))
}

async fn stranger(port: u16, seed: u64) -> anyhow::Result<()> {
    let mut stream = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port))).await?;
    let mut words = vec![0; BYTES];
    StdRng::seed_from_u64(u64::from(port) << 8 | seed).fill_bytes(&mut words);
    if seed % 2 == 1 {
        words[..HEADER_BYTES].copy_from_slice(&Header::hello().encode());
    }
    // A server that closes the connection has refused the bytes.
    let talk = async {
        stream.write_all(&words).await?;
        stream.read_to_end(&mut Vec::new()).await
    };
    let _ = tokio::time::timeout(PATIENCE, talk).await;
    Ok(())
}
