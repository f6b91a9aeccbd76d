//! Broken weights or KV must not become fluent nonsense: NaN or an infinity in Q or K fails the step with a typed
//! error, and nothing that was computed from it is shared. On tiny models made here, on every instruction set of the
//! machine.
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use tandem_engine::cpu::{CpuExecutor, ModelConfig};
use tandem_engine::ops::simd::{ArithmeticChoice, IsaChoice};
use tandem_engine::{
    Engine, EngineError, KvDtype, KvLease, Prefix, SamplingParams, SchedulerConfig, SequenceEvent, SequenceRequest,
    Speculate,
};
use tandem_proto::hash::sequence_hashes;
use tandem_proto::{CacheSalt, SequenceKey};

const VOCAB: usize = 96;
const BLOCKS: usize = 32;
const PROMPT: usize = 50;
/// Two prompts' length: what follows a prompt that is there already.
const LONGER: usize = 80;
const BROKEN: [f32; 3] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];

/// A way of computing that the machine has.
#[derive(Clone, Copy, Debug)]
struct Way {
    head_dim: usize,
    kv_dtype: KvDtype,
    isa: IsaChoice,
    arithmetic: ArithmeticChoice,
    /// Tokens of a step: fewer than a prompt has, and it comes in chunks.
    step_tokens: usize,
}

fn ways() -> Vec<Way> {
    let isas = [
        (IsaChoice::Portable, ArithmeticChoice::F32),
        (IsaChoice::Avx2, ArithmeticChoice::F32),
        (IsaChoice::Avx512, ArithmeticChoice::F32),
        (IsaChoice::Avx512, ArithmeticChoice::Auto),
        (IsaChoice::Auto, ArithmeticChoice::Auto),
    ];
    let mut ways = Vec::new();
    for head_dim in [16, 32, 64] {
        for kv_dtype in [KvDtype::F32, KvDtype::Bf16, KvDtype::Int8] {
            for step_tokens in [64, 16] {
                let way = |(isa, arithmetic)| Way { head_dim, kv_dtype, isa, arithmetic, step_tokens };
                ways.extend(isas.map(way));
            }
        }
    }
    ways
}

/// Two layers, 64 wide, two heads on one; `change` is applied to each tensor's values by its name. Given back to the
/// system with the test.
struct Model(PathBuf);

impl Drop for Model {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Model {
    fn new(test: &str, head_dim: usize, change: impl Fn(&str, &mut [f32])) -> Self {
        let (hidden, wide) = (64, 96);
        let mut shapes = vec![("token_embd".to_owned(), vec![VOCAB, hidden]), ("output_norm".to_owned(), vec![hidden])];
        for layer in 0..2 {
            let of_layer = [
                ("attn_norm", vec![hidden]),
                ("ffn_norm", vec![hidden]),
                ("attn_q", vec![2 * head_dim, hidden]),
                ("attn_k", vec![head_dim, hidden]),
                ("attn_v", vec![head_dim, hidden]),
                ("attn_output", vec![hidden, 2 * head_dim]),
                ("ffn_gate", vec![wide, hidden]),
                ("ffn_up", vec![wide, hidden]),
                ("ffn_down", vec![hidden, wide]),
            ];
            shapes.extend(of_layer.map(|(part, dims)| (format!("blk.{layer}.{part}"), dims)));
        }
        let tensors: Vec<(String, QTensor)> = shapes
            .into_iter()
            .enumerate()
            .map(|(seed, (name, dims))| {
                let values = 0..dims.iter().product::<usize>();
                let middle = if dims.len() == 1 { 1.0 } else { 0.0 };
                let mut values: Vec<f32> =
                    values.map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 5000.0 - 0.2 + middle).collect();
                change(&name, &mut values);
                let tensor = Tensor::from_vec(values, dims, &Device::Cpu).expect("dims");
                (format!("{name}.weight"), QTensor::quantize(&tensor, GgmlDType::F32).expect("stored"))
            })
            .collect();
        let numbers = [
            ("llama.block_count", 2),
            ("llama.embedding_length", hidden),
            ("llama.attention.head_count", 2),
            ("llama.attention.head_count_kv", 1),
            ("llama.attention.key_length", head_dim),
            ("llama.feed_forward_length", wide),
            ("llama.context_length", 256),
            ("tokenizer.ggml.eos_token_id", 2),
        ];
        let mut metadata = vec![
            ("general.architecture", Value::String("llama".into())),
            ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ];
        metadata.extend(numbers.map(|(key, number)| (key, Value::U32(number as u32))));
        let path = std::env::temp_dir().join(format!("tandem-broken-{}-{test}-{head_dim}.gguf", std::process::id()));
        let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(key, value)| (*key, value)).collect();
        let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let mut file = std::fs::File::create(&path).expect("temporary file");
        gguf_file::write(&mut file, &metadata, &tensors).expect("written");
        Self(path)
    }

    /// `None` where the machine has no such instruction set.
    fn engine(&self, Way { kv_dtype, isa, arithmetic, step_tokens, .. }: Way) -> Option<Engine> {
        let path = self.0.clone();
        let config = ModelConfig { path, kv_dtype, isa, arithmetic, blocks: BLOCKS, ..ModelConfig::default() };
        let limits = SchedulerConfig {
            max_running: 4,
            max_step_tokens: step_tokens,
            inbox: 8,
            prefix_caching: true,
            speculate: Speculate::Off,
        };
        match CpuExecutor::load(&config) {
            Ok(executor) => Some(Engine::start(Box::new(executor), limits)),
            Err(EngineError::InvalidArgument(_)) => None,
            Err(error) => panic!("{error}"),
        }
    }
}

