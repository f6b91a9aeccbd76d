//! Whatever comes in: a clear error, no panic, no hang, and the service goes on.
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

use tandem_cluster_tests::client::{ask, text, token_ids};
use tandem_cluster_tests::cluster::{free_port, model, words};
use tandem_cluster_tests::process::{ended_by_itself, run_to_end};
use tandem_cluster_tests::{Cluster, Options};
use tonic::Code;

/// A program that cannot work says so within this time.
const SOON: Duration = Duration::from_secs(30);
const PROGRAMS: [&str; 4] = ["tandem-router", "tandem-prefill-node", "tandem-decode-node", "tandem"];

/// The program ends by itself, not with success, and says `expected`.
async fn fails(program: &str, args: &[String], expected: &str) -> anyhow::Result<()> {
    let output = run_to_end(program, args, SOON).await?;
    let said = format!("{}{}", String::from_utf8_lossy(&output.stderr), String::from_utf8_lossy(&output.stdout));
    let context = format!("{program} {args:?}: {}\n{said}", output.status);
    assert!(ended_by_itself(output.status) && !output.status.success(), "{context}");
    assert!(!said.contains("panicked"), "{context}");
    assert!(said.to_lowercase().contains(&expected.to_lowercase()), "no {expected:?}: {context}");
    Ok(())
}

#[tokio::test]
async fn unknown_flags() -> anyhow::Result<()> {
    for program in PROGRAMS {
        fails(program, &words("--no-such-flag"), "--no-such-flag").await?;
    }
    Ok(())
}

