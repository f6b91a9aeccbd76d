//! Whether tile registers compute what they should: two products of some rows, panels and groups, beside plain sums and
//! beside the order of additions that is known, bit by bit: a processor may add in another than those on which ours was
//! found.
//! An engine asks before it computes with them; it takes less than a millisecond.
use super::super::packed::{BLOCK, PackedMatrix};
use super::super::product::Output;
use super::amx::Tiles;

/// Two whole row tiles and a part of one, so that all registers are in use, alone and in pairs.
const ROWS: usize = 37;
/// A slice of the groups and a part of the next, and a group that is not full.
const K: usize = 14 * 32 + 5;
/// Two panels and a part of one.
const COLUMNS: usize = 70;
/// Of the sum of the terms' sizes: f32 sums of so few terms in any order are closer.
const TOLERANCE: f64 = 4e-6;

/// What is wrong with these registers, if anything.
///
/// # Safety
/// The machine has AVX-512 with BF16, and what `T` needs.
pub(in crate::ops) unsafe fn fault<T: Tiles>() -> Option<String> {
    // Whole numbers: each sum is exact in f32, in whichever order it is made, so that every bit is known beforehand.
    let whole = |i: usize| ((i * 7 + i / 11) % 17) as f32 - 8.0;
    // Of these, of different sizes, the sums are rounded: in each order to something else.
    let size = |i: usize| (1 << (i % 11)) as f32 / 32.0;
    let fraction = |i: usize| (((i * 2_654_435_761) % 509) as f32 / 256.0 - 1.0) * size(i);
    // SAFETY: the machine has what `T` and AVX-512 need, as the caller says; `differs` asks for no more.
    unsafe { differs::<T>(whole, 0.0).or_else(|| differs::<T>(fraction, TOLERANCE)) }
}

/// The first element of a product of such numbers that is farther from the plain sum than `tolerance`; or, where all
/// are near, that the first row has other bits.
///
/// # Safety
/// As [`fault`].
unsafe fn differs<T: Tiles>(number: impl Fn(usize) -> f32, tolerance: f64) -> Option<String> {
    let rounded = |i: usize| half::bf16::from_f32(number(i)).to_f32();
    let x: Vec<f32> = (0..ROWS * K).map(rounded).collect();
    let weights: Vec<f32> = (0..COLUMNS * K).map(|i| rounded(i + 3)).collect();
    let mut out = vec![f32::NAN; ROWS * COLUMNS];
    let packed = PackedMatrix::from_f32(&weights, K).rounded();
    // SAFETY: the machine has the instructions, as the caller says. The matrix is in bf16;
    // `x` and the results are whole rows of the product.
    unsafe {
        super::matmul::<T>(&x, &packed, &mut out, Output::Store);
    }
    let far = out.iter().enumerate().find_map(|(i, &got)| {
        let (row, column) = (i / COLUMNS, i % COLUMNS);
        let terms = x[row * K..][..K].iter().zip(&weights[column * K..]).map(|(x, w)| f64::from(*x) * f64::from(*w));
        let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
        let near = (f64::from(got) - sum).abs() <= tolerance * size;
        (!near).then(|| format!("its tiles give {got} and not {sum} for row {row}, column {column} of a test product"))
    });
    let differ = || {
        let known = weights.chunks(K).map(|weights| in_order(&x[..K], weights));
        known.zip(&out).any(|(known, tile)| known.to_bits() != tile.to_bits())
    };
    far.or_else(|| differ().then(|| "its tiles add up in another order than is known".to_owned()))
}

/// A row times a column as `tdpbf16ps` adds up. For each group of 32 `k` ascending, two chains from zero and their sum:
///
/// ```text
/// even  = fma(x30, w30, … fma(x2, w2, fma(x0, w0, 0)))
/// odd   = fma(x31, w31, … fma(x3, w3, fma(x1, w1, 0)))
/// total = total + (even + odd)
/// ```
pub(super) fn in_order(x: &[f32], weights: &[f32]) -> f32 {
    x.chunks(BLOCK).zip(weights.chunks(BLOCK)).fold(0.0, |total, (x, weights)| {
        let chain = |first: usize| (first..x.len()).step_by(2).fold(0.0f32, |sum, k| x[k].mul_add(weights[k], sum));
        total + (chain(0) + chain(1))
    })
}
