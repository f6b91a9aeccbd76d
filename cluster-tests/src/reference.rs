//! What a simulated node answers when nothing goes wrong: the same executor alone, in this process.
use std::sync::Arc;

use anyhow::bail;
use tandem_engine::{
    Engine, Prefix, SamplingParams, SchedulerConfig, SequenceEvent, SequenceRequest, SimulatedConfig,
    SimulatedExecutor, Speculate,
};

use crate::cluster::model;

/// Blocks for a prompt of the whole context.
const BLOCKS: usize = 1024;

/// One engine in the model's place, with no delays.
pub struct Reference(Engine);

impl Reference {
    /// Starts it.
    ///
    /// # Errors
    /// The model is not there.
    pub fn start() -> anyhow::Result<Self> {
        let config = SimulatedConfig { blocks: BLOCKS, ..SimulatedConfig::in_place_of(&model()?)? };
        let limits = SchedulerConfig {
            max_running: 16,
            max_step_tokens: 512,
            inbox: 256,
            prefix_caching: true,
            speculate: Speculate::Off,
        };
        Ok(Self(Engine::start(Box::new(SimulatedExecutor::new(&config)?), limits)))
    }

    /// The greedy answer of `new_tokens` tokens, whatever they are.
    ///
    /// # Errors
    /// The request does not fit.
    pub async fn tokens(&self, prompt: &[u32], new_tokens: u32) -> anyhow::Result<Vec<u32>> {
        let (pool, spec) = (self.0.pool(), self.0.spec());
        let blocks = pool.blocks_for(prompt.len() + new_tokens as usize);
        let lease = Arc::new(pool.reserve_prefix(blocks, Prefix::default()).await?);
        let mut stream = self.0.submit(SequenceRequest {
            id: "reference".into(),
            prompt_len: prompt.len(),
            tokens: prompt.to_vec(),
            computed: 0,
            lease,
            max_new_tokens: new_tokens,
            sampling: SamplingParams::default().into(),
            ignore_eos: true,
            stop_token_ids: Vec::new(),
            deadline: None,
            priority: 0,
            report_layers: Vec::new(),
        })?;
        let mut tokens = Vec::new();
        while let Some(event) = stream.next().await {
            match event {
                SequenceEvent::Token { id, .. } => tokens.push(id),
                SequenceEvent::Failed(error) => bail!("{} of {}: {error}", tokens.len(), spec.model_name),
                _ => {}
            }
        }
        Ok(tokens)
    }
}
