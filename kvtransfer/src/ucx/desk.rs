//! What both halves of the driver work at: the worker, its endpoints, the operations in flight, and what the node told
//! them. Posts, keeps and gives up; what an operation's end means is for the half that it belongs to, so ends and
//! losses wait here until the driver hands them out. Knows no hand-off.
use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use tokio::sync::OwnedSemaphorePermit;
use ucx_sys::{UCS_OK, ucp_dt_iov, ucs_status_t};

use super::address::{AddressKey, CheckedAddress};
use super::commands::{Command, Shared};
use super::custody::Closed;
use super::device;
use super::endpoints::{Endpoints, Loss};
use super::hello::About;
use super::ids::{EndpointId, OperationId};
use super::inbox;
use super::one_copy::{OneCopy, Report};
use super::operations::{Cargo, Operation, Operations, SendCargo};
use super::origin::{Generation, Origin};
use super::owners::{Region, Worker};
use super::process::{ProcessName, Watch};
use super::profile::UcxConfig;
use super::result::{Posted, UcxError};
use crate::arena::Run;
use crate::error::{TransferError, TransferErrorKind};
use crate::registry::{Claim, Registry};
use crate::terms::BlockOwner;
use crate::wire::{DataHeader, Header};

/// The fields are dropped in the order that UCX needs: connections before the worker before the memory.
pub(super) struct Desk {
    pub(super) endpoints: Endpoints,
    pub(super) worker: Rc<Worker>,
    pub(super) region: Region,
    pub(super) operations: Operations,
    pub(super) one_copy: OneCopy,
    pub(super) shared: Shared,
    pub(super) config: UcxConfig,
    pub(super) build_id: String,
    pub(super) key: AddressKey,
    process: ProcessName,
    /// Of peers that have said hello, until nothing of them can be written any more.
    watches: HashMap<EndpointId, Option<Watch>>,
    ends: VecDeque<End>,
}

/// What the halves have to be told.
pub(super) enum End {
    /// An endpoint was given up.
    Lost(EndpointId, TransferError),
    /// An operation is over.
    Finished { on: EndpointId, cargo: Cargo, succeeded: bool },
}

impl Desk {
    /// # Errors
    /// The system gives no thread.
    pub(super) fn new(
        worker: Rc<Worker>,
        region: Region,
        shared: Shared,
        config: UcxConfig,
        build_id: String,
    ) -> io::Result<Self> {
        let queue = shared.queue.clone();
        let report: Report = Box::new(move |ranges| {
            // After shutdown there is nobody to tell.
            let _ = queue.send_now(Command::Copied { ranges });
        });
        Ok(Self {
            one_copy: OneCopy::start(&shared.arena, &config, report)?,
            endpoints: Endpoints::new(worker.clone(), config.credit_bytes, config.max_peers),
            worker,
            region,
            operations: Operations::default(),
            shared,
            key: AddressKey::new(&config.address_keys, &build_id),
            config,
            build_id,
            process: ProcessName::own(),
            watches: HashMap::new(),
            ends: VecDeque::new(),
        })
    }

    pub(super) fn registry(&self) -> &Arc<Registry> {
        &self.shared.registry
    }

    /// The endpoint to `address`, new if there is none; when all places are taken, one without operations, and that is
    /// not `busy`, makes room.
    pub(super) fn connect(
        &mut self,
        address: &CheckedAddress,
        busy: impl Fn(EndpointId) -> bool,
    ) -> Result<EndpointId, TransferError> {
        let operations = &self.operations;
        self.endpoints.connect(address, Instant::now(), |id| operations.is_busy(id) || busy(id))
    }

    /// The endpoint to whoever has said hello. One that is paired with an endpoint that the peer does not have any more
    /// is closed first.
    pub(super) fn answer_to(
        &mut self,
        address: &CheckedAddress,
        origin: &Origin,
        busy: impl Fn(EndpointId) -> bool,
    ) -> Result<EndpointId, TransferError> {
        if let Some(stale) = self.endpoints.stale(address, origin) {
            let why = "the KV peer has connected anew";
            self.lose(stale, Loss::GivenUp, TransferError::peer_gone(why));
        }
        let id = self.connect(address, busy)?;
        self.meet(id, origin);
        Ok(id)
    }

