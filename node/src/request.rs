//! A `RequestSpec` from the router, checked against this node's engine. The rest of a node sees only the checked form.
use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem_engine::{Engine, EngineSpec, KvLease, Prefix, SamplingParams, SequenceRequest, TokenLogprob};
use tandem_proto::hash::sequence_hashes;
use tandem_proto::{
    CacheSalt, Error, ErrorKind, MAX_PRIORITY, MAX_REQUEST_MS, SequenceHash, SequenceKey, TraceContext, TraceState, v1,
};
use tandem_telemetry::clock;

/// Bounds a request that came without a deadline.
pub const LONGEST_REQUEST: Duration = Duration::from_secs(600);
/// Bounds one that came with a deadline. Routers give no later one, see their `--max-request-ms`: a node that ended a
/// request before its router does would look as if it had failed.
const LATEST_DEADLINE: Duration = Duration::from_millis(MAX_REQUEST_MS as u64);

/// Where nobody says what users call good.
const STALL: Duration = Duration::from_millis(100);

/// A request that this node can run.
#[derive(Clone, Debug)]
pub struct CheckedRequest {
    /// For people.
    pub id: String,
    /// Never empty, shorter than the context. Its last `output_tokens` are output of an earlier attempt.
    pub prompt: Vec<u32>,
    /// Fewer than the prompt has.
    output_tokens: usize,
    /// Tokens to generate at most, at least 1, capped by the context.
    pub max_tokens: u32,
    /// Every phase ends by then.
    pub deadline: Instant,
    /// The span that calls this node.
    pub parent: TraceContext,
    /// What others say of its trace.
    pub state: TraceState,
    /// A reader notices a longer time between two tokens.
    pub stall: Duration,
    sampling: Arc<SamplingParams>,
    ignore_eos: bool,
    stop_token_ids: Vec<u32>,
    priority: i32,
    cache_salt: CacheSalt,
    eos_token_id: u32,
    max_context_tokens: usize,
}

impl CheckedRequest {
    /// Checks `spec`.
    ///
    /// # Errors
    /// `InvalidArgument` with the field that is wrong.
    pub fn check(spec: v1::RequestSpec, engine: &EngineSpec) -> Result<Self, Error> {
        let (len, limit) = (spec.prompt.len(), engine.max_context_tokens);
        if len == 0 {
            return Err(Error::invalid("prompt", "the prompt is empty"));
        }
        if len >= limit {
            let message = format!("the prompt has {len} tokens: with at least one new token the context holds {limit}");
            return Err(Error::invalid("prompt", message));
        }
        if let Some(token) = spec.prompt.iter().find(|&&token| token as usize >= engine.vocab_size) {
            let message = format!("token id {token} is outside the vocabulary of {}", engine.vocab_size);
            return Err(Error::invalid("prompt", message));
        }
        if spec.max_tokens == 0 {
            return Err(Error::invalid("max_tokens", "max_tokens must be at least 1"));
        }
        let output_tokens = spec.output_tokens as usize;
        if output_tokens >= len {
            let message =
                format!("{output_tokens} of the prompt's {len} tokens cannot be output: none would be prompt");
            return Err(Error::invalid("output_tokens", message));
        }
        // `min_tokens` is of the whole answer, as the sampler counts it; `max_tokens` is what is left of it.
        let answer_tokens = spec.max_tokens.saturating_add(spec.output_tokens);
        let room = u32::try_from(limit - len).unwrap_or(u32::MAX);
        Ok(Self {
            id: spec.request_id,
            prompt: spec.prompt,
            output_tokens,
            max_tokens: spec.max_tokens.min(room),
            deadline: deadline(spec.time_left_ns),
            parent: context(&spec.traceparent),
            state: TraceState::read([spec.tracestate.as_str()]),
            stall: if spec.tpot_objective_ms == 0 {
                STALL
            } else {
                Duration::from_millis(spec.tpot_objective_ms.into())
            },
            sampling: sampling(spec.sampling.unwrap_or_default(), answer_tokens, engine)?.into(),
            ignore_eos: spec.ignore_eos,
            stop_token_ids: spec.stop_token_ids,
            priority: priority(spec.priority)?,
            cache_salt: CacheSalt::from_wire(&spec.cache_salt)?,
            eos_token_id: engine.eos_token_id,
            max_context_tokens: limit,
        })
    }

