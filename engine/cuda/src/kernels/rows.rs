//! Launches of what happens to single rows of the residual stream: `kernels/rows.cu`.
use super::Kernel;
use super::launch::{Arg, Checks, Launch, Mem, Refused};

/// The kernels of `rows.cu`.
pub const KERNELS: [Kernel; 3] = [
    Kernel { name: "embed", shared_bytes: 0 },
    Kernel { name: "rms_norm", shared_bytes: 0 },
    Kernel { name: "check_rows", shared_bytes: 0 },
];

/// Threads of a block that has a row.
const THREADS: u32 = 256;

/// Tokens to rows of the residual stream.
#[derive(Clone, Copy, Debug)]
pub struct Embed {
    /// Out: f32 `[rows][width]`.
    pub hidden: Mem,
    /// bf16 `[vocabulary][width]`.
    pub table: Mem,
    /// u32 `[rows]`, each below `vocabulary`.
    pub tokens: Mem,
    /// Tokens that the step before chose.
    pub last: Option<Last>,
    /// Rows.
    pub rows: usize,
    /// Values of a row, a multiple of 8.
    pub width: usize,
    /// Rows of the table.
    pub vocabulary: usize,
}

/// Where a row's token is one that an earlier step chose, and that the host need not have seen yet.
#[derive(Clone, Copy, Debug)]
pub struct Last {
    /// u32 `[rows]`: the index in `chosen`, or [`Last::NOT`] for the token in `tokens`.
    pub from: Mem,
    /// [`super::choose::Outcome`] `[choices]`, of the earlier step.
    pub chosen: Mem,
    /// Length of `chosen`; an index beyond it means token 0.
    pub choices: usize,
}

impl Last {
    /// In `from`: this row's token is that of `tokens`.
    pub const NOT: u32 = u32::MAX;
}

/// `hidden[r] = table[token of r]`.
///
/// # Errors
/// For memory that is too small, and sizes that the kernel does not take.
pub fn embed(embed: &Embed) -> Result<Launch, Refused> {
    let &Embed { hidden, table, tokens, last, rows, width, vocabulary } = embed;
    let check = Checks("embed");
    check.require(width.is_multiple_of(8) && vocabulary > 0, || format!("rows of {width} of {vocabulary}"))?;
    let choices = last.map_or(0, |last| last.choices);
    let args = [
        check.wide("hidden", hidden, check.area("hidden", &[rows, width])?, 4)?,
        check.wide("table", table, check.area("table", &[vocabulary, width])?, 2)?,
        check.array("tokens", tokens, rows, 4)?,
        check.optional("from", last.map(|last| last.from), rows, 4)?,
        check.optional("chosen", last.map(|last| last.chosen), choices, size_of::<super::choose::Outcome>())?,
        Arg::U32(check.size("choices", choices)?),
        Arg::U32(check.size("width", width)?),
        Arg::U32(check.size("vocabulary", vocabulary)?),
    ];
    Ok(Launch::new("embed", [check.size("rows", rows)?, 1, 1], THREADS.min(block(width / 8)), &args))
}

/// Root mean square norm (Zhang & Sennrich 2019).
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm {
    /// Out: bf16 `[rows][width]`.
    pub out: Mem,
    /// f32 `[..][width]`, the residual stream.
    pub hidden: Mem,
    /// f32 `[width]`.
    pub weight: Mem,
    /// u32 `[rows]`: row `r` of `out` is that of `hidden`'s row `of[r]`, each below `hidden_rows`. Without it they are
    /// the same.
    pub of: Option<Mem>,
    /// Rows of `out`.
    pub rows: usize,
    /// Rows of `hidden`.
    pub hidden_rows: usize,
    /// Values of a row, a multiple of 8.
    pub width: usize,
    /// Added to the mean of the squares.
    pub eps: f32,
}

/// `out[r] = hidden[of[r]] / sqrt(mean(hidden[of[r]]²) + eps) * weight`, to bf16.
///
/// # Errors
/// As [`embed`].
pub fn rms_norm(norm: &RmsNorm) -> Result<Launch, Refused> {
    let &RmsNorm { out, hidden, weight, of, rows, hidden_rows, width, eps } = norm;
    let check = Checks("rms_norm");
    check.require(width.is_multiple_of(8) && width > 0, || format!("rows of {width}"))?;
    check.require(of.is_some() || rows <= hidden_rows, || format!("{rows} rows of {hidden_rows}"))?;
    let args = [
        check.wide("out", out, check.area("out", &[rows, width])?, 2)?,
        check.wide("hidden", hidden, check.area("hidden", &[hidden_rows, width])?, 4)?,
        check.wide("weight", weight, width, 4)?,
        check.optional("of", of, rows, 4)?,
        Arg::U32(check.size("hidden_rows", hidden_rows)?),
        Arg::U32(check.size("width", width)?),
        Arg::F32(eps),
    ];
    Ok(Launch::new("rms_norm", [check.size("rows", rows)?, 1, 1], THREADS, &args))
}

/// Which rows came to numbers.
#[derive(Clone, Copy, Debug)]
pub struct CheckRows {
    /// Out: u32 `[rows]`: 1 where one of the row's values is not finite, else 0.
    pub unsound: Mem,
    /// f32 `[rows][width]`: the residual stream after the last layer.
    pub hidden: Mem,
    /// Rows.
    pub rows: usize,
    /// Values of a row, a multiple of 4.
    pub width: usize,
}

/// `unsound[r] = any value of hidden[r] is not finite`; [`super::choose`] reads it.
///
/// # Errors
/// As [`embed`].
pub fn check_rows(rows: &CheckRows) -> Result<Launch, Refused> {
    let &CheckRows { unsound, hidden, rows, width } = rows;
    let check = Checks("check_rows");
    check.require(width.is_multiple_of(4) && width > 0, || format!("rows of {width}"))?;
    let args = [
        check.array("unsound", unsound, rows, 4)?,
        check.wide("hidden", hidden, check.area("hidden", &[rows, width])?, 4)?,
        Arg::U32(check.size("width", width)?),
    ];
    Ok(Launch::new("check_rows", [check.size("rows", rows)?, 1, 1], THREADS.min(block(width / 4)), &args))
}

/// Threads for so much work of one thread each, in whole warps.
fn block(work: usize) -> u32 {
    u32::try_from(work.div_ceil(32).max(1) * 32).unwrap_or(u32::MAX)
}
