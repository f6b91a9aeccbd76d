//! The model executor on a tiny model made here: the same bits whatever the batch. Files that it refuses are in
//! `model/files.rs`. The real model is `golden.rs`'s matter.
#[path = "model/files.rs"]
mod files;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use proptest::prelude::*;
use tandem_engine::cpu::{CpuExecutor, ModelConfig, ModelLoader};
use tandem_engine::footprint::Footprint;
use tandem_engine::memory::MemoryFiles;
use tandem_engine::ops::simd::{ArithmeticChoice, Isa, IsaChoice};
use tandem_engine::sampling::uniform;
use tandem_engine::{
    Arithmetic, Batch, BatchItem, BlockPool, Choose, Chosen, EngineError, Executor, History, KvDtype, KvLease,
    SamplingParams, Tokens,
};
use tandem_proto::BLOCK_TOKENS;

const VOCAB: usize = 96;
const DTYPES: [KvDtype; 3] = [KvDtype::F32, KvDtype::Bf16, KvDtype::Int8];

type Keys = Vec<(String, Value)>;
type Tensors = Vec<(String, QTensor)>;

/// A GGUF file that goes away with the test.
struct TinyModel(PathBuf);

impl Drop for TinyModel {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl TinyModel {
    fn new(name: &str) -> Self {
        Self::with(name, |_| {})
    }

    fn with(name: &str, change: impl FnOnce(&mut Vec<(String, Value)>)) -> Self {
        let (mut metadata, tensors) = Self::content();
        change(&mut metadata);
        Self::written(name, &metadata, &tensors)
    }

    fn written(name: &str, metadata: &[(String, Value)], tensors: &[(String, QTensor)]) -> Self {
        let path = std::env::temp_dir().join(format!("tandem-tiny-{}-{name}.gguf", std::process::id()));
        write(&path, metadata, tensors);
        Self(path)
    }

    /// 64 wide, Q4_1 but for an F16 V (so that Q, K and V do not fuse) and a Q8_0 embedding.
    fn content() -> (Keys, Tensors) {
        Self::content_of([64, 32, 96], |part| match part {
            "token_embd" => GgmlDType::Q8_0,
            "attn_v" => GgmlDType::F16,
            _ => GgmlDType::Q4_1,
        })
    }

    /// Two layers with 4 heads on 2, matrices in the types that `dtype` gives for their names.
    fn content_of([hidden, kv, wide]: [usize; 3], dtype: impl Fn(&str) -> GgmlDType) -> (Keys, Tensors) {
        let mut tensors = vec![
            tensor("token_embd.weight", &[VOCAB, hidden], dtype("token_embd"), 1),
            tensor("output_norm.weight", &[hidden], GgmlDType::F32, 2),
        ];
        for layer in 0..2 {
            let mut add = |part: &str, dims: &[usize]| {
                let dtype = if dims.len() == 1 { GgmlDType::F32 } else { dtype(part) };
                let seed = 3 + tensors.len() as u64;
                tensors.push(tensor(&format!("blk.{layer}.{part}.weight"), dims, dtype, seed));
            };
            add("attn_norm", &[hidden]);
            add("ffn_norm", &[hidden]);
            add("attn_q", &[hidden, hidden]);
            add("attn_k", &[kv, hidden]);
            add("attn_v", &[kv, hidden]);
            add("attn_output", &[hidden, hidden]);
            add("ffn_gate", &[wide, hidden]);
            add("ffn_up", &[wide, hidden]);
            add("ffn_down", &[hidden, wide]);
        }
        let mut metadata = vec![("general.architecture".to_string(), Value::String("llama".into()))];
        for (key, number) in [
            ("llama.block_count", 2),
            ("llama.embedding_length", hidden as u32),
            ("llama.attention.head_count", 4),
            ("llama.attention.head_count_kv", 2),
            ("llama.feed_forward_length", wide as u32),
            ("llama.context_length", 256),
            ("tokenizer.ggml.eos_token_id", 2),
        ] {
            metadata.push((key.into(), Value::U32(number)));
        }
        metadata.push(("llama.attention.layer_norm_rms_epsilon".into(), Value::F32(1e-5)));
        (metadata, tensors)
    }

