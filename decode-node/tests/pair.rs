//! A prefill and a decode node in one process, simulated model, hand-offs over tcp, driven by gRPC as the router does.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is the failure message of a test")]
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tandem_kvtransfer::{Refusal, transport::Faults};
use tandem_node::{Node, NodeArgs};
use tandem_proto::v1::decode_client::DecodeClient;
use tandem_proto::v1::decode_command::Command as DecodeCommandKind;
use tandem_proto::v1::decode_event::Event as DecodeEventKind;
use tandem_proto::v1::prefill_client::PrefillClient;
use tandem_proto::v1::prefill_command::Command as PrefillCommandKind;
use tandem_proto::v1::prefill_event::Event as PrefillEventKind;
use tandem_proto::v1::{
    self, DecodeCommand, DecodeEvent, DecodeStart, PrefillCommand, PrefillEvent, RequestSpec, Role,
};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::service::Routes;
use tonic::transport::{Channel, Server};
use tonic::{Code, Status, Streaming};

const TRACEPARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const LEASE: Duration = Duration::from_secs(20);

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    node: NodeArgs,
}

struct Pair {
    prefill: Arc<Node>,
    decode: Arc<Node>,
    to_prefill: PrefillClient<Channel>,
    to_decode: DecodeClient<Channel>,
}

impl Pair {
    async fn start(faults: Faults, flags: &str) -> Self {
        let prefill = node(Role::Prefill, faults, flags).await;
        let decode = node(Role::Decode, Faults::default(), flags).await;
        let to_prefill = PrefillClient::new(serve(tandem_prefill_node::routes(prefill.clone())).await);
        let to_decode = DecodeClient::new(serve(tandem_decode_node::routes(decode.clone(), LEASE)).await);
        Self { prefill, decode, to_prefill, to_decode }
    }

    async fn open_decode(&mut self, spec: &RequestSpec) -> Result<Streaming<DecodeEvent>, Status> {
        let start = DecodeStart {
            spec: Some(spec.clone()),
            prefill_incarnation: self.prefill.incarnation.0,
            route_traceparent: TRACEPARENT.to_owned(),
        };
        let start = DecodeCommand { command: Some(DecodeCommandKind::Start(start)) };
        Ok(self.to_decode.generate(tokio_stream::iter([start])).await?.into_inner())
    }

    async fn open_prefill(
        &mut self,
        spec: &RequestSpec,
    ) -> Result<(mpsc::Sender<PrefillCommand>, Streaming<PrefillEvent>), Status> {
        let (commands, outbox) = mpsc::channel(2);
        let start = PrefillCommand { command: Some(PrefillCommandKind::Start(spec.clone())) };
        commands.send(start).await.unwrap();
        Ok((commands, self.to_prefill.prefill(ReceiverStream::new(outbox)).await?.into_inner()))
    }

    /// Both legs, as the router joins them.
    async fn run(&mut self, spec: &RequestSpec) -> Result<Answer, Status> {
        let mut decode = self.open_decode(spec).await?;
        let (commands, mut prefill) = self.open_prefill(spec).await?;
        // Refused when the answer ended with its first token.
        let _ = commands.send(deliver(ticket(&mut decode).await?)).await;
        let first = first_token(&mut prefill).await?;
        let mut answer = Answer { tokens: vec![first.token_id], ..Answer::default() };
        let delivered = async {
            match prefill.message().await?.and_then(|event| event.event) {
                Some(PrefillEventKind::Delivered(delivered)) => Ok(delivered),
                other => panic!("expected delivered, got {other:?}"),
            }
        };
        if first.finished.is_some() {
            answer.spans = delivered.await?.spans;
            return Ok(answer);
        }
        let (delivered, ()) = tokio::try_join!(delivered, collect(&mut decode, &mut answer))?;
        answer.spans.extend(delivered.spans);
        Ok(answer)
    }

    async fn local(&mut self, spec: &RequestSpec) -> Result<Answer, Status> {
        let mut stream = self.to_decode.local(spec.clone()).await?.into_inner();
        let mut answer = Answer::default();
        collect(&mut stream, &mut answer).await?;
        Ok(answer)
    }

    /// Ready when every block of both nodes is free again.
    async fn all_blocks_back(&self) {
        for node in [&self.prefill, &self.decode] {
            let pool = node.engine.pool();
            let all = tokio::time::timeout(Duration::from_secs(5), pool.reserve(pool.total())).await;
            all.unwrap_or_else(|_| panic!("{} {pool:?}", node.node_id)).unwrap();
        }
    }
}

#[derive(Debug, Default)]
struct Answer {
    tokens: Vec<u32>,
    reason: i32,
    verified: Option<v1::Verified>,
    spans: Vec<v1::Span>,
}

impl Answer {
    fn span(&self, name: &str) -> &v1::Span {
        self.spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("no span {name}"))
    }
}

async fn node(role: Role, faults: Faults, flags: &str) -> Arc<Node> {
    let flags = format!("node --router http://127.0.0.1:1 --simulated --transport tcp {flags}");
    let config = Cli::parse_from(flags.split_whitespace()).node.resolve(role).unwrap();
    Node::start(&config, faults).await.unwrap()
}

