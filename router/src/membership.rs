//! The node table: the one map that tasks of the router share. Owns who is there, what each node reported, and what was
//! routed to it since; a node's death is told to its running requests through [`Node::died`]. Time is an argument of
//! everything that depends on it. The gRPC service that fills the table is [`join`]; who gets a request is
//! [`crate::select`]'s matter.
//!
//! A node is dead when its stream ends, when it was silent for the lease, or when another incarnation takes its name.
//! That is a verdict on this router's session with it and on what this router booked there, a *life* of the node: other
//! routers have theirs. A dead life does not come back ([`fence`]), and its calls are refused by the node. A node that
//! fails its requests is alive, but tried last for a while ([`breaker`]). Who waits for room
//! ([`node_capacity`]) learns by [`Capacity::freed`] when there may be some.
mod accepts;
mod answers;
mod booking;
pub mod breaker;
mod entry;
pub mod fence;
mod join;
mod node;
mod node_capacity;
mod node_client;
mod notice;
pub mod now;
pub mod origin;
mod refusals;
mod registration;
mod route;
mod table;
mod table_lock;
mod totals;
mod wire;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tandem_telemetry::clock;

use http::uri::Authority;
use serde_json::json;
use tandem_ports::{JoinGuard, JoinTokens, NodeTls};
use tandem_proto::hash::sequence_hashes;
use tandem_proto::{CacheSalt, Error, SequenceKey, v1};
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use crate::capacity::{Ahead, Capacity, Demand, Predicted};
use crate::index::{CacheChanges, Gap, IndexTotals, MOST_NODES, PrefixIndex};
use crate::select::ways::Fallbacks;
use crate::select::{self, LocalPrefill, NoPair, Wish};
pub use accepts::{Accepts, NotYet};
pub use join::JoinService;
pub use node::Node;
use node_capacity::BlockDemand;
use node_client::Connector;
pub use node_client::NodeClient;
use now::ClusterNow;
use origin::NodeEndpoints;
pub use refusals::Refusals;
pub use route::Route;
use table::{Booked, Table};
use table_lock::TableLock;
pub use totals::{Breakers, DEATHS, Death, Totals};
pub use wire::Unhurried;

/// Nodes at most; the next one is refused.
pub const MAX_NODES: usize = MOST_NODES;
/// Blocks of which it is known who has them cached, where nothing else is said.
pub const DEFAULT_INDEX_BLOCKS: usize = 4_000_000;
/// How often a node reports.
pub const REPORT_INTERVAL: Duration = Duration::from_millis(500);

/// What every node must agree on with this router.
#[derive(Clone, Debug)]
pub struct Expected {
    /// XXH3-64 of the model file.
    pub model_digest: u64,
    /// End-of-sequence token.
    pub eos_token_id: u32,
}

/// Handle to the node table.
#[derive(Clone, Debug)]
pub struct Membership {
    table: Arc<TableLock>,
    /// Nodes came or went.
    changed: Arc<Notify>,
    /// There may be room that there was not.
    freed: Arc<Notify>,
    expected: Expected,
    lease: Duration,
    connector: Connector,
    endpoints: NodeEndpoints,
    /// Who may join.
    strangers: JoinGuard,
    cache_secret: Option<[u8; 32]>,
    refusals: Refusals,
    choice: select::Settings,
}

impl Membership {
    /// An empty table for pairs. Nodes that do not match `expected` are refused.
    pub fn new(expected: Expected, lease: Duration) -> Self {
        let index = PrefixIndex::new(DEFAULT_INDEX_BLOCKS, rand::random());
        let table = Arc::new(TableLock::new(Table::new(breaker::Settings::default(), index, lease)));
        let (connector, choice) = (Connector::default(), select::Settings::default());
        let (changed, freed, strangers) = (Arc::default(), Arc::default(), JoinGuard::default());
        let (endpoints, refusals) = (NodeEndpoints::default(), Refusals::default());
        let cache_secret = None;
        Self { table, changed, freed, expected, lease, connector, endpoints, strangers, cache_secret, refusals, choice }
    }

