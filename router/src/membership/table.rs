//! The table's state machine: who is there, bookings, verdicts, expiry, and the nodes' cached blocks. Synchronous; the
//! lock around it, and all that it logs, is in [`super::table_lock`]. What is known of one node is [`super::entry`]'s.
//! Long because it is all that happens under the one lock; what can be decided without it is elsewhere.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem_proto::{DEFAULT_BLOCK_TOKENS, Error, ErrorKind, Life, SequenceHash, v1};

use super::answers::Answers;
use super::booking::{BookingId, Stage};
use super::breaker::{self, Breaker};
use super::entry::NodeEntry;
use super::fence::Fence;
use super::node_capacity::{BlockDemand, ClusterCapacity, Room};
use super::notice::Notice;
use super::now::{ClusterNow, Departed, Departures};
use super::{Accepts, Breakers, DEATHS, Death, MAX_NODES, Node, NotYet, Totals};
use crate::capacity::{Ahead, Demand};
use crate::index::{CacheChanges, Gap, IndexTotals, PrefixIndex};
use crate::select::calibrate::Links;
use crate::select::numerics::{self, Numerics};
use crate::select::ways::{self, Apart, Fallback, Fallbacks, Ways};
use crate::select::{self, Candidate, Cluster, LocalPrefill, NoPair, NodeView, Plan, Role, Wish, Work};

/// A plan with its work booked: what becomes a [`super::Route`].
#[derive(Debug)]
pub(super) struct Booked {
    pub prefill: Option<(Arc<Node>, BookingId)>,
    pub decode: (Arc<Node>, BookingId),
    /// The chosen one first.
    pub candidates: Vec<Candidate>,
    /// Pairs that are none.
    pub apart: Arc<[Apart]>,
}

#[derive(Debug)]
pub(super) struct Table {
    entries: BTreeMap<u64, NodeEntry>,
    /// What the choice sees of each entry, in the same order: by session.
    views: Vec<NodeView>,
    links: Links,
    ways: Ways,
    pub(super) answers: Answers,
    last_session: u64,
    /// Requests routed so far, from a number on: the choice's only chance, so that a run can be repeated.
    turn: u64,
    /// When [`Table::expire`] was last called.
    watched: Option<Instant>,
    fence: Fence,
    breakers: breaker::Settings,
    /// Breakers that opened, of prefill and of decode nodes.
    opened: [u64; 2],
    /// By [`Death`].
    deaths: [u64; DEATHS.len()],
    /// Of all nodes there were, as far as they were reported.
    preemptions: u64,
    departures: Departures,
    /// Of the nodes in `entries`, by session.
    index: PrefixIndex,
    /// Silence after which a node is tried last.
    suspicion: Duration,
    /// What is left to do once the lock is released.
    notices: Vec<Notice>,
}

impl Table {
    /// Nodes that were silent for half of `lease` are suspect: tried last.
    pub fn new(breakers: breaker::Settings, index: PrefixIndex, lease: Duration) -> Self {
        Self {
            suspicion: lease / 2,
            entries: BTreeMap::new(),
            views: Vec::new(),
            answers: Answers::default(),
            links: Links::default(),
            ways: Ways::default(),
            last_session: 0,
            turn: 0,
            watched: None,
            fence: Fence::default(),
            breakers,
            opened: [0; 2],
            deaths: [0; DEATHS.len()],
            preemptions: 0,
            departures: Departures::default(),
            index,
            notices: Vec::new(),
        }
    }

    pub fn take_notices(&mut self) -> Vec<Notice> {
        std::mem::take(&mut self.notices)
    }

    /// For nodes that register from now on.
    pub fn set_breakers(&mut self, breakers: breaker::Settings) {
        self.breakers = breakers;
    }

    /// Before requests come.
    pub fn draw_from(&mut self, turn: u64) {
        self.turn = turn;
    }

    /// Before nodes register.
    pub fn set_index(&mut self, index: PrefixIndex) {
        self.index = index;
    }

