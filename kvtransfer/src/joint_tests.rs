//! The sender's machine (`delivery.rs`) and the receiver's (`session.rs`) joined by a faulty link in virtual time:
//! frames are bytes, every delay is drawn from a seed, and each case has a few faults at chosen frames. Nothing waits
//! and nothing runs beside the test, so a failing case is the same every time.
//! Long because the link, its faults and the two machines' drivers are one world, made for two properties.
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tandem_memory::HostMemory;
use tandem_proto::{HandoffId, v1};

use crate::arena::{Arena, Run};
use crate::delivery::{self, Delivery, FrameLimits};
use crate::error::{Refusal, TransferError};
use crate::joints::{self, Joints};
use crate::seal::{self, Manifest};
use crate::session::{Arrived, Offer, Sessions, State};
use crate::terms::{CheckedTicket, Expected, PeerId};
use crate::wire::{Answer, DataHeader, Header, parse_seal};

const ID: HandoffId = HandoffId([7; 16]);
const BLOCKS: u32 = 5;
const UNITS: u8 = 3;
const BLOCK_BYTES: usize = 48;
const LEASE: Duration = Duration::from_secs(30);
const GRACE: Duration = Duration::from_secs(5);
/// Of both ends' waits together: each fault may use up a lease, and an abandoned write two graces.
const PATIENCE: Duration = Duration::from_secs(600);

/// What happens to one frame of the sender, or because of it.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// It arrives so many ms later than it would: others overtake it.
    Late(u64),
    /// It arrives twice.
    Twice,
    /// Of its payload so many bytes are missing.
    Truncated(usize),
    /// This bit of header and payload is wrong.
    Flipped(usize),
    /// The connection breaks, and what is under way comes from a stranger.
    LinkLost,
    /// The connection breaks some time after it has arrived.
    LinkLostBehind,
    /// Its write into the arena fails.
    WriteFails,
    /// Its write into the arena never ends.
    WriteHangs,
    /// The sender gives up.
    SenderLeaves,
    /// The receiver gives up.
    ReceiverLeaves,
    /// The sender stands still for so many ms.
    SenderFreezes(u64),
    /// The receiver's answers take so many ms longer.
    AnswersLate(u64),
    /// Another peer that knows the id says the same.
    Stranger,
}

fn any_fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        (1u64..70_000).prop_map(Fault::Late),
        Just(Fault::Twice),
        (1usize..40).prop_map(Fault::Truncated),
        any::<usize>().prop_map(Fault::Flipped),
        Just(Fault::LinkLost),
        Just(Fault::LinkLostBehind),
        Just(Fault::WriteFails),
        Just(Fault::WriteHangs),
        Just(Fault::SenderLeaves),
        Just(Fault::ReceiverLeaves),
        (1u64..70_000).prop_map(Fault::SenderFreezes),
        (1u64..70_000).prop_map(Fault::AnswersLate),
        Just(Fault::Stranger),
    ]
}

