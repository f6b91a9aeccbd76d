//! By which way KV gets from a prefill to a decode node, and which way failed there lately. Pure.
//!
//! Nodes pair within *domains* (`tandem_proto::ways`): sets of nodes of one compatibility digest in which each prefill
//! node reaches each decode node by one transport. The table gives each domain a small number and each node the numbers
//! of its domains, the fastest first; so whether two nodes have a way is a comparison of a few integers, and a short
//! list of nodes is kept for each domain instead of for each pair.
//!
//! A way by which a hand-off failed cools down for that pair of nodes: the next one that the two have in common is
//! taken meanwhile. It is a rank and not a filter: where all are cooling down, the fastest is taken. Times grow with
//! failures in a row and are forgotten with the first hand-off that succeeds.
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem_proto::v1;
use tandem_proto::ways::{Domain, no_way, receives_in, sends_in, short_name};

use super::{NodeView, Role};

/// How long a way is left alone after its first failure; twice as long after each further one.
pub const FIRST_COOL_DOWN: Duration = Duration::from_secs(5);
/// At most.
pub const LONGEST_COOL_DOWN: Duration = Duration::from_secs(300);
/// Ways of pairs that are remembered as failing.
const MAX_FAILING: usize = 4096;
/// Pairs without a way that are told at most.
const MAX_APART: usize = 16;
/// Different fall-backs that are counted.
const MAX_FALLBACKS: usize = 256;

/// A way between two nodes, as it is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PairWay {
    /// Number of the domain.
    pub domain: u32,
    /// "ucx/shm".
    pub name: Arc<str>,
    /// By which the decode node knows it.
    pub build_id: Arc<str>,
    /// The faster way of this pair that failed lately.
    pub instead_of: Option<Arc<str>>,
}

/// Two nodes that would understand each other's KV and have no way for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Apart {
    /// Name of the prefill node.
    pub prefill_id: Arc<str>,
    /// Name of the decode node.
    pub decode_id: Arc<str>,
    /// What each of them has, for people.
    pub why: Arc<str>,
}

/// From which way to which pairs of nodes went over, and how often.
pub type Fallbacks = BTreeMap<(Arc<str>, Arc<str>), u64>;

/// What happened when a way of a pair failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fallback {
    /// The way that failed.
    pub from: Arc<str>,
    /// The one that is taken now.
    pub to: Arc<str>,
    /// For so long.
    pub cool_down: Duration,
}

/// See the head of this file.
#[derive(Debug, Default)]
pub struct Ways {
    numbers: HashMap<(u64, Domain), u32>,
    /// By number; `None` is free.
    domains: Vec<Option<Known>>,
    failing: HashMap<(u64, u64, u32), Failing>,
    fallbacks: Fallbacks,
    apart: Arc<[Apart]>,
}

#[derive(Debug)]
struct Known {
    key: (u64, Domain),
    name: Arc<str>,
    build_id: Arc<str>,
    nodes: u32,
}

#[derive(Clone, Copy, Debug)]
struct Failing {
    until: Instant,
    last: Duration,
    /// As of the last [`Ways::refresh`].
    cooling: bool,
}

impl Ways {
    /// The numbers of a node's domains, the fastest first. Each call is undone by [`Self::leave`].
    pub fn enter(&mut self, role: Role, info: &v1::Register) -> Arc<[u32]> {
        let mut numbers = Vec::new();
        for transport in &info.transports {
            let domains = match role {
                Role::Prefill => sends_in(transport),
                Role::Decode => receives_in(transport),
            };
            for domain in domains {
                let number = self.number((info.compatibility_digest, domain), short_name(&transport.name));
                if !numbers.contains(&number) {
                    numbers.push(number);
                }
            }
        }
        for number in &numbers {
            self.domains[*number as usize].iter_mut().for_each(|known| known.nodes += 1);
        }
        for faster_and_next in numbers.windows(2) {
            let [from, to] = [0, 1].map(|at| self.known(faster_and_next[at]).map(|known| Arc::clone(&known.name)));
            from.zip(to).into_iter().for_each(|names| self.count_fallback(names, 0));
        }
        numbers.into()
    }

