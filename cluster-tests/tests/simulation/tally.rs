//! What happened in runs, counted: to see that the faults struck and what the cluster did about them.
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::Ordering::Relaxed;

use tandem_kvtransfer::Transport;

use crate::client::{End, Outcome};
use crate::node::NodeProcess;
use crate::schedule::Schedule;

/// Counts by name, in a few groups.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    groups: BTreeMap<&'static str, BTreeMap<String, u64>>,
}

impl Tally {
    fn count(&mut self, group: &'static str, name: impl Into<String>, times: u64) {
        if times > 0 {
            *self.groups.entry(group).or_default().entry(name.into()).or_default() += times;
        }
    }

    pub fn add(&mut self, other: &Self) {
        for (group, counts) in &other.groups {
            counts.iter().for_each(|(name, times)| self.count(group, name.clone(), *times));
        }
    }

    /// What was planned.
    pub fn schedule(&mut self, schedule: &Schedule) {
        for (_, fault) in &schedule.faults {
            let name = format!("{fault:?}");
            self.count("faults", name.split('(').next().unwrap_or_default(), 1);
        }
    }

    /// What clients saw.
    pub fn outcomes(&mut self, outcomes: &[Outcome]) {
        for outcome in outcomes {
            self.count("requests", outcome.label(), 1);
            if let End::Finished { timings, .. } = &outcome.end {
                self.count("requests", "finished after a re-plan", u64::from(timings.replans > 0));
                let local = timings.prefill_instance == timings.decode_instance;
                self.count("requests", "finished locally", u64::from(local));
            }
        }
    }

    /// What a node counted in its life.
    pub fn node(&mut self, node: &NodeProcess) {
        let counters = node.transport.counters();
        for (name, count) in [
            ("verified", &counters.verified_handoffs),
            ("aborted", &counters.aborted_handoffs),
            ("quarantined", &counters.quarantined_handoffs),
            ("peers cut off", &counters.fenced_peers),
            ("peers lost", &counters.lost_peers),
        ] {
            self.count("hand-offs", name, count.load(Relaxed));
        }
        let handoffs = &node.node.handoffs;
        self.count("hand-offs", "blocks reused", handoffs.reused_blocks.load(Relaxed));
        self.count("hand-offs", "delivered again", handoffs.redelivered.load(Relaxed));
        counters.refused().for_each(|(reason, count)| self.count("refusals", reason, count));
        self.count("nodes", "preemptions", node.node.engine.load().preemptions);
        self.count("nodes", "sessions after the first", node.node.work.lives().counts().1.saturating_sub(1));
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (group, counts) in &self.groups {
            let counts: Vec<String> = counts.iter().map(|(name, times)| format!("{name} {times}")).collect();
            writeln!(f, "{group:>10}: {}", counts.join(", "))?;
        }
        Ok(())
    }
}
