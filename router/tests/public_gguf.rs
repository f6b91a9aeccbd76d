//! GGUF files as people download them: small files with the tokenizer keys that the public conversions have, and
//! without those that they lack, at the token ids of the real vocabularies. What is expected are llama.cpp's prompt
//! tokens (`add_special`) and its end-of-generation tokens for the same files.
use std::io::Write;

use tandem_router::text::{ModelText, SpecialTokens};

const STRING: u32 = 8;
const U16: u32 = 2;
const U32: u32 = 4;
const I32: u32 = 5;
const F32: u32 = 6;
const BOOL: u32 = 7;
const ARRAY: u32 = 9;

/// Types of tokens in `tokenizer.ggml.token_type`.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;

/// A file's keys (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>), without tensors.
#[derive(Default)]
struct Gguf {
    keys: u64,
    bytes: Vec<u8>,
}

impl Gguf {
    fn key(&mut self, name: &str, kind: u32, value: &[u8]) {
        self.keys += 1;
        self.bytes.extend(text(name));
        self.bytes.extend(kind.to_le_bytes());
        self.bytes.extend(value);
    }

    fn text(&mut self, name: &str, value: &str) {
        self.key(name, STRING, &text(value));
    }

    fn array(&mut self, name: &str, kind: u32, items: Vec<Vec<u8>>) {
        let mut value = kind.to_le_bytes().to_vec();
        value.extend((items.len() as u64).to_le_bytes());
        value.extend(items.concat());
        self.key(name, ARRAY, &value);
    }

    fn load(self) -> ModelText {
        let mut file = tempfile::Builder::new().suffix(".gguf").tempfile().expect("a usable file");
        file.write_all(&self.file_bytes()).expect("a usable file");
        ModelText::load(file.path()).expect("a usable file")
    }

    fn file_bytes(&self) -> Vec<u8> {
        let mut file = b"GGUF\x03\0\0\0".to_vec();
        file.extend(0u64.to_le_bytes());
        file.extend(self.keys.to_le_bytes());
        file.extend(&self.bytes);
        file
    }

    fn part(mut self, number: u16, count: u16) -> Vec<u8> {
        self.key("split.no", U16, &number.to_le_bytes());
        self.key("split.count", U16, &count.to_le_bytes());
        self.key("split.tensors.count", I32, &0i32.to_le_bytes());
        self.file_bytes()
    }
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// What a public file says about its tokenizer.
struct Public {
    name: &'static str,
    architecture: &'static str,
    /// `tokenizer.ggml.model` and `tokenizer.ggml.pre`.
    model: &'static str,
    pre: &'static str,
    vocabulary: usize,
    /// The tokens of which a prompt here is made, and the named ones of the real vocabulary.
    tokens: &'static [(usize, &'static str, i32)],
    merges: &'static [&'static str],
    bos: u32,
    eos: u32,
    /// `tokenizer.ggml.add_bos_token`; most files of Llama 3 lack it.
    add_bos: Option<bool>,
    /// The prompt, with which llama.cpp's tokenizer begins, and the ends of generation that it lists.
    prompt: &'static [u32],
    ends: &'static [u32],
}

const LLAMA3: &[(usize, &str, i32)] = &[
    (39, "H", NORMAL),
    (72, "i", NORMAL),
    (13347, "Hi", NORMAL),
    (128_000, "<|begin_of_text|>", CONTROL),
    (128_001, "<|end_of_text|>", CONTROL),
    (128_002, "<|reserved_special_token_0|>", CONTROL),
    (128_004, "<|finetune_right_pad_id|>", CONTROL),
    (128_006, "<|start_header_id|>", CONTROL),
    (128_007, "<|end_header_id|>", CONTROL),
    (128_008, "<|eom_id|>", CONTROL),
    (128_009, "<|eot_id|>", CONTROL),
    (128_010, "<|python_tag|>", CONTROL),
];

