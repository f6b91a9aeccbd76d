//! What a server says about itself over HTTP before it is measured: model, context, kind, nodes; and its tokenizer.
use std::time::Duration;

use anyhow::{Context, bail};
use reqwest::Response;
use serde::Deserialize;
use serde_json::{Value, json};

use super::client::http::{Dialect, root};
use super::cost_model::{Model, StepCost};
use super::record::ClusterNode;

/// Bound of one question.
const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes of an answer at most.
const MOST_BYTES: usize = 16 << 20;

/// The HTTP side of a server.
#[derive(Clone)]
pub struct Server {
    http: reqwest::Client,
    root: String,
}

/// What it says of itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// Name of the model to ask for.
    pub model: String,
    /// Prompt and answer together at most, tokens; `None` where it does not say.
    pub context_tokens: Option<u32>,
    /// Whose server it is.
    pub dialect: Dialect,
}

/// The nodes behind a Tandem router.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cluster {
    /// One line a node.
    pub lines: Vec<String>,
    /// Their names and roles.
    pub nodes: Vec<ClusterNode>,
    /// What the nodes report of their own speed, for predictions.
    pub model: Model,
}

#[derive(Deserialize)]
struct Models {
    data: Vec<ModelCard>,
}

#[derive(Deserialize)]
struct ModelCard {
    id: String,
    owned_by: Option<String>,
    max_model_len: Option<u32>,
}

#[derive(Deserialize)]
struct Tokens {
    tokens: Vec<u32>,
}

impl Server {
    /// The server whose API begins at `base`.
    pub fn new(http: reqwest::Client, base: &str) -> Self {
        Self { http, root: root(base).to_owned() }
    }

    /// From `/v1/models`; `wanted`: the model's name, where the user gave one.
    ///
    /// # Errors
    /// Nobody there, no model, or not the wanted one.
    pub async fn facts(&self, wanted: Option<&str>) -> anyhow::Result<Facts> {
        let url = format!("{}/v1/models", self.root);
        let body = self.ask(self.http.get(&url)).await?;
        let models: Models = serde_json::from_slice(&body).with_context(|| format!("{url} answers with no models"))?;
        let names = || models.data.iter().map(|card| card.id.as_str()).collect::<Vec<_>>().join(", ");
        let card = match wanted {
            Some(name) => models.data.iter().find(|card| card.id == name),
            None => models.data.first(),
        };
        let Some(card) = card else {
            bail!("{url}: no model `{}`; it has: {}", wanted.unwrap_or_default(), names());
        };
        let ours = card.owned_by.as_deref() == Some("tandem");
        Ok(Facts {
            model: card.id.clone(),
            context_tokens: card.max_model_len,
            dialect: if ours { Dialect::Tandem } else { Dialect::OpenAi },
        })
    }

    /// From `/debug/cluster`; nothing where there is no such thing.
    pub async fn cluster(&self) -> Cluster {
        let url = format!("{}/debug/cluster", self.root);
        let body = self.ask(self.http.get(&url)).await.unwrap_or_default();
        serde_json::from_slice(&body).map(|json: Value| Cluster::from_json(&json)).unwrap_or_default()
    }

    /// The tokens of a text as the model sees it, by `/tokenize` with vLLM's fields.
    ///
    /// # Errors
    /// A server without a tokenizer to ask.
    pub async fn tokenize(&self, model: &str, text: &str) -> anyhow::Result<Vec<u32>> {
        self.tokens(json!({"model": model, "prompt": text})).await
    }

    /// The tokens of a chat with this one message, the template's included.
    ///
    /// # Errors
    /// As [`Self::tokenize`]'s.
    pub async fn tokenize_chat(&self, model: &str, text: &str) -> anyhow::Result<Vec<u32>> {
        self.tokens(json!({"model": model, "messages": [{"role": "user", "content": text}]})).await
    }

    async fn tokens(&self, body: Value) -> anyhow::Result<Vec<u32>> {
        let url = format!("{}/tokenize", self.root);
        let answer = self.ask(self.http.post(&url).json(&body)).await?;
        let Tokens { tokens } = serde_json::from_slice(&answer).with_context(|| format!("{url} answers no tokens"))?;
        Ok(tokens)
    }

