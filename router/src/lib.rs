//! The router: the only orchestrator. It speaks to clients, knows the nodes, and owns every request.
//!
//! - [`api`]: the border between the edges and the flow; start reading here.
//! - [`grpc`], [`http`]: the edges: `tandem.v1.Inference`, and the OpenAI API; [`caller`]: headers that both read.
//! - [`admission`]: who may start: tenants, API keys, rates, the fair queue.
//! - [`intake`]: what may be read and tokenized at the same time, before that.
//! - [`flow`]: one request from admission to the last token: two legs, one client, one timeline, and other nodes
//!   when one fails.
//! - [`select`]: which nodes; pure. [`index`]: which node has which blocks in its cache; pure.
//! - [`membership`]: the node table, the gRPC service that fills it, circuit breakers, and the fence before lives of
//!   nodes that are over.
//! - [`tokenizer`], [`template`], [`text`]: text ↔ token ids, from the model file's own metadata.
//! - [`traces`], [`metrics`]: what happened, for people. [`page`]: the cluster as it is now, for them, too.
//! - [`config`]: flags, resolved once; [`check`]: what `--check` reads; [`reload`]: what is read again at SIGHUP.
//!
//! The router never sees a KV block: tickets pass through it, and all that it reads there is the hand-off's id.
#![forbid(unsafe_code)]

pub mod admission;
pub mod api;
pub mod caller;
pub mod check;
pub mod config;
pub mod flow;
pub mod grpc;
pub mod http;
pub mod index;
pub mod intake;
pub mod membership;
pub mod metrics;
pub mod page;
pub mod reload;
pub mod select;
pub mod template;
pub mod text;
pub mod tokenizer;
pub mod traces;
