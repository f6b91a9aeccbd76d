//! Nodes that do what the test says: each call is handed to the test, which reads its commands and writes its events.
use std::collections::VecDeque;
use std::io::Write;
use std::sync::LazyLock;

use candle_core::quantized::gguf_file::{self, Value};
use futures::FutureExt;
use tokio::net::TcpListener;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

use super::*;
use crate::admission::keys::Keys;
use crate::api::Service;
use crate::membership::{Expected, Node};
use crate::select::{self, LocalPrefill};

/// For a call and its first command. A router that has given up sends none: its test fails then, and does not hang.
const CALLED: Duration = Duration::from_secs(30);

/// Of [`model`], which is written and loaded for it once: a node may have to join within a request's bound.
static DIGEST: LazyLock<u64> = LazyLock::new(|| model().digest);

type Replies<E> = mpsc::Sender<Result<E, Status>>;

/// One call, in the test's hands.
pub struct Call<C, E> {
    pub commands: Streaming<C>,
    pub events: Replies<E>,
}

impl<C, E> Call<C, E> {
    pub async fn send(&self, event: E) {
        self.events.send(Ok(event)).await.expect("the call was cancelled");
    }

    /// Waits until all of it is on its way: what is sent next, without a wait between, leaves together.
    pub async fn sent(&self) {
        while self.events.capacity() < self.events.max_capacity() {
            tokio::task::yield_now().await;
        }
    }

    pub async fn fail(&self, status: Status) {
        self.events.send(Err(status)).await.expect("the call was cancelled");
    }

    /// Waits until the router has cancelled the call.
    pub async fn cancelled(self) {
        self.events.closed().await;
    }

    /// The first command.
    async fn begins(&mut self) -> C {
        let first = in_time("a command", self.commands.message()).await;
        first.expect("a call that lives").expect("a command")
    }
}

pub type PrefillCall = Call<v1::PrefillCommand, v1::PrefillEvent>;
pub type DecodeCall = Call<v1::DecodeCommand, v1::DecodeEvent>;

/// Serves both roles; it is asked for the one as which it registered.
struct FakeNode {
    prefill: mpsc::Sender<PrefillCall>,
    decode: mpsc::Sender<DecodeCall>,
}

#[tonic::async_trait]
impl v1::prefill_server::Prefill for FakeNode {
    type PrefillStream = ReceiverStream<Result<v1::PrefillEvent, Status>>;

    async fn prefill(
        &self,
        request: Request<Streaming<v1::PrefillCommand>>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        let (events, outbound) = mpsc::channel(8);
        let call = Call { commands: request.into_inner(), events };
        self.prefill.send(call).await.map_err(|_| Status::internal("the test is over"))?;
        Ok(Response::new(ReceiverStream::new(outbound)))
    }
}

#[tonic::async_trait]
impl v1::decode_server::Decode for FakeNode {
    type GenerateStream = ReceiverStream<Result<v1::DecodeEvent, Status>>;

    async fn generate(
        &self,
        request: Request<Streaming<v1::DecodeCommand>>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let (events, outbound) = mpsc::channel(8);
        let call = Call { commands: request.into_inner(), events };
        self.decode.send(call).await.map_err(|_| Status::internal("the test is over"))?;
        Ok(Response::new(ReceiverStream::new(outbound)))
    }
}

/// One node of one role.
pub struct Fake<C> {
    pub node: Arc<Node>,
    calls: mpsc::Receiver<C>,
    /// Of them, those that had said nothing when somebody looked: the router opens calls ahead.
    silent: VecDeque<C>,
}

impl Fake<PrefillCall> {
    /// The next call, its first command read.
    pub async fn call(&mut self) -> (PrefillCall, v1::RequestSpec) {
        let mut call = self.next().await;
        let first = call.begins().await.command;
        let Some(v1::prefill_command::Command::Start(spec)) = first else { panic!("{first:?}") };
        (call, spec)
    }
}

impl Fake<DecodeCall> {
    /// The next call, its first command read.
    pub async fn call(&mut self) -> (DecodeCall, v1::DecodeStart) {
        let mut call = self.next().await;
        let first = call.begins().await.command;
        let Some(v1::decode_command::Command::Start(start)) = first else { panic!("{first:?}") };
        (call, start)
    }
}

