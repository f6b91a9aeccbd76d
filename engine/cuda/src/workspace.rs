//! The memory between a step's kernels: one allocation, planned for the largest step. No kernel needs what another step
//! left there, but for the tokens that the step before chose and the sequences' block tables.
use tandem_engine::models::config::LlamaConfig;

use crate::inputs::Frame;
use crate::kernels::attention::{PARTITION, Split};
use crate::kernels::choose::Outcome;
use crate::kernels::product;
use crate::large;
use crate::plan::{Span, Spans};

/// Rows of logits that are computed at a time: more choose in several turns.
pub(crate) const MOST_LOGITS: usize = 256;

/// Blocks of attention that each multiprocessor shall have, where partitions can be shared out: three run at a time.
/// (Measured on an H200 from 2 to 32: more are no faster, and from 1,024 tiles on it costs 5 % to share them out.)
const BLOCKS_EACH: usize = 4;
/// Memory for partitions that are computed side by side, at most.
const MOST_PARTIALS_BYTES: usize = 256 << 20;

/// How large steps can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepLimits {
    /// Rows: tokens and drafts, and what pads decode rows.
    pub rows: usize,
    /// Sequences that have a block table on the device.
    pub tables: usize,
    /// Blocks of a sequence.
    pub table_blocks: usize,
    /// Positions of a sequence.
    pub positions: usize,
    /// Multiprocessors of the device: see [`split_of`].
    pub multiprocessors: usize,
    /// cuBLASLt is there for products of many rows.
    pub library: bool,
}

/// Where everything lies.
#[derive(Clone, Debug)]
pub(crate) struct WorkspacePlan {
    /// See [`Frame`].
    pub inputs: Span,
    /// [`Outcome`] of each choice; of the step before until this one chooses.
    pub outcomes: Span,
    /// u32 `[tables][table_blocks]`.
    pub tables: Span,
    /// f32: the residual stream.
    pub hidden: Span,
    /// bf16, likewise of `hidden`'s width.
    pub normed: Span,
    /// f32.
    pub qkv: Span,
    /// bf16.
    pub queries: Span,
    /// bf16.
    pub attended: Span,
    /// bf16.
    pub activated: Span,
    /// u32 of each row.
    pub unsound: Span,
    /// bf16 `[MOST_LOGITS][hidden]`.
    pub last: Span,
    /// f32 `[MOST_LOGITS][vocabulary]`.
    pub logits: Span,
    /// Of partitions side by side.
    pub partials: Span,
    /// Of a product whose segments are computed side by side, or by the library.
    pub segments: Span,
    /// Of the whole allocation.
    pub bytes: usize,
}

impl WorkspacePlan {
    pub fn new(config: &LlamaConfig, limits: &StepLimits) -> Self {
        let mut spans = Spans::new();
        let (rows, hidden) = (limits.rows, config.hidden);
        let logits = rows.min(MOST_LOGITS);
        let partials = (1..=logits).filter_map(|tiles| split_of(config, limits, tiles).map(|split| (tiles, split)));
        let partials =
            partials.map(|(tiles, (partitions, _))| Split::bytes(tiles, config.heads, 1, partitions, config.head_dim));
        let partials = partials.max().unwrap_or(0);
        let segments = products(config).into_iter().map(|(n, k)| scratch_of(limits, n, k)).max().unwrap_or(0);
        Self {
            inputs: spans.take(&[Frame::most_bytes(rows)], 1),
            outcomes: spans.take(&[rows], size_of::<Outcome>()),
            tables: spans.take(&[limits.tables, limits.table_blocks], 4),
            hidden: spans.take(&[rows, hidden], 4),
            normed: spans.take(&[rows, hidden], 2),
            qkv: spans.take(&[rows, config.qkv_width()], 4),
            queries: spans.take(&[rows, config.attended_width()], 2),
            attended: spans.take(&[rows, config.attended_width()], 2),
            activated: spans.take(&[rows, config.feed_forward], 2),
            unsound: spans.take(&[rows], 4),
            last: spans.take(&[logits, hidden], 2),
            logits: spans.take(&[logits, config.vocab_size], 4),
            partials: spans.take(&[partials], 1),
            segments: spans.take(&[segments], 1),
            bytes: spans.bytes(),
        }
    }
}

/// Bytes for results of a product that are not where they belong yet: of segments side by side, or of the library.
fn scratch_of(limits: &StepLimits, n: usize, k: usize) -> usize {
    let most = (1..=limits.rows).rev().find(|&rows| product::Split::pays(rows, n, k, limits.multiprocessors));
    let split = most.map_or(0, |rows| product::Split::bytes(rows, n, k));
    split.max(if limits.library { large::scratch_bytes(limits.rows, n) } else { 0 })
}

/// `n` and `k` of a step's products.
fn products(config: &LlamaConfig) -> [(usize, usize); 5] {
    let LlamaConfig { hidden, feed_forward, vocab_size, .. } = *config;
    [
        (config.qkv_width(), hidden),
        (hidden, config.attended_width()),
        (2 * feed_forward, hidden),
        (hidden, feed_forward),
        (vocab_size, hidden),
    ]
}

/// Partitions of the longest sequence, and how many blocks share those of a tile, for so many tiles of one token: none
/// where there are blocks enough without, or where their results would take too much memory. The bits are the same.
pub(crate) fn split_of(config: &LlamaConfig, limits: &StepLimits, tiles: usize) -> Option<(usize, usize)> {
    let partitions = limits.positions.div_ceil(PARTITION);
    let blocks = BLOCKS_EACH * limits.multiprocessors;
    let ways = blocks.div_ceil((tiles * config.kv_heads).max(1)).min(partitions);
    let bytes = Split::bytes(tiles, config.heads, 1, partitions, config.head_dim);
    (ways > 1 && bytes <= MOST_PARTIALS_BYTES).then_some((partitions, ways))
}
