//! Where each of a model's weights lies in device memory: one allocation, planned from the model's sizes alone, so that
//! it is known how much memory they take before anything is read.
use tandem_engine::models::config::LlamaConfig;
use tandem_engine::models::rope::RowOrder;

/// Each tensor begins at a multiple of it: more than any load needs.
const ALIGN: usize = 256;

/// Bytes of the allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub at: usize,
    pub bytes: usize,
}

/// Spans of one allocation, one after another.
#[derive(Debug)]
pub(crate) struct Spans {
    /// `None`: more than there are addresses. Sizes are a file's header's, and no device has so much.
    end: Option<usize>,
}

impl Spans {
    pub fn new() -> Self {
        Self { end: Some(0) }
    }

    /// The next one: as many values of `size` bytes as the product of `values`.
    pub fn take(&mut self, values: &[usize], size: usize) -> Span {
        let bytes = values.iter().try_fold(size, |bytes, &value| bytes.checked_mul(value));
        let at = self.end.and_then(|end| end.checked_next_multiple_of(ALIGN));
        self.end = at.zip(bytes).and_then(|(at, bytes)| at.checked_add(bytes));
        Span { at: at.unwrap_or(usize::MAX), bytes: bytes.unwrap_or(usize::MAX) }
    }

    /// Of all.
    pub fn bytes(&self) -> usize {
        self.end.unwrap_or(usize::MAX)
    }
}

/// All weights of a model.
#[derive(Clone, Debug)]
pub(crate) struct WeightPlan {
    /// bf16 `[vocabulary][hidden]`.
    pub embedding: Span,
    /// The output matrix: the embedding once more where the model ties them.
    pub head: Span,
    /// f32 `[hidden]`.
    pub final_norm: Span,
    /// f32 `[positions][head_dim / 2][2]`: cosine and sine.
    pub rotations: Span,
    pub layers: Vec<LayerPlan>,
    /// Of the whole allocation.
    pub bytes: usize,
}

/// The weights of a layer; matrices are bf16, all else is f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerPlan {
    pub attention_norm: Span,
    /// Q, K and V, one after another.
    pub qkv: Span,
    pub qkv_bias: Option<Span>,
    /// Of each head of Q and of K.
    pub head_norm: Option<Span>,
    pub attention_out: Span,
    pub feed_forward_norm: Span,
    /// Rows of the gate and of the other matrix in turn.
    pub gate_up: Span,
    pub down: Span,
}

/// A part of a fused matrix.
pub(crate) struct Part {
    /// GGUF's name of the tensor.
    pub name: String,
    pub rows: usize,
    pub order: RowOrder,
}

impl WeightPlan {
    /// Of a model of these sizes; sequences have up to `positions` positions.
    pub fn new(config: &LlamaConfig, positions: usize) -> Self {
        let mut spans = Spans::new();
        let mut span = |values: &[usize], size: usize| spans.take(values, size);
        let LlamaConfig { hidden, feed_forward, head_dim, vocab_size, .. } = *config;
        let embedding = span(&[vocab_size, hidden], 2);
        let head = if config.tied { embedding } else { span(&[vocab_size, hidden], 2) };
        let (final_norm, rotations) = (span(&[hidden], 4), span(&[positions, head_dim], 4));
        let layers = (0..config.layers)
            .map(|_| LayerPlan {
                attention_norm: span(&[hidden], 4),
                qkv: span(&[config.qkv_width(), hidden], 2),
                qkv_bias: config.qkv_bias.then(|| span(&[config.qkv_width()], 4)),
                head_norm: config.qk_norm.then(|| span(&[config.heads + config.kv_heads, head_dim], 4)),
                attention_out: span(&[hidden, config.attended_width()], 2),
                feed_forward_norm: span(&[hidden], 4),
                gate_up: span(&[2, feed_forward, hidden], 2),
                down: span(&[hidden, feed_forward], 2),
            })
            .collect();
        Self { embedding, head, final_norm, rotations, layers, bytes: spans.bytes() }
    }
}

/// The tensors of a layer's Q, K and V, in their order; `kind` is `weight` or `bias`.
pub(crate) fn qkv_parts(config: &LlamaConfig, layer: usize, kind: &str) -> [Part; 3] {
    let turned = config.rope.row_order(config.head_dim);
    let (q_width, kv_width) = (config.attended_width(), config.kv_heads * config.head_dim);
    let part = |name: &str, rows, order| Part { name: format!("blk.{layer}.{name}.{kind}"), rows, order };
    [part("attn_q", q_width, turned), part("attn_k", kv_width, turned), part("attn_v", kv_width, RowOrder::AsStored)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_do_not_overlap_and_too_many_bytes_are_the_most() {
        let mut spans = Spans::new();
        let all = [spans.take(&[3, 5], 4), spans.take(&[0], 2), spans.take(&[1000], 2)];
        assert_eq!(all.map(|span| (span.at, span.bytes)), [(0, 60), (256, 0), (256, 2000)]);
        assert_eq!(spans.bytes(), 2256);
        assert_eq!(spans.take(&[usize::MAX, 2], 2).bytes, usize::MAX);
        assert_eq!((spans.take(&[1], 1).at, spans.bytes()), (usize::MAX, usize::MAX));
    }
}
