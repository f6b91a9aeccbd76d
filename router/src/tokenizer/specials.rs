//! The special tokens of a vocabulary, found in text in one pass, however many there are and
//! whatever the text repeats (Aho-Corasick).
use aho_corasick::{AhoCorasick, BuildError, MatchKind};

use super::{SpecialTokens, Token, TokenKind};

/// Tokens that are found in text before the BPE sees it.
pub(super) struct Specials {
    tokens: Vec<Special>,
    /// Control tokens and user-defined ones.
    every: Finder,
    /// Those that are text in any prompt.
    user_defined: Finder,
    control: Starts,
}

struct Special {
    text: String,
    id: u32,
}

/// A special token in a text.
pub(super) struct Found {
    /// Bytes of the text.
    pub place: std::ops::Range<usize>,
    pub id: u32,
}

/// Of the tokens that begin at the first possible byte, the longest; then on behind it.
struct Finder {
    automaton: AhoCorasick,
    ids: Vec<u32>,
}

/// Every place where one of the texts begins.
struct Starts {
    automaton: AhoCorasick,
    texts: Vec<String>,
    longest: usize,
}

impl Specials {
    /// # Errors
    /// The tokens' texts are more than an automaton can hold.
    pub fn new(vocabulary: Vec<Token>) -> Result<Self, BuildError> {
        let special: Vec<(u32, Token)> = (0u32..)
            .zip(vocabulary)
            .filter(|(_, token)| !token.text.is_empty() && token.kind != TokenKind::Plain)
            .collect();
        let of_kind = |kind: TokenKind| special.iter().filter(move |(_, token)| token.kind == kind);
        Ok(Self {
            every: Finder::new(special.iter())?,
            user_defined: Finder::new(of_kind(TokenKind::UserDefined))?,
            control: Starts::new(of_kind(TokenKind::Control).map(|(_, token)| token.text.clone()).collect())?,
            tokens: special.into_iter().map(|(id, token)| Special { text: token.text, id }).collect(),
        })
    }

    /// The special tokens of `text` from left to right; none overlap.
    pub fn find<'a>(&'a self, text: &'a str, specials: SpecialTokens) -> impl Iterator<Item = Found> + 'a {
        let finder = match specials {
            SpecialTokens::Parse => &self.every,
            SpecialTokens::AsText => &self.user_defined,
        };
        finder.automaton.find_iter(text).map(|found| Found { place: found.range(), id: finder.ids[found.pattern()] })
    }

    /// For each byte of `text`, whether a control token begins there, or would if the right text
    /// followed.
    pub fn control_starts(&self, text: &str) -> Vec<bool> {
        self.control.of(text)
    }

    /// The text of the token `id`.
    pub fn text(&self, id: u32) -> Option<&str> {
        self.tokens.iter().find(|token| token.id == id).map(|token| token.text.as_str())
    }

    /// The id of the token that is written as `text`.
    pub fn id(&self, text: &str) -> Option<u32> {
        self.tokens.iter().find(|token| token.text == text).map(|token| token.id)
    }
}

impl Finder {
    fn new<'a>(tokens: impl Iterator<Item = &'a (u32, Token)>) -> Result<Self, BuildError> {
        let (ids, texts): (Vec<u32>, Vec<&str>) = tokens.map(|(id, token)| (*id, token.text.as_str())).unzip();
        Ok(Self { automaton: automaton(MatchKind::LeftmostLongest, &texts)?, ids })
    }
}

impl Starts {
    fn new(texts: Vec<String>) -> Result<Self, BuildError> {
        let longest = texts.iter().map(String::len).max().unwrap_or(0);
        Ok(Self { automaton: automaton(MatchKind::Standard, &texts)?, texts, longest })
    }

    fn of(&self, text: &str) -> Vec<bool> {
        let mut starts = vec![false; text.len()];
        self.automaton.find_overlapping_iter(text).for_each(|found| starts[found.start()] = true);
        // What is cut off by the end of the text is shorter than the longest token.
        let tail = text.len().saturating_sub(self.longest.saturating_sub(1));
        for (at, start) in starts.iter_mut().enumerate().skip(tail) {
            let cut_off = |token: &String| token.as_bytes().starts_with(&text.as_bytes()[at..]);
            *start = *start || self.texts.iter().any(cut_off);
        }
        starts
    }
}