    /// The same on a node that decodes it: an answer ends at the latest where all of the node's KV memory is its own.
    /// The KV of the last token is not needed.
    #[must_use]
    pub fn within_memory(mut self, engine: &EngineSpec) -> Self {
        let tokens = engine.total_blocks.saturating_mul(engine.block_tokens).saturating_add(1);
        let room = u32::try_from(tokens.saturating_sub(self.prompt.len())).unwrap_or(u32::MAX);
        self.max_tokens = self.max_tokens.min(room).max(1);
        self
    }

    /// Tokens for whose KV a node that decodes it reserves room: the prompt and, where another one follows, the first
    /// token. The engine takes the blocks of further ones as they come.
    pub fn first_kv_tokens(&self) -> usize {
        SequenceRequest::kv_tokens(self.prompt.len(), self.max_tokens.min(2), self.max_context_tokens)
    }

    /// Names of the prompt's blocks.
    pub fn hashes(&self, engine: &EngineSpec) -> Vec<SequenceHash> {
        sequence_hashes(SequenceKey::new(engine.model_digest, self.cache_salt), &self.prompt, engine.block_tokens)
    }

    /// Why the answer ends with its first token, if it does.
    pub fn finished_by(&self, first_token: u32) -> Option<v1::FinishReason> {
        let eos = first_token == self.eos_token_id && !self.ignore_eos;
        if eos || self.stop_token_ids.contains(&first_token) {
            return Some(v1::FinishReason::Stop);
        }
        (self.max_tokens == 1).then_some(v1::FinishReason::Length)
    }

    /// The engine's request to read what the lease does not share of the prompt and sample `max_new_tokens`.
    pub fn from_prompt(&self, lease: Arc<KvLease>, max_new_tokens: u32) -> SequenceRequest {
        self.sequence(self.prompt.clone(), lease.cached_tokens(), lease, max_new_tokens)
    }

    /// Waits for room for the KV of `tokens` tokens, sharing what is cached of the prompt.
    ///
    /// # Errors
    /// `InvalidArgument` when the arena never has so much.
    pub async fn reserve(&self, engine: &Engine, tokens: usize) -> Result<Arc<KvLease>, Error> {
        let (pool, hashes) = (engine.pool(), self.hashes(engine.spec()));
        let prefix = Prefix { cache_salt: self.cache_salt, hashes: &hashes, tokens: self.prompt.len() };
        Ok(Arc::new(pool.reserve_prefix(pool.blocks_for(tokens), prefix).await?))
    }

    /// The engine's request to go on after `first_token`, with the prompt's KV in `lease`.
    pub fn after_first(&self, first_token: u32, lease: Arc<KvLease>) -> SequenceRequest {
        let tokens = self.prompt.iter().copied().chain([first_token]).collect();
        self.sequence(tokens, self.prompt.len(), lease, self.max_tokens.saturating_sub(1))
    }

    fn sequence(&self, tokens: Vec<u32>, computed: usize, lease: Arc<KvLease>, max_new_tokens: u32) -> SequenceRequest {
        SequenceRequest {
            id: self.id.clone(),
            tokens,
            prompt_len: self.prompt.len() - self.output_tokens,
            computed,
            lease,
            max_new_tokens,
            sampling: Arc::clone(&self.sampling),
            ignore_eos: self.ignore_eos,
            stop_token_ids: self.stop_token_ids.clone(),
            deadline: Some(self.deadline),
            priority: self.priority,
            report_layers: Vec::new(),
        }
    }
}

/// The trace to join; a new one when the text is not a `traceparent`.
pub fn context(traceparent: &str) -> TraceContext {
    traceparent.parse().unwrap_or_else(|_| TraceContext::root(&mut rand::rng()))
}

