//! The third layer: each UCX object with its owner, freed by `Drop` and in the right order, because a child holds its
//! parent. All of it lives on one thread (`Rc`, raw pointers: not `Send`).
use std::ffi::{CString, c_int, c_void};
use std::os::fd::RawFd;
use std::ptr::{NonNull, null, null_mut};
use std::rc::Rc;

use tandem_memory::Place;
use ucx_sys::*;

use super::address::CheckedAddress;
use super::ids::{EndpointId, OperationId};
use super::inbox;
use super::result::{Posted, Request, UcxError, check, posted};
use crate::arena::{Arena, Run};
use crate::error::{TransferError, TransferErrorKind};

/// The only active-message id in use: the frame's header says what it is.
const FRAME_ID: u32 = 1;

/// A UCX instance with its settings.
pub(super) struct Context {
    api: &'static Api,
    raw: ucp_context_h,
}

impl Context {
    /// Opens UCX with `settings` (names without `UCX_`) over those of the environment.
    pub(super) fn open(api: &'static Api, settings: &[(&str, String)]) -> Result<Rc<Self>, UcxError> {
        let config = Config::read(api)?;
        for (name, value) in settings {
            config.set(name, value)?;
        }
        // SAFETY: a C structure of integers and pointers, for which zero is "absent".
        let mut params: ucp_params = unsafe { std::mem::zeroed() };
        params.field_mask = UCP_PARAM_FIELD_FEATURES;
        params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
        let mut raw = null_mut();
        let (major, minor) = ucx_sys::load::API_VERSION;
        // SAFETY: params and config are valid during the call, raw is written on success.
        let status = unsafe { (api.ucp_init_version)(major, minor, &params, config.raw, &mut raw) };
        check(api, "ucp_init", status)?;
        Ok(Rc::new(Self { api, raw }))
    }

    /// What UCX says about itself: one line per transport that it opened.
    pub(super) fn describe(&self) -> String {
        // SAFETY: the context is alive and the stream is open during the call.
        print_to_string(|stream| unsafe { (self.api.ucp_context_print_info)(self.raw, stream) })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: every worker and region holds an `Rc` of this, so none is left.
        unsafe { (self.api.ucp_cleanup)(self.raw) };
    }
}

struct Config {
    api: &'static Api,
    raw: ucp_config_h,
}

impl Config {
    fn read(api: &'static Api) -> Result<Self, UcxError> {
        let mut raw = null_mut();
        // SAFETY: null prefix and file mean the defaults.
        let status = unsafe { (api.ucp_config_read)(null(), null(), &mut raw) };
        check(api, "ucp_config_read", status)?;
        Ok(Self { api, raw })
    }

    fn set(&self, name: &str, value: &str) -> Result<(), UcxError> {
        let bad = || UcxError { call: "ucp_config_modify", status: -5, text: format!("{name}={value:?}") };
        let (c_name, c_value) = (CString::new(name).map_err(|_| bad())?, CString::new(value).map_err(|_| bad())?);
        // SAFETY: two strings that outlive the call.
        let status = unsafe { (self.api.ucp_config_modify)(self.raw, c_name.as_ptr(), c_value.as_ptr()) };
        check(self.api, "ucp_config_modify", status).map_err(|error| UcxError { text: bad().text, ..error })
    }
}

impl Drop for Config {
    fn drop(&mut self) {
        // SAFETY: read by `ucp_config_read`, freed once.
        unsafe { (self.api.ucp_config_release)(self.raw) };
    }
}

/// The whole arena, registered once.
pub(super) struct Region {
    context: Rc<Context>,
    arena: std::sync::Arc<Arena>,
    /// Of the arena's first byte, which the processor can read only of its own memory.
    address: NonNull<c_void>,
    memory_type: c_int,
    raw: ucp_mem_h,
}

impl Region {
    /// # Errors
    /// UCX's; `Io` for memory at no address.
    pub(super) fn register(context: &Rc<Context>, arena: std::sync::Arc<Arena>) -> Result<Self, TransferError> {
        let (address, memory_type) = address_of(arena.memory().place())?;
        // SAFETY: as in `Context::open`.
        let mut params: ucp_mem_map_params = unsafe { std::mem::zeroed() };
        params.field_mask =
            UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
        params.address = address.as_ptr();
        params.length = arena.bytes();
        params.memory_type = memory_type;
        let mut raw = null_mut();
        // SAFETY: the memory is the arena's, which this region keeps alive until it is unmapped.
        let status = unsafe { (context.api.ucp_mem_map)(context.raw, &params, &mut raw) };
        check(context.api, "ucp_mem_map", status)?;
        Ok(Self { context: context.clone(), arena, address, memory_type, raw })
    }