const QWEN: &[(usize, &str, i32)] = &[
    (39, "H", NORMAL),
    (72, "i", NORMAL),
    (13048, "Hi", NORMAL),
    (151_643, "<|endoftext|>", CONTROL),
    (151_644, "<|im_start|>", CONTROL),
    (151_645, "<|im_end|>", CONTROL),
    (151_657, "<tool_call>", 4),
    (151_659, "<|fim_prefix|>", CONTROL),
    (151_660, "<|fim_middle|>", CONTROL),
    (151_661, "<|fim_suffix|>", CONTROL),
    (151_662, "<|fim_pad|>", CONTROL),
    (151_663, "<|repo_name|>", CONTROL),
    (151_664, "<|file_sep|>", CONTROL),
];

const MISTRAL: &[(usize, &str, i32)] = &[
    (0, "<unk>", UNKNOWN),
    (1, "<s>", CONTROL),
    (2, "</s>", CONTROL),
    (3, "[INST]", CONTROL),
    (4, "[/INST]", CONTROL),
    (16127, "\u{2581}Hi", NORMAL),
    (29_473, "\u{2581}", NORMAL),
    (29_537, "H", NORMAL),
    (29_478, "i", NORMAL),
    (28_000, "Hi", NORMAL),
];

const LLAMA_31: Public = Public {
    name: "Llama-3.1-8B-Instruct",
    architecture: "llama",
    model: "gpt2",
    pre: "llama-bpe",
    vocabulary: 128_256,
    tokens: LLAMA3,
    merges: &["H i"],
    bos: 128_000,
    eos: 128_009,
    add_bos: None,
    prompt: &[128_000, 13347],
    ends: &[128_001, 128_008, 128_009],
};

const QWEN_25: Public = Public {
    name: "Qwen2.5-7B-Instruct",
    architecture: "qwen2",
    model: "gpt2",
    pre: "qwen2",
    vocabulary: 152_064,
    tokens: QWEN,
    merges: &["H i"],
    bos: 151_643,
    eos: 151_645,
    add_bos: Some(false),
    prompt: &[13048],
    ends: &[151_643, 151_645, 151_662, 151_663, 151_664],
};

const MISTRAL_03: Public = Public {
    name: "Mistral-7B-Instruct-v0.3",
    architecture: "llama",
    model: "llama",
    pre: "default",
    vocabulary: 32_768,
    tokens: MISTRAL,
    merges: &[],
    bos: 1,
    eos: 2,
    add_bos: Some(true),
    prompt: &[1, 16127],
    ends: &[2],
};

const FILES: [Public; 7] = [
    LLAMA_31,
    Public { name: "Llama-3.2-3B-Instruct", ..LLAMA_31 },
    // Early conversions named the base model's end: their chats never ended.
    Public { name: "Meta-Llama-3-8B-Instruct, early", eos: 128_001, ..LLAMA_31 },
    QWEN_25,
    Public { name: "Qwen3-8B", architecture: "qwen3", vocabulary: 151_936, ..QWEN_25 },
    MISTRAL_03,
    // Some conversions leave the key out: SentencePiece's default is the same.
    Public { name: "Mistral-7B-v0.3", add_bos: None, ..MISTRAL_03 },
];

impl Public {
    fn file(&self) -> Gguf {
        let mut file = Gguf::default();
        let bytes = |number: u32| number.to_le_bytes();
        file.text("general.architecture", self.architecture);
        file.key(&format!("{}.context_length", self.architecture), U32, &bytes(131_072));
        file.text("tokenizer.ggml.model", self.model);
        file.text("tokenizer.ggml.pre", self.pre);
        let mut tokens: Vec<String> = (0..self.vocabulary).map(|id| format!("filler{id}")).collect();
        let mut types = vec![NORMAL; self.vocabulary];
        let mut scores = vec![-1e9f32; self.vocabulary];
        for (id, token, kind) in self.tokens {
            (tokens[*id], types[*id], scores[*id]) = ((*token).to_owned(), *kind, token.len() as f32);
        }
        file.array("tokenizer.ggml.tokens", STRING, tokens.iter().map(|token| text(token)).collect());
        file.array("tokenizer.ggml.token_type", I32, types.iter().map(|kind| kind.to_le_bytes().to_vec()).collect());
        if self.model == "llama" {
            let scores = scores.iter().map(|score| score.to_le_bytes().to_vec()).collect();
            file.array("tokenizer.ggml.scores", F32, scores);
            file.key("tokenizer.ggml.unknown_token_id", U32, &bytes(0));
        } else {
            file.array("tokenizer.ggml.merges", STRING, self.merges.iter().map(|merge| text(merge)).collect());
        }
        file.key("tokenizer.ggml.bos_token_id", U32, &bytes(self.bos));
        file.key("tokenizer.ggml.eos_token_id", U32, &bytes(self.eos));
        if let Some(add) = self.add_bos {
            file.key("tokenizer.ggml.add_bos_token", BOOL, &[u8::from(add)]);
        }
        file.text(
            "tokenizer.chat_template",
            "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
        );
        file
    }
}

