//! How evenly a router used its nodes (pure), by the names that it sends with every answer.
//!
//! A prompt was computed on its prefill node, or on the decode node where that did it itself; an answer was decoded on
//! its decode node. The number to look at is max / mean: 1 is even, and the number of nodes means that one of them did
//! everything.
use std::collections::BTreeMap;

use super::ratio;
use super::request::is_ok;
use crate::record::{ClusterNode, Record};

/// More nodes than this are counted as one.
const MOST_NODES: usize = 256;
/// The name of that one.
const OTHER_NODES: &str = "other nodes";

/// What one node did.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct NodeLoad {
    pub requests: u64,
    /// Of prompts: those that were not cached. Of answers: all.
    pub tokens: u64,
}

/// Nodes by their names.
pub type NodeLoads = BTreeMap<String, NodeLoad>;

/// What all nodes did, of the requests that were answered.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct Balance {
    /// By where the prompt was computed; tokens that were not cached.
    pub prompts: NodeLoads,
    /// By where the answer was decoded; output tokens.
    pub answers: NodeLoads,
}

impl Balance {
    /// Empty where the server names no nodes.
    pub fn of<'a>(records: impl Iterator<Item = &'a Record>) -> Self {
        let mut balance = Self::default();
        for record in records.filter(|record| is_ok(record)) {
            let uncached = record.prompt_tokens.saturating_sub(record.cached_tokens);
            let output: u64 = record.chunks.iter().map(|(_, tokens)| u64::from(*tokens)).sum();
            add(&mut balance.prompts, record.nodes.prompt(), uncached.into());
            add(&mut balance.answers, record.nodes.decode.as_deref(), output);
        }
        balance
    }

    /// Nodes that are there and did nothing count in the mean.
    pub fn with_idle(mut self, nodes: &[ClusterNode]) -> Self {
        if self == Self::default() {
            return self;
        }
        for node in nodes {
            let loads = match node.role.as_str() {
                "prefill" => &mut self.prompts,
                "decode" => &mut self.answers,
                _ => continue,
            };
            if loads.len() < MOST_NODES {
                loads.entry(node.id.clone()).or_default();
            }
        }
        self
    }

    /// Prompts and answers with what they are called; without nodes, left out.
    pub fn kinds(&self) -> impl Iterator<Item = (&'static str, &NodeLoads)> {
        [("prompts", &self.prompts), ("answers", &self.answers)].into_iter().filter(|(_, loads)| !loads.is_empty())
    }
}

fn add(loads: &mut NodeLoads, name: Option<&str>, tokens: u64) {
    let Some(name) = name else { return };
    let name = if loads.len() < MOST_NODES || loads.contains_key(name) { name } else { OTHER_NODES };
    let load = loads.entry(name.to_owned()).or_default();
    load.requests += 1;
    load.tokens += tokens;
}

/// The most that a node did by the mean of all.
pub fn max_by_mean(loads: &NodeLoads, number: fn(&NodeLoad) -> u64) -> f64 {
    let (most, sum) = loads.values().map(number).fold((0, 0), |(most, sum), one| (most.max(one), sum + one));
    ratio(most as f64 * loads.len() as f64, sum as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Nodes, Outcome};
    use crate::report::fixture;

    #[test]
    fn by_hand() {
        let on = |prefill: &str, decode: &str| Record {
            nodes: Nodes::named(prefill, decode).unwrap_or_default(),
            ..fixture::record(0.0, &[(0.1, 1), (0.2, 2)])
        };
        let failed = Record { outcome: Outcome::Unfinished, ..on("p0", "d0") };
        // The second one was computed where it was decoded; the last one tells nothing.
        let records = [on("p0", "d0"), on("", "d1"), on("p0", "d1"), failed, on("", "")];
        let of = Balance::of(records.iter());
        // The fixture's prompts have 100 tokens, 25 of them cached.
        let load = |requests, tokens| NodeLoad { requests, tokens };
        assert_eq!(of.prompts, NodeLoads::from([("p0".into(), load(2, 150)), ("d1".into(), load(1, 75))]));
        assert_eq!(of.answers, NodeLoads::from([("d0".into(), load(1, 3)), ("d1".into(), load(2, 6))]));
        assert!((max_by_mean(&of.answers, |of| of.requests) - 4.0 / 3.0).abs() < 1e-9);
        let node = |id: &str, role: &str| ClusterNode { id: id.into(), role: role.into() };
        let nodes = [node("p0", "prefill"), node("p1", "prefill"), node("d0", "decode"), node("d2", "decode")];
        let of = of.with_idle(&nodes);
        assert_eq!((of.prompts.len(), of.answers.len(), of.answers["d2"]), (3, 3, NodeLoad::default()));
        assert!((max_by_mean(&of.answers, |of| of.requests) - 2.0).abs() < 1e-9);
        assert_eq!(Balance::of([].into_iter()).with_idle(&nodes), Balance::default(), "nothing is known");
        assert_eq!(max_by_mean(&NodeLoads::new(), |of| of.tokens), 0.0);
    }

    #[test]
    fn names_are_bounded() {
        let record = |index: usize| Record {
            nodes: Nodes { prefill: None, decode: Some(index.to_string()) },
            ..fixture::record(0.0, &[(0.1, 1)])
        };
        let records: Vec<Record> = (0..1000).map(record).collect();
        let of = Balance::of(records.iter());
        assert_eq!((of.answers.len(), of.answers[OTHER_NODES].requests), (MOST_NODES + 1, 1000 - MOST_NODES as u64));
    }
}
