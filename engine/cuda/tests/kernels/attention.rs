//! Attention: beside the formula, and bits over tiles, chunks, phases and splits.
use half::bf16;
use tandem_cuda::Buffer;
use tandem_cuda::kernels::attention::{Attention, Height, PARTITION, Split, Tile, attention, merge};
use tandem_cuda::kernels::qkv::Arena;

use crate::gpu::{Gpu, Random, assert_same_bits};

/// A model's heads.
#[derive(Clone, Copy, Debug)]
struct Shape {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    window: Option<usize>,
}

/// One sequence with its queries, keys and values: of each token those of its heads.
struct Sequence {
    shape: Shape,
    tokens: usize,
    queries: Vec<bf16>,
    keys: Vec<bf16>,
    values: Vec<bf16>,
    block_tokens: usize,
}

/// A sequence on the device, in blocks that are in no order. Slots that it does not use are NaN, and so is another
/// layer; table entries that it does not use lead nowhere.
struct Placed<'a> {
    gpu: &'a Gpu,
    sequence: &'a Sequence,
    arena: Buffer,
    tables: Buffer,
    table_blocks: usize,
}

impl Sequence {
    fn random(seed: u64, shape: Shape, tokens: usize, block_tokens: usize) -> Self {
        let (mut random, width) = (Random(seed), shape.kv_heads * shape.head_dim);
        let queries = random.halves(tokens * shape.heads * shape.head_dim);
        let (keys, values) = (random.halves(tokens * width), random.halves(tokens * width));
        Self { shape, tokens, queries, keys, values, block_tokens }
    }

    fn group(&self) -> usize {
        self.shape.heads / self.shape.kv_heads
    }

    /// Values of a token's queries.
    fn width(&self) -> usize {
        self.shape.heads * self.shape.head_dim
    }

    fn place<'a>(&'a self, gpu: &'a Gpu) -> Placed<'a> {
        let Shape { kv_heads, head_dim, .. } = self.shape;
        let used = self.tokens.div_ceil(self.block_tokens);
        // 7 shares no factor with their number: each block once.
        let blocks = if (used + 3).is_multiple_of(7) { used + 4 } else { used + 3 };
        let (block_of, part) = (|index: usize| (index * 7 + 3) % blocks, kv_heads * self.block_tokens * head_dim);
        let mut arena = vec![bf16::NAN; blocks * 2 * 2 * part];
        for position in 0..self.tokens {
            let (block, slot) = (block_of(position / self.block_tokens), position % self.block_tokens);
            for head in 0..kv_heads {
                let to = (block * 2 + 1) * 2 * part + (head * self.block_tokens + slot) * head_dim;
                let from = (position * kv_heads + head) * head_dim;
                arena[to..to + head_dim].copy_from_slice(&self.keys[from..from + head_dim]);
                arena[to + part..to + part + head_dim].copy_from_slice(&self.values[from..from + head_dim]);
            }
        }
        // The second of two tables.
        let mut tables = vec![u32::MAX; 2 * (used + 2)];
        (0..used).for_each(|index| tables[used + 2 + index] = block_of(index) as u32);
        Placed { gpu, sequence: self, arena: gpu.holding(&arena), tables: gpu.holding(&tables), table_blocks: used + 2 }
    }

    /// Output in f64, and the sum of the absolute values of its terms.
    fn reference(&self, position: usize, head: usize) -> Vec<(f64, f64)> {
        let Shape { kv_heads, head_dim, window, .. } = self.shape;
        let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
        let query = &self.queries[position * self.width() + head * head_dim..][..head_dim];
        let of = |matrix: &[bf16], key: usize, at: usize| {
            matrix[(key * kv_heads + head / self.group()) * head_dim + at].to_f64()
        };
        let score = |key| (0..head_dim).map(|at| query[at].to_f64() * of(&self.keys, key, at)).sum::<f64>();
        let scores: Vec<f64> = (first..=position).map(|key| score(key) / (head_dim as f64).sqrt()).collect();
        let most = scores.iter().copied().fold(f64::MIN, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
        let total: f64 = weights.iter().sum();
        let terms =
            |at| weights.iter().zip(first..).map(move |(weight, key)| weight / total * of(&self.values, key, at));
        (0..head_dim).map(|at| (terms(at).sum(), terms(at).map(f64::abs).sum())).collect()
    }
}

impl Placed<'_> {
    /// Outputs of the tokens from `start` to `end`, in tiles of `most` tokens or what `height` takes. The first row of
    /// the step is another's, and the last tile is none.
    fn attend(&self, start: usize, end: usize, height: Height, most: usize, ways: Option<usize>) -> Vec<bf16> {
        self.attend_with(start, end, height, most, ways, |_| {})
    }

