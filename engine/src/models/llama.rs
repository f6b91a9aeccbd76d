//! The Llama architecture (arXiv:2302.13971, arXiv:2307.09288): RMS norm, rotary grouped-query attention, SwiGLU. Owns
//! weights and a step's intermediate matrices; K and V live in the arena that the caller hands in.
use super::gguf::GgufFile;
use crate::error::EngineError;
use crate::ops::attention::{Chunk, Queries, attention};
use crate::ops::kv::{KvArena, Place};
use crate::ops::matmul::{Output, PackedMatrix, matmul};
use crate::ops::rows::{Rotations, rms_norm, swiglu};
use crate::ops::simd::Isa;

/// Sizes and constants of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// `general.name`, or the file's name.
    pub name: String,
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// K and V heads; divide the query heads.
    pub kv_heads: usize,
    /// Values of a head.
    pub head_dim: usize,
    /// Width of the feed-forward part.
    pub feed_forward: usize,
    /// Token ids.
    pub vocab_size: usize,
    /// Base of the rotary frequencies.
    pub rope_base: f32,
    /// Added to the mean square in norms.
    pub norm_eps: f32,
    /// Longest sequence that the model was made for.
    pub max_context_tokens: usize,
    /// Ends a sequence.
    pub eos_token_id: u32,
}

impl LlamaConfig {
    /// From the metadata.
    ///
    /// # Errors
    /// `Model` for another architecture, for missing or contradictory numbers, and for what the kernels do not do.
    pub fn read(file: &GgufFile) -> Result<Self, EngineError> {
        let architecture = file.text("general.architecture").unwrap_or("(none)");
        if architecture != "llama" {
            return Err(file.error(format_args!("the architecture is {architecture}; only llama can be served")));
        }
        let (hidden, heads) = (file.number("llama.embedding_length")?, file.number("llama.attention.head_count")?);
        let head_dim = file.optional_number("llama.attention.key_length").unwrap_or(hidden / heads.max(1));
        let config = Self {
            name: file.text("general.name").map_or_else(|| file.stem(), Into::into),
            layers: file.number("llama.block_count")?,
            hidden,
            heads,
            kv_heads: file.optional_number("llama.attention.head_count_kv").unwrap_or(heads),
            head_dim,
            feed_forward: file.number("llama.feed_forward_length")?,
            vocab_size: file.rows("token_embd.weight")?,
            rope_base: file.optional_float("llama.rope.freq_base").unwrap_or(10_000.0),
            norm_eps: file
                .optional_float("llama.attention.layer_norm_rms_epsilon")
                .ok_or_else(|| file.error("no llama.attention.layer_norm_rms_epsilon in the metadata"))?,
            max_context_tokens: file.number("llama.context_length")?,
            eos_token_id: file.number("tokenizer.ggml.eos_token_id")? as u32,
        };
        let rotated = file.optional_number("llama.rope.dimension_count").unwrap_or(head_dim);
        let scaling = file.text("llama.rope.scaling.type").unwrap_or("none");
        config.problem(rotated, scaling).map_or(Ok(()), |problem| Err(file.error(problem)))?;
        Ok(config)
    }

    fn problem(&self, rotated: usize, scaling: &str) -> Option<String> {
        let zero = [self.layers, self.hidden, self.heads, self.kv_heads, self.head_dim, self.max_context_tokens];
        let contradiction = zero.contains(&0)
            || self.heads * self.head_dim != self.hidden
            || !self.heads.is_multiple_of(self.kv_heads)
            || self.eos_token_id as usize >= self.vocab_size;
        if contradiction || !self.rope_base.is_finite() || self.rope_base <= 0.0 || !self.norm_eps.is_finite() {
            return Some(format!("the sizes in the metadata contradict each other: {self:?}"));
        }
        if !self.head_dim.is_multiple_of(16) || self.feed_forward == 0 || !self.feed_forward.is_multiple_of(16) {
            let (head, feed_forward) = (self.head_dim, self.feed_forward);
            return Some(format!("heads of {head} and a feed-forward of {feed_forward} are no multiples of 16"));
        }
        if rotated != self.head_dim || scaling != "none" {
            return Some(format!("rotating {rotated} values of a head with scaling {scaling} is not supported"));
        }
        None
    }
}

