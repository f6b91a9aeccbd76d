//! Launches of attention over the paged KV of sequences: `kernels/attention.cu`.
use super::Kernel;
use super::launch::{Arg, Checks, Launch, Mem, Refused};
use super::qkv::Arena;

/// Keys of a partition: where the first one begins follows from position 0 alone.
pub const PARTITION: usize = 256;

/// Query rows (heads of a group × tokens) of a tile of [`Height::Rows16`].
const FEW: usize = 16;
/// Of [`Height::Rows128`].
const MANY: usize = 128;
/// Threads of a block that merges.
const MERGE_THREADS: u32 = 128;
/// Rows of K, and as many of V, that are in shared memory at a time.
const STAGED_KEYS: u32 = 128;

/// Rows of queries, K and V, in panels of 64 values.
const fn shared(rows: usize, head_dim: u32) -> u32 {
    (rows as u32 + 2 * STAGED_KEYS) * head_dim.div_ceil(64) * 64 * 2
}

macro_rules! kernels {
    ($($dim:literal $few:literal $many:literal $merge:literal)*) => {
        /// The kernels of `attention.cu`.
        pub const KERNELS: [Kernel; 15] = [$(
            Kernel { name: $few, shared_bytes: shared(FEW, $dim) },
            Kernel { name: $many, shared_bytes: shared(MANY, $dim) },
            Kernel { name: $merge, shared_bytes: 0 },
        )*];
        fn kernels(head_dim: usize) -> Option<[Kernel; 3]> {
            match head_dim {
                $($dim => Some([
                    Kernel { name: $few, shared_bytes: shared(FEW, $dim) },
                    Kernel { name: $many, shared_bytes: shared(MANY, $dim) },
                    Kernel { name: $merge, shared_bytes: 0 },
                ]),)*
                _ => None,
            }
        }
    };
}

kernels! {
    16 "attention_16_d16" "attention_128_d16" "attention_merge_d16"
    32 "attention_16_d32" "attention_128_d32" "attention_merge_d32"
    64 "attention_16_d64" "attention_128_d64" "attention_merge_d64"
    96 "attention_16_d96" "attention_128_d96" "attention_merge_d96"
    128 "attention_16_d128" "attention_128_d128" "attention_merge_d128"
}

/// A few adjacent tokens of one sequence, as the kernels read them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Tile {
    /// Row of the step of its first token.
    pub first_row: u32,
    /// Tokens; none: nothing to do.
    pub tokens: u32,
    /// Row of the block tables.
    pub table: u32,
    /// Position of the first token.
    pub start: u32,
}

/// Query rows of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Height {
    /// Up to 16: decode rows, and ends of chunks. Four warps share the rows.
    Rows16,
    /// Up to 128: prompts. Each of eight warps has 16 of them.
    Rows128,
}

impl Height {
    /// Tokens of a tile at most, where a KV head has `group` query heads (up to 16).
    pub fn tokens(self, group: usize) -> usize {
        let rows = if self == Self::Rows16 { FEW } else { MANY };
        rows / group.clamp(1, FEW)
    }

    /// Threads of a block.
    fn threads(self) -> u32 {
        if self == Self::Rows16 { 128 } else { 256 }
    }

    /// Adds the tiles of `tokens` tokens from row `first_row` on, the first of which stands at `start`.
    pub fn cut(self, group: usize, first_row: u32, tokens: usize, table: u32, start: u32, tiles: &mut Vec<Tile>) {
        let most = self.tokens(group);
        tiles.extend((0..tokens).step_by(most).map(|at| Tile {
            first_row: first_row + at as u32,
            tokens: most.min(tokens - at) as u32,
            table,
            start: start + at as u32,
        }));
    }
}

/// Attention of the queries of some tiles over the arena, in which the K and V of their own tokens already are.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// bf16 `[rows][heads * head_dim]`.
    pub queries: Mem,
    /// Out: bf16, alike.
    pub out: Mem,
    /// Rows of both.
    pub rows: usize,
    /// K and V.
    pub arena: Arena,
    /// Which layer of it.
    pub layer: usize,
    /// u32 `[tables][table_blocks]`: a sequence's blocks.
    pub tables: Mem,
    /// Number of tables.
    pub table_rows: usize,
    /// Length of a table.
    pub table_blocks: usize,
    /// [`Tile`] `[tiles]`, none higher than `height`, all of their tokens among `rows`.
    pub tiles: Mem,
    /// Number of tiles.
    pub tile_count: usize,
    /// Query rows of a tile.
    pub height: Height,
    /// Heads of Q, a multiple of the arena's.
    pub heads: usize,
    /// Keys that a row sees, itself included; `None`: all up to itself.
    pub window: Option<usize>,
    /// Computes partitions side by side; only with [`Height::Rows16`].
    pub split: Option<Split>,
}

/// Partitions side by side: their softmaxes go to memory, and [`merge`] joins them. Same bits as without.
#[derive(Clone, Copy, Debug)]
pub struct Split {
    /// Scratch of [`Split::bytes`].
    pub partials: Mem,
    /// Partitions of the longest of the sequences at most: `context.div_ceil(PARTITION)`.
    pub partitions: usize,
    /// Blocks that share a tile's partitions, 1 to `partitions`.
    pub ways: usize,
    /// Tokens of a tile at most: 1 for decode rows.
    pub tokens: usize,
}

