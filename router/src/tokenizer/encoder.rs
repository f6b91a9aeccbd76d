//! Text without special tokens → ids. What comes out is the `tokenizers` crate's word; but that takes a microsecond for
//! each token, and texts consist of the same words again and again. So a text is cut into words, where that changes
//! nothing, and what a word became once is looked up ([`Words`]).
use tokenizers::SplitDelimiterBehavior;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::split::SplitPattern;

use super::words::Words;

/// Bytes of a word that is remembered.
const LONGEST_WORD: usize = 24;

/// A BPE, and what it made of words.
pub(super) struct Encoder {
    bpe: tokenizers::Tokenizer,
    /// `None` where the ids of a word may depend on what stands beside it.
    words: Option<Words>,
}

impl Encoder {
    pub fn new(bpe: tokenizers::Tokenizer) -> Self {
        let words = cuts_at_words(&bpe).then(Words::default);
        Self { bpe, words }
    }

    /// Whether the text is changed before it is cut.
    pub fn normalizes(&self) -> bool {
        self.bpe.get_normalizer().is_some()
    }

    /// Appends the ids of `text`.
    pub fn encode(&self, text: &str, ids: &mut Vec<u32>) -> tokenizers::Result<()> {
        let Some(words) = &self.words else { return self.encode_whole(text, ids) };
        let (mut from, mut at) = (0, 0);
        for Segment { text: segment, plain } in segments(text) {
            let start = at;
            at += segment.len();
            // Numbers and long ones are not likely to come again.
            if plain && segment.len() <= LONGEST_WORD {
                self.encode_whole(&text[from..start], ids)?;
                self.encode_word(words, segment, ids)?;
                from = at;
            }
        }
        self.encode_whole(&text[from..], ids)
    }

    fn encode_word(&self, words: &Words, word: &str, ids: &mut Vec<u32>) -> tokenizers::Result<()> {
        if words.append(word, ids) {
            return Ok(());
        }
        let before = ids.len();
        self.encode_whole(word, ids)?;
        words.learn(word, &ids[before..]);
        Ok(())
    }

    fn encode_whole(&self, text: &str, ids: &mut Vec<u32>) -> tokenizers::Result<()> {
        if !text.is_empty() {
            ids.extend_from_slice(self.bpe.encode_fast(text, false)?.get_ids());
        }
        Ok(())
    }
}

/// What a byte is, as far as cuts go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Letter,
    Space,
    Digit,
    /// Of ASCII.
    Other,
    /// Of a longer character.
    Wide,
}

const KINDS: [Kind; 256] = {
    let mut kinds = [Kind::Wide; 256];
    let mut byte = 0_u8;
    while byte.is_ascii() {
        kinds[byte as usize] = match byte {
            b' ' => Kind::Space,
            b'0'..=b'9' => Kind::Digit,
            b'A'..=b'Z' | b'a'..=b'z' => Kind::Letter,
            _ => Kind::Other,
        };
        byte += 1;
    }
    kinds
};

fn kind(byte: Option<&u8>) -> Kind {
    byte.map_or(Kind::Wide, |byte| KINDS[usize::from(*byte)])
}

#[derive(Debug, PartialEq, Eq)]
struct Segment<'a> {
    text: &'a str,
    /// Of ASCII, and without digits.
    plain: bool,
}

/// `text`, cut behind ASCII letters where another ASCII character follows, and before a space where an ASCII letter
/// does.
fn segments(mut text: &str) -> impl Iterator<Item = Segment<'_>> {
    std::iter::from_fn(move || {
        let bytes = text.as_bytes();
        let mut last = kind(Some(bytes.first()?));
        let (mut plain, mut end) = (true, 0);
        loop {
            plain &= !matches!(last, Kind::Digit | Kind::Wide);
            end += 1;
            // Most of a text, and never cut.
            if last == Kind::Letter {
                end += bytes[end..].iter().take_while(|byte| kind(Some(byte)) == Kind::Letter).count();
            }
            let next = kind(bytes.get(end));
            let cut = match (last, next) {
                (Kind::Letter, Kind::Space | Kind::Digit | Kind::Other) => true,
                (_, Kind::Space) => kind(bytes.get(end + 1)) == Kind::Letter,
                _ => end >= bytes.len(),
            };
            if cut {
                break;
            }
            last = next;
        }
        let (segment, rest) = text.split_at(end);
        text = rest;
        Some(Segment { text: segment, plain })
    })
}

/// Whether the tokenizer itself cuts wherever [`segments`] does, and sees nothing across the cut. GPT-2's expression
/// and its kin match letters until one that is none; and a space before letters together with them, or, as the last one
/// of several, at their head. None of them looks back.
fn cuts_at_words(bpe: &tokenizers::Tokenizer) -> bool {
    let harmless = |pre: &PreTokenizerWrapper| match pre {
        PreTokenizerWrapper::ByteLevel(bytes) => !bytes.add_prefix_space,
        PreTokenizerWrapper::Digits(_) => true,
        pre => is_known(pre),
    };
    let cuts = |pre: &PreTokenizerWrapper| match pre {
        PreTokenizerWrapper::ByteLevel(bytes) => bytes.use_regex,
        pre => is_known(pre),
    };
    let composes_at_most = matches!(bpe.get_normalizer(), None | Some(NormalizerWrapper::NFC(_)));
    let steps = match bpe.get_pre_tokenizer() {
        Some(PreTokenizerWrapper::Sequence(sequence)) => sequence.as_ref(),
        Some(pre) => std::slice::from_ref(pre),
        None => &[],
    };
    let spells_bytes = steps.iter().any(|pre| matches!(pre, PreTokenizerWrapper::ByteLevel(_)));
    composes_at_most && spells_bytes && steps.iter().all(harmless) && steps.iter().any(cuts)
}

