//! Router and nodes within TLS: who has a certificate for its role belongs to the cluster, who has another one or none
//! is told so and counted, and certificates are replaced while requests run.
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair, SanType,
    date_time_ymd,
};
use tandem_cluster_tests::client::{ask, metric, text};
use tandem_cluster_tests::cluster::{model, words};
use tandem_cluster_tests::process::{Process, run_to_end};
use tandem_cluster_tests::{Cluster, Options};
use tandem_ports::{NodeTls, NodeTlsFiles, PeerRole, Wanted};
use tandem_proto::v1::{self, node_report::Report};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

const SOON: Duration = Duration::from_secs(20);

/// A directory with the files of one authority.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    dir: PathBuf,
}

impl Authority {
    fn new(dir: PathBuf) -> anyhow::Result<Self> {
        std::fs::create_dir_all(&dir)?;
        let mut params = CertificateParams::new(Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        std::fs::write(dir.join("ca.pem"), issuer.pem())?;
        Ok(Self { issuer, dir })
    }

    /// `NAME.pem` and `NAME.key` for who has this path in its name.
    fn sign(&self, name: &str, path: &str) -> anyhow::Result<NodeTlsFiles> {
        self.sign_with(name, path, |_| {})
    }

    fn sign_with(
        &self,
        name: &str,
        path: &str,
        change: impl FnOnce(&mut CertificateParams),
    ) -> anyhow::Result<NodeTlsFiles> {
        let mut params = CertificateParams::new(Vec::new())?;
        params.subject_alt_names = vec![SanType::URI(format!("spiffe://cluster.test/tandem/{path}").try_into()?)];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut params);
        let key = KeyPair::generate()?;
        let files = NodeTlsFiles {
            cert: self.dir.join(format!("{name}.pem")),
            key: self.dir.join(format!("{name}.key")),
            ca: self.dir.join("ca.pem"),
            any_name: false,
        };
        std::fs::write(&files.cert, params.signed_by(&key, &*self.issuer)?.pem())?;
        std::fs::write(&files.key, key.serialize_pem())?;
        Ok(files)
    }
}

fn flags(files: &NodeTlsFiles) -> Vec<String> {
    let NodeTlsFiles { cert, key, ca, .. } = files;
    let files = [("--node-tls-cert", cert), ("--node-tls-key", key), ("--node-tls-ca", ca)];
    files.into_iter().flat_map(|(flag, path)| [flag.to_owned(), path.display().to_string()]).collect()
}

async fn start(authority: &Authority) -> anyhow::Result<Cluster> {
    let router = authority.sign("router", "router")?;
    Cluster::start(Options {
        transport: "tcp",
        router_args: [words("--nodes 127.0.0.1:0"), flags(&router)].concat(),
        prefill_args: flags(&authority.sign("prefill", "prefill")?),
        decode_args: flags(&authority.sign("decode", "decode/decode-0")?),
        ..Options::default()
    })
    .await
}

async fn refused_by_router(cluster: &Cluster) -> anyhow::Result<f64> {
    let metrics = cluster.get("/metrics").await?.text().await?;
    let line = metrics.lines().find(|line| line.starts_with("tandem_strangers_refused_total"));
    Ok(line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(f64::NAN))
}

#[tokio::test]
async fn only_who_has_a_certificate_for_it_belongs_to_the_cluster() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let (ours, theirs) = (Authority::new(dir.path().join("ours"))?, Authority::new(dir.path().join("theirs"))?);
    let cluster = start(&ours).await?;
    assert!(cluster.router.ready("nodes").starts_with("https://"));
    let answer = cluster.answer(ask(text("The capital of France is"), 8)).await?;
    assert!(answer.text.contains("Paris"), "{}", answer.text);
    assert_eq!(refused_by_router(&cluster).await?, 0.0);

    nodes_do_not_join(&cluster, &theirs).await?;
    certificates_are_for_their_holders(&cluster, &ours).await?;
    strangers_call_no_node(&cluster, &ours, &theirs).await?;
    wrong_files_end_a_start(&ours, &theirs).await?;

    assert_eq!(cluster.nodes().await?.len(), 2);
    let again = cluster.answer(ask(text("The capital of France is"), 8)).await?;
    assert_eq!(again.tokens, answer.tokens, "honest requests go on");
    Ok(())
}

