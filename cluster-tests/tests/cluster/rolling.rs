//! An upgrade under load: every node is told to end, ends by itself with 0, and is started anew, one after another,
//! while clients stream. No request is lost, none is answered wrongly, no block is left behind.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use tandem_cluster_tests::client::{ask, rest, token_ids};
use tandem_cluster_tests::fleet::{Fleet, FleetOptions};
use tandem_cluster_tests::reference::Reference;
use tandem_proto::v1::inference_client::InferenceClient;
use tokio::task::JoinSet;

const CLIENTS: u32 = 12;
const NEW_TOKENS: u32 = 60;
/// A node's running requests end before it does.
const DRAINED: Duration = Duration::from_secs(30);
const SETTLED: Duration = Duration::from_secs(10);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_node_is_replaced_under_load_and_nothing_is_lost() -> anyhow::Result<()> {
    let node = "--threads 1 --kv-blocks 512 --simulated-step-us 4000 --simulated-token-us 50";
    let (prefill_args, decode_args) = (node.to_owned(), node.to_owned());
    let mut fleet = Fleet::start(FleetOptions { prefill_args, decode_args, ..FleetOptions::default() }).await?;
    let (reference, upgraded) = (Arc::new(Reference::start()?), Arc::new(AtomicBool::default()));
    let mut clients = JoinSet::new();
    for number in 0..CLIENTS {
        clients.spawn(stream(fleet.entrance_url(), number, Arc::clone(&reference), Arc::clone(&upgraded)));
    }

    for index in 0..fleet.members.len() {
        let node = &mut fleet.members[index].process;
        node.terminate();
        let status = node.ended(DRAINED).await?;
        ensure!(status.success(), "node {index} ended with {status}\n{}", node.log());
        fleet.restart_dead().await?;
        fleet.registered().await?;
    }
    upgraded.store(true, Ordering::Relaxed);

    let mut answers = 0;
    while let Some(answered) = clients.join_next().await {
        answers += answered??;
    }
    println!("{answers} answers of {NEW_TOKENS} tokens while {} nodes were replaced", fleet.members.len());
    ensure!(answers > CLIENTS, "the load was over before the upgrade");
    fleet.settled(SETTLED).await.map(drop)
}

/// Asks until the upgrade is over, and compares each answer with the undisturbed one; says how many there were.
async fn stream(url: String, number: u32, reference: Arc<Reference>, upgraded: Arc<AtomicBool>) -> anyhow::Result<u32> {
    let mut client = InferenceClient::connect(url).await?;
    let mut answers = 0;
    while !upgraded.load(Ordering::Relaxed) {
        let seed = 300 + number * 1000 + answers;
        let prompt: Vec<u32> = (0..40 + 5 * number).map(|position| (seed + position) % 30_000).collect();
        let mut request = ask(token_ids(prompt.clone()), NEW_TOKENS);
        request.ignore_eos = true;
        let opened = client.generate(request).await.with_context(|| format!("answer {answers} of client {number}"))?;
        let answer = rest(opened.into_inner()).await.with_context(|| format!("answer {answers} of client {number}"))?;
        let expected = reference.tokens(&prompt, NEW_TOKENS).await?;
        ensure!(answer.tokens == expected, "answer {answers} of client {number} is not the undisturbed one");
        answers += 1;
    }
    Ok(answers)
}
