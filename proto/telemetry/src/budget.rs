//! How many lines a second something may log that can happen any number of times. What is left out is counted, and told
//! with the next line.
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const SECOND: Duration = Duration::from_secs(1);

/// Lines that are left, shared by all who log them.
#[derive(Debug)]
pub struct Budget {
    each_second: u32,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    since: Option<Instant>,
    left: u32,
    untold: u64,
}

impl Budget {
    /// So many a second.
    pub const fn new(each_second: u32) -> Self {
        Self { each_second, state: Mutex::new(State { since: None, left: 0, untold: 0 }) }
    }

    /// Takes one line; says how many were left out since the last one. `None`: this one is left out.
    pub fn take(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.since.is_none_or(|since| now.saturating_duration_since(since) >= SECOND) {
            (state.since, state.left) = (Some(now), self.each_second);
        }
        if state.left == 0 {
            state.untold += 1;
            return None;
        }
        state.left -= 1;
        Some(std::mem::take(&mut state.untold))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_is_told_with_the_next_line() {
        let (budget, start) = (Budget::new(2), Instant::now());
        let told: Vec<_> = (0..5).map(|_| budget.take(start)).collect();
        assert_eq!(told, [Some(0), Some(0), None, None, None]);
        assert_eq!(budget.take(start + SECOND), Some(3));
        assert_eq!(budget.take(start + SECOND), Some(0));
        assert_eq!(budget.take(start + SECOND), None);
        assert_eq!(budget.take(start + 2 * SECOND), Some(1));
    }
}