    /// The same, for nodes that have these tokens: they show one to join, and are shown one by each call.
    pub fn with_join_tokens(self, tokens: Option<&JoinTokens>) -> Self {
        let connector = Connector::Network { tokens: tokens.cloned(), tls: None };
        let cache_secret = tokens.map(|tokens| tokens.derive("tandem cache salts"));
        Self { connector, strangers: JoinGuard::new(tokens), cache_secret, ..self }
    }

    /// The same, for nodes that have certificates, if this router has one.
    pub fn with_node_tls(self, tls: Option<&NodeTls>) -> Self {
        Self { connector: self.connector.within(tls), strangers: self.strangers.within(tls), ..self }
    }

    /// The same, with decode nodes that compute prompts, too.
    pub fn with_local_prefill(self, local: LocalPrefill) -> Self {
        Self { choice: select::Settings { local, ..self.choice }, ..self }
    }

    /// The same, with another rule for the choice of nodes, local prefill included.
    pub fn with_choice(self, choice: select::Settings) -> Self {
        Self { choice, ..self }
    }

    /// The rule by which nodes are chosen.
    pub fn choice(&self) -> &select::Settings {
        &self.choice
    }

    /// An empty table with other settings for the nodes' circuit breakers.
    pub fn with_breakers(self, settings: breaker::Settings) -> Self {
        self.table.with(|table| table.set_breakers(settings));
        self
    }

    /// An empty table that knows who has cached at most so many blocks.
    pub fn with_index_blocks(self, blocks: usize) -> Self {
        self.table.with(|table| table.set_index(PrefixIndex::new(blocks, rand::random())));
        self
    }

    /// The same, with choices that are drawn from here on: routers that know the same of their nodes do not all take
    /// the same one.
    pub fn drawing_from(self, turn: u64) -> Self {
        self.table.with(|table| table.draw_from(turn));
        self
    }

    /// The same, for nodes of this process: `find` gives the services of one that registers, whatever its endpoint is.
    /// For simulations and tests.
    pub fn in_process(self, find: impl Fn(&v1::Register) -> NodeClient + Send + Sync + 'static) -> Self {
        Self { connector: Connector::InProcess(Arc::new(find)), ..self }
    }

    /// Silence after which a node is dead.
    pub fn lease(&self) -> Duration {
        self.lease
    }

    /// The same, which takes these endpoints of nodes that join over a network.
    pub fn with_endpoints(self, endpoints: NodeEndpoints) -> Self {
        Self { endpoints, ..self }
    }

    /// Whether a node that says this of itself, and calls from `peer`, may join now; the address to dial it at.
    ///
    /// # Errors
    /// As [`Self::register`]; `Incompatible` for an endpoint that is another host's.
    pub async fn admits(&self, info: &v1::Register, peer: Option<IpAddr>) -> Result<Authority, Error> {
        let (_, endpoint) = registration::check(info, &self.expected)?;
        self.table.with(|table| table.admits(info, clock::now()))?;
        match (self.endpoints, peer) {
            (NodeEndpoints::Own, Some(peer)) => origin::address(info, &endpoint, peer).await,
            _ => Ok(endpoint),
        }
    }

    /// Enters a node. A node of the same name is replaced, and the last life of the same one: its requests end.
    ///
    /// # Errors
    /// `Incompatible` for a field or digest that is wrong, or for another block size, arithmetic or KV order than the
    /// other nodes'; `DeclaredDead` for a life that was; `Unavailable` for a node that is here by another address
    /// or as another process that is well; `Overloaded` when the table is full.
    pub fn register(&self, info: v1::Register, now: Instant) -> Result<Arc<Node>, Error> {
        let (_, endpoint) = registration::check(&info, &self.expected)?;
        self.register_at(endpoint, info, now)
    }

    /// The same, for a node that is dialled at `endpoint`.
    ///
    /// # Errors
    /// As [`Self::register`].
    fn register_at(&self, endpoint: Authority, info: v1::Register, now: Instant) -> Result<Arc<Node>, Error> {
        let (role, _) = registration::check(&info, &self.expected)?;
        let client = self.connector.client(&info, role, endpoint);
        let node = self.table.with(|table| table.insert(|session| Node::new(session, role, info, client), now));
        self.changed.notify_waiters();
        self.freed.notify_one();
        node
    }

