//! The nodes of a test, and the router's part in it, by gRPC.
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use rand::Rng;
use rand::rngs::StdRng;
use tandem_kvtransfer::Faults;
use tandem_kvtransfer::mem::{MemFaults, MemNetwork, MemTransport};
use tandem_kvtransfer::{Arena, Transport};
use tandem_node::{Node, NodeArgs, NodeConfig};
use tandem_prefill_node::Settings;
use tandem_proto::spans::unpack;
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
use tonic::{Status, Streaming};

pub const TRACEPARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
pub const PREFILL_TRACEPARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b8-01";
pub const LEASE: Duration = Duration::from_secs(20);

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    node: NodeArgs,
}

pub struct Pair {
    pub prefill: Arc<Node>,
    pub decode: Arc<Node>,
    pub to_prefill: PrefillClient<Channel>,
    pub to_decode: DecodeClient<Channel>,
}

impl Pair {
    pub async fn start(faults: Faults, flags: &str) -> Self {
        let prefill = node(Role::Prefill, faults, flags).await;
        let decode = node(Role::Decode, Faults::default(), flags).await;
        let to_prefill = PrefillClient::new(serve(tandem_prefill_node::routes(prefill.clone())).await);
        let to_decode = DecodeClient::new(serve(tandem_decode_node::routes(decode.clone(), LEASE)).await);
        Self { prefill, decode, to_prefill, to_decode }
    }

    pub async fn open_decode(&mut self, spec: &RequestSpec) -> Result<Streaming<DecodeEvent>, Status> {
        Ok(self.to_decode.generate(tokio_stream::iter([self.start_decode(spec)])).await?.into_inner())
    }

    pub async fn open_stoppable_decode(
        &mut self,
        spec: &RequestSpec,
    ) -> Result<(mpsc::Sender<DecodeCommand>, Streaming<DecodeEvent>), Status> {
        let (commands, outbox) = mpsc::channel(2);
        commands.send(self.start_decode(spec)).await.unwrap();
        Ok((commands, self.to_decode.generate(ReceiverStream::new(outbox)).await?.into_inner()))
    }

    pub fn start_decode(&self, spec: &RequestSpec) -> DecodeCommand {
        let start = DecodeStart {
            spec: Some(spec.clone()),
            prefill_incarnation: self.prefill.incarnation().0,
            request_traceparent: TRACEPARENT.to_owned(),
            local: None,
            transport: String::new(),
        };
        DecodeCommand { command: Some(DecodeCommandKind::Start(start)) }
    }

    pub async fn open_prefill(
        &mut self,
        spec: &RequestSpec,
    ) -> Result<(mpsc::Sender<PrefillCommand>, Streaming<PrefillEvent>), Status> {
        let (commands, outbox) = mpsc::channel(4);
        let start = PrefillCommand { command: Some(PrefillCommandKind::Start(spec.clone())) };
        commands.send(start).await.unwrap();
        Ok((commands, self.to_prefill.prefill(ReceiverStream::new(outbox)).await?.into_inner()))
    }

    /// Both legs, as the router joins them.
    pub async fn run(&mut self, spec: &RequestSpec) -> Result<Answer, Status> {
        let mut decode = self.open_decode(spec).await?;
        let (commands, mut prefill) = self.open_prefill(spec).await?;
        // Refused when the answer ended with its first token.
        let _ = commands.send(deliver(ticket(&mut decode).await?)).await;
        let first = first_token(&mut prefill).await?;
        let cached_tokens = first.cached_tokens;
        let mut answer = Answer { tokens: vec![first.token_id], cached_tokens, ..Answer::default() };
        let delivered = delivered(&mut prefill);
        if first.finished.is_some() {
            answer.spans.extend(unpack(&delivered.await?.spans));
            return Ok(answer);
        }
        let (delivered, ()) = tokio::try_join!(delivered, collect(&mut decode, &mut answer))?;
        answer.spans.extend(unpack(&delivered.spans));
        Ok(answer)
    }

