//! KV over UCX (<https://openucx.org>): shared memory, sockets or RDMA by active-message rendezvous. The sender
//! announces a range, the receiver looks its blocks up in its own grant and lets UCX put the bytes there: our frames
//! carry no remote key and no memory address. UCX's own frames do, on a fabric: its rendezvous sends the address of the
//! data and a key of the registered memory, which is the whole arena. So a peer on RDMA is one that is trusted with all
//! of a node's KV.
//!
//! Three layers: `ucx-sys` (raw), [`result`] (status to error), `owners` (objects with `Drop`). Above them one thread,
//! `driver`, makes every UCX call. `sending` and `receiving` are its two halves, which share a `desk`; `turns` says
//! whose payload is next, and `budget` how many land at once. `endpoints` and `operations` are the tables on the desk,
//! `ids` their names. `custody` decides when the blocks of a lost peer are free, with what `process` and `probe` find
//! out. `address` is what is checked before UCX reads it, `inbox` what callbacks leave; `commands` are what the process
//! says to the driver, and `queue` is how; `ending` is what is left when it is gone. `profile` picks UCX's transports,
//! `hello` is what a sender says of itself, `origin` says in it which endpoint it comes from, `survey` is what UCX can
//! open on a machine.
//! `one_copy` takes the place of UCX's rendezvous where the receiver can map the sender's memory; `device` is what KV
//! on a GPU asks for.
//!
//! How things end. An endpoint is *lost* (its close has begun), *closed* (UCX is done with it), and then *free* or in
//! *quarantine* (somebody may still write). An operation *completes* (its callback came), or is *abandoned* (it gives
//! up its blocks, and keeps what UCX may look at). A hand-off is *answered*, *cancelled* by its sender, or *refused*. A
//! peer is *fenced* in the registry when it is free.
//!
//! One UCX version per cluster: two versions do not understand each other, so the version is part of the build id,
//! which is compared before UCX is touched. So is Tandem's protocol: builds whose hellos differ would wait for each
//! other's welcomes in vain. Read next: `driver.rs`.
#![allow(unsafe_code)]

mod address;
mod budget;
mod commands;
mod custody;
mod desk;
mod device;
mod driver;
mod ending;
mod endpoints;
mod hello;
mod ids;
mod inbox;
mod one_copy;
mod operations;
mod origin;
mod owners;
#[doc(hidden)]
pub mod presence;
mod probe;
mod process;
pub mod profile;
mod queue;
mod receiving;
pub mod result;
mod sending;
#[doc(hidden)]
pub mod stranger;
pub mod survey;
mod turns;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;

use futures::future::BoxFuture;
use tandem_proto::{HandoffId, PROTOCOL_VERSION, v1};
use tokio::sync::{Semaphore, oneshot};
use ucx_sys::Api;
pub use ucx_sys::{SETTINGS, prepare_environment};

pub use self::address::AddressKeys;
use self::address::{AddressKey, CheckedAddress};
use self::commands::{Command, Shared};
use self::driver::Driver;
use self::ending::Ending;
use self::ids::EndpointId;
pub use self::profile::{UcxConfig, UcxProfile};
use self::queue::Queue;
use crate::arena::{Arena, Run};
use crate::build_id::ON_GPU;
use crate::counters::Counters;
use crate::error::{TransferError, TransferErrorKind};
use crate::incoming::Incoming;
use crate::outgoing::{Outgoing, SendLink};
use crate::registry::{PeerLink, Registry};
use crate::terms::{BlockOwner, Grant, PeerId};
use crate::transport::{Transport, read_ticket};
use crate::wire::{Answer, DataHeader};

/// A node's UCX worker. Dropping it closes every connection and ends its thread.
pub struct UcxTransport {
    info: v1::TransportInfo,
    shared: Shared,
    config: UcxConfig,
    key: AddressKey,
    thread: Option<JoinHandle<()>>,
}

