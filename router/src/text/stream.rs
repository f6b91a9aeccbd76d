//! Tokens to text, one at a time: a token may end inside a UTF-8 character and a stop string may span tokens, so both
//! are held back until they are decided. Work is linear in the bytes; nothing is decoded twice.
use std::sync::Arc;

use crate::tokenizer::Pieces;

/// Text that has become certain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextStep {
    /// May be empty.
    pub text: String,
    /// A stop string was found: `text` ends before it and nothing follows.
    pub stopped: bool,
}

/// The state of one answer.
pub struct TextStream {
    pieces: Arc<Pieces>,
    /// The beginning of a character: at most 3 bytes between calls.
    partial: Vec<u8>,
    stops: Vec<StopMatcher>,
    /// Text that may turn out to begin a stop string.
    held: String,
    /// Tokens to come in which no stop string ends the answer.
    early_tokens: u32,
    stopped: bool,
}

impl TextStream {
    pub(crate) fn new(pieces: Arc<Pieces>, stop: &[String]) -> Self {
        let stops = stop.iter().filter(|text| !text.is_empty()).map(|text| StopMatcher::new(text)).collect();
        Self { pieces, partial: Vec::new(), stops, held: String::new(), early_tokens: 0, stopped: false }
    }

    /// A stop string that is complete within the first `tokens` tokens is ordinary text.
    pub fn not_within(self, tokens: u32) -> Self {
        Self { early_tokens: tokens, ..self }
    }

    /// Takes the next token.
    pub fn push(&mut self, token: u32) -> TextStep {
        if self.stopped {
            return TextStep { text: String::new(), stopped: true };
        }
        self.partial.extend_from_slice(self.pieces.get(token));
        let text = take_characters(&mut self.partial);
        let step = self.release(&text);
        self.early_tokens = self.early_tokens.saturating_sub(1);
        step
    }

    /// The answer is complete: what was held back. A partial character becomes U+FFFD.
    pub fn finish(mut self) -> String {
        if self.stopped {
            return String::new();
        }
        let rest = String::from_utf8_lossy(&self.partial).into_owned();
        let step = self.release(&rest);
        if step.stopped { step.text } else { step.text + &self.held }
    }

    /// Adds `text` and takes out what no stop string can claim any more.
    fn release(&mut self, text: &str) -> TextStep {
        let before = self.held.len();
        self.held.push_str(text);
        for (offset, byte) in text.bytes().enumerate() {
            let matched = self.stops.iter_mut().filter_map(|stop| stop.step(byte)).max();
            if let Some(stop_bytes) = matched.filter(|_| self.early_tokens == 0) {
                self.held.truncate(before + offset + 1 - stop_bytes);
                self.stopped = true;
                return TextStep { text: std::mem::take(&mut self.held), stopped: true };
            }
        }
        let undecided = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let text = self.held.drain(..self.held.len() - undecided).collect();
        TextStep { text, stopped: false }
    }
}

/// Takes all whole characters out of `bytes`, each invalid sequence as U+FFFD, and leaves an unfinished one: so the
/// pieces together equal `String::from_utf8_lossy` of the whole.
fn take_characters(bytes: &mut Vec<u8>) -> String {
    let mut text = String::with_capacity(bytes.len());
    let mut rest = bytes.as_slice();
    loop {
        match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                rest = &[];
                break;
            }
            Err(error) => {
                let (valid, invalid) = rest.split_at(error.valid_up_to());
                text.push_str(&String::from_utf8_lossy(valid));
                rest = invalid;
                match error.error_len() {
                    Some(length) => {
                        text.push(char::REPLACEMENT_CHARACTER);
                        rest = &rest[length..];
                    }
                    None => break,
                }
            }
        }
    }
    let taken = bytes.len() - rest.len();
    bytes.drain(..taken);
    text
}

/// Knuth–Morris–Pratt over the bytes of one stop string.
struct StopMatcher {
    stop: Vec<u8>,
    /// `fallback[n]`: the longest proper prefix of the stop string that ends its first `n + 1` bytes.
    fallback: Vec<usize>,
    matched: usize,
}