fn automaton<T: AsRef<[u8]>>(kind: MatchKind, texts: &[T]) -> Result<AhoCorasick, BuildError> {
    AhoCorasick::builder().match_kind(kind).build(texts)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn specials(tokens: &[(&str, TokenKind)]) -> Specials {
        let token = |(text, kind): &(&str, TokenKind)| Token { text: (*text).to_owned(), kind: *kind };
        Specials::new(tokens.iter().map(token).collect()).unwrap()
    }

    fn found(specials: &Specials, text: &str, how: SpecialTokens) -> Vec<(std::ops::Range<usize>, u32)> {
        specials.find(text, how).map(|found| (found.place, found.id)).collect()
    }

    #[test]
    fn the_longest_of_the_leftmost_is_taken() {
        use TokenKind::{Control, Plain, UserDefined};
        let specials =
            specials(&[("<a", Control), ("x", Plain), ("<a>", Control), ("<ab", UserDefined), ("", Control)]);
        assert_eq!(found(&specials, "x<a><ab<a", SpecialTokens::Parse), [(1..4, 2), (4..7, 3), (7..9, 0)]);
        assert_eq!(found(&specials, "x<a><ab<a", SpecialTokens::AsText), [(4..7, 3)]);
        assert_eq!((specials.text(3), specials.id("<a>"), specials.id("x")), (Some("<ab"), Some(2), None));
    }

    #[test]
    fn a_control_token_cut_off_by_the_end_is_seen() {
        let specials = specials(&[("<|end|>", TokenKind::Control), ("<u>", TokenKind::UserDefined)]);
        assert_eq!(specials.control_starts("<|e"), [true, false, false]);
        assert_eq!(specials.control_starts("<|x"), [false, false, false]);
        assert!(specials.control_starts("<u>").iter().all(|start| !start));
    }

    proptest! {
        /// As one would find them without an automaton: at each place try every token.
        #[test]
        fn the_automaton_finds_what_a_search_finds(
            texts in prop::collection::vec("[ab<é]{1,5}", 0..8),
            control in prop::collection::vec(any::<bool>(), 8),
            text in "[ab<é]{0,40}",
        ) {
            let kind = |control: bool| if control { TokenKind::Control } else { TokenKind::UserDefined };
            // Of equal texts the first is taken, as in a vocabulary, where none are equal.
            let mut tokens: Vec<(&str, TokenKind)> = Vec::new();
            for (index, token) in texts.iter().enumerate() {
                if tokens.iter().all(|(known, _)| known != token) {
                    tokens.push((token, kind(control[index])));
                }
            }
            let specials = self::specials(&tokens);
            for how in [SpecialTokens::Parse, SpecialTokens::AsText] {
                prop_assert_eq!(found(&specials, &text, how), searched(&tokens, &text, how));
            }
            let starts = specials.control_starts(&text);
            for (at, start) in starts.into_iter().enumerate() {
                let rest = &text.as_bytes()[at..];
                let begins = |token: &str| rest.starts_with(token.as_bytes()) || token.as_bytes().starts_with(rest);
                let expected = tokens.iter().any(|(token, kind)| *kind == TokenKind::Control && begins(token));
                prop_assert_eq!(start, expected, "{} {}", text, at);
            }
        }
    }

    fn searched(tokens: &[(&str, TokenKind)], text: &str, how: SpecialTokens) -> Vec<(std::ops::Range<usize>, u32)> {
        let (mut found, mut at) = (Vec::new(), 0);
        while at < text.len() {
            let begins = |(_, (token, kind)): &(usize, &(&str, TokenKind))| {
                let seen = how == SpecialTokens::Parse || *kind == TokenKind::UserDefined;
                seen && text.as_bytes()[at..].starts_with(token.as_bytes())
            };
            match tokens.iter().enumerate().filter(begins).max_by_key(|(_, (token, _))| token.len()) {
                Some((id, (token, _))) => {
                    found.push((at..at + token.len(), id as u32));
                    at += token.len();
                }
                None => at += 1,
            }
        }
        found
    }
}
