//! Cases in which bytes arrive, and cases in which rules are broken.
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::{Rng, seq::SliceRandom};
use tandem_kvtransfer::{Faults, Refusal, TransferErrorKind};
use tandem_proto::v1;

use super::{CANARY, HandOff, LEASE, Pair, Probe, block_bytes, grant, open, pair, prompt, run, table};
use crate::MakePair;

pub async fn random_block_tables_arrive_and_nothing_else_changes(make: MakePair) {
    for size in [8, 4104, 65_536, 300_000] {
        let Some(pair) = pair(make, size, Faults::default()) else { return };
        let mut granted = std::collections::HashSet::new();
        for seed in 0..8 {
            let mut rng = StdRng::seed_from_u64(seed);
            let count = rng.random_range(1..=7);
            let (from, mut to) = (table(&mut rng, &pair.from, count), table(&mut rng, &pair.to, 64));
            to.retain(|block| !granted.contains(block));
            to.truncate(count);
            if to.len() < count {
                break;
            }
            granted.extend(to.iter().copied());
            let handoff = HandOff::new(&pair, from.clone(), to.clone(), LEASE);
            let seal = handoff.seal(&pair);
            let (sent, received) = run(&pair, handoff, seal.clone()).await;
            let (sent, received) = (sent.expect("sent"), received.expect("received"));
            assert_eq!((sent.bytes, sent.blocks), ((count * size) as u64, count as u32));
            assert_eq!((received.bytes, received.blocks), (sent.bytes, sent.blocks));
            assert_eq!(received.seal, seal);
            assert!(received.first_arrival <= received.last_arrival && received.last_arrival <= received.verified_at);
            for (a, b) in from.iter().zip(&to) {
                assert_eq!(block_bytes(&pair.from, *a), block_bytes(&pair.to, *b), "seed {seed}, size {size}");
            }
            assert_untouched(&pair, &granted);
        }
    }
}

fn assert_untouched(pair: &Pair, granted: &std::collections::HashSet<u32>) {
    let canary = CANARY.to_ne_bytes().repeat(pair.to.block_bytes() / 8);
    for block in (0..pair.to.blocks()).filter(|block| !granted.contains(block)) {
        assert!(block_bytes(&pair.to, block) == canary, "block {block} was not granted and changed");
    }
}

pub async fn two_hundred_handoffs_interleaved(make: MakePair) {
    let Some(pair) = pair(make, 4096, Faults::default()) else { return };
    let mut rng = StdRng::seed_from_u64(200);
    let mut free = table(&mut rng, &pair.to, 1024);
    let handoffs: Vec<_> = (0..200)
        .map(|_| {
            let count = rng.random_range(1..=5);
            let (from, to) = (table(&mut rng, &pair.from, count), free.split_off(free.len() - count));
            let mut order: Vec<u32> = (0..count as u32).collect();
            order.shuffle(&mut rng);
            (HandOff::new(&pair, from, to, LEASE), order)
        })
        .collect();
    let transfers = handoffs.into_iter().map(|(handoff, order)| one_by_one(&pair, handoff, order));
    prompt(join_all(transfers)).await;
    let counters = pair.receiver.counters();
    assert_eq!(counters.verified_handoffs.load(std::sync::atomic::Ordering::Relaxed), 200);
}

async fn one_by_one(pair: &Pair, handoff: HandOff, order: Vec<u32>) {
    let (seal, expected) = (handoff.seal(pair), handoff.expected());
    let send = async {
        let mut outgoing = pair.sender.open(&handoff.ticket).await.expect("open");
        for index in order {
            let block = handoff.from[index as usize];
            outgoing.push(index, &[block], Arc::new(())).await.expect("push");
            tokio::task::yield_now().await;
        }
        outgoing.seal(seal).await.expect("seal")
    };
    let (receipt, received) = tokio::join!(send, handoff.incoming.verified(expected));
    assert_eq!(received.expect("verified").descriptors, receipt.descriptors);
    for (a, b) in handoff.from.iter().zip(&handoff.to) {
        assert_eq!(block_bytes(&pair.from, *a), block_bytes(&pair.to, *b));
    }
}