async fn serve(routes: Routes) -> Channel {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(Server::builder().add_routes(routes).serve_with_incoming(TcpListenerStream::new(listener)));
    Channel::from_shared(url).unwrap().connect().await.unwrap()
}

async fn ticket(decode: &mut Streaming<DecodeEvent>) -> Result<Vec<u8>, Status> {
    match decode.message().await?.and_then(|event| event.event) {
        Some(DecodeEventKind::Reserved(reserved)) => Ok(reserved.ticket),
        other => panic!("expected reserved, got {other:?}"),
    }
}

async fn first_token(prefill: &mut Streaming<PrefillEvent>) -> Result<v1::FirstToken, Status> {
    match prefill.message().await?.and_then(|event| event.event) {
        Some(PrefillEventKind::FirstToken(first)) => Ok(first),
        other => panic!("expected a first token, got {other:?}"),
    }
}

fn deliver(ticket: Vec<u8>) -> PrefillCommand {
    PrefillCommand { command: Some(PrefillCommandKind::Deliver(v1::Deliver { ticket })) }
}

async fn collect(stream: &mut Streaming<DecodeEvent>, answer: &mut Answer) -> Result<(), Status> {
    while let Some(event) = stream.message().await? {
        match event.event {
            Some(DecodeEventKind::Token(token)) => answer.tokens.push(token.token_id),
            Some(DecodeEventKind::Verified(verified)) => answer.verified = Some(verified),
            Some(DecodeEventKind::Finished(finished)) => {
                answer.reason = finished.reason;
                answer.spans.extend(finished.spans);
                return Ok(());
            }
            other => panic!("unexpected {other:?}"),
        }
    }
    Err(Status::internal("the stream ended without a finish"))
}

