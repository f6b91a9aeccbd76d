//! Scheduler, pool and executor without threads or clock: thousands of requests on tiny KV memory, with shared
//! beginnings, priorities, cancels and failing steps, from one seed. Every answer must equal that of the request run
//! alone.
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tandem_engine::scheduler::{Decision, Scheduler};
use tandem_engine::{
    BlockPool, Drafts, EngineError, Executor, KvLease, Prefix, SamplingParams, SchedulerConfig, SequenceRequest,
    SimulatedConfig, SimulatedExecutor, Speculate, StepModel, StepShape, Tokens,
};
use tandem_proto::hash::sequence_hashes;
use tandem_proto::{CacheSalt, SequenceKey};

use crate::support::{greedy, request_in, seeded};

const LIMITS: SchedulerConfig =
    SchedulerConfig { max_running: 6, max_step_tokens: 24, inbox: 0, prefix_caching: true, speculate: Speculate::Off };

#[derive(Clone)]
struct Job {
    prompt: Vec<u32>,
    max_new_tokens: usize,
    sampling: Arc<SamplingParams>,
    priority: i32,
    /// Whether the end-of-sequence token ends it.
    ends: bool,
    /// Steps from arrival after which its caller leaves.
    patience: Option<usize>,
}

impl Job {
    /// One of four families of prompts that begin alike.
    fn random(rng: &mut StdRng) -> Self {
        let (family, shared, own) = (rng.random_range(0..4u32), rng.random_range(0..70), rng.random_range(1..20));
        let shared = (0..shared).map(|i| (i * 7 + family) % 64);
        Self {
            prompt: shared.chain((0..own).map(|_| rng.random_range(0..64))).collect(),
            max_new_tokens: rng.random_range(1..14),
            sampling: Arc::new(random_sampling(rng)),
            priority: rng.random_range(-2..=2),
            ends: false,
            patience: rng.random_bool(0.2).then(|| rng.random_range(0..60)),
        }
    }

    /// As [`Job::random`], with answers that are long beside the memory: some longer than it.
    fn long(rng: &mut StdRng) -> Self {
        let longest = if rng.random_bool(0.05) { 250 } else { 90 };
        Self {
            max_new_tokens: rng.random_range(1..longest),
            patience: rng.random_bool(0.1).then(|| rng.random_range(0..200)),
            ..Self::random(rng)
        }
    }

    /// As [`Job::long`], with ends in mid-answer, and tokens that must not be one yet.
    fn ending(rng: &mut StdRng) -> Self {
        let job = Self::long(rng);
        let sampling = SamplingParams {
            min_tokens: rng.random_range(0..30),
            logit_bias: if rng.random_bool(0.3) { vec![(2, 1.5), (1, -4.0)] } else { Vec::new() },
            top_logprobs: rng.random_range(0..3),
            ..(*job.sampling).clone()
        };
        Self { sampling: Arc::new(sampling), ends: rng.random_bool(0.7), ..job }
    }
}

/// A third of them penalized: their tokens hang on all before.
fn random_sampling(rng: &mut StdRng) -> SamplingParams {
    match rng.random_range(0..3) {
        0 => greedy(),
        1 => seeded(rng.random()),
        _ => SamplingParams { repetition_penalty: 1.4, frequency_penalty: 0.8, ..seeded(rng.random()) },
    }
}

type Reserving = Pin<Box<dyn Future<Output = Result<KvLease, EngineError>>>>;

enum Stage {
    Reserving(Reserving),
    Submitted,
    Answered,
    Left,
}

struct Caller {
    job: Job,
    answer: Vec<u32>,
    arrived: usize,
    stage: Stage,
}

/// What one run saw, so that a test can tell that it tested something.
#[derive(Default)]
struct Seen {
    cached_tokens: usize,
    failed_steps: usize,
    left: usize,
    preemptions: usize,
    cut_by_memory: usize,
    last_tokens: usize,
    drafts: Drafts,
}

struct Machine {
    scheduler: Scheduler,
    executor: SimulatedExecutor,
    pool: BlockPool,
    callers: Vec<Caller>,
    /// Which caller a sequence is of.
    sequences: BTreeMap<u64, usize>,
    next_seq: u64,
    round: usize,
    now: Instant,
    seen: Seen,
}

