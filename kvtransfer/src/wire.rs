//! Frames of the data plane. Every frame of every backend starts with the same 32-byte header; a backend adds only what
//! its medium lacks (the tcp backend: a payload length). Parsing never panics and never trusts a number.
//!
//! ```text
//! byte  0..4   magic "TKV1"
//!       4      kind
//!       5      first unit of a range (of data, ready or copied), else zero
//!       6      units of a range (0: whole blocks), else zero
//!       7      zero
//!       8..24  hand-off id
//!      24..28  a: first block index | refusal code   | protocol version (hello)   (little endian)
//!      28..32  b: block count       | refusal detail | 0
//! ```
use std::ops::Range;

use prost::Message;
use tandem_proto::{HandoffId, PROTOCOL_VERSION, hash, v1};

use crate::error::Refusal;

/// Bytes of every header.
pub const HEADER_BYTES: usize = 32;
/// Largest seal payload: a hand-off of 100,000 blocks fits.
pub const MAX_SEAL_BYTES: usize = 3 << 20;
/// Largest build id of a hello.
pub const MAX_HELLO_BYTES: usize = 256;

const MAGIC: [u8; 4] = *b"TKV1";
/// Kinds of the headers with units.
const DATA: u8 = 1;
const READY: u8 = 8;
const COPIED: u8 = 9;

/// A frame without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Header {
    /// First frame of a connection, or of a hand-off; payload: `handshake.rs`.
    Hello {
        /// Must equal ours.
        protocol: u32,
    },
    /// Payload: the units of blocks `first..first + count` of the hand-off, block by block.
    Data(DataHeader),
    /// Payload: an encoded `v1::Seal`.
    Seal(HandoffId),
    /// The sender gives up; no payload.
    Cancel(HandoffId),
    /// The receiver's answer; no payload.
    Answer(HandoffId, Answer),
    /// The receiver knows whose the frames of a hand-off are: they may be sent now; payload: its proof of that.
    Welcome(HandoffId),
    /// Another hand-off is this connection's, too; payload: the sender's proof of that. Of the tcp backend, whose
    /// connections are of many hand-offs.
    Join(HandoffId),
    /// The sender is still there: the lease begins anew; no payload.
    KeepAlive(HandoffId),
    /// A welcome of a receiver that copies out of the sender's memory itself: announce instead of sending;
    /// payload: its proof of that.
    WillCopy(HandoffId),
    /// These pieces are final in the sender's memory, and stay; payload: where (`ucx/one_copy/announcement.rs`).
    Ready(DataHeader),
    /// The receiver has its copy of these pieces; no payload.
    Copied(DataHeader),
}

/// Which pieces of which blocks a payload fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataHeader {
    /// The hand-off.
    pub handoff: HandoffId,
    /// Index in the grant, not an arena block.
    pub first: u32,
    /// Number of blocks.
    pub count: u32,
    /// What of each of them.
    pub units: Units,
}

/// Which units of a block, as a frame says it: unchecked numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Units {
    first: u8,
    /// 0: the whole block, and `first` is 0.
    count: u8,
}

impl Units {
    /// The whole block, whatever its units are.
    pub const ALL: Self = Self { first: 0, count: 0 };

    /// `range` of a block of `units`.
    pub fn new(range: Range<u8>, units: u8) -> Self {
        if range == (0..units) {
            Self::ALL
        } else {
            Self { first: range.start, count: range.end.saturating_sub(range.start) }
        }
    }

    /// Which of a block of `units` they are; `None` when it does not have them.
    pub fn of(self, units: u8) -> Option<Range<u8>> {
        match self {
            Self::ALL => Some(0..units),
            Self { count: 0, .. } => None,
            Self { first, count } => first.checked_add(count).filter(|end| *end <= units).map(|end| first..end),
        }
    }
}

/// How a receiver ends a hand-off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Verified.
    Ack,
    /// Not accepted; nothing of it will be read.
    Refused(Refusal),
}

impl Header {
    /// The hello of this build.
    pub fn hello() -> Self {
        Self::Hello { protocol: PROTOCOL_VERSION }
    }

    /// Writes the 32 bytes.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut units = Units::ALL;
        let (kind, handoff, a, b) = match *self {
            Self::Hello { protocol } => (0, HandoffId([0; 16]), protocol, 0),
            Self::Data(range) | Self::Ready(range) | Self::Copied(range) => {
                units = range.units;
                (self.range_kind(), range.handoff, range.first, range.count)
            }
            Self::Seal(handoff) => (2, handoff, 0, 0),
            Self::Cancel(handoff) => (3, handoff, 0, 0),
            Self::Answer(handoff, Answer::Ack) => (4, handoff, 0, 0),
            Self::Answer(handoff, Answer::Refused(refusal)) => {
                let (code, detail) = refusal.to_wire();
                (5, handoff, code, detail)
            }
            Self::Welcome(handoff) => (6, handoff, 0, 0),
            Self::KeepAlive(handoff) => (7, handoff, 0, 0),
            Self::WillCopy(handoff) => (10, handoff, 0, 0),
            Self::Join(handoff) => (11, handoff, 0, 0),
        };
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..7].copy_from_slice(&[kind, units.first, units.count]);
        bytes[8..24].copy_from_slice(&handoff.0);
        bytes[24..28].copy_from_slice(&a.to_le_bytes());
        bytes[28..].copy_from_slice(&b.to_le_bytes());
        bytes
    }

    /// Reads a header; `None` for anything that [`Header::encode`] does not write. Refusals alone are read whatever
    /// they say: to pass over one would leave a hand-off waiting that is over.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; HEADER_BYTES] = bytes.try_into().ok()?;
        let (kind, units) = (bytes[4], Units { first: bytes[5], count: bytes[6] });
        if bytes[..4] != MAGIC || bytes[7] != 0 {
            return None;
        }
        let is_range = matches!(kind, DATA | READY | COPIED);
        if !is_range && units != Units::ALL {
            return None;
        }
        let handoff = HandoffId(bytes[8..24].try_into().ok()?);
        let a = u32::from_le_bytes(bytes[24..28].try_into().ok()?);
        let b = u32::from_le_bytes(bytes[28..].try_into().ok()?);
        let uses_numbers = is_range || matches!(kind, 0 | 5);
        if !uses_numbers && (a, b) != (0, 0) {
            return None;
        }
        let range = DataHeader { handoff, first: a, count: b, units };
        let header = match kind {
            0 if b == 0 && handoff == HandoffId([0; 16]) => Self::Hello { protocol: a },
            DATA => Self::Data(range),
            2 => Self::Seal(handoff),
            3 => Self::Cancel(handoff),
            4 => Self::Answer(handoff, Answer::Ack),
            5 => Self::Answer(handoff, Answer::Refused(Refusal::from_wire(a, b))),
            6 => Self::Welcome(handoff),
            7 => Self::KeepAlive(handoff),
            READY => Self::Ready(range),
            COPIED => Self::Copied(range),
            10 => Self::WillCopy(handoff),
            11 => Self::Join(handoff),
            _ => return None,
        };
        Some(header)
    }

    fn range_kind(&self) -> u8 {
        match self {
            Self::Ready(_) => READY,
            Self::Copied(_) => COPIED,
            _ => DATA,
        }
    }
}

