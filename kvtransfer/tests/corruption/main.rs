//! A thousand seeded attacks on receivers: bytes and frames changed, cut, replayed, misplaced and forged, by the right
//! peer and by others. No hand-off may be verified with other bytes than its sender's; each attack is counted under its
//! reason; and an honest hand-off works right after each. Prints a table of what was counted (`--nocapture`).
//!
//! [`raw`] speaks the frames themselves, over `mem` and `tcp`; [`api`] does what the transports' interface allows, over
//! UCX.
mod api;
mod raw;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use tandem_kvtransfer::ucx::UcxProfile;
use tandem_kvtransfer::{
    Arena, Counters, Expected, Grant, Held, Incoming, TransferError, Transport, Verified, seal_for,
};
use tandem_memory::HostMemory;
use tandem_proto::{HandoffId, Incarnation, SequenceHash, v1};

/// Of four layers of two leaves each, the second one short; half a layer is whole words, too.
const BLOCK_BYTES: usize = 4 * 4112;
const BLOCKS: u32 = 64;
const UNITS: u8 = 4;
const PROMPT_TOKENS: u32 = 61;
const LEASE: Duration = Duration::from_secs(20);
/// Nothing here takes longer.
const PROMPT: Duration = Duration::from_secs(10);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn four_hundred_attacks_over_mem() {
    raw::campaign(raw::mem(), 400).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn four_hundred_attacks_over_tcp() {
    raw::campaign(raw::tcp(), 400).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_attacks_over_ucx_shm() {
    api::campaign(UcxProfile::Shm, noise(1), 100).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_attacks_over_ucx_tcp() {
    api::campaign(UcxProfile::Tcp, noise(1), 100).await;
}

/// Out of the sender's memory, which the receiver maps.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_attacks_over_one_copy() {
    api::campaign(UcxProfile::Shm, shareable_noise(1), 100).await;
}

/// What is under attack.
struct Target {
    receiver: Arc<dyn Transport>,
    /// An honest sender.
    sender: Arc<dyn Transport>,
    from: Arc<Arena>,
    to: Arc<Arena>,
}

/// One granted hand-off.
struct Victim {
    id: HandoffId,
    incoming: Incoming,
    ticket: v1::Ticket,
    from: Vec<u32>,
    to: Vec<u32>,
    hashes: Vec<SequenceHash>,
}

fn noise(seed: u64) -> Arc<Arena> {
    let mut rng = StdRng::seed_from_u64(seed);
    let words: Vec<u64> = (0..BLOCKS as usize * BLOCK_BYTES / 8).map(|_| rng.random()).collect();
    Arena::new(HostMemory::holding(&words).expect("little"), BLOCK_BYTES, UNITS.into())
}

/// As [`noise`], in memory that others may map.
fn shareable_noise(seed: u64) -> Arc<Arena> {
    let (private, mut bytes) = (noise(seed), vec![0; BLOCKS as usize * BLOCK_BYTES]);
    private.read(0, &mut bytes);
    let arena = Arena::new(HostMemory::shareable(bytes.len()).expect("little"), BLOCK_BYTES, UNITS.into());
    arena.write(0, &bytes);
    arena
}

impl Target {
    fn victim(&self, rng: &mut StdRng) -> Victim {
        let count = rng.random_range(2..=6);
        let mut table = || {
            let mut blocks: Vec<u32> = (0..BLOCKS).collect();
            blocks.shuffle(rng);
            blocks.truncate(count);
            blocks
        };
        let (from, to) = (table(), table());
        let id = HandoffId::random(rng);
        let grant = Grant {
            handoff: id,
            prefill_incarnation: Incarnation(rng.random()),
            decode_incarnation: Incarnation(rng.random()),
            compatibility_digest: 3,
            blocks: to.clone(),
            units: UNITS,
            held: Held::default(),
            owner: Arc::new(()),
            lease: LEASE,
        };
        let incoming = self.receiver.accept(grant).expect("accept");
        let hashes = (0..count).map(|_| rng.random::<u128>().into()).collect();
        Victim { id, ticket: incoming.ticket(), incoming, from, to, hashes }
    }

    fn seal(&self, victim: &Victim) -> v1::Seal {
        seal_for(&self.from, &victim.from, &victim.ticket, PROMPT_TOKENS, victim.hashes.clone())
    }

    /// The blocks hold what their sender has.
    fn is_intact(&self, from: &[u32], to: &[u32]) -> bool {
        from.iter().zip(to).all(|(from, to)| self.from.checksum(*from) == self.to.checksum(*to))
    }

    async fn honest(&self, rng: &mut StdRng) {
        let victim = self.victim(rng);
        let (seal, expected) = (self.seal(&victim), victim.expected());
        let send = async {
            let mut outgoing = self.sender.open(&victim.ticket).await?;
            outgoing.push(0, &victim.from, Arc::new(())).await?;
            outgoing.seal(seal).await
        };
        let both = async { tokio::join!(send, victim.incoming.verified(expected)) };
        let (sent, received) = tokio::time::timeout(PROMPT, both).await.expect("in time");
        sent.expect("an honest hand-off is acknowledged");
        received.expect("an honest hand-off is verified");
        assert!(self.is_intact(&victim.from, &victim.to));
    }
}

impl Victim {
    fn expected(&self) -> Expected {
        Expected { prompt_tokens: PROMPT_TOKENS, sequence_hashes: self.hashes.clone() }
    }
}

async fn verdict(incoming: Incoming, expected: Expected) -> Result<Verified, TransferError> {
    tokio::time::timeout(PROMPT, incoming.verified(expected)).await.expect("an attack must not hold a hand-off")
}

/// Garbage, and refusals by reason.
fn counts(counters: &Counters) -> BTreeMap<&'static str, u64> {
    let garbage = counters.protocol_errors.load(Relaxed);
    counters.refused().chain([("garbage", garbage)]).filter(|(_, count)| *count > 0).collect()
}

/// Waits for a count, which follows what it counts.
async fn counted(counters: &Counters, reasons: &[&str], before: &BTreeMap<&'static str, u64>) -> bool {
    let until = Instant::now() + PROMPT;
    let of = |counts: &BTreeMap<&'static str, u64>| {
        reasons.iter().map(|reason| counts.get(reason).copied().unwrap_or_default()).sum::<u64>()
    };
    while of(&counts(counters)) <= of(before) {
        if Instant::now() > until {
            return false;
        }
        tokio::task::yield_now().await;
    }
    true
}

/// The table of a campaign.
struct Tally {
    name: String,
    attacks: BTreeMap<&'static str, u64>,
    verified_intact: u64,
    verified_wrongly: u64,
}

impl Tally {
    fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), attacks: BTreeMap::new(), verified_intact: 0, verified_wrongly: 0 }
    }

    /// A hand-off was verified: its blocks must be its sender's.
    fn verified(&mut self, is_intact: bool) {
        self.verified_intact += u64::from(is_intact);
        self.verified_wrongly += u64::from(!is_intact);
    }

    /// Prints what was counted, and fails when anything was verified wrongly.
    fn conclude(&self, counters: &Counters) {
        let attacks: u64 = self.attacks.values().sum();
        let Self { name, verified_intact, verified_wrongly, .. } = self;
        println!(
            "\n{name}: {attacks} attacks, {verified_wrongly} hand-offs verified wrongly, {verified_intact} unharmed"
        );
        println!("| attack | count |\n|---|---|");
        self.attacks.iter().for_each(|(attack, count)| println!("| {attack} | {count} |"));
        println!("\n| reason | counted |\n|---|---|");
        counts(counters).iter().for_each(|(reason, count)| println!("| {reason} | {count} |"));
        assert_eq!(*verified_wrongly, 0);
    }
}
