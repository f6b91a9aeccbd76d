//! Requests as large as they may be, many at once: the router refuses them without taking memory for what it refuses.
use std::time::Duration;

use tandem_cluster_tests::{Cluster, Options};

/// Megabytes, see `make bench-large-requests` for what is measured.
const MOST_MB: f64 = 400.0;
const SOON: Duration = Duration::from_secs(10);

/// Just under the 8 MiB that a body may have: millions of token ids, or of whatever else takes more room than its text.
fn bodies() -> Vec<String> {
    let filled = |head: &str, item: &str, tail: &str| {
        let items = vec![item; (8_300_000 - head.len() - tail.len()) / (item.len() + 1)];
        format!("{head}{}{tail}", items.join(","))
    };
    vec![
        filled(r#"{"n": 128, "max_tokens": 1, "prompt": ["#, "7", "]}"),
        filled(r#"{"n": 128, "prompt": ["#, "[]", "]}"),
        filled(r#"{"n": 128, "prompt": ["#, r#""""#, "]}"),
        filled(r#"{"prompt": "a", "stop": ["#, r#""""#, "]}"),
        filled(r#"{"prompt": "a", "stop_token_ids": ["#, "1", "]}"),
        format!("{{{}, \"prompt\": \"a\"}}", (0..600_000).map(|n| format!("\"f{n}\":1")).collect::<Vec<_>>().join(",")),
    ]
}

#[tokio::test]
async fn sixteen_at_once_take_no_gigabyte() -> anyhow::Result<()> {
    let cluster = Cluster::start(Options { simulated: true, ..Options::default() }).await?;
    let idle = cluster.router.resident_mb().expect("a process");
    for body in bodies() {
        let calls = (0..16).map(|_| cluster.post("/v1/completions", body.clone()));
        let mut all = std::pin::pin!(futures::future::join_all(calls));
        let mut peak = idle;
        let answers = loop {
            tokio::select! {
                answers = &mut all => break answers,
                () = tokio::time::sleep(Duration::from_millis(5)) => {
                    peak = peak.max(cluster.router.resident_mb().expect("a process"));
                }
            }
        };
        let mut its_own_fault = 0;
        for answer in answers {
            let status = answer?.status().as_u16();
            // Its own fault or, where too many came at once, ours.
            assert!([400, 429].contains(&status), "{status} for {}", &body[..60]);
            its_own_fault += usize::from(status == 400);
        }
        assert!(its_own_fault > 0, "some of {} were read", &body[..60]);
        assert!(peak < MOST_MB, "{peak} MB at {}", &body[..60]);
    }
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
