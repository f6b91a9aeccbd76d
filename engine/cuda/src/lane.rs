//! What one copy or hash of KV memory at a time has to itself: a stream, pinned memory, and memory of the device for
//! hashes. Knows no trait and no threads: `memory.rs` hands lanes out.
//!
//! Pieces to hash come as a list, mostly of equal ones side by side, so the device gets rows of them: 24 bytes a run of
//! blocks instead of 16 for each 4 KiB. Several turns of them are queued, and the digests of one are taken while the
//! device works on the next.
use std::sync::Arc;

use tandem_memory::Run;

use crate::buffer::Buffer;
use crate::context::Context;
use crate::error::CudaError;
use crate::kernels::blocks::{PieceRow, Xxh3, xxh3};
use crate::loaded::Kernels;
use crate::pinned::Pinned;
use crate::stream::{Event, Stream};

/// Bytes of pinned memory of a lane.
const LANE_BYTES: usize = 4 << 20;
/// Launches that are queued at once.
const TURNS: usize = 4;
/// Pieces that are hashed by one launch: 64 MiB in leaves of 4 KiB.
const TURN_PIECES: usize = 16 << 10;
/// Rows of one launch.
const TURN_ROWS: usize = 2048;
const ROWS_BYTES: usize = TURN_ROWS * size_of::<PieceRow>();
const DIGESTS_BYTES: usize = TURN_PIECES * size_of::<u64>();
const _: () = assert!(TURNS * (ROWS_BYTES + DIGESTS_BYTES) <= LANE_BYTES, "turns fit into the pinned memory");

/// See the head of this file.
pub(crate) struct Lane {
    pub(crate) stream: Stream,
    pinned: Pinned,
    rows: Buffer,
    digests: Buffer,
    /// Each turn's digests are here.
    hashed: [Event; TURNS],
}

impl Lane {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let event = || Event::new(context);
        Ok(Self {
            stream: Stream::new(context)?,
            pinned: Pinned::new(context, LANE_BYTES)?,
            rows: Buffer::new(context, "pieces to hash", TURNS * ROWS_BYTES)?,
            digests: Buffer::new(context, "hashes", TURNS * DIGESTS_BYTES)?,
            hashed: [event()?, event()?, event()?, event()?],
        })
    }

    pub(crate) fn read(&mut self, arena: &Buffer, at: usize, out: &mut [u8]) -> Result<(), CudaError> {
        for (index, piece) in out.chunks_mut(LANE_BYTES).enumerate() {
            arena.download(at + index * LANE_BYTES, &self.pinned, 0, piece.len(), &self.stream)?;
            self.stream.synchronize()?;
            // SAFETY: the copy has ended.
            piece.copy_from_slice(unsafe { self.pinned.slice(0, piece.len()) });
        }
        Ok(())
    }

    pub(crate) fn write(&mut self, arena: &Buffer, at: usize, bytes: &[u8]) -> Result<(), CudaError> {
        for (index, piece) in bytes.chunks(LANE_BYTES).enumerate() {
            // SAFETY: the copy before has ended: each is waited for.
            unsafe { self.pinned.slice_mut(0, piece.len()) }.copy_from_slice(piece);
            arena.upload(at + index * LANE_BYTES, &self.pinned, 0, piece.len(), &self.stream)?;
            self.stream.synchronize()?;
        }
        Ok(())
    }

    /// The digest of each piece; the caller has checked that they are inside the arena.
    pub(crate) fn digests(
        &mut self,
        arena: &Buffer,
        kernels: &Kernels,
        mut pieces: &[Run],
        mut out: &mut [u64],
    ) -> Result<(), CudaError> {
        while !pieces.is_empty() {
            let mut counts = [0; TURNS];
            for (turn, count) in counts.iter_mut().enumerate() {
                if pieces.is_empty() {
                    break;
                }
                *count = self.queue_turn(turn, arena, kernels, pieces)?;
                pieces = &pieces[*count..];
            }
            for (turn, count) in counts.into_iter().enumerate().filter(|(_, count)| *count > 0) {
                self.hashed[turn].synchronize()?;
                let (hashed, rest) = out.split_at_mut(count);
                // SAFETY: the copy of this turn has ended.
                hashed.copy_from_slice(unsafe { self.pinned.slice(digests_at(turn), count) });
                out = rest;
            }
        }
        Ok(())
    }

    /// Queues what is hashed of `pieces` by one launch. Returns how many that are.
    fn queue_turn(
        &mut self,
        turn: usize,
        arena: &Buffer,
        kernels: &Kernels,
        pieces: &[Run],
    ) -> Result<usize, CudaError> {
        let at = turn * ROWS_BYTES;
        // SAFETY: this turn's copies have ended: each is waited for before the next of its number.
        let rows = unsafe { self.pinned.slice_mut::<PieceRow>(at, TURN_ROWS) };
        let (row_count, count) = fill_rows(rows, &pieces[..pieces.len().min(TURN_PIECES)]);
        let bytes = row_count * size_of::<PieceRow>();
        self.rows.upload(at, &self.pinned, at, bytes, &self.stream)?;
        let digests = self.digests.part(turn * DIGESTS_BYTES, DIGESTS_BYTES);
        let rows = self.rows.part(at, bytes);
        let launch = Xxh3 { digests, memory: arena.mem(), rows, row_count, count };
        // SAFETY: the pieces are inside the arena, by the caller's check; all memory is this lane's or the arena's, and
        // waited for before it is used again.
        unsafe { kernels.launch(&self.stream, xxh3(&launch)) }?;
        let digests_bytes = count * size_of::<u64>();
        self.digests.download(turn * DIGESTS_BYTES, &self.pinned, digests_at(turn), digests_bytes, &self.stream)?;
        self.hashed[turn].record(&self.stream)?;
        Ok(count)
    }
}