impl UcxTransport {
    /// Loads UCX, registers the arena and starts the driver thread.
    ///
    /// # Errors
    /// `Incompatible` when UCX is absent, of a version that is not served, has no transport for the profile or for the
    /// arena's device, or an operator's variable goes against it; `Io` when it refuses the settings or the arena;
    /// `BadAddress` when its address is longer than peers take.
    pub fn start(arena: Arc<Arena>, config: UcxConfig) -> Result<Arc<Self>, TransferError> {
        device::check_operators(&arena, &config)?;
        let api = Api::load(config.lib_dir.as_deref())
            .map_err(|error| TransferError::new(TransferErrorKind::Incompatible, error.to_string()))?;
        let build_id = build_id(api, &config, &arena);
        let key = AddressKey::new(&config.address_keys, &build_id);
        let shared = Shared::new(arena, &config)?;
        let (started, outcome) = std::sync::mpsc::sync_channel(1);
        let (for_driver, driver_config, driver_build) = (shared.clone(), config.clone(), build_id.clone());
        let thread = std::thread::Builder::new().name("kv-ucx".to_owned()).spawn(move || {
            // Dropped after the driver, and by a panic of it too.
            let _ending = Ending(for_driver.clone());
            match Driver::open(api, driver_config, driver_build, for_driver) {
                Ok(driver) => {
                    let _ = started.send(Ok(driver.name().to_owned()));
                    driver.run();
                }
                Err(error) => {
                    let _ = started.send(Err(error));
                }
            }
        })?;
        let died = |_| Err(TransferError::new(TransferErrorKind::Io, "the UCX thread died at its start"));
        let name = outcome.recv().unwrap_or_else(died)?;
        if config.profile != UcxProfile::Shm {
            tracing::warn!(
                "KV over UCX is not encrypted, and whoever reaches its port or fabric can read and write this node's KV \
                 memory: keep that network closed to all but the nodes"
            );
        }
        let info = v1::TransportInfo { backend: "ucx".to_owned(), name, build_id, reach: None };
        Ok(Arc::new(Self { info, shared, config, key, thread: Some(thread) }))
    }
}

impl Transport for UcxTransport {
    fn info(&self) -> v1::TransportInfo {
        self.info.clone()
    }

    fn address(&self) -> Vec<u8> {
        self.shared.address()
    }

    fn counters(&self) -> Arc<Counters> {
        self.shared.registry.counters().clone()
    }

    fn failed(&self) -> Option<String> {
        self.shared.failure.get().map(|reason| format!("UCX: {reason}"))
    }

    fn accept(&self, grant: Grant) -> Result<Incoming, TransferError> {
        if let Some(reason) = self.failed() {
            return Err(TransferError::new(TransferErrorKind::Io, format!("the KV transport has failed: {reason}")));
        }
        // A ticket of an old address is either withdrawn with the others of it, or never made.
        self.shared.at_address(|address| Incoming::accept(&self.shared.registry, grant, self.info(), address.to_vec()))
    }

    fn open<'a>(&'a self, ticket: &'a v1::Ticket) -> BoxFuture<'a, Result<Outgoing, TransferError>> {
        Box::pin(async move {
            let address = |bytes: &[u8]| Ok(CheckedAddress::parse(bytes, &self.key)?);
            let (arena, counters) = (&self.shared.arena, self.counters());
            let (checked, secret, address) = read_ticket(ticket, &self.info, arena, &counters, address)?;
            let (reply, opened) = oneshot::channel();
            let command = Command::Open { handoff: checked.handoff, address, secret, reply };
            self.shared.queue.send(command).await.map_err(|_| shut_down())?;
            let opened = opened.await.map_err(|_| shut_down())??;
            let link = UcxSendLink {
                queue: self.shared.queue.clone(),
                endpoint: opened.endpoint,
                credit: opened.credit,
                credit_bytes: self.config.credit_bytes,
                max_range_bytes: device::range_bytes(&self.shared.arena, &self.config),
                contiguous: self.config.profile == UcxProfile::Rdma || device::holds(&self.shared.arena),
            };
            let (arena, counters) = (self.shared.arena.clone(), self.counters());
            Ok(Outgoing::new(Box::new(link), arena, counters, checked, opened.answer))
        })
    }
}

impl Drop for UcxTransport {
    fn drop(&mut self) {
        self.shared.queue.close();
        if let Some(thread) = self.thread.take() {
            // Bounded: the driver flushes for a tenth of a second at most. A panic there was already printed.
            let _ = thread.join();
        }
    }
}

