//! The first words on a socket: the caller's hello with the key of the hand-off that it dials for, and the welcome, or
//! the refusal. Both within a time, and not a byte of what follows is read. Knows no frame after them.
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use tandem_proto::PROTOCOL_VERSION;
use tokio::io::AsyncReadExt;

use super::frame::{PRELUDE_BYTES, garbage, is_timeout, parse_prelude, prelude};
use super::sealing::{Opener, Sealer};
use crate::build_id::difference;
use crate::error::{Refusal, TransferError, TransferErrorKind};
use crate::handshake::{Direction, HELLO_HEAD_BYTES, Hello, Nonces, Secret, WELCOME_HEAD_BYTES, Way, Welcome};
use crate::registry::Registry;
use crate::terms::PeerId;
use crate::wire::{Answer, Header, MAX_HELLO_BYTES};

/// What both ends have agreed upon.
pub(super) struct Greeted {
    pub(super) nonces: Nonces,
    pub(super) sealer: Sealer,
    pub(super) opener: Opener,
}

impl Greeted {
    fn new(secret: &Secret, nonces: Nonces, out: Direction, back: Direction) -> Self {
        let sealer = Sealer::new(secret.session(nonces, out));
        Self { nonces, sealer, opener: Opener::new(secret.session(nonces, back)) }
    }
}

/// Says hello for a hand-off, and waits for the welcome.
///
/// # Errors
/// The receiver's refusal; `Refused(Unauthenticated)` for a receiver that does not know the key.
pub(super) fn call(
    mut stream: &TcpStream,
    build_id: &str,
    secret: &Secret,
    until: Instant,
) -> Result<Greeted, TransferError> {
    let sender = rand::random();
    let hello = secret.hello(sender, build_id.as_bytes());
    stream.write_all(&[&prelude(&Header::hello(), hello.len() as u64)[..], &hello].concat())?;
    let mut head = [0; PRELUDE_BYTES];
    read_until(stream, &mut head, until)?;
    match parse_prelude(&head) {
        Some((Header::Welcome(_), len)) if len == WELCOME_HEAD_BYTES as u64 => {}
        Some((Header::Answer(_, Answer::Refused(refusal)), 0)) => return Err(refusal.into()),
        _ => return Err(garbage()),
    }
    let mut payload = [0; WELCOME_HEAD_BYTES];
    read_until(stream, &mut payload, until)?;
    let welcome = Welcome::parse(&payload).filter(|it| secret.welcomed(Way::Sent, it, sender, build_id.as_bytes()));
    let nonces = Nonces { sender, receiver: welcome.ok_or(Refusal::Unauthenticated)?.nonce };
    Ok(Greeted::new(secret, nonces, Direction::ToReceiver, Direction::ToSender))
}

/// A hello, all of it, not parsed yet.
pub(super) struct HelloFrame {
    protocol: u32,
    payload: Vec<u8>,
}

/// Waits for a hello, for as long as its caller does.
///
/// # Errors
/// `Corrupt` for what is none, those of the socket.
pub(super) async fn read_hello(stream: &mut tokio::net::TcpStream) -> Result<HelloFrame, TransferError> {
    let mut head = [0; PRELUDE_BYTES];
    stream.read_exact(&mut head).await?;
    let Some((Header::Hello { protocol }, len)) = parse_prelude(&head) else { return Err(garbage()) };
    if len > (HELLO_HEAD_BYTES + MAX_HELLO_BYTES) as u64 {
        return Err(garbage());
    }
    let mut payload = vec![0; len as usize];
    stream.read_exact(&mut payload).await?;
    Ok(HelloFrame { protocol, payload })
}

/// Opens a hello's hand-off for `peer`, and welcomes it. The stream does not block: it is new, so a few bytes have
/// room.
///
/// # Errors
/// `Incompatible` for another build, the refusal, `Corrupt` for what is no hello.
pub(super) fn answer(
    mut stream: &TcpStream,
    frame: &HelloFrame,
    build_id: &str,
    registry: &Registry,
    peer: PeerId,
) -> Result<Greeted, TransferError> {
    let hello = Hello::parse(&frame.payload).ok_or_else(garbage)?;
    if frame.protocol != PROTOCOL_VERSION || hello.about != build_id.as_bytes() {
        let differs = difference(build_id, &String::from_utf8_lossy(hello.about));
        let message = format!("the KV sender is of another build (protocol {}): {differs}", frame.protocol);
        return Err(TransferError::new(TransferErrorKind::Incompatible, message));
    }
    let opened = registry.authenticate(&hello).and_then(|authenticated| {
        registry.open(peer, &authenticated)?;
        Ok(authenticated)
    });
    let authenticated = match opened {
        Ok(authenticated) => authenticated,
        Err(refusal) => {
            // Who is gone by now need not know.
            let _ = stream.write_all(&prelude(&Header::Answer(hello.handoff, Answer::Refused(refusal)), 0));
            return Err(refusal.into());
        }
    };
    let (secret, nonces) = (authenticated.secret(), Nonces { sender: hello.nonce, receiver: rand::random() });
    let welcome = secret.welcome(Way::Sent, nonces, hello.about, &[]);
    let welcome = [&prelude(&Header::Welcome(hello.handoff), welcome.len() as u64)[..], &welcome].concat();
    // Its hand-off is open, and nobody else would fail it.
    stream.write_all(&welcome).inspect_err(|_| registry.fence(peer))?;
    Ok(Greeted::new(secret, nonces, Direction::ToSender, Direction::ToReceiver))
}

/// Fills `bytes` by a time: a read timeout alone lets a peer hold its place by a byte now and then.
fn read_until(mut stream: &TcpStream, bytes: &mut [u8], until: Instant) -> io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut bytes[filled..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted || is_timeout(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
