//! The Llama architecture on a device: weights, and the launches of a step. As `models/llama.rs` of the engine on the
//! CPU; what families add is there or not in a layer's weights.
use std::sync::Arc;

use tandem_engine::models::config::LlamaConfig;

use crate::buffer::Buffer;
use crate::cublaslt::Lt;
use crate::error::CudaError;
use crate::inputs::Frame;
use crate::kernels::attention::{self, Attention, Height, Split};
use crate::kernels::choose::{self, Choice, Choose, Outcome};
use crate::kernels::launch::{Launch, Mem, Refused, part};
use crate::kernels::product::{self, Output, Product};
use crate::kernels::qkv::{Arena, QkvToCache, qkv_to_cache};
use crate::kernels::rows::{CheckRows, Embed, Last, RmsNorm, check_rows, embed, rms_norm};
use crate::large::{FEW_ROWS, Large};
use crate::loaded::Kernels;
use crate::memory::CudaMemory;
use crate::plan::{LayerPlan, Span, WeightPlan};
use crate::stream::Stream;
use crate::workspace::{MOST_LOGITS, StepLimits, WorkspacePlan, split_of};

/// A model on a device, its arena, and the memory of a step.
pub(crate) struct Network {
    pub config: LlamaConfig,
    pub limits: StepLimits,
    pub kernels: Arc<Kernels>,
    /// For products of many rows, where it is on the machine.
    pub library: Option<Lt>,
    pub weights: Buffer,
    pub plan: WeightPlan,
    pub memory: Arc<CudaMemory>,
    /// Tokens of a block.
    pub block_tokens: usize,
    pub workspace: Buffer,
    pub work: WorkspacePlan,
}

/// Of the rows that want logits, some at a time, and their choices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    /// First of the rows of logits.
    pub first_logits: usize,
    pub logits: usize,
    pub first_choice: usize,
    pub choices: usize,
}

impl Network {
    /// Queues all layers of the step whose inputs are on the device. `written(n)` is called where the K and V of the
    /// first `n` layers are written.
    pub fn layers(
        &self,
        stream: &Stream,
        frame: &Frame,
        written: &mut dyn FnMut(usize) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let LlamaConfig { hidden, vocab_size, .. } = self.config;
        let work = &self.work;
        let last = Last { from: self.input(frame.at.from), chosen: self.at(work.outcomes), choices: self.limits.rows };
        self.queue(
            stream,
            embed(&Embed {
                hidden: self.at(work.hidden),
                table: self.weight(self.plan.embedding),
                tokens: self.input(frame.at.tokens),
                last: Some(last),
                rows: frame.rows,
                width: hidden,
                vocabulary: vocab_size,
            }),
        )?;
        for (index, layer) in self.plan.layers.iter().enumerate() {
            self.attend(stream, frame, index, layer, written)?;
            self.feed_forward(stream, frame, layer)?;
        }
        let (unsound, stream_of) = (self.at(work.unsound), self.at(work.hidden));
        self.queue(stream, check_rows(&CheckRows { unsound, hidden: stream_of, rows: frame.rows, width: hidden }))
    }

    /// Queues the logits of some rows, and their choices.
    pub fn choose(&self, stream: &Stream, frame: &Frame, turn: &Turn) -> Result<(), CudaError> {
        let LlamaConfig { hidden, vocab_size, norm_eps, .. } = self.config;
        let work = &self.work;
        let rows = turn.logits;
        let logits_of = self.input(frame.at.logits_of);
        self.queue(
            stream,
            rms_norm(&RmsNorm {
                out: self.at(work.last),
                hidden: self.at(work.hidden),
                weight: self.weight(self.plan.final_norm),
                of: frame.gathered.map(|_| part(logits_of, 4 * turn.first_logits, 4 * rows)),
                rows,
                hidden_rows: frame.rows,
                width: hidden,
                eps: norm_eps,
            }),
        )?;
        let logits = Output::Store(self.at(work.logits));
        self.multiply(stream, rows, work.last, self.plan.head, hidden, logits)?;
        let (choice, outcome) = (size_of::<Choice>(), size_of::<Outcome>());
        let (first, count) = (turn.first_choice, turn.choices);
        self.queue(
            stream,
            choose::choose(&Choose {
                outcomes: part(self.at(work.outcomes), first * outcome, count * outcome),
                choices: part(self.input(frame.at.choices), first * choice, count * choice),
                count,
                logits: self.at(work.logits),
                logits_rows: self.limits.rows.min(MOST_LOGITS),
                vocabulary: vocab_size,
                unsound: self.at(work.unsound),
                rows: frame.rows,
            }),
        )
    }

