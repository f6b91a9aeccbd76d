//! What UCX's callbacks leave behind. A callback runs inside a `ucp_*` call, where our state may be half changed, so it
//! does nothing but note an [`Event`] in this thread's inbox; the driver reads them between two calls.
//!
//! The inbox is thread-local: a thread has at most one worker, UCX calls back on that thread only
//! (`UCS_THREAD_MODE_SINGLE`), and so a callback needs no pointer into our memory, which a request that UCX lost would
//! outlive. Callbacks do not unwind: they copy, push and return.
use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::ptr::NonNull;

use ucx_sys::{UCP_AM_RECV_ATTR_FLAG_RNDV, UCS_INPROGRESS, UCS_OK, ucp_am_recv_param, ucp_ep_h, ucs_status_t};

use super::ids::{EndpointId, OperationId};
use crate::wire::{HEADER_BYTES, MAX_SEAL_BYTES};

/// Events between two looks. What arrives beyond is dropped and counted: a range is refused, and a hand-off whose frame
/// was lost ends by its lease.
const MAX_EVENTS: usize = 16 * 1024;

/// A rendezvous payload that waits for its place. UCX keeps it until it is received or released.
#[derive(Debug)]
pub(super) struct Descriptor(pub(super) NonNull<c_void>);

/// Something happened in UCX.
#[derive(Debug)]
pub(super) enum Event {
    /// An operation is over.
    Completed {
        /// Which.
        operation: OperationId,
        /// How.
        status: ucs_status_t,
    },
    /// An endpoint failed.
    EndpointFailed {
        /// Which.
        endpoint: EndpointId,
        /// Why.
        status: ucs_status_t,
    },
    /// A frame whose payload came with it.
    Frame {
        /// Unparsed.
        header: [u8; HEADER_BYTES],
        /// Copied.
        payload: Vec<u8>,
    },
    /// A frame whose payload waits at the sender.
    Range {
        /// Unparsed.
        header: [u8; HEADER_BYTES],
        /// Bytes of the payload.
        length: usize,
        /// The payload.
        descriptor: Descriptor,
    },
    /// Something that cannot be one of our frames.
    Garbage,
}

thread_local! {
    static INBOX: RefCell<Vec<Event>> = const { RefCell::new(Vec::new()) };
    static DROPPED: Cell<u64> = const { Cell::new(0) };
}

/// Takes what the callbacks of this thread noted. `spare` is an emptied vector of an earlier call, for its memory.
pub(super) fn take(spare: Vec<Event>) -> Vec<Event> {
    INBOX.with_borrow_mut(|events| std::mem::replace(events, spare))
}

/// Nothing was noted since the last [`take`].
pub(super) fn is_empty() -> bool {
    INBOX.with_borrow(Vec::is_empty)
}

/// How many events found no room since the last call.
pub(super) fn take_dropped() -> u64 {
    DROPPED.take()
}

/// False: there is no room, or the thread is ending.
fn push(event: Event) -> bool {
    let pushed = INBOX
        .try_with(|inbox| match inbox.try_borrow_mut() {
            Ok(mut events) if events.len() < MAX_EVENTS || is_ours(&event) => {
                events.push(event);
                true
            }
            _ => false,
        })
        .unwrap_or(false);
    if !pushed {
        // A thread that is ending tells nobody.
        let _ = DROPPED.try_with(|dropped| dropped.set(dropped.get() + 1));
    }
    pushed
}

/// Bounded by what we posted, and lost for ever if not noted.
fn is_ours(event: &Event) -> bool {
    matches!(event, Event::Completed { .. } | Event::EndpointFailed { .. })
}

/// A send has completed.
pub(super) unsafe extern "C" fn on_sent(_request: *mut c_void, status: ucs_status_t, user_data: *mut c_void) {
    push(Event::Completed { operation: OperationId::from_user_data(user_data), status });
}

/// A payload has arrived.
pub(super) unsafe extern "C" fn on_received(
    _request: *mut c_void,
    status: ucs_status_t,
    _length: usize,
    user_data: *mut c_void,
) {
    push(Event::Completed { operation: OperationId::from_user_data(user_data), status });
}

