//! What happens to single rows between the products: RMS norm (Zhang & Sennrich 2019), rotary embedding (RoFormer,
//! arXiv:2104.09864), SwiGLU (arXiv:2002.05202). Rows are spread over the current pool.
use super::simd::{Isa, LANES, Lanes, isa_dispatch};
use super::{Shared, pool};

/// Fewer rows than this are not worth another thread.
const MIN_ROWS: usize = 16;

/// `out[r] = x[r] / sqrt(mean(x[r]²) + eps) * weight`, rows as long as `weight`.
///
/// # Panics
/// If the lengths do not fit together or the row is no multiple of 16 long.
pub fn rms_norm(isa: Isa, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let n = weight.len();
    assert!(n > 0 && n.is_multiple_of(LANES) && x.len().is_multiple_of(n) && out.len() == x.len());
    let to = Shared(out.as_mut_ptr());
    pool::for_each_run(x.len() / n, MIN_ROWS, |run| {
        for row in run {
            // SAFETY: all three rows have `n` elements, a multiple of 16, and the row is in this run only.
            unsafe { norm_row(isa, x[row * n..].as_ptr(), weight.as_ptr(), eps, n, to.get().add(row * n)) }
        }
    });
}

/// `out[r, i] = silu(gate_up[r, i]) * gate_up[r, width + i]`.
///
/// # Panics
/// If the lengths do not fit together or `width` is no multiple of 16.
pub fn swiglu(isa: Isa, gate_up: &[f32], width: usize, out: &mut [f32]) {
    assert!(width > 0 && width.is_multiple_of(LANES) && gate_up.len() == 2 * out.len());
    assert!(out.len().is_multiple_of(width));
    let to = Shared(out.as_mut_ptr());
    pool::for_each_run(out.len() / width, MIN_ROWS, |run| {
        for row in run {
            // SAFETY: `2 * width` inputs and `width` outputs, a multiple of 16; the row is in this run only.
            unsafe { swiglu_row(isa, gate_up[row * 2 * width..].as_ptr(), width, to.get().add(row * width)) }
        }
    });
}

/// Adds `bias` to every row of `x`, rows as long as `bias`.
///
/// # Panics
/// If `x` is not a whole number of rows.
pub fn add_to_rows(x: &mut [f32], bias: &[f32]) {
    assert!(!bias.is_empty() && x.len().is_multiple_of(bias.len()));
    for_each_row(x, bias.len(), |row| row.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias));
}

/// [`rms_norm`] in place of single heads: of the first ones of every row of `x`, rows `stride` long, as many as
/// `weights` has heads of `head_dim` values.
///
/// # Panics
/// If the lengths do not fit together or `head_dim` is no multiple of 16.
pub fn norm_heads(isa: Isa, x: &mut [f32], stride: usize, head_dim: usize, weights: &[f32], eps: f32) {
    assert!(head_dim > 0 && head_dim.is_multiple_of(LANES) && weights.len().is_multiple_of(head_dim));
    assert!(weights.len() <= stride && x.len().is_multiple_of(stride));
    for_each_row(x, stride, |row| {
        for (head, weight) in row.chunks_exact_mut(head_dim).zip(weights.chunks_exact(head_dim)) {
            let head = head.as_mut_ptr();
            // SAFETY: a head and its weights have `head_dim` elements, a multiple of 16; each vector of the head is
            // read before it is written, and its sum of squares before that.
            unsafe { norm_row(isa, head, weight.as_ptr(), eps, head_dim, head) }
        }
    });
}

fn for_each_row(x: &mut [f32], stride: usize, f: impl Fn(&mut [f32]) + Sync) {
    let (rows, first) = (x.len() / stride, Shared(x.as_mut_ptr()));
    pool::for_each_run(rows, MIN_ROWS, |run| {
        for row in run {
            // SAFETY: a whole row inside `x`, which is borrowed for as long; the row is in this run only.
            f(unsafe { std::slice::from_raw_parts_mut(first.get().add(row * stride), stride) });
        }
    });
}

/// Cosines and sines of the rotary embedding for a step's rows; the memory is kept.
#[derive(Default)]
pub struct Rotations {
    /// (cos, sin), rows × head_dim / 2.
    pairs: Vec<(f32, f32)>,
    half: usize,
}

impl Rotations {
    /// For the rows' `positions` from now on: pair `i` turns by `position * frequencies[i]`.
    pub fn turn_to(&mut self, positions: &[usize], frequencies: &[f64]) {
        let turn = |(position, frequency): (f64, f64)| {
            let (sin, cos) = (position * frequency).sin_cos();
            (cos as f32, sin as f32)
        };
        self.half = frequencies.len();
        self.pairs.clear();
        self.pairs.extend(positions.iter().flat_map(|&p| frequencies.iter().map(move |&f| turn((p as f64, f)))));
    }

