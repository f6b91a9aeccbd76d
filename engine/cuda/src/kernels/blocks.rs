//! Launches on the bytes of KV blocks: `kernels/blocks.cu`.
use super::Kernel;
use super::launch::{Arg, Checks, Launch, Mem, Refused};

/// The kernels of `blocks.cu`.
pub const KERNELS: [Kernel; 2] =
    [Kernel { name: "xxh3_pieces", shared_bytes: 0 }, Kernel { name: "copy_blocks", shared_bytes: 0 }];

/// Warps of a block of `xxh3_pieces`; each has a piece.
const WARPS: usize = 4;
/// Threads of a block of `copy_blocks`.
const THREADS: u32 = 256;

/// Pieces of one length that lie side by side, as the kernel reads them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct PieceRow {
    /// First byte of the first one, counted from the memory's start; a multiple of 8.
    pub at: u64,
    /// Length of each; a multiple of 8.
    pub bytes: u64,
    /// Pieces of the rows before this one.
    pub first: u64,
}

/// Hashes of pieces.
#[derive(Clone, Copy, Debug)]
pub struct Xxh3 {
    /// Out: u64 `[count]`.
    pub digests: Mem,
    /// What is hashed; its address is a multiple of 8.
    pub memory: Mem,
    /// [`PieceRow`] `[row_count]`, all within `memory`, in the order of their pieces.
    pub rows: Mem,
    /// Number of rows, at least 1.
    pub row_count: usize,
    /// Number of pieces.
    pub count: usize,
}

/// `digests[i] = XXH3-64(piece i)`, without a seed. A warp each: many short ones are faster than few long ones.
///
/// # Errors
/// For memory that is too small or not aligned, and for no rows.
pub fn xxh3(xxh3: &Xxh3) -> Result<Launch, Refused> {
    let &Xxh3 { digests, memory, rows, row_count, count } = xxh3;
    let check = Checks("xxh3_pieces");
    check.require(row_count > 0, || "no rows".to_owned())?;
    let args = [
        check.array("digests", digests, count, 8)?,
        check.array("memory", memory, memory.bytes / 8, 8)?,
        check.array("rows", rows, 3 * row_count, size_of::<u64>())?,
        Arg::U32(check.size("row_count", row_count)?),
        Arg::U32(check.size("count", count)?),
    ];
    Ok(Launch::new("xxh3_pieces", [check.size("count", count.div_ceil(WARPS))?, 1, 1], 32 * WARPS as u32, &args))
}

/// Copies between blocks of an arena.
#[derive(Clone, Copy, Debug)]
pub struct CopyBlocks {
    /// The arena.
    pub memory: Mem,
    /// u32 `[count][2]`: from which block to which. No block is written twice, or written and read.
    pub pairs: Mem,
    /// Number of pairs.
    pub count: usize,
    /// Bytes of a block, a multiple of 16.
    pub block_bytes: usize,
}

/// `memory[pairs[i].1] = memory[pairs[i].0]`.
///
/// # Errors
/// As [`xxh3`].
pub fn copy_blocks(copy: &CopyBlocks) -> Result<Launch, Refused> {
    let &CopyBlocks { memory, pairs, count, block_bytes } = copy;
    let check = Checks("copy_blocks");
    check.require(block_bytes.is_multiple_of(16) && block_bytes > 0, || format!("blocks of {block_bytes} bytes"))?;
    let words = block_bytes / 16;
    let args =
        [check.wide("memory", memory, words, 16)?, check.array("pairs", pairs, count, 8)?, Arg::U64(words as u64)];
    // Eight words a thread.
    let share = words.div_ceil(8 * THREADS as usize).min(64);
    Ok(Launch::new("copy_blocks", [check.size("count", count)?, check.size("share", share)?, 1], THREADS, &args))
}
