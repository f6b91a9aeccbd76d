//! What happened in a run, in order, for a digest that two runs of one seed can be compared by, and for people.
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::time::Instant;
use xxhash_rust::xxh3::xxh3_64;

/// A handle; clones write to the same log.
#[derive(Clone, Default)]
pub struct Log {
    lines: Arc<Mutex<Vec<String>>>,
}

impl Log {
    /// Notes what happened now, so long after `begin`.
    pub fn note(&self, begin: Instant, what: fmt::Arguments<'_>) {
        let at = begin.elapsed().as_micros();
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).push(format!("{at} {what}"));
    }

    /// Equal for equal logs.
    pub fn digest(&self) -> u64 {
        xxh3_64(self.lines().join("\n").as_bytes())
    }

    pub fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
