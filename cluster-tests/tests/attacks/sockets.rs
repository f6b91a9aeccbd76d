//! Bytes on sockets, as no client library would send them.
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// A door that says nothing for so long leaves a stranger waiting, which is its right.
pub const PATIENCE: Duration = Duration::from_millis(700);

/// What came back.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// All bytes.
    pub bytes: Vec<u8>,
    /// The other end closed or broke the connection.
    pub is_closed: bool,
}

impl Answer {
    /// As text, as far as it is one.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    /// The statuses of HTTP/1.1 answers in it.
    pub fn statuses(&self) -> Vec<u16> {
        let text = self.text();
        let parts = text.split("HTTP/1.1 ").skip(1);
        parts.filter_map(|part| part.get(..3)?.parse().ok()).collect()
    }
}

/// Says `bytes`, and reads until the other end closes or has been silent for a while. The other end may close before
/// all of it is said.
///
/// # Errors
/// Nobody listens.
pub async fn say(to: SocketAddr, bytes: &[u8]) -> anyhow::Result<Answer> {
    said(to, bytes, PATIENCE).await
}

/// The same where the other end is to close: a door that takes its time on a busy machine has not stayed open.
///
/// # Errors
/// As [`say`].
pub async fn say_until_closed(to: SocketAddr, bytes: &[u8]) -> anyhow::Result<Answer> {
    said(to, bytes, 10 * PATIENCE).await
}

async fn said(to: SocketAddr, bytes: &[u8], patience: Duration) -> anyhow::Result<Answer> {
    let mut stream = TcpStream::connect(to).await?;
    let _ = timeout(10 * PATIENCE, stream.write_all(bytes)).await;
    Ok(heard(&mut stream, patience).await)
}

/// Reads until the other end closes or has been silent for a while.
pub async fn listen(stream: &mut TcpStream) -> Answer {
    heard(stream, PATIENCE).await
}

async fn heard(stream: &mut TcpStream, patience: Duration) -> Answer {
    let mut answer = Answer::default();
    let mut chunk = vec![0; 64 << 10];
    loop {
        match timeout(patience, stream.read(&mut chunk)).await {
            Err(_) => return answer,
            Ok(Ok(0) | Err(_)) => return Answer { is_closed: true, ..answer },
            Ok(Ok(read)) => answer.bytes.extend_from_slice(&chunk[..read]),
        }
        if answer.bytes.len() > 1 << 20 {
            return answer;
        }
    }
}

/// So many connections that say `bytes` and then stay as they are.
///
/// # Errors
/// This process has no more descriptors.
pub async fn hold(to: SocketAddr, count: usize, bytes: &[u8]) -> anyhow::Result<Vec<TcpStream>> {
    let mut held = Vec::with_capacity(count);
    for _ in 0..count {
        let mut stream = TcpStream::connect(to).await?;
        // It may have been closed for another one's sake already.
        let _ = stream.write_all(bytes).await;
        held.push(stream);
    }
    Ok(held)
}

/// Bytes without a meaning, the same ones for one number.
pub fn noise(number: u64, bytes: usize) -> Vec<u8> {
    use rand::{RngCore, SeedableRng};
    let mut noise = vec![0; bytes];
    rand::rngs::StdRng::seed_from_u64(number).fill_bytes(&mut noise);
    noise
}

/// The beginning of a TLS 1.3 handshake, as a browser says it: record, client hello, and what it offers, cut.
pub fn tls_hello() -> Vec<u8> {
    let mut hello = vec![0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3];
    hello.extend(noise(1, 506));
    hello
}

/// HTTP/2, frame by frame (RFC 9113).
pub mod h2 {
    /// What a client begins with.
    pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    /// Types of frames.
    pub const DATA: u8 = 0;
    /// See above.
    pub const HEADERS: u8 = 1;
    /// See above.
    pub const RST_STREAM: u8 = 3;
    /// See above.
    pub const SETTINGS: u8 = 4;
    /// See above.
    pub const PING: u8 = 6;
    /// See above.
    pub const CONTINUATION: u8 = 9;
    const GOAWAY: u8 = 7;
    /// Flags.
    pub const END_STREAM: u8 = 1;
    /// See above.
    pub const END_HEADERS: u8 = 4;

    /// One frame.
    pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let len = (payload.len() as u32).to_be_bytes();
        [&len[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
    }

    /// Preface and these settings.
    pub fn opening(settings: &[(u16, u32)]) -> Vec<u8> {
        let payload: Vec<u8> =
            settings.iter().flat_map(|(id, value)| [&id.to_be_bytes()[..], &value.to_be_bytes()].concat()).collect();
        [PREFACE, &frame(SETTINGS, 0, 0, &payload)].concat()
    }

    /// Headers in HPACK's plainest form: literal, not indexed, not compressed (RFC 7541, 6.2.2).
    pub fn headers(pairs: &[(&str, &str)]) -> Vec<u8> {
        let mut block = Vec::new();
        for (name, value) in pairs {
            block.push(0);
            for text in [name, value] {
                integer(&mut block, text.len());
                block.extend_from_slice(text.as_bytes());
            }
        }
        block
    }

    /// With seven bits in the first byte (RFC 7541, 5.1).
    fn integer(block: &mut Vec<u8>, mut value: usize) {
        if value < 127 {
            return block.push(value as u8);
        }
        block.push(127);
        value -= 127;
        while value >= 128 {
            block.push((value % 128 + 128) as u8);
            value /= 128;
        }
        block.push(value as u8);
    }

    /// Why the server ended the connection, if it did: the code of its GOAWAY.
    pub fn goaway(mut bytes: &[u8]) -> Option<u32> {
        while let Some((head, rest)) = bytes.split_first_chunk::<9>() {
            let len = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
            let (payload, rest) = rest.split_at_checked(len)?;
            if head[3] == GOAWAY {
                return Some(u32::from_be_bytes(payload.get(4..8)?.try_into().ok()?));
            }
            bytes = rest;
        }
        None
    }
}
