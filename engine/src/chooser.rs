//! Chooses a step's tokens on the host, for executors whose logits are in host memory ([`Chooser`]), and keeps what the
//! next step of a sequence needs of this one: a slot for each ([`Slots`]). Tokens of a step are chosen side by side on
//! the threads of the installed [`pool`]; who chooses does not matter, see `sampler.rs`.
//!
//! A slot lasts until [`Slots::forget`]. It is of the latest step that chooses for its sequence, whether that has ended
//! or not. Its token is taken by the step that computes it: after a step that failed, or that chose nothing, there is
//! none.
use std::collections::HashMap;
use std::sync::Arc;

use crate::error::EngineError;
use crate::executor::{Batch, BatchItem, Choose, Chosen, Draft, History, Seq, Tokens};
use crate::logits::Logits;
use crate::ops::pool;
use crate::sampler::{self, Past};
use crate::sampling::{Sampled, SamplingParams};

/// What is kept for sequences from step to step.
#[derive(Debug, Default)]
pub struct Slots {
    of: HashMap<Seq, Slot>,
    /// Steps begun so far; numbers the latest.
    begun: u64,
}

/// Logits and choices of one step at a time. Its memory is kept from step to step.
#[derive(Debug, Default)]
pub struct Chooser {
    /// The step's, among all that share the slots.
    number: u64,
    /// One for each item of the step.
    picks: Vec<Pick>,
    /// Of each item one, and one more for each of its drafts.
    choices: Vec<Choice>,
    logits: Logits,
    chosen: Vec<Chosen>,
}

/// The token that [`Tokens::Last`] stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Last {
    /// This.
    Known(u32),
    /// A step that has not ended chooses it, by rules of the device.
    UnderWay,
}

impl Last {
    /// The token, where the host has it.
    pub fn known(self) -> Option<u32> {
        match self {
            Self::Known(token) => Some(token),
            Self::UnderWay => None,
        }
    }
}

/// What is known of a choice before the host looks at logits.
#[derive(Clone, Debug, PartialEq)]
pub enum Found {
    /// Something that the step computed up to there is no number.
    NotNumbers,
    /// All are numbers; where a token is asked for, the host chooses it.
    Logits,
    /// The device has chosen.
    Token(Sampled),
}

/// What is kept for a sequence.
#[derive(Debug, Default)]
struct Slot {
    /// The step's that it is of.
    number: u64,
    /// The token that the step chose.
    last: Option<Last>,
    /// All tokens whose successors were chosen, where penalties look at them.
    history: Option<History>,
}

/// What a step does for one of its sequences.
#[derive(Debug)]
struct Pick {
    seq: Seq,
    last: Option<Last>,
    rules: Option<Rules>,
}

#[derive(Debug)]
struct Rules {
    sampling: Arc<SamplingParams>,
    uniform: f64,
    forbidden: Option<Arc<[u32]>>,
    /// With the drafts at its end.
    history: Option<History>,
    drafts: Vec<Draft>,
}

/// The token behind an item's tokens and so many of its drafts.
#[derive(Debug)]
struct Choice {
    item: usize,
    drafts: usize,
    chosen: Chosen,
}

impl Slots {
    /// Frees a sequence's slot.
    pub fn forget(&mut self, seq: Seq) {
        self.of.remove(&seq);
    }

    /// Sequences that have one.
    pub fn len(&self) -> usize {
        self.of.len()
    }

    /// Whether none has.
    pub fn is_empty(&self) -> bool {
        self.of.is_empty()
    }

    /// The slot of `seq`, if it is still the step's with this number.
    fn of_step(&mut self, seq: Seq, number: u64) -> Option<&mut Slot> {
        self.of.get_mut(&seq).filter(|slot| slot.number == number)
    }
}

impl Chooser {
    /// Begins a step: takes what it continues out of the slots, which are its own from now on.
    ///
    /// # Errors
    /// `InvalidArgument` for an item that continues what was not chosen, or whose penalties lack the tokens before.
    pub fn begin(&mut self, batch: &Batch, slots: &mut Slots) -> Result<(), EngineError> {
        self.give_up(slots);
        slots.begun += 1;
        self.number = slots.begun;
        self.chosen.clear();
        for item in &batch.items {
            match pick(slots, item, self.number) {
                Ok(pick) => self.picks.push(pick),
                Err(problem) => {
                    self.give_up(slots);
                    return Err(EngineError::InvalidArgument(format!("sequence {} in a step: {problem}", item.seq)));
                }
            }
        }
        Ok(())
    }

