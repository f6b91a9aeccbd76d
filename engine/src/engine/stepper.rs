//! Drives an engine's worker as a future: it waits for messages and for the end of a step in tokio's time. Under a
//! paused clock a step takes exactly its time, whatever the machine does. Knows nothing of what a step is: see the
//! worker.
use std::time::{Duration, Instant};

use tokio::time;

use super::worker::{BLOCKS_AWAY, Outcome, Worker, waiting_for_layers};
use crate::step_model::StepShape;

/// The driver of one engine without a thread, see [`Engine::stepped`](super::Engine::stepped). Dropping it is the
/// worker's sudden end: all its sequences fail.
pub struct Stepper {
    worker: Worker,
    step_time: Box<dyn Fn(StepShape) -> Duration + Send + Sync>,
}

impl Stepper {
    pub(super) fn new(worker: Worker, step_time: impl Fn(StepShape) -> Duration + Send + Sync + 'static) -> Self {
        Self { worker, step_time: Box::new(step_time) }
    }

    /// Steps until the engine is shut down or its last handle is dropped. The KV of a step is written at its beginning,
    /// its tokens are told at its end.
    pub async fn run(mut self) {
        while self.worker.lost.is_none() && self.receive().await {
            let Some(batch) = self.worker.plan(now()) else {
                if !self.worker.scheduler.is_idle() {
                    time::sleep(BLOCKS_AWAY).await;
                }
                continue;
            };
            let takes = (self.step_time)(StepShape::of(&batch));
            self.worker.begin(batch, now());
            self.step(takes).await;
        }
        let reason = self.worker.ended();
        self.worker.stopped(reason);
    }

    /// Writes everything at once, and then lets time pass, with a stop after each layer that somebody waits for.
    async fn step(&mut self, takes: Duration) {
        let Worker { executor, under_way, scheduler, clients, .. } = &mut self.worker;
        let Some(flight) = under_way.front() else { return };
        let (begin, layers) = (time::Instant::now(), u32::try_from(executor.spec().layers).unwrap_or(u32::MAX));
        let mut done = Vec::new();
        let outcome = Outcome::of(flight, &mut **executor, scheduler, &mut |layers| done.push(layers));
        let waiting = waiting_for_layers(clients, &flight.batch);
        for layer in done {
            time::sleep_until(begin + takes * u32::try_from(layer).unwrap_or(u32::MAX) / layers).await;
            waiting.iter().filter(|_| outcome.failed.is_none()).for_each(|client| client.tell_layers(layer, now()));
        }
        time::sleep_until(begin + takes).await;
        self.worker.conclude(outcome, takes, now());
    }

    /// As the thread's: waits while there is nothing to run. False when the engine shall stop.
    async fn receive(&mut self) -> bool {
        if self.worker.scheduler.is_idle() {
            match self.worker.inbox.recv().await {
                Some(message) => self.worker.take(message),
                None => return false,
            }
        }
        self.worker.take_waiting()
    }
}

fn now() -> Instant {
    time::Instant::now().into_std()
}
