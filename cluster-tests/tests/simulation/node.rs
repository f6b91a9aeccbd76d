//! One process of a simulated node: the real node with the real services and the real membership stream, over an engine
//! that steps in virtual time. How it lives and dies; what it is asked is the router's matter.
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use tandem_engine::{Engine, SchedulerConfig, SimulatedExecutor, Speculate};
use tandem_kvtransfer::Arena;
use tandem_kvtransfer::mem::{MemFaults, MemNetwork, MemTransport};
use tandem_node::JoinGuard;
use tandem_node::Node;
use tandem_node::device::Target;
use tandem_node::membership::{self, RouterWay};
use tandem_node::node::Parts;
use tandem_node::tasks::Tasks;
use tandem_node::work::Work;
use tandem_prefill_node::settings::Settings;
use tandem_proto::Incarnation;
use tandem_proto::v1::Role;
use tandem_router::text::ModelText;
use tandem_telemetry::Exporter;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::service::Routes;

use crate::channel::{self, Calls, Link};
use crate::data_plane::DataPlane;
use crate::model;
use crate::process::Process;
use crate::router::RouterProcess;
use crate::schedule::{NodeName, Schedule};

/// Silence in a hand-off after which decode gives it up.
pub const HANDOFF_LEASE: Duration = Duration::from_millis(1500);
/// How long a computed prompt waits for another ticket.
pub const REDELIVER_WAIT: Duration = Duration::from_millis(1500);
/// As a node process's.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// Calls at once.
pub const MAX_CALLS: usize = 64;
/// Tasks of a node without work: its engine and its membership.
pub const IDLE_TASKS: usize = 2;

/// What all nodes of a run share.
#[derive(Clone)]
pub struct Surroundings {
    pub text: Arc<ModelText>,
    pub network: MemNetwork,
    pub data_plane: DataPlane,
    /// The router's present process.
    pub router: Arc<Mutex<Option<Arc<RouterProcess>>>>,
}

/// A running node.
pub struct NodeProcess {
    pub name: NodeName,
    pub process: Process,
    pub node: Arc<Node>,
    pub transport: Arc<MemTransport>,
    routes: Routes,
    link: Link,
    stop: CancellationToken,
}

impl NodeProcess {
    /// Starts the node's life number `life`; the router reaches it over `link`.
    pub fn start(name: NodeName, life: u64, schedule: &Schedule, around: &Surroundings, link: Link) -> Arc<Self> {
        let process = Process::default();
        let config = model::engine(&around.text, schedule.blocks(name));
        let executor = SimulatedExecutor::new(&config).expect("a valid configuration");
        let limits = SchedulerConfig {
            max_running: schedule.max_running,
            max_step_tokens: schedule.max_step_tokens,
            inbox: MAX_CALLS,
            prefix_caching: true,
            speculate: Speculate::Ngram,
        };
        let (engine, stepper) = Engine::stepped(Box::new(executor), limits, model::step_time);
        process.spawn(stepper.run());
        let arena = Arena::new(engine.memory(), engine.spec().block_bytes, engine.spec().layers);
        let faults = MemFaults::default();
        let transport = MemTransport::new(&around.network, arena.clone(), faults);
        around.data_plane.attach(&tandem_kvtransfer::Transport::address(&*transport), name, process.clone());
        let role = match name {
            NodeName::Prefill(_) => Role::Prefill,
            NodeName::Decode(_) => Role::Decode,
        };
        let tasks = Tasks::wrapped({
            let process = process.clone();
            move |task| process.task(task)
        });
        let node = Node::of(Parts {
            role,
            node_id: name.to_string(),
            incarnation: incarnation(schedule.seed, name, life),
            engine,
            arena,
            transport: transport.clone().into(),
            exporter: Exporter::disabled(),
            work: Work::on(tasks, MAX_CALLS),
            max_step_tokens: schedule.max_step_tokens,
            max_step: Duration::from_secs(60),
            max_running: schedule.max_running,
            strangers: JoinGuard::default(),
            target: Target::Cpu,
            processor: None,
        });
        let routes = match role {
            Role::Prefill => {
                let settings = Settings { redeliver_wait: REDELIVER_WAIT, ..Settings::default() };
                tandem_prefill_node::service::routes_with(node.clone(), settings)
            }
            _ => tandem_decode_node::routes(node.clone(), HANDOFF_LEASE),
        };
        let stop = CancellationToken::new();
        let started = Arc::new(Self { name, process, node, transport, routes, link, stop });
        started.join(around);
        started
    }

    fn join(self: &Arc<Self>, around: &Surroundings) {
        let (router, client, link) = (around.router.clone(), self.process.clone(), self.link.clone());
        let connect = move || {
            let router = router.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let (client, link) = (client.clone(), link.clone());
            async move {
                let router = router.ok_or_else(|| Status::unavailable("connection refused"))?;
                Ok(channel::calls(client, router.process.clone(), link, router.routes()))
            }
            .boxed()
        };
        let (node, stop) = (self.node.clone(), self.stop.clone());
        let router = RouterWay::InProcess(Arc::new(connect));
        self.process.spawn(membership::stay_joined(node, router, endpoint(self.name), stop));
    }

    /// What the router calls it through.
    pub fn calls(&self, router: Process) -> Calls {
        channel::calls(router, self.process.clone(), self.link.clone(), self.routes.clone())
    }

    /// kill −9.
    pub fn kill(&self) {
        self.process.kill();
        self.transport.kill();
    }

    /// SIGTERM: as `Running::drain` of a node process does it; the caller ends the process. False when work was left at
    /// the bound.
    pub async fn drain(&self) -> bool {
        self.node.work.drain();
        let drained = async {
            self.node.work.drained().await;
            self.process.runs().await;
        };
        let drained = tokio::select! {
            biased;
            drained = tokio::time::timeout(DRAIN_TIMEOUT, drained) => drained.is_ok(),
            // Killed meanwhile.
            () = self.process.died() => true,
        };
        self.stop.cancel();
        // The router sees its stream end before the process does.
        tokio::time::sleep(Duration::from_millis(50)).await;
        drained
    }
}

/// Where a node says that it can be reached.
pub fn endpoint(name: NodeName) -> String {
    format!("http://{name}.simulated:1")
}

fn incarnation(seed: u64, name: NodeName, life: u64) -> Incarnation {
    let number = match name {
        NodeName::Prefill(number) => number as u64,
        NodeName::Decode(number) => 1000 + number as u64,
    };
    Incarnation((seed << 24) ^ (number << 12) ^ life)
}
