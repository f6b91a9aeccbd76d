//! Joins engine and KV transport on the sending side; the two do not know each other. One hand-off: pushes the prompt's
//! blocks as they become final, hashes them beside that, seals them, waits for the receipt. What leaves when is
//! `plan.rs`; whose ticket it is and what comes after a failure is `delivery.rs`.
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tandem_engine::KvLease;
use tandem_kvtransfer::hashing::{self, Hashing};
use tandem_kvtransfer::transport::check_identity;
use tandem_kvtransfer::{Manifest, Outgoing, Receipt, TransferError};
use tandem_node::{CheckedRequest, Node, Trace, call};
use tandem_proto::v1::{Delivered, Seal, Ticket};
use tandem_proto::{Error, ErrorKind, SequenceHash, TraceContext};
use tandem_telemetry::{Kind, clock};
use tokio::sync::watch;

use crate::groups::MIN_FRAME_BYTES;
use crate::link::{Links, Receiver};
use crate::plan::{MAX_GPU_PIECE_BYTES, MAX_PIECE_BYTES, Piece, Plan, Progress, Shape};
use crate::settings::{Push, Settings};

/// Of a piece that a fault delays.
const DELAYED_PIECE_BYTES: usize = 64 << 10;

/// A prompt's KV as its computation publishes it.
#[derive(Clone, Debug, Default)]
pub struct Kv {
    /// Where it is; `None` before blocks are there, and while they are given to others.
    pub lease: Option<Arc<KvLease>>,
    /// What of it is final.
    pub progress: Progress,
    /// The computation's span, once it began.
    pub forward: Option<TraceContext>,
    /// Set at the end of the computation, when the client was told.
    pub first: Option<First>,
    /// The client was told its first token, wherever the blocks are now.
    pub told: bool,
}

/// The end of a prompt's computation.
#[derive(Clone, Copy, Debug)]
pub struct First {
    /// The first token of the answer.
    pub token: u32,
    /// When it was there.
    pub at: Instant,
}

/// Why there is no receipt.
#[derive(Debug)]
pub enum Failed {
    /// It lies with the receiver or the way there: another ticket may do.
    There(Error),
    /// It lies here.
    Here(Error),
}

impl From<TransferError> for Failed {
    fn from(error: TransferError) -> Self {
        Self::There(error.into())
    }
}

/// What every hand-off of a request needs.
pub struct Sender<'a> {
    /// This node.
    pub node: &'a Arc<Node>,
    /// The request.
    pub request: &'a CheckedRequest,
    /// Parent of what happens before the computation has begun.
    pub server: TraceContext,
    /// When blocks leave.
    pub settings: Settings,
    /// Learns from receipts.
    pub links: &'a Mutex<Links>,
}

