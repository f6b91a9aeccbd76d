//! Who computes where: the cluster and its polite client on one half of the cores, attackers on the other. What an
//! attack takes of the polite client's time is then the router's doing, not that of a loud neighbour on its core.
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// The halves. `None`: there is one core, and all share it.
#[derive(Clone, Copy, Debug)]
pub struct Cores {
    halves: Option<[CpuSet; 2]>,
    counts: [usize; 2],
}

impl Cores {
    /// Those of this thread.
    ///
    /// # Errors
    /// The system does not tell them.
    pub fn of_this_thread() -> anyhow::Result<Self> {
        let all = sched_getaffinity(Pid::from_raw(0))?;
        let cores: Vec<usize> = (0..CpuSet::count()).filter(|core| all.is_set(*core).unwrap_or(false)).collect();
        let (cluster, attackers) = cores.split_at(cores.len() / 2);
        let set = |cores: &[usize]| {
            let mut set = CpuSet::new();
            cores.iter().try_for_each(|core| set.set(*core)).map(|()| set)
        };
        let halves = if cluster.is_empty() { None } else { Some([set(cluster)?, set(attackers)?]) };
        Ok(Self { halves, counts: [cluster.len(), attackers.len()] })
    }

    /// This thread, and whoever it starts, runs on the cluster's half of the cores.
    ///
    /// # Errors
    /// The system does not allow it.
    pub fn for_cluster(&self) -> anyhow::Result<()> {
        self.pin(0)
    }

    /// The same with the attackers' half.
    ///
    /// # Errors
    /// As there.
    pub fn for_attackers(&self) -> anyhow::Result<()> {
        self.pin(1)
    }

    fn pin(&self, half: usize) -> anyhow::Result<()> {
        let Some(halves) = &self.halves else { return Ok(()) };
        Ok(sched_setaffinity(Pid::from_raw(0), &halves[half])?)
    }
}

impl std::fmt::Display for Cores {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.halves, self.counts) {
            (None, _) => f.write_str("all on one core"),
            (_, [cluster, attackers]) => write!(f, "cores: {cluster} of the cluster, {attackers} of attackers"),
        }
    }
}
