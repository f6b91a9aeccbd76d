//! The scheduler without an executor: limits, order, and what is done when blocks run out.
mod overlap;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;
use tandem_proto::hash::sequence_hashes;
use tandem_proto::{CacheSalt, SequenceKey};

use super::*;
use crate::blocks::{BlockPool, Prefix};
use crate::executor::Executor;
use crate::sampling::{SamplingParams, uniform};
use crate::sequence::MAX_PRIORITY;
use crate::simulated::{SimulatedConfig, SimulatedExecutor};

const VOCAB: usize = 8;

fn scheduler(max_running: usize, max_step_tokens: usize, pool: &BlockPool) -> Scheduler {
    let config = SimulatedConfig { vocab_size: VOCAB, eos_token_id: 7, blocks: 1, ..Default::default() };
    let executor = SimulatedExecutor::new(&config).unwrap();
    let config =
        SchedulerConfig { max_running, max_step_tokens, inbox: 0, prefix_caching: true, speculate: Speculate::Off };
    Scheduler::new(&config, executor.spec(), pool.clone())
}

fn request(pool: &BlockPool, len: usize, max_new_tokens: u32) -> SequenceRequest {
    SequenceRequest {
        id: String::new(),
        tokens: vec![1; len],
        prompt_len: len,
        computed: 0,
        lease: Arc::new(pool.try_reserve(pool.blocks_for(len)).unwrap()),
        max_new_tokens,
        sampling: SamplingParams::GREEDY.into(),
        ignore_eos: false,
        stop_token_ids: Vec::new(),
        deadline: None,
        priority: 0,
        report_layers: Vec::new(),
    }
}

fn apply(scheduler: &mut Scheduler, decisions: &[(Seq, Decision)]) {
    scheduler.apply(decisions);
}

/// Every choice is token 3.
fn three(batch: &Batch) -> Vec<Chosen> {
    let three = Chosen::Token(Sampled { token: 3, logprob: 0.0, top: Vec::new() });
    batch.items.iter().map(|item| item.choose.as_ref().map_or(Chosen::Nothing, |_| three.clone())).collect()
}

/// Every round of it, in order.
fn fit(scheduler: &mut Scheduler) -> Vec<(Seq, Decision)> {
    let rounds = std::iter::from_fn(|| {
        let decisions = scheduler.fit();
        scheduler.apply(&decisions);
        Some(decisions).filter(|decisions| !decisions.is_empty())
    });
    rounds.flatten().collect()
}

fn step(scheduler: &mut Scheduler, now: Instant) -> Vec<(Seq, Decision)> {
    let decisions = scheduler.admit(now, |_| false);
    apply(scheduler, &decisions);
    fit(scheduler);
    let batch = scheduler.plan();
    let chosen = three(&batch);
    let decisions = scheduler.resolve(&batch, Ok(&chosen));
    apply(scheduler, &decisions);
    decisions
}

