//! The writing half of a connection: takes frames off its queue, reads their bytes from the arena when their turn
//! comes, and puts them on the socket with their tags, encrypted where that is asked for.
use std::io::{self, Write};
use std::net::TcpStream;
use std::sync::Arc;

use super::frame::{PRELUDE_BYTES, SCRATCH_BYTES, prelude};
use super::queue::{DataFrame, Frame, FrameQueue};
use super::sealing::{Protection, RECORD_BYTES, Sealer, TAG_BYTES};
use crate::arena::Arena;
use crate::wire::Header;

/// Where data starts in the scratch, aligned; the frame's head stands just before.
const DATA_AT: usize = 64;
const HEAD_BYTES: usize = PRELUDE_BYTES + TAG_BYTES;

pub(super) struct Writer {
    socket: TcpStream,
    arena: Arc<Arena>,
    sealer: Sealer,
    protection: Protection,
    scratch: Vec<u8>,
}

impl Writer {
    pub(super) fn new(socket: TcpStream, arena: Arc<Arena>, sealer: Sealer, protection: Protection) -> Self {
        Self { socket, arena, sealer, protection, scratch: vec![0; DATA_AT + SCRATCH_BYTES + TAG_BYTES] }
    }

    /// Until the queue is closed or the socket fails.
    pub(super) fn run(&mut self, queue: &FrameQueue) -> io::Result<()> {
        while let Some(frame) = queue.next() {
            match frame {
                Frame::Bare(header) => self.message(&header, &[])?,
                Frame::Join { handoff, proof } => self.message(&Header::Join(handoff), &proof)?,
                Frame::Seal { handoff, payload, .. } => self.message(&Header::Seal(handoff), &payload)?,
                Frame::Data(data) => self.data(&data)?,
            }
        }
        Ok(())
    }

    /// A frame whose payload, if it has one, has tags whatever the protection.
    pub(super) fn message(&mut self, header: &Header, payload: &[u8]) -> io::Result<()> {
        let prelude = prelude(header, payload.len() as u64);
        let mut bytes = prelude.to_vec();
        bytes.extend(self.sealer.bind(&prelude));
        match self.protection {
            _ if payload.is_empty() => {}
            Protection::Bound => {
                bytes.extend_from_slice(payload);
                bytes.extend(self.sealer.bind(payload));
            }
            Protection::Encrypted => {
                for part in payload.chunks(RECORD_BYTES) {
                    let at = bytes.len();
                    bytes.extend_from_slice(part);
                    let tag = self.sealer.encrypt(&prelude, &mut bytes[at..]);
                    bytes.extend(tag);
                }
            }
        }
        self.socket.write_all(&bytes)
    }

    fn data(&mut self, data: &DataFrame) -> io::Result<()> {
        let len = data.bytes() - if data.faults.truncate_push { 8 } else { 0 };
        let prelude = prelude(&Header::Data(data.range), len as u64);
        self.scratch[DATA_AT - HEAD_BYTES..][..PRELUDE_BYTES].copy_from_slice(&prelude);
        let tag = self.sealer.bind(&prelude);
        self.scratch[DATA_AT - TAG_BYTES..DATA_AT].copy_from_slice(&tag);
        let most = if self.protection == Protection::Encrypted { RECORD_BYTES } else { SCRATCH_BYTES };
        let (mut from, mut offset) = (DATA_AT - HEAD_BYTES, 0);
        while offset < len {
            let part = most.min(len - offset);
            self.arena.gather(&data.runs, offset, &mut self.scratch[DATA_AT..DATA_AT + part]);
            self.scratch[DATA_AT] ^= u8::from(data.faults.flip_byte && offset == 0);
            let mut end = DATA_AT + part;
            if self.protection == Protection::Encrypted {
                let tag = self.sealer.encrypt(&prelude, &mut self.scratch[DATA_AT..end]);
                self.scratch[end..end + TAG_BYTES].copy_from_slice(&tag);
                end += TAG_BYTES;
            }
            self.socket.write_all(&self.scratch[from..end])?;
            (from, offset) = (DATA_AT, offset + part);
        }
        // A truncated range of 8 bytes has no payload at all.
        if len == 0 { self.socket.write_all(&self.scratch[from..DATA_AT]) } else { Ok(()) }
    }
}
