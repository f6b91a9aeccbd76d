//! [`Executor`] on a CUDA device. A step of decode rows alone is a captured graph: of the next larger of a few batch
//! sizes, whose spare rows write their K and V behind the arena's blocks. Every other step is single launches over all
//! of its rows, with an event after each layer that somebody waits for. Both are the same kernels, and a row's bits are
//! the same.
//!
//! Inputs go up in one copy. Tokens are chosen on the device and come down, a few bytes a row; where the rules are the
//! host's alone (penalties, bias, forbidden ends, log probabilities of others), the row's logits do, and the engine's
//! sampler chooses. What a sequence's last step chose on the device is taken from there by the next.
use std::collections::HashMap;
use std::sync::Arc;

use tandem_engine::chooser::{Chooser, Found};
use tandem_engine::logits::Logits;
use tandem_engine::step::Step;
use tandem_engine::{
    Batch, BatchItem, Choose, Chosen, EngineError, EngineSpec, Executor, LayersDone, Sampled, Seq, Tokens,
};
use tandem_memory::KvMemory;

use crate::context::Context;
use crate::error::CudaError;
use crate::graph::Graph;
use crate::inputs::{Frame, Inputs};
use crate::kernels::attention::{Height, Tile};
use crate::kernels::choose::{Choice, Outcome};
use crate::kernels::rows::Last;
use crate::network::{Network, Turn};
use crate::pinned::Pinned;
use crate::stream::{Event, Stream};
use crate::tables::Tables;
use crate::workspace::MOST_LOGITS;

/// Rows of decode steps that have a graph.
pub(crate) const BUCKETS: [usize; 13] = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256];
/// Spare rows of a bucket at most.
pub(crate) const MOST_SPARE: usize = 63;
/// Pinned memory for logits on their way to the host at a time.
const LOGITS_BYTES: usize = 32 << 20;

/// A model on a CUDA device. `loader.rs` makes it.
pub struct CudaExecutor {
    spec: EngineSpec,
    // Fields are dropped in this order: graphs and what is queued before the memory that they work on.
    graphs: Vec<(usize, Graph)>,
    stream: Stream,
    /// Of each layer: its K and V are written.
    written: Vec<Event>,
    network: Network,
    tables: Tables,
    inputs: Inputs,
    /// [`Inputs`] as they are uploaded.
    uploaded: Pinned,
    /// [`Outcome`] of each choice.
    outcomes: Pinned,
    host_logits: HostLogits,
    /// Of the step under way, or the last one.
    step: Step,
    chooser: Chooser,
    items: Vec<Item>,
    /// The device's row of each item's block table.
    table_rows: Vec<u32>,
    under_way: Option<UnderWay>,
    /// Work may be queued that nobody has waited for.
    busy: bool,
    /// Which outcome of the last step is a sequence's last token.
    last: HashMap<Seq, u32>,
    context: Arc<Context>,
}

/// What a step does for one of its sequences.
#[derive(Clone, Copy, Debug)]
struct Item {
    /// Of its choices, one and one more for each draft.
    first_choice: usize,
    /// The host chooses, from logits.
    on_host: bool,
}

/// How the step under way is computed.
#[derive(Clone, Copy, Debug)]
enum UnderWay {
    /// By a graph: its layers are done when all is.
    Graph,
    /// By single launches, with events.
    Launches,
}

/// Logits on their way to the host.
struct HostLogits {
    pinned: Pinned,
    /// Rows that fit.
    most: usize,
    /// Which rows of the chooser those are that are on their way.
    pending: Vec<usize>,
    /// Rows of the step so far.
    rows: usize,
}

