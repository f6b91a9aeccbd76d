//! The table as people are shown it: plain data that is taken under the table's lock and written as JSON outside it,
//! because requests wait for that lock. `/debug/cluster` and the live page show the same.
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tandem_proto::v1;
use tandem_proto::ways::Offer;

use super::Node;
use super::breaker::Circuit;
use crate::select::Role;
use crate::select::calibrate::Link;
use crate::select::cost::StepCost;

/// Nodes that are remembered after they left.
const MAX_DEPARTED: usize = 32;

/// What a node did for the requests of this router, counted as it comes.
#[derive(Debug, Default)]
pub struct Work {
    prompt_tokens: AtomicU64,
    output_tokens: AtomicU64,
}

impl Work {
    /// Tokens of prompts that it computed.
    pub fn prompt_tokens(&self) -> u64 {
        self.prompt_tokens.load(Ordering::Relaxed)
    }

    /// Tokens that it generated.
    pub fn output_tokens(&self) -> u64 {
        self.output_tokens.load(Ordering::Relaxed)
    }

    /// It computed so many tokens of a prompt.
    pub fn computed(&self, tokens: u32) {
        self.prompt_tokens.fetch_add(tokens.into(), Ordering::Relaxed);
    }

    /// It generated a token.
    pub fn generated(&self) {
        self.output_tokens.fetch_add(1, Ordering::Relaxed);
    }
}

/// What people want to know of a node first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It takes requests.
    Ready,
    /// It was silent for half of the lease: tried last.
    Suspect,
    /// It failed requests in a row: tried last.
    Failing,
    /// It finishes what it has.
    Draining,
}

impl State {
    /// As it is written.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Suspect => "suspect",
            Self::Failing => "failing",
            Self::Draining => "draining",
        }
    }
}

/// One node.
#[derive(Clone, Debug)]
pub struct NodeNow {
    /// Who it is, and what it did.
    pub node: Arc<Node>,
    /// Its last report.
    pub load: v1::Load,
    /// Since that.
    pub silent: Duration,
    /// In one word.
    pub state: State,
    /// Of its circuit breaker.
    pub circuit: Circuit,
    /// Blocks of its cache that the router knows.
    pub indexed_blocks: u32,
    /// What its prompts will take.
    pub backlog_ms: f64,
    /// As it measured.
    pub step_cost: StepCost,
    /// By how much its prompts take longer than that says.
    pub prefill_factor: f64,
    /// Tokens of a step.
    pub max_step_tokens: u32,
}

impl NodeNow {
    fn json(&self) -> Value {
        let (info, load) = (&self.node.info, &self.load);
        json!({
            "id": info.node_id,
            "role": self.node.role.as_str(),
            "state": self.state.as_str(),
            "silent_ms": self.silent.as_millis() as u64,
            "incarnation": self.node.incarnation().to_string(),
            "endpoint": info.endpoint,
            "transport": transport_names(info),
            "transports": info.transports.iter().map(|transport| {
                json!({
                    "name": transport.name,
                    "build": transport.build_id,
                    "reach": Offer(transport).to_string(),
                })
            }).collect::<Value>(),
            "compatibility_digest": format!("{:016x}", info.compatibility_digest),
            "arithmetic": info.arithmetic,
            "kv_order": info.kv_order,
            "model": info.model_name,
            "draining": self.state == State::Draining,
            "breaker": self.circuit.as_str(),
            "free_blocks": load.free_blocks,
            "cached_blocks": load.cached_blocks,
            "indexed_blocks": self.indexed_blocks,
            "total_blocks": info.total_blocks,
            "block_tokens": info.block_tokens,
            "running": load.running,
            "waiting": load.waiting,
            "prompt_tokens": self.node.work.prompt_tokens(),
            "output_tokens": self.node.work.output_tokens(),
            "max_step_tokens": self.max_step_tokens,
            "queued_tokens": load.queued_tokens,
            "backlog_ms": self.backlog_ms,
            "step_cost": {
                "base_ms": self.step_cost.base_ms,
                "token_ms": self.step_cost.token_ms,
                "context_ms": self.step_cost.context_ms,
                "decode_token_ms": self.step_cost.decode_token_ms,
                "decode_context_ms": self.step_cost.decode_context_ms,
            },
            "prefill_factor": self.prefill_factor,
            "processor": info.processor.map(|v1::Processor { id, cores, threads }| {
                json!({ "id": format!("{id:016x}"), "cores": cores, "threads": threads })
            }),
        })
    }
}

/// The ways that it offers, the fastest first, for people.
pub fn transport_names(info: &v1::Register) -> String {
    info.transports.iter().map(|transport| transport.name.as_str()).collect::<Vec<_>>().join(",")
}

/// A node that was there.
#[derive(Clone, Debug, PartialEq)]
pub struct Departed {
    /// Its name.
    pub id: String,
    /// What it did.
    pub role: Role,
    /// What it died of; `None`: it had said before that it drains.
    pub died_of: Option<String>,
    /// When.
    pub at: Instant,
}

impl Departed {
    /// How it went, for people.
    pub fn why(&self) -> &str {
        self.died_of.as_deref().unwrap_or("it drained")
    }
}

/// The last ones that left; the newest is at the back.
#[derive(Debug, Default)]
pub(super) struct Departures(VecDeque<Departed>);

impl Departures {
    pub fn add(&mut self, departed: Departed) {
        if self.0.len() == MAX_DEPARTED {
            self.0.pop_front();
        }
        self.0.push_back(departed);
    }

    pub fn newest_first(&self) -> Vec<Departed> {
        self.0.iter().rev().cloned().collect()
    }
}

/// All of it at one moment.
#[derive(Clone, Debug)]
pub struct ClusterNow {
    /// When.
    pub at: Instant,
    /// By name.
    pub nodes: Vec<NodeNow>,
    /// In no order.
    pub links: Vec<Link>,
    /// The newest first.
    pub departed: Vec<Departed>,
}

impl ClusterNow {
    /// The name of a node that is here.
    pub fn name(&self, session: u64) -> Option<&str> {
        let of = self.nodes.iter().find(|now| now.node.session == session)?;
        Some(&of.node.info.node_id)
    }

    /// The nodes as `/debug/cluster` shows them.
    pub(super) fn nodes_json(&self) -> Value {
        self.nodes.iter().map(NodeNow::json).collect()
    }

    /// Who left.
    pub(super) fn departed_json(&self) -> Value {
        let json = |gone: &Departed| {
            let ago_ms = self.at.saturating_duration_since(gone.at).as_millis() as u64;
            json!({"id": gone.id, "role": gone.role.as_str(), "why": gone.why(), "ago_ms": ago_ms})
        };
        self.departed.iter().map(json).collect()
    }
}
