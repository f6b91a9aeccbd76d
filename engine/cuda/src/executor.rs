//! [`Executor`] on a CUDA device. Two steps may be under way: the host begins one while the device computes the one
//! before. What a step has to itself is a `flight`, its work goes through a `queue`.
//!
//! Inputs go up in one copy. Tokens are chosen on the device and come down, a few bytes a row; where the rules are the
//! host's alone (penalties, bias, forbidden ends, log probabilities of others), the row's logits do, and the engine's
//! sampler chooses. What a sequence's last step chose on the device is taken from there by the next.
use std::collections::HashMap;
use std::sync::Arc;

use tandem_engine::chooser::{Last, Slots};
use tandem_engine::logits::Logits;
use tandem_engine::under_way::UnderWay;
use tandem_engine::{Batch, Chosen, EngineError, EngineSpec, Executor, LayersDone, Seq};
use tandem_memory::KvMemory;

use crate::context::Context;
use crate::error::CudaError;
use crate::flight::{Flight, Item};
use crate::network::Network;
use crate::queue::Queue;

/// Steps that may be under way. A third would only make whoever arrives wait for one more.
const MOST_UNDER_WAY: usize = 2;

/// A model on a CUDA device. `loader.rs` makes it.
pub struct CudaExecutor {
    spec: EngineSpec,
    // Before the memory that its copies work on.
    queue: Queue,
    flights: UnderWay<Flight>,
    slots: Slots,
    /// Which outcome of the step that began last is a sequence's last token: the device has those of no other.
    last: HashMap<Seq, u32>,
    context: Arc<Context>,
}

impl CudaExecutor {
    /// Over a network whose weights are there; records the graphs.
    pub(crate) fn new(context: &Arc<Context>, spec: EngineSpec, network: Network) -> Result<Self, CudaError> {
        let flight = |_| Flight::new(context, &spec, &network.limits);
        let flights: Vec<_> = (0..MOST_UNDER_WAY).map(flight).collect::<Result<_, _>>()?;
        Ok(Self {
            queue: Queue::new(context, &spec, network)?,
            flights: UnderWay::new(flights),
            slots: Slots::default(),
            last: HashMap::new(),
            context: Arc::clone(context),
            spec,
        })
    }

    /// The logits of the last step's items whose tokens the host chose: those that asked for log probabilities of other
    /// tokens, among others.
    pub fn logits(&self) -> &Logits {
        self.flights.ended().chooser.logits()
    }

    /// Sequences for which something is kept.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }
}

impl Executor for CudaExecutor {
    fn spec(&self) -> &EngineSpec {
        &self.spec
    }

    fn memory(&self) -> Arc<dyn KvMemory> {
        self.queue.network.memory.clone()
    }

    fn most_under_way(&self) -> usize {
        self.flights.most()
    }

    fn begin(&mut self, batch: &Batch) -> Result<(), EngineError> {
        let Self { spec, queue, flights, slots, last, context } = self;
        let flight = flights.next_step().ok_or_else(|| EngineError::Executor("too many steps under way".into()))?;
        context.bind()?;
        // Whatever becomes of this step, the device may not have the outcomes of the one before any more.
        let before = std::mem::take(last);
        let laid_out = flight.lay_out(batch, spec, queue.network.limits.rows, &queue.stream, slots);
        let begun = laid_out.and_then(|()| check_last(batch, flight, &before)).and_then(|()| {
            queue.queue(batch, flight, &before)?;
            Ok(())
        });
        if let Err(error) = begun {
            flight.abandon(&queue.stream, slots);
            return Err(error);
        }
        for (item, &Item { first_choice, on_host }) in batch.items.iter().zip(&flight.items) {
            if item.choose.is_some() && !on_host {
                last.insert(item.seq, first_choice as u32);
            }
        }
        flights.began();
        Ok(())
    }

    fn finish(&mut self, layers_done: &mut LayersDone<'_>) -> Result<&[Chosen], EngineError> {
        let Self { spec, queue, flights, slots, last, context } = self;
        let flight = flights.end().ok_or_else(|| EngineError::Executor("no step was begun".into()))?;
        let waited = context.bind().and_then(|()| flight.wait(spec, layers_done));
        if let Err(error) = waited {
            flight.abandon(&queue.stream, slots);
            return Err(error.into());
        }
        flight.choose(slots);
        // The outcomes of drafts that came true are the host's to count. Without a step behind, the device has them.
        for ((seq, chosen), Item { first_choice, .. }) in flight.chooser.chosen_of().zip(&flight.items) {
            if let Chosen::Tokens(all) = chosen {
                last.entry(seq).and_modify(|outcome| *outcome = (first_choice + all.len() - 1) as u32);
            }
        }
        Ok(self.flights.ended().chooser.chosen())
    }

    fn forget(&mut self, seq: Seq) {
        self.slots.forget(seq);
        self.queue.tables.forget(seq);
        self.last.remove(&seq);
    }
}

/// Whether the device has all tokens that the host has not.
fn check_last(batch: &Batch, flight: &Flight, before: &HashMap<Seq, u32>) -> Result<(), EngineError> {
    let unseen = |index: usize| flight.chooser.last(index) == Some(Last::UnderWay);
    let lacking =
        batch.items.iter().enumerate().find(|(index, item)| unseen(*index) && !before.contains_key(&item.seq));
    match lacking {
        Some((_, item)) => {
            let why = format!("sequence {} in a step: the step before did not choose its token", item.seq);
            Err(EngineError::InvalidArgument(why))
        }
        None => Ok(()),
    }
}

impl Drop for CudaExecutor {
    fn drop(&mut self) {
        // Nothing may be queued that works on memory which is freed.
        let _ = self.context.bind();
        let _ = self.queue.stream.synchronize();
    }
}
