//! Whether cuBLASLt adds as our kernels do, asked when a model is loaded: its products of the model's shapes, in each
//! number of rows that a graph has and in the largest, beside those of `kernels/products.cu`. The answer is a version's
//! and a card's, and a library that adds otherwise is not used. What it computes with is loaded by the way, as a graph
//! can record only what has run before.
use std::sync::Arc;

use crate::buffer::Buffer;
use crate::context::Context;
use crate::error::CudaError;
use crate::kernels::product::{self, Output, Product};
use crate::large::{FEW_ROWS, Large};
use crate::network::Network;
use crate::plan::Span;
use crate::stream::Stream;
use crate::workspace::MOST_LOGITS;

/// Columns of a product that are compared, of its first rows, those in the middle and the last ones.
const COLUMNS: usize = 64;

/// Whether the library's bits are ours in products of so many rows. Without a library they are.
///
/// # Errors
/// Whatever the driver and the library answer.
pub(crate) fn library_agrees(
    context: &Arc<Context>,
    network: &Network,
    stream: &Stream,
    all_rows: &[usize],
) -> Result<bool, CudaError> {
    let Some(layer) = network.plan.layers.first() else { return Ok(true) };
    let config = &network.config;
    let mut weights = vec![
        (layer.qkv, config.hidden),
        (layer.attention_out, config.attended_width()),
        (layer.gate_up, config.hidden),
        (layer.down, config.feed_forward),
    ];
    let Some(most) = all_rows.iter().copied().filter(|&rows| network.library.is_some() && rows > FEW_ROWS).max() else {
        return Ok(true);
    };
    let widest = weights.iter().map(|(_, k)| *k).max().unwrap_or(0);
    let x = Buffer::holding(context, "products that are compared", &noise(most * widest))?;
    for &rows in all_rows.iter().filter(|&&rows| rows > FEW_ROWS) {
        if rows <= MOST_LOGITS {
            weights.push((network.plan.head, config.hidden));
        }
        for &(weight, k) in &weights {
            if !agrees(network, stream, &x, weight, rows, k)? {
                return Ok(false);
            }
        }
        weights.truncate(4);
    }
    Ok(true)
}

fn agrees(
    network: &Network,
    stream: &Stream,
    x: &Buffer,
    weight: Span,
    rows: usize,
    k: usize,
) -> Result<bool, CudaError> {
    let Some(lt) = &network.library else { return Ok(true) };
    let (work, weight) = (&network.work, network.weights.part(weight.at, weight.bytes));
    let n = weight.bytes / (2 * k);
    // As many rows as its memory takes: there it goes in turns.
    let rows = rows.min(work.segments.bytes / (4 * n));
    let (theirs, ours) = (network.workspace.part(work.segments.at, 4 * rows * n), work.qkv);
    let columns = COLUMNS.min(n).min(network.config.qkv_width());
    let all = Product { output: Output::Store(theirs), x: x.mem(), weight, rows, n, k };
    let large = Large { lt, stream, product: all, scratch: theirs };
    // SAFETY: weights and workspace are the network's, which waits for the stream before it lets go of them, as is done
    // here for `x`; nothing else is queued.
    let has_queued = unsafe { large.queue(|launch| network.kernels.launch(stream, launch)) }?;
    let own = network.workspace.part(ours.at, 4 * rows * columns);
    let own = Product { output: Output::Store(own), n: columns, ..all };
    // SAFETY: as above.
    unsafe { network.kernels.launch(stream, product::product(&own, network.limits.multiprocessors)) }?;
    stream.synchronize()?;
    let read = |at: usize, row: usize, width: usize| {
        let mut values = vec![0.0f32; columns];
        network.workspace.read(at + 4 * row * width, &mut values).map(|()| values)
    };
    for row in [0, 1, rows / 2, rows - 2, rows - 1] {
        let (theirs, ours) = (read(work.segments.at, row, n)?, read(ours.at, row, columns)?);
        if has_queued && theirs.iter().map(|value| value.to_bits()).ne(ours.iter().map(|value| value.to_bits())) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// bf16 numbers between 0.5 and 2, of either sign.
fn noise(count: usize) -> Vec<u16> {
    let word = |i: usize| (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    (0..count).map(|i| (word(i) as u16 & 0x80ff) | 0x3f00).collect()
}