/// Equal on nodes that understand each other: UCX's version, its transports, where the KV lies, and the protocol, by
/// which hellos, addresses and frames have their form.
fn build_id(api: &Api, config: &UcxConfig, arena: &Arena) -> String {
    let device = if device::holds(arena) { ON_GPU } else { "" };
    format!("ucx-{}/{}{device}/{PROTOCOL_VERSION}", api.version, config.profile)
}

impl Shared {
    fn new(arena: Arc<Arena>, config: &UcxConfig) -> std::io::Result<Self> {
        let queue = Queue::new()?;
        let counters = Arc::new(Counters::default());
        let link = Box::new(UcxPeerLink { queue: queue.clone(), counters: counters.clone() });
        let registry = Registry::new(arena.clone(), counters, link, config.grace);
        let (address, failure) = (Arc::default(), Arc::default());
        Ok(Self { arena, registry, pending: Arc::default(), queue, address, failure })
    }
}

fn shut_down() -> TransferError {
    TransferError::new(TransferErrorKind::Cancelled, "the KV transport shut down")
}

struct UcxPeerLink {
    queue: Arc<Queue<Command>>,
    counters: Arc<Counters>,
}

impl PeerLink for UcxPeerLink {
    fn answer(&self, peer: PeerId, handoff: HandoffId, answer: Answer) {
        let command = Command::Answer { endpoint: EndpointId(peer.0), handoff, answer };
        let sent = match answer {
            Answer::Ack => self.queue.send_now(command),
            Answer::Refused(_) => self.queue.send_refusal(command),
        };
        // Flooded, or after shutdown, where there is nobody to tell.
        self.counters.dropped_frames.fetch_add(u64::from(sent.is_err()), Relaxed);
    }

    fn cut_off(&self, peer: PeerId) {
        // After shutdown it is fenced.
        let _ = self.queue.send_now(Command::CutOff { endpoint: EndpointId(peer.0) });
    }
}

struct UcxSendLink {
    queue: Arc<Queue<Command>>,
    endpoint: EndpointId,
    credit: Arc<Semaphore>,
    credit_bytes: usize,
    max_range_bytes: usize,
    /// See [`SendLink::max_runs`].
    contiguous: bool,
}

impl SendLink for UcxSendLink {
    fn max_range_bytes(&self) -> usize {
        self.max_range_bytes
    }

    /// On a fabric, and from device to device, only what is contiguous at both ends moves without a copy: a vector of
    /// pieces names no registered memory, so UCX copies it, piece by piece, on the driver's thread, and into a
    /// scattered receive it fetches by active messages, which its thread copies too.
    fn max_runs(&self) -> usize {
        if self.contiguous { 1 } else { usize::MAX }
    }

    fn push(
        &mut self,
        range: DataHeader,
        runs: Vec<Run>,
        owner: BlockOwner,
    ) -> BoxFuture<'_, Result<(), TransferError>> {
        Box::pin(async move {
            // A range of more than all credit waits for all of it.
            let bytes = runs.iter().map(|run| run.bytes).sum::<usize>().min(self.credit_bytes);
            let credit = self.credit.clone().acquire_many_owned(u32::try_from(bytes).unwrap_or(u32::MAX)).await;
            let credit = credit.map_err(|_| TransferError::peer_gone("the KV peer is gone"))?;
            let command = Command::Push { endpoint: self.endpoint, range, runs, owner, credit };
            self.queue.send(command).await.map_err(|_| shut_down())
        })
    }

    fn keep_alive(&mut self, handoff: HandoffId) -> BoxFuture<'_, Result<(), TransferError>> {
        let command = Command::KeepAlive { endpoint: self.endpoint, handoff };
        Box::pin(async move { self.queue.send(command).await.map_err(|_| shut_down()) })
    }

    fn seal(&mut self, handoff: HandoffId, payload: Vec<u8>) -> BoxFuture<'_, Result<(), TransferError>> {
        Box::pin(async move { self.queue.send(Command::Seal { handoff, payload }).await.map_err(|_| shut_down()) })
    }

    fn cancel(&mut self, handoff: HandoffId) {
        // After shutdown there is nobody to tell.
        let _ = self.queue.send_now(Command::Cancel { handoff });
    }
}
