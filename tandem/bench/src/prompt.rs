//! Pieces of content to words and token ids, with lengths that the server will count too; pure.
//!
//! A prompt is a fixed head and then words from a list of everyday words, of which a tokenizer makes one token each
//! (with their space). How many tokens the head has, and which words the server's tokenizer takes whole, a
//! [`Vocabulary`] knows; [`super::calibrate`] finds it out.
use rand::Rng;

use super::piece::Piece;
use super::seed;

/// What every prompt begins with: the words behind it then all have a space before them.
pub const HEAD: &str = "the";

/// What prompts are made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Vocabulary {
    words: Vec<Word>,
    head: Vec<u32>,
    head_tokens: f64,
    tokens_per_word: f64,
}

/// One word and the token that " word" is.
#[derive(Clone, Debug, PartialEq)]
pub struct Word {
    /// Without the space.
    pub text: String,
    /// Where the tokenizer said it.
    pub id: Option<u32>,
}

/// How a prompt travels.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// To be tokenized by the server.
    Text(String),
    /// As token ids.
    Ids(Vec<u32>),
}

impl Vocabulary {
    /// Of words that are one token each. `head` are the tokens of [`HEAD`] with all that the server puts around a
    /// prompt.
    pub fn exact(words: Vec<Word>, head: Vec<u32>) -> Self {
        Self { words, head_tokens: head.len() as f64, head, tokens_per_word: 1.0 }
    }

    /// Of all words, as many tokens in the mean as measured; lengths are then right in the mean.
    pub fn measured(head_tokens: f64, tokens_per_word: f64) -> Self {
        let words = WORDS.split_ascii_whitespace().map(|word| Word { text: word.to_owned(), id: None }).collect();
        Self { words, head: Vec::new(), head_tokens, tokens_per_word }
    }

    /// Whether prompts can travel as ids.
    pub fn has_ids(&self) -> bool {
        !self.head.is_empty() && self.words.iter().all(|word| word.id.is_some())
    }

    /// The prompt as text.
    pub fn text(&self, pieces: &[Piece]) -> String {
        let mut text = HEAD.to_owned();
        for word in self.words(pieces) {
            text.push(' ');
            text.push_str(&word.text);
        }
        text
    }

    /// The same prompt as ids: those that the server would make of [`Self::text`].
    pub fn ids(&self, pieces: &[Piece]) -> Vec<u32> {
        let mut ids = self.head.clone();
        ids.extend(self.words(pieces).into_iter().filter_map(|word| word.id));
        ids
    }

    /// Text of so many words, for calibration.
    pub fn sample(&self, words: u32) -> String {
        let mut rng = seed::stream(&[u64::from_be_bytes(*b"a sample")]);
        let drawn = (0..words).map(|_| self.words[rng.random_range(0..self.words.len())].text.as_str());
        [HEAD].into_iter().chain(drawn).collect::<Vec<_>>().join(" ")
    }

    /// Pieces end where they end in tokens: the head takes its tokens from the first ones.
    fn words(&self, pieces: &[Piece]) -> Vec<&Word> {
        let until =
            |tokens: u32| ((f64::from(tokens) - self.head_tokens) / self.tokens_per_word).round().max(0.0) as u64;
        let (mut tokens, mut words) = (0u32, Vec::new());
        for (number, piece) in pieces.iter().enumerate() {
            let begun = until(tokens);
            tokens = tokens.saturating_add(piece.tokens);
            // A prompt of nothing but the head would be everybody's prompt.
            let least = u64::from(number + 1 == pieces.len() && words.is_empty());
            let mut rng = seed::stream(&[piece.key]);
            let count = (until(tokens) - begun).max(least);
            words.extend((0..count).map(|_| &self.words[rng.random_range(0..self.words.len())]));
        }
        words
    }
}

/// The words that calibration asks about.
pub fn candidates() -> impl Iterator<Item = &'static str> {
    WORDS.split_ascii_whitespace()
}

