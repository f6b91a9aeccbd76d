//! The tcp backend against what is not its protocol.
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tandem_kvtransfer::tcp::{Protection, TcpConfig, TcpTransport};
use tandem_kvtransfer::wire::{Answer, Header};
use tandem_kvtransfer::{Arena, Expected, Grant, Held, Refusal, TransferErrorKind, Transport, seal_for};
use tandem_memory::HostMemory;
use tandem_proto::{HandoffId, Incarnation};

fn bind() -> (Arc<TcpTransport>, SocketAddr) {
    bind_with(TcpConfig::default())
}

fn bind_with(config: TcpConfig) -> (Arc<TcpTransport>, SocketAddr) {
    let arena = Arena::new(HostMemory::zeroed(64 * 8).expect("little"), 64, 1);
    let transport = TcpTransport::bind((Ipv4Addr::LOCALHOST, 0).into(), arena, config).expect("bind");
    let address = String::from_utf8(transport.address()).expect("text").parse().expect("address");
    (transport, address)
}

/// Of one block.
fn grant(id: u8) -> Grant {
    Grant {
        handoff: HandoffId([id; 16]),
        prefill_incarnation: Incarnation(1),
        decode_incarnation: Incarnation(2),
        compatibility_digest: 3,
        blocks: vec![0],
        units: 1,
        held: Held::default(),
        owner: Arc::new(()),
        lease: Duration::from_secs(10),
    }
}

/// Writes `bytes` and reads until the node hangs up; returns what it said.
fn speak(address: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).expect("connect");
    stream.set_read_timeout(Some(Duration::from_secs(5))).expect("timeout");
    let _ = stream.write_all(bytes);
    let mut said = Vec::new();
    if let Err(error) = stream.read_to_end(&mut said) {
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "the node did not hang up");
    }
    said
}

/// Of a hand-off that nobody granted.
fn hello(build: &str) -> Vec<u8> {
    let payload = [&[7; 64][..], build.as_bytes()].concat();
    let mut frame = Header::hello().encode().to_vec();
    frame.extend_from_slice(&(payload.len() as u64).to_le_bytes());
    frame.extend_from_slice(&payload);
    frame
}