    fn load(&self, kv_dtype: KvDtype) -> Result<CpuExecutor, EngineError> {
        self.load_blocks_of(16, kv_dtype)
    }

    fn load_blocks_of(&self, block_tokens: usize, kv_dtype: KvDtype) -> Result<CpuExecutor, EngineError> {
        load(&self.0, block_tokens, kv_dtype)
    }

    /// With the f32 kernels, and with this machine's fastest ones.
    fn load_both(&self, block_tokens: usize, kv_dtype: KvDtype) -> [CpuExecutor; 2] {
        [ArithmeticChoice::F32, ArithmeticChoice::Auto].map(|arithmetic| {
            let config = ModelConfig { arithmetic, ..config(&self.0, block_tokens, kv_dtype) };
            CpuExecutor::load(&config).expect("loads")
        })
    }

    /// The file's bytes, and what loading says about the file with `bytes` in it.
    fn bytes(&self) -> Vec<u8> {
        std::fs::read(&self.0).expect("readable")
    }

    fn load_bytes(&self, bytes: &[u8]) -> Result<CpuExecutor, EngineError> {
        std::fs::write(&self.0, bytes).expect("writable");
        self.load(KvDtype::Bf16)
    }
}

fn load(path: &Path, block_tokens: usize, kv_dtype: KvDtype) -> Result<CpuExecutor, EngineError> {
    CpuExecutor::load(&config(path, block_tokens, kv_dtype))
}

fn config(path: &Path, block_tokens: usize, kv_dtype: KvDtype) -> ModelConfig {
    ModelConfig { path: path.to_owned(), kv_dtype, blocks: 32, block_tokens, threads: 2, ..ModelConfig::default() }
}

fn write(path: &Path, metadata: &[(String, Value)], tensors: &[(String, QTensor)]) {
    let mut file = std::fs::File::create(path).expect("temporary file");
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    gguf_file::write(&mut file, &metadata, &tensors).expect("written");
}

fn tensor(name: &str, dims: &[usize], dtype: GgmlDType, seed: u64) -> (String, QTensor) {
    let n: usize = dims.iter().product();
    let values: Vec<f32> = (0..n as u64).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 5000.0 - 0.2).collect();
    let values = match dims.len() {
        1 => values.into_iter().map(|x| 1.0 + x).collect(),
        _ => values,
    };
    let tensor = Tensor::from_vec(values, dims, &Device::Cpu).expect("dims");
    (name.into(), QTensor::quantize(&tensor, dtype).expect("quantized"))
}

fn prompt(n: usize, seed: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * i * 31 + i * 17 + seed * 29) % VOCAB) as u32).collect()
}

fn item(seq: u64, tokens: &[u32], start: usize, blocks: &Arc<KvLease>) -> BatchItem {
    let choose = Choose {
        sampling: Arc::new(SamplingParams::GREEDY),
        uniform: 0.0,
        forbidden: None,
        history: None,
        drafts: Vec::new(),
    };
    let tokens = Tokens::Given(tokens.into());
    BatchItem { seq, tokens, start, blocks: Arc::clone(blocks), choose: Some(choose) }
}

fn batch(items: Vec<BatchItem>) -> Batch {
    Batch { items, report_layers: Vec::new() }
}

/// What a step chooses.
fn run(executor: &mut CpuExecutor, batch: &Batch) -> Result<Vec<Chosen>, EngineError> {
    executor.begin(batch)?;
    executor.finish(&mut |_| {}).map(<[_]>::to_vec)
}

fn step(executor: &mut CpuExecutor, items: Vec<BatchItem>) -> Vec<Vec<f32>> {
    run(executor, &batch(items)).expect("a step");
    let logits = executor.logits();
    (0..logits.items()).map(|item| logits.of(item).expect("wanted").to_vec()).collect()
}

fn lease(pool: &BlockPool, tokens: usize) -> Arc<KvLease> {
    Arc::new(pool.try_reserve(pool.blocks_for(tokens)).expect("room"))
}

