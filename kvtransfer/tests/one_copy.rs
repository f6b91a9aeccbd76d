//! The way with one copy, where it differs from UCX's own: who takes it, what a receiver that cannot map does,
//! announcements of what is not there, and the bugs that it could have. The rules that all transports share are in
//! `conformance.rs`.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

#[cfg(feature = "planted-bugs")]
use tandem_kvtransfer::mutation::Mutation;
use tandem_kvtransfer::ucx::stranger::Stranger;
use tandem_kvtransfer::ucx::{UcxConfig, UcxProfile, UcxTransport};
use tandem_kvtransfer::wire::{DataHeader, Units};
use tandem_kvtransfer::{
    Arena, BlockOwner, Expected, Grant, Held, Incoming, Refusal, TransferError, TransferErrorKind, Transport, Verified,
    seal_for,
};
use tandem_memory::{HostMemory, KvMemory, Place, Run, Share};
use tandem_proto::{HandoffId, Incarnation};

const BLOCK_BYTES: usize = 64 << 10;
const BLOCKS: usize = 32;
const CANARY: u64 = 0xdead_beef_dead_beef;
const PROMPT: Duration = Duration::from_secs(10);

fn config() -> UcxConfig {
    UcxConfig::new(UcxProfile::Shm)
}

/// `None`: there is no UCX here.
fn start(arena: &Arc<Arena>, config: UcxConfig) -> Option<Arc<UcxTransport>> {
    match UcxTransport::start(arena.clone(), config) {
        Ok(transport) => Some(transport),
        Err(error) if error.kind == TransferErrorKind::Incompatible => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("UCX is there and does not start: {error}"),
    }
}

fn arena(memory: Arc<dyn KvMemory>) -> Arc<Arena> {
    Arena::new(memory, BLOCK_BYTES, 1)
}

fn fill(memory: Arc<HostMemory>) -> Arc<HostMemory> {
    memory.words().iter().zip(0u64..).for_each(|(word, i)| word.store(i.wrapping_mul(0x9e37_79b9_7f4a_7c15), Relaxed));
    memory
}

fn shareable() -> Arc<HostMemory> {
    fill(HostMemory::shareable(BLOCKS * BLOCK_BYTES).expect("little"))
}

fn canaries() -> Arc<Arena> {
    arena(HostMemory::holding(&[CANARY; BLOCKS * BLOCK_BYTES / 8]).expect("little"))
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
        lease: PROMPT,
    }
}

fn words(arena: &Arena) -> &[AtomicU64] {
    arena.memory().place().host().expect("main memory")
}

/// From blocks 1, 2, 3 and 9 of the sender's arena into four others.
async fn hand_off(
    from: &Arc<Arena>,
    sender: &UcxTransport,
    receiver: &UcxTransport,
    owner: BlockOwner,
) -> Result<Verified, TransferError> {
    let (source, target) = (vec![1, 2, 3, 9], vec![30, 4, 5, 7]);
    let incoming = receiver.accept(grant(1, target)).expect("accept");
    let ticket = incoming.ticket();
    let seal = seal_for(from, &source, &ticket, 9, vec![5.into(); 4]);
    let send = async {
        let mut outgoing = sender.open(&ticket).await?;
        outgoing.push(0, &source, owner).await?;
        outgoing.seal(seal).await
    };
    let expected = Expected { prompt_tokens: 9, sequence_hashes: vec![5.into(); 4] };
    let both = async { tokio::join!(send, incoming.verified(expected)) };
    tokio::time::timeout(PROMPT, both).await.expect("in time").1
}

fn copied(receiver: &UcxTransport) -> u64 {
    receiver.counters().copied_bytes.load(Relaxed)
}

/// The sender's memory, both ends' settings, blocks that are copied, and peers that cannot be mapped.
type Case = (Arc<dyn KvMemory>, UcxConfig, UcxConfig, usize, u64);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_receiver_copies_where_it_can_and_ucx_does_where_not() {
    let private = fill(HostMemory::zeroed(BLOCKS * BLOCK_BYTES).expect("little"));
    let off = || UcxConfig { one_copy: false, ..config() };
    let cases: [Case; 5] = [
        (shareable(), config(), config(), 4 * BLOCK_BYTES, 0),
        (private, config(), config(), 0, 0),
        (shareable(), off(), config(), 0, 0),
        (shareable(), config(), off(), 0, 0),
        (Arc::new(Misnamed(shareable())), config(), config(), 0, 1),
    ];
    for (case, (memory, sending, receiving, bytes, unmapped)) in cases.into_iter().enumerate() {
        let (from, to) = (arena(memory), canaries());
        let Some(sender) = start(&from, sending) else { return };
        let receiver = start(&to, receiving).expect("the first one started");
        let verified = hand_off(&from, &sender, &receiver, Arc::new(())).await.expect("verified");
        assert_eq!((verified.bytes, copied(&receiver)), (4 * BLOCK_BYTES as u64, bytes as u64), "case {case}");
        assert_eq!(receiver.counters().unmapped_peers.load(Relaxed), unmapped, "case {case}");
        assert_eq!(from.checksum(9), to.checksum(7));
        assert!(words(&to)[..4 * BLOCK_BYTES / 8].iter().all(|word| word.load(Relaxed) == CANARY));
    }
}

#[cfg(feature = "planted-bugs")]
/// Overwrites the sender's blocks when they are let go of, as the next prompt would.
struct Reuse(Arc<Arena>);

