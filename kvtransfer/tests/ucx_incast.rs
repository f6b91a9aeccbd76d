//! Sixteen senders and one receiver whose budget is a small part of what they announce: all arrive, each whole, and no
//! more than the budget lands at once; or the receiver copies it all out of sixteen memories. How evenly they get on is
//! a property of `ucx/turns.rs`, and a row of `bench_transfer --parts incast`.
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

/// In memory that others can map.
fn arena(blocks: u32, seed: u64) -> Arc<Arena> {
    let memory = HostMemory::shareable(blocks as usize * BLOCK_BYTES).expect("little");
    memory.words().iter().zip(0u64..).for_each(|(word, at)| word.store(at * 31 + seed, Relaxed));
    Arena::new(memory, BLOCK_BYTES, 1)
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
    let Some(receiver) = incast(UcxProfile::Shm, false).await else { return };
    assert_within_budget(&receiver);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_senders_arrive_over_tcp() {
    let Some(receiver) = incast(UcxProfile::Tcp, false).await else { return };
    assert_within_budget(&receiver);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_memories_are_copied_out_of() {
    let Some(receiver) = incast(UcxProfile::Shm, true).await else { return };
    let counters = receiver.counters();
    let all = u64::from(SENDERS * BLOCKS) * BLOCK_BYTES as u64;
    assert_eq!((counters.copied_bytes.load(Relaxed), counters.landing_peak_bytes.load(Relaxed)), (all, 0));
}

/// A receiver that copies by itself has one range under way at a time: the budget is UCX's.
fn assert_within_budget(receiver: &UcxTransport) {
    let peak = receiver.counters().landing_peak_bytes.load(Relaxed);
    assert!((1..=LANDING_BYTES as u64).contains(&peak), "{peak} bytes at once");
}

/// The receiver of sixteen hand-offs that were each verified. `None`: there is no UCX here.
async fn incast(profile: UcxProfile, one_copy: bool) -> Option<Arc<UcxTransport>> {
    let usual = UcxConfig::new(profile);
    let config = UcxConfig { landing_frames: LANDING_BYTES / usual.max_range_bytes, one_copy, ..usual };
    let to = arena(SENDERS * BLOCKS, 0);
    let receiver = or_skip(UcxTransport::start(to.clone(), config))?;
    let handoffs = (0..SENDERS).map(|number| {
        let incoming = receiver.accept(grant(number)).expect("accept");
        let expected = || Expected { prompt_tokens: 9, sequence_hashes: vec![5.into(); BLOCKS as usize] };
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
    assert_eq!(receiver.counters().open_writes.load(Relaxed), 0);
    Some(receiver)
}
