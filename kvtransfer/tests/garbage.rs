//! Ten thousand tickets and hellos that are not what anybody made, against each backend: cut, extended, with flipped
//! bits, with lengths that lie, of other versions, made with another key, or noise. Each is refused and counted,
//! nothing of a hand-off changes, and honest hand-offs beside them work. `make test-garbage` runs it under
//! AddressSanitizer, and the part that meets UCX's C under valgrind: no read leaves its bytes.
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use prost::Message;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tandem_kvtransfer::handshake::{HELLO_HEAD_BYTES, Secret};
use tandem_kvtransfer::mem::{MemFaults, MemNetwork, MemTransport};
use tandem_kvtransfer::tcp::{Protection, TcpConfig, TcpTransport};
use tandem_kvtransfer::ucx::stranger::{BUILD_AT, Stranger};
use tandem_kvtransfer::ucx::{UcxConfig, UcxProfile, UcxTransport};
use tandem_kvtransfer::wire::Header;
use tandem_kvtransfer::{
    Arena, Counters, Expected, Grant, Held, Incoming, TransferError, TransferErrorKind, Transport, seal_for,
};
use tandem_memory::HostMemory;
use tandem_proto::{HandoffId, Incarnation, v1};

/// Of each backend.
const TICKETS: usize = 5_000;
const HELLOS: usize = 5_000;
/// Between two honest hand-offs.
const ROUND: usize = 500;
const BLOCK_BYTES: usize = 4096;
/// Nothing here takes longer.
const PROMPT: Duration = Duration::from_secs(60);
const LEASE: Duration = Duration::from_secs(600);

struct Pair {
    sender: Arc<dyn Transport>,
    receiver: Arc<dyn Transport>,
    from: Arc<Arena>,
    to: Arc<Arena>,
}

fn arena(seed: u64) -> Arc<Arena> {
    let mut rng = StdRng::seed_from_u64(seed);
    let words: Vec<u64> = (0..16 * BLOCK_BYTES / 8).map(|_| rng.random()).collect();
    Arena::new(HostMemory::holding(&words).expect("little"), BLOCK_BYTES, 1)
}

impl Pair {
    fn accept(&self, rng: &mut StdRng) -> Incoming {
        let grant = Grant {
            handoff: HandoffId::random(rng),
            prefill_incarnation: Incarnation::random(rng),
            decode_incarnation: Incarnation::random(rng),
            compatibility_digest: 3,
            blocks: vec![4, 5, 1],
            units: 1,
            held: Held::default(),
            owner: Arc::new(()),
            lease: LEASE,
        };
        self.receiver.accept(grant).expect("accept")
    }

    /// The honest end of a hand-off.
    async fn fill(&self, incoming: Incoming) {
        let (ticket, blocks) = (incoming.ticket(), [7, 2, 3]);
        let send = async {
            let mut outgoing = self.sender.open(&ticket).await?;
            outgoing.push(0, &blocks, Arc::new(())).await?;
            outgoing.seal(seal_for(&self.from, &blocks, &ticket, 9, vec![5.into(); 3])).await
        };
        let expected = Expected { prompt_tokens: 9, sequence_hashes: vec![5.into(); 3] };
        let (sent, verified) = tokio::join!(send, incoming.verified(expected));
        assert_eq!((sent.expect("sent").blocks, verified.expect("verified").blocks), (3, 3));
        assert!(blocks.iter().zip([4, 5, 1]).all(|(a, b)| self.from.checksum(*a) == self.to.checksum(b)));
    }

    /// At once, or by the answer: who joins a connection does not wait for it.
    async fn refused(&self, ticket: &v1::Ticket) -> TransferError {
        match self.sender.open(ticket).await {
            Ok(mut outgoing) => outgoing.ended().await,
            Err(refused) => refused,
        }
    }

    /// Garbled tickets of an open hand-off, which is then filled by the honest one.
    async fn tickets(&self, seed: u64) {
        let mut rng = StdRng::seed_from_u64(seed);
        self.fill(self.accept(&mut rng)).await;
        let mut unreadable = 0;
        for _ in 0..TICKETS / ROUND {
            let incoming = self.accept(&mut rng);
            let honest = incoming.ticket();
            for case in 0..ROUND {
                let Some(ticket) = garbled_ticket(&mut rng, &honest) else {
                    unreadable += 1;
                    continue;
                };
                let before = [refusals(&self.sender.counters()), refusals(&self.receiver.counters())];
                let refused = tokio::time::timeout(PROMPT, self.refused(&ticket)).await.expect("never welcome");
                let counted = || [refusals(&self.sender.counters()), refusals(&self.receiver.counters())] != before;
                // A port where nobody listens is no refusal.
                let is_nobody = matches!(refused.kind, TransferErrorKind::PeerGone | TransferErrorKind::Timeout);
                assert!(is_nobody || counted(), "case {case} is not counted: {refused:?} {ticket:?}");
            }
            self.fill(incoming).await;
        }
        assert!(unreadable < TICKETS / 2, "{unreadable} were no tickets at all");
    }
}