/// An endpoint has failed.
pub(super) unsafe extern "C" fn on_endpoint_failed(arg: *mut c_void, _endpoint: ucp_ep_h, status: ucs_status_t) {
    push(Event::EndpointFailed { endpoint: EndpointId(arg as usize as u64), status });
}

/// A frame has arrived. `UCS_OK` ends UCX's interest in it; for a rendezvous payload that means "refused".
pub(super) unsafe extern "C" fn on_frame(
    _arg: *mut c_void,
    header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const ucp_am_recv_param,
) -> ucs_status_t {
    let mut copy = [0; HEADER_BYTES];
    if header_length != HEADER_BYTES || header.is_null() || param.is_null() {
        push(Event::Garbage);
        return UCS_OK;
    }
    // SAFETY: UCX gives a header of `header_length` bytes, which is the length of `copy`.
    unsafe { std::ptr::copy_nonoverlapping(header.cast::<u8>(), copy.as_mut_ptr(), HEADER_BYTES) };
    // SAFETY: not null, and valid during the callback.
    let is_rendezvous = unsafe { (*param).recv_attr } & UCP_AM_RECV_ATTR_FLAG_RNDV != 0;
    let pointer = NonNull::new(data);
    if is_rendezvous {
        let Some(descriptor) = pointer.map(Descriptor) else { return UCS_OK };
        let kept = push(Event::Range { header: copy, length, descriptor });
        return if kept { UCS_INPROGRESS } else { UCS_OK };
    }
    if length > MAX_SEAL_BYTES {
        push(Event::Garbage);
        return UCS_OK;
    }
    let payload = match pointer {
        Some(bytes) if length > 0 => {
            // SAFETY: an eager payload of `length` bytes, valid during the callback.
            unsafe { std::slice::from_raw_parts(bytes.cast::<u8>().as_ptr(), length) }.to_vec()
        }
        _ => Vec::new(),
    };
    push(Event::Frame { header: copy, payload });
    UCS_OK
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deliver(header: &[u8], data: &mut [u8], recv_attr: u64) -> ucs_status_t {
        let param = ucp_am_recv_param { recv_attr, reply_ep: std::ptr::null_mut() };
        let (header, length) = (header.as_ptr().cast(), header.len());
        // SAFETY: slices of the stated lengths.
        unsafe { on_frame(std::ptr::null_mut(), header, length, data.as_mut_ptr().cast(), data.len(), &param) }
    }

    #[test]
    fn frames_of_a_wrong_shape_are_garbage() {
        for length in [0, 1, 31, 33, 4096] {
            assert_eq!(deliver(&vec![7; length], &mut [], 0), UCS_OK);
        }
        assert_eq!(deliver(&[7; 32], &mut vec![0; MAX_SEAL_BYTES + 1], 0), UCS_OK);
        let events = take(Vec::new());
        assert_eq!(events.len(), 6);
        assert!(events.iter().all(|event| matches!(event, Event::Garbage)));
    }

    #[test]
    fn payloads_are_copied_and_ranges_kept_while_there_is_room() {
        assert_eq!(deliver(&[1; 32], &mut [5, 6], 0), UCS_OK);
        assert_eq!(deliver(&[2; 32], &mut [0], UCP_AM_RECV_ATTR_FLAG_RNDV), UCS_INPROGRESS);
        let events = take(Vec::new());
        assert!(matches!(&events[0], Event::Frame { payload, .. } if payload == &[5, 6]));
        assert!(matches!(&events[1], Event::Range { length: 1, .. }));
        for _ in 0..MAX_EVENTS {
            deliver(&[1; 32], &mut [], 0);
        }
        assert_eq!(take_dropped(), 0);
        assert_eq!(deliver(&[2; 32], &mut [0], UCP_AM_RECV_ATTR_FLAG_RNDV), UCS_OK, "full");
        assert_eq!(deliver(&[1; 32], &mut [], 0), UCS_OK, "full");
        assert_eq!((take_dropped(), take_dropped()), (2, 0));
        assert_eq!(take(Vec::new()).len(), MAX_EVENTS);
    }
}
