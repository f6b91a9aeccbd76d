//! The UCX backend alone: what it is called, how fast it is refused, and garbage. The rules that all transports share
//! are in `conformance.rs`; peers that are killed in `ucx_fault.rs`.
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tandem_kvtransfer::ucx::presence::or_skip;
use tandem_kvtransfer::ucx::{UcxConfig, UcxProfile, UcxTransport};
use tandem_kvtransfer::{AddressError, Arena, Expected, Grant, Held, TransferErrorKind, Transport, seal_for};
use tandem_memory::HostMemory;
use tandem_proto::{HandoffId, Incarnation, v1};

const BLOCK_BYTES: usize = 256 << 10;

fn arena(blocks: usize) -> Arc<Arena> {
    let words: Vec<u64> = (0..(blocks * BLOCK_BYTES / 8) as u64).collect();
    Arena::new(HostMemory::holding(&words).expect("little"), BLOCK_BYTES, 1)
}

fn grant(id: u8, blocks: Vec<u32>) -> Grant {
    Grant {
        handoff: HandoffId([id; 16]),
        prefill_incarnation: Incarnation(1),
        decode_incarnation: Incarnation(2),
        compatibility_digest: 3,
        blocks,
        units: 1,
        held: Held::default(),
        owner: Arc::new(()),
        lease: Duration::from_secs(10),
    }
}

