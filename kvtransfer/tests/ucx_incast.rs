//! Sixteen senders and one receiver whose budget is a small part of what they announce: all arrive, each whole, and no
//! more than the budget lands at once. How evenly they get on is a property of `ucx/turns.rs`, and a row of
//! `bench_transfer --parts incast`.
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tandem_kvtransfer::ucx::presence::or_skip;
use tandem_kvtransfer::ucx::{UcxConfig, UcxProfile, UcxTransport};
use tandem_kvtransfer::{Arena, Expected, Grant, Held, Transport, seal_for};
use tandem_memory::HostMemory;
use tandem_proto::{HandoffId, Incarnation};

const BLOCK_BYTES: usize = 256 << 10;
const SENDERS: u32 = 16;
/// Of each.
const BLOCKS: u32 = 16;
/// A 32nd of all.
const LANDING_BYTES: usize = 2 << 20;
const LEASE: Duration = Duration::from_secs(60);

fn arena(blocks: u32, seed: u64) -> Arc<Arena> {
    let words: Vec<u64> = (0..u64::from(blocks) * BLOCK_BYTES as u64 / 8).map(|word| word * 31 + seed).collect();
    Arena::new(HostMemory::holding(&words).expect("little"), BLOCK_BYTES, 1)
}

fn grant(sender: u32) -> Grant {
    Grant {
        handoff: HandoffId([sender as u8 + 1; 16]),
        prefill_incarnation: Incarnation(1),
        decode_incarnation: Incarnation(2),
        compatibility_digest: 3,
        blocks: (sender * BLOCKS..(sender + 1) * BLOCKS).collect(),
        units: 1,
        held: Held::default(),
        owner: Arc::new(()),
        lease: LEASE,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_senders_arrive_over_shm() {
    incast(UcxProfile::Shm).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_senders_arrive_over_tcp() {
    incast(UcxProfile::Tcp).await;
}

async fn incast(profile: UcxProfile) {
    // A receiver that copies by itself has one range under way at a time: the budget is UCX's.
    let config = UcxConfig { landing_bytes: LANDING_BYTES, one_copy: false, ..UcxConfig::new(profile) };
    let to = arena(SENDERS * BLOCKS, 0);
    let Some(receiver) = or_skip(UcxTransport::start(to.clone(), config)) else { return };
    let handoffs = (0..SENDERS).map(|number| {
        let incoming = receiver.accept(grant(number)).expect("accept");
        let expected = || Expected { prompt_tokens: 9, sequence_hashes: vec![5; BLOCKS as usize] };
        let to = to.clone();
        async move {
            let from = arena(BLOCKS, u64::from(number) + 1);
            let sender = UcxTransport::start(from.clone(), UcxConfig::new(profile)).expect("the receiver started");
            let ticket = incoming.ticket();
            let send = async {
                let mut outgoing = sender.open(&ticket).await.expect("open");
                let blocks: Vec<u32> = (0..BLOCKS).collect();
                outgoing.push(0, &blocks, Arc::new(())).await.expect("push");
                let seal = seal_for(&from, &blocks, &ticket, 9, expected().sequence_hashes);
                outgoing.seal(seal).await.expect("receipt")
            };
            let (_, verified) = tokio::join!(send, incoming.verified(expected()));
            assert_eq!(verified.expect("verified").blocks, BLOCKS);
            for block in 0..BLOCKS {
                assert_eq!(from.checksum(block), to.checksum(number * BLOCKS + block));
            }
        }
    });
    let all = futures::future::join_all(handoffs);
    tokio::time::timeout(LEASE, all).await.expect("not one has waited for its lease");
    let counters = receiver.counters();
    assert_eq!(counters.open_writes.load(Relaxed), 0);
    let peak = counters.landing_peak_bytes.load(Relaxed);
    assert!((1..=LANDING_BYTES as u64).contains(&peak), "{peak} bytes at once");
}
