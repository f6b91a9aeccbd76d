//! What can go wrong with a hand-off, by what the caller does next, and its mapping to the error of `tandem-proto`.
use std::fmt;

use tandem_proto::{Error, ErrorKind};

/// Why a receiver refuses a frame or a whole hand-off. Crosses the wire as (code, detail): see [`Refusal::to_wire`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// No grant has this hand-off id.
    Unknown,
    /// The id was used before: ids are single use.
    Used,
    /// The lease ended.
    Expired,
    /// Another peer opened this hand-off.
    WrongPeer,
    /// A range's bytes are not its blocks' bytes: a truncated push.
    Length,
    /// Blocks that were not granted.
    OutOfRange,
    /// A block came twice.
    AlreadyWritten,
    /// The seal came before all blocks.
    Incomplete,
    /// The seal does not name the incarnations of the grant.
    WrongIncarnation,
    /// The seal is for another prompt length.
    WrongPrompt,
    /// This block (index in the hand-off) holds the KV of other tokens.
    WrongSequence(u32),
    /// This block (index in the hand-off) has other bytes than the sender hashed.
    Corrupt(u32),
    /// The receiver no longer wants it.
    Cancelled,
    /// A frame that cannot be read.
    Malformed,
    /// A write into the arena failed on the receiver's side.
    WriteFailed,
    /// A unit of a block came before the one that precedes it.
    OutOfOrder,
    /// The receiver has too many hand-offs at once.
    Overloaded,
    /// The peer's connection ended, or was ended by force, before its hand-off did.
    PeerLost,
    /// The peer has not proved that it has the hand-off's key.
    Unauthenticated,
    /// The seal is of another layout or model than the grant.
    WrongLayout,
}

/// Labels of all reasons, indexed by `Refusal::code`; for metrics.
pub const REFUSAL_LABELS: [&str; 20] = [
    "unknown",
    "used",
    "expired",
    "wrong_peer",
    "length",
    "out_of_range",
    "already_written",
    "incomplete",
    "wrong_incarnation",
    "wrong_prompt",
    "wrong_sequence",
    "corrupt",
    "cancelled",
    "malformed",
    "write_failed",
    "out_of_order",
    "overloaded",
    "peer_lost",
    "unauthenticated",
    "wrong_layout",
];

impl Refusal {
    /// Stable number of the reason.
    pub fn code(self) -> u32 {
        match self {
            Self::Unknown => 0,
            Self::Used => 1,
            Self::Expired => 2,
            Self::WrongPeer => 3,
            Self::Length => 4,
            Self::OutOfRange => 5,
            Self::AlreadyWritten => 6,
            Self::Incomplete => 7,
            Self::WrongIncarnation => 8,
            Self::WrongPrompt => 9,
            Self::WrongSequence(_) => 10,
            Self::Corrupt(_) => 11,
            Self::Cancelled => 12,
            Self::Malformed => 13,
            Self::WriteFailed => 14,
            Self::OutOfOrder => 15,
            Self::Overloaded => 16,
            Self::PeerLost => 17,
            Self::Unauthenticated => 18,
            Self::WrongLayout => 19,
        }
    }

    /// Stable name, for metrics and span attributes.
    pub fn label(self) -> &'static str {
        REFUSAL_LABELS[self.code() as usize]
    }

    /// (code, detail) of a refusal frame.
    pub fn to_wire(self) -> (u32, u32) {
        match self {
            Self::WrongSequence(block) | Self::Corrupt(block) => (self.code(), block),
            _ => (self.code(), 0),
        }
    }

    /// Reads a refusal frame; an unknown code of a newer peer is `Malformed`.
    pub fn from_wire(code: u32, detail: u32) -> Self {
        match code {
            0 => Self::Unknown,
            1 => Self::Used,
            2 => Self::Expired,
            3 => Self::WrongPeer,
            4 => Self::Length,
            5 => Self::OutOfRange,
            6 => Self::AlreadyWritten,
            7 => Self::Incomplete,
            8 => Self::WrongIncarnation,
            9 => Self::WrongPrompt,
            10 => Self::WrongSequence(detail),
            11 => Self::Corrupt(detail),
            12 => Self::Cancelled,
            14 => Self::WriteFailed,
            15 => Self::OutOfOrder,
            16 => Self::Overloaded,
            17 => Self::PeerLost,
            18 => Self::Unauthenticated,
            19 => Self::WrongLayout,
            _ => Self::Malformed,
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("no grant has this hand-off id"),
            Self::Used => f.write_str("the hand-off id was used before"),
            Self::Expired => f.write_str("the lease expired"),
            Self::WrongPeer => f.write_str("another peer opened this hand-off"),
            Self::Length => f.write_str("a range's length is not that of its blocks (truncated push?)"),
            Self::OutOfRange => f.write_str("a range holds blocks that were not granted"),
            Self::AlreadyWritten => f.write_str("a block was written twice"),
            Self::Incomplete => f.write_str("the seal came before all blocks"),
            Self::WrongIncarnation => f.write_str("the seal names other incarnations than the grant"),
            Self::WrongPrompt => f.write_str("the seal is for another prompt length"),
            Self::WrongSequence(block) => write!(f, "block {block} holds the KV of other tokens"),
            Self::Corrupt(block) => write!(f, "block {block} fails its checksum"),
            Self::Cancelled => f.write_str("the receiver cancelled"),
            Self::Malformed => f.write_str("malformed frame"),
            Self::WriteFailed => f.write_str("writing into the arena failed"),
            Self::OutOfOrder => f.write_str("a unit of a block came before the one that precedes it"),
            Self::Overloaded => f.write_str("the receiver has too many hand-offs at once"),
            Self::PeerLost => f.write_str("the peer's connection ended before its hand-off did"),
            Self::Unauthenticated => f.write_str("the peer has not proved that it has the hand-off's key"),
            Self::WrongLayout => f.write_str("the seal is of another KV layout or model than the grant"),
        }
    }
}

