//! Which endpoint of which process a hello or a welcome comes from. An address names a worker, and a worker may have
//! had several endpoints to us, one after the other; UCX pairs each with one of ours, and drops what is sent to the
//! other half of a pair that is gone. So both ends tell the number of theirs (its *generation*), and whoever meets a
//! new number at a known address replaces its own end, too.
//!
//! ```text
//! 0..8   its endpoint       (little endian)
//! 8..16  the other side's endpoint that it answers to, 0 when it knows none
//! 16..52 its process
//! 52..76 its memory as processes of its host map it, zeros if they do not (`one_copy/`): process id, descriptor
//!        (4 bytes each), inode, bytes (8 bytes each)
//! ```
use tandem_memory::Share;

use super::process::{NAME_BYTES, ProcessName};

/// Of an origin as it travels.
pub(super) const ORIGIN_BYTES: usize = 16 + NAME_BYTES + SHARE_BYTES;
const SHARE_BYTES: usize = 24;

/// The number of an endpoint on its own side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Generation(pub(super) u64);

/// Where a hello or a welcome comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Origin {
    pub(super) generation: Generation,
    /// Of the other side's endpoint, as far as this one knows.
    pub(super) paired: Option<Generation>,
    pub(super) process: ProcessName,
    /// Its word, as the rest.
    pub(super) memory: Option<Share>,
}

impl Generation {
    pub(super) fn encode(self) -> [u8; 8] {
        self.0.to_le_bytes()
    }

    pub(super) fn parse(bytes: [u8; 8]) -> Self {
        Self(u64::from_le_bytes(bytes))
    }
}

impl Origin {
    pub(super) fn encode(&self) -> [u8; ORIGIN_BYTES] {
        let mut bytes = [0; ORIGIN_BYTES];
        bytes[..8].copy_from_slice(&self.generation.encode());
        bytes[8..16].copy_from_slice(&self.paired.unwrap_or(Generation(0)).encode());
        let (process, memory) = bytes[16..].split_at_mut(NAME_BYTES);
        process.copy_from_slice(&self.process.encode());
        memory.copy_from_slice(&encode_share(self.memory));
        bytes
    }

    /// `None`: it is cut off. Otherwise with what follows it.
    pub(super) fn parse(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (generation, rest) = bytes.split_first_chunk::<8>()?;
        let (paired, rest) = rest.split_first_chunk::<8>()?;
        let (process, rest) = rest.split_first_chunk::<NAME_BYTES>()?;
        let (memory, rest) = rest.split_first_chunk::<SHARE_BYTES>()?;
        let paired = Some(Generation::parse(*paired)).filter(|paired| paired.0 != 0);
        let generation = Generation::parse(*generation);
        let (process, memory) = (ProcessName::parse(process), parse_share(memory));
        Some((Self { generation, paired, process, memory }, rest))
    }
}

fn encode_share(share: Option<Share>) -> [u8; SHARE_BYTES] {
    let mut bytes = [0; SHARE_BYTES];
    if let Some(share) = share {
        bytes[..4].copy_from_slice(&share.process.to_le_bytes());
        bytes[4..8].copy_from_slice(&share.descriptor.to_le_bytes());
        bytes[8..16].copy_from_slice(&share.inode.to_le_bytes());
        bytes[16..].copy_from_slice(&share.bytes.to_le_bytes());
    }
    bytes
}

fn parse_share(bytes: &[u8; SHARE_BYTES]) -> Option<Share> {
    let half = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let whole = |at: usize| u64::from(half(at)) | u64::from(half(at + 4)) << 32;
    let share = Share { process: half(0), descriptor: half(4), inode: whole(8), bytes: whole(16) };
    (share.bytes > 0).then_some(share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_round_trips_and_a_short_one_is_none() {
        let share = Share { process: 9, descriptor: 3, inode: u64::MAX - 5, bytes: 1 << 40 };
        for (paired, memory) in [(None, Some(share)), (Some(Generation(9)), None)] {
            let origin = Origin { generation: Generation(7), paired, process: ProcessName::own(), memory };
            let mut bytes = origin.encode().to_vec();
            bytes.push(5);
            assert_eq!(Origin::parse(&bytes), Some((origin, [5].as_slice())));
            assert_eq!(Origin::parse(&bytes[..ORIGIN_BYTES - 1]), None);
        }
    }
}