    async fn ask(&self, request: reqwest::RequestBuilder) -> anyhow::Result<Vec<u8>> {
        let response =
            request.timeout(PATIENCE).send().await.with_context(|| format!("no answer from {}", self.root))?;
        let (url, status) = (response.url().clone(), response.status());
        let body = bounded(response).await?;
        if !status.is_success() {
            let body: String = String::from_utf8_lossy(&body).chars().take(300).collect();
            bail!("{url}: {status}: {body}");
        }
        Ok(body)
    }
}

async fn bounded(mut response: Response) -> anyhow::Result<Vec<u8>> {
    let mut body = Vec::new();
    while let Some(bytes) = response.chunk().await? {
        if body.len() + bytes.len() > MOST_BYTES {
            bail!("{} answers with more than {MOST_BYTES} bytes", response.url());
        }
        body.extend_from_slice(&bytes);
    }
    Ok(body)
}

impl Cluster {
    fn from_json(json: &Value) -> Self {
        let nodes = json.get("nodes").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let of_role = |role: &str| -> Vec<&Value> { nodes.iter().filter(|node| node["role"] == role).collect() };
        let cost = |role| of_role(role).into_iter().find_map(|node| step_cost(&node["step_cost"]));
        // Without prefill nodes, decode nodes compute the prompts.
        let mut computing = of_role("prefill").into_iter().chain(of_role("decode"));
        let model = Model {
            decode_nodes: u32::try_from(of_role("decode").len()).unwrap_or(0),
            prefill_cost: cost("prefill"),
            decode_cost: cost("decode"),
            prefill_step_tokens: computing.find_map(|node| node["max_step_tokens"].as_f64()),
            ..Model::default()
        };
        let text = |node: &Value, name: &str| node[name].as_str().unwrap_or_default().to_owned();
        let named = nodes.iter().map(|node| ClusterNode { id: text(node, "id"), role: text(node, "role") });
        Self { lines: nodes.iter().map(line).collect(), nodes: named.collect(), model }
    }
}

/// As a node reports it; zeros mean that it does not know yet.
fn step_cost(json: &Value) -> Option<StepCost> {
    let number = |name: &str| json.get(name).and_then(Value::as_f64);
    let cost = StepCost {
        base_ms: number("base_ms")?,
        token_ms: number("token_ms")?,
        context_ms: number("context_ms").unwrap_or(0.0),
        decode_token_ms: number("decode_token_ms"),
        decode_context_ms: number("decode_context_ms"),
    };
    let decode_ms = cost.decode_token_ms.unwrap_or(0.0);
    (cost.base_ms + cost.token_ms + decode_ms > 0.0).then_some(cost)
}

fn line(node: &Value) -> String {
    let text = |name: &str| node[name].as_str().unwrap_or("?").to_owned();
    let number = |name: &str| node[name].as_u64().unwrap_or(0);
    let blocks = format!("{} blocks of {} tokens", number("total_blocks"), number("block_tokens"));
    format!("{}: {}, {}, {blocks}", text("id"), text("role"), text("transport"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_is_its_nodes() {
        let json = json!({"nodes": [
            {"id": "decode-0", "role": "decode", "transport": "ucx/posix", "total_blocks": 100, "block_tokens": 16,
             "step_cost": {"base_ms": 5.0, "token_ms": 0.5, "context_ms": 0.001}},
            {"id": "prefill-0", "role": "prefill", "max_step_tokens": 512, "step_cost": {"base_ms": 0.0, "token_ms": 0.0, "context_ms": 0.0}},
        ]});
        let cluster = Cluster::from_json(&json);
        assert_eq!(cluster.lines[0], "decode-0: decode, ucx/posix, 100 blocks of 16 tokens");
        assert_eq!(cluster.model.decode_nodes, 1);
        assert_eq!((cluster.model.prefill_cost, cluster.model.prefill_step_tokens), (None, Some(512.0)));
        assert_eq!(cluster.nodes[1], ClusterNode { id: "prefill-0".into(), role: "prefill".into() });
        let cost = StepCost { base_ms: 5.0, token_ms: 0.5, context_ms: 0.001, ..Default::default() };
        assert_eq!(cluster.model.decode_cost, Some(cost));
        assert_eq!(Cluster::from_json(&json!([])), Cluster::default());
    }
}