impl Sender<'_> {
    /// Sends the prompt's KV to whoever granted `ticket`, as `kv` tells of it, and waits until it is verified there.
    /// Spans go to `spans`, packed, in any case. Dropping the future cancels the hand-off at the receiver.
    ///
    /// # Errors
    /// `There` with `Incompatible` for a ticket for another node, model, layout or prompt, `Unavailable` or the
    /// receiver's refusal; `Here` when hashing or the computation broke.
    pub async fn run(
        &self,
        ticket: &Ticket,
        kv: watch::Receiver<Kv>,
        spans: &mut Vec<u8>,
    ) -> Result<Delivered, Failed> {
        let mut trace = self.node.trace(&self.request.state);
        let outcome = self.deliver(ticket, kv, &mut trace).await;
        if let Err(Failed::There(error) | Failed::Here(error)) = &outcome {
            trace.fail(&error.message);
        }
        spans.extend(trace.finish(clock::now()));
        outcome
    }

    async fn deliver(
        &self,
        ticket: &Ticket,
        mut kv: watch::Receiver<Kv>,
        trace: &mut Trace,
    ) -> Result<Delivered, Failed> {
        let mut hashes = self.request.hashes(self.node.engine.spec());
        let held = self.check(ticket, &hashes)?;
        let outgoing = self.node.transport.open(ticket).await?;
        let mut plan = Plan::new(self.shape(ticket), held);
        let mut pushing = Pushing { sender: self, ticket, outgoing, held, manifest: None, post: None, trace };
        let first = loop {
            if kv.borrow().first.is_some() {
                // Perhaps in this very turn, with the end of the last chunk: the client waits for it, and not for KV.
                call::let_it_leave().await;
            }
            let now = kv.borrow_and_update().clone();
            // The last chunk is done a moment before its token is told: a whole push waits for that, or it would count
            // as hidden.
            let may_push = self.settings.push == Push::Overlap || now.first.is_some();
            if let Some(lease) = now.lease.as_ref().filter(|_| may_push) {
                for piece in plan.pieces(now.progress) {
                    let hidden = kv.borrow().first.is_none();
                    pushing.push(piece, lease, now.forward.unwrap_or(self.server)).await?;
                    let hidden = hidden && kv.borrow().first.is_none();
                    pushing.count(&plan, hidden);
                }
            }
            match now.first {
                Some(first) if plan.is_complete() => break first,
                _ => pushing.wait(&mut kv).await?,
            }
        };
        let receipt = pushing.seal(first, hashes.split_off(held)).await?;
        Ok(self.report(ticket, &receipt, first.at))
    }

    /// How many blocks the receiver holds.
    fn check(&self, ticket: &Ticket, hashes: &[SequenceHash]) -> Result<usize, Failed> {
        let spec = self.node.engine.spec();
        check_identity(ticket, self.node.incarnation(), spec.compatibility_digest)?;
        let incompatible = |message| Err(Failed::There(Error::new(ErrorKind::Incompatible, message)));
        let (held, blocks) = (ticket.held_blocks as usize, hashes.len());
        if held + ticket.blocks as usize != blocks {
            let Ticket { blocks: to_fill, held_blocks, .. } = ticket;
            return incompatible(format!(
                "the ticket is for {to_fill} blocks after {held_blocks} held ones, the prompt has {blocks}"
            ));
        }
        let last_held = held.checked_sub(1).map(|last| hashes[last]);
        let told = Some(&ticket.held_hash).filter(|told| !told.is_empty());
        let told = match told.map(|told| SequenceHash::from_wire(told)).transpose() {
            Ok(told) => told,
            Err(error) => return incompatible(error.message),
        };
        if told != last_held {
            return incompatible(format!("the {held} blocks that the receiver holds are of another prompt"));
        }
        let units = ticket.units.max(1);
        if units != 1 && units != u32::from(self.node.arena.units()) {
            return incompatible(format!("blocks in {units} units, of a model with {} layers", spec.layers));
        }
        Ok(held)
    }

    fn shape(&self, ticket: &Ticket) -> Shape {
        let spec = self.node.engine.spec();
        Shape {
            tokens: self.request.prompt.len(),
            block_tokens: spec.block_tokens,
            block_bytes: spec.block_bytes,
            layers: spec.layers,
            units: u8::try_from(ticket.units.max(1)).unwrap_or(1),
            min_bytes: match self.settings.push {
                Push::Overlap => MIN_FRAME_BYTES,
                Push::Whole => usize::MAX,
            },
            max_bytes: match self.node.arena.memory().place().host() {
                _ if !self.settings.push_delay.is_zero() => DELAYED_PIECE_BYTES,
                Some(_) => MAX_PIECE_BYTES,
                None => MAX_GPU_PIECE_BYTES,
            },
        }
    }

    fn report(&self, ticket: &Ticket, receipt: &Receipt, computed: Instant) -> Delivered {
        let exposed = exposed(receipt.first_post, receipt.elapsed, computed);
        let hidden = receipt.elapsed.saturating_sub(exposed);
        self.node.handoffs.count_delivered(hidden, exposed);
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        links.observe(Receiver::of(ticket), receipt.bytes, receipt.elapsed, exposed);
        links.seen().iter().for_each(|speed| self.node.handoffs.set_link_speed(*speed));
        Delivered {
            bytes: receipt.bytes,
            blocks: receipt.blocks,
            descriptors: receipt.descriptors,
            transfer_ms: ms(receipt.elapsed),
            post_ms: ms(receipt.post),
            hidden_ms: ms(hidden),
            exposed_ms: ms(exposed),
            spans: Vec::new(),
            handoff_id: ticket.handoff_id.clone(),
        }
    }
}

/// Of a transfer that began at `first_post` and took `elapsed`, what came after the computation's end.
fn exposed(first_post: Instant, elapsed: Duration, computed: Instant) -> Duration {
    (first_post + elapsed).saturating_duration_since(computed.max(first_post))
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// An open hand-off.
struct Pushing<'a> {
    sender: &'a Sender<'a>,
    ticket: &'a Ticket,
    outgoing: Outgoing,
    /// Blocks of the prompt in front of the grant's.
    held: usize,
    /// `None` before the blocks are known.
    manifest: Option<Manifest>,
    post: Option<Post>,
    trace: &'a mut Trace,
}

/// The `kv.post` span, which is open in the trace.
struct Post {
    context: TraceContext,
    start: Instant,
    /// The first piece was queued. The span ends here: it stands for the beginning of the copy, which is `kv.transfer`.
    end: Instant,
    last: Piece,
}