/// GPT-4's expression and its kin, whatever they do with digits.
fn is_known(pre: &PreTokenizerWrapper) -> bool {
    let PreTokenizerWrapper::Split(split) = pre else { return false };
    let SplitPattern::Regex(expression) = &split.pattern else { return false };
    let digits = expression.strip_prefix(BEFORE_DIGITS).and_then(|rest| rest.strip_suffix(AFTER_DIGITS));
    let digits = digits.is_some_and(|digits| [r"\p{N}", r"\p{N}{1,3}"].contains(&digits));
    digits && split.behavior == SplitDelimiterBehavior::Isolated && !split.invert
}

/// The expression by which GPT-4's kin cut text, before what it says of digits.
pub(super) const BEFORE_DIGITS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|";
/// The rest of it.
pub(super) const AFTER_DIGITS: &str = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::LazyLock;

    use proptest::prelude::*;
    use tokenizers::normalizers::Lowercase;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;
    use tokenizers::pre_tokenizers::digits::Digits;
    use tokenizers::pre_tokenizers::sequence::Sequence;
    use tokenizers::pre_tokenizers::split::Split;

    use super::super::json::plain;
    use super::*;

    /// A model of the tests of families, without its special tokens.
    fn bare(name: &str) -> tokenizers::Tokenizer {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/families/data");
        let whole = tokenizers::Tokenizer::from_file(data.join(name).join("tokenizer.json")).expect("test data");
        plain(&whole).unwrap().0
    }

    /// The same, cut in another way.
    fn cut_by(pre: impl Into<PreTokenizerWrapper>) -> tokenizers::Tokenizer {
        let mut bare = bare("llama");
        bare.with_pre_tokenizer(Some(pre));
        bare
    }

    fn bytes(with_space: bool, cutting: bool) -> PreTokenizerWrapper {
        ByteLevel::new(with_space, false, cutting).into()
    }

    fn expression(expression: &str) -> PreTokenizerWrapper {
        let pattern = SplitPattern::Regex(expression.to_owned());
        Split::new(pattern, SplitDelimiterBehavior::Isolated, false).unwrap().into()
    }

    /// Those of all cases together: what one text taught them is used in the others.
    static ENCODERS: LazyLock<[Encoder; 4]> = LazyLock::new(|| {
        let gpt2 = cut_by(Sequence::new(vec![Digits::new(true).into(), bytes(false, true)]));
        [bare("llama"), bare("qwen3"), gpt2, bare("mistral")].map(Encoder::new)
    });

    proptest! {
        #[test]
        fn ids_are_the_library_s(
            pieces in prop::collection::vec(
                prop::sample::select(vec![
                    "node", " node", " nodes", " the", " and", "one", " one", "code", " nod", "es", "The", "don't", " it's",
                    "'ll", "'S", " ", "  ", "\n", "\r\n ", "\t", "1", " 42", "2345", "!", " ?", "é", " é", "e\u{301}", "\u{301}",
                    "中文", " 中", "。", "\u{a0}", "ſ", "K", "🦀", "_", "-the",
                ]),
                0..16,
            ),
        ) {
            let text = pieces.concat();
            for encoder in ENCODERS.iter() {
                let expected = encoder.bpe.encode_fast(text.as_str(), false).unwrap().get_ids().to_vec();
                let mut ids = Vec::new();
                encoder.encode(&text, &mut ids).unwrap();
                prop_assert_eq!(ids, expected, "{:?}", text);
            }
        }
    }

    #[test]
    fn words_are_remembered() {
        for bpe in [bare("llama"), bare("qwen3"), cut_by(bytes(false, true))] {
            let (encoder, mut ids) = (Encoder::new(bpe), Vec::new());
            encoder.encode("the nodes, and the nodes: 42 nodes!", &mut ids).unwrap();
            assert_eq!(encoder.words.unwrap().all(), [" and", " nodes", " the", "!", ",", "the"]);
        }
    }

    #[test]
    fn where_a_word_may_depend_on_others_nothing_is() {
        let mut lowercase = bare("llama");
        lowercase.with_normalizer(Some(Lowercase)).unwrap();
        let lines = Sequence::new(vec![expression(r"\n+"), bytes(false, false)]);
        let of_lines_and_words = Sequence::new(vec![expression(r"\w+ \w+"), bytes(false, true)]);
        let uncut = [bytes(false, false), bytes(true, true)].map(cut_by);
        for bpe in [bare("mistral"), lowercase, cut_by(lines), cut_by(of_lines_and_words)].into_iter().chain(uncut) {
            let pre = format!("{:?}", bpe.get_pre_tokenizer());
            assert!(Encoder::new(bpe).words.is_none(), "{pre}");
        }
    }

    #[test]
    fn texts_are_cut_between_words_alone() {
        let cut = |text| segments(text).map(|segment| segment.text).collect::<Vec<_>>();
        assert_eq!(cut("The nodes don't  see 2 é, x"), ["The", " nodes", " don", "'t", " ", " see", " 2 é,", " x"]);
        assert_eq!(cut("aé bé"), ["aé", " bé"]);
        assert_eq!(cut(" (`a.b` 1a2\nb"), [" (`a", ".b", "` 1a", "2\nb"]);
        assert!(cut("").is_empty());
        let plain = |text| segments(text).map(|segment| segment.plain).collect::<Vec<_>>();
        assert_eq!(plain("The nodes don't see 2 é, x"), [true, true, true, true, true, false, true]);
    }
}