impl CudaExecutor {
    /// Over a network whose weights are there; records the graphs.
    pub(crate) fn new(context: &Arc<Context>, spec: EngineSpec, network: Network) -> Result<Self, CudaError> {
        let limits = network.limits;
        let (layers, vocabulary) = (spec.layers, spec.vocab_size);
        let most = (LOGITS_BYTES / (4 * vocabulary)).clamp(1, limits.rows.min(MOST_LOGITS));
        let pinned = Pinned::new(context, most * vocabulary * 4)?;
        let mut executor = Self {
            spec,
            graphs: Vec::new(),
            stream: Stream::new(context)?,
            written: (0..layers).map(|_| Event::new(context)).collect::<Result<_, _>>()?,
            tables: Tables::new(context, limits.tables, limits.table_blocks)?,
            inputs: Inputs::default(),
            uploaded: Pinned::new(context, Frame::most_bytes(limits.rows))?,
            outcomes: Pinned::new(context, limits.rows * size_of::<Outcome>())?,
            host_logits: HostLogits { pinned, most, pending: Vec::new(), rows: 0 },
            network,
            step: Step::default(),
            chooser: Chooser::default(),
            items: Vec::new(),
            table_rows: Vec::new(),
            under_way: None,
            busy: false,
            last: HashMap::new(),
            context: Arc::clone(context),
        };
        for bucket in buckets(limits.rows) {
            let graph = executor.capture(bucket)?;
            executor.graphs.push((bucket, graph));
        }
        Ok(executor)
    }

    /// The logits of the last step's items whose tokens the host chose: those that asked for log probabilities of other
    /// tokens, among others.
    pub fn logits(&self) -> &Logits {
        self.chooser.logits()
    }

    /// Sequences for which something is kept.
    pub fn slots(&self) -> usize {
        self.chooser.slots()
    }

    fn capture(&self, bucket: usize) -> Result<Graph, CudaError> {
        let frame = Frame::bucket(bucket);
        let turn = Turn { first_logits: 0, logits: bucket, first_choice: 0, choices: bucket };
        Graph::capture(&self.stream, || {
            self.upload(&frame)?;
            self.network.layers(&self.stream, &frame, &mut |_| Ok(()))?;
            self.network.choose(&self.stream, &frame, &turn)?;
            self.download_outcomes(bucket)
        })
    }

    fn upload(&self, frame: &Frame) -> Result<(), CudaError> {
        let Network { workspace, work, .. } = &self.network;
        workspace.upload(work.inputs.at, &self.uploaded, 0, frame.bytes, &self.stream)
    }

    fn download_outcomes(&self, count: usize) -> Result<(), CudaError> {
        let Network { workspace, work, .. } = &self.network;
        workspace.download(work.outcomes.at, &self.outcomes, 0, count * size_of::<Outcome>(), &self.stream)
    }

    /// Waits for whatever a step that failed has left.
    fn settle(&mut self) -> Result<(), CudaError> {
        self.context.bind()?;
        if self.busy {
            self.stream.synchronize()?;
            self.busy = false;
        }
        Ok(())
    }

    /// Queues the step that is laid out.
    fn queue(&mut self, batch: &Batch, last: &HashMap<Seq, u32>) -> Result<UnderWay, CudaError> {
        self.busy = true;
        let Self { network, tables, stream, table_rows, .. } = self;
        tables.update(batch, &network.workspace, network.work.tables, stream, table_rows)?;
        self.list_items(batch);
        let width = self.spec.vocab_size;
        let Self { chooser, items, .. } = self;
        chooser.rows_of(width, |item| items[item].on_host);
        self.host_logits.begin();
        let rows = self.step.tokens.len();
        let decodes_only = batch.items.iter().all(decodes);
        let graph = self.graphs.iter().position(|(bucket, _)| decodes_only && *bucket >= rows);
        self.inputs.clear();
        self.list_rows(batch, last);
        match graph {
            Some(index) => self.run_graph(batch, index),
            None => self.run_launches(batch),
        }
    }

    fn list_items(&mut self, batch: &Batch) {
        self.items.clear();
        let mut first_choice = 0;
        for item in &batch.items {
            self.items.push(Item { first_choice, on_host: item.choose.as_ref().is_some_and(is_of_host) });
            first_choice += 1 + item.drafts().len();
        }
    }

    /// What both ways have of each row.
    fn list_rows(&mut self, batch: &Batch, last: &HashMap<Seq, u32>) {
        let Self { step, inputs, .. } = self;
        inputs.tokens.extend_from_slice(&step.tokens);
        inputs.positions.extend(step.positions.iter().map(|&position| position as u32));
        inputs.places.extend(step.places.iter().flat_map(|place| [place.block, place.slot as u32]));
        inputs.from.resize(step.tokens.len(), Last::NOT);
        for (item, chunk) in batch.items.iter().zip(&step.chunks) {
            if item.tokens == Tokens::Last {
                inputs.from[chunk.first_row] = last.get(&item.seq).copied().unwrap_or(Last::NOT);
            }
        }
    }