#[test]
fn garbage_closes_the_connection_and_is_counted() {
    let (transport, address) = bind();
    let mut long_hello = Header::hello().encode().to_vec();
    long_hello.extend_from_slice(&u64::MAX.to_le_bytes());
    let cases: [&[u8]; 4] =
        [b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n", &[0; 4096], &hello("tcp/other"), &long_hello];
    for (i, bytes) in cases.iter().enumerate() {
        assert!(speak(address, bytes).is_empty(), "case {i}");
        wait_for_errors(&transport, i as u64 + 1);
    }
    // A hello of our form has an answer, and no more.
    let said = speak(address, &hello(&transport.info().build_id));
    let answer = said.first_chunk().and_then(|header: &[u8; 32]| Header::parse(header));
    assert_eq!(answer, Some(Header::Answer(HandoffId([7; 16]), Answer::Refused(Refusal::Unknown))));
    assert_eq!((said.len(), transport.counters().refused_for(Refusal::Unknown)), (40, 1));
}

#[test]
fn connections_without_a_hello_make_room_for_those_with_one() {
    let (transport, address) = bind();
    // More than there are places for connections.
    let silent: Vec<_> = (0..300).map(|_| TcpStream::connect(address).expect("connect")).collect();
    // Each newcomer beyond 64 ends the oldest one.
    wait_for_errors(&transport, 236);
    for mut stream in &silent[..236] {
        stream.set_read_timeout(Some(Duration::from_secs(5))).expect("timeout");
        assert_eq!(stream.read(&mut [0]).expect("it hung up"), 0);
    }
    assert_eq!(speak(address, &hello(&transport.info().build_id)).len(), 40, "a hello is answered");
}

#[test]
fn a_hello_that_was_sent_is_read_before_those_behind_it_take_its_place() {
    let (transport, address) = bind();
    let mut first = TcpStream::connect(address).expect("connect");
    first.set_read_timeout(Some(Duration::from_secs(5))).expect("timeout");
    first.write_all(&hello(&transport.info().build_id)).expect("write");
    let silent: Vec<_> = (0..100).map(|_| TcpStream::connect(address).expect("connect")).collect();
    let mut said = Vec::new();
    first.read_to_end(&mut said).expect("it hung up");
    assert_eq!((said.len(), transport.counters().refused_for(Refusal::Unknown)), (40, 1));
    drop(silent);
}

#[test]
fn a_transport_that_ends_hangs_up_on_newcomers() {
    let (transport, address) =
        bind_with(TcpConfig { connect_timeout: Duration::from_secs(60), ..TcpConfig::default() });
    let mut silent = TcpStream::connect(address).expect("connect");
    silent.set_read_timeout(Some(Duration::from_secs(10))).expect("timeout");
    drop(transport);
    // Closed before it was accepted: reset.
    let heard = silent.read(&mut [0]).or_else(|error| match error.kind() {
        std::io::ErrorKind::ConnectionReset => Ok(0),
        _ => Err(error),
    });
    assert_eq!(heard.expect("it hung up"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn encryption_is_for_both_or_none_and_the_words_name_the_flag() {
    let (encrypted, _) = bind_with(TcpConfig { protection: Protection::Encrypted, ..TcpConfig::default() });
    let (plain, _) = bind();
    for (sender, receiver) in [(&plain, &encrypted), (&encrypted, &plain)] {
        let ticket = receiver.accept(grant(1)).expect("accept").ticket();
        let refused = sender.open(&ticket).await.err().expect("refused");
        assert_eq!(refused.kind, TransferErrorKind::Incompatible);
        assert!(refused.message.contains("--kv-encrypt"), "{refused}");
    }
}

/// What a listener on the way sees of a hand-off of blocks of `0xab`.
async fn overheard(protection: Protection) -> Vec<u8> {
    const BYTES: usize = 1 << 20;
    let node = |byte: u64, advertise: Option<String>| {
        let words = vec![byte * 0x0101_0101_0101_0101; 4 * BYTES / 8];
        let arena = Arena::new(HostMemory::holding(&words).expect("little"), BYTES, 1);
        let config = TcpConfig { protection, advertise, ..TcpConfig::default() };
        (TcpTransport::bind((Ipv4Addr::LOCALHOST, 0).into(), arena.clone(), config).expect("bind"), arena)
    };
    let relay = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
    let (sender, from) = node(0xab, None);
    let (receiver, to) = node(0, None);
    let onward: SocketAddr = String::from_utf8(receiver.address()).expect("text").parse().expect("address");
    drop(receiver);
    // The receiver's tickets name the relay.
    let advertise = Some(relay.local_addr().expect("bound").to_string());
    let config = TcpConfig { protection, advertise, ..TcpConfig::default() };
    let receiver = TcpTransport::bind(onward, to.clone(), config).expect("bind again");
    let listening = std::thread::spawn(move || {
        let (caller, _) = relay.accept().expect("accept");
        let called = TcpStream::connect(onward).expect("connect");
        let back = (called.try_clone().expect("clone"), caller.try_clone().expect("clone"));
        std::thread::spawn(move || std::io::copy(&mut &back.0, &mut &back.1));
        let mut heard = Vec::new();
        let mut buffer = vec![0; 1 << 16];
        while let Ok(read @ 1..) = (&caller).read(&mut buffer) {
            heard.extend_from_slice(&buffer[..read]);
            if (&called).write_all(&buffer[..read]).is_err() {
                break;
            }
        }
        heard
    });
    let incoming = receiver.accept(Grant { blocks: vec![2, 0], ..grant(1) }).expect("accept");
    let ticket = incoming.ticket();
    let mut outgoing = sender.open(&ticket).await.expect("open");
    outgoing.push(0, &[1, 2], Arc::new(())).await.expect("push");
    let seal = seal_for(&from, &[1, 2], &ticket, 9, vec![5.into(); 2]);
    let expected = Expected { prompt_tokens: 9, sequence_hashes: vec![5.into(); 2] };
    let (receipt, verified) = tokio::join!(outgoing.seal(seal), incoming.verified(expected));
    assert_eq!((receipt.expect("receipt").blocks, verified.expect("verified").blocks), (2, 2));
    assert_eq!((to.checksum(2), to.checksum(0)), (from.checksum(1), from.checksum(2)));
    drop((sender, receiver));
    let heard = listening.join().expect("no panic");
    let key = ticket.key.expect("a key").secret;
    assert!(heard.windows(32).all(|window| window != key), "the key was on the way");
    heard
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn encrypted_kv_cannot_be_read_on_the_way() {
    let has_kv = |heard: &[u8]| heard.windows(64).any(|window| window == [0xab; 64]);
    assert!(has_kv(&overheard(Protection::Bound).await), "what is looked for");
    let heard = overheard(Protection::Encrypted).await;
    assert!(heard.len() > 2 << 20 && !has_kv(&heard));
}

#[test]
fn a_hello_that_trickles_in_does_not_keep_its_place() {
    let (transport, address) =
        bind_with(TcpConfig { connect_timeout: Duration::from_millis(300), ..TcpConfig::default() });
    let mut stream = TcpStream::connect(address).expect("connect");
    stream.set_read_timeout(Some(Duration::from_millis(100))).expect("timeout");
    let start = Instant::now();
    // So many bytes at this pace would take many times the bound.
    for byte in hello("tcp/other") {
        // The pace; the node says nothing before it hangs up.
        let hung_up = stream.read(&mut [0]).is_ok();
        if hung_up || stream.write_all(&[byte]).is_err() {
            break;
        }
    }
    wait_for_errors(&transport, 1);
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}

/// The node counts just after it hung up.
fn wait_for_errors(transport: &TcpTransport, expected: u64) {
    let deadline = Instant::now() + Duration::from_secs(5);
    while transport.counters().protocol_errors.load(Relaxed) != expected {
        assert!(Instant::now() < deadline, "{expected} errors were not counted");
        std::thread::yield_now();
    }
}

#[test]
fn a_taken_port_and_an_address_for_all_are_clear_errors() {
    let (_transport, address) = bind();
    for address in [address, (Ipv4Addr::UNSPECIFIED, 0).into()] {
        let arena = Arena::new(HostMemory::zeroed(64 * 8).expect("little"), 64, 1);
        let error = TcpTransport::bind(address, arena, TcpConfig::default()).err().expect("bound");
        assert_eq!(error.kind, TransferErrorKind::Io);
        assert!(error.message.contains(&address.to_string()), "{error}");
    }
}
