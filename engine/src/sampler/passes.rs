//! Loops over a vocabulary of logits, in a form that compilers turn into vector code. Nothing in them depends on the
//! machine: additions have a fixed order and are never fused, so that every node gets the same bits.
use std::cmp::Ordering;

use crate::ops::simd::{Pass, widest};

/// Values that are added side by side.
const LANES: usize = 16;
/// Values whose sum is kept in f32 before it goes into an f64.
const RUN: usize = 512;

/// A token with its logit or weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    pub value: f32,
    pub id: u32,
}

/// A logit as a number that can be compared and subtracted: nothing and NaN are impossible, infinity is finite.
pub(super) fn value(logit: Option<&f32>) -> f32 {
    match logit {
        Some(logit) if !logit.is_nan() => logit.min(f32::MAX),
        _ => f32::NEG_INFINITY,
    }
}

/// Whether none is NaN.
pub(super) fn are_numbers(logits: &[f32]) -> bool {
    struct AreNumbers<'a>(&'a [f32]);
    impl Pass for AreNumbers<'_> {
        type Output = bool;
        #[inline(always)]
        fn run(self) -> bool {
            !self.0.chunks(RUN).any(|run| run.iter().fold(false, |found, logit| found | logit.is_nan()))
        }
    }
    widest(AreNumbers(logits))
}

/// The first of the greatest logits; 0 without any that is possible.
pub(super) fn likeliest(logits: &[f32]) -> usize {
    struct Likeliest<'a>(&'a [f32]);
    impl Pass for Likeliest<'_> {
        type Output = usize;
        #[inline(always)]
        fn run(self) -> usize {
            first_greatest(self.0)
        }
    }
    widest(Likeliest(logits))
}

#[inline(always)]
fn first_greatest(logits: &[f32]) -> usize {
    let greater = |a: f32, b: f32| if b > a { b } else { a };
    // Four vectors of the widest kind: one alone would wait for itself.
    let (whole, rest) = logits.as_chunks::<{ 4 * LANES }>();
    let mut lanes = [f32::NEG_INFINITY; 4 * LANES];
    for chunk in whole {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane = greater(*lane, logit);
        }
    }
    let greatest = lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |greatest, &logit| greater(greatest, logit));
    if greatest == f32::NEG_INFINITY {
        return 0;
    }
    // Infinity is no greater than the greatest finite logit, see `value`.
    let is_it = |logit: f32| (logit >= greatest) | (logit >= f32::MAX);
    let run = logits.chunks(RUN).position(|run| run.iter().fold(false, |found, &logit| found | is_it(logit)));
    let start = run.unwrap_or(0) * RUN;
    logits[start..].iter().position(|&logit| is_it(logit)).map_or(0, |offset| start + offset)
}

/// The sum of e^(logit − greatest); at least 1 where `greatest` is the greatest.
pub(super) fn total(logits: &[f32], greatest: f32) -> f64 {
    struct Total<'a>(&'a [f32], f32);
    impl Pass for Total<'_> {
        type Output = f64;
        #[inline(always)]
        fn run(self) -> f64 {
            let weigh = Weigh { greatest: self.1, scale: 1.0, least: 0.0 };
            self.0.chunks(RUN).map(|run| sum(run, |logit| weigh.one(logit))).sum()
        }
    }
    widest(Total(logits, greatest))
}

/// Logits to unnormalized probabilities; the greatest has 1.
pub(super) struct Weigh {
    pub greatest: f32,
    /// 1 ÷ temperature.
    pub scale: f32,
    /// Smaller weights are none.
    pub least: f32,
}

impl Weigh {
    /// The weight of one logit; 0 for an impossible one.
    #[inline(always)]
    pub fn one(&self, logit: f32) -> f32 {
        // Not `f32::min`, which would make a number of NaN.
        let logit = if logit > f32::MAX { f32::MAX } else { logit };
        let weight = exp((logit - self.greatest) * self.scale);
        if weight < self.least { 0.0 } else { weight }
    }