    /// The decode call of a local plan. It can be stopped as long as the sender is there.
    pub async fn open_local(
        &mut self,
        spec: &RequestSpec,
    ) -> Result<(mpsc::Sender<DecodeCommand>, Streaming<DecodeEvent>), Status> {
        let local = Some(v1::LocalPrefill { traceparent: PREFILL_TRACEPARENT.to_owned() });
        let start = DecodeStart { spec: Some(spec.clone()), local, ..DecodeStart::default() };
        let (commands, outbox) = mpsc::channel(2);
        commands.send(DecodeCommand { command: Some(DecodeCommandKind::Start(start)) }).await.unwrap();
        Ok((commands, self.to_decode.generate(ReceiverStream::new(outbox)).await?.into_inner()))
    }

    /// The same request by the decode node alone.
    pub async fn local(&mut self, spec: &RequestSpec) -> Result<Answer, Status> {
        let (_, mut stream) = self.open_local(spec).await?;
        let mut answer = Answer::default();
        collect(&mut stream, &mut answer).await?;
        Ok(answer)
    }

    /// Ready when both nodes have counted so many good calls; any other end is a failure.
    pub async fn every_call_ended_well(&self, calls: u64) {
        for node in [&self.prefill, &self.decode] {
            let counted = || node.work.outcomes().filter(|(_, count)| *count > 0).collect::<Vec<_>>();
            let all = async {
                while node.work.in_flight() > 0 {
                    tokio::task::yield_now().await;
                }
            };
            tokio::time::timeout(Duration::from_secs(5), all).await.unwrap();
            assert_eq!(counted(), [("ok", calls)], "{}", node.node_id);
        }
    }

    /// Ready when every block of both nodes is free again.
    pub async fn all_blocks_back(&self) {
        for node in [&self.prefill, &self.decode] {
            let pool = node.engine.pool();
            let all = tokio::time::timeout(Duration::from_secs(5), pool.reserve(pool.total())).await;
            all.unwrap_or_else(|_| panic!("{} {pool:?}", node.node_id)).unwrap();
        }
    }
}

#[derive(Debug, Default)]
pub struct Answer {
    pub tokens: Vec<u32>,
    pub cached_tokens: u32,
    pub reason: i32,
    pub verified: Option<v1::Verified>,
    pub spans: Vec<v1::Span>,
}

impl Answer {
    pub fn span(&self, name: &str) -> &v1::Span {
        self.spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("no span {name}"))
    }
}

pub async fn node(role: Role, faults: Faults, flags: &str) -> Arc<Node> {
    Node::start(&config(role, flags), faults).await.unwrap()
}

fn config(role: Role, flags: &str) -> NodeConfig {
    let flags = format!("node --router http://127.0.0.1:1 --simulated --transport tcp {flags}");
    Cli::parse_from(flags.split_whitespace()).node.resolve(role).unwrap()
}

/// Nodes that share a network inside this process.
pub struct Nodes {
    network: MemNetwork,
    flags: String,
}

impl Nodes {
    pub fn new(flags: &str) -> Self {
        Self { network: MemNetwork::default(), flags: flags.to_owned() }
    }

    /// A pair whose prefill node is told `settings` and makes `faults`.
    pub async fn pair(&self, settings: Settings, faults: MemFaults) -> Pair {
        self.pair_over(settings, |network, arena| MemTransport::new(network, arena, faults)).await
    }

