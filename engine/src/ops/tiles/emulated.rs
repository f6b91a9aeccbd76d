//! Tile registers in plain Rust, for tests: as Intel describes them, and such as compute something else.
use super::amx::{ROW_BYTES, Shapes, Tile, Tiles};

/// As they should be.
pub(in crate::ops) type Emulated = Registers<FAULTLESS>;
/// One never takes a sum up: what a wrong configuration or a wrong operand would look like.
pub(super) type Forgetful = Registers<FORGETFUL>;
/// The pairs of `k` are added up in one chain, as `vdpbf16ps` does.
pub(super) type OneChain = Registers<ONE_CHAIN>;

const FAULTLESS: u8 = 0;
const FORGETFUL: u8 = 1;
const ONE_CHAIN: u8 = 2;

/// The registers after the instructions' description, but for a fault: 8 tiles that are configured first, whose rows
/// and row lengths decide what an instruction does.
pub(in crate::ops) struct Registers<const FAULT: u8> {
    row_bytes: [usize; 8],
    rows: [usize; 8],
    tiles: [Tile; 8],
}

/// SAFETY of every block below: as the trait's; a row of a tile lies within it.
#[allow(clippy::undocumented_unsafe_blocks, reason = "one sentence above covers all of these bodies")]
impl<const FAULT: u8> Tiles for Registers<FAULT> {
    unsafe fn configured(shapes: &Shapes) -> Self {
        // LDTILECFG faults if one of these does not hold.
        let Shapes { palette, start_row, reserved, row_bytes, rows } = shapes;
        assert_eq!((*palette, *start_row, reserved), (1, 0, &[0; 14]));
        assert!(row_bytes[8..].iter().all(|&bytes| bytes == 0) && rows[8..].iter().all(|&rows| rows == 0));
        assert!(row_bytes[..8].iter().all(|bytes| (1..=64).contains(bytes)));
        assert!(rows[..8].iter().all(|rows| (1..=16).contains(rows)));
        Self {
            row_bytes: std::array::from_fn(|tile| usize::from(row_bytes[tile])),
            rows: std::array::from_fn(|tile| usize::from(rows[tile])),
            tiles: [Tile([[f32::NAN.to_bits(); 16]; 16]); 8],
        }
    }
    unsafe fn configure(&mut self, shapes: &Shapes) {
        *self = unsafe { Self::configured(shapes) };
        self.tiles = [Tile::ZERO; 8];
    }
    unsafe fn zero<const T: usize>(&mut self) {
        self.tiles[T] = Tile::ZERO;
    }
    unsafe fn load<const T: usize>(&mut self, from: *const u8, stride: usize) {
        self.tiles[T] = Tile::ZERO;
        if FAULT == FORGETFUL && T == 3 {
            return;
        }
        for row in 0..self.rows[T] {
            let to = self.tiles[T].0[row].as_mut_ptr().cast::<u8>();
            unsafe { from.add(row * stride).copy_to(to, self.row_bytes[T]) };
        }
    }
    unsafe fn store<const T: usize>(&mut self, to: *mut u8, stride: usize) {
        for row in 0..self.rows[T] {
            let from = self.tiles[T].0[row].as_ptr().cast::<u8>();
            unsafe { to.add(row * stride).copy_from(from, self.row_bytes[T]) };
        }
    }
    unsafe fn multiply<const SUM: usize, const A: usize, const B: usize>(&mut self) {
        let (columns, pairs) = (self.row_bytes[SUM] / 4, self.row_bytes[A] / 4);
        assert!(SUM != A && SUM != B && A != B);
        assert!(self.rows[SUM] == self.rows[A] && self.row_bytes[SUM] == self.row_bytes[B] && self.rows[B] == pairs);
        if FAULT == ONE_CHAIN {
            return self.multiply_in_one_chain(SUM, A, B);
        }
        for m in 0..self.rows[SUM] {
            let mut chains = [[0.0f32; 2]; ROW_BYTES / 4];
            for k in 0..pairs {
                let a = pair(self.tiles[A].0[m][k]);
                for (n, chain) in chains.iter_mut().enumerate().take(columns) {
                    let b = pair(self.tiles[B].0[k][n]);
                    *chain = [0, 1].map(|half| flushed(a[half].mul_add(b[half], chain[half])));
                }
            }
            for (sum, chain) in self.tiles[SUM].0[m].iter_mut().zip(chains).take(columns) {
                let both = flushed(chain[0] + chain[1]);
                *sum = flushed(flushed(f32::from_bits(*sum)) + both).to_bits();
            }
        }
    }
}

impl<const FAULT: u8> Registers<FAULT> {
    fn multiply_in_one_chain(&mut self, sum: usize, a: usize, b: usize) {
        let tiles = &mut self.tiles;
        for m in 0..16 {
            for n in 0..16 {
                let chain = (0..16).fold(f32::from_bits(tiles[sum].0[m][n]), |sum, k| {
                    let (a, b) = (pair(tiles[a].0[m][k]), pair(tiles[b].0[k][n]));
                    a[0].mul_add(b[0], a[1].mul_add(b[1], sum))
                });
                tiles[sum].0[m][n] = chain.to_bits();
            }
        }
    }
}

/// The bf16 in the low and the high half.
pub(super) fn pair(bits: u32) -> [f32; 2] {
    [f32::from_bits(bits << 16), f32::from_bits(bits & 0xffff_0000)].map(flushed)
}

/// Subnormal numbers count as zero.
fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { 0.0 } else { x }
}