    /// First byte of a run that lies inside the arena.
    fn pointer(&self, run: Run) -> *mut c_void {
        assert!(self.arena.contains(run), "runs come from checked grants and checked pushes");
        // A number, and no pointer of this process: a device's memory is none of its own. Others touch the processor's
        // only as atomic words; UCX writes only blocks that a grant claimed once, and nobody trusts their content
        // before it was verified.
        self.address.as_ptr().wrapping_byte_add(run.at)
    }

    /// Pointer and length of a run.
    pub(super) fn entry(&self, run: Run) -> ucp_dt_iov {
        ucp_dt_iov { buffer: self.pointer(run), length: run.bytes }
    }

    /// Pointers and lengths of several runs.
    pub(super) fn vector(&self, runs: &[Run]) -> Vec<ucp_dt_iov> {
        runs.iter().map(|run| self.entry(*run)).collect()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped once and unmapped once; the driver has destroyed its worker before.
        let status = unsafe { (self.context.api.ucp_mem_unmap)(self.context.raw, self.raw) };
        if let Err(error) = check(self.context.api, "ucp_mem_unmap", status) {
            tracing::warn!(%error, "KV arena stays registered");
        }
    }
}

/// Where UCX finds memory, and of which of its types it is.
fn address_of(place: Place<'_>) -> Result<(NonNull<c_void>, c_int), TransferError> {
    match place {
        Place::Host(words) => Ok((NonNull::from(words).cast(), UCS_MEMORY_TYPE_HOST)),
        Place::Cuda { address, .. } => match NonNull::new(address as usize as *mut c_void) {
            Some(address) => Ok((address, UCS_MEMORY_TYPE_CUDA)),
            None => Err(TransferError::new(TransferErrorKind::Io, "the KV memory of the GPU has no address")),
        },
    }
}

/// This thread's worker.
pub(super) struct Worker {
    context: Rc<Context>,
    raw: ucp_worker_h,
    event_fd: RawFd,
}

impl Worker {
    /// At most one per thread: its callbacks use the thread's inbox.
    pub(super) fn create(context: &Rc<Context>) -> Result<Rc<Self>, UcxError> {
        let api = context.api;
        // SAFETY: as in `Context::open`.
        let mut params: ucp_worker_params = unsafe { std::mem::zeroed() };
        params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_FLAGS;
        params.thread_mode = UCS_THREAD_MODE_SINGLE;
        params.flags = UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK;
        let mut raw = null_mut();
        // SAFETY: the context is alive, raw is written on success.
        let status = unsafe { (api.ucp_worker_create)(context.raw, &params, &mut raw) };
        check(api, "ucp_worker_create", status)?;
        let mut worker = Self { context: context.clone(), raw, event_fd: -1 };
        let mut event_fd: c_int = -1;
        // SAFETY: the descriptor belongs to the worker.
        let status = unsafe { (api.ucp_worker_get_efd)(raw, &mut event_fd) };
        check(api, "ucp_worker_get_efd", status)?;
        worker.event_fd = event_fd;
        // SAFETY: as in `Context::open`.
        let mut handler: ucp_am_handler_param = unsafe { std::mem::zeroed() };
        handler.field_mask = UCP_AM_HANDLER_PARAM_FIELDS;
        handler.id = FRAME_ID;
        handler.flags = UCP_AM_FLAG_WHOLE_MSG;
        handler.cb = Some(inbox::on_frame);
        // SAFETY: the callback uses no argument and is a static function.
        let status = unsafe { (api.ucp_worker_set_am_recv_handler)(raw, &handler) };
        check(api, "ucp_worker_set_am_recv_handler", status)?;
        Ok(Rc::new(worker))
    }