#[tokio::test]
async fn ports_that_are_taken() -> anyhow::Result<()> {
    let taken = std::net::TcpListener::bind("127.0.0.1:0")?;
    let address = taken.local_addr()?.to_string();
    let model = model()?.display().to_string();
    // The other port is free, whatever else runs on the machine.
    for (flag, other) in [("--http", "--grpc"), ("--grpc", "--http")] {
        let line = format!("--model {model} {other} 127.0.0.1:0 {flag} {address}");
        fails("tandem-router", &words(&line), &address).await?;
    }
    for program in ["tandem-prefill-node", "tandem-decode-node"] {
        for flag in ["--listen", "--admin"] {
            let line = format!("--simulated --router http://127.0.0.1:1 --transport tcp {flag} {address}");
            fails(program, &words(&line), &address).await?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn model_files_that_are_none() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let truncated = dir.path().join("truncated.gguf");
    let mut head = vec![0; 8 << 20];
    std::fs::File::open(model()?)?.read_exact(&mut head)?;
    std::fs::write(&truncated, head)?;
    let header_only = dir.path().join("header.gguf");
    std::fs::write(&header_only, b"GGUF\x03\0\0\0\xff\xff\xff\xff\xff\xff\xff\x7f")?;
    let foreign = dir.path().join("foreign.gguf");
    std::fs::write(&foreign, gguf("no-such-architecture"))?;
    let text = dir.path().join("text.gguf");
    std::fs::write(&text, "this is not a model")?;
    let missing = dir.path().join("missing.gguf");
    let cases: [(&Path, &str); 5] = [
        (&missing, "missing.gguf"),
        (&truncated, "truncated.gguf"),
        (&header_only, "header.gguf"),
        (&foreign, "no-such-architecture"),
        (&text, "text.gguf"),
    ];
    for (path, expected) in cases {
        for program in ["tandem-prefill-node", "tandem-decode-node"] {
            let line = format!("--transport tcp --router http://127.0.0.1:1 --model {}", path.display());
            fails(program, &words(&line), expected).await?;
        }
        // A router needs the tokenizer only, which a truncated file still has.
        if path != truncated {
            let line = format!("--http 127.0.0.1:0 --grpc 127.0.0.1:0 --model {}", path.display());
            fails("tandem-router", &words(&line), expected).await?;
        }
    }
    Ok(())
}

/// A GGUF file of version 3 with nothing but its architecture.
fn gguf(architecture: &str) -> Vec<u8> {
    const STRING: u32 = 8;
    let mut file = b"GGUF".to_vec();
    file.extend(3u32.to_le_bytes());
    file.extend([0u64, 1].iter().flat_map(|count| count.to_le_bytes()));
    let string = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    file.extend(string("general.architecture"));
    file.extend(STRING.to_le_bytes());
    file.extend(string(architecture));
    file
}

#[tokio::test]
async fn requests_that_are_wrong() -> anyhow::Result<()> {
    let cluster = Cluster::start(Options::default()).await?;
    let body = |rest: &str| format!(r#"{{"prompt":"hello",{rest}}}"#);
    let cases: Vec<(&str, Vec<u8>, u16)> = vec![
        ("/v1/completions", b"{\"prompt\":\"\xff\xfe\"}".to_vec(), 400),
        ("/v1/completions", b"{\"prompt\":".to_vec(), 400),
        ("/v1/completions", b"[]".to_vec(), 400),
        ("/v1/completions", body(r#""max_tokens":-5"#).into_bytes(), 400),
        ("/v1/completions", body(r#""max_tokens":1e30"#).into_bytes(), 400),
        ("/v1/completions", body(r#""temperature":-1"#).into_bytes(), 400),
        ("/v1/completions", body(r#""model":"no-such-model""#).into_bytes(), 404),
        ("/v1/completions", br#"{"prompt":[99999999]}"#.to_vec(), 400),
        ("/v1/completions", br#"{"prompt":[-1]}"#.to_vec(), 400),
        ("/v1/completions", br#"{"max_tokens":4}"#.to_vec(), 400),
        ("/v1/chat/completions", br#"{"messages":[]}"#.to_vec(), 400),
        (
            "/v1/chat/completions",
            br#"{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function"}]}"#.to_vec(),
            400,
        ),
        ("/v1/no-such-path", b"{}".to_vec(), 404),
        ("/api/traces/zz", b"".to_vec(), 405),
    ];
    for (path, body, expected) in cases {
        let shown = String::from_utf8_lossy(&body).into_owned();
        let response = cluster.post(path, body).await?;
        let (status, said) = (response.status().as_u16(), response.text().await?);
        assert_eq!(status, expected, "{path} {shown}: {said}");
        if expected == 400 {
            let error: serde_json::Value = serde_json::from_str(&said)?;
            assert!(error["error"]["message"].is_string(), "{path} {shown}: {said}");
        }
    }
    assert_eq!(cluster.get("/api/traces/zz").await?.status(), 404);
    let long = ask(token_ids(vec![500; 9000]), 4);
    let empty = ask(token_ids(Vec::new()), 4);
    let wild = ask(token_ids(vec![u32::MAX]), 4);
    let mut stops = ask(text("hello"), 4);
    stops.stop = vec!["a".to_owned(); 5];
    for request in [long, empty, wild, stops, tandem_proto::v1::GenerateRequest::default()] {
        let failure = cluster.answer(request).await.expect_err("a wrong request was answered");
        assert_eq!(failure.status.code(), Code::InvalidArgument, "{failure}");
    }
    goes_on(cluster).await
}

#[tokio::test]
async fn a_body_of_100_mb() -> anyhow::Result<()> {
    let cluster = Cluster::start(Options::default()).await?;
    // A server may also close such a connection before all of it was sent.
    if let Ok(response) = cluster.post("/v1/completions", vec![b'a'; 100 << 20]).await {
        assert_eq!(response.status(), 413);
    }
    goes_on(cluster).await
}

#[tokio::test]
async fn garbage_on_every_port() -> anyhow::Result<()> {
    let kv = [free_port()?, free_port()?];
    let cluster = Cluster::start(Options {
        transport: "tcp",
        prefill_args: words(&format!("--kv-listen 127.0.0.1:{}", kv[0])),
        decode_args: words(&format!("--kv-listen 127.0.0.1:{}", kv[1])),
        ..Options::default()
    })
    .await?;
    let mut ports = vec![
        cluster.router.url("grpc"),
        cluster.router.url("http"),
        cluster.prefill.url("grpc"),
        cluster.prefill.url("admin"),
        cluster.decode.url("grpc"),
        cluster.decode.url("admin"),
    ];
    ports.extend(kv.map(|port| format!("http://127.0.0.1:{port}")));
    for port in &ports {
        throw_garbage(port.trim_start_matches("http://"))?;
    }
    goes_on(cluster).await
}

/// Over shared memory a node has no port but those that it names. UCX over sockets has one, whose reader is UCX's own.
#[tokio::test]
async fn garbage_on_ucx_ports() -> anyhow::Result<()> {
    let cluster = Cluster::start(Options::default()).await?;
    for node in [&cluster.prefill, &cluster.decode] {
        let named: BTreeSet<u16> =
            [node.url("grpc"), node.url("admin")].iter().map(|url| port(url)).collect::<Result<_, _>>()?;
        assert_eq!(node.listening_ports()?, named, "{}", node.name);
    }
    drop(cluster);
    if !Path::new("/sys/class/net/lo").exists() {
        println!("no /sys here: UCX finds no network device, its tcp profile is not tested");
        return Ok(());
    }
    let cluster = Cluster::start(Options {
        node_args: words("--threads 1 --kv-blocks 1024 --ucx-profile tcp"),
        ..Options::default()
    })
    .await?;
    for node in [&cluster.prefill, &cluster.decode] {
        let ports = node.listening_ports()?;
        assert!(ports.len() > 2, "UCX listens: {ports:?}");
        for port in ports {
            throw_garbage(&format!("127.0.0.1:{port}"))?;
        }
    }
    goes_on(cluster).await
}

fn port(url: &str) -> anyhow::Result<u16> {
    Ok(url.rsplit(':').next().unwrap_or_default().parse()?)
}

/// Three kinds of bytes that are no protocol, and a connection that says nothing and stays.
fn throw_garbage(address: &str) -> anyhow::Result<()> {
    let noise: Vec<u8> = (0u32..65_536).map(|n| n.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
    let (zeros, huge_lengths) = (vec![0; 65_536], vec![0xff; 65_536]);
    for bytes in [noise, zeros, huge_lengths] {
        let mut socket = TcpStream::connect(address)?;
        // The other end may close in the middle; it must not do anything else.
        let _ = socket.write_all(&bytes);
    }
    std::mem::forget(TcpStream::connect(address)?);
    Ok(())
}

/// Everybody is alive and answers, and nobody panicked.
async fn goes_on(mut cluster: Cluster) -> anyhow::Result<()> {
    let answer = cluster.answer(ask(token_ids(vec![500; 40]), 4)).await;
    assert!(answer.is_ok(), "{answer:?}");
    cluster.idle(Duration::from_secs(3)).await?;
    for process in [&mut cluster.router, &mut cluster.prefill, &mut cluster.decode] {
        assert!(process.is_alive());
        assert!(!process.log().contains("panicked"), "{}", process.log());
    }
    Ok(())
}