const WORDS: &str = "
about above across act action add after again against age ago air all almost alone along already also always among amount
animal answer any area arm around art ask away baby back bad ball bank base bed before begin behind being below best better
between big bird black blood blue board boat body book both bottom box boy bread bring brother brown build building business but
buy call came can car care carry case cause cell center century chance change chair child children church city class clean clear
close cloth cold color come common company complete control cook cool copy corn corner cost could country course cover cross cry cup
current cut dark daughter day dead deal death decide deep did difference different dinner direct do doctor dog dollar door
down draw dream dress drink drive dry during each early earth east easy eat edge effect eight either else end energy engine
enough enter even evening event ever every example eye face fact fair fall family far farm fast father fear feel feet few
field fight figure fill film final find fine finger fire first fish five floor flow fly follow food foot for force form found
four free fresh friend from front fruit full game garden gas gave general girl give glass go gold gone good got government
great green ground group grow had hair half hand happen happy hard has hat have he head health hear heart heat heavy held
help her here high hill him his history hold hole home hope horse hot hotel hour house how human hundred ice idea if image
in inch include industry inside into iron island it job join just keep kept key kind king knew know land language large
last late laugh law lay lead learn least leave left leg less let letter level lie life light like line list listen little
live local long look lost lot love low machine made main make man many map mark market may mean measure meat meet men
metal method middle might mile milk million mind mine minute miss moment money month moon more morning most mother mountain
mouth move much music must name nation nature near need never new news next night nine no noise none north nose not note
nothing notice now number object ocean of off offer office often oil old on once one only open or orange order other our
out over own page paint pair paper parent part party pass past pattern pay peace people perhaps period person picture
piece place plain plan plane plant play please point poor position power present press price print problem process produce
product public pull push put question quick quiet quite race radio rain ran reach read ready real reason receive record red
region remember rest result return rich ride right ring rise river road rock room root rose round rule run safe said sail
salt same sand save saw say school science sea season seat second see seed seem sell send sense sent serve set seven several
shape she ship short should show side sight sign silver simple since sing sister sit six size skin sky sleep slow small smell
smile snow so soft soil soldier some son song soon sort sound south space speak special speed spend spot spring square stand
star start state station stay steel step still stone stood stop store story street strong student study such sugar summer sun
support sure surface surprise system table take talk tall teach team tell ten test than that their them then there these they
thick thin thing think third this those though thought three through time today together told tomorrow tone too took top total
touch toward town trade train travel tree trip trouble true trust try turn twenty two type under unit until up us use usual
valley value very view village visit voice wait walk wall want war warm was wash watch water wave way we wear weather week
weight well went were west what wheel when where which while white who whole why wide wife will wind window winter wish with
woman women wonder wood word work world would write wrong year yellow yes yet you young your
";

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn exact(head: u32) -> Vocabulary {
        let words = candidates().zip(100..).map(|(word, id)| Word { text: word.to_owned(), id: Some(id) });
        Vocabulary::exact(words.collect(), (0..head).collect())
    }

    fn piece(key: u64, tokens: u32) -> Piece {
        Piece { key, tokens }
    }

    #[test]
    fn there_are_words_enough_and_none_twice() {
        let words: Vec<&str> = candidates().collect();
        assert!(words.len() > 512, "{}", words.len());
        assert_eq!(words.iter().collect::<HashSet<_>>().len(), words.len());
        assert!(words.iter().all(|word| *word != HEAD && word.bytes().all(|byte| byte.is_ascii_lowercase())));
    }

    #[test]
    fn lengths_are_exact_as_text_and_as_ids() {
        for head in [1, 2, 31] {
            let vocabulary = exact(head);
            for total in [32, 33, 100, 1_000] {
                let pieces = [piece(1, total / 3), piece(2, total - total / 3)];
                let words = vocabulary.text(&pieces).split(' ').count() as u32;
                assert_eq!(words - 1 + head, total);
                assert_eq!(vocabulary.ids(&pieces).len() as u32, total);
            }
        }
    }

    #[test]
    fn the_same_key_is_the_same_content_and_another_one_is_not() {
        let vocabulary = exact(1);
        let ids = |pieces: &[Piece]| vocabulary.ids(pieces);
        let (a, b) = (ids(&[piece(1, 64), piece(2, 64)]), ids(&[piece(1, 64), piece(3, 64)]));
        assert_eq!(a[..64], b[..64]);
        assert_ne!(a[64..80], b[64..80]);
        assert_eq!(ids(&[piece(1, 48)])[..], ids(&[piece(1, 64)])[..48]);
    }

    #[test]
    fn measured_lengths_are_right_in_the_mean() {
        let vocabulary = Vocabulary::measured(11.0, 1.25);
        assert!(!vocabulary.has_ids());
        let words = vocabulary.text(&[piece(1, 500), piece(2, 511)]).split(' ').count() - 1;
        assert_eq!(words, 800);
        assert_eq!(vocabulary.sample(17).split(' ').count(), 18);
    }

    #[test]
    fn a_prompt_shorter_than_its_head_is_still_its_own() {
        let vocabulary = exact(31);
        assert_eq!(vocabulary.ids(&[piece(1, 4)]).len(), 32);
        assert_eq!(vocabulary.ids(&[piece(1, 4), piece(2, 3)]).len(), 32);
    }
}