#[test]
fn an_absent_library_is_incompatible() {
    let config = UcxConfig { lib_dir: Some(PathBuf::from("/nonexistent")), ..UcxConfig::new(UcxProfile::Shm) };
    let error = UcxTransport::start(arena(1), config).err().expect("nothing is there");
    assert_eq!(error.kind, TransferErrorKind::Incompatible);
    assert!(error.message.contains("/nonexistent"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_name_says_what_ucx_chose_and_scattered_blocks_arrive() {
    for (profile, name) in [(UcxProfile::Shm, "ucx/shm(sysv+posix)"), (UcxProfile::Tcp, "ucx/tcp")] {
        let (from, to) = (arena(32), arena(32));
        let start = |arena: &Arc<Arena>| UcxTransport::start(arena.clone(), UcxConfig::new(profile));
        let Some(sender) = or_skip(start(&from)) else { return };
        let receiver = start(&to).expect("the first one started");
        assert_eq!(sender.info().name, name);
        let words = to.memory().place().host().expect("main memory");
        words.iter().for_each(|word| word.store(0, Relaxed));
        // Scattered on either side: one message, from several places into several others.
        let (source, target): (Vec<u32>, Vec<u32>) = (0..16).map(|i| (i * 7 % 32, 31 - 2 * i)).unzip();
        let incoming = receiver.accept(grant(7, target.clone())).expect("accept");
        let ticket = incoming.ticket();
        let mut outgoing = sender.open(&ticket).await.expect("open");
        outgoing.push(0, &source, Arc::new(())).await.expect("push");
        let seal = seal_for(&from, &source, &ticket, 9, vec![5.into(); 16]);
        let expected = Expected { prompt_tokens: 9, sequence_hashes: vec![5.into(); 16] };
        let (receipt, verified) = tokio::join!(outgoing.seal(seal), incoming.verified(expected));
        assert_eq!(receipt.expect("receipt").descriptors, 4);
        let verified = verified.expect("verified");
        assert_eq!((verified.blocks, verified.descriptors), (16, 4));
        for (a, b) in source.iter().zip(&target) {
            assert_eq!(from.checksum(*a), to.checksum(*b));
        }
    }
}

#[tokio::test]
async fn a_ticket_with_a_foreign_address_or_build_is_refused_before_ucx_sees_it() {
    let to = arena(2);
    let Some(transport) = or_skip(UcxTransport::start(to, UcxConfig::new(UcxProfile::Shm))) else { return };
    let ticket = transport.accept(grant(1, vec![0])).expect("accept").ticket();
    for (address, expected) in [
        (vec![], AddressError::Empty),
        (vec![0; 4097], AddressError::Magic),
        (vec![0; 4119], AddressError::TooLong { bytes: 4119, most: 4118 }),
    ] {
        let bad = v1::Ticket { address, ..ticket.clone() };
        let refused = transport.open(&bad).await.err().expect("refused");
        assert_eq!(refused.kind, TransferErrorKind::BadAddress(expected));
    }
    // The last is of a build whose hellos did not name the sender's memory.
    let own = transport.info().build_id;
    let (start, protocol) = own.rsplit_once('/').expect("it ends with the protocol");
    for (build_id, words) in [
        (format!("ucx-9.9.9/shm/{protocol}"), "9.9.9 there; run one version of UCX on all nodes"),
        (format!("{start}/tka1"), "an older one there; run one version of Tandem on all nodes"),
    ] {
        let mut other = ticket.clone();
        other.transport.as_mut().expect("transport").build_id = build_id;
        let refused = transport.open(&other).await.err().expect("refused");
        assert_eq!(refused.kind, TransferErrorKind::Incompatible);
        assert!(refused.message.contains(words), "{refused}");
    }
}

#[tokio::test]
async fn an_address_of_another_key_is_refused_before_ucx_sees_it() {
    let keyed = |byte| UcxConfig { address_keys: [byte; 32].into(), ..UcxConfig::new(UcxProfile::Shm) };
    let Some(sender) = or_skip(UcxTransport::start(arena(1), keyed(1))) else { return };
    let receiver = UcxTransport::start(arena(1), keyed(2)).expect("the first one started");
    let ticket = receiver.accept(grant(1, vec![0])).expect("accept").ticket();
    let refused = sender.open(&ticket).await.err().expect("refused");
    assert_eq!(refused.kind, TransferErrorKind::BadAddress(AddressError::Tag));
    assert_eq!(sender.counters().rejected_tickets.load(Relaxed), 1);
}

/// What a stranger who knows an honest address, and not the key, makes of it.
fn garbled(rng: &mut StdRng, honest: &[u8]) -> Vec<u8> {
    let mut bytes = honest.to_vec();
    match rng.random_range(0..4) {
        0 => bytes.truncate(rng.random_range(0..honest.len())),
        1 => bytes[rng.random_range(0..honest.len())] ^= 1 << rng.random_range(0..8),
        // The head of an address, with anything behind it.
        2 => bytes[22..].iter_mut().for_each(|byte| *byte = rng.random()),
        _ => bytes = (0..rng.random_range(0..5000)).map(|_| rng.random()).collect(),
    }
    bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_thousand_garbled_tickets_are_refused_and_honest_ones_beside_them_served() {
    let (from, to) = (arena(4), arena(4));
    let Some(sender) = or_skip(UcxTransport::start(from.clone(), UcxConfig::new(UcxProfile::Shm))) else { return };
    let receiver = UcxTransport::start(to, UcxConfig::new(UcxProfile::Shm)).expect("the first one started");
    let mut rng = StdRng::seed_from_u64(1);
    for round in 0..10 {
        let incoming = receiver.accept(grant(round, vec![0, 1])).expect("accept");
        let ticket = incoming.ticket();
        for _ in 0..500 {
            let bad = v1::Ticket { address: garbled(&mut rng, &ticket.address), ..ticket.clone() };
            let refused = sender.open(&bad).await.err().expect("refused");
            assert!(matches!(refused.kind, TransferErrorKind::BadAddress(_)), "{refused:?}");
        }
        let mut outgoing = sender.open(&ticket).await.expect("open");
        outgoing.push(0, &[2, 3], Arc::new(())).await.expect("push");
        let seal = seal_for(&from, &[2, 3], &ticket, 9, vec![5.into(); 2]);
        let expected = Expected { prompt_tokens: 9, sequence_hashes: vec![5.into(); 2] };
        let (receipt, verified) = tokio::join!(outgoing.seal(seal), incoming.verified(expected));
        assert_eq!((receipt.expect("receipt").blocks, verified.expect("verified").blocks), (2, 2));
    }
    assert_eq!(sender.counters().rejected_tickets.load(Relaxed), 5000);
    assert_eq!(sender.counters().lost_peers.load(Relaxed), 0);
}
