//! The incarnations that were declared dead. A node that hangs and wakes, or whose stream was cut, may still believe in
//! a life whose requests run elsewhere by now: it is refused until it has let go of that life. Pure, and bounded: the
//! one that nobody asked for the longest is forgotten first, and would be let in as any node is after a restart of the
//! router.
use std::collections::VecDeque;

use tandem_proto::Incarnation;

/// Incarnations remembered: four times the nodes that the table holds.
pub const MAX_FENCED: usize = 4096;

/// A bounded memory of deaths.
#[derive(Debug, Default)]
pub struct Fence {
    /// The one that was asked for last is at the back.
    dead: VecDeque<Incarnation>,
}

impl Fence {
    /// Remembers a death.
    pub fn declare(&mut self, incarnation: Incarnation) {
        if !self.holds(incarnation) {
            if self.dead.len() >= MAX_FENCED {
                self.dead.pop_front();
            }
            self.dead.push_back(incarnation);
        }
    }

    /// Whether this one was declared dead.
    pub fn holds(&mut self, incarnation: Incarnation) -> bool {
        let Some(found) = self.dead.iter().position(|dead| *dead == incarnation) else { return false };
        self.dead.remove(found);
        self.dead.push_back(incarnation);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forgets_the_one_nobody_asked_for() {
        let mut fence = Fence::default();
        for incarnation in 0..MAX_FENCED as u64 {
            fence.declare(Incarnation(incarnation));
        }
        assert!(fence.holds(Incarnation(0)));
        fence.declare(Incarnation(0));
        fence.declare(Incarnation(u64::MAX));
        assert!(fence.holds(Incarnation(0)) && fence.holds(Incarnation(2)) && fence.holds(Incarnation(u64::MAX)));
        assert!(!fence.holds(Incarnation(1)));
        assert_eq!(fence.dead.len(), MAX_FENCED);
    }
}
