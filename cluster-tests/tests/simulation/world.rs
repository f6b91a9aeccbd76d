//! One simulated run from the first request to the last free block. Owns the processes, lets the faults strike and the
//! clients ask, heals everything at the end, and hands what happened to the invariants.
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tandem_kvtransfer::mem::MemNetwork;
use tandem_router::text::ModelText;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::channel::Link;
use crate::client::{self, Outcome};
use crate::data_plane::{DataPlane, Trouble};
use crate::invariants::{self, Violation};
use crate::log::Log;
use crate::node::{NodeProcess, Surroundings};
use crate::oracle::{self, Expected};
use crate::process::Process;
use crate::router::{self, Directory, RouterProcess};
use crate::schedule::{Fault, NodeName, Schedule};
use crate::tally::Tally;

/// Nodes have joined by then, and clients begin to ask.
const WARM_UP: Duration = Duration::from_millis(200);
/// How often limits are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Everything is back so long after the last client has gone: the longest of the bounds that a node may have to wait
/// out (connections that are given up, leases, waits for another ticket), and some more.
const SETTLED_WITHIN: Duration = Duration::from_secs(12);

/// What came of a run.
pub struct Report {
    pub log: Log,
    pub outcomes: Vec<Outcome>,
    pub violations: Vec<Violation>,
    pub tally: Tally,
    /// Virtual time.
    pub lasted: Duration,
}

/// The cluster.
pub struct World {
    schedule: Schedule,
    around: Surroundings,
    directory: Directory,
    links: BTreeMap<NodeName, Link>,
    state: Mutex<State>,
    log: Log,
    begin: Instant,
}

#[derive(Default)]
struct State {
    nodes: BTreeMap<NodeName, Arc<NodeProcess>>,
    /// Processes of earlier lives.
    dead: Vec<Process>,
    lives: u64,
    violations: Vec<Violation>,
    tally: Tally,
}

/// Runs a schedule. Needs a runtime of one thread with a paused clock.
pub async fn run(schedule: Schedule, text: Arc<ModelText>, network: impl FnOnce(DataPlane) -> MemNetwork) -> Report {
    let begin = Instant::now();
    let expected = oracle::answers(&schedule, &text).await;
    let world = World::start(schedule, text, network);
    tokio::time::sleep(WARM_UP).await;
    let outcomes = world.live(&expected).await;
    world.settle().await;
    let more = world.ask_again(&expected).await;
    world.settle().await;
    let mut violations = std::mem::take(&mut world.lock().violations);
    violations.extend(invariants::of_outcomes(&world.schedule, &expected, &outcomes));
    violations.extend(invariants::of_healed(&world.schedule, &expected, &more));
    let log = world.log.clone();
    let mut tally = world.end();
    tally.schedule(&world.schedule);
    tally.outcomes(&outcomes);
    Report { log, outcomes, violations, tally, lasted: begin.elapsed() }
}

impl World {
    fn start(schedule: Schedule, text: Arc<ModelText>, network: impl FnOnce(DataPlane) -> MemNetwork) -> Arc<Self> {
        let data_plane = DataPlane::new(schedule.seed);
        let (directory, router) = (Directory::default(), Arc::default());
        let around = Surroundings { text, network: network(data_plane.clone()), data_plane, router };
        let links =
            schedule.nodes().enumerate().map(|(i, name)| (name, Link::new(Duration::from_millis(i as u64 % 3))));
        let world = Self {
            links: links.collect(),
            around,
            directory,
            state: Mutex::default(),
            log: Log::default(),
            begin: Instant::now(),
            schedule,
        };
        world.start_router();
        world.schedule.nodes().for_each(|name| world.start_node(name));
        Arc::new(world)
    }

    /// Faults and clients, until the last of both has ended.
    async fn live(self: &Arc<Self>, expected: &[Expected]) -> Vec<Outcome> {
        let expected: Arc<[Expected]> = expected.into();
        let mut faults = JoinSet::new();
        for (at, fault) in self.schedule.faults.clone() {
            let world = self.clone();
            faults.spawn(async move {
                tokio::time::sleep(at).await;
                world.strike(fault).await;
            });
        }
        let mut clients = JoinSet::new();
        for index in 0..self.schedule.requests.len() {
            let (world, expected) = (self.clone(), expected.clone());
            clients.spawn(async move { world.ask(index, &expected[index]).await });
        }
        let looking = tokio::spawn({
            let world = self.clone();
            async move { world.look().await }
        });
        let mut outcomes = clients.join_all().await;
        faults.join_all().await;
        looking.abort();
        outcomes.sort_by_key(|outcome| outcome.request);
        outcomes
    }

    async fn ask(&self, index: usize, expected: &Expected) -> Outcome {
        let request = &self.schedule.requests[index];
        tokio::time::sleep(request.at).await;
        let outcome = client::run(index, request, expected, self.router()).await;
        self.log.note(self.begin, format_args!("{index} {} {:?}", outcome.label(), outcome.tokens));
        outcome
    }

