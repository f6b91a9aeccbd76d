//! C types of `ucp/api/ucp.h`, 1.13 to 1.22. Between these no field moved and no function changed; five structures grew
//! at their end. The sizes here are those of 1.22: zeroed and with the field masks of 1.13 they serve both.
//!
//! C enums are integers with constants, never Rust enums: a library may return a value that this file does not know.
use std::ffi::{c_char, c_int, c_uint, c_void};

/// `ucs_status_t`: a packed enum, hence one signed byte. 0 is success, 1 in progress, negative an error.
pub type ucs_status_t = i8;
/// `ucs_status_ptr_t`: null, a request, or a status cast to a pointer.
pub type ucs_status_ptr_t = *mut c_void;

/// Success.
pub const UCS_OK: ucs_status_t = 0;
/// Goes on; from an AM callback: the data descriptor is kept.
pub const UCS_INPROGRESS: ucs_status_t = 1;
/// `ucp_worker_arm`: events are pending, progress again.
pub const UCS_ERR_BUSY: ucs_status_t = -15;
/// The endpoint has no connection.
pub const UCS_ERR_NOT_CONNECTED: ucs_status_t = -24;
/// The peer hung up or died.
pub const UCS_ERR_CONNECTION_RESET: ucs_status_t = -25;
/// Failures of links (-40 to -59) and of endpoints (-60 to -89).
pub const UCS_ERR_FAILURES: std::ops::RangeInclusive<ucs_status_t> = -89..=-40;
/// The lowest status that a pointer may carry.
pub const UCS_ERR_LAST: ucs_status_t = -100;

macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident => $handle:ident;)*) => {$(
        $(#[$doc])*
        #[repr(C)]
        pub struct $name {
            _opaque: [u8; 0],
            _not_send: std::marker::PhantomData<*mut u8>,
        }
        #[doc = concat!("Pointer to [`", stringify!($name), "`].")]
        pub type $handle = *mut $name;
    )*};
}
opaque! {
    /// A library instance.
    ucp_context => ucp_context_h;
    /// A progress engine: one thread's queue pairs, FIFOs, sockets.
    ucp_worker => ucp_worker_h;
    /// A connection to a remote worker.
    ucp_ep => ucp_ep_h;
    /// A registered memory region.
    ucp_mem => ucp_mem_h;
    /// Settings of a context to be.
    ucp_config => ucp_config_h;
    /// A worker's address, opaque bytes.
    ucp_address => ucp_address_h;
}

/// `UCP_FEATURE_WAKEUP`: the worker has an event descriptor.
pub const UCP_FEATURE_WAKEUP: u64 = 1 << 4;
/// `UCP_FEATURE_AM`: active messages.
pub const UCP_FEATURE_AM: u64 = 1 << 6;
/// `UCP_PARAM_FIELD_FEATURES`.
pub const UCP_PARAM_FIELD_FEATURES: u64 = 1;

/// `ucp_params_t`
#[repr(C)]
pub struct ucp_params {
    /// `UCP_PARAM_FIELD_*`
    pub field_mask: u64,
    /// `UCP_FEATURE_*`
    pub features: u64,
    /// Bytes of the user in a request.
    pub request_size: usize,
    /// Unused here.
    pub request_init: *const c_void,
    /// Unused here.
    pub request_cleanup: *const c_void,
    /// Unused here.
    pub tag_sender_mask: u64,
    /// Unused here.
    pub mt_workers_shared: c_int,
    /// Unused here.
    pub estimated_num_eps: usize,
    /// Unused here.
    pub estimated_num_ppn: usize,
    /// Name in traces.
    pub name: *const c_char,
    /// Grown after 1.13.
    pub since_1_13: [u64; 1],
}

