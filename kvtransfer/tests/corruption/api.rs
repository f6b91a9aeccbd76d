//! Attacks by what an open hand-off lets its sender do, over UCX, whose frames nobody else can make.
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use tandem_kvtransfer::ucx::presence::or_skip;
use tandem_kvtransfer::ucx::{UcxConfig, UcxProfile, UcxTransport};
use tandem_kvtransfer::{Arena, Faults, Outgoing, TransferError, Transport};
use tandem_proto::{HandoffId, v1};

use super::{Tally, Target, UNITS, counted, counts, noise, verdict};

/// What the receiver must say. The second: the hand-off goes on.
type Attack = (&'static str, &'static str, bool);

const ATTACKS: [Attack; 19] = [
    ("payload bit flipped", "corrupt", false),
    ("payload truncated", "length", false),
    ("an id never granted", "unknown", true),
    ("old ticket replayed", "used", true),
    ("another peer with the right id", "wrong_peer", true),
    ("another peer with another key", "unauthenticated", true),
    ("seal of another layout", "wrong_layout", false),
    ("index outside the grant", "out_of_range", false),
    ("unit outside the block", "length", false),
    ("unit out of order", "out_of_order", false),
    ("unit twice", "already_written", false),
    ("block twice", "already_written", false),
    ("seal before its blocks", "incomplete", false),
    ("seal of another hand-off", "malformed", false),
    ("stale prefill incarnation", "wrong_incarnation", false),
    ("stale decode incarnation", "wrong_incarnation", false),
    ("other prompt length", "wrong_prompt", false),
    ("other tokens", "wrong_sequence", false),
    ("other checksum", "corrupt", false),
];

struct Attackers {
    target: Target,
    stranger: Arc<UcxTransport>,
    flipping: Arc<UcxTransport>,
    truncating: Arc<UcxTransport>,
    /// Of a hand-off that was verified.
    old: v1::Ticket,
}

/// `count` attacks on what comes from `from`, each followed by an honest hand-off. Without UCX it says so.
pub async fn campaign(profile: UcxProfile, from: Arc<Arena>, count: u64) {
    let Some(attackers) = Attackers::start(profile, from).await else { return };
    let (target, counters) = (&attackers.target, attackers.target.receiver.counters());
    let mut tally = Tally::new(target.sender.info().name);
    for seed in 0..count {
        let mut rng = StdRng::seed_from_u64(seed);
        let attack = *ATTACKS.choose(&mut rng).expect("some");
        let (name, reason, is_unharmed) = attack;
        *tally.attacks.entry(name).or_default() += 1;
        let victim = target.victim(&mut rng);
        let before = counts(&counters);
        let (from, to, expected) = (victim.from.clone(), victim.to.clone(), victim.expected());
        let (ticket, seal) = (victim.ticket.clone(), target.seal(&victim));
        let attempt = attackers.attempt(name, &mut rng, &ticket, seal, &from);
        let (said, verdict) = tokio::join!(attempt, verdict(victim.incoming, expected));
        let case = format!("{profile}, seed {seed}: {name}: {said:?}, {verdict:?}");
        assert_eq!(verdict.is_ok(), is_unharmed, "{case}");
        assert!(counted(&counters, &[reason], &before).await, "not counted: {case}: {:?}", counts(&counters));
        if verdict.is_ok() {
            tally.verified(target.is_intact(&from, &to));
        }
        target.honest(&mut rng).await;
    }
    tally.conclude(&counters);
}

impl Attackers {
    async fn start(profile: UcxProfile, from: Arc<Arena>) -> Option<Self> {
        let start = |arena: &Arc<Arena>, faults| {
            or_skip(UcxTransport::start(arena.clone(), UcxConfig { faults, ..UcxConfig::new(profile) }))
        };
        let to = noise(2);
        let sender = start(&from, Faults::default())?;
        // Whoever has no key is not answered, and waits for so long.
        let impatient = UcxConfig { stall_timeout: Duration::from_millis(300), ..UcxConfig::new(profile) };
        let stranger = UcxTransport::start(from.clone(), impatient).expect("the first one started");
        let flipping = start(&from, Faults { flip_byte: true, ..Faults::default() })?;
        let truncating = start(&from, Faults { truncate_push: true, ..Faults::default() })?;
        let receiver = start(&to, Faults::default())?;
        let target = Target { receiver, sender, from, to };
        let victim = target.victim(&mut StdRng::seed_from_u64(u64::MAX));
        let (old, seal, expected) = (victim.ticket.clone(), target.seal(&victim), victim.expected());
        let blocks = victim.from.clone();
        let (sent, verified) =
            tokio::join!(hand_off(&target.sender, &old, &blocks, seal), verdict(victim.incoming, expected));
        sent.and(verified.map(|_| ())).expect("an honest hand-off");
        Some(Self { target, stranger, flipping, truncating, old })
    }

