//! The product on emulated tile registers, and on the real ones where this machine has them, against plain sums.
use proptest::prelude::*;
use tandem_gguf::TensorType;

use super::super::bf16_k32::{from_sums, to_tiles, x_lift};
use super::super::matmul::{Output, matmul};
use super::super::packed::{PackedMatrix, WeightFormat};
use super::super::simd::amx::available;
use super::super::simd::{Isa, IsaChoice, Kind};
use super::super::tests::{FORMATS, noise, packed, round, unpacked};
use super::amx::{Amx, Tile, Tiles};
use super::emulated::{Emulated, Forgetful, OneChain, pair};
use super::fault;
use super::trial::in_order;

/// A product in tiles; `None` if this machine lacks what stands around the registers.
fn in_tiles<T: Tiles>(x: &[f32], w: &PackedMatrix, before: &[f32], output: Output) -> Option<Vec<f32>> {
    if !rounds() || !decodes(w) {
        eprintln!("skipped: this machine has no AVX-512 BF16, or no FP16 for {:?}", w.format());
        return None;
    }
    let mut out = before.to_vec();
    // SAFETY: AVX-512 with BF16 and FP16 was just found; `T` is emulated, or the caller found it.
    unsafe { super::matmul::<T>(x, w, &mut out, output) };
    Some(out)
}

/// The same product on all registers that there are: both kinds, where `TANDEM_REQUIRE_AMX` is set.
fn on_all(x: &[f32], w: &PackedMatrix, before: &[f32], output: Output) -> Vec<(&'static str, Vec<f32>)> {
    let emulated = in_tiles::<Emulated>(x, w, before, output).map(|out| ("emulated", out));
    let real = available().then(|| in_tiles::<Amx>(x, w, before, output)).flatten().map(|out| ("real", out));
    let all: Vec<_> = emulated.into_iter().chain(real).collect();
    assert!(all.len() == 2 || std::env::var_os("TANDEM_REQUIRE_AMX").is_none(), "no AMX here, and it is required");
    all
}

fn rounds() -> bool {
    Isa::choose(IsaChoice::Avx512, false).is_some_and(Isa::rounds)
}

/// Whether this machine makes tiles of the matrix's blocks.
fn decodes(w: &PackedMatrix) -> bool {
    w.format() == WeightFormat::Bf16 || is_x86_feature_detected!("avx512fp16")
}

/// The weights that tiles multiply; `None` where the machine cannot decode them.
fn operands(w: &PackedMatrix) -> Option<Vec<f32>> {
    let mut weights = unpacked(w);
    let Some(to_tiles) = to_tiles(w.format()) else { return Some(weights) };
    if !rounds() || !decodes(w) {
        return None;
    }
    let mut tiles = [Tile::ZERO; 2];
    for (i, weight) in weights.iter_mut().enumerate() {
        let (n, k) = (i / w.k(), i % w.k());
        let block = w.format().block(w.panel(n / 32).as_ptr(), k / 32);
        // SAFETY: the machine has AVX-512 with BF16 and FP16; the panel has the block.
        unsafe { to_tiles(block, tiles.as_mut_ptr().cast()) };
        *weight = pair(tiles[n % 32 / 16].0[k % 32 / 2][n % 16])[k % 2];
    }
    Some(weights)
}

/// What these weights stand for: a product's `x` is lifted, its sums are multiplied. Where the machine decodes none,
/// those of the matrix.
fn multiplied(w: &PackedMatrix) -> Vec<f32> {
    let factor = 2f32.powi(x_lift(w.format())) * from_sums(w.format(), w.lifted());
    operands(w).map_or_else(|| unpacked(w), |weights| weights.into_iter().map(|weight| weight * factor).collect())
}

/// A row times a column, plainly: the operands' bits and the order of the additions are all that there is to it.
fn plainly(x: &[f32], weights: &[f32], w: &PackedMatrix) -> f32 {
    let operand = |x: &f32| match round(*x) {
        x if x.abs() < 2f32.powi(-50) => 0.0,
        x => x * 2f32.powi(x_lift(w.format())),
    };
    in_order(&x.iter().map(operand).collect::<Vec<_>>(), weights) * from_sums(w.format(), w.lifted())
}

