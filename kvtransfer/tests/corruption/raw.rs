//! Attacks by frames that are made by hand.
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use tandem_kvtransfer::mem::{MemFaults, MemNetwork, MemTransport, RawLink};
use tandem_kvtransfer::tcp::stranger::Stranger;
use tandem_kvtransfer::tcp::{TcpConfig, TcpTransport};
use tandem_kvtransfer::wire::{DataHeader, Header, Units, encode_seal};
use tandem_kvtransfer::{Arena, Counters, Refusal, TransferError};
use tandem_proto::{HandoffId, v1};

use super::{PROMPT, Tally, Target, UNITS, Victim, counted, counts, noise, verdict};

/// A connection to the receiver, as an attacker has it.
trait Link: Send {
    fn send(&mut self, frame: &Frame);
}

#[derive(Clone)]
struct Frame {
    header: [u8; 32],
    payload: Vec<u8>,
}

/// By the hello of a ticket.
type Connect = Box<dyn Fn(&v1::Ticket) -> Result<Box<dyn Link>, TransferError> + Send>;

pub struct Raw {
    target: Target,
    connect: Connect,
    name: &'static str,
}

pub fn mem() -> Raw {
    let (network, from, to) = (MemNetwork::default(), noise(1), noise(2));
    let sender = MemTransport::new(&network, from.clone(), MemFaults::default());
    let receiver = MemTransport::new(&network, to.clone(), MemFaults::default());
    let attacker = sender.clone();
    let connect: Connect = Box::new(move |ticket| Ok(Box::new(attacker.opened_link(ticket)?)));
    Raw { target: Target { receiver, sender, from, to }, connect, name: "mem" }
}

pub fn tcp() -> Raw {
    let bind = |arena: &Arc<Arena>| {
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        TcpTransport::bind(any, arena.clone(), TcpConfig::default()).expect("bind")
    };
    let (from, to) = (noise(1), noise(2));
    let (sender, receiver) = (bind(&from), bind(&to));
    let connect: Connect = Box::new(|ticket| Ok(Box::new(Stranger::connect(ticket, PROMPT)?)));
    Raw { target: Target { receiver, sender, from, to }, connect, name: "tcp" }
}

impl Link for RawLink {
    fn send(&mut self, frame: &Frame) {
        // Closed by what came before: part of some attacks.
        let _ = RawLink::send(self, &frame.header, &frame.payload);
    }
}

impl Link for Stranger {
    fn send(&mut self, frame: &Frame) {
        let is_data = matches!(Header::parse(&frame.header), Some(Header::Data(_)));
        // As above.
        let _ = Stranger::send(self, &frame.header, &frame.payload, is_data);
    }
}

/// What an attack must lead to.
enum Expect {
    /// One of these reasons is counted, and the hand-off is not verified.
    Refused(&'static [&'static str]),
    /// The reason is counted, and the hand-off goes on.
    Unharmed(&'static str),
    /// It may mean the same as before; else something is counted.
    Either,
}

use Expect::{Either, Refused, Unharmed};

/// An attack changes the frames of an honest hand-off, or adds to them.
type Attack = (&'static str, fn(&mut Scene) -> Expect);

struct Scene<'a> {
    rng: &'a mut StdRng,
    victim: &'a Victim,
    frames: Vec<Frame>,
    seal: v1::Seal,
    /// Another peer says hello by this ticket when the right one has begun.
    foreign: Option<v1::Ticket>,
    /// Of a hand-off that was verified.
    old: &'a Old,
}

