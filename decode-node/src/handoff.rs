//! Joins engine and KV transport on the receiving side; the two do not know each other.
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tandem_engine::KvLease;
use tandem_kvtransfer::{Expected, Grant, Held, Incoming, Landed, Verified};
use tandem_node::{CheckedRequest, Node, Trace};
use tandem_proto::v1::{Seal, Ticket};
use tandem_proto::{Error, ErrorKind, HandoffId, Incarnation, TraceContext, v1};
use tandem_telemetry::{Value, clock};

/// Blocks at the head of the prompt that `lease` shares with the prefix cache: they were computed or verified here, do
/// not travel, and are never written.
pub fn held_blocks(node: &Node, lease: &KvLease) -> usize {
    lease.cached_tokens() / node.engine.spec().block_tokens
}

/// Who fills a prompt's blocks, and how.
pub struct Terms {
    /// Who sends.
    pub prefill: Incarnation,
    /// Build id of the transport, as the router chose it for the two nodes.
    pub transport: String,
    /// Longest silence of the sender.
    pub lease: Duration,
}

/// Lets another node fill those of the prompt's blocks in `lease` that are not held already. They return to the pool
/// when the request and every writer have let go of them.
///
/// # Errors
/// `Overloaded` when too many hand-offs are out, `Incompatible` for a transport that this node does not have.
pub fn grant(node: &Node, request: &CheckedRequest, terms: &Terms, lease: &Arc<KvLease>) -> Result<Incoming, Error> {
    let (held, hashes) = (held_blocks(node, lease), request.hashes(node.engine.spec()));
    let missing = lease.blocks().get(held..hashes.len());
    let missing = missing.ok_or_else(|| internal("the lease is shorter than the prompt"))?;
    let last_held = held.checked_sub(1).and_then(|last| hashes.get(last)).copied();
    let grant = Grant {
        handoff: HandoffId::random(&mut rand::rng()),
        prefill_incarnation: terms.prefill,
        decode_incarnation: node.incarnation(),
        compatibility_digest: node.engine.spec().compatibility_digest,
        blocks: missing.to_vec(),
        units: node.arena.units(),
        held: Held { blocks: u32::try_from(held).unwrap_or(u32::MAX), hash: last_held },
        owner: lease.clone(),
        lease: terms.lease.min(request.deadline.saturating_duration_since(clock::now())),
    };
    Ok(node.transport.accept(&terms.transport, grant)?)
}

/// Verified KV of a prompt.
pub struct Received {
    /// What arrived.
    pub verified: Verified,
    /// When the copy began, hidden part included.
    pub start: Instant,
    /// When the prompt was computed: what comes after it is exposed.
    pub computed: Instant,
    /// Blocks of the prompt that did not travel.
    pub held_blocks: u32,
    /// Name of the transport by which the others came.
    pub transport: String,
}

/// Waits for the KV, verifies it, and tells the open `kv.transfer` phase of `trace` about it. `granted` is when the
/// ticket was made.
///
/// # Errors
/// `Corrupt` or a refusal for KV that is not the prompt's, `Unavailable` when it does not come.
pub async fn receive(
    node: &Node,
    request: &CheckedRequest,
    incoming: Incoming,
    granted: Instant,
    trace: &mut Trace,
) -> Result<Received, Error> {
    let prompt_tokens = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX);
    let Ticket { held_blocks, transport, .. } = incoming.ticket();
    let transport = transport.map(|transport| transport.name).unwrap_or_default();
    let sequence_hashes = request.hashes(node.engine.spec()).split_off(held_blocks as usize);
    let verified = incoming.verified(Expected { prompt_tokens, sequence_hashes }).await?;
    node.handoffs.reused_blocks.fetch_add(held_blocks.into(), Relaxed);
    check_seal(&verified.seal, prompt_tokens, node.engine.spec().vocab_size)?;
    let start = copy_start(&verified, granted);
    let computed = computed(&verified, start);
    let received = Received { verified, start, computed, held_blocks, transport };
    let parent = received.verified.seal.traceparent.parse::<TraceContext>();
    // The seal's word is taken for the trace only within the request's own trace.
    if let Some(parent) = parent.ok().filter(|parent| parent.trace_id == request.parent.trace_id) {
        trace.reparent(parent, start);
    }
    trace.attr("tandem.kv.bytes", received.verified.bytes);
    trace.attr("tandem.kv.blocks", received.verified.blocks);
    trace.attr("tandem.kv.blocks_reused", held_blocks);
    trace.attr("tandem.kv.hidden_ms", ms(received.hidden()));
    trace.attr("tandem.kv.exposed_ms", ms(received.exposed()));
    trace.attr("tandem.kv.gbps", received.gbps());
    trace.attr("tandem.kv.transport", received.transport.as_str());
    trace.attr("tandem.kv.verify_ms", ms(received.verify()));
    for Landed { units: (first, count), blocks, bytes, at } in &received.verified.landed {
        let landed = [
            ("tandem.kv.blocks", Value::from(*blocks)),
            ("tandem.kv.bytes", Value::from(*bytes)),
            ("tandem.kv.first_unit", Value::from(u32::from(*first))),
            ("tandem.kv.units", Value::from(u32::from(*count))),
        ];
        trace.event("layer_group.landed", *at, landed);
    }
    Ok(received)
}