/// By half of a bf16's last place and a little, and up as often as down.
#[test]
fn weights_are_rounded_without_a_bias() {
    for format in (1..FORMATS).filter(|format| ![3, 4].contains(format)) {
        let w = fitted(format, 11, 64, 8, 0);
        let (exact, taken) = (unpacked(&w), multiplied(&w));
        let count = exact.len() as f64;
        // Where scale and offset have factors, they are rounded to f16 themselves.
        let factors = matches!(w.format(), WeightFormat::Q4K | WeightFormat::Q5K | WeightFormat::Q6K);
        let greatest = exact.iter().fold(0.0f32, |greatest, weight| greatest.max(weight.abs()));
        let scales_off = if factors { greatest / 1024.0 } else { 0.0 };
        let mut bias = 0.0;
        for (exact, taken) in exact.iter().zip(&taken) {
            let place = (f32::from_bits(exact.to_bits() & 0x7f80_0000) / 128.0).max(f32::MIN_POSITIVE);
            let off = (taken.abs() - exact.abs()) / place;
            assert!(off.abs() < 0.57 + scales_off / place, "{format}: {exact} {taken}");
            bias += f64::from(off) / count;
        }
        assert!(bias.abs() < 0.03, "{format}: {bias} of the last place");
    }
}

fn fitted(format: u8, seed: u32, columns: usize, groups: usize, ragged: usize) -> PackedMatrix {
    let k = groups * 32 + ragged;
    let w = match format {
        0 => PackedMatrix::from_f32(&noise(seed, columns * k), k),
        _ => packed(format, seed, columns, groups),
    };
    w.fitted(Isa(Kind::Amx))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn products_are_near_and_the_same_for_every_row_count(
        format in 0..FORMATS, rows in 1usize..100, columns in 1usize..100, groups in 1usize..30, ragged in 0usize..32,
        cut in 0usize..100, seed: u32, add: bool,
    ) {
        let w = fitted(format, seed, columns, groups, ragged);
        let (x, weights) = (noise(seed ^ 1, rows * w.k()), multiplied(&w));
        let (before, output) = match add {
            true => (noise(seed ^ 2, rows * columns), Output::Add),
            false => (vec![f32::NAN; rows * columns], Output::Store),
        };
        for (registers, whole) in on_all(&x, &w, &before, output) {
            for (i, got) in whole.iter().enumerate() {
                let (row, n) = (i / columns, i % columns);
                let terms = x[row * w.k()..][..w.k()].iter().zip(&weights[n * w.k()..])
                    .map(|(x, w)| f64::from(round(*x)) * f64::from(*w));
                let before = if add { f64::from(before[i]) } else { 0.0 };
                let (sum, size) = terms.fold((before, 1.0), |(sum, size), t| (sum + t, size + t.abs()));
                prop_assert!((f64::from(*got) - sum).abs() < 4e-6 * size, "{registers} {row} {n}: {got}, not {sum}");
            }
            let at = cut.min(rows);
            let ((x_top, x_bottom), (top, bottom)) = (x.split_at(at * w.k()), before.split_at(at * columns));
            let mut parts = Vec::new();
            for (x, before) in [(x_top, top), (x_bottom, bottom)].iter().filter(|(x, _)| !x.is_empty()) {
                let part = on_all(x, &w, before, output).into_iter().find(|(name, _)| *name == registers);
                parts.extend(part.expect("the same registers").1);
            }
            prop_assert_eq!(parts, whole, "{} cut at {}", registers, at);
        }
    }

    /// Numbers of very different sizes: also such that a register counts as zero.
    #[test]
    fn an_element_is_groups_of_two_chains(
        format in 0..FORMATS, rows in 1usize..40, columns in 1usize..40, groups in 1usize..30, ragged in 0usize..32,
        powers in -140i32..20, seed: u32, add: bool,
    ) {
        let sized = |seed: u32, n: usize| -> Vec<f32> {
            let power = noise(seed ^ 77, n).into_iter().map(|x| (powers as f32 * x.abs()) as i32);
            noise(seed, n).into_iter().zip(power).map(|(x, power)| x * 2f32.powi(power / 2) * 2f32.powi(power / 2)).collect()
        };
        let w = match format {
            0 => PackedMatrix::from_f32(&sized(seed, columns * (groups * 32 + ragged)), groups * 32 + ragged),
            _ => packed(format, seed, columns, groups),
        };
        let w = w.fitted(Isa(Kind::Amx));
        let x = sized(seed ^ 1, rows * w.k());
        let (before, output) = match add {
            true => (noise(seed ^ 2, rows * columns), Output::Add),
            false => (vec![0.0; rows * columns], Output::Store),
        };
        let Some(weights) = operands(&w) else { return Ok(()) };
        let rows = x.chunks(w.k()).flat_map(|x| weights.chunks(w.k()).map(|weights| plainly(x, weights, &w)));
        let want: Vec<f32> = rows.zip(&before).map(|(sum, before)| before + sum).collect();
        for (registers, got) in on_all(&x, &w, &before, output) {
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&got), bits(&want), "{}", registers);
        }
    }
}