    /// The step comes to nothing: nobody can continue what it should have chosen. Of no effect after
    /// [`Chooser::choose`].
    pub fn give_up(&mut self, slots: &mut Slots) {
        for pick in self.picks.drain(..).filter(|_| self.chosen.is_empty()) {
            if let Some(slot) = slots.of_step(pick.seq, self.number) {
                (slot.last, slot.history) = (None, None);
            }
        }
    }

    /// The token that [`Tokens::Last`] of the item with this index stands for.
    pub fn last(&self, item: usize) -> Option<Last> {
        self.picks.get(item)?.last
    }

    /// Makes room for the logits of the step's items that choose: rows of `width`, one after another, holding anything.
    pub fn rows(&mut self, width: usize) -> &mut [f32] {
        self.rows_of(width, |_| true)
    }

    /// Likewise, of those items that `on_host` names by their index: a device has chosen for the others.
    pub fn rows_of(&mut self, width: usize, on_host: impl Fn(usize) -> bool) -> &mut [f32] {
        let choices = |pick: &Pick| pick.rules.as_ref().map_or(0, |rules| 1 + rules.drafts.len());
        let wanted = |(item, pick)| if on_host(item) { choices(pick) } else { 0 };
        self.logits.lay_out(width, self.picks.iter().enumerate().map(wanted))
    }

    /// The rows once more, as they are.
    pub fn rows_mut(&mut self) -> &mut [f32] {
        self.logits.values_mut()
    }

    /// Chooses, from the logits that are in [`Chooser::rows`] by now; nothing where what the step computed is no
    /// number: `sound(item, n)` says so of all rows of an item but the last `n`.
    pub fn choose(&mut self, slots: &mut Slots, sound: impl Fn(usize, usize) -> bool + Sync) {
        self.choose_found(slots, |item, _, behind| if sound(item, behind) { Found::Logits } else { Found::NotNumbers });
    }

    /// Likewise, with what a device found: `found(item, after, n)` is of the token behind so many drafts of an item,
    /// and of all of its rows but the last `n`.
    pub fn choose_found(&mut self, slots: &mut Slots, found: impl Fn(usize, usize, usize) -> Found + Sync) {
        let Self { number, picks, choices, logits, chosen } = self;
        choices.clear();
        for (item, pick) in picks.iter().enumerate() {
            let all = 0..=pick.drafts().len();
            choices.extend(all.map(|drafts| Choice { item, drafts, chosen: Chosen::Nothing }));
        }
        pool::for_each_of(choices, |_, Choice { item, drafts, chosen }| {
            let pick = &picks[*item];
            match found(*item, *drafts, pick.drafts().len() - *drafts) {
                Found::NotNumbers => *chosen = Chosen::NotNumbers,
                Found::Token(sampled) => *chosen = Chosen::Token(sampled),
                Found::Logits => {
                    if let (Some(rules), Some(logits)) = (&pick.rules, logits.row(*item, *drafts)) {
                        *chosen = rules.choose(*drafts, logits);
                    }
                }
            }
        });
        let mut rest = &mut choices[..];
        for pick in picks {
            let (own, behind) = rest.split_at_mut(1 + pick.drafts().len());
            rest = behind;
            chosen.push(verified(pick.drafts(), own));
            // Neither a sequence that was forgotten meanwhile, nor one of which a later step is under way.
            if let Some(slot) = slots.of_step(pick.seq, *number) {
                (slot.last, slot.history) = pick.left(chosen.last());
            }
        }
    }

    /// What was chosen, one entry for each item.
    pub fn chosen(&self) -> &[Chosen] {
        &self.chosen
    }

    /// Likewise, each with its sequence.
    pub fn chosen_of(&self) -> impl Iterator<Item = (Seq, &Chosen)> {
        self.picks.iter().map(|pick| pick.seq).zip(&self.chosen)
    }

    /// The logits of the last step.
    pub fn logits(&self) -> &Logits {
        &self.logits
    }
}

/// What holds of an item's choices: those behind drafts that came true, up to the first that did not. What is no number
/// behind a draft that did is not told here: the next step finds it again.
fn verified(drafts: &[Draft], choices: &mut [Choice]) -> Chosen {
    let mut chosen = choices.iter_mut().map(|choice| std::mem::replace(&mut choice.chosen, Chosen::Nothing));
    match chosen.next() {
        Some(Chosen::Token(first)) if !drafts.is_empty() => {
            let mut all = vec![first];
            for (draft, next) in drafts.iter().zip(chosen) {
                match next {
                    Chosen::Token(next) if all.last().is_some_and(|last| last.token == draft.token) => all.push(next),
                    _ => break,
                }
            }
            Chosen::Tokens(all)
        }
        first => first.unwrap_or(Chosen::Nothing),
    }
}

impl Pick {
    fn drafts(&self) -> &[Draft] {
        self.rules.as_ref().map_or(&[], |rules| &rules.drafts)
    }

