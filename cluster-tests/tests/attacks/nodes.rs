//! The nodes' own doors: their gRPC and admin ports, and where KV arrives.
use anyhow::{Context, bail, ensure};
use futures::FutureExt;
use tandem_kvtransfer::wire::{HEADER_BYTES, Header};
use tandem_proto::v1;
use tandem_proto::v1::decode_client::DecodeClient;
use tandem_proto::v1::prefill_client::PrefillClient;
use tonic::{Code, Request};

use crate::Attack;
use crate::sockets::{hold, noise, say_until_closed, tls_hello};
use crate::target::{Seen, Target};

/// All of them.
pub fn attacks() -> Vec<Attack> {
    let attack = |name, door, seen, run| Attack { name, door, seen, run };
    let strangers = Seen::Nodes("tandem_strangers_refused_total");
    let garbage_seen = Seen::Nodes("tandem_kv_protocol_errors_total");
    vec![
        attack("calls without the token", "nodes' gRPC", strangers, |target| calls(target, None).boxed_local()),
        attack("calls with a wrong token", "nodes' gRPC", strangers, |target| {
            calls(target, Some("f".repeat(64))).boxed_local()
        }),
        attack(
            "garbage, TLS, half-open",
            "nodes' gRPC, admin",
            Seen::Nodes("tandem_connections_failed_total"),
            |target| garbage(target).boxed_local(),
        ),
        attack("garbage and made-up frames", "KV", garbage_seen, |target| kv_garbage(target).boxed_local()),
        attack("hellos without a key", "KV", Seen::Nodes("reason=\"unknown\""), |target| hellos(target).boxed_local()),
        attack("half-open connections", "KV", garbage_seen, |target| kv_half_open(target).boxed_local()),
    ]
}

async fn calls(target: &Target, token: Option<String>) -> anyhow::Result<String> {
    let mut prefill = PrefillClient::connect(target.cluster.prefill.url("grpc")).await?;
    let mut decode = DecodeClient::connect(target.cluster.decode.url("grpc")).await?;
    for _ in 0..target.count(50, 1000) {
        let mut call = Request::new(tokio_stream::iter([v1::PrefillCommand::default()]));
        let mut other = Request::new(tokio_stream::iter([v1::DecodeCommand::default()]));
        if let Some(token) = &token {
            call.metadata_mut().insert("x-tandem-join", token.parse()?);
            other.metadata_mut().insert("x-tandem-join", token.parse()?);
        }
        for refused in [prefill.prefill(call).await.err(), decode.generate(other).await.err()] {
            let Some(status) = refused else { bail!("a node computes for a stranger") };
            ensure!(status.code() == Code::Unauthenticated, "{status:?}");
        }
    }
    Ok("Unauthenticated, before a message is read".to_owned())
}

async fn garbage(target: &Target) -> anyhow::Result<String> {
    let [prefill, decode] = target.nodes("grpc")?;
    let [prefill_admin, decode_admin] = target.nodes("admin")?;
    for to in [prefill, decode, prefill_admin, decode_admin] {
        for bytes in [noise(1, 64 << 10), vec![0; 4096], tls_hello()] {
            ensure!(say_until_closed(to, &bytes).await?.is_closed, "{to} stays open");
        }
        drop(hold(to, target.count(200, 2000), b"PRI * HTTP").await?);
    }
    Ok("closed".to_owned())
}

async fn kv_garbage(target: &Target) -> anyhow::Result<String> {
    for to in target.kv {
        for number in 0..target.count(32, 1000) as u64 {
            let mut bytes = noise(number, 8192);
            if number % 2 == 1 {
                bytes[..HEADER_BYTES].copy_from_slice(&Header::hello().encode());
            }
            ensure!(say_until_closed(to, &bytes).await?.is_closed, "{to} stays open");
        }
    }
    Ok("closed".to_owned())
}

/// Well formed, of a hand-off that nobody granted.
async fn hellos(target: &Target) -> anyhow::Result<String> {
    for to in target.kv {
        for number in 0..target.count(20, 1000) as u64 {
            let payload = [noise(number, 64), build_id(target).await?.into_bytes()].concat();
            let head = [&Header::hello().encode()[..], &(payload.len() as u64).to_le_bytes()].concat();
            let answer = say_until_closed(to, &[head, payload].concat()).await?;
            ensure!(answer.is_closed, "{to} stays open");
        }
    }
    Ok("refused: no such hand-off".to_owned())
}

async fn build_id(target: &Target) -> anyhow::Result<String> {
    let url = format!("{}/debug/cluster", target.cluster.router.url("admin"));
    let cluster: serde_json::Value = serde_json::from_str(&target.metrics(&url).await?)?;
    let transport = &cluster["nodes"][0]["transports"][0];
    Ok(transport["build"].as_str().with_context(|| format!("no build id in {cluster}"))?.to_owned())
}

/// Those without a hello are few; the oldest of them goes.
async fn kv_half_open(target: &Target) -> anyhow::Result<String> {
    for to in target.kv {
        let held = hold(to, target.count(300, 5000), &Header::hello().encode()[..8]).await?;
        drop(held);
    }
    Ok("64 at a time, of 2 s".to_owned())
}
