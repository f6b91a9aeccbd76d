//! The table's state machine: entries, bookings, verdicts, expiry. Synchronous; the lock around it is in [`super`].
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use tandem_proto::{DEFAULT_BLOCK_TOKENS, Error, ErrorKind, v1};

use super::breaker::{Breaker, Settings};
use super::fence::Fence;
use super::{Breakers, MAX_NODES, Node, Totals};
use crate::select::{self, Candidate, Need, NoPair, NodeView, Role, Wish, Work};

/// Work booked on a node. It counts until the node's next report, which includes it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    pub session: u64,
    epoch: u64,
    work: Work,
    /// The breaker's one request while it is half-open; until the verdict.
    probe: bool,
}

#[derive(Debug)]
pub(super) struct Table {
    entries: BTreeMap<u64, Entry>,
    last_session: u64,
    turn: usize,
    /// When [`Table::expire`] was last called.
    watched: Option<Instant>,
    fence: Fence,
    breakers: Settings,
    /// Breakers that opened, of prefill and of decode nodes.
    opened: [u64; 2],
}

#[derive(Debug)]
struct Entry {
    node: Arc<Node>,
    load: v1::Load,
    routed: Work,
    /// Reports taken so far.
    epoch: u64,
    heard: Instant,
    draining: bool,
    breaker: Breaker,
}

impl Table {
    pub fn new(breakers: Settings) -> Self {
        let (entries, fence) = (BTreeMap::new(), Fence::default());
        Self { entries, last_session: 0, turn: 0, watched: None, fence, breakers, opened: [0; 2] }
    }

    pub fn insert(&mut self, node: impl FnOnce(u64) -> Node, now: Instant) -> Result<Arc<Node>, Error> {
        let node = Arc::new(node(self.last_session + 1));
        self.same_block_size(&node.info)?;
        let incarnation = node.incarnation();
        let twin = self.entries.values().find(|entry| entry.node.info.node_id == node.info.node_id);
        let twin = twin.map(|entry| (entry.node.session, entry.node.incarnation()));
        match twin {
            _ if self.fence.holds(incarnation) => return Err(declared_dead(&node)),
            Some((session, same)) if same == incarnation => {
                // Its stream is lost, and this side had not seen it.
                self.remove(session, "its stream was lost");
                return Err(declared_dead(&node));
            }
            Some((session, _)) => self.remove(session, "it registered again"),
            None if self.entries.len() >= MAX_NODES => {
                return Err(Error::new(ErrorKind::Overloaded, format!("the router holds {MAX_NODES} nodes already")));
            }
            None => {}
        }
        self.last_session = node.session;
        let load = v1::Load { free_blocks: node.info.total_blocks, ..v1::Load::default() };
        let routed = Work::default();
        let breaker = Breaker::new(self.breakers);
        let entry = Entry { node: Arc::clone(&node), load, routed, epoch: 0, heard: now, draining: false, breaker };
        self.entries.insert(node.session, entry);
        Ok(node)
    }

    /// A node of another block size would never be part of a pair: say so now, and not at each request.
    fn same_block_size(&self, info: &v1::Register) -> Result<(), Error> {
        let differs = |other: &&v1::Register| other.node_id != info.node_id && other.block_tokens != info.block_tokens;
        let Some(other) = self.entries.values().map(|entry| &entry.node.info).find(differs) else { return Ok(()) };
        let why = format!(
            "node `{}`: blocks of {} tokens, node `{}` has {}: start all nodes with the same --block-size",
            info.node_id, info.block_tokens, other.node_id, other.block_tokens
        );
        Err(Error::new(ErrorKind::Incompatible, why))
    }

    /// Tokens of a block, on every node.
    pub fn block_tokens(&self) -> u32 {
        self.entries.values().next().map_or(DEFAULT_BLOCK_TOKENS as u32, |entry| entry.node.info.block_tokens)
    }

    pub fn report(&mut self, session: u64, load: &v1::Load, now: Instant) {
        if let Some(entry) = self.entries.get_mut(&session) {
            let free_blocks = load.free_blocks.min(entry.node.info.total_blocks);
            entry.load = v1::Load { free_blocks, ..*load };
            entry.routed = Work::default();
            entry.epoch += 1;
            entry.heard = now;
        }
    }