/// What a node has refused.
fn refusals(counters: &Counters) -> u64 {
    let refused: u64 = counters.refused().map(|(_, count)| count).sum();
    refused + counters.rejected_tickets.load(Relaxed) + counters.protocol_errors.load(Relaxed)
}

/// Bytes that `honest` is not.
fn garbled(rng: &mut StdRng, honest: &[u8]) -> Vec<u8> {
    loop {
        let mut bytes = honest.to_vec();
        let at = rng.random_range(0..honest.len());
        match rng.random_range(0..6) {
            0 => bytes.truncate(at),
            1 => bytes[at] ^= 1u8 << rng.random_range(0..8),
            2 => bytes.extend((0..rng.random_range(1..300)).map(|_| rng.random::<u8>())),
            // A length that lies, wherever one may stand.
            3 => bytes[at..].iter_mut().take(rng.random_range(1..9)).for_each(|byte| *byte = 0xff),
            4 => bytes[at..].iter_mut().for_each(|byte| *byte = rng.random()),
            _ => bytes = (0..rng.random_range(0..5000)).map(|_| rng.random()).collect(),
        }
        if bytes != honest {
            return bytes;
        }
    }
}

/// A ticket that differs in what matters here; `None`: bytes that are none.
fn garbled_ticket(rng: &mut StdRng, honest: &v1::Ticket) -> Option<v1::Ticket> {
    loop {
        let mut ticket = honest.clone();
        match rng.random_range(0..10) {
            0 => ticket.handoff_id = garbled(rng, &ticket.handoff_id),
            1 => ticket.key = Some(v1::HandoffKey { secret: garbled(rng, &ticket.key?.secret) }),
            2 => ticket.key = None,
            3 => ticket.decode_incarnation ^= 1 << rng.random_range(0..64),
            4 => ticket.prefill_incarnation ^= 1 << rng.random_range(0..64),
            5 => ticket.block_bytes ^= 1 << rng.random_range(0..64),
            6 => ticket.blocks ^= 1 << rng.random_range(0..32),
            7 => {
                ticket.joints =
                    (0..rng.random_range(0..9)).map(|_| rng.random::<u32>() >> rng.random_range(0..32)).collect()
            }
            8 => ticket.address = garbled_address(rng, &ticket.address),
            // Bytes on the wire, addresses apart: those of sockets are names, which nobody should look up.
            _ => {
                ticket = v1::Ticket::decode(&garbled(rng, &ticket.encode_to_vec())[..]).ok()?;
                ticket.address.clone_from(&honest.address);
            }
        }
        if matters(&ticket) != matters(honest) {
            return Some(ticket);
        }
    }
}

/// Without what says nothing of who may open it.
fn matters(ticket: &v1::Ticket) -> v1::Ticket {
    let mut ticket = v1::Ticket {
        held_blocks: 0,
        held_hash: Vec::new(),
        lease_ms: 0,
        compatibility_digest: 0,
        units: 1,
        ..ticket.clone()
    };
    ticket.transport.iter_mut().for_each(|transport| transport.name.clear());
    // They say only where frames are cut.
    if !ticket.joints.contains(&0)
        && ticket.joints.iter().map(|run| u64::from(*run)).sum::<u64>() == u64::from(ticket.blocks)
    {
        ticket.joints.clear();
    }
    ticket
}

/// Of sockets: no address, one that is too long, no text, or another port. Else anything.
fn garbled_address(rng: &mut StdRng, honest: &[u8]) -> Vec<u8> {
    let Some(host) = std::str::from_utf8(honest).ok().and_then(|text| text.strip_prefix("127.0.0.1:")) else {
        return garbled(rng, honest);
    };
    match rng.random_range(0..4) {
        0 => Vec::new(),
        1 => vec![b'1'; rng.random_range(300..5000)],
        2 => (0..rng.random_range(1..50)).map(|_| rng.random_range(0x80..=0xff)).collect(),
        _ => format!("127.0.0.1:{}", host.len()).into_bytes(),
    }
}