/// Nodes without a certificate, and with one of another authority: each says why, and the router counts them.
async fn nodes_do_not_join(cluster: &Cluster, theirs: &Authority) -> anyhow::Result<()> {
    let url = cluster.router.url("nodes");
    let foreign = flags(&theirs.sign("decode", "decode")?);
    for (name, router, more, said) in [
        ("bare", url.replace("https://", "http://"), Vec::new(), "no router, trying again"),
        ("foreign", url, foreign, "no authority of --node-tls-ca signed its certificate"),
    ] {
        let before = refused_by_router(cluster).await?;
        let args = format!("--listen 127.0.0.1:0 --admin 127.0.0.1:0 --transport tcp --simulated --node-id {name}");
        let mut args = words(&format!("{args} --router {router} --model {}", model()?.display()));
        args.extend(more);
        let stranger = Process::start(name, "tandem-decode-node", &args, cluster.dir()).await?;
        let refused = async |cluster: &Cluster| {
            let counted = refused_by_router(cluster).await.is_ok_and(|count| count > before);
            counted && stranger.log().contains(said) && cluster.router.log().contains("refused a stranger")
        };
        cluster.wait_until(SOON, &format!("{name} is refused, counted, and says why"), refused).await?;
    }
    Ok(())
}

/// What a process with these files gets to a call of its own making.
async fn channel_by(files: &NodeTlsFiles, role: PeerRole, url: String, wanted: Wanted) -> anyhow::Result<Channel> {
    let tls = NodeTls::read(files, role)?;
    let connect = tower::service_fn(move |uri: http::Uri| {
        let (tls, wanted) = (tls.clone(), wanted.clone());
        tls.dial_url(uri, wanted)
    });
    Ok(Endpoint::from_shared(url)?.connect_with_connector(connect).await?)
}

/// A prefill node's certificate is no decode node's, and one node's is not another's.
async fn certificates_are_for_their_holders(cluster: &Cluster, ours: &Authority) -> anyhow::Result<()> {
    let (any, one) = (ours.sign("any", "prefill")?, ours.sign("one", "prefill/prefill-7")?);
    for (files, role, id, said) in [
        (&any, v1::Role::Decode, "decode-9", "not of the decode node `decode-9`"),
        (&one, v1::Role::Prefill, "prefill-9", "not of the prefill node `prefill-9`"),
    ] {
        let before = refused_by_router(cluster).await?;
        let channel = channel_by(files, PeerRole::Prefill, cluster.router.url("nodes"), Wanted::Router).await?;
        let (reports, stream) = mpsc::channel(1);
        let register = v1::Register { node_id: id.to_owned(), role: role.into(), ..v1::Register::default() };
        reports.send(v1::NodeReport { report: Some(Report::Register(register)) }).await?;
        let mut membership = v1::membership_client::MembershipClient::new(channel);
        let refused = membership.join(ReceiverStream::new(stream)).await.err();
        is_refused(refused, said);
        assert_eq!(refused_by_router(cluster).await?, before + 1.0);
    }
    // A router has no business at another one's port for nodes.
    let router = ours.sign("router-2", "router")?;
    let channel = channel_by(&router, PeerRole::Router, cluster.router.url("nodes"), Wanted::Router).await?;
    let mut membership = v1::membership_client::MembershipClient::new(channel);
    is_refused(membership.join(tokio_stream::pending()).await.err(), "not of a node");
    Ok(())
}

fn is_refused(status: Option<Status>, said: &str) {
    let status = status.expect("refused");
    assert!(status.code() == Code::PermissionDenied && status.message().contains(said), "{status}");
}

/// Calls to the nodes' own ports: in the clear, with another authority's router certificate, and as another node.
async fn strangers_call_no_node(cluster: &Cluster, ours: &Authority, theirs: &Authority) -> anyhow::Result<()> {
    let decode = Wanted::Node { role: PeerRole::Decode, node_id: "decode-0".to_owned() };
    let url = cluster.decode.url("grpc");
    let refused = async || metric(&cluster.decode, "tandem_strangers_refused_total").await;
    assert_eq!(refused().await?, 0.0);
    let mut plain = v1::decode_client::DecodeClient::new(Endpoint::from_shared(url.clone())?.connect_lazy());
    assert!(plain.generate(Request::new(tokio_stream::pending())).await.is_err(), "in the clear");
    let at_least = async |count: f64| {
        let counted = async |_: &Cluster| refused().await.is_ok_and(|now| now >= count);
        cluster.wait_until(SOON, "the node counts who is refused", counted).await
    };
    at_least(1.0).await?;
    let foreign = theirs.sign("router", "router")?;
    let dialled = channel_by(&foreign, PeerRole::Router, url.clone(), decode.clone()).await;
    assert!(dialled.is_err(), "a router of another cluster talks to nobody here");
    at_least(2.0).await?;
    let node = ours.sign("decode-2", "decode")?;
    let channel = channel_by(&node, PeerRole::Decode, url, decode).await?;
    let mut as_node = v1::decode_client::DecodeClient::new(channel);
    is_refused(as_node.generate(Request::new(tokio_stream::pending())).await.err(), "not of a router");
    at_least(3.0).await?;
    Ok(())
}