    fn run_graph(&mut self, batch: &Batch, index: usize) -> Result<UnderWay, CudaError> {
        let (bucket, rows) = (self.graphs[index].0, self.inputs.tokens.len());
        self.list_choices(batch, |row, _| row);
        let Self { inputs, step, table_rows, spec, network, .. } = self;
        for (chunk, &table) in step.chunks.iter().zip(&*table_rows) {
            decode_tiles(chunk.first_row, chunk.rows, table, chunk.start, &mut inputs.decode_tiles);
        }
        for spare in 0..bucket - rows {
            let block = spec.total_blocks + spare / network.block_tokens;
            inputs.places.extend([block as u32, (spare % network.block_tokens) as u32]);
        }
        inputs.tokens.resize(bucket, 0);
        inputs.from.resize(bucket, Last::NOT);
        inputs.positions.resize(bucket, 0);
        inputs.decode_tiles.resize(bucket, Tile::default());
        inputs.choices.resize(bucket, Choice::soundness(0, 0));
        // SAFETY: `settle` has waited for all copies, and none of this step is queued.
        unsafe { inputs.write(&Frame::bucket(bucket), &mut self.uploaded) };
        self.graphs[index].1.launch(&self.stream)?;
        for item in 0..batch.items.len() {
            let Item { on_host, .. } = self.items[item];
            let chunk = self.step.chunks[item];
            if on_host {
                (0..chunk.rows).try_for_each(|row| self.fetch_logits(chunk.first_row + row))?;
            }
        }
        Ok(UnderWay::Graph)
    }

    fn run_launches(&mut self, batch: &Batch) -> Result<UnderWay, CudaError> {
        self.list_choices(batch, |_, index| index % MOST_LOGITS);
        let Self { inputs, step, table_rows, network, .. } = self;
        let group = network.config.heads / network.config.kv_heads;
        for ((item, chunk), &table) in batch.items.iter().zip(&step.chunks).zip(&*table_rows) {
            if decodes(item) {
                decode_tiles(chunk.first_row, chunk.rows, table, chunk.start, &mut inputs.decode_tiles);
            } else {
                let (first, start) = (chunk.first_row as u32, chunk.start as u32);
                Height::Rows64.cut(group, first, chunk.rows, table, start, &mut inputs.prompt_tiles);
            }
        }
        inputs.logits_of.extend(step.logits_of.iter().map(|&row| row as u32));
        let frame = inputs.frame();
        // SAFETY: `settle` has waited for all copies, and none of this step is queued.
        unsafe { inputs.write(&frame, &mut self.uploaded) };
        self.upload(&frame)?;
        let Self { network, stream, written, step, .. } = &*self;
        network.layers(stream, &frame, &mut |layers| match step.reports(layers) {
            true => written[layers - 1].record(stream),
            false => Ok(()),
        })?;
        self.choose_in_turns(batch, &frame)?;
        self.download_outcomes(frame.choices)?;
        Ok(UnderWay::Launches)
    }

    /// Logits and choices, as many rows at a time as there is memory for.
    fn choose_in_turns(&mut self, batch: &Batch, frame: &Frame) -> Result<(), CudaError> {
        let mut turn = Turn { first_logits: 0, logits: 0, first_choice: 0, choices: 0 };
        // Rows of this turn whose logits the host wants.
        let mut wanted = Vec::new();
        for (index, item) in batch.items.iter().enumerate() {
            let choices = 1 + item.drafts().len();
            for _ in 0..choices {
                if turn.logits == MOST_LOGITS {
                    self.take_turn(frame, &turn, &mut wanted)?;
                    let (logits, choices) = (turn.first_logits + turn.logits, turn.first_choice + turn.choices);
                    turn = Turn { first_logits: logits, logits: 0, first_choice: choices, choices: 0 };
                }
                if self.items[index].on_host {
                    wanted.push(turn.logits);
                }
                turn.logits += usize::from(item.choose.is_some());
                turn.choices += 1;
            }
        }
        self.take_turn(frame, &turn, &mut wanted)
    }

