//! Queues steps in the executor's one stream, in whose order they run: a step reads what those before it have left in
//! the workspace, the arena and the block tables, and the host waits for none of them here. A step of decode rows alone
//! is a captured graph: of the next larger of a few batch sizes, whose spare rows write their K and V behind the
//! arena's blocks. Every other step is single launches over all of its rows, with an event after each layer that
//! somebody waits for. Both are the same kernels, and a row's bits are the same.
use std::collections::HashMap;
use std::sync::Arc;

use tandem_engine::{Batch, BatchItem, Choose, EngineSpec, Seq, Tokens};

use crate::context::Context;
use crate::error::CudaError;
use crate::flight::{Flight, HostLogits, Item, Way};
use crate::graph::Graph;
use crate::inputs::{Frame, Inputs};
use crate::kernels::attention::{Height, Tile};
use crate::kernels::choose::{Choice, Outcome};
use crate::kernels::rows::Last;
use crate::network::{Network, Turn};
use crate::proof::library_agrees;
use crate::stream::Stream;
use crate::tables::Tables;
use crate::workspace::MOST_LOGITS;

/// Rows of decode steps that have a graph.
pub(crate) const BUCKETS: [usize; 13] = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256];
/// Spare rows of a bucket at most.
pub(crate) const MOST_SPARE: usize = 63;

/// See the head of this file.
pub(crate) struct Queue {
    // Fields are dropped in this order: graphs and what is queued before the memory that they work on.
    graphs: Vec<(usize, Graph)>,
    pub stream: Stream,
    pub network: Network,
    pub tables: Tables,
    /// Blocks of the arena.
    total_blocks: usize,
    /// Of the step that is being queued.
    inputs: Inputs,
    /// The device's row of each item's block table, likewise.
    table_rows: Vec<u32>,
}

impl Queue {
    /// Over a network whose weights are there; records the graphs.
    pub fn new(context: &Arc<Context>, spec: &EngineSpec, network: Network) -> Result<Self, CudaError> {
        let limits = network.limits;
        let mut queue = Self {
            graphs: Vec::new(),
            stream: Stream::new(context)?,
            network,
            tables: Tables::new(limits.tables, limits.table_blocks),
            total_blocks: spec.total_blocks,
            inputs: Inputs::default(),
            table_rows: Vec::new(),
        };
        let mut rows: Vec<usize> = buckets(limits.rows).chain([limits.rows]).collect();
        rows.dedup();
        if !library_agrees(context, &queue.network, &queue.stream, &rows)? {
            tracing::warn!(
                "cuBLASLt adds in another order here: large products are computed by kernels of Tandem's own"
            );
            queue.network.library = None;
        }
        for bucket in buckets(limits.rows) {
            let graph = queue.capture(bucket)?;
            queue.graphs.push((bucket, graph));
        }
        Ok(queue)
    }

    /// Copies are no part of a graph: each of the steps under way has its own memory on the host.
    fn capture(&self, bucket: usize) -> Result<Graph, CudaError> {
        let frame = Frame::bucket(bucket);
        let turn = Turn { first_logits: 0, logits: bucket, first_choice: 0, choices: bucket };
        Graph::capture(&self.stream, || {
            self.network.layers(&self.stream, &frame, &mut |_| Ok(()))?;
            self.network.choose(&self.stream, &frame, &turn)
        })
    }

    /// Queues the step that is laid out in `flight`; `last` is which outcome of the step before is a sequence's last
    /// token.
    pub fn queue(&mut self, batch: &Batch, flight: &mut Flight, last: &HashMap<Seq, u32>) -> Result<(), CudaError> {
        flight.busy = true;
        let Self { network, tables, stream, table_rows, .. } = self;
        tables.update(batch, &network.workspace, network.work.tables, stream, &mut flight.tables, table_rows)?;
        let rows = flight.step.tokens.len();
        let decodes_only = batch.items.iter().all(decodes);
        let graph = self.graphs.iter().position(|(bucket, _)| decodes_only && *bucket >= rows);
        self.inputs.clear();
        self.list_rows(batch, flight, last);
        match graph {
            Some(index) => self.run_graph(batch, flight, index)?,
            None => self.run_launches(batch, flight)?,
        }
        flight.ended.record(&self.stream)
    }

