//! Three routers with the same four nodes: each of them dies or is replaced under load, and clients that ask once more
//! lose nothing; what a dead one had on the nodes is back; all know the same of the nodes' caches.
use std::time::Duration;

use anyhow::{Context, ensure};
use tandem_cluster_tests::load::{CLIENTS, Load, request};
use tandem_cluster_tests::reference::Reference;
use tandem_cluster_tests::routers::{Routers, RoutersOptions, ask_in_turn};
use tandem_proto::v1::inference_client::InferenceClient;
use tokio::time::{Instant, sleep};

/// Far more than the lease of 3 s, for busy cores.
const SOON: Duration = Duration::from_secs(20);
/// What nobody ends goes on for longer than [`SOON`]: so many tokens, of which each takes a slow step.
const LONG_ANSWER: u32 = 2000;
const SLOW_STEP_US: u32 = 20_000;

fn three(step_us: u32) -> RoutersOptions {
    RoutersOptions {
        routers: 3,
        found_by: None,
        nodes: 2,
        router_args: String::new(),
        node_args: format!("--kv-blocks 512 --simulated-step-us {step_us} --simulated-token-us 50"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_asks_once_more_loses_nothing_when_routers_are_killed() -> anyhow::Result<()> {
    let mut cluster = Routers::start(three(4000)).await?;
    let load = Load::start(cluster.urls())?;
    for number in 0..3 {
        load.answers_more(2 * CLIENTS).await?;
        let noticed = cluster.replace_killed(number).await?;
        println!("router {number} was killed; its sessions were over after {:.0} ms", ms(noticed));
    }
    let (answers, again) = load.end().await?;
    println!("{answers} answers, {again} of them at the second try");
    ensure!(again > 0, "no router died with a request");
    cluster.settled(SOON).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_router_is_replaced_under_load_and_no_stream_is_cut() -> anyhow::Result<()> {
    let mut cluster = Routers::start(three(4000)).await?;
    let load = Load::start(cluster.urls())?;
    for number in 0..3 {
        load.answers_more(2 * CLIENTS).await?;
        cluster.replace_drained(number).await?;
    }
    let cut = load.has_cut();
    let (answers, again) = load.end().await?;
    println!("{answers} answers, {again} of them at the second try");
    ensure!(!cut, "an answer that had begun was cut off");
    cluster.settled(SOON).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_dead_or_silent_router_had_is_back_and_the_others_go_on() -> anyhow::Result<()> {
    let mut cluster = Routers::start(three(SLOW_STEP_US)).await?;
    let (urls, reference) = (cluster.urls(), Reference::start()?);
    // Long enough for whatever happens: 4 s.
    let (prompt, tokens) = (vec![7; 40], 200);
    let expected = reference.tokens(&prompt, tokens).await?;
    for killed in [false, true] {
        let mut streams = Vec::new();
        for number in 0..4 {
            let mut client = InferenceClient::connect(urls[0].clone()).await?;
            let mut stream = client.generate(request(&[number; 40], LONG_ANSWER)).await?.into_inner();
            stream.message().await?.context("its first token")?;
            streams.push(stream);
        }
        let other = tokio::spawn({
            let (urls, request) = (urls.clone(), request(&prompt, tokens));
            async move { ask_in_turn(&urls, 1, 1, &request).await }
        });
        cluster.busy(streams.len() + 1, SOON).await?;
        match killed {
            true => cluster.routers[0].kill(),
            false => cluster.routers[0].freeze(),
        }
        let noticed = cluster.sessions(2).await?;
        // Its four answers, and not the other router's.
        let cancelled = cluster.calls_at_most(1, SOON).await?;
        println!(
            "router 0 is {}; its sessions were over after {:.0} ms, its calls {:.0} ms later",
            if killed { "dead" } else { "silent" },
            ms(noticed),
            ms(cancelled)
        );
        let (answer, _) = other.await?.map_err(|failure| anyhow::anyhow!("{failure}"))?;
        ensure!(answer.tokens == expected, "the other router's answer is not the undisturbed one");
        cluster.settled(SOON).await?;
        if !killed {
            // It wakes, and finds another life of each node. Its requests go on there: their clients are still here.
            cluster.routers[0].wake();
            cluster.sessions(3).await?;
            for stream in &mut streams {
                stream.message().await?.context("the next token")?;
            }
        }
        drop(streams);
        cluster.settled(SOON).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_routers_know_the_same_of_the_nodes_caches() -> anyhow::Result<()> {
    let mut cluster = Routers::start(three(4000)).await?;
    let urls = cluster.urls();
    for number in 0..12 {
        let prompt: Vec<u32> = (0..100).map(|position| number * 1000 + position).collect();
        let asked = ask_in_turn(&urls, number as usize, 1, &request(&prompt, 4)).await;
        asked.map_err(|failure| anyhow::anyhow!("{failure}"))?;
    }
    let agreed = agree(&cluster).await?;
    println!("the indexes agree {:.0} ms after the last answer", ms(agreed));
    // One that comes late gets what the others know.
    cluster.replace_killed(2).await?;
    let agreed = agree(&cluster).await?;
    println!("and {:.0} ms after a new router has all nodes", ms(agreed));
    Ok(())
}

/// Waits until all routers have the same of each node, and all that there is to know: not nothing.
async fn agree(cluster: &Routers) -> anyhow::Result<Duration> {
    let start = Instant::now();
    loop {
        let mut indexes = Vec::new();
        for number in 0..3 {
            indexes.push(cluster.indexed(number).await?);
        }
        let blocks: u64 = indexes[0].iter().map(|(_, blocks)| blocks).sum();
        // Six full blocks of each of twelve prompts, on both of its nodes.
        if blocks >= 12 * 6 * 2 && indexes.iter().all(|index| *index == indexes[0]) {
            return Ok(start.elapsed());
        }
        ensure!(start.elapsed() < SOON, "the routers know of their nodes: {indexes:?}");
        sleep(Duration::from_millis(10)).await;
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