/// What the caller can do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransferErrorKind {
    /// Our deadline (the lease) passed.
    Timeout,
    /// The peer died or hung up.
    PeerGone,
    /// The receiver said no.
    Refused(Refusal),
    /// Builds, protocols or layouts differ: these two nodes never pair.
    Incompatible,
    /// Bytes or manifest failed verification.
    Corrupt,
    /// Too many hand-offs at once.
    Overloaded,
    /// The other side gave up on purpose.
    Cancelled,
    /// A peer's address was refused before it was used: it is garbage, or of another cluster.
    BadAddress(AddressError),
    /// Sockets, libraries, addresses.
    Io,
}

/// Why an address from a ticket or a hello was refused. Nothing of it has reached UCX.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum AddressError {
    /// There is none.
    #[error("there is no KV address")]
    Empty,
    /// Shorter than every address.
    #[error("the KV address is truncated")]
    Truncated,
    /// It does not begin as one.
    #[error("these bytes are no KV address (or one of another version of Tandem)")]
    Magic,
    /// It is not as long as it says.
    #[error("the KV address is not as long as it says: truncated or changed on its way")]
    Length,
    /// Longer than any may be.
    #[error("the KV address has {bytes} bytes, {most} are allowed: name fewer network devices")]
    TooLong {
        /// Its length.
        bytes: usize,
        /// The limit.
        most: usize,
    },
    /// Nobody with our key and build made it.
    #[error("the KV address fails its check: changed on its way, or of a cluster with another key or build")]
    Tag,
}

/// A failed hand-off.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct TransferError {
    /// What the caller can do about it.
    pub kind: TransferErrorKind,
    /// The receiver's reason, where it gave one.
    pub refusal: Option<Refusal>,
    /// For people.
    pub message: String,
}

impl TransferError {
    /// An error without a refusal.
    pub fn new(kind: TransferErrorKind, message: impl Into<String>) -> Self {
        Self { kind, refusal: None, message: message.into() }
    }

    /// The peer died or hung up.
    pub fn peer_gone(message: impl Into<String>) -> Self {
        Self::new(TransferErrorKind::PeerGone, message)
    }
}

impl From<Refusal> for TransferError {
    fn from(refusal: Refusal) -> Self {
        let kind = match refusal {
            Refusal::Length | Refusal::Malformed | Refusal::WrongSequence(_) | Refusal::Corrupt(_) => {
                TransferErrorKind::Corrupt
            }
            Refusal::Cancelled => TransferErrorKind::Cancelled,
            Refusal::Overloaded => TransferErrorKind::Overloaded,
            Refusal::PeerLost => TransferErrorKind::PeerGone,
            other => TransferErrorKind::Refused(other),
        };
        Self { kind, refusal: Some(refusal), message: format!("KV hand-off refused: {refusal}") }
    }
}

impl From<AddressError> for TransferError {
    fn from(error: AddressError) -> Self {
        Self::new(TransferErrorKind::BadAddress(error), error.to_string())
    }
}

impl From<std::io::Error> for TransferError {
    fn from(error: std::io::Error) -> Self {
        use std::io::ErrorKind::*;
        let kind = match error.kind() {
            ConnectionReset | ConnectionAborted | BrokenPipe | UnexpectedEof | ConnectionRefused | NotConnected => {
                TransferErrorKind::PeerGone
            }
            TimedOut => TransferErrorKind::Timeout,
            _ => TransferErrorKind::Io,
        };
        Self::new(kind, error.to_string())
    }
}

impl From<TransferError> for Error {
    fn from(error: TransferError) -> Self {
        let kind = match error.kind {
            TransferErrorKind::Timeout | TransferErrorKind::PeerGone | TransferErrorKind::Io => ErrorKind::Unavailable,
            TransferErrorKind::Refused(_) => ErrorKind::Unavailable,
            // Another try with these two nodes would fail as well.
            TransferErrorKind::Incompatible | TransferErrorKind::BadAddress(_) => ErrorKind::Incompatible,
            TransferErrorKind::Corrupt => ErrorKind::Corrupt,
            TransferErrorKind::Overloaded => ErrorKind::Overloaded,
            TransferErrorKind::Cancelled => ErrorKind::Cancelled,
        };
        Error::new(kind, error.message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_survive_the_wire() {
        for code in 0..REFUSAL_LABELS.len() as u32 {
            let refusal = Refusal::from_wire(code, 7);
            assert_eq!(refusal.code(), code);
            let (code, detail) = refusal.to_wire();
            assert_eq!(Refusal::from_wire(code, detail), refusal);
        }
        assert_eq!(Refusal::from_wire(u32::MAX, 0), Refusal::Malformed);
    }
}
