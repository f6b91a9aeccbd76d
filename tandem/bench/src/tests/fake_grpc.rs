//! The generator against a `tandem.v1.Inference` in this process.
use std::pin::Pin;
use std::time::Duration;

use futures::{Stream, StreamExt, stream};
use tandem_client::connect::Tls;
use tandem_proto::v1::generate_response::Event;
use tandem_proto::v1::inference_server::{Inference, InferenceServer};
use tandem_proto::{Error, ErrorKind, v1};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};

use super::{kinds, part, target, watch};
use crate::client::grpc::GrpcClient;
use crate::client::{Asking, Client};
use crate::record::Outcome;
use crate::runner::{Load, Target, measure};

/// Answers by the name of the model.
struct Fake;

type Responses = Pin<Box<dyn Stream<Item = Result<v1::GenerateResponse, Status>> + Send>>;

#[tonic::async_trait]
impl Inference for Fake {
    type GenerateStream = Responses;

    async fn generate(&self, request: Request<v1::GenerateRequest>) -> Result<Response<Responses>, Status> {
        if request.metadata().get("authorization").is_none_or(|key| key != "Bearer k") {
            return Err(Status::unauthenticated("no key"));
        }
        let message = request.into_inner();
        let token = |index| event(Event::Token(v1::TokenChunk { index, ..v1::TokenChunk::default() }));
        let tokens = stream::iter((0..message.max_tokens.unwrap_or(0)).map(token));
        Ok(Response::new(match message.model.as_str() {
            "good" => Box::pin(tokens.chain(stream::iter([event(Event::Finish(finish(&message)))]))),
            "full" => return Err(Error::new(ErrorKind::Overloaded, "full").into()),
            "dies" => Box::pin(tokens.chain(stream::iter([Err(Status::aborted("a node died"))]))),
            "cut" => Box::pin(tokens),
            _ => Box::pin(stream::pending()),
        }))
    }
}

fn event(event: Event) -> Result<v1::GenerateResponse, Status> {
    Ok(v1::GenerateResponse { event: Some(event) })
}

fn finish(message: &v1::GenerateRequest) -> v1::Finish {
    let timings = v1::Timings {
        queue_ms: 1.0,
        predicted_ttft_ms: 7.0,
        prefill_instance: "prefill-0".into(),
        decode_instance: "decode-0".into(),
        ..v1::Timings::default()
    };
    v1::Finish {
        prompt_tokens: 10,
        cached_tokens: 4,
        completion_tokens: message.max_tokens.unwrap_or(0),
        timings: Some(timings),
        trace_id: "t2".into(),
        ..v1::Finish::default()
    }
}

async fn fake(model: &str) -> Target {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = tonic::transport::Server::builder().add_service(InferenceServer::new(Fake));
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    let asking = Asking { model: model.into(), ignore_eos: true, timeout: Duration::from_secs(5) };
    let mut metadata = MetadataMap::new();
    metadata.insert("authorization", "Bearer k".parse().unwrap());
    target(Client::Grpc(GrpcClient::connect(&url, &Tls::default(), 2, metadata, asking).await.unwrap()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_bring_their_phases() {
    let mut part = part(Load::Concurrency(4));
    part.bounds.requests = Some(20);
    let interval = measure(&fake("good").await, &part, &watch()).await.unwrap();
    assert_eq!(interval.records.len(), 20);
    for record in &interval.records {
        assert_eq!((record.outcome.clone(), record.chunks.len()), (Outcome::Ok, 3));
        assert_eq!((record.prompt_tokens, record.cached_tokens, record.max_tokens), (10, 4, 3));
        let phases = record.phases.unwrap();
        assert_eq!((phases.queue_ms, phases.predicted_ttft_ms, phases.local), (1.0, 7.0, false));
        assert_eq!(record.trace_id.as_deref(), Some("t2"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_answers_are_records() {
    let cases = [
        ("full", "Refused { retry_after_s: Some(1.0) }"),
        ("dies", "grpc Aborted"),
        ("cut", "cut"),
        ("hangs", "timeout"),
    ];
    for (model, wanted) in cases {
        let mut part = part(Load::Concurrency(2));
        part.bounds.requests = Some(2);
        part.bounds.timeout = Duration::from_millis(100);
        let interval = measure(&fake(model).await, &part, &watch()).await.unwrap();
        assert_eq!(kinds(&interval), [wanted; 2], "{model}");
    }
}