    /// Whether a node that says this of itself may join now. Changes nothing.
    ///
    /// # Errors
    /// Why not.
    pub fn admits(&mut self, info: &v1::Register, now: Instant) -> Result<(), Error> {
        self.same_block_size(info)?;
        self.same_numerics(info)?;
        if self.fence.holds(Life(info.life)) {
            return Err(declared_dead(info));
        }
        let twin = self.entries.values().find(|entry| entry.node.info.node_id == info.node_id);
        match twin {
            Some(twin) => twin.yields_to(info, now, self.suspicion),
            None if self.entries.len() >= MAX_NODES => {
                Err(Error::new(ErrorKind::Overloaded, format!("the router holds {MAX_NODES} nodes already")))
            }
            None => Ok(()),
        }
    }

    pub fn insert(&mut self, node: impl FnOnce(u64) -> Node, now: Instant) -> Result<Arc<Node>, Error> {
        let node = Arc::new(node(self.last_session + 1));
        self.admits(&node.info, now)?;
        let twin = self.entries.values().map(|entry| &entry.node).find(|twin| twin.info.node_id == node.info.node_id);
        if let Some(twin) = twin.cloned() {
            if twin.incarnation() == node.incarnation() {
                // Its stream is lost, and this side had not seen it.
                self.remove(twin.session, Death::StreamLost, "its stream was lost", now);
            } else {
                self.remove(twin.session, Death::Replaced, "it registered again", now);
            }
            if twin.life() == node.life() {
                return Err(declared_dead(&node.info));
            }
        }
        self.last_session = node.session;
        let domains = self.ways.enter(node.role, &node.info);
        let entry = NodeEntry::new(Arc::clone(&node), Breaker::new(self.breakers), now);
        // Sessions only grow: the last one stays the last.
        self.views.push(entry.view(domains));
        self.entries.insert(node.session, entry);
        self.look_for_gaps();
        if self.views.last().is_some_and(|view| ways::is_alone(view, &self.views)) {
            let why = self.ways.apart().iter().find(|apart| apart.is_of(&node.info.node_id));
            self.notices.push(Notice::Alone(Arc::clone(&node), why.map(|apart| Arc::clone(&apart.why))));
        }
        Ok(node)
    }

    fn look_for_gaps(&mut self) {
        let infos = self.entries.values().map(|entry| &entry.node.info);
        self.ways.look_for_gaps(self.views.iter().zip(infos));
    }

    fn of(&mut self, session: u64) -> Option<(&mut NodeEntry, &mut NodeView)> {
        let place = self.place(session)?;
        Some((self.entries.get_mut(&session)?, &mut self.views[place]))
    }

    /// Among the views.
    fn place(&self, session: u64) -> Option<usize> {
        self.views.binary_search_by_key(&session, |view| view.session).ok()
    }