pub async fn an_id_is_single_use(make: MakePair) {
    let Some(pair) = pair(make, 4096, Faults::default()) else { return };
    let first = HandOff::small(&pair);
    let (ticket, seal, from) = (first.ticket.clone(), first.seal(&pair), first.from.clone());
    let (sent, received) = run(&pair, first, seal.clone()).await;
    assert!(sent.is_ok() && received.is_ok());

    let id = tandem_proto::HandoffId::from_wire(&ticket.handoff_id).expect("id");
    let again = pair.receiver.accept(grant(id, vec![1], Probe::new().0, LEASE));
    assert_eq!(again.err().and_then(|error| error.refusal), Some(Refusal::Used));

    // The old ticket opens nothing any more.
    let refused = async {
        // Where a hand-off is announced, it ends here.
        let mut outgoing = pair.sender.open(&ticket).await?;
        outgoing.push(0, &from, Arc::new(())).await?;
        outgoing.seal(seal).await
    };
    assert_eq!(prompt(refused).await.expect_err("replayed").refusal, Some(Refusal::Used));
}

pub async fn an_expired_lease_is_refused(make: MakePair) {
    let Some(pair) = pair(make, 4096, Faults::default()) else { return };
    let mut handoff = HandOff::new(&pair, vec![1, 2], vec![3, 4], Duration::ZERO);
    let seal = handoff.seal(&pair);
    // A sender that believes in a longer lease.
    handoff.ticket.lease_ms = 10_000;
    let refused = async {
        let mut outgoing = pair.sender.open(&handoff.ticket).await?;
        outgoing.push(0, &handoff.from, Arc::new(())).await?;
        outgoing.seal(seal).await
    };
    let refusal = prompt(refused).await.expect_err("late").refusal;
    // The frame may find it expired, or over already.
    assert!(matches!(refusal, Some(Refusal::Expired | Refusal::Used)), "{refusal:?}");
    let expected = handoff.expected();
    assert!(prompt(handoff.incoming.verified(expected)).await.is_err());
    prompt(handoff.received).await.expect("blocks back");
}

/// Runs a hand-off whose seal or expectation is wrong; both ends must learn why, and the blocks must come back.
async fn refused(make: MakePair, faults: Faults, spoil: impl FnOnce(&mut v1::Seal, &mut HandOff), expected: Refusal) {
    let Some(pair) = pair(make, 4096, faults) else { return };
    let mut handoff = HandOff::small(&pair);
    let mut seal = handoff.seal(&pair);
    spoil(&mut seal, &mut handoff);
    let dropped = std::mem::replace(&mut handoff.received, tokio::sync::oneshot::channel().1);
    let (sent, received) = run(&pair, handoff, seal).await;
    assert_eq!(received.expect_err("received").refusal, Some(expected));
    assert_eq!(sent.expect_err("sent").refusal, Some(expected));
    prompt(dropped).await.expect("blocks back");
    assert_eq!(pair.receiver.counters().refused_for(expected), 1);
    // The pair still works.
    if faults == Faults::default() {
        let next = HandOff::new(&pair, vec![8], vec![9], LEASE);
        let seal = next.seal(&pair);
        assert!(run(&pair, next, seal).await.1.is_ok());
    }
}

pub async fn a_wrong_incarnation_is_refused(make: MakePair) {
    refused(make, Faults::default(), |seal, _| seal.prefill_incarnation += 1, Refusal::WrongIncarnation).await;
    refused(make, Faults::default(), |seal, _| seal.decode_incarnation += 1, Refusal::WrongIncarnation).await;
}

pub async fn a_wrong_prompt_is_refused(make: MakePair) {
    refused(make, Faults::default(), |seal, _| seal.prompt_tokens += 1, Refusal::WrongPrompt).await;
    refused(make, Faults::default(), |seal, _| seal.checksums.truncate(2), Refusal::WrongPrompt).await;
}