    fn take_turn(&mut self, frame: &Frame, turn: &Turn, wanted: &mut Vec<usize>) -> Result<(), CudaError> {
        self.network.choose(&self.stream, frame, turn)?;
        wanted.drain(..).try_for_each(|row| self.fetch_logits(row))
    }

    /// The choices of all items; `logits_row(row, n)` is where the logits of a step's row are, which is the `n`th that
    /// chooses.
    fn list_choices(&mut self, batch: &Batch, logits_row: impl Fn(usize, usize) -> usize) {
        let Self { inputs, step, items, .. } = self;
        let mut choosing = 0;
        for ((item, chunk), Item { on_host, .. }) in batch.items.iter().zip(&step.chunks).zip(&*items) {
            let (first, drafts) = (chunk.first_row as u32, item.drafts());
            for after in 0..=drafts.len() {
                let sound = chunk.rows - (drafts.len() - after);
                let mut choice = Choice::soundness(first, sound as u32);
                if let Some(Choose { sampling, uniform, .. }) = &item.choose {
                    let uniform = after.checked_sub(1).map_or(*uniform, |draft| drafts[draft].uniform);
                    let row = logits_row(chunk.first_row + sound - 1, choosing);
                    choosing += 1;
                    if !on_host {
                        choice = Choice::new(sampling, uniform, row as u32, first, sound as u32).unwrap_or(choice);
                    }
                }
                inputs.choices.push(choice);
            }
        }
    }

    /// Queues a copy of a row of logits, which are the next of the chooser's.
    fn fetch_logits(&mut self, row: usize) -> Result<(), CudaError> {
        if self.host_logits.pending.len() == self.host_logits.most {
            self.stream.synchronize()?;
            self.host_logits.arrived(&mut self.chooser);
        }
        let Network { workspace, work, .. } = &self.network;
        let bytes = 4 * self.spec.vocab_size;
        let HostLogits { pinned, pending, rows, .. } = &mut self.host_logits;
        workspace.download(work.logits.at + row * bytes, pinned, pending.len() * bytes, bytes, &self.stream)?;
        pending.push(*rows);
        *rows += 1;
        Ok(())
    }

    /// Waits for the step, and reports its layers.
    fn wait(&mut self, way: UnderWay, layers_done: &mut LayersDone<'_>) -> Result<(), CudaError> {
        self.context.bind()?;
        let Self { step, spec, written, stream, .. } = &*self;
        let reports = step.report_layers.iter().copied().filter(|layers| (1..=spec.layers).contains(layers));
        match way {
            UnderWay::Graph => {
                stream.synchronize()?;
                reports.for_each(layers_done);
            }
            UnderWay::Launches => {
                for layers in reports {
                    written[layers - 1].synchronize()?;
                    layers_done(layers);
                }
                stream.synchronize()?;
            }
        }
        self.busy = false;
        Ok(())
    }
}

impl Executor for CudaExecutor {
    fn spec(&self) -> &EngineSpec {
        &self.spec
    }

    fn memory(&self) -> Arc<dyn KvMemory> {
        self.network.memory.clone()
    }

    fn begin(&mut self, batch: &Batch) -> Result<(), EngineError> {
        self.under_way = None;
        let last = std::mem::take(&mut self.last);
        self.settle()?;
        let Self { chooser, step, spec, .. } = self;
        chooser.begin(batch)?;
        step.lay_out(batch, spec, |item| chooser.last(item))?;
        let (rows, most) = (self.step.tokens.len(), self.network.limits.rows);
        if rows > most {
            let why = format!("a step of {rows} rows, and there is memory for {most} (--max-num-batched-tokens)");
            return Err(EngineError::InvalidArgument(why));
        }
        self.under_way = Some(self.queue(batch, &last)?);
        Ok(())
    }