const ATTACKS: [Attack; 31] = [
    ("payload bit flipped", |scene| {
        let frame = scene.data();
        flip(scene.rng, &mut scene.frames[frame].payload);
        Refused(&["corrupt"])
    }),
    ("seal bit flipped", |scene| {
        let last = scene.frames.len() - 1;
        flip(scene.rng, &mut scene.frames[last].payload);
        Refused(&["malformed"])
    }),
    ("header bit flipped", |scene| {
        let frame = scene.rng.random_range(0..scene.frames.len());
        flip(scene.rng, &mut scene.frames[frame].header);
        Either
    }),
    ("header of noise", |scene| {
        let frame = scene.data();
        scene.rng.fill(&mut scene.frames[frame].header[..]);
        Refused(&["garbage"])
    }),
    ("payload rotated", |scene| {
        let frame = scene.data();
        scene.frames[frame].payload.rotate_left(8);
        Refused(&["corrupt"])
    }),
    ("seal before its blocks", |scene| {
        let seal = scene.frames.pop().expect("seal");
        let at = scene.rng.random_range(0..scene.frames.len());
        scene.frames.insert(at, seal);
        Refused(&["incomplete"])
    }),
    ("payload truncated", |scene| {
        let frame = scene.data();
        let payload = &mut scene.frames[frame].payload;
        payload.truncate(scene.rng.random_range(0..payload.len()));
        Refused(&["length"])
    }),
    ("payload too long", |scene| {
        let frame = scene.data();
        let more = scene.rng.random_range(1..400);
        scene.frames[frame].payload.extend(vec![7; more]);
        Refused(&["length"])
    }),
    ("seal truncated", |scene| {
        let last = scene.frames.len() - 1;
        let payload = &mut scene.frames[last].payload;
        payload.truncate(scene.rng.random_range(0..payload.len()));
        Refused(&["malformed"])
    }),
    ("old seal replayed", |scene| {
        let last = scene.frames.len() - 1;
        scene.frames[last].payload = scene.old.frames.last().expect("seal").payload.clone();
        Refused(&["malformed"])
    }),
    ("old seal under the new id", |scene| {
        let mut seal = scene.old.seal.clone();
        seal.handoff_id = scene.victim.id.0.to_vec();
        scene.reseal(seal);
        Refused(&["wrong_incarnation"])
    }),
    ("old checksums under the new identity", |scene| {
        let mut seal = scene.seal.clone();
        let n = seal.checksums.len();
        seal.checksums = scene.old.seal.checksums.iter().copied().cycle().take(n).collect();
        scene.reseal(seal);
        Refused(&["corrupt"])
    }),
    ("old data replayed", |scene| {
        let at = scene.rng.random_range(0..scene.frames.len());
        scene.frames.insert(at, scene.old.frames[0].clone());
        Unharmed("used")
    }),
    ("old ticket replayed", |scene| {
        scene.foreign = Some(scene.old.ticket.clone());
        Unharmed("used")
    }),
    ("old frames under the new ticket", |scene| {
        let at = scene.rng.random_range(0..scene.frames.len());
        scene.frames.splice(at..at, scene.old.frames.iter().cloned());
        Unharmed("used")
    }),
    ("stale prefill incarnation", |scene| {
        let stale = scene.rng.random();
        scene.reseal(v1::Seal { prefill_incarnation: stale, ..scene.seal.clone() });
        Refused(&["wrong_incarnation"])
    }),
    ("stale decode incarnation", |scene| {
        let stale = scene.rng.random();
        scene.reseal(v1::Seal { decode_incarnation: stale, ..scene.seal.clone() });
        Refused(&["wrong_incarnation"])
    }),
    ("other prompt length", |scene| {
        let tokens = scene.rng.random_range(0..60);
        scene.reseal(v1::Seal { prompt_tokens: tokens, ..scene.seal.clone() });
        Refused(&["wrong_prompt"])
    }),
    ("other tokens", |scene| {
        let mut seal = scene.seal.clone();
        let byte = scene.rng.random_range(0..seal.sequence_hashes.len());
        seal.sequence_hashes[byte] ^= 1 << scene.rng.random_range(0..8);
        scene.reseal(seal);
        Refused(&["wrong_sequence"])
    }),
    ("a sequence hash cut short", |scene| {
        let mut seal = scene.seal.clone();
        let left = seal.sequence_hashes.len() - scene.rng.random_range(1..16);
        seal.sequence_hashes.truncate(left);
        scene.reseal(seal);
        Refused(&["malformed"])
    }),
    ("checksum missing", |scene| {
        let mut seal = scene.seal.clone();
        seal.checksums.pop();
        scene.reseal(seal);
        Refused(&["wrong_prompt"])
    }),
    ("the right ticket in other hands", |scene| {
        scene.foreign = Some(scene.victim.ticket.clone());
        Unharmed("wrong_peer")
    }),
    ("a hello with another key", |scene| {
        let secret = (0..32).map(|_| scene.rng.random()).collect();
        let key = Some(v1::HandoffKey { secret });
        scene.foreign = Some(v1::Ticket { key, ..scene.victim.ticket.clone() });
        Unharmed("unauthenticated")
    }),
    ("a hello for another incarnation", |scene| {
        let decode_incarnation = scene.rng.random();
        scene.foreign = Some(v1::Ticket { decode_incarnation, ..scene.victim.ticket.clone() });
        Unharmed("unauthenticated")
    }),
    ("a seal of another layout", |scene| {
        scene.reseal(v1::Seal { compatibility_digest: 4, ..scene.seal.clone() });
        Refused(&["wrong_layout"])
    }),
    ("index outside the grant", |scene| {
        let frame = scene.data();
        let far = scene.victim.to.len() as u32;
        scene.rewrite(frame, |range| range.first += far);
        Refused(&["out_of_range"])
    }),
    ("no blocks at all", |scene| {
        let frame = scene.data();
        scene.rewrite(frame, |range| range.count = 0);
        Refused(&["out_of_range"])
    }),
    ("unit outside the block", |scene| {
        let frame = scene.data();
        scene.rewrite(frame, |range| range.units = Units::new(UNITS..UNITS + 1, UNITS));
        Refused(&["out_of_range"])
    }),
    ("unit out of order", |scene| {
        let unit = scene.rng.random_range(1..UNITS);
        let range = DataHeader { handoff: scene.victim.id, first: 0, count: 1, units: Units::new(unit..UNITS, UNITS) };
        let bytes = super::BLOCK_BYTES / usize::from(UNITS) * usize::from(UNITS - unit);
        scene.frames.insert(0, Frame { header: Header::Data(range).encode(), payload: vec![0; bytes] });
        Refused(&["out_of_order"])
    }),
    ("block twice", |scene| {
        let frame = scene.data();
        scene.frames.insert(frame + 1, scene.frames[frame].clone());
        Refused(&["already_written"])
    }),
    ("an id never granted", |scene| {
        let at = scene.rng.random_range(0..scene.frames.len());
        let id = HandoffId::random(scene.rng);
        let range = DataHeader { handoff: id, first: 0, count: 1, units: Units::ALL };
        let data = Frame { header: Header::Data(range).encode(), payload: vec![0; super::BLOCK_BYTES] };
        let unknown = if scene.rng.random() { data } else { bare(Header::KeepAlive(id)) };
        scene.frames.insert(at, unknown);
        Unharmed("unknown")
    }),
];

