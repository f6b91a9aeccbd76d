//! Somebody on the data network who says what it likes, for tests: a worker of its own, which sends hellos and
//! announcements, well made or not, to any node that it has an address of, or that has connected to it. Not a part of
//! any node.
use std::sync::Arc;

use tandem_proto::{PROTOCOL_VERSION, v1};
use ucx_sys::Api;

use super::address::CheckedAddress;
use super::commands::Shared;
use super::driver::Driver;
use super::ids::EndpointId;
use super::origin::ORIGIN_BYTES;
use super::{UcxConfig, build_id};
use crate::arena::Arena;
use crate::error::{TransferError, TransferErrorKind};
use crate::handshake::{HELLO_HEAD_BYTES, Secret};
use crate::terms::PeerId;
use crate::wire::{DataHeader, Header};

/// Where the build and the address begin in a hello: whoever has the key may say of its origin what it likes.
pub const BUILD_AT: usize = HELLO_HEAD_BYTES + ORIGIN_BYTES;

/// Stays on the thread that made it, which has to call [`Stranger::turn`] all the time.
pub struct Stranger {
    driver: Driver,
}

impl Stranger {
    /// One with a worker, and no thread.
    ///
    /// # Errors
    /// As [`super::UcxTransport::start`].
    pub fn start(arena: Arc<Arena>, config: UcxConfig) -> Result<Self, TransferError> {
        let api = Api::load(config.lib_dir.as_deref())
            .map_err(|error| TransferError::new(TransferErrorKind::Incompatible, error.to_string()))?;
        let build_id = build_id(api, &config, &arena);
        let shared = Shared::new(arena, &config)?;
        Ok(Self { driver: Driver::open(api, config, build_id, shared)? })
    }

    /// An honest address of its worker, as a ticket has it.
    pub fn address(&self) -> Vec<u8> {
        self.driver.desk.shared.address()
    }

    /// Connects to a node, by the honest address of a ticket of it.
    ///
    /// # Errors
    /// `BadAddress`, or what UCX says.
    pub fn connect(&mut self, address: &[u8]) -> Result<PeerId, TransferError> {
        let address = CheckedAddress::parse(address, &self.driver.desk.key)?;
        Ok(self.driver.desk.connect(&address, |_| true)?.into())
    }

    /// Those that it has connected to, and those that have said hello to it.
    pub fn peers(&self) -> Vec<PeerId> {
        self.driver.desk.endpoints.all().into_iter().map(PeerId::from).collect()
    }

    /// The payload of an honest hello to whoever gave the ticket.
    ///
    /// # Errors
    /// As [`Secret::of`].
    pub fn hello(&self, ticket: &v1::Ticket) -> Result<Vec<u8>, TransferError> {
        Ok(Secret::of(ticket)?.hello(rand::random(), &self.driver.desk.about(EndpointId::NONE)))
    }

    /// Sends a hello with this payload.
    pub fn say_hello(&mut self, to: PeerId, payload: Vec<u8>) {
        self.driver.desk.post_frame(EndpointId(to.0), Header::Hello { protocol: PROTOCOL_VERSION }, payload);
    }

    /// Announces a range that lies, it says, at these bytes of its memory (first byte, number of bytes).
    pub fn announce(&mut self, to: PeerId, range: DataHeader, runs: &[(u64, u64)]) {
        let payload = runs.iter().flat_map(|(at, bytes)| [*at, *bytes]).flat_map(u64::to_le_bytes).collect();
        self.driver.desk.post_frame(EndpointId(to.0), Header::Ready(range), payload);
    }

    /// Lets UCX work.
    pub fn turn(&mut self) {
        self.driver.turn();
    }
}
