//! The router: the only orchestrator. It speaks to clients, knows the nodes, and owns every request.
//!
//! - [`api`]: the border between the edges and the flow; start reading here. [`generation`]: what passes it.
//! - [`grpc`], [`http`]: the edges: `tandem.v1.Inference`, and the OpenAI API; [`caller`]: headers that both read.
//! - [`admission`]: who may start: tenants, API keys, rates, the fair queue. [`capacity`]: what it asks of the nodes.
//! - [`intake`]: what may be read and tokenized at the same time, before that.
//! - [`flow`]: one request from admission to the last token: two legs, one client, one timeline, and other nodes
//!   when one fails. [`failure`]: how an attempt fails.
//! - [`select`]: which nodes; pure. [`index`]: which node has which blocks in its cache; pure.
//! - [`membership`]: the node table, the gRPC service that fills it, circuit breakers, and the fence before lives of
//!   nodes that are over.
//! - [`tokenizer`], [`template`], [`text`]: text ↔ token ids, from the [`model_file`]'s own metadata.
//! - [`record`]: what is known of one request at its end. [`traces`], [`metrics`]: what happened, for people. [`page`]:
//!   the cluster as it is now, for them, too.
//! - [`config`]: flags, resolved once; [`limits`]: those that bound requests; [`check`]: what `--check` reads;
//!   [`reload`]: what is read again at SIGHUP; [`registration`]: how nodes find it in etcd.
//!
//! Layers, the highest first; imports go downwards, which `cluster-tests/tests/tidy.rs` checks:
//!
//! 1. program: [`config`], [`check`], [`registration`], [`reload`];
//! 2. edge: [`http`], [`grpc`], [`page`], [`api`], [`intake`];
//! 3. flow: [`flow`], [`admission`], [`generation`], [`caller`], [`failure`];
//! 4. observe: [`metrics`], [`record`], [`traces`];
//! 5. cluster: [`membership`], [`select`], [`index`], [`capacity`];
//! 6. model: [`text`], [`template`], [`tokenizer`], [`model_file`]; and [`limits`].
//!
//! The router never sees a KV block: tickets pass through it, and all that it reads there is the hand-off's id.
#![forbid(unsafe_code)]

pub mod admission;
pub mod api;
pub mod caller;
pub mod capacity;
pub mod check;
pub mod config;
pub mod failure;
pub mod flow;
pub mod generation;
pub mod grpc;
pub mod http;
pub mod index;
pub mod intake;
pub mod limits;
pub mod membership;
pub mod metrics;
pub mod model_file;
pub mod page;
pub mod record;
pub mod registration;
pub mod reload;
pub mod select;
pub mod template;
pub mod text;
pub mod tokenizer;
pub mod traces;
