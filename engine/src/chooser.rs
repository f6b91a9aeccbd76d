//! Chooses a step's tokens on the host, for executors whose logits are in host memory, and keeps what the next step of
//! a sequence needs of this one: a slot for each. Tokens of a step are chosen side by side on the threads of the
//! installed [`pool`]; who chooses does not matter, see `sampler.rs`.
//!
//! A slot lasts until [`Chooser::forget`]. Its token is taken by the step that computes it: after a step that failed,
//! or that chose nothing, there is none.
use std::collections::HashMap;
use std::sync::Arc;

use crate::error::EngineError;
use crate::executor::{Batch, BatchItem, Choose, Chosen, History, Seq, Tokens};
use crate::logits::Logits;
use crate::ops::pool;
use crate::sampler::{self, Past};
use crate::sampling::SamplingParams;

/// Logits and choices of the step at hand, and the slots. Its memory is kept from step to step.
#[derive(Debug, Default)]
pub struct Chooser {
    /// One for each item of the step.
    picks: Vec<Pick>,
    logits: Logits,
    chosen: Vec<Chosen>,
    slots: HashMap<Seq, Slot>,
}

/// What is kept for a sequence.
#[derive(Debug, Default)]
struct Slot {
    /// The token that its last step chose.
    last: Option<u32>,
    /// All tokens whose successors were chosen, where penalties look at them.
    history: Option<History>,
}

/// What a step does for one of its sequences.
#[derive(Debug)]
struct Pick {
    seq: Seq,
    /// The token that [`Tokens::Last`] stands for.
    last: Option<u32>,
    rules: Option<Rules>,
}

#[derive(Debug)]
struct Rules {
    sampling: Arc<SamplingParams>,
    uniform: f64,
    forbidden: Option<Arc<[u32]>>,
    history: Option<History>,
}

impl Chooser {
    /// Begins a step: takes what it continues out of the slots.
    ///
    /// # Errors
    /// `InvalidArgument` for an item that continues what was not chosen, or whose penalties lack the tokens before.
    pub fn begin(&mut self, batch: &Batch) -> Result<(), EngineError> {
        self.picks.clear();
        self.chosen.clear();
        for item in &batch.items {
            let pick = pick(self.slots.get_mut(&item.seq), item).map_err(|problem| {
                EngineError::InvalidArgument(format!("sequence {} in a step: {problem}", item.seq))
            })?;
            self.picks.push(pick);
        }
        Ok(())
    }

    /// The token that [`Tokens::Last`] of the item with this index stands for.
    pub fn last(&self, item: usize) -> Option<u32> {
        self.picks.get(item)?.last
    }

    /// Makes room for the logits of the step's items that choose: rows of `width`, one after another, holding anything.
    pub fn rows(&mut self, width: usize) -> &mut [f32] {
        self.logits.lay_out(width, self.picks.iter().map(|pick| pick.rules.is_some()))
    }

    /// Chooses, from the logits that are in [`Chooser::rows`] by now; nothing for items that are not `sound`: those of
    /// which the step computed something that is no number.
    pub fn choose(&mut self, sound: impl Fn(usize) -> bool + Sync) {
        let Self { picks, logits, chosen, slots } = self;
        chosen.resize(picks.len(), Chosen::Nothing);
        pool::for_each_of(chosen, |item, chosen| {
            if !sound(item) {
                *chosen = Chosen::NotNumbers;
            } else if let (Some(rules), Some(logits)) = (&picks[item].rules, logits.of(item)) {
                *chosen = rules.choose(logits);
            }
        });
        for (Pick { seq, rules, .. }, chosen) in picks.iter_mut().zip(&*chosen) {
            if let (Some(rules), Chosen::Token(sampled)) = (rules, chosen) {
                let (last, history) = (Some(sampled.token), rules.history.take());
                *slots.entry(*seq).or_default() = Slot { last, history };
            }
        }
    }

    /// What was chosen, one entry for each item.
    pub fn chosen(&self) -> &[Chosen] {
        &self.chosen
    }

    /// The logits of the last step.
    pub fn logits(&self) -> &Logits {
        &self.logits
    }

    /// Frees a sequence's slot.
    pub fn forget(&mut self, seq: Seq) {
        self.slots.remove(&seq);
    }

    /// Sequences that have one.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }
}

