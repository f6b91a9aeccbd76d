//! The second layer over `ucx-sys`: every status becomes a `Result`, every pointer-or-status one of three cases. Knows
//! no ownership; read `owners.rs` next.
use std::ffi::c_void;
use std::ptr::NonNull;

use ucx_sys::{Api, UCS_ERR_LAST, UCS_OK, ucs_status_ptr_t, ucs_status_t};

use crate::error::{TransferError, TransferErrorKind};

/// A UCX call that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {text} (UCX status {status})")]
pub struct UcxError {
    /// The function.
    pub call: &'static str,
    /// What it returned.
    pub status: ucs_status_t,
    /// UCX's words for it.
    pub text: String,
}

impl UcxError {
    pub(super) fn new(api: &Api, call: &'static str, status: ucs_status_t) -> Self {
        Self { call, status, text: api.describe(status) }
    }
}

impl From<UcxError> for TransferError {
    fn from(error: UcxError) -> Self {
        Self::new(TransferErrorKind::Io, error.to_string())
    }
}

/// `Err` for everything but success.
pub(super) fn check(api: &Api, call: &'static str, status: ucs_status_t) -> Result<(), UcxError> {
    if status == UCS_OK { Ok(()) } else { Err(UcxError::new(api, call, status)) }
}

/// A request that UCX works on; it is freed by [`super::owners::Worker::free`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request(pub(super) NonNull<c_void>);

/// What a non-blocking call returned (`UCS_PTR_*` of the C headers).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Posted {
    /// Complete; the callback will not come.
    Done,
    /// The callback will come, unless UCX loses the request.
    Pending(Request),
}

/// Splits a pointer-or-status.
pub(super) fn posted(api: &Api, call: &'static str, pointer: ucs_status_ptr_t) -> Result<Posted, UcxError> {
    let value = pointer as isize;
    if (isize::from(UCS_ERR_LAST)..0).contains(&value) {
        return Err(UcxError::new(api, call, value as ucs_status_t));
    }
    Ok(NonNull::new(pointer).map_or(Posted::Done, |request| Posted::Pending(Request(request))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_cases_of_a_pointer() {
        let Ok(api) = Api::load(None) else { return };
        assert_eq!(posted(api, "f", std::ptr::null_mut()), Ok(Posted::Done));
        for status in [-1isize, -25, -100] {
            let error = posted(api, "f", status as *mut c_void).expect_err("a status");
            assert_eq!(isize::from(error.status), status);
        }
        let pointer = 0x1000 as *mut c_void;
        assert!(matches!(posted(api, "f", pointer), Ok(Posted::Pending(Request(p))) if p.as_ptr() == pointer));
    }
}