    fn attend(
        &self,
        stream: &Stream,
        frame: &Frame,
        index: usize,
        layer: &LayerPlan,
        written: &mut dyn FnMut(usize) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let (config, work, rows) = (&self.config, &self.work, frame.rows);
        self.norm(stream, rows, layer.attention_norm)?;
        self.multiply(stream, rows, work.normed, layer.qkv, config.hidden, Output::Store(self.at(work.qkv)))?;
        self.queue(
            stream,
            qkv_to_cache(&QkvToCache {
                qkv: self.at(work.qkv),
                queries: self.at(work.queries),
                arena: self.arena(),
                layer: index,
                bias: layer.qkv_bias.map(|span| self.weight(span)),
                head_norm: layer.head_norm.map(|span| self.weight(span)),
                eps: config.norm_eps,
                rotations: self.weight(self.plan.rotations),
                most_positions: self.limits.positions,
                positions: self.input(frame.at.positions),
                places: self.input(frame.at.places),
                rows,
                heads: config.heads,
            }),
        )?;
        written(index + 1)?;
        let prompts = self.attention(frame, index, frame.at.prompt_tiles, frame.prompt_tiles, Height::Rows128);
        self.queue(stream, attention::attention(&prompts))?;
        let decoding = self.attention(frame, index, frame.at.decode_tiles, frame.decode_tiles, Height::Rows16);
        self.queue(stream, attention::attention(&decoding))?;
        if decoding.split.is_some() {
            self.queue(stream, attention::merge(&decoding))?;
        }
        let out = Output::Add(self.at(work.hidden));
        self.multiply(stream, rows, work.attended, layer.attention_out, config.attended_width(), out)
    }

    fn feed_forward(&self, stream: &Stream, frame: &Frame, layer: &LayerPlan) -> Result<(), CudaError> {
        let (config, work, rows) = (&self.config, &self.work, frame.rows);
        self.norm(stream, rows, layer.feed_forward_norm)?;
        let activated = Output::SwiGlu(self.at(work.activated));
        self.multiply(stream, rows, work.normed, layer.gate_up, config.hidden, activated)?;
        let out = Output::Add(self.at(work.hidden));
        self.multiply(stream, rows, work.activated, layer.down, config.feed_forward, out)
    }

    /// The residual stream, normed.
    fn norm(&self, stream: &Stream, rows: usize, weight: Span) -> Result<(), CudaError> {
        let norm = RmsNorm {
            out: self.at(self.work.normed),
            hidden: self.at(self.work.hidden),
            weight: self.weight(weight),
            of: None,
            rows,
            hidden_rows: rows,
            width: self.config.hidden,
            eps: self.config.norm_eps,
        };
        self.queue(stream, rms_norm(&norm))
    }

    /// The product of `x`, rows of `k` values in the workspace, and a matrix.
    fn multiply(
        &self,
        stream: &Stream,
        rows: usize,
        x: Span,
        weight: Span,
        k: usize,
        output: Output,
    ) -> Result<(), CudaError> {
        let n = weight.bytes / (2 * k.max(1));
        let one = Product { output, x: self.at(x), weight: self.weight(weight), rows, n, k };
        let (scratch, multiprocessors) = (self.at(self.work.segments), self.limits.multiprocessors);
        if let Some(lt) = self.library.as_ref().filter(|_| rows > FEW_ROWS) {
            let large = Large { lt, stream, product: one, scratch };
            // SAFETY: as in `queue` below; the library's workspace is used by this stream alone.
            if unsafe { large.queue(|launch| self.queue(stream, launch)) }? {
                return Ok(());
            }
        }
        if !product::Split::pays(rows, n, k, multiprocessors) {
            return self.queue(stream, product::product(&one, multiprocessors));
        }
        match product::product_split(&one, scratch, multiprocessors) {
            Ok(launches) => launches.into_iter().try_for_each(|launch| self.queue(stream, Ok(launch))),
            Err(refused) => self.queue(stream, Err(refused)),
        }
    }

    fn attention(&self, frame: &Frame, layer: usize, tiles: Span, tile_count: usize, height: Height) -> Attention {
        let StepLimits { tables, table_blocks, .. } = self.limits;
        let decoding = height == Height::Rows16 && tile_count <= MOST_LOGITS;
        let split = decoding.then(|| split_of(&self.config, &self.limits, tile_count)).flatten();
        let partials = self.at(self.work.partials);
        Attention {
            queries: self.at(self.work.queries),
            out: self.at(self.work.attended),
            rows: frame.rows,
            arena: self.arena(),
            layer,
            tables: self.at(self.work.tables),
            table_rows: tables,
            table_blocks,
            tiles: self.input(tiles),
            tile_count,
            height,
            heads: self.config.heads,
            window: self.config.windows[layer],
            split: split.map(|(partitions, ways)| Split { partials, partitions, ways, tokens: 1 }),
        }
    }

    fn arena(&self) -> Arena {
        let LlamaConfig { layers, kv_heads, head_dim, .. } = self.config;
        let block_tokens = self.block_tokens;
        Arena { memory: self.memory.arena().mem(), layers, block_tokens, kv_heads, head_dim }
    }

    fn at(&self, span: Span) -> Mem {
        self.workspace.part(span.at, span.bytes)
    }

    fn weight(&self, span: Span) -> Mem {
        self.weights.part(span.at, span.bytes)
    }

    /// An array of the step's inputs.
    fn input(&self, span: Span) -> Mem {
        self.workspace.part(self.work.inputs.at + span.at, span.bytes)
    }

    fn queue(&self, stream: &Stream, launch: Result<Launch, Refused>) -> Result<(), CudaError> {
        // SAFETY: all memory is `self`'s, whose owner waits for the stream before it lets go of it; launches and copies
        // of one stream run in their order, those of a step behind all of the step before, and each writes a part of
        // the workspace, or places of the arena that the step's layout has checked. Indices in the inputs were checked
        // against the same limits that the launch was made with.
        unsafe { self.kernels.launch(stream, launch) }
    }
}
