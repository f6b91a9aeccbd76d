//! KV on a CUDA device. UCX moves it as it moves the processor's, if it was built with CUDA; what differs stands here.
//!
//! - The device's context is bound on the driver's thread before UCX is opened: UCX takes the current one.
//! - Memory and requests name their type (`owners.rs`), and frames are contiguous at both ends: of a vector UCX would
//!   copy each piece by itself.
//! - **On one host the receiver reads** (`cuda_ipc`, rendezvous by get): it maps the sender's memory and copies on a
//!   stream of its own. So nobody else writes into its memory, as with `one_copy`: a dead sender cannot write late. UCX
//!   would also let the sender write (put), whose copies nothing on this side could end: so `UCX_RNDV_SCHEME` asks for
//!   get, and `UCX_CUDA_IPC_ENABLE_GET_ZCOPY` permits it, without which UCX takes put where there is no NVLink,
//!   whatever the scheme. An operator who sets either is refused. Where a receiver cannot map a sender, UCX offers it
//!   no memory of ours but buffers of its own (read in its 1.22: `ucp_proto_rndv_ctrl_probe`, `unreachable_md_map`).
//! - So the end of a peer's process proves nothing: this one writes. Blocks of a lost peer go back when their receives
//!   have ended (or the worker has), and then only when all that this process has asked the device to do is done
//!   ([`KvMemory::settle`]): a copy on a stream outlives the request that UCX has given up, and even its worker.
//!
//! What a network card has written is put in its place before it is hashed: a matter of the memory's own.
//!
//! [`KvMemory::settle`]: tandem_memory::KvMemory::settle
use tandem_memory::Place;

use super::profile::{READS, UcxConfig, UcxProfile, opened_transports};
use crate::arena::Arena;
use crate::error::{TransferError, TransferErrorKind};

/// Longest range of one frame: a copy of 1 MiB takes a device less time than a message does.
const RANGE_BYTES: usize = 8 << 20;

/// Longest range of one frame.
pub(super) fn range_bytes(arena: &Arena, config: &UcxConfig) -> usize {
    if holds(arena) { RANGE_BYTES } else { config.max_range_bytes }
}

/// The KV lies on a device.
pub(super) fn holds(arena: &Arena) -> bool {
    matches!(arena.memory().place(), Place::Cuda { .. })
}

/// Whether nobody but this process writes into the arena by what the operator has set.
pub(super) fn check_operators(arena: &Arena, config: &UcxConfig) -> Result<(), TransferError> {
    let is_ours = |name: &&String| READS.iter().any(|(ours, _)| *ours == name.as_str());
    match config.operators.iter().find(is_ours) {
        Some(name) if holds(arena) && config.profile == UcxProfile::Shm => {
            let message =
                format!("UCX_{name} is in the environment, and KV of a GPU is moved by one scheme: leave it out");
            Err(TransferError::new(TransferErrorKind::Incompatible, message))
        }
        _ => Ok(()),
    }
}

/// Makes the arena's device the one that UCX finds on this thread.
pub(super) fn bind(arena: &Arena) -> Result<(), TransferError> {
    arena.memory().bind().map_err(|error| TransferError::new(TransferErrorKind::Io, error))
}

/// What a UCX of `version` that describes itself like this lacks to move the arena; `None`: nothing.
pub(super) fn lacking(arena: &Arena, profile: UcxProfile, description: &str, version: &str) -> Option<TransferError> {
    let Place::Cuda { device, .. } = arena.memory().place() else { return None };
    let opened = opened_transports(description);
    let needed = if profile == UcxProfile::Shm { "cuda_ipc" } else { "cuda_copy" };
    let message = format!(
        "the KV memory lies on CUDA device {device}, and UCX {version} opens no {needed} here: it needs a UCX with CUDA, \
         such as PyPI's libucx-cu13, named by --ucx-lib-dir"
    );
    let missing = ["cuda_copy", needed].iter().any(|transport| !opened.contains(transport));
    missing.then(|| TransferError::new(TransferErrorKind::Incompatible, message))
}
