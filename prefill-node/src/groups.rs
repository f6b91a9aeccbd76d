//! Where to cut a prompt's last chunk into groups of layers, each of which leaves while the next ones compute. Pure:
//! speeds in, cuts out.
//!
//! Fewer and larger groups cost less (a wake-up and a frame each), but a group can leave only when its last layer is
//! done. So the cuts are made from the end: the last group is small, since nothing hides it; the one before it is as
//! large as the last one's compute can hide, and so on. Over a fast link groups grow backwards quickly and there are
//! few; over a slow one each is as small as a frame may be, so that the link is never idle.
use std::time::Duration;

/// What a frame is worth its cost from, see `docs/benchmarks/transfer.md`.
pub const MIN_FRAME_BYTES: usize = 256 << 10;
/// How long the last group may take: so long, or this share of the whole transfer, whichever is more.
const TAIL: Duration = Duration::from_millis(1);
const TAIL_SHARE: f64 = 0.05;

/// What cutting depends on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerCost {
    /// Layers of the model.
    pub layers: usize,
    /// Bytes of one layer that leave in the last chunk.
    pub layer_bytes: usize,
    /// Bytes of the prompt that leave in all.
    pub total_bytes: usize,
    /// Of one layer of the last chunk; zero while nothing was measured.
    pub compute: Duration,
    /// Of the link.
    pub bytes_per_second: f64,
}

/// After how many layers something shall leave; ascending, the last one is all of them. Nothing for nothing.
pub fn layer_groups(cost: &LayerCost) -> Vec<usize> {
    let LayerCost { layers, layer_bytes, .. } = *cost;
    if layers == 0 || layer_bytes == 0 {
        return Vec::new();
    }
    let seconds = |bytes: usize| bytes as f64 / cost.bytes_per_second.max(1.0);
    let transfer = seconds(layer_bytes);
    let frame = MIN_FRAME_BYTES.div_ceil(layer_bytes).min(layers);
    let tail = TAIL.as_secs_f64().max(TAIL_SHARE * seconds(cost.total_bytes));
    // As casts saturate, a link without limit gives the whole chunk.
    let last = frame.min(((tail / transfer) as usize).max(1));
    let hidden = cost.compute.as_secs_f64() / transfer;
    let (mut cuts, mut end, mut size) = (Vec::new(), layers, last as f64);
    while end > 0 {
        cuts.push(end);
        let taken = if cuts.len() == 1 { last } else { frame.max(size as usize) };
        end = end.saturating_sub(taken);
        // A first group below a frame joins the next one.
        if end < frame && cuts.len() > 1 {
            end = 0;
        }
        size = (taken as f64).max(size) * hidden;
    }
    cuts.reverse();
    cuts
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// 512 tokens of SmolLM2-135M in bf16 on a CPU.
    const COST: LayerCost = LayerCost {
        layers: 30,
        layer_bytes: 393_216,
        total_bytes: 30 * 393_216,
        compute: Duration::from_millis(20),
        bytes_per_second: 1e9,
    };

    #[test]
    fn over_a_fast_link_there_are_few_groups_and_the_last_one_is_small() {
        assert_eq!(layer_groups(&COST), [29, 30]);
        let quicker = LayerCost { compute: Duration::from_micros(1000), ..COST };
        assert_eq!(layer_groups(&quicker), [5, 21, 27, 29, 30]);
    }

    #[test]
    fn over_a_slow_link_every_group_is_a_frame() {
        let slow = LayerCost { compute: Duration::from_millis(1), bytes_per_second: 50e6, ..COST };
        assert_eq!(layer_groups(&slow), (1..=30).collect::<Vec<_>>());
        let small = LayerCost { layer_bytes: 100_000, total_bytes: 3_000_000, ..slow };
        let cuts = layer_groups(&small);
        assert_eq!((cuts.len(), &cuts[cuts.len() - 2..]), (10, &[29, 30][..]), "{cuts:?}");
    }

    #[test]
    fn without_a_measurement_groups_are_frames() {
        assert_eq!(layer_groups(&LayerCost { compute: Duration::ZERO, ..COST }).len(), 30);
    }

    #[test]
    fn little_leaves_in_one_piece() {
        let little = LayerCost { layer_bytes: 4096, total_bytes: 30 * 4096, ..COST };
        assert_eq!(layer_groups(&little), [30]);
        assert!(layer_groups(&LayerCost { layers: 0, ..COST }).is_empty());
        assert_eq!(layer_groups(&LayerCost { bytes_per_second: f64::INFINITY, ..COST }).last(), Some(&30));
    }

    proptest! {
        #[test]
        fn cuts_ascend_to_the_end_and_the_tail_is_short(
            layers in 1usize..100, layer_bytes in 1usize..10_000_000, more in 0usize..100_000_000, us in 0u64..100_000,
            bytes_per_second in 1e6f64..1e11,
        ) {
            let (total_bytes, compute) = (layers * layer_bytes + more, Duration::from_micros(us));
            let cost = LayerCost { layers, layer_bytes, total_bytes, compute, bytes_per_second };
            let cuts = layer_groups(&cost);
            prop_assert_eq!(cuts.last(), Some(&layers));
            prop_assert!(cuts.windows(2).all(|two| two[0] < two[1]) && cuts[0] > 0);
            let sizes: Vec<usize> = std::iter::once(&0).chain(&cuts).zip(&cuts).map(|(from, to)| to - from).collect();
            let (tail, before) = sizes.split_last().expect("one at least");
            prop_assert!(before.iter().all(|size| size * layer_bytes >= MIN_FRAME_BYTES || before.len() == 1));
            let seconds = (tail * layer_bytes) as f64 / bytes_per_second;
            let allowed = (0.05 * total_bytes as f64 / bytes_per_second).max(1e-3);
            prop_assert!(*tail == 1 || seconds <= allowed * 1.001, "{} layers, {} s of {}", tail, seconds, allowed);
        }
    }
}
