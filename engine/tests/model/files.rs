//! Model files that are damaged, cut, in parts or of a kind that is not served: refused without a panic, and named.
use super::*;

#[test]
fn a_file_cut_anywhere_is_refused() {
    let model = TinyModel::new("cut");
    let bytes = model.bytes();
    // The file ends in padding that no tensor needs.
    for length in (0..bytes.len() - 64).step_by(997).chain(0..64) {
        let Err(EngineError::Model(why)) = model.load_bytes(&bytes[..length]) else { panic!("cut at {length}") };
        assert!(why.contains("tandem-tiny"), "{why}");
    }
}

#[test]
fn what_cannot_be_served_is_named() {
    let changed = |name: &str, key: &str, value: Value| {
        let model = TinyModel::with(name, |metadata| {
            metadata.retain(|(k, _)| k != key);
            metadata.push((key.into(), value));
        });
        model.load(KvDtype::Bf16).err().expect("refused").to_string()
    };
    assert!(changed("arch", "general.architecture", Value::String("mamba".into())).contains("mamba"));
    assert!(changed("layers", "llama.block_count", Value::U32(3)).contains("blk.2.attn_norm.weight"));
    assert!(changed("less", "llama.block_count", Value::U32(1)).contains("blk.1."));
    assert!(changed("heads", "llama.attention.head_count", Value::U32(0)).contains("contradict"));
    assert!(changed("kv", "llama.attention.head_count_kv", Value::U32(3)).contains("contradict"));
    assert!(changed("width", "llama.feed_forward_length", Value::U32(128)).contains("shape"));
    assert!(changed("rope", "llama.rope.scaling.type", Value::String("yarn".into())).contains("yarn"));
    assert!(changed("eos", "tokenizer.ggml.eos_token_id", Value::U32(96)).contains("contradict"));
    // Mixtral's files call themselves Llamas.
    assert!(changed("experts", "llama.expert_count", Value::U32(8)).contains("mixture of 8 experts"));
}

#[test]
fn a_type_that_cannot_be_unpacked_is_named_with_its_tensor() {
    const NAME: &str = "blk.1.ffn_down.weight";
    let model = TinyModel::new("types");
    let bytes = model.bytes();
    let at = bytes.windows(NAME.len()).position(|window| window == NAME.as_bytes()).expect("its name");
    // Behind the name: the number of dimensions, the two dimensions, the type.
    let at = at + NAME.len() + 4 + 2 * 8;
    for (number, name) in
        [(23u32, "IQ4_XS"), (34, "TQ1_0"), (39, "MXFP4"), (40, "NVFP4"), (15, "Q8_K"), (999, "number 999")]
    {
        let mut bytes = bytes.clone();
        bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
        let why = model.load_bytes(&bytes).err().expect("refused").to_string();
        assert!(why.contains(NAME) && why.contains(&format!("the type {name},")), "{why}");
    }
}

/// A model in three parts, as `gguf-split` writes them: the first has all keys and no tensors.
struct Parts(tempfile::TempDir);

impl Parts {
    fn new() -> Self {
        let parts = Self(tempfile::tempdir().expect("temporary directory"));
        let (metadata, mut tensors) = TinyModel::content();
        let total = tensors.len();
        let rest = tensors.split_off(total / 2);
        for (number, (keys, tensors)) in [(metadata, vec![]), (vec![], tensors), (vec![], rest)].into_iter().enumerate()
        {
            parts.write(number, 3, total, keys, &tensors);
        }
        parts
    }

    fn path(&self, number: usize) -> PathBuf {
        self.0.path().join(format!("tiny-{:05}-of-00003.gguf", number + 1))
    }

    fn write(
        &self,
        number: usize,
        count: u16,
        total: usize,
        mut keys: Vec<(String, Value)>,
        tensors: &[(String, QTensor)],
    ) {
        keys.push(("split.no".into(), Value::U16(number as u16)));
        keys.push(("split.count".into(), Value::U16(count)));
        keys.push(("split.tensors.count".into(), Value::I32(total as i32)));
        write(&self.path(number), &keys, tensors);
    }

