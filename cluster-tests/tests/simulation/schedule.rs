//! What happens in one simulated run, drawn from its seed before it begins: the cluster, who asks for what and when,
//! and which faults strike. Pure data, and how people read it.
use std::fmt;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use tandem_proto::v1::Sampling;
use tandem_router::select::LocalPrefill;

/// Tokens of the model; 0 ends an answer.
pub const VOCABULARY: u32 = 96;
/// Requests of a run.
pub const REQUESTS: usize = 120;
/// They come within so long.
pub const ARRIVALS: Duration = Duration::from_millis(2500);

/// One run.
#[derive(Clone, Debug)]
pub struct Schedule {
    pub seed: u64,
    pub prefill_nodes: usize,
    pub decode_nodes: usize,
    /// Of each node's arena.
    pub prefill_blocks: usize,
    pub decode_blocks: usize,
    pub max_running: usize,
    pub max_step_tokens: usize,
    /// The router's.
    pub max_inflight: u32,
    pub max_queue: usize,
    pub local_prefill: LocalPrefill,
    /// By arrival.
    pub requests: Vec<Request>,
    /// By time.
    pub faults: Vec<(Duration, Fault)>,
}

/// One client's wish.
#[derive(Clone, Debug)]
pub struct Request {
    pub at: Duration,
    pub prompt: Prompt,
    pub max_tokens: u32,
    pub sampling: Sampling,
    pub ignore_eos: bool,
    pub stop_token_ids: Vec<u32>,
    pub deadline: Duration,
    pub client: Client,
}

/// What it begins with.
#[derive(Clone, Debug)]
pub enum Prompt {
    Fresh(Vec<u32>),
    /// The history of an earlier request, its whole answer, and these.
    Turn(usize, Vec<u32>),
}

/// How the client reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Client {
    Patient,
    /// Leaves after so many tokens.
    LeavesAfter(u32),
    /// Leaves after so long.
    LeavesIn(Duration),
    /// Takes so long over each event.
    Slow(Duration),
}

/// A node, by its role and number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodeName {
    Prefill(usize),
    Decode(usize),
}

/// What strikes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// kill −9, and a new process of the same name after so long.
    Kill(NodeName, Duration),
    /// SIGSTOP, and SIGCONT after so long.
    Freeze(NodeName, Duration),
    /// SIGTERM, and a new process of the same name so long after it has ended.
    Drain(NodeName, Duration),
    /// The router's connections to a node carry nothing for so long.
    CutControl(NodeName, Duration),
    /// They are slow for so long.
    SlowControl(NodeName, Duration),
    /// No KV travels from one node to another for so long.
    CutData(NodeName, NodeName, Duration),
    /// KV between any two nodes is slow for so long: frames linger, and are written piece by piece.
    SlowData(Duration),
    /// Bits flip.
    Flip(Duration),
    /// Ranges are too short.
    Truncate(Duration),
    /// Seals get lost.
    LoseSeals(Duration),
    /// Cancel frames get lost, and connections are closed late.
    LoseCancels(Duration),
    /// Data connections break.
    Sever(Duration),
    /// The router hears of a dropped call late.
    LateCancels(NodeName),
    /// kill −9 of the router, and a new one after so long.
    KillRouter(Duration),
}

impl Schedule {
    /// The run of `seed`.
    pub fn draw(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let (prefill_nodes, decode_nodes) = (rng.random_range(2..=3), rng.random_range(2..=3));
        let mut schedule = Self {
            seed,
            prefill_nodes,
            decode_nodes,
            prefill_blocks: rng.random_range(16..=48),
            // The same number of draws in every run, so that a seed stays what it was.
            decode_blocks: rng.random_range(16..=48).min(if is_tight(seed) { 18 } else { 48 }),
            max_running: rng.random_range(2..=8),
            max_step_tokens: *[16, 32, 64].choose(&mut rng).unwrap_or(&32),
            max_inflight: rng.random_range(8..=40),
            max_queue: rng.random_range(4..=32),
            // Of eight runs one is aggregated and one mixed; drawn from no random number, so that the others stay what
            // they were before there was a choice.
            local_prefill: match seed % 8 {
                6 => LocalPrefill::Auto,
                7 => LocalPrefill::Always,
                _ => LocalPrefill::Never,
            },
            requests: Vec::new(),
            faults: Vec::new(),
        };
        schedule.draw_requests(&mut rng);
        schedule.draw_faults(&mut rng);
        schedule
    }

