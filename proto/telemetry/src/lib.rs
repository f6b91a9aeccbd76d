//! How every Tandem process tells what it did: times, spans, their export, and the log.
//!
//! - [`clock`]: one (wall clock, monotonic clock) pair per process, so that phases tile exactly.
//! - [`phase`]: a finished phase of a request as a `v1::Span`, built from exact start and end times.
//! - [`export`]: those spans to an OTLP/gRPC collector, in the background; [`otlp`] is the conversion, `relay` sends
//!   those of other processes in their names.
//! - [`logging`]: what people read on stderr.
//!
//! Nothing here blocks a request, and nothing here knows what the phases mean.
#![forbid(unsafe_code)]

pub mod clock;
pub mod export;
pub mod logging;
mod otlp;
pub mod phase;
mod relay;

pub use clock::{Clock, clock};
pub use export::Exporter;
pub use logging::init_logging;
pub use phase::{Kind, Phase, Value};
