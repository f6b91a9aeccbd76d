//! Builders and an executor that the test steps by hand.
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc as blocking;
use std::time::Duration;

use tandem_engine::{
    Batch, Chosen, Engine, EngineError, EngineSpec, Executor, FinishReason, KvLease, LayersDone, SamplingParams,
    SchedulerConfig, Seq, SequenceEvent, SequenceRequest, SequenceStream, SimulatedConfig, SimulatedExecutor,
    Speculate,
};
use tandem_memory::KvMemory;
use tokio::sync::mpsc;

pub const LIMITS: SchedulerConfig =
    SchedulerConfig { max_running: 8, max_step_tokens: 64, inbox: 64, prefix_caching: true, speculate: Speculate::Off };

pub fn greedy() -> SamplingParams {
    SamplingParams::GREEDY
}

pub fn seeded(seed: u64) -> SamplingParams {
    SamplingParams { temperature: 1.0, top_p: 0.95, seed, ..SamplingParams::GREEDY }
}

pub fn simulated(blocks: usize) -> Box<SimulatedExecutor> {
    simulated_blocks_of(16, blocks)
}

pub fn simulated_blocks_of(block_tokens: usize, blocks: usize) -> Box<SimulatedExecutor> {
    simulated_by(SimulatedConfig { blocks, ..small_model() }.with_block_tokens(block_tokens))
}

pub fn simulated_by(config: SimulatedConfig) -> Box<SimulatedExecutor> {
    Box::new(SimulatedExecutor::new(&config).expect("a valid configuration"))
}

pub fn small_model() -> SimulatedConfig {
    SimulatedConfig { max_context_tokens: 512, block_bytes: 256, layers: 2, ..Default::default() }
}

pub fn engine(config: SchedulerConfig) -> Engine {
    Engine::start(simulated(64), config)
}

pub fn prompt(len: usize, salt: u32) -> Vec<u32> {
    (0..len as u32).map(|i| (i * 37 + salt * 101 + 5) % 1024).collect()
}

/// A local-role request with a lease of its own.
pub fn request(engine: &Engine, tokens: Vec<u32>, max_new_tokens: u32) -> SequenceRequest {
    let blocks = engine.pool().blocks_for(tokens.len() + max_new_tokens as usize);
    let lease = engine.pool().try_reserve(blocks).expect("room in the test's pool");
    request_in(Arc::new(lease), tokens, max_new_tokens)
}

pub fn request_in(lease: Arc<KvLease>, tokens: Vec<u32>, max_new_tokens: u32) -> SequenceRequest {
    SequenceRequest {
        id: "test".into(),
        prompt_len: tokens.len(),
        tokens,
        computed: 0,
        lease,
        max_new_tokens,
        sampling: greedy().into(),
        ignore_eos: true,
        stop_token_ids: Vec::new(),
        deadline: None,
        priority: 0,
        report_layers: Vec::new(),
    }
}

/// A hang fails the test instead of stopping the run.
pub async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), future).await.expect("hangs")
}

/// The stream's tokens and its last event.
pub async fn collect(mut stream: SequenceStream) -> (Vec<u32>, SequenceEvent) {
    let mut tokens = Vec::new();
    loop {
        match within(stream.next()).await.expect("an end") {
            SequenceEvent::Token { id, .. } => tokens.push(id),
            event if event.is_last() => return (tokens, event),
            _ => {}
        }
    }
}

/// The tokens of a request that must finish.
pub async fn generate(engine: &Engine, request: SequenceRequest) -> Vec<u32> {
    let (tokens, end) = collect(engine.submit(request).expect("a valid request")).await;
    assert!(matches!(end, SequenceEvent::Finished { .. }), "{end:?}");
    tokens
}

pub fn finished(event: &SequenceEvent) -> Option<FinishReason> {
    match event {
        SequenceEvent::Finished { reason, .. } => Some(*reason),
        _ => None,
    }
}

/// Waits until every block is free.
pub async fn all_blocks_back(engine: &Engine) {
    let all = within(engine.pool().reserve(engine.pool().total())).await.expect("the pool's size");
    drop(all);
    assert_eq!(engine.pool().free(), engine.pool().total());
}

/// What the test tells a gated executor to do with its next step.
pub enum Go {
    Run,
    Fail,
    /// The device is gone with it.
    Lose,
    Panic,
}

/// Ends steps when told to, refuses one when told to, and reports each step's sequences as it is to begin. Runs freely
/// once the gate is dropped.
pub struct Gated {
    inner: Box<SimulatedExecutor>,
    go: blocking::Receiver<Go>,
    refuse: Arc<AtomicBool>,
    steps: mpsc::UnboundedSender<Vec<u64>>,
}

pub struct Gate {
    go: blocking::Sender<Go>,
    refuse: Arc<AtomicBool>,
    steps: mpsc::UnboundedReceiver<Vec<u64>>,
}

pub fn gated(config: SchedulerConfig) -> (Engine, Gate) {
    gated_under_way(config, 1)
}

/// With so many steps under way at a time.
pub fn gated_under_way(config: SchedulerConfig, under_way: usize) -> (Engine, Gate) {
    let (go, go_receiver) = blocking::channel();
    let (steps_sender, steps) = mpsc::unbounded_channel();
    let inner = simulated_by(SimulatedConfig { blocks: 64, under_way, ..small_model() });
    let refuse = Arc::new(AtomicBool::new(false));
    let executor = Gated { inner, go: go_receiver, refuse: Arc::clone(&refuse), steps: steps_sender };
    (Engine::start(Box::new(executor), config), Gate { go, refuse, steps })
}

impl Gate {
    /// Waits until a step stands at the gate; gives its sequences.
    pub async fn step(&mut self) -> Vec<u64> {
        within(self.steps.recv()).await.expect("a step")
    }

    /// Whether no further step has begun.
    pub fn is_quiet(&mut self) -> bool {
        self.steps.try_recv().is_err()
    }

    pub fn go(&self, go: Go) {
        self.go.send(go).expect("the engine lives");
    }

    /// The next step that would begin cannot.
    pub fn refuse_next(&self) {
        self.refuse.store(true, Ordering::SeqCst);
    }
}

impl Executor for Gated {
    fn spec(&self) -> &EngineSpec {
        self.inner.spec()
    }

    fn memory(&self) -> Arc<dyn KvMemory> {
        self.inner.memory()
    }

    fn most_under_way(&self) -> usize {
        self.inner.most_under_way()
    }

    fn begin(&mut self, batch: &Batch) -> Result<(), EngineError> {
        // Before the report: who has it refuses a later one.
        let refused = self.refuse.swap(false, Ordering::SeqCst);
        let _ = self.steps.send(batch.items.iter().map(|item| item.seq).collect());
        if refused {
            return Err(EngineError::Executor("told not to begin".into()));
        }
        self.inner.begin(batch)
    }

    fn finish(&mut self, layers_done: &mut LayersDone<'_>) -> Result<&[Chosen], EngineError> {
        match self.go.recv().unwrap_or(Go::Run) {
            Go::Run => self.inner.finish(layers_done),
            Go::Fail => {
                self.inner.finish(layers_done)?;
                Err(EngineError::Executor("told to fail".into()))
            }
            Go::Lose => Err(EngineError::DeviceLost("told to be gone".into())),
            Go::Panic => panic!("told to panic"),
        }
    }

    fn forget(&mut self, seq: Seq) {
        self.inner.forget(seq);
    }
}