/// `UCP_WORKER_PARAM_FIELD_THREAD_MODE`
pub const UCP_WORKER_PARAM_FIELD_THREAD_MODE: u64 = 1;
/// `UCP_WORKER_PARAM_FIELD_FLAGS`
pub const UCP_WORKER_PARAM_FIELD_FLAGS: u64 = 1 << 5;
/// Only the thread that created the worker uses it.
pub const UCS_THREAD_MODE_SINGLE: c_int = 0;
/// Do not print a warning per request that is lost when the worker is destroyed.
pub const UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK: u64 = 1;

/// `ucp_worker_params_t`
#[repr(C)]
pub struct ucp_worker_params {
    /// `UCP_WORKER_PARAM_FIELD_*`
    pub field_mask: u64,
    /// `UCS_THREAD_MODE_*`
    pub thread_mode: c_int,
    /// Unused here.
    pub cpu_mask: [u64; 16],
    /// Unused here.
    pub events: c_uint,
    /// Unused here.
    pub user_data: *mut c_void,
    /// Unused here.
    pub event_fd: c_int,
    /// `UCP_WORKER_FLAG_*`
    pub flags: u64,
    /// Name in traces.
    pub name: *const c_char,
    /// Unused here.
    pub am_alignment: usize,
    /// Unused here.
    pub client_id: u64,
}

/// `ucs_sock_addr_t`
#[repr(C)]
pub struct ucs_sock_addr {
    /// The address.
    pub addr: *const c_void,
    /// Its length.
    pub addrlen: u32,
}

/// `UCP_EP_PARAM_FIELD_REMOTE_ADDRESS`
pub const UCP_EP_PARAM_FIELD_REMOTE_ADDRESS: u64 = 1;
/// `UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE`
pub const UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE: u64 = 1 << 1;
/// `UCP_EP_PARAM_FIELD_ERR_HANDLER`
pub const UCP_EP_PARAM_FIELD_ERR_HANDLER: u64 = 1 << 2;
/// `UCP_ERR_HANDLING_MODE_PEER`: a peer's death fails the operations instead of hanging them.
pub const UCP_ERR_HANDLING_MODE_PEER: c_int = 1;

/// Called once when the endpoint has failed.
pub type ucp_err_handler_cb_t = unsafe extern "C" fn(arg: *mut c_void, ep: ucp_ep_h, status: ucs_status_t);

/// `ucp_err_handler_t`
#[repr(C)]
pub struct ucp_err_handler {
    /// The callback.
    pub cb: Option<ucp_err_handler_cb_t>,
    /// Its first argument.
    pub arg: *mut c_void,
}

/// `ucp_ep_params_t`
#[repr(C)]
pub struct ucp_ep_params {
    /// `UCP_EP_PARAM_FIELD_*`
    pub field_mask: u64,
    /// Remote worker.
    pub address: *const ucp_address,
    /// `UCP_ERR_HANDLING_MODE_*`
    pub err_mode: c_int,
    /// Called on failure.
    pub err_handler: ucp_err_handler,
    /// Unused here.
    pub user_data: *mut c_void,
    /// Unused here.
    pub flags: c_uint,
    /// Unused here.
    pub sockaddr: ucs_sock_addr,
    /// Unused here.
    pub conn_request: *mut c_void,
    /// Name in traces.
    pub name: *const c_char,
    /// Unused here.
    pub local_sockaddr: ucs_sock_addr,
}

/// `UCP_MEM_MAP_PARAM_FIELD_ADDRESS`
pub const UCP_MEM_MAP_PARAM_FIELD_ADDRESS: u64 = 1;
/// `UCP_MEM_MAP_PARAM_FIELD_LENGTH`
pub const UCP_MEM_MAP_PARAM_FIELD_LENGTH: u64 = 1 << 1;
/// `UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE`
pub const UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE: u64 = 1 << 4;

/// `ucs_memory_type_t`: the processor's.
pub const UCS_MEMORY_TYPE_HOST: c_int = 0;
/// `ucs_memory_type_t`: a CUDA device's. 1.13 and 1.22 disagree on the number for "unknown", so that is never said.
pub const UCS_MEMORY_TYPE_CUDA: c_int = 1;