/// One sentence each, before anything is loaded.
async fn wrong_files_end_a_start(ours: &Authority, theirs: &Authority) -> anyhow::Result<()> {
    let node = words("--router https://127.0.0.1:9 --simulated");
    let router = words(&format!("--http 127.0.0.1:0 --grpc 127.0.0.1:0 --nodes 127.0.0.1:0 --model {}", "m.gguf"));
    let expired = |params: &mut CertificateParams| params.not_after = date_time_ymd(2024, 1, 1);
    let past = flags(&ours.sign_with("past", "decode", expired)?);
    let prefill = flags(&ours.sign("as-decode", "prefill")?);
    let strange = {
        let files = ours.sign("strange", "router")?;
        flags(&NodeTlsFiles { ca: theirs.dir.join("ca.pem"), ..files })
    };
    let half = flags(&ours.sign("half", "router")?)[..4].to_vec();
    for (program, args, said) in [
        ("tandem-decode-node", [node.clone(), past].concat(), "not valid any more"),
        ("tandem-decode-node", [node, prefill].concat(), "this process is of role decode"),
        ("tandem-router", [router.clone(), strange].concat(), "no authority of --node-tls-ca signed this certificate"),
        ("tandem-router", [router, half].concat(), "--node-tls-ca"),
    ] {
        let output = run_to_end(program, &args, SOON).await?;
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && errors.contains(said), "{program} {args:?}: {errors}");
    }
    Ok(())
}

#[tokio::test]
async fn certificates_are_replaced_while_requests_run() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let (old, new) = (Authority::new(dir.path().join("in-use"))?, Authority::new(dir.path().join("new"))?);
    let mut cluster = start(&old).await?;
    let expected = cluster.answer(ask(text("The capital of France is"), 8)).await?.tokens;
    let stop = Arc::new(AtomicBool::new(false));
    let asking = async {
        let mut asked = 0;
        while !stop.load(Ordering::Relaxed) {
            let answer = cluster.answer(ask(text("The capital of France is"), 8)).await?;
            anyhow::ensure!(answer.tokens == expected, "{answer:?}");
            asked += 1;
        }
        anyhow::Ok(asked)
    };
    let replacing = async {
        let replaced = replace(&cluster, &old.dir, &new).await;
        stop.store(true, Ordering::Relaxed);
        replaced
    };
    let (asked, replaced) = tokio::join!(asking, replacing);
    replaced?;
    assert!(asked? > 0, "requests ran meanwhile");

    // Connections that are made now are made with the new files, in both directions.
    cluster.restart_prefill().await?;
    assert_eq!(cluster.answer(ask(text("The capital of France is"), 8)).await?.tokens, expected);
    let before = refused_by_router(&cluster).await?;
    let left_over = Authority { issuer: old.issuer, dir: dir.path().join("left-over") };
    std::fs::create_dir_all(&left_over.dir)?;
    std::fs::write(left_over.dir.join("ca.pem"), new.issuer.pem() + &left_over.issuer.pem())?;
    let files = left_over.sign("decode", "decode")?;
    let channel = channel_by(&files, PeerRole::Decode, cluster.router.url("nodes"), Wanted::Router).await;
    let refused = match channel {
        Ok(channel) => {
            v1::membership_client::MembershipClient::new(channel).join(tokio_stream::pending()).await.map(drop).is_err()
        }
        Err(_) => true,
    };
    assert!(refused, "the old authority is still taken");
    let counted = async |cluster: &Cluster| refused_by_router(cluster).await.is_ok_and(|count| count > before);
    cluster.wait_until(SOON, "it is counted", counted).await?;
    Ok(())
}

/// As an operator does it: first both authorities are taken, then certificates are the new one's, then it is alone.
async fn replace(cluster: &Cluster, in_use: &Path, new: &Authority) -> anyhow::Result<()> {
    let ca = in_use.join("ca.pem");
    let (first, second) = (std::fs::read_to_string(&ca)?, new.issuer.pem());
    std::fs::write(&ca, format!("{first}{second}"))?;
    read_again(cluster, 1).await?;
    for (name, path) in [("router", "router"), ("prefill", "prefill"), ("decode", "decode/decode-0")] {
        let files = new.sign(name, path)?;
        std::fs::copy(&files.cert, in_use.join(format!("{name}.pem")))?;
        std::fs::copy(&files.key, in_use.join(format!("{name}.key")))?;
    }
    read_again(cluster, 2).await?;
    std::fs::write(&ca, second)?;
    read_again(cluster, 3).await
}

/// All processes have read their files so often by signal; they may have seen the change before.
async fn read_again(cluster: &Cluster, times: usize) -> anyhow::Result<()> {
    let processes = [&cluster.router, &cluster.prefill, &cluster.decode];
    processes.iter().for_each(|process| process.hang_up());
    let read = async |_: &Cluster| {
        let count = |process: &&Process| process.log().matches("read again (at SIGHUP)").count();
        processes.iter().all(|process| count(process) >= times)
    };
    cluster.wait_until(SOON, "the files are read again", read).await.map(drop)
}