    /// The last token, and the history behind it: what the sequence's next step needs of this one.
    fn left(&mut self, chosen: Option<&Chosen>) -> (Option<Last>, Option<History>) {
        let (last, accepted) = match chosen {
            Some(Chosen::Token(only)) => (Some(only), 0),
            Some(Chosen::Tokens(all)) => (all.last(), all.len() - 1),
            Some(Chosen::Nothing | Chosen::NotNumbers) | None => (None, 0),
        };
        let (Some(last), Some(Rules { history, drafts, .. })) = (last, &mut self.rules) else { return (None, None) };
        let mut history = history.take();
        if let Some(History { tokens, .. }) = &mut history {
            tokens.truncate(tokens.len() - (drafts.len() - accepted));
        }
        (Some(Last::Known(last.token)), history)
    }
}

/// Whatever the step comes to, the slot's token is taken.
fn pick(slots: &mut Slots, item: &BatchItem, number: u64) -> Result<Pick, String> {
    let Slot { last, history, .. } = slots.of.get_mut(&item.seq).map(std::mem::take).unwrap_or_default();
    let (last, history) = match &item.tokens {
        Tokens::Given(tokens) => (None, item.choose.as_ref().and_then(|choose| after(choose, tokens))),
        Tokens::Last => {
            let last = last.ok_or("no step chose the token that it continues")?;
            let history = history.zip(last.known()).map(|(mut history, last)| {
                history.tokens.push(last);
                history
            });
            (Some(last), history)
        }
    };
    let history = history.map(|mut history| {
        history.tokens.extend(item.drafts().iter().map(|draft| draft.token));
        history
    });
    if let Some(choose) = &item.choose {
        let last = choose.is_of_device().then_some(Last::UnderWay);
        slots.of.insert(item.seq, Slot { number, last, history: None });
    }
    let rules = item.choose.as_ref().map(|Choose { sampling, uniform, forbidden, drafts, .. }| Rules {
        sampling: Arc::clone(sampling),
        uniform: *uniform,
        forbidden: forbidden.clone(),
        history,
        drafts: drafts.clone(),
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
    /// The token behind the first `after` drafts. Broken weights or KV must not become fluent nonsense; minus infinity
    /// is a masked token.
    fn choose(&self, after: usize, logits: &[f32]) -> Chosen {
        if !sampler::are_numbers(logits) {
            return Chosen::NotNumbers;
        }
        let (uniform, forbidden) = match after.checked_sub(1).and_then(|draft| self.drafts.get(draft)) {
            Some(draft) => (draft.uniform, &draft.forbidden),
            None => (self.uniform, &self.forbidden),
        };
        let (tokens, prompt_len) = match &self.history {
            Some(History { tokens, prompt_len }) => {
                (&tokens[..tokens.len() - (self.drafts.len() - after)], *prompt_len)
            }
            None => (&[][..], 0),
        };
        let past = Past { tokens, prompt_len, forbidden: forbidden.as_deref().unwrap_or_default() };
        Chosen::Token(sampler::sample(&self.sampling, uniform, &past, logits))
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
                drafts: Vec::new(),
            }),
        }
    }

    fn batch(items: Vec<BatchItem>) -> Batch {
        Batch { items, report_layers: Vec::new() }
    }

    /// A step over logits that depend on the place.
    fn step((chooser, slots): &mut (Chooser, Slots), batch: &Batch) -> Vec<Chosen> {
        chooser.begin(batch, slots).unwrap();
        let starts: Vec<usize> = batch.items.iter().map(|item| item.start).collect();
        for (row, start) in chooser.rows(VOCAB).chunks_exact_mut(VOCAB).zip(starts) {
            (0..).zip(row).for_each(|(id, logit)| *logit = ((id * 5 + start * 3) % VOCAB) as f32 / 4.0);
        }
        chooser.choose(slots, |_, _| true);
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
            let (mut by_slot, mut given, mut tokens) = (Default::default(), Default::default(), vec![1, 6, 2]);
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
        let alone = step(&mut Default::default(), &batch);
        for threads in 1..5 {
            let mut threads = Pool::new(threads, Vec::new()).unwrap();
            assert_eq!(threads.install(|| step(&mut Default::default(), &batch)), alone);
        }
    }

    #[test]
    fn a_slot_lasts_until_it_is_forgotten_and_its_token_until_the_next_step() {
        let (greedy, last) = (Arc::new(SamplingParams::GREEDY), |_| Tokens::Last);
        let mut both = <(Chooser, Slots)>::default();
        let refused = |(chooser, slots): &mut (Chooser, Slots)| {
            let outcome = chooser.begin(&batch(vec![item(7, &[1, 2], &greedy, last)]), slots);
            matches!(outcome, Err(EngineError::InvalidArgument(why)) if why.contains("sequence 7"))
        };
        assert!(refused(&mut both), "nothing was chosen yet");
        step(&mut both, &batch(vec![item(7, &[1], &greedy, Tokens::Given)]));
        assert_eq!(both.1.len(), 1);
        both.1.forget(7);
        assert!(both.1.is_empty() && refused(&mut both), "forgotten");
        // A chunk that chooses nothing, and a step that never ends.
        step(&mut both, &batch(vec![item(7, &[1], &greedy, Tokens::Given)]));
        step(&mut both, &batch(vec![BatchItem { choose: None, ..item(7, &[1, 2], &greedy, Tokens::Given) }]));
        assert!(refused(&mut both), "the last step chose nothing");
        step(&mut both, &batch(vec![item(7, &[1], &greedy, Tokens::Given)]));
        both.0.begin(&batch(vec![item(7, &[1, 2], &greedy, last)]), &mut both.1).unwrap();
        assert!(refused(&mut both), "the last step did not end");
        both.1.forget(8);
    }

    #[test]
    fn a_step_continues_what_one_under_way_chooses_by_rules_of_the_device() {
        let last = |_| Tokens::Last;
        let listed = Arc::new(SamplingParams { top_logprobs: 1, ..SamplingParams::GREEDY });
        for (sampling, is_of_device) in [(Arc::new(SamplingParams::GREEDY), true), (listed, false)] {
            let (mut slots, mut first, mut second) = (Slots::default(), Chooser::default(), Chooser::default());
            let of = |by, tokens: &[u32]| batch(vec![item(7, tokens, &sampling, by)]);
            first.begin(&of(Tokens::Given, &[1]), &mut slots).unwrap();
            assert_eq!(second.begin(&of(last, &[1, 2]), &mut slots).is_ok(), is_of_device);
            if !is_of_device {
                continue;
            }
            assert_eq!((second.last(0), slots.len()), (Some(Last::UnderWay), 1));
            let choose = |chooser: &mut Chooser, slots: &mut Slots, token: usize| {
                chooser.rows(VOCAB).iter_mut().enumerate().for_each(|(id, to)| *to = f32::from(u8::from(id == token)));
                chooser.choose(slots, |_, _| true);
            };
            // The slot is the second's: the first one's token is not what a third would continue.
            choose(&mut first, &mut slots, 3);
            first.begin(&of(last, &[1, 2, 3]), &mut slots).unwrap();
            assert_eq!(first.last(0), Some(Last::UnderWay));
            choose(&mut second, &mut slots, 4);
            choose(&mut first, &mut slots, 5);
            second.begin(&of(last, &[1, 2, 3, 4]), &mut slots).unwrap();
            assert_eq!(second.last(0), Some(Last::Known(5)));
            // One that comes to nothing, and one whose sequence has ended meanwhile.
            second.give_up(&mut slots);
            assert!(first.begin(&of(last, &[1, 2, 3, 4, 5]), &mut slots).is_err());
            first.begin(&of(Tokens::Given, &[1]), &mut slots).unwrap();
            slots.forget(7);
            choose(&mut first, &mut slots, 6);
            assert!(slots.is_empty(), "nothing is kept for who has ended");
        }
    }

    #[test]
    fn penalties_want_the_tokens_before() {
        let sampling = Arc::new(SamplingParams { repetition_penalty: 2.0, ..SamplingParams::GREEDY });
        let mut item = item(1, &[1, 2], &sampling, Tokens::Given);
        item.choose.as_mut().unwrap().history = None;
        assert!(matches!(
            Chooser::default().begin(&batch(vec![item]), &mut Slots::default()),
            Err(EngineError::InvalidArgument(_))
        ));
    }

    #[test]
    fn what_is_no_number_is_no_token_and_leaves_none_behind() {
        let greedy = Arc::new(SamplingParams::GREEDY);
        let (mut chooser, slots) = (Chooser::default(), &mut Slots::default());
        let items = |by| batch(vec![item(1, &[1, 2], &greedy, by), item(2, &[1, 2], &greedy, by)]);
        chooser.begin(&items(Tokens::Given), slots).unwrap();
        let rows = chooser.rows(VOCAB);
        rows.fill(0.0);
        rows[3] = f32::NAN;
        chooser.choose(slots, |_, _| true);
        assert!(matches!(chooser.chosen(), [Chosen::NotNumbers, Chosen::Token(_)]));
        assert!(chooser.begin(&batch(vec![item(1, &[1, 2], &greedy, |_| Tokens::Last)]), slots).is_err());
        assert!(chooser.begin(&batch(vec![item(2, &[1, 2], &greedy, |_| Tokens::Last)]), slots).is_ok());
    }
}
