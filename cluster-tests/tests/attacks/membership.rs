//! Nodes that are none, at the port where nodes join: without the token, and with it, which is worse.

use anyhow::{Context, bail, ensure};
use futures::FutureExt;
use serde_json::Value;
use tandem_proto::v1::membership_client::MembershipClient;
use tandem_proto::v1::node_report::Report;
use tandem_proto::{BLOCK_TOKENS, v1};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Status, Streaming};
use xxhash_rust::xxh3::xxh3_64;

use crate::Attack;
use crate::sockets::PATIENCE;
use crate::target::{Seen, Target};

/// All of them.
pub fn attacks() -> Vec<Attack> {
    let attack = |name, seen, run| Attack { name, door: "nodes' port", seen, run };
    let strangers = Seen::Router("tandem_strangers_refused_total");
    let incompatible = Seen::Router("tandem_registrations_refused_total{role=\"router\"");
    let refused = |name, run| attack(name, incompatible, run);
    vec![
        attack("join without the token", strangers, |target| join_as(target, None).boxed_local()),
        attack("join with a wrong token", strangers, |target| join_as(target, Some("0".repeat(64))).boxed_local()),
        refused("a live node's name", |target| namesake(target).boxed_local()),
        refused("a live node's name, incarnation and link", |target| same_process(target).boxed_local()),
        refused("a foreign endpoint (SSRF)", |target| endpoints(target).boxed_local()),
        refused("another model", |target| model(target).boxed_local()),
        refused("absurd fields in Register", |target| fields(target).boxed_local()),
        refused("no Register first", |target| no_register(target).boxed_local()),
        refused("a second Register", |target| twice(target).boxed_local()),
        refused("a report of 4 MB", |target| oversize(target).boxed_local()),
        refused("log injection by a node's name", |target| names(target).boxed_local()),
        attack("absurd loads and cache events", Seen::Router("tandem_index_gaps_total"), |target| {
            absurd(target).boxed_local()
        }),
        refused("streams that register nothing", |target| silent(target).boxed_local()),
    ]
}

type Sent = mpsc::Sender<v1::NodeReport>;
type Told = Streaming<v1::RouterReport>;

/// Opens a stream whose first message is this one.
async fn join(
    target: &Target,
    first: Option<Report>,
    token: Option<String>,
) -> anyhow::Result<Result<(Sent, Told), Status>> {
    let mut client = MembershipClient::connect(target.cluster.router.url("nodes")).await?;
    let (sender, receiver) = mpsc::channel(64);
    if let Some(first) = first {
        sender.send(v1::NodeReport { report: Some(first) }).await?;
    }
    let mut request = Request::new(ReceiverStream::new(receiver));
    if let Some(token) = token {
        request.metadata_mut().insert("x-tandem-join", token.parse()?);
    }
    Ok(match timeout(10 * PATIENCE, client.join(request)).await.context("no word on Join")? {
        Ok(told) => Ok((sender, told.into_inner())),
        Err(status) => Err(status),
    })
}

async fn with_token(target: &Target, first: Report) -> anyhow::Result<Result<(Sent, Told), Status>> {
    join(target, Some(first), Some(target.token()?.to_str()?.to_owned())).await
}

async fn refused(target: &Target, first: v1::Register, code: Code) -> anyhow::Result<String> {
    refused_as(target, first, &[code]).await
}

async fn refused_as(target: &Target, first: v1::Register, codes: &[Code]) -> anyhow::Result<String> {
    match with_token(target, Report::Register(first)).await? {
        Ok(_) => bail!("it was taken"),
        Err(status) => {
            ensure!(codes.contains(&status.code()), "{status:?}");
            let why: String = status.message().chars().take(70).collect();
            Ok(format!("{:?} {why}", status.code()))
        }
    }
}