/// Runs `body` until the request's deadline.
///
/// # Errors
/// Those of `body`, and `DeadlineExceeded`.
pub async fn until_deadline<T>(deadline: Instant, body: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    match tokio::time::timeout_at(deadline.into(), body).await {
        Ok(result) => result,
        Err(_) => Err(too_late()),
    }
}

fn deadline(time_left_ns: u64) -> Instant {
    let left = Duration::from_nanos(time_left_ns);
    clock::now() + if left.is_zero() { LONGEST_REQUEST } else { left.min(LATEST_DEADLINE) }
}

fn priority(priority: i32) -> Result<i32, Error> {
    if priority.unsigned_abs() > MAX_PRIORITY.unsigned_abs() {
        let message = format!("priority must be -{MAX_PRIORITY} to {MAX_PRIORITY}, not {priority}");
        return Err(Error::invalid("priority", message));
    }
    Ok(priority)
}

fn too_late() -> Error {
    Error::new(ErrorKind::DeadlineExceeded, "the request's deadline passed")
}

fn sampling(sampling: v1::Sampling, answer_tokens: u32, engine: &EngineSpec) -> Result<SamplingParams, Error> {
    sampling.check(u32::try_from(engine.vocab_size).unwrap_or(u32::MAX))?;
    sampling.check_min_tokens(answer_tokens)?;
    // On the wire 0 means off, as absent does.
    let or_off = |number: f32| if number == 0.0 { 1.0 } else { number };
    let mut logit_bias: Vec<(u32, f32)> = sampling.logit_bias.into_iter().collect();
    logit_bias.sort_unstable_by_key(|&(token, _)| token);
    Ok(SamplingParams {
        temperature: sampling.temperature,
        top_p: or_off(sampling.top_p),
        top_k: sampling.top_k,
        min_p: sampling.min_p,
        repetition_penalty: or_off(sampling.repetition_penalty),
        presence_penalty: sampling.presence_penalty,
        frequency_penalty: sampling.frequency_penalty,
        logit_bias,
        min_tokens: sampling.min_tokens,
        top_logprobs: sampling.top_logprobs,
        seed: sampling.seed,
    })
}

/// The likeliest tokens as they go to the router, which knows their bytes.
pub fn top_logprobs(top: Vec<TokenLogprob>) -> Vec<v1::TokenLogprob> {
    let wire = |top: TokenLogprob| v1::TokenLogprob { token_id: top.token, logprob: top.logprob, token: Vec::new() };
    top.into_iter().map(wire).collect()
}

#[cfg(test)]
mod tests {
    use tandem_engine::simulated::{SimulatedConfig, SimulatedExecutor};
    use tandem_engine::{Executor, SchedulerConfig, Speculate};

    use super::*;

    fn engine() -> EngineSpec {
        let config = SimulatedConfig { max_context_tokens: 100, blocks: 8, ..SimulatedConfig::default() };
        SimulatedExecutor::new(&config).unwrap().spec().clone()
    }

    fn spec() -> v1::RequestSpec {
        v1::RequestSpec { prompt: vec![5; 20], max_tokens: 10, ..v1::RequestSpec::default() }
    }

    #[test]
    fn a_good_request_passes() {
        let request = CheckedRequest::check(v1::RequestSpec { priority: -3, ..spec() }, &engine()).unwrap();
        let lease = Arc::new(tandem_engine::BlockPool::new(8, 16).try_reserve(2).unwrap());
        assert_eq!(request.from_prompt(lease, 1).priority, -3);
        assert_eq!(request.first_kv_tokens(), 21);
        let one = CheckedRequest::check(v1::RequestSpec { max_tokens: 1, ..spec() }, &engine()).unwrap();
        assert_eq!(one.first_kv_tokens(), 20);
        assert_eq!(request.hashes(&engine()).len(), 2);
        assert_eq!(request.finished_by(7), None);
        let quick = CheckedRequest::check(v1::RequestSpec { tpot_objective_ms: 20, ..spec() }, &engine()).unwrap();
        assert_eq!([request.stall, quick.stall].map(|stall| stall.as_millis()), [100, 20]);
        assert_eq!(request.finished_by(2), Some(v1::FinishReason::Stop));
    }

