//! Who says what to whom, and when it arrives. Between two ends messages stay in order; a way that is cut holds them
//! until it is whole again, as TCP does. A process that died gets nothing more, and one that is frozen gets all at once
//! when it wakes.
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::time::Duration;

use rand::Rng;
use rand::rngs::StdRng;
use tandem_proto::{SequenceHash, v1};

/// Since the start of the run.
pub type Time = Duration;
/// A stream of reports, and so a life: drawn by its node.
pub type Stream = u64;
/// A router's call to a node.
pub type Call = u64;

/// A process, of whatever generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum End {
    Router(usize),
    Node(usize),
}

/// What is said.
#[derive(Clone, Debug)]
pub enum Message {
    /// Opens a stream.
    Register(Stream, Box<v1::Register>),
    /// With a probe of the clock, by its name.
    Load(Stream, Box<v1::Load>, Option<u64>),
    Kv(Stream, v1::KvEvents),
    Hello(Stream),
    Refused(Stream),
    /// The answer to a probe.
    Reading(Stream, u64),
    WantsSnapshot(Stream),
    /// The end of a stream, by either side.
    Closed(Stream),
    /// A call of this life for a request.
    Start(Call, Stream, Work),
    Cancel(Call),
    /// A decode node has room for it, under this name.
    Reserved(Call),
    /// The prefill node is to hand over to this call of this decode node.
    Deliver(Call, usize, Call),
    /// The prompt is read.
    First(Call),
    /// From prefill to decode node: the KV for this call, by that one.
    Seal(Call),
    Token(Call, u32),
    Done(Call),
    Failed(Call),
    /// The process at the other end has died: its connections are reset.
    Reset,
}

/// What a call is for.
#[derive(Clone, Debug)]
pub enum Work {
    /// Reads a prompt with these blocks.
    Prefill(Vec<SequenceHash>),
    /// Generates tokens from this position to that one.
    Decode(u32, u32),
}

/// A message under way.
#[derive(Clone, Debug)]
pub struct Packet {
    pub from: End,
    pub to: End,
    /// Generations of both processes when it was sent.
    pub between: (u64, u64),
    pub message: Message,
}

/// Something that happens at a time.
#[derive(Debug)]
pub enum Event {
    Arrives(Box<Packet>),
    /// A node's own times: see there. With its number and generation.
    Report(usize, u64, usize, Stream),
    Lease(usize, u64, usize, Stream),
    Step(usize, u64, Call),
    Connect(usize, u64, usize),
    /// A router looks for silent nodes, and places what waits.
    Watch(usize, u64),
    /// A client asks, or asks again.
    Client(u64),
    /// A fault begins or ends: its number in the schedule.
    Fault(usize, bool),
}

/// All that is to come.
#[derive(Default)]
pub struct Network {
    queue: BinaryHeap<Reverse<(Time, u64)>>,
    events: BTreeMap<u64, Event>,
    count: u64,
    /// Of each way, when its last message arrives.
    last: BTreeMap<(End, End), Time>,
    cut: BTreeSet<(End, End)>,
    held: BTreeMap<(End, End), VecDeque<Packet>>,
}

/// Longest time on the way.
pub const SLOWEST: Duration = Duration::from_millis(20);

impl Network {
    pub fn at(&mut self, time: Time, event: Event) {
        self.count += 1;
        self.queue.push(Reverse((time, self.count)));
        self.events.insert(self.count, event);
    }

    pub fn next(&mut self) -> Option<(Time, Event)> {
        let Reverse((time, number)) = self.queue.pop()?;
        Some((time, self.events.remove(&number).expect("each is there once")))
    }

    pub fn send(&mut self, now: Time, packet: Packet, rng: &mut StdRng) {
        let way = (packet.from, packet.to);
        if self.cut.contains(&way) {
            self.held.entry(way).or_default().push_back(packet);
            return;
        }
        let slow = rng.random_range(0..50) == 0;
        let most = if slow { SLOWEST.as_micros() as u64 } else { 1000 };
        let arrives = now + Duration::from_micros(rng.random_range(50..=most));
        let last = self.last.entry(way).or_default();
        *last = arrives.max(*last + Duration::from_micros(1));
        let arrives = *last;
        self.at(arrives, Event::Arrives(Box::new(packet)));
    }

    /// Both ways between two ends.
    pub fn cut(&mut self, one: End, other: End) {
        self.cut.extend([(one, other), (other, one)]);
    }

    /// What was held comes now.
    pub fn heal(&mut self, now: Time, one: End, other: End, rng: &mut StdRng) {
        for way in [(one, other), (other, one)] {
            self.cut.remove(&way);
            for packet in self.held.remove(&way).unwrap_or_default() {
                self.send(now, packet, rng);
            }
        }
    }
}
