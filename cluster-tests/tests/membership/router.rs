//! A router: the real node table and prefix index, and of the requests' flow what membership is about: a plan, two
//! calls, tokens of the present attempt alone, another plan when a node dies or fails.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use tandem_proto::{SequenceHash, v1};
use tandem_router::capacity::Demand;
use tandem_router::membership::{Expected, Membership, Node, Route};
use tandem_router::select::{LocalPrefill, Wish};

use super::ledger::{End, LEASE};
use super::network::{Call, Message, Stream, Time, Work};
use super::node::at;

/// Between two looks for silent nodes.
pub const WATCH: Duration = Duration::from_millis(10);

/// A request here.
pub struct Request {
    pub hashes: Vec<SequenceHash>,
    /// Tokens of the whole answer, and those that the client has.
    pub tokens: u32,
    pub have: u32,
    attempt: Option<Attempt>,
}

/// Its present nodes.
struct Attempt {
    route: Route,
    prefill: Call,
    decode: Call,
    /// The prompt's token is here; before that, what decode has said waits.
    first: bool,
    early: Vec<Message>,
}

/// What a router wants to be done.
pub enum Effect {
    Tell(usize, Message),
    /// For the ledger: a call of a request, in a life; whether it decodes.
    Books(Call, u64, Stream, bool),
    /// The call is given up.
    Over(Call, End),
    /// A life is over, by silence.
    Fences(Stream),
    /// The client has all tokens.
    Answered(u64),
    /// The client's stream is not what it should be.
    Broken(String),
}

pub struct Router {
    pub generation: u64,
    pub alive: bool,
    pub frozen: bool,
    pub membership: Membership,
    /// Its streams, and the nodes behind them.
    sessions: BTreeMap<Stream, (usize, Arc<Node>)>,
    pub requests: BTreeMap<u64, Request>,
    calls: u64,
}

impl Router {
    pub fn start(number: usize, generation: u64) -> Self {
        let membership = Membership::new(Expected { model_digest: 9, eos_token_id: 2 }, LEASE);
        let membership = membership.with_local_prefill(LocalPrefill::Never);
        Self {
            generation,
            alive: true,
            frozen: false,
            membership,
            sessions: BTreeMap::new(),
            requests: BTreeMap::new(),
            // Calls of all routers differ.
            calls: (number as u64 + 1) << 48 | generation << 32,
        }
    }

    pub fn on_message(&mut self, node: usize, message: Message, now: Time) -> Vec<Effect> {
        match message {
            Message::Register(stream, info) => self.registers(node, stream, *info, now),
            Message::Load(stream, load, probe) => {
                let Some((_, of)) = self.sessions.get(&stream) else { return Vec::new() };
                self.membership.report(of.session, &load, at(now));
                probe.map(|probe| Effect::Tell(node, Message::Reading(stream, probe))).into_iter().collect()
            }
            Message::Kv(stream, events) => {
                let Some((_, of)) = self.sessions.get(&stream) else { return Vec::new() };
                let changes = events.try_into().expect("whole hashes");
                match self.membership.kv_events(of.session, &changes, at(now)) {
                    Ok(()) => Vec::new(),
                    Err(_) => vec![Effect::Tell(node, Message::WantsSnapshot(stream))],
                }
            }
            Message::Closed(stream) => {
                if let Some((_, of)) = self.sessions.get(&stream) {
                    self.membership.leave(of.session, "its stream was cut");
                }
                self.buries()
            }
            Message::Reset => {
                let of_node: Vec<_> = self.sessions.iter().filter(|(_, (number, _))| *number == node).collect();
                of_node.iter().for_each(|(_, (_, of))| self.membership.leave(of.session, "its stream was cut"));
                self.buries()
            }
            Message::Reserved(call) => self.reserved(call),
            Message::First(call) => self.first(call),
            Message::Token(call, _) | Message::Done(call) => self.decoded(call, message),
            Message::Failed(call) => match self.of_call(call) {
                Some(request) => self.gives_up(request),
                None => Vec::new(),
            },
            _ => Vec::new(),
        }
    }