/// `scale * q + offset` in f16, then in bf16: in plain arithmetic.
#[test]
fn weights_are_rounded_to_f16_first() {
    let f16_of = |x: f64| half::f16::from_f64(x).to_f64();
    for dtype in [TensorType::Q4_1, TensorType::Q8_0] {
        let format = WeightFormat::kept(dtype, Isa(Kind::Amx));
        let w = packed(if dtype == TensorType::Q4_1 { 1 } else { 2 }, 3, 40, 4);
        assert_eq!(w.format(), format);
        let exact = unpacked(&w);
        let w = w.fitted(Isa(Kind::Amx));
        let Some(taken) = operands(&w) else { return };
        for (exact, taken) in exact.iter().zip(taken) {
            let lifted = f16_of(f64::from(*exact) * 2f64.powi(w.lifted())) as f32;
            // Halves away from zero.
            let want = f32::from_bits((lifted.to_bits() + 0x8000) & 0xffff_0000) * 2f32.powi(-112);
            assert_eq!(taken, if want.is_subnormal() { 0.0 } else { want }, "{format:?}: {exact}");
        }
    }
}

/// Which weights cannot be lifted stays as it is, in bf16.
#[test]
fn scales_beyond_f16_are_kept_in_bf16() {
    for (scale, format) in [(1000.0, WeightFormat::Q4_1), (5000.0, WeightFormat::Bf16), (0.0, WeightFormat::Q4_1)] {
        let mut group = [0x77; 20];
        group[..2].copy_from_slice(&half::f16::from_f32(scale).to_le_bytes());
        group[2..4].copy_from_slice(&[0; 2]);
        let w = PackedMatrix::from_q4_1(&group, 32).fitted(Isa(Kind::Amx));
        assert_eq!(w.format(), format, "{scale}");
        assert!(unpacked(&w).iter().all(|weight| (weight - 7.0 * scale).abs() <= 7.0 * scale / 256.0));
    }
}

#[test]
fn chunks_of_rows_and_slices_of_k_meet() {
    // Two chunks of 256 rows and a tail; 18 groups are a slice and a half.
    let (rows, columns, k) = (530, 70, 576);
    let w = PackedMatrix::from_f32(&noise(1, columns * k), k).rounded();
    let x = noise(2, rows * k);
    for (registers, whole) in on_all(&x, &w, &vec![0.0; rows * columns], Output::Store) {
        for row in [0, 255, 256, 511, 512, 529] {
            let alone = on_all(&x[row * k..][..k], &w, &vec![0.0; columns], Output::Store);
            let (_, alone) = alone.iter().find(|(name, _)| *name == registers).expect("the same registers");
            assert_eq!(&whole[row * columns..][..columns], &alone[..], "{registers} row {row}");
        }
    }
}

