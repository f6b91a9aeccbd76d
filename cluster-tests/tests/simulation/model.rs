//! The model of the simulation: for the router a GGUF header whose tokens are the visible ASCII characters, for the
//! engines their hash of the KV under that file's digest.
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use tandem_engine::{SimulatedConfig, StepShape};
use tandem_router::text::ModelText;

use crate::schedule::VOCABULARY;

/// Longest sequence.
pub const CONTEXT_TOKENS: usize = 512;
const BLOCK_TOKENS: usize = 16;
const LAYERS: usize = 2;

const U32: u32 = 4;
const I32: u32 = 5;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// Tokenizer and names, as a router loads them.
pub fn text() -> Arc<ModelText> {
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.write_all(&header()).expect("room on the disk");
    Arc::new(ModelText::load(file.path()).expect("a usable model file"))
}

/// What a step takes in virtual time.
pub fn step_time(shape: StepShape) -> Duration {
    let pace = SimulatedConfig {
        step_delay: Duration::from_millis(4),
        token_delay: Duration::from_micros(250),
        ..SimulatedConfig::default()
    };
    pace.step_time(shape)
}

/// An engine's arena. Its executor itself never waits.
pub fn engine(text: &ModelText, blocks: usize) -> SimulatedConfig {
    SimulatedConfig {
        identity: text.digest,
        vocab_size: VOCABULARY as usize,
        eos_token_id: text.eos,
        max_context_tokens: CONTEXT_TOKENS,
        block_tokens: BLOCK_TOKENS,
        block_bytes: BLOCK_TOKENS * LAYERS * 8,
        layers: LAYERS,
        blocks,
        ..SimulatedConfig::default()
    }
}

fn header() -> Vec<u8> {
    let characters = ('!'..).take(VOCABULARY as usize - 2).map(String::from);
    let tokens: Vec<String> = ["<eos>".to_owned()].into_iter().chain(characters).chain(["!!".to_owned()]).collect();
    let kinds: Vec<i32> = (0..tokens.len()).map(|id| if id == 0 { 3 } else { 1 }).collect();
    let mut pairs: Vec<(&str, Vec<u8>)> = vec![
        ("general.architecture", text_value("llama")),
        ("general.name", text_value("simulated")),
        ("llama.context_length", u32_value(CONTEXT_TOKENS as u32)),
        ("tokenizer.ggml.model", text_value("gpt2")),
        ("tokenizer.ggml.pre", text_value("smollm")),
        ("tokenizer.ggml.eos_token_id", u32_value(0)),
    ];
    pairs.push(("tokenizer.ggml.tokens", array(STRING, tokens.iter().map(|token| string(token)))));
    pairs.push(("tokenizer.ggml.token_type", array(I32, kinds.iter().map(|kind| kind.to_le_bytes().to_vec()))));
    pairs.push(("tokenizer.ggml.merges", array(STRING, ["! !"].iter().map(|merge| string(merge)))));
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3u32.to_le_bytes());
    bytes.extend(0u64.to_le_bytes());
    bytes.extend((pairs.len() as u64).to_le_bytes());
    for (key, value) in pairs {
        bytes.extend(string(key));
        bytes.extend(value);
    }
    bytes
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

fn text_value(text: &str) -> Vec<u8> {
    [&STRING.to_le_bytes()[..], &string(text)].concat()
}

fn u32_value(value: u32) -> Vec<u8> {
    [U32.to_le_bytes(), value.to_le_bytes()].concat()
}

fn array(kind: u32, items: impl ExactSizeIterator<Item = Vec<u8>>) -> Vec<u8> {
    let mut bytes = [&ARRAY.to_le_bytes()[..], &kind.to_le_bytes(), &(items.len() as u64).to_le_bytes()].concat();
    items.for_each(|item| bytes.extend(item));
    bytes
}