proptest! {
    #[test]
    fn steps_keep_their_limits_and_everyone_ends(
        arrivals in prop::collection::vec((1usize..90, 1u32..12, 0usize..30, -2i32..3), 1..40),
        max_running in 1usize..6, max_step_tokens in 1usize..40, cancelled in prop::collection::btree_set(0u64..40, 0..6),
    ) {
        let (pool, now) = (BlockPool::new(1000, 16), Instant::now());
        let mut scheduler = scheduler(max_running, max_step_tokens, &pool);
        let work: usize = arrivals.iter().map(|(len, new, ..)| len + *new as usize).sum();
        let mut arrivals: Vec<_> = arrivals.into_iter().enumerate().collect();
        let (mut expected, mut ended) = (BTreeMap::<Seq, usize>::new(), BTreeSet::new());
        let mut next = 0;
        // Each step computes at least one token, and arrivals keep coming for 30 steps.
        for round in 0..work + 31 {
            arrivals.retain(|&(_, (len, new, at, priority))| {
                if at > round { return true; }
                scheduler.enqueue(next, SequenceRequest { priority, ..request(&pool, len, new) });
                next += 1;
                false
            });
            let decisions = scheduler.admit(now, |seq| round > 3 && cancelled.contains(&seq));
            ended.extend(decisions.iter().filter(|(_, decision)| decision.ends()).map(|(seq, _)| *seq));
            apply(&mut scheduler, &decisions);
            prop_assert!(scheduler.running() <= max_running);
            fit(&mut scheduler);
            let batch = scheduler.plan();
            prop_assert!(batch.tokens() <= max_step_tokens);
            prop_assert_eq!(batch.items.is_empty(), scheduler.running() == 0);
            let members: BTreeSet<_> = batch.items.iter().map(|item| item.seq).collect();
            prop_assert_eq!(members.len(), batch.items.len(), "a sequence is in a step twice");
            for (&seq, sequence) in &scheduler.running {
                let prefilling = scheduler.running.values().filter(|s| s.request.queued_tokens() > 1);
                let first_prefill = prefilling.min_by_key(|s| s.rank).map(|s| s.rank.1);
                let must = sequence.request.queued_tokens() == 1 || first_prefill == Some(seq);
                prop_assert!(!must || members.contains(&seq), "{} starves", seq);
            }
            for item in &batch.items {
                let start = expected.insert(item.seq, item.start + item.tokens.len()).unwrap_or(0);
                prop_assert_eq!(item.start, start, "a token is skipped or computed twice");
            }
            let chosen = three(&batch);
            let decisions = scheduler.resolve(&batch, Ok(&chosen));
            ended.extend(decisions.iter().filter(|(_, decision)| decision.ends()).map(|(seq, _)| *seq));
            apply(&mut scheduler, &decisions);
        }
        prop_assert!(scheduler.is_idle());
        prop_assert_eq!(ended.len() as u64, next);
        prop_assert_eq!(pool.free(), 1000);
    }
}

#[test]
fn a_long_prompt_is_not_starved_and_does_not_stall_decoding() {
    let (pool, now) = (BlockPool::new(1000, 16), Instant::now());
    let mut scheduler = scheduler(4, 8, &pool);
    scheduler.enqueue(0, request(&pool, 1, 100));
    scheduler.enqueue(1, request(&pool, 70, 1));
    for seq in 2..20 {
        scheduler.enqueue(seq, request(&pool, 30, 1));
    }
    let steps_of_one = std::iter::from_fn(|| Some(step(&mut scheduler, now)))
        .take_while(|decisions| {
            assert!(decisions.iter().any(|(seq, _)| *seq == 0), "the decoding one waited");
            !decisions.iter().any(|(seq, decision)| *seq == 1 && decision.ends())
        })
        .count();
    assert_eq!(steps_of_one, 9, "ten steps of 7 tokens each, beside the one that decodes");
}

proptest! {
    /// One arrival a step, one place to run: the worst that can be done to those who wait.
    #[test]
    fn priorities_order_starts_and_nobody_is_overtaken_for_ever(
        priorities in prop::collection::vec(prop_oneof![Just(-MAX_PRIORITY), Just(MAX_PRIORITY), -3i32..3], 1..900),
    ) {
        let (pool, now) = (BlockPool::new(2000, 16), Instant::now());
    let mut scheduler = scheduler(1, 8, &pool);
        let mut started: Vec<Seq> = Vec::new();
        let count = priorities.len();
        let mut arrivals = priorities.iter().zip(0..);
        for _ in 0..2 * count + 2 {
            for (&priority, seq) in arrivals.by_ref().take(2) {
                scheduler.enqueue(seq, SequenceRequest { priority, ..request(&pool, 1, 1) });
            }
            let decisions = scheduler.admit(now, |_| false);
            started.extend(decisions.iter().filter(|(_, what)| *what == Decision::Start).map(|(seq, _)| *seq));
            apply(&mut scheduler, &decisions);
            let batch = scheduler.plan();
            let chosen = three(&batch);
            let decisions = scheduler.resolve(&batch, Ok(&chosen));
            apply(&mut scheduler, &decisions);
        }
        prop_assert_eq!(started.len(), count);
        let (priority, bound) = (|seq: Seq| i64::from(priorities[seq as usize]), PLACES_A_LEVEL);
        for (at, &seq) in started.iter().enumerate() {
            let overtakers = started[..at].iter().filter(|&&other| other > seq);
            for &other in overtakers {
                let allowed = (priority(other) - priority(seq)) * bound;
                prop_assert!((other - seq) as i64 <= allowed, "{} overtook {}", other, seq);
            }
        }
    }
}

