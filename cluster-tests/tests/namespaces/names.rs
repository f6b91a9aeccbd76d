//! A name in DNS whose addresses change, as a headless service of Kubernetes has one: nodes that have it as `--router`
//! follow. The name stands in a file of hosts that the nodes alone see, in a mount namespace: the system's resolver
//! reads it anew for each question, and answers what it would answer of a name server's.
use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::ensure;
use tandem_cluster_tests::cluster::{free_port, model, words};
use tandem_cluster_tests::load::request;
use tandem_cluster_tests::process::Process;
use tandem_cluster_tests::reference::Reference;
use tandem_cluster_tests::routers::{ask_in_turn, logged, registered, sessions, until};
use tempfile::TempDir;
use tokio::time::sleep;

use super::network::is_permitted;
use super::strs;

const NAME: &str = "routers.example";
/// Many of the two seconds between two questions, for busy cores.
const SOON: Duration = Duration::from_secs(30);
/// Within this the name was asked for twice.
const TWICE_ASKED: Duration = Duration::from_secs(5);

/// One node of each role, and the routers at loopback addresses with one port.
struct Named {
    nodes: Vec<Process>,
    port: u16,
    hosts: PathBuf,
    switch: PathBuf,
    // Fields drop in order: processes before their directory.
    dir: TempDir,
}

impl Named {
    /// A cluster without a router: the name has no address yet.
    async fn start() -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let (hosts, switch) = (dir.path().join("hosts"), dir.path().join("nsswitch.conf"));
        std::fs::write(&switch, "hosts: files\n")?;
        let mut named = Self { nodes: Vec::new(), port: free_port()?, hosts, switch, dir };
        named.points_to(&[])?;
        for role in ["prefill", "decode"] {
            // Of the host's own name servers nothing is asked.
            let mount = format!(
                "mount --bind {} /etc/hosts && mount --bind {} /etc/nsswitch.conf && exec \"$@\"",
                named.hosts.display(),
                named.switch.display()
            );
            let by = ["unshare", "--mount", "sh", "-c", &mount, "sh"].map(str::to_owned);
            let mut args = words(&format!(
                "--listen 127.0.0.1:0 --admin 127.0.0.1:0 --transport tcp --simulated --threads 1 --kv-blocks 256 \
                 --node-id {role}-0 --router dns:///{NAME}:{} --model",
                named.port
            ));
            args.push(model()?.display().to_string());
            let (name, program) = (format!("{role}-0"), format!("tandem-{role}-node"));
            named.nodes.push(Process::start_through(&strs(&by), &name, &program, &args, named.dir.path()).await?);
        }
        Ok(named)
    }

    async fn router(&self, address: &str) -> anyhow::Result<Process> {
        let mut args =
            words(&format!("--http {address}:0 --grpc {address}:{} --local-prefill never --model", self.port));
        args.push(model()?.display().to_string());
        Process::start(&format!("router-{address}"), "tandem-router", &args, self.dir.path()).await
    }

    /// The name has these addresses, and no others: at no moment anything else.
    fn points_to(&self, addresses: &[&str]) -> anyhow::Result<()> {
        let lines = addresses.iter().map(|address| format!("{address} {NAME}\n"));
        let text: String = ["127.0.0.1 localhost\n".to_owned()].into_iter().chain(lines).collect();
        // In place: another file of that name would not be the one that is mounted.
        let old = self.hosts.metadata().map_or(0, |hosts| hosts.len() as usize);
        let file = File::options().create(true).write(true).truncate(false).open(&self.hosts)?;
        std::os::unix::fs::FileExt::write_all_at(&file, format!("{text:<old$}").as_bytes(), 0)?;
        Ok(())
    }

    async fn sessions(&self, count: usize) -> anyhow::Result<Duration> {
        sessions(&self.nodes, count, SOON).await
    }

    /// One session more, with this router, which has all nodes then.
    async fn joined(&self, router: &Process, count: usize) -> anyhow::Result<()> {
        self.sessions(count).await?;
        registered(router, self.nodes.len(), SOON).await
    }
}

#[tokio::test]
async fn nodes_follow_the_addresses_of_a_name() -> anyhow::Result<()> {
    if !is_permitted(&["unshare --mount mount --bind /etc/hosts /etc/nsswitch.conf"])? {
        return Ok(());
    }
    let reference = Reference::start()?;
    let answers = async |router: &Process, word: u32| -> anyhow::Result<()> {
        let asked = ask_in_turn(&[router.url("grpc")], 0, 1, &request(&[word; 40], 8)).await;
        let (answer, _) = asked.map_err(|failure| anyhow::anyhow!("{failure}"))?;
        ensure!(answer.tokens == reference.tokens(&[word; 40], 8).await?, "another answer than the undisturbed one");
        Ok(())
    };
    let named = Named::start().await?;
    // A name without an address ends no node, and is said once.
    logged(&named.nodes, "cannot be resolved", SOON).await?;
    let mut first = named.router("127.0.0.2").await?;
    named.points_to(&["127.0.0.2"])?;
    named.joined(&first, 1).await?;
    answers(&first, 1).await?;

    // A second address is a second router.
    let second = named.router("127.0.0.3").await?;
    named.points_to(&["127.0.0.2", "127.0.0.3"])?;
    named.joined(&second, 2).await?;
    answers(&second, 2).await?;

    // One that left the name keeps its nodes while it is there, and serves; then nobody looks for it any more.
    named.points_to(&["127.0.0.3"])?;
    sleep(TWICE_ASKED).await;
    named.sessions(2).await?;
    answers(&first, 3).await?;
    first.terminate();
    first.ended(SOON).await?;
    logged(&named.nodes, "a router has left", SOON).await?;
    named.sessions(1).await?;
    let again = named.router("127.0.0.2").await?;
    answers(&second, 4).await?;

    // Without any address the nodes keep whom they know, and follow when there are addresses again.
    named.points_to(&[])?;
    for node in &named.nodes {
        let twice = async || Ok(node.log().matches("cannot be resolved").count() == 2);
        until(SOON, "the name's loss is logged once more", twice).await?;
    }
    answers(&second, 5).await?;
    named.sessions(1).await?;
    named.points_to(&["127.0.0.2", "127.0.0.3"])?;
    named.joined(&again, 2).await?;
    answers(&again, 6).await?;
    Ok(())
}
