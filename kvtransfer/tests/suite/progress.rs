//! Cases of hand-offs that take their time: pieces of blocks, keep-alives, silence.
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::{Rng, seq::IndexedRandom};
use tandem_kvtransfer::{Faults, Refusal, TransferErrorKind};

use super::{HandOff, LEASE, Pair, Probe, block_bytes, grant_in_units, open, pair, prompt, run, table};
use crate::MakePair;

/// Of 6 words.
const BLOCK_BYTES: usize = 3 * 16_400;
const UNITS: u8 = super::LAYERS;
/// Short, but long enough for a busy machine to open a hand-off or to send a frame in.
const SHORT: Duration = Duration::from_secs(3);

impl HandOff {
    fn in_units(pair: &Pair, from: Vec<u32>, to: Vec<u32>, lease: Duration) -> Self {
        let (owner, received) = Probe::new();
        Self::granted(pair, grant_in_units(to, UNITS, owner, lease), from, received)
    }
}

fn assert_same(pair: &Pair, from: &[u32], to: &[u32]) {
    for (a, b) in from.iter().zip(to) {
        assert!(block_bytes(&pair.from, *a) == block_bytes(&pair.to, *b), "block {a} is not block {b}");
    }
}

/// Each block is cut at random places, the blocks take turns, some go whole.
pub async fn blocks_arrive_in_units(make: MakePair) {
    let Some(pair) = pair(make, BLOCK_BYTES, Faults::default()) else { return };
    let mut rng = StdRng::seed_from_u64(6);
    let mut free = table(&mut rng, &pair.to, 512);
    for _ in 0..12 {
        let count = rng.random_range(1..=9);
        let (from, to) = (table(&mut rng, &pair.from, count), free.split_off(free.len() - count));
        let handoff = HandOff::in_units(&pair, from.clone(), to.clone(), LEASE);
        let (seal, expected) = (handoff.seal(&pair), handoff.expected());
        let mut next = vec![0; count];
        assert_eq!(handoff.ticket.units, u32::from(UNITS));
        let mut outgoing = open(&pair, &handoff).await;
        let send = async {
            while let Some(least) = next.iter().copied().filter(|unit| *unit < UNITS).min() {
                // A range of neighbours that stand at the same unit.
                let candidates: Vec<usize> = (0..count).filter(|index| next[*index] == least).collect();
                let first = *candidates.choose(&mut rng).expect("one");
                let run = next[first..].iter().take_while(|unit| **unit == least).count();
                let last = first + rng.random_range(1..=run);
                let end = rng.random_range(least + 1..=UNITS);
                outgoing.push_units(least..end, first as u32, &from[first..last], Arc::new(())).await?;
                next[first..last].fill(end);
            }
            outgoing.seal(seal).await
        };
        let (sent, received) = prompt(async { tokio::join!(send, handoff.incoming.verified(expected)) }).await;
        let (sent, received) = (sent.expect("sent"), received.expect("received"));
        assert_eq!((sent.blocks, sent.bytes), (count as u32, (count * BLOCK_BYTES) as u64));
        assert_eq!((received.blocks, received.bytes), (sent.blocks, sent.bytes));
        assert!(sent.post <= sent.elapsed && sent.first_post <= received.verified_at);
        assert_same(&pair, &from, &to);
    }
    assert_eq!(pair.receiver.counters().verified_handoffs.load(Relaxed), 12);
}

pub async fn a_unit_out_of_order_is_refused(make: MakePair) {
    let cases = [(1..2, Refusal::OutOfOrder), (0..2, Refusal::AlreadyWritten)];
    for (wrong, expected_refusal) in cases {
        let Some(pair) = pair(make, BLOCK_BYTES, Faults::default()) else { return };
        let handoff = HandOff::in_units(&pair, vec![3, 4], vec![7, 8], LEASE);
        let (seal, expected) = (handoff.seal(&pair), handoff.expected());
        let mut outgoing = open(&pair, &handoff).await;
        let send = async {
            let (start, rest) = if wrong.start == 0 { (0..1, 1..UNITS) } else { (0..0, 0..UNITS) };
            if !start.is_empty() {
                outgoing.push_units(start, 0, &[3], Arc::new(())).await?;
            }
            outgoing.push_units(wrong, 0, &[3], Arc::new(())).await?;
            outgoing.push_units(rest, 0, &[3], Arc::new(())).await?;
            outgoing.push(1, &[4], Arc::new(())).await?;
            outgoing.seal(seal).await
        };
        let (sent, received) = prompt(async { tokio::join!(send, handoff.incoming.verified(expected)) }).await;
        assert_eq!(sent.expect_err("sent").refusal, Some(expected_refusal));
        assert_eq!(received.expect_err("received").refusal, Some(expected_refusal));
        prompt(handoff.received).await.expect("blocks back");
        assert_eq!(pair.receiver.counters().refused_for(expected_refusal), 1);
    }
}