#[test]
fn a_step_mixes_decode_tokens_and_the_chunks_of_several_prompts() {
    let (pool, now) = (BlockPool::new(1000, 16), Instant::now());
    let mut scheduler = scheduler(8, 32, &pool);
    scheduler.enqueue(0, request(&pool, 1, 100));
    step(&mut scheduler, now);
    for (seq, priority) in [(1, 0), (2, 0), (3, 1), (4, 0)] {
        scheduler.enqueue(seq, SequenceRequest { priority, ..request(&pool, 10, 9) });
    }
    let decisions = scheduler.admit(now, |_| false);
    apply(&mut scheduler, &decisions);
    let items: Vec<_> = scheduler.plan().items.iter().map(|item| (item.seq, item.tokens.len())).collect();
    assert_eq!(items, [(0, 1), (3, 10), (1, 10), (2, 10), (4, 1)], "the budget is used to the last token");
}

#[test]
fn blocks_are_cached_as_they_fill() {
    let (pool, now) = (BlockPool::new(100, 16), Instant::now());
    let mut scheduler = scheduler(1, 32, &pool);
    scheduler.enqueue(0, request(&pool, 70, 40));
    let hashes = sequence_hashes(SequenceKey::new(SimulatedConfig::default().identity, CacheSalt::NONE), &[1; 70], 16);
    let cached = |tokens| {
        let lease =
            pool.try_reserve_prefix(5, Prefix { cache_salt: CacheSalt::NONE, hashes: &hashes, tokens }).unwrap();
        lease.cached_tokens()
    };
    let seen: Vec<_> = (0..3)
        .map(|_| {
            step(&mut scheduler, now);
            cached(80)
        })
        .collect();
    assert_eq!(seen, [32, 64, 64], "chunk by chunk");
    let known: Vec<u32> = [vec![1; 70], vec![3; 31]].concat();
    let hashes = sequence_hashes(SequenceKey::new(SimulatedConfig::default().identity, CacheSalt::NONE), &known, 16);
    for _ in 0..30 {
        step(&mut scheduler, now);
    }
    let lease =
        pool.try_reserve_prefix(7, Prefix { cache_salt: CacheSalt::NONE, hashes: &hashes, tokens: 101 }).unwrap();
    assert_eq!(lease.cached_tokens(), 96, "the answer's blocks follow as they fill");
}

#[test]
fn steps_without_numbers_cache_nothing() {
    // The whole prompt in a step, its second of three chunks, and its last one.
    for (step_tokens, steps_before, cached) in [(80, 0, 0), (32, 1, 2), (32, 2, 4)] {
        let (pool, now) = (BlockPool::new(100, 16), Instant::now());
        let mut scheduler = scheduler(1, step_tokens, &pool);
        scheduler.enqueue(0, request(&pool, 70, 1));
        for _ in 0..steps_before {
            step(&mut scheduler, now);
        }
        let decisions = scheduler.admit(now, |_| false);
        apply(&mut scheduler, &decisions);
        let batch = scheduler.plan();
        let decisions = scheduler.resolve(&batch, Ok(&[Chosen::NotNumbers]));
        drop(batch);
        assert!(matches!(&decisions[..], [(0, Decision::Fail(EngineError::Executor(_)))]), "{decisions:?}");
        apply(&mut scheduler, &decisions);
        assert_eq!((pool.free(), pool.cached()), (100, cached));
    }
}

