//! One run: routers, nodes, clients and faults, drawn from a seed; then all is healed, and what must be is looked at.
//! Long because it joins all machines of the simulation: each message and each fault is carried out here.
use std::collections::BTreeMap;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tandem_proto::SequenceHash;
use tandem_proto::v1::Role;
use tandem_router::capacity::Demand;
use tandem_router::select::Wish;

use super::Bug;
use super::ledger::{Booked, Ledger};
use super::network::{End, Event, Message, Network, Packet, Time};
use super::node::{self, Node, at};
use super::router::{self, Router, WATCH};

/// Faults begin within this.
const TROUBLE: Duration = Duration::from_secs(4);
/// All are over, clients come no more.
const HEALED: Duration = Duration::from_secs(6);
/// What is looked at then: all have found each other, and indexes agree.
const LOOKED_AT: Duration = Duration::from_secs(8);
/// A router's process may be away for so long.
const AWAY_MS: std::ops::Range<u64> = 20..700;

/// What is done to whom, and for how long.
#[derive(Clone, Copy, Debug)]
enum Fault {
    KillRouter(usize),
    KillNode(usize),
    FreezeRouter(usize),
    FreezeNode(usize),
    CutControl(usize, usize),
    CutData(usize, usize),
}

/// What runs came to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub clients: u64,
    pub answered: u64,
    pub asked_again: u64,
    pub attempts: u64,
    pub fenced: u64,
    pub sessions: u64,
    pub gaps: u64,
    pub faults: u64,
}

impl Counts {
    pub fn add(&mut self, other: &Self) {
        let Self { clients, answered, asked_again, attempts, fenced, sessions, gaps, faults } = other;
        self.clients += clients;
        self.answered += answered;
        self.asked_again += asked_again;
        self.attempts += attempts;
        self.fenced += fenced;
        self.sessions += sessions;
        self.gaps += gaps;
        self.faults += faults;
    }
}

pub struct Report {
    pub violations: Vec<String>,
    pub counts: Counts,
    pub log: Vec<String>,
}

/// A client's request, and where it is.
struct Client {
    family: usize,
    blocks: usize,
    tokens: u32,
    router: Option<usize>,
    answers: u32,
}

pub struct World {
    now: Time,
    rng: StdRng,
    network: Network,
    routers: Vec<Router>,
    nodes: Vec<Node>,
    /// What came while it was frozen.
    deferred: BTreeMap<End, Vec<Event>>,
    clients: BTreeMap<u64, Client>,
    faults: Vec<Fault>,
    ledger: Ledger,
    counts: Counts,
    bug: Bug,
    log: Vec<String>,
}

impl World {
    pub fn run(seed: u64, bug: Bug) -> Report {
        let mut world = Self::draw(seed, bug);
        while let Some((time, event)) = world.network.next() {
            world.now = time;
            if time > LOOKED_AT {
                break;
            }
            world.happens(event);
            if !world.ledger.violations.is_empty() {
                break;
            }
        }
        if world.ledger.violations.is_empty() {
            world.look();
        }
        let sessions = world.nodes.iter().map(|node| node.lives.counts().1).sum();
        let gaps = world.routers.iter().map(|router| router.membership.index().gaps).sum();
        let counts = Counts { sessions, gaps, ..world.counts };
        Report { violations: world.ledger.violations, counts, log: world.log }
    }