    fn why(&self, number: usize) -> String {
        load(&self.path(number), 16, KvDtype::F32).err().expect("refused").to_string()
    }
}

#[test]
fn a_model_in_parts_is_the_model_in_one_file() {
    let (parts, whole) = (Parts::new(), TinyModel::new("whole"));
    let mut executor = load(&parts.path(0), 16, KvDtype::F32).expect("loads");
    assert_eq!(executor.spec().model_name, "tiny");
    let digests = [0, 1, 2].map(|part| xxhash_rust::xxh3::xxh3_64(&std::fs::read(parts.path(part)).expect("a part")));
    assert_eq!(executor.spec().model_digest, tandem_proto::model::digest_of_parts(&digests));
    let logits = |executor: &mut CpuExecutor| {
        step(executor, vec![item(0, &prompt(40, 3), 0, &lease(&BlockPool::new(32, 16), 40))])
    };
    assert_eq!(logits(&mut executor), logits(&mut whole.load(KvDtype::F32).expect("loads")));
}

#[test]
fn parts_that_are_missing_misplaced_or_foreign_are_named() {
    let parts = Parts::new();
    let second = std::fs::read(parts.path(1)).expect("a part");
    assert!(parts.why(1).contains("give the first one, tiny-00001-of-00003.gguf"), "{}", parts.why(1));
    std::fs::rename(parts.path(0), parts.0.path().join("other.gguf")).expect("renamed");
    let why = load(&parts.0.path().join("other.gguf"), 16, KvDtype::F32).err().expect("refused").to_string();
    assert!(why.contains("-00001-of-00003.gguf"), "{why}");
    std::fs::rename(parts.0.path().join("other.gguf"), parts.path(0)).expect("renamed");

    std::fs::remove_file(parts.path(1)).expect("removed");
    assert!(parts.why(0).contains("tiny-00002-of-00003.gguf"), "{}", parts.why(0));
    std::fs::copy(parts.path(2), parts.path(1)).expect("copied");
    assert!(
        parts.why(0).contains("tiny-00002-of-00003.gguf: damaged GGUF header: is not part 2 of 3"),
        "{}",
        parts.why(0)
    );
    std::fs::write(parts.path(1), &second[..second.len() / 3]).expect("written");
    assert!(parts.why(0).contains("tiny-00002-of-00003.gguf"), "{}", parts.why(0));

    let (_, mut tensors) = TinyModel::content();
    let total = tensors.len();
    // Of another cut of the model: tensors of the third part, too, or fewer than there should be.
    parts.write(1, 3, total, vec![], &tensors);
    assert!(parts.why(0).contains("tensors, not"), "{}", parts.why(0));
    let rest = tensors.split_off(total / 2);
    parts.write(1, 3, total, vec![], &rest[..total / 2]);
    assert!(parts.why(0).contains("is in another part, too"), "{}", parts.why(0));
    parts.write(1, 4, total, vec![], &tensors);
    assert!(parts.why(0).contains("part 2 of 4"), "{}", parts.why(0));
    std::fs::write(parts.path(1), second).expect("written");
    load(&parts.path(0), 16, KvDtype::F32).expect("whole again");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn flipped_bytes_never_panic(flips in prop::collection::vec((0usize..4000, any::<u8>()), 1..8)) {
        let model = TinyModel::new("flips");
        let mut bytes = model.bytes();
        for (at, byte) in flips {
            bytes[at] = byte;
        }
        // A flip in a name or a weight may go unnoticed; then the model must run.
        if let Ok(mut executor) = model.load_bytes(&bytes) {
            let pool = BlockPool::new(32, 16);
            let _ = run(&mut executor, &batch(vec![item(0, &[1, 2, 3], 0, &lease(&pool, 3))]));
        }
    }
}
