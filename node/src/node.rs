//! The parts of a node that its services share, built once at start: who it is, what computes, what moves KV, where
//! spans go. Order matters: cheap things that can fail come before the model is loaded.
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use anyhow::{Context, ensure};
use tandem_cuda::{CudaConfig, CudaLoader};
use tandem_engine::cpu::{ModelConfig, ModelLoader};
use tandem_engine::memory::MemoryFiles;
use tandem_engine::{Engine, Executor, SchedulerConfig, SimulatedConfig, SimulatedExecutor, StepCost};
use tandem_kvtransfer::Faults;
use tandem_kvtransfer::error::TransferError;
use tandem_kvtransfer::{Arena, Transports};
use tandem_ports::{JoinGuard, Places};
use tandem_proto::v1::{self, Role};
use tandem_proto::{Incarnation, TraceState};
use tandem_telemetry::{Exporter, clock};

use crate::clock_offset::Reference;
use crate::config::{ModelSource, NodeConfig};
use crate::device::{self, Beside, Target};
use crate::figures::Figures;
use crate::handoffs::Handoffs;
use crate::processor;
use crate::trace::{SpanSink, Strays, Trace};
use crate::warm_turn::{self, WarmTurn};
use crate::work::Work;

/// A started node.
pub struct Node {
    /// What it does.
    pub role: Role,
    /// Its name.
    pub node_id: String,
    /// Computes.
    pub engine: Engine,
    /// The engine's KV memory, as the transport sees it.
    pub arena: Arc<Arena>,
    /// Moves KV.
    pub transport: Transports,
    /// Where spans go.
    pub spans: SpanSink,
    /// Calls in flight.
    pub work: Work,
    /// What became of its hand-offs.
    pub handoffs: Handoffs,
    /// Of its caches and tokens.
    pub figures: Figures,
    /// Who may call it.
    pub strangers: JoinGuard,
    /// The ports that it listens on, by name, once it does.
    pub ports: OnceLock<[(&'static str, Places); 2]>,
    /// What computes.
    pub target: Target,
    /// Tokens of an engine step at most.
    pub max_step_tokens: usize,
    max_step: Duration,
    max_running: u32,
    processor: Option<v1::Processor>,
    incarnation: Incarnation,
    reference: Mutex<Reference>,
}

/// What a node is made of, for those who bring their own: a simulation brings an engine without a thread.
pub struct Parts {
    /// See [`Node`]; so for those below.
    pub role: Role,
    /// Its name.
    pub node_id: String,
    /// Drawn by the caller.
    pub incarnation: Incarnation,
    /// Over `arena`.
    pub engine: Engine,
    /// The engine's.
    pub arena: Arc<Arena>,
    /// Over `arena`.
    pub transport: Transports,
    /// Where spans go.
    pub exporter: Exporter,
    /// With the limit of calls, and where they run.
    pub work: Work,
    /// Tokens of one of the engine's steps at most.
    pub max_step_tokens: usize,
    /// A step that takes longer hangs.
    pub max_step: Duration,
    /// Sequences that run at once, as the router is told.
    pub max_running: usize,
    /// Who may call it.
    pub strangers: JoinGuard,
    /// What computes.
    pub target: Target,
    /// The cores it computes on; `None`: none that others use.
    pub processor: Option<v1::Processor>,
}

impl Node {
    /// A node of these parts.
    pub fn of(parts: Parts) -> Arc<Self> {
        let Parts { role, node_id, incarnation, engine, arena, transport, exporter, work, .. } = parts;
        let (service, instance, strays) = (service_name(role), node_id.clone(), Strays::default());
        let spans = SpanSink { service, instance, exporter, strays };
        Arc::new(Self {
            role,
            node_id,
            engine,
            arena,
            transport,
            spans,
            work,
            handoffs: Handoffs::default(),
            figures: Figures::default(),
            strangers: parts.strangers,
            ports: OnceLock::new(),
            target: parts.target,
            max_step_tokens: parts.max_step_tokens,
            max_step: parts.max_step,
            max_running: u32::try_from(parts.max_running).unwrap_or(u32::MAX),
            processor: parts.processor,
            incarnation,
            reference: Mutex::default(),
        })
    }

    /// Loads the model, starts engine, transport and exporter. `faults` are the transport's, for demonstrations.
    ///
    /// # Errors
    /// The model cannot be served, the asked-for transport is not there, or the OTLP endpoint is no URL.
    pub async fn start(config: &NodeConfig, faults: Faults) -> anyhow::Result<Arc<Self>> {
        let open = |arena| config.kv_transport.start(&arena, config.credentials.join.as_ref(), faults);
        Self::start_with(config, open).await
    }

    /// As [`Node::start`], over the transport that `open` gives: nodes of one process can share a `MemNetwork`.
    ///
    /// # Errors
    /// The model cannot be served, `open` fails, or the OTLP endpoint is no URL.
    pub async fn start_with<T: Into<Transports>>(
        config: &NodeConfig,
        open: impl FnOnce(Arc<Arena>) -> Result<T, TransferError>,
    ) -> anyhow::Result<Arc<Self>> {
        if config.clock_offset_ms != 0 {
            clock::shift(i64::from(config.clock_offset_ms) * 1_000_000);
        }
        let incarnation = Incarnation::random(&mut rand::rng());
        let node_id = config.node_id.clone().unwrap_or_else(|| {
            let short = &incarnation.to_string()[..8];
            format!("{}-{short}", role_name(config.role))
        });
        let service = service_name(config.role);
        let exporter = Exporter::start(service, &node_id, &config.collector)?;
        let loading = config.clone();
        let loaded = tokio::task::spawn_blocking(move || {
            let beside = Beside { isa: loading.isa, arithmetic: loading.arithmetic, kv_dtype: loading.kv_dtype };
            let target = device::choose(loading.device, beside)?;
            anyhow::Ok((target, load(&loading, target)?))
        });
        let (target, executor) = loaded.await.context("loading the model")??;
        // Who simulates its steps sleeps; who computes on a GPU leaves the cores to others.
        let processor = match (&config.model, target) {
            (ModelSource::File(_), Target::Cpu) => {
                processor::this(config.threads, &config.cpus, config.lending.as_ref())
            }
            _ => None,
        };
        let engine = Engine::start(executor, scheduler(config));
        let spec = engine.spec();
        tracing::info!(
            model = spec.model_name,
            arithmetic = spec.arithmetic.name(),
            kv_order = spec.kv_order.name(),
            block_tokens = spec.block_tokens,
            digest = format_args!("{:016x}", spec.compatibility_digest),
            "nodes that differ in one of these are not paired"
        );
        if config.warm_up {
            warm_up(&engine, config, target).await?;
        }
        let arena = Arena::new(engine.memory(), engine.spec().block_bytes, engine.spec().layers);
        let transport = open(arena.clone()).context("no KV transport")?.into();
        Ok(Self::of(Parts {
            role: config.role,
            node_id,
            engine,
            arena,
            transport,
            exporter,
            work: Work::new(config.max_calls),
            max_step_tokens: config.max_step_tokens,
            max_step: config.max_step,
            max_running: config.max_running,
            strangers: config.credentials.guard(),
            target,
            processor,
            incarnation,
        }))
    }

    /// Whose clock counts.
    pub(crate) fn reference(&self) -> MutexGuard<'_, Reference> {
        self.reference.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drawn at start: a restarted node is another node. Hand-offs of KV name it.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// Why the process cannot go on: without engine or KV transport it has to leave, and its supervisor to start it
    /// again. `None`: it works.
    pub fn failed(&self) -> Option<String> {
        let engine = self.engine.stopped().map(|reason| format!("the engine has stopped: {reason}"));
        let hangs = self.engine.step_age().filter(|age| *age > self.max_step);
        let hangs = || hangs.map(|age| format!("a step of the engine takes longer than --max-step-ms: {age:.1?}"));
        let transport = || self.transport.failed().map(|reason| format!("the KV transport has failed: {reason}"));
        engine.or_else(hangs).or_else(transport)
    }

    /// The spans of a new request, whose trace others say this of.
    pub fn trace(&self, state: &TraceState) -> Trace {
        Trace::new(self.spans.clone(), state.clone())
    }

    /// What a router is told first, without the life.
    pub fn registration(&self, endpoint: String) -> v1::Register {
        let spec = self.engine.spec();
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        v1::Register {
            node_id: self.node_id.clone(),
            role: self.role.into(),
            incarnation: self.incarnation().0,
            compatibility_digest: spec.compatibility_digest,
            protocol: tandem_proto::PROTOCOL_VERSION,
            model_digest: spec.model_digest,
            model_name: spec.model_name.clone(),
            endpoint,
            transports: self.transport.infos(),
            total_blocks: count(spec.total_blocks),
            block_tokens: count(spec.block_tokens),
            max_context_tokens: count(spec.max_context_tokens),
            max_running: self.max_running,
            eos_token_id: spec.eos_token_id,
            max_batched_tokens: count(self.max_step_tokens),
            processor: self.processor,
            arithmetic: spec.arithmetic.name().to_owned(),
            kv_order: spec.kv_order.name().to_owned(),
            ..v1::Register::default()
        }
    }

    /// The present load. A call that waits for KV blocks or for its peer counts as waiting. Whose calls they are is for
    /// a session to say.
    pub fn load(&self) -> v1::Load {
        let load = self.engine.load();
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        v1::Load {
            running: count(load.running),
            waiting: count(self.work.in_flight().saturating_sub(load.running)),
            queued_tokens: load.queued_tokens as u64,
            free_blocks: count(load.free_blocks),
            running_tokens: load.running_tokens as u64,
            cached_blocks: count(load.cached_blocks),
            step_cost: Some(step_cost(load.step_cost)),
            preemptions: self.figures.preemptions.get() + load.preemptions,
            ..v1::Load::default()
        }
    }
}

fn step_cost(cost: StepCost) -> v1::StepCost {
    v1::StepCost {
        base_ms: cost.base_ms,
        token_ms: cost.token_ms,
        context_ms: cost.context_ms,
        decode_token_ms: Some(cost.decode_token_ms),
        decode_context_ms: Some(cost.decode_context_ms),
    }
}

/// "prefill" or "decode".
pub fn role_name(role: Role) -> &'static str {
    match role {
        Role::Prefill => "prefill",
        Role::Decode => "decode",
        Role::Unspecified => "node",
    }
}

/// `service.name` of a role's spans.
pub fn service_name(role: Role) -> &'static str {
    match role {
        Role::Prefill => "tandem-prefill",
        Role::Decode => "tandem-decode",
        Role::Unspecified => "tandem-node",
    }
}

