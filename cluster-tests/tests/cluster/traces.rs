//! One request, one tree of spans over three services, in a collector and in the router; its parts add up to TTFT.
use std::collections::BTreeSet;
use std::time::Duration;

use tandem_cluster_tests::client::{ask, metric, rest, text, token_ids};
use tandem_cluster_tests::{Cluster, Options};
use tonic::Request;

use crate::collector::{Collector, EXPORTED, Span, Value};

const TRACE_ID: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT_ID: &str = "00f067aa0ba902b7";
const TRACE_STATE: &str = "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE";

impl Span {
    fn ms(&self) -> f64 {
        (self.end - self.start) as f64 / 1e6
    }

    fn number(&self, key: &str) -> f64 {
        let names = [key.to_owned(), format!("kv.{key}"), format!("tandem.kv.{key}"), format!("tandem.{key}")];
        match names.iter().find_map(|name| self.attributes.get(name)) {
            Some(Value::IntValue(number)) => *number as f64,
            Some(Value::DoubleValue(number)) => *number,
            other => panic!("{key} of {} is {other:?}: {:?}", self.name, self.attributes),
        }
    }
}

/// Asks with a parent of our own, and collects until the tree is whole.
async fn traced(prompt_tokens: usize) -> anyhow::Result<(Cluster, Vec<Span>, tandem_proto::v1::Finish)> {
    let collector = Collector::start().await?;
    let mut options = Options { router_args: collector.flags(), ..Options::default() };
    options.node_args.extend(collector.flags());
    let cluster = Cluster::start(options).await?;
    let prompt: Vec<u32> = (0..prompt_tokens as u32).map(|index| 1000 + index * 31 % 40_000).collect();
    let mut request = ask(token_ids(prompt), 8);
    request.ignore_eos = true;
    let mut request = Request::new(request);
    request.metadata_mut().insert("traceparent", format!("00-{TRACE_ID}-{PARENT_ID}-01").parse()?);
    request.metadata_mut().insert("tracestate", TRACE_STATE.parse()?);
    let grpc = cluster.router.url("grpc");
    let mut client = tandem_proto::v1::inference_client::InferenceClient::connect(grpc).await?;
    let answer = rest(client.generate(request).await?.into_inner()).await?;
    let whole = |spans: &Vec<Span>| is_whole(spans).then(|| spans.clone());
    let spans = collector.until("the whole tree", |got| whole(&got.spans)).await;
    assert!(spans.iter().all(|span| span.trace == TRACE_ID && span.state == TRACE_STATE), "{spans:#?}");
    Ok((cluster, spans, answer.finish))
}

/// Every phase of every service. The services' exporters send on their own, and the router's `prefill` and `decode`
/// have namesakes on the nodes: a name alone does not say that a node's last batch is there.
const PHASES: [(&str, &str); 13] = [
    ("tandem-router", "queue"),
    ("tandem-router", "route"),
    ("tandem-router", "prefill"),
    ("tandem-router", "transfer"),
    ("tandem-router", "decode"),
    ("tandem-prefill", "prefill"),
    ("tandem-prefill", "prefill.queue"),
    ("tandem-prefill", "prefill.forward"),
    ("tandem-prefill", "kv.post"),
    ("tandem-decode", "kv.reserve"),
    ("tandem-decode", "kv.transfer"),
    ("tandem-decode", "decode"),
    ("tandem-decode", "decode.queue"),
];

/// All of [`PHASES`], and every parent is there.
fn is_whole(spans: &[Span]) -> bool {
    let ids: BTreeSet<&str> = spans.iter().map(|span| span.id.as_str()).chain([PARENT_ID]).collect();
    let has = |(service, name): (&str, &str)| spans.iter().any(|span| span.service == service && span.name == name);
    PHASES.into_iter().all(has) && spans.iter().all(|span| ids.contains(span.parent.as_str()))
}

