//! What a node's `/metrics` has: families with their types and helps, and series with their labels. Dashboards, rules
//! and documents know them by these; a change shows in `tests/data`. `TANDEM_WRITE_METRICS=1` writes the files instead.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is the failure message of a test")]
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use axum::body::{Body, to_bytes};
use axum::http::Request;
use clap::Parser;
use tandem_kvtransfer::Faults;
use tandem_node::{Node, NodeArgs, admin};
use tandem_proto::v1::Role;
use tower::ServiceExt;

const OPEN_METRICS: &str = "application/openmetrics-text;version=1.0.0";

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    node: NodeArgs,
}

async fn node(role: Role) -> Arc<Node> {
    let flags = "node --router http://127.0.0.1:1 --simulated --transport tcp --kv-blocks 7 --node-id n0";
    let config = Cli::parse_from(flags.split_whitespace()).node.resolve(role).unwrap();
    Node::start(&config, Faults::default()).await.unwrap()
}

/// The content type and the text for a scraper that accepts this.
async fn scrape(node: &Arc<Node>, accept: &str) -> (String, String) {
    let request = Request::get("/metrics").header("accept", accept).body(Body::empty()).unwrap();
    let response = admin::routes(node.clone()).oneshot(request).await.unwrap();
    let kind = response.headers()["content-type"].to_str().unwrap().to_owned();
    (kind, String::from_utf8(to_bytes(response.into_body(), 1 << 20).await.unwrap().to_vec()).unwrap())
}

/// Without values and order, and each label where it says something of its own.
fn shape(text: &str) -> String {
    let line = |line: &str| {
        if line.starts_with('#') {
            return line.to_owned();
        }
        let (series, value) = line.rsplit_once(' ').unwrap();
        value.parse::<f64>().unwrap();
        let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
        let mut labels: Vec<&str> = labels.trim_end_matches('}').split(',').collect();
        labels.sort_unstable();
        format!("{name} {}", labels.join(" "))
    };
    let lines: BTreeSet<String> = text.lines().map(line).collect();
    lines.into_iter().map(|line| line + "\n").collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn families_and_series_are_those_that_dashboards_read() {
    for (role, name) in [(Role::Prefill, "prefill"), (Role::Decode, "decode")] {
        let node = node(role).await;
        let (kind, classic) = scrape(&node, "*/*").await;
        assert_eq!(kind, "text/plain; version=0.0.4; charset=utf-8");
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/metrics-{name}.txt"));
        if std::env::var_os("TANDEM_WRITE_METRICS").is_some() {
            std::fs::write(&path, shape(&classic)).unwrap();
        }
        assert_eq!(shape(&classic), std::fs::read_to_string(&path).unwrap(), "{name}");
        let (kind, open) = scrape(&node, OPEN_METRICS).await;
        assert!(kind.starts_with("application/openmetrics-text; version=1.0.0") && open.ends_with("# EOF\n"), "{kind}");
        // Counters are called otherwise there, and their series are not.
        let series =
            |text: &str| shape(text).lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect();
        let (open, classic): (Vec<String>, Vec<String>) = (series(&open), series(&classic));
        assert_eq!(open, classic, "{name}");
    }
}
