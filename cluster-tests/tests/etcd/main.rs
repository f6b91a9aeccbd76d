//! Routers that stand in a real etcd, and nodes that find them there: routers come and die, etcd is killed, frozen,
//! emptied and compacted under load, and no request notices. Without `etcd` on the PATH the tests say so and end; with
//! `TANDEM_REQUIRE_ETCD=1` they fail.
//!
//! - [`server`]: the etcd. [`access`]: TLS, users, and an etcd that comes last.

mod access;
mod server;

use std::time::Duration;

use anyhow::{Context, ensure};
use etcd_client::Client;
use server::{EtcdServer, PREFIX};
use tandem_cluster_tests::cluster::{model, words};
use tandem_cluster_tests::load::{CLIENTS, Load};
use tandem_cluster_tests::process::run_to_end;
use tandem_cluster_tests::routers::{Routers, RoutersOptions, logged, until};
use tandem_etcd::register::TTL;
use tokio::time::sleep;

/// For what etcd, routers and nodes do by themselves, on busy cores.
const SOON: Duration = Duration::from_secs(30);

/// `routers` of them, which the nodes find at `etcd`.
fn options(etcd: &EtcdServer, routers: usize) -> RoutersOptions {
    RoutersOptions {
        routers,
        found_by: Some(etcd.address()),
        nodes: 2,
        router_args: format!("--register {}", etcd.address()),
        node_args: "--kv-blocks 512 --simulated-step-us 4000 --simulated-token-us 50".to_owned(),
    }
}