    /// One that could happen counts zero, so that the first one is an increase.
    fn count_fallback(&mut self, names: (Arc<str>, Arc<str>), times: u64) {
        if names.0 != names.1 && (self.fallbacks.len() < MAX_FALLBACKS || self.fallbacks.contains_key(&names)) {
            *self.fallbacks.entry(names).or_default() += times;
        }
    }

    /// The node with this key and these domains is gone. Returns the domains that are gone with it.
    pub fn leave(&mut self, session: u64, domains: &[u32]) -> Vec<u32> {
        let mut emptied = Vec::new();
        for number in domains {
            let place = &mut self.domains[*number as usize];
            let Some(known) = place else { continue };
            known.nodes = known.nodes.saturating_sub(1);
            if known.nodes == 0 {
                self.numbers.remove(&known.key);
                *place = None;
                emptied.push(*number);
            }
        }
        self.failing.retain(|(prefill, decode, _), _| *prefill != session && *decode != session);
        emptied
    }

    fn number(&mut self, key: (u64, Domain), name: &str) -> u32 {
        if let Some(number) = self.numbers.get(&key) {
            return *number;
        }
        let free = self.domains.iter().position(Option::is_none).unwrap_or(self.domains.len());
        if free == self.domains.len() {
            self.domains.push(None);
        }
        let number = u32::try_from(free).unwrap_or(u32::MAX);
        let build_id = key.1.build_id.as_str().into();
        self.domains[free] = Some(Known { key: key.clone(), name: name.into(), build_id, nodes: 0 });
        self.numbers.insert(key, number);
        number
    }

    /// The way that the pair takes now: the fastest in common that does not cool down, else the fastest.
    pub fn between(&self, prefill: &NodeView, decode: &NodeView) -> Option<u32> {
        let mut common = common(&prefill.domains, &decode.domains);
        let first = common.next()?;
        if self.failing.is_empty() {
            return Some(first);
        }
        let cooling = |domain: u32| {
            let failing = self.failing.get(&(prefill.session, decode.session, domain));
            failing.is_some_and(|failing| failing.cooling)
        };
        std::iter::once(first).chain(common).find(|domain| !cooling(*domain)).or(Some(first))
    }

    /// The way with this number, of this pair, for people.
    pub fn describe(&self, prefill: &NodeView, decode: &NodeView, domain: u32) -> Option<PairWay> {
        let known = self.known(domain)?;
        let best = common(&prefill.domains, &decode.domains).next().filter(|best| *best != domain);
        let instead_of = best.and_then(|best| self.known(best)).map(|best| Arc::clone(&best.name));
        let (name, build_id) = (Arc::clone(&known.name), Arc::clone(&known.build_id));
        Some(PairWay { domain, name, build_id, instead_of })
    }

    fn known(&self, domain: u32) -> Option<&Known> {
        self.domains.get(domain as usize)?.as_ref()
    }

    /// Brings up to date what depends on the time.
    pub fn refresh(&mut self, now: Instant) {
        self.failing.values_mut().for_each(|failing| failing.cooling = now < failing.until);
    }

    /// A hand-off of this pair failed by this way. What that changes, if it was the way that the pair took and there is
    /// another one.
    pub fn failed(&mut self, prefill: &NodeView, decode: &NodeView, domain: u32, now: Instant) -> Option<Fallback> {
        self.refresh(now);
        let before = self.between(prefill, decode).filter(|before| *before == domain)?;
        // Where there is no other way, there is nothing to remember.
        common(&prefill.domains, &decode.domains).find(|other| *other != domain)?;
        let key = (prefill.session, decode.session, domain);
        if self.failing.len() >= MAX_FAILING && !self.failing.contains_key(&key) {
            self.failing.retain(|_, failing| failing.cooling);
            if self.failing.len() >= MAX_FAILING {
                return None;
            }
        }
        let last = self.failing.get(&key).map_or(Duration::ZERO, |failing| failing.last);
        let cool_down = (last * 2).clamp(FIRST_COOL_DOWN, LONGEST_COOL_DOWN);
        self.failing.insert(key, Failing { until: now + cool_down, last: cool_down, cooling: true });
        let after = self.between(prefill, decode).filter(|after| *after != before)?;
        let (from, to) = (Arc::clone(&self.known(before)?.name), Arc::clone(&self.known(after)?.name));
        self.count_fallback((Arc::clone(&from), Arc::clone(&to)), 1);
        Some(Fallback { from, to, cool_down })
    }

