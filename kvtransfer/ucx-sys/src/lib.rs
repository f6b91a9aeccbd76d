//! Raw bindings of UCP, the communication layer of UCX (<https://openucx.readthedocs.io>), loaded at run time: a binary
//! built without UCX starts on a machine without UCX, and one binary serves every installed 1.x from 1.13 on.
//!
//! - [`types`]: C structures, constants and callback types, written by hand from `ucp.h`.
//! - [`load`]: finds the libraries, checks their version and resolves the functions into an [`Api`].
//! - [`prepare_environment`]: the one process-wide setting, to be made before any thread exists.
//!
//! This crate knows no ownership and no error beyond a failed load: both are the caller's layers.
pub mod load;
#[allow(non_camel_case_types)]
pub mod types;

pub use load::{Api, LoadError, Version};
pub use types::*;

/// UCX reads this in a constructor, when the library is opened; a context's configuration is too late for it.
const HANDLE_ERRORS: &str = "UCX_HANDLE_ERRORS";

/// The process already has several threads, so the environment may no longer be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "UCX_HANDLE_ERRORS not set: the process already runs {threads} threads; call prepare_environment() first in main"
)]
pub struct TooLate {
    /// Threads counted.
    pub threads: usize,
}

/// Keeps UCX from replacing the process's signal handlers when it is loaded: sets `UCX_HANDLE_ERRORS=none` unless the
/// operator has set the variable. Call it as the first statement of `main`, before any runtime or thread starts.
///
/// # Errors
/// [`TooLate`], with nothing changed, when other threads exist (which might read the environment meanwhile). UCX works
/// all the same then; only its crash handlers stay.
pub fn prepare_environment() -> Result<(), TooLate> {
    if std::env::var_os(HANDLE_ERRORS).is_some() {
        return Ok(());
    }
    let threads = std::fs::read_dir("/proc/self/task").map_or(usize::MAX, Iterator::count);
    if threads != 1 {
        return Err(TooLate { threads });
    }
    // SAFETY: this is the process's only thread (counted above, and only this thread could start another), so nothing
    // reads the environment while it changes.
    unsafe { std::env::set_var(HANDLE_ERRORS, "none") };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threaded_process_is_refused_or_already_prepared() {
        // The test harness runs this beside its main thread.
        let prepared = std::env::var_os(HANDLE_ERRORS).is_some();
        assert_eq!(prepare_environment().is_ok(), prepared);
    }
}