#[cfg(feature = "planted-bugs")]
impl Drop for Reuse {
    fn drop(&mut self) {
        [1, 2, 3, 9].into_iter().for_each(|block| self.0.copy_in(block, 0, &[7; BLOCK_BYTES]));
    }
}

/// A receiver that is fast copies blocks before whoever got them too early has overwritten them.
#[cfg(feature = "planted-bugs")]
const TRIES: usize = 100;

/// Blocks are held until they were copied, ranges are acknowledged when they were: who breaks that is found out.
#[cfg(feature = "planted-bugs")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sender_that_frees_early_and_a_receiver_that_acknowledges_early_are_caught() {
    for (sending, receiving) in [
        (Mutation::None, Mutation::None),
        (Mutation::FreeAnnounced, Mutation::None),
        (Mutation::None, Mutation::AcknowledgeUncopied),
    ] {
        let is_honest = (sending, receiving) == (Mutation::None, Mutation::None);
        let mut is_caught = false;
        for _ in 0..TRIES {
            let (from, to) = (arena(shareable()), canaries());
            let Some(sender) = start(&from, UcxConfig { mutation: sending, ..config() }) else { return };
            let receiver = start(&to, UcxConfig { mutation: receiving, ..config() }).expect("the first one started");
            let verdict = hand_off(&from, &sender, &receiver, Arc::new(Reuse(from.clone()))).await;
            assert_eq!(copied(&receiver), 4 * BLOCK_BYTES as u64);
            let refused = verdict.as_ref().err().map(|error| error.refusal);
            is_caught = matches!(refused, Some(Some(Refusal::Corrupt(_))));
            assert!(is_caught || verdict.is_ok(), "{verdict:?}");
            if is_caught || is_honest {
                break;
            }
        }
        assert_eq!(is_caught, !is_honest, "{sending:?} and {receiving:?}");
    }
}

/// Whoever announces what its memory has not ends its own hand-off, and nothing else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn announcements_of_what_is_not_there_are_refused() {
    let (from, to) = (arena(shareable()), canaries());
    let Some(receiver) = start(&to, config()) else { return };
    let (block, all) = (BLOCK_BYTES as u64, (BLOCKS * BLOCK_BYTES) as u64);
    let attacks: [(&[(u64, u64)], Refusal); 9] = [
        (&[(all, block)], Refusal::Malformed),
        (&[(all - block + 8, block)], Refusal::Malformed),
        (&[(u64::MAX - 7, block)], Refusal::Malformed),
        (&[(4, block)], Refusal::Malformed),
        (&[(0, block - 4), (0, 4)], Refusal::Malformed),
        (&[], Refusal::Malformed),
        (&[(0, block - 8)], Refusal::Length),
        (&[(0, block), (0, 8)], Refusal::Length),
        (&[(0, 8), (0, block - 8)], Refusal::WriteFailed),
    ];
    for (id, (runs, refusal)) in (10..).zip(attacks) {
        let incoming = receiver.accept(grant(id, vec![6])).expect("accept");
        let error = attacked(&from, incoming, HandoffId([id; 16]), runs).await;
        assert_eq!(error.refusal, Some(refusal), "{runs:?}: {error:?}");
    }
    assert!(words(&to).iter().all(|word| word.load(Relaxed) == CANARY));
    assert_eq!(copied(&receiver), 0);
    let sender = start(&from, config()).expect("the first one started");
    assert!(hand_off(&from, &sender, &receiver, Arc::new(())).await.is_ok());
}

/// What the receiver says of this announcement, by a sender whose hello was honest.
async fn attacked(from: &Arc<Arena>, incoming: Incoming, handoff: HandoffId, runs: &[(u64, u64)]) -> TransferError {
    let (ticket, from, runs) = (incoming.ticket(), from.clone(), runs.to_vec());
    let over = Arc::new(AtomicBool::new(false));
    let told = over.clone();
    let attack = std::thread::spawn(move || {
        let mut stranger = Stranger::start(from, config()).expect("UCX is there");
        let peer = stranger.connect(&ticket.address).expect("connect");
        let hello = stranger.hello(&ticket).expect("a key");
        stranger.say_hello(peer, hello);
        let range = DataHeader { handoff, first: 0, count: 1, units: Units::ALL };
        // Before the hello was read it is garbage, after the first refusal it is of a hand-off that is over.
        while !told.load(Relaxed) {
            stranger.announce(peer, range, &runs);
            (0..1000).for_each(|_| stranger.turn());
        }
    });
    let expected = Expected { prompt_tokens: 9, sequence_hashes: vec![5.into()] };
    let verdict = tokio::time::timeout(PROMPT, incoming.verified(expected)).await;
    over.store(true, Relaxed);
    attack.join().expect("no panic");
    verdict.expect("in time").expect_err("refused")
}

/// Memory whose process names another file than it has.
struct Misnamed(Arc<HostMemory>);

impl KvMemory for Misnamed {
    fn bytes(&self) -> usize {
        self.0.bytes()
    }

    fn place(&self) -> Place<'_> {
        self.0.place()
    }

    fn share(&self) -> Option<Share> {
        self.0.share().map(|share| Share { inode: share.inode ^ 1, ..share })
    }

    fn read(&self, at: usize, out: &mut [u8]) {
        self.0.read(at, out);
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        self.0.write(at, bytes);
    }

    fn digests(&self, pieces: &[Run], out: &mut [u64]) {
        self.0.digests(pieces, out);
    }
}