    /// The peer has said which end of its own, and which process, is behind an endpoint.
    pub(super) fn meet(&mut self, endpoint: EndpointId, origin: &Origin) {
        self.endpoints.pair(endpoint, origin.generation);
        self.watches.entry(endpoint).or_insert_with(|| Watch::on(&origin.process));
    }

    /// Which end of ours, and which process, an endpoint is.
    pub(super) fn origin(&self, endpoint: EndpointId) -> Origin {
        let paired = self.endpoints.get(endpoint).and_then(|entry| entry.paired);
        Origin { generation: Generation(endpoint.0), paired, process: self.process, memory: self.one_copy.share() }
    }

    /// All that a hello over this endpoint says of us.
    pub(super) fn about(&self, endpoint: EndpointId) -> Vec<u8> {
        About::encode(&self.origin(endpoint), &self.build_id, &self.shared.address())
    }

    /// The process behind an endpoint has ended, by our kernel's word.
    pub(super) fn has_ended(&self, endpoint: EndpointId) -> bool {
        self.watches.get(&endpoint).and_then(Option::as_ref).is_some_and(Watch::has_ended)
    }

    /// Endpoints that UCX has closed, or does not close in time.
    pub(super) fn take_closed(&mut self, now: Instant) -> Vec<Closed> {
        let Self { endpoints, watches, .. } = self;
        endpoints.take_closed(now, |id| watches.get(&id).and_then(Option::as_ref).is_some_and(Watch::has_ended))
    }

    /// Nothing of an endpoint can be written any more.
    pub(super) fn fence(&mut self, endpoint: EndpointId) {
        self.watches.remove(&endpoint);
        // We are the ones who write what we copy.
        let stopped = self.one_copy.stop(endpoint);
        self.registry().fence(endpoint.into());
        drop(stopped);
    }

    /// Whether a range lands here as it is cut: on a device only in one piece.
    pub(super) fn takes(&self, runs: &[Run]) -> bool {
        runs.len() <= 1 || !device::holds(&self.shared.arena)
    }

    /// See [`Shared::settle`].
    pub(super) fn settle(&self) {
        self.shared.settle();
    }

    /// Posts a small frame; a failure takes the endpoint.
    pub(super) fn post_frame(&mut self, to: EndpointId, header: Header, payload: Vec<u8>) {
        let operation = self.operations.next_id();
        let header = header.encode().to_vec();
        let Some(entry) = self.endpoints.get(to) else { return };
        // SAFETY: heap memory, kept in the table of operations until the callback came.
        let posted = unsafe { entry.endpoint.send_frame(&header[..], &payload, operation) };
        self.keep(to, operation, posted, Cargo::Frame { header, payload });
    }

    /// Posts a range; with `altered` bytes instead of those of the runs, unless they are none.
    pub(super) fn post_range(&mut self, to: EndpointId, range: DataHeader, runs: &[Run], load: Load) {
        let Load { altered, owner, credit } = load;
        let source = match altered.as_slice() {
            [] => self.region.vector(runs),
            bytes => vec![ucp_dt_iov { buffer: bytes.as_ptr().cast::<c_void>().cast_mut(), length: bytes.len() }],
        };
        let header = Header::Data(range).encode().to_vec();
        let region = altered.is_empty().then_some(&self.region);
        let operation = self.operations.next_id();
        let Some(entry) = self.endpoints.get(to) else { return };
        let send = Box::new(SendCargo { handoff: range.handoff, header, source, altered, _owner: owner, credit });
        // SAFETY: header, source and altered bytes are heap memory of `send`, the blocks are its owner's; the table of
        // operations keeps it until the callback came or the endpoint is closed.
        let posted = unsafe { entry.endpoint.send_range(&send.header[..], region, &send.source, operation) };
        self.keep(to, operation, posted, Cargo::Send(send));
    }