    #[tokio::test]
    async fn requests_of_two_salts_share_no_kv() {
        let executor = SimulatedExecutor::new(&SimulatedConfig { blocks: 8, ..SimulatedConfig::default() }).unwrap();
        let (prefix_caching, speculate) = (true, Speculate::Off);
        let limits = SchedulerConfig { max_running: 4, max_step_tokens: 64, inbox: 4, prefix_caching, speculate };
        let engine = Engine::start(Box::new(executor), limits);
        let of = |salt| {
            let cache_salt = CacheSalt::new([salt; 16]).to_wire();
            CheckedRequest::check(v1::RequestSpec { cache_salt, max_tokens: 1, ..spec() }, engine.spec()).unwrap()
        };
        let mut cached = Vec::new();
        for salt in [1, 2, 1, 0, 2] {
            let lease = of(salt).reserve(&engine, 20).await.unwrap();
            cached.push(lease.cached_tokens());
            let mut stream = engine.submit(of(salt).from_prompt(lease, 1)).unwrap();
            while stream.next().await.is_some() {}
        }
        assert_eq!(cached, [0, 0, 16, 0, 16]);
        let names: std::collections::BTreeSet<_> = [0, 1, 2].map(|salt| of(salt).hashes(engine.spec())).into();
        assert_eq!(names.len(), 3, "a hand-off names its blocks by them");
    }

    #[test]
    fn fields_that_are_left_out_change_nothing() {
        let absent = CheckedRequest::check(spec(), &engine()).unwrap().sampling;
        assert_eq!(*absent, SamplingParams::GREEDY);
        let asked = v1::Sampling {
            repetition_penalty: 1.1,
            logit_bias: [(9, 1.0), (3, -1.0)].into(),
            min_tokens: 10,
            top_logprobs: 2,
            ..v1::Sampling::default()
        };
        let asked = v1::RequestSpec { sampling: Some(asked), ..spec() };
        let expected = SamplingParams {
            repetition_penalty: 1.1,
            logit_bias: vec![(3, -1.0), (9, 1.0)],
            min_tokens: 10,
            top_logprobs: 2,
            ..SamplingParams::GREEDY
        };
        assert_eq!(*CheckedRequest::check(asked, &engine()).unwrap().sampling, expected);
    }

    #[test]
    fn what_an_earlier_attempt_generated_is_output() {
        let sampling = Some(v1::Sampling { min_tokens: 12, ..v1::Sampling::default() });
        let resumed = v1::RequestSpec { sampling, output_tokens: 3, max_tokens: 9, ..spec() };
        let request = CheckedRequest::check(resumed.clone(), &engine()).unwrap();
        // As many tokens in all as the first attempt would have had.
        let whole = v1::RequestSpec { prompt: vec![5; 17], max_tokens: 12, ..spec() };
        let whole = CheckedRequest::check(whole, &engine()).unwrap();
        assert_eq!(request.prompt.len() + request.max_tokens as usize, whole.prompt.len() + whole.max_tokens as usize);
        let lease = Arc::new(tandem_engine::BlockPool::new(8, 16).try_reserve(2).unwrap());
        let (first, later) = (request.from_prompt(lease.clone(), 1), request.after_first(7, lease));
        assert_eq!((first.tokens.len(), first.prompt_len, first.max_new_tokens), (20, 17, 1));
        assert_eq!((later.tokens.len(), later.prompt_len, later.max_new_tokens), (21, 17, 8));
        assert_eq!((later.computed, later.sampling.min_tokens), (20, 12));
        // Twelve of which three are there: a thirteenth is not to be had.
        let sampling = Some(v1::Sampling { min_tokens: 13, ..v1::Sampling::default() });
        let error = CheckedRequest::check(v1::RequestSpec { sampling, ..resumed }, &engine()).unwrap_err();
        assert_eq!(error.param, Some("min_tokens"));
    }

