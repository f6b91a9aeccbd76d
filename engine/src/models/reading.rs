//! Account of a load: which tensors were read, how far it is and how fast. The log has a line a second and one at the
//! end.
use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Between two lines.
const INTERVAL: Duration = Duration::from_secs(1);

/// One load of one set of weights.
pub struct Reading {
    total_bytes: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    used: HashSet<String>,
    bytes: usize,
    /// When the first tensor was asked for, and the last line written.
    begun: Option<Instant>,
    told: Option<Instant>,
}

impl Reading {
    /// Of weights of `total_bytes`.
    pub fn new(total_bytes: usize) -> Self {
        Self { total_bytes, state: Mutex::default() }
    }

    /// A tensor of so many bytes is read now. What was read before it is done.
    pub fn note(&self, tensor: &str, bytes: usize) {
        let mut state = self.state();
        let now = Instant::now();
        let begun = *state.begun.get_or_insert(now);
        if now.duration_since(*state.told.get_or_insert(begun)) >= INTERVAL {
            state.told = Some(now);
            let (percent, gb_per_s) = self.progress(state.bytes, now.duration_since(begun));
            tracing::info!("loading weights: {percent:.0} %, {gb_per_s:.2} GB/s");
        }
        // A second look at a tensor is no progress.
        if state.used.insert(tensor.to_owned()) {
            state.bytes += bytes;
        }
    }

    /// All is read: the last line. Gives back the first of `tensors` that nobody asked for.
    pub fn finish<'a>(&self, tensors: impl Iterator<Item = &'a str>) -> Option<&'a str> {
        let state = self.state();
        let took = state.begun.map_or(Duration::ZERO, |begun| begun.elapsed());
        let (_, gb_per_s) = self.progress(state.bytes, took);
        let (megabytes, seconds) = (state.bytes as f64 / 1e6, took.as_secs_f64());
        tracing::info!("weights loaded: {megabytes:.1} MB in {seconds:.2} s, {gb_per_s:.2} GB/s");
        tensors.filter(|&name| !state.used.contains(name)).min()
    }

    fn progress(&self, bytes: usize, took: Duration) -> (f64, f64) {
        let percent = 100.0 * bytes as f64 / self.total_bytes.max(1) as f64;
        (percent.min(100.0), bytes as f64 / 1e9 / took.as_secs_f64().max(1e-9))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_asked_for_is_found_and_bytes_count_once() {
        let reading = Reading::new(100);
        reading.note("b", 30);
        reading.note("b", 30);
        reading.note("a", 20);
        assert_eq!(reading.state().bytes, 50);
        assert_eq!(reading.progress(50, Duration::from_secs(1)).0, 50.0);
        assert_eq!(reading.finish(["a", "d", "c", "b"].into_iter()), Some("c"));
        assert_eq!(reading.finish(["a", "b"].into_iter()), None);
    }
}
