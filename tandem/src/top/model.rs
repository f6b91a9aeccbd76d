//! What the router said of the cluster. Pure: events go in, and are kept as the router keeps them.
use std::collections::{BTreeMap, VecDeque};

use serde::Deserialize;
use serde_json::{Map, Value};

/// Requests that are kept, as many as the router keeps.
const MAX_ROWS: usize = 1_000;

type Fields = Map<String, Value>;

/// One event of the stream. Fields that did not change are absent.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Event {
    /// `whole`, `older` or `delta`.
    #[serde(default)]
    pub kind: String,
    #[serde(default)]
    at_ms: u64,
    #[serde(default)]
    about: Option<About>,
    #[serde(default)]
    cluster: Fields,
    #[serde(default)]
    nodes: Vec<Fields>,
    #[serde(default)]
    gone: Vec<String>,
    #[serde(default)]
    links: Option<Vec<Link>>,
    #[serde(default)]
    departed: Option<Vec<Departed>>,
    #[serde(default)]
    tail: Option<Vec<Stretch>>,
    #[serde(default)]
    requests: Vec<Row>,
}

/// Whose page it is.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct About {
    /// Served model name.
    #[serde(default)]
    pub model: String,
    /// Of the router.
    #[serde(default)]
    pub version: String,
}

/// A node.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub struct Node {
    /// Its name.
    pub id: String,
    /// `prefill` or `decode`.
    pub role: String,
    /// In one word.
    pub state: String,
    /// KV blocks.
    pub total_blocks: u64,
    /// Of those, free ones.
    pub free_blocks: u64,
    /// Of those, cached ones.
    pub cached_blocks: u64,
    /// Sequences in its batch.
    pub running: u64,
    /// Calls that wait.
    pub waiting: u64,
    /// What its prompts will take.
    pub backlog_ms: f64,
    /// Prompts.
    pub prompt_tokens_per_s: f64,
    /// Answers.
    pub output_tokens_per_s: f64,
    /// By which KV travels.
    pub transport: String,
}

/// The cluster's figures.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Cluster {
    /// Requests admitted.
    pub running: u64,
    /// Requests that wait for that.
    pub queued: u64,
    /// A request could start.
    pub ready: bool,
    /// The router ends.
    pub draining: bool,
    /// Of all nodes.
    pub prompt_tokens_per_s: f64,
    /// Of all nodes.
    pub output_tokens_per_s: f64,
    /// Over all links.
    pub kv_bytes_per_s: f64,
    /// That end.
    pub requests_per_s: f64,
}

/// A pair of nodes between which KV moved.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Link {
    /// From.
    pub prefill: String,
    /// To.
    pub decode: String,
    /// While bytes move.
    pub gbps: f64,
    /// Now, pauses included.
    pub bytes_per_s: f64,
    /// So far.
    pub handoffs: u64,
    /// So far.
    pub bytes: u64,
}

/// A node that left.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Departed {
    /// Its name.
    pub id: String,
    /// What it did.
    pub role: String,
    /// For people.
    pub why: String,
    /// Unix milliseconds.
    pub at_ms: u64,
}

/// The request at p99 of ten seconds.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Stretch {
    /// Unix milliseconds of its beginning.
    pub at_ms: u64,
    /// With a first token.
    pub requests: u64,
    /// p99.
    pub ttft_ms: f64,
    /// Of it.
    pub queue_ms: f64,
    /// Of it.
    pub route_ms: f64,
    /// Of it.
    pub prefill_ms: f64,
}

/// A request that ended.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Row {
    /// Its own.
    pub id: String,
    /// 32 hexadecimal digits.
    pub trace: String,
    /// The client's.
    pub request: String,
    /// Unix milliseconds when it came.
    pub at_ms: u64,
    /// `pair` or `local`.
    pub plan: String,
    /// Who computed the prompt.
    pub prefill: String,
    /// Who generated.
    pub decode: String,
    /// Of the prompt.
    pub prompt_tokens: u64,
    /// Of the answer.
    pub output_tokens: u64,
    /// How it ended.
    pub outcome: String,
    /// Empty: it did not fail.
    pub error: String,
    /// Times that it went on with other nodes.
    pub replans: u64,
    /// To the first token.
    pub ttft_ms: Option<f64>,
    /// For each further one.
    pub tpot_ms: Option<f64>,
    /// To its end.
    pub e2e_ms: f64,
}

/// See the head of this file.
#[derive(Debug, Default)]
pub struct Model {
    /// Unix milliseconds of the router's last word.
    pub at_ms: u64,
    /// Whose page it is.
    pub about: About,
    /// The newest first.
    pub rows: VecDeque<Row>,
    /// The busiest first.
    pub links: Vec<Link>,
    /// The newest first.
    pub departed: Vec<Departed>,
    /// The oldest first.
    pub tail: Vec<Stretch>,
    /// Why there is no connection, if there is none; empty before the first word.
    pub lost: Option<String>,
    is_begun: bool,
    cluster: Fields,
    nodes: BTreeMap<String, Fields>,
}