async fn stand(etcd: &EtcdServer, routers: usize) -> anyhow::Result<Duration> {
    let all = async || Ok(etcd.entries().await?.len() == routers);
    until(SOON, &format!("{routers} routers stand in etcd"), all).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routers_come_and_go_and_nodes_follow() -> anyhow::Result<()> {
    let Some(mut etcd) = EtcdServer::new()? else { return Ok(()) };
    etcd.start().await?;
    let mut cluster = Routers::start(options(&etcd, 2)).await?;
    let load = Load::start(cluster.urls())?;
    load.answers_more(CLIENTS).await?;

    cluster.add_router().await?;
    cluster.sessions(3).await?;
    let found = etcd.entries().await?;
    let address = cluster.routers[2].ready("grpc").to_owned();
    ensure!(found.get(&format!("{PREFIX}{address}")) == Some(&address), "{found:?}");

    // Its key ends with its lease; the nodes notice its death before, and give it up then.
    cluster.routers[2].kill();
    cluster.sessions(2).await?;
    ensure!(etcd.entries().await?.len() == 3, "a key that went without its lease");
    let gone = stand(&etcd, 2).await?;
    println!("a router was killed: its key was gone {:.1} s after its sessions", gone.as_secs_f64());
    let left_by_all = async || {
        let has = |log: &str| log.lines().any(|line| line.contains("a router has left") && line.contains(&address));
        Ok(cluster.nodes.iter().all(|node| has(&node.log())))
    };
    until(SOON, "every node has left the dead router", left_by_all).await?;

    // One that drains leaves its name first: long before its lease would be over. A slow etcd may take one removal too
    // late.
    let mut gone = drained(&mut cluster, &etcd).await?;
    if gone >= TTL / 2 {
        gone = drained(&mut cluster, &etcd).await?;
    }
    ensure!(gone < TTL / 2, "the keys of routers that drain were there for {gone:?}");

    // What is no address is skipped, and said.
    let mut client: Client = etcd.client().await?;
    let large = "1".repeat(2000);
    for (name, value) in [("url", "http://10.0.0.1:1"), ("large", large.as_str()), ("empty", "")] {
        client.put(format!("{PREFIX}{name}"), value, None).await?;
    }
    for name in ["\"url\"", "\"large\"", "\"empty\""] {
        logged(&cluster.nodes, name, SOON).await?;
    }
    cluster.sessions(2).await?;

    load.answers_more(2 * CLIENTS).await?;
    nothing_lost(load).await?;
    cluster.settled(SOON).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_may_die_stand_still_or_forget() -> anyhow::Result<()> {
    let Some(mut etcd) = EtcdServer::new()? else { return Ok(()) };
    etcd.start().await?;
    let mut cluster = Routers::start(options(&etcd, 2)).await?;
    let load = Load::start(cluster.urls())?;
    load.answers_more(CLIENTS).await?;

    etcd.kill();
    logged(&cluster.nodes, "etcd is lost", SOON).await?;
    load.answers_more(2 * CLIENTS).await?;
    cluster.sessions(2).await?;
    etcd.start().await?;
    // Found by a watch that was begun anew.
    cluster.add_router().await?;
    stand(&etcd, 3).await?;

    // Longer than the lease: it is over when etcd wakes, or the routers have renewed it just then.
    etcd.freeze()?;
    sleep(TTL + Duration::from_secs(5)).await;
    load.answers_more(CLIENTS).await?;
    etcd.wake()?;
    stand(&etcd, 3).await?;
    cluster.sessions(3).await?;

    // The history is gone up to now.
    let revision = etcd.clear().await?;
    etcd.client().await?.compact(revision, None).await?;
    let back = stand(&etcd, 3).await?;
    println!("keys that somebody removed were back after {:.1} s", back.as_secs_f64());

    etcd.kill();
    etcd.start_empty().await?;
    let back = stand(&etcd, 3).await?;
    println!("in an empty etcd all routers stood after {:.1} s", back.as_secs_f64());
    cluster.add_router().await?;
    cluster.sessions(4).await?;
    // The nodes have seen its address go and come back while their sessions went on: they still look for it there.
    cluster.replace_killed(2).await?;
    cluster.sessions(4).await?;

    load.answers_more(2 * CLIENTS).await?;
    nothing_lost(load).await?;
    cluster.settled(SOON).await?;
    Ok(())
}

#[tokio::test]
async fn wrong_flags_are_errors_at_the_start() -> anyhow::Result<()> {
    let model = model()?.display().to_string();
    let router = ["--model", model.as_str(), "--register"].map(str::to_owned);
    for (program, flags, words_of_error) in [
        ("tandem-router", "etcd://127.0.0.1:1/p --grpc 0.0.0.0:0 --http 127.0.0.1:0", vec!["--advertise-host"]),
        ("tandem-router", "etcd://127.0.0.1:1", vec!["no prefix", "etcd://host:port"]),
        ("tandem-router", "etcd://127.0.0.1:1/p --etcd-user u --etcd-password no-such-file", vec!["--etcd-password"]),
        ("tandem-router", "etcd://root:geheim@127.0.0.1:1/p", vec!["--register", "--etcd-password"]),
        ("tandem-decode-node", "--router etcd://127.0.0.1:1", vec!["no prefix", "etcd://host:port"]),
        ("tandem-decode-node", "--router etcds://u:geheim@h/p", vec!["--etcd-password"]),
    ] {
        let mut args = if program == "tandem-router" { router.to_vec() } else { words("--simulated") };
        args.extend(words(flags));
        let output = run_to_end(program, &args, SOON).await?;
        let text = String::from_utf8_lossy(&output.stderr);
        ensure!(!output.status.success(), "{program} {flags} went well");
        ensure!(words_of_error.iter().all(|word| text.contains(word)), "{program} {flags}: {text}");
        ensure!(!text.contains("geheim"), "a password is in the error: {text}");
    }
    Ok(())
}

/// A third router comes and drains; for how long its key was there meanwhile.
async fn drained(cluster: &mut Routers, etcd: &EtcdServer) -> anyhow::Result<Duration> {
    cluster.add_router().await?;
    let router = cluster.routers.last_mut().context("the router that was added")?;
    router.terminate();
    let gone = stand(etcd, 2).await?;
    let status = router.ended(SOON).await?;
    ensure!(status.success(), "it ended with {status}");
    Ok(gone)
}

/// The routers that the clients know were there all the time: no request took a second try.
async fn nothing_lost(load: Load) -> anyhow::Result<()> {
    let cut = load.has_cut();
    let (answers, again) = load.end().await.context("under load")?;
    println!("{answers} answers, {again} of them at the second try");
    ensure!(again == 0 && !cut, "{again} of {answers} answers took a second try");
    Ok(())
}