pub async fn wrong_tokens_are_refused(make: MakePair) {
    refused(make, Faults::default(), |_, handoff| handoff.hashes[2] = 9.into(), Refusal::WrongSequence(2)).await;
}

pub async fn a_flipped_byte_is_corrupt(make: MakePair) {
    let faults = Faults { flip_byte: true, ..Faults::default() };
    refused(make, faults, |_, _| {}, Refusal::Corrupt(0)).await;
    assert_eq!(tandem_kvtransfer::TransferError::from(Refusal::Corrupt(0)).kind, TransferErrorKind::Corrupt);
}

pub async fn a_truncated_push_is_refused(make: MakePair) {
    let faults = Faults { truncate_push: true, ..Faults::default() };
    refused(make, faults, |_, _| {}, Refusal::Length).await;
}

pub async fn a_seal_before_all_blocks_is_refused(make: MakePair) {
    let Some(pair) = pair(make, 4096, Faults::default()) else { return };
    let handoff = HandOff::small(&pair);
    let (seal, expected) = (handoff.seal(&pair), handoff.expected());
    let mut outgoing = open(&pair, &handoff).await;
    outgoing.push(1, &handoff.from[1..], Arc::new(())).await.expect("push");
    let (sent, received) =
        prompt(async { tokio::join!(outgoing.seal(seal), handoff.incoming.verified(expected)) }).await;
    assert_eq!(sent.expect_err("sent").refusal, Some(Refusal::Incomplete));
    assert_eq!(received.expect_err("received").refusal, Some(Refusal::Incomplete));
}

pub async fn a_block_sent_twice_is_refused(make: MakePair) {
    let Some(pair) = pair(make, 4096, Faults::default()) else { return };
    let handoff = HandOff::small(&pair);
    let (seal, expected) = (handoff.seal(&pair), handoff.expected());
    let mut outgoing = open(&pair, &handoff).await;
    let send = async {
        outgoing.push(0, &handoff.from, Arc::new(())).await?;
        outgoing.push(2, &handoff.from[2..3], Arc::new(())).await?;
        outgoing.seal(seal).await
    };
    let (sent, received) = prompt(async { tokio::join!(send, handoff.incoming.verified(expected)) }).await;
    assert_eq!(sent.expect_err("sent").refusal, Some(Refusal::AlreadyWritten));
    assert_eq!(received.expect_err("received").refusal, Some(Refusal::AlreadyWritten));
}

pub async fn blocks_outside_the_grant_are_not_sent(make: MakePair) {
    let Some(pair) = pair(make, 4096, Faults::default()) else { return };
    let handoff = HandOff::small(&pair);
    let mut outgoing = open(&pair, &handoff).await;
    for (first, blocks) in [(4, vec![1]), (u32::MAX, vec![1]), (0, vec![pair.from.blocks()])] {
        let refused = outgoing.push(first, &blocks, Arc::new(())).await.expect_err("pushed");
        assert_eq!(refused.refusal, Some(Refusal::OutOfRange));
    }
    for blocks in [vec![], vec![1, 1], vec![pair.to.blocks()]] {
        let id = tandem_proto::HandoffId([9; 16]);
        assert!(pair.receiver.accept(grant(id, blocks, Probe::new().0, LEASE)).is_err());
    }
}

pub async fn another_build_is_incompatible(make: MakePair) {
    let Some(pair) = pair(make, 4096, Faults::default()) else { return };
    let handoff = HandOff::small(&pair);
    let spoils: [fn(&mut v1::Ticket); 3] = [
        |ticket| ticket.transport = None,
        |ticket| ticket.transport.iter_mut().for_each(|transport| transport.build_id.push('x')),
        |ticket| ticket.block_bytes += 8,
    ];
    for spoil in spoils {
        let mut ticket = handoff.ticket.clone();
        spoil(&mut ticket);
        let refused = prompt(pair.sender.open(&ticket)).await.err().expect("opened");
        assert_eq!(refused.kind, TransferErrorKind::Incompatible);
    }
}