#[derive(Debug)]
enum Event {
    /// The sender does the next thing of its script.
    Act,
    /// A frame of the sender arrives.
    Frame { peer: PeerId, header: [u8; 32], payload: Vec<u8>, write: Write },
    /// An answer arrives.
    Answer(Answer),
    /// The sender learns that the connection is gone.
    SenderCut,
    /// The receiver's backend has closed a connection: nothing of it writes any more.
    Fenced(PeerId),
    /// A write into the arena is over.
    Written { claim: u64, ok: bool },
    /// Verification is over.
    Checked,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Write {
    Succeeds,
    Fails,
    Hangs,
}

/// What the sender does, in this order.
#[derive(Clone, Debug)]
enum Step {
    Push(Range<u8>, u32, Vec<u32>),
    /// So many ms pass, with keep-alives.
    Compute(u64),
    Seal,
}

struct Claim {
    peer: PeerId,
    range: DataHeader,
    runs: Vec<Run>,
    payload: Vec<u8>,
}

struct World {
    now: Instant,
    end: Instant,
    rng: StdRng,
    queue: BTreeMap<(Instant, u64), Event>,
    queued: u64,
    faults: BTreeMap<usize, Fault>,
    frames: usize,
    // The sender.
    from: Arc<Arena>,
    from_blocks: Vec<u32>,
    delivery: Delivery,
    script: std::vec::IntoIter<Step>,
    computing_until: Option<Instant>,
    frozen_until: Instant,
    peer: PeerId,
    // The receiver.
    to: Arc<Arena>,
    to_blocks: Vec<u32>,
    sessions: Sessions,
    owner: Arc<()>,
    claims: BTreeMap<u64, Claim>,
    manifest: Option<Manifest>,
    arrived: Option<Arrived>,
    answers_late: Duration,
    aborted: bool,
    verified: bool,
}

impl World {
    fn new(seed: u64, faults: BTreeMap<usize, Fault>) -> Self {
        let (now, mut rng) = (Instant::now(), StdRng::seed_from_u64(seed));
        let arena = |start: u64| {
            let words: Vec<u64> = (start..start + 16 * BLOCK_BYTES as u64 / 8).collect();
            Arena::new(HostMemory::holding(&words).expect("little"), BLOCK_BYTES, UNITS.into())
        };
        let (from, to) = (arena(1), arena(1 << 32));
        let from_blocks = vec![3, 4, 5, 9, 1];
        let to_blocks = vec![8, 2, 3, 14, 15];
        let mut sessions = Sessions::new(GRACE);
        let owner = Arc::new(());
        let block_bytes = BLOCK_BYTES as u64;
        let offer = Offer { blocks: to_blocks.clone(), block_bytes, units: UNITS, owner: owner.clone(), lease: LEASE };
        sessions.offer(ID, offer, now).expect("fresh");
        sessions.open(PeerId(1), ID, now).expect("it has the key");
        let joints = Joints::parse(&joints::of(&to_blocks), BLOCKS).expect("its own");
        let ticket = CheckedTicket { handoff: ID, blocks: BLOCKS, units: UNITS, joints, lease: LEASE };
        let script = script(&mut rng, &from_blocks).into_iter();
        let manifest = Some(Manifest::new(to.clone(), to_blocks.clone(), UNITS));
        let mut world = Self {
            now,
            end: now + PATIENCE,
            rng,
            queue: BTreeMap::new(),
            queued: 0,
            faults,
            frames: 0,
            delivery: Delivery::new(ticket, from.clone(), now),
            from,
            from_blocks,
            script,
            computing_until: None,
            frozen_until: now,
            peer: PeerId(1),
            to,
            to_blocks,
            sessions,
            owner,
            claims: BTreeMap::new(),
            manifest,
            arrived: None,
            answers_late: Duration::ZERO,
            aborted: false,
            verified: false,
        };
        world.after(Duration::ZERO, Event::Act);
        world
    }

    fn after(&mut self, delay: Duration, event: Event) {
        self.queued += 1;
        self.queue.insert((self.now + delay, self.queued), event);
    }

    fn millis(&mut self, range: Range<u64>) -> Duration {
        Duration::from_millis(self.rng.random_range(range))
    }

    /// Until nothing is under way and both ends are done with it.
    fn run(&mut self) {
        loop {
            let next_event = self.queue.keys().next().map(|(at, _)| *at);
            let sender_timer = (!self.delivery.is_over()).then(|| self.delivery.deadline().max(self.frozen_until));
            let next = [next_event, sender_timer, self.sessions.next_timeout()].into_iter().flatten().min();
            let Some(next) = next else { return };
            assert!(next < self.end, "somebody waits without a bound: {:?}", self.delivery.state());
            self.now = self.now.max(next);
            self.timers();
            let due = self.queue.first_entry().filter(|entry| entry.key().0 <= self.now);
            if let Some(event) = due.map(|entry| entry.remove()) {
                self.handle(event);
            }
            self.check();
        }
    }

    fn timers(&mut self) {
        if self.now >= self.frozen_until && self.delivery.expire(self.now).is_err() {
            self.give_up_sending();
        }
        for (_, ended) in self.sessions.expire(self.now) {
            self.aborted = true;
            if ended.peer.is_some() {
                self.answer(Answer::Refused(Refusal::Expired));
            }
        }
        for peer in self.sessions.overstayed(self.now) {
            let delay = self.millis(0..50);
            self.after(delay, Event::Fenced(peer));
        }
    }

