//! The ways in which a client gets its tokens.
use anyhow::{Context, ensure};
use futures::StreamExt;
use serde_json::json;
use tandem_cluster_tests::Cluster;
use tandem_cluster_tests::client::{ask, token_ids};
use tandem_proto::v1::generate_response::Event;
use tandem_proto::v1::inference_client::InferenceClient;
use tonic::transport::Channel;

use crate::direct::Direct;

/// Keeps its connections.
#[derive(Clone)]
pub enum Way {
    /// Both nodes, without a router.
    Direct(Direct),
    /// `tandem.v1.Inference`.
    Grpc(InferenceClient<Channel>),
    /// OpenAI's completions, streamed.
    Http { client: reqwest::Client, url: String, model: String },
}

impl Way {
    /// To the router of `cluster`.
    pub async fn grpc(cluster: &Cluster) -> anyhow::Result<Self> {
        Ok(Self::Grpc(InferenceClient::connect(cluster.router.url("grpc")).await?))
    }

    /// To whatever listens there.
    pub fn http(url: &str, model: &str) -> anyhow::Result<Self> {
        let client = reqwest::Client::builder().tcp_nodelay(true).build()?;
        Ok(Self::Http { client, url: format!("{url}/v1/completions"), model: model.to_owned() })
    }

    /// Runs a request and calls `token` at each token.
    ///
    /// # Errors
    /// Anything but a whole answer.
    pub async fn ask(&self, prompt: Vec<u32>, max_tokens: u32, mut token: impl FnMut()) -> anyhow::Result<()> {
        let mut tokens = 0;
        let mut count = || {
            tokens += 1;
            token();
        };
        match self {
            Self::Direct(direct) => direct.ask(prompt, max_tokens, count).await?,
            Self::Grpc(client) => {
                let mut request = ask(token_ids(prompt), max_tokens);
                request.ignore_eos = true;
                let mut stream = client.clone().generate(request).await?.into_inner();
                while let Some(message) = stream.message().await? {
                    if let Some(Event::Token(_)) = message.event {
                        count();
                    }
                }
            }
            Self::Http { client, url, model } => {
                let body = json!({
                    "model": model, "prompt": text(&prompt), "max_tokens": max_tokens, "ignore_eos": true, "stream": true,
                    "temperature": 0,
                });
                let answer = client.post(url).json(&body).send().await?.error_for_status()?;
                let mut lines = Lines::default();
                let mut bytes = answer.bytes_stream();
                while let Some(chunk) = bytes.next().await {
                    (0..lines.feed(&chunk?)).for_each(|_| count());
                }
                ensure!(lines.done, "the stream ended without [DONE]");
                // The one with the reason of the end.
                tokens = tokens.min(max_tokens);
            }
        }
        ensure!(tokens == max_tokens, "{tokens} tokens instead of {max_tokens}");
        Ok(())
    }
}

/// Events in a stream of bytes that may be cut anywhere.
#[derive(Default)]
struct Lines {
    rest: Vec<u8>,
    done: bool,
}

impl Lines {
    /// Events that these bytes complete.
    fn feed(&mut self, bytes: &[u8]) -> usize {
        self.rest.extend_from_slice(bytes);
        let mut events = 0;
        while let Some(end) = self.rest.windows(2).position(|pair| pair == b"\n\n") {
            let event: Vec<u8> = self.rest.drain(..end + 2).collect();
            match event.strip_prefix(b"data: ") {
                Some(data) if data.starts_with(b"[DONE]") => self.done = true,
                Some(_) => events += 1,
                None => {}
            }
        }
        events
    }
}

/// Unlike any other prompt of the run.
pub fn prompt(number: u64) -> Vec<u32> {
    (0..96).map(|index| 100 + ((number * 7919 + index * 131) % 40_000) as u32).collect()
}

/// As many words as there are ids; sglang-router takes no ids.
fn text(prompt: &[u32]) -> String {
    const WORDS: [&str; 8] = [" the", " of", " and", " to", " in", " is", " for", " that"];
    prompt.iter().map(|id| WORDS[*id as usize % WORDS.len()]).collect()
}

/// A name for what went wrong.
pub fn named<T>(result: anyhow::Result<T>, way: &Way) -> anyhow::Result<T> {
    let name = match way {
        Way::Direct(_) => "direct",
        Way::Grpc(_) => "gRPC",
        Way::Http { url, .. } => url,
    };
    result.with_context(|| format!("way: {name}"))
}