impl Machine {
    /// One with `company` shares what it can, and guesses.
    fn new(load: &Load, blocks: usize, block_tokens: usize, company: bool) -> Self {
        let config = SimulatedConfig {
            vocab_size: load.vocabulary,
            eos_token_id: 1,
            max_context_tokens: 256,
            block_bytes: 128,
            layers: 1,
            blocks,
            ..Default::default()
        };
        let config = config.with_block_tokens(block_tokens);
        let executor = SimulatedExecutor::new(&config).expect("a valid configuration");
        let pool = BlockPool::with_prefix_caching(blocks, executor.spec().block_tokens, company);
        let speculate = if company { load.speculate } else { Speculate::Off };
        Self {
            scheduler: Scheduler::new(&SchedulerConfig { speculate, ..LIMITS }, executor.spec(), pool.clone()),
            pool,
            executor,
            callers: Vec::new(),
            sequences: BTreeMap::new(),
            next_seq: 0,
            round: 0,
            now: Instant::now(),
            seen: Seen::default(),
        }
    }

    fn arrive(&mut self, job: Job) {
        let stage = Stage::Reserving(self.reserving(&job, &[]));
        self.callers.push(Caller { job, answer: Vec::new(), arrived: self.round, stage });
    }

    /// As a node reserves: what is known and the next token, with the hashes of what is known.
    fn reserving(&self, job: &Job, answer: &[u32]) -> Reserving {
        let (pool, known) = (self.pool.clone(), [&job.prompt[..], answer].concat());
        let hashes = sequence_hashes(
            SequenceKey::new(self.executor.spec().model_digest, CacheSalt::NONE),
            &known,
            pool.block_tokens(),
        );
        let more = usize::from(job.max_new_tokens > answer.len() + 1);
        let blocks = pool.blocks_for(known.len() + more).min(pool.total());
        Box::pin(async move {
            pool.reserve_prefix(blocks, Prefix { cache_salt: CacheSalt::NONE, hashes: &hashes, tokens: known.len() })
                .await
        })
    }

    fn step(&mut self, fails: bool, mut watch: impl FnMut(StepShape)) {
        self.round += 1;
        self.take_leases();
        let (callers, sequences, round) = (&self.callers, &self.sequences, self.round);
        let gone = |seq| callers[sequences[&seq]].is_gone(round);
        let decisions = self.scheduler.admit(self.now, gone);
        self.apply(decisions);
        loop {
            let decisions = self.scheduler.fit();
            if decisions.is_empty() {
                break;
            }
            self.apply(decisions);
        }
        let batch = self.scheduler.plan();
        if batch.items.is_empty() {
            return;
        }
        watch(StepShape::of(&batch));
        self.seen.last_tokens += batch.items.iter().filter(|item| item.tokens == Tokens::Last).count();
        let mut outcome = self.executor.begin(&batch).and_then(|()| self.executor.finish(&mut |_| {}));
        if fails {
            self.seen.failed_steps += 1;
            // The work is done when it fails: what it wrote must not be used.
            outcome = Err(EngineError::Executor("told to fail".into()));
        }
        let decisions = self.scheduler.resolve(&batch, outcome);
        drop(batch);
        self.apply(decisions);
    }

    fn take_leases(&mut self) {
        let mut context = Context::from_waker(Waker::noop());
        for id in 0..self.callers.len() {
            let caller = &mut self.callers[id];
            let gone = caller.is_gone(self.round);
            let Stage::Reserving(reserving) = &mut caller.stage else { continue };
            if gone {
                caller.stage = Stage::Left;
                self.seen.left += 1;
            } else if let Poll::Ready(lease) = reserving.as_mut().poll(&mut context) {
                let lease = lease.expect("fits the pool");
                caller.stage = Stage::Submitted;
                let request = caller.request(lease);
                self.seen.cached_tokens += request.computed;
                self.sequences.insert(self.next_seq, id);
                self.scheduler.enqueue(self.next_seq, request);
                self.next_seq += 1;
            }
        }
    }

