//! Nodes that belong to the cluster by their token, and say what is not so: another node's name, another host's
//! address. And one that may have the name: a node that was started again.
use std::time::Duration;

use tandem_cluster_tests::client::{ask, text};
use tandem_cluster_tests::cluster::{model, words};
use tandem_cluster_tests::process::Process;
use tandem_cluster_tests::{Cluster, Options};

const SOON: Duration = Duration::from_secs(20);

#[tokio::test]
async fn neither_a_live_nodes_name_nor_another_hosts_address_is_taken() -> anyhow::Result<()> {
    let cluster = Cluster::start(Options { node_args: words("--threads 1"), ..Options::default() }).await?;
    let question = || ask(text("The capital of France is"), 8);
    let before = cluster.answer(question()).await?;
    let was = cluster.get("/debug/cluster").await?.json::<serde_json::Value>().await?;

    is_refused(&cluster, "--node-id decode-0", "as another process").await?;
    // TEST-NET-1: of nobody.
    is_refused(&cluster, "--node-id elsewhere --advertise-host 192.0.2.1", "--node-endpoints any").await?;

    let is = cluster.get("/debug/cluster").await?.json::<serde_json::Value>().await?;
    let incarnations = |cluster: &serde_json::Value| {
        let nodes = cluster["nodes"].as_array().cloned().unwrap_or_default();
        nodes.iter().map(|node| (node["id"].clone(), node["incarnation"].clone())).collect::<Vec<_>>()
    };
    assert_eq!((incarnations(&is), incarnations(&is).len()), (incarnations(&was), 2));
    assert_eq!(cluster.answer(question()).await?.tokens, before.tokens);
    Ok(())
}

/// The old one's connections stay open, as those of a host that is gone do: nobody but its lease tells its end.
#[tokio::test]
async fn a_node_that_was_started_again_joins_within_the_lease() -> anyhow::Result<()> {
    let options = Options { simulated: true, router_args: words("--lease-ms 9000"), ..Options::default() };
    let cluster = Cluster::start(options).await?;
    let model = model()?.display().to_string();
    let args = format!("--node-id decode-0 --listen 127.0.0.1:0 --admin 127.0.0.1:0 --simulated --model {model}");
    let args = words(&format!("{args} --router {}", cluster.router.url("grpc")));
    let next = Process::start("next", "tandem-decode-node", &args, cluster.dir()).await?;
    // While the old one lives its name is not given away.
    let refused = async |_: &Cluster| next.log().contains("as another process");
    cluster.wait_until(SOON, "the next process is refused", refused).await?;
    cluster.decode.freeze();
    let is_here = async |cluster: &Cluster| {
        let nodes = cluster.nodes().await.unwrap_or_default();
        nodes.iter().any(|node| node.incarnation.trim_start_matches("0x") == next.ready("incarnation"))
    };
    let took = cluster.wait_until(SOON, "the next process has joined", is_here).await?;
    println!("joined {took:?} after the old one fell silent");
    // It replaced the old one: that was not given up for the silence of a whole lease.
    let view = cluster.get("/debug/cluster").await?.json::<serde_json::Value>().await?;
    assert_eq!(view["departed"][0]["why"], "it registered again", "{view}");
    cluster.answer(ask(text("The capital of France is"), 8)).await?;
    // The old one wakes, and takes nothing back.
    cluster.decode.wake();
    cluster
        .wait_until(SOON, "the old process is refused", async |_: &Cluster| {
            cluster.decode.log().contains("as another process")
        })
        .await?;
    assert!(is_here(&cluster).await);
    Ok(())
}

/// A decode node with these flags says why it does not join.
async fn is_refused(cluster: &Cluster, flags: &str, why: &str) -> anyhow::Result<()> {
    let model = model()?.display().to_string();
    let args = format!("{flags} --listen 127.0.0.1:0 --admin 127.0.0.1:0 --threads 1 --model {model}");
    let args = words(&format!("{args} --router {}", cluster.router.url("grpc")));
    let impostor = Process::start("impostor", "tandem-decode-node", &args, cluster.dir()).await?;
    cluster.wait_until(SOON, why, async |_: &Cluster| impostor.log().contains(why)).await.map(drop)
}
