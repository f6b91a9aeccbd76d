//! From a model's files to device memory: every tensor becomes bf16 (vectors f32) on the host's cores, a bounded block
//! at a time, and streams through two blocks of pinned memory while the next one is unpacked. Where tensors go is
//! planned in `plan.rs`; rows of Q and K change places as on the CPU, so that one rotation serves all files.
use std::sync::Arc;
use std::thread;

use half::bf16;
use tandem_engine::EngineError;
use tandem_engine::models::config::LlamaConfig;
use tandem_engine::models::rope::RowOrder;
use tandem_engine::models::weights::{RawTensor, Weights};
use tandem_engine::ops::dequantize::dequantize;
use tandem_gguf::TensorType;

use crate::buffer::Buffer;
use crate::context::Context;
use crate::error::CudaError;
use crate::pinned::Pinned;
use crate::plan::{LayerPlan, Part, Span, WeightPlan, qkv_parts};
use crate::stream::{Event, Stream};

/// Bytes of a block of pinned memory; there are two.
const BLOCK_BYTES: usize = 16 << 20;
/// Threads that unpack at most: beyond that the copy is what takes time.
const MOST_THREADS: usize = 16;

/// Reads all weights of `config` and writes them where `plan` says.
///
/// # Errors
/// `Model` for a tensor that is missing, damaged or of no use; what the device answers.
pub(crate) fn load(
    context: &Arc<Context>,
    weights: &dyn Weights,
    config: &LlamaConfig,
    plan: &WeightPlan,
    positions: usize,
) -> Result<Buffer, EngineError> {
    let buffer = Buffer::new(context, "the model's weights", plan.bytes)?;
    let mut upload = Upload::new(context, &buffer, weights)?;
    let (hidden, vocabulary) = (config.hidden, config.vocab_size);
    upload.matrix("token_embd.weight", vocabulary, hidden, plan.embedding)?;
    if !config.tied {
        upload.matrix("output.weight", vocabulary, hidden, plan.head)?;
    }
    upload.vector("output_norm.weight", hidden, plan.final_norm)?;
    for (layer, spans) in plan.layers.iter().enumerate() {
        upload.layer(config, layer, spans)?;
    }
    weights.finish()?;
    upload.values(&rotations(config, positions), plan.rotations)?;
    upload.end()?;
    drop(upload);
    Ok(buffer)
}

/// Cosine and sine of each pair at each position, as the CPU computes them.
fn rotations(config: &LlamaConfig, positions: usize) -> Vec<f32> {
    let frequencies = config.rope.frequencies(config.head_dim);
    let turn = |position: usize, frequency: f64| {
        let (sin, cos) = (position as f64 * frequency).sin_cos();
        [cos as f32, sin as f32]
    };
    (0..positions)
        .flat_map(|position| frequencies.iter().flat_map(move |&frequency| turn(position, frequency)))
        .collect()
}

/// A load under way.
struct Upload<'a> {
    weights: &'a dyn Weights,
    buffer: &'a Buffer,
    stream: Stream,
    blocks: [Block; 2],
    /// Which block is filled next.
    next: usize,
    threads: usize,
}

/// Pinned memory, and when the device has copied it.
struct Block {
    memory: Pinned,
    copied: Event,
}