    /// Lets a payload fly to where its claim says.
    pub(super) fn receive(&mut self, from: EndpointId, descriptor: inbox::Descriptor, claim: Claim) {
        let operation = self.operations.next_id();
        let target = self.region.vector(claim.runs());
        // SAFETY: the claim keeps the blocks, the table of operations keeps both until the callback came; the vector's
        // heap memory stays in place when it moves there.
        let posted = unsafe { self.worker.receive(descriptor, &self.region, &target, operation) };
        self.keep(from, operation, posted, Cargo::Receive { claim, target });
    }

    /// Refuses a payload.
    pub(super) fn release(&mut self, descriptor: inbox::Descriptor) {
        self.worker.release(descriptor);
    }

    /// Gives up an endpoint and everything on it. The registry learns of it when UCX has let go of the memory.
    pub(super) fn lose(&mut self, endpoint: EndpointId, loss: Loss, why: TransferError) {
        if !self.endpoints.close(endpoint, loss, Instant::now()) {
            return;
        }
        tracing::warn!(peer = endpoint.0, "KV peer lost: {why}");
        self.registry().counters().lost_peers.fetch_add(1, Relaxed);
        self.shared.pending.peer_gone(endpoint.into(), &why);
        self.ends.push_back(End::Lost(endpoint, why));
    }

    /// UCX says that an operation is over.
    pub(super) fn completed(&mut self, id: OperationId, status: ucs_status_t) {
        let Some(operation) = self.operations.complete(id) else { return };
        if let Some(request) = operation.request {
            self.worker.free(request);
        }
        let on = operation.endpoint;
        if status != UCS_OK {
            let text = self.worker.api().describe(status);
            let why = TransferError::peer_gone(format!("a KV transfer failed: {text}"));
            self.lose(on, Loss::of(status), why);
        } else if self.endpoints.has(on) {
            // A slow peer is none that hangs.
            self.operations.progressed(on, Instant::now() + self.config.stall_timeout);
        }
        self.ends.push_back(End::Finished { on, cargo: operation.cargo, succeeded: status == UCS_OK });
    }

    /// Gives up endpoints whose operations hang.
    pub(super) fn give_up_overdue(&mut self, now: Instant) {
        for endpoint in self.operations.overdue(now) {
            let message = "a KV transfer took too long; the peer is given up";
            self.lose(endpoint, Loss::GivenUp, TransferError::new(TransferErrorKind::Timeout, message));
        }
    }

    /// Gives up endpoints whose process has ended: UCX overlooks a death now and then.
    pub(super) fn give_up_ended(&mut self) {
        let ended: Vec<EndpointId> = self.watches.keys().copied().filter(|id| self.has_ended(*id)).collect();
        for endpoint in ended {
            self.lose(endpoint, Loss::Dead, TransferError::peer_gone("the KV peer's process has ended"));
        }
    }

    /// The next end that nobody was told.
    pub(super) fn next_end(&mut self) -> Option<End> {
        self.ends.pop_front()
    }

    /// Keeps what was posted until it is over.
    fn keep(&mut self, on: EndpointId, id: OperationId, posted: Result<Posted, UcxError>, cargo: Cargo) {
        match posted {
            Ok(Posted::Done) => self.ends.push_back(End::Finished { on, cargo, succeeded: true }),
            Ok(Posted::Pending(request)) => {
                // UCX overlooks a death now and then, and a frozen peer always.
                let deadline = Some(Instant::now() + self.config.stall_timeout);
                self.operations.insert(id, Operation { endpoint: on, deadline, request: Some(request), cargo });
            }
            Err(error) => {
                let why = TransferError::peer_gone(format!("the KV peer is gone: {error}"));
                self.lose(on, Loss::of(error.status), why);
                self.ends.push_back(End::Finished { on, cargo, succeeded: false });
            }
        }
    }
}

/// What a range that leaves carries along.
pub(super) struct Load {
    /// A changed copy of its bytes, for injected faults.
    pub(super) altered: Vec<u8>,
    pub(super) owner: BlockOwner,
    pub(super) credit: OwnedSemaphorePermit,
}
