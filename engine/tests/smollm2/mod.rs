//! The model of the set-up, and what an independent engine makes of it (llama.cpp, see the data file's `oracle` and
//! `note`).
use std::path::PathBuf;

use serde::Deserialize;
use tandem_engine::cpu::{CpuExecutor, ModelConfig};

const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

#[derive(Deserialize)]
pub struct Golden {
    pub prompts: Vec<Prompt>,
}

#[derive(Deserialize)]
pub struct Prompt {
    pub name: String,
    pub ids: Vec<u32>,
    pub out: Outputs,
}

#[derive(Deserialize)]
pub struct Outputs {
    /// Exact dequantization: the reference.
    pub f32: Output,
}

#[derive(Deserialize)]
pub struct Output {
    pub tokens: Vec<u32>,
    /// Best minus second-best logit of each step.
    #[allow(dead_code, reason = "not every test of this file's looks at it")]
    pub gap: Vec<f32>,
    /// (token, logprob) of the first step.
    #[allow(dead_code, reason = "not every test of this file's looks at it")]
    pub top5_first: Vec<(u32, f32)>,
}

impl Output {
    /// The tokens before the first step whose two best logits are closer than `tie`: rounding may choose either there.
    pub fn sure(&self, tie: f32) -> &[u32] {
        let first = self.gap.iter().position(|&gap| gap < tie).unwrap_or(self.tokens.len());
        &self.tokens[..first.min(self.tokens.len())]
    }
}

pub fn golden() -> Golden {
    serde_json::from_str(include_str!("../data/smollm2-135m-golden.json")).expect("golden file")
}

/// The model, loaded as `config` says.
pub fn executor(config: ModelConfig) -> CpuExecutor {
    CpuExecutor::load(&ModelConfig { path: model_path(), ..config }).expect("the model loads")
}

/// Where `make setup` puts the model.
#[allow(clippy::disallowed_methods, reason = "a test has no command line to take the path from")]
fn model_path() -> PathBuf {
    let cache = std::env::var("TANDEM_CACHE").map(PathBuf::from);
    let home = || PathBuf::from(std::env::var("HOME").unwrap_or_default()).join(".cache/tandem");
    let path = cache.unwrap_or_else(|_| home()).join(FILE);
    assert!(path.is_file(), "the model {} is missing: run `make setup`", path.display());
    path
}
