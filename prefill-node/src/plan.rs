//! What of a prompt's KV can leave, and what has left: a pure state machine for one hand-off. How far the computation
//! is goes in, pieces to push come out, each once and none before it is final. Knows no ticket, no arena, no time; the
//! hand-off in `handoff.rs` executes what it says.
//!
//! A prompt is computed chunk by chunk and, inside a chunk, layer by layer. So the final part of its KV is a rectangle
//! of (tokens, all layers), and in the last chunk also one of (all tokens, some layers):
//!
//! ```text
//!            blocks ─────────────►
//! units  ████████████████░░░░░░░░   █ final by chunks: these blocks leave whole
//!   │    ████████████████▓▓▓▓▓▓▓▓   ▓ final by layers, in the last chunk: these leave unit by unit, the partial
//!   ▼    ████████████████░░░░░░░░     last block among them
//! ```
use std::ops::Range;

/// Longest piece: what is hashed and queued in one go, and how finely hidden and exposed bytes are told apart.
pub const MAX_PIECE_BYTES: usize = 8 << 20;
/// Likewise of a GPU's memory. A piece costs the GPU some 30 µs, in which it hashes that much. Where the receiver's
/// process has the same GPU, a change between the two takes 0.3 ms.
pub const MAX_GPU_PIECE_BYTES: usize = 64 << 20;

/// How far the computation of a prompt is. Only ever grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Tokens, from the first, whose KV is final in all layers.
    pub tokens: usize,
    /// Layers, from the first, in which the KV of all other tokens is final, too: only in the last chunk more than 0.
    pub layers: usize,
}

/// Sizes of a prompt's KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Tokens of the prompt, at least 1.
    pub tokens: usize,
    /// Tokens of a block.
    pub block_tokens: usize,
    /// Bytes of a block.
    pub block_bytes: usize,
    /// Layers of the model.
    pub layers: usize,
    /// Equal pieces in which a block may leave: `layers`, or 1 for only whole.
    pub units: u8,
    /// Nothing smaller leaves before all is final. `usize::MAX`: nothing at all does.
    pub min_bytes: usize,
    /// Of a piece that has more than a block.
    pub max_bytes: usize,
}

impl Shape {
    /// Blocks of the prompt, a partial last one included.
    pub fn blocks(&self) -> usize {
        self.tokens.div_ceil(self.block_tokens)
    }

    fn bytes(&self, piece: &Piece) -> usize {
        piece.blocks.len() * self.block_bytes / usize::from(self.units) * piece.units.len()
    }
}

/// Some units of some adjacent blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Indices in the prompt.
    pub blocks: Range<usize>,
    /// Of each of them.
    pub units: Range<u8>,
}

/// One hand-off's way through a prompt.
#[derive(Clone, Debug)]
pub struct Plan {
    shape: Shape,
    /// Blocks before this index have left, or never had to.
    whole: usize,
    /// Of the others, units before this one have left.
    units: u8,
}

impl Plan {
    /// Nothing has left; the receiver has the first `held` blocks.
    pub fn new(shape: Shape, held: usize) -> Self {
        Self { shape, whole: held.min(shape.blocks()), units: 0 }
    }

    /// What can leave now, in the order in which it shall. The caller pushes all of it.
    pub fn pieces(&mut self, progress: Progress) -> Vec<Piece> {
        let (blocks, all_units) = (self.shape.blocks(), self.shape.units);
        let complete = progress.tokens >= self.shape.tokens || progress.layers >= self.shape.layers;
        let whole = if complete { blocks } else { progress.tokens / self.shape.block_tokens };
        let whole = whole.max(self.whole);
        let units = if usize::from(all_units) == self.shape.layers { progress.layers as u8 } else { 0 };
        let by_chunks = Piece { blocks: self.whole..whole, units: self.units..all_units };
        let by_layers = Piece { blocks: whole..blocks, units: self.units..units.max(self.units) };
        let ready: Vec<_> = [by_chunks, by_layers].into_iter().filter(|piece| self.shape.bytes(piece) > 0).collect();
        let bytes: usize = ready.iter().map(|piece| self.shape.bytes(piece)).sum();
        if !complete && bytes < self.shape.min_bytes {
            return Vec::new();
        }
        (self.whole, self.units) = (whole, units.max(self.units));
        ready.into_iter().flat_map(|piece| self.cut(piece)).collect()
    }