    fn finish(&mut self, layers_done: &mut LayersDone<'_>) -> Result<&[Chosen], EngineError> {
        let way = self.under_way.take().ok_or_else(|| EngineError::Executor("no step was begun".into()))?;
        self.wait(way, layers_done)?;
        self.host_logits.arrived(&mut self.chooser);
        let Self { outcomes, items, chooser, last, inputs, .. } = self;
        // SAFETY: the step has ended, and with it the copy of its outcomes.
        let outcomes = unsafe { outcomes.slice::<Outcome>(0, inputs.choices.len()) };
        chooser.choose_found(|item, after, _| {
            let Outcome { token, logprob, status, .. } = outcomes[items[item].first_choice + after];
            match status {
                Outcome::CHOSEN => Found::Token(Sampled { token, logprob, top: Vec::new() }),
                Outcome::SOUND => Found::Logits,
                _ => Found::NotNumbers,
            }
        });
        for ((seq, chosen), Item { first_choice, on_host }) in chooser.chosen_of().zip(&*items) {
            let accepted = match chosen {
                Chosen::Token(_) => 0,
                Chosen::Tokens(all) => all.len() - 1,
                Chosen::Nothing | Chosen::NotNumbers => continue,
            };
            if !on_host {
                last.insert(seq, (first_choice + accepted) as u32);
            }
        }
        Ok(chooser.chosen())
    }

    fn forget(&mut self, seq: Seq) {
        self.chooser.forget(seq);
        self.tables.forget(seq);
        self.last.remove(&seq);
    }
}

impl Drop for CudaExecutor {
    fn drop(&mut self) {
        // Nothing may be queued that works on memory which is freed.
        let _ = self.context.bind();
        let _ = self.stream.synchronize();
    }
}

impl HostLogits {
    fn begin(&mut self) {
        self.pending.clear();
        self.rows = 0;
    }

    /// The copies have ended: their rows become the chooser's.
    fn arrived(&mut self, chooser: &mut Chooser) {
        let width = self.pinned.bytes() / 4 / self.most;
        let all = chooser.rows_mut();
        for (index, row) in self.pending.drain(..).enumerate() {
            // SAFETY: the caller has waited for the copies.
            let logits = unsafe { self.pinned.slice::<f32>(index * width * 4, width) };
            all[row * width..][..width].copy_from_slice(logits);
        }
    }
}

/// Whether an item is one row and its drafts, of which each chooses.
fn decodes(item: &BatchItem) -> bool {
    item.tokens.len() == 1 && item.choose.is_some()
}

/// Whether its rules are known to the host alone.
fn is_of_host(choose: &Choose) -> bool {
    let is_some = |forbidden: &Option<Arc<[u32]>>| forbidden.as_ref().is_some_and(|tokens| !tokens.is_empty());
    let forbids = is_some(&choose.forbidden) || choose.drafts.iter().any(|draft| is_some(&draft.forbidden));
    forbids || Choice::new(&choose.sampling, 0.0, 0, 0, 0).is_none()
}

/// A tile for each row.
fn decode_tiles(first_row: usize, rows: usize, table: u32, start: usize, tiles: &mut Vec<Tile>) {
    let tile = |row: usize| Tile { first_row: (first_row + row) as u32, tokens: 1, table, start: (start + row) as u32 };
    tiles.extend((0..rows).map(tile));
}

/// The sizes that have a graph, where steps have up to `rows` rows.
fn buckets(rows: usize) -> impl Iterator<Item = usize> {
    BUCKETS.into_iter().filter(move |&bucket| bucket <= rows)
}

/// Rows that there must be memory for, so that a step of `tokens` tokens may be a graph of the next size.
pub(crate) fn rows_with_spare(tokens: usize) -> usize {
    BUCKETS.into_iter().find(|&bucket| bucket >= tokens).unwrap_or(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_cover_what_runs_and_their_spare_rows_fit() {
        let spare = BUCKETS.windows(2).map(|pair| pair[1] - pair[0] - 1).max();
        assert_eq!(spare, Some(MOST_SPARE));
        assert_eq!(buckets(24).collect::<Vec<_>>(), [1, 2, 4, 8, 16, 24]);
        assert_eq!(buckets(4096).count(), BUCKETS.len());
        assert_eq!([1, 3, 65, 256, 2048].map(rows_with_spare), [1, 4, 96, 256, 2048]);
    }
}
