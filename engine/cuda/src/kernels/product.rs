//! Launches of matrix products: `kernels/products.cu`.
use super::Kernel;
use super::launch::{Arg, Checks, Launch, Mem, Refused};

/// The kernels of `products.cu`.
pub const KERNELS: [Kernel; 7] = [
    FEW_8.kernel(),
    FEW_16.kernel(),
    FEW_32.kernel(),
    FEW_64.kernel(),
    TILES_64.kernel(),
    TILES_128.kernel(),
    Kernel { name: "product_sum", shared_bytes: 0 },
];

/// Values of `k` that have one accumulator: `SEGMENT` in `products.cu`.
pub const SEGMENT: usize = 4096;

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
    /// Up to 8 rows at a time, of which the weights go through shared memory once. For decode.
    Few8,
    /// 16 rows.
    Few16,
    /// 32 rows.
    Few32,
    /// 64 rows.
    Few64,
    /// Tiles of 64 × 64.
    Tiles64,
    /// Tiles of 128 × 128.
    Tiles128,
}

impl Plan {
    /// All.
    pub const ALL: [Self; 6] = [Self::Few8, Self::Few16, Self::Few32, Self::Few64, Self::Tiles64, Self::Tiles128];

    /// The one for so many rows.
    pub fn of(rows: usize, n: usize) -> Self {
        match rows {
            0..=8 => Self::Few8,
            9..=16 => Self::Few16,
            17..=32 => Self::Few32,
            33..=64 => Self::Few64,
            // Large tiles where there are enough of them for a card's multiprocessors.
            _ if rows.div_ceil(128) * n.div_ceil(128) >= 128 => Self::Tiles128,
            _ => Self::Tiles64,
        }
    }

    fn kernel(self) -> Shape {
        match self {
            Self::Few8 => Shape::Few(FEW_8),
            Self::Few16 => Shape::Few(FEW_16),
            Self::Few32 => Shape::Few(FEW_32),
            Self::Few64 => Shape::Few(FEW_64),
            Self::Tiles64 => Shape::Tiles(TILES_64),
            Self::Tiles128 => Shape::Tiles(TILES_128),
        }
    }

    /// Blocks without a split: what there is to do side by side.
    fn blocks(self, rows: usize, n: usize) -> usize {
        match self.kernel() {
            Shape::Few(few) => rows.div_ceil(few.rows as usize) * n.div_ceil(Few::COLUMNS as usize),
            Shape::Tiles(tiles) => rows.div_ceil(tiles.side as usize) * n.div_ceil(tiles.side as usize),
        }
    }
}

/// The product, by the kernel for so many rows, on a card of so many multiprocessors: as many blocks stay where one
/// takes one part of the product after another. That changes no bit.
///
/// # Errors
/// For memory that is too small, and sizes that the kernel does not take.
pub fn product(product: &Product, multiprocessors: usize) -> Result<Launch, Refused> {
    product_by(Plan::of(product.rows, product.n), product, multiprocessors)
}

/// The product, by the kernel `plan`.
///
/// # Errors
/// As [`product`].
pub fn product_by(plan: Plan, product: &Product, multiprocessors: usize) -> Result<Launch, Refused> {
    plan.kernel().launch(product, &args(product)?, 1, multiprocessors)
}

/// The product in two launches, whose segments of `k` are computed side by side: where parts of the product are too few
/// to fill a card. `scratch` has [`Split::bytes`], and is free after the second launch. Same bits.
///
/// # Errors
/// As [`product`].
pub fn product_split(product: &Product, scratch: Mem, multiprocessors: usize) -> Result<[Launch; 2], Refused> {
    let &Product { rows, n, k, .. } = product;
    let check = Checks("product_sum");
    let segments = k.div_ceil(SEGMENT);
    let values = check.area("scratch", &[segments, rows, n])?;
    let [_, x, weight, rows_arg, n_arg, k_arg, _] = args(product)?;
    let args = [check.wide("scratch", scratch, values, 4)?, x, weight, rows_arg, n_arg, k_arg, Arg::U32(0)];
    let parts = Plan::of(rows, n).kernel().launch(product, &args, check.size("k", segments)?, multiprocessors)?;
    Ok([parts, sum(product, scratch, segments)?])
}

