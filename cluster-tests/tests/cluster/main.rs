//! A router, a prefill node and a decode node as real processes: what they must do, and what must not happen.
//!
//! - [`first_light`]: a prompt crosses the cluster; disaggregated = single node; many at once.
//! - [`failures`]: nodes die, hang, come back; clients leave.
//! - [`corruption`]: damaged KV is refused.
//! - [`arithmetic`]: a node that computes otherwise is not taken.
//! - [`bad_input`]: whatever comes in, the service goes on.
//! - [`configuration`]: flags from a file and the environment, `--check`, SIGHUP.
//! - [`clocks`]: nodes whose clocks are wrong.
//! - [`collector`]: an OTLP collector for tests.
//! - [`impostors`]: nodes that say what is not so.
//! - [`join_token`]: who belongs to the cluster.
//! - [`large_requests`]: the largest requests, many at once.
//! - [`lending`]: cores that nodes lend each other, and what a kill does to that.
//! - [`telemetry`]: what a collector gets: sampled traces, log lines, metrics; and a log that nobody reads.
//! - [`traces`]: one tree of spans whose parts add up.
//! - [`local`]: without a prefill node: aggregated, or because it died.
//! - [`node_tls`]: the same by certificates, which are replaced while requests run.
//! - [`overload`]: more requests than fit: who is refused, who waits, who is served.
//! - [`rolling`]: every node is replaced under load.
//! - [`routers`]: several routers, of which each dies, stands still, or is replaced.
//! - [`streams`]: many streams lose a node and go on.
//! - [`metrics`]: what every role shows to dashboards.
//! - [`sampling`]: every way to choose tokens, through both nodes.
//! - [`reach`]: how commands find and reach a router: URLs, keys, TLS, ports.
//! - [`tool`]: `tandem up` and its companions.
//! - [`turns`]: a second turn moves only what is missing.

mod arithmetic;
mod bad_input;
mod clocks;
mod collector;
mod configuration;
mod corruption;
mod failures;
mod first_light;
mod impostors;
mod join_token;
mod large_requests;
mod lending;
mod local;
mod metrics;
mod node_tls;
mod overload;
mod reach;
mod rolling;
mod routers;
mod sampling;
mod streams;
mod telemetry;
mod tool;
mod traces;
mod turns;