    /// What must hold at every moment.
    fn check(&self) {
        let owned = Arc::strong_count(&self.owner) == 2;
        assert!(owned || self.claims.is_empty(), "blocks were given back under a writer");
        assert!(!(self.verified && self.aborted), "it ended twice");
        if self.delivery.state() == delivery::State::Acknowledged {
            assert!(self.verified, "acknowledged and not verified");
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Act if self.now < self.frozen_until => {
                let delay = self.frozen_until - self.now;
                self.after(delay, Event::Act);
            }
            Event::Act => self.act(),
            Event::Frame { peer, header, payload, write } => self.receive(peer, &header, payload, write),
            Event::Answer(_) | Event::SenderCut if self.now < self.frozen_until => {
                let delay = self.frozen_until - self.now;
                self.after(delay, event);
            }
            // The verdict is in the machine's state.
            Event::Answer(answer) => _ = self.delivery.answered(answer),
            Event::SenderCut => _ = self.delivery.told(Err(TransferError::peer_gone("cut"))),
            Event::Fenced(peer) => {
                self.claims.retain(|_, claim| claim.peer != peer);
                let before = self.sessions.state(ID);
                self.aborted |= !self.sessions.fence(peer, self.now).is_empty();
                if before == Some(State::Sealed) {
                    assert_eq!(self.sessions.state(ID), before, "all of it is here: it needs no peer");
                }
            }
            Event::Written { claim, ok } => self.written(claim, ok),
            Event::Checked => self.checked(),
        }
    }

    fn act(&mut self) {
        if self.delivery.is_over() || self.delivery.state() == delivery::State::Sealed {
            return;
        }
        if let Some(until) = self.computing_until {
            if self.now < until {
                let header = self.delivery.keep_alive().expect("open");
                self.send(header, Vec::new());
                self.delivery.progressed(self.now);
                let delay = self.delivery.keep_alive_every().min(until - self.now);
                return self.after(delay, Event::Act);
            }
            self.computing_until = None;
        }
        match self.script.next() {
            None => return,
            Some(Step::Compute(ms)) => self.computing_until = Some(self.now + Duration::from_millis(ms)),
            Some(Step::Push(units, first, blocks)) => self.push(units, first, &blocks),
            Some(Step::Seal) => self.seal(),
        }
        let delay = self.millis(0..20);
        self.after(delay, Event::Act);
    }

    fn push(&mut self, units: Range<u8>, first: u32, blocks: &[u32]) {
        let limits = FrameLimits { bytes: 3 * BLOCK_BYTES, runs: self.rng.random_range(1..4) };
        let mut push = self.delivery.push(units, first, blocks, limits, self.now).expect("granted");
        while let Some(frame) = self.delivery.next_frame(&mut push) {
            let mut payload = vec![0; frame.bytes() as usize];
            self.from.gather(&frame.runs, 0, &mut payload);
            self.send(Header::Data(frame.header), payload);
            self.delivery.pushed(frame.header, frame.bytes(), self.now);
        }
    }

    fn seal(&mut self) {
        let ticket = ticket();
        let seal = seal::seal_for(&self.from, &self.from_blocks, &ticket, 77, vec![5.into(); BLOCKS as usize]);
        let payload = self.delivery.seal(&seal).expect("short");
        self.send(Header::Seal(ID), payload);
        self.delivery.sealed(self.now);
    }

    fn give_up_sending(&mut self) {
        if let Some(header) = self.delivery.cancel() {
            self.send(header, Vec::new());
        }
    }