    pub fn draining(&mut self, session: u64, now: Instant) {
        if let Some(entry) = self.entries.get_mut(&session) {
            entry.draining = true;
            entry.heard = now;
        }
    }

    /// The node's death: its incarnation does not come back.
    pub fn remove(&mut self, session: u64, why: &str) {
        if let Some(entry) = self.entries.remove(&session) {
            self.fence.declare(entry.node.incarnation());
            entry.node.end(why);
        }
    }

    /// The node's stream ended. A draining node has said so beforehand and its calls end by themselves: their last
    /// events may still be on the way on another connection, so they are not told of a death.
    pub fn leave(&mut self, session: u64, why: &str) {
        match self.entries.get(&session) {
            Some(entry) if entry.draining => {
                tracing::info!(node = entry.node.info.node_id, incarnation = %entry.node.incarnation(), "node drained");
                self.entries.remove(&session);
            }
            _ => self.remove(session, why),
        }
    }

    pub fn clear(&mut self, why: &str) {
        std::mem::take(&mut self.entries).into_values().for_each(|entry| entry.node.end(why));
    }

    /// Whether any was silent for too long.
    /// Time in which nobody called this does not count as silence: then the router itself stood still, and what its nodes
    /// have said meanwhile waits in its sockets.
    pub fn expire(&mut self, now: Instant, lease: Duration) -> bool {
        let unwatched = now.saturating_duration_since(self.watched.replace(now).unwrap_or(now));
        if unwatched > lease / 2 {
            tracing::warn!(
                stalled_ms = unwatched.as_millis() as u64,
                "the router stood still; its nodes have that time"
            );
            self.entries.values_mut().for_each(|entry| entry.heard = now.min(entry.heard + unwatched));
        }
        let silent = |entry: &Entry| now.saturating_duration_since(entry.heard) > lease;
        let sessions: Vec<u64> = self.entries.iter().filter(|(_, e)| silent(e)).map(|(session, _)| *session).collect();
        for session in &sessions {
            self.remove(*session, &format!("it was silent for {} ms", lease.as_millis()));
        }
        !sessions.is_empty()
    }

    #[expect(clippy::type_complexity, reason = "the parts of one Route, which the caller joins to the table's handle")]
    pub fn route(
        &mut self,
        need: &Need,
        wish: &Wish,
        now: Instant,
    ) -> Result<(Arc<Node>, Arc<Node>, Vec<Candidate>, [Share; 2]), NoPair> {
        self.turn = self.turn.wrapping_add(1);
        let candidates = select::select(&self.views(now), need, wish, self.turn)?;
        let (prefill_session, decode_session) = (candidates[0].prefill, candidates[0].decode);
        let prefill_work = Work { requests: 1, tokens: u64::from(need.prompt_tokens), blocks: need.prompt_blocks() };
        let decode_work = Work { requests: 1, tokens: 0, blocks: need.total_blocks() };
        let (prefill, prefill_share) = self.book(prefill_session, prefill_work, now)?;
        let (decode, decode_share) = self.book(decode_session, decode_work, now)?;
        Ok((prefill, decode, candidates, [prefill_share, decode_share]))
    }

    fn book(&mut self, session: u64, work: Work, now: Instant) -> Result<(Arc<Node>, Share), NoPair> {
        let entry = self.entries.get_mut(&session).ok_or(NoPair::Incompatible)?;
        entry.routed.requests += work.requests;
        entry.routed.tokens += work.tokens;
        entry.routed.blocks = entry.routed.blocks.saturating_add(work.blocks);
        let probe = entry.breaker.begin(now);
        Ok((Arc::clone(&entry.node), Share { session, epoch: entry.epoch, work, probe }))
    }

    /// The node did its part for this request.
    pub fn succeeded(&mut self, share: &mut Share) {
        share.probe = false;
        if let Some(entry) = self.entries.get_mut(&share.session) {
            entry.breaker.succeeded();
        }
    }

    /// The node failed this request.
    pub fn failed(&mut self, share: &mut Share, now: Instant) {
        let probe = std::mem::take(&mut share.probe);
        let Some(entry) = self.entries.get_mut(&share.session) else { return };
        if entry.breaker.failed(probe, now) {
            tracing::warn!(node = entry.node.info.node_id, "it failed requests in a row: others are tried first");
            self.opened[entry.node.role as usize] += 1;
        }
    }

