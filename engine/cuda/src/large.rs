//! Products of many rows by cuBLASLt: a call for each segment of `k`, added in their order, so that the bits are those
//! of `kernels/products.cu`. What the library cannot do with results, `product_sum` does behind it: the gate, and the
//! addition of several segments to what is there.
use std::sync::Arc;

use crate::cublaslt::{self, Lt, Operands, Prepared, Shape};
use crate::error::CudaError;
use crate::kernels::launch::{Launch, Mem, Refused, part};
use crate::kernels::product::{self, Output, Product, SEGMENT};
use crate::stream::Stream;

/// More rows than this are the library's: up to it our kernels are as fast, or faster.
pub(crate) const FEW_ROWS: usize = 32;
/// Scratch memory at most: more rows go through it in turns.
const MOST_SCRATCH_BYTES: usize = 256 << 20;

/// Bytes of scratch for products of up to `rows` rows.
pub(crate) fn scratch_bytes(rows: usize, n: usize) -> usize {
    rows.saturating_mul(4 * n).min(MOST_SCRATCH_BYTES).max(4 * n)
}

/// A product that the library computes.
pub(crate) struct Large<'a> {
    pub lt: &'a Lt,
    pub stream: &'a Stream,
    pub product: Product,
    /// f32, of [`scratch_bytes`].
    pub scratch: Mem,
}

impl Large<'_> {
    /// Queues it; `launch` queues kernels of ours. Whether it did: the library may have no algorithm for a shape, and
    /// then nothing is queued.
    ///
    /// # Errors
    /// As [`Lt::prepare`] and [`Lt::run`], and those of `launch`.
    ///
    /// # Safety
    /// As [`Lt::run`], of all memory that is named here.
    pub unsafe fn queue(
        &self,
        launch: impl Fn(Result<Launch, Refused>) -> Result<(), CudaError>,
    ) -> Result<bool, CudaError> {
        let Product { output, rows, n, k, .. } = self.product;
        let in_place = match output {
            Output::Store(_) => true,
            Output::Add(_) => k <= SEGMENT,
            Output::SwiGlu(_) => false,
        };
        let rows_at_a_time = if in_place { rows } else { (self.scratch.bytes / (4 * n.max(1))).clamp(1, rows) };
        let turns: Vec<Product> =
            (0..rows).step_by(rows_at_a_time).map(|first| self.turn(first, rows_at_a_time)).collect();
        let mut prepared = Vec::new();
        for turn in &turns {
            let Some(segments) = self.prepare(turn.rows)? else { return Ok(false) };
            prepared.push(segments);
        }
        for (turn, segments) in turns.iter().zip(prepared) {
            let target = match turn.output {
                Output::Store(out) if in_place => cublaslt::Output::Store(out),
                Output::Add(out) if in_place => cublaslt::Output::Add(out),
                _ => cublaslt::Output::Store(part(self.scratch, 0, 4 * turn.rows * n)),
            };
            // SAFETY: the caller's promise.
            unsafe { self.add_segments(turn, &segments, target) }?;
            if !in_place {
                launch(product::sum(turn, self.scratch, 1))?;
            }
        }
        Ok(true)
    }

    /// Some rows of the product.
    fn turn(&self, first: usize, most: usize) -> Product {
        let Product { output, x, rows, n, k, .. } = self.product;
        let rows = most.min(rows - first);
        let output = match output {
            Output::Store(out) => Output::Store(part(out, 4 * n * first, 4 * n * rows)),
            Output::Add(out) => Output::Add(part(out, 4 * n * first, 4 * n * rows)),
            Output::SwiGlu(out) => Output::SwiGlu(part(out, n * first, n * rows)),
        };
        Product { output, x: part(x, 2 * k * first, 2 * k * rows), rows, ..self.product }
    }

    /// The products of the segments; none where the library has no algorithm for one of them.
    fn prepare(&self, rows: usize) -> Result<Option<Vec<Arc<Prepared>>>, CudaError> {
        let Product { n, k, .. } = self.product;
        let shape = |at| Shape { rows, n, k: SEGMENT.min(k - at), x_stride: k, weight_stride: k };
        (0..k).step_by(SEGMENT).map(|at| self.lt.prepare(shape(at))).collect()
    }

    /// Stores or adds the first segment, as `target` says, and adds the others.
    unsafe fn add_segments(
        &self,
        turn: &Product,
        segments: &[Arc<Prepared>],
        target: cublaslt::Output,
    ) -> Result<(), CudaError> {
        let (cublaslt::Output::Store(to) | cublaslt::Output::Add(to)) = target;
        for (index, prepared) in segments.iter().enumerate() {
            let behind = |mem: Mem| part(mem, 2 * SEGMENT * index, mem.bytes);
            let output = if index == 0 { target } else { cublaslt::Output::Add(to) };
            let operands = Operands { output, x: behind(turn.x), weight: behind(turn.weight) };
            // SAFETY: the caller's promise.
            unsafe { self.lt.run(self.stream, prepared, &operands) }?;
        }
        Ok(())
    }
}