    fn apply(&mut self, decisions: Vec<(u64, Decision)>) {
        self.scheduler.apply(&decisions);
        for (seq, decision) in decisions {
            let id = self.sequences[&seq];
            match &decision {
                Decision::Advance { sampled, drafts, finish, .. } => {
                    self.seen.drafts += *drafts;
                    let caller = &mut self.callers[id];
                    caller.answer.extend(sampled.iter().map(|sampled| sampled.token));
                    if finish.is_some() {
                        caller.stage = Stage::Answered;
                    }
                }
                Decision::Cancel => {
                    self.callers[id].stage = Stage::Left;
                    self.seen.left += 1;
                }
                // It goes on as a router would let it: with the tokens so far, on blocks of its own.
                Decision::Fail(_) => {
                    let reserving = self.reserving(&self.callers[id].job, &self.callers[id].answer);
                    self.callers[id].stage = Stage::Reserving(reserving);
                }
                Decision::Preempt => self.seen.preemptions += 1,
                Decision::Start | Decision::Grow | Decision::Resume => {}
            }
            if decision.ends() || decision == Decision::Preempt {
                self.executor.forget(seq);
            }
            if decision.ends() {
                self.sequences.remove(&seq);
            }
        }
    }

    fn busy(&self) -> bool {
        self.callers.iter().any(|caller| matches!(caller.stage, Stage::Reserving(_) | Stage::Submitted))
    }
}

impl Caller {
    fn is_gone(&self, round: usize) -> bool {
        self.job.patience.is_some_and(|patience| round > self.arrived + patience)
    }

    fn request(&self, lease: KvLease) -> SequenceRequest {
        let tokens = [&self.job.prompt[..], &self.answer[..]].concat();
        let left = self.job.max_new_tokens - self.answer.len();
        SequenceRequest {
            computed: lease.cached_tokens(),
            prompt_len: self.job.prompt.len(),
            sampling: self.job.sampling.clone(),
            priority: self.job.priority,
            ignore_eos: !self.job.ends,
            ..request_in(Arc::new(lease), tokens, left as u32)
        }
    }
}

/// The answer without company, cache or failure, on as much memory.
fn alone(job: &Job, load: &Load, blocks: usize, block_tokens: usize) -> Vec<u32> {
    let mut machine = Machine::new(load, blocks, block_tokens, false);
    machine.arrive(Job { patience: None, ..job.clone() });
    while machine.busy() {
        machine.step(false, |_| {});
    }
    machine.callers.remove(0).answer
}

/// A kind of load: so much memory, and who comes.
struct Load {
    kv_tokens: usize,
    job: fn(&mut StdRng) -> Job,
    vocabulary: usize,
    speculate: Speculate,
}

impl Load {
    fn job(&self, rng: &mut StdRng) -> Job {
        let mut job = (self.job)(rng);
        job.prompt.iter_mut().for_each(|token| *token %= self.vocabulary as u32);
        job
    }
}

fn stress(seed: u64, requests: usize, load: &Load) -> Seen {
    let mut rng = StdRng::seed_from_u64(seed);
    // The same memory in larger blocks every other time.
    let block_tokens = if seed.is_multiple_of(2) { 16 } else { 32 };
    let blocks = load.kv_tokens / block_tokens;
    let mut machine = Machine::new(load, blocks, block_tokens, true);
    let mut to_come = requests;
    let mut idle_rounds = 0;
    while to_come > 0 || machine.busy() {
        for _ in 0..rng.random_range(0..4).min(to_come) {
            machine.arrive(load.job(&mut rng));
            to_come -= 1;
        }
        let mut worked = false;
        machine.step(rng.random_bool(0.005), |_| worked = true);
        // Whoever waits for blocks gets them from those who run: without those, nobody waits.
        idle_rounds = if worked || !machine.busy() { 0 } else { idle_rounds + 1 };
        assert!(idle_rounds < 3, "seed {seed}: everybody waits and nobody runs");
        // A step computes a token at least, but for the few that fail.
        assert!(machine.round < requests * 300, "seed {seed}: {} of {requests} still wait", machine.sequences.len());
    }
    for (id, caller) in machine.callers.iter().enumerate() {
        let whole = alone(&caller.job, load, blocks, block_tokens);
        match caller.stage {
            Stage::Answered => assert_eq!(caller.answer, whole, "seed {seed}, request {id}"),
            Stage::Left => assert!(whole.starts_with(&caller.answer), "seed {seed}, request {id}"),
            Stage::Reserving(_) | Stage::Submitted => panic!("seed {seed}: request {id} starves"),
        }
        assert!(caller.job.patience.is_some() || matches!(caller.stage, Stage::Answered), "seed {seed}: {id} was lost");
        let full = caller.job.prompt.len() + whole.len() == load.kv_tokens + 1;
        machine.seen.cut_by_memory += usize::from(full && whole.len() < caller.job.max_new_tokens);
    }
    assert!(machine.scheduler.is_idle());
    assert_eq!(machine.pool.free(), machine.pool.total(), "seed {seed}: blocks are lost");
    assert_eq!(machine.executor.slots(), 0, "seed {seed}: slots are lost");
    machine.seen
}