/// What counts follows what it counts.
fn until(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PROMPT, "{what}");
        std::thread::yield_now();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn over_mem() {
    let (network, from, to) = (MemNetwork::default(), arena(1), arena(2));
    let sender = MemTransport::new(&network, from.clone(), MemFaults::default());
    let receiver = MemTransport::new(&network, to.clone(), MemFaults::default());
    let (attacker, counters) = (sender.clone(), receiver.counters());
    let pair = Pair { sender, receiver, from, to };
    pair.tickets(1).await;
    let mut rng = StdRng::seed_from_u64(2);
    for _ in 0..HELLOS / ROUND {
        let incoming = pair.accept(&mut rng);
        let ticket = incoming.ticket();
        let honest = Secret::of(&ticket).expect("a key").hello([1; 16], &[]);
        let link = attacker.raw_link(&ticket.address).expect("it is there");
        for case in 0..ROUND {
            let before = refusals(&counters);
            assert!(link.hello(&garbled(&mut rng, &honest)).is_err(), "case {case} is welcome");
            assert_eq!(refusals(&counters), before + 1, "case {case} is counted");
        }
        pair.fill(incoming).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn over_tcp() {
    sockets(Protection::Bound).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn over_encrypted_tcp() {
    sockets(Protection::Encrypted).await;
}

async fn sockets(protection: Protection) {
    let (from, to) = (arena(1), arena(2));
    let bind = |arena: &Arc<Arena>| {
        let config = TcpConfig { protection, ..TcpConfig::default() };
        TcpTransport::bind((Ipv4Addr::LOCALHOST, 0).into(), arena.clone(), config).expect("bind")
    };
    let pair = Pair { sender: bind(&from), receiver: bind(&to), from, to };
    pair.tickets(1).await;
    let address: SocketAddr = String::from_utf8(pair.receiver.address()).expect("text").parse().expect("address");
    let (counters, build) = (pair.receiver.counters(), pair.receiver.info().build_id);
    let mut rng = StdRng::seed_from_u64(2);
    for _ in 0..HELLOS / ROUND {
        let incoming = pair.accept(&mut rng);
        let hello = Secret::of(&incoming.ticket()).expect("a key").hello([1; 16], build.as_bytes());
        let honest = [&Header::hello().encode()[..], &(hello.len() as u64).to_le_bytes(), &hello].concat();
        for case in 0..ROUND {
            // More behind an honest hello would be a frame of whoever said it.
            let said = loop {
                let said = garbled(&mut rng, &honest);
                if !said.starts_with(&honest) {
                    break said;
                }
            };
            let before = refusals(&counters);
            let answer = say(address, &said).unwrap_or_default();
            let welcome = answer.first_chunk().and_then(|header: &[u8; 32]| Header::parse(header));
            assert!(!matches!(welcome, Some(Header::Welcome(_) | Header::WillCopy(_))), "case {case} is welcome");
            until("it is counted", || refusals(&counters) > before);
        }
        pair.fill(incoming).await;
    }
}

/// Says bytes and no more, and reads what comes until the node hangs up.
fn say(address: SocketAddr, bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(address).expect("connect");
    // Thousands of closed sockets would take all ports for a minute.
    socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
    stream.set_read_timeout(Some(PROMPT))?;
    // The node hangs up in the middle of what is no hello.
    stream.write_all(bytes)?;
    stream.shutdown(Shutdown::Write)?;
    let mut said = Vec::new();
    stream.read_to_end(&mut said)?;
    Ok(said)
}

fn ucx(arena: &Arc<Arena>) -> Option<Arc<UcxTransport>> {
    match UcxTransport::start(arena.clone(), UcxConfig::new(UcxProfile::Shm)) {
        Ok(transport) => Some(transport),
        Err(TransferError { kind: TransferErrorKind::Incompatible, message, .. }) => {
            println!("skipped: {message}");
            None
        }
        Err(error) => panic!("UCX is there and does not start: {error}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tickets_over_ucx() {
    let (from, to) = (arena(1), arena(2));
    let (Some(sender), Some(receiver)) = (ucx(&from), ucx(&to)) else { return };
    Pair { sender, receiver, from, to }.tickets(1).await;
}

/// The stranger has the key of the hand-off now and then, and not that of the cluster: then the address that it gives
/// is garbage that it has proved to have said.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hellos_over_ucx() {
    let (from, to) = (arena(1), arena(2));
    let (Some(sender), Some(receiver)) = (ucx(&from), ucx(&to)) else { return };
    let counters = receiver.counters();
    let pair = Pair { sender, receiver, from, to };
    let mut rng = StdRng::seed_from_u64(2);
    let mut said = 0;
    for round in 0..(HELLOS / ROUND) as u64 {
        let incoming = pair.accept(&mut rng);
        let (ticket, counters) = (incoming.ticket(), counters.clone());
        said += ROUND as u64;
        // Its worker stays on its thread.
        let saying = std::thread::spawn(move || hellos(&ticket, round, &counters, said));
        saying.join().expect("every hello is refused and counted");
        pair.fill(incoming).await;
    }
    assert_eq!(counters.rejected_hellos.load(Relaxed), said, "the honest ones are not");
}

fn hellos(ticket: &v1::Ticket, seed: u64, counters: &Counters, expected: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut stranger = Stranger::start(arena(3), UcxConfig::new(UcxProfile::Shm)).expect("the node has UCX");
    let node = stranger.connect(&ticket.address).expect("an honest address");
    let honest = stranger.hello(ticket).expect("a key");
    let secret = Secret::of(ticket).expect("a key");
    for _ in 0..ROUND {
        let hello = match rng.random_range(0..2) {
            0 => garbled(&mut rng, &honest),
            _ => {
                let about = [&honest[HELLO_HEAD_BYTES..BUILD_AT], &garbled(&mut rng, &honest[BUILD_AT..])].concat();
                secret.hello(rng.random(), &about)
            }
        };
        stranger.say_hello(node, hello);
        stranger.turn();
    }
    let start = Instant::now();
    while counters.rejected_hellos.load(Relaxed) < expected {
        stranger.turn();
        assert!(start.elapsed() < PROMPT, "{} of {expected}", counters.rejected_hellos.load(Relaxed));
    }
}