fn load(config: &NodeConfig, target: Target) -> anyhow::Result<Box<dyn Executor>> {
    let machine = MemoryFiles::default();
    match (&config.model, target) {
        (ModelSource::File(path), Target::Cuda(device)) => load_on_gpu(config, path, device),
        (ModelSource::File(path), Target::Cpu) => {
            let (loader, blocks) = open(config, path, &machine)?;
            Ok(Box::new(loader.load(blocks, &machine)?))
        }
        (ModelSource::Simulated { in_place_of, step, token, context }, _) => {
            let like = in_place_of.as_deref().map(SimulatedConfig::in_place_of).transpose()?.unwrap_or_default();
            let like = like.with_block_tokens(config.block_tokens);
            let blocks = config.kv_memory.blocks(like.block_bytes, machine.total())?;
            let (step_delay, token_delay, context_delay) = (*step, *token, *context);
            let simulated = SimulatedConfig { blocks, step_delay, token_delay, context_delay, ..like };
            Ok(Box::new(SimulatedExecutor::new(&simulated)?))
        }
    }
}

/// The model with its headers read, and the blocks of its arena.
pub(crate) fn open(config: &NodeConfig, path: &Path, machine: &MemoryFiles) -> anyhow::Result<(ModelLoader, usize)> {
    let loader = ModelLoader::open(&model_of(config, path))?;
    // Before its arena is sized: a model that is too large alone is what must be said.
    loader.check(0, machine)?;
    let left = machine.total().map(|total| loader.footprint().left_for_kv(total));
    let blocks = config.kv_memory.blocks(loader.block_bytes(), left)?;
    loader.check(blocks, machine)?;
    Ok((loader, blocks))
}