/// Whatever the step comes to, the slot's token is taken.
fn pick(slot: Option<&mut Slot>, item: &BatchItem) -> Result<Pick, String> {
    let Slot { last, history } = slot.map(std::mem::take).unwrap_or_default();
    let (last, history) = match &item.tokens {
        Tokens::Given(tokens) => (None, item.choose.as_ref().and_then(|choose| after(choose, tokens))),
        Tokens::Last => {
            let last = last.ok_or("no step chose the token that it continues")?;
            let history = history.map(|mut history| {
                history.tokens.push(last);
                history
            });
            (Some(last), history)
        }
    };
    let rules = item.choose.as_ref().map(|Choose { sampling, uniform, forbidden, .. }| Rules {
        sampling: Arc::clone(sampling),
        uniform: *uniform,
        forbidden: forbidden.clone(),
        history,
    });
    if rules.as_ref().is_some_and(|rules| rules.sampling.penalizes() && rules.history.is_none()) {
        return Err("its penalties lack the tokens before".into());
    }
    Ok(Pick { seq: item.seq, last, rules })
}

/// The history behind `tokens`.
fn after(choose: &Choose, tokens: &[u32]) -> Option<History> {
    let History { tokens: before, prompt_len } = choose.history.as_ref()?;
    Some(History { tokens: [before, tokens].concat(), prompt_len: *prompt_len })
}

