//! Hosts whose clocks are wrong, by a minute either way: requests, deadlines and traces must not show it.
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tandem_cluster_tests::client::{ask, text, token_ids};
use tandem_cluster_tests::cluster::words;
use tandem_cluster_tests::{Cluster, Options};
use tandem_proto::v1::inference_client::InferenceClient;
use tonic::{Code, Request};

/// Longer than any wait of this test, and far less than the clocks are wrong.
const FAR_OFF: Duration = Duration::from_secs(20);

/// A cluster whose nodes' clocks are so many milliseconds ahead.
async fn cluster(prefill_ms: i64, decode_ms: i64) -> anyhow::Result<Cluster> {
    let ahead = |ms: i64| words(&format!("--debug-clock-offset-ms {ms}"));
    // Deadlines that are near: what is too late for them is predicted.
    let (prefill_args, decode_args) = (ahead(prefill_ms), ahead(decode_ms));
    let options = Options { prefill_args, decode_args, warm_up: true, ..Options::default() };
    let cluster = Cluster::start(options).await?;
    // The first reading of the router's clock comes with the first report.
    let related = async |cluster: &Cluster| {
        [(&cluster.prefill, prefill_ms), (&cluster.decode, decode_ms)]
            .iter()
            .all(|(node, ms)| *ms == 0 || node.log().contains("this host's clock is not the router's"))
    };
    cluster.wait_until(FAR_OFF, "the clocks are related", related).await?;
    Ok(cluster)
}

#[tokio::test]
async fn a_minute_ahead_or_behind_changes_nothing() -> anyhow::Result<()> {
    for (prefill_ms, decode_ms) in [(60_000, 0), (-60_000, 60_000), (0, -60_000)] {
        let cluster = cluster(prefill_ms, decode_ms).await?;
        let what = format!("prefill {prefill_ms} ms, decode {decode_ms} ms ahead");
        answers_and_deadlines(&cluster, &what).await?;
        spans_on_one_line(&cluster, &what).await?;
        cluster.idle(FAR_OFF).await?;
    }
    Ok(())
}

/// A deadline that is far off ends nothing, and one that is near ends its request when it is due.
async fn answers_and_deadlines(cluster: &Cluster, what: &str) -> anyhow::Result<()> {
    let mut client = InferenceClient::connect(cluster.router.url("grpc")).await?;
    let mut request = Request::new(ask(text("The capital of France is"), 8));
    request.set_timeout(FAR_OFF);
    let answer = tandem_cluster_tests::client::rest(client.generate(request).await?.into_inner()).await?;
    assert!(answer.text.contains("Paris"), "{what}: {}", answer.text);
    let timings = answer.finish.timings.unwrap_or_default();
    assert_eq!(timings.replans, 0, "{what}: no node took the request for too late");

    let mut endless = ask(text("Once upon a time"), 4000);
    endless.ignore_eos = true;
    let mut request = Request::new(endless);
    request.set_timeout(Duration::from_secs(2));
    let began = std::time::Instant::now();
    let ended = match client.generate(request).await {
        Ok(stream) => {
            tandem_cluster_tests::client::rest(stream.into_inner()).await.err().map(|failure| failure.status.code())
        }
        Err(status) => Some(status.code()),
    };
    assert_eq!(ended, Some(Code::DeadlineExceeded), "{what}");
    assert!((1..10).contains(&began.elapsed().as_secs()), "{what}: after {:?}", began.elapsed());
    Ok(())
}

fn unix_ns() -> anyhow::Result<u64> {
    Ok(u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos())?)
}

/// A long prompt, whose KV leaves while it is computed: its spans stand where they belong, and most of the copy is
/// hidden.
async fn spans_on_one_line(cluster: &Cluster, what: &str) -> anyhow::Result<()> {
    let began = unix_ns()?;
    let prompt: Vec<u32> = (0..2000).map(|index| 1000 + index * 31 % 40_000).collect();
    let answer = cluster.answer(ask(token_ids(prompt), 4)).await?;
    let timings = answer.finish.timings.clone().unwrap_or_default();
    assert!(timings.transfer_total_ms > 0.0, "{what}: {timings:?}");
    let trace: serde_json::Value =
        cluster.get(&format!("/api/traces/{}", answer.finish.trace_id)).await?.json().await?;
    let spans = trace["spans"].as_array().expect("spans");
    let time = |span: &serde_json::Value, key: &str| span[key].as_u64().unwrap_or_default();
    let far_off = FAR_OFF.as_nanos() as u64;
    let meanwhile = (began - far_off)..(unix_ns()? + far_off);
    for span in spans {
        assert!(
            ["start_unix_ns", "end_unix_ns"].iter().all(|key| meanwhile.contains(&time(span, key))),
            "{what}: {span:#}"
        );
    }
    let named = |name: &str, service: &str| {
        let found = spans.iter().find(|span| span["name"] == name && span["service"] == service);
        found.unwrap_or_else(|| panic!("{what}: no {name} of {service} in {trace:#}"))
    };
    let (forward, copy) = (named("prefill.forward", "tandem-prefill"), named("kv.transfer", "tandem-decode"));
    let overlap_ns = time(forward, "end_unix_ns").saturating_sub(time(copy, "start_unix_ns"));
    assert!(overlap_ns > 0, "{what}: the copy begins while the prompt is computed: {copy:#} {forward:#}");
    // Hidden and exposed are the whole copy; chunk by chunk, most of it goes beside the computation.
    let number = |key: &str| copy["attributes"][key].as_f64().unwrap_or_else(|| panic!("{what}: no {key} in {copy:#}"));
    let hidden = number("tandem.kv.hidden_ms");
    let whole = (time(copy, "end_unix_ns") - time(copy, "start_unix_ns")) as f64 / 1e6;
    assert!(hidden > whole / 2.0 && hidden <= whole + 0.1, "{what}: {hidden} of {whole}");
    Ok(())
}
