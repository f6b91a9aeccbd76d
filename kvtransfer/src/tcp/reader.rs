//! Buffered reading that hands out its buffer, so that bytes are copied once on their way into the arena. Every head is
//! checked against its tag before anybody sees it, every encrypted record is decrypted where it was read.
use std::io::{self, Read};
use std::net::TcpStream;

use super::frame::{PRELUDE_BYTES, SCRATCH_BYTES, garbage, is_timeout, parse_prelude};
use super::sealing::{Opener, Protection, RECORD_BYTES, TAG_BYTES};
use crate::error::TransferError;
use crate::wire::Header;

// A record fits, whole, behind what was read before it.
const _: () = assert!(SCRATCH_BYTES >= 2 * (RECORD_BYTES + TAG_BYTES));

/// The head of a frame whose payload comes next.
pub(super) struct Head {
    pub(super) header: Header,
    /// Bytes of the payload.
    pub(super) len: u64,
    bytes: [u8; PRELUDE_BYTES],
}

pub(super) struct Reader<'a> {
    stream: &'a TcpStream,
    opener: Opener,
    protection: Protection,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(stream: &'a TcpStream, opener: Opener, protection: Protection) -> Self {
        Self { stream, opener, protection, buffer: vec![0; SCRATCH_BYTES], start: 0, end: 0 }
    }

    /// Waits for the next frame as long as it takes.
    pub(super) fn head(&mut self) -> Result<Head, TransferError> {
        while self.start == self.end {
            match self.fill() {
                Err(error) if is_timeout(&error) => {}
                other => other?,
            }
        }
        let mut bytes = [0; PRELUDE_BYTES];
        bytes.copy_from_slice(self.take(PRELUDE_BYTES)?);
        let tag = self.tag()?;
        self.opener.check(&bytes, tag)?;
        let (header, len) = parse_prelude(&bytes).ok_or_else(garbage)?;
        Ok(Head { header, len, bytes })
    }

    /// The next of the `left` bytes of a payload: a part of whole words, unless it is the last. Data that is not
    /// encrypted is as it came.
    pub(super) fn part(&mut self, head: &Head, left: u64) -> Result<&[u8], TransferError> {
        if self.protection == Protection::Encrypted {
            let bytes = RECORD_BYTES.min(left as usize) + TAG_BYTES;
            self.ensure(bytes)?;
            let at = self.start;
            self.start += bytes;
            return self.opener.decrypt(&head.bytes, &mut self.buffer[at..at + bytes]);
        }
        self.ensure(left.min(8) as usize)?;
        let here = ((self.end - self.start) as u64).min(left);
        Ok(self.take(if here < left { here & !7 } else { here } as usize)?)
    }

    /// A short payload, whole.
    pub(super) fn payload(&mut self, head: &Head) -> Result<Vec<u8>, TransferError> {
        let mut payload = Vec::with_capacity(head.len as usize);
        while (payload.len() as u64) < head.len {
            let left = head.len - payload.len() as u64;
            payload.extend_from_slice(self.part(head, left)?);
        }
        // Nothing is behind a head without a payload.
        if self.protection == Protection::Bound && head.len > 0 {
            let tag = self.tag()?;
            self.opener.check(&payload, tag)?;
        }
        Ok(payload)
    }

    /// Reads over the payload of a range.
    pub(super) fn discard(&mut self, head: &Head) -> Result<(), TransferError> {
        let mut left = head.len;
        while left > 0 {
            left -= self.part(head, left)?.len() as u64;
        }
        Ok(())
    }

    fn tag(&mut self) -> io::Result<[u8; TAG_BYTES]> {
        let mut tag = [0; TAG_BYTES];
        tag.copy_from_slice(self.take(TAG_BYTES)?);
        Ok(tag)
    }

    fn take(&mut self, bytes: usize) -> io::Result<&[u8]> {
        self.ensure(bytes)?;
        let at = self.start;
        self.start += bytes;
        Ok(&self.buffer[at..at + bytes])
    }

    /// At least `bytes` (a record at most) are in the buffer.
    fn ensure(&mut self, bytes: usize) -> io::Result<()> {
        while self.end - self.start < bytes {
            self.fill()?;
        }
        Ok(())
    }

    /// Reads once. What is still there moves to the front only where little room is left behind it.
    fn fill(&mut self) -> io::Result<()> {
        if self.start == self.end || self.buffer.len() - self.start < RECORD_BYTES + TAG_BYTES {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        match self.stream.read(&mut self.buffer[self.end..]) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => {
                self.end += read;
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(error),
        }
    }
}