    /// What both ways have of each row.
    fn list_rows(&mut self, batch: &Batch, Flight { step, .. }: &Flight, last: &HashMap<Seq, u32>) {
        let inputs = &mut self.inputs;
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

    fn run_graph(&mut self, batch: &Batch, flight: &mut Flight, index: usize) -> Result<(), CudaError> {
        let (bucket, rows) = (self.graphs[index].0, self.inputs.tokens.len());
        self.list_choices(batch, flight, |row, _| row);
        let Self { inputs, table_rows, network, .. } = self;
        for (chunk, &table) in flight.step.chunks.iter().zip(&*table_rows) {
            decode_tiles(chunk.first_row, chunk.rows, table, chunk.start, &mut inputs.decode_tiles);
        }
        for spare in 0..bucket - rows {
            let block = self.total_blocks + spare / network.block_tokens;
            inputs.places.extend([block as u32, (spare % network.block_tokens) as u32]);
        }
        inputs.tokens.resize(bucket, 0);
        inputs.from.resize(bucket, Last::NOT);
        inputs.positions.resize(bucket, 0);
        inputs.decode_tiles.resize(bucket, Tile::default());
        inputs.choices.resize(bucket, Choice::soundness(0, 0));
        flight.way = Way::Graph;
        let frame = Frame::bucket(bucket);
        // SAFETY: the flight was waited for, and no copy of this step is queued.
        unsafe { inputs.write(&frame, &mut flight.uploaded) };
        self.upload(&frame, flight)?;
        self.graphs[index].1.launch(&self.stream)?;
        self.download_outcomes(flight)?;
        for item in 0..batch.items.len() {
            let chunk = flight.step.chunks[item];
            if flight.items[item].on_host {
                (0..chunk.rows).try_for_each(|row| self.fetch_logits(flight, chunk.first_row + row))?;
            }
        }
        Ok(())
    }

    fn run_launches(&mut self, batch: &Batch, flight: &mut Flight) -> Result<(), CudaError> {
        self.list_choices(batch, flight, |_, index| index % MOST_LOGITS);
        let Self { inputs, table_rows, network, .. } = self;
        let step = &flight.step;
        let group = network.config.heads / network.config.kv_heads;
        for ((item, chunk), &table) in batch.items.iter().zip(&step.chunks).zip(&*table_rows) {
            if decodes(item) {
                decode_tiles(chunk.first_row, chunk.rows, table, chunk.start, &mut inputs.decode_tiles);
            } else {
                let (first, start) = (chunk.first_row as u32, chunk.start as u32);
                Height::Rows128.cut(group, first, chunk.rows, table, start, &mut inputs.prompt_tiles);
            }
        }
        inputs.logits_of.extend(step.logits_of.iter().map(|&row| row as u32));
        let frame = inputs.frame();
        flight.way = Way::Launches;
        // SAFETY: the flight was waited for, and no copy of this step is queued.
        unsafe { inputs.write(&frame, &mut flight.uploaded) };
        self.upload(&frame, flight)?;
        let (Self { network, stream, .. }, Flight { step, written, .. }) = (&*self, &*flight);
        network.layers(stream, &frame, &mut |layers| match step.reports(layers) {
            true => written[layers - 1].record(stream),
            false => Ok(()),
        })?;
        self.choose_in_turns(batch, flight, &frame)?;
        self.download_outcomes(flight)
    }

    /// Logits and choices, as many rows at a time as there is memory for.
    fn choose_in_turns(&self, batch: &Batch, flight: &mut Flight, frame: &Frame) -> Result<(), CudaError> {
        let mut turn = Turn { first_logits: 0, logits: 0, first_choice: 0, choices: 0 };
        // Rows of this turn whose logits the host wants.
        let mut wanted = Vec::new();
        for (index, item) in batch.items.iter().enumerate() {
            let choices = 1 + item.drafts().len();
            for _ in 0..choices {
                if turn.logits == MOST_LOGITS {
                    self.take_turn(flight, frame, &turn, &mut wanted)?;
                    let (logits, choices) = (turn.first_logits + turn.logits, turn.first_choice + turn.choices);
                    turn = Turn { first_logits: logits, logits: 0, first_choice: choices, choices: 0 };
                }
                if flight.items[index].on_host {
                    wanted.push(turn.logits);
                }
                turn.logits += usize::from(item.choose.is_some());
                turn.choices += 1;
            }
        }
        self.take_turn(flight, frame, &turn, &mut wanted)
    }

    fn take_turn(
        &self,
        flight: &mut Flight,
        frame: &Frame,
        turn: &Turn,
        wanted: &mut Vec<usize>,
    ) -> Result<(), CudaError> {
        self.network.choose(&self.stream, frame, turn)?;
        wanted.drain(..).try_for_each(|row| self.fetch_logits(flight, row))
    }

    /// The choices of all items; `logits_row(row, n)` is where the logits of a step's row are, which is the `n`th that
    /// chooses.
    fn list_choices(&mut self, batch: &Batch, flight: &Flight, logits_row: impl Fn(usize, usize) -> usize) {
        let (inputs, Flight { step, items, .. }) = (&mut self.inputs, flight);
        let mut choosing = 0;
        for ((item, chunk), Item { on_host, .. }) in batch.items.iter().zip(&step.chunks).zip(items) {
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
    fn fetch_logits(&self, flight: &mut Flight, row: usize) -> Result<(), CudaError> {
        if flight.host_logits.pending.len() == flight.host_logits.most {
            self.stream.synchronize()?;
            flight.host_logits.arrived(&mut flight.chooser);
        }
        let Network { workspace, work, .. } = &self.network;
        let bytes = 4 * self.network.config.vocab_size;
        let HostLogits { pinned, pending, rows, .. } = &mut flight.host_logits;
        workspace.download(work.logits.at + row * bytes, pinned, pending.len() * bytes, bytes, &self.stream)?;
        pending.push(*rows);
        *rows += 1;
        Ok(())
    }

    fn upload(&self, frame: &Frame, flight: &Flight) -> Result<(), CudaError> {
        let Network { workspace, work, .. } = &self.network;
        workspace.upload(work.inputs.at, &flight.uploaded, 0, frame.bytes, &self.stream)
    }

    fn download_outcomes(&self, flight: &Flight) -> Result<(), CudaError> {
        let Network { workspace, work, .. } = &self.network;
        let bytes = flight.choices * size_of::<Outcome>();
        workspace.download(work.outcomes.at, &flight.outcomes, 0, bytes, &self.stream)
    }
}

/// Whether an item is one row and its drafts, of which each chooses.
fn decodes(item: &BatchItem) -> bool {
    item.tokens.len() == 1 && item.choose.is_some()
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
