//! The launch that chooses a step's tokens: `kernels/choose.cu`. Its oracle is `tandem_engine::sampler`.
use tandem_engine::sampling::{LOWEST_TEMPERATURE, SamplingParams};

use super::Kernel;
use super::launch::{Arg, Checks, Launch, Mem, Refused};

/// The kernel of `choose.cu`.
pub const KERNELS: [Kernel; 1] = [Kernel { name: "choose", shared_bytes: 0 }];

/// Tokens of a vocabulary at most: weights are summed in 64-bit integers, see `choose.cu`.
pub const MOST_TOKENS: usize = 1 << 18;

/// What is asked for, as the kernel reads it: whether some rows of a step are sound, and the token that follows one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct Choice {
    uniform: f64,
    /// Row of the logits, or [`Choice::NONE`].
    logits_row: u32,
    first_row: u32,
    rows: u32,
    top_k: u32,
    /// 1 ÷ temperature; 0 is greedy.
    scale: f32,
    top_p: f32,
    min_p: f32,
    /// The struct has no bytes that are not written.
    pad: u32,
}

impl Choice {
    /// As `logits_row`: no token is chosen.
    pub const NONE: u32 = u32::MAX;

    /// The token that `sampling` chooses from a row of logits with the random number `uniform`, where the `rows` rows
    /// of the step from `first_row` on are sound. `None` for rules that only the host knows: penalties, bias, tokens
    /// that must not end, log probabilities of others; [`Choice::soundness`] is for these.
    pub fn new(sampling: &SamplingParams, uniform: f64, logits_row: u32, first_row: u32, rows: u32) -> Option<Self> {
        if sampling.needs_host() {
            return None;
        }
        let temperature = sampling.temperature;
        let greedy = !(temperature >= LOWEST_TEMPERATURE && temperature.is_finite());
        let scale = if greedy { 0.0 } else { temperature.recip() };
        let &SamplingParams { top_k, top_p, min_p, .. } = sampling;
        Some(Self { uniform, logits_row, first_row, rows, top_k, scale, top_p, min_p, pad: 0 })
    }

    /// Only whether the rows are sound.
    pub fn soundness(first_row: u32, rows: u32) -> Self {
        Self { logits_row: Self::NONE, first_row, rows, ..Self::default() }
    }
}

/// What became of a [`Choice`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct Outcome {
    /// The token; 0 where none was chosen.
    pub token: u32,
    /// Natural logarithm of the probability that the model gave it, of the full softmax.
    pub logprob: f32,
    /// [`Outcome::SOUND`], [`Outcome::CHOSEN`] or [`Outcome::NOT_NUMBERS`].
    pub status: u32,
    /// The struct has no bytes that are not written.
    pad: u32,
}

impl Outcome {
    /// The rows are numbers; no token was asked for.
    pub const SOUND: u32 = 0;
    /// The rows are numbers, the token is chosen.
    pub const CHOSEN: u32 = 1;
    /// One of the rows has a value that is not finite, or a logit is NaN.
    pub const NOT_NUMBERS: u32 = 2;
}

/// A step's choices.
#[derive(Clone, Copy, Debug)]
pub struct Choose {
    /// Out: [`Outcome`] `[count]`.
    pub outcomes: Mem,
    /// [`Choice`] `[count]`.
    pub choices: Mem,
    /// Number of choices.
    pub count: usize,
    /// f32 `[logits_rows][vocabulary]`.
    pub logits: Mem,
    /// Rows of logits.
    pub logits_rows: usize,
    /// Values of a row of logits, up to [`MOST_TOKENS`].
    pub vocabulary: usize,
    /// u32 `[rows]` of [`super::rows::check_rows`].
    pub unsound: Mem,
    /// Rows of the step; choices name rows among them.
    pub rows: usize,
}

/// Temperature, `min_p`, `top_k`, `top_p` and the draw by the number that the host gives; among equal logits the lowest
/// id comes first.
///
/// # Errors
/// For memory that is too small, and a vocabulary that is too large.
pub fn choose(choose: &Choose) -> Result<Launch, Refused> {
    let &Choose { outcomes, choices, count, logits, logits_rows, vocabulary, unsound, rows } = choose;
    let check = Checks("choose");
    check.require((1..=MOST_TOKENS).contains(&vocabulary), || format!("a vocabulary of {vocabulary} tokens"))?;
    let args = [
        check.wide("outcomes", outcomes, count, size_of::<Outcome>())?,
        check.wide("choices", choices, count, size_of::<Choice>())?,
        check.array("logits", logits, check.area("logits", &[logits_rows, vocabulary])?, 4)?,
        check.array("unsound", unsound, rows, 4)?,
        Arg::U32(check.size("logits_rows", logits_rows)?),
        Arg::U32(check.size("vocabulary", vocabulary)?),
        Arg::U32(check.size("rows", rows)?),
    ];
    let threads = if vocabulary > 8192 { 1024 } else { 256 };
    Ok(Launch::new("choose", [check.size("count", count)?, 1, 1], threads, &args))
}
