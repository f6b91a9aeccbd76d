//! A node: the real lives, leases, cache and feeds. What the shells of the product do with them
//! (`node/src/membership.rs`, `call.rs`), this file does by hand, and wrongly where a bug is planted.
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use tandem_engine::prefix_cache::PrefixCache;
use tandem_node::kv_feed::KvFeed;
use tandem_node::lease::Lease;
use tandem_node::life_secrets::LifeSecrets;
use tandem_node::lives::{Lives, Member, Session};
use tandem_proto::{Life, SequenceHash, v1};

use super::Bug;
use super::ledger::LEASE;
use super::network::{Call, Message, Stream, Time, Work};

/// Between two reports.
pub const INTERVAL: Duration = Duration::from_millis(100);
/// A prompt, and a token.
const STEP: Duration = Duration::from_millis(8);
/// Blocks that the cache keeps.
const CACHE: usize = 24;

/// Its stream to one router.
#[derive(Default)]
pub struct Link {
    pub open: Option<Open>,
    secrets: LifeSecrets,
}

/// A stream that this side believes in.
pub struct Open {
    pub stream: Stream,
    session: Session,
    lease: Lease,
    feed: KvFeed,
}

/// A request here.
pub struct Task {
    pub router: usize,
    member: Member,
    kind: Kind,
}

enum Kind {
    /// Reads a prompt; then hands over to that call of that node.
    Prefill { hashes: Vec<SequenceHash>, read: bool, to: Option<(usize, Call)> },
    /// Waits for KV, then generates.
    Decode { next: u32, end: u32, sealed: bool },
}

/// What a node wants to be done.
pub enum Effect {
    /// To this router.
    Tell(usize, Message),
    /// To this decode node.
    Hand(usize, Message),
    /// A call's next step.
    StepIn(Duration, Call),
    /// A stream's next report.
    ReportIn(Duration, usize, Stream),
    /// A look at its lease.
    LeaseAt(Instant, usize, Stream),
    /// Another stream to this router.
    ReconnectIn(Duration, usize),
    /// It works for this call: for the ledger.
    Works(&'static str, Call),
}

pub struct Node {
    pub number: usize,
    pub role: v1::Role,
    pub generation: u64,
    pub frozen: bool,
    pub alive: bool,
    pub lives: Lives,
    pub links: Vec<Link>,
    pub tasks: BTreeMap<Call, Task>,
    pub cache: PrefixCache,
    bug: Bug,
    probes: u64,
    blocks: u32,
    /// What a router heard of the cache last, for a bug.
    old_feeds: BTreeMap<usize, KvFeed>,
}

impl Node {
    pub fn start(number: usize, role: v1::Role, generation: u64, routers: usize, bug: Bug) -> Self {
        Self {
            number,
            role,
            generation,
            frozen: false,
            alive: true,
            lives: Lives::default(),
            links: std::iter::repeat_with(Link::default).take(routers).collect(),
            tasks: BTreeMap::new(),
            cache: PrefixCache::default(),
            bug,
            probes: 0,
            blocks: 0,
            old_feeds: BTreeMap::new(),
        }
    }

    /// Opens a stream to a router, unless there is one.
    pub fn connect(&mut self, router: usize, now: Time, rng: &mut StdRng) -> Vec<Effect> {
        if self.links[router].open.is_some() {
            return Vec::new();
        }
        let life = Life::random(rng);
        let lease = Lease::new(LEASE, at(now));
        let session = self.lives.open(life, lease.ends());
        let feed = match self.bug {
            Bug::TellsNoSnapshot => self.old_feeds.remove(&router).unwrap_or_default(),
            _ => KvFeed::default(),
        };
        self.links[router].open = Some(Open { stream: life.0, session, lease, feed });
        let register = self.registration(life, router);
        // Nobody guesses here.
        let secret = std::array::from_fn(|byte| life.0.to_le_bytes()[byte % 8]);
        let register = Box::new(self.links[router].secrets.begin(secret, register));
        vec![
            Effect::Tell(router, Message::Register(life.0, register)),
            Effect::LeaseAt(at(now) + LEASE, router, life.0),
        ]
    }