#[test]
fn prompts_begin_as_llama_cpp_begins_them() {
    for public in FILES {
        let model = public.file().load();
        assert_eq!(model.encode("Hi", SpecialTokens::Parse).unwrap(), public.prompt, "{}", public.name);
        assert_eq!(model.context_len, 131_072);
    }
}

#[test]
fn answers_end_where_llama_cpp_ends_them() {
    for public in FILES {
        let model = public.file().load();
        let mut ends = model.stop_token_ids(&[], false);
        ends.push(model.eos);
        ends.sort_unstable();
        assert_eq!(ends, public.ends, "{}", public.name);
        assert_eq!(model.eos, public.eos, "{}", public.name);
        assert!(model.stop_token_ids(&[], true).is_empty(), "whoever ignores the ends ignores all of them");
    }
}

#[test]
fn what_the_file_says_of_its_prompts_goes_before_the_default() {
    let silent = Public { add_bos: Some(false), ..LLAMA_31 };
    assert_eq!(silent.file().load().encode("Hi", SpecialTokens::Parse).unwrap(), [13347]);
    let wordy = Public { add_bos: Some(true), ..QWEN_25 };
    assert_eq!(wordy.file().load().encode("Hi", SpecialTokens::Parse).unwrap(), [151_643, 13048]);
}

#[test]
fn an_end_is_a_control_token_whatever_the_file_calls_it() {
    const MISNAMED: &[(usize, &str, i32)] = &[
        (39, "H", NORMAL),
        (72, "i", NORMAL),
        (13347, "Hi", NORMAL),
        (128_000, "<|begin_of_text|>", CONTROL),
        (128_001, "<|end_of_text|>", NORMAL),
        (128_009, "<|eot_id|>", NORMAL),
    ];
    let model = Public { tokens: MISNAMED, ..LLAMA_31 }.file().load();
    assert_eq!(model.stop_token_ids(&[], false), [128_001]);
    assert_eq!(model.encode("Hi<|eot_id|>", SpecialTokens::Parse).unwrap(), [128_000, 13347, 128_009]);
    assert_eq!(model.decode(&[13347, 128_009]), "Hi", "and no text of the answer");
}

#[test]
fn a_model_in_parts_has_the_keys_of_the_first_and_the_digest_of_all() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |number: usize| folder.path().join(format!("Big-{number:05}-of-00002.gguf"));
    let parts = [LLAMA_31.file().part(0, 2), Gguf::default().part(1, 2)];
    std::fs::write(path(1), &parts[0]).expect("written");
    let why = |number: usize| ModelText::load(&path(number)).err().expect("refused").to_string();
    assert!(why(1).contains("Big-00002-of-00002.gguf"), "{}", why(1));
    std::fs::write(path(2), Gguf::default().part(0, 2)).expect("written");
    assert!(why(1).contains("is not part 2 of 2"), "{}", why(1));
    std::fs::write(path(2), &parts[1]).expect("written");
    assert!(why(2).contains("give the first one, Big-00001-of-00002.gguf"), "{}", why(2));
    let model = ModelText::load(&path(1)).expect("both parts");
    assert_eq!(model.model_name, "Big");
    assert_eq!(model.encode("Hi", SpecialTokens::Parse).unwrap(), LLAMA_31.prompt);
    let digests = parts.map(|part| xxhash_rust::xxh3::xxh3_64(&part));
    assert_eq!(model.digest, tandem_proto::model::digest_of_parts(&digests));
}