impl Pushing<'_> {
    /// Queues a piece, and hashes it beside that: each finds the bytes in the cache of the other.
    async fn push(&mut self, piece: Piece, lease: &Arc<KvLease>, parent: TraceContext) -> Result<(), Failed> {
        if !self.sender.settings.push_delay.is_zero() {
            tokio::time::sleep(self.sender.settings.push_delay).await;
        }
        let start = clock::now();
        let post = self.post.take();
        let context = match &post {
            Some(post) => post.context,
            None => self.trace.open("kv.post", Kind::Producer, parent, start),
        };
        let blocks = lease.blocks().get(piece.blocks.clone()).ok_or_else(|| broken("the lease is too short"))?;
        let first = index(piece.blocks.start - self.held);
        let hashing = self.hash(&piece, lease)?;
        self.outgoing.push_units(piece.units.clone(), first, blocks, lease.clone()).await?;
        let queued = clock::now();
        self.manifest = Some(hashing.await.map_err(|error| broken(format!("hashing failed: {error}")))?);
        self.trace.event(
            "layer_group.posted",
            queued,
            [
                ("tandem.kv.blocks", blocks.len().into()),
                ("tandem.kv.first_unit", i64::from(piece.units.start).into()),
                ("tandem.kv.units", piece.units.len().into()),
            ],
        );
        let (start, end) = post.map_or((start, queued), |post| (post.start, post.end));
        self.post = Some(Post { context, start, end, last: piece });
        Ok(())
    }

    /// Hashes a piece where blocking is allowed. The lease keeps the blocks meanwhile, whoever else lets go.
    fn hash(&mut self, piece: &Piece, lease: &Arc<KvLease>) -> Result<Hashing<Manifest>, Failed> {
        let (arena, units) = (self.sender.node.arena.clone(), self.ticket.units.clamp(1, u8::MAX.into()) as u8);
        let granted = lease.blocks().get(self.held..self.held + self.ticket.blocks as usize);
        let granted = granted.ok_or_else(|| broken("the lease is shorter than the prompt"))?;
        let mut manifest = self.manifest.take().unwrap_or_else(|| Manifest::new(arena, granted.to_vec(), units));
        let blocks = index(piece.blocks.start - self.held)..index(piece.blocks.end - self.held);
        let (units, lease) = (piece.units.clone(), lease.clone());
        let bytes = piece.blocks.len() * self.sender.node.arena.block_bytes();
        Ok(hashing::start(bytes, move || {
            manifest.cover(blocks, units);
            drop(lease);
            manifest
        }))
    }

    /// Counts the piece that was pushed last.
    fn count(&self, plan: &Plan, hidden: bool) {
        let Some(Post { last, .. }) = &self.post else { return };
        let complete = u32::from(last.units.end) == self.ticket.units.max(1);
        let blocks = if complete { last.blocks.len() } else { 0 };
        self.sender.node.handoffs.count_piece(plan.bytes(last), blocks, hidden);
    }

    /// Waits for news of the computation; keeps the receiver's lease alive and hears its refusal meanwhile.
    async fn wait(&mut self, kv: &mut watch::Receiver<Kv>) -> Result<(), Failed> {
        loop {
            let every = self.outgoing.keep_alive_every();
            tokio::select! {
                biased;
                changed = kv.changed() => return changed.map_err(|_| broken("the computation is gone")),
                error = self.outgoing.ended() => return Err(error.into()),
                () = tokio::time::sleep(every) => self.outgoing.keep_alive().await?,
            }
        }
    }

    /// Everything was pushed.
    async fn seal(mut self, first: First, sequence_hashes: Vec<SequenceHash>) -> Result<Receipt, Failed> {
        let (Some(manifest), Some(post)) = (self.manifest.take(), self.post.take()) else {
            return Err(broken("a seal without a push"));
        };
        let prompt_tokens = index(self.sender.request.prompt.len());
        let seal = Seal {
            compatibility_digest: self.sender.node.engine.spec().compatibility_digest,
            handoff_id: self.ticket.handoff_id.clone(),
            prefill_incarnation: self.ticket.prefill_incarnation,
            decode_incarnation: self.ticket.decode_incarnation,
            prompt_tokens,
            sequence_hashes: SequenceHash::all_to_wire(&sequence_hashes),
            // Every piece was covered: nothing is left to hash.
            checksums: manifest.finish(),
            first_token: first.token,
            sampler_position: prompt_tokens + 1,
            traceparent: post.context.to_string(),
            first_post_unix_ns: clock().unix_ns(post.start),
            computed_unix_ns: clock().unix_ns(first.at),
        };
        let receipt = self.outgoing.seal(seal).await?;
        let exposed = exposed(receipt.first_post, receipt.elapsed, first.at);
        self.trace.attr("tandem.kv.blocks", receipt.blocks);
        self.trace.attr("tandem.kv.blocks_reused", self.held);
        self.trace.attr("tandem.kv.bytes", receipt.bytes);
        self.trace.attr("tandem.kv.descriptors", receipt.descriptors);
        let transport = self.ticket.transport.as_ref();
        self.trace.attr("tandem.kv.transport", transport.map_or("", |transport| &transport.name));
        self.trace.attr("tandem.kv.post_ms", ms(receipt.post));
        self.trace.attr("tandem.kv.hidden_ms", ms(receipt.elapsed.saturating_sub(exposed)));
        self.trace.attr("tandem.kv.exposed_ms", ms(exposed));
        self.trace.close(post.end);
        Ok(receipt)
    }
}

/// A block's index on the wire: an arena has fewer than 2³² blocks.
fn index(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

fn broken(message: impl Into<String>) -> Failed {
    Failed::Here(Error::new(ErrorKind::Internal, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_after_the_computation_is_exposed() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let ms = Duration::from_millis;
        assert_eq!(exposed(at(10), ms(100), at(90)), ms(20));
        assert_eq!(exposed(at(10), ms(100), at(5)), ms(100), "all of it");
        assert_eq!(exposed(at(10), ms(100), at(200)), ms(0), "none of it");
    }
}