    /// Takes a load report.
    pub fn report(&self, session: u64, load: &v1::Load, now: Instant) {
        self.table.with(|table| table.report(session, load, now));
        self.freed.notify_one();
    }

    /// Takes what a node tells of its cache.
    ///
    /// # Errors
    /// [`Gap`]: the node is to be asked for a snapshot, once.
    pub fn kv_events(&self, session: u64, changes: &CacheChanges, now: Instant) -> Result<(), Gap> {
        self.table.with(|table| table.kv_events(session, changes, now))
    }

    /// The node takes no new work from now on.
    pub fn draining(&self, session: u64, now: Instant) {
        self.table.with(|table| table.draining(session, now));
        self.freed.notify_one();
    }

    /// The stream of this session ended: takes its node out, and ends its requests unless it had drained.
    pub fn leave(&self, session: u64, why: &str) {
        self.table.with(|table| table.leave(session, why, clock::now()));
        self.changed.notify_waiters();
        self.freed.notify_one();
    }

    /// Ends all nodes: their streams close. For the router's own end.
    pub fn close(&self) {
        self.table.with(|table| table.clear("the router is shutting down"));
    }

    /// Ends every node whose last report is older than the lease.
    pub fn expire(&self, now: Instant) {
        let expired = self.table.with(|table| table.expire(now, self.lease));
        self.tell_expired(expired);
    }

    fn tell_expired(&self, expired: bool) {
        if expired {
            self.changed.notify_waiters();
            self.freed.notify_one();
        }
    }

    /// Calls [`Self::expire`] often enough that death is seen within a fiftieth of the lease. Ends never.
    pub async fn watch(self) {
        let mut ticks = tokio::time::interval((self.lease / 50).max(Duration::from_millis(5)));
        loop {
            ticks.tick().await;
            self.expire(clock::now());
        }
    }

