//! Bytes and blocks, never tokens: moves the KV blocks of one request from one node's arena into another's, and lets
//! nobody read them before they were verified.
//!
//! - [`transport`]: the trait that nodes use, [`Grant`] in, [`Incoming`] and [`Outgoing`] out. How a backend plugs in.
//! - [`terms`]: the plain data of it all.
//! - [`session`]: the receiver's rules as a pure state machine: who may write what, once, and until when.
//! - [`registry`]: the same machine with a lock, a clock and waiters; every backend receives through it.
//! - [`delivery`]: the sender's side of a hand-off as a pure state machine.
//! - [`incoming`], [`outgoing`]: the two ends of a hand-off as a node holds them; the receiving one verifies, what has
//!   landed (`landing`) while the rest is on its way.
//! - [`seal`]: makes the manifest on the sending node and checks it on the receiving one; [`hashing`]: on which thread.
//! - `build_id`: what two builds that do not understand each other differ in.
//! - [`handshake`]: how both ends prove that they have the key of a hand-off's ticket.
//! - [`wire`]: the 32-byte header that every frame of every backend starts with; [`joints`]: where frames are cut.
//! - [`arena`]: KV memory (`tandem-memory`) as blocks.
//! - [`error`], [`counters`]: what went wrong, and how often.
//! - Backends: [`mem`] (in one process, with fault knobs), [`tcp`] (plain sockets), [`ucx`] (UCX active messages);
//!   [`mod@select`] starts them, [`transports`] is what a node has of them.
//!
//! Only `ucx` holds `unsafe`. Read next: `transport.rs`.
#![deny(unsafe_code)]

pub mod arena;
mod build_id;
mod clock;
pub mod counters;
pub mod delivery;
pub mod error;
pub mod handshake;
pub mod hashing;
pub mod incoming;
pub mod joints;
mod landing;
pub mod mem;
#[doc(hidden)]
pub mod mutation;
pub mod outgoing;
pub mod registry;
pub mod seal;
pub mod select;
pub mod session;
pub mod tcp;
pub mod terms;
pub mod transport;
pub mod transports;
pub mod ucx;
pub mod wire;

#[cfg(test)]
mod joint_tests;

pub use arena::{Arena, Slice};
pub use counters::Counters;
pub use error::{AddressError, Refusal, TransferError, TransferErrorKind};
pub use incoming::Incoming;
pub use outgoing::Outgoing;
pub use seal::{Manifest, seal_for};
pub use tandem_memory::Run;
pub use terms::{BlockOwner, Expected, Faults, Grant, Held, Landed, PeerId, Receipt, Verified};
pub use transport::Transport;
pub use transports::Transports;
