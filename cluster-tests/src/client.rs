//! What a client of a cluster does: asks, leaves, and looks at the nodes' counters.
use std::time::Duration;

use anyhow::Context;
use serde_json::Value;
use tandem_proto::v1;
use tandem_proto::v1::decode_client::DecodeClient;
use tandem_proto::v1::decode_command::Command as DecodeCommand;
use tandem_proto::v1::decode_event::Event as DecodeEvent;
use tandem_proto::v1::generate_request::Input;
use tandem_proto::v1::generate_response::Event;
use tandem_proto::v1::inference_client::InferenceClient;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

use crate::cluster::Cluster;
use crate::process::Process;

/// No answer of the small model takes longer, even on busy cores.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(240);

/// A finished answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// All tokens, in order.
    pub tokens: Vec<u32>,
    /// All text.
    pub text: String,
    /// The last message.
    pub finish: v1::Finish,
}

/// An answer that ended with an error.
#[derive(Debug)]
pub struct Failure {
    /// What had come before.
    pub tokens: Vec<u32>,
    /// The error.
    pub status: Status,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}: {} (after {} tokens)", self.status.code(), self.status.message(), self.tokens.len())
    }
}

impl std::error::Error for Failure {}

/// One node as the router sees it.
#[derive(Clone, Debug)]
pub struct Node {
    /// `prefill` or `decode`.
    pub role: String,
    /// As in the node's ready line.
    pub incarnation: String,
    /// As in the node's ready line.
    pub transport: String,
    /// Blocks that nobody holds.
    pub free_blocks: u64,
    /// All blocks.
    pub total_blocks: u64,
    /// Sequences in the batch.
    pub running: u64,
    /// Sequences that wait.
    pub waiting: u64,
    /// Names the set of cores that it computes on; empty: it did not say.
    pub processor: String,
}

impl Node {
    /// Nothing runs, nothing waits, every block is free.
    pub fn is_idle(&self) -> bool {
        self.free_blocks == self.total_blocks && self.running == 0 && self.waiting == 0
    }
}

/// The tokens of a decode node's stream, and the bytes of KV that were verified for it.
///
/// # Errors
/// What the stream ended with.
pub async fn decoded(mut stream: Streaming<v1::DecodeEvent>) -> anyhow::Result<(Vec<u32>, u64)> {
    let (mut tokens, mut kv_bytes) = (Vec::new(), 0);
    while let Some(message) = stream.message().await? {
        match message.event {
            Some(DecodeEvent::FirstToken(first)) => tokens.push(first.token_id),
            Some(DecodeEvent::Token(token)) => tokens.push(token.token_id),
            Some(DecodeEvent::Verified(verified)) => kv_bytes = verified.bytes,
            Some(DecodeEvent::Finished(_)) => return Ok((tokens, kv_bytes)),
            _ => {}
        }
    }
    anyhow::bail!("the stream ended without its last message")
}

/// The tokens of an answer from this decode node alone.
///
/// # Errors
/// Those of the node.
pub async fn local_tokens(mut node: DecodeClient<Channel>, spec: v1::RequestSpec) -> anyhow::Result<Vec<u32>> {
    let local = Some(v1::LocalPrefill::default());
    let start = v1::DecodeStart { spec: Some(spec), local, ..v1::DecodeStart::default() };
    let start = v1::DecodeCommand { command: Some(DecodeCommand::Start(start)) };
    Ok(decoded(node.generate(tokio_stream::iter([start])).await?.into_inner()).await?.0)
}

/// A greedy request.
pub fn ask(input: Input, max_tokens: u32) -> v1::GenerateRequest {
    v1::GenerateRequest { input: Some(input), max_tokens: Some(max_tokens), ..Default::default() }
}

/// A prompt of text.
pub fn text(prompt: &str) -> Input {
    Input::Text(prompt.to_owned())
}

/// A prompt of token ids.
pub fn token_ids(ids: impl Into<Vec<u32>>) -> Input {
    Input::TokenIds(v1::TokenIds { ids: ids.into() })
}

/// A conversation of one message.
pub fn chat(message: &str) -> Input {
    let message = v1::ChatMessage { role: "user".to_owned(), content: message.to_owned() };
    Input::Chat(v1::ChatMessages { messages: vec![message] })
}

impl Cluster {
    /// The whole answer over gRPC.
    ///
    /// # Errors
    /// The router's status, with the tokens that came before.
    pub async fn answer(&self, request: v1::GenerateRequest) -> Result<Answer, Failure> {
        let stream = self.open(request).await.map_err(|status| Failure { tokens: Vec::new(), status })?;
        rest(stream).await
    }

    /// The answer as a stream of messages.
    ///
    /// # Errors
    /// The router's status, when it refuses at once.
    pub async fn open(&self, request: v1::GenerateRequest) -> Result<Streaming<v1::GenerateResponse>, Status> {
        let connect = InferenceClient::connect(self.router.url("grpc"));
        let mut client = connect.await.map_err(|error| Status::unavailable(error.to_string()))?;
        let mut request = tonic::Request::new(request);
        request.set_timeout(ANSWER_TIMEOUT);
        Ok(client.generate(request).await?.into_inner())
    }

