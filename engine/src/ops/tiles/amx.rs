//! The eight tile registers of AMX (Intel SDM vol. 1 ch. 18, vol. 2 `TDPBF16PS`): what the product asks of them, and
//! the instructions. They are written in assembly because Rust's intrinsics for them are unstable.
use std::arch::asm;

/// Rows of a tile.
pub(in crate::ops) const TILE_ROWS: usize = 16;
/// Bytes of a tile's row: 16 f32 or 16 pairs of bf16.
pub(in crate::ops) const ROW_BYTES: usize = 64;

/// What a tile register holds, in memory: 16 rows one after another, each a cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::ops) struct Tile(pub [[u32; ROW_BYTES / 4]; TILE_ROWS]);

impl Tile {
    pub const ZERO: Self = Self([[0; ROW_BYTES / 4]; TILE_ROWS]);
}

/// The tile registers of a thread, from [`Tiles::configured`] to the drop.
///
/// # Safety
/// Of all methods: the machine has the instructions and the process may use them; register numbers are below 8;
/// pointers are valid for the register's rows, `stride` bytes apart, which need not begin at a line; the value stays on
/// its thread, and nothing else uses the thread's tile registers while it lives.
pub(in crate::ops) trait Tiles: Sized {
    unsafe fn configured(shapes: &Shapes) -> Self;
    /// Other shapes. The registers hold zeros then.
    unsafe fn configure(&mut self, shapes: &Shapes);
    unsafe fn zero<const T: usize>(&mut self);
    unsafe fn load<const T: usize>(&mut self, from: *const u8, stride: usize);
    unsafe fn store<const T: usize>(&mut self, to: *mut u8, stride: usize);
    /// `SUM[m][n] += Σ_k A[m][k] · B[k][n]`: of whole tiles, `SUM` is 16 × 16 f32, `A` has 16 rows of 16 pairs of bf16,
    /// `B` 16 rows of pairs, each pair of one column. The shapes must fit together.
    unsafe fn multiply<const SUM: usize, const A: usize, const B: usize>(&mut self);
}

/// What `ldtilecfg` reads.
#[repr(C, align(64))]
pub(in crate::ops) struct Shapes {
    pub palette: u8,
    pub start_row: u8,
    pub reserved: [u8; 14],
    pub row_bytes: [u16; 16],
    pub rows: [u8; 16],
}

impl Shapes {
    /// Of palette 1: the eight registers' rows and the bytes of a row.
    pub const fn new(tiles: [(u8, u16); 8]) -> Self {
        // Names that the palette does not have must have no shape.
        let mut shapes = Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        let mut tile = 0;
        while tile < tiles.len() {
            (shapes.rows[tile], shapes.row_bytes[tile]) = tiles[tile];
            tile += 1;
        }
        shapes
    }
}

/// Eight whole tiles.
pub(in crate::ops) static WHOLE: Shapes = Shapes::new([(TILE_ROWS as u8, ROW_BYTES as u16); 8]);

/// The registers themselves. The drop gives them up: while a thread's tiles are in use, every switch away from it saves
/// 8 KiB, and its core does not reach the deeper idle states. It costs nothing beside a task, and so no thread keeps a
/// configuration that somebody else (a library's own tile code) could have replaced.
pub(in crate::ops) struct Amx {
    /// Of one thread.
    _not_send: std::marker::PhantomData<*mut ()>,
}

/// SAFETY of every block below: see the trait. No statement declares the tile registers: the compiler has none of its
/// own to put there, since no function here enables AMX, so they keep their contents from one to the next; and it
/// keeps the order of `asm!` statements, because none of them is `pure`.
#[allow(clippy::undocumented_unsafe_blocks, reason = "one sentence above covers all of these one-line bodies")]
impl Tiles for Amx {
    #[inline(always)]
    unsafe fn configured(shapes: &Shapes) -> Self {
        let mut tiles = Self { _not_send: std::marker::PhantomData };
        unsafe { tiles.configure(shapes) };
        tiles
    }
    #[inline(always)]
    unsafe fn configure(&mut self, shapes: &Shapes) {
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const *shapes, options(nostack, preserves_flags, readonly)) };
    }
    #[inline(always)]
    unsafe fn zero<const T: usize>(&mut self) {
        unsafe { asm!("tilezero tmm{}", const T, options(nostack, preserves_flags, nomem)) };
    }
    #[inline(always)]
    unsafe fn load<const T: usize>(&mut self, from: *const u8, stride: usize) {
        unsafe {
            asm!("tileloadd tmm{tile}, [{from} + {stride} * 1]", tile = const T, from = in(reg) from,
                stride = in(reg) stride, options(nostack, preserves_flags, readonly));
        }
    }
    #[inline(always)]
    unsafe fn store<const T: usize>(&mut self, to: *mut u8, stride: usize) {
        unsafe {
            asm!("tilestored [{to} + {stride} * 1], tmm{tile}", tile = const T, to = in(reg) to,
                stride = in(reg) stride, options(nostack, preserves_flags));
        }
    }
    #[inline(always)]
    unsafe fn multiply<const SUM: usize, const A: usize, const B: usize>(&mut self) {
        unsafe {
            asm!("tdpbf16ps tmm{sum}, tmm{a}, tmm{b}", sum = const SUM, a = const A, b = const B,
                options(nostack, preserves_flags, nomem));
        }
    }
}

impl Drop for Amx {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: who made the value has the instruction; nobody reads the registers after this.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
    }
}
