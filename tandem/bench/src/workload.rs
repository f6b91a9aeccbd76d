//! What is asked: the rows A to F and the user's own, as a pure function of a seed and the request's number.
//!
//! A request is its length in tokens and *pieces* of content; the same key is the same content, so that prefixes are
//! shared exactly where a row wants it, and nowhere else. Which words the pieces become: [`super::prompt`].
use std::str::FromStr;
use std::sync::Arc;

use rand::Rng;

use super::piece::Piece;
use super::seed;
use super::trace::Trace;

/// A range of token counts, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lengths {
    /// At least so many, 1 or more.
    pub low: u32,
    /// At most so many.
    pub high: u32,
}

/// Input and output of one kind of requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Prompt tokens.
    pub input: Lengths,
    /// Tokens to generate, to the last one.
    pub output: Lengths,
    /// What prompts share.
    pub prefix: Option<Prefix>,
}

/// Prompts of one group begin with the same tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prefix {
    /// Share of a prompt that is its group's, 0 to 1.
    pub share: f64,
    /// How many such beginnings there are.
    pub groups: u32,
}

/// What the requests of one row are.
#[derive(Clone, Debug)]
pub enum Mix {
    /// Each of one of these shapes, by weight.
    Shapes(Vec<(f64, Shape)>),
    /// As recorded or made.
    Trace(Arc<Trace>),
}

/// Whether shared beginnings were seen by the server before the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    /// Every prompt is new from its first token.
    Cold,
    /// Groups share their prefix, and each was sent once before.
    Warm,
}

/// One row: a name and what is asked.
#[derive(Clone, Debug)]
pub struct Workload {
    /// As `--row` names it.
    pub name: String,
    /// What its requests are.
    pub mix: Mix,
}

/// Which of all possible runs of a workload this is.
#[derive(Clone, Copy, Debug)]
pub struct Draw {
    /// Decides lengths: the same for both endpoints of a comparison.
    pub seed: u64,
    /// Decides contents: another one for every interval, so that no server has seen the prompts of this one before.
    pub content: u64,
    /// Whether prefixes are shared.
    pub cache: Cache,
}

/// One request, before it has words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// The prompt.
    pub pieces: Vec<Piece>,
    /// Tokens to generate.
    pub max_tokens: u32,
}

impl Item {
    /// Length of the prompt.
    pub fn prompt_tokens(&self) -> u32 {
        self.pieces.iter().map(|piece| piece.tokens).sum()
    }
}

/// Names of different uses of a draw.
const LENGTHS: u64 = 1;
const GROUP: u64 = 2;
const UNIQUE: u64 = 3;
const BLOCK: u64 = 4;

impl Workload {
    /// Request number `index` of a draw; `None` behind the end of a trace.
    pub fn item(&self, draw: Draw, index: u64) -> Option<Item> {
        match &self.mix {
            Mix::Shapes(shapes) => Some(shaped(shapes, draw, index)),
            Mix::Trace(trace) => {
                let request = trace.requests.get(usize::try_from(index).ok()?)?;
                let unique = || seed::key(&[draw.content, UNIQUE, index]);
                let piece = |piece: &Piece| Piece { key: seed::key(&[draw.content, BLOCK, piece.key]), ..*piece };
                let pieces = match request.blocks.as_slice() {
                    [] => vec![Piece { key: unique(), tokens: request.input_tokens }],
                    blocks => blocks.iter().map(piece).collect(),
                };
                Some(Item { pieces, max_tokens: request.output_tokens })
            }
        }
    }

    /// Requests that a draw wants sent before its first one: every shared prefix once, so that it is cached.
    pub fn primers(&self, draw: Draw) -> Vec<Item> {
        let Mix::Shapes(shapes) = &self.mix else { return Vec::new() };
        let mut primers = Vec::new();
        for (number, (_, shape)) in shapes.iter().enumerate() {
            let (Some(prefix), Cache::Warm) = (shape.prefix, draw.cache) else { continue };
            for group in 0..prefix.groups {
                let head = Piece { key: group_key(draw, number, group), tokens: prefix.tokens_of(shape.input.high) };
                let tail = Piece { key: seed::key(&[draw.content, UNIQUE, u64::MAX - u64::from(group)]), tokens: 1 };
                primers.push(Item { pieces: vec![head, tail], max_tokens: 1 });
            }
        }
        primers
    }

    /// Whether cold and warm are two different things for this row.
    pub fn shares_prefixes(&self) -> bool {
        match &self.mix {
            Mix::Shapes(shapes) => shapes.iter().any(|(_, shape)| shape.prefix.is_some()),
            Mix::Trace(_) => false,
        }
    }

    /// Prompt and output of the longest request together, tokens.
    pub fn longest_tokens(&self) -> u32 {
        match &self.mix {
            Mix::Shapes(shapes) => {
                shapes.iter().map(|(_, shape)| shape.input.high.saturating_add(shape.output.high)).max().unwrap_or(0)
            }
            Mix::Trace(trace) => {
                let total = |r: &super::trace::TraceRequest| r.input_tokens.saturating_add(r.output_tokens);
                trace.requests.iter().map(total).max().unwrap_or(0)
            }
        }
    }
}

