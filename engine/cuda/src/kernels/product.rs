//! Launches of matrix products: `kernels/products.cu`.
use super::Kernel;
use super::launch::{Arg, Checks, Launch, Mem, Refused};

/// The kernels of `products.cu`.
pub const KERNELS: [Kernel; 6] = [
    Kernel { name: "product_rows_16", shared_bytes: ROWS_16.shared_bytes(MOST_WARPS) },
    Kernel { name: "product_rows_32", shared_bytes: ROWS_32.shared_bytes(MOST_WARPS) },
    Kernel { name: "product_rows_64", shared_bytes: ROWS_64.shared_bytes(MOST_WARPS) },
    Kernel { name: "product_tiles_64", shared_bytes: TILES_64.shared_bytes() },
    Kernel { name: "product_tiles_128", shared_bytes: TILES_128.shared_bytes() },
    Kernel { name: "product_sum", shared_bytes: 0 },
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
    /// Rows of `weight`: columns of the result; even for [`Output::SwiGlu`].
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
    let args = args(product)?;
    match plan {
        Plan::Rows16 => ROWS_16.launch("product_rows_16", product, &args),
        Plan::Rows32 => ROWS_32.launch("product_rows_32", product, &args),
        Plan::Rows64 => ROWS_64.launch("product_rows_64", product, &args),
        Plan::Tiles64 => TILES_64.launch("product_tiles_64", product, &args),
        Plan::Tiles128 => TILES_128.launch("product_tiles_128", product, &args),
    }
}

/// The product in two launches, whose segments of `k` are computed side by side: where rows are too many for the
/// kernels that do so by themselves, and too few for tiles to fill a card. `scratch` has [`Split::bytes`], and is free
/// after the second launch. Same bits.
///
/// # Errors
/// As [`product`].
pub fn product_split(product: &Product, scratch: Mem) -> Result<[Launch; 2], Refused> {
    let &Product { rows, n, k, .. } = product;
    let check = Checks("product_sum");
    let segments = check.size("k", k.div_ceil(SEGMENT))?;
    let values = check.area("scratch", &[segments as usize, rows, n])?;
    let [out, x, weight, rows_arg, n_arg, k_arg, mode] = args(product)?;
    let partial = check.wide("scratch", scratch, values, 4)?;
    let mut launch =
        TILES_128.launch("product_tiles_128", product, &[partial, x, weight, rows_arg, n_arg, k_arg, Arg::U32(0)])?;
    launch.grid[2] = segments;
    let sum = [out, partial, rows_arg, n_arg, Arg::U32(segments), mode];
    let grid = [check.size("rows", rows)?, check.size("n", n.div_ceil(2 * 256))?, 1];
    Ok([launch, Launch::new("product_sum", grid, 256, &sum)])
}

/// When [`product_split`] pays, as long as nobody has measured better.
#[derive(Clone, Copy, Debug)]
pub struct Split;

impl Split {
    /// Whether it is for so many rows.
    pub fn pays(rows: usize, n: usize, k: usize) -> bool {
        rows > 64 && k > SEGMENT && rows.div_ceil(128) * n.div_ceil(128) < 128
    }

    /// Bytes of its scratch memory.
    pub fn bytes(rows: usize, n: usize, k: usize) -> usize {
        4 * k.div_ceil(SEGMENT) * rows * n
    }
}

/// Address of the output, both operands, rows, n, k, and what becomes of results.
fn args(product: &Product) -> Result<[Arg; 7], Refused> {
    let &Product { output, x, weight, rows, n, k } = product;
    let check = Checks("product");
    let pairs = !matches!(output, Output::SwiGlu(_)) || n.is_multiple_of(2);
    check.require(k > 0 && k.is_multiple_of(32) && pairs, || format!("n = {n}, k = {k}"))?;
    let (out, mode) = match output {
        Output::Store(out) => (check.array("out", out, check.area("out", &[rows, n])?, 4)?, 0),
        Output::Add(out) => (check.array("out", out, check.area("out", &[rows, n])?, 4)?, 1),
        Output::SwiGlu(out) => (check.array("out", out, check.area("out", &[rows, n / 2])?, 2)?, 2),
    };
    Ok([
        out,
        check.wide("x", x, check.area("x", &[rows, k])?, 2)?,
        check.wide("weight", weight, check.area("weight", &[n, k])?, 2)?,
        Arg::U32(check.size("rows", rows)?),
        Arg::U32(check.size("n", n)?),
        Arg::U32(check.size("k", k)?),
        Arg::U32(mode),
    ])
}

/// A kernel for few rows: rows and columns of a warp.
struct Rows {
    rows: u32,
    columns: u32,
}

const ROWS_16: Rows = Rows { rows: 16, columns: 16 };
const ROWS_32: Rows = Rows { rows: 32, columns: 32 };
const ROWS_64: Rows = Rows { rows: 64, columns: 32 };
/// Warps of its blocks at most.
const MOST_WARPS: u32 = 8;

impl Rows {
    /// Results of each warp, in rows that are padded by 8 values.
    const fn shared_bytes(&self, warps: u32) -> u32 {
        warps * self.rows * (self.columns + 8) * 4
    }

    /// A block has warps for as many segments as there are, up to 8; what is left of the 8 have further columns.
    fn launch(&self, kernel: &'static str, product: &Product, args: &[Arg]) -> Result<Launch, Refused> {
        let &Product { rows, n, k, .. } = product;
        let check = Checks(kernel);
        let segments = check.size("k", k.div_ceil(SEGMENT))?.min(MOST_WARPS).next_power_of_two();
        let groups = check.size("n", n.div_ceil(self.columns as usize))?;
        let groups_of_block = (MOST_WARPS / segments).min(groups.max(1));
        let args = [args, &[Arg::U32(segments)]].concat();
        let grid = [groups.div_ceil(groups_of_block), check.size("rows", rows)?.div_ceil(self.rows), 1];
        let warps = segments * groups_of_block;
        Ok(Launch::new(kernel, grid, 32 * warps, &args).with_shared(self.shared_bytes(warps)))
    }
}

/// A kernel for many rows: rows and columns of a block.
struct Tiles {
    side: u32,
    threads: u32,
}

const TILES_64: Tiles = Tiles { side: 64, threads: 128 };
const TILES_128: Tiles = Tiles { side: 128, threads: 256 };
/// Parts of `k` that are in shared memory: `STAGES` in `products.cu`.
const STAGES: u32 = 4;

impl Tiles {
    /// Each stage has 64 bytes of every row of both matrices.
    const fn shared_bytes(&self) -> u32 {
        STAGES * 2 * self.side * 64
    }

    fn launch(&self, kernel: &'static str, product: &Product, args: &[Arg]) -> Result<Launch, Refused> {
        let check = Checks(kernel);
        let tiles = |what, size| Ok(check.size(what, size)?.div_ceil(self.side));
        // Blocks that run together share their columns of weights: rows go first.
        let grid = [tiles("rows", product.rows)?, tiles("n", product.n)?, 1];
        Ok(Launch::new(kernel, grid, self.threads, args).with_shared(self.shared_bytes()))
    }
}