fn prompt(len: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * i * 31 + i * 17) % VOCAB) as u32).collect()
}

/// As a node reserves for a prompt.
fn lease(engine: &Engine, tokens: &[u32]) -> Arc<KvLease> {
    let (spec, pool) = (engine.spec(), engine.pool());
    let hashes = sequence_hashes(SequenceKey::new(spec.model_digest, CacheSalt::NONE), tokens, spec.block_tokens);
    let prefix = Prefix { cache_salt: CacheSalt::NONE, hashes: &hashes, tokens: tokens.len() };
    Arc::new(pool.try_reserve_prefix(pool.blocks_for(LONGER + 8), prefix).expect("room"))
}

/// The last event of a sequence over these tokens, the first `computed` of which are in the lease.
async fn end(engine: &Engine, lease: Arc<KvLease>, tokens: Vec<u32>, computed: usize) -> SequenceEvent {
    let request = SequenceRequest {
        id: "test".into(),
        prompt_len: tokens.len(),
        tokens,
        computed,
        lease,
        max_new_tokens: 2,
        sampling: SamplingParams::GREEDY.into(),
        ignore_eos: true,
        stop_token_ids: Vec::new(),
        deadline: None,
        priority: 0,
        report_layers: Vec::new(),
    };
    let mut stream = engine.submit(request).expect("a valid request");
    loop {
        let event = tokio::time::timeout(Duration::from_secs(60), stream.next()).await.expect("hangs");
        if let Some(event) = event.filter(SequenceEvent::is_last) {
            return event;
        }
    }
}

fn assert_not_numbers(event: &SequenceEvent, what: &str) {
    let SequenceEvent::Failed(EngineError::Executor(why)) = event else { panic!("{what}: {event:?}") };
    assert!(why.contains("not numbers"), "{what}: {why}");
}

#[tokio::test]
async fn weights_that_give_no_numbers_in_q_or_k_fail_the_step() {
    let mut run = 0;
    for way in ways() {
        for part in ["attn_q", "attn_k"] {
            for value in BROKEN {
                // One weight: one element of Q or K of each token.
                let broken = |name: &str, values: &mut [f32]| {
                    if name == format!("blk.1.{part}") {
                        values[64 * 3 + 7] = value;
                    }
                };
                let model = Model::new("weights", way.head_dim, broken);
                let Some(engine) = model.engine(way) else { continue };
                let what = format!("{value} in {part}, {way:?}");
                let event = end(&engine, lease(&engine, &prompt(PROMPT)), prompt(PROMPT), 0).await;
                assert_not_numbers(&event, &what);
                assert_eq!((engine.pool().cached(), engine.pool().free()), (0, BLOCKS), "{what}");
                run += 1;
            }
        }
    }
    assert!(run >= 3 * 3 * 2 * 6, "plain code runs everywhere");
}

#[tokio::test]
async fn all_of_q_broken_fails_the_step() {
    for way in ways() {
        let broken = |name: &str, values: &mut [f32]| {
            if name == "blk.0.attn_q" {
                values.fill(f32::NAN);
            }
        };
        let Some(engine) = Model::new("queries", way.head_dim, broken).engine(way) else { continue };
        let event = end(&engine, lease(&engine, &prompt(PROMPT)), prompt(PROMPT), 0).await;
        assert_not_numbers(&event, &format!("{way:?}"));
        assert_eq!((engine.pool().cached(), engine.pool().free()), (0, BLOCKS), "{way:?}");
    }
}

/// A bit that flipped in memory, or a transfer that brought something else.
#[tokio::test]
async fn one_broken_element_of_an_earlier_tokens_k_fails_the_step_and_shares_nothing() {
    for way in ways() {
        let model = Model::new("earlier", way.head_dim, |_, _| {});
        for value in BROKEN {
            let Some(engine) = model.engine(way) else { continue };
            let held = lease(&engine, &prompt(PROMPT));
            let event = end(&engine, Arc::clone(&held), prompt(PROMPT), 0).await;
            assert!(matches!(event, SequenceEvent::Finished { .. }), "{event:?}");
            assert_eq!(lease(&engine, &prompt(LONGER)).cached_tokens(), 48, "its three full blocks");

            // The first element of K of the first token and head; of 8-bit numbers their scale, which all of them
            // share.
            let words = engine.spec().block_bytes / 8 * held.blocks()[0] as usize;
            let (at, bits, mask) = match way.kv_dtype {
                KvDtype::F32 => (words, u64::from(value.to_bits()), 0xffff_ffff),
                KvDtype::Bf16 => (words, u64::from(value.to_bits() >> 16), 0xffff),
                KvDtype::Int8 => (words + 16 * way.head_dim / 8, u64::from(value.to_bits() >> 16), 0xffff),
            };
            let mut bytes = [0; 8];
            engine.memory().read(at * 8, &mut bytes);
            let word = u64::from_ne_bytes(bytes) & !mask | bits;
            engine.memory().write(at * 8, &word.to_ne_bytes());

            // A prompt that goes on where the first one ended, with the first one's KV before it.
            let event = end(&engine, held, prompt(LONGER), PROMPT).await;
            let what = format!("{value} in K, {way:?}");
            assert_not_numbers(&event, &what);
            assert_eq!(lease(&engine, &prompt(LONGER)).cached_tokens(), 48, "nothing new is shared: {what}");
        }
    }
}
