//! What a request leaves in metrics, and whether its trace is kept.
use tandem_proto::{TraceContext, TraceState};
use tandem_telemetry::Collector;

use super::*;
use crate::caller::Parent;
use crate::select::{self, LocalPrefill};

/// The value of the series that begins so.
fn value(service: &crate::api::Service, series: &str) -> f64 {
    let text = service.metrics_text(None).1;
    let line = text.lines().find(|line| line.starts_with(series)).unwrap_or_else(|| panic!("{series}\n{text}"));
    line.rsplit_once(' ').unwrap().1.parse().unwrap()
}

#[tokio::test]
async fn a_request_runs_or_waits_whatever_nodes_report() {
    let mut cluster = Cluster::start(Limits { max_inflight: 2, ..Limits::default() }).await;
    let stream = cluster.service.generate(request()).unwrap();
    let legs = cluster.legs().await;
    // Both have it, and neither has begun.
    let load = v1::Load { waiting: 1, free_blocks: 64, ..v1::Load::default() };
    for node in [&cluster.prefill.node, &cluster.decode.node] {
        cluster.service.membership().report(node.session, &load, clock::now());
    }
    let states = |service: &crate::api::Service| {
        ["running", "waiting"].map(|state| value(service, &format!("vllm:num_requests_{state}{{")))
    };
    assert_eq!(states(&cluster.service), [1.0, 0.0]);
    let _more = [cluster.service.generate(request()).unwrap(), cluster.service.generate(request()).unwrap()];
    let _legs = cluster.legs().await;
    assert_eq!(states(&cluster.service), [2.0, 1.0], "one has no slot");
    drop((stream, legs));
}

#[tokio::test]
async fn tokens_of_other_caches_are_counted_when_they_are_asked_for_and_when_they_come() {
    let mut cluster = Cluster::start(one_attempt()).await;
    let counted = |service: &crate::api::Service| {
        ["queries", "hits"].map(|what| value(service, &format!("vllm:external_prefix_cache_{what}_total{{")))
    };
    let stream = cluster.service.generate(request()).unwrap();
    let (mut prefill, _, decode, _) = cluster.legs().await;
    let reserved = v1::Reserved { ticket: ticket("d0"), blocks: 2, held_blocks: 1 };
    decode.send(v1::DecodeEvent { event: Some(v1::decode_event::Event::Reserved(reserved)) }).await;
    assert_eq!(told(&mut prefill).await, deliver("d0"));
    assert_eq!(counted(&cluster.service), [4.0, 0.0], "20 tokens less a block");
    prefill.send(first_token(id('a'), None)).await;
    decode.send(verified()).await;
    decode.send(finished(Length, vec![])).await;
    assert!(read(stream).await.2.is_ok());
    assert_eq!(counted(&cluster.service), [4.0, 4.0]);

    let stream = cluster.service.generate(request()).unwrap();
    let (mut prefill, _, decode, _) = cluster.legs().await;
    decode.send(super::attempt_protocol::tests::reserved()).await;
    told(&mut prefill).await;
    decode.fail(Status::data_loss("checksum of block 0")).await;
    assert!(read(stream).await.2.is_err());
    let failed = "tandem_handoffs_total{role=\"router\",instance=\"router-test\",state=\"aborted\"}";
    let failed = [failed, "vllm:nixl_num_failed_transfers_total{"].map(|series| value(&cluster.service, series));
    assert_eq!(failed, [1.0, 1.0], "though no other attempt came after it");
    // Nobody is left to say how large blocks are.
    for node in [&cluster.prefill.node, &cluster.decode.node] {
        cluster.service.membership().leave(node.session, "gone");
    }
    assert_eq!(counted(&cluster.service), [24.0, 4.0], "what failed was asked for, and nothing goes back");
}

#[tokio::test]
async fn every_histogram_of_a_request_points_to_its_trace() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let stream = cluster.service.generate(request()).unwrap();
    let (mut prefill, _, decode, _) = cluster.legs().await;
    hand_off(&mut prefill, &decode, 'a').await;
    decode.send(token(id('b'))).await;
    decode.send(finished(Length, vec![])).await;
    let Ok(GenerationEvent::Finish { trace_id, .. }) = read(stream).await.2 else { panic!("no end") };
    let text = cluster.service.metrics_text(Some("application/openmetrics-text")).1;
    let exemplar = format!("# {{trace_id=\"{trace_id}\"}}");
    let histograms = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" histogram"));
    let filled = |name: &&str| {
        let count = format!("{name}_count");
        text.lines().any(|line| line.starts_with(&count) && !line.ends_with(" 0"))
    };
    let filled: Vec<&str> = histograms.filter(filled).collect();
    assert!(filled.len() >= 19, "{filled:?}");
    for name in filled {
        let bucket = format!("{name}_bucket");
        assert!(text.lines().any(|line| line.starts_with(&bucket) && line.contains(&exemplar)), "{name}\n{text}");
    }
}

