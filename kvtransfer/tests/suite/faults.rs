//! Cases in which somebody goes away.
use std::sync::Arc;

use tandem_kvtransfer::{Faults, Refusal, TransferErrorKind};

use super::{HandOff, LEASE, Probe, open, pair, prompt, run};
use crate::MakePair;

pub async fn dropping_the_receiving_end_midway_returns_its_blocks(make: MakePair) {
    let Some(pair) = pair(make, 4096, Faults::default()) else { return };
    let handoff = HandOff::small(&pair);
    let seal = handoff.seal(&pair);
    let mut outgoing = open(&pair, &handoff).await;
    outgoing.push(0, &handoff.from[..2], Arc::new(())).await.expect("push");
    drop(handoff.incoming);
    prompt(handoff.received).await.expect("blocks back");
    let refused = async {
        outgoing.push(2, &handoff.from[2..], Arc::new(())).await?;
        outgoing.seal(seal).await
    };
    let refusal = prompt(refused).await.expect_err("cancelled").refusal;
    // What arrives after the end, or what it is told at the end.
    assert!(matches!(refusal, Some(Refusal::Used | Refusal::Cancelled)), "{refusal:?}");

    let next = HandOff::new(&pair, vec![8], vec![2], LEASE);
    let seal = next.seal(&pair);
    assert!(run(&pair, next, seal).await.1.is_ok());
}

pub async fn dropping_the_sending_end_midway_ends_the_receiving_one(make: MakePair) {
    let Some(pair) = pair(make, 4096, Faults::default()) else { return };
    let handoff = HandOff::small(&pair);
    let expected = handoff.expected();
    let mut outgoing = open(&pair, &handoff).await;
    let (owner, sent) = Probe::new();
    outgoing.push(0, &handoff.from[..2], owner).await.expect("push");
    drop(outgoing);
    let ended = prompt(handoff.incoming.verified(expected)).await.expect_err("cancelled");
    assert!(matches!(ended.kind, TransferErrorKind::Cancelled | TransferErrorKind::PeerGone), "{ended:?}");
    prompt(handoff.received).await.expect("receiver's blocks back");
    prompt(sent).await.expect("sender's blocks back");
}

pub async fn the_sender_dies(make: MakePair) {
    let Some(pair) = pair(make, 4096, Faults::default()) else { return };
    let handoff = HandOff::small(&pair);
    let expected = handoff.expected();
    let mut outgoing = open(&pair, &handoff).await;
    outgoing.push(0, &handoff.from[..2], Arc::new(())).await.expect("push");
    // Its hand-offs go with it, without a word.
    std::mem::forget(outgoing);
    let dies = async move {
        // The first range has arrived: the hand-off is bound to its peer.
        let received = &pair.receiver.counters().received_bytes;
        while received.load(std::sync::atomic::Ordering::Relaxed) == 0 {
            tokio::task::yield_now().await;
        }
        drop(pair.sender);
        pair.receiver
    };
    let (_receiver, ended) = prompt(async { tokio::join!(dies, handoff.incoming.verified(expected)) }).await;
    assert!(ended.is_err());
    prompt(handoff.received).await.expect("blocks back");
}

pub async fn the_receiver_dies(make: MakePair) {
    let Some(pair) = pair(make, 4096, Faults::default()) else { return };
    let handoff = HandOff::small(&pair);
    let seal = handoff.seal(&pair);
    let mut outgoing = open(&pair, &handoff).await;
    let (owner, sent) = Probe::new();
    outgoing.push(0, &handoff.from, owner).await.expect("push");
    drop(pair.receiver);
    assert!(prompt(outgoing.seal(seal)).await.is_err());
    prompt(sent).await.expect("sender's blocks back");
}