pub async fn a_missing_unit_is_incomplete(make: MakePair) {
    let Some(pair) = pair(make, BLOCK_BYTES, Faults::default()) else { return };
    let handoff = HandOff::in_units(&pair, vec![3, 4], vec![7, 8], LEASE);
    let (seal, expected) = (handoff.seal(&pair), handoff.expected());
    let mut outgoing = open(&pair, &handoff).await;
    let send = async {
        outgoing.push(0, &[3], Arc::new(())).await?;
        outgoing.push_units(0..UNITS - 1, 1, &[4], Arc::new(())).await?;
        outgoing.seal(seal).await
    };
    let (sent, received) = prompt(async { tokio::join!(send, handoff.incoming.verified(expected)) }).await;
    assert_eq!(sent.expect_err("sent").refusal, Some(Refusal::Incomplete));
    assert_eq!(received.expect_err("received").refusal, Some(Refusal::Incomplete));
}

/// More than a lease passes between the two halves.
pub async fn keep_alives_carry_a_slow_handoff_beyond_its_lease(make: MakePair) {
    let Some(pair) = pair(make, BLOCK_BYTES, Faults::default()) else { return };
    let handoff = HandOff::in_units(&pair, vec![3, 4], vec![7, 8], SHORT);
    let (seal, expected) = (handoff.seal(&pair), handoff.expected());
    let mut outgoing = open(&pair, &handoff).await;
    // Counted from the first half on, which begins the lease anew.
    let pause = SHORT + outgoing.keep_alive_every();
    let send = async {
        outgoing.push_units(0..2, 0, &[3, 4], Arc::new(())).await?;
        let pushed = Instant::now();
        let mut due = tokio::time::interval(outgoing.keep_alive_every());
        while pushed.elapsed() < pause {
            due.tick().await;
            outgoing.keep_alive().await?;
        }
        outgoing.push_units(2..UNITS, 0, &[3, 4], Arc::new(())).await?;
        outgoing.seal(seal).await
    };
    let both = async { tokio::join!(send, handoff.incoming.verified(expected)) };
    let (sent, received) = tokio::time::timeout(pause + super::PROMPT, both).await.expect("it ends");
    assert!(sent.expect("sent").elapsed > pause);
    received.expect("received");
    assert_same(&pair, &[3, 4], &[7, 8]);
}

/// The sender lives and says nothing.
pub async fn silence_for_the_lease_ends_a_handoff(make: MakePair) {
    let Some(pair) = pair(make, 4096, Faults::default()) else { return };
    let handoff = HandOff::new(&pair, vec![1, 2], vec![3, 4], SHORT);
    let expected = handoff.expected();
    let mut outgoing = open(&pair, &handoff).await;
    let pushed = outgoing.push(0, &[1], Arc::new(())).await;
    let error = prompt(handoff.incoming.verified(expected)).await.expect_err("nothing came");
    assert_eq!((error.kind, error.refusal), (TransferErrorKind::Timeout, Some(Refusal::Expired)));
    prompt(handoff.received).await.expect("blocks back");
    assert_eq!(pair.receiver.counters().refused_for(Refusal::Expired), 1);
    assert_eq!(pair.receiver.counters().quarantined_blocks.load(Relaxed), 0);
    // It was told, or is refused.
    let late = async {
        // On a busy machine the lease may have been over by then.
        pushed?;
        outgoing.keep_alive().await?;
        outgoing.push(1, &[2], Arc::new(())).await?;
        outgoing.seal(Default::default()).await
    };
    let refusal = prompt(late).await.expect_err("over").refusal;
    assert!(matches!(refusal, Some(Refusal::Expired | Refusal::Used)), "{refusal:?}");
    let next = HandOff::new(&pair, vec![8], vec![9], LEASE);
    let seal = next.seal(&pair);
    assert!(run(&pair, next, seal).await.1.is_ok());
}

/// A ticket that nobody uses ends too, and is no refusal of anybody's frame.
pub async fn an_unused_grant_expires_without_a_waiter(make: MakePair) {
    let Some(pair) = pair(make, 4096, Faults::default()) else { return };
    let handoff = HandOff::new(&pair, vec![1], vec![3], Duration::from_millis(50));
    prompt(handoff.received).await.expect("blocks back, though nobody waits");
    let counters = pair.receiver.counters();
    let counted = async {
        while counters.refused_for(Refusal::Expired) == 0 {
            tokio::task::yield_now().await;
        }
    };
    prompt(counted).await;
    drop(handoff.incoming);
    assert_eq!((counters.refused_for(Refusal::Expired), counters.refused_for(Refusal::Cancelled)), (1, 0));
}