    /// A hand-off of this pair came to its end by this way.
    pub fn succeeded(&mut self, pair: (u64, u64), domain: u32) {
        self.failing.remove(&(pair.0, pair.1, domain));
    }

    /// All fall-backs so far, and those that could happen as zeros.
    pub fn fallbacks(&self) -> &Fallbacks {
        &self.fallbacks
    }

    /// Pairs of nodes that are here and have no way, some of them.
    pub fn apart(&self) -> &Arc<[Apart]> {
        &self.apart
    }

    /// Nodes came or went: looks anew which pairs have no way. `nodes` have their registrations beside them.
    pub fn look_for_gaps<'a>(&mut self, nodes: impl Iterator<Item = (&'a NodeView, &'a v1::Register)> + Clone) {
        let of = |role| nodes.clone().filter(move |(view, _)| view.role == role);
        // Of decode nodes: by digest, and by domain. As a rule all are in one, and no two nodes have to be compared.
        let (mut all, mut within) = (HashMap::<u64, u32>::new(), vec![0; self.domains.len()]);
        for (view, info) in of(Role::Decode) {
            *all.entry(info.compatibility_digest).or_default() += 1;
            view.domains.iter().for_each(|domain| within[*domain as usize] += 1);
        }
        let reaches_all = |view: &NodeView, info: &v1::Register| {
            let all = all.get(&info.compatibility_digest).copied().unwrap_or(0);
            all == 0 || view.domains.iter().any(|domain| within[*domain as usize] == all)
        };
        let mut apart = Vec::new();
        for (prefill, sends) in of(Role::Prefill).filter(|(view, info)| !reaches_all(view, info)) {
            let fit = of(Role::Decode).filter(|(_, info)| info.compatibility_digest == sends.compatibility_digest);
            for (decode, receives) in fit.filter(|(view, _)| common(&prefill.domains, &view.domains).next().is_none()) {
                if apart.len() < MAX_APART {
                    apart.push(Apart::of((prefill, sends), (decode, receives)));
                }
            }
            if apart.len() == MAX_APART {
                break;
            }
        }
        self.apart = apart.into();
    }
}

impl Apart {
    /// Whether it is about this node.
    pub fn is_of(&self, node_id: &str) -> bool {
        [&*self.prefill_id, &*self.decode_id].contains(&node_id)
    }

    fn of((prefill, sends): (&NodeView, &v1::Register), (decode, receives): (&NodeView, &v1::Register)) -> Self {
        let (prefill_id, decode_id) = (Arc::clone(&prefill.node_id), Arc::clone(&decode.node_id));
        let why = no_way((&prefill_id, &sends.transports), (&decode_id, &receives.transports)).into();
        Self { prefill_id, decode_id, why }
    }
}

/// Domains that two nodes have in common, in the order of the first.
pub fn common(sender: &[u32], receiver: &[u32]) -> impl Iterator<Item = u32> {
    sender.iter().copied().filter(|domain| receiver.contains(domain))
}

/// Whether a node has a way to none of those of the other role, though there are some.
pub fn is_alone(node: &NodeView, nodes: &[NodeView]) -> bool {
    let mut others = nodes.iter().filter(|other| other.role != node.role).peekable();
    others.peek().is_some() && others.all(|other| common(&node.domains, &other.domains).next().is_none())
}

#[cfg(test)]
mod tests;
