//! Splits the CPUs of this process between the nodes (pure), so that prefill and decode do not disturb each other.

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

/// The CPUs that this process may use.
pub fn available() -> Vec<usize> {
    let Ok(set) = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)) else {
        return Vec::new();
    };
    (0..nix::sched::CpuSet::count()).filter(|&cpu| set.is_set(cpu).unwrap_or(false)).collect()
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
    fn this_process_has_a_cpu() {
        assert!(!available().is_empty());
    }
}
