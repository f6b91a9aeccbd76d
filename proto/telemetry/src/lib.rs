//! How every Tandem process tells what it did: times, spans, their export, and the log.
//!
//! - [`clock`]: one (wall clock, monotonic clock) pair per process, so that phases tile exactly.
//! - [`phase`]: a finished phase of a request as the bytes of a `v1::Span`, built from exact start and end times.
//! - [`export`]: those spans to an OTLP/gRPC collector, in the background; `otlp` says of whom they are.
//! - [`exposition`]: the text of `/metrics`, and histograms that point to traces.
//! - [`metrics_export`]: the figures of `/metrics` to the collector; `openmetrics` reads their text, `convert` makes
//!   OTLP's messages of it. [`collector`]: the flags that say where all this goes, `headers` with what.
//! - [`logging`]: the lines on stderr; `lines`: how they look, for people or programs; [`log_filter`]: which ones;
//!   `traced`: which request they are about; [`notes`]: those that become events of its span; `log_export` sends lines
//!   to the collector; [`budget`]: how much of it, where it could be any amount; `stderr` keeps its reader from
//!   holding up who writes.
//!
//! Nothing here blocks a request, and nothing here knows what the phases mean.
#![forbid(unsafe_code)]

pub mod budget;
pub mod clock;
pub mod collector;
mod convert;
pub mod export;
pub mod exposition;
mod fields;
mod headers;
mod lines;
mod log_export;
pub mod log_filter;
pub mod logging;
pub mod metrics_export;
pub mod notes;
mod openmetrics;
mod otlp;
pub mod phase;
mod stderr;
mod traced;

pub use budget::Budget;
pub use clock::{Clock, clock};
pub use collector::Collector;
pub use export::Exporter;
pub use fields::ACCESS;
pub use log_filter::LogFilter;
pub use logging::{Log, LogFormat, init_logging, lost_lines, say_ready};
pub use metrics_export::MetricsExport;
pub use notes::Notes;
pub use phase::{Kind, Phase, Value};
pub use traced::{in_request, within_request};