fn spec(rng: &mut StdRng, prompt_tokens: usize, max_tokens: u32) -> RequestSpec {
    let sampled = rng.random_bool(0.5);
    RequestSpec {
        request_id: "r".to_owned(),
        prompt: (0..prompt_tokens).map(|_| rng.random_range(3..1000)).collect(),
        sampling: Some(v1::Sampling {
            temperature: if sampled { 0.8 } else { 0.0 },
            top_p: 0.95,
            top_k: 50,
            seed: rng.random(),
            repetition_penalty: 1.2,
            frequency_penalty: 0.5,
            min_tokens: max_tokens.min(3),
            ..v1::Sampling::default()
        }),
        max_tokens,
        traceparent: TRACEPARENT.to_owned(),
        ..RequestSpec::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disaggregated_is_local_token_for_token() {
    let mut pair = Pair::start(Faults::default(), "").await;
    let mut rng = StdRng::seed_from_u64(1);
    for prompt_tokens in [1, 15, 16, 17, 100, 700, 1000] {
        for max_tokens in [1, 2, 40] {
            let spec = spec(&mut rng, prompt_tokens, max_tokens);
            let (apart, alone) = (pair.run(&spec).await.unwrap(), pair.local(&spec).await.unwrap());
            assert_eq!(apart.tokens, alone.tokens, "{prompt_tokens} + {max_tokens}");
        }
    }
    pair.all_blocks_back().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_spans_are_one_tree() {
    let mut pair = Pair::start(Faults::default(), "").await;
    let spec = spec(&mut StdRng::seed_from_u64(2), 600, 8);
    let answer = pair.run(&spec).await.unwrap();
    for (child, parent) in [
        ("prefill.queue", "prefill"),
        ("prefill.forward", "prefill"),
        ("kv.post", "prefill.forward"),
        ("kv.transfer", "kv.post"),
        ("decode.queue", "decode"),
    ] {
        assert_eq!(answer.span(child).parent_span_id, answer.span(parent).span_id, "{child}");
    }
    for root in ["kv.reserve", "prefill", "decode"] {
        assert_eq!(answer.span(root).parent_span_id, [0x00, 0xf0, 0x67, 0xaa, 0x0b, 0xa9, 0x02, 0xb7], "{root}");
    }
    assert!(answer.spans.iter().all(|span| span.error.is_empty() && span.start_unix_ns <= span.end_unix_ns));
    let transfer: Vec<_> = answer.span("kv.transfer").attributes.iter().map(|a| a.key.as_str()).collect();
    for key in ["bytes", "blocks", "gbps", "transport", "verify_ms"] {
        assert!(transfer.contains(&format!("tandem.kv.{key}").as_str()), "{transfer:?}");
    }
    assert_eq!(answer.span("prefill.queue").end_unix_ns, answer.span("prefill.forward").start_unix_ns);
    assert!(answer.span("prefill.forward").events.len() >= 2, "a chunk a step");
    let verified = answer.verified.unwrap();
    assert_eq!((verified.blocks, verified.bytes), (38, 38 * 4096));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_kv_is_refused_and_never_decoded() {
    let flip = Faults { flip_byte: true, ..Faults::default() };
    let truncate = Faults { truncate_push: true, ..Faults::default() };
    for (faults, refusal) in [(flip, Refusal::Corrupt(0)), (truncate, Refusal::Length)] {
        let mut pair = Pair::start(faults, "").await;
        let spec = spec(&mut StdRng::seed_from_u64(3), 100, 8);
        let mut decode = pair.open_decode(&spec).await.unwrap();
        let (commands, mut prefill) = pair.open_prefill(&spec).await.unwrap();
        commands.send(deliver(ticket(&mut decode).await.unwrap())).await.unwrap();
        first_token(&mut prefill).await.unwrap();
        let refused = collect(&mut decode, &mut Answer::default()).await.unwrap_err();
        assert_eq!(refused.code(), Code::DataLoss, "{refused:?}");
        prefill.message().await.unwrap_err();
        assert_eq!(pair.decode.transport.counters().refused_for(refusal), 1);
        assert!(pair.decode.work.outcomes().any(|outcome| outcome == ("corrupt", 1)));
        pair.all_blocks_back().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_goes_leaves_nothing_behind() {
    let mut pair = Pair::start(Faults::default(), "--simulated-step-us 2000").await;
    let spec = RequestSpec { ignore_eos: true, ..spec(&mut StdRng::seed_from_u64(4), 600, 2000) };
    for phase in ["granted", "computing", "computed", "decoding"] {
        let mut decode = pair.open_decode(&spec).await.unwrap();
        let ticket = ticket(&mut decode).await.unwrap();
        let (commands, mut prefill) = pair.open_prefill(&spec).await.unwrap();
        if phase == "computed" || phase == "decoding" {
            first_token(&mut prefill).await.unwrap();
        }
        if phase == "decoding" {
            commands.send(deliver(ticket)).await.unwrap();
            for _ in 0..5 {
                assert!(decode.message().await.unwrap().is_some());
            }
        }
        // HTTP/2 resets a stream when both directions are let go.
        drop(commands);
        if phase == "granted" {
            drop(prefill);
            drop(decode);
        } else {
            drop(decode);
            drop(prefill);
        }
        pair.all_blocks_back().await;
    }
    // And the pair still works.
    let short = RequestSpec { max_tokens: 5, ..spec.clone() };
    assert_eq!(pair.run(&short).await.unwrap().tokens, pair.local(&short).await.unwrap().tokens);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waits_are_bounded_by_the_deadline() {
    let mut pair = Pair::start(Faults::default(), "").await;
    let soon = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap() + Duration::from_millis(200);
    let late = RequestSpec {
        deadline_unix_ns: soon.as_nanos() as u64,
        ignore_eos: true,
        ..spec(&mut StdRng::seed_from_u64(5), 50, 8)
    };
    let mut decode = pair.open_decode(&late).await.unwrap();
    let (_commands, mut prefill) = pair.open_prefill(&late).await.unwrap();
    ticket(&mut decode).await.unwrap();
    first_token(&mut prefill).await.unwrap();
    // No ticket ever reaches the prefill node.
    let codes = [prefill.message().await.unwrap_err().code(), decode.message().await.unwrap_err().code()];
    assert_eq!(codes[0], Code::DeadlineExceeded);
    // The lease ends with the deadline: whichever timer fires first names it.
    assert!(matches!(codes[1], Code::DeadlineExceeded | Code::Unavailable), "{codes:?}");
    pair.all_blocks_back().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_requests_are_refused_at_once() {
    let mut pair = Pair::start(Faults::default(), "--kv-blocks 8").await;
    let mut rng = StdRng::seed_from_u64(6);
    let refused = pair.run(&RequestSpec { prompt: Vec::new(), ..spec(&mut rng, 1, 1) }).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    let too_large = spec(&mut rng, 300, 4);
    assert_eq!(pair.run(&too_large).await.unwrap_err().code(), Code::InvalidArgument);
    let (_commands, mut prefill) = pair.open_prefill(&too_large).await.unwrap();
    assert_eq!(prefill.message().await.unwrap_err().code(), Code::InvalidArgument);
    let fine = RequestSpec { ignore_eos: true, ..spec(&mut rng, 40, 4) };
    let (commands, mut prefill) = pair.open_prefill(&fine).await.unwrap();
    commands.send(deliver(vec![0xff; 9])).await.unwrap();
    let code = loop {
        match prefill.message().await {
            Ok(Some(_)) => {}
            other => break other.unwrap_err().code(),
        }
    };
    assert_eq!(code, Code::InvalidArgument);
    pair.all_blocks_back().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_requests_share_few_blocks() {
    let pair = Pair::start(Faults::default(), "--kv-blocks 16").await;
    let pair = Arc::new(pair);
    let mut running = tokio::task::JoinSet::new();
    for seed in 0..32 {
        let mut pair = Pair {
            prefill: pair.prefill.clone(),
            decode: pair.decode.clone(),
            to_prefill: pair.to_prefill.clone(),
            to_decode: pair.to_decode.clone(),
        };
        running.spawn(async move {
            let spec = spec(&mut StdRng::seed_from_u64(seed), 60, 30);
            assert_eq!(pair.run(&spec).await.unwrap().tokens, pair.local(&spec).await.unwrap().tokens);
        });
    }
    running.join_all().await;
    pair.all_blocks_back().await;
}