/// `ucp_mem_map_params_t`
#[repr(C)]
pub struct ucp_mem_map_params {
    /// `UCP_MEM_MAP_PARAM_FIELD_*`
    pub field_mask: u64,
    /// First byte.
    pub address: *mut c_void,
    /// Bytes.
    pub length: usize,
    /// Unused here.
    pub flags: c_uint,
    /// Unused here.
    pub prot: c_uint,
    /// `UCS_MEMORY_TYPE_*`; without it UCX finds out.
    pub memory_type: c_int,
    /// Grown after 1.13.
    pub since_1_13: [u64; 1],
}

/// `UCP_OP_ATTR_FIELD_CALLBACK`
pub const UCP_OP_ATTR_FIELD_CALLBACK: u32 = 1 << 1;
/// `UCP_OP_ATTR_FIELD_USER_DATA`
pub const UCP_OP_ATTR_FIELD_USER_DATA: u32 = 1 << 2;
/// `UCP_OP_ATTR_FIELD_DATATYPE`
pub const UCP_OP_ATTR_FIELD_DATATYPE: u32 = 1 << 3;
/// `UCP_OP_ATTR_FIELD_FLAGS`
pub const UCP_OP_ATTR_FIELD_FLAGS: u32 = 1 << 4;
/// `UCP_OP_ATTR_FIELD_MEMORY_TYPE`
pub const UCP_OP_ATTR_FIELD_MEMORY_TYPE: u32 = 1 << 6;
/// `UCP_OP_ATTR_FIELD_MEMH`
pub const UCP_OP_ATTR_FIELD_MEMH: u32 = 1 << 8;
/// `UCP_EP_CLOSE_FLAG_FORCE`: without the peer's consent.
pub const UCP_EP_CLOSE_FLAG_FORCE: u32 = 1;
/// `UCP_AM_SEND_FLAG_EAGER`: the payload travels with the message.
pub const UCP_AM_SEND_FLAG_EAGER: u32 = 1 << 1;
/// `UCP_AM_SEND_FLAG_RNDV`: the receiver says where the payload goes before it travels.
pub const UCP_AM_SEND_FLAG_RNDV: u32 = 1 << 2;
/// `ucp_dt_make_contig(1)`: a run of bytes.
pub const UCP_DATATYPE_BYTES: u64 = 1 << 3;
/// `ucp_dt_make_iov()`: an array of [`ucp_dt_iov`].
pub const UCP_DATATYPE_IOV: u64 = 2;

/// A send or an endpoint close has completed.
pub type ucp_send_nbx_callback_t =
    unsafe extern "C" fn(request: *mut c_void, status: ucs_status_t, user_data: *mut c_void);
/// The payload of an active message has arrived.
pub type ucp_am_recv_data_nbx_callback_t =
    unsafe extern "C" fn(request: *mut c_void, status: ucs_status_t, length: usize, user_data: *mut c_void);

/// The callback of a [`ucp_request_param`], by operation.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ucp_request_callback {
    /// Of a send.
    pub send: Option<ucp_send_nbx_callback_t>,
    /// Of the receipt of an active message's payload.
    pub recv_am: Option<ucp_am_recv_data_nbx_callback_t>,
}

/// `ucp_request_param_t`
#[repr(C)]
pub struct ucp_request_param {
    /// `UCP_OP_ATTR_*`
    pub op_attr_mask: u32,
    /// `UCP_AM_SEND_FLAG_*` or `UCP_EP_CLOSE_FLAG_*`
    pub flags: u32,
    /// Unused here.
    pub request: *mut c_void,
    /// Called on completion, unless the call itself completed.
    pub cb: ucp_request_callback,
    /// `UCP_DATATYPE_*`
    pub datatype: u64,
    /// Last argument of the callback.
    pub user_data: *mut c_void,
    /// Unused here.
    pub reply_buffer: *mut c_void,
    /// `UCS_MEMORY_TYPE_*` of the buffer; without it UCX finds out, with each request.
    pub memory_type: c_int,
    /// Unused here.
    pub recv_info: *mut c_void,
    /// The registered region that contains the buffer.
    pub memh: ucp_mem_h,
    /// Grown after 1.13.
    pub since_1_13: [u64; 3],
}