/// A request that nobody samples and that ends well, by objectives of these milliseconds.
async fn answered(exporter: Exporter, [ttft_objective_ms, tpot_objective_ms]: [f64; 2]) -> Cluster {
    let local = LocalPrefill::Never;
    let choice = select::Settings { ttft_objective_ms, tpot_objective_ms, local, ..select::Settings::default() };
    let service = fakes::router_telling(exporter, Limits::default(), choice);
    let mut cluster = Cluster::of(service).await;
    let parent = TraceContext { trace_id: [3; 16], span_id: [4; 8], sampled: false };
    let parent = Some(Parent { span: parent, state: TraceState::default() });
    let stream = cluster.service.generate(GenerationRequest { parent, ..request() }).unwrap();
    let (mut prefill, spec, decode, start) = cluster.legs().await;
    hand_off(&mut prefill, &decode, 'a').await;
    prefill.send(delivered(vec![node_span(&spec.traceparent, "prefill")])).await;
    decode.send(token(id('b'))).await;
    let stranger = v1::Span { trace_id: vec![9; 16], ..node_span(&spec.traceparent, "decode") };
    let span = node_span(&start.spec.unwrap().traceparent, "decode");
    decode.send(finished(Length, vec![span, stranger])).await;
    assert!(read(stream).await.2.is_ok());
    // The client does not wait for the collector; the drain does.
    while value(&cluster.service, "tandem_inflight_requests{") > 0.0 {
        tokio::task::yield_now().await;
    }
    cluster
}

/// Spans that went out of it. An exporter to nowhere counts what it was given, once it is shut down, as dropped.
async fn exported(ttft_objective_ms: f64, tpot_objective_ms: f64) -> u64 {
    let exporter = Exporter::start("tandem-router", "r0", &Collector::at("http://127.0.0.1:1")).unwrap();
    answered(exporter.clone(), [ttft_objective_ms, tpot_objective_ms]).await;
    exporter.shutdown().await;
    exporter.dropped()
}

#[tokio::test]
async fn an_answer_counts_by_the_objectives_that_it_kept() {
    for (objectives, expected) in
        [([3e6, 3e6], "met"), ([0.0, 3e6], "ttft_missed"), ([3e6, 0.0], "tpot_missed"), ([0.0, 0.0], "both_missed")]
    {
        let cluster = answered(Exporter::disabled(), objectives).await;
        let counted = |of: &str| {
            let series =
                format!("tandem_answers_total{{role=\"router\",instance=\"router-test\",objectives=\"{of}\"}}");
            value(&cluster.service, &series)
        };
        for of in ["met", "ttft_missed", "tpot_missed", "both_missed"] {
            assert_eq!(counted(of), f64::from(u8::from(of == expected)), "{of} of {objectives:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_request_is_kept_with_its_nodes_spans() {
    assert_eq!(exported(3e6, 3e6).await, 0);
    assert_eq!(exported(0.0, 3e6).await, 6 + 2);
    assert_eq!(exported(3e6, 0.0).await, 6 + 2);
}

#[tokio::test]
async fn a_client_that_takes_nothing_is_counted_once() {
    let mut cluster = Cluster::start(Limits { client_stall: Duration::from_millis(20), ..Limits::default() }).await;
    let stream = cluster.service.generate(GenerationRequest { max_tokens: 100, ..request() }).unwrap();
    let (mut prefill, _, decode, _) = cluster.legs().await;
    hand_off(&mut prefill, &decode, 'a').await;
    for _ in 0..CLIENT_QUEUE_EVENTS {
        decode.send(token(id('b'))).await;
    }
    decode.cancelled().await;
    let ended = async {
        while value(&cluster.service, "tandem_inflight_requests{") > 0.0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), ended).await.expect("the request ends");
    assert_eq!(value(&cluster.service, "tandem_client_stalls_total{"), 1.0);
    drop(stream);
}

#[tokio::test]
async fn the_queue_has_its_series_while_nobody_waits() {
    let series =
        |tenant: &str| format!("tandem_queue_depth{{role=\"router\",instance=\"router-test\",tenant=\"{tenant}\"}}");
    let cluster = Cluster::start(Limits::default()).await;
    assert_eq!(value(&cluster.service, &series("default")), 0.0);
    let cluster = Cluster::with_tenants(Limits::default(), &["alice", "bobby"]).await;
    for tenant in ["alice", "bobby"] {
        assert_eq!(value(&cluster.service, &series(tenant)), 0.0);
    }
    assert!(!cluster.service.metrics_text(None).1.contains(&series("default")), "nobody has that name there");
}