    /// A pair whose prefill node sends by what `open` gives.
    pub async fn pair_over<T: Transport + 'static>(
        &self,
        settings: Settings,
        open: impl FnOnce(&MemNetwork, Arc<Arena>) -> Arc<T>,
    ) -> Pair {
        let network = self.network.clone();
        let prefill = config(Role::Prefill, &self.flags);
        let prefill = Node::start_with(&prefill, |arena| Ok(open(&network, arena))).await.unwrap();
        let to_prefill = PrefillClient::new(serve(tandem_prefill_node::routes_with(prefill.clone(), settings)).await);
        let (decode, to_decode, _) = self.decode().await;
        Pair { prefill, decode, to_prefill, to_decode }
    }

    /// A decode node, and its transport to kill.
    pub async fn decode(&self) -> (Arc<Node>, DecodeClient<Channel>, Arc<MemTransport>) {
        let mut transport = None;
        let config = config(Role::Decode, &self.flags);
        let decode = Node::start_with(&config, |arena| {
            let opened = MemTransport::new(&self.network, arena, MemFaults::default());
            transport = Some(opened.clone());
            Ok(opened)
        });
        let decode = decode.await.unwrap();
        let to_decode = DecodeClient::new(serve(tandem_decode_node::routes(decode.clone(), LEASE)).await);
        (decode, to_decode, transport.unwrap())
    }
}

pub async fn serve(routes: Routes) -> Channel {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(Server::builder().add_routes(routes).serve_with_incoming(TcpListenerStream::new(listener)));
    Channel::from_shared(url).unwrap().connect().await.unwrap()
}

pub async fn ticket(decode: &mut Streaming<DecodeEvent>) -> Result<Vec<u8>, Status> {
    match decode.message().await?.and_then(|event| event.event) {
        Some(DecodeEventKind::Reserved(reserved)) => Ok(reserved.ticket),
        other => panic!("expected reserved, got {other:?}"),
    }
}

pub async fn first_token(prefill: &mut Streaming<PrefillEvent>) -> Result<v1::FirstToken, Status> {
    match prefill.message().await?.and_then(|event| event.event) {
        Some(PrefillEventKind::FirstToken(first)) => Ok(first),
        other => panic!("expected a first token, got {other:?}"),
    }
}

pub async fn undelivered(prefill: &mut Streaming<PrefillEvent>) -> Result<v1::Undelivered, Status> {
    match prefill.message().await?.and_then(|event| event.event) {
        Some(PrefillEventKind::Undelivered(undelivered)) => Ok(undelivered),
        other => panic!("expected undelivered, got {other:?}"),
    }
}

pub async fn delivered(prefill: &mut Streaming<PrefillEvent>) -> Result<v1::Delivered, Status> {
    match prefill.message().await?.and_then(|event| event.event) {
        Some(PrefillEventKind::Delivered(delivered)) => Ok(delivered),
        other => panic!("expected delivered, got {other:?}"),
    }
}

pub fn stop(no_handoff: bool) -> DecodeCommand {
    DecodeCommand { command: Some(DecodeCommandKind::Stop(v1::DecodeStop { no_handoff })) }
}

pub fn deliver(ticket: Vec<u8>) -> PrefillCommand {
    PrefillCommand { command: Some(PrefillCommandKind::Deliver(v1::Deliver { ticket })) }
}

pub async fn collect(stream: &mut Streaming<DecodeEvent>, answer: &mut Answer) -> Result<(), Status> {
    while let Some(event) = stream.message().await? {
        match event.event {
            Some(DecodeEventKind::FirstToken(first)) => {
                answer.tokens.push(first.token_id);
                answer.cached_tokens = first.cached_tokens;
            }
            Some(DecodeEventKind::Token(token)) => answer.tokens.push(token.token_id),
            Some(DecodeEventKind::Verified(verified)) => answer.verified = Some(verified),
            Some(DecodeEventKind::Finished(finished)) => {
                answer.reason = finished.reason;
                answer.spans.extend(unpack(&finished.spans));
                return Ok(());
            }
            other => panic!("unexpected {other:?}"),
        }
    }
    Err(Status::internal("the stream ended without a finish"))
}

pub fn spec(rng: &mut StdRng, prompt_tokens: usize, max_tokens: u32) -> RequestSpec {
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
