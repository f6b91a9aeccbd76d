//! Somebody who has a ticket and says what it likes, for tests: a connection that speaks frames as bytes, well made or
//! not, each with the tag that its reader expects. Not a part of any node.
use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use tandem_proto::v1;

use super::greeting::{self, Greeted};
use crate::error::TransferError;
use crate::handshake::Secret;

/// An open connection without encryption.
pub struct Stranger {
    stream: TcpStream,
    greeted: Greeted,
}

impl Stranger {
    /// Says the ticket's hello.
    ///
    /// # Errors
    /// The receiver's refusal, or that of the socket.
    pub fn connect(ticket: &v1::Ticket, patience: Duration) -> Result<Self, TransferError> {
        let address = String::from_utf8_lossy(&ticket.address).into_owned();
        let build_id = &ticket.transport.as_ref().map(|info| info.build_id.clone()).unwrap_or_default();
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        let greeted = greeting::call(&stream, build_id, &Secret::of(ticket)?, Instant::now() + patience)?;
        stream.set_read_timeout(Some(patience))?;
        Ok(Self { stream, greeted })
    }

    /// Says a frame, with tags behind its head and, unless it is data, behind its payload.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn send(&mut self, header: &[u8; 32], payload: &[u8], is_data: bool) -> std::io::Result<()> {
        self.send_head(header, payload.len() as u64)?;
        self.stream.write_all(payload)?;
        if is_data || payload.is_empty() { Ok(()) } else { self.stream.write_all(&self.greeted.sealer.bind(payload)) }
    }

    /// Says the head of a frame alone.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn send_head(&mut self, header: &[u8; 32], len: u64) -> std::io::Result<()> {
        let mut head = [&header[..], &len.to_le_bytes()].concat();
        let tag = self.greeted.sealer.bind(&head);
        head.extend(tag);
        self.stream.write_all(&head)
    }

    /// The socket, for whatever comes next.
    pub fn into_socket(self) -> TcpStream {
        self.stream
    }
}