impl<'a> Upload<'a> {
    fn new(context: &Arc<Context>, buffer: &'a Buffer, weights: &'a dyn Weights) -> Result<Self, CudaError> {
        let block = || -> Result<Block, CudaError> {
            Ok(Block { memory: Pinned::new(context, BLOCK_BYTES)?, copied: Event::new(context)? })
        };
        let threads = thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS);
        let (stream, blocks) = (Stream::new(context)?, [block()?, block()?]);
        Ok(Self { weights, buffer, stream, blocks, next: 0, threads })
    }

    fn layer(&mut self, config: &LlamaConfig, layer: usize, spans: &LayerPlan) -> Result<(), EngineError> {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        let (hidden, feed_forward) = (config.hidden, config.feed_forward);
        self.vector(&name("attn_norm"), hidden, spans.attention_norm)?;
        self.fused(&qkv_parts(config, layer, "weight"), hidden, spans.qkv)?;
        if let Some(span) = spans.qkv_bias {
            let mut all = Vec::with_capacity(config.qkv_width());
            for Part { name, rows, order } in qkv_parts(config, layer, "bias") {
                all.extend(order.apply(&self.weights.tensor(&name, &[rows])?.values()));
            }
            self.values(&all, span)?;
        }
        if let Some(span) = spans.head_norm {
            let (turned, mut all) = (config.rope.row_order(config.head_dim), Vec::new());
            for (part, heads) in [("attn_q_norm", config.heads), ("attn_k_norm", config.kv_heads)] {
                let norm = self.weights.tensor(&name(part), &[config.head_dim])?.values();
                all.extend(turned.apply(&norm).repeat(heads));
            }
            self.values(&all, span)?;
        }
        self.matrix(&name("attn_output"), hidden, config.attended_width(), spans.attention_out)?;
        self.vector(&name("ffn_norm"), hidden, spans.feed_forward_norm)?;
        self.in_turn([&name("ffn_gate"), &name("ffn_up")], feed_forward, hidden, spans.gate_up)?;
        self.matrix(&name("ffn_down"), hidden, feed_forward, spans.down)
    }

    /// A vector, as f32.
    fn vector(&mut self, name: &str, n: usize, span: Span) -> Result<(), EngineError> {
        let values = self.weights.tensor(name, &[n])?.values();
        Ok(self.values(&values, span)?)
    }

    /// f32 values that are in memory.
    fn values(&mut self, values: &[f32], span: Span) -> Result<(), CudaError> {
        self.stream(values.len(), size_of::<f32>(), span, |n, to| to.copy_from_slice(&values[n].to_le_bytes()))
    }

    /// A matrix of `rows` × `k`.
    fn matrix(&mut self, name: &str, rows: usize, k: usize, span: Span) -> Result<(), EngineError> {
        self.fused(&[Part { name: name.to_owned(), rows, order: RowOrder::AsStored }], k, span)
    }

    /// Matrices of `k` columns, one after another.
    fn fused(&mut self, parts: &[Part], k: usize, span: Span) -> Result<(), EngineError> {
        let mut at = span.at;
        for part in parts {
            let tensor = self.weights.tensor(&part.name, &[part.rows, k])?;
            let bytes = part.rows * k * size_of::<bf16>();
            self.stream(part.rows, k * size_of::<bf16>(), Span { at, bytes }, |n, to| {
                unpack(&tensor, part.order.stored(n), to);
            })?;
            at += bytes;
        }
        Ok(())
    }

    /// Two matrices of `rows` × `k`, their rows in turn.
    fn in_turn(&mut self, names: [&str; 2], rows: usize, k: usize, span: Span) -> Result<(), EngineError> {
        let [first, second] = names.map(|name| self.weights.tensor(name, &[rows, k]));
        let tensors = [first?, second?];
        Ok(self.stream(2 * rows, k * size_of::<bf16>(), span, |n, to| unpack(&tensors[n % 2], n / 2, to))?)
    }

    /// Copies `rows` rows of `row_bytes` to `span`, each of which `row` writes.
    fn stream(
        &mut self,
        rows: usize,
        row_bytes: usize,
        span: Span,
        row: impl Fn(usize, &mut [u8]) + Sync,
    ) -> Result<(), CudaError> {
        assert_eq!(rows * row_bytes, span.bytes, "a tensor as large as it was planned");
        let per_block = BLOCK_BYTES / row_bytes.max(1);
        if per_block == 0 {
            return Err(CudaError::Kernels(format!("a row of weights has {row_bytes} bytes; more than {BLOCK_BYTES}")));
        }
        for first in (0..rows).step_by(per_block) {
            let count = per_block.min(rows - first);
            let Block { memory, copied } = &mut self.blocks[self.next];
            copied.synchronize()?;
            // SAFETY: the copy of the block before has ended.
            let bytes = unsafe { memory.slice_mut::<u8>(0, count * row_bytes) };
            side_by_side(self.threads, bytes, row_bytes, |n, to| row(first + n, to));
            self.buffer.upload(span.at + first * row_bytes, memory, 0, count * row_bytes, &self.stream)?;
            copied.record(&self.stream)?;
            self.next = 1 - self.next;
        }
        Ok(())
    }

    /// All is there.
    fn end(&self) -> Result<(), CudaError> {
        self.stream.synchronize()
    }
}

impl Drop for Upload<'_> {
    fn drop(&mut self) {
        // After an error as well: no copy may read pinned memory that is freed.
        let _ = self.stream.synchronize();
    }
}

/// A row as bf16, rounded to the nearest, which is exact for BF16 files.
fn unpack(tensor: &RawTensor<'_>, row: usize, to: &mut [u8]) {
    let bytes = &tensor[row * tensor.row_bytes()..][..tensor.row_bytes()];
    if tensor.dtype() == TensorType::BF16 {
        return to.copy_from_slice(bytes);
    }
    let mut values = vec![0.0; to.len() / size_of::<bf16>()];
    dequantize(tensor.dtype(), bytes, &mut values);
    for (to, value) in to.as_chunks_mut().0.iter_mut().zip(values) {
        *to = bf16::from_f32(value).to_le_bytes();
    }
}

/// Writes all rows of `bytes`, on so many threads where there is enough to do.
fn side_by_side(threads: usize, bytes: &mut [u8], row_bytes: usize, row: impl Fn(usize, &mut [u8]) + Sync) {
    /// Less than this is done sooner than a thread starts.
    const LEAST_BYTES: usize = 256 << 10;
    let rows = bytes.len() / row_bytes.max(1);
    let share = rows.div_ceil(threads.max(1)).max(LEAST_BYTES.div_ceil(row_bytes.max(1))).max(1);
    let write = |first: usize, bytes: &mut [u8]| {
        (first..).zip(bytes.chunks_exact_mut(row_bytes)).for_each(|(n, to)| row(n, to));
    };
    if share >= rows {
        return write(0, bytes);
    }
    thread::scope(|scope| {
        for (index, part) in bytes.chunks_mut(share * row_bytes).enumerate() {
            let write = &write;
            scope.spawn(move || write(index * share, part));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_rows_are_written_by_however_many_threads() {
        for (threads, rows, row_bytes) in [(1, 5, 8), (4, 1000, 1024), (3, 1, 4), (16, 257, 4096)] {
            let mut bytes = vec![0; rows * row_bytes];
            side_by_side(threads, &mut bytes, row_bytes, |n, to| to.fill(1 + (n % 250) as u8));
            let right = |(n, row): (usize, &[u8])| row.iter().all(|byte| *byte == 1 + (n % 250) as u8);
            assert!(bytes.chunks(row_bytes).enumerate().all(right), "{threads} {rows} {row_bytes}");
        }
    }
}