    fn draw_requests(&mut self, rng: &mut StdRng) {
        let families: Vec<Vec<u32>> = (0..4).map(|_| tokens(rng, 48)).collect();
        // A burst now and then: more than the queue takes.
        let bursts: Vec<Duration> = (0..2).map(|_| within(rng, ARRIVALS)).collect();
        let mut arrivals: Vec<Duration> = (0..REQUESTS)
            .map(|_| match bursts.choose(rng) {
                Some(burst) if rng.random_bool(0.3) => *burst,
                _ => within(rng, ARRIVALS),
            })
            .collect();
        arrivals.sort();
        for (index, at) in arrivals.into_iter().enumerate() {
            let prompt = match rng.random_range(0..10) {
                0..=2 if index > 0 => {
                    let more = rng.random_range(1..=12);
                    Prompt::Turn(rng.random_range(index.saturating_sub(40)..index), tokens(rng, more))
                }
                3..=6 => {
                    let (family, own) = (rng.random_range(0..families.len()), rng.random_range(1..=24));
                    let shared = rng.random_range(1..=48);
                    Prompt::Fresh([&families[family][..shared], &tokens(rng, own)].concat())
                }
                _ => {
                    let len = rng.random_range(1..=72);
                    Prompt::Fresh(tokens(rng, len))
                }
            };
            let longest = if is_tight(self.seed) { 80 } else { 16 };
            self.requests.push(draw_request(rng, at, prompt, longest));
        }
    }

    fn draw_faults(&mut self, rng: &mut StdRng) {
        // Every tenth run is calm: it has nothing to excuse it.
        let count = if rng.random_bool(0.1) { 0 } else { rng.random_range(1..=6) };
        for _ in 0..count {
            let at = Duration::from_millis(100) + within(rng, ARRIVALS);
            let node = self.any_node(rng);
            let fault = self.draw_fault(rng, node);
            self.faults.push((at, fault));
        }
        self.faults.sort_by_key(|(at, _)| *at);
    }

    fn draw_fault(&self, rng: &mut StdRng, node: NodeName) -> Fault {
        let ms = |rng: &mut StdRng, range| Duration::from_millis(rng.random_range(range));
        match rng.random_range(0..20) {
            0..=2 => Fault::Kill(node, ms(rng, 50..1500)),
            3..=5 => Fault::Freeze(node, ms(rng, 20..2500)),
            6..=7 => Fault::Drain(node, ms(rng, 10..500)),
            8 => Fault::CutControl(node, ms(rng, 20..3000)),
            9 => Fault::SlowControl(node, ms(rng, 100..1000)),
            10 => {
                let (prefill, decode) =
                    (rng.random_range(0..self.prefill_nodes), rng.random_range(0..self.decode_nodes));
                Fault::CutData(NodeName::Prefill(prefill), NodeName::Decode(decode), ms(rng, 20..2500))
            }
            11..=13 => Fault::SlowData(ms(rng, 300..2500)),
            14 => Fault::Flip(ms(rng, 50..500)),
            15 => Fault::Truncate(ms(rng, 50..500)),
            16 => Fault::LoseSeals(ms(rng, 50..500)),
            17 => Fault::LoseCancels(ms(rng, 100..1500)),
            18 => match rng.random_bool(0.5) {
                true => Fault::Sever(ms(rng, 50..500)),
                false => Fault::LateCancels(node),
            },
            _ => Fault::KillRouter(ms(rng, 10..500)),
        }
    }

    fn any_node(&self, rng: &mut StdRng) -> NodeName {
        if rng.random_bool(0.5) {
            NodeName::Prefill(rng.random_range(0..self.prefill_nodes))
        } else {
            NodeName::Decode(rng.random_range(0..self.decode_nodes))
        }
    }

