//! Steps that are planned while others are under way: each sequence gets the tokens that it gets alone, once and in
//! order, whoever ends, leaves, waits or gives its blocks away meanwhile.
use std::collections::VecDeque;

use super::*;

/// A sequence's token at a place: now and then one that ends it, where nobody expects it.
fn token(seq: Seq, place: usize) -> u32 {
    match (uniform(seq, place) * 40.0) as u32 {
        0 => 7,
        1 => 5,
        other => other % 5,
    }
}

fn chosen(batch: &Batch) -> Vec<Chosen> {
    let sampled = |seq, place| Sampled { token: token(seq, place), logprob: 0.0, top: Vec::new() };
    let choose = |item: &BatchItem| match &item.choose {
        Some(choose) if choose.drafts.is_empty() => Chosen::Token(sampled(item.seq, item.end())),
        Some(choose) => {
            let came_true = (item.end()..).zip(&choose.drafts).take_while(|(at, it)| token(item.seq, *at) == it.token);
            Chosen::Tokens((0..=came_true.count()).map(|after| sampled(item.seq, item.end() + after)).collect())
        }
        None => Chosen::Nothing,
    };
    batch.items.iter().map(choose).collect()
}

/// What the rules of the tests' sequences are.
fn rules(kind: u8) -> SamplingParams {
    match kind {
        0 => SamplingParams { top_logprobs: 1, ..SamplingParams::GREEDY },
        1 => SamplingParams { min_tokens: 5, ..SamplingParams::GREEDY },
        _ => SamplingParams::GREEDY,
    }
}

/// A scheduler with steps under way.
struct Overlapping {
    scheduler: Scheduler,
    most: usize,
    under_way: VecDeque<Batch>,
    /// Where each sequence's next step begins.
    starts: BTreeMap<Seq, usize>,
    /// Begun while another step was under way.
    ahead: usize,
}

impl Overlapping {
    fn new(scheduler: Scheduler, most: usize) -> Self {
        Self { scheduler, most, under_way: VecDeque::new(), starts: BTreeMap::new(), ahead: 0 }
    }

    /// Begins what can begin; the decisions on the way.
    fn begin(&mut self, now: Instant, gone: impl Fn(Seq) -> bool) -> Result<Vec<(Seq, Decision)>, TestCaseError> {
        let mut decisions = Vec::new();
        while self.under_way.len() < self.most {
            let admitted = self.scheduler.admit(now, &gone);
            self.scheduler.apply(&admitted);
            let fitted = fit(&mut self.scheduler);
            let again = |(_, decision): &&(Seq, Decision)| *decision == Decision::Preempt;
            for (seq, _) in fitted.iter().filter(again) {
                prop_assert!(self.under_way.is_empty(), "blocks are taken from a step under way");
                self.starts.remove(seq);
            }
            decisions.extend(admitted.into_iter().chain(fitted));
            let batch = self.scheduler.plan();
            if batch.items.is_empty() {
                break;
            }
            self.check(&batch)?;
            self.scheduler.begin(&batch);
            self.ahead += usize::from(!self.under_way.is_empty());
            self.under_way.push_back(batch);
        }
        Ok(decisions)
    }

    fn check(&mut self, batch: &Batch) -> Result<(), TestCaseError> {
        prop_assert!(batch.tokens() <= self.scheduler.max_step_tokens);
        for item in &batch.items {
            let start = self.starts.insert(item.seq, item.end());
            prop_assert!(start.is_none_or(|start| start == item.start), "a token is skipped or computed twice");
            prop_assert!(item.end() <= item.blocks.capacity_tokens());
            let unseen = self.under_way.iter().flat_map(|batch| &batch.items).filter(|other| other.seq == item.seq);
            for chooses in unseen.filter_map(|other| other.choose.as_ref()) {
                prop_assert!(chooses.is_of_device() && item.tokens == Tokens::Last, "it hangs on what nobody knows");
            }
            if let Some(choose) = &item.choose {
                let seed = self.scheduler.running[&item.seq].request.sampling.seed;
                prop_assert_eq!(choose.uniform, uniform(seed, item.end()));
            }
        }
        // Nothing of what steps under way write is for others to read.
        for item in self.under_way.iter().flat_map(|batch| &batch.items) {
            if let Some(sequence) = self.scheduler.running.get(&item.seq) {
                prop_assert!(item.start >= sequence.request.lease.read_only_tokens());
            }
        }
        Ok(())
    }