/// Adds what `segments` launches or blocks have left in `scratch`, f32 `[segments][rows][n]`, in ascending order.
///
/// # Errors
/// As [`product`].
pub fn sum(product: &Product, scratch: Mem, segments: usize) -> Result<Launch, Refused> {
    let &Product { rows, n, .. } = product;
    let check = Checks("product_sum");
    let values = check.area("scratch", &[segments, rows, n])?;
    let [out, _, _, rows_arg, n_arg, _, mode] = args(product)?;
    let args =
        [out, check.wide("scratch", scratch, values, 4)?, rows_arg, n_arg, Arg::U32(check.size("k", segments)?), mode];
    let grid = [check.size("rows", rows)?, check.size("n", n.div_ceil(2 * 256))?, 1];
    Ok(Launch::new("product_sum", grid, 256, &args))
}

/// When [`product_split`] pays.
#[derive(Clone, Copy, Debug)]
pub struct Split;

impl Split {
    /// Whether it is for so many rows on a card of so many multiprocessors.
    pub fn pays(rows: usize, n: usize, k: usize, multiprocessors: usize) -> bool {
        k > SEGMENT && Plan::of(rows, n).blocks(rows, n) < RESIDENT * multiprocessors
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

/// Blocks that run together on a multiprocessor.
const RESIDENT: usize = 2;

#[derive(Clone, Copy)]
enum Shape {
    Few(Few),
    Tiles(Tiles),
}

impl Shape {
    /// With `segments` above 1 each has blocks of its own, and a result of its own in the output.
    fn launch(self, product: &Product, args: &[Arg], segments: u32, multiprocessors: usize) -> Result<Launch, Refused> {
        match self {
            Self::Few(few) => few.launch(product, args, segments, multiprocessors),
            Self::Tiles(tiles) => tiles.launch(product, args, segments),
        }
    }
}

/// A kernel for few rows: rows of x, and stages of its ring.
#[derive(Clone, Copy)]
struct Few {
    name: &'static str,
    rows: u32,
    stages: u32,
}

// Two blocks' rings fit a multiprocessor; one's the 99 KiB that a block may have on sm_86 and sm_89.
const FEW_8: Few = Few { name: "product_few_8", rows: 8, stages: 5 };
const FEW_16: Few = Few { name: "product_few_16", rows: 16, stages: 4 };
const FEW_32: Few = Few { name: "product_few_32", rows: 32, stages: 4 };
const FEW_64: Few = Few { name: "product_few_64", rows: 64, stages: 3 };

impl Few {
    /// Rows of the weights that a block has at a time.
    const COLUMNS: u32 = 64;
    const THREADS: u32 = 128;

    /// Each stage has 128 values of every row.
    const fn shared_bytes(&self) -> u32 {
        self.stages * (Self::COLUMNS + self.rows) * 256
    }

    const fn kernel(&self) -> Kernel {
        Kernel { name: self.name, shared_bytes: self.shared_bytes() }
    }

    fn launch(
        &self,
        product: &Product,
        args: &[Arg],
        segments: u32,
        multiprocessors: usize,
    ) -> Result<Launch, Refused> {
        let check = Checks(self.name);
        let panels = check.size("n", product.n)?.div_ceil(Self::COLUMNS);
        let rows = check.size("rows", product.rows)?.div_ceil(self.rows);
        let resident = check.size("multiprocessors", RESIDENT * multiprocessors)?;
        let stay = (resident / (segments * rows).max(1)).max(1);
        let grid = [panels.min(stay), rows, segments];
        Ok(Launch::new(self.name, grid, Self::THREADS, args).with_shared(self.shared_bytes()))
    }
}

/// A kernel for many rows: rows and columns of a block.
#[derive(Clone, Copy)]
struct Tiles {
    name: &'static str,
    side: u32,
    threads: u32,
}

const TILES_64: Tiles = Tiles { name: "product_tiles_64", side: 64, threads: 128 };
const TILES_128: Tiles = Tiles { name: "product_tiles_128", side: 128, threads: 256 };
/// Parts of `k` that are in shared memory: `STAGES` in `products.cu`.
const STAGES: u32 = 3;

impl Tiles {
    /// Each stage has 128 bytes of every row of both matrices.
    const fn shared_bytes(&self) -> u32 {
        STAGES * 2 * self.side * 128
    }

    const fn kernel(&self) -> Kernel {
        Kernel { name: self.name, shared_bytes: self.shared_bytes() }
    }

    fn launch(&self, product: &Product, args: &[Arg], segments: u32) -> Result<Launch, Refused> {
        let check = Checks(self.name);
        let tiles = |what, size| Ok(check.size(what, size)?.div_ceil(self.side));
        // Blocks that run together share their columns of weights: rows go first.
        let grid = [tiles("rows", product.rows)?, tiles("n", product.n)?, segments];
        Ok(Launch::new(self.name, grid, self.threads, args).with_shared(self.shared_bytes()))
    }
}
