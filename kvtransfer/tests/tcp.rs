//! The tcp backend against what is not its protocol.
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tandem_kvtransfer::tcp::{TcpConfig, TcpTransport};
use tandem_kvtransfer::wire::Header;
use tandem_kvtransfer::{Arena, TransferErrorKind, Transport};
use tandem_memory::HostMemory;

fn bind() -> (Arc<TcpTransport>, SocketAddr) {
    let arena = Arena::new(HostMemory::zeroed(64 * 8).expect("little"), 64, 1);
    let transport = TcpTransport::bind((Ipv4Addr::LOCALHOST, 0).into(), arena, TcpConfig::default()).expect("bind");
    let address = String::from_utf8(transport.address()).expect("text").parse().expect("address");
    (transport, address)
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

fn hello(build: &str) -> Vec<u8> {
    let mut frame = Header::hello().encode().to_vec();
    frame.extend_from_slice(&(build.len() as u64).to_le_bytes());
    frame.extend_from_slice(build.as_bytes());
    frame
}

#[test]
fn garbage_closes_the_connection_and_is_counted() {
    let (transport, address) = bind();
    let ours = transport.info().build_id;
    let mut truncated_frame = hello(&ours);
    truncated_frame.extend_from_slice(&[0xff; 40]);
    let mut long_hello = Header::hello().encode().to_vec();
    long_hello.extend_from_slice(&u64::MAX.to_le_bytes());
    let cases: [(&[u8], bool); 5] = [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n", false),
        (&[0; 4096], false),
        (&hello("tcp/other"), false),
        (&long_hello, false),
        (&truncated_frame, true),
    ];
    for (i, (bytes, greeted)) in cases.iter().enumerate() {
        let said = speak(address, bytes);
        assert_eq!(!said.is_empty(), *greeted, "case {i}");
        wait_for_errors(&transport, i as u64 + 1);
    }
}

#[test]
fn a_hello_that_trickles_in_does_not_keep_its_place() {
    let arena = Arena::new(HostMemory::zeroed(64 * 8).expect("little"), 64, 1);
    let config = TcpConfig { connect_timeout: Duration::from_millis(300), ..TcpConfig::default() };
    let transport = TcpTransport::bind((Ipv4Addr::LOCALHOST, 0).into(), arena, config).expect("bind");
    let address = String::from_utf8(transport.address()).expect("text");
    let mut stream = TcpStream::connect(address).expect("connect");
    stream.set_read_timeout(Some(Duration::from_millis(100))).expect("timeout");
    let start = Instant::now();
    // 49 bytes at this pace would take twice the bound.
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
