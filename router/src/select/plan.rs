//! A plan: its kind, what it is predicted to cost, and how it is told of as a candidate; and why there is none. Plain
//! data: [`super::prune`] scores plans, [`super::select`] ranks them.
use std::sync::Arc;

use super::numerics::Numerics;
use super::ways::PairWay;
use super::{Role, Settings};

/// The kind of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Plan {
    /// A prefill node computes the prompt, a decode node takes over.
    Pair,
    /// The decode node computes the prompt, too.
    Local,
}

/// All of them, for metrics.
pub const PLANS: [Plan; 2] = [Plan::Pair, Plan::Local];

impl Plan {
    /// For labels and spans.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pair => "pair",
            Self::Local => "local",
        }
    }
}

/// What a plan is predicted to cost, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Terms {
    /// The prompts before it on the prefill node.
    pub wait_prefill_ms: f64,
    /// Computing what is not cached of the prompt.
    pub prefill_ms: f64,
    /// The part of the KV transfer that outlasts the prefill.
    pub exposed_ms: f64,
    /// Until the decode node takes it: of a pair, the part that outlasts the prefill.
    pub wait_decode_ms: f64,
    /// One step of the decode node with this request in its batch.
    pub step_ms: f64,
    /// What the prompt costs others, in milliseconds of TTFT: the decode node's streams, which wait once and take that
    /// much longer a token; the prompt that it computes, where the two nodes share their cores.
    pub interference_ms: f64,
}

impl Terms {
    /// All of it, in milliseconds of TTFT.
    pub fn total_ms(&self, settings: &Settings) -> f64 {
        let once =
            self.wait_prefill_ms + self.prefill_ms + self.exposed_ms + self.wait_decode_ms + self.interference_ms;
        once + settings.step_weight() * self.step_ms
    }
}

/// A plan that could take the request, and why it is as good as it is.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Table key of the prefill node; `None`: the decode node computes the prompt.
    pub prefill: Option<u64>,
    /// Table key of the decode node.
    pub decode: u64,
    /// Name of the prefill node.
    pub prefill_id: Option<Arc<str>>,
    /// Name of the decode node.
    pub decode_id: Arc<str>,
    /// How the KV of a pair travels.
    pub way: Option<PairWay>,
    /// What it is predicted to cost.
    pub terms: Terms,
    /// All terms by the objectives' weights, milliseconds.
    pub total_ms: f64,
    /// Prompt tokens that need no computing.
    pub cached_tokens: u32,
    /// Blocks that the decode node lacks now.
    pub blocks_short: u32,
    /// The node that computes the prompt has measured its steps: the prediction is one.
    pub measured: bool,
    /// By how much the prompt is predicted to take longer than the step model says.
    pub factor: f64,
    /// The circuit breaker of one of its nodes is shut.
    pub shut: bool,
    /// It failed this request before.
    pub avoided: bool,
    /// It has the prompt already.
    pub kept: bool,
}

impl Candidate {
    /// Whether nothing but load speaks against it.
    pub fn is_sound(&self) -> bool {
        !self.shut && !self.avoided
    }

    /// Its kind.
    pub fn plan(&self) -> Plan {
        if self.prefill.is_some() { Plan::Pair } else { Plan::Local }
    }

    /// From the choice to the first token, milliseconds. Of a pair the first token comes from the prefill node,
    /// whatever decode still waits for.
    pub fn ttft_ms(&self) -> f64 {
        let Terms { wait_prefill_ms, prefill_ms, wait_decode_ms, .. } = self.terms;
        prefill_ms + if self.prefill.is_some() { wait_prefill_ms } else { wait_decode_ms }
    }
}

/// Why nothing was chosen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoPair {
    /// No node of this role is there, or all of them are draining.
    #[error("no {} node is available", .0.as_str())]
    NoNode(Role),
    /// There are nodes of both roles, but none that fit together.
    #[error("no prefill and decode node with the same compatibility digest are available")]
    Incompatible,
    /// There are two that fit together, and KV cannot get from the one to the other.
    #[error("{0}; start them with a KV transport by which they reach each other (--transport, --kv-listen)")]
    NoWay(Arc<str>),
    /// The answer began in another arithmetic than the nodes have that are there now.
    #[error("the answer began in {began}, the available nodes compute in {now}")]
    OtherNumerics {
        /// Of the nodes that began it.
        began: Numerics,
        /// Of those that are there.
        now: Numerics,
    },
    /// No compatible pair could ever hold the request.
    #[error(
        "the request needs {blocks} KV blocks for its prompt and a context of {tokens} tokens; no available node or pair \
         of nodes can hold them"
    )]
    TooLarge {
        /// Blocks of its prompt.
        blocks: u32,
        /// Tokens of prompt and longest answer.
        tokens: u32,
    },
}
