//! Names of what lives in UCX and outlives a call: they travel through it as numbers, and a number that is in no table
//! any more harms nobody.
use std::ffi::c_void;

use crate::terms::PeerId;

/// Names an endpoint for the life of the transport; also the peer's name in the registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct EndpointId(pub(super) u64);

impl EndpointId {
    /// Not in any table: its events are ignored.
    pub(super) const NONE: Self = Self(0);
}

impl From<EndpointId> for PeerId {
    fn from(id: EndpointId) -> Self {
        Self(id.0)
    }
}

/// Names an operation for the life of the transport; travels through UCX as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct OperationId(pub(super) u64);

impl OperationId {
    /// Not in any table: its completion is ignored.
    pub(super) const NONE: Self = Self(0);

    pub(super) fn to_user_data(self) -> *mut c_void {
        self.0 as usize as *mut c_void
    }

    pub(super) fn from_user_data(user_data: *mut c_void) -> Self {
        Self(user_data as usize as u64)
    }
}
