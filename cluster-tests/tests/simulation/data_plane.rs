//! The weather of the KV network: every frame is a little late, and while a fault is on, frames are very late, damaged,
//! lost, or stuck behind a frozen receiver. Draws from the seed, in the order in which frames leave.
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tandem_kvtransfer::mem::{Fate, Frame, Weather, Window};
use tokio::time::Instant;

use crate::process::Process;
use crate::schedule::NodeName;

/// A handle; clones are the same network.
#[derive(Clone)]
pub struct DataPlane {
    state: Arc<Mutex<State>>,
}

struct State {
    rng: StdRng,
    nodes: BTreeMap<u64, (NodeName, Process)>,
    cut: BTreeMap<(NodeName, NodeName), Instant>,
    until: BTreeMap<Trouble, Instant>,
}

/// What is wrong with the whole network for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Trouble {
    Slow,
    Flip,
    Truncate,
    LoseSeals,
    LoseCancels,
    Sever,
}

impl DataPlane {
    pub fn new(seed: u64) -> Self {
        // Another stream of numbers than the schedule's.
        let rng = StdRng::seed_from_u64(seed ^ 0x006b_765f_6e65_7477);
        let (nodes, cut, until) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { state: Arc::new(Mutex::new(State { rng, nodes, cut, until })) }
    }

    /// The node behind `address` is `name`, in `process`.
    pub fn attach(&self, address: &[u8], name: NodeName, process: Process) {
        let address = address.try_into().map(u64::from_le_bytes).expect("an address of the mem transport");
        self.lock().nodes.insert(address, (name, process));
    }

    /// Nothing gets from one node to the other, in either direction, for so long.
    pub fn cut(&self, one: NodeName, other: NodeName, lasts: Duration) {
        let end = Instant::now() + lasts;
        let mut state = self.lock();
        state.cut.insert((one, other), end);
        state.cut.insert((other, one), end);
    }

    pub fn trouble(&self, what: Trouble, lasts: Duration) {
        self.lock().until.insert(what, Instant::now() + lasts);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn troubled(&self, by: Trouble) -> bool {
        self.until.get(&by).is_some_and(|end| Instant::now() < *end)
    }

    /// With the chance `of` while the trouble lasts.
    fn strikes(&mut self, by: Trouble, of: f64) -> bool {
        self.troubled(by) && self.rng.random_bool(of)
    }

    fn latency(&mut self, frame: Frame) -> Duration {
        let slow = self.strikes(Trouble::Slow, 0.3);
        let ms = match frame {
            // As UCX and tcp do with an end that they do not hear of.
            Frame::Close if self.troubled(Trouble::LoseCancels) => self.rng.random_range(100..1500),
            _ if slow => self.rng.random_range(5..120),
            _ => self.rng.random_range(0..=2),
        };
        Duration::from_millis(ms)
    }

    fn fate(&mut self, frame: Frame) -> Fate {
        match frame {
            Frame::Data if self.strikes(Trouble::Sever, 0.1) => Fate::Severed,
            Frame::Data => {
                let flip = self.strikes(Trouble::Flip, 0.4);
                Fate::Arrived { flip, truncate: self.strikes(Trouble::Truncate, 0.4) }
            }
            Frame::Seal if self.strikes(Trouble::LoseSeals, 0.5) => Fate::Lost,
            Frame::Cancel if self.strikes(Trouble::LoseCancels, 0.7) => Fate::Lost,
            _ => Fate::UNHARMED,
        }
    }

    fn pair(&self, from: u64, to: u64) -> Option<((NodeName, NodeName), Process)> {
        let ((from, _), (to, process)) = (self.nodes.get(&from)?, self.nodes.get(&to)?);
        Some(((*from, *to), process.clone()))
    }
}

impl Weather for DataPlane {
    fn travel(&self, from: u64, to: u64, frame: Frame) -> BoxFuture<'static, Fate> {
        let mut state = self.lock();
        let (latency, fate) = (state.latency(frame), state.fate(frame));
        let Some((pair, receiver)) = state.pair(from, to) else { return std::future::ready(Fate::Lost).boxed() };
        let arrival = Instant::now() + latency;
        let healed = state.cut.get(&pair).copied().filter(|end| arrival < *end);
        async move {
            sleep_until(healed.unwrap_or(arrival)).await;
            if receiver.runs().await { fate } else { Fate::Lost }
        }
        .boxed()
    }

    fn pass(&self, from: u64, to: u64, window: Window) -> BoxFuture<'static, ()> {
        let mut state = self.lock();
        let Some((_, receiver)) = state.pair(from, to) else { return std::future::ready(()).boxed() };
        let ms = match window {
            // Some linger while others overtake them: a late writer meets blocks that have another owner by then.
            Window::Writing if state.strikes(Trouble::Slow, 0.3) => state.rng.random_range(20..400),
            Window::Writing => state.rng.random_range(0..=4),
            Window::Written => 0,
        };
        let end = Instant::now() + Duration::from_millis(ms);
        async move {
            sleep_until(end).await;
            // A NIC writes while its host is frozen; that everything was written only the host notices.
            if window == Window::Written {
                receiver.runs().await;
            }
        }
        .boxed()
    }
}

async fn sleep_until(at: Instant) {
    if at > Instant::now() {
        tokio::time::sleep_until(at).await;
    }
}
