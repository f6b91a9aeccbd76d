//! Sockets alone: half-open ones by the thousand, heads and bodies that come byte by byte.
use std::time::Duration;

use anyhow::{Context, ensure};
use futures::FutureExt;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use crate::Attack;
use crate::sockets::{h2::PREFACE, hold, listen};
use crate::target::{CONNECTIONS, Seen, Target, VICTIM};

/// Seconds that a port waits for a head, see `proto/ports`.
const SILENCE: Duration = Duration::from_secs(30);

/// All of them.
pub fn attacks() -> Vec<Attack> {
    let evicted = Seen::Router("tandem_connections_evicted_total{role=\"router\"");
    let attack = |name, door, run| Attack { name, door, seen: evicted, run };
    vec![
        attack("half-open connections x 10,000", "router: all ports", |target| half_open(target).boxed_local()),
        attack("slowloris on heads", "client HTTP", |target| slow_heads(target).boxed_local()),
        attack("slowloris on bodies", "client HTTP", |target| slow_bodies(target).boxed_local()),
        attack("half a preface x 10,000", "client gRPC", |target| half_prefaces(target).boxed_local()),
        Attack {
            seen: Seen::Router("outcome=\"overloaded\""),
            ..attack("viewers of the live page", "admin", |target| viewers(target).boxed_local())
        },
    ]
}

fn many(target: &Target) -> usize {
    target.count(CONNECTIONS + 500, 10_000)
}

async fn half_open(target: &Target) -> anyhow::Result<String> {
    for door in ["http", "grpc", "nodes", "admin"] {
        let held = hold(target.router(door)?, many(target), b"").await.context(door)?;
        is_answered(target).await.with_context(|| format!("beside {} at {door}", held.len()))?;
    }
    Ok(format!("{} at each port; the longest idle ones made room", many(target)))
}

/// Both ports for people answer newcomers.
async fn is_answered(target: &Target) -> anyhow::Result<()> {
    for door in ["http", "admin"] {
        let url = format!("{}/health", target.cluster.router.url(door));
        // A client of its own: a connection of its own.
        let status = reqwest::Client::new().get(url).send().await?.status();
        ensure!(status == 200, "/health at {door}: {status}");
    }
    Ok(())
}

async fn slow_heads(target: &Target) -> anyhow::Result<String> {
    let mut held = hold(target.router("http")?, many(target), b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n").await?;
    for round in 0..3 {
        for stream in &mut held {
            let _ = stream.try_write(format!("x-{round}: y\r\n").as_bytes());
        }
        is_answered(target).await?;
    }
    if !target.full {
        return Ok("made room for newcomers; 30 s each in the full form".to_owned());
    }
    // One that nobody pushes out has its 30 seconds, however often it says a byte.
    drop(held);
    let mut one = TcpStream::connect(target.router("http")?).await?;
    one.write_all(b"POST /v1/completions HTTP/1.1\r\n").await?;
    let start = std::time::Instant::now();
    while one.write_all(b"x: y\r\n").await.is_ok() {
        ensure!(start.elapsed() < SILENCE + Duration::from_secs(10), "a head may take for ever");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    Ok(format!("made room for newcomers; one alone was closed after {:.0} s", start.elapsed().as_secs_f64()))
}

async fn slow_bodies(target: &Target) -> anyhow::Result<String> {
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {VICTIM}\r\n\
         content-type: application/json\r\ncontent-length: 1000000\r\n\r\n{{"
    );
    let mut held = hold(target.router("http")?, many(target), head.as_bytes()).await?;
    for _ in 0..3 {
        for stream in &mut held {
            let _ = stream.try_write(b" ");
        }
        is_answered(target).await?;
    }
    Ok("made room for newcomers; 12 s for such a body at most".to_owned())
}

async fn half_prefaces(target: &Target) -> anyhow::Result<String> {
    let held = hold(target.router("grpc")?, many(target), &PREFACE[..10]).await?;
    is_answered(target).await?;
    Ok(format!("{} of them; the longest idle ones made room", held.len()))
}

/// They may have a part of the port's places: probes and scrapers get theirs.
async fn viewers(target: &Target) -> anyhow::Result<String> {
    let request = format!("GET /page/events HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {VICTIM}\r\n\r\n");
    let mut held = hold(target.router("admin")?, 60, request.as_bytes()).await?;
    is_answered(target).await?;
    let mut refused = 0;
    for stream in &mut held {
        let mut head = [0; 12];
        let read = tokio::io::AsyncReadExt::read_exact(stream, &mut head);
        let read = tokio::time::timeout(Duration::from_secs(5), read).await;
        refused += usize::from(matches!(read, Ok(Ok(_))) && &head[9..] != b"200");
    }
    ensure!(refused > 0, "60 viewers were all let in");
    let _ = listen(&mut held[0]).await;
    Ok(format!("{refused} of 60 refused: try later"))
}