    fn draw(seed: u64, bug: Bug) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let (routers, prefills, decodes) = (rng.random_range(2..=3), rng.random_range(1..=2), rng.random_range(2..=3));
        let role = |number| if number < prefills { Role::Prefill } else { Role::Decode };
        let nodes = (0..prefills + decodes).map(|number| Node::start(number, role(number), 1, routers, bug)).collect();
        let mut world = Self {
            now: Duration::ZERO,
            rng,
            network: Network::default(),
            routers: (0..routers).map(|number| Router::start(number, 1)).collect(),
            nodes,
            deferred: BTreeMap::new(),
            clients: BTreeMap::new(),
            faults: Vec::new(),
            ledger: Ledger::default(),
            counts: Counts::default(),
            bug,
            log: Vec::new(),
        };
        for router in 0..routers {
            world.network.at(WATCH, Event::Watch(router, 1));
        }
        for (node, router) in (0..world.nodes.len()).flat_map(|node| (0..routers).map(move |router| (node, router))) {
            world.network.at(Duration::from_millis(1), Event::Connect(node, 1, router));
        }
        for number in 0..world.rng.random_range(10..30) {
            let time = world.within(HEALED);
            let (family, blocks) = (world.rng.random_range(0..4), world.rng.random_range(1..=8));
            let tokens = world.rng.random_range(2..40);
            world.clients.insert(number, Client { family, blocks, tokens, router: None, answers: 0 });
            world.network.at(time, Event::Client(number));
        }
        world.draw_faults();
        world
    }

    fn draw_faults(&mut self) {
        for number in 0..self.rng.random_range(1..=5) {
            let (router, node) =
                (self.rng.random_range(0..self.routers.len()), self.rng.random_range(0..self.nodes.len()));
            let other = self.rng.random_range(0..self.nodes.len());
            let fault = match self.rng.random_range(0..10) {
                0 | 1 => Fault::KillRouter(router),
                2 => Fault::KillNode(node),
                3 => Fault::FreezeRouter(router),
                4 | 5 => Fault::FreezeNode(node),
                6 => Fault::CutData(node, other),
                _ => Fault::CutControl(router, node),
            };
            let begins = Duration::from_millis(100) + self.within(TROUBLE);
            let away = match fault {
                Fault::KillRouter(_) | Fault::KillNode(_) => self.rng.random_range(AWAY_MS),
                _ => self.rng.random_range(20..1800),
            };
            let ends = (begins + Duration::from_millis(away)).min(HEALED);
            self.faults.push(fault);
            self.network.at(begins, Event::Fault(number, true));
            self.network.at(ends, Event::Fault(number, false));
        }
        self.counts.faults = self.faults.len() as u64;
    }

    fn within(&mut self, span: Duration) -> Duration {
        Duration::from_micros(self.rng.random_range(0..span.as_micros() as u64))
    }

    fn happens(&mut self, event: Event) {
        if let Some(of) = self.whose(&event)
            && self.is_frozen(of)
        {
            self.deferred.entry(of).or_default().push(event);
            return;
        }
        match event {
            Event::Arrives(packet) => self.arrives(*packet),
            Event::Client(number) => self.asks(number),
            Event::Fault(number, begins) => self.fault(self.faults[number], begins),
            Event::Watch(router, generation) if self.is(End::Router(router), generation) => {
                let effects = self.routers[router].watch(self.now);
                self.of_router(router, effects);
                self.network.at(self.now + WATCH, Event::Watch(router, generation));
            }
            Event::Connect(node, generation, router) if self.is(End::Node(node), generation) => {
                let effects = self.nodes[node].connect(router, self.now, &mut self.rng);
                self.of_node(node, effects);
            }
            Event::Report(node, generation, router, stream) if self.is(End::Node(node), generation) => {
                let effects = self.nodes[node].reports(router, stream, self.now);
                self.of_node(node, effects);
            }
            Event::Lease(node, generation, router, stream) if self.is(End::Node(node), generation) => {
                let effects = self.nodes[node].doubts(router, stream, self.now);
                self.of_node(node, effects);
            }
            Event::Step(node, generation, call) if self.is(End::Node(node), generation) => {
                let effects = self.nodes[node].step(call);
                self.of_node(node, effects);
            }
            _ => {}
        }
    }

    /// The process that an event happens to.
    fn whose(&self, event: &Event) -> Option<End> {
        match event {
            Event::Arrives(packet) => Some(packet.to),
            Event::Watch(router, _) => Some(End::Router(*router)),
            Event::Connect(node, ..) | Event::Report(node, ..) | Event::Lease(node, ..) | Event::Step(node, ..) => {
                Some(End::Node(*node))
            }
            Event::Client(_) | Event::Fault(..) => None,
        }
    }

    fn is_frozen(&self, end: End) -> bool {
        match end {
            End::Router(router) => self.routers[router].frozen,
            End::Node(node) => self.nodes[node].frozen,
        }
    }

    fn generation(&self, end: End) -> u64 {
        match end {
            End::Router(router) => self.routers[router].generation,
            End::Node(node) => self.nodes[node].generation,
        }
    }

    /// Whether this process lives, and is of that generation.
    fn is(&self, end: End, generation: u64) -> bool {
        let alive = match end {
            End::Router(router) => self.routers[router].alive,
            End::Node(node) => self.nodes[node].alive,
        };
        alive && self.generation(end) == generation
    }

    fn arrives(&mut self, Packet { from, to, between: (of_sender, of_receiver), message }: Packet) {
        if self.is(to, of_receiver) {
            // A connection whose other end has died says no more than that; a reset comes from the dead.
            if !matches!(message, Message::Reset) && self.generation(from) != of_sender {
                return;
            }
            return match (from, to) {
                (End::Node(node), End::Router(router)) => {
                    let effects = self.routers[router].on_message(node, message, self.now);
                    self.of_router(router, effects);
                }
                (End::Router(router), End::Node(node)) => {
                    let effects = self.nodes[node].on_message(router, message, self.now);
                    self.of_node(node, effects);
                }
                (_, End::Node(node)) => {
                    let Message::Seal(call) = message else { return };
                    let effects = self.nodes[node].receives(call);
                    self.of_node(node, effects);
                }
                _ => {}
            };
        }
        // Nobody is there, or somebody who knows nothing of this connection.
        let answer = match message {
            Message::Register(stream, _) => Some(Message::Refused(stream)),
            Message::Start(call, ..) => Some(Message::Failed(call)),
            _ => None,
        };
        if let Some(answer) = answer
            && self.generation(from) == of_sender
        {
            self.send(to, from, answer);
        }
    }

    fn send(&mut self, from: End, to: End, message: Message) {
        let between = (self.generation(from), self.generation(to));
        self.network.send(self.now, Packet { from, to, between, message }, &mut self.rng);
    }

    fn of_node(&mut self, number: usize, effects: Vec<node::Effect>) {
        let generation = self.nodes[number].generation;
        for effect in effects {
            match effect {
                node::Effect::Tell(router, message) => {
                    if let Message::Closed(life) = &message {
                        self.ledger.ended(*life, self.now);
                    }
                    self.send(End::Node(number), End::Router(router), message);
                }
                node::Effect::Hand(to, message) => self.send(End::Node(number), End::Node(to), message),
                node::Effect::StepIn(time, call) => {
                    self.network.at(self.now + time, Event::Step(number, generation, call));
                }
                node::Effect::ReportIn(time, router, stream) => {
                    self.network.at(self.now + time, Event::Report(number, generation, router, stream));
                }
                node::Effect::LeaseAt(time, router, stream) => {
                    let time = time.saturating_duration_since(at(Duration::ZERO)).max(self.now);
                    self.network.at(time, Event::Lease(number, generation, router, stream));
                }
                node::Effect::ReconnectIn(time, router) => {
                    self.network.at(self.now + time, Event::Connect(number, generation, router));
                }
                node::Effect::Works(what, call) => self.ledger.works(what, call, self.now),
            }
        }
    }

    fn of_router(&mut self, number: usize, effects: Vec<router::Effect>) {
        for effect in effects {
            match effect {
                router::Effect::Tell(node, message) => self.send(End::Router(number), End::Node(node), message),
                router::Effect::Books(call, request, life, decodes) => {
                    self.counts.attempts += u64::from(decodes);
                    self.ledger.book(call, Booked { request, life, decodes, over: None });
                    if decodes {
                        self.ledger.is_alone(call, self.now);
                    }
                }
                router::Effect::Over(call, end) => self.ledger.over(call, self.now, end),
                router::Effect::Fences(life) => {
                    self.counts.fenced += 1;
                    self.ledger.fence(life, self.now);
                }
                router::Effect::Answered(request) => self.answered(request),
                router::Effect::Broken(what) => self.ledger.broken(what),
            }
        }
    }

    fn asks(&mut self, number: u64) {
        let up: Vec<_> = (0..self.routers.len()).filter(|router| self.routers[*router].alive).collect();
        let again = self.now + Duration::from_millis(20);
        if up.is_empty() {
            return self.network.at(again, Event::Client(number));
        }
        let router = up[self.rng.random_range(0..up.len())];
        if self.routers[router].frozen {
            return self.network.at(again, Event::Client(number));
        }
        let client = self.clients.get_mut(&number).expect("drawn");
        client.router = Some(router);
        self.counts.clients += 1;
        let (hashes, tokens) = (chain(client.family, client.blocks), client.tokens);
        let effects = self.routers[router].takes(number, hashes, tokens, self.now);
        self.of_router(router, effects);
    }

    fn answered(&mut self, number: u64) {
        self.counts.answered += 1;
        let client = self.clients.get_mut(&number).expect("drawn");
        (client.answers, client.router) = (client.answers + 1, None);
        if client.answers > 1 {
            self.ledger.broken(format!("client {number} has {} answers", client.answers));
        }
    }

    fn fault(&mut self, fault: Fault, begins: bool) {
        self.log.push(format!("{:?} {fault:?} {}", self.now, if begins { "begins" } else { "ends" }));
        let (control, data) =
            (|router, node| (End::Router(router), End::Node(node)), |node, other| (End::Node(node), End::Node(other)));
        match (fault, begins) {
            (Fault::CutControl(router, node), begins) => self.cut(control(router, node), begins),
            (Fault::CutData(node, other), begins) => self.cut(data(node, other), begins),
            (Fault::KillRouter(router), true) => self.kill_router(router),
            (Fault::KillRouter(router), false) if !self.routers[router].alive => {
                let generation = self.routers[router].generation + 1;
                self.routers[router] = Router::start(router, generation);
                self.network.at(self.now + WATCH, Event::Watch(router, generation));
            }
            (Fault::KillNode(node), true) => self.kill_node(node),
            (Fault::KillNode(node), false) if !self.nodes[node].alive => {
                let Node { role, generation, .. } = self.nodes[node];
                self.nodes[node] = Node::start(node, role, generation + 1, self.routers.len(), self.bug);
                for router in 0..self.routers.len() {
                    self.network.at(self.now, Event::Connect(node, generation + 1, router));
                }
            }
            (Fault::FreezeRouter(router), frozen) => {
                self.routers[router].frozen = frozen;
                self.thaw(End::Router(router), frozen);
            }
            (Fault::FreezeNode(node), frozen) => {
                self.nodes[node].frozen = frozen;
                self.thaw(End::Node(node), frozen);
            }
            (Fault::KillRouter(_) | Fault::KillNode(_), false) => {}
        }
    }

    fn cut(&mut self, (one, other): (End, End), begins: bool) {
        match begins {
            true => self.network.cut(one, other),
            false => self.network.heal(self.now, one, other, &mut self.rng),
        }
    }

    /// What came meanwhile: first the routers' messages, then its clocks, then KV and its engine. (A real node may end
    /// the step that it was in before it looks at its clock.)
    fn thaw(&mut self, end: End, frozen: bool) {
        if frozen {
            return;
        }
        let mut events = self.deferred.remove(&end).unwrap_or_default();
        events.sort_by_key(|event| match event {
            Event::Arrives(packet) if !matches!(packet.message, Message::Seal(_)) => 0,
            Event::Arrives(_) | Event::Step(..) => 2,
            _ => 1,
        });
        events.into_iter().for_each(|event| self.happens(event));
    }

    /// Its clients ask again, elsewhere or where it comes back.
    fn kill_router(&mut self, router: usize) {
        if !self.routers[router].alive {
            return;
        }
        (self.routers[router].alive, self.routers[router].frozen) = (false, false);
        self.deferred.remove(&End::Router(router));
        self.ledger.all_over(&self.routers[router].requests.keys().copied().collect::<Vec<_>>(), self.now);
        for node in 0..self.nodes.len() {
            self.send(End::Router(router), End::Node(node), Message::Reset);
        }
        let lost: Vec<_> = self.clients.iter().filter(|(_, client)| client.router == Some(router)).collect();
        let lost: Vec<_> = lost.into_iter().map(|(number, _)| *number).collect();
        for number in lost {
            self.counts.asked_again += 1;
            self.clients.get_mut(&number).expect("it is there").router = None;
            self.network.at(self.now + Duration::from_millis(5), Event::Client(number));
        }
    }

    fn kill_node(&mut self, node: usize) {
        if !self.nodes[node].alive {
            return;
        }
        (self.nodes[node].alive, self.nodes[node].frozen) = (false, false);
        self.deferred.remove(&End::Node(node));
        self.nodes[node].tasks.clear();
        for router in 0..self.routers.len() {
            self.send(End::Node(node), End::Router(router), Message::Reset);
        }
    }

    /// Long after the last fault.
    fn look(&mut self) {
        for (number, client) in &self.clients {
            if client.answers != 1 {
                let state = client.router.map(|router| self.routers[router].state(*number));
                let what = format!("client {number} has {} answers: {state:?}", client.answers);
                self.ledger.broken(what);
            }
        }
        for node in &self.nodes {
            let (left, name) = (node.tasks.len(), format!("n{}", node.number));
            if left > 0 || node.lives.counts().0 != self.routers.len() {
                let lives = node.lives.counts().0;
                self.ledger.violations.push(format!("{name} has {left} calls and {lives} lives at the end"));
            }
            for (number, router) in self.routers.iter().enumerate() {
                let seen = router.membership.now();
                let of = seen.nodes.iter().find(|now| now.node.info.node_id == name);
                let told = of.map(|now| (now.node.info.incarnation, now.indexed_blocks as usize));
                let is = (node.generation, node.cache.len());
                if told != Some(is) {
                    let what = format!("router {number} takes {name} for {told:?}, and it is {is:?}");
                    self.ledger.violations.push(what);
                }
            }
        }
        self.look_at_indexes();
    }

    /// Each router knows of each prefill node how much of each prompt it has cached.
    fn look_at_indexes(&mut self) {
        for (number, router) in self.routers.iter().enumerate() {
            for family in 0..4 {
                let demand = Demand { hashes: chain(family, 8), ..router.membership.demand(8 * 16 + 1, 8) };
                let Ok(route) = router.membership.route(&demand, &Wish::default(), at(self.now)) else {
                    self.ledger.violations.push(format!("router {number} has no pair at the end"));
                    continue;
                };
                for candidate in &route.candidates {
                    let by = self
                        .nodes
                        .iter()
                        .find(|node| candidate.prefill_id.as_deref() == Some(&format!("n{}", node.number)));
                    let cached = by.map_or(0, |node| node.cache.lookup(&demand.hashes).len()) as u32 * 16;
                    if candidate.cached_tokens != cached {
                        let (told, id) = (candidate.cached_tokens, &candidate.prefill_id);
                        let what = format!("router {number} believes that {id:?} has {told} tokens and not {cached}");
                        self.ledger.violations.push(what);
                    }
                }
            }
        }
    }
}

/// The blocks' hashes of a prompt: those of one family begin alike.
fn chain(family: usize, blocks: usize) -> Vec<SequenceHash> {
    (1..=blocks as u128).map(|block| ((family as u128 + 1) << 32 | block).into()).collect()
}