    /// The same; between a split and its end, `change` sees what the partitions left in memory, for each tile and KV
    /// head `partitions` equal parts.
    fn attend_with(
        &self,
        start: usize,
        end: usize,
        height: Height,
        most: usize,
        ways: Option<usize>,
        change: impl FnOnce(&mut [f32]),
    ) -> Vec<bf16> {
        let Self { gpu, sequence, arena, tables, table_blocks } = self;
        let (Shape { heads, kv_heads, head_dim, window }, width) = (sequence.shape, sequence.width());
        let rows = end - start + 1;
        let queries = [&vec![bf16::NAN; width], &sequence.queries[start * width..end * width]].concat();
        let (queries, out) = (gpu.holding(&queries), gpu.space::<bf16>(rows * width));
        let (mut tiles, most) = (Vec::new(), most.min(height.tokens(sequence.group())));
        for at in (start..end).step_by(most) {
            let first_row = (at - start + 1) as u32;
            height.cut(sequence.group(), first_row, most.min(end - at), 1, at as u32, &mut tiles);
        }
        tiles.push(Tile::default());
        let tile_memory = gpu.holding(&tiles);
        let partitions = end.div_ceil(PARTITION) + 1;
        let partials = gpu.space::<u8>(Split::bytes(tiles.len(), heads, most, partitions, head_dim));
        let asked = |partials: &Buffer| Attention {
            queries: queries.mem(),
            out: out.mem(),
            rows,
            arena: Arena { memory: arena.mem(), layers: 2, block_tokens: sequence.block_tokens, kv_heads, head_dim },
            layer: 1,
            tables: tables.mem(),
            table_rows: 2,
            table_blocks: *table_blocks,
            tiles: tile_memory.mem(),
            tile_count: tiles.len(),
            height,
            heads,
            window,
            split: ways.map(|ways| Split { partials: partials.mem(), partitions, ways, tokens: most }),
        };
        gpu.launch(attention(&asked(&partials)));
        if ways.is_some() {
            let mut left = gpu.read::<f32>(&partials);
            change(&mut left);
            let changed = gpu.holding(&left);
            gpu.launch(merge(&asked(&changed)));
            return gpu.read::<bf16>(&out).split_off(width);
        }
        gpu.read::<bf16>(&out).split_off(width)
    }
}

#[test]
fn outputs_agree_with_the_formula() {
    let Some(gpu) = Gpu::get() else { return };
    let shape = |heads, kv_heads, head_dim, window| Shape { heads, kv_heads, head_dim, window };
    for (seed, (shape, tokens)) in [
        (shape(4, 2, 16, None), 70),
        (shape(3, 1, 32, Some(20)), 100),
        (shape(14, 2, 64, None), 66),
        (shape(2, 2, 96, Some(64)), 130),
        (shape(16, 1, 128, None), 65),
        (shape(2, 1, 16, None), 1040),
        (shape(1, 1, 16, Some(600)), 1300),
    ]
    .into_iter()
    .enumerate()
    {
        let sequence = Sequence::random(20 + seed as u64, shape, tokens, 16);
        let placed = sequence.place(&gpu);
        let start = tokens.saturating_sub(70);
        for height in [Height::Rows16, Height::Rows128] {
            assert_near(&sequence, start, &placed.attend(start, tokens, height, usize::MAX, None));
        }
    }
}

/// Panics unless `got`, outputs of the tokens from `start` on, are near the formula's.
fn assert_near(sequence: &Sequence, start: usize, got: &[bf16]) {
    let (shape, tokens) = (sequence.shape, got.len() / sequence.width());
    for (at, head) in (start..start + tokens).flat_map(|at| (0..shape.heads).map(move |head| (at, head))) {
        let from = (at - start) * sequence.width() + head * shape.head_dim;
        for (got, (want, size)) in got[from..].iter().zip(sequence.reference(at, head)) {
            // Weights are bf16 and so is the output: half a unit of 2^-8 each, in the sum as well.
            let error = (got.to_f64() - want).abs();
            assert!(error <= 0.0045 * size + 0.002 * want.abs(), "{got} {want}, {at} {head} {shape:?}");
        }
    }
}

/// Scores grow with the position, so that the references of weights move in most tiles and partitions.
#[test]
fn scores_that_grow_are_weighed_as_the_formula_says_and_with_the_same_bits() {
    let Some(gpu) = Gpu::get() else { return };
    for (window, block_tokens) in [(None, 64), (Some(330), 16)] {
        let shape = Shape { heads: 4, kv_heads: 2, head_dim: 64, window };
        let (start, end) = (600, 640);
        let mut sequence = Sequence::random(50, shape, end, block_tokens);
        let width = shape.kv_heads * shape.head_dim;
        for (position, keys) in sequence.keys.chunks_exact_mut(width).enumerate() {
            let factor = 2.0f32.powf(position as f32 / 90.0);
            keys.iter_mut().for_each(|key| *key = bf16::from_f32(key.to_f32() * factor));
        }
        let placed = sequence.place(&gpu);
        let whole = placed.attend(start, end, Height::Rows128, usize::MAX, None);
        assert_near(&sequence, start, &whole);
        for (most, ways) in [(usize::MAX, None), (1, None), (1, Some(2)), (2, Some(3))] {
            let what = || format!("tiles of {most} tokens, {ways:?} ways, window {window:?}");
            assert_same_bits(&placed.attend(start, end, Height::Rows16, most, ways), &whole, &what);
        }
    }
}

