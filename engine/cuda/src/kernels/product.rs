//! Launches of matrix products: `kernels/products.cu`.
use super::Kernel;
use super::launch::{Arg, Checks, Launch, Mem, Refused};

/// The kernels of `products.cu`.
pub const KERNELS: [Kernel; 5] = [
    Kernel { name: "product_rows_16", shared_bytes: 0 },
    Kernel { name: "product_rows_32", shared_bytes: 0 },
    Kernel { name: "product_rows_64", shared_bytes: 0 },
    Kernel { name: "product_tiles_64", shared_bytes: TILES_64.shared_bytes() },
    Kernel { name: "product_tiles_128", shared_bytes: TILES_128.shared_bytes() },
];

/// Values of `k` that have one accumulator: `SEGMENT` in `products.cu`.
pub const SEGMENT: usize = 1024;

/// `out = x · weightᵀ`, or another [`Output`].
#[derive(Clone, Copy, Debug)]
pub struct Product {
    /// What becomes of the results.
    pub output: Output,
    /// bf16 `[rows][k]`.
    pub x: Mem,
    /// bf16 `[n][k]`.
    pub weight: Mem,
    /// Rows of `x`.
    pub rows: usize,
    /// Rows of `weight`: columns of the result. Even.
    pub n: usize,
    /// A multiple of 32.
    pub k: usize,
}

/// What becomes of results.
#[derive(Clone, Copy, Debug)]
pub enum Output {
    /// Stored: f32 `[rows][n]`.
    Store(Mem),
    /// Added: f32 `[rows][n]`.
    Add(Mem),
    /// `silu(gate) * up` to bf16 `[rows][n / 2]`: rows 2i and 2i + 1 of `weight` are row i of the gate's matrix and of
    /// the other one's.
    SwiGlu(Mem),
}

/// Which kernel. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// 16 rows at a time; weights go straight to registers, segments of `k` side by side. For decode.
    Rows16,
    /// 32 rows.
    Rows32,
    /// 64 rows.
    Rows64,
    /// Tiles of 64 × 64 in shared memory, segments one after another.
    Tiles64,
    /// Tiles of 128 × 128.
    Tiles128,
}

impl Plan {
    /// All.
    pub const ALL: [Self; 5] = [Self::Rows16, Self::Rows32, Self::Rows64, Self::Tiles64, Self::Tiles128];

    /// The one for so many rows, as long as nobody has measured better.
    pub fn of(rows: usize, n: usize) -> Self {
        match rows {
            0..=16 => Self::Rows16,
            17..=32 => Self::Rows32,
            33..=64 => Self::Rows64,
            // Large tiles where there are enough of them for a card's multiprocessors.
            _ if rows.div_ceil(128) * n.div_ceil(128) >= 128 => Self::Tiles128,
            _ => Self::Tiles64,
        }
    }
}

/// The product, by the kernel for so many rows.
///
/// # Errors
/// For memory that is too small, and sizes that the kernel does not take.
pub fn product(product: &Product) -> Result<Launch, Refused> {
    product_by(Plan::of(product.rows, product.n), product)
}

/// The product, by the kernel `plan`.
///
/// # Errors
/// As [`product`].
pub fn product_by(plan: Plan, product: &Product) -> Result<Launch, Refused> {
    let &Product { output, x, weight, rows, n, k } = product;
    let check = Checks("product");
    check.require(k > 0 && k.is_multiple_of(32) && n.is_multiple_of(2), || format!("n = {n}, k = {k}"))?;
    let (out, mode) = match output {
        Output::Store(out) => (check.array("out", out, check.area("out", &[rows, n])?, 4)?, 0),
        Output::Add(out) => (check.array("out", out, check.area("out", &[rows, n])?, 4)?, 1),
        Output::SwiGlu(out) => (check.array("out", out, check.area("out", &[rows, n / 2])?, 2)?, 2),
    };
    let args = [
        out,
        check.wide("x", x, check.area("x", &[rows, k])?, 2)?,
        check.wide("weight", weight, check.area("weight", &[n, k])?, 2)?,
        Arg::U32(check.size("rows", rows)?),
        Arg::U32(check.size("n", n)?),
        Arg::U32(check.size("k", k)?),
        Arg::U32(mode),
    ];
    let tiles = |height: usize, width: usize| {
        Ok([check.size("n", n.div_ceil(width))?, check.size("rows", rows.div_ceil(height))?, 1])
    };
    match plan {
        Plan::Rows16 => Ok(few("product_rows_16", &tiles(16, 16)?, 16, n, k, &args)),
        Plan::Rows32 => Ok(few("product_rows_32", &tiles(32, 32)?, 32, n, k, &args)),
        Plan::Rows64 => Ok(few("product_rows_64", &tiles(64, 32)?, 32, n, k, &args)),
        Plan::Tiles64 => Ok(TILES_64.launch("product_tiles_64", tiles(64, 64)?, &args)),
        Plan::Tiles128 => Ok(TILES_128.launch("product_tiles_128", tiles(128, 128)?, &args)),
    }
}

/// Warps of a block of the kernels for few rows at most.
const MOST_WARPS: usize = 8;

/// A block has warps for as many segments as there are, up to 8; what is left of the 8 are further columns.
fn few(kernel: &'static str, tiles: &[u32; 3], width: usize, n: usize, k: usize, args: &[Arg]) -> Launch {
    let segments = k.div_ceil(SEGMENT).min(MOST_WARPS).next_power_of_two();
    let columns = (MOST_WARPS / segments).min(n.div_ceil(width));
    let args = [args, &[Arg::U32(segments as u32)]].concat();
    let blocks = n.div_ceil(width * columns) as u32;
    Launch::new(kernel, [blocks, tiles[1], 1], (32 * segments * columns) as u32, &args)
}

/// A kernel for many rows.
struct Tiles {
    threads: u32,
    /// Rows of both matrices that are in shared memory.
    rows: u32,
    stages: u32,
}

const TILES_64: Tiles = Tiles { threads: 128, rows: 128, stages: 4 };
const TILES_128: Tiles = Tiles { threads: 256, rows: 256, stages: 4 };

impl Tiles {
    /// Each stage has 32 values of `k` of each row.
    const fn shared_bytes(&self) -> u32 {
        self.stages * self.rows * 64
    }

    fn launch(&self, kernel: &'static str, grid: [u32; 3], args: &[Arg]) -> Launch {
        // Neighbouring blocks share their columns of weights: rows go first.
        Launch::new(kernel, [grid[1], grid[0], 1], self.threads, args).with_shared(self.shared_bytes())
    }
}