/// Of NaNs, and in f16, which is moved to bf16 by its bits.
#[test]
fn a_scale_that_is_no_number_makes_no_number() {
    // The f16 of each type.
    let halves: [(TensorType, &[usize]); 8] = [
        (TensorType::Q4_0, &[0]),
        (TensorType::Q4_1, &[0, 2]),
        (TensorType::Q5_0, &[0]),
        (TensorType::Q5_1, &[0, 2]),
        (TensorType::Q8_0, &[0]),
        (TensorType::Q4_K, &[0, 2]),
        (TensorType::Q5_K, &[0, 2]),
        (TensorType::Q6_K, &[208]),
    ];
    for ((dtype, halves), nan) in halves.into_iter().flat_map(|of| NANS.map(|nan| (of, nan))) {
        let sizes = dtype.group().expect("sizes");
        for &at in halves {
            let mut group = vec![0x11; sizes.bytes as usize];
            group[at..at + 2].copy_from_slice(&nan.to_le_bytes());
            let fitted = |isa| {
                let format = WeightFormat::kept(dtype, isa);
                PackedMatrix::from_raw(format, dtype, &group, sizes.values as usize).fitted(isa)
            };
            for rows in [1, 5, 9] {
                let x = vec![1.0; rows * sizes.values as usize];
                let kernels = Isa::available().into_iter().map(|isa| {
                    let mut out = vec![0.0; rows];
                    matmul(isa, &x, &fitted(isa), &mut out, Output::Store);
                    (isa.name(), out)
                });
                let tiles = on_all(&x, &fitted(Isa(Kind::Amx)), &vec![0.0; rows], Output::Store);
                for (kernel, out) in kernels.chain(tiles) {
                    assert!(out.iter().all(|x| x.is_nan()), "{dtype} at {at}, {kernel}, {rows}, {nan:x}: {out:?}");
                }
            }
        }
    }
}

const NANS: [u16; 5] = [0x7c01, 0x7e00, 0x7fff, 0xfc01, 0xffff];

#[test]
fn weights_are_kept_once() {
    for format in (1..FORMATS).filter(|format| ![3, 4].contains(format)) {
        let plain = packed(format, 5, 70, 3);
        let (exact, plain_bytes) = (unpacked(&plain), plain.size_bytes());
        let w = fitted(format, 5, 70, 3, 0);
        assert_eq!((unpacked(&w), w.size_bytes()), (exact, plain_bytes));
    }
    let w = fitted(0, 5, 70, 3, 0);
    assert_eq!(w.size_bytes(), 3 * 3 * 32 * 32 * 2, "f32 weights in bf16");
}

#[test]
fn tiles_are_taken_by_default_and_by_name_but_never_where_exactness_was_asked_for() {
    let tiles = |choice, exact| Isa::choose(choice, exact).is_some_and(Isa::has_tiles);
    let amx = Isa::available().into_iter().any(Isa::has_tiles);
    assert_eq!([tiles(IsaChoice::Auto, false), tiles(IsaChoice::Amx, false)], [amx, amx]);
    assert!(!tiles(IsaChoice::Avx512, false) && !tiles(IsaChoice::Auto, true));
    assert_eq!(Isa::choose(IsaChoice::Amx, true), None);
}

#[test]
fn the_trial_passes_good_registers_and_no_others() {
    if !rounds() {
        eprintln!("skipped: this machine has no AVX-512 BF16");
        return;
    }
    // SAFETY: AVX-512 with BF16 was just found; the registers are emulated.
    let (good, forgetful) = unsafe { (fault::<Emulated>(), fault::<Forgetful>()) };
    assert_eq!(good, None);
    let fault_found = forgetful.expect("it is wrong");
    // Register 3 has the second sixteen rows and columns.
    assert!(fault_found.contains("row 16, column 16 "), "{fault_found}");
    // SAFETY: as above.
    let other = unsafe { fault::<OneChain>() }.expect("near, and other bits");
    assert!(other.contains("another order"), "{other}");
    if available() {
        // SAFETY: and AMX is there.
        assert_eq!(unsafe { fault::<Amx>() }, None, "the registers of this machine");
    }
}

/// Where there are tiles: which rows take them, and that nobody sees it.
#[test]
fn the_number_of_rows_changes_no_bit() {
    let Some(isa) = Isa::choose(IsaChoice::Amx, false) else { return };
    for format in 0..FORMATS {
        let w = fitted(format, 7, 70, 18, 0);
        let x = noise(8, 40 * w.k());
        let product = |rows: std::ops::Range<usize>| {
            let mut out = vec![0.25; rows.len() * w.columns()];
            matmul(isa, &x[rows.start * w.k()..rows.end * w.k()], &w, &mut out, Output::Add);
            out
        };
        let whole = product(0..40);
        for size in [1, 2, 3, 4, 5, 7, 16, 33] {
            let parts = (0..40).step_by(size).map(|start| product(start..40.min(start + size)));
            assert_eq!(parts.collect::<Vec<_>>().concat(), whole, "format {format}, {size} rows at a time");
        }
    }
}