/// Where a turn's digests come to in the pinned memory: behind all rows.
const fn digests_at(turn: usize) -> usize {
    TURNS * ROWS_BYTES + turn * DIGESTS_BYTES
}

/// Describes `pieces` from the first on, until the rows are full. Returns how many rows and how many pieces.
fn fill_rows(rows: &mut [PieceRow], pieces: &[Run]) -> (usize, usize) {
    let (mut row_count, mut done) = (0, 0);
    while let (Some(row), Some(&Run { at, bytes })) = (rows.get_mut(row_count), pieces.get(done)) {
        *row = PieceRow { at: at as u64, bytes: bytes as u64, first: done as u64 };
        let ends = (at + bytes..).step_by(bytes.max(1));
        let is_next = |(piece, end): &(&Run, usize)| piece.bytes == bytes && piece.at == *end && bytes > 0;
        done += 1 + pieces[done + 1..].iter().zip(ends).take_while(is_next).count();
        row_count += 1;
    }
    (row_count, done)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_ROW: PieceRow = PieceRow { at: 0, bytes: 0, first: 0 };

    fn run((at, bytes): (usize, usize)) -> Run {
        Run { at, bytes }
    }

    #[test]
    fn equal_neighbours_are_a_row() {
        let pieces = [(64, 8), (72, 8), (80, 8), (88, 16), (104, 16), (0, 16), (8, 16), (24, 0), (24, 0), (24, 8)];
        let mut rows = [NO_ROW; 9];
        assert_eq!(fill_rows(&mut rows, &pieces.map(run)), (7, 10));
        let row = |at, bytes, first| PieceRow { at, bytes, first };
        let expected =
            [row(64, 8, 0), row(88, 16, 3), row(0, 16, 5), row(8, 16, 6), row(24, 0, 7), row(24, 0, 8), row(24, 8, 9)];
        assert_eq!(rows[..7], expected);
        assert_eq!(fill_rows(&mut rows, &[]), (0, 0));
    }

    #[test]
    fn what_has_no_row_is_left() {
        let pieces = [(0, 8), (8, 8), (32, 8), (48, 8)].map(run);
        let mut rows = [NO_ROW; 2];
        assert_eq!(fill_rows(&mut rows, &pieces), (2, 3));
        assert_eq!(fill_rows(&mut rows, &pieces[3..]), (1, 1));
        assert_eq!(rows[0], PieceRow { at: 48, bytes: 8, first: 0 });
    }
}