/// A decode node that would be taken, and pairs with none: it computes otherwise.
async fn honest(target: &Target) -> anyhow::Result<v1::Register> {
    let digest = model_digest(target).await?;
    Ok(v1::Register {
        node_id: "stranger".into(),
        role: v1::Role::Decode.into(),
        incarnation: 77,
        compatibility_digest: 1,
        protocol: tandem_proto::PROTOCOL_VERSION,
        model_digest: digest,
        model_name: "stranger".into(),
        endpoint: "http://127.0.0.1:9".into(),
        transports: vec![v1::TransportInfo {
            backend: "tcp".into(),
            name: "tcp".into(),
            build_id: "stranger".into(),
            reach: None,
        }],
        total_blocks: 64,
        block_tokens: BLOCK_TOKENS[0] as u32,
        max_context_tokens: 2048,
        max_running: 8,
        eos_token_id: 2,
        arithmetic: own_node(target).await?["arithmetic"].as_str().context("arithmetic")?.to_owned(),
        kv_order: own_node(target).await?["kv_order"].as_str().context("kv_order")?.to_owned(),
        life: rand::random(),
        ..v1::Register::default()
    })
}

async fn own_node(target: &Target) -> anyhow::Result<Value> {
    let url = format!("{}/debug/cluster", target.cluster.router.url("admin"));
    let cluster: Value = serde_json::from_str(&target.metrics(&url).await?)?;
    Ok(cluster["nodes"][0].clone())
}

/// From the refusal of a node that has none.
async fn model_digest(target: &Target) -> anyhow::Result<u64> {
    let node = own_node(target).await?;
    let register = v1::Register {
        node_id: "stranger".into(),
        role: v1::Role::Decode.into(),
        incarnation: 77,
        compatibility_digest: 1,
        protocol: tandem_proto::PROTOCOL_VERSION,
        endpoint: "http://127.0.0.1:9".into(),
        transports: vec![v1::TransportInfo {
            backend: "tcp".into(),
            name: "tcp".into(),
            build_id: "x".into(),
            reach: None,
        }],
        total_blocks: 64,
        block_tokens: BLOCK_TOKENS[0] as u32,
        max_context_tokens: 2048,
        max_running: 8,
        arithmetic: node["arithmetic"].as_str().context("arithmetic")?.to_owned(),
        kv_order: node["kv_order"].as_str().context("kv_order")?.to_owned(),
        life: 1,
        ..v1::Register::default()
    };
    let Err(status) = with_token(target, Report::Register(register)).await? else { bail!("taken without a model") };
    let told = status.message().split("the router's has ").nth(1).and_then(|rest| rest.get(..16));
    u64::from_str_radix(told.with_context(|| format!("no digest in {status:?}"))?, 16).context("a digest")
}

async fn join_as(target: &Target, token: Option<String>) -> anyhow::Result<String> {
    let Err(status) = join(target, None, token).await? else { bail!("it was let in") };
    ensure!(status.code() == Code::Unauthenticated, "{status:?}");
    Ok("Unauthenticated, before its message is read".to_owned())
}

async fn namesake(target: &Target) -> anyhow::Result<String> {
    let mut told = String::new();
    for name in ["decode-0", "prefill-0"] {
        let register = v1::Register { node_id: name.into(), ..honest(target).await? };
        told = refused(target, register, Code::Unavailable).await?;
    }
    is_unchanged(target).await?;
    Ok(told)
}

/// With all that a namesake can learn or guess of a live node: but for the secret of its life.
async fn same_process(target: &Target) -> anyhow::Result<String> {
    let mut told = String::new();
    let link = xxh3_64(format!("{}/", target.cluster.router.url("nodes")).as_bytes());
    for node in target.cluster.nodes().await? {
        let incarnation = u64::from_str_radix(node.incarnation.trim_start_matches("0x"), 16)?;
        let node_id = format!("{}-0", node.role);
        let ended = vec![v1::LifeSecret { secret: vec![7; 32] }];
        let register = v1::Register { node_id, incarnation, link, ended, ..honest(target).await? };
        told = refused(target, register, Code::Unavailable).await?;
        ensure!(told.contains("and this is"), "no proof: {told}");
    }
    is_unchanged(target).await?;
    Ok(told)
}