    pub(super) fn api(&self) -> &'static Api {
        self.context.api
    }

    /// Becomes readable after [`Worker::arm`] when there is something to do.
    pub(super) fn event_fd(&self) -> RawFd {
        self.event_fd
    }

    /// Whether anything happened.
    pub(super) fn progress(&self) -> bool {
        // SAFETY: the worker is alive and this is its thread.
        unsafe { (self.api().ucp_worker_progress)(self.raw) != 0 }
    }

    /// Asks for an event; false: there is work already, progress first.
    pub(super) fn arm(&self) -> Result<bool, UcxError> {
        // SAFETY: as in `progress`.
        match unsafe { (self.api().ucp_worker_arm)(self.raw) } {
            UCS_ERR_BUSY => Ok(false),
            status => check(self.api(), "ucp_worker_arm", status).map(|()| true),
        }
    }

    /// What peers connect to.
    ///
    /// # Errors
    /// UCX's, or `BadAddress` when no peer would take it.
    pub(super) fn address(&self) -> Result<CheckedAddress, TransferError> {
        let (mut address, mut length) = (null_mut(), 0);
        // SAFETY: both are written on success.
        let status = unsafe { (self.api().ucp_worker_get_address)(self.raw, &mut address, &mut length) };
        check(self.api(), "ucp_worker_get_address", status)?;
        // SAFETY: UCX gave `length` bytes at `address`, released right after the copy.
        let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>().cast_const(), length) };
        let checked = CheckedAddress::own(bytes);
        // SAFETY: from this worker, released once.
        unsafe { (self.api().ucp_worker_release_address)(self.raw, address) };
        Ok(checked?)
    }

    /// Lets the payload behind `descriptor` fly into `target`; `on_received` reports `operation`.
    ///
    /// # Safety
    /// `target` and the blocks it points to stay untouched by others until the operation is over.
    pub(super) unsafe fn receive(
        &self,
        descriptor: inbox::Descriptor,
        region: &Region,
        target: &[ucp_dt_iov],
        operation: OperationId,
    ) -> Result<Posted, UcxError> {
        let mut param = request_param(operation);
        param.cb.recv_am = Some(inbox::on_received);
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_DATATYPE;
        let (buffer, count) = place(target, Some(region), &mut param);
        let descriptor = descriptor.0.as_ptr();
        // SAFETY: the descriptor is unused so far (it is moved in); the buffer is the caller's promise.
        let pointer =
            unsafe { (self.api().ucp_am_recv_data_nbx)(self.raw, descriptor, buffer.cast_mut(), count, &param) };
        posted(self.api(), "ucp_am_recv_data_nbx", pointer)
    }

    /// Refuses a payload; the sender sees its send complete.
    pub(super) fn release(&self, descriptor: inbox::Descriptor) {
        // SAFETY: unused so far (it is moved in).
        unsafe { (self.api().ucp_am_data_release)(self.raw, descriptor.0.as_ptr()) };
    }

    /// Gives back a request whose callback has come, or that is no longer waited for.
    pub(super) fn free(&self, request: Request) {
        // SAFETY: posted by this worker; callers forget the request with this call.
        unsafe { (self.api().ucp_request_free)(request.0.as_ptr()) };
    }

    fn is_complete(&self, request: Request) -> bool {
        // SAFETY: not freed yet.
        unsafe { (self.api().ucp_request_check_status)(request.0.as_ptr()) != UCS_INPROGRESS }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // SAFETY: every endpoint holds an `Rc` of this, so none is left.
        unsafe { (self.api().ucp_worker_destroy)(self.raw) };
    }
}

/// A connection to a peer's worker, closed by force when dropped.
pub(super) struct Endpoint {
    worker: Rc<Worker>,
    raw: ucp_ep_h,
}

impl Endpoint {
    /// Starts to connect; failures come as events.
    pub(super) fn connect(worker: &Rc<Worker>, address: &CheckedAddress, id: EndpointId) -> Result<Self, UcxError> {
        // SAFETY: as in `Context::open`.
        let mut params: ucp_ep_params = unsafe { std::mem::zeroed() };
        params.field_mask =
            UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
        params.address = address.as_ptr().cast();
        params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
        params.err_handler = ucp_err_handler { cb: Some(inbox::on_endpoint_failed), arg: id.0 as usize as *mut c_void };
        let mut raw = null_mut();
        // SAFETY: the address is alive during the call, and whole: a UCX of this build made it, as its type says. UCX
        // reads it without knowing its length. The handler's argument is a number, never dereferenced.
        let status = unsafe { (worker.api().ucp_ep_create)(worker.raw, &params, &mut raw) };
        check(worker.api(), "ucp_ep_create", status)?;
        Ok(Self { worker: worker.clone(), raw })
    }

    /// Sends a small frame.
    ///
    /// # Safety
    /// `header` and `payload` stay where they are until the operation is over.
    pub(super) unsafe fn send_frame(
        &self,
        header: &[u8],
        payload: &[u8],
        operation: OperationId,
    ) -> Result<Posted, UcxError> {
        let mut param = request_param(operation);
        param.cb.send = Some(inbox::on_sent);
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
        param.flags = UCP_AM_SEND_FLAG_EAGER;
        // SAFETY: the caller's promise.
        unsafe { self.send(header, payload.as_ptr().cast(), payload.len(), &param) }
    }