fn shaped(shapes: &[(f64, Shape)], draw: Draw, index: u64) -> Item {
    let mut rng = seed::stream(&[draw.seed, LENGTHS, index]);
    let total: f64 = shapes.iter().map(|(weight, _)| weight).sum();
    let mut left = rng.random_range(0.0..total.max(f64::MIN_POSITIVE));
    let chosen = shapes.iter().position(|(weight, _)| {
        left -= weight;
        left < 0.0
    });
    let number = chosen.unwrap_or(shapes.len() - 1);
    let shape = &shapes[number].1;
    let input = rng.random_range(shape.input.low..=shape.input.high);
    let max_tokens = rng.random_range(shape.output.low..=shape.output.high);
    let unique = seed::key(&[draw.content, UNIQUE, index]);
    let pieces = match (shape.prefix, draw.cache) {
        (Some(prefix), Cache::Warm) => {
            let group = rng.random_range(0..prefix.groups);
            // The last token is always the request's own: a prompt that is cached to its end is another workload.
            let shared = prefix.tokens_of(input).min(input - 1);
            let head = Piece { key: group_key(draw, number, group), tokens: shared };
            let pieces = [head, Piece { key: unique, tokens: input - shared }];
            pieces.into_iter().filter(|piece| piece.tokens > 0).collect()
        }
        _ => vec![Piece { key: unique, tokens: input }],
    };
    Item { pieces, max_tokens }
}

fn group_key(draw: Draw, shape: usize, group: u32) -> u64 {
    seed::key(&[draw.content, GROUP, shape as u64, group.into()])
}

impl Prefix {
    fn tokens_of(&self, input: u32) -> u32 {
        (f64::from(input) * self.share).round() as u32
    }
}

impl Lengths {
    /// No more than `most` tokens.
    pub fn capped(self, most: u32) -> Self {
        Self { low: self.low.min(most), high: self.high.min(most) }
    }
}

/// `N` or `N..M`, both ends included.
impl FromStr for Lengths {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |part: &str| part.trim().parse::<u32>().map_err(|_| format!("`{part}` is no number of tokens"));
        let (low, high) = match text.split_once("..") {
            Some((low, high)) => (number(low)?, number(high.trim_start_matches('='))?),
            None => (number(text)?, number(text)?),
        };
        if low == 0 || high < low {
            return Err(format!("{text}: lengths are 1 or more, and the second is not below the first"));
        }
        Ok(Self { low, high })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn draw(cache: Cache) -> Draw {
        Draw { seed: 1, content: 2, cache }
    }

    fn own(input: &str, output: &str, prefix: Option<Prefix>) -> Workload {
        let shape = Shape { input: input.parse().unwrap(), output: output.parse().unwrap(), prefix };
        Workload { name: "own".into(), mix: Mix::Shapes(vec![(1.0, shape)]) }
    }

    #[test]
    fn lengths_stay_in_their_ranges_and_reach_both_ends() {
        let workload = own("10..13", "5", None);
        let items: Vec<Item> = (0..200).filter_map(|index| workload.item(draw(Cache::Cold), index)).collect();
        let inputs: HashSet<u32> = items.iter().map(Item::prompt_tokens).collect();
        assert_eq!(inputs, HashSet::from([10, 11, 12, 13]));
        assert!(items.iter().all(|item| item.max_tokens == 5));
    }

    #[test]
    fn cold_prompts_share_nothing_and_warm_ones_their_prefix() {
        let prefix = Prefix { share: 0.75, groups: 3 };
        let workload = own("100", "1", Some(prefix));
        let first = |cache, index| workload.item(draw(cache), index).unwrap().pieces[0];
        let cold: HashSet<u64> = (0..100).map(|index| first(Cache::Cold, index).key).collect();
        assert_eq!(cold.len(), 100);
        let warm: HashSet<u64> = (0..100).map(|index| first(Cache::Warm, index).key).collect();
        assert_eq!(warm.len(), 3);
        assert_eq!(first(Cache::Warm, 0).tokens, 75);
        let primed: HashSet<u64> = workload.primers(draw(Cache::Warm)).iter().map(|item| item.pieces[0].key).collect();
        assert_eq!(primed, warm);
        assert!(workload.primers(draw(Cache::Cold)).is_empty());
    }

    #[test]
    fn another_interval_has_other_contents_of_the_same_lengths() {
        let workload = own("10..90", "5..9", Some(Prefix { share: 0.5, groups: 2 }));
        let (one, two) = (draw(Cache::Warm), Draw { content: 3, ..draw(Cache::Warm) });
        for index in 0..50 {
            let (a, b) = (workload.item(one, index).unwrap(), workload.item(two, index).unwrap());
            assert_eq!((a.prompt_tokens(), a.max_tokens), (b.prompt_tokens(), b.max_tokens));
            assert!(a.pieces.iter().zip(&b.pieces).all(|(a, b)| a.key != b.key));
        }
    }

    #[test]
    fn weights_are_shares() {
        let shape = |input: &str| Shape { input: input.parse().unwrap(), output: "1".parse().unwrap(), prefix: None };
        let workload = Workload { name: "m".into(), mix: Mix::Shapes(vec![(0.8, shape("1")), (0.2, shape("2"))]) };
        let long = (0..5_000).filter(|i| workload.item(draw(Cache::Cold), *i).unwrap().prompt_tokens() == 2).count();
        assert!((900..1_100).contains(&long), "{long}");
    }

    #[test]
    fn a_whole_prompt_is_never_shared() {
        let workload = own("1..3", "1", Some(Prefix { share: 1.0, groups: 1 }));
        for index in 0..20 {
            let item = workload.item(draw(Cache::Warm), index).unwrap();
            assert_eq!(item.pieces.last().unwrap().tokens, 1);
        }
    }

    #[test]
    fn lengths_are_read() {
        assert_eq!("7".parse(), Ok(Lengths { low: 7, high: 7 }));
        assert_eq!("7..9".parse(), Ok(Lengths { low: 7, high: 9 }));
        for wrong in ["", "0", "9..7", "a", "1..", "-1"] {
            assert!(wrong.parse::<Lengths>().is_err(), "{wrong}");
        }
    }
}