#[test]
fn deadlines_count_in_the_queue_and_in_the_batch() {
    let (pool, now) = (BlockPool::new(100, 16), Instant::now());
    let mut scheduler = scheduler(1, 8, &pool);
    let later = now + Duration::from_secs(1);
    for seq in 0..3 {
        let deadline = (seq < 2).then_some(later);
        scheduler.enqueue(seq, SequenceRequest { deadline, ..request(&pool, 4, 9) });
    }
    assert_eq!(scheduler.admit(now, |_| false), [(0, Decision::Start)]);
    step(&mut scheduler, now);
    let expired = Decision::Fail(EngineError::DeadlineExceeded);
    let expected = [(0, expired.clone()), (1, expired), (2, Decision::Start)];
    assert_eq!(scheduler.admit(later, |_| false), expected);
}

#[test]
fn a_wrong_outcome_fails_the_step_and_not_the_others() {
    type Outcome = Result<Vec<Chosen>, EngineError>;
    let broken: [fn(&Batch) -> Outcome; 5] = [
        |_| Ok(Vec::new()),
        |_| Err(EngineError::Executor("broken".into())),
        |_| Ok(vec![Chosen::Nothing]),
        |batch| Ok([three(batch), three(batch)].concat()),
        |_| Ok(vec![Chosen::NotNumbers]),
    ];
    for broken in broken {
        let (pool, now) = (BlockPool::new(100, 16), Instant::now());
        let mut scheduler = scheduler(1, 8, &pool);
        scheduler.enqueue(0, request(&pool, 4, 9));
        scheduler.enqueue(1, request(&pool, 4, 9));
        let decisions = scheduler.admit(now, |_| false);
        apply(&mut scheduler, &decisions);
        let batch = scheduler.plan();
        let outcome = broken(&batch);
        let decisions = scheduler.resolve(&batch, outcome.as_deref().map_err(EngineError::clone));
        assert!(matches!(decisions[..], [(0, Decision::Fail(EngineError::Executor(_)))]), "{decisions:?}");
        apply(&mut scheduler, &decisions);
        assert_eq!((scheduler.running(), scheduler.waiting()), (0, 1));
    }
}

/// What happened to each sequence of a run on little memory.
#[derive(Default)]
struct Fates {
    preempted: BTreeMap<Seq, usize>,
    grown: BTreeMap<Seq, usize>,
    ended: BTreeSet<Seq>,
}

impl Fates {
    fn note(&mut self, decisions: &[(Seq, Decision)]) {
        for (seq, decision) in decisions {
            match decision {
                Decision::Grow => *self.grown.entry(*seq).or_default() += 1,
                Decision::Preempt => *self.preempted.entry(*seq).or_default() += 1,
                decision if decision.ends() => drop(self.ended.insert(*seq)),
                _ => {}
            }
        }
    }
}