/// Both nodes are there, and no other.
async fn is_unchanged(target: &Target) -> anyhow::Result<()> {
    let nodes = target.cluster.nodes().await?;
    ensure!(nodes.len() == 2, "{nodes:?}");
    Ok(())
}

async fn endpoints(target: &Target) -> anyhow::Result<String> {
    let mut told = String::new();
    for endpoint in [
        "http://169.254.169.254:80",
        "http://192.0.2.1:8000",
        "http://[2001:db8::1]:80",
        "http://10.0.0.1:6443",
        "http://no-such-host.invalid:80",
        "http://127.0.0.1:80/latest/meta-data",
        "http://user:password@127.0.0.1:80",
        "file:///etc/passwd",
        "gopher://127.0.0.1:6379",
        "",
    ] {
        let register = v1::Register { endpoint: endpoint.into(), ..honest(target).await? };
        // A resolver may take longer than the router waits for it.
        let codes = [Code::FailedPrecondition, Code::DeadlineExceeded];
        told = refused_as(target, register, &codes).await.context(endpoint)?;
    }
    Ok(told)
}

async fn model(target: &Target) -> anyhow::Result<String> {
    let register = v1::Register { model_digest: 7, ..honest(target).await? };
    refused(target, register, Code::FailedPrecondition).await
}

async fn fields(target: &Target) -> anyhow::Result<String> {
    let honest = honest(target).await?;
    let transport = |name: String| v1::TransportInfo { name, ..honest.transports[0].clone() };
    let mut told = String::new();
    for wrong in [
        v1::Register { role: 7, ..honest.clone() },
        v1::Register { block_tokens: u32::MAX, ..honest.clone() },
        v1::Register { block_tokens: 0, ..honest.clone() },
        v1::Register { total_blocks: 0, ..honest.clone() },
        v1::Register { max_running: 0, ..honest.clone() },
        v1::Register { node_id: "n".repeat(200_000), ..honest.clone() },
        v1::Register { arithmetic: "f".repeat(1000), ..honest.clone() },
        v1::Register { transports: vec![transport("t".into()); 1000], ..honest.clone() },
        v1::Register { transports: vec![transport("t".repeat(10_000))], ..honest.clone() },
        v1::Register { transports: Vec::new(), ..honest.clone() },
    ] {
        told = refused(target, wrong, Code::FailedPrecondition).await?;
    }
    Ok(told)
}

async fn no_register(target: &Target) -> anyhow::Result<String> {
    let mut told = String::new();
    for first in [Report::Load(v1::Load::default()), Report::Draining(v1::Draining {}), Report::Spans(vec![7; 1000])] {
        let Err(status) = with_token(target, first).await? else { bail!("it was taken") };
        ensure!(status.code() == Code::InvalidArgument, "{status:?}");
        told = format!("InvalidArgument {}", status.message());
    }
    Ok(told)
}

/// Enters a node, of which nothing but its place in the table is known.
async fn entered(target: &Target) -> anyhow::Result<(Sent, Told)> {
    let joined = with_token(target, Report::Register(honest(target).await?)).await?;
    let Ok((sent, told)) = joined else { bail!("an honest node was refused: {joined:?}") };
    Ok((sent, told))
}

async fn says(sent: &Sent, report: Report) -> anyhow::Result<()> {
    Ok(sent.send(v1::NodeReport { report: Some(report) }).await?)
}

/// Reads until the router ends the stream.
async fn ended(mut told: Told) -> anyhow::Result<()> {
    let read = async { while let Ok(Some(_)) = told.message().await {} };
    timeout(10 * PATIENCE, read).await.context("the stream goes on")
}

