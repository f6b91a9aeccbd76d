//! What a step has to itself from its beginning to its end, so that the host can begin the next one meanwhile: its
//! layout, the pinned memory that it copies from and to, the events that it comes to, and its choices. All else is of
//! the stream, in whose order steps run, see `queue.rs`.
use std::sync::Arc;

use tandem_engine::chooser::{Chooser, Found, Slots};
use tandem_engine::step::Step;
use tandem_engine::{Batch, Choose, EngineError, EngineSpec, LayersDone, Sampled};

use crate::context::Context;
use crate::error::CudaError;
use crate::inputs::Frame;
use crate::kernels::choose::Outcome;
use crate::pinned::Pinned;
use crate::stream::{Event, Stream};
use crate::workspace::{MOST_LOGITS, StepLimits};

/// Pinned memory for logits on their way to the host at a time.
const LOGITS_BYTES: usize = 32 << 20;

/// See the head of this file.
pub(crate) struct Flight {
    pub step: Step,
    pub chooser: Chooser,
    pub items: Vec<Item>,
    /// [`crate::inputs::Inputs`] as they are uploaded.
    pub uploaded: Pinned,
    /// Block tables as they are uploaded.
    pub tables: Pinned,
    /// [`Outcome`] of each choice.
    pub outcomes: Pinned,
    /// How many there are.
    pub choices: usize,
    pub host_logits: HostLogits,
    /// Of each layer: its K and V are written. Recorded where somebody waits, and no graph computes the step.
    pub written: Vec<Event>,
    /// Everything is computed and copied.
    pub ended: Event,
    pub way: Way,
    /// Work may be queued that nobody has waited for.
    pub busy: bool,
}

/// What a step does for one of its sequences.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Item {
    /// Of its choices, one and one more for each draft.
    pub first_choice: usize,
    /// The host chooses, from logits.
    pub on_host: bool,
}

/// How a step is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// By a graph: its layers are done when all is.
    Graph,
    /// By single launches, with events.
    Launches,
}

/// Logits on their way to the host.
pub(crate) struct HostLogits {
    pub pinned: Pinned,
    /// Rows that fit.
    pub most: usize,
    /// Which rows of the chooser those are that are on their way.
    pub pending: Vec<usize>,
    /// Rows of the step so far.
    pub rows: usize,
}

impl Flight {
    pub fn new(context: &Arc<Context>, spec: &EngineSpec, limits: &StepLimits) -> Result<Self, CudaError> {
        let vocabulary = spec.vocab_size;
        let most = (LOGITS_BYTES / (4 * vocabulary)).clamp(1, limits.rows.min(MOST_LOGITS));
        let pinned = Pinned::new(context, most * vocabulary * 4)?;
        Ok(Self {
            step: Step::default(),
            chooser: Chooser::default(),
            items: Vec::new(),
            uploaded: Pinned::new(context, Frame::most_bytes(limits.rows))?,
            tables: Pinned::new(context, limits.tables * limits.table_blocks * 4)?,
            outcomes: Pinned::new(context, limits.rows * size_of::<Outcome>())?,
            choices: 0,
            host_logits: HostLogits { pinned, most, pending: Vec::new(), rows: 0 },
            written: (0..spec.layers).map(|_| Event::new(context)).collect::<Result<_, _>>()?,
            ended: Event::new(context)?,
            way: Way::Launches,
            busy: false,
        })
    }

    /// Waits for whatever a step that failed has left in the stream.
    pub fn settle(&mut self, stream: &Stream) -> Result<(), CudaError> {
        if self.busy {
            stream.synchronize()?;
            self.busy = false;
        }
        Ok(())
    }

    /// The step has failed. Its blocks are another's after this, and a part of it may be queued and still write there:
    /// waits for that. Should the wait fail too, the device is lost, as the next step says.
    pub fn abandon(&mut self, stream: &Stream, slots: &mut Slots) {
        self.chooser.give_up(slots);
        let _ = self.settle(stream);
    }

    /// Checks and lays out `batch`.
    pub fn lay_out(
        &mut self,
        batch: &Batch,
        spec: &EngineSpec,
        most_rows: usize,
        stream: &Stream,
        slots: &mut Slots,
    ) -> Result<(), EngineError> {
        self.settle(stream)?;
        let Self { step, chooser, items, .. } = self;
        chooser.begin(batch, slots)?;
        // For a token that only the device knows, any will do: its row takes it from there.
        step.lay_out(batch, spec, |item| chooser.last(item).map(|last| last.known().unwrap_or(0)))?;
        let rows = step.tokens.len();
        if rows > most_rows {
            let why = format!("a step of {rows} rows, and there is memory for {most_rows} (--max-num-batched-tokens)");
            return Err(EngineError::InvalidArgument(why));
        }
        items.clear();
        let mut first_choice = 0;
        for item in &batch.items {
            let on_host = item.choose.as_ref().is_some_and(Choose::is_of_host);
            items.push(Item { first_choice, on_host });
            first_choice += 1 + item.drafts().len();
        }
        self.choices = first_choice;
        chooser.rows_of(spec.vocab_size, |item| items[item].on_host);
        self.host_logits.begin();
        Ok(())
    }

    /// Waits for the end, and reports layers.
    pub fn wait(&mut self, spec: &EngineSpec, layers_done: &mut LayersDone<'_>) -> Result<(), CudaError> {
        let Self { step, written, ended, .. } = &*self;
        let reports = step.report_layers.iter().copied().filter(|layers| (1..=spec.layers).contains(layers));
        match self.way {
            Way::Graph => {
                ended.synchronize()?;
                reports.for_each(layers_done);
            }
            Way::Launches => {
                for layers in reports {
                    written[layers - 1].synchronize()?;
                    layers_done(layers);
                }
                ended.synchronize()?;
            }
        }
        self.busy = false;
        Ok(())
    }

    /// What the device has found, and the host chooses, once the step has ended.
    pub fn choose(&mut self, slots: &mut Slots) {
        self.host_logits.arrived(&mut self.chooser);
        let Self { outcomes, choices, items, chooser, .. } = self;
        // SAFETY: the step has ended, and with it the copy of its outcomes.
        let outcomes = unsafe { outcomes.slice::<Outcome>(0, *choices) };
        chooser.choose_found(slots, |item, after, _| {
            let Outcome { token, logprob, status, .. } = outcomes[items[item].first_choice + after];
            match status {
                Outcome::CHOSEN => Found::Token(Sampled { token, logprob, top: Vec::new() }),
                Outcome::SOUND => Found::Logits,
                _ => Found::NotNumbers,
            }
        });
    }
}

impl HostLogits {
    fn begin(&mut self) {
        self.pending.clear();
        self.rows = 0;
    }

    /// The copies have ended: their rows become the chooser's.
    pub fn arrived(&mut self, chooser: &mut Chooser) {
        let width = self.pinned.bytes() / 4 / self.most;
        let all = chooser.rows_mut();
        for (index, row) in self.pending.drain(..).enumerate() {
            // SAFETY: the caller has waited for the copies.
            let logits = unsafe { self.pinned.slice::<f32>(index * width * 4, width) };
            all[row * width..][..width].copy_from_slice(logits);
        }
    }
}