/// Blocks that a sequence holds are its own or shared and never written; together with the free ones they are all.
fn check_blocks(scheduler: &Scheduler, pool: &BlockPool, outside: &[Arc<KvLease>]) -> Result<(), TestCaseError> {
    let leases = || scheduler.running.values().chain(scheduler.waiting.values()).map(|it| &it.request.lease);
    let held: BTreeSet<u32> = leases().chain(outside).flat_map(|lease| lease.blocks()).copied().collect();
    prop_assert_eq!(held.len() + pool.free(), pool.total(), "a block is lost");
    for lease in leases() {
        for block in &lease.blocks()[lease.read_only_tokens() / 16..] {
            let holders = leases().chain(outside).filter(|lease| lease.blocks().contains(block)).count();
            prop_assert_eq!(holders, 1, "block {} is written by one and held by another", block);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    #[test]
    fn on_little_memory_the_first_is_never_preempted_and_nobody_for_ever(
        arrivals in prop::collection::vec((1usize..60, 1u32..70, 0usize..30, -2i32..3, any::<bool>()), 1..24),
        max_running in 1usize..6, blocks in 5usize..12, transfers in prop::collection::vec((0usize..4, 1usize..40), 0..3),
    ) {
        let (pool, now) = (BlockPool::new(blocks, 16), Instant::now());
        let mut scheduler = scheduler(max_running, 24, &pool);
        let (mut fates, mut ranks, mut sampled) = (Fates::default(), BTreeMap::new(), BTreeMap::<Seq, usize>::new());
        // Blocks that transfers hold for so many steps.
        let hold = |&(n, steps): &(usize, usize)| pool.try_reserve(n).ok().map(|lease| (Arc::new(lease), steps));
        let mut transfers: Vec<_> = transfers.iter().filter_map(hold).collect();
        let mut arrivals: Vec<_> = arrivals;
        let count = arrivals.len();
        for round in 0.. {
            prop_assert!(round < 20_000, "{} of {} still wait", count - fates.ended.len(), count);
            transfers.retain(|(_, steps)| *steps > round);
            arrivals.retain(|&(len, new, at, priority, alike)| {
                let tokens = vec![if alike { 1 } else { 2 }; len];
                let hashes = sequence_hashes(SequenceKey::new(scheduler.model_digest, CacheSalt::NONE), &tokens, 16);
                let prefix = Prefix { cache_salt: CacheSalt::NONE, hashes: &hashes, tokens: len };
                let lease = (at <= round).then(|| pool.try_reserve_prefix(pool.blocks_for(len), prefix));
                let Some(Ok(lease)) = lease else { return true };
                let seq = ranks.len() as u64;
                let request = SequenceRequest {
                    id: String::new(), tokens, prompt_len: len, computed: lease.cached_tokens(), lease: Arc::new(lease),
                    max_new_tokens: new, sampling: SamplingParams::GREEDY.into(), ignore_eos: false, stop_token_ids: Vec::new(),
                    deadline: None, priority, report_layers: Vec::new(),
                };
                scheduler.enqueue(seq, request);
                ranks.insert(seq, scheduler.waiting[&seq].rank);
                false
            });
            let decisions = scheduler.admit(now, |_| false);
            scheduler.apply(&decisions);
            let present = scheduler.running.values().chain(scheduler.waiting.values()).map(|it| it.rank);
            let first = present.min().map(|rank| rank.1);
            let decisions = fit(&mut scheduler);
            prop_assert!(decisions.iter().all(|(seq, what)| *what != Decision::Preempt || Some(*seq) != first));
            fates.note(&decisions);
            let outside: Vec<_> = transfers.iter().map(|(lease, _)| Arc::clone(lease)).collect();
            check_blocks(&scheduler, &pool, &outside)?;
            let batch = scheduler.plan();
            // Only for want of blocks that are in transfers, or when the next step is for whoever got the place.
            let gave_way = decisions.iter().any(|(_, decision)| *decision == Decision::Preempt);
            let may_rest = scheduler.is_idle() || !transfers.is_empty() || gave_way;
            prop_assert!(!batch.items.is_empty() || may_rest, "nobody runs");
            for item in &batch.items {
                prop_assert!(item.start + item.tokens.len() <= item.blocks.capacity_tokens());
                prop_assert!(item.start >= item.blocks.read_only_tokens(), "a step writes where others read");
            }
            let chosen = three(&batch);
            let decisions = scheduler.resolve(&batch, Ok(&chosen));
            drop(batch);
            for (seq, decision) in &decisions {
                let Decision::Advance { sampled: new, .. } = decision else { continue };
                *sampled.entry(*seq).or_default() += new.len();
            }
            fates.note(&decisions);
            scheduler.apply(&decisions);
            if arrivals.is_empty() && scheduler.is_idle() {
                break;
            }
        }
        drop(transfers);
        prop_assert_eq!((fates.ended.len(), pool.free(), pool.total()), (count, blocks, blocks));
        for (seq, times) in &fates.preempted {
            let before = |other: &&Seq| ranks[other] < ranks[seq];
            let started = ranks.keys().filter(before).count();
            let grown = started + fates.grown.keys().filter(before).map(|other| fates.grown[other]).sum::<usize>();
            prop_assert!(*times <= grown, "{} was preempted {} times for {} blocks", seq, times, grown);
        }
        // By a block of its answer it grows once, however often it is preempted.
        for (seq, grown) in &fates.grown {
            prop_assert!(*grown <= sampled[seq].div_ceil(16), "{} took {} blocks for {} tokens", seq, grown, sampled[seq]);
        }
    }
}

#[test]
fn the_last_in_the_order_gives_way_and_comes_back_with_what_is_cached() {
    [CacheSalt::NONE, SALT].into_iter().for_each(one_gives_way);
}

const SALT: CacheSalt = CacheSalt::new([7; 16]);

fn one_gives_way(cache_salt: CacheSalt) {
    let (pool, now) = (BlockPool::new(6, 16), Instant::now());
    let mut scheduler = scheduler(4, 64, &pool);
    let with = |tokens: u32, priority| {
        let prefix = Prefix { cache_salt, ..Prefix::default() };
        let lease = Arc::new(pool.try_reserve_prefix(2, prefix).unwrap());
        SequenceRequest { tokens: vec![tokens; 32], prompt_len: 32, lease, priority, ..request(&pool, 1, 30) }
    };
    // The second is the youngest, but of the higher priority.
    scheduler.enqueue(0, with(4, 0));
    scheduler.enqueue(1, with(5, 1));
    step(&mut scheduler, now);
    let (mut told, mut cached) = (Vec::new(), 0);
    while !scheduler.is_idle() {
        let decisions = scheduler.admit(now, |_| false);
        scheduler.apply(&decisions);
        if decisions.contains(&(0, Decision::Resume)) {
            cached = scheduler.running[&0].request.computed;
        }
        told.extend(decisions);
        told.extend(fit(&mut scheduler));
        let batch = scheduler.plan();
        let chosen = three(&batch);
        let decisions = scheduler.resolve(&batch, Ok(&chosen));
        for (seq, decision) in &decisions {
            let again = matches!(decision, Decision::Advance { chunk: true, .. });
            assert!(!again, "{seq}: a chunk is told twice");
        }
        told.extend(decisions.iter().filter(|(_, decision)| decision.ends()).cloned());
        scheduler.apply(&decisions);
    }
    let ends = told.iter().map(|(seq, decision)| (*seq, Some(decision.clone()).filter(|decision| !decision.ends())));
    let (grow, preempt, resume) = (Some(Decision::Grow), Some(Decision::Preempt), Some(Decision::Resume));
    // Four blocks each in the end.
    let expected = [(1, grow.clone()), (0, grow.clone()), (0, preempt), (1, grow), (1, None), (0, resume), (0, None)];
    assert_eq!(ends.collect::<Vec<_>>(), expected);
    assert_eq!((scheduler.preemptions(), cached, pool.free()), (1, 32, 6), "the third block went to the other");
    // What it computed before and after is there for those with its salt.
    let answered: Vec<u32> = [vec![4; 32], vec![3; 30]].concat();
    for (salt, there) in [(cache_salt, 48), (CacheSalt::new([8; 16]), 0)] {
        let hashes = sequence_hashes(SequenceKey::new(SimulatedConfig::default().identity, salt), &answered, 16);
        let prefix = Prefix { cache_salt: salt, hashes: &hashes, tokens: answered.len() };
        assert_eq!(pool.try_reserve_prefix(4, prefix).unwrap().cached_tokens(), there, "{salt:?}");
    }
}