#[test]
fn the_spec_comes_from_the_file() {
    let model = TinyModel::new("spec");
    let (f32, bf16) = (model.load(KvDtype::F32).expect("loads"), model.load(KvDtype::Bf16).expect("loads"));
    let (f32, bf16) = (f32.spec().clone(), bf16.spec().clone());
    assert_eq!((bf16.layers, bf16.kv_heads, bf16.head_dim, bf16.vocab_size), (2, 2, 16, VOCAB));
    assert_eq!((bf16.eos_token_id, bf16.max_context_tokens, bf16.total_blocks), (2, 256, 32));
    assert_eq!((bf16.block_bytes, f32.block_bytes), (2 * 2 * 2 * 16 * 16 * 2, 2 * 2 * 2 * 16 * 16 * 4));
    assert!(bf16.model_name.starts_with("tandem-tiny"), "{}", bf16.model_name);
    assert_eq!(bf16.model_digest, xxhash_rust::xxh3::xxh3_64(&model.bytes()));
    assert_eq!(f32.model_digest, bf16.model_digest);
    let int8 = model.load(KvDtype::Int8).expect("loads").spec().clone();
    assert_eq!(int8.block_bytes, 2 * 2 * 2 * 16 * (16 + 2));
    let wide = model.load_blocks_of(64, KvDtype::F32).expect("loads").spec().clone();
    assert_eq!((wide.block_tokens, wide.block_bytes), (64, 4 * f32.block_bytes));
    let orders = [&f32, &bf16, &int8].map(|spec| spec.kv_order.name());
    assert_eq!(orders, ["f32-rows", "bf16-pairs", "int8-pairs"]);
    let fastest = Isa::detect().arithmetic();
    assert_eq!([&f32, &bf16, &int8].map(|spec| spec.arithmetic), [Arithmetic::F32, fastest, fastest]);
    let mut digests = [f32, bf16, int8, wide].map(|spec| spec.compatibility_digest);
    digests.sort_unstable();
    assert!(digests.windows(2).all(|two| two[0] != two[1]));
}

#[test]
fn nodes_of_another_arithmetic_have_another_digest() {
    let model = TinyModel::new("arithmetic");
    let spec = |isa, arithmetic| {
        let config = ModelConfig { path: model.0.clone(), blocks: 4, isa, arithmetic, ..ModelConfig::default() };
        CpuExecutor::load(&config).ok().map(|executor| executor.spec().clone())
    };
    let exact = spec(IsaChoice::Auto, ArithmeticChoice::F32).expect("everywhere");
    assert_eq!(
        spec(IsaChoice::Portable, ArithmeticChoice::F32).expect("everywhere"),
        exact,
        "the same bits on every machine"
    );
    let loose = [IsaChoice::Portable, IsaChoice::Avx2, IsaChoice::Avx512, IsaChoice::Amx]
        .map(|isa| spec(isa, ArithmeticChoice::Auto));
    for spec in loose.into_iter().flatten() {
        let same = spec.arithmetic == exact.arithmetic;
        assert_eq!(spec.compatibility_digest == exact.compatibility_digest, same, "{}", spec.arithmetic.name());
        assert_eq!(spec.kv_order, exact.kv_order);
    }
}

#[test]
fn a_model_that_takes_more_memory_than_there_is_is_refused_before_it_is_read() {
    let model = TinyModel::new("memory");
    let folder = tempfile::tempdir().expect("temporary directory");
    let machine = MemoryFiles {
        meminfo: folder.path().join("meminfo"),
        groups: folder.path().join("cgroup"),
        cgroup_root: folder.path().into(),
    };
    std::fs::write(&machine.meminfo, "MemTotal: 8388608 kB\nMemAvailable: 8388608 kB\n").expect("written");
    std::fs::write(&machine.groups, "0::/\n").expect("written");
    // In f32 the weights take the same memory on every machine.
    let config = ModelConfig {
        path: model.0.clone(),
        max_step_tokens: 64,
        max_running: 4,
        arithmetic: ArithmeticChoice::F32,
        ..ModelConfig::default()
    };
    let open = || ModelLoader::open(&config).expect("a good file");
    let Footprint { weights, workspace } = open().footprint();
    let kv = 32 * open().block_bytes() as u64;
    // Two layers of Q4_1 matrices, V in f16, an embedding of 8 bits.
    let q4_1 = 64 * 64 * 2 + 32 * 64 + 96 * 64 * 3;
    let matrices = 2 * (q4_1 * 20 / 32 + 32 * 64 * 2) + 96 * 64 * 34 / 32;
    assert_eq!((weights, workspace), (matrices + 5 * 64 * 4, 4 * (64 * (2 * 64 + 128 + 64 + 4 * 96) + 4 * 96)));

    // Of a group's limit seven eighths may be filled.
    let limit = |bytes: u64| std::fs::write(folder.path().join("memory.max"), bytes.to_string()).expect("written");
    limit((weights + workspace + kv) / 7 * 8 + 16);
    let executor = open().load(32, &machine).expect("fits");
    assert_eq!(executor.spec().total_blocks, 32);
    limit((weights + workspace + kv) / 7 * 8 - 16);
    let misfit = match open().load(32, &machine) {
        Err(EngineError::DoesNotFit(misfit)) => misfit,
        other => panic!("{:?}", other.map(|_| "loaded")),
    };
    assert_eq!((misfit.footprint, misfit.kv), (open().footprint(), kv));
    assert!(misfit.to_string().contains("--kv-blocks"), "{misfit}");
    // A share is one of what the model leaves.
    let left = open().footprint().left_for_kv(machine.total().expect("a limit"));
    assert!(left < kv && left + 64 > kv, "{left} of {kv}");
}