#[test]
fn a_rows_bits_are_the_same_in_any_tile_and_chunk_as_prompt_and_as_decode_row() {
    let Some(gpu) = Gpu::get() else { return };
    let mut random = Random(30);
    let shape = |heads, kv_heads, head_dim, window| Shape { heads, kv_heads, head_dim, window };
    for (shape, block_tokens) in [
        (shape(2, 2, 16, None), 16),
        (shape(3, 1, 16, Some(300)), 32),
        (shape(4, 2, 32, None), 64),
        (shape(7, 1, 64, Some(530)), 128),
        (shape(5, 1, 96, None), 16),
        (shape(16, 1, 128, Some(40)), 32),
    ] {
        let (start, end) = (500, 561);
        let sequence = Sequence::random(random.word(), shape, end, block_tokens);
        let placed = sequence.place(&gpu);
        let whole = placed.attend(start, end, Height::Rows128, usize::MAX, None);
        for (height, most) in
            [(Height::Rows16, usize::MAX), (Height::Rows16, 1), (Height::Rows128, 5), (Height::Rows128, 13)]
        {
            let what = || format!("{height:?} of {most} tokens, {shape:?}");
            assert_same_bits(&placed.attend(start, end, height, most, None), &whole, &what);
        }
        for ways in [1, 2] {
            let what = || format!("{ways} ways, {shape:?}");
            assert_same_bits(&placed.attend(start, end, Height::Rows16, 1, Some(ways)), &whole, &what);
        }
        for _ in 0..4 {
            let from = start + random.below(end - start);
            let to = from + 1 + random.below(end - from);
            let height = [Height::Rows16, Height::Rows128][random.below(2)];
            let want = &whole[(from - start) * sequence.width()..(to - start) * sequence.width()];
            let what = || format!("{from}..{to} by {height:?}, {shape:?}");
            assert_same_bits(&placed.attend(from, to, height, usize::MAX, None), want, &what);
        }
    }
}

/// A sequence whose every order of partitions has other bits: scores are 0, so that sums of values are exact within a
/// partition, those of the partitions 1 and 3 cancel, and between them the others are rounded to multiples of 4.
fn sensitive(shape: Shape, tokens: usize) -> Sequence {
    let mut sequence = Sequence::random(40, shape, tokens, 16);
    sequence.keys.fill(bf16::ZERO);
    let width = shape.kv_heads * shape.head_dim;
    for (position, values) in sequence.values.chunks_exact_mut(width).enumerate() {
        match position / PARTITION {
            1 => values.fill(bf16::from_f32(131_072.0)),
            3 => values.fill(bf16::from_f32(-131_072.0 * PARTITION as f32 / (tokens - 3 * PARTITION) as f32)),
            _ => {}
        }
    }
    sequence
}

#[test]
fn partitions_are_merged_in_ascending_order_and_another_order_is_noticed() {
    let Some(gpu) = Gpu::get() else { return };
    for window in [None, Some(1200)] {
        let shape = Shape { heads: 4, kv_heads: 1, head_dim: 32, window };
        let end = 3 * PARTITION + 64;
        for (sequence, start) in [(Sequence::random(41, shape, end, 16), end - 10), (sensitive(shape, end), end - 1)] {
            let placed = sequence.place(&gpu);
            let whole = placed.attend(start, end, Height::Rows128, usize::MAX, None);
            for (ways, most) in [(1, 1), (3, 1), (4, 1), (2, 4)] {
                let what = || format!("{ways} ways, {most} tokens, window {window:?}");
                assert_same_bits(&placed.attend(start, end, Height::Rows16, most, Some(ways)), &whole, &what);
            }
        }
        // What a merge in the order of arrival would do.
        let sequence = sensitive(shape, end);
        let placed = sequence.place(&gpu);
        let whole = placed.attend(end - 1, end, Height::Rows16, 1, None);
        let planted = placed.attend_with(end - 1, end, Height::Rows16, 1, Some(4), |left| swap(left, shape, 1, 3));
        let close = |(a, b): (&bf16, &bf16)| (a.to_f32() - b.to_f32()).abs() <= 32.0 / end as f32;
        assert!(planted.iter().zip(&whole).all(close), "more than the order has changed");
        assert!(planted != whole, "the comparison does not see the order of partitions, window {window:?}");
    }
}

/// Two partitions of every tile of one token change their places in what a split left in memory.
fn swap(left: &mut [f32], shape: Shape, first: usize, second: usize) {
    let partitions = left.len() / (2 * shape.heads * (shape.head_dim + 2));
    let (outputs, running) = left.split_at_mut(2 * partitions * shape.heads * shape.head_dim);
    for (part, values) in [(outputs, shape.head_dim), (running, 2)] {
        let length = shape.heads * values;
        for tile in part.chunks_exact_mut(partitions * length) {
            let (head, tail) = tile.split_at_mut(second * length);
            head[first * length..(first + 1) * length].swap_with_slice(&mut tail[..length]);
        }
    }
}
