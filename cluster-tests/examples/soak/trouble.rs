//! What befalls the nodes.
use std::fmt;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tandem_cluster_tests::Fleet;

/// Longer than the router's lease of a second.
const SILENCE: Duration = Duration::from_millis(1800);
const DRAIN: Duration = Duration::from_secs(40);

/// A seeded series of troubles.
pub struct Trouble {
    rng: StdRng,
    killed: u32,
    frozen: u32,
    drained: u32,
}

impl Trouble {
    pub fn new(seed: u64) -> Self {
        Self { rng: StdRng::seed_from_u64(seed), killed: 0, frozen: 0, drained: 0 }
    }

    /// One trouble: mostly kill -9; the node is started again at once.
    pub async fn strikes(&mut self, fleet: &mut Fleet) -> anyhow::Result<()> {
        let victim = self.rng.random_range(0..fleet.members.len());
        let process = &mut fleet.members[victim].process;
        match self.rng.random_range(0..10) {
            0..6 => {
                self.killed += 1;
                process.kill();
            }
            6..8 => {
                self.frozen += 1;
                process.freeze();
                tokio::time::sleep(SILENCE).await;
                process.wake();
            }
            _ => {
                self.drained += 1;
                process.terminate();
                let status = process.ended(DRAIN).await?;
                anyhow::ensure!(status.success(), "a drained node ended with {status}");
            }
        }
        fleet.restart_dead().await
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} killed, {} frozen, {} drained", self.killed, self.frozen, self.drained)
    }
}
