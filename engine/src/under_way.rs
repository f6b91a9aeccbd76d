//! What an executor keeps for each of its steps under way: as many states as there may be such steps, which take turns.
//! Pure; what a state is, is the executor's.

/// States of steps. Those under way are in the order in which they began; the others wait for a step to come.
#[derive(Debug)]
pub struct UnderWay<T> {
    states: Box<[T]>,
    /// Steps that have ended so far: the oldest under way is the next in turn.
    ended: usize,
    begun: usize,
}

impl<T> UnderWay<T> {
    /// For as many steps as there are `states`, at least one.
    pub fn new(states: impl IntoIterator<Item = T>) -> Self {
        let states: Box<[T]> = states.into_iter().collect();
        assert!(!states.is_empty(), "no step could begin");
        Self { states, ended: 0, begun: 0 }
    }

    /// Steps that may be under way at a time.
    pub fn most(&self) -> usize {
        self.states.len()
    }

    /// The state of the step that begins next, or `None` while as many are under way as may.
    pub fn next_step(&mut self) -> Option<&mut T> {
        let free = self.begun - self.ended < self.states.len();
        free.then(|| self.in_turn(self.begun))
    }

    /// The step of [`UnderWay::next_step`] is under way.
    pub fn began(&mut self) {
        assert!(self.begun - self.ended < self.states.len(), "a step that has no state");
        self.begun += 1;
    }

    /// The oldest step under way is so no longer, whatever it came to: its state, which lasts until another begins.
    pub fn end(&mut self) -> Option<&mut T> {
        if self.ended == self.begun {
            return None;
        }
        self.ended += 1;
        Some(self.in_turn(self.ended - 1))
    }

    /// The state of the step that ended last; before the first has, one that was never used.
    pub fn ended(&self) -> &T {
        &self.states[(self.ended + self.states.len() - 1) % self.states.len()]
    }

    fn in_turn(&mut self, step: usize) -> &mut T {
        let count = self.states.len();
        &mut self.states[step % count]
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn states_are_of_their_steps_from_beginning_to_end(most in 1usize..4, moves in prop::collection::vec(any::<bool>(), 0..60)) {
            let (mut all, mut expected, mut count) = (UnderWay::new(vec![0; most]), VecDeque::new(), 0);
            for begins in moves {
                if begins {
                    let next = all.next_step();
                    prop_assert_eq!(next.is_some(), expected.len() < most);
                    let Some(state) = next else { continue };
                    count += 1;
                    *state = count;
                    // One that could not begin leaves its state to the next one.
                    if count % 5 > 0 {
                        all.began();
                        expected.push_back(count);
                    }
                } else {
                    let oldest = expected.pop_front();
                    prop_assert_eq!(all.end().map(|state| *state), oldest);
                    prop_assert!(oldest.is_none_or(|oldest| *all.ended() == oldest));
                }
            }
        }
    }
}