    fn registers(&mut self, node: usize, stream: Stream, info: v1::Register, now: Time) -> Vec<Effect> {
        let mut effects = match self.membership.register(info, at(now)) {
            Ok(of) => {
                self.sessions.insert(stream, (node, of));
                vec![Effect::Tell(node, Message::Hello(stream))]
            }
            Err(_) => vec![Effect::Tell(node, Message::Refused(stream))],
        };
        effects.extend(self.buries());
        effects
    }

    /// Looks for silent nodes, and places what waits.
    pub fn watch(&mut self, now: Time) -> Vec<Effect> {
        self.membership.expire(at(now));
        let mut effects = self.buries();
        let waiting: Vec<_> = self.requests.iter().filter(|(_, of)| of.attempt.is_none()).map(|(id, _)| *id).collect();
        effects.extend(waiting.into_iter().flat_map(|request| self.routes(request, now)));
        effects
    }

    /// Takes in a client's request.
    pub fn takes(&mut self, request: u64, hashes: Vec<SequenceHash>, tokens: u32, now: Time) -> Vec<Effect> {
        self.requests.insert(request, Request { hashes, tokens, have: 0, attempt: None });
        self.routes(request, now)
    }

    fn routes(&mut self, number: u64, now: Time) -> Vec<Effect> {
        let request = self.requests.get_mut(&number).expect("it is there");
        let demand = self.membership.demand(request.hashes.len() as u32 * 16 + 1, 40);
        let demand = Demand { hashes: request.hashes.clone(), ..demand };
        let Ok(route) = self.membership.route(&demand, &Wish::default(), at(now)) else { return Vec::new() };
        self.calls += 2;
        let (prefill, decode) = (self.calls - 1, self.calls);
        let of = |node: &Node| (self.sessions.get(&node.info.life).map(|(number, _)| *number), node.info.life);
        let (Some(by), (Some(to), to_life)) = (route.prefill.as_ref().map(|node| of(node)), of(&route.decode)) else {
            return vec![Effect::Broken(format!("request {number} has a plan without a node"))];
        };
        let (Some(from), from_life) = by else {
            return vec![Effect::Broken(format!("request {number} has a plan without a node"))];
        };
        let first = request.have;
        let effects = vec![
            Effect::Books(prefill, number, from_life, false),
            Effect::Books(decode, number, to_life, true),
            Effect::Tell(from, Message::Start(prefill, from_life, Work::Prefill(request.hashes.clone()))),
            Effect::Tell(to, Message::Start(decode, to_life, Work::Decode(first + 1, request.tokens))),
        ];
        request.attempt = Some(Attempt { route, prefill, decode, first: false, early: Vec::new() });
        effects
    }

    fn of_call(&self, call: Call) -> Option<u64> {
        let of = |attempt: &Attempt| attempt.prefill == call || attempt.decode == call;
        self.requests.iter().find(|(_, request)| request.attempt.as_ref().is_some_and(of)).map(|(number, _)| *number)
    }

    fn attempt(&mut self, call: Call) -> Option<(u64, &mut Request)> {
        let number = self.of_call(call)?;
        Some((number, self.requests.get_mut(&number)?))
    }

    fn node_of(&self, node: &Node) -> Option<usize> {
        self.sessions.get(&node.info.life).map(|(number, _)| *number)
    }

    fn reserved(&mut self, call: Call) -> Vec<Effect> {
        let Some(number) = self.of_call(call) else { return Vec::new() };
        let request = self.requests.get_mut(&number).expect("it is there");
        let attempt = request.attempt.as_mut().expect("of this call");
        let (prefill, decode) = (attempt.prefill, attempt.decode);
        let (by, to) = (attempt.route.prefill.clone(), Arc::clone(&attempt.route.decode));
        let nodes = by.and_then(|by| Some((self.node_of(&by)?, self.node_of(&to)?)));
        nodes.map(|(by, to)| Effect::Tell(by, Message::Deliver(prefill, to, decode))).into_iter().collect()
    }