    /// The tokens of the same request computed by the decode node alone.
    ///
    /// # Errors
    /// The node's status, or tokens that end without `finished`.
    pub async fn local_tokens(&self, spec: v1::RequestSpec) -> anyhow::Result<Vec<u32>> {
        local_tokens(DecodeClient::connect(self.decode.url("grpc")).await?, spec).await
    }

    /// The nodes as the router sees them.
    ///
    /// # Errors
    /// The router does not answer, or not in its form.
    pub async fn nodes(&self) -> anyhow::Result<Vec<Node>> {
        let url = format!("{}/debug/cluster", self.router.operators_url());
        let cluster: Value = reqwest::get(url).await?.json().await?;
        let nodes = cluster.get("nodes").unwrap_or(&cluster).as_array().context("no list of nodes")?;
        nodes.iter().map(node).collect()
    }

    /// Waits until every node is idle again, and says how long that took.
    ///
    /// # Errors
    /// A block is still away when the time is over.
    pub async fn idle(&self, within: Duration) -> anyhow::Result<Duration> {
        let idle = async |_: &Self| self.nodes().await.is_ok_and(|nodes| nodes.iter().all(Node::is_idle));
        self.wait_until(within, "all blocks are back", idle).await
    }

    /// Waits until some node of `role` has a sequence in its batch.
    ///
    /// # Errors
    /// None has in time.
    pub async fn busy(&self, role: &str, within: Duration) -> anyhow::Result<Duration> {
        let busy = async |_: &Self| {
            let nodes = self.nodes().await.unwrap_or_default();
            nodes.iter().any(|node| node.role == role && !node.is_idle())
        };
        self.wait_until(within, &format!("{role} works"), busy).await
    }

    /// Free and all blocks of every node, for people.
    ///
    /// # Errors
    /// The router does not answer.
    pub async fn blocks(&self) -> anyhow::Result<String> {
        let counts = |node: &Node| format!("{} {}/{} free", node.role, node.free_blocks, node.total_blocks);
        Ok(self.nodes().await?.iter().map(counts).collect::<Vec<_>>().join(", "))
    }

    /// GET on the router's HTTP port.
    ///
    /// # Errors
    /// No answer.
    pub async fn get(&self, path: &str) -> reqwest::Result<reqwest::Response> {
        reqwest::get(format!("{}{path}", self.router.url("http"))).await
    }

    /// POST on the router's HTTP port.
    ///
    /// # Errors
    /// No answer.
    pub async fn post(&self, path: &str, body: impl Into<reqwest::Body>) -> reqwest::Result<reqwest::Response> {
        let url = format!("{}{path}", self.router.url("http"));
        let request = reqwest::Client::new().post(url).header("content-type", "application/json");
        request.timeout(ANSWER_TIMEOUT).body(body).send().await
    }
}

/// Reads an answer to its end.
///
/// # Errors
/// The router's status, with the tokens that came before.
pub async fn rest(mut stream: Streaming<v1::GenerateResponse>) -> Result<Answer, Failure> {
    let (mut tokens, mut text) = (Vec::new(), String::new());
    loop {
        let message = match stream.message().await {
            Ok(message) => message,
            Err(status) => return Err(Failure { tokens, status }),
        };
        match message.and_then(|message| message.event) {
            Some(Event::Token(token)) => {
                tokens.push(token.token_id);
                text.push_str(&token.text);
            }
            Some(Event::Finish(finish)) => {
                text.push_str(&finish.text);
                return Ok(Answer { tokens, text, finish });
            }
            None => {
                return Err(Failure { tokens, status: Status::unknown("the answer ended without its last message") });
            }
        }
    }
}

/// Sum of all series of a node's /metrics whose line contains `part`.
///
/// # Errors
/// The node does not answer.
pub async fn metric(node: &Process, part: &str) -> anyhow::Result<f64> {
    let text = reqwest::get(format!("{}/metrics", node.url("admin"))).await?.text().await?;
    let lines = text.lines().filter(|line| !line.starts_with('#') && line.contains(part));
    Ok(lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum())
}

fn node(value: &Value) -> anyhow::Result<Node> {
    let text = |key: &str| match value.get(key) {
        Some(Value::String(text)) => Ok(text.to_lowercase()),
        Some(Value::Number(number)) => Ok(number.to_string()),
        other => anyhow::bail!("{key} of a node is {other:?}"),
    };
    let number = |key: &str| value.get(key).and_then(Value::as_u64).with_context(|| format!("{key} of {value}"));
    Ok(Node {
        role: text("role")?,
        incarnation: text("incarnation")?,
        transport: text("transport")?,
        free_blocks: number("free_blocks")?,
        total_blocks: number("total_blocks")?,
        running: number("running")?,
        waiting: number("waiting")?,
        processor: value["processor"]["id"].as_str().unwrap_or_default().to_owned(),
    })
}