    fn registration(&self, life: Life, router: usize) -> v1::Register {
        v1::Register {
            node_id: format!("n{}", self.number),
            role: self.role.into(),
            incarnation: self.generation,
            compatibility_digest: 5,
            protocol: tandem_proto::PROTOCOL_VERSION,
            model_digest: 9,
            endpoint: "http://127.0.0.1:1".into(),
            transports: vec![v1::TransportInfo {
                backend: "mem".into(),
                name: "mem".into(),
                build_id: "1".into(),
                reach: None,
            }],
            total_blocks: 1000,
            block_tokens: 16,
            max_context_tokens: 4096,
            max_running: 64,
            eos_token_id: 2,
            arithmetic: "f32".into(),
            kv_order: "f32".into(),
            life: life.0,
            link: router as u64 + 1,
            ..v1::Register::default()
        }
    }

    /// Its stream to this router, if it is that one.
    fn open(&mut self, router: usize, stream: Stream) -> Option<&mut Open> {
        self.links[router].open.as_mut().filter(|open| open.stream == stream)
    }

    /// The time of a lease has come: it is over, unless there was an answer.
    pub fn doubts(&mut self, router: usize, stream: Stream, now: Time) -> Vec<Effect> {
        let never = self.bug == Bug::HasNoLease;
        let Some(open) = self.open(router, stream) else { return Vec::new() };
        match open.lease.ends() {
            _ if never => Vec::new(),
            ends if ends <= at(now) => self.lost(router),
            ends => vec![Effect::LeaseAt(ends, router, stream)],
        }
    }

    /// Reports on a stream, as every interval.
    pub fn reports(&mut self, router: usize, stream: Stream, now: Time) -> Vec<Effect> {
        self.probes += 1;
        let probe = self.probes;
        let Some(Open { feed, lease, .. }) = self.links[router].open.as_mut().filter(|open| open.stream == stream)
        else {
            return Vec::new();
        };
        lease.sent(probe, at(now));
        let told = std::iter::from_fn(|| feed.next(|from| self.cache.events_since(from)));
        let mut effects: Vec<_> = told.map(|events| Effect::Tell(router, Message::Kv(stream, events))).collect();
        effects.extend(self.load(router).map(|load| Effect::Tell(router, Message::Load(stream, load, Some(probe)))));
        effects.push(Effect::ReportIn(INTERVAL, router, stream));
        effects
    }

    fn load(&self, router: usize) -> Option<Box<v1::Load>> {
        let (own, others) = self.links[router].open.as_ref()?.session.calls();
        Some(Box::new(v1::Load { free_blocks: 1000, own: Some(own), others: Some(others), ..v1::Load::default() }))
    }

    /// The stream is over, for whatever reason, and the life with it.
    pub fn lost(&mut self, router: usize) -> Vec<Effect> {
        let Some(Open { stream, session, feed, .. }) = self.links[router].open.take() else { return Vec::new() };
        if self.bug == Bug::TellsNoSnapshot {
            self.old_feeds.insert(router, feed);
        }
        drop(session);
        if self.bug != Bug::KeepsCalls {
            self.purge();
        }
        let closed = Effect::Tell(router, Message::Closed(stream));
        vec![closed, Effect::ReconnectIn(Duration::from_millis(30), router)]
    }

    /// Calls whose life is over end at once.
    fn purge(&mut self) {
        self.tasks.retain(|_, task| !task.member.is_over());
    }

    /// A message of a router.
    pub fn on_message(&mut self, router: usize, message: Message, now: Time) -> Vec<Effect> {
        match message {
            Message::Hello(stream) if self.open(router, stream).is_some() => {
                self.open(router, stream).into_iter().for_each(|open| open.session.joined());
                self.reports(router, stream, now)
            }
            Message::Reading(stream, probe) => {
                let wrong = self.bug == Bug::CountsFromTheAnswer;
                if let Some(open) = self.open(router, stream) {
                    if wrong {
                        open.lease = Lease::new(LEASE, at(now));
                    }
                    open.lease.answered(probe);
                    open.session.lasts_until(open.lease.ends());
                }
                Vec::new()
            }
            Message::WantsSnapshot(stream) if self.bug != Bug::TellsNoSnapshot => {
                self.open(router, stream).into_iter().for_each(|open| open.feed.start_over());
                Vec::new()
            }
            Message::Refused(stream) | Message::Closed(stream) if self.open(router, stream).is_some() => {
                self.lost(router)
            }
            Message::Reset => {
                // All connections of the process are gone: the stream's, and those of its calls.
                self.tasks.retain(|_, task| task.router != router);
                self.lost(router)
            }
            Message::Start(call, life, work) => self.begins(router, call, life, work, now),
            Message::Cancel(call) => {
                self.tasks.remove(&call);
                Vec::new()
            }
            Message::Deliver(call, node, to_call) => {
                if let Some(Task { kind: Kind::Prefill { to, .. }, .. }) = self.tasks.get_mut(&call) {
                    *to = Some((node, to_call));
                }
                self.hand_over(call)
            }
            _ => Vec::new(),
        }
    }