impl StopMatcher {
    fn new(stop: &str) -> Self {
        let stop = stop.as_bytes().to_vec();
        let mut fallback = vec![0; stop.len()];
        for at in 1..stop.len() {
            let mut matched = fallback[at - 1];
            while matched > 0 && stop[at] != stop[matched] {
                matched = fallback[matched - 1];
            }
            fallback[at] = matched + usize::from(stop[at] == stop[matched]);
        }
        Self { stop, fallback, matched: 0 }
    }

    /// The length of the stop string when `byte` completes it.
    fn step(&mut self, byte: u8) -> Option<usize> {
        while self.matched > 0 && self.stop[self.matched] != byte {
            self.matched = self.fallback[self.matched - 1];
        }
        self.matched += usize::from(self.stop[self.matched] == byte);
        let complete = self.matched == self.stop.len();
        if complete {
            self.matched = self.fallback[self.matched - 1];
        }
        complete.then_some(self.stop.len())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Token `n` is the byte `n`, token 256 a control token.
    fn bytes_as_tokens() -> Arc<Pieces> {
        Arc::new(Pieces::from_pieces((0..=255u8).map(|byte| vec![byte]).chain([vec![]])))
    }

    fn run(tokens: impl IntoIterator<Item = u32>, stop: &[String]) -> (String, bool) {
        let mut stream = TextStream::new(bytes_as_tokens(), stop);
        let mut text = String::new();
        for token in tokens {
            let step = stream.push(token);
            text += &step.text;
            if step.stopped {
                assert_eq!(stream.finish(), "");
                return (text, true);
            }
        }
        text += &stream.finish();
        (text, false)
    }

    fn tokens(text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).collect()
    }

    #[test]
    fn characters_come_whole() {
        let mut stream = TextStream::new(bytes_as_tokens(), &[]);
        let texts: Vec<String> = "é€".bytes().map(|byte| stream.push(u32::from(byte)).text).collect();
        assert_eq!(texts, ["", "é", "", "", "€"]);
        assert_eq!(stream.push(256).text, "");
        assert_eq!(stream.push(9999).text, "");
        stream.push(0xe2);
        assert_eq!(stream.finish(), "\u{fffd}");
    }

    #[test]
    fn text_flows_unless_a_stop_string_may_begin() {
        let mut stream = TextStream::new(bytes_as_tokens(), &["END".into()]);
        let texts: Vec<String> = "xEENx".bytes().map(|byte| stream.push(u32::from(byte)).text).collect();
        assert_eq!(texts, ["x", "", "E", "", "ENx"]);
        assert_eq!(run(tokens("one END two"), &["END".into()]), ("one ".into(), true));
        assert_eq!(run(tokens("one EN"), &["END".into()]), ("one EN".into(), false));
        assert_eq!(run(tokens("aabaabaac"), &["aabaac".into()]), ("aab".into(), true));
    }

    #[test]
    fn early_stop_strings_are_text() {
        let run = |text: &str, stop: &str, tokens| {
            let mut stream = TextStream::new(bytes_as_tokens(), &[stop.into()]).not_within(tokens);
            let mut out = String::new();
            let stopped = text.bytes().any(|byte| {
                let step = stream.push(u32::from(byte));
                out += &step.text;
                step.stopped
            });
            (out + &stream.finish(), stopped)
        };
        assert_eq!(run("aENDb END", "END", 0), ("a".into(), true));
        assert_eq!(run("aENDb END", "END", 3), ("a".into(), true));
        assert_eq!(run("aENDb END", "END", 4), ("aENDb ".into(), true));
        assert_eq!(run("aENDb END", "END", 9), ("aENDb END".into(), false));
        // One that overlaps an early one counts when its own end is late enough.
        assert_eq!(run("aaab", "aa", 2), ("a".into(), true));
    }

    proptest! {
        #[test]
        fn pieces_add_up_to_the_whole(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            let (text, _) = run(bytes.iter().map(|byte| u32::from(*byte)), &[]);
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }

        #[test]
        fn stop_strings_never_leak(
            text in "[abé€]{0,40}", stop in prop::collection::vec("[abé€]{1,4}", 0..4),
        ) {
            let (out, stopped) = run(tokens(&text), &stop);
            prop_assert!(text.starts_with(&out));
            prop_assert!(stop.iter().all(|stop| !out.contains(stop.as_str())));
            prop_assert_eq!(stopped, stop.iter().any(|stop| text.contains(stop.as_str())));
            prop_assert!(stopped || out == text);
        }
    }
}
