//! A router whose HTTP port is full of connections that ask nothing: `make bench-connections`.
//!
//! Half of them have sent a part of a request's head, the others have had an answer and stay. Others keep coming, more
//! in half a minute than the port has places, because silence ends the old ones by then. Meanwhile `/health` is asked
//! again and again, each time over a new connection, on that port and on the admin port: how long from the connection
//! to the whole answer?
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Parser;
use tandem_cluster_tests::cluster::words;
use tandem_cluster_tests::open_loop::percentile;
use tandem_cluster_tests::{Cluster, Options};
use tandem_ports::raise_descriptor_limit;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{interval, sleep, timeout};

/// A question that takes longer has failed: what a probe waits, usually.
const ASK: Duration = Duration::from_secs(10);
/// Between two questions.
const PAUSE: Duration = Duration::from_millis(5);

#[derive(Parser)]
struct Args {
    /// Connections that ask nothing
    #[arg(long, default_value_t = 5000)]
    connections: usize,
    /// Those that come every second while `/health` is asked
    #[arg(long, default_value_t = 250, value_parser = clap::value_parser!(u32).range(1..))]
    coming: u32,
    /// The router's --max-connections
    #[arg(long, default_value_t = 4096)]
    max_connections: usize,
    /// Questions on each port
    #[arg(long, default_value_t = 1000)]
    questions: usize,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let descriptors = raise_descriptor_limit();
    if descriptors < args.connections as u64 + 512 {
        bail!("{descriptors} descriptors are too few for {} connections: raise `ulimit -n`", args.connections);
    }
    let router_args = format!("--admin 127.0.0.1:0 --max-connections {}", args.max_connections);
    let options = Options { simulated: true, transport: "tcp", router_args: words(&router_args), ..Options::default() };
    let cluster = Cluster::start(options).await?;
    let (main, admin) = (address(&cluster, "http")?, address(&cluster, "admin")?);

    println!("| port | connections that ask nothing | p50 ms | p99 ms | max ms | failed |");
    println!("|---|---|---|---|---|---|");
    for (name, port) in [("main", main), ("admin", admin)] {
        health(port, args.questions).await.print(name, 0);
    }
    let mut silent = Vec::with_capacity(args.connections);
    for number in 0..args.connections {
        silent.push(ask_nothing(main, number).await?);
    }
    let coming = tokio::spawn(keep_coming(main, silent, args.coming));
    for (name, port) in [("main", main), ("admin", admin)] {
        health(port, args.questions).await.print(name, args.connections);
    }
    coming.abort();
    println!();
    let text = reqwest::get(format!("http://{admin}/metrics")).await?.text().await?;
    text.lines().filter(|line| line.starts_with("tandem_connections")).for_each(|line| println!("    {line}"));
    Ok(())
}

fn address(cluster: &Cluster, port: &str) -> anyhow::Result<SocketAddr> {
    cluster.router.ready(port).parse().with_context(|| format!("the router's {port} address"))
}

/// Half-open, or idle after an answer.
async fn ask_nothing(port: SocketAddr, number: usize) -> anyhow::Result<TcpStream> {
    let mut stream = TcpStream::connect(port).await?;
    if number.is_multiple_of(2) {
        stream.write_all(b"GET /health HT").await?;
    } else {
        stream.write_all(b"GET /health HTTP/1.1\r\nhost: bench\r\n\r\n").await?;
        // The head of the answer, which is all in one piece; an end where others took the place.
        let _ = timeout(ASK, stream.read(&mut [0; 1024])).await;
    }
    Ok(stream)
}

/// Takes the place of the oldest ones, so many a second.
async fn keep_coming(port: SocketAddr, mut silent: Vec<TcpStream>, rate: u32) {
    let mut ticks = interval(Duration::from_secs(1) / rate);
    for number in 0.. {
        ticks.tick().await;
        // A client that cannot connect tries again.
        if let Ok(stream) = ask_nothing(port, number).await {
            let oldest = number % silent.len().max(1);
            silent.splice(oldest..(oldest + 1).min(silent.len()), [stream]);
        }
    }
}

/// How long `/health` took, in milliseconds, sorted; and how often it did not answer.
struct Seen {
    sorted_ms: Vec<f64>,
    failed: usize,
}

async fn health(port: SocketAddr, questions: usize) -> Seen {
    let (mut sorted_ms, mut failed) = (Vec::with_capacity(questions), 0);
    for _ in 0..questions {
        let start = Instant::now();
        match timeout(ASK, ask_health(port)).await {
            Ok(Ok(())) => sorted_ms.push(start.elapsed().as_secs_f64() * 1e3),
            Ok(Err(_)) | Err(_) => failed += 1,
        }
        sleep(PAUSE).await;
    }
    sorted_ms.sort_by(f64::total_cmp);
    Seen { sorted_ms, failed }
}

async fn ask_health(port: SocketAddr) -> anyhow::Result<()> {
    let mut stream = TcpStream::connect(port).await?;
    stream.write_all(b"GET /health HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n").await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    if !answer.starts_with("HTTP/1.1 200 ") {
        bail!("{answer:?}");
    }
    Ok(())
}

impl Seen {
    fn print(&self, port: &str, connections: usize) {
        let at = |share| percentile(&self.sorted_ms, share);
        let (p50, p99, max) = (at(0.5), at(0.99), self.sorted_ms.last().copied().unwrap_or(f64::NAN));
        println!("| {port} | {connections} | {p50:.2} | {p99:.2} | {max:.2} | {} |", self.failed);
    }
}
