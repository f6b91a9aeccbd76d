//! What identifies a model that is a directory of files: which of them count, and the digest over them. Engine and
//! router read the files themselves; both come to the same number by this rule. A model that is one file has the
//! XXH3-64 of that file, one that is several parts the digest of theirs in order.
use std::collections::BTreeMap;

use xxhash_rust::xxh3::Xxh3;

/// Files beside the weights that change what a model computes or how its text reads.
const TEXTS: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
];

/// Whether a file of this name, directly in the directory, is a part of the model.
pub fn is_part(name: &str) -> bool {
    let hidden_or_below = name.starts_with('.') || name.contains(['/', '\\']);
    !hidden_or_below && (TEXTS.contains(&name) || name.ends_with(".safetensors"))
}

/// Digest of a directory from the XXH3-64 of each of its parts, by name.
pub fn digest(parts: &BTreeMap<String, u64>) -> u64 {
    let mut hasher = Xxh3::new();
    for (name, digest) in parts {
        hasher.update(&(name.len() as u64).to_le_bytes());
        hasher.update(name.as_bytes());
        hasher.update(&digest.to_le_bytes());
    }
    hasher.digest()
}

/// Digest of a model that is one file, or several parts, from the XXH3-64 of each in order. What the parts are called
/// does not count.
pub fn digest_of_parts(parts: &[u64]) -> u64 {
    match *parts {
        [whole] => whole,
        _ => digest(&parts.iter().zip(1..).map(|(part, number)| (format!("{number:05}"), *part)).collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_weights_and_texts_of_the_directory_itself() {
        for part in ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors"] {
            assert!(is_part(part), "{part}");
        }
        for other in ["README.md", "pytorch_model.bin", "../config.json", "a/b.safetensors", ".x.safetensors"] {
            assert!(!is_part(other), "{other}");
        }
    }

    #[test]
    fn every_name_and_content_counts() {
        let parts = |list: &[(&str, u64)]| digest(&list.iter().map(|(name, hash)| ((*name).into(), *hash)).collect());
        let all = [parts(&[("a", 1), ("b", 2)]), parts(&[("a", 2), ("b", 1)]), parts(&[("ab", 1)]), parts(&[("a", 1)])];
        for (i, one) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|other| other != one), "{i}");
        }
        assert_eq!(parts(&[("b", 2), ("a", 1)]), all[0]);
        assert_eq!(digest_of_parts(&[7]), 7);
        let orders = [digest_of_parts(&[1, 2]), digest_of_parts(&[2, 1]), digest_of_parts(&[1, 2, 0])];
        assert!(orders[0] != orders[1] && orders[0] != orders[2]);
    }
}