/// `UCP_AM_HANDLER_PARAM_FIELD_ID | FLAGS | CB | ARG`
pub const UCP_AM_HANDLER_PARAM_FIELDS: u64 = 0b1111;
/// `UCP_AM_FLAG_WHOLE_MSG`: one callback per message.
pub const UCP_AM_FLAG_WHOLE_MSG: u32 = 1;
/// `UCP_AM_RECV_ATTR_FLAG_RNDV`: `data` is a descriptor for `ucp_am_recv_data_nbx`.
pub const UCP_AM_RECV_ATTR_FLAG_RNDV: u64 = 1 << 17;

/// `ucp_am_recv_param_t`
#[repr(C)]
pub struct ucp_am_recv_param {
    /// `UCP_AM_RECV_ATTR_*`
    pub recv_attr: u64,
    /// Unused here.
    pub reply_ep: ucp_ep_h,
}

/// An active message has arrived.
pub type ucp_am_recv_callback_t = unsafe extern "C" fn(
    arg: *mut c_void,
    header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const ucp_am_recv_param,
) -> ucs_status_t;

/// `ucp_am_handler_param_t`
#[repr(C)]
pub struct ucp_am_handler_param {
    /// `UCP_AM_HANDLER_PARAM_FIELD_*`
    pub field_mask: u64,
    /// Message id.
    pub id: c_uint,
    /// `UCP_AM_FLAG_*`
    pub flags: u32,
    /// The callback.
    pub cb: Option<ucp_am_recv_callback_t>,
    /// Its first argument.
    pub arg: *mut c_void,
}

/// `ucp_dt_iov_t`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ucp_dt_iov {
    /// First byte.
    pub buffer: *mut c_void,
    /// Bytes.
    pub length: usize,
}

/// Offsets and sizes as `gcc` gives them for the headers of 1.13.1 on a 64-bit machine; what grew later is not counted.
#[cfg(target_pointer_width = "64")]
const _: () = {
    use std::mem::{offset_of, size_of};
    macro_rules! layout {
        ($type:ident: $size:expr, $grown:expr; $($field:ident $offset:expr),*) => {
            assert!(size_of::<$type>() == $size + $grown);
            $(assert!(offset_of!($type, $field) == $offset);)*
        };
    }
    layout!(ucp_params: 80, 8; features 8, request_size 16, mt_workers_shared 48, name 72, since_1_13 80);
    layout!(ucp_worker_params: 200, 0; thread_mode 8, cpu_mask 16, events 144, user_data 152, event_fd 160, flags 168,
        name 176, client_id 192);
    layout!(ucp_ep_params: 104, 0; address 8, err_mode 16, err_handler 24, user_data 40, flags 48, sockaddr 56,
        conn_request 72, name 80, local_sockaddr 88);
    layout!(ucp_mem_map_params: 40, 8; address 8, length 16, flags 24, prot 28, memory_type 32, since_1_13 40);
    layout!(ucp_request_param: 72, 24; op_attr_mask 0, flags 4, request 8, cb 16, datatype 24, user_data 32,
        reply_buffer 40, memory_type 48, recv_info 56, memh 64, since_1_13 72);
    layout!(ucp_am_handler_param: 32, 0; id 8, flags 12, cb 16, arg 24);
    layout!(ucp_am_recv_param: 16, 0; reply_ep 8);
    layout!(ucp_dt_iov: 16, 0; buffer 0, length 8);
    layout!(ucp_err_handler: 16, 0; cb 0, arg 8);
    layout!(ucs_sock_addr: 16, 0; addr 0, addrlen 8);
    assert!(size_of::<ucs_status_t>() == 1);
};