/// `count` attacks, each followed by an honest hand-off.
pub async fn campaign(raw: Raw, count: u64) {
    let Raw { target, connect, name } = raw;
    let counters = target.receiver.counters();
    let mut tally = Tally::new(name);
    let old = recorded(&target, &connect).await;
    for seed in 0..count {
        let mut rng = StdRng::seed_from_u64(seed);
        let (attack, make) = *ATTACKS.choose(&mut rng).expect("some");
        *tally.attacks.entry(attack).or_default() += 1;
        let victim = target.victim(&mut rng);
        let frames = frames(&target, &victim, &mut rng);
        let seal = target.seal(&victim);
        let mut scene = Scene { rng: &mut rng, victim: &victim, frames, seal, foreign: None, old: &old };
        let expect = make(&mut scene);
        let Scene { frames, foreign, .. } = scene;
        // A changed header may leave the hand-off open: then the end of the connection, which is bound to it, ends it.
        let is_open = attack.starts_with("header");
        let before = counts(&counters);
        let (from, to, expected) = (victim.from.clone(), victim.to.clone(), victim.expected());
        let link = connect(&victim.ticket).expect("it has the key");
        let link = say(link, &connect, &counters, &frames, foreign).await;
        let kept = (!is_open).then_some(link);
        let verdict = verdict(victim.incoming, expected).await;
        let case = format!("{name}, seed {seed}: {attack}: {verdict:?}");
        drop(kept);
        if verdict.is_ok() {
            tally.verified(target.is_intact(&from, &to));
        }
        let reasons = match expect {
            Refused(_) | Unharmed(_) if verdict.is_ok() != matches!(expect, Unharmed(_)) => panic!("{case}"),
            Refused(reasons) => reasons,
            Unharmed(reason) => &[reason],
            Either if verdict.is_ok() => &[],
            Either => &ANY,
        };
        let is_counted = reasons.is_empty() || counted(&counters, reasons, &before).await;
        assert!(is_counted, "not counted: {case}: {before:?} and then {:?}", counts(&counters));
        target.honest(&mut rng).await;
    }
    assert_eq!(counters.quarantined_blocks.load(Relaxed), 0);
    tally.conclude(&counters);
}

