//! Made-up conversation traffic from a seed, with the statistics of Mooncake's conversation trace (12,031 requests in
//! 3,537 s): prompts of 12,000 tokens in the mean and 7,000 in the median, answers of 343, sessions of 1.6 turns that
//! share their history in blocks, one system prompt for all, a third of all prompt tokens seen before, arrivals a
//! little burstier than chance. Pure. For tests, and for row F where no file is given.
use rand::Rng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, Gamma, LogNormal, Poisson};

use super::{BLOCK_TOKENS, Recorded};
use crate::seed;

/// Seconds in which the rate of new sessions is one number.
const TICK_S: f64 = 3.0;
/// Requests of a tick: their variance is 1.1 times what chance alone would give, so the rate is drawn anew each tick.
const REQUESTS_PER_TICK: f64 = 10.2;
const RATE_SHAPE: f64 = 38.0;
/// Sessions that have a second turn, and then each further one.
const SECOND_TURN: f64 = 0.306;
const FURTHER_TURN: f64 = 0.51;
const MEAN_TURNS: f64 = 1.0 + SECOND_TURN / (1.0 - FURTHER_TURN);
/// Later turns whose history was edited, so that only a part of it is shared.
const EDITED: f64 = 0.1;
/// Later turns that ask the same once more.
const AGAIN: f64 = 0.1;
/// Mooncake's shortest and longest.
const INPUT_TOKENS: (f64, f64) = (890.0, 126_000.0);
const OUTPUT_TOKENS: (f64, f64) = (1.0, 2_000.0);
/// The block that all prompts begin with.
const SYSTEM_PROMPT: u64 = 0;

/// The distributions; logarithms of tokens or seconds.
struct Shapes {
    rate: Gamma<f64>,
    first_input: LogNormal<f64>,
    message: LogNormal<f64>,
    short_answer: LogNormal<f64>,
    answer: LogNormal<f64>,
    pause_s: LogNormal<f64>,
}

impl Shapes {
    /// `None` would be constants here that are no distributions.
    fn new() -> Option<Self> {
        let mean = REQUESTS_PER_TICK / MEAN_TURNS;
        Some(Self {
            rate: Gamma::new(RATE_SHAPE, mean / RATE_SHAPE).ok()?,
            first_input: LogNormal::new(8.70, 1.14).ok()?,
            message: LogNormal::new(4.4, 2.1).ok()?,
            short_answer: LogNormal::new(3.0, 0.9).ok()?,
            answer: LogNormal::new(5.93, 0.38).ok()?,
            pause_s: LogNormal::new(4.8, 0.95).ok()?,
        })
    }

    fn output(&self, rng: &mut StdRng) -> u32 {
        let tokens = if rng.random_bool(0.2) { self.short_answer.sample(rng) } else { self.answer.sample(rng) };
        tokens.clamp(OUTPUT_TOKENS.0, OUTPUT_TOKENS.1) as u32
    }
}

/// The first `requests` of a traffic that has been running for a while.
pub fn generate(seed: u64, requests: usize) -> Vec<Recorded> {
    let Some(shapes) = Shapes::new() else { return Vec::new() };
    let mut rng = seed::stream(&[seed, u64::from_be_bytes(*b"sessions")]);
    let mut ids = SYSTEM_PROMPT + 1;
    let mut made: Vec<Recorded> = Vec::new();
    let mut tick = 0u32;
    // Sessions that began later than the last wanted request cannot come before it.
    loop {
        let began = f64::from(tick) * TICK_S;
        let sessions =
            Poisson::new(shapes.rate.sample(&mut rng).max(1e-9)).map_or(0.0, |poisson| poisson.sample(&mut rng));
        for _ in 0..sessions as u32 {
            let at_s = began + rng.random_range(0.0..TICK_S);
            session(&shapes, at_s, &mut ids, &mut rng, &mut made);
        }
        tick += 1;
        if made.iter().filter(|request| request.at_s < f64::from(tick) * TICK_S).count() >= requests {
            break;
        }
    }
    made.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
    made.truncate(requests);
    made
}