    /// Puts a frame on the link, with the fault that is due.
    fn send(&mut self, header: Header, payload: Vec<u8>) {
        // In order: a later frame leaves later, and all take equally long.
        let delay = Duration::from_millis(20) + Duration::from_micros(self.frames as u64);
        let fault = self.faults.remove(&self.frames);
        self.frames += 1;
        let (mut delay, mut header, mut payload, mut write) = (delay, header.encode(), payload, Write::Succeeds);
        match fault {
            None => {}
            Some(Fault::Late(ms)) => delay += Duration::from_millis(ms),
            Some(Fault::Truncated(bytes)) => payload.truncate(payload.len().saturating_sub(bytes)),
            Some(Fault::Flipped(bit)) => match bit / 8 % (32 + payload.len()) {
                at @ 0..32 => header[at] ^= 1 << (bit % 8),
                at => payload[at - 32] ^= 1 << (bit % 8),
            },
            Some(Fault::WriteFails) => write = Write::Fails,
            Some(Fault::WriteHangs) => write = Write::Hangs,
            Some(Fault::SenderFreezes(ms)) => self.frozen_until = self.now + Duration::from_millis(ms),
            Some(Fault::AnswersLate(ms)) => self.answers_late = Duration::from_millis(ms),
            Some(Fault::Twice) => {
                let again = Event::Frame { peer: self.peer, header, payload: payload.clone(), write };
                self.after(delay + Duration::from_millis(3), again);
            }
            Some(Fault::Stranger) => {
                let stranger = Event::Frame { peer: PeerId(99), header, payload: payload.clone(), write };
                self.after(delay + Duration::from_millis(1), stranger);
            }
            Some(Fault::LinkLost) => {
                self.after(delay, Event::Fenced(self.peer));
                self.after(delay * 2, Event::SenderCut);
                self.peer.0 += 1;
            }
            Some(Fault::LinkLostBehind) => {
                let behind = delay + self.millis(0..100);
                self.after(delay, Event::Frame { peer: self.peer, header, payload, write });
                self.after(behind, Event::Fenced(self.peer));
                self.after(behind * 2, Event::SenderCut);
                self.peer.0 += 1;
                return;
            }
            Some(Fault::SenderLeaves) => self.give_up_sending(),
            Some(Fault::ReceiverLeaves) => self.give_up_receiving(),
        }
        self.after(delay, Event::Frame { peer: self.peer, header, payload, write });
    }

    fn give_up_receiving(&mut self) {
        if self.sessions.abort(ID, self.now).is_some() {
            self.aborted = true;
            self.answer(Answer::Refused(Refusal::Cancelled));
        }
    }

    fn answer(&mut self, answer: Answer) {
        let delay = self.millis(0..40) + self.answers_late;
        self.after(delay, Event::Answer(answer));
    }

    fn receive(&mut self, peer: PeerId, header: &[u8], payload: Vec<u8>, write: Write) {
        let over = self.aborted || self.verified;
        let outcome = match Header::parse(header) {
            Some(Header::Data(range)) => match self.sessions.claim(peer, range, payload.len() as u64, self.now) {
                Ok(pieces) => {
                    let runs = self.to.runs(&pieces.blocks, self.to.slice(pieces.of, &pieces.units));
                    self.queued += 1;
                    let claim = self.queued;
                    self.claims.insert(claim, Claim { peer, range, runs, payload });
                    if write != Write::Hangs {
                        let delay = self.millis(0..30);
                        self.after(delay, Event::Written { claim, ok: write == Write::Succeeds });
                    }
                    Ok(())
                }
                Err(rejected) => Err(rejected),
            },
            Some(Header::Seal(handoff)) => match parse_seal(handoff, &payload) {
                Some(seal) => self.sessions.seal(peer, handoff, seal, self.now).map(|arrived| self.whole(arrived)),
                None => Err(self.sessions.unreadable(peer, handoff, self.now)),
            },
            Some(Header::KeepAlive(handoff)) => self.sessions.keep_alive(peer, handoff, self.now),
            Some(Header::Cancel(handoff)) => {
                let ended = self.sessions.cancelled_by(peer, handoff, self.now);
                assert!(!over || ended.is_none(), "it ended twice");
                self.aborted |= ended.is_some();
                return;
            }
            // A stream that cannot be read any more is closed, as the tcp backend does.
            Some(_) | None => {
                self.after(Duration::ZERO, Event::Fenced(peer));
                return self.after(Duration::from_millis(20), Event::SenderCut);
            }
        };
        match outcome {
            Ok(()) => assert!(!over, "a frame was accepted after the end"),
            Err(rejected) => {
                assert!(!(rejected.aborted && over), "it ended twice");
                self.aborted |= rejected.aborted;
                self.answer(Answer::Refused(rejected.refusal));
            }
        }
    }

    fn written(&mut self, claim: u64, ok: bool) {
        // Fenced meanwhile: the backend has stopped writing.
        let Some(Claim { range, runs, payload, .. }) = self.claims.remove(&claim) else { return };
        if !ok {
            let ended = self.sessions.failed(ID, self.now);
            self.aborted |= ended.is_some();
            if ended.is_some() {
                self.answer(Answer::Refused(Refusal::WriteFailed));
            }
            return;
        }
        let mut rest = payload.as_slice();
        for run in runs {
            let (now, later) = rest.split_at(run.bytes);
            self.to.write(run.at, now);
            rest = later;
        }
        let arrived = self.sessions.written(range, self.now);
        if let Some(manifest) = &mut self.manifest {
            manifest.cover_ranges([range]);
        }
        self.whole(arrived);
    }