    fn first(&mut self, call: Call) -> Vec<Effect> {
        let Some((number, request)) = self.attempt(call) else { return Vec::new() };
        request.have += 1;
        let attempt = request.attempt.as_mut().expect("of this call");
        attempt.first = true;
        let (decode, early) = (attempt.decode, std::mem::take(&mut attempt.early));
        let mut effects = self.may_be_whole(number);
        effects.extend(early.into_iter().flat_map(|message| self.decoded(decode, message)));
        effects
    }

    fn decoded(&mut self, call: Call, message: Message) -> Vec<Effect> {
        let Some((number, request)) = self.attempt(call) else { return Vec::new() };
        let attempt = request.attempt.as_mut().expect("of this call");
        match message {
            Message::Done(_) if attempt.prefill == call => vec![Effect::Over(call, End::Done)],
            message if !attempt.first => {
                attempt.early.push(message);
                Vec::new()
            }
            Message::Token(_, position) if position == request.have => {
                request.have += 1;
                self.may_be_whole(number)
            }
            message => {
                let have = request.have;
                vec![Effect::Broken(format!("request {number} has {have} tokens and gets {message:?}"))]
            }
        }
    }

    /// The answer is complete with its last token.
    fn may_be_whole(&mut self, number: u64) -> Vec<Effect> {
        if self.requests.get(&number).is_none_or(|request| request.have < request.tokens) {
            return Vec::new();
        }
        let mut effects = self.gives_up(number);
        self.requests.remove(&number);
        effects.push(Effect::Answered(number));
        effects
    }

    /// What a request waits for, for people.
    pub fn state(&self, number: u64) -> String {
        let Some(request) = self.requests.get(&number) else { return "it is not there".to_owned() };
        let Request { have, tokens, attempt, .. } = request;
        let first = attempt.as_ref().map(|attempt| attempt.first);
        format!("{have} of {tokens} tokens, first token of its attempt: {first:?}")
    }

    /// The attempts of nodes that are dead end; lives that ended by silence are fenced.
    fn buries(&mut self) -> Vec<Effect> {
        let mut effects = Vec::new();
        let died = |node: &Node| node.died().now_or_never();
        let dead = self.sessions.iter().filter_map(|(life, (number, node))| {
            died(node).map(|why| (*life, *number, why.starts_with("it was silent")))
        });
        let dead: Vec<_> = dead.collect();
        for (life, node, silent) in &dead {
            if *silent {
                effects.push(Effect::Fences(*life));
            }
            effects.push(Effect::Tell(*node, Message::Closed(*life)));
        }
        let of_dead = |route: &Route| {
            let lives = [Some(&route.decode), route.prefill.as_ref()];
            lives.into_iter().flatten().any(|node| dead.iter().any(|(life, ..)| *life == node.info.life))
        };
        let lost = self.requests.iter().filter_map(|(number, request)| {
            let attempt = request.attempt.as_ref()?;
            of_dead(&attempt.route).then_some(*number)
        });
        for number in lost.collect::<Vec<_>>() {
            effects.extend(self.gives_up(number));
        }
        dead.iter().for_each(|(life, ..)| drop(self.sessions.remove(life)));
        effects
    }

    /// Both calls of an attempt end; the request waits for another plan.
    fn gives_up(&mut self, number: u64) -> Vec<Effect> {
        let Some(request) = self.requests.get_mut(&number) else { return Vec::new() };
        let Some(Attempt { route, prefill, decode, .. }) = request.attempt.take() else { return Vec::new() };
        let calls = [(route.prefill.clone(), prefill), (Some(Arc::clone(&route.decode)), decode)];
        let cancel = |(node, call): (Option<Arc<Node>>, Call)| {
            let tell = node.and_then(|node| self.node_of(&node)).map(|node| Effect::Tell(node, Message::Cancel(call)));
            [Some(Effect::Over(call, End::GivenUp)), tell].into_iter().flatten()
        };
        calls.into_iter().flat_map(cancel).collect()
    }
}
