//! Where a prompt's KV goes: the router's commands, and the hand-offs that they begin. A ticket replaces the one before
//! it; a hand-off that fails on the receiver's side is told to the router, which may send another ticket for the same
//! KV. Knows nothing of how the KV comes to be: that is `prefill.rs`, which runs beside it.
use std::pin::Pin;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tandem_node::call::Events;
use tandem_node::trace::Finished;
use tandem_proto::v1::prefill_event::Event;
use tandem_proto::v1::{Delivered, PrefillEvent, Ticket, Undelivered};
use tandem_proto::{Error, ErrorKind};
use tandem_telemetry::clock;
use tokio::sync::watch;

use crate::commands::{Commands, Word};
use crate::handoff::{Failed, Kv, Sender};
use crate::link::Receiver;

/// The hand-offs of one request, one after the other.
pub struct Deliveries<'a> {
    sender: &'a Sender<'a>,
    events: &'a Events<PrefillEvent>,
    kv: watch::Receiver<Kv>,
    /// Whose ticket wants the KV; `None`: nobody's.
    wanted: &'a watch::Sender<Option<Receiver>>,
    redeliver_wait: Duration,
    tickets: u64,
    /// Of the hand-offs that ended.
    spans: Finished,
    /// Why the last one failed, and until when another ticket may come.
    failed: Option<(Error, Instant)>,
}

/// A hand-off under way, and the spans that it leaves, packed.
type Running<'a> = Pin<Box<dyn Future<Output = Ended> + Send + 'a>>;

struct Ended {
    outcome: Result<Delivered, Failed>,
    spans: Vec<u8>,
    handoff_id: Vec<u8>,
}

impl<'a> Deliveries<'a> {
    /// Nothing was said yet.
    pub fn new(
        sender: &'a Sender<'a>,
        events: &'a Events<PrefillEvent>,
        kv: watch::Receiver<Kv>,
        wanted: &'a watch::Sender<Option<Receiver>>,
        redeliver_wait: Duration,
    ) -> Self {
        let spans = Finished::new(sender.node.spans.clone());
        Self { sender, events, kv, wanted, redeliver_wait, tickets: 0, spans, failed: None }
    }

    /// Follows the router's commands until the KV is delivered, or (`Delivered` of nothing) shall not be.
    ///
    /// # Errors
    /// `Cancelled` when the router closed its side without a ticket, what a failed hand-off failed of when no other
    /// ticket came in time, and what broke here.
    pub async fn run(mut self, commands: &mut Commands) -> Result<Delivered, Error> {
        let (mut running, mut open): (Option<Running<'a>>, bool) = (None, true);
        loop {
            tokio::select! {
                biased;
                word = commands.word(), if open => match word? {
                    Word::Deliver(ticket) => running = self.begin(*ticket),
                    Word::Stop => {
                        drop(running);
                        self.computed().await?;
                        return Ok(Delivered { spans: self.spans.take(), ..Delivered::default() });
                    }
                    Word::Closed if running.is_some() => open = false,
                    Word::Closed => return Err(self.unheard().await),
                },
                ended = end_of(&mut running) => {
                    running = None;
                    self.spans.add(&ended.spans);
                    match ended.outcome {
                        Ok(delivered) => return Ok(Delivered { spans: self.spans.take(), ..delivered }),
                        Err(Failed::Here(error)) => return Err(error),
                        Err(Failed::There(error)) => self.undelivered(error, ended.handoff_id, open).await?,
                    }
                }
                error = too_late(&self.failed) => {
                    self.sender.node.handoffs.not_redelivered.fetch_add(1, Relaxed);
                    return Err(error);
                }
            }
        }
    }

    /// Starts the hand-off of a ticket; the one before it was dropped, and so cancelled, by then. An answer of one
    /// token is complete without a hand-off, and its ticket with it.
    fn begin(&mut self, ticket: Ticket) -> Option<Running<'a>> {
        if self.sender.request.max_tokens == 1 {
            return None;
        }
        self.tickets += 1;
        self.failed = None;
        self.sender.node.handoffs.redelivered.fetch_add(u64::from(self.tickets > 1), Relaxed);
        self.wanted.send_replace(Some(Receiver::of(&ticket)));
        let (sender, kv) = (self.sender, self.kv.clone());
        Some(Box::pin(async move {
            let mut spans = Vec::new();
            let outcome = sender.run(&ticket, kv, &mut spans).await;
            Ended { outcome, spans, handoff_id: ticket.handoff_id }
        }))
    }

    /// The router hears of it, and the KV waits for another ticket.
    async fn undelivered(&mut self, error: Error, handoff_id: Vec<u8>, open: bool) -> Result<(), Error> {
        tracing::info!(kind = ?error.kind, "KV hand-off failed: {error}");
        self.sender.node.handoffs.count_undelivered(error.kind);
        self.wanted.send_replace(None);
        let status = tonic::Status::from(error.clone());
        let event = Undelivered { handoff_id, code: status.code().into(), message: error.message.clone() };
        self.events.send(PrefillEvent { event: Some(Event::Undelivered(event)) }).await?;
        if !open {
            return Err(error);
        }
        self.failed = Some((error, clock::now() + self.redeliver_wait));
        Ok(())
    }

    /// The router closed its side while nothing was under way: there will be no ticket.
    async fn unheard(mut self) -> Error {
        if let Some((error, _)) = self.failed {
            return error;
        }
        let unheard = "the router closed its side of the call before it sent a ticket";
        self.computed().await.err().unwrap_or_else(|| Error::new(ErrorKind::Cancelled, unheard))
    }

    /// Ready when the client was told its first token.
    async fn computed(&mut self) -> Result<(), Error> {
        let computed = self.kv.wait_for(|kv| kv.told).await;
        computed.map(|_| ()).map_err(|_| Error::new(ErrorKind::Internal, "the computation is gone"))
    }
}

/// Pending while nothing runs.
async fn end_of(running: &mut Option<Running<'_>>) -> Ended {
    match running {
        Some(running) => running.await,
        None => std::future::pending().await,
    }
}

/// Pending unless something failed.
async fn too_late(failed: &Option<(Error, Instant)>) -> Error {
    let Some((error, until)) = failed else { return std::future::pending().await };
    tokio::time::sleep_until((*until).into()).await;
    error.clone()
}