/// What a changed header may turn out to be.
const ANY: [&str; 10] = [
    "garbage",
    "unknown",
    "length",
    "out_of_range",
    "already_written",
    "incomplete",
    "malformed",
    "out_of_order",
    "peer_lost",
    "corrupt",
];

/// Says `frames`; once the first of them is here, another peer says hello, and is refused.
async fn say(
    mut link: Box<dyn Link>,
    connect: &Connect,
    counters: &Counters,
    frames: &[Frame],
    foreign: Option<v1::Ticket>,
) -> Box<dyn Link> {
    let (first, rest) = frames.split_at(1);
    let received = counters.received_bytes.load(Relaxed);
    first.iter().for_each(|frame| link.send(frame));
    if let Some(ticket) = foreign {
        while counters.received_bytes.load(Relaxed) == received {
            tokio::task::yield_now().await;
        }
        let refused = connect(&ticket).err().and_then(|error| error.refusal);
        assert!(
            matches!(refused, Some(Refusal::Used | Refusal::WrongPeer | Refusal::Unauthenticated)),
            "a stranger is welcome: {refused:?}"
        );
    }
    rest.iter().for_each(|frame| link.send(frame));
    link
}

/// A hand-off that was verified.
struct Old {
    ticket: v1::Ticket,
    frames: Vec<Frame>,
    seal: v1::Seal,
}

/// An honest hand-off made of frames, which is verified.
async fn recorded(target: &Target, connect: &Connect) -> Old {
    let mut rng = StdRng::seed_from_u64(u64::MAX);
    let victim = target.victim(&mut rng);
    let (frames, seal, expected) = (frames(target, &victim, &mut rng), target.seal(&victim), victim.expected());
    let mut link = connect(&victim.ticket).expect("it has the key");
    frames.iter().for_each(|frame| link.send(frame));
    let ticket = victim.ticket.clone();
    verdict(victim.incoming, expected).await.expect("these are the right frames");
    Old { ticket, frames, seal }
}

/// Data in chunks of blocks and units, then the seal.
fn frames(target: &Target, victim: &Victim, rng: &mut StdRng) -> Vec<Frame> {
    let (mut frames, mut first) = (Vec::new(), 0);
    while first < victim.from.len() {
        let last = rng.random_range(first + 1..=victim.from.len());
        let mut unit = 0;
        while unit < UNITS {
            let end = rng.random_range(unit + 1..=UNITS);
            let units = Units::new(unit..end, UNITS);
            let range = DataHeader { handoff: victim.id, first: first as u32, count: (last - first) as u32, units };
            let runs = target.from.runs(&victim.from[first..last], target.from.slice(UNITS, &(unit..end)));
            let mut payload = vec![0; runs.iter().map(|run| run.bytes).sum()];
            target.from.gather(&runs, 0, &mut payload);
            frames.push(Frame { header: Header::Data(range).encode(), payload });
            unit = end;
        }
        first = last;
    }
    frames.push(seal_frame(victim.id, &target.seal(victim)));
    frames
}

fn seal_frame(id: HandoffId, seal: &v1::Seal) -> Frame {
    Frame { header: Header::Seal(id).encode(), payload: encode_seal(seal) }
}

fn bare(header: Header) -> Frame {
    Frame { header: header.encode(), payload: Vec::new() }
}

fn flip(rng: &mut StdRng, bytes: &mut [u8]) {
    let bit = rng.random_range(0..bytes.len() * 8);
    bytes[bit / 8] ^= 1 << (bit % 8);
}

impl Scene<'_> {
    /// Any of the frames with data.
    fn data(&mut self) -> usize {
        self.rng.random_range(0..self.frames.len() - 1)
    }

    fn reseal(&mut self, seal: v1::Seal) {
        let last = self.frames.len() - 1;
        self.frames[last] = seal_frame(self.victim.id, &seal);
    }

    fn rewrite(&mut self, frame: usize, change: impl FnOnce(&mut DataHeader)) {
        let Some(Header::Data(mut range)) = Header::parse(&self.frames[frame].header) else { panic!("not data") };
        change(&mut range);
        self.frames[frame].header = Header::Data(range).encode();
    }
}
