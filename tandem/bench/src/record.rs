//! What a benchmark run leaves behind: one record per request, and what the run was.
use super::cost_model::Model;

/// One request as its client saw it. All times are seconds since the run began, by one monotonic clock.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize, PartialEq)]
pub struct Record {
    pub index: u32,
    /// Name of the workload row it belongs to.
    pub row: String,
    /// Which endpoint (A/B): 0 or 1.
    pub endpoint: u8,
    /// When it was to be sent: latencies count from here (no coordinated omission).
    pub intended: f64,
    /// When its bytes were handed to the socket.
    pub sent: f64,
    /// Prompt tokens: as planned, and as the server said (usage), if it did.
    pub prompt_tokens: u32,
    pub cached_tokens: u32,
    /// Tokens asked for at most.
    pub max_tokens: u32,
    /// Arrival of each chunk that carried tokens: (seconds, tokens in it).
    pub chunks: Vec<(f64, u32)>,
    /// When the answer's end was read.
    pub ended: f64,
    pub outcome: Outcome,
    /// From a Tandem server's last message, where it sent them.
    pub phases: Option<Phases>,
    /// Of a Tandem server, where it said so.
    #[serde(default)]
    pub nodes: Nodes,
    pub trace_id: Option<String>,
}
/// Who served a request, by the names of the nodes.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize, PartialEq)]
pub struct Nodes {
    /// That computed the prompt; None: the decode node did so itself.
    pub prefill: Option<String>,
    pub decode: Option<String>,
}
impl Nodes {
    /// None where a server names none.
    pub fn named(prefill: &str, decode: &str) -> Option<Self> {
        let name = |name: &str| (!name.is_empty()).then(|| name.to_owned());
        let nodes = Self { prefill: name(prefill), decode: name(decode) };
        (nodes != Self::default()).then_some(nodes)
    }
    /// That computed the prompt.
    pub fn prompt(&self) -> Option<&str> {
        self.prefill.as_deref().or(self.decode.as_deref())
    }
}
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize, PartialEq)]
pub enum Outcome {
    Ok,
    /** refused for load: HTTP 429 / RESOURCE_EXHAUSTED */
    Refused {
        retry_after_s: Option<f64>,
    },
    /** anything else */
    Failed {
        kind: String,
        message: String,
    },
    /** the run ended first */
    Unfinished,
}
/// Milliseconds, as `v1::Timings` names them.
#[derive(Clone, Copy, Debug, Default, serde::Serialize, serde::Deserialize, PartialEq)]
pub struct Phases {
    pub queue_ms: f64,
    pub route_ms: f64,
    pub prefill_ms: f64,
    pub ttft_ms: f64,
    pub transfer_exposed_ms: f64,
    pub transfer_total_ms: f64,
    pub decode_ms: f64,
    pub handoff_gap_ms: f64,
    pub kv_bytes: u64,
    pub kv_gbps: f64,
    pub predicted_ttft_ms: f64,
    pub local: bool,
}
/// What ran: written into every report.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize, PartialEq)]
pub struct RunInfo {
    pub command: Vec<String>,
    pub tandem_version: String,
    pub commit: String,
    pub started_unix_s: u64,
    pub machine: String,
    pub endpoints: Vec<String>,
    pub model: String,
    pub dtype: String,
    pub seed: u64,
    pub server_flags: Vec<String>,
    /// Worst and 99th percentile of how late the generator itself sent, milliseconds.
    pub own_lag_p99_ms: f64,
    pub own_lag_max_ms: f64,
    /// Decided contents, so that a run can be repeated to the letter.
    #[serde(default)]
    pub salt: u64,
    /// Of each endpoint: its nodes, where it tells.
    #[serde(default)]
    pub nodes: Vec<Vec<ClusterNode>>,
    /// Of each endpoint: what its nodes report of their own speed, read after the last interval, when they know it.
    #[serde(default)]
    pub models: Vec<Model>,
    /// What a reader must know of the run.
    #[serde(default)]
    pub notes: Vec<String>,
}
/// A node of the cluster that was measured.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize, PartialEq)]
pub struct ClusterNode {
    pub id: String,
    /// "prefill" or "decode".
    pub role: String,
}
/// One measured interval: the records of one row at one rate (or concurrency), warm-up left out.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize, PartialEq)]
pub struct Interval {
    pub row: String,
    pub endpoint: u8,
    pub repeat: u32,
    /** requests a second offered; None in concurrency mode */
    pub rate: Option<f64>,
    pub concurrency: Option<u32>,
    /** cold or warm prefix */
    pub warm: bool,
    /** how long requests were offered, or, of so many requests, how long they took */
    pub seconds: f64,
    /** Of a closed loop over a window of time: when it began, seconds of the run. The records then have, beside the requests
    sent inside the window, those that were sent before it and ended later: they count for throughput alone. */
    #[serde(default)]
    pub window_from: Option<f64>,
    /** What a reader must know of this one. */
    #[serde(default)]
    pub notes: Vec<String>,
    pub records: Vec<Record>,
}
impl Interval {
    /// The requests that latencies and counts are of: those that were sent in the measured time.
    pub fn measured(&self) -> impl Iterator<Item = &Record> {
        let from = self.window_from.unwrap_or(f64::NEG_INFINITY);
        self.records.iter().filter(move |record| record.intended.is_nan() || record.intended >= from)
    }
}
/// A whole benchmark.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize, PartialEq)]
pub struct Run {
    pub info: RunInfo,
    pub intervals: Vec<Interval>,
}
/// What a user calls good, milliseconds.
#[derive(Clone, Copy, Debug, serde::Serialize, serde::Deserialize, PartialEq)]
pub struct Objectives {
    pub ttft_ms: f64,
    pub tpot_ms: f64,
}