    /// Takes the node out, and all that was only of use with it.
    fn take(&mut self, session: u64) -> Option<NodeEntry> {
        let entry = self.entries.remove(&session)?;
        self.index.remove(session);
        if let Some(place) = self.place(session) {
            let domains = self.views.remove(place).domains;
            let emptied = self.ways.leave(session, &domains);
            self.links.remove(session, &emptied);
            self.look_for_gaps();
        }
        Some(entry)
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

    /// Nor would a node of another arithmetic, and an answer must not go on there.
    fn same_numerics(&self, info: &v1::Register) -> Result<(), Error> {
        let mut others = self.entries.values().map(|entry| &entry.node.info).filter(|of| of.node_id != info.node_id);
        let why = others.find_map(|other| numerics::difference(info, other));
        why.map_or(Ok(()), |why| Err(Error::new(ErrorKind::Incompatible, why)))
    }

    /// Tokens of a block, on every node.
    pub fn block_tokens(&self) -> u32 {
        self.entries.values().next().map_or(DEFAULT_BLOCK_TOKENS as u32, |entry| entry.node.info.block_tokens)
    }

    pub fn report(&mut self, session: u64, load: &v1::Load, now: Instant) {
        if let Some((entry, view)) = self.of(session) {
            let preempted = entry.report(view, load, now);
            self.preemptions += preempted;
        }
    }

    /// Takes what a node tells of its cache. What a node that is gone told last is ignored.
    pub fn kv_events(&mut self, session: u64, changes: &CacheChanges, now: Instant) -> Result<(), Gap> {
        let Some(entry) = self.entries.get_mut(&session) else { return Ok(()) };
        entry.heard = now;
        self.index.apply(session, changes)
    }

    pub fn draining(&mut self, session: u64, now: Instant) {
        if let Some((entry, view)) = self.of(session) {
            view.draining = true;
            entry.heard = now;
        }
    }

    /// The node's death, as far as this router goes: that life does not come back.
    fn remove(&mut self, session: u64, death: Death, why: &str, now: Instant) {
        if let Some(entry) = self.take(session) {
            self.deaths[death as usize] += 1;
            self.departs(&entry.node, Some(why), now);
            self.fence.declare(entry.node.life());
            self.notices.push(Notice::Gone(entry.node, why.to_owned()));
        }
    }

    fn departs(&mut self, node: &Node, died_of: Option<&str>, at: Instant) {
        let (id, died_of) = (node.info.node_id.clone(), died_of.map(str::to_owned));
        self.departures.add(Departed { id, role: node.role, died_of, at });
    }

    /// The node's stream ended. A draining node has said so beforehand and its calls end by themselves: their last
    /// events may still be on the way on another connection, so they are not told of a death.
    pub fn leave(&mut self, session: u64, why: &str, now: Instant) {
        let draining = self.of(session).is_some_and(|(_, view)| view.draining);
        match draining.then(|| self.take(session)).flatten() {
            Some(NodeEntry { node, .. }) => {
                self.departs(&node, None, now);
                self.notices.push(Notice::Drained(node));
            }
            None => self.remove(session, Death::StreamLost, why, now),
        }
    }

    pub fn clear(&mut self, why: &str) {
        for view in std::mem::take(&mut self.views) {
            self.ways.leave(view.session, &view.domains);
        }
        self.look_for_gaps();
        for (session, entry) in std::mem::take(&mut self.entries) {
            self.index.remove(session);
            self.notices.push(Notice::Gone(entry.node, why.to_owned()));
        }
    }

    /// Whether any was silent for too long.
    /// Time in which this was not called does not count as silence: then the router itself stood still, and what its
    /// nodes have said meanwhile waits in its sockets. Not so after more than a lease. Their own half of it has ended,
    /// and they have registered anew: requests must not look for that one by one.
    pub fn expire(&mut self, now: Instant, lease: Duration) -> bool {
        let unwatched = now.saturating_duration_since(self.watched.replace(now).unwrap_or(now));
        if unwatched > lease / 2 {
            let over = unwatched > lease;
            self.notices.push(Notice::StoodStill { stalled: unwatched, over });
            if !over {
                self.entries.values_mut().for_each(|entry| entry.heard = now.min(entry.heard + unwatched));
            }
        }
        let silent = |entry: &NodeEntry| now.saturating_duration_since(entry.heard) > lease;
        let sessions: Vec<u64> = self.entries.iter().filter(|(_, e)| silent(e)).map(|(session, _)| *session).collect();
        for session in &sessions {
            self.remove(*session, Death::Silent, &format!("it was silent for {} ms", lease.as_millis()), now);
        }
        !sessions.is_empty()
    }

    /// Whether the router has just gone on after it had stood still, and has not looked at its nodes yet.
    pub fn stood_still(&self, now: Instant, lease: Duration) -> bool {
        self.watched.is_some_and(|watched| now.saturating_duration_since(watched) > lease)
    }

    pub fn route(
        &mut self,
        demand: &Demand,
        wish: &Wish,
        settings: &select::Settings,
        now: Instant,
    ) -> Result<Booked, NoPair> {
        let candidates = self.next_candidates(demand, wish, settings, now)?;
        self.book_first(candidates, demand, now)
    }

    /// The same for a request that runs: where there is room, by what it `accepts`.
    pub fn route_again(
        &mut self,
        demand: &Demand,
        wish: &Wish,
        accepts: Accepts,
        settings: &select::Settings,
        now: Instant,
    ) -> Result<Booked, NotYet> {
        let mut candidates = self.next_candidates(demand, wish, settings, now)?;
        let speaks_against = |candidate: &Candidate| (candidate.shut, candidate.avoided);
        let best = candidates.first().ok_or(NoPair::Incompatible)?;
        if !best.is_sound() && !accepts.unsound {
            return Err(NotYet::Unsound);
        }
        let wanted = BlockDemand::of(demand, &Ahead::default(), accepts.node_queue, self.block_tokens());
        let mut equal = candidates.iter().take_while(|other| speaks_against(other) == speaks_against(best));
        match equal.position(|candidate| self.takes_at_once(candidate, &wanted, now)) {
            Some(place) => candidates[..=place].rotate_right(1),
            None if accepts.without_room => {}
            None => return Err(NotYet::NoRoom),
        }
        Ok(self.book_first(candidates, demand, now)?)
    }

    /// For a request whose turn it is.
    fn next_candidates(
        &mut self,
        demand: &Demand,
        wish: &Wish,
        settings: &select::Settings,
        now: Instant,
    ) -> Result<Vec<Candidate>, NoPair> {
        self.turn = self.turn.wrapping_add(1);
        // All nodes compute alike.
        let any = self.entries.values().next().map(|entry| &entry.node.info);
        if let (Some(began), Some(info)) = (&wish.continues, any)
            && !began.are_of(info)
        {
            return Err(NoPair::OtherNumerics { began: began.clone(), now: Numerics::of(info) });
        }
        self.candidates(demand, wish, settings, now)
    }

    /// Whether the nodes of this plan have room for its request now.
    fn takes_at_once(&self, plan: &Candidate, wanted: &BlockDemand, now: Instant) -> bool {
        let node = |session| Some(self.entries.get(&session)?.capacity(&self.views[self.place(session)?], now));
        let Some(decode) = node(plan.decode) else { return false };
        let computes = match plan.prefill {
            None => decode.computes(wanted),
            // It has the prompt.
            Some(_) if plan.kept => true,
            Some(prefill) => node(prefill).is_some_and(|prefill| prefill.prefills(wanted)),
        };
        computes && decode.decodes(wanted)
    }

    fn book_first(&mut self, candidates: Vec<Candidate>, demand: &Demand, now: Instant) -> Result<Booked, NoPair> {
        let best = candidates.first().ok_or(NoPair::Incompatible)?;
        let block_tokens = self.block_tokens();
        let uncached = u64::from(demand.prompt_tokens.saturating_sub(best.cached_tokens));
        // A node that is kept has the prompt.
        let (stage, tokens) = (Stage::computing(best, now), if best.kept { 0 } else { uncached });
        let prefill_work = Work { requests: 1, tokens, blocks: demand.prompt_blocks(block_tokens), ..Work::default() };
        let (context, answers) = (u64::from(demand.prompt_tokens), u64::from(demand.answer_tokens));
        let decode_work = Work { requests: 1, tokens: 0, blocks: demand.usual_blocks(block_tokens), context, answers };
        let (prefill, decode) = match (best.plan(), best.prefill) {
            (Plan::Pair, Some(prefill)) => {
                let prefill = self.book(prefill, prefill_work, stage, now)?;
                (Some(prefill), self.book(best.decode, decode_work, Stage::Awaiting { ms: best.ttft_ms() }, now)?)
            }
            _ => (None, self.book(best.decode, Work { tokens, ..decode_work }, stage, now)?),
        };
        Ok(Booked { prefill, decode, candidates, apart: Arc::clone(self.ways.apart()) })
    }

    /// The plan whose first token would come soonest, without anything booked; `None` where nobody can tell.
    pub fn predict(&mut self, demand: &Demand, settings: &select::Settings, now: Instant) -> Option<Candidate> {
        let candidates = self.candidates(demand, &Wish::default(), settings, now).ok()?;
        select::soonest(&candidates).cloned()
    }

    /// The views as they are at `now`.
    fn refresh(&mut self, now: Instant) {
        let nodes = self.entries.values().zip(&mut self.views);
        nodes.for_each(|(entry, view)| entry.refresh(view, now, self.suspicion));
        self.ways.refresh(now);
    }

    /// What each node holds of the prompt with these blocks.
    fn look_up(&mut self, hashes: &[SequenceHash]) {
        for (session, blocks) in self.index.matches(hashes) {
            if let Some(place) = self.place(session) {
                self.views[place].cached_blocks_of_prompt = blocks;
            }
        }
    }

    /// What is booked on a node that no report of it includes.
    #[cfg(test)]
    pub fn routed_of(&self, session: u64) -> Work {
        self.entries.get(&session).map(|entry| entry.bookings.routed()).unwrap_or_default()
    }

    /// What each node holds of such a prompt, by session.
    #[cfg(test)]
    pub fn cached_of(&mut self, hashes: &[SequenceHash], now: Instant) -> Vec<u32> {
        self.refresh(now);
        self.look_up(hashes);
        self.views.iter().map(|view| view.cached_blocks_of_prompt).collect()
    }

    fn book(&mut self, session: u64, work: Work, stage: Stage, now: Instant) -> Result<(Arc<Node>, BookingId), NoPair> {
        let entry = self.entries.get_mut(&session).ok_or(NoPair::Incompatible)?;
        let number = entry.book(work, stage, now);
        Ok((Arc::clone(&entry.node), BookingId { session, number }))
    }

    /// Lets `change` happen to the number of each of these bookings, in the row of its node, if that is still there.
    pub fn each(&mut self, bookings: impl IntoIterator<Item = BookingId>, change: impl Fn(&mut NodeEntry, u64)) {
        for BookingId { session, number } in bookings {
            if let Some(entry) = self.entries.get_mut(&session) {
                change(entry, number);
            }
        }
    }

    /// Decode has verified the KV that came from `pair` by the way of this domain.
    pub fn handed_off(&mut self, pair: (u64, u64), domain: u32, kv: &v1::Verified) {
        if self.entries.contains_key(&pair.1) {
            self.links.observe(pair, domain, kv.bytes, kv.blocks, kv.copying_ms);
            self.ways.succeeded(pair, domain);
        }
    }

    /// The KV of `pair` did not get there by the way of this domain.
    pub fn handoff_failed(&mut self, pair: (u64, u64), domain: u32, now: Instant) -> Option<Fallback> {
        let (prefill, decode) = (self.place(pair.0)?, self.place(pair.1)?);
        self.ways.failed(&self.views[prefill], &self.views[decode], domain, now)
    }

    /// From which way to which pairs went over.
    pub fn fallbacks(&self) -> Fallbacks {
        self.ways.fallbacks().clone()
    }

    /// The node failed this request.
    pub fn failed(&mut self, BookingId { session, number }: BookingId, now: Instant) {
        let Some(entry) = self.entries.get_mut(&session) else { return };
        if entry.failed(number, now) {
            self.notices.push(Notice::RankedLast(Arc::clone(&entry.node)));
            self.opened[entry.node.role as usize] += 1;
        }
    }

    /// Whether the nodes have room for a request, so that it need not wait on one of them, or only with as many others
    /// as may. Where only decode nodes have room for its prompt, it has room if they are where it would go.
    pub fn has_room(
        &mut self,
        wanted: BlockDemand,
        demand: &Demand,
        settings: &select::Settings,
        now: Instant,
    ) -> bool {
        let mut capacity = ClusterCapacity::new(wanted, settings.local);
        let mut nodes = self.entries.values().zip(&self.views);
        let mut enough = |(entry, view): (&NodeEntry, _)| {
            capacity.tell(view, &entry.capacity(view, now), entry.is_sound(now, self.suspicion))
        };
        let room = if nodes.any(&mut enough) { Room::Yes } else { capacity.answer() };
        match room {
            Room::Yes => true,
            Room::Local => self.would_go_local(&wanted, demand, settings, now),
            Room::No => false,
        }
    }

    /// Whether the choice would now be a decode node that has room for the prompt, too.
    fn would_go_local(
        &mut self,
        wanted: &BlockDemand,
        demand: &Demand,
        settings: &select::Settings,
        now: Instant,
    ) -> bool {
        let told = self.candidates(demand, &Wish::default(), settings, now).unwrap_or_default();
        told.first().is_some_and(|chosen| chosen.plan() == Plan::Local && self.takes_at_once(chosen, wanted, now))
    }

    /// All that could take the request, the choice first.
    fn candidates(
        &mut self,
        demand: &Demand,
        wish: &Wish,
        settings: &select::Settings,
        now: Instant,
    ) -> Result<Vec<Candidate>, NoPair> {
        self.refresh(now);
        self.look_up(&demand.hashes);
        let cluster = Cluster { nodes: &self.views, links: &self.links, ways: &self.ways };
        select::select(&cluster, demand, wish, settings, self.turn)
    }

    pub fn has_pair(&self, local: LocalPrefill) -> bool {
        select::is_served(&self.views, local)
    }

    /// Tokens of prompt and answer for which the largest decode node has KV blocks; nothing while there is none.
    pub fn most_tokens(&self) -> Option<u32> {
        let decodes = self.entries.values().filter(|entry| entry.node.role == Role::Decode);
        let tokens = decodes.map(|entry| {
            let info = &entry.node.info;
            info.total_blocks.saturating_mul(info.block_tokens).min(info.max_context_tokens)
        });
        tokens.max()
    }

    pub fn totals(&self) -> Totals {
        let none = Totals { block_tokens: self.block_tokens(), deaths: self.deaths, ..Totals::default() };
        let none = Totals { preemptions: self.preemptions, ..none };
        self.entries.values().zip(&self.views).fold(none, |mut totals, (entry, view)| {
            let held = entry.bookings.held().requests;
            let beyond = u64::from(held.saturating_sub(view.max_running));
            match entry.node.role {
                Role::Prefill => {
                    totals.prefill_nodes += 1;
                    totals.with_prefill += u64::from(held);
                    totals.beyond_prefill += beyond;
                }
                Role::Decode => {
                    totals.decode_nodes += 1;
                    totals.beyond_decode += beyond;
                    totals.free_blocks += u64::from(entry.load.free_blocks);
                    totals.total_blocks += u64::from(entry.node.info.total_blocks);
                }
            }
            totals
        })
    }

    pub fn breakers(&self, now: Instant) -> Breakers {
        let of =
            |(entry, view): (&NodeEntry, &NodeView)| (view.role, Arc::clone(&view.node_id), entry.breaker.circuit(now));
        Breakers { nodes: self.entries.values().zip(&self.views).map(of).collect(), opened: self.opened }
    }

    /// As people are shown it, the nodes by session.
    pub fn now(&self, at: Instant) -> ClusterNow {
        let now = |(entry, view): (&NodeEntry, &NodeView)| {
            entry.now(view, self.index.blocks_of(view.session), at, self.suspicion)
        };
        let nodes = self.entries.values().zip(&self.views).map(now).collect();
        ClusterNow { at, nodes, links: self.links.all().collect(), departed: self.departures.newest_first() }
    }

    pub fn index(&self) -> IndexTotals {
        self.index.totals()
    }
}

fn declared_dead(info: &v1::Register) -> Error {
    let message = format!("node `{}`: this life ({}) was declared dead", info.node_id, Life(info.life));
    Error::new(ErrorKind::DeclaredDead, message)
}