/// Payload of a seal frame: the message, and its XXH3-64 (little endian). What the seal says of tokens nothing else
/// would check.
pub fn encode_seal(seal: &v1::Seal) -> Vec<u8> {
    let mut payload = seal.encode_to_vec();
    payload.extend_from_slice(&hash::checksum(&payload).to_le_bytes());
    payload
}

/// Reads the payload of a seal frame; `None` when it is too long, unreadable, changed on its way, or names another
/// hand-off than its header.
pub fn parse_seal(handoff: HandoffId, payload: &[u8]) -> Option<v1::Seal> {
    if payload.len() > MAX_SEAL_BYTES {
        return None;
    }
    let (message, checksum) = payload.split_last_chunk::<8>()?;
    if hash::checksum(message) != u64::from_le_bytes(*checksum) {
        return None;
    }
    let seal = v1::Seal::decode(message).ok()?;
    (seal.handoff_id == handoff.0).then_some(seal)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_header() -> impl Strategy<Value = Header> {
        let id = any::<[u8; 16]>().prop_map(HandoffId);
        prop_oneof![
            any::<u32>().prop_map(|protocol| Header::Hello { protocol }),
            (id.clone(), any::<u32>(), any::<u32>(), any::<[u8; 3]>()).prop_map(|(handoff, first, count, units)| {
                let [kind, units @ ..] = units;
                let units = Units { first: units[0], count: units[1] };
                let of = [Header::Data, Header::Ready, Header::Copied][usize::from(kind % 3)];
                of(DataHeader { handoff, first, count, units })
            }),
            id.clone().prop_map(Header::WillCopy),
            id.clone().prop_map(Header::Seal),
            id.clone().prop_map(Header::Cancel),
            id.clone().prop_map(Header::Welcome),
            id.clone().prop_map(Header::KeepAlive),
            id.clone().prop_map(Header::Join),
            id.clone().prop_map(|id| Header::Answer(id, Answer::Ack)),
            (id, 0u32..20, any::<u32>())
                .prop_map(|(id, code, detail)| Header::Answer(id, Answer::Refused(Refusal::from_wire(code, detail)))),
        ]
    }

    proptest! {
        #[test]
        fn round_trip(header in any_header()) {
            prop_assert_eq!(Header::parse(&header.encode()), Some(header));
        }

        #[test]
        fn parsing_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..64), kind in any::<u8>()) {
            let _ = Header::parse(&bytes);
            let mut framed = Header::hello().encode();
            framed[4] = kind;
            for (to, from) in framed[8..].iter_mut().zip(&bytes) {
                *to = *from;
            }
            let _ = Header::parse(&framed);
            let _ = parse_seal(HandoffId([0; 16]), &bytes);
        }

        #[test]
        fn units_are_those_of_the_block_or_none(first in any::<u8>(), count in any::<u8>(), units in 1u8..) {
            let named = Units { first, count }.of(units);
            let end = u16::from(first) + u16::from(count);
            let whole = (first, count) == (0, 0);
            prop_assert_eq!(named.is_some(), whole || (count > 0 && end <= u16::from(units)));
            if let Some(range) = named {
                prop_assert_eq!(Units::new(range.clone(), units).of(units), Some(range));
            }
        }

        #[test]
        fn a_seal_round_trips_under_its_own_id_only(id in any::<[u8; 16]>(), sums in prop::collection::vec(any::<u64>(), 0..9), bit in any::<usize>(),
        ) {
            let seal = v1::Seal { handoff_id: id.to_vec(), checksums: sums, ..Default::default() };
            let bytes = encode_seal(&seal);
            let mut other = id;
            other[0] ^= 1;
            prop_assert_eq!(parse_seal(HandoffId(id), &bytes), Some(seal));
            prop_assert_eq!(parse_seal(HandoffId(other), &bytes), None);
            let mut flipped = bytes.clone();
            flipped[bit / 8 % bytes.len()] ^= 1 << (bit % 8);
            prop_assert_eq!(parse_seal(HandoffId(id), &flipped), None);
            prop_assert_eq!(parse_seal(HandoffId(id), &bytes[..bit % bytes.len()]), None);
        }
    }
}