#[test]
fn an_item_alone_equals_the_item_in_a_batch_bit_for_bit() {
    let model = TinyModel::new("batch");
    for mut executor in DTYPES.into_iter().flat_map(|kv_dtype| model.load_both(16, kv_dtype)) {
        let pool = BlockPool::new(32, 16);
        let sizes = [1, 40, 17, 100, 3];
        let alone: Vec<Vec<f32>> = sizes
            .iter()
            .enumerate()
            .map(|(i, &n)| step(&mut executor, vec![item(0, &prompt(n, i), 0, &lease(&pool, n))]).remove(0))
            .collect();
        let items = sizes.iter().enumerate().map(|(i, &n)| item(i as u64, &prompt(n, i), 0, &lease(&pool, n)));
        let items = items.collect();
        assert_eq!(step(&mut executor, items), alone);
    }
}

/// Types mixed as in files of K-quants: Q and K in another one than V, gate and up in two that are kept in the same.
#[test]
fn quantized_weights_give_the_bits_of_the_numbers_that_they_stand_for() {
    for k_quants in [GgmlDType::Q4K, GgmlDType::Q5K] {
        let (metadata, tensors) = TinyModel::content_of([256, 128, 256], |part| match part {
            "attn_v" | "token_embd" => GgmlDType::Q6K,
            "attn_output" => GgmlDType::Q5_1,
            "ffn_gate" => GgmlDType::Q4_0,
            "ffn_up" => GgmlDType::Q4_1,
            "ffn_down" => GgmlDType::Q5_0,
            _ => k_quants,
        });
        let in_f32 = |tensor: &QTensor| {
            let numbers = tensor.dequantize(&Device::Cpu).expect("numbers");
            QTensor::quantize(&numbers, GgmlDType::F32).expect("as they are")
        };
        let numbers: Tensors = tensors.iter().map(|(name, tensor)| (name.clone(), in_f32(tensor))).collect();
        let models = [("mixed", &tensors), ("mixed-f32", &numbers)]
            .map(|(name, tensors)| TinyModel::written(&format!("{name}-{k_quants:?}"), &metadata, tensors));
        let mut steps = models.each_ref().map(|model| {
            let [mut exact, mut fast] = model.load_both(16, KvDtype::F32);
            let prompts = |executor: &mut CpuExecutor| {
                let pool = BlockPool::new(32, 16);
                let items = [1, 40, 3].into_iter().enumerate();
                step(executor, items.map(|(i, n)| item(i as u64, &prompt(n, i), 0, &lease(&pool, n))).collect())
            };
            (prompts(&mut exact), prompts(&mut fast))
        });
        let [(exact, fast), (exact_f32, fast_f32)] = &mut steps;
        assert_eq!(exact, exact_f32, "{k_quants:?}");
        for (a, b) in fast.iter().flatten().zip(fast_f32.iter().flatten()) {
            assert!((a - b).abs() < 0.03 * (1.0 + b.abs()), "{k_quants:?}: {a}, not {b}");
        }
    }
}

