//! The head of a frame on a socket, and what both halves of a connection share of it.
use std::io;

use crate::error::{TransferError, TransferErrorKind};
use crate::wire::{HEADER_BYTES, Header};

/// Bytes that go through the processor's cache at once, each way: a quarter of a core's second-level cache, so that
/// they stay there where several connections take turns.
pub(super) const SCRATCH_BYTES: usize = 256 << 10;
/// Header and payload length.
pub(super) const PRELUDE_BYTES: usize = HEADER_BYTES + 8;

pub(super) fn prelude(header: &Header, len: u64) -> [u8; PRELUDE_BYTES] {
    let mut bytes = [0; PRELUDE_BYTES];
    bytes[..HEADER_BYTES].copy_from_slice(&header.encode());
    bytes[HEADER_BYTES..].copy_from_slice(&len.to_le_bytes());
    bytes
}

pub(super) fn parse_prelude(bytes: &[u8; PRELUDE_BYTES]) -> Option<(Header, u64)> {
    let (header, len) = bytes.split_at(HEADER_BYTES);
    Some((Header::parse(header)?, u64::from_le_bytes(len.try_into().ok()?)))
}

pub(super) fn garbage() -> TransferError {
    TransferError::new(TransferErrorKind::Corrupt, "what arrived is not our protocol")
}

pub(super) fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}