    /// Takes bookings back that no report has replaced yet, and probes that had no verdict.
    pub fn unbook(&mut self, shares: &[Share]) {
        for share in shares {
            if let Some(entry) = self.entries.get_mut(&share.session).filter(|_| share.probe) {
                entry.breaker.unproven();
            }
            if let Some(entry) = self.entries.get_mut(&share.session).filter(|entry| entry.epoch == share.epoch) {
                let routed = &mut entry.routed;
                routed.requests = routed.requests.saturating_sub(share.work.requests);
                routed.tokens = routed.tokens.saturating_sub(share.work.tokens);
                routed.blocks = routed.blocks.saturating_sub(share.work.blocks);
            }
        }
    }

    pub fn has_pair(&self, now: Instant) -> bool {
        let views = self.views(now);
        let of = |role| views.iter().filter(move |view| view.role == role && !view.draining);
        of(Role::Prefill).any(|prefill| of(Role::Decode).any(|decode| select::compatible(prefill, decode)))
    }

    pub fn totals(&self) -> Totals {
        let none = Totals { block_tokens: self.block_tokens(), ..Totals::default() };
        self.entries.values().fold(none, |mut totals, entry| {
            totals.waiting += u64::from(entry.load.waiting);
            match entry.node.role {
                Role::Prefill => totals.prefill_nodes += 1,
                Role::Decode => {
                    totals.decode_nodes += 1;
                    totals.running += u64::from(entry.load.running);
                    totals.free_blocks += u64::from(entry.load.free_blocks);
                    totals.total_blocks += u64::from(entry.node.info.total_blocks);
                }
            }
            totals
        })
    }

    pub fn breakers(&self, now: Instant) -> Breakers {
        let of = |entry: &Entry| (entry.node.role, entry.node.info.node_id.clone(), entry.breaker.circuit(now));
        Breakers { nodes: self.entries.values().map(of).collect(), opened: self.opened }
    }

    pub fn json(&self, now: Instant) -> serde_json::Value {
        let mut entries: Vec<&Entry> = self.entries.values().collect();
        entries.sort_by(|a, b| a.node.info.node_id.cmp(&b.node.info.node_id));
        entries.into_iter().map(|entry| entry.json(now)).collect()
    }

    fn views(&self, now: Instant) -> Vec<NodeView> {
        self.entries.values().map(|entry| entry.view(now)).collect()
    }
}

fn declared_dead(node: &Node) -> Error {
    let message = format!("node `{}`: this incarnation ({}) was declared dead", node.info.node_id, node.incarnation());
    Error::new(ErrorKind::DeclaredDead, message)
}

impl Entry {
    fn view(&self, now: Instant) -> NodeView {
        let info = &self.node.info;
        let transport = info.transport.clone().unwrap_or_default();
        NodeView {
            session: self.node.session,
            node_id: info.node_id.clone(),
            role: self.node.role,
            compatibility_digest: info.compatibility_digest,
            transport: (transport.backend, transport.build_id),
            total_blocks: info.total_blocks,
            free_blocks: self.load.free_blocks,
            max_context_tokens: info.max_context_tokens,
            max_running: info.max_running,
            draining: self.draining,
            shut: !self.breaker.admits(now),
            reported: Work {
                requests: self.load.running.saturating_add(self.load.waiting),
                tokens: self.load.queued_tokens,
                blocks: 0,
            },
            routed: self.routed,
        }
    }

    fn json(&self, now: Instant) -> serde_json::Value {
        let info = &self.node.info;
        json!({
            "id": info.node_id,
            "role": self.node.role.as_str(),
            "incarnation": self.node.incarnation().to_string(),
            "endpoint": info.endpoint,
            "transport": info.transport.as_ref().map_or("", |transport| &transport.name),
            "transport_build": info.transport.as_ref().map_or("", |transport| &transport.build_id),
            "compatibility_digest": format!("{:016x}", info.compatibility_digest),
            "model": info.model_name,
            "draining": self.draining,
            "breaker": self.breaker.circuit(now).as_str(),
            "free_blocks": self.load.free_blocks,
            "total_blocks": info.total_blocks,
            "block_tokens": info.block_tokens,
            "running": self.load.running,
            "waiting": self.load.waiting,
            "queued_tokens": self.load.queued_tokens,
        })
    }
}
