//! The router's way from text to ids beside the `tokenizers` crate alone, on the default model: medians, in turn.
//! `cargo bench -p tandem-router --bench tokenizer`
#![allow(clippy::unwrap_used, reason = "a benchmark has nobody to report errors to")]
use std::fs::File;
use std::hint::black_box;
use std::time::{Duration, Instant};

use candle_core::quantized::gguf_file::{Content, Value};
use tandem_router::text::{ModelText, SpecialTokens};
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;

#[path = "../tests/model/mod.rs"]
mod model;

const ROUNDS: usize = 101;
const WORDS: [&str; 8] = [" the", " of", " and", " to", " in", " is", " for", " that"];

fn main() {
    let (ours, library) = (ModelText::load(&model::path()).unwrap(), library());
    let words: String = (0..96).map(|index| WORDS[index * 131 % WORDS.len()]).collect();
    let texts = [
        ("96 short words", words.as_str()),
        ("English prose with terms", include_str!("../../ARCHITECTURE.md")),
        ("Rust", include_str!("../src/select.rs")),
        ("Chinese", &"预填充节点计算键值张量,并将其发送到解码节点。".repeat(100)),
    ];
    println!("{:<28}{:>8}{:>8}{:>14}{:>12}{:>8}", "text", "bytes", "tokens", "library µs", "router µs", "ratio");
    for (name, text) in texts {
        let by_library = || library.encode_fast(text, false).unwrap().get_ids().to_vec();
        let by_us = || ours.encode(text, SpecialTokens::AsText).unwrap();
        assert_eq!(by_us(), by_library(), "{name}");
        let (mut theirs, mut own) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            theirs.push(time(|| drop(black_box(by_library()))));
            own.push(time(|| drop(black_box(by_us()))));
        }
        let (theirs, own) = (median_us(theirs), median_us(own));
        let (bytes, tokens) = (text.len(), by_us().len());
        println!("{name:<28}{bytes:>8}{tokens:>8}{theirs:>14.1}{own:>12.1}{:>8.1}", theirs / own);
    }
}

/// The model's tokenizer as its makers' `tokenizer.json` has it: digits one by one, then GPT-2's expression.
fn library() -> tokenizers::Tokenizer {
    let header = Content::read(&mut File::open(model::path()).unwrap()).unwrap();
    let texts = |key: &str| -> Vec<String> {
        let Value::Array(items) = &header.metadata[key] else { panic!("{key} is no list") };
        items.iter().map(|item| item.to_string().unwrap().clone()).collect()
    };
    let vocabulary: Vocab = texts("tokenizer.ggml.tokens").into_iter().zip(0..).collect();
    let merges = texts("tokenizer.ggml.merges").into_iter();
    let merges = merges.map(|merge| merge.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned())).unwrap());
    let bpe = BPE::builder().vocab_and_merges(vocabulary, merges.collect::<Vec<_>>());
    let mut library = tokenizers::Tokenizer::new(bpe.build().unwrap());
    let steps = vec![Digits::new(true).into(), ByteLevel::new(false, false, true).into()];
    library.with_pre_tokenizer(Some(Sequence::new(steps)));
    library
}

fn time(run: impl FnOnce()) -> Duration {
    let start = Instant::now();
    run();
    start.elapsed()
}

fn median_us(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e6
}