impl Received {
    /// First post to last byte.
    pub fn copy(&self) -> Duration {
        self.verified.last_arrival.saturating_duration_since(self.start)
    }

    /// Last byte to verdict.
    pub fn verify(&self) -> Duration {
        self.verified.verified_at.saturating_duration_since(self.verified.last_arrival)
    }

    /// The part of the copy that the prompt's computation hid.
    pub fn hidden(&self) -> Duration {
        self.computed.min(self.verified.verified_at).saturating_duration_since(self.start)
    }

    /// End of the computation to verdict.
    pub fn exposed(&self) -> Duration {
        self.verified.verified_at.saturating_duration_since(self.computed.max(self.start))
    }

    /// 10⁹ bytes a second, while bytes were moving.
    pub fn gbps(&self) -> f64 {
        self.verified.bytes as f64 / self.verified.copying.as_nanos().max(1) as f64
    }

    /// What the router is told; `span` is that of the copy.
    pub fn event(&self, span: TraceContext) -> v1::Verified {
        v1::Verified {
            bytes: self.verified.bytes,
            blocks: self.verified.blocks,
            descriptors: self.verified.descriptors,
            transfer_ms: ms(self.copy()),
            verify_ms: ms(self.verify()),
            held_blocks: self.held_blocks,
            copying_ms: ms(self.verified.copying),
            transport: self.transport.clone(),
            span_id: span.span_id.to_vec(),
        }
    }
}

/// Two hosts' clocks, each related to the router's, differ by less.
const CLOCKS: Duration = Duration::from_millis(20);

/// The sender says when it posted the first range, by the router's clock as it knows it. It cannot have been before the
/// grant or after the arrival: a little is the clocks' difference, and for one that is far off the arrival counts.
fn copy_start(verified: &Verified, granted: Instant) -> Instant {
    let posted = clock().instant(verified.seal.first_post_unix_ns);
    within(posted, granted, verified.first_arrival).unwrap_or(verified.first_arrival)
}

/// The sender says when it had computed the prompt, too. A clock that is far off makes all of the copy exposed.
fn computed(verified: &Verified, start: Instant) -> Instant {
    within(clock().instant(verified.seal.computed_unix_ns), start, verified.verified_at).unwrap_or(start)
}

/// The time between these two that is meant by one which may be a little beside them.
fn within(at: Option<Instant>, earliest: Instant, latest: Instant) -> Option<Instant> {
    at.filter(|at| *at + CLOCKS >= earliest && *at <= latest + CLOCKS).map(|at| at.max(earliest).min(latest))
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// What the transport's checks leave open: the parts of the seal that are about tokens.
fn check_seal(seal: &Seal, prompt_tokens: u32, vocab_size: usize) -> Result<(), Error> {
    let corrupt = |message: String| Err(Error::new(ErrorKind::Corrupt, message));
    if seal.first_token as usize >= vocab_size {
        return corrupt(format!("the seal's first token {} is outside the vocabulary", seal.first_token));
    }
    if Some(seal.sampler_position) != prompt_tokens.checked_add(1) {
        let position = seal.sampler_position;
        return corrupt(format!("the seal's sampler position is {position} after a prompt of {prompt_tokens}"));
    }
    Ok(())
}

fn internal(message: &str) -> Error {
    Error::new(ErrorKind::Internal, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seal_about_other_tokens_is_corrupt() {
        let seal = |first_token, sampler_position| Seal { first_token, sampler_position, ..Seal::default() };
        assert!(check_seal(&seal(5, 11), 10, 100).is_ok());
        assert_eq!(check_seal(&seal(100, 11), 10, 100).unwrap_err().kind, ErrorKind::Corrupt);
        assert_eq!(check_seal(&seal(5, 12), 10, 100).unwrap_err().kind, ErrorKind::Corrupt);
        assert_eq!(check_seal(&seal(5, 0), u32::MAX, 100).unwrap_err().kind, ErrorKind::Corrupt);
    }

    #[test]
    fn a_foreign_clock_does_not_stretch_the_copy() {
        let granted = Instant::now();
        let arrived = granted + Duration::from_millis(5);
        let verified = |first_post_unix_ns| Verified {
            seal: Seal { first_post_unix_ns, ..Seal::default() },
            bytes: 1,
            blocks: 1,
            descriptors: 1,
            first_arrival: arrived,
            last_arrival: arrived,
            copying: Duration::ZERO,
            landed: Vec::new(),
            verified_at: arrived,
        };
        let posted = granted + Duration::from_millis(2);
        assert_eq!(copy_start(&verified(clock().unix_ns(posted)), granted), posted);
        let a_little_early = granted - Duration::from_millis(1);
        assert_eq!(copy_start(&verified(clock().unix_ns(a_little_early)), granted), granted);
        assert_eq!(copy_start(&verified(0), granted), arrived);
        assert_eq!(copy_start(&verified(u64::MAX), granted), arrived);
    }
}