/// All turns of one conversation.
fn session(shapes: &Shapes, mut at_s: f64, ids: &mut u64, rng: &mut StdRng, made: &mut Vec<Recorded>) {
    let clamped = |tokens: f64| tokens.clamp(INPUT_TOKENS.0, INPUT_TOKENS.1) as u32;
    let mut input_tokens = clamped(shapes.first_input.sample(rng));
    let mut history = vec![SYSTEM_PROMPT];
    let mut again = SECOND_TURN;
    loop {
        extend(&mut history, input_tokens, ids);
        let output_tokens = shapes.output(rng);
        made.push(Recorded { at_s, input_tokens, output_tokens, blocks: history.clone() });
        if !rng.random_bool(again) {
            return;
        }
        again = FURTHER_TURN;
        at_s += shapes.pause_s.sample(rng);
        if !rng.random_bool(AGAIN) {
            // Only full blocks are found again: the last one of the old prompt goes on with other tokens.
            history.truncate((input_tokens / BLOCK_TOKENS).max(1) as usize);
            input_tokens = clamped(f64::from(input_tokens + output_tokens) + shapes.message.sample(rng));
        }
        if rng.random_bool(EDITED) {
            history.truncate(rng.random_range(1..=history.len()));
        }
    }
}

/// New blocks until `input_tokens` are covered; surplus ones go.
fn extend(history: &mut Vec<u64>, input_tokens: u32, ids: &mut u64) {
    let blocks = input_tokens.div_ceil(BLOCK_TOKENS) as usize;
    history.truncate(blocks);
    while history.len() < blocks {
        history.push(*ids);
        *ids += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Selection, prepare};
    use super::*;

    fn quantile(mut values: Vec<u32>, at: f64) -> f64 {
        values.sort_unstable();
        f64::from(values[(at * values.len() as f64) as usize])
    }

    fn near(found: f64, wanted: f64, share: f64, what: &str) {
        assert!((found / wanted - 1.0).abs() < share, "{what}: {found}, the real trace has {wanted}");
    }

    #[test]
    fn the_statistics_are_those_of_the_real_trace() {
        let made = generate(5, 12_031);
        assert_eq!(made.len(), 12_031);
        let inputs: Vec<u32> = made.iter().map(|request| request.input_tokens).collect();
        let outputs: Vec<u32> = made.iter().map(|request| request.output_tokens).collect();
        let mean = |values: &[u32]| values.iter().map(|v| f64::from(*v)).sum::<f64>() / values.len() as f64;
        near(mean(&inputs), 12_035.0, 0.15, "mean prompt");
        near(quantile(inputs.clone(), 0.5), 6_909.0, 0.15, "median prompt");
        near(quantile(inputs, 0.9), 27_367.0, 0.15, "p90 prompt");
        near(mean(&outputs), 343.0, 0.1, "mean answer");
        near(quantile(outputs, 0.5), 350.0, 0.1, "median answer");
        let all = Selection { scale: 1, speed: 1.0, from_s: 0.0, requests: usize::MAX, most_tokens: u32::MAX, seed: 1 };
        let trace = prepare(made, &all).unwrap();
        near(trace.seconds(), 3_537.0, 0.15, "seconds");
        near(trace.shared_share(), 0.374, 0.12, "shared share");
        let mut ticks = vec![0.0; (trace.seconds() / TICK_S) as usize + 1];
        trace.requests.iter().for_each(|request| ticks[(request.at_s / TICK_S) as usize] += 1.0);
        // Behind the first minutes, in which old sessions have no later turns yet.
        let ticks = &ticks[200..];
        let mean = ticks.iter().sum::<f64>() / ticks.len() as f64;
        let variance = ticks.iter().map(|n| (n - mean).powi(2)).sum::<f64>() / ticks.len() as f64;
        near(variance / mean, 1.1, 0.25, "variance of a tick's requests, in means");
    }

    #[test]
    fn a_seed_is_a_trace() {
        assert_eq!(generate(1, 50), generate(1, 50));
        assert_ne!(generate(1, 50), generate(2, 50));
        let short = generate(1, 10);
        assert_eq!(short, generate(1, 50)[..10]);
    }

    #[test]
    fn blocks_cover_their_prompt() {
        for request in generate(3, 500) {
            assert_eq!(request.blocks.len(), request.input_tokens.div_ceil(BLOCK_TOKENS) as usize);
            assert_eq!(request.blocks[0], SYSTEM_PROMPT);
        }
    }
}
