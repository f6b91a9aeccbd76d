//! The Llama architecture (arXiv:2302.13971, arXiv:2307.09288): RMS norm, rotary grouped-query attention, SwiGLU. Owns
//! weights and a step's intermediate matrices; K and V live in the arena that the caller hands in. What other families
//! add (biases, norms of heads, windows) is there or not in a layer's data; the forward pass asks for no family.
use super::config::LlamaConfig;
use super::packing::{Packing, Part};
use super::rope::RowOrder;
use super::weights::Weights;
use crate::error::EngineError;
use crate::executor::LayersDone;
use crate::ops::attention::{Attention, Queries, Sequences};
use crate::ops::kv::KvArena;
use crate::ops::lookup::RowTable;
use crate::ops::matmul::{Output, matmul};
use crate::ops::packed::PackedMatrix;
use crate::ops::rows::{Rotations, add_to_rows, norm_heads, rms_norm, swiglu};
use crate::ops::simd::Isa;
use crate::step::{Chunk, Step};

/// A model in memory.
pub struct Llama {
    config: LlamaConfig,
    /// Of the rotary embedding's pairs.
    frequencies: Vec<f64>,
    isa: Isa,
    embedding: Embedding,
    layers: Vec<Layer>,
    final_norm: Vec<f32>,
    buffers: Buffers,
}

/// What becomes of tokens, and what logits come from.
enum Embedding {
    /// One matrix for both. It is packed for the product, which reads all of it in every step; looking a row up there
    /// costs microseconds, and a second copy would cost as much memory again.
    Tied(PackedMatrix),
    /// Two: rows as the file has them, and an output matrix.
    Apart { rows: RowTable, head: PackedMatrix },
}

struct Layer {
    attention_norm: Vec<f32>,
    /// Q, K and V: one matrix where their formats are equal.
    qkv: Fused,
    /// Added to Q, K and V.
    qkv_bias: Option<Vec<f32>>,
    /// Weights of the norm of each head of Q and K, one head after another.
    head_norm: Option<Vec<f32>>,
    /// Keys that a row sees, itself included.
    window: Option<usize>,
    attention_out: PackedMatrix,
    feed_forward_norm: Vec<f32>,
    gate_up: Fused,
    down: PackedMatrix,
}

/// The step's intermediate matrices, kept to save their allocation.
struct Buffers {
    hidden: Vec<f32>,
    normed: Vec<f32>,
    qkv: Vec<f32>,
    attended: Vec<f32>,
    gate_up: Vec<f32>,
    activated: Vec<f32>,
    part: Vec<f32>,
    rotations: Rotations,
    attention: Attention,
}

impl Llama {
    /// Reads all weights and packs them for the kernels of `isa`, on all threads of the current pool.
    ///
    /// # Errors
    /// `Model` when a tensor is missing, has another shape, an unsupported type, or does not lie within the file.
    pub fn load(weights: &dyn Weights, config: LlamaConfig, isa: Isa) -> Result<Self, EngineError> {
        let packing = Packing { weights, isa };
        let (vocabulary, hidden) = (config.vocab_size, config.hidden);
        let embedding = match config.tied {
            true => Embedding::Tied(packing.matrix("token_embd.weight", vocabulary, hidden)?),
            false => Embedding::Apart {
                rows: packing.table("token_embd.weight", vocabulary, hidden)?,
                head: packing.matrix("output.weight", vocabulary, hidden)?,
            },
        };
        let final_norm = packing.vector("output_norm.weight", hidden)?;
        let layers = (0..config.layers).map(|layer| Layer::load(&packing, &config, layer)).collect::<Result<_, _>>()?;
        weights.finish()?;
        let frequencies = config.rope.frequencies(config.head_dim);
        Ok(Self { config, frequencies, isa, embedding, layers, final_norm, buffers: Buffers::new(isa) })
    }