    fn whole(&mut self, arrived: Option<Arrived>) {
        if arrived.is_some() {
            assert!(self.claims.is_empty() && self.sessions.state(ID) == Some(State::Sealed));
            self.arrived = arrived;
            let delay = self.millis(0..200);
            self.after(delay, Event::Checked);
        }
    }

    fn checked(&mut self) {
        let (Some(arrived), Some(manifest)) = (self.arrived.take(), self.manifest.take()) else { return };
        let expected = Expected { prompt_tokens: 77, sequence_hashes: vec![5.into(); BLOCKS as usize] };
        match seal::verify(&arrived.seal, &ticket(), &expected, || manifest.finish()) {
            Ok(()) => {
                if self.sessions.verified(ID).is_some() {
                    self.verified = true;
                    self.read();
                    self.answer(Answer::Ack);
                }
            }
            Err(refusal) => {
                if self.sessions.abort(ID, self.now).is_some() {
                    self.aborted = true;
                    self.answer(Answer::Refused(refusal));
                }
            }
        }
    }

    /// The request reads its blocks: they are the sender's.
    fn read(&self) {
        let bytes =
            |arena: &Arena, blocks: &[u32]| blocks.iter().map(|block| arena.checksum(*block)).collect::<Vec<_>>();
        assert_eq!(bytes(&self.from, &self.from_blocks), bytes(&self.to, &self.to_blocks), "read and wrong");
    }
}

fn ticket() -> v1::Ticket {
    v1::Ticket { handoff_id: ID.0.to_vec(), blocks: BLOCKS, units: UNITS.into(), ..Default::default() }
}

/// Blocks in chunks, chunks in groups of units, with pauses of up to two leases.
fn script(rng: &mut StdRng, blocks: &[u32]) -> Vec<Step> {
    let (mut steps, mut first) = (Vec::new(), 0);
    while first < blocks.len() {
        let last = rng.random_range(first + 1..=blocks.len());
        let mut unit = 0;
        while unit < UNITS {
            let end = rng.random_range(unit + 1..=UNITS);
            if rng.random_bool(0.2) {
                steps.push(Step::Compute(rng.random_range(0..60_000)));
            }
            steps.push(Step::Push(unit..end, first as u32, blocks[first..last].to_vec()));
            unit = end;
        }
        first = last;
    }
    steps.push(Step::Seal);
    steps
}

/// Runs a case to its end, and checks what must hold there.
fn run(seed: u64, faults: BTreeMap<usize, Fault>) -> World {
    let mut world = World::new(seed, faults);
    world.run();
    assert!(world.delivery.is_over(), "the sender still waits: {:?}", world.delivery.state());
    assert_eq!(world.sessions.state(ID), None, "the receiver still waits");
    assert!(world.verified != world.aborted, "it ended one way");
    assert_eq!((Arc::strong_count(&world.owner), world.sessions.quarantined().blocks), (1, 0), "blocks are back");
    let again = Offer { blocks: vec![0], block_bytes: 48, units: 1, owner: Arc::new(()), lease: LEASE };
    assert_eq!(world.sessions.offer(ID, again, world.now), Err(Refusal::Used));
    let untouched = |block: &u32| !world.to_blocks.contains(block);
    for block in (0..16).filter(untouched) {
        let first = (1u64 << 32) + u64::from(block) * 6;
        let mut bytes = [0; 8];
        world.to.copy_out(block, 0, &mut bytes);
        assert_eq!(u64::from_ne_bytes(bytes), first, "block {block} was not granted");
    }
    world
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn an_undisturbed_handoff_is_acknowledged(seed in any::<u64>()) {
        let world = run(seed, BTreeMap::new());
        prop_assert_eq!(world.delivery.state(), delivery::State::Acknowledged);
        prop_assert!(world.verified);
    }

    #[test]
    fn whatever_the_link_does_nothing_unverified_is_read_and_nobody_waits_for_ever(
        seed in any::<u64>(), faults in prop::collection::btree_map(0usize..14, any_fault(), 1..5),
    ) {
        run(seed, faults);
    }
}
