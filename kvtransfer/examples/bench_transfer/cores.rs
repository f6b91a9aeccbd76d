//! Where threads run. Two busy threads that share a core while the other is idle would be measured as slow transfers.
use std::sync::OnceLock;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// Runs `start` on the `index`th core that this process may use; threads that it starts stay there.
pub fn on_core<T>(index: usize, start: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    static ALLOWED: OnceLock<Vec<usize>> = OnceLock::new();
    let this_thread = Pid::from_raw(0);
    let before = sched_getaffinity(this_thread)?;
    // The first caller is not pinned yet.
    let allowed =
        ALLOWED.get_or_init(|| (0..CpuSet::count()).filter(|core| before.is_set(*core) == Ok(true)).collect());
    let mut one = CpuSet::new();
    one.set(allowed[index % allowed.len()])?;
    sched_setaffinity(this_thread, &one)?;
    let started = start();
    sched_setaffinity(this_thread, &before)?;
    started
}