#[test]
fn the_size_of_a_block_changes_no_bit() {
    let model = TinyModel::new("block-size");
    for kv_dtype in DTYPES {
        let of_size = BLOCK_TOKENS.map(|block_tokens| {
            model.load_both(block_tokens, kv_dtype).map(|mut executor| {
                let pool = BlockPool::new(32, block_tokens);
                let (blocks, tokens) = (lease(&pool, 150), prompt(150, 1));
                // A prompt in two chunks, then a token.
                let parts = [(0, 70), (70, 149), (149, 150)];
                parts.map(|(from, to)| step(&mut executor, vec![item(0, &tokens[from..to], from, &blocks)]))
            })
        });
        let [first, others @ ..] = &of_size;
        assert!(others.iter().all(|other| other == first), "{kv_dtype:?}");
    }
    for block_tokens in [0, 8, 17, 48, 256] {
        let error = model.load_blocks_of(block_tokens, KvDtype::Bf16).err().expect("refused").to_string();
        assert!(error.contains("[16, 32, 64, 128]"), "{error}");
    }
}

#[test]
fn a_layer_that_is_done_is_not_written_again() {
    let model = TinyModel::new("layers-done");
    for kv_dtype in DTYPES {
        let mut executor = model.load(kv_dtype).expect("loads");
        let (memory, layers) = (executor.memory(), executor.spec().layers);
        let arena = memory.place().host().expect("main memory");
        let words = executor.spec().block_bytes / 8;
        let pool = BlockPool::new(32, 16);
        let leases = [lease(&pool, 70), lease(&pool, 5)];
        let items = leases.iter().zip([70, 5]).enumerate();
        let items = items.map(|(seq, (lease, n))| item(seq as u64, &prompt(n, seq), 0, lease)).collect();
        // Words of the first `n` layers of every block of the step.
        let first = |n: usize| -> Vec<u64> {
            let blocks = leases.iter().flat_map(|lease| lease.blocks());
            let parts = blocks.map(|&block| &arena[block as usize * words..][..words * n / layers]);
            parts.flatten().map(|word| word.load(std::sync::atomic::Ordering::Relaxed)).collect()
        };
        let mut seen = Vec::new();
        let mut layers_done = |n| seen.push((n, first(n), first(layers)));
        executor.begin(&Batch { items, report_layers: vec![1, 2] }).expect("a batch");
        executor.finish(&mut layers_done).expect("a step");
        let counts: Vec<_> = seen.iter().map(|(n, ..)| *n).collect();
        assert_eq!(counts, [1, 2]);
        assert!(seen.iter().all(|(n, then, _)| *then == first(*n)), "{kv_dtype:?}");
        assert_ne!(seen[0].2, seen[1].2, "the second layer was not there yet");
    }
}

#[test]
fn bad_batches_are_refused() {
    let model = TinyModel::new("bad-batch");
    let mut executor = model.load(KvDtype::Bf16).expect("loads");
    let pool = BlockPool::new(64, 16);
    let blocks = lease(&pool, 32);
    let mut refused = |items| match run(&mut executor, &batch(items)) {
        Err(EngineError::InvalidArgument(_)) => true,
        Err(error) => panic!("{error}"),
        Ok(_) => false,
    };
    assert!(refused(vec![item(0, &[], 0, &blocks)]), "no tokens");
    assert!(refused(vec![item(0, &[VOCAB as u32], 0, &blocks)]), "unknown token");
    assert!(refused(vec![item(0, &[1, 2], 31, &blocks)]), "lease too short");
    assert!(refused(vec![item(0, &[1], usize::MAX, &blocks)]), "overflow");
    assert!(refused(vec![item(0, &[1], 0, &blocks), item(1, &[1], 1, &blocks)]), "one block twice");
    let _rest = lease(&pool, 30 * 16);
    assert!(refused(vec![item(0, &[1], 0, &lease(&pool, 16))]), "block 32 of 32");
    assert!(!refused(vec![item(0, &[1], 0, &blocks)]));
    let last = BatchItem { tokens: Tokens::Last, ..item(9, &[1], 0, &blocks) };
    assert!(refused(vec![last]), "the token that nobody chose");
    assert!(run(&mut executor, &Batch::default()).expect("nothing to do").is_empty());
    assert!(matches!(executor.finish(&mut |_| {}), Err(EngineError::Executor(_))), "no step was begun");
}