    /// The weights of all logits, and their sum.
    pub fn all(&self, logits: &[f32], weights: &mut Vec<f32>) -> f64 {
        struct All<'a>(&'a Weigh, &'a [f32], &'a mut [f32]);
        impl Pass for All<'_> {
            type Output = f64;
            #[inline(always)]
            fn run(self) -> f64 {
                let Self(weigh, logits, weights) = self;
                let runs = logits.chunks(RUN).zip(weights.chunks_mut(RUN));
                let weigh_run = |(logits, weights): (&[f32], &mut [f32])| {
                    weights.iter_mut().zip(logits).for_each(|(weight, &logit)| *weight = weigh.one(logit));
                    sum(weights, |weight| weight)
                };
                runs.map(weigh_run).sum()
            }
        }
        weights.resize(logits.len(), 0.0);
        widest(All(self, logits, weights))
    }
}

/// The index of the weight at the point `left` of their sum, by index.
pub(super) fn at(weights: &[f32], mut left: f64) -> Option<usize> {
    let mut last = None;
    for (number, run) in weights.chunks(RUN).enumerate() {
        let mass = sum(run, |weight| weight);
        if mass > 0.0 {
            last = Some((number * RUN, run));
        }
        if left < mass {
            break;
        }
        left -= mass;
    }
    let (start, run) = last?;
    let hit = run.iter().position(|&weight| {
        left -= f64::from(weight);
        left < 0.0
    });
    // Rounding may leave a little beyond the last one.
    hit.or_else(|| run.iter().rposition(|&weight| weight > 0.0)).map(|offset| start + offset)
}

/// The `count` greatest logits, the greatest first; fewer where not so many are possible.
pub(super) fn likeliest_of(logits: &[f32], count: usize, kept: &mut Vec<Candidate>) {
    kept.clear();
    if count == 0 {
        return;
    }
    let full = count.saturating_mul(2).saturating_add(RUN);
    let mut bar = f32::NEG_INFINITY;
    for (number, run) in logits.chunks(RUN / 8).enumerate() {
        // Most runs hold nothing above the bar, and this test of them is vector code.
        if !run.iter().fold(false, |any, &logit| any | (logit > bar)) {
            continue;
        }
        for (offset, &logit) in run.iter().enumerate() {
            if logit > bar {
                // Adding zero makes the two zeros equal.
                let value = logit.min(f32::MAX) + 0.0;
                kept.push(Candidate { value, id: (number * (RUN / 8) + offset) as u32 });
            }
        }
        if kept.len() >= full {
            kept.select_nth_unstable_by(count - 1, likelier);
            kept.truncate(count);
            // Who comes later and is only equal has a higher id: it comes behind all of these.
            bar = kept[count - 1].value;
        }
    }
    if count < kept.len() {
        kept.select_nth_unstable_by(count - 1, likelier);
        kept.truncate(count);
    }
    kept.sort_unstable_by(likelier);
}

fn likelier(a: &Candidate, b: &Candidate) -> Ordering {
    b.value.total_cmp(&a.value).then(a.id.cmp(&b.id))
}

#[inline(always)]
fn sum(run: &[f32], weigh: impl Fn(f32) -> f32) -> f64 {
    let (whole, rest) = run.as_chunks::<LANES>();
    let mut lanes = [0f32; LANES];
    for chunk in whole {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane += weigh(value);
        }
    }
    let rest = rest.iter().map(|&value| f64::from(weigh(value)));
    lanes.iter().map(|&lane| f64::from(lane)).chain(rest).sum()
}

/// e^x for x ≤ 0, within 2 units in the last place (the polynomial of Cephes' `expf`); 0 below -87 and for NaN.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    /// Adding it rounds to an integer, which the lowest bits then hold.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let possible = x >= -87.0;
    let x = if possible { x } else { 0.0 };
    let rounded = x * std::f32::consts::LOG2_E + ROUND;
    let whole = rounded - ROUND;
    let x = x - whole * LN2_HIGH - whole * LN2_LOW;
    let mut y = 1.987_569_1e-4;
    y = y * x + 1.398_199_9e-3;
    y = y * x + 8.333_452e-3;
    y = y * x + 4.166_579_6e-2;
    y = y * x + 1.666_666_5e-1;
    y = y * x + 5e-1;
    let y = y * x * x + x + 1.0;
    let exponent = rounded.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23;
    if possible { y * f32::from_bits(exponent) } else { 0.0 }
}
