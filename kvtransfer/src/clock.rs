//! The one look at the clock of everything that runs on tokio. The progress threads of `ucx` have the system's.
use std::time::Instant;

/// Now, by tokio's clock: the system's monotonic one, or in a simulation the paused one.
pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