    /// Ends the oldest step, in one way or another.
    fn end(&mut self, fails: bool) -> Vec<(Seq, Decision)> {
        let Some(batch) = self.under_way.pop_front() else { return Vec::new() };
        let chosen = chosen(&batch);
        let outcome = if fails { Err(EngineError::Executor("told to fail".into())) } else { Ok(&chosen[..]) };
        let decisions = self.scheduler.resolve(&batch, outcome);
        self.scheduler.end(batch);
        self.scheduler.apply(&decisions);
        for (seq, decision) in &decisions {
            if let Decision::Advance { computed, drafts: Drafts { accepted: 1.., .. }, .. } = decision {
                self.starts.insert(*seq, *computed);
            }
        }
        decisions
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn everybody_gets_the_tokens_that_it_has_alone(
        arrivals in prop::collection::vec((1usize..60, 1u32..60, 0usize..30, -2i32..3, 0u8..12), 1..24),
        max_running in 1usize..6, blocks in 6usize..40, most in 1usize..4,
        cancelled in prop::collection::btree_map(0u64..24, 0usize..60, 0..6),
        failing in prop::collection::btree_set(0usize..200, 0..4),
        speculate in prop::sample::select(vec![Speculate::Off, Speculate::Ngram]),
    ) {
        let (pool, now) = (BlockPool::new(blocks, 16), Instant::now());
        let mut steps = Overlapping::new(scheduler(max_running, 24, &pool), most);
        steps.scheduler.speculate = speculate;
        let mut arrivals = arrivals;
        let (mut given, mut answers, mut ended) = (Vec::new(), BTreeMap::<Seq, Vec<u32>>::new(), BTreeMap::new());
        for round in 0.. {
            prop_assert!(round < 20_000, "{} of {} have ended", ended.len(), given.len());
            arrivals.retain(|&(len, new, at, priority, kind)| {
                let lease = (at <= round).then(|| pool.try_reserve(pool.blocks_for(len)));
                let Some(Ok(lease)) = lease else { return true };
                let new_request = SequenceRequest {
                    priority, sampling: rules(kind).into(), stop_token_ids: vec![5], lease: Arc::new(lease),
                    tokens: vec![1; len], prompt_len: len, max_new_tokens: new, ..request(&BlockPool::new(1, 16), 1, 1)
                };
                steps.scheduler.enqueue(given.len() as Seq, new_request);
                given.push((len, new));
                false
            });
            let decisions = steps.begin(now, |seq| cancelled.get(&seq).is_some_and(|at| *at <= round))?;
            let may_rest = steps.scheduler.is_idle() || steps.scheduler.preempted() > 0;
            prop_assert!(!steps.under_way.is_empty() || may_rest, "nobody runs");
            for (seq, decision) in decisions.into_iter().chain(steps.end(failing.contains(&round))) {
                prop_assert!(!ended.contains_key(&seq), "{} goes on behind its end", seq);
                if let Decision::Advance { sampled, .. } = &decision {
                    answers.entry(seq).or_default().extend(sampled.iter().map(|sampled| sampled.token));
                }
                if decision.ends() {
                    ended.insert(seq, decision);
                }
            }
            if arrivals.is_empty() && steps.scheduler.is_idle() && steps.under_way.is_empty() {
                break;
            }
        }
        prop_assert_eq!((ended.len(), pool.free()), (given.len(), blocks));
        for (seq, decision) in ended {
            let (len, new) = given[seq as usize];
            let most = (new as usize).min(blocks * 16 + 1 - len);
            let whole: Vec<u32> = (len..len + most).map(|place| token(seq, place)).collect();
            let stop = whole.iter().position(|token| *token == 7 || *token == 5).map_or(most, |at| at + 1);
            let answer = answers.remove(&seq).unwrap_or_default();
            match decision {
                Decision::Advance { .. } => prop_assert_eq!(&answer, &whole[..stop], "sequence {}", seq),
                _ => prop_assert!(whole[..stop].starts_with(&answer), "sequence {}", seq),
            }
        }
    }
}

/// Two prompts of one token that go on until they are stopped.
fn two(kind: u8, speculate: Speculate, pool: &BlockPool) -> Overlapping {
    let mut scheduler = scheduler(4, 24, pool);
    scheduler.speculate = speculate;
    for seq in 0..2 {
        let sampling = if seq == 0 { rules(kind) } else { SamplingParams::GREEDY };
        scheduler.enqueue(
            seq,
            SequenceRequest {
                sampling: sampling.into(),
                stop_token_ids: vec![6],
                ignore_eos: true,
                ..request(pool, 1, 40)
            },
        );
    }
    Overlapping::new(scheduler, 2)
}

#[test]
fn who_needs_the_value_waits_and_nobody_is_ahead_of_it() {
    let ahead = |kind, speculate| {
        let (pool, now) = (BlockPool::new(100, 16), Instant::now());
        let mut steps = two(kind, speculate, &pool);
        for _ in 0..12 {
            steps.begin(now, |_| false).unwrap();
            assert!(steps.under_way.iter().all(|batch| batch.items.len() == 2), "one got a step more than the other");
            steps.end(false);
        }
        steps.ahead
    };
    assert_eq!(ahead(2, Speculate::Off), 12, "each step begins while one is under way");
    assert_eq!(ahead(0, Speculate::Off), 0, "one lists other tokens");
    assert_eq!(ahead(1, Speculate::Off), 7, "one must not end before its fifth token");
    assert_eq!(ahead(2, Speculate::Ngram), 10, "guesses are waited for and made once; they fail, and are no more");
}

#[test]
fn an_end_by_length_is_known_ahead_and_one_by_a_token_is_not() {
    let (pool, now) = (BlockPool::new(100, 16), Instant::now());
    let mut steps = Overlapping::new(scheduler(4, 24, &pool), 2);
    let ends = (0..).find(|seq| (1..4).all(|place| token(*seq, place) < 5) && token(*seq, 4) == 7).unwrap();
    steps.scheduler.enqueue(ends, request(&pool, 1, 40));
    steps.scheduler.enqueue(ends + 1, SequenceRequest { ignore_eos: true, ..request(&pool, 1, 4) });
    let mut rows = Vec::new();
    while !(steps.scheduler.is_idle() && steps.under_way.is_empty()) {
        steps.begin(now, |_| false).unwrap();
        rows.push(steps.under_way.back().unwrap().items.len());
        let held = pool.total() - pool.free();
        steps.end(false);
        assert!(held == 2 || steps.under_way.is_empty());
    }
    // Four steps of both; the last was planned before anybody knew of the first one's end, which takes a step to
    // itself.
    assert_eq!(rows, [2, 2, 2, 1, 1]);
    assert_eq!(pool.free(), 100);
}