#[tokio::test]
async fn one_tree_over_three_services_that_adds_up() -> anyhow::Result<()> {
    let (cluster, spans, finish) = traced(300).await?;
    assert_eq!(finish.trace_id, TRACE_ID);
    let roots: Vec<&Span> = spans.iter().filter(|span| span.parent == PARENT_ID).collect();
    assert_eq!(roots.len(), 1, "{roots:#?}");
    let root = roots[0];
    let services: BTreeSet<&str> = spans.iter().map(|span| span.service.as_str()).collect();
    assert_eq!(services, BTreeSet::from(["tandem-router", "tandem-prefill", "tandem-decode"]));
    // The phases of the first token tile TTFT.
    let phase = |name: &str| {
        let found: Vec<&Span> = spans.iter().filter(|span| span.name == name && span.parent == root.id).collect();
        assert_eq!(found.len(), 1, "{name}: {found:#?}");
        found[0]
    };
    let (queue, route, prefill) = (phase("queue"), phase("route"), phase("prefill"));
    let (transfer, decode) = (phase("transfer"), phase("decode"));
    let ttft = root.number("tandem.ttft_ms");
    let sum = queue.ms() + route.ms() + prefill.ms();
    assert!((sum - ttft).abs() <= ttft * 0.01, "queue + route + prefill = {sum} ms, TTFT {ttft} ms");
    for (before, after) in [(queue, route), (route, prefill), (prefill, transfer), (transfer, decode)] {
        assert!(before.end < after.start, "{} and {} overlap", before.name, after.name);
    }
    // Jaeger takes a child outside of its parent for one with a wrong clock; a copy outlives its post.
    for span in spans.iter().filter(|span| span.id != root.id) {
        let parent = spans.iter().find(|parent| parent.id == span.parent).expect("a parent");
        let outlives = span.name == "kv.transfer";
        assert!(span.start >= parent.start && (span.end <= parent.end || outlives), "{span:#?} in {parent:#?}");
    }
    // The same figures in the last message.
    let timings = finish.timings.clone().unwrap_or_default();
    assert!(
        (timings.queue_ms + timings.route_ms + timings.prefill_ms - timings.ttft_ms).abs() <= timings.ttft_ms * 0.01
    );
    // The copy itself.
    let copy = spans.iter().find(|span| span.name == "kv.transfer").expect("kv.transfer");
    assert_eq!(copy.service, "tandem-decode");
    assert_eq!(transfer.links, [copy.id.as_str()]);
    assert_eq!(copy.number("blocks"), 19.0);
    assert_eq!(copy.number("bytes"), timings.kv_bytes as f64);
    assert!(copy.number("gbps") > 0.0);
    let names = ["transport", "kv.transport", "tandem.kv.transport"];
    let transport = names.iter().find_map(|name| copy.attributes.get(*name));
    assert!(matches!(transport, Some(Value::StringValue(name)) if name.starts_with("ucx/")), "{transport:?}");
    shown_by_the_router(&cluster, &spans).await
}

/// The router shows the same trace without a collector.
async fn shown_by_the_router(cluster: &Cluster, spans: &[Span]) -> anyhow::Result<()> {
    for id in [TRACE_ID, "last"] {
        let trace: serde_json::Value = cluster.get(&format!("/api/traces/{id}")).await?.json().await?;
        assert_eq!(trace["trace_id"], TRACE_ID);
        let listed = trace["spans"].as_array().expect("spans");
        let shown: BTreeSet<&str> = listed.iter().filter_map(|span| span["span_id"].as_str()).collect();
        let collected: BTreeSet<&str> = spans.iter().map(|span| span.id.as_str()).collect();
        assert_eq!(shown, collected);
    }
    Ok(())
}

/// An answer that a stop string or its first token ends is an answer: no node counts or traces a failure.
#[tokio::test]
async fn an_answer_that_ends_early_is_no_failure() -> anyhow::Result<()> {
    let cluster = Cluster::start(Options::default()).await?;
    let mut stopped = ask(text("The capital of France is"), 200);
    stopped.stop = vec![".".to_owned()];
    stopped.ignore_eos = true;
    for (request, names) in [
        (stopped, ["kv.reserve", "kv.transfer", "prefill.forward"].as_slice()),
        (ask(text("The capital of France is"), 1), ["kv.reserve", "prefill.forward"].as_slice()),
    ] {
        let answer = cluster.answer(request).await?;
        // The stopped node's report comes behind the answer.
        let spans = async {
            loop {
                let path = format!("/api/traces/{}", answer.finish.trace_id);
                let trace: serde_json::Value = cluster.get(&path).await?.json().await?;
                let spans = trace["spans"].as_array().expect("spans").clone();
                if names.iter().all(|name| spans.iter().any(|span| span["name"] == *name)) {
                    return anyhow::Ok(spans);
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let spans = tokio::time::timeout(EXPORTED, spans).await??;
        assert!(spans.iter().all(|span| span["error"] == ""), "{spans:#?}");
    }
    for node in [&cluster.prefill, &cluster.decode] {
        for none in ["outcome=\"cancelled\"", "state=\"aborted\"", "tandem_handoff_refusals_total"] {
            assert_eq!(metric(node, none).await?, 0.0, "{none}");
        }
        assert_eq!(metric(node, "outcome=\"ok\"").await?, 2.0);
    }
    assert_eq!(metric(&cluster.decode, "state=\"released\"").await?, 1.0);
    Ok(())
}
