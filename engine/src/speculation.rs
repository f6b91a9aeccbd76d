//! Lossless speculation by prompt lookup: guesses at a sequence's next tokens, and how many of them a step should
//! compute. A row's bits do not depend on its batch, so a step that computes drafts beside the last token chooses at
//! each of them exactly what a later step would have chosen, as long as the drafts before came true. Pure: no model,
//! no clock. `scheduler.rs` asks for drafts, `chooser.rs` verifies them.
//!
//! **Drafts** are what followed the longest earlier occurrence of the sequence's last tokens (prompt lookup decoding,
//! github.com/apoorvumang/prompt-lookup-decoding): summaries, edits and quotes repeat their prompt. The search is a
//! scan backwards over a bounded window: some microseconds beside a step of milliseconds, and no index to keep.
//!
//! **How many** follows from two estimates. [`Acceptance`] is the chance that a draft of this sequence comes true;
//! [`Budget`] weighs the tokens that drafts gain against the time that their rows add to the step, as the step model
//! predicts it. Text that does not repeat itself soon gets no drafts, and another try later.
use crate::step_model::{StepCost, StepShape};

/// Whether, and from what, drafts are made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Speculate {
    /// None: each step gives each sequence one token.
    #[default]
    Off,
    /// From what followed the sequence's last tokens before.
    Ngram,
}

/// Drafts of a sequence in one step at most.
pub const MAX_DRAFTS: usize = 8;
/// Decode rows of a step with drafts at most, those of the drafts counted. A larger batch is itself what fills the
/// machine, so nothing is drafted, or even looked up, for it.
pub const MAX_ROWS: usize = 16;
/// The chance of a draft ([`Acceptance::chance`]) from which on a step waits for the one under way, so that there can
/// be drafts. A wait costs the whole batch its overlap, whatever comes of the drafts. Who is new is above this; one
/// step of rejected drafts puts it below, at 1/4, for some 40 tokens.
pub const WORTH_A_WAIT: f64 = 0.3;

/// Tokens, counted from the last one back, that a search looks at.
const WINDOW: usize = 16_384;
/// A match of fewer tokens says too little.
const SHORTEST_MATCH: usize = 2;
/// A match of so many tokens is as good as any longer one.
const LONGEST_MATCH: usize = 8;

/// Up to `most` tokens that may follow `tokens`: those that followed the longest earlier occurrence of its end, the
/// latest of equally long ones. Empty where the last [`SHORTEST_MATCH`] tokens are new. An occurrence that overlaps the
/// end is a period, and goes on with it.
pub fn draft(tokens: &[u32], most: usize) -> Vec<u32> {
    let window = &tokens[tokens.len().saturating_sub(WINDOW)..];
    let Some(from) = occurrence(window).filter(|_| most > 0) else { return Vec::new() };
    let period = window.len() - from;
    (0..most).map(|place| window[from + place % period]).collect()
}

/// Where the best earlier occurrence of the end of `tokens` ends.
fn occurrence(tokens: &[u32]) -> Option<usize> {
    let (&last, before) = tokens.split_last()?;
    let mut best = (SHORTEST_MATCH - 1, None);
    for end in (SHORTEST_MATCH..=before.len()).rev() {
        // Most places end here.
        if tokens[end - 1] != last {
            continue;
        }
        let alike = tokens[..end].iter().rev().zip(tokens.iter().rev()).take(LONGEST_MATCH);
        let length = alike.take_while(|(one, other)| one == other).count();
        if length > best.0 {
            best = (length, Some(end));
        }
        if length == LONGEST_MATCH {
            break;
        }
    }
    best.1
}

/// The chance that a sequence's next draft comes true if those before it did: a count of drafts that did and of first
/// ones that did not, in which each counts less with every token that follows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Acceptance {
    came_true: f64,
    failed: f64,
}

/// What a step's evidence is worth after the next one with drafts.
const KEPT_BY_DRAFTS: f64 = 0.8;
/// And after a token without: rejected drafts are half forgiven after some 70 tokens.
const KEPT_BY_TOKEN: f64 = 0.99;

impl Acceptance {
    /// A step verified `drafted` drafts of which the first `accepted` came true; without drafts it gave one token.
    pub fn note(&mut self, drafted: usize, accepted: usize) {
        let kept = if drafted > 0 { KEPT_BY_DRAFTS } else { KEPT_BY_TOKEN };
        self.came_true = kept * self.came_true + accepted as f64;
        self.failed = kept * self.failed + f64::from(u8::from(accepted < drafted));
    }

    /// The estimate, 1/2 where nothing is known.
    pub fn chance(&self) -> f64 {
        (self.came_true + 0.5) / (self.came_true + self.failed + 1.0)
    }
}

/// A step's time and tokens, to which drafts add.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// That the step is expected to take.
    ms: f64,
    /// That it is expected to give.
    tokens: f64,
    /// Of one more decode row.
    row_ms: f64,
    /// Further rows that the step may have.
    rows: usize,
}

/// Drafts must promise so much more than they cost: estimates are estimates.
const MARGIN: f64 = 1.2;