/// A step's tokens, all sequences stacked.
pub struct Step<'a> {
    /// One a row.
    pub tokens: &'a [u32],
    /// Of each row in its sequence.
    pub positions: &'a [usize],
    /// Where each row's K and V go.
    pub places: &'a [Place],
    /// Which rows are of one sequence.
    pub chunks: &'a [Chunk<'a>],
    /// Rows whose logits are wanted.
    pub logits_of: &'a [usize],
}

/// A model in memory.
pub struct Llama {
    config: LlamaConfig,
    isa: Isa,
    embedding: PackedMatrix,
    layers: Vec<Layer>,
    final_norm: Vec<f32>,
    /// `None`: the embedding is the output matrix, too.
    head: Option<PackedMatrix>,
    buffers: Buffers,
}

struct Layer {
    attention_norm: Vec<f32>,
    /// Q, K and V: one matrix where their formats are equal.
    qkv: Fused,
    attention_out: PackedMatrix,
    feed_forward_norm: Vec<f32>,
    gate_up: Fused,
    down: PackedMatrix,
}

/// The step's intermediate matrices, kept to save their allocation.
#[derive(Default)]
struct Buffers {
    hidden: Vec<f32>,
    normed: Vec<f32>,
    qkv: Vec<f32>,
    attended: Vec<f32>,
    gate_up: Vec<f32>,
    activated: Vec<f32>,
    part: Vec<f32>,
}

impl Llama {
    /// Reads all weights.
    ///
    /// # Errors
    /// `Model` when a tensor is missing, has another shape, an unsupported type, or does not lie within the file.
    pub fn load(file: &GgufFile, config: LlamaConfig) -> Result<Self, EngineError> {
        let embedding = file.matrix("token_embd.weight", config.vocab_size, config.hidden)?;
        let head = match file.has_tensor("output.weight") {
            true => Some(file.matrix("output.weight", config.vocab_size, config.hidden)?),
            false => None,
        };
        let final_norm = file.vector("output_norm.weight", config.hidden)?;
        let layers = (0..config.layers).map(|layer| Layer::load(file, &config, layer)).collect::<Result<_, _>>()?;
        file.check_all_used()?;
        Ok(Self { config, isa: Isa::detect(), embedding, layers, final_norm, head, buffers: Buffers::default() })
    }

    /// The same model computed by `isa`'s kernels; where those round to bf16 anyway, f32 weights are kept in it.
    pub fn with_isa(mut self, isa: Isa) -> Self {
        self.isa = isa;
        if isa.rounds() {
            self.embedding = self.embedding.rounded();
            self.head = self.head.map(PackedMatrix::rounded);
            self.layers = self.layers.into_iter().map(Layer::rounded).collect();
        }
        self
    }

    /// The sizes.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Computes the step: writes its K and V and returns the logits of the wanted rows, one after another.
    ///
    /// # Panics
    /// If tokens, positions, places or chunks are out of range or do not fit together.
    pub fn forward(&mut self, kv: &KvArena, step: &Step<'_>) -> Vec<f32> {
        let Self { config, isa, embedding, layers, final_norm, head, buffers } = self;
        let (isa, rows, hidden) = (*isa, step.tokens.len(), config.hidden);
        let rotations = Rotations::new(step.positions, config.head_dim, config.rope_base);
        buffers.resize(config, rows);
        for (row, &token) in buffers.hidden.chunks_exact_mut(hidden).zip(step.tokens) {
            embedding.column(token as usize, row);
        }
        for (index, layer) in layers.iter().enumerate() {
            layer.attend(isa, config, index, kv, step, &rotations, buffers);
            layer.feed_forward(isa, config, buffers);
        }
        let last: Vec<f32> =
            step.logits_of.iter().flat_map(|&row| &buffers.hidden[row * hidden..][..hidden]).copied().collect();
        let mut normed = vec![0.0; last.len()];
        rms_norm(isa, &last, final_norm, config.norm_eps, &mut normed);
        let mut logits = vec![0.0; step.logits_of.len() * config.vocab_size];
        matmul(isa, &normed, head.as_ref().unwrap_or(embedding), &mut logits, Output::Store);
        logits
    }
}

