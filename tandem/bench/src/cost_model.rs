//! What is known of how fast a server can be: its hardware, as the user says, and the cost of a step, as its nodes do.
//! Plain data of the run; what it predicts is [`super::report::model`]'s matter.
use serde::{Deserialize, Serialize};

/// What is known of the server; everything may be missing. Numbers that are not positive count as missing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Model {
    /// Bytes of weights that one decode step reads.
    pub weight_bytes: Option<f64>,
    /// Of all layers, K and V.
    pub kv_bytes_per_token: Option<f64>,
    /// Of one decode node, 10⁹ bytes a second.
    pub memory_gb_per_s: Option<f64>,
    /// Some twice the parameters.
    pub flop_per_token: Option<f64>,
    /// Of one prefill node, 10⁹ operations a second.
    pub compute_gflop_per_s: Option<f64>,
    /// Of one prefill node, measured; comes before the two above.
    pub prefill_tokens_per_s: Option<f64>,
    /// As prefill nodes report it.
    pub prefill_cost: Option<StepCost>,
    /// As decode nodes report it.
    pub decode_cost: Option<StepCost>,
    /// Tokens of one step, at most, of the nodes that prefill; None: a prompt is one step.
    pub prefill_step_tokens: Option<f64>,
    /// 0 counts as 1.
    #[serde(default)]
    pub decode_nodes: u32,
}

impl Model {
    /// The user's facts first, then what the nodes told; None without either.
    pub fn of(hardware: Option<&Self>, told: Option<&Self>) -> Option<Self> {
        let told = told.filter(|told| **told != Self::default());
        let (Some(given), Some(told)) = (hardware, told) else { return hardware.or(told).cloned() };
        Some(Self {
            prefill_cost: given.prefill_cost.or(told.prefill_cost),
            decode_cost: given.decode_cost.or(told.decode_cost),
            prefill_step_tokens: given.prefill_step_tokens.or(told.prefill_step_tokens),
            decode_nodes: if given.decode_nodes == 0 { told.decode_nodes } else { given.decode_nodes },
            ..given.clone()
        })
    }
}

/// A step takes a base, and for t tokens of prompts that attend to p positions `token_ms · t + context_ms · p`; so for
/// those that decode, as `v1::StepCost` has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepCost {
    pub base_ms: f64,
    pub token_ms: f64,
    pub context_ms: f64,
    /// None, as in runs of before: what a prompt's token costs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode_token_ms: Option<f64>,
    /// So here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode_context_ms: Option<f64>,
}

impl StepCost {
    /// One step for so many tokens of prompts that attend to so many positions.
    pub fn prompt_ms(self, tokens: f64, positions: f64) -> f64 {
        self.base_ms + self.token_ms * tokens + self.context_ms * positions
    }

    /// One step for so many sequences that decode and attend to so many positions.
    pub fn decode_ms(self, sequences: f64, positions: f64) -> f64 {
        let token_ms = self.decode_token_ms.unwrap_or(self.token_ms);
        self.base_ms + token_ms * sequences + self.decode_context_ms.unwrap_or(self.context_ms) * positions
    }
}
