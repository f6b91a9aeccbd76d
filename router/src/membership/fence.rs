//! The lives that were declared dead: sessions of this router with nodes, not nodes. What was booked in one of them
//! runs elsewhere by now. A node draws a new life for each stream, so that only a message that was long on its way, or
//! a node that does not keep to that, names an old one: it is refused. Pure, and bounded: the one that nobody asked for
//! the longest is forgotten first.
use std::collections::VecDeque;

use tandem_proto::Life;

/// Lives remembered: four times the nodes that the table holds.
pub const MAX_FENCED: usize = 4096;

/// A bounded memory of deaths.
#[derive(Debug, Default)]
pub struct Fence {
    /// The one that was asked for last is at the back.
    dead: VecDeque<Life>,
}

impl Fence {
    /// Remembers a death.
    pub fn declare(&mut self, life: Life) {
        if !self.holds(life) {
            if self.dead.len() >= MAX_FENCED {
                self.dead.pop_front();
            }
            self.dead.push_back(life);
        }
    }

    /// Whether this one was declared dead.
    pub fn holds(&mut self, life: Life) -> bool {
        let Some(found) = self.dead.iter().position(|dead| *dead == life) else { return false };
        self.dead.remove(found);
        self.dead.push_back(life);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forgets_the_one_nobody_asked_for() {
        let mut fence = Fence::default();
        for life in 0..MAX_FENCED as u64 {
            fence.declare(Life(life));
        }
        assert!(fence.holds(Life(0)));
        fence.declare(Life(0));
        fence.declare(Life(u64::MAX));
        assert!(fence.holds(Life(0)) && fence.holds(Life(2)) && fence.holds(Life(u64::MAX)));
        assert!(!fence.holds(Life(1)));
        assert_eq!(fence.dead.len(), MAX_FENCED);
    }
}
