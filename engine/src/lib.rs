//! Token ids to logits to tokens, on one machine. Knows nothing of requests on the wire, text, or where KV travels.
//!
//! # Map
//!
//! Three nouns carry the engine, and one loop joins them:
//!
//! - [`blocks`]: who holds which KV block, and who waits for some; [`prefix_cache`]: which can be reused. No tensors.
//! - [`scheduler`]: what each step computes. Pure; no model, clock or channel.
//! - [`executor`]: the seam to what computes it and chooses tokens, and the layout both sides agree on. Either [`cpu`]
//!   (a real model, from [`models`] and the kernels of [`ops`]) or [`simulated`] (no model; wrong KV still gives wrong
//!   tokens). [`step`] is a batch as both compute it, [`chooser`] how both choose, from [`logits`] by the rules of
//!   [`sampler`].
//! - [`engine`]: the thread that runs `admit → fit → plan → execute → resolve → apply`, and the handle to it.
//!
//! Around them: [`speculation`] guesses tokens that a step verifies, [`sequence`] is what goes in and comes out,
//! [`sampling`] how tokens are to be chosen, [`step_model`] predicts a step's time, also with
//! borrowed cores (`pace`), [`numerics`] names what nodes must
//! have in common to continue each other, [`memory`] says how much there is and [`footprint`] what a model takes of it,
//! [`error`] what the caller can do. To follow one request read [`Engine::submit`], then `Worker::run` in
//! `engine/worker.rs`.
//!
//! # What holds
//!
//! - **KV memory** is a `tandem_memory::KvMemory` that the executor allocates. Block `b` is its bytes
//!   `b * block_bytes ..`; only executors compute on it, and whoever moves KV between nodes copies bytes of it.
//! - **A block has holders, not an owner**: a [`KvLease`] is shared by the sequence, the step that runs and a transfer
//!   in flight; the block is free when the last of them lets go. Empty + cached + leased = all, always.
//! - **A block that others may read is never written**: full blocks of computed prefixes are shared between leases
//!   ([`BlockPool::reserve_prefix`]), and a request that would write one is refused. Tokens are the same either way.
//! - **A lease grows with its sequence**, block by block, ahead of reservations. When no block is free the last in the
//!   order gives its own back and is computed again; the first never does, and no one for ever (see [`scheduler`]).
//! - **Roles differ only in what is submitted** (see [`SequenceRequest`]). Tokens depend on the sequence and on
//!   (seed, index), so that prefill here and decode elsewhere, chunks of any size, and a move in mid-answer all give
//!   the same ones.
//! - **Every stream ends** in `Finished` or `Failed`: after a failed step, a panic in the executor, a shutdown.
//! - **Nothing grows**: the queue is bounded and refuses with `Overloaded`; a stream has room for all the events that
//!   its sequence can have, so that a slow reader never holds the batch up.
//!
//! # Use
//!
//! ```
//! # use std::sync::Arc;
//! # use tandem_engine::*;
//! # use tandem_proto::{CacheSalt, SequenceKey};
//! # async fn example(sampling: Arc<SamplingParams>) -> Result<(), EngineError> {
//! let executor = SimulatedExecutor::new(&SimulatedConfig::default())?;
//! let limits = SchedulerConfig {
//!     max_running: 16,
//!     max_step_tokens: 512,
//!     inbox: 256,
//!     prefix_caching: true,
//!     speculate: Speculate::Ngram,
//! };
//! let engine = Engine::start(Box::new(executor), limits);
//!
//! let prompt = vec![11, 12, 13];
//! let spec = engine.spec();
//! let key = SequenceKey::new(spec.model_digest, CacheSalt::NONE);
//! let hashes = tandem_proto::hash::sequence_hashes(key, &prompt, spec.block_tokens);
//! let prefix = Prefix { cache_salt: CacheSalt::NONE, hashes: &hashes, tokens: prompt.len() };
//! let lease = engine.pool().reserve_prefix(engine.pool().blocks_for(prompt.len() + 32), prefix).await?;
//! let mut stream = engine.submit(SequenceRequest {
//!     id: "example".into(),
//!     prompt_len: prompt.len(),
//!     tokens: prompt,
//!     computed: lease.cached_tokens(),
//!     lease: Arc::new(lease),
//!     max_new_tokens: 32,
//!     sampling,
//!     ignore_eos: false,
//!     stop_token_ids: Vec::new(),
//!     deadline: None,
//!     priority: 0,
//!     report_layers: Vec::new(),
//! })?;
//! while let Some(event) = stream.next().await {
//!     println!("{event:?}");
//! }
//! # Ok(())
//! # }
//! ```
#![deny(unsafe_code)]

pub mod blocks;
pub mod chooser;
pub mod cpu;
pub mod engine;
pub mod error;
pub mod executor;
pub mod footprint;
mod kv_memory;
pub mod logits;
pub mod memory;
pub mod models;
pub mod numerics;
#[allow(unsafe_code)]
pub mod ops;
mod pace;
pub mod prefix_cache;
pub mod sampler;
pub mod sampling;
pub mod scheduler;
pub mod sequence;
pub mod simulated;
pub mod speculation;
pub mod step;
pub mod step_model;
pub mod under_way;

pub use blocks::{BlockPool, KvLease, Prefix};
pub use engine::{Engine, EngineLoad, SequenceStream};
pub use error::EngineError;
pub use executor::{Batch, BatchItem, Choose, Chosen, Draft, EngineSpec, Executor, History, LayersDone, Seq, Tokens};
pub use logits::Logits;
pub use numerics::{Arithmetic, KvDtype, KvOrder};
pub use prefix_cache::{CacheEvent, CacheUpdate};
pub use sampling::{Sampled, SamplingParams, TokenLogprob};
pub use scheduler::SchedulerConfig;
pub use sequence::{Drafts, FinishReason, SequenceEvent, SequenceRequest};
pub use simulated::{SimulatedConfig, SimulatedExecutor};
pub use speculation::Speculate;
pub use step_model::{StepCost, StepModel, StepShape};