    fn begins(&mut self, router: usize, call: Call, life: Stream, work: Work, now: Time) -> Vec<Effect> {
        let life = if self.bug == Bug::TakesOldCalls { None } else { Some(Life(life)) };
        let Ok(member) = self.lives.join(life, at(now)) else {
            return vec![Effect::Tell(router, Message::Failed(call))];
        };
        let mut effects = vec![Effect::Works("it takes a call", call)];
        let kind = match work {
            Work::Prefill(hashes) => {
                member.reads(hashes.len() * 16);
                effects.push(Effect::StepIn(STEP * 3, call));
                Kind::Prefill { hashes, read: false, to: None }
            }
            Work::Decode(next, end) => {
                effects.push(Effect::Tell(router, Message::Reserved(call)));
                Kind::Decode { next, end, sealed: false }
            }
        };
        self.tasks.insert(call, Task { router, member, kind });
        effects
    }

    /// The engine's step for a call.
    pub fn step(&mut self, call: Call) -> Vec<Effect> {
        let Some(task) = self.tasks.get_mut(&call) else { return Vec::new() };
        let router = task.router;
        match &mut task.kind {
            Kind::Prefill { hashes, read, .. } => {
                *read = true;
                task.member.has_read();
                let hashes = hashes.clone();
                self.keep(&hashes);
                let mut effects = vec![Effect::Works("it reads", call), Effect::Tell(router, Message::First(call))];
                effects.extend(self.hand_over(call));
                effects
            }
            Kind::Decode { next, end, .. } => {
                let (position, done) = (*next, *next + 1 >= *end);
                *next += 1;
                let token = Effect::Tell(router, Message::Token(call, position));
                let mut effects = vec![Effect::Works("it generates", call), token];
                match done {
                    true => {
                        self.tasks.remove(&call);
                        effects.push(Effect::Tell(router, Message::Done(call)));
                    }
                    false => effects.push(Effect::StepIn(STEP, call)),
                }
                effects
            }
        }
    }

    fn hand_over(&mut self, call: Call) -> Vec<Effect> {
        let Some(Task { kind: Kind::Prefill { read: true, to: Some((node, to_call)), .. }, router, .. }) =
            self.tasks.get(&call)
        else {
            return Vec::new();
        };
        let effects = vec![Effect::Hand(*node, Message::Seal(*to_call)), Effect::Tell(*router, Message::Done(call))];
        self.tasks.remove(&call);
        effects
    }

    /// KV for a call. Without a grant it is refused.
    pub fn receives(&mut self, call: Call) -> Vec<Effect> {
        match self.tasks.get_mut(&call) {
            Some(Task { kind: Kind::Decode { sealed, .. }, .. }) if !*sealed => {
                *sealed = true;
                vec![Effect::Works("it accepts a grant's KV", call), Effect::StepIn(STEP, call)]
            }
            _ => Vec::new(),
        }
    }

    fn keep(&mut self, hashes: &[SequenceHash]) {
        for hash in hashes {
            self.blocks += 1;
            if self.cache.insert(*hash, self.blocks) {
                self.cache.release(self.blocks);
            }
            while self.cache.len() > CACHE {
                self.cache.evict();
            }
        }
    }
}

/// Virtual time as an `Instant`: all of a run count from one.
pub fn at(time: Time) -> Instant {
    use std::sync::OnceLock;
    static START: OnceLock<Instant> = OnceLock::new();
    *START.get_or_init(Instant::now) + time
}