    /// Whether so much goes wrong that a request may fail of it: one node or way that is lost is no excuse.
    pub fn excuses(&self) -> bool {
        use Fault::*;
        let of_one = |fault: &Fault| {
            let process = matches!(fault, Kill(..) | Freeze(..) | Drain(..) | LateCancels(_));
            process || matches!(fault, CutControl(..) | SlowControl(..) | CutData(..) | SlowData(_))
        };
        self.faults.len() > 1 || self.faults.iter().any(|(_, fault)| !of_one(fault))
    }

    /// All nodes.
    pub fn nodes(&self) -> impl Iterator<Item = NodeName> + use<> {
        (0..self.prefill_nodes).map(NodeName::Prefill).chain((0..self.decode_nodes).map(NodeName::Decode))
    }

    /// Tokens of `node`'s arena in blocks.
    pub fn blocks(&self, node: NodeName) -> usize {
        match node {
            NodeName::Prefill(_) => self.prefill_blocks,
            NodeName::Decode(_) => self.decode_blocks,
        }
    }
}

/// Of four runs one has long answers on decode nodes that barely hold one: sequences are preempted.
fn is_tight(seed: u64) -> bool {
    seed % 4 == 1
}

fn draw_request(rng: &mut StdRng, at: Duration, prompt: Prompt, longest: u32) -> Request {
    let max_tokens = rng.random_range(1..=longest);
    let mut sampling = Sampling { seed: rng.random(), ..Sampling::default() };
    if rng.random_bool(0.6) {
        sampling.temperature = rng.random_range(0.2..1.5);
        sampling.top_p = rng.random_range(0.5..=1.0);
        sampling.top_k = rng.random_range(0..20);
    }
    if rng.random_bool(0.3) {
        sampling.repetition_penalty = rng.random_range(1.0..1.5);
        sampling.presence_penalty = rng.random_range(-1.0..1.0);
        sampling.frequency_penalty = rng.random_range(-1.0..1.0);
    }
    if rng.random_bool(0.2) {
        sampling.min_tokens = rng.random_range(0..=max_tokens);
    }
    let client = match rng.random_range(0..20) {
        0 => Client::LeavesAfter(rng.random_range(1..=8)),
        1..=3 => Client::LeavesIn(Duration::from_millis(rng.random_range(1..300))),
        4 => Client::Slow(Duration::from_millis(rng.random_range(1..60))),
        _ => Client::Patient,
    };
    let deadline = match rng.random_bool(0.15) {
        true => rng.random_range(10..300),
        false => rng.random_range(5_000..15_000),
    };
    Request {
        at,
        prompt,
        max_tokens,
        sampling,
        ignore_eos: rng.random_bool(0.5),
        stop_token_ids: if rng.random_bool(0.3) { tokens(rng, 4) } else { Vec::new() },
        deadline: Duration::from_millis(deadline),
        client,
    }
}

fn tokens(rng: &mut StdRng, len: usize) -> Vec<u32> {
    (0..len).map(|_| rng.random_range(1..VOCABULARY - 1)).collect()
}

fn within(rng: &mut StdRng, span: Duration) -> Duration {
    Duration::from_millis(rng.random_range(0..span.as_millis() as u64))
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Prefill(number) => write!(f, "prefill-{number}"),
            Self::Decode(number) => write!(f, "decode-{number}"),
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { prefill_nodes, decode_nodes, prefill_blocks, decode_blocks, max_running, .. } = self;
        writeln!(f, "  local prefill: {:?}", self.local_prefill)?;
        writeln!(
            f,
            "  {prefill_nodes} prefill nodes of {prefill_blocks} blocks, {decode_nodes} decode nodes of {decode_blocks}, \
             {max_running} sequences a step of {} tokens; the router runs {} requests and queues {}",
            self.max_step_tokens, self.max_inflight, self.max_queue
        )?;
        self.faults.iter().try_for_each(|(at, fault)| writeln!(f, "  {:>5} ms  {fault:?}", at.as_millis()))
    }
}
