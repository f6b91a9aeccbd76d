//! Directories that lack something, or whose files are not what they should be: refused with the file's name, without a
//! panic.
use std::path::Path;

use proptest::prelude::*;
use tempfile::TempDir;

use super::{data, load};

const SHARD: &str = "model-00002-of-00002.safetensors";

/// A copy of a directory of the test data.
fn copy(name: &str) -> TempDir {
    let copy = tempfile::tempdir().expect("temporary directory");
    for entry in std::fs::read_dir(data().join(name)).expect("test data") {
        let path = entry.expect("test data").path();
        std::fs::copy(&path, copy.path().join(path.file_name().expect("a name"))).expect("copied");
    }
    copy
}

fn why(directory: &Path) -> String {
    load(directory).err().expect("refused").to_string()
}

/// Puts `to` for `from` into a text file of a copy of `name`, and says why it is refused.
fn edited(name: &str, file: &str, from: &str, to: &str) -> String {
    let copy = copy(name);
    let path = copy.path().join(file);
    let text = std::fs::read_to_string(&path).expect("a text");
    assert!(text.contains(from), "{from}");
    std::fs::write(&path, text.replace(from, to)).expect("written");
    why(copy.path())
}

#[test]
fn a_missing_file_is_named() {
    for (name, file) in [("llama", "config.json"), ("llama", SHARD), ("qwen3", "model.safetensors")] {
        let copy = copy(name);
        assert!(load(copy.path()).is_ok());
        std::fs::remove_file(copy.path().join(file)).expect("removed");
        assert!(why(copy.path()).contains(file), "{file}");
    }
    let empty = tempfile::tempdir().expect("temporary directory");
    assert!(why(empty.path()).contains("config.json"));
}

#[test]
fn a_shard_cut_anywhere_is_refused() {
    let copy = copy("llama");
    let path = copy.path().join(SHARD);
    let bytes = std::fs::read(&path).expect("a shard");
    for length in (0..bytes.len()).step_by(4999).chain([7, 8, 9, bytes.len() - 1]) {
        std::fs::write(&path, &bytes[..length]).expect("written");
        assert!(why(copy.path()).contains(SHARD), "cut at {length}");
    }
}

#[test]
fn contradictions_are_named() {
    assert!(edited("qwen3", "config.json", "\"qwen3\"", "\"mamba\"").contains("mamba"));
    assert!(edited("qwen3", "config.json", "{", "").contains("config.json"));
    assert!(edited("qwen3", "config.json", "\"vocab_size\":320", "\"vocab_size\":319").contains("shape"));
    assert!(edited("qwen3", "config.json", "\"num_hidden_layers\":2", "\"num_hidden_layers\":1").contains("layers.1."));
    // Qwen3's norms of heads are of no use to a Llama, and a Llama has none.
    assert!(edited("qwen3", "config.json", "\"qwen3\"", "\"llama\"").contains("norm.weight"));
    assert!(edited("mistral", "config.json", "\"mistral\"", "\"qwen3\"").contains("no tensor"));
    let index = "model.safetensors.index.json";
    assert!(edited("llama", index, SHARD, "../elsewhere.safetensors").contains("elsewhere"));
    assert!(edited("llama", index, "weight_map", "map").contains(index));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn flipped_bytes_never_panic(flips in prop::collection::vec((0usize..2400, any::<u8>()), 1..6)) {
        let copy = copy("qwen2");
        let path = copy.path().join("model.safetensors");
        let mut bytes = std::fs::read(&path).expect("readable");
        for (at, byte) in flips {
            bytes[at] = byte;
        }
        std::fs::write(&path, bytes).expect("written");
        let _ = load(copy.path());
    }
}
