//! Whether cuBLASLt adds as our kernels do, asked when a model is loaded: its products of the model's shapes, in each
//! number of rows that a graph has and in the largest, beside those of `kernels/products.cu`. The answer is a version's
//! and a card's, and a library that adds otherwise is not used. What it computes with is loaded by the way, as a graph
//! can record only what has run before.
use std::sync::Arc;

use crate::buffer::Buffer;
use crate::context::Context;
use crate::cublaslt::Lt;
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
    let (Some(lt), Some(layer)) = (&network.library, network.plan.layers.first()) else { return Ok(true) };
    let config = &network.config;
    // Each matrix, its `k`, and the rows that it is multiplied with at most.
    let products = [
        (layer.qkv, config.hidden, usize::MAX),
        (layer.attention_out, config.attended_width(), usize::MAX),
        (layer.gate_up, config.hidden, usize::MAX),
        (layer.down, config.feed_forward, usize::MAX),
        (network.plan.head, config.hidden, MOST_LOGITS),
    ];
    let many = || all_rows.iter().copied().filter(|&rows| rows > FEW_ROWS);
    let Some(most) = many().max() else { return Ok(true) };
    let widest = products.iter().map(|(_, k, _)| *k).max().unwrap_or(0);
    let x = Buffer::holding(context, "products that are compared", &noise(most * widest))?;
    for rows in many() {
        for &(weight, k, most) in &products {
            if rows <= most && !agrees(network, lt, stream, &x, weight, rows, k)? {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

fn agrees(
    network: &Network,
    lt: &Lt,
    stream: &Stream,
    x: &Buffer,
    weight: Span,
    rows: usize,
    k: usize,
) -> Result<bool, CudaError> {
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
    if !unsafe { large.queue(|launch| network.kernels.launch(stream, launch)) }? {
        return Ok(true);
    }
    let own = network.workspace.part(ours.at, 4 * rows * columns);
    let own = Product { output: Output::Store(own), n: columns, ..all };
    // SAFETY: as above.
    unsafe { network.kernels.launch(stream, product::product(&own, network.limits.multiprocessors)) }?;
    stream.synchronize()?;
    let bits = |at: usize, row: usize, width: usize| {
        let mut values = vec![0.0f32; columns];
        network.workspace.read(at + 4 * row * width, &mut values)?;
        Ok::<_, CudaError>(values.into_iter().map(f32::to_bits).collect::<Vec<_>>())
    };
    for row in [0, 1, rows / 2, rows - 2, rows - 1] {
        if bits(work.segments.at, row, n)? != bits(ours.at, row, columns)? {
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