    /// Turns the first `heads` heads of every row of `x`, rows `stride` long. Pairs are neighbours (2i, 2i + 1), the
    /// order in which GGUF stores Q and K of the Llama family.
    ///
    /// # Panics
    /// If `x` has other rows than these rotations.
    pub fn apply(&self, x: &mut [f32], stride: usize, heads: usize) {
        let half = self.half;
        assert!(x.len() * half == self.pairs.len() * stride && heads * 2 * half <= stride);
        let to = Shared(x.as_mut_ptr());
        pool::for_each_run(x.len() / stride, MIN_ROWS, |run| {
            for row in run {
                // SAFETY: the row is in `x` and in this run only.
                let x = unsafe { std::slice::from_raw_parts_mut(to.get().add(row * stride), stride) };
                let pairs = &self.pairs[row * half..][..half];
                for head in x.chunks_exact_mut(2 * half).take(heads) {
                    for (pair, (cos, sin)) in head.chunks_exact_mut(2).zip(pairs) {
                        let (a, b) = (pair[0], pair[1]);
                        (pair[0], pair[1]) = (a * cos - b * sin, a * sin + b * cos);
                    }
                }
            }
        });
    }
}

isa_dispatch! {
    fn norm_row(x: *const f32, weight: *const f32, eps: f32, n: usize, out: *mut f32) = norm_row_with
}
isa_dispatch! { fn swiglu_row(gate_up: *const f32, width: usize, out: *mut f32) = swiglu_row_with }

#[inline(always)]
unsafe fn norm_row_with<L: Lanes>(x: *const f32, weight: *const f32, eps: f32, n: usize, out: *mut f32) {
    // SAFETY: `n` is a multiple of 16 and the length of all three.
    unsafe {
        let mut squares = L::splat(0.0);
        for i in (0..n).step_by(LANES) {
            let x = L::load(x.add(i));
            squares = squares.fma(x, x);
        }
        let scale = L::splat(1.0 / (squares.sum() / n as f32 + eps).sqrt());
        for i in (0..n).step_by(LANES) {
            L::load(x.add(i)).mul(scale).mul(L::load(weight.add(i))).store(out.add(i));
        }
    }
}

#[inline(always)]
unsafe fn swiglu_row_with<L: Lanes>(gate_up: *const f32, width: usize, out: *mut f32) {
    // SAFETY: `gate_up` has `2 * width` elements, `out` `width`, a multiple of 16.
    unsafe {
        let (zero, one) = (L::splat(0.0), L::splat(1.0));
        for i in (0..width).step_by(LANES) {
            let (gate, up) = (L::load(gate_up.add(i)), L::load(gate_up.add(width + i)));
            let silu = gate.div(one.add(zero.sub(gate).exp()));
            silu.mul(up).store(out.add(i));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wave(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.37).sin() * 9.0).collect()
    }

    #[test]
    fn norm_and_swiglu_agree_with_their_formulas_and_across_instruction_sets() {
        let (x, weight) = (wave(3 * 64), wave(64));
        let mut first: Option<(Vec<f32>, Vec<f32>)> = None;
        for isa in Isa::available() {
            let (mut norm, mut glu) = (vec![0.0; x.len()], vec![0.0; x.len() / 2]);
            rms_norm(isa, &x, &weight, 1e-5, &mut norm);
            swiglu(isa, &x, 32, &mut glu);
            for (r, row) in x.chunks(64).enumerate() {
                let mean = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / 64.0;
                for i in 0..64 {
                    let want = f64::from(row[i]) / (mean + 1e-5).sqrt() * f64::from(weight[i]);
                    assert!((f64::from(norm[r * 64 + i]) - want).abs() < 1e-5);
                }
                for i in 0..32 {
                    let gate = f64::from(row[i]);
                    let want = gate / (1.0 + (-gate).exp()) * f64::from(row[32 + i]);
                    assert!((f64::from(glu[r * 32 + i]) - want).abs() < 1e-4, "{}", isa.name());
                }
            }
            let first = first.get_or_insert_with(|| (norm.clone(), glu.clone()));
            assert_eq!(*first, (norm, glu), "{}", isa.name());
        }
    }

    #[test]
    fn heads_are_normed_in_place_and_the_rest_of_a_row_is_left() {
        let (x, weights) = (wave(2 * 80), wave(48));
        let mut normed = x.clone();
        norm_heads(Isa::detect(), &mut normed, 80, 16, &weights, 1e-6);
        for (before, after) in x.chunks(80).zip(normed.chunks(80)) {
            for head in 0..3 {
                let at = head * 16..(head + 1) * 16;
                let mut want = [0.0; 16];
                rms_norm(Isa::detect(), &before[at.clone()], &weights[at.clone()], 1e-6, &mut want);
                assert_eq!(after[at], want);
            }
            assert_eq!(before[48..], after[48..]);
        }
        add_to_rows(&mut normed, &wave(80));
        assert_eq!(normed[80 + 60], x[80 + 60] + wave(80)[60]);
    }

    #[test]
    fn rotation_keeps_lengths_and_depends_on_distance_only() {
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f32>();
        let (q, k) = (wave(16), wave(32)[16..].to_vec());
        let turned = |x: &[f32], position| {
            let mut x = x.to_vec();
            let frequencies: Vec<f64> = (0..8).map(|i| 1e4f64.powf(-f64::from(i) / 8.0)).collect();
            let mut rotations = Rotations::default();
            rotations.turn_to(&[position], &frequencies);
            rotations.apply(&mut x, 16, 1);
            x
        };
        assert!((dot(&turned(&q, 9), &turned(&q, 9)) - dot(&q, &q)).abs() < 1e-2);
        assert!((dot(&turned(&q, 9), &turned(&k, 4)) - dot(&turned(&q, 105), &turned(&k, 100))).abs() < 1e-2);
        assert_eq!(turned(&q, 0), q);
    }
}
