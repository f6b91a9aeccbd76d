//! What every answer must be: the tokens of one undisturbed engine.
use std::sync::Arc;
use std::time::Duration;

use tandem_engine::{Engine, FinishReason, SchedulerConfig, SequenceEvent, SimulatedExecutor, Speculate};
use tandem_node::CheckedRequest;
use tandem_proto::v1::{self, RequestSpec};
use tandem_router::text::ModelText;

use crate::model;
use crate::schedule::{Prompt, Request, Schedule};

/// An undisturbed answer and what it answers.
#[derive(Clone, Debug)]
pub struct Expected {
    pub prompt: Vec<u32>,
    pub tokens: Vec<u32>,
    pub reason: v1::FinishReason,
}

/// Enough for any one request.
const BLOCKS: usize = model::CONTEXT_TOKENS / 16;
/// Longer histories are cut at their head.
const LONGEST_PROMPT: usize = 160;

/// The answers to all requests of a schedule.
pub async fn answers(schedule: &Schedule, text: &ModelText) -> Vec<Expected> {
    let executor = SimulatedExecutor::new(&model::engine(text, BLOCKS)).expect("a valid configuration");
    let limits = SchedulerConfig {
        max_running: 1,
        max_step_tokens: 256,
        inbox: 1,
        prefix_caching: false,
        speculate: Speculate::Off,
    };
    let (engine, stepper) = Engine::stepped(Box::new(executor), limits, |_| Duration::ZERO);
    let running = tokio::spawn(stepper.run());
    let mut answers: Vec<Expected> = Vec::with_capacity(schedule.requests.len());
    for request in &schedule.requests {
        let prompt = match &request.prompt {
            Prompt::Fresh(tokens) => tokens.clone(),
            Prompt::Turn(earlier, tokens) => {
                let Expected { prompt, tokens: answer, .. } = &answers[*earlier];
                let history = [prompt, answer, tokens].map(|part| part.as_slice()).concat();
                history[history.len().saturating_sub(LONGEST_PROMPT)..].to_vec()
            }
        };
        answers.push(answer(&engine, request, prompt).await);
    }
    drop(engine);
    running.await.expect("the oracle's engine");
    answers
}

async fn answer(engine: &Engine, request: &Request, prompt: Vec<u32>) -> Expected {
    let spec = RequestSpec {
        prompt: prompt.clone(),
        sampling: Some(request.sampling.clone()),
        max_tokens: request.max_tokens,
        ignore_eos: request.ignore_eos,
        stop_token_ids: request.stop_token_ids.clone(),
        ..RequestSpec::default()
    };
    let checked = CheckedRequest::check(spec, engine.spec()).expect("the schedule draws valid requests");
    let lease = engine.pool().try_reserve(BLOCKS).expect("one request at a time");
    let sequence = checked.from_prompt(Arc::new(lease), checked.max_tokens);
    let mut stream = engine.submit(sequence).expect("a valid sequence");
    let mut tokens = Vec::new();
    loop {
        match stream.next().await {
            Some(SequenceEvent::Token { id, .. }) => tokens.push(id),
            Some(SequenceEvent::Finished { reason: FinishReason::Stop, .. }) => {
                return Expected { prompt, tokens, reason: v1::FinishReason::Stop };
            }
            Some(SequenceEvent::Finished { reason: FinishReason::Length, .. }) => {
                return Expected { prompt, tokens, reason: v1::FinishReason::Length };
            }
            Some(SequenceEvent::Failed(error)) => panic!("the oracle failed: {error}"),
            Some(_) => {}
            None => panic!("the oracle ended without an end"),
        }
    }
}