impl Split {
    /// Bytes of `partials`.
    pub fn bytes(tiles: usize, heads: usize, tokens: usize, partitions: usize, head_dim: usize) -> usize {
        // Output, maximum and sum of each query row.
        4 * tiles * heads * tokens * partitions * (head_dim + 2)
    }
}

/// Softmax(q · k / √head_dim) · v of each query row over the keys up to its own. `head_dim`: 16, 32, 64, 96, 128; up to
/// 16 query heads a KV head.
///
/// # Errors
/// For memory that is too small, and sizes that the kernels do not take.
pub fn attention(attention: &Attention) -> Result<Launch, Refused> {
    let check = Checks("attention");
    let Shape { kernels: [few, many, _], kv_heads, group } = shape(&check, attention)?;
    let kernel = if attention.height == Height::Rows16 { few } else { many };
    let values = check.area("queries", &[attention.rows, attention.heads, attention.arena.head_dim])?;
    let [k, block, part, block_tokens] = attention.arena.args(&check, attention.layer)?;
    let (partials, partitions, ways, tokens) = split_args(&check, attention)?;
    let scale = std::f32::consts::LOG2_E / (attention.arena.head_dim as f32).sqrt();
    let args = [
        check.wide("out", attention.out, values, 2)?,
        check.wide("queries", attention.queries, values, 2)?,
        k,
        block,
        part,
        block_tokens,
        check.array("tables", attention.tables, attention.table_rows * attention.table_blocks, 4)?,
        Arg::U32(check.size("table_blocks", attention.table_blocks)?),
        check.array("tiles", attention.tiles, attention.tile_count, size_of::<Tile>())?,
        Arg::U32(check.size("group", group)?),
        Arg::U32(attention.window.map_or(Ok(0), |window| check.size("window", window.max(1)))?),
        Arg::F32(scale),
        partials,
        Arg::U32(partitions),
        Arg::U32(tokens),
    ];
    // Heads go last, so that blocks that run together read different K and V.
    let grid = [check.size("tiles", attention.tile_count)?, check.size("kv_heads", kv_heads)?, ways];
    Ok(Launch::new(kernel.name, grid, attention.height.threads(), &args).with_shared(kernel.shared_bytes))
}

/// Joins what [`attention`] of the same values left in `partials`.
///
/// # Errors
/// As [`attention`], and where nothing is split.
pub fn merge(attention: &Attention) -> Result<Launch, Refused> {
    let check = Checks("attention_merge");
    let Shape { kernels: [_, _, kernel], kv_heads, group } = shape(&check, attention)?;
    check.require(attention.split.is_some(), || "nothing is split".into())?;
    let values = check.area("out", &[attention.rows, attention.heads, attention.arena.head_dim])?;
    let (partials, partitions, _, tokens) = split_args(&check, attention)?;
    let args = [
        check.wide("out", attention.out, values, 2)?,
        partials,
        check.array("tiles", attention.tiles, attention.tile_count, size_of::<Tile>())?,
        Arg::U32(check.size("group", group)?),
        Arg::U32(attention.window.map_or(Ok(0), |window| check.size("window", window.max(1)))?),
        Arg::U32(partitions),
        Arg::U32(tokens),
    ];
    let rows = group * attention.split.map_or(0, |split| split.tokens);
    let grid = [
        check.size("tiles", attention.tile_count)?,
        check.size("kv_heads", kv_heads)?,
        check.size("rows", rows.div_ceil(4))?,
    ];
    Ok(Launch::new(kernel.name, grid, MERGE_THREADS, &args))
}

struct Shape {
    kernels: [Kernel; 3],
    kv_heads: usize,
    group: usize,
}

fn shape(check: &Checks, attention: &Attention) -> Result<Shape, Refused> {
    let Arena { kv_heads, head_dim, .. } = attention.arena;
    let heads = attention.heads;
    let Some(kernels) = kernels(head_dim) else {
        return check.refuse(format!("heads of {head_dim} values; there are kernels for 16, 32, 64, 96 and 128"));
    };
    let divides = kv_heads > 0 && heads.is_multiple_of(kv_heads) && (1..=FEW).contains(&(heads / kv_heads));
    check.require(divides, || format!("{heads} query heads on {kv_heads} of K; up to {FEW} may share one"))?;
    Ok(Shape { kernels, kv_heads, group: heads / kv_heads })
}

/// Address of the partials, partitions, blocks of a tile, tokens of a tile.
fn split_args(check: &Checks, attention: &Attention) -> Result<(Arg, u32, u32, u32), Refused> {
    let Some(Split { partials, partitions, ways, tokens }) = attention.split else {
        return Ok((Arg::Ptr(0), 0, 1, 0));
    };
    let fits = tokens <= Height::Rows16.tokens(attention.heads / attention.arena.kv_heads.max(1));
    check.require(attention.height == Height::Rows16 && fits, || format!("tiles of {tokens} tokens are not split"))?;
    check.require((1..=partitions).contains(&ways), || format!("{ways} ways for {partitions} partitions"))?;
    let rows = check.area("partials", &[attention.tile_count, attention.heads, tokens, partitions])?;
    let address =
        check.wide("partials", partials, check.area("partials", &[rows, attention.arena.head_dim + 2])?, 4)?;
    Ok((address, check.size("partitions", partitions)?, check.size("ways", ways)?, check.size("tokens", tokens)?))
}