    /// Does it, and what is left of the honest hand-off.
    async fn attempt(
        &self,
        name: &str,
        rng: &mut StdRng,
        ticket: &v1::Ticket,
        mut seal: v1::Seal,
        blocks: &[u32],
    ) -> Result<(), TransferError> {
        let sender = &self.target.sender;
        let block = rng.random_range(0..blocks.len());
        match name {
            "payload bit flipped" => return hand_off(&self.flipping, ticket, blocks, seal).await,
            "payload truncated" => return hand_off(&self.truncating, ticket, blocks, seal).await,
            "an id never granted" => {
                let unknown = v1::Ticket { handoff_id: HandoffId::random(rng).0.to_vec(), ..ticket.clone() };
                hand_off(&self.stranger, &unknown, blocks, seal.clone()).await.expect_err("nobody granted it");
            }
            "old ticket replayed" => {
                let some = &blocks[..1];
                hand_off(sender, &self.old, some, seal.clone()).await.expect_err("it is used");
            }
            "another peer with the right id" => {
                let mut outgoing = sender.open(ticket).await?;
                outgoing.push(0, blocks, Arc::new(())).await?;
                hand_off(&self.stranger, ticket, blocks, seal.clone()).await.expect_err("it is bound");
                return outgoing.seal(seal).await.map(|_| ());
            }
            "another peer with another key" => {
                let secret = (0..32).map(|_| rng.random()).collect();
                let foreign = v1::Ticket { key: Some(v1::HandoffKey { secret }), ..ticket.clone() };
                hand_off(&self.stranger, &foreign, blocks, seal.clone()).await.expect_err("it has no key of ours");
            }
            "index outside the grant" => {
                let joints = [&ticket.joints[..], &[1]].concat();
                let wider = v1::Ticket { blocks: ticket.blocks + 1, joints, ..ticket.clone() };
                let mut outgoing = sender.open(&wider).await?;
                outgoing.push(1, blocks, Arc::new(())).await?;
                return outgoing.seal(seal).await.map(|_| ());
            }
            "unit outside the block" => {
                let finer = v1::Ticket { units: u32::from(UNITS) * 2, ..ticket.clone() };
                return in_units(sender, &finer, &[0..1, 1..2], blocks, seal).await;
            }
            "unit out of order" => return in_units(sender, ticket, &[1..2, 0..1], blocks, seal).await,
            "unit twice" => return in_units(sender, ticket, &[0..2, 1..3], blocks, seal).await,
            "block twice" => return in_units(sender, ticket, &[0..UNITS, 0..UNITS], blocks, seal).await,
            "seal before its blocks" => return in_units(sender, ticket, &[0..1, 1..UNITS - 1], blocks, seal).await,
            "seal of another hand-off" => seal.handoff_id = self.old.handoff_id.clone(),
            "seal of another layout" => seal.compatibility_digest += 1,
            "stale prefill incarnation" => seal.prefill_incarnation = rng.random(),
            "stale decode incarnation" => seal.decode_incarnation = rng.random(),
            "other prompt length" => seal.prompt_tokens += 1,
            "other tokens" => seal.sequence_hashes[block * 16] ^= 1,
            "other checksum" => seal.checksums[block] ^= 1,
            other => panic!("no attack is called {other}"),
        }
        hand_off(sender, ticket, blocks, seal).await
    }
}

async fn hand_off(
    sender: &Arc<impl Transport + ?Sized>,
    ticket: &v1::Ticket,
    blocks: &[u32],
    seal: v1::Seal,
) -> Result<(), TransferError> {
    let mut outgoing = sender.open(ticket).await?;
    outgoing.push(0, blocks, Arc::new(())).await?;
    finish(outgoing, seal).await
}

async fn in_units(
    sender: &Arc<dyn Transport>,
    ticket: &v1::Ticket,
    pieces: &[std::ops::Range<u8>],
    blocks: &[u32],
    seal: v1::Seal,
) -> Result<(), TransferError> {
    let mut outgoing = sender.open(ticket).await?;
    for units in pieces {
        outgoing.push_units(units.clone(), 0, blocks, Arc::new(())).await?;
    }
    finish(outgoing, seal).await
}

async fn finish(outgoing: Outgoing, seal: v1::Seal) -> Result<(), TransferError> {
    outgoing.seal(seal).await.map(|_| ())
}
