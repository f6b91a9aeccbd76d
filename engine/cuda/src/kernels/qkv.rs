//! The launch between the product of Q, K and V and attention: `kernels/qkv.cu`. And the arena's layout, which
//! attention shares.
use super::Kernel;
use super::launch::{Arg, Checks, Launch, Mem, Refused};

/// The kernel of `qkv.cu`.
pub const KERNELS: [Kernel; 1] = [Kernel { name: "qkv_to_cache", shared_bytes: 0 }];

/// Warps of a block; each has a head of a row.
const WARPS: usize = 4;

/// The KV arena: blocks of `[layer][K, V][kv_head][token][head_dim]` bf16, one after another.
#[derive(Clone, Copy, Debug)]
pub struct Arena {
    /// All of it.
    pub memory: Mem,
    /// Layers of the model.
    pub layers: usize,
    /// Tokens of a block.
    pub block_tokens: usize,
    /// Heads of K.
    pub kv_heads: usize,
    /// Values of a head.
    pub head_dim: usize,
}

impl Arena {
    /// Values of the K (or V) of one layer in a block.
    pub fn part_values(&self) -> usize {
        self.kv_heads * self.block_tokens * self.head_dim
    }

    /// Bytes of one layer in a block.
    pub fn layer_bytes(&self) -> usize {
        2 * 2 * self.part_values()
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.layers * self.layer_bytes()
    }

    /// Its arguments, as every kernel of `layer` takes them: address of that layer's K in block 0, values of a block,
    /// values of a part, tokens of a block.
    pub(super) fn args(&self, check: &Checks, layer: usize) -> Result<[Arg; 4], Refused> {
        let block = check.area("a block", &[self.layers, 2, self.kv_heads, self.block_tokens, self.head_dim])?;
        check.require(layer < self.layers, || format!("layer {layer} of {}", self.layers))?;
        check.require(self.head_dim.is_multiple_of(8), || format!("heads of {}", self.head_dim))?;
        check.require(self.block_tokens.is_power_of_two(), || format!("blocks of {} tokens", self.block_tokens))?;
        let Arg::Ptr(start) = check.wide("arena", self.memory, block, 2)? else {
            return check.refuse("the arena has no address".into());
        };
        Ok([
            Arg::Ptr(start + (layer * self.layer_bytes()) as u64),
            Arg::U64(block as u64),
            Arg::U32(check.size("a layer", self.part_values())?),
            Arg::U32(check.size("block_tokens", self.block_tokens)?),
        ])
    }
}

/// From the product of Q, K and V to queries for attention and the step's rows of the arena.
#[derive(Clone, Copy, Debug)]
pub struct QkvToCache {
    /// f32 `[rows][(heads + 2 * kv_heads) * head_dim]`: Q, K, V, of each its heads one after another. Rows of heads of
    /// Q and K in the order in which neighbours (2i, 2i + 1) turn together.
    pub qkv: Mem,
    /// Out: bf16 `[rows][heads * head_dim]`.
    pub queries: Mem,
    /// Out: K and V, at `places`.
    pub arena: Arena,
    /// Which layer of it.
    pub layer: usize,
    /// Added first: f32, as long as a row of `qkv`.
    pub bias: Option<Mem>,
    /// Then the RMS norm of each head of Q and K: f32 `[(heads + kv_heads) * head_dim]`, see `eps`.
    pub head_norm: Option<Mem>,
    /// Added to the mean of the squares of a head.
    pub eps: f32,
    /// Then pairs turn: f32 `[positions][head_dim / 2][2]`, cosine and sine.
    pub rotations: Mem,
    /// Rows of `rotations`.
    pub most_positions: usize,
    /// u32 `[rows]`, each below `most_positions`.
    pub positions: Mem,
    /// u32 `[rows][2]`: block, and token in the block. No place twice.
    pub places: Mem,
    /// Rows.
    pub rows: usize,
    /// Heads of Q.
    pub heads: usize,
}

/// `queries = turn(norm(q + bias))`, `arena[place] = turn(norm(k + bias)), v + bias`. `head_dim` is a multiple of 8, up
/// to 256.
///
/// # Errors
/// For memory that is too small, and sizes that the kernel does not take.
pub fn qkv_to_cache(qkv: &QkvToCache) -> Result<Launch, Refused> {
    let check = Checks("qkv_to_cache");
    let &QkvToCache { arena: Arena { kv_heads, head_dim, .. }, rows, heads, .. } = qkv;
    check.require(head_dim <= 256, || format!("heads of {head_dim}"))?;
    let all_heads = heads + 2 * kv_heads;
    let [k, block, part, block_tokens] = qkv.arena.args(&check, qkv.layer)?;
    let args = [
        check.wide("qkv", qkv.qkv, check.area("qkv", &[rows, all_heads, head_dim])?, 4)?,
        check.wide("queries", qkv.queries, check.area("queries", &[rows, heads, head_dim])?, 2)?,
        k,
        block,
        part,
        block_tokens,
        check.optional("bias", qkv.bias, all_heads * head_dim, 4)?,
        check.optional("head_norm", qkv.head_norm, (heads + kv_heads) * head_dim, 4)?,
        Arg::F32(qkv.eps),
        check.array("rotations", qkv.rotations, check.area("rotations", &[qkv.most_positions, head_dim / 2])?, 8)?,
        check.array("positions", qkv.positions, rows, 4)?,
        check.array("places", qkv.places, rows, 8)?,
        Arg::U32(check.size("heads", heads)?),
        Arg::U32(check.size("kv_heads", kv_heads)?),
        Arg::U32(check.size("head_dim", head_dim)?),
    ];
    let grid = [check.size("rows", rows)?, check.size("heads", all_heads.div_ceil(WARPS))?, 1];
    Ok(Launch::new("qkv_to_cache", grid, 32 * WARPS as u32, &args))
}