impl Budget {
    /// Of a step of `shape` that gives `tokens` tokens, with room for `rows` more rows. A model that has seen no step
    /// says that rows cost nothing.
    pub fn new(cost: &StepCost, shape: StepShape, tokens: usize, rows: usize) -> Self {
        Self { ms: cost.predict_ms(shape), tokens: tokens as f64, row_ms: cost.decode_token_ms, rows }
    }

    /// Whether any draft can be worth a search.
    pub fn allows_any(&self) -> bool {
        self.rows > 0
    }

    /// How many drafts of a sequence, `most` at most, make the step's tokens come faster: each one whose chance, in
    /// tokens, is worth more than the tokens that the step gives in the time of a row.
    pub fn drafts(&self, chance: f64, most: usize) -> usize {
        let (mut ms, mut tokens, mut gain) = (self.ms, self.tokens, 1.0);
        let worth = |_: &usize| {
            gain *= chance;
            let worth = gain * ms >= MARGIN * self.row_ms * tokens;
            ms += self.row_ms;
            tokens += gain;
            worth
        };
        (0..most.min(self.rows)).take_while(worth).count()
    }

    /// So many drafts of that chance are in the step.
    pub fn take(&mut self, chance: f64, drafts: usize) {
        self.rows -= drafts.min(self.rows);
        self.ms += self.row_ms * drafts as f64;
        self.tokens += (1..=drafts).map(|draft| chance.powi(draft as i32)).sum::<f64>();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// By the definition, in quadratic time.
    fn oracle(tokens: &[u32], most: usize) -> Vec<u32> {
        let length = |end: usize| {
            (1..=LONGEST_MATCH.min(end)).take_while(move |n| tokens[..end].ends_with(&tokens[tokens.len() - n..]))
        };
        let ends = (1..tokens.len()).map(|end| (length(end).count(), end));
        let Some((_, end)) = ends.filter(|(length, _)| *length >= SHORTEST_MATCH).max() else { return Vec::new() };
        let mut grown = tokens.to_vec();
        (0..most).for_each(|place| grown.push(grown[end + place]));
        grown.split_off(tokens.len())
    }

    proptest! {
        #[test]
        fn drafts_follow_the_longest_and_latest_match(
            tokens in prop_oneof![prop::collection::vec(0u32..3, 0..60), prop::collection::vec(0u32..9, 0..200)],
            most in 0usize..12,
        ) {
            prop_assert_eq!(draft(&tokens, most), oracle(&tokens, most));
        }

        #[test]
        fn drafts_pay_for_their_rows(
            base_ms in 0.0f64..20.0, decode_token_ms in 0.0f64..5.0, decoding in 1usize..16,
            chance in 0.0f64..1.0, most in 0usize..9,
        ) {
            let cost = StepCost { base_ms, decode_token_ms, ..StepCost::default() };
            let shape = StepShape { decode_tokens: decoding, ..StepShape::default() };
            let mut budget = Budget::new(&cost, shape, decoding, MAX_ROWS - decoding);
            let before = (budget.ms, budget.tokens);
            let drafts = budget.drafts(chance, most);
            prop_assert!(drafts <= most.min(MAX_ROWS - decoding));
            budget.take(chance, drafts);
            prop_assert!(budget.tokens * before.0 >= before.1 * budget.ms * (1.0 - 1e-9), "{:?} {:?}", before, budget);
            prop_assert_eq!(budget.rows, MAX_ROWS - decoding - drafts);
        }
    }

    #[test]
    fn a_period_goes_on() {
        assert_eq!(draft(&[9, 1, 2, 3, 1, 2, 3, 1, 2], 7), [3, 1, 2, 3, 1, 2, 3]);
        assert_eq!(draft(&[5, 5, 5], 4), [5; 4]);
        assert_eq!((draft(&[1, 2, 3, 2], 4), draft(&[], 4), draft(&[1], 4)), (vec![], vec![], vec![]));
    }

    #[test]
    fn a_search_is_bounded() {
        let mut tokens: Vec<u32> = (0..WINDOW as u32 + 10).collect();
        tokens.extend([100, 101]);
        assert_eq!(draft(&tokens, 2), [102, 103]);
        tokens.extend([2, 3]);
        assert!(draft(&tokens, 2).is_empty(), "before the window");
    }

    #[test]
    fn acceptance_sets_how_many_drafts_there_are() {
        // A row costs an eighth of a step: as measured of a small model on two cores.
        let cost = StepCost { base_ms: 7.0, decode_token_ms: 1.0, ..StepCost::default() };
        let shape = StepShape { decode_tokens: 1, ..StepShape::default() };
        let drafts = |acceptance: &Acceptance| Budget::new(&cost, shape, 1, 15).drafts(acceptance.chance(), MAX_DRAFTS);
        let mut acceptance = Acceptance::default();
        assert!((1..=3).contains(&drafts(&acceptance)), "a first try");
        (0..4).for_each(|_| acceptance.note(8, 8));
        assert_eq!(drafts(&acceptance), MAX_DRAFTS);
        (0..20).for_each(|_| acceptance.note(2, 0));
        assert_eq!(drafts(&acceptance), 0, "{acceptance:?}");
        (0..200).for_each(|_| acceptance.note(0, 0));
        assert!(drafts(&acceptance) > 0, "and another try");
    }
}
