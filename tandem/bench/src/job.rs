//! What `tandem bench` is to do: what to ask of whom, how often, and where the numbers go. Plain data, resolved from
//! the flags by [`super::command_line`]; the rest of the load generator sees only this.
use std::path::PathBuf;

use tandem_client::connect::{Headers, Tls};

use super::record::Objectives;
use super::rows::Row;
use super::runner::{Bounds, Form};
use super::session::Loading;
use super::workload::Shape;

/// What to do.
pub enum Bench {
    /// Measure.
    Run(Box<Run>),
    /// Say again what was measured.
    Report(Report),
}

impl Bench {
    /// Threads of the generator; `None` where nothing is sent.
    pub fn threads(&self) -> Option<usize> {
        match self {
            Self::Run(run) => Some(run.threads),
            Self::Report(_) => None,
        }
    }
}

/// A measurement.
pub struct Run {
    /// One server, or two to compare.
    pub endpoints: Vec<Endpoint>,
    /// How to ask.
    pub asking: Asking,
    /// What to ask.
    pub rows: Vec<RowPlan>,
    /// For row F.
    pub trace: TraceChoice,
    /// Limits of each interval.
    pub bounds: Bounds,
    /// Each interval so many times.
    pub repeats: u32,
    /// Lengths and arrivals.
    pub seed: u64,
    /// Contents; `None`: other ones every time, so that no server knows them already.
    pub salt: Option<u64>,
    /// Threads of the generator.
    pub threads: usize,
    /// What is good, and where the numbers go.
    pub report: Reporting,
    /// Raw records.
    pub records: Option<PathBuf>,
}

/// A report of records.
pub struct Report {
    /// As `--records` wrote them.
    pub records: PathBuf,
    /// What is good, and where the numbers go.
    pub report: Reporting,
}

/// What is good, and where the numbers go.
pub struct Reporting {
    /// What a user calls good.
    pub objectives: Objectives,
    /// Facts for predictions, as JSON.
    pub hardware: Option<PathBuf>,
    /// With vLLM's key names.
    pub json: Option<PathBuf>,
    /// One line a row and load.
    pub csv: Option<PathBuf>,
    /// One page with plots.
    pub html: Option<PathBuf>,
}

/// One server.
#[derive(Clone, Debug, PartialEq)]
pub struct Endpoint {
    /// As reports call it.
    pub name: String,
    /// Where requests go.
    pub api: Api,
    /// Its HTTP side, for the model's name and the tokenizer.
    pub http: Option<String>,
    /// Its processes on this machine, by name.
    pub processes: Vec<(String, u32)>,
}

/// The API that is measured.
#[derive(Clone, Debug, PartialEq)]
pub enum Api {
    /// `tandem.v1.Inference` at this URL.
    Grpc(String),
    /// `/v1/completions` below this URL.
    Completions(String),
    /// `/v1/chat/completions` below this URL.
    Chat(String),
}

impl Api {
    /// Where requests go.
    pub fn url(&self) -> &str {
        match self {
            Self::Grpc(url) | Self::Completions(url) | Self::Chat(url) => url,
        }
    }
}

/// How every request is asked.
pub struct Asking {
    /// Name of the model; `None`: the first one of the server.
    pub model: Option<String>,
    /// Sent with every request.
    pub headers: Headers,
    /// For `https://` and `grpcs://`.
    pub tls: Tls,
    /// Fields for every HTTP body.
    pub extra: serde_json::Map<String, serde_json::Value>,
    /// `None`: ids over gRPC where possible, else text.
    pub form: Option<Form>,
    /// Answers go on to their last token.
    pub ignore_eos: bool,
    /// Of gRPC.
    pub connections: usize,
}

/// One row and how it is loaded.
pub struct RowPlan {
    /// What is asked.
    pub what: What,
    /// One after the other.
    pub loads: Vec<Loading>,
}

/// What a row asks.
pub enum What {
    /// Of the matrix.
    Matrix(&'static Row),
    /// The user's.
    Own(String, Shape),
    /// Row F.
    Trace,
}

/// What row F replays.
pub struct TraceChoice {
    /// `None`: made from the seed.
    pub file: Option<PathBuf>,
    /// Lengths and blocks are divided by it.
    pub scale: u32,
    /// Times are divided by it.
    pub speed: f64,
    /// Left out at the beginning, seconds.
    pub from_s: f64,
    /// At most so many.
    pub requests: usize,
}