    /// The sizes.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Computes the step: writes its K and V, and the logits of the wanted rows into `logits`, one after another. Tells
    /// `layers_done` after each layer whose K and V are written.
    ///
    /// # Panics
    /// If tokens, positions, places, chunks or `logits` are out of range or do not fit together.
    pub fn forward(&mut self, kv: &KvArena, step: &Step, logits: &mut [f32], layers_done: &mut LayersDone<'_>) {
        let Self { config, frequencies, isa, embedding, layers, final_norm, buffers } = self;
        let (isa, rows, hidden) = (*isa, step.tokens.len(), config.hidden);
        buffers.resize(config, rows);
        buffers.rotations.turn_to(&step.positions, frequencies);
        embedding.look_up(&step.tokens, &mut buffers.hidden);
        for (index, layer) in layers.iter().enumerate() {
            layer.attend(isa, config, index, kv, step, buffers);
            // Every kernel has joined its threads by now, so that what they wrote happens before whatever follows here.
            layers_done(index + 1);
            layer.feed_forward(isa, config, buffers);
        }
        // What the layers needed is free now.
        let (last, normed) = (&mut buffers.attended, &mut buffers.normed);
        last.clear();
        last.extend(step.logits_of.iter().flat_map(|&row| &buffers.hidden[row * hidden..][..hidden]));
        normed.resize(last.len(), 0.0);
        rms_norm(isa, last, final_norm, config.norm_eps, normed);
        matmul(isa, normed, embedding.head(), logits, Output::Store);
    }

    /// Whether the last step came to numbers in all rows of `chunk`. Each row has read its own K and V and those of
    /// earlier ones, and what is no number stays none from layer to layer: so all KV that the chunk wrote are numbers.
    pub fn is_sound(&self, chunk: &Chunk) -> bool {
        let width = self.config.hidden;
        let rows = self.buffers.hidden.chunks_exact(width).skip(chunk.first_row).take(chunk.rows);
        rows.flatten().all(|value| value.is_finite())
    }
}

impl Embedding {
    fn look_up(&self, tokens: &[u32], out: &mut [f32]) {
        match self {
            Self::Tied(matrix) => matrix.look_up(tokens, out),
            Self::Apart { rows, .. } => rows.look_up(tokens, out),
        }
    }

    fn head(&self) -> &PackedMatrix {
        match self {
            Self::Tied(matrix) => matrix,
            Self::Apart { head, .. } => head,
        }
    }
}