async fn twice(target: &Target) -> anyhow::Result<String> {
    let (sent, told) = entered(target).await?;
    says(&sent, Report::Load(v1::Load::default())).await?;
    says(&sent, Report::Register(honest(target).await?)).await?;
    ended(told).await?;
    is_unchanged(target).await?;
    Ok("its stream ended, and the node is out".to_owned())
}

async fn oversize(target: &Target) -> anyhow::Result<String> {
    let Err(status) = with_token(target, Report::Spans(vec![7; 4 << 20])).await? else { bail!("it was taken") };
    ensure!([Code::InvalidArgument, Code::OutOfRange].contains(&status.code()), "{status:?}");
    let (sent, told) = entered(target).await?;
    says(&sent, Report::Load(v1::Load::default())).await?;
    says(&sent, Report::Spans(vec![7; 4 << 20])).await?;
    ended(told).await?;
    is_unchanged(target).await?;
    Ok(format!("{:?}; within a stream its end", status.code()))
}

async fn names(target: &Target) -> anyhow::Result<String> {
    let honest = honest(target).await?;
    let mut told = String::new();
    for name in ["a\nINJECTED line", "\u{1b}[31mred", "a b", "", "\u{202e}evil", "a\"}\nINJECTED 1"] {
        let register = v1::Register { node_id: name.into(), ..honest.clone() };
        told = refused(target, register, Code::FailedPrecondition).await?;
    }
    Ok(told)
}

/// A node with the token that says what cannot be: the table and the page hold, and the polite client is served by the
/// honest nodes.
async fn absurd(target: &Target) -> anyhow::Result<String> {
    let (sent, told) = entered(target).await?;
    let cost = |value| v1::StepCost {
        base_ms: value,
        token_ms: -value,
        context_ms: value,
        decode_token_ms: Some(value),
        decode_context_ms: Some(-value),
    };
    for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, f64::MAX, -1.0, 0.0] {
        let load = v1::Load {
            running: u32::MAX,
            waiting: u32::MAX,
            queued_tokens: u64::MAX,
            free_blocks: u32::MAX,
            running_tokens: u64::MAX,
            cached_blocks: u32::MAX,
            preemptions: u64::MAX,
            step_cost: Some(cost(value)),
            own: Some(v1::CallCounts { requests: u32::MAX, prompts: u32::MAX, prompt_tokens: u64::MAX }),
            others: Some(v1::CallCounts { requests: u32::MAX, prompts: u32::MAX, prompt_tokens: u64::MAX }),
        };
        says(&sent, Report::Load(load)).await?;
        let (hashes, removed) = (vec![1; 16 * 1000], vec![0xff; 125]);
        let events = v1::KvEvents { first: u64::MAX, snapshot: false, hashes, removed };
        says(&sent, Report::KvEvents(events)).await?;
        says(&sent, Report::Spans(crate::sockets::noise(9, 10_000))).await?;
        says(&sent, Report::ClockProbe(v1::ClockProbe { sent_unix_ns: u64::MAX })).await?;
    }
    let totals = target.cluster.nodes().await?;
    ensure!(totals.len() <= 3, "{totals:?}");
    drop((sent, told));
    let gone =
        async |cluster: &tandem_cluster_tests::Cluster| cluster.nodes().await.is_ok_and(|nodes| nodes.len() == 2);
    target.cluster.wait_until(10 * PATIENCE, "the stranger is out", gone).await?;
    Ok("taken as far as it can be, out with its stream".to_owned())
}

/// Calls that say nothing are given up with the lease.
async fn silent(target: &Target) -> anyhow::Result<String> {
    let token = target.token()?.to_str()?.to_owned();
    let calls = (0..target.count(64, 1000)).map(|_| async {
        let Err(status) = join(target, None, Some(token.clone())).await? else { bail!("it was taken") };
        ensure!(status.code() == Code::DeadlineExceeded, "{status:?}");
        anyhow::Ok(status.message().to_owned())
    });
    let told = futures::future::try_join_all(calls).await?;
    Ok(format!("{} times DeadlineExceeded: {}", told.len(), told[0]))
}
