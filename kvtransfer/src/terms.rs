//! What goes in and out of a hand-off, as plain data: whom it concerns, what is granted, expected and confirmed. Owns
//! no rule: those stand in `session.rs` and `delivery.rs`; `transport.rs` has the trait that nodes use.
use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem_proto::{HandoffId, Incarnation, SequenceHash, v1};

use crate::joints::Joints;

/// One connection or endpoint of a backend; a reconnected peer is another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId(pub u64);

/// Keeps blocks out of their pool while a writer or a reader may still touch them: usually the engine's lease.
pub type BlockOwner = Arc<dyn Any + Send + Sync>;

/// Permission to fill blocks, once.
pub struct Grant {
    /// Random, single use. The permission is the key that the ticket has beside it.
    pub handoff: HandoffId,
    /// Who will send.
    pub prefill_incarnation: Incarnation,
    /// Who receives.
    pub decode_incarnation: Incarnation,
    /// Layout and model; part of the ticket.
    pub compatibility_digest: u64,
    /// Arena blocks to fill, in the order of their indices; distinct.
    pub blocks: Vec<u32>,
    /// Equal pieces that a block may be sent in: 1, only whole, or its layers ([`Arena::units`](crate::Arena::units)).
    pub units: u8,
    /// What the receiver has already, in front of `blocks`.
    pub held: Held,
    /// Kept until no writer can touch the blocks.
    pub owner: BlockOwner,
    /// Without a frame of the sender for so long the hand-off ends: progress and keep-alives extend it.
    pub lease: Duration,
}

/// The blocks at the head of a prompt that a receiver holds: they do not travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Number of blocks.
    pub blocks: u32,
    /// Of the last of them, if there is one.
    pub hash: Option<SequenceHash>,
}

/// What the KV must be to be accepted.
#[derive(Clone, Debug)]
pub struct Expected {
    /// Tokens whose KV is handed off.
    pub prompt_tokens: u32,
    /// One per block.
    pub sequence_hashes: Vec<SequenceHash>,
}

/// Ranges that arrived one behind the other, all of the same units: whole blocks, or a group of layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Landed {
    /// The first of the units, and how many of each block.
    pub units: (u8, u8),
    /// Of the grant.
    pub blocks: u32,
    /// Of them.
    pub bytes: u64,
    /// The last of these bytes.
    pub at: Instant,
}

/// A hand-off whose every block was verified: it may be read now.
#[derive(Clone, Debug)]
pub struct Verified {
    /// As the sender wrote it; incarnations, hashes and checksums were checked, the rest is its word.
    pub seal: v1::Seal,
    /// Of all blocks.
    pub bytes: u64,
    /// Number of blocks.
    pub blocks: u32,
    /// Ranges they came as.
    pub descriptors: u32,
    /// First range's header.
    pub first_arrival: Instant,
    /// Last range's last byte.
    pub last_arrival: Instant,
    /// Time in which bytes were moving: less than the whole when they waited for the sender's computation.
    pub copying: Duration,
    /// What arrived when.
    pub landed: Vec<Landed>,
    /// After the checks.
    pub verified_at: Instant,
}

/// The receiver verified what was sent.
#[derive(Clone, Debug)]
pub struct Receipt {
    /// Of all blocks.
    pub bytes: u64,
    /// Number of blocks.
    pub blocks: u32,
    /// Ranges they were sent as.
    pub descriptors: u32,
    /// First push to acknowledgement.
    pub elapsed: Duration,
    /// Spent in queueing frames, waits for credit included.
    pub post: Duration,
    /// When the first push began (the seal, without any).
    pub first_post: Instant,
}

/// Faults that the sending side of any backend makes on request, for tests and demonstrations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Flips one bit of the first byte of every hand-off's first range, after the checksum was taken.
    pub flip_byte: bool,
    /// Sends 8 bytes too few of every hand-off's first range.
    pub truncate_push: bool,
}

/// A ticket whose fields were checked against this node.
pub struct CheckedTicket {
    /// The hand-off.
    pub handoff: HandoffId,
    /// Blocks to fill.
    pub blocks: u32,
    /// Pieces that a block may be sent in.
    pub units: u8,
    /// Of the receiver's blocks.
    pub joints: Joints,
    /// From now on, and from each frame on.
    pub lease: Duration,
}