impl Layer {
    fn load(packing: &Packing<'_>, config: &LlamaConfig, layer: usize) -> Result<Self, EngineError> {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        let fused = |parts: &[(&str, usize, RowOrder)], k: usize| {
            let parts: Vec<Part> =
                parts.iter().map(|&(part, rows, order)| Part { name: name(part), rows, order }).collect();
            packing.matrices(&parts, k).map(Fused)
        };
        let LlamaConfig { hidden, feed_forward, head_dim, .. } = *config;
        let (q_width, kv_width) = (config.attended_width(), config.kv_heads * head_dim);
        let (turned, as_stored) = (config.rope.row_order(head_dim), RowOrder::AsStored);
        let qkv = [("attn_q", q_width, turned), ("attn_k", kv_width, turned), ("attn_v", kv_width, as_stored)];
        let gate_up = [("ffn_gate", feed_forward, as_stored), ("ffn_up", feed_forward, as_stored)];
        Ok(Self {
            attention_norm: packing.vector(&name("attn_norm"), hidden)?,
            qkv: fused(&qkv, hidden)?,
            qkv_bias: config.qkv_bias.then(|| Self::qkv_bias(packing, config, layer)).transpose()?,
            head_norm: config.qk_norm.then(|| Self::head_norm(packing, config, layer)).transpose()?,
            window: config.windows[layer],
            attention_out: packing.matrix(&name("attn_output"), hidden, q_width)?,
            feed_forward_norm: packing.vector(&name("ffn_norm"), hidden)?,
            gate_up: fused(&gate_up, hidden)?,
            down: packing.matrix(&name("ffn_down"), hidden, feed_forward)?,
        })
    }

    fn qkv_bias(packing: &Packing<'_>, config: &LlamaConfig, layer: usize) -> Result<Vec<f32>, EngineError> {
        let turned = config.rope.row_order(config.head_dim);
        let kv_width = config.kv_heads * config.head_dim;
        let parts = [
            ("attn_q", config.attended_width(), turned),
            ("attn_k", kv_width, turned),
            ("attn_v", kv_width, RowOrder::AsStored),
        ];
        let mut all = Vec::with_capacity(config.qkv_width());
        for (part, width, order) in parts {
            let bias = packing.vector(&format!("blk.{layer}.{part}.bias"), width)?;
            all.extend(order.apply(&bias));
        }
        Ok(all)
    }

    fn head_norm(packing: &Packing<'_>, config: &LlamaConfig, layer: usize) -> Result<Vec<f32>, EngineError> {
        let turned = config.rope.row_order(config.head_dim);
        let mut all = Vec::new();
        for (part, heads) in [("attn_q_norm", config.heads), ("attn_k_norm", config.kv_heads)] {
            let norm = packing.vector(&format!("blk.{layer}.{part}.weight"), config.head_dim)?;
            all.extend(turned.apply(&norm).repeat(heads));
        }
        Ok(all)
    }

    #[allow(clippy::too_many_arguments, reason = "the step's context, in one place only")]
    fn attend(&self, isa: Isa, config: &LlamaConfig, index: usize, kv: &KvArena, step: &Step, buffers: &mut Buffers) {
        let Buffers { hidden, normed, qkv, attended, part, rotations, attention, .. } = buffers;
        let stride = config.qkv_width();
        rms_norm(isa, hidden, &self.attention_norm, config.norm_eps, normed);
        self.qkv.multiply(isa, normed, qkv, part);
        if let Some(bias) = &self.qkv_bias {
            add_to_rows(qkv, bias);
        }
        if let Some(weights) = &self.head_norm {
            norm_heads(isa, qkv, stride, config.head_dim, weights, config.norm_eps);
        }
        rotations.apply(qkv, stride, config.heads + config.kv_heads);
        kv.write(index, qkv, stride, &step.places);
        let queries = Queries { values: qkv, stride, heads: config.heads, window: self.window };
        let sequences = Sequences { blocks: &step.blocks, chunks: &step.chunks };
        attention.compute(kv, index, sequences, queries, attended);
        matmul(isa, attended, &self.attention_out, hidden, Output::Add);
    }

    fn feed_forward(&self, isa: Isa, config: &LlamaConfig, buffers: &mut Buffers) {
        let Buffers { hidden, normed, gate_up, activated, part, .. } = buffers;
        rms_norm(isa, hidden, &self.feed_forward_norm, config.norm_eps, normed);
        self.gate_up.multiply(isa, normed, gate_up, part);
        swiglu(isa, gate_up, config.feed_forward, activated);
        matmul(isa, activated, &self.down, hidden, Output::Add);
    }
}

impl Buffers {
    fn new(isa: Isa) -> Self {
        let [hidden, normed, qkv, attended, gate_up, activated, part] = Default::default();
        let (rotations, attention) = (Rotations::default(), Attention::new(isa));
        Self { hidden, normed, qkv, attended, gate_up, activated, part, rotations, attention }
    }

    fn resize(&mut self, config: &LlamaConfig, rows: usize) {
        let LlamaConfig { hidden, feed_forward, .. } = *config;
        self.hidden.resize(rows * hidden, 0.0);
        self.normed.resize(rows * hidden, 0.0);
        self.qkv.resize(rows * config.qkv_width(), 0.0);
        self.attended.resize(rows * config.attended_width(), 0.0);
        self.gate_up.resize(rows * 2 * feed_forward, 0.0);
        self.activated.resize(rows * feed_forward, 0.0);
    }
}

/// Matrices of one input whose outputs stand side by side: packed as one where their formats allow it.
struct Fused(Vec<PackedMatrix>);

impl Fused {
    /// `out`: rows × the sum of the columns; `part` is scratch.
    fn multiply(&self, isa: Isa, x: &[f32], out: &mut [f32], part: &mut Vec<f32>) {
        if let [one] = &self.0[..] {
            return matmul(isa, x, one, out, Output::Store);
        }
        let width: usize = self.0.iter().map(PackedMatrix::columns).sum();
        let rows = out.len() / width;
        let mut first = 0;
        for matrix in &self.0 {
            let columns = matrix.columns();
            part.resize(rows * columns, 0.0);
            matmul(isa, x, matrix, part, Output::Store);
            for (to, from) in out.chunks_exact_mut(width).zip(part.chunks_exact(columns)) {
                to[first..first + columns].copy_from_slice(from);
            }
            first += columns;
        }
    }
}