    /// Some requests on the healed cluster: they must be answered.
    async fn ask_again(&self, expected: &[Expected]) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        for index in (0..self.schedule.requests.len()).step_by(self.schedule.requests.len() / 4) {
            let request = invariants::patient(&self.schedule.requests[index]);
            outcomes.push(client::run(index, &request, &expected[index], self.router()).await);
        }
        outcomes
    }

    /// Looks at the limits for ever.
    async fn look(&self) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let mut state = self.lock();
            let found: Vec<_> = state.nodes.values().flat_map(|node| invariants::of_limits(node)).collect();
            state.violations.extend(found);
            drop(state);
            if let Some(router) = self.router() {
                let found = invariants::of_queue(&self.schedule, &router);
                self.lock().violations.extend(found);
            }
        }
    }

    /// Waits until everything is back, and says what is not if it takes too long.
    async fn settle(&self) {
        let bound = Instant::now() + SETTLED_WITHIN;
        loop {
            let found = self.left();
            if found.is_empty() {
                return;
            }
            if Instant::now() >= bound {
                self.lock().violations.extend(found);
                return;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// What a cluster at rest must not have.
    fn left(&self) -> Vec<Violation> {
        let state = self.lock();
        let mut found: Vec<_> = state.nodes.values().flat_map(|node| invariants::of_rest(node)).collect();
        found.extend(state.dead.iter().filter_map(invariants::of_dead));
        drop(state);
        found.extend(invariants::of_network(&self.around.network));
        if let Some(router) = self.router() {
            found.extend(invariants::of_idle(&router));
            found.extend(invariants::of_membership(&self.schedule, &router));
        }
        found
    }

    async fn strike(&self, fault: Fault) {
        self.log.note(self.begin, format_args!("{fault:?}"));
        let sleep = tokio::time::sleep;
        match fault {
            Fault::Kill(name, lasts) => {
                if let Some(node) = self.take(name) {
                    self.kill(&node);
                    sleep(lasts).await;
                    self.start_node(name);
                }
            }
            Fault::Drain(name, lasts) => {
                if let Some(node) = self.take(name) {
                    let drained = node.drain().await;
                    self.kill(&node);
                    if !drained {
                        self.lock().violations.push(Violation::new(4, format!("{name} did not drain")));
                    }
                    sleep(lasts).await;
                    self.start_node(name);
                }
            }
            Fault::Freeze(name, lasts) => {
                let node = self.lock().nodes.get(&name).cloned();
                if let Some(node) = node {
                    node.process.freeze();
                    sleep(lasts).await;
                    node.process.thaw();
                }
            }
            Fault::CutControl(name, lasts) => {
                self.links[&name].set_cut(true);
                sleep(lasts).await;
                self.links[&name].set_cut(false);
            }
            Fault::SlowControl(name, lasts) => {
                self.links[&name].set_latency(Duration::from_millis(40));
                sleep(lasts).await;
                self.links[&name].set_latency(Duration::from_millis(1));
            }
            Fault::LateCancels(name) => {
                (0..8).for_each(|_| self.links[&name].delay_cancel(Duration::from_millis(300)));
            }
            Fault::CutData(one, other, lasts) => {
                self.around.data_plane.cut(one, other, lasts);
                sleep(lasts).await;
            }
            Fault::SlowData(lasts) => self.trouble(Trouble::Slow, lasts).await,
            Fault::Flip(lasts) => self.trouble(Trouble::Flip, lasts).await,
            Fault::Truncate(lasts) => self.trouble(Trouble::Truncate, lasts).await,
            Fault::LoseSeals(lasts) => self.trouble(Trouble::LoseSeals, lasts).await,
            Fault::LoseCancels(lasts) => self.trouble(Trouble::LoseCancels, lasts).await,
            Fault::Sever(lasts) => self.trouble(Trouble::Sever, lasts).await,
            Fault::KillRouter(lasts) => {
                let router = self.around.router.lock().unwrap_or_else(PoisonError::into_inner).take();
                if let Some(router) = router {
                    router.process.kill();
                    self.lock().dead.push(router.process.clone());
                    drop(router);
                    sleep(lasts).await;
                    self.start_router();
                }
            }
        }
    }

    async fn trouble(&self, what: Trouble, lasts: Duration) {
        self.around.data_plane.trouble(what, lasts);
        tokio::time::sleep(lasts).await;
    }

    fn start_router(&self) {
        let router = RouterProcess::start(&self.schedule, self.around.text.clone(), self.directory.clone());
        *self.around.router.lock().unwrap_or_else(PoisonError::into_inner) = Some(router);
    }

    fn router(&self) -> Option<Arc<RouterProcess>> {
        self.around.router.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn start_node(&self, name: NodeName) {
        let mut state = self.lock();
        state.lives += 1;
        let node = NodeProcess::start(name, state.lives, &self.schedule, &self.around, self.links[&name].clone());
        router::enter(&self.directory, &node);
        state.nodes.insert(name, node);
    }

    /// The node, if it is there: it is not any more.
    fn take(&self, name: NodeName) -> Option<Arc<NodeProcess>> {
        self.lock().nodes.remove(&name)
    }

    fn end(&self) -> Tally {
        let nodes = std::mem::take(&mut self.lock().nodes);
        nodes.into_values().for_each(|node| self.kill(&node));
        std::mem::take(&mut self.lock().tally)
    }

    fn kill(&self, node: &NodeProcess) {
        let mut state = self.lock();
        state.tally.node(node);
        state.dead.push(node.process.clone());
        drop(state);
        node.kill();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
