//! Splits the CPUs of this process between the nodes, so that prefill and decode do not disturb each other.
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

use nix::sys::memfd::{MFdFlags, memfd_create};

/// A file in memory by which the nodes lend each other cores that have nothing to do. It is gone with this process,
/// however that ends.
pub struct LendingFile(OwnedFd);

impl LendingFile {
    /// # Errors
    /// The system's, which has no such files, or no more of them.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self(memfd_create(c"tandem-cores", MFdFlags::MFD_CLOEXEC)?))
    }

    /// As the nodes open it.
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd()).into()
    }
}

/// Parts of `cpus` for `nodes` nodes, in order and as even as possible; none when there are fewer CPUs than nodes.
pub fn split(cpus: &[usize], nodes: usize) -> Option<Vec<Vec<usize>>> {
    if nodes == 0 || cpus.len() < nodes {
        return None;
    }
    let (share, larger) = (cpus.len() / nodes, cpus.len() % nodes);
    let mut rest = cpus;
    let parts = (0..nodes).map(|node| {
        let (part, tail) = rest.split_at(share + usize::from(node < larger));
        rest = tail;
        part.to_vec()
    });
    Some(parts.collect())
}

/// As `taskset -c` reads it.
pub fn list(cpus: &[usize]) -> String {
    cpus.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

/// The CPUs that this process may use, those of one core one after the other: so that a part has whole cores.
pub fn available() -> Vec<usize> {
    let Ok(set) = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)) else {
        return Vec::new();
    };
    let cpus = (0..nix::sched::CpuSet::count()).filter(|&cpu| set.is_set(cpu).unwrap_or(false));
    by_core(cpus.collect(), |cpu| {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        std::fs::read_to_string(path).ok()?.split([',', '-', '\n']).next()?.parse().ok()
    })
}

/// `first_sibling`: the lowest number among the CPUs of the same core, if the system says it.
fn by_core(mut cpus: Vec<usize>, first_sibling: impl Fn(usize) -> Option<usize>) -> Vec<usize> {
    cpus.sort_by_key(|&cpu| (first_sibling(cpu).unwrap_or(cpu), cpu));
    cpus
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cpu_has_one_node() {
        assert_eq!(split(&[0, 1], 2), Some(vec![vec![0], vec![1]]));
        assert_eq!(split(&[2, 3, 5, 8, 9], 2), Some(vec![vec![2, 3, 5], vec![8, 9]]));
        assert_eq!(split(&[0], 2), None);
        assert_eq!(split(&[0], 0), None);
        assert_eq!(list(&[2, 3, 5]), "2,3,5");
    }

    #[test]
    fn the_cpus_of_a_core_stay_together() {
        assert_eq!(by_core((0..8).collect(), |cpu| Some(cpu % 4)), [0, 4, 1, 5, 2, 6, 3, 7]);
        assert_eq!(by_core(vec![2, 0, 1], |_| None), [0, 1, 2]);
    }

    #[test]
    fn this_process_has_a_cpu() {
        assert!(!available().is_empty());
    }
}
