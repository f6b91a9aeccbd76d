//! Spans against an in-process OTLP collector, and against none.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is the failure message of a test")]
use std::sync::Arc;
use std::time::{Duration, Instant};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::any_value;
use tandem_proto::TraceContext;
use tandem_proto::spans::unpack;
use tandem_telemetry::{Collector, Exporter, Kind, MetricsExport, Phase, Value};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::TcpListenerStream;

/// The header that it wants, and what comes.
struct Traces(Option<&'static str>, mpsc::Sender<ExportTraceServiceRequest>);

#[tonic::async_trait]
impl TraceService for Traces {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<ExportTraceServiceResponse>, tonic::Status> {
        if self.0.is_some_and(|key| request.metadata().get(key).is_none_or(|value| value != "let me in")) {
            return Err(tonic::Status::unauthenticated("who is it?"));
        }
        self.1.send(request.into_inner()).await.map_err(|_| tonic::Status::unavailable("closed"))?;
        Ok(tonic::Response::new(ExportTraceServiceResponse::default()))
    }
}

async fn collector(header: Option<&'static str>) -> (String, mpsc::Receiver<ExportTraceServiceRequest>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let endpoint = format!("http://{}", listener.local_addr().expect("bound"));
    let (sender, receiver) = mpsc::channel(64);
    let server = tonic::transport::Server::builder().add_service(TraceServiceServer::new(Traces(header, sender)));
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    (endpoint, receiver)
}

fn span(number: u64, service: &str, instance: &str) -> Vec<u8> {
    let mut context = TraceContext { trace_id: [7; 16], span_id: [0; 8], sampled: true };
    context.span_id = (number + 1).to_be_bytes();
    let start = Instant::now();
    Phase::new("kv.transfer", Kind::Consumer, context, Some([9; 8]))
        .attr("bytes", 4096_u64)
        .attr("transport", "mem")
        .attr("reasons", vec!["stop".to_owned()])
        .event("landed", start, [("index", Value::from(number))])
        .link(TraceContext { span_id: [8; 8], ..context })
        .error("cut")
        .end(service, instance, start, start + Duration::from_millis(3))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_span_arrives_whole() {
    let (endpoint, mut received) = collector(None).await;
    let exporter = Exporter::start("tandem-decode", "d0", &Collector::at(endpoint)).unwrap();
    let packed = span(0, "tandem-decode", "d0");
    let sent = unpack(&packed).next().unwrap();
    exporter.export(packed);
    exporter.shutdown().await;
    let request = received.recv().await.unwrap();
    let resource = &request.resource_spans[0];
    let named: Vec<_> = resource.resource.as_ref().unwrap().attributes.iter().map(|a| a.key.as_str()).collect();
    assert!(named.contains(&"service.name") && named.contains(&"service.instance.id"), "{named:?}");
    let got = &resource.scope_spans[0].spans[0];
    assert_eq!((&got.trace_id, &got.span_id, &got.parent_span_id), (&vec![7; 16], &sent.span_id, &vec![9; 8]));
    assert_eq!((got.start_time_unix_nano, got.end_time_unix_nano), (sent.start_unix_ns, sent.end_unix_ns));
    assert_eq!((got.name.as_str(), got.kind), ("kv.transfer", 5));
    assert_eq!((got.attributes.len(), got.events.len()), (3, 1));
    let reasons = got.attributes[2].value.as_ref().and_then(|value| value.value.as_ref());
    assert!(matches!(reasons, Some(any_value::Value::ArrayValue(list)) if list.values.len() == 1), "{reasons:?}");
    let linked: Vec<_> = got.links.iter().map(|link| (link.trace_id.clone(), link.span_id.clone())).collect();
    assert_eq!(linked, [(vec![7; 16], vec![8; 8])]);
    let status = got.status.as_ref().unwrap();
    assert_eq!((status.message.as_str(), status.code, got.flags), ("cut", 2, 0x301));
    assert_eq!(exporter.dropped(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn spans_are_passed_on_in_the_name_of_their_process() {
    let (endpoint, mut received) = collector(None).await;
    let exporter = Exporter::start("tandem-router", "r0", &Collector::at(endpoint)).unwrap();
    let of_nodes = [(1, "d0"), (2, "d1"), (3, "d0")].map(|(number, of)| span(number, "tandem-decode", of)).concat();
    exporter.export([of_nodes, span(0, "tandem-router", "r0")].concat());
    exporter.shutdown().await;
    let mut told = Vec::new();
    while let Ok(request) = received.try_recv() {
        for spans in request.resource_spans {
            let attributes = spans.resource.unwrap().attributes;
            let text = |key: &str| {
                let value = attributes.iter().find(|attribute| attribute.key == key)?.value.clone()?.value?;
                if let any_value::Value::StringValue(text) = value { Some(text) } else { None }
            };
            let who = format!("{} {}", text("service.name").unwrap(), text("service.instance.id").unwrap());
            told.extend(spans.scope_spans[0].spans.iter().map(|span| (span.span_id[7], who.clone())));
        }
    }
    told.sort();
    let expected = [(1, "tandem-router r0"), (2, "tandem-decode d0"), (3, "tandem-decode d1"), (4, "tandem-decode d0")];
    assert_eq!(told, expected.map(|(number, who)| (number, who.to_owned())));
    assert_eq!(exporter.dropped(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_gets_the_headers_that_it_wants() {
    for (headers, expected) in [("x-key=let%20me%20in", 0), ("x-key=other", 1)] {
        let (endpoint, mut received) = collector(Some("x-key")).await;
        let to = Collector::at(endpoint).with_headers(headers).unwrap();
        let exporter = Exporter::start("tandem-decode", "d0", &to).unwrap();
        exporter.export(span(0, "tandem-decode", "d0"));
        exporter.shutdown().await;
        assert_eq!((exporter.dropped(), received.try_recv().is_err()), (expected, expected == 1), "{headers}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_collector_drops_and_counts() {
    let exporter = Exporter::start("tandem-decode", "d0", &Collector::at("http://127.0.0.1:1")).unwrap();
    for number in 0..10_000 {
        exporter.export(span(number, "tandem-decode", "d0"));
    }
    exporter.export(Vec::new());
    // A span without a trace.
    exporter.export(vec![10, 0]);
    exporter.shutdown().await;
    assert_eq!(exporter.dropped(), 10_001);
}

#[tokio::test]
async fn a_bad_endpoint_is_a_clear_error() {
    let error = Exporter::start("s", "i", &Collector::at("not a url")).unwrap_err();
    assert!(error.to_string().contains("not a url"), "{error}");
}

/// Text that says when somebody asks for it, and that nobody asks any more.
fn asked() -> (Arc<dyn Fn() -> String + Send + Sync>, mpsc::UnboundedReceiver<()>) {
    let (tell, told) = mpsc::unbounded_channel();
    let text = move || {
        let _ = tell.send(());
        "# TYPE tandem_nodes gauge\ntandem_nodes 1\n".to_owned()
    };
    (Arc::new(text), told)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_takes_no_metrics_is_asked_once() {
    let (endpoint, _received) = collector(None).await;
    let (text, mut told) = asked();
    let often = Collector::at(endpoint).with_metrics_every(Duration::from_millis(5));
    let export = MetricsExport::start("tandem-router", "r0", &often, text).unwrap();
    assert_eq!((told.recv().await, told.recv().await), (Some(()), None));
    export.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_collector_is_asked_again_and_holds_up_no_end() {
    let (text, mut told) = asked();
    let often = Collector::at("http://127.0.0.1:1").with_metrics_every(Duration::from_millis(5));
    let export = MetricsExport::start("tandem-router", "r0", &often, text).unwrap();
    for _ in 0..3 {
        told.recv().await.unwrap();
    }
    tokio::time::timeout(Duration::from_secs(10), export.shutdown()).await.unwrap();
    while told.recv().await.is_some() {}
    let (text, _) = asked();
    let error = MetricsExport::start("s", "i", &Collector::at("not a url"), text).unwrap_err();
    assert!(error.to_string().contains("not a url"), "{error}");
}
