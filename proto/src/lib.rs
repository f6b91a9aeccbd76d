//! Tandem's words, shared by every process: no I/O, no async code of our own.
//!
//! - [`ids`]: incarnation, life and hand-off id. Random values come from the caller's generator.
//! - [`hash`]: sequence hashes of token blocks, under which key, and checksums of bytes, those of KV blocks among them.
//! - [`model`]: the digest of a model that is a directory.
//! - [`error`]: what went wrong, by what the caller does next, and its gRPC status.
//! - [`sampling`]: which numbers a sampling request may hold.
//! - [`trace`]: W3C trace context; [`tracestate`]: what others say of a trace. [`spans`]: how spans travel.
//! - [`ways`]: by which way KV gets from one node to another.
//! - [`codec`]: messages to bytes on a call. [`device`]: on what a node computes, as people write it.
//! - `secrets`: how messages with a secret are printed.
//! - [`v1`]: the generated gRPC messages (`proto/tandem/v1/*.proto`): `inference.proto` is the public API,
//!   `cluster.proto` the control plane.
#![forbid(unsafe_code)]

pub mod codec;
pub mod device;
pub mod error;
pub mod hash;
pub mod ids;
pub mod model;
pub mod sampling;
mod secrets;
pub mod spans;
pub mod trace;
pub mod tracestate;
pub mod ways;

/// Generated from `proto/tandem/v1/*.proto`.
#[allow(missing_docs, clippy::all, clippy::unwrap_used)]
pub mod v1 {
    tonic::include_proto!("tandem.v1");

    /// Serialized `FileDescriptorSet`, for gRPC reflection.
    pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/tandem_descriptor.bin"));
}

use std::time::Duration;

pub use error::{ERROR_KINDS, Error, ErrorCode, ErrorKind};
pub use hash::{CacheSalt, SequenceHash, SequenceKey};
pub use ids::{HandoffId, Incarnation, LIFE_HEADER, Life};
pub use trace::TraceContext;
pub use tracestate::TraceState;

/// What a block may hold, in tokens: the unit of caching, hashing and transfer. Multiples of the 16 keys that the CPU
/// kernels take at a time; all nodes of a cluster have the same.
pub const BLOCK_TOKENS: [usize; 4] = [16, 32, 64, 128];

/// Tokens of a block where nothing else is said.
pub const DEFAULT_BLOCK_TOKENS: usize = BLOCK_TOKENS[0];

/// A request's priority lies within this, either side of the usual 0: it bounds how long one request can hold another
/// up.
pub const MAX_PRIORITY: i32 = 10;

/// Changes when the meaning of a wire message, of a sequence hash or of the arena layout changes. Part of the
/// compatibility digest; a router takes no node of another one.
pub const PROTOCOL_VERSION: u32 = 9;

/// A node ends a call that has not said by then what it is for.
pub const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Largest control-plane message: a prompt of a million token ids fits, a runaway body does not.
pub const MAX_MESSAGE_BYTES: usize = 8 << 20;

/// Milliseconds that a request may take at most, a day: routers give no later deadline, and nodes keep none.
pub const MAX_REQUEST_MS: u32 = 86_400_000;
