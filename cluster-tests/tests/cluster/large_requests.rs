//! Requests as large as they may be, many at once: the router refuses them without taking memory for what it refuses.
use std::future::Future;
use std::time::Duration;

use tandem_cluster_tests::{Cluster, Options};
use tandem_proto::v1::generate_request::Input;
use tandem_proto::v1::inference_client::InferenceClient;
use tandem_proto::{MAX_MESSAGE_BYTES, v1};
use tonic::Code;

/// Megabytes, see `make bench-large-requests` for what is measured.
const MOST_MB: f64 = 400.0;
const SOON: Duration = Duration::from_secs(10);

/// Just under the 8 MiB that a body may have: millions of token ids, or of whatever else takes more room than its text.
fn bodies() -> Vec<(&'static str, String)> {
    let filled = |head: &str, item: &str, tail: &str| {
        let items = vec![item; (8_300_000 - head.len() - tail.len()) / (item.len() + 1)];
        format!("{head}{}{tail}", items.join(","))
    };
    let completions = [
        filled(r#"{"n": 128, "max_tokens": 1, "prompt": ["#, "7", "]}"),
        filled(r#"{"n": 128, "prompt": ["#, "[]", "]}"),
        filled(r#"{"n": 128, "prompt": ["#, r#""""#, "]}"),
        filled(r#"{"prompt": "a", "stop": ["#, r#""""#, "]}"),
        filled(r#"{"prompt": "a", "stop_token_ids": ["#, "1", "]}"),
        format!("{{{}, \"prompt\": \"a\"}}", (0..600_000).map(|n| format!("\"f{n}\":1")).collect::<Vec<_>>().join(",")),
    ];
    let text = format!(r#"{{"return_token_strs": true, "prompt": "{}"}}"#, "a 1 ".repeat(2_070_000));
    let others = [("/detokenize", filled(r#"{"tokens": ["#, "28", "]}")), ("/tokenize", text)];
    completions.map(|body| ("/v1/completions", body)).into_iter().chain(others).collect()
}

/// What the router takes at most until all of `calls` are answered.
async fn peak_mb<T>(cluster: &Cluster, calls: impl Iterator<Item = impl Future<Output = T>>) -> (f64, Vec<T>) {
    let mut all = std::pin::pin!(futures::future::join_all(calls));
    let mut peak: f64 = 0.0;
    loop {
        tokio::select! {
            answers = &mut all => return (peak, answers),
            () = tokio::time::sleep(Duration::from_millis(5)) => {
                peak = peak.max(cluster.router.resident_mb().expect("a process"));
            }
        }
    }
}

#[tokio::test]
async fn sixteen_at_once_take_no_gigabyte() -> anyhow::Result<()> {
    let cluster = Cluster::start(Options { simulated: true, ..Options::default() }).await?;
    let idle = cluster.router.resident_mb().expect("a process");
    for (path, body) in bodies() {
        let (peak, answers) = peak_mb(&cluster, (0..16).map(|_| cluster.post(path, body.clone()))).await;
        let mut read = 0;
        for answer in answers {
            let status = answer?.status().as_u16();
            // Its own fault or, where too many came at once, ours.
            assert!([400, 429].contains(&status), "{status} for {path} {}", &body[..60]);
            read += usize::from(status == 400);
        }
        assert!(read > 0, "some of {path} {} were read", &body[..60]);
        assert!(peak < MOST_MB, "{peak} MB at {path} {}", &body[..60]);
    }
    sixteen_over_grpc(&cluster).await?;
    let back = async |cluster: &Cluster| cluster.router.resident_mb().is_some_and(|mb| mb <= 2.0 * idle);
    cluster.wait_until(SOON, &format!("the router has given its memory back, to twice {idle} MB"), back).await?;
    let small = cluster.post("/v1/completions", r#"{"prompt": "a", "max_tokens": 1}"#).await?;
    assert_eq!(small.status().as_u16(), 200);
    // One that needs room and a thread: both were given back.
    let long = format!(r#"{{"prompt": "a", "max_tokens": 1, "user": "{}"}}"#, "u".repeat(1 << 20));
    assert_eq!(cluster.post("/v1/completions", long).await?.status().as_u16(), 200);
    let metrics = cluster.get("/metrics").await?.text().await?;
    for given_back in ["tandem_body_bytes", "tandem_texts_working", "tandem_texts_waiting"] {
        let line = metrics.lines().find(|line| line.starts_with(given_back)).unwrap_or_default();
        assert!(line.ends_with(" 0"), "{line}");
    }
    Ok(())
}

/// Messages just under 8 MiB of token ids of one byte each, over connections of their own.
async fn sixteen_over_grpc(cluster: &Cluster) -> anyhow::Result<()> {
    let calls = (0..16).map(|_| async {
        let client = InferenceClient::connect(cluster.router.url("grpc")).await?;
        let input = Some(Input::TokenIds(v1::TokenIds { ids: vec![7; 8_380_000] }));
        let request = v1::GenerateRequest { input, n: 128, ..v1::GenerateRequest::default() };
        let answer = client.max_encoding_message_size(MAX_MESSAGE_BYTES).generate(request).await;
        anyhow::Ok(answer.err().map(|status| status.code()))
    });
    let (peak, answers) = peak_mb(cluster, calls).await;
    let codes = answers.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    assert!(codes.contains(&Some(Code::InvalidArgument)), "some were read: {codes:?}");
    let refused = |code: &Option<Code>| matches!(code, Some(Code::InvalidArgument | Code::ResourceExhausted));
    assert!(codes.iter().all(refused), "{codes:?}");
    assert!(peak < MOST_MB, "{peak} MB over gRPC");
    Ok(())
}
