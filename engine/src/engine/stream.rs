//! The events of one sequence: the worker's end of its stream, and the reader's. The worker never waits for a reader: a
//! stream has room for every event that its sequence can have.
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::Shared;
use crate::error::EngineError;
use crate::sampling::Sampled;
use crate::scheduler::Decision;
use crate::sequence::{MAX_PREEMPTIONS_TOLD, SequenceEvent};

/// The events of one sequence. Dropping it cancels the sequence before the next step that the engine begins.
#[derive(Debug)]
pub struct SequenceStream {
    events: mpsc::Receiver<SequenceEvent>,
    shared: Arc<Shared>,
    ended: bool,
}

impl SequenceStream {
    pub(super) fn new(events: mpsc::Receiver<SequenceEvent>, shared: Arc<Shared>) -> Self {
        Self { events, shared, ended: false }
    }

    /// The next event, or `None` after the last one. Always ends in `Finished` or `Failed`. Cancel-safe.
    pub async fn next(&mut self) -> Option<SequenceEvent> {
        if self.ended {
            return None;
        }
        let event = self.events.recv().await;
        // Without an end from the worker, the worker itself has ended.
        let event = event.unwrap_or_else(|| SequenceEvent::Failed(EngineError::Stopped(self.shared.stop_reason())));
        self.ended = event.is_last();
        Some(event)
    }
}

/// The worker's end of a stream.
pub(super) struct Client {
    events: mpsc::Sender<SequenceEvent>,
    /// Held while the sequence waits.
    queue_place: Option<OwnedSemaphorePermit>,
    /// See `SequenceRequest::report_layers`; empty once the first token is there.
    report_layers: Vec<usize>,
    started: bool,
    /// So many preemptions can still be told.
    preemptions: usize,
}

impl Client {
    /// Of a sequence that waits, and has this place in the queue till it starts.
    pub fn new(events: mpsc::Sender<SequenceEvent>, place: OwnedSemaphorePermit, report_layers: Vec<usize>) -> Self {
        let preemptions = MAX_PREEMPTIONS_TOLD;
        Self { events, queue_place: Some(place), report_layers, started: false, preemptions }
    }

    /// Whether nobody reads any more.
    pub fn has_left(&self) -> bool {
        self.events.is_closed()
    }

    /// Whether it wants to know of layers.
    pub fn waits_for_layers(&self) -> bool {
        !self.report_layers.is_empty()
    }

    /// What its sequence came to.
    pub fn tell(&mut self, decision: Decision, at: Instant) {
        match decision {
            Decision::Start => {
                self.queue_place = None;
                self.start(at);
            }
            Decision::Grow => {}
            Decision::Preempt => {
                // It holds no blocks and takes no place from those who do.
                self.queue_place = None;
                self.report_layers = Vec::new();
                if self.preemptions > 0 {
                    self.send(SequenceEvent::Preempted { at });
                }
            }
            Decision::Resume => {
                self.start(at);
                if self.preemptions > 0 {
                    self.preemptions -= 1;
                    self.send(SequenceEvent::Resumed { at });
                }
            }
            Decision::Advance { computed, chunk, sampled, mut drafts, finish } => {
                if chunk {
                    self.send(SequenceEvent::ChunkDone { tokens: computed, at });
                }
                for Sampled { token, logprob, top } in sampled {
                    self.report_layers = Vec::new();
                    let drafts = std::mem::take(&mut drafts);
                    self.send(SequenceEvent::Token { id: token, logprob, top, drafts, at });
                }
                if let Some(reason) = finish {
                    self.send(SequenceEvent::Finished { reason, at });
                }
            }
            Decision::Fail(error) => self.send(SequenceEvent::Failed(error)),
            Decision::Cancel => {}
        }
    }

    fn start(&mut self, at: Instant) {
        if !self.started {
            self.started = true;
            self.send(SequenceEvent::Started { at });
        }
    }

    /// Called in the middle of a step: the channel's send is what orders the step's writes before the reader's reads.
    pub fn tell_layers(&self, layers: usize, at: Instant) {
        if self.report_layers.contains(&layers) {
            self.send(SequenceEvent::LayersDone { layers, at });
        }
    }

    /// A reader that has left is no error: the next step cancels its sequence.
    fn send(&self, event: SequenceEvent) {
        if let Err(mpsc::error::TrySendError::Full(event)) = self.events.try_send(event) {
            debug_assert!(false, "the stream has no room for {event:?}");
        }
    }
}