impl Layer {
    fn load(file: &GgufFile, config: &LlamaConfig, layer: usize) -> Result<Self, EngineError> {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        let LlamaConfig { hidden, feed_forward, .. } = *config;
        let kv_width = config.kv_heads * config.head_dim;
        Ok(Self {
            attention_norm: file.vector(&name("attn_norm"), hidden)?,
            qkv: Fused::new(vec![
                file.matrix(&name("attn_q"), hidden, hidden)?,
                file.matrix(&name("attn_k"), kv_width, hidden)?,
                file.matrix(&name("attn_v"), kv_width, hidden)?,
            ]),
            attention_out: file.matrix(&name("attn_output"), hidden, hidden)?,
            feed_forward_norm: file.vector(&name("ffn_norm"), hidden)?,
            gate_up: Fused::new(vec![
                file.matrix(&name("ffn_gate"), feed_forward, hidden)?,
                file.matrix(&name("ffn_up"), feed_forward, hidden)?,
            ]),
            down: file.matrix(&name("ffn_down"), hidden, feed_forward)?,
        })
    }

    fn rounded(self) -> Self {
        Self {
            qkv: self.qkv.rounded(),
            attention_out: self.attention_out.rounded(),
            gate_up: self.gate_up.rounded(),
            down: self.down.rounded(),
            ..self
        }
    }

    #[allow(clippy::too_many_arguments, reason = "the step's context, in one place only")]
    fn attend(
        &self,
        isa: Isa,
        config: &LlamaConfig,
        index: usize,
        kv: &KvArena,
        step: &Step<'_>,
        rotations: &Rotations,
        buffers: &mut Buffers,
    ) {
        let Buffers { hidden, normed, qkv, attended, part, .. } = buffers;
        let stride = (config.heads + 2 * config.kv_heads) * config.head_dim;
        rms_norm(isa, hidden, &self.attention_norm, config.norm_eps, normed);
        self.qkv.multiply(isa, normed, qkv, part);
        rotations.apply(qkv, stride, config.heads + config.kv_heads);
        kv.write(index, qkv, stride, step.places);
        let queries = Queries { values: qkv, stride, heads: config.heads };
        attention(isa, kv, index, step.chunks, queries, attended);
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
    fn resize(&mut self, config: &LlamaConfig, rows: usize) {
        let LlamaConfig { hidden, heads, kv_heads, head_dim, feed_forward, .. } = *config;
        self.hidden.resize(rows * hidden, 0.0);
        self.normed.resize(rows * hidden, 0.0);
        self.qkv.resize(rows * (heads + 2 * kv_heads) * head_dim, 0.0);
        self.attended.resize(rows * hidden, 0.0);
        self.gate_up.resize(rows * 2 * feed_forward, 0.0);
        self.activated.resize(rows * feed_forward, 0.0);
    }
}

/// Matrices of one input whose outputs stand side by side: packed as one where formats and widths allow it.
struct Fused(Vec<PackedMatrix>);

impl Fused {
    fn new(parts: Vec<PackedMatrix>) -> Self {
        match PackedMatrix::concatenated(&parts.iter().collect::<Vec<_>>()) {
            Some(one) => Self(vec![one]),
            None => Self(parts),
        }
    }

    fn rounded(self) -> Self {
        Self::new(self.0.into_iter().map(PackedMatrix::rounded).collect())
    }

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