#[test]
fn a_thousand_requests_on_tiny_memory_over_a_hundred_seeds() {
    let begin = Instant::now();
    let load = Load { kv_tokens: 24 * 16, job: Job::random, vocabulary: 64, speculate: Speculate::Off };
    let all: Vec<Seen> = (0..100).map(|seed| stress(seed, 1000, &load)).collect();
    let total = |count: fn(&Seen) -> usize| all.iter().map(count).sum::<usize>();
    let (cached, failed, left) = (total(|s| s.cached_tokens), total(|s| s.failed_steps), total(|s| s.left));
    println!("{cached} tokens from the cache, {failed} failed steps, {left} left early, {:?}", begin.elapsed());
    assert!(total(|s| s.last_tokens) > 100_000);
    assert!(cached > 100_000 && failed > 300 && left > 1000, "{cached} {failed} {left}");
}

#[test]
fn long_answers_on_tiny_memory_over_a_hundred_seeds() {
    let begin = Instant::now();
    let load = Load { kv_tokens: 12 * 16, job: Job::long, vocabulary: 64, speculate: Speculate::Off };
    let all: Vec<Seen> = (0..100).map(|seed| stress(seed, 150, &load)).collect();
    let total = |count: fn(&Seen) -> usize| all.iter().map(count).sum::<usize>();
    let (preemptions, left) = (total(|s| s.preemptions), total(|s| s.left));
    let (failed, cut) = (total(|s| s.failed_steps), total(|s| s.cut_by_memory));
    println!("{preemptions} preemptions, {failed} failed steps, {left} left early, {cut} cut, {:?}", begin.elapsed());
    assert!(preemptions > 1000 && failed > 300 && left > 300 && cut > 20, "{preemptions} {failed} {left} {cut}");
}

#[test]
fn drafts_change_no_answer_on_tiny_memory_over_sixty_seeds() {
    let begin = Instant::now();
    let (mut drafts, mut preemptions, mut cached) = (Drafts::default(), 0, 0);
    // Of four tokens many a draft comes true by chance.
    for (vocabulary, kv_tokens) in [(4, 12 * 16), (4, 24 * 16), (9, 12 * 16)] {
        let load = Load { kv_tokens, job: Job::ending, vocabulary, speculate: Speculate::Ngram };
        for seed in 0..20 {
            let seen = stress(seed, 150, &load);
            drafts += seen.drafts;
            preemptions += seen.preemptions;
            cached += seen.cached_tokens;
        }
    }
    println!("{drafts:?}, {preemptions} preemptions, {cached} tokens from the cache, {:?}", begin.elapsed());
    assert!(drafts.accepted > 10_000 && drafts.drafted > 2 * drafts.accepted, "{drafts:?}");
    assert!(preemptions > 100 && cached > 5000, "{preemptions} {cached}");
}

#[test]
fn the_step_model_finds_the_simulated_cost() {
    let law = SimulatedConfig {
        step_delay: Duration::from_micros(5000),
        token_delay: Duration::from_micros(230),
        context_delay: Duration::from_nanos(900),
        ..Default::default()
    };
    let ms = |shape| law.step_time(shape).as_secs_f64() * 1e3;
    let load = Load { kv_tokens: 64 * 16, job: Job::random, vocabulary: 64, speculate: Speculate::Off };
    let (mut rng, mut machine, mut model) =
        (StdRng::seed_from_u64(9), Machine::new(&load, 64, 16, true), StepModel::default());
    let (mut errors, mut shapes) = (Vec::new(), BTreeSet::new());
    for _ in 0..600 {
        if rng.random_bool(0.3) {
            machine.arrive(Job::random(&mut rng));
        }
        machine.step(false, |shape| {
            errors.push((model.cost().predict_ms(shape) / ms(shape) - 1.0).abs());
            shapes.insert((shape.tokens(), shape.context()));
            model.observe(shape, ms(shape));
        });
    }
    let mut late = errors.split_off(50);
    late.sort_unstable_by(f64::total_cmp);
    assert!(shapes.len() > 100, "the workload is mixed");
    assert!(late[late.len() / 2] < 0.001 && late[late.len() - 1] < 0.05, "{:?}, law {law:?}", model.cost());
}
