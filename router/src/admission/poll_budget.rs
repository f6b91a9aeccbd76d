//! How often the queue looks whether the nodes have other room. Pure. Reports and the ends of requests come in crowds,
//! and each look asks for all nodes: so there is one in [`BETWEEN`] at most, as a rule looks take a tenth of the time
//! at most, and there is always one after the last change.
use std::time::{Duration, Instant};

/// From one look to the next.
pub const BETWEEN: Duration = Duration::from_millis(1);
/// The pause after a look, against its length.
const PAUSE: u32 = 9;
/// No pause is longer: a look may have stood still with its thread.
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// When the queue may look, and whether it will.
#[derive(Clone, Copy, Debug, Default)]
pub struct PollBudget {
    next: Option<Instant>,
    /// A look is still to come.
    planned: bool,
}

/// What is to be done about a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Poll {
    /// Poll.
    Now,
    /// Poll then, and say so by [`PollBudget::begin`].
    At(Instant),
    /// The look that is still to come will see it.
    Planned,
}

impl PollBudget {
    /// The nodes may have other room.
    pub fn changed(&mut self, now: Instant) -> Poll {
        if self.planned {
            return Poll::Planned;
        }
        match self.next.filter(|next| now < *next) {
            Some(next) => {
                self.planned = true;
                Poll::At(next)
            }
            None => Poll::Now,
        }
    }

    /// A look begins: what changes from now on needs another one.
    pub fn begin(&mut self, now: Instant) {
        *self = Self { next: Some(now + BETWEEN), planned: false };
    }

    /// The look that began then is over.
    pub fn end(&mut self, began: Instant, now: Instant) {
        let pause = (now.saturating_duration_since(began) * PAUSE).min(LONGEST_PAUSE);
        self.next = self.next.max(Some(now + pause));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// After each change comes a look, soon, and no more of them than there may be.
        #[test]
        fn seldom_and_never_too_late(pauses_us in prop::collection::vec(0u64..3_000, 1..200)) {
            let (mut budget, mut now, mut planned) = (PollBudget::default(), Instant::now(), None::<Instant>);
            let mut seen: Vec<Instant> = Vec::new();
            for pause_us in pauses_us {
                now += Duration::from_micros(pause_us);
                if let Some(at) = planned.filter(|at| *at <= now) {
                    budget.begin(at);
                    seen.push(at);
                    planned = None;
                }
                match budget.changed(now) {
                    Poll::Now => {
                        budget.begin(now);
                        seen.push(now);
                    }
                    Poll::At(at) => {
                        prop_assert!(at > now && at <= now + BETWEEN && planned.is_none());
                        planned = Some(at);
                    }
                    Poll::Planned => prop_assert!(planned.is_some_and(|at| at > now)),
                }
            }
            prop_assert!(seen.windows(2).all(|pair| pair[1] >= pair[0] + BETWEEN), "{seen:?}");
        }
    }

    #[test]
    fn a_long_look_is_followed_by_a_longer_pause() {
        let (mut budget, start) = (PollBudget::default(), Instant::now());
        let ms = |millis| start + Duration::from_millis(millis);
        budget.begin(start);
        budget.end(start, ms(2));
        assert_eq!((budget.changed(ms(3)), budget.changed(ms(4))), (Poll::At(ms(20)), Poll::Planned));
        budget.begin(ms(20));
        budget.end(ms(20), ms(1020));
        assert_eq!(budget.changed(ms(1021)), Poll::At(ms(1040)), "it stood still");
    }
}
