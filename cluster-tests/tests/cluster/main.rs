//! A router, a prefill node and a decode node as real processes: what they must do, and what must not happen.
//!
//! - [`first_light`]: a prompt crosses the cluster; disaggregated = single node; many at once.
//! - [`failures`]: nodes die, hang, come back; clients leave.
//! - [`corruption`]: damaged KV is refused.
//! - [`bad_input`]: whatever comes in, the service goes on.
//! - [`traces`]: one tree of spans whose parts add up.
//! - [`streams`]: many streams lose a node and go on.
//! - [`metrics`]: what every role shows to dashboards.
//! - [`sampling`]: every way to choose tokens, through both nodes.
//! - [`tool`]: `tandem up` and its companions.

mod bad_input;
mod corruption;
mod failures;
mod first_light;
mod metrics;
mod sampling;
mod streams;
mod tool;
mod traces;
