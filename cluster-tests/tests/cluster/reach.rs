//! How commands find and reach a router: one `--url` for all of them, keys, headers and TLS, and the ports that `tandem
//! up` takes.
use std::path::Path;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use tandem_cluster_tests::cluster::{model, words};
use tandem_cluster_tests::process::{Process, run_to_end};

use crate::tool::{SOON, TURN, said, up, up_at_usual_ports};

/// A trace that a client began.
const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

#[tokio::test]
async fn one_url_is_enough_for_every_command() -> anyhow::Result<()> {
    let _turn = TURN.lock().await;
    let dir = tempfile::tempdir()?;
    let state = dir.path().join("state.json");
    let tandem = up(dir.path(), &["--simulated"]).await?;
    let (http, grpc) = (tandem.url("http"), tandem.url("grpc").replace("http://", "grpc://"));
    // Without the file that `up` leaves: this is another machine.
    let elsewhere = dir.path().join("no-state.json");
    for url in [&http, &grpc] {
        for command in ["generate", "chat"] {
            let (ok, _, errors) = said(&elsewhere, &[command, "--url", url, "--max-tokens", "4", "hi"]).await?;
            assert!(ok && errors.contains("TTFT"), "{command} {url}: {errors}");
        }
    }
    for command in ["trace", "explain"] {
        let (ok, _, errors) = said(&elsewhere, &[command, "last", "--url", &http]).await?;
        assert!(ok, "{command}: {errors}");
        let (ok, _, errors) = said(&elsewhere, &[command, "last", "--url", &grpc]).await?;
        assert!(!ok && errors.contains("--url http://HOST:PORT"), "{command}: {errors}");
    }
    // A port under the other one's scheme.
    let wrong = http.replace("http://", "grpc://");
    let hint = format!("{http} answers HTTP/1.1: is this the HTTP port? the gRPC port is {}", tandem.url("grpc"));
    for command in ["generate", "chat"] {
        let (ok, _, errors) = said(&state, &[command, "--url", &wrong, "hi"]).await?;
        assert!(!ok && errors.contains(&hint), "{errors}");
        let (ok, _, errors) = said(&state, &[command, "--url", &tandem.url("grpc"), "hi"]).await?;
        assert!(!ok && errors.contains("no router answers HTTP") && errors.contains("grpc://HOST:PORT"), "{errors}");
    }
    let (ok, _, errors) = said(&state, &["bench", "--url", &wrong]).await?;
    assert!(!ok && errors.contains("answers HTTP/1.1"), "{errors}");
    Ok(())
}

/// A router behind TLS that wants client certificates and a key, and a node of each kind.
#[tokio::test]
async fn keys_headers_and_tls_reach_a_router_that_wants_all_three() -> anyhow::Result<()> {
    let _turn = TURN.lock().await;
    let dir = tempfile::tempdir()?;
    let files = certificates(dir.path())?;
    let keys = dir.path().join("keys.json");
    std::fs::write(&keys, r#"{"keys": [{"name": "alice", "key": "sk-alice-0123456789abcdef"}]}"#)?;
    let (model, keys) = (model()?.display().to_string(), keys.display().to_string());
    let router = [
        &words("--http 127.0.0.1:0 --grpc 127.0.0.1:0 --nodes 127.0.0.1:0 --model")[..],
        &[model.clone(), "--api-keys".to_owned(), keys],
        &["--tls-cert", &files.server.0, "--tls-key", &files.server.1, "--tls-client-ca", &files.ca].map(str::to_owned),
    ];
    let router = Process::start("router", "tandem-router", &router.concat(), dir.path()).await?;
    let node = words("--listen 127.0.0.1:0 --admin 127.0.0.1:0 --transport tcp --simulated --kv-blocks 64 --router");
    let node = [&node[..], &[router.url("nodes"), "--model".to_owned(), model]].concat();
    let _prefill = Process::start("prefill", "tandem-prefill-node", &node, dir.path()).await?;
    let _decode = Process::start("decode", "tandem-decode-node", &node, dir.path()).await?;

    let state = dir.path().join("no-state.json");
    let http = router.url("http");
    let secrets = ["--tls-ca", &files.ca, "--tls-cert", &files.client.0, "--tls-key", &files.client.1];
    let parent = format!("traceparent: 00-{TRACE}-b7ad6b7169203331-01");
    let key = ["--api-key", "sk-alice-0123456789abcdef", "--header", &parent];
    let ask = |url: &str, flags: &[&str]| {
        let words = ["generate", "--url", url, "--max-tokens", "4", "--ignore-eos", "hi"];
        let words: Vec<String> = words.iter().chain(flags).map(|&word| word.to_owned()).collect();
        let state = state.clone();
        async move { said(&state, &words.iter().map(String::as_str).collect::<Vec<_>>()).await }
    };
    let all = [&secrets[..], &key].concat();
    // Nodes join in their own time.
    let mut asked = ask(&http, &all).await?;
    for _ in 0..200 {
        if asked.0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        asked = ask(&http, &all).await?;
    }
    assert!(asked.0 && asked.2.contains("TTFT"), "{}", asked.2);
    let grpcs = router.url("grpc").replace("https://", "grpcs://");
    assert!(ask(&grpcs, &all).await?.0);
    let trace = [&["trace", TRACE, "--url", &http][..], &all].concat();
    let (ok, drawn, errors) = said(&state, &trace).await?;
    assert!(ok && drawn.contains("TTFT"), "the header went with the request: {drawn}{errors}");
    let bench = ["bench", "--url", &http, "--input", "16", "--output", "4", "--requests", "2", "--warmup", "0"];
    let (ok, _, errors) = said(&state, &[&bench[..], &all].concat()).await?;
    assert!(ok, "{errors}");

    // One of the three is not enough.
    for (flags, why) in
        [(&secrets[..], "Unauthenticated"), (&key[..], "no router answers HTTP"), (&all[..2], "no router")]
    {
        let (ok, _, errors) = ask(&http, flags).await?;
        assert!(!ok && errors.contains(why), "{flags:?}: {errors}");
    }
    let (ok, _, errors) = ask(&http, &["--tls-ca", "/nowhere/ca.pem"]).await?;
    assert!(!ok && errors.contains("cannot read /nowhere/ca.pem"), "{errors}");
    Ok(())
}

/// Paths of an authority's certificate, and of certificate and key of a server and of a client.
pub(super) struct Certificates {
    pub(super) ca: String,
    pub(super) server: (String, String),
    pub(super) client: (String, String),
}

pub(super) fn certificates(dir: &Path) -> anyhow::Result<Certificates> {
    let write = |name: &str, pem: String| {
        let path = dir.join(name);
        std::fs::write(&path, pem).map(|()| path.display().to_string())
    };
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
    let ca = write("ca.pem", authority.pem())?;
    let signed = |name: &str, purpose| {
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()])?;
        params.extended_key_usages = vec![purpose];
        let key = KeyPair::generate()?;
        let cert = write(&format!("{name}.pem"), params.signed_by(&key, &*authority)?.pem())?;
        anyhow::Ok((cert, write(&format!("{name}.key"), key.serialize_pem())?))
    };
    let server = signed("server", ExtendedKeyUsagePurpose::ServerAuth)?;
    let client = signed("client", ExtendedKeyUsagePurpose::ClientAuth)?;
    Ok(Certificates { ca, server, client })
}