    /// Whether all has left.
    pub fn is_complete(&self) -> bool {
        self.whole == self.shape.blocks()
    }

    /// Bytes of a piece.
    pub fn bytes(&self, piece: &Piece) -> usize {
        self.shape.bytes(piece)
    }

    /// Into pieces of at most `max_bytes`, but of a block at least.
    fn cut(&self, piece: Piece) -> impl Iterator<Item = Piece> + use<> {
        let of_a_block = self.shape.bytes(&Piece { blocks: 0..1, units: piece.units.clone() });
        let step = (self.shape.max_bytes / of_a_block.max(1)).max(1);
        let Range { start, end } = piece.blocks;
        (start..end)
            .step_by(step)
            .map(move |first| Piece { blocks: first..(first + step).min(end), units: piece.units.clone() })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SHAPE: Shape = Shape {
        tokens: 100,
        block_tokens: 16,
        block_bytes: 4096,
        layers: 4,
        units: 4,
        min_bytes: 1,
        max_bytes: MAX_PIECE_BYTES,
    };

    fn after(tokens: usize, layers: usize) -> Progress {
        Progress { tokens, layers }
    }

    fn piece(blocks: Range<usize>, units: Range<u8>) -> Piece {
        Piece { blocks, units }
    }

    #[test]
    fn chunks_leave_whole_and_the_last_one_layer_by_layer() {
        let mut plan = Plan::new(SHAPE, 0);
        assert_eq!(plan.pieces(after(0, 0)), []);
        assert_eq!(plan.pieces(after(40, 0)), [piece(0..2, 0..4)], "block 2 is half full");
        assert_eq!(plan.pieces(after(40, 1)), [piece(2..7, 0..1)]);
        assert_eq!(plan.pieces(after(40, 3)), [piece(2..7, 1..3)]);
        assert!(!plan.is_complete());
        assert_eq!(plan.pieces(after(40, 4)), [piece(2..7, 3..4)], "the partial last block included");
        assert!(plan.is_complete());
        assert_eq!(plan.pieces(after(100, 0)), []);
    }

    #[test]
    fn a_ticket_that_comes_late_finds_what_is_there() {
        assert_eq!(Plan::new(SHAPE, 0).pieces(after(64, 2)), [piece(0..4, 0..4), piece(4..7, 0..2)]);
        assert_eq!(Plan::new(SHAPE, 0).pieces(after(100, 0)), [piece(0..7, 0..4)]);
    }

    #[test]
    fn what_the_receiver_holds_does_not_leave() {
        let mut plan = Plan::new(SHAPE, 3);
        assert_eq!(plan.pieces(after(32, 0)), []);
        assert_eq!(plan.pieces(after(32, 1)), [piece(3..7, 0..1)]);
        assert_eq!(plan.pieces(after(100, 0)), [piece(3..7, 1..4)]);
        assert!(Plan::new(SHAPE, 7).is_complete());
    }

    #[test]
    fn small_pieces_wait_for_more_or_for_the_end() {
        let mut plan = Plan::new(Shape { min_bytes: 3 * 4096, ..SHAPE }, 0);
        assert_eq!(plan.pieces(after(32, 0)), []);
        assert_eq!(plan.pieces(after(48, 0)), [piece(0..3, 0..4)]);
        assert_eq!(plan.pieces(after(48, 2)), [], "4 blocks, half of each");
        assert_eq!(plan.pieces(after(48, 3)), [piece(3..7, 0..3)]);
        assert_eq!(plan.pieces(after(48, 4)), [piece(3..7, 3..4)]);
        let mut whole = Plan::new(Shape { min_bytes: usize::MAX, ..SHAPE }, 0);
        assert_eq!(whole.pieces(after(96, 3)), []);
        assert_eq!(whole.pieces(after(100, 0)), [piece(0..7, 0..4)]);
    }

    #[test]
    fn blocks_without_units_leave_whole() {
        let mut plan = Plan::new(Shape { units: 1, ..SHAPE }, 0);
        assert_eq!(plan.pieces(after(64, 3)), [piece(0..4, 0..1)]);
        assert_eq!(plan.pieces(after(64, 4)), [piece(4..7, 0..1)]);
        assert!(plan.is_complete());
    }

    #[test]
    fn no_piece_is_longer_than_it_may_be() {
        let large = Shape { tokens: 10_000, block_bytes: 368_640, layers: 30, units: 30, ..SHAPE };
        let pieces = Plan::new(large, 0).pieces(after(10_000, 0));
        assert!(pieces.len() > 1 && pieces.iter().all(|piece| large.bytes(piece) <= MAX_PIECE_BYTES));
    }

    /// A computation: what is cached, chunks, then the layers of the last chunk that are told of.
    fn course(shape: Shape, cached: usize, step: usize, told: &[bool]) -> Vec<Progress> {
        let mut course = vec![after(cached, 0)];
        let mut tokens = cached;
        while tokens + step < shape.tokens {
            tokens += step;
            course.push(after(tokens, 0));
        }
        let layers = (1..=shape.layers).filter(|layer| told[layer % told.len()]);
        course.extend(layers.map(|layers| after(tokens, layers)));
        course.push(after(shape.tokens, 0));
        course
    }

    proptest! {
        #[test]
        fn every_unit_leaves_once_in_order_and_when_it_is_final(
            tokens in 1usize..300, block_tokens in prop::sample::select(vec![1usize, 16, 32]), layers in 1usize..7,
            by_units in any::<bool>(), min_bytes in 0usize..40_000, max_bytes in 0usize..20_000, step in 1usize..120, cached in 0usize..300,
            held in 0usize..20, ticket_after in 0usize..30, seen in prop::collection::vec(any::<bool>(), 1..20),
            told in prop::collection::vec(any::<bool>(), 1..5),
        ) {
            let units = if by_units { layers as u8 } else { 1 };
            let block_bytes = layers * 8 * block_tokens;
            let shape = Shape { tokens, block_tokens, block_bytes, layers, units, min_bytes, max_bytes };
            let cached = cached.min(tokens - 1) / block_tokens * block_tokens;
            let held = held.min(shape.blocks());
            let mut plan = Plan::new(shape, held);
            let mut left = vec![0u8; shape.blocks()];
            let course = course(shape, cached, step, &told);
            let last = course.len() - 1;
            for (at, progress) in course.into_iter().enumerate() {
                // Not everything is looked at: who is busy pushing finds the latest.
                if at < last && (at < ticket_after || !seen[at % seen.len()]) { continue; }
                let pieces = plan.pieces(progress);
                let bytes: usize = pieces.iter().map(|piece| plan.bytes(piece)).sum();
                let complete = progress.tokens >= tokens || progress.layers == layers;
                prop_assert!(complete || pieces.is_empty() || bytes >= min_bytes);
                for Piece { blocks, units: range } in pieces {
                    prop_assert!(!range.is_empty() && !blocks.is_empty());
                    for block in blocks {
                        prop_assert_eq!(left[block], range.start, "without gap, none twice");
                        left[block] = range.end;
                        let computed = ((block + 1) * block_tokens).min(tokens) <= progress.tokens;
                        let layer = usize::from(range.end) * layers / usize::from(units);
                        prop_assert!(computed || layer <= progress.layers, "block {} is not final", block);
                    }
                }
            }
            prop_assert!(plan.is_complete());
            prop_assert!(left[..held].iter().all(|left| *left == 0) && left[held..].iter().all(|left| *left == units));
        }
    }
}