    #[test]
    fn max_tokens_is_capped_by_the_context() {
        let long = v1::RequestSpec { max_tokens: u32::MAX, ..spec() };
        assert_eq!(CheckedRequest::check(long, &engine()).unwrap().max_tokens, 80);
    }

    #[test]
    fn max_tokens_is_capped_by_the_whole_memory_where_it_is_decoded() {
        let long = v1::RequestSpec { max_tokens: u32::MAX, ..spec() };
        let tokens = |blocks| {
            let engine = EngineSpec { total_blocks: blocks, ..engine() };
            let request = CheckedRequest::check(long.clone(), &engine).unwrap().within_memory(&engine);
            (request.max_tokens, request.first_kv_tokens())
        };
        assert_eq!([tokens(8), tokens(4), tokens(2), tokens(1)], [(80, 21), (45, 21), (13, 21), (1, 20)]);
    }

    #[test]
    fn wrong_fields_are_named() {
        let sampling = |temperature, top_p| Some(v1::Sampling { temperature, top_p, ..v1::Sampling::default() });
        let biased = |bias| Some(v1::Sampling { logit_bias: [bias].into(), ..v1::Sampling::default() });
        for (spec, param) in [
            (v1::RequestSpec { prompt: vec![], ..spec() }, "prompt"),
            (v1::RequestSpec { prompt: vec![1; 100], ..spec() }, "prompt"),
            (v1::RequestSpec { prompt: vec![u32::MAX], ..spec() }, "prompt"),
            (v1::RequestSpec { max_tokens: 0, ..spec() }, "max_tokens"),
            (v1::RequestSpec { output_tokens: 20, ..spec() }, "output_tokens"),
            (v1::RequestSpec { priority: 11, ..spec() }, "priority"),
            (v1::RequestSpec { priority: i32::MIN, ..spec() }, "priority"),
            (v1::RequestSpec { cache_salt: vec![1; 8], ..spec() }, "cache_salt"),
            (v1::RequestSpec { cache_salt: vec![1; 17], ..spec() }, "cache_salt"),
            (v1::RequestSpec { output_tokens: u32::MAX, ..spec() }, "output_tokens"),
            (v1::RequestSpec { sampling: sampling(-1.0, 1.0), ..spec() }, "temperature"),
            (v1::RequestSpec { sampling: sampling(f32::NAN, 1.0), ..spec() }, "temperature"),
            (v1::RequestSpec { sampling: sampling(1.0, 1.5), ..spec() }, "top_p"),
            (v1::RequestSpec { sampling: biased((1024, 1.0)), ..spec() }, "logit_bias"),
            (
                v1::RequestSpec { sampling: Some(v1::Sampling { min_tokens: 11, ..Default::default() }), ..spec() },
                "min_tokens",
            ),
        ] {
            assert_eq!(CheckedRequest::check(spec, &engine()).unwrap_err().param, Some(param));
        }
    }

    #[test]
    fn a_deadline_is_what_is_left_whatever_time_it_is() {
        let left = |time_left_ns| {
            let spec = v1::RequestSpec { time_left_ns, ..spec() };
            CheckedRequest::check(spec, &engine()).unwrap().deadline.saturating_duration_since(clock::now())
        };
        let second = Duration::from_secs(1);
        assert!(left(second.as_nanos() as u64) <= second && left(second.as_nanos() as u64) > second / 2);
        assert!(left(0) > LONGEST_REQUEST - second && left(0) <= LONGEST_REQUEST);
        assert!(left(u64::MAX) > LATEST_DEADLINE - second && left(u64::MAX) <= LATEST_DEADLINE);
        let hour = 3600 * second;
        assert!(left(hour.as_nanos() as u64) > hour - second, "the node does not shorten what the router gives");
    }
}