/// How the CPU is to hold a model.
pub(crate) fn model_of(config: &NodeConfig, path: &Path) -> ModelConfig {
    ModelConfig {
        path: path.to_owned(),
        kv_dtype: config.kv_dtype,
        block_tokens: config.block_tokens,
        max_step_tokens: config.max_step_tokens,
        max_running: config.max_running,
        threads: config.threads,
        cpus: config.cpus.clone(),
        lending: config.lending.clone(),
        isa: config.isa,
        arithmetic: config.arithmetic,
        ..ModelConfig::default()
    }
}

fn load_on_gpu(config: &NodeConfig, path: &Path, device: u32) -> anyhow::Result<Box<dyn Executor>> {
    let loader = CudaLoader::open(&CudaConfig {
        path: path.to_owned(),
        device,
        kv_dtype: config.kv_dtype,
        block_tokens: config.block_tokens,
        max_step_tokens: config.max_step_tokens,
        max_running: config.max_running,
        ..CudaConfig::default()
    })?;
    tracing::info!(device = %loader.device(), "this node computes on a GPU");
    // Before its arena is sized: a model that is too large alone is what must be said.
    loader.check(0)?;
    let blocks = config.kv_memory.blocks(loader.block_bytes(), Some(loader.left_for_kv()?))?;
    ensure!(blocks > 0, "a KV arena has one block at least");
    Ok(Box::new(loader.load(blocks)?))
}

/// In turn with the nodes that share its cores, if steps cost these anything. One that borrows cores computes on all of
/// them while the others are idle, and learns what its steps take then.
async fn warm_up(engine: &Engine, config: &NodeConfig, target: Target) -> anyhow::Result<()> {
    let computes = matches!(config.model, ModelSource::File(_)) && target == Target::Cpu;
    let turn = match computes {
        true => {
            let cores = processor::core_numbers(&config.cpus);
            let wanted = if config.lending.is_some() { cores.len() } else { config.threads };
            Some(WarmTurn::take(&WarmTurn::file(), &cores, wanted, warm_turn::PATIENCE).await)
        }
        false => None,
    };
    let warming = clock::now();
    engine.warm_up(config.max_step_tokens).await.context("the first steps of the model")?;
    let took_ms = clock::now().saturating_duration_since(warming).as_millis() as u64;
    let alone = turn.is_some_and(|turn| turn.is_alone());
    tracing::info!(took_ms, alone, "warm: the first steps are done");
    Ok(())
}

fn scheduler(config: &NodeConfig) -> SchedulerConfig {
    SchedulerConfig {
        max_running: config.max_running,
        max_step_tokens: config.max_step_tokens,
        inbox: config.max_calls,
        prefix_caching: config.prefix_caching,
        speculate: config.speculate,
    }
}
