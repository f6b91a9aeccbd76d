//! HTTP/1.1 as no client writes it: garbage, heads without end, bodies that two readers would cut at different places.
use anyhow::ensure;
use futures::FutureExt;

use crate::Attack;
use crate::sockets::{Answer, noise, say, say_until_closed, tls_hello};
use crate::target::{Seen, Target, VICTIM};

const FAILED: Seen = Seen::Router("tandem_connections_failed_total{role=\"router\"");

/// All of them.
pub fn attacks() -> Vec<Attack> {
    let attack = |name, run| Attack { name, door: "client HTTP", seen: FAILED, run };
    vec![
        attack("request smuggling", |target| smuggling(target).boxed_local()),
        attack("a header of 1 MB", |target| huge_header(target).boxed_local()),
        attack("100,000 headers", |target| many_headers(target).boxed_local()),
        attack("a target of 1 MB", |target| huge_target(target).boxed_local()),
        Attack { door: "router: all ports", ..attack("garbage bytes", |target| garbage(target).boxed_local()) },
        Attack { door: "router: all ports", ..attack("TLS on a plain port", |target| tls(target).boxed_local()) },
        Attack { door: "admin", ..attack("request smuggling, admin", |target| smuggling_admin(target).boxed_local()) },
    ]
}

/// Two readers of such a request could see two different ones. Either it is refused, or it has one reading: a body in
/// chunks, whatever a length says beside it (RFC 9112, 6.3).
async fn smuggle(to: std::net::SocketAddr) -> anyhow::Result<String> {
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {VICTIM}\r\n");
    let hidden = "GET /smuggled HTTP/1.1\r\nhost: a\r\n\r\n";
    let mut refused = 0;
    let refusals = [
        format!("content-length: 5\r\ncontent-length: 40\r\n\r\n{hidden}"),
        format!("content-length: +5\r\n\r\n{hidden}"),
        format!("content-length: 5, 40\r\n\r\n{hidden}"),
        format!("content-length: 0x5\r\n\r\n{hidden}"),
        format!("content-length : 40\r\n\r\n{hidden}"),
        format!("transfer-encoding: identity\r\n\r\n{hidden}"),
        format!("transfer-encoding: xchunked\r\n\r\n{hidden}"),
        format!("transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n{hidden}"),
        format!("transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n{hidden}"),
        format!("transfer-encoding: chunked\r\n\r\n-1\r\n{hidden}"),
        format!("x: y\r\n folded: z\r\ncontent-length: 0\r\n\r\n{hidden}"),
        format!("x\0: y\r\n\r\n{hidden}"),
        format!("x: y\rz\r\n\r\n{hidden}"),
    ];
    for rest in &refusals {
        let answer = say(to, format!("{head}{rest}").as_bytes()).await?;
        let statuses = answer.statuses();
        let smuggled = answer.text().contains("no such route: GET /smuggled") && statuses.first() == Some(&200);
        ensure!(!smuggled, "{rest:?}: {statuses:?}");
        ensure!(statuses.iter().all(|status| *status >= 400), "{rest:?}: {statuses:?}");
        refused += usize::from(answer.is_closed);
    }
    // Both: the length is left out, and the connection does not outlive the answer.
    let both = format!("{head}content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n{hidden}");
    let answer = say(to, both.as_bytes()).await?;
    ensure!(answer.statuses().iter().all(|status| *status >= 400), "both: {}", answer.text());
    ensure!(answer.statuses().len() <= 2, "both: {}", answer.text());
    Ok(format!("400; {refused} of {} closed; chunks win over a length", refusals.len()))
}

async fn smuggling(target: &Target) -> anyhow::Result<String> {
    smuggle(target.router("http")?).await
}

async fn smuggling_admin(target: &Target) -> anyhow::Result<String> {
    smuggle(target.router("admin")?).await
}

fn closed(answer: &Answer, statuses: &[u16]) -> anyhow::Result<String> {
    let told = answer.statuses();
    ensure!(told.iter().all(|status| statuses.contains(status)), "{told:?}: {}", answer.text());
    ensure!(answer.is_closed, "it stays open after {told:?}");
    Ok(told.first().map_or("closed".to_owned(), |status| format!("{status}, closed")))
}

async fn huge_header(target: &Target) -> anyhow::Result<String> {
    let request = format!("GET /health HTTP/1.1\r\nhost: a\r\nx: {}\r\n\r\n", "y".repeat(1 << 20));
    closed(&say_until_closed(target.router("http")?, request.as_bytes()).await?, &[431])
}

async fn many_headers(target: &Target) -> anyhow::Result<String> {
    let headers: String = (0..100_000).map(|number| format!("x-{number}: 1\r\n")).collect();
    let request = format!("GET /health HTTP/1.1\r\nhost: a\r\n{headers}\r\n");
    closed(&say_until_closed(target.router("http")?, request.as_bytes()).await?, &[431])
}

async fn huge_target(target: &Target) -> anyhow::Result<String> {
    let request = format!("GET /{} HTTP/1.1\r\nhost: a\r\n\r\n", "a".repeat(1 << 20));
    closed(&say_until_closed(target.router("http")?, request.as_bytes()).await?, &[400, 414, 431])
}

async fn garbage(target: &Target) -> anyhow::Result<String> {
    for door in ["http", "grpc", "nodes", "admin"] {
        let to = target.router(door)?;
        let noises = (0..target.count(4, 64) as u64).map(|number| noise(number, 64 << 10));
        for bytes in noises.chain([vec![0; 4096], vec![0xff; 4096], b"\r\n\r\n\r\nGET\r\n\r\n".to_vec()]) {
            let answer = say_until_closed(to, &bytes).await?;
            ensure!(answer.is_closed, "{door} stays open");
            ensure!(answer.statuses().iter().all(|status| *status == 400), "{door}: {}", answer.text());
        }
    }
    Ok("400 or closed".to_owned())
}

async fn tls(target: &Target) -> anyhow::Result<String> {
    for door in ["http", "grpc", "nodes", "admin"] {
        let answer = say_until_closed(target.router(door)?, &tls_hello()).await?;
        ensure!(answer.is_closed, "{door} stays open");
    }
    Ok("400 or closed".to_owned())
}
