//! The cluster's secret: who has it belongs to the cluster, who lacks it is told so and nothing else.
use std::time::Duration;

use tandem_cluster_tests::client::{ask, metric, text};
use tandem_cluster_tests::cluster::{model, words};
use tandem_cluster_tests::process::Process;
use tandem_cluster_tests::{Cluster, Options};
use tandem_proto::v1;
use tokio::sync::mpsc::{Sender, channel};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request};

const SOON: Duration = Duration::from_secs(20);

#[tokio::test]
async fn only_who_has_the_token_belongs_to_the_cluster() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let file = |name: &str, token: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, token).map(|()| format!("--join-token-file {}", path.display()))
    };
    let (ours, theirs) =
        (words(&file("ours", "our-cluster-s-secret\n")?), words(&file("theirs", "another-one-s-secret")?));
    let options =
        Options { router_args: ours.clone(), node_args: [words("--threads 1"), ours].concat(), ..Options::default() };
    let cluster = Cluster::start(options).await?;
    let answer = cluster.answer(ask(text("The capital of France is"), 8)).await?;
    assert!(answer.text.contains("Paris"), "{}", answer.text);

    strangers_are_refused(&cluster).await?;
    for (name, token) in [("without", Vec::new()), ("with-another", theirs)] {
        does_not_join(&cluster, name, token).await?;
    }
    let metrics = cluster.get("/metrics").await?.text().await?;
    let counted = metrics.lines().find(|line| line.starts_with("tandem_strangers_refused_total"));
    let count = counted.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    assert!(count.is_some_and(|count| count >= 3.0), "{counted:?}");
    assert_eq!(cluster.nodes().await?.len(), 2);
    let again = cluster.answer(ask(text("The capital of France is"), 8)).await?;
    assert_eq!(again.tokens, answer.tokens, "honest requests go on");
    Ok(())
}

#[tokio::test]
async fn a_hangup_brings_the_next_token_and_filter_and_ends_no_process() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let (token, config) = (dir.path().join("token"), dir.path().join("tandem.toml"));
    let [first, second] = ["our-cluster-s-secret", "its-next-cluster-secret"];
    let written = |tokens: &str, filter: &str| {
        std::fs::write(&config, format!("log-filter = '{filter}'\n")).and_then(|()| std::fs::write(&token, tokens))
    };
    written(first, "info")?;
    let files = words(&format!("--join-token-file {} --config {}", token.display(), config.display()));
    let (router_args, node_args) = (files.clone(), files);
    let mut cluster = Cluster::start(Options { router_args, node_args, simulated: true, ..Options::default() }).await?;
    let question = || ask(text("The capital of France is"), 8);
    let before = cluster.answer(question()).await?;
    let steps =
        [(format!("{first}\n{second}\n"), "debug"), (format!("{second}\n{first}"), "info"), (second.into(), "warn")];
    for (step, (tokens, filter)) in steps.into_iter().enumerate() {
        written(&tokens, filter)?;
        // In any order, with requests in between.
        for process in [&cluster.decode, &cluster.router, &cluster.prefill] {
            process.hang_up();
            let read =
                async |_: &Cluster| process.log().matches("join token read again (at SIGHUP)").count() == step + 1;
            cluster.wait_until(SOON, "the token is read again", read).await?;
            assert_eq!(cluster.answer(question()).await?.tokens, before.tokens);
        }
    }
    cluster.restart_decode().await?;
    assert_eq!(cluster.answer(question()).await?.tokens, before.tokens, "who starts has the next one");
    assert_eq!(metric(&cluster.prefill, "tandem_strangers_refused_total").await?, 0.0);
    let metrics = cluster.get("/metrics").await?.text().await?;
    let refused = metrics.lines().find(|line| line.starts_with("tandem_strangers_refused_total"));
    assert!(refused.is_some_and(|line| line.ends_with(" 0")), "{refused:?}");
    for process in [&cluster.router, &cluster.prefill] {
        let changed = |line: &&str| line.contains("flag=\"log-filter\"") && line.contains("this holds from now on");
        assert_eq!(process.log().lines().filter(changed).count(), 2, "{}", process.log());
    }
    Ok(())
}

/// A stream that says nothing for as long as its sender lives, without a token or with a made-up one.
fn silent<T>(token: Option<&str>) -> anyhow::Result<(Sender<T>, Request<ReceiverStream<T>>)> {
    let (open, silent) = channel(1);
    let mut request = Request::new(ReceiverStream::new(silent));
    if let Some(token) = token {
        request.metadata_mut().insert("x-tandem-join", token.parse()?);
    }
    Ok((open, request))
}

/// Calls to the nodes and to the router's membership, before anything of theirs is read.
async fn strangers_are_refused(cluster: &Cluster) -> anyhow::Result<()> {
    let refused = |code| assert_eq!(code, Some(Code::Unauthenticated));
    let mut prefill = v1::prefill_client::PrefillClient::connect(cluster.prefill.url("grpc")).await?;
    let mut decode = v1::decode_client::DecodeClient::connect(cluster.decode.url("grpc")).await?;
    let mut membership = v1::membership_client::MembershipClient::connect(cluster.router.url("grpc")).await?;
    let guessed = "0".repeat(64);
    for token in [None, Some(&*guessed)] {
        let (_open, call) = silent(token)?;
        refused(timeout(SOON, prefill.prefill(call)).await?.err().map(|status| status.code()));
        let (_open, call) = silent(token)?;
        refused(timeout(SOON, decode.generate(call)).await?.err().map(|status| status.code()));
        let (_open, call) = silent(token)?;
        refused(timeout(SOON, membership.join(call)).await?.err().map(|status| status.code()));
    }
    for node in [&cluster.prefill, &cluster.decode] {
        assert_eq!(metric(node, "tandem_strangers_refused_total").await?, 2.0);
    }
    Ok(())
}

/// Such a node says what is wrong with it, and the router does not list it.
async fn does_not_join(cluster: &Cluster, name: &str, token: Vec<String>) -> anyhow::Result<()> {
    let model = model()?.display().to_string();
    let args = format!("--listen 127.0.0.1:0 --admin 127.0.0.1:0 --transport tcp --simulated --model {model}");
    let mut args = words(&format!("{args} --node-id {name} --router {}", cluster.router.url("grpc")));
    args.extend(token);
    let stranger = Process::start(name, "tandem-decode-node", &args, cluster.dir()).await?;
    let told = async |_: &Cluster| stranger.log().contains("join token");
    cluster.wait_until(SOON, "the node says that its token is wrong", told).await?;
    Ok(())
}