impl Rules {
    /// Broken weights or KV must not become fluent nonsense; minus infinity is a masked token.
    fn choose(&self, logits: &[f32]) -> Chosen {
        if !sampler::are_numbers(logits) {
            return Chosen::NotNumbers;
        }
        let history = self.history.as_ref();
        let (tokens, prompt_len) = history.map_or((&[][..], 0), |history| (&history.tokens, history.prompt_len));
        let past = Past { tokens, prompt_len, forbidden: self.forbidden.as_deref().unwrap_or_default() };
        Chosen::Token(sampler::sample(&self.sampling, self.uniform, &past, logits))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::blocks::BlockPool;
    use crate::ops::pool::Pool;
    use crate::sampling::uniform;

    const VOCAB: usize = 8;

    /// The token after `tokens`, of which the last alone is computed.
    fn item(seq: Seq, tokens: &[u32], sampling: &Arc<SamplingParams>, by: fn(Vec<u32>) -> Tokens) -> BatchItem {
        let (before, last) = tokens.split_at(tokens.len() - 1);
        let tokens = by(last.to_vec());
        let history = (sampling.penalizes() && tokens != Tokens::Last)
            .then(|| History { tokens: before.to_vec(), prompt_len: 2 });
        BatchItem {
            seq,
            tokens,
            start: before.len(),
            blocks: Arc::new(BlockPool::new(1, 16).try_reserve(1).unwrap()),
            choose: Some(Choose {
                sampling: Arc::clone(sampling),
                uniform: uniform(sampling.seed, before.len() + 1),
                forbidden: None,
                history,
            }),
        }
    }

    fn batch(items: Vec<BatchItem>) -> Batch {
        Batch { items, report_layers: Vec::new() }
    }

    /// A step over logits that depend on the place.
    fn step(chooser: &mut Chooser, batch: &Batch) -> Vec<Chosen> {
        chooser.begin(batch).unwrap();
        let starts: Vec<usize> = batch.items.iter().map(|item| item.start).collect();
        for (row, start) in chooser.rows(VOCAB).chunks_exact_mut(VOCAB).zip(starts) {
            (0..).zip(row).for_each(|(id, logit)| *logit = ((id * 5 + start * 3) % VOCAB) as f32 / 4.0);
        }
        chooser.choose(|_| true);
        chooser.chosen().to_vec()
    }

    fn token(chosen: &Chosen) -> u32 {
        match chosen {
            Chosen::Token(sampled) => sampled.token,
            other => panic!("{other:?}"),
        }
    }

    proptest! {
        #[test]
        fn the_last_token_from_its_slot_is_the_given_one(
            temperature in 0f32..2.0, seed in any::<u64>(), top_k in 0u32..9,
            repetition in prop_oneof![Just(1.0), 0.5f32..3.0], presence in prop_oneof![Just(0.0), -2f32..2.0],
        ) {
            let sampling = Arc::new(SamplingParams {
                temperature, seed, top_k, repetition_penalty: repetition, presence_penalty: presence, top_logprobs: 2,
                ..SamplingParams::GREEDY
            });
            let (mut by_slot, mut given, mut tokens) = (Chooser::default(), Chooser::default(), vec![1, 6, 2]);
            for step_number in 0..12 {
                let kind = |_| Tokens::Last;
                let kind = if step_number == 0 { Tokens::Given } else { kind };
                let chosen = step(&mut by_slot, &batch(vec![item(4, &tokens, &sampling, kind)]));
                prop_assert_eq!(&chosen, &step(&mut given, &batch(vec![item(4, &tokens, &sampling, Tokens::Given)])));
                tokens.push(token(&chosen[0]));
            }
        }
    }

    #[test]
    fn tokens_are_the_same_whatever_the_number_of_threads() {
        let sampling =
            |seq: u64| SamplingParams { temperature: 0.5 * (seq % 3) as f32, seed: seq, ..SamplingParams::GREEDY };
        let items = (0..9).map(|seq| item(seq, &[1; 4], &Arc::new(sampling(seq)), Tokens::Given));
        let batch = batch(items.collect());
        let alone = step(&mut Chooser::default(), &batch);
        for threads in 1..5 {
            let mut threads = Pool::new(threads, Vec::new()).unwrap();
            assert_eq!(threads.install(|| step(&mut Chooser::default(), &batch)), alone);
        }
    }

    #[test]
    fn a_slot_lasts_until_it_is_forgotten_and_its_token_until_the_next_step() {
        let (greedy, last) = (Arc::new(SamplingParams::GREEDY), |_| Tokens::Last);
        let mut chooser = Chooser::default();
        let refused = |chooser: &mut Chooser| {
            let outcome = chooser.begin(&batch(vec![item(7, &[1, 2], &greedy, last)]));
            matches!(outcome, Err(EngineError::InvalidArgument(why)) if why.contains("sequence 7"))
        };
        assert!(refused(&mut chooser), "nothing was chosen yet");
        step(&mut chooser, &batch(vec![item(7, &[1], &greedy, Tokens::Given)]));
        assert_eq!(chooser.slots(), 1);
        chooser.forget(7);
        assert!(chooser.slots() == 0 && refused(&mut chooser), "forgotten");
        // A chunk that chooses nothing, and a step that never ends.
        step(&mut chooser, &batch(vec![item(7, &[1], &greedy, Tokens::Given)]));
        step(&mut chooser, &batch(vec![BatchItem { choose: None, ..item(7, &[1, 2], &greedy, Tokens::Given) }]));
        assert!(refused(&mut chooser), "the last step chose nothing");
        step(&mut chooser, &batch(vec![item(7, &[1], &greedy, Tokens::Given)]));
        chooser.begin(&batch(vec![item(7, &[1, 2], &greedy, last)])).unwrap();
        assert!(refused(&mut chooser), "the last step did not end");
        chooser.forget(8);
    }

    #[test]
    fn penalties_want_the_tokens_before() {
        let sampling = Arc::new(SamplingParams { repetition_penalty: 2.0, ..SamplingParams::GREEDY });
        let mut item = item(1, &[1, 2], &sampling, Tokens::Given);
        item.choose.as_mut().unwrap().history = None;
        assert!(matches!(Chooser::default().begin(&batch(vec![item])), Err(EngineError::InvalidArgument(_))));
    }

    #[test]
    fn what_is_no_number_is_no_token_and_leaves_none_behind() {
        let greedy = Arc::new(SamplingParams::GREEDY);
        let mut chooser = Chooser::default();
        let items = |by| batch(vec![item(1, &[1, 2], &greedy, by), item(2, &[1, 2], &greedy, by)]);
        chooser.begin(&items(Tokens::Given)).unwrap();
        let rows = chooser.rows(VOCAB);
        rows.fill(0.0);
        rows[3] = f32::NAN;
        chooser.choose(|_| true);
        assert!(matches!(chooser.chosen(), [Chosen::NotNumbers, Chosen::Token(_)]));
        assert!(chooser.begin(&batch(vec![item(1, &[1, 2], &greedy, |_| Tokens::Last)])).is_err());
        assert!(chooser.begin(&batch(vec![item(2, &[1, 2], &greedy, |_| Tokens::Last)])).is_ok());
    }
}
