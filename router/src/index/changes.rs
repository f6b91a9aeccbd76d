//! What a node tells of its cache, read from the wire: the rest of the index sees only this form.
use tandem_proto::{Error, SequenceHash, v1};

/// A [`v1::KvEvents`] whose hashes have the length of one.
#[derive(Clone, Debug, Default)]
pub struct CacheChanges {
    /// Number of the first change.
    pub first: u64,
    /// Nothing told before holds any more.
    pub snapshot: bool,
    /// Of the blocks that came or went, in order.
    pub hashes: Vec<SequenceHash>,
    /// Which of them went: bit `i % 8` of byte `i / 8`. Absent bytes are zero.
    pub removed: Vec<u8>,
}

impl TryFrom<v1::KvEvents> for CacheChanges {
    type Error = Error;

    fn try_from(events: v1::KvEvents) -> Result<Self, Error> {
        let v1::KvEvents { first, snapshot, hashes, removed } = events;
        Ok(Self { first, snapshot, hashes: SequenceHash::all_from_wire(&hashes)?, removed })
    }
}