    /// Ready when nodes have come or gone since this call. Who waits longest is told first.
    pub fn changed(&self) -> Notified<'_> {
        self.changed.notified()
    }

    /// Picks the nodes for a request and books its work on them.
    ///
    /// # Errors
    /// [`NoPair`].
    pub fn route(&self, demand: &Demand, wish: &Wish, now: Instant) -> Result<Route, NoPair> {
        let booked = self.with_watched(now, |table| table.route(demand, wish, &self.choice, now))?;
        Ok(self.booked(booked))
    }

    /// The same for a request that runs, where there is room: by what it `accepts`. Nothing is booked without nodes.
    ///
    /// # Errors
    /// [`NotYet`].
    pub fn route_again(&self, demand: &Demand, wish: &Wish, accepts: Accepts, now: Instant) -> Result<Route, NotYet> {
        let again = |table: &mut Table| table.route_again(demand, wish, accepts, &self.choice, now);
        Ok(self.booked(self.with_watched(now, again)?))
    }

    /// The table, without the nodes that have given this router up while it stood still: requests wake as early as
    /// [`Self::watch`] does.
    fn with_watched<T>(&self, now: Instant, change: impl FnOnce(&mut Table) -> T) -> T {
        let (expired, result) = self.table.with(|table| {
            let expired = table.stood_still(now, self.lease) && table.expire(now, self.lease);
            (expired, change(table))
        });
        self.tell_expired(expired);
        result
    }

    fn booked(&self, Booked { prefill, decode, candidates, apart }: Booked) -> Route {
        let ((prefill, prefill_booking), (decode, decode_booking)) = (prefill.unzip(), decode);
        let (table, freed) = (Arc::clone(&self.table), Arc::clone(&self.freed));
        Route { prefill, decode, candidates, apart, prefill_booking, decode_booking, table, freed }
    }

    /// How soon the first token of a request would come that was routed now; `None` where no node has measured its
    /// steps, or there are no nodes for it. Books nothing.
    pub fn predict(&self, demand: &Demand, now: Instant) -> Option<Predicted> {
        let soonest = self.table.with(|table| table.predict(demand, &self.choice, now))?;
        let time = |ms: f64| Duration::try_from_secs_f64(ms / 1e3).ok();
        let prefill_ms = soonest.terms.prefill_ms;
        Some(Predicted { wait: time(soonest.ttft_ms() - prefill_ms)?, prefill: time(prefill_ms)? })
    }

    /// What a request needs whose answer may have `max_tokens` and will be as long as answers have been lately. What is
    /// cached of its prompt is left open.
    pub fn demand(&self, prompt_tokens: u32, max_tokens: u32) -> Demand {
        let answer_tokens = self.table.with(|table| table.answers.usual(max_tokens));
        Demand { prompt_tokens, max_tokens, answer_tokens, hashes: Vec::new() }
    }

    /// The same with the names that its prompt's blocks have for requests with this salt.
    pub fn demand_of(&self, prompt: &[u32], max_tokens: u32, salt: CacheSalt) -> Demand {
        let (block_tokens, answer_tokens) =
            self.table.with(|table| (table.block_tokens().max(1) as usize, table.answers.usual(max_tokens)));
        // A node always computes the last token, whose logits give the next one: its block is never all reused.
        let reusable = prompt.len().saturating_sub(1) / block_tokens * block_tokens;
        let hashes = sequence_hashes(self.sequence_key(salt), &prompt[..reusable], block_tokens);
        let prompt_tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        Demand { prompt_tokens, max_tokens, answer_tokens, hashes }
    }

    fn sequence_key(&self, cache_salt: CacheSalt) -> SequenceKey {
        SequenceKey::new(self.expected.model_digest, cache_salt)
    }

    /// What the routers of this cluster know and its clients do not, for cache salts; none without a join token.
    pub fn cache_secret(&self) -> Option<[u8; 32]> {
        self.cache_secret
    }

    /// Whether nodes are there that take new work: a compatible pair or, with local prefill, a decode node.
    pub fn has_pair(&self) -> bool {
        self.table.with(|table| table.has_pair(self.choice.local))
    }

    /// An answer of so many tokens was complete: what [`Self::demand`] learns from.
    pub fn answered(&self, tokens: u32) {
        self.table.with(|table| table.answers.ended(tokens));
    }

    /// Tokens of prompt and answer that fit the largest decode node; nothing while there is none.
    pub fn most_tokens(&self) -> Option<u32> {
        self.table.with(|table| table.most_tokens())
    }

    /// Sums over all nodes.
    pub fn totals(&self) -> Totals {
        self.table.with(|table| table.totals())
    }

    /// What is known of the nodes' caches.
    pub fn index(&self) -> IndexTotals {
        self.table.with(|table| table.index())
    }

    /// The state of all circuit breakers at `now`.
    pub fn breakers(&self, now: Instant) -> Breakers {
        self.table.with(|table| table.breakers(now))
    }

    /// How often pairs of nodes went over from one way for their KV to another, by their names.
    pub fn way_fallbacks(&self) -> Fallbacks {
        self.table.with(|table| table.fallbacks())
    }

    /// The nodes, their links, and who left, for people.
    pub fn now(&self) -> ClusterNow {
        let mut now = self.table.with(|table| table.now(clock::now()));
        now.nodes.sort_by(|a, b| a.node.info.node_id.cmp(&b.node.info.node_id));
        now
    }

    /// The nodes as `/debug/cluster` shows them, by name.
    pub fn json(&self) -> serde_json::Value {
        let IndexTotals { blocks, limit, evicted, gaps } = self.index();
        let now = self.now();
        json!({
            "lease_ms": self.lease.as_millis() as u64,
            "index": { "blocks": blocks, "limit": limit, "evicted": evicted, "gaps": gaps },
            "nodes": now.nodes_json(),
            "departed": now.departed_json(),
        })
    }
}

impl Capacity for Membership {
    /// A request has room where it need not wait, or only with those that `node_queue` allows; without nodes that could
    /// ever hold it there is: then [`Self::route`] says why not. Nodes that are tried last count only where no others
    /// make a plan.
    fn has_room(&self, demand: &Demand, ahead: &Ahead, node_queue: u32, now: Instant) -> bool {
        self.table.with(|table| {
            let wanted = BlockDemand::of(demand, ahead, node_queue, table.block_tokens());
            table.has_room(wanted, demand, &self.choice, now)
        })
    }

    fn freed(&self) -> &Notify {
        &self.freed
    }
}

#[cfg(test)]
pub(crate) mod tests;