/// An answer of `steps` tokens, each step's token by `kind` from the second on; and the words of its blocks.
fn answer(
    executor: &mut CpuExecutor,
    sampling: &Arc<SamplingParams>,
    steps: usize,
    kind: impl Fn(u32) -> Tokens,
) -> (Vec<Chosen>, Vec<u64>) {
    let (pool, mut tokens) = (BlockPool::new(32, executor.spec().block_tokens), prompt(20, 3));
    let (blocks, words) = (lease(&pool, tokens.len() + steps), executor.spec().block_bytes / 8);
    let (mut start, mut computed, mut all) = (0, Tokens::Given(tokens.clone()), Vec::new());
    for _ in 0..steps {
        let given = computed != Tokens::Last;
        let history = History { tokens: tokens[..start].to_vec(), prompt_len: 20 };
        let choose = Choose {
            sampling: Arc::clone(sampling),
            uniform: uniform(sampling.seed, tokens.len()),
            forbidden: None,
            history: (given && sampling.penalizes()).then_some(history),
            drafts: Vec::new(),
        };
        let item = BatchItem { seq: 5, tokens: computed, start, blocks: Arc::clone(&blocks), choose: Some(choose) };
        all.extend(run(executor, &batch(vec![item])).expect("a step"));
        let Some(Chosen::Token(sampled)) = all.last() else { panic!("{all:?}") };
        (start, computed) = (tokens.len(), kind(sampled.token));
        tokens.push(sampled.token);
    }
    let memory = executor.memory();
    let arena = memory.place().host().expect("main memory");
    let words = blocks.blocks().iter().flat_map(|&block| &arena[block as usize * words..][..words]);
    (all, words.map(|word| word.load(std::sync::atomic::Ordering::Relaxed)).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn the_last_token_gives_the_tokens_and_kv_of_the_given_one(
        temperature in 0f32..2.0, seed in any::<u64>(), penalty in prop_oneof![Just(1.0), 0.5f32..2.0],
        kv_dtype in prop::sample::select(&DTYPES[..]), steps in 1usize..40,
    ) {
        let model = TinyModel::new("last");
        let sampling = SamplingParams { temperature, seed, repetition_penalty: penalty, ..SamplingParams::GREEDY };
        let sampling = Arc::new(sampling);
        let mut executors = [(); 2].map(|()| model.load(kv_dtype).expect("loads"));
        let [by_slot, given] = &mut executors;
        let expected = answer(given, &sampling, steps, |token| Tokens::Given(vec![token]));
        prop_assert_eq!(answer(by_slot, &sampling, steps, |_| Tokens::Last), expected);
        prop_assert_eq!(by_slot.slots(), 1);
        by_slot.forget(5);
        prop_assert_eq!(by_slot.slots(), 0);
        let pool = BlockPool::new(32, 16);
        let last = BatchItem { tokens: Tokens::Last, ..item(5, &[1], 0, &lease(&pool, 1)) };
        let refused = matches!(run(by_slot, &batch(vec![last])), Err(EngineError::InvalidArgument(_)));
        prop_assert!(refused, "a forgotten sequence has no last token");
    }

    #[test]
    fn chunks_equal_the_whole_bit_for_bit(
        n in 2usize..120, cuts in prop::collection::vec(1usize..120, 0..4), kv_dtype in prop::sample::select(&DTYPES[..]),
        block_tokens in prop::sample::select(&BLOCK_TOKENS[..]),
    ) {
        let model = TinyModel::new("chunks");
        let mut cuts: Vec<usize> = cuts.into_iter().filter(|&cut| cut < n).chain([0, n]).collect();
        cuts.sort_unstable();
        cuts.dedup();
        for mut executor in model.load_both(block_tokens, kv_dtype) {
            let (pool, tokens) = (BlockPool::new(32, block_tokens), prompt(n, n));
            let whole = step(&mut executor, vec![item(0, &tokens, 0, &lease(&pool, n))]);
            let blocks = lease(&pool, n);
            let mut last = Vec::new();
            for pair in cuts.windows(2) {
                last = step(&mut executor, vec![item(0, &tokens[pair[0]..pair[1]], pair[0], &blocks)]);
            }
            prop_assert_eq!(last, whole, "{}", executor.spec().arithmetic.name());
        }
    }
}