impl<C, E> Fake<Call<C, E>> {
    async fn next(&mut self) -> Call<C, E> {
        match self.silent.pop_front() {
            Some(call) => call,
            None => in_time("a call", self.calls.recv()).await.expect("a call"),
        }
    }

    /// Nothing was said but what was read.
    pub fn is_left_alone(&mut self) -> bool {
        self.silent.extend(std::iter::from_fn(|| self.calls.try_recv().ok()));
        let speaks = |call: &mut Call<C, E>| matches!(call.commands.message().now_or_never(), Some(Ok(Some(_))));
        !self.silent.iter_mut().any(speaks)
    }
}

async fn in_time<T>(what: &str, comes: impl Future<Output = T>) -> T {
    tokio::time::timeout(CALLED, comes).await.unwrap_or_else(|_| panic!("{what} did not come within {CALLED:?}"))
}

/// A router with one pair of fake nodes, `p0` and `d0`.
pub struct Cluster {
    pub service: Service,
    pub prefill: Fake<PrefillCall>,
    pub decode: Fake<DecodeCall>,
}

impl Cluster {
    pub async fn start(limits: Limits) -> Self {
        Self::of(router(limits)).await
    }

    /// The same for clients with API keys of tenants that are called so: `sk-NAME-secret`.
    pub async fn with_tenants(limits: Limits, names: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("keys.json");
        let key = |name: &&str| format!(r#"{{"name": "{name}", "key": "sk-{name}-0123456789abcdefgh"}}"#);
        let keys: Vec<String> = names.iter().map(key).collect();
        std::fs::write(&path, format!(r#"{{"keys": [{}]}}"#, keys.join(","))).expect("room on the disk");
        let keys = Keys::load(&path, clock::now()).expect("keys");
        Self::of(router_with_keys(limits, keys)).await
    }

    pub async fn of(service: Service) -> Self {
        let (prefill, decode) = (join_prefill(&service, "p0").await, join_decode(&service, "d0").await);
        Self { service, prefill, decode }
    }

    /// Both calls of the next request, their first commands read.
    pub async fn legs(&mut self) -> (PrefillCall, v1::RequestSpec, DecodeCall, v1::DecodeStart) {
        let (prefill, spec) = self.prefill.call().await;
        let (decode, start) = self.decode.call().await;
        (prefill, spec, decode, start)
    }
}

/// Another prefill node.
pub async fn join_prefill(service: &Service, id: &str) -> Fake<PrefillCall> {
    join_prefill_of(service, id, "f32").await
}

/// Another prefill node, of this arithmetic.
pub async fn join_prefill_of(service: &Service, id: &str, arithmetic: &str) -> Fake<PrefillCall> {
    let (node, calls, _) = join(service, id, v1::Role::Prefill, arithmetic).await;
    Fake { node, calls, silent: VecDeque::new() }
}

/// Another decode node.
pub async fn join_decode(service: &Service, id: &str) -> Fake<DecodeCall> {
    join_decode_of(service, id, "f32").await
}

/// Another decode node, of this arithmetic.
pub async fn join_decode_of(service: &Service, id: &str, arithmetic: &str) -> Fake<DecodeCall> {
    let (node, _, calls) = join(service, id, v1::Role::Decode, arithmetic).await;
    Fake { node, calls, silent: VecDeque::new() }
}

async fn join(
    service: &Service,
    id: &str,
    role: v1::Role,
    arithmetic: &str,
) -> (Arc<Node>, mpsc::Receiver<PrefillCall>, mpsc::Receiver<DecodeCall>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
    let (prefill, prefill_calls) = mpsc::channel(8);
    let (decode, decode_calls) = mpsc::channel(8);
    let node = Arc::new(FakeNode { prefill, decode });
    let server = tonic::transport::Server::builder()
        .add_service(v1::prefill_server::PrefillServer::from_arc(Arc::clone(&node)))
        .add_service(v1::decode_server::DecodeServer::from_arc(node))
        .serve_with_incoming(TcpIncoming::from(listener));
    tokio::spawn(server);
    let (incarnation, arithmetic) = (rand::random_range(2..=u64::MAX), arithmetic.to_owned());
    let info = v1::Register { incarnation, life: incarnation, arithmetic, ..register(id, role, &endpoint) };
    (service.membership().register(info, Instant::now()).expect("accepted"), prefill_calls, decode_calls)
}

/// A router without nodes, for pairs.
pub fn router(limits: Limits) -> Service {
    router_of(limits, LocalPrefill::Never)
}

/// A router without nodes.
pub fn router_of(limits: Limits, local: LocalPrefill) -> Service {
    router_telling(Exporter::disabled(), limits, select::Settings { local, ..select::Settings::default() })
}

/// A router without nodes, whose spans go there.
pub fn router_telling(exporter: Exporter, limits: Limits, choice: select::Settings) -> Service {
    let model = Arc::new(model());
    let expected = Expected { model_digest: model.digest, eos_token_id: model.eos };
    let membership = Membership::new(expected, Duration::from_secs(3)).with_choice(choice);
    Service::new(model, membership, exporter, limits, "router-test".into())
}

/// A router without nodes, for clients with these keys.
pub fn router_with_keys(limits: Limits, keys: Keys) -> Service {
    let model = Arc::new(model());
    let expected = Expected { model_digest: model.digest, eos_token_id: model.eos };
    let membership = Membership::new(expected, Duration::from_secs(3)).with_local_prefill(LocalPrefill::Never);
    Service::with_keys(model, membership, Exporter::disabled(), limits, "router-test".into(), keys)
}

pub fn register(node_id: &str, role: v1::Role, endpoint: &str) -> v1::Register {
    let transport = |name: &str| {
        let (name, build_id) = (name.to_owned(), format!("{name}/1"));
        v1::TransportInfo { backend: "mem".into(), name, build_id, reach: None }
    };
    v1::Register {
        node_id: node_id.into(),
        role: role.into(),
        incarnation: 1,
        compatibility_digest: 5,
        protocol: tandem_proto::PROTOCOL_VERSION,
        model_digest: *DIGEST,
        endpoint: endpoint.into(),
        transports: ["fast", "slow"].map(transport).into(),
        total_blocks: 64,
        block_tokens: 16,
        max_context_tokens: 256,
        max_running: 8,
        arithmetic: "f32".into(),
        kv_order: "bf16-pairs".into(),
        life: 1,
        link: 1,
        ..v1::Register::default()
    }
}

/// The token of a visible ASCII character; 0 ends an answer.
pub fn id(character: char) -> u32 {
    u32::from(character) - 32
}

/// A model whose tokens are the visible ASCII characters.
pub fn model() -> ModelText {
    let texts = |items: Vec<String>| Value::Array(items.into_iter().map(Value::String).collect());
    let tokens: Vec<String> =
        std::iter::once("<eos>".to_owned()).chain(('!'..='~').map(String::from)).chain(["!!".to_owned()]).collect();
    let types = (0..tokens.len()).map(|i| Value::I32(if i == 0 { 3 } else { 1 })).collect();
    let metadata = [
        ("general.architecture", Value::String("llama".into())),
        ("general.name", Value::String("fake".into())),
        ("llama.context_length", Value::U32(256)),
        ("tokenizer.ggml.model", Value::String("gpt2".into())),
        ("tokenizer.ggml.pre", Value::String("smollm".into())),
        ("tokenizer.ggml.tokens", texts(tokens)),
        ("tokenizer.ggml.token_type", Value::Array(types)),
        ("tokenizer.ggml.merges", texts(vec!["! !".into()])),
        ("tokenizer.ggml.eos_token_id", Value::U32(0)),
    ];
    let pairs: Vec<(&str, &Value)> = metadata.iter().map(|(key, value)| (*key, value)).collect();
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    let mut bytes = std::io::Cursor::new(Vec::new());
    gguf_file::write(&mut bytes, &pairs, &[]).expect("a header");
    file.write_all(bytes.get_ref()).expect("room on the disk");
    let mut text = ModelText::load(file.path()).expect("a usable model file");
    text.model_name = "fake".to_owned();
    text
}
