//! Account of a load: which tensors were read, how far it is and how fast. On a terminal it is a bar; elsewhere the log
//! has a line a second. Both end with a line in the log.
use std::collections::HashSet;
use std::io::{IsTerminal, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Between two lines of the log.
const LINES: Duration = Duration::from_secs(1);
/// Between two states of the bar, and before the first one: a small model is there sooner.
const BARS: Duration = Duration::from_millis(200);
/// Columns of the bar.
const WIDTH: usize = 40;

/// One load of one set of weights.
pub struct Reading {
    total_bytes: u64,
    /// Whether people look at standard error.
    terminal: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    used: HashSet<String>,
    bytes: u64,
    /// When the first tensor was asked for, and the last line or bar written.
    begun: Option<Instant>,
    told: Option<Instant>,
    /// There is a bar, and the cursor behind it.
    drawn: bool,
}

impl Reading {
    /// Of weights of `total_bytes`.
    pub fn new(total_bytes: u64) -> Self {
        Self { total_bytes, terminal: std::io::stderr().is_terminal(), state: Mutex::default() }
    }

    /// A tensor is read now.
    pub fn begin(&self, tensor: &str) {
        let mut state = self.state();
        let now = Instant::now();
        let begun = *state.begun.get_or_insert(now);
        state.told.get_or_insert(begun);
        state.used.insert(tensor.to_owned());
    }

    /// So many bytes of tensors were read.
    pub fn done(&self, bytes: usize) {
        let mut state = self.state();
        state.bytes += bytes as u64;
        let now = Instant::now();
        let (Some(begun), Some(told)) = (state.begun, state.told) else { return };
        if now.duration_since(told) < if self.terminal { BARS } else { LINES } {
            return;
        }
        state.told = Some(now);
        let (percent, gb_per_s) = self.progress(state.bytes, now.duration_since(begun));
        if self.terminal {
            // What cannot be written is lost, as in the log.
            let _ = write!(std::io::stderr(), "\r{} {percent:3.0} %, {gb_per_s:.2} GB/s", bar(percent));
            state.drawn = true;
        } else {
            tracing::info!("loading weights: {percent:.0} %, {gb_per_s:.2} GB/s");
        }
    }

    /// All is read: the last line. Gives back the first of `tensors` that nobody asked for.
    pub fn finish<'a>(&self, tensors: impl Iterator<Item = &'a str>) -> Option<&'a str> {
        let mut state = self.state();
        state.wipe();
        let took = state.begun.map_or(Duration::ZERO, |begun| begun.elapsed());
        let (_, gb_per_s) = self.progress(state.bytes, took);
        let (megabytes, seconds) = (state.bytes as f64 / 1e6, took.as_secs_f64());
        tracing::info!("weights loaded: {megabytes:.1} MB in {seconds:.2} s, {gb_per_s:.2} GB/s");
        tensors.filter(|&name| !state.used.contains(name)).min()
    }

    fn progress(&self, bytes: u64, took: Duration) -> (f64, f64) {
        let percent = 100.0 * bytes as f64 / self.total_bytes.max(1) as f64;
        (percent.min(100.0), bytes as f64 / 1e9 / took.as_secs_f64().max(1e-9))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// So that what is written next has the line for itself.
    fn wipe(&mut self) {
        if std::mem::take(&mut self.drawn) {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

impl Drop for Reading {
    /// A load that failed leaves no half of a bar.
    fn drop(&mut self) {
        self.state().wipe();
    }
}

fn bar(percent: f64) -> String {
    let full = (percent / 100.0 * WIDTH as f64) as usize;
    format!("loading weights [{}{}]", "#".repeat(full), ".".repeat(WIDTH.saturating_sub(full)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_asked_for_is_found_and_what_is_done_counts() {
        let reading = Reading::new(100);
        reading.begin("b");
        reading.begin("a");
        assert_eq!(reading.state().bytes, 0, "nothing is done yet");
        reading.done(30);
        reading.done(20);
        assert_eq!(reading.state().bytes, 50);
        assert_eq!(reading.progress(50, Duration::from_secs(1)).0, 50.0);
        assert_eq!(reading.finish(["a", "d", "c", "b"].into_iter()), Some("c"));
        assert_eq!(reading.finish(["a", "b"].into_iter()), None);
    }

    #[test]
    fn the_bar_has_one_width() {
        assert!(bar(50.0).contains(&format!("[{}{}]", "#".repeat(20), ".".repeat(20))));
        assert_eq!([0.0, 99.9, 100.0].map(|percent| bar(percent).len()), [bar(50.0).len(); 3]);
    }
}