    /// Offers a range, of `region` if it lies in one; the receiver says where it goes.
    ///
    /// # Safety
    /// `header`, `source` and the memory it names stay until the operation is over.
    pub(super) unsafe fn send_range(
        &self,
        header: &[u8],
        region: Option<&Region>,
        source: &[ucp_dt_iov],
        operation: OperationId,
    ) -> Result<Posted, UcxError> {
        let mut param = request_param(operation);
        param.cb.send = Some(inbox::on_sent);
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_DATATYPE;
        param.flags = UCP_AM_SEND_FLAG_RNDV;
        let (buffer, count) = place(source, region, &mut param);
        // SAFETY: the caller's promise.
        unsafe { self.send(header, buffer, count, &param) }
    }

    /// # Safety
    /// As the callers'.
    unsafe fn send(
        &self,
        header: &[u8],
        buffer: *const c_void,
        count: usize,
        param: &ucp_request_param,
    ) -> Result<Posted, UcxError> {
        let api = self.worker.api();
        let (raw, header, length) = (self.raw, header.as_ptr().cast(), header.len());
        // SAFETY: the endpoint is open and this is its thread; the memory is the caller's promise.
        let pointer = unsafe { (api.ucp_am_send_nbx)(raw, FRAME_ID, header, length, buffer, count, param) };
        posted(api, "ucp_am_send_nbx", pointer)
    }

    /// Closes without asking the peer; UCX ends the endpoint's operations, most of them.
    pub(super) fn close(self) -> Closing {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is never used or dropped again, so the `Rc` moves out once.
        let worker = unsafe { std::ptr::read(&this.worker) };
        let request = force_close(&worker, this.raw);
        Closing { worker, request }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if let Some(request) = force_close(&self.worker, self.raw) {
            self.worker.free(request);
        }
    }
}

fn force_close(worker: &Worker, raw: ucp_ep_h) -> Option<Request> {
    // SAFETY: as in `Context::open`.
    let mut param: ucp_request_param = unsafe { std::mem::zeroed() };
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    // SAFETY: the endpoint is open; callers forget it with this call.
    let pointer = unsafe { (worker.api().ucp_ep_close_nbx)(raw, &param) };
    match posted(worker.api(), "ucp_ep_close_nbx", pointer) {
        Ok(Posted::Pending(request)) => Some(request),
        Ok(Posted::Done) => None,
        Err(error) => {
            tracing::debug!(%error, "endpoint close");
            None
        }
    }
}

/// An endpoint on its way out.
pub(super) struct Closing {
    worker: Rc<Worker>,
    request: Option<Request>,
}

impl Closing {
    /// UCX has forgotten the endpoint: nothing of it touches memory any more.
    pub(super) fn is_closed(&self) -> bool {
        self.request.is_none_or(|request| self.worker.is_complete(request))
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        if let Some(request) = self.request {
            self.worker.free(request);
        }
    }
}

fn request_param(operation: OperationId) -> ucp_request_param {
    // SAFETY: as in `Context::open`.
    let mut param: ucp_request_param = unsafe { std::mem::zeroed() };
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
    param.memory_type = UCS_MEMORY_TYPE_HOST;
    param.user_data = operation.to_user_data();
    param
}

/// Buffer and count for one run (bytes of the registered region) or for several (a vector, which takes no region).
fn place(vector: &[ucp_dt_iov], region: Option<&Region>, param: &mut ucp_request_param) -> (*const c_void, usize) {
    if let Some(region) = region {
        param.memory_type = region.memory_type;
    }
    if let [one] = vector {
        if let Some(region) = region {
            param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
            param.memh = region.raw;
        }
        param.datatype = UCP_DATATYPE_BYTES;
        (one.buffer, one.length)
    } else {
        param.datatype = UCP_DATATYPE_IOV;
        (vector.as_ptr().cast(), vector.len())
    }
}

fn print_to_string(print: impl FnOnce(*mut libc::FILE)) -> String {
    let (mut buffer, mut length) = (null_mut(), 0);
    // SAFETY: both live until the stream is closed.
    let stream = unsafe { libc::open_memstream(&mut buffer, &mut length) };
    if stream.is_null() {
        return String::new();
    }
    print(stream);
    // SAFETY: open; closing it makes buffer and length final.
    let closed = unsafe { libc::fclose(stream) };
    let text = if closed == 0 && !buffer.is_null() {
        // SAFETY: `length` bytes that the stream allocated and wrote.
        let text = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>().cast_const(), length) };
        String::from_utf8_lossy(text).into_owned()
    } else {
        String::new()
    };
    // SAFETY: null, or allocated by the stream with malloc; freed once.
    unsafe { libc::free(buffer.cast()) };
    text
}
