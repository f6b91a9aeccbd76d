//! Raw bindings of UCP, the communication layer of UCX (<https://openucx.readthedocs.io>), loaded at run time: a binary
//! built without UCX starts on a machine without UCX, and one binary serves every installed 1.x from 1.13 on.
//!
//! - [`types`]: C structures, constants and callback types, written by hand from `ucp.h`.
//! - [`load`]: finds the libraries, checks their version and resolves the functions into an [`Api`].
//! - [`prepare_environment`]: the process-wide settings, to be made before any thread exists.
//!
//! This crate knows no ownership and no error beyond a failed load: both are the caller's layers.
pub mod load;
#[allow(non_camel_case_types)]
pub mod types;

pub use load::{Api, LoadError, Version};
pub use types::*;

/// What UCX reads in constructors, when the library is opened; a context's configuration is too late for these.
///
/// - It would replace the process's handlers of fatal signals, and that of SIGHUP: a hangup would turn on its debug
///   log, thousands of lines for each hand-off.
/// - It would watch memory that comes and goes (`mmap`, `munmap`, `sbrk`, `malloc`), to forget registrations of memory
///   that is gone. Both of its ways are unsafe in a process that has threads. `bistro` writes jumps into the code of
///   libc, and a thread that runs there meanwhile crashes (its pull requests 5855 and 9148 narrow that, its own CI
///   still meets it). `reloc` puts UCX's own allocator behind `malloc` and `free`, never frees what came from glibc's,
///   and hands its own blocks to code of libc that frees them by glibc's (its issue 5644): one in nine runs of the
///   conformance tests ended with a corrupt heap. An arena is registered once and outlives its registration, and small
///   frames go through UCX's own buffers, so there is nothing to watch. What it costs: a range that lands in several
///   places on a fabric (`owners.rs::place`) has no registration of its own, and UCX does not remember the one it
///   makes. Not measured: no fabric here.
/// - It would log to standard output, in the middle of the line by which a node says that it is ready.
pub const SETTINGS: [(&str, &str); 4] =
    [("UCX_HANDLE_ERRORS", "none"), ("UCX_DEBUG_SIGNO", "0"), ("UCX_MEM_EVENTS", "n"), ("UCX_LOG_FILE", "stderr")];

/// The process already has several threads, so the environment may no longer be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "UCX's process-wide settings not made: {threads} threads run already; call prepare_environment() first in main"
)]
pub struct TooLate {
    /// Threads counted.
    pub threads: usize,
}

/// Makes the settings that UCX reads when it is loaded, but for those that the operator has made: it leaves the
/// process's signal handlers, its memory functions and its standard output alone. Call it as the first statement of
/// `main`, before any runtime or thread starts.
///
/// # Errors
/// [`TooLate`], with nothing changed, when other threads exist (which might read the environment meanwhile). UCX works
/// all the same then; only what [`SETTINGS`] avoids can happen.
pub fn prepare_environment() -> Result<(), TooLate> {
    let missing = || SETTINGS.into_iter().filter(|(name, _)| std::env::var_os(name).is_none());
    if missing().next().is_none() {
        return Ok(());
    }
    let threads = std::fs::read_dir("/proc/self/task").map_or(usize::MAX, Iterator::count);
    if threads != 1 {
        return Err(TooLate { threads });
    }
    for (name, value) in missing() {
        // SAFETY: this is the process's only thread (counted above, and only this thread could start another), so
        // nothing reads the environment while it changes.
        unsafe { std::env::set_var(name, value) };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threaded_process_is_refused_or_already_prepared() {
        // The test harness runs this beside its main thread.
        let prepared = SETTINGS.iter().all(|(name, _)| std::env::var_os(name).is_some());
        assert_eq!(prepare_environment().is_ok(), prepared);
    }

    #[test]
    fn cargo_makes_the_same_settings_for_tests_and_benchmarks() {
        let config = include_str!("../../../.cargo/config.toml");
        for (name, value) in SETTINGS {
            assert!(config.contains(&format!("{name} = \"{value}\"\n")), "{name} is not {value} in .cargo/config.toml");
        }
    }
}