#[tokio::test]
async fn ports_are_the_usual_ones_or_the_next_that_are_free() -> anyhow::Result<()> {
    let _turn = TURN.lock().await;
    let (one, other) = (tempfile::tempdir()?, tempfile::tempdir()?);
    // Somebody may have the usual ports already: what counts is that two clusters get along.
    let first = up_at_usual_ports(one.path()).await?;
    let second = up_at_usual_ports(other.path()).await?;
    let port = |tandem: &Process, name: &str| {
        let url = tandem.url(name);
        url.rsplit(':').next().and_then(|port| port.parse::<u16>().ok()).unwrap_or_default()
    };
    let ports = [port(&first, "http"), port(&first, "grpc"), port(&second, "http"), port(&second, "grpc")];
    assert!(ports.iter().all(|port| (8000..8200).contains(port)), "{ports:?}");
    assert!(ports.iter().enumerate().all(|(at, port)| !ports[..at].contains(port)), "{ports:?}");
    assert!(second.log().contains(&format!("127.0.0.1:{} for 127.0.0.1:8000", ports[2])), "{}", second.log());
    Ok(())
}

#[tokio::test]
async fn exit_codes_are_those_of_the_docs() -> anyhow::Result<()> {
    let code =
        async |program: &str, args: &str| anyhow::Ok(run_to_end(program, &words(args), SOON).await?.status.code());
    assert_eq!(code("tandem", "completions bash").await?, Some(0));
    assert_eq!(code("tandem", "trace last --url http://127.0.0.1:9").await?, Some(1));
    for program in ["tandem", "tandem-router", "tandem-prefill-node", "tandem-decode-node"] {
        assert_eq!(code(program, "--no-such-flag").await?, Some(2), "{program}");
    }
    assert_eq!(code("tandem-router", "--model /nowhere/m.gguf --http 127.0.0.1:0 --grpc 127.0.0.1:0").await?, Some(1));
    Ok(())
}

#[tokio::test]
async fn completions_are_scripts_of_their_shells() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let output = run_to_end("tandem", &words("completions bash"), SOON).await?;
    let script = dir.path().join("tandem.bash");
    std::fs::write(&script, &output.stdout)?;
    let complete = format!(
        "source {}; COMP_WORDS=(tandem gen); COMP_CWORD=1; _tandem tandem gen tandem; echo \"${{COMPREPLY[@]}}\"",
        script.display()
    );
    let completed = tokio::process::Command::new("bash").args(["-c", &complete]).output().await?;
    let replies = String::from_utf8_lossy(&completed.stdout).into_owned();
    assert!(replies.split_whitespace().any(|word| word == "generate"), "{replies}{completed:?}");
    Ok(())
}