impl Model {
    /// The router says so.
    pub fn take(&mut self, event: Event) {
        self.lost = None;
        match event.kind.as_str() {
            "older" => {
                self.rows.extend(event.requests);
                return self.rows.truncate(MAX_ROWS);
            }
            "whole" => {
                *self = Self { is_begun: true, about: event.about.clone().unwrap_or_default(), ..Self::default() };
            }
            _ => {}
        }
        self.at_ms = event.at_ms;
        self.cluster.extend(event.cluster);
        event.gone.iter().for_each(|id| drop(self.nodes.remove(id)));
        for node in event.nodes {
            let Some(id) = node.get("id").and_then(Value::as_str).map(str::to_owned) else { continue };
            self.nodes.entry(id).or_default().extend(node);
        }
        replace(&mut self.links, event.links);
        replace(&mut self.departed, event.departed);
        replace(&mut self.tail, event.tail);
        let older = std::mem::replace(&mut self.rows, event.requests.into());
        self.rows.extend(older);
        self.rows.truncate(MAX_ROWS);
    }

    /// There is no connection.
    pub fn lost(&mut self, why: String) {
        self.lost = Some(why);
    }

    /// Whether the router has said anything.
    pub fn is_begun(&self) -> bool {
        self.is_begun
    }

    /// The figures.
    pub fn cluster(&self) -> Cluster {
        read(&self.cluster)
    }

    /// Prefill nodes first, by name; 10 comes behind 9.
    pub fn nodes(&self) -> Vec<Node> {
        let mut nodes: Vec<Node> = self.nodes.values().map(read).collect();
        nodes.sort_by_cached_key(|node| (node.role != "prefill", in_order(&node.id)));
        nodes
    }
}

fn replace<T>(old: &mut Vec<T>, new: Option<Vec<T>>) {
    if let Some(new) = new {
        *old = new;
    }
}

/// Fields of another type are those of another version: what is not understood is left out.
fn read<T: for<'de> Deserialize<'de> + Default>(fields: &Fields) -> T {
    T::deserialize(Value::Object(fields.clone())).unwrap_or_default()
}

/// A name with its number at the end apart.
fn in_order(id: &str) -> (String, u64) {
    let name = id.trim_end_matches(|c: char| c.is_ascii_digit());
    (name.to_owned(), id[name.len()..].parse().unwrap_or(0))
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::*;

    pub fn event(value: Value) -> Event {
        serde_json::from_value(value).unwrap()
    }

    pub fn whole() -> Event {
        event(json!({
            "kind": "whole", "at_ms": 1_790_000_000_000u64, "about": {"model": "m", "version": "0.1.0"},
            "cluster": {"running": 2, "queued": 1, "ready": true, "output_tokens_per_s": 41.5},
            "nodes": [
                {"id": "prefill-10", "role": "prefill", "state": "ready", "total_blocks": 64, "free_blocks": 64},
                {"id": "decode-0", "role": "decode", "state": "ready", "total_blocks": 64, "free_blocks": 16,
                 "cached_blocks": 8, "running": 2, "output_tokens_per_s": 41.5, "transport": "ucx/posix"},
                {"id": "prefill-9", "role": "prefill", "state": "suspect", "total_blocks": 64, "free_blocks": 64},
            ],
            "links": [{"prefill": "prefill-9", "decode": "decode-0", "gbps": 3.25, "bytes_per_s": 2e6, "handoffs": 7, "bytes": 7_000_000}],
            "departed": [{"id": "decode-1", "role": "decode", "why": "it was silent for 3000 ms", "at_ms": 1_789_999_990_000u64}],
            "tail": [{"at_ms": 1_789_999_990_000u64, "requests": 3, "ttft_ms": 40.0, "queue_ms": 10.0, "route_ms": 0.1, "prefill_ms": 29.9}],
            "requests": [
                {"id": "b", "trace": "0b", "request": "req-b", "plan": "pair", "prefill": "prefill-9", "decode": "decode-0",
                 "prompt_tokens": 12, "output_tokens": 8, "outcome": "length", "ttft_ms": 40.0, "tpot_ms": 5.0, "e2e_ms": 75.0},
                {"id": "a", "trace": "0a", "request": "req-a", "outcome": "Overloaded", "error": "too many", "e2e_ms": 1.0},
            ],
        }))
    }

    #[test]
    fn changes_go_into_what_is_known() {
        let mut model = Model::default();
        model.take(whole());
        let names = |model: &Model| model.nodes().into_iter().map(|node| node.id).collect::<Vec<_>>();
        assert_eq!(names(&model), ["prefill-9", "prefill-10", "decode-0"]);
        model.lost("gone".into());
        model.take(event(json!({"kind": "older", "requests": [{"id": "0"}]})));
        model.take(event(json!({
            "kind": "delta", "at_ms": 1_790_000_001_000u64, "cluster": {"running": 3}, "gone": ["prefill-10"],
            "nodes": [{"id": "decode-0", "free_blocks": 12}], "requests": [{"id": "c"}],
        })));
        assert_eq!((names(&model), model.lost.as_deref()), (vec!["prefill-9".to_owned(), "decode-0".to_owned()], None));
        let decode = &model.nodes()[1];
        assert_eq!((decode.free_blocks, decode.running, decode.transport.as_str()), (12, 2, "ucx/posix"));
        assert_eq!((model.cluster().running, model.cluster().queued, model.at_ms), (3, 1, 1_790_000_001_000));
        let ids = |model: &Model| model.rows.iter().map(|row| row.id.clone()).collect::<Vec<_>>();
        assert_eq!(ids(&model), ["c", "b", "a", "0"], "the newest first");
        model.take(whole());
        assert_eq!((ids(&model).len(), names(&model).len()), (2, 3), "everything anew");
        model.take(event(json!({"requests": vec![json!({"id": "x"}); 2 * MAX_ROWS]})));
        assert_eq!(model.rows.len(), MAX_ROWS);
    }
}
