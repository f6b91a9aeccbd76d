//! How much of this machine's processors went to other guests of its host: Linux counts it (proc(5), `steal`).
use anyhow::Context;

/// Processor time of the whole machine up to a moment, in ticks.
pub struct Stolen {
    stolen: f64,
    all: f64,
}

impl Stolen {
    /// Now.
    pub fn look() -> anyhow::Result<Self> {
        let stat = std::fs::read_to_string("/proc/stat")?;
        let all =
            stat.lines().next().and_then(|line| line.strip_prefix("cpu ")).context("no processors in /proc/stat")?;
        // user, nice, system, idle, iowait, irq, softirq, steal; what follows is counted in these already.
        let ticks: Result<Vec<f64>, _> = all.split_whitespace().take(8).map(str::parse).collect();
        let ticks = ticks?;
        Ok(Self { stolen: *ticks.last().context("no ticks in /proc/stat")?, all: ticks.iter().sum() })
    }

    /// Their share of the time since then.
    pub fn share_since(&self) -> anyhow::Result<f64> {
        let now = Self::look()?;
        Ok((now.stolen - self.stolen) / (now.all - self.all).max(1.0))
    }
}
