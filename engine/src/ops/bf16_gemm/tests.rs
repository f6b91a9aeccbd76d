//! The order of operations that gives K-quants' products their bits, once more and plainly: an element at a time, from
//! the file's bytes. How weights lie in memory and which rows share a tile must change nothing of it.
use std::arch::x86_64::*;

use half::f16;
use tandem_gguf::TensorType;

use super::super::dequantize::{q4_k_integers, q6_k_integers, q6_k_scales, scale_and_minimum};
use super::super::matmul::{Output, matmul};
use super::super::packed::{PackedMatrix, WeightFormat};
use super::super::simd::{Isa, IsaChoice, bf16, bits, rounded_pairs};
use super::super::tests::{QUANTIZED, noise, quantized_rows};
use super::BLOCK;

/// 32 weights of a column.
struct Group {
    integers: [f32; BLOCK],
    /// Each of the same number of `k`.
    scales: Vec<f32>,
    offset: Option<f32>,
}

fn q4_k(group: &[u8; 144], part: usize) -> Group {
    let [d, min] = [[group[0], group[1]], [group[2], group[3]]].map(|half| f16::from_le_bytes(half).to_f32());
    let (scale, minimum) = scale_and_minimum(part, group);
    let integers = q4_k_integers(group, part).map(f32::from);
    Group { integers, scales: vec![d * f32::from(scale)], offset: Some(-min * f32::from(minimum)) }
}

fn q6_k(group: &[u8; 210], part: usize) -> Group {
    let d = f16::from_le_bytes([group[208], group[209]]).to_f32();
    let scales = q6_k_scales(group, part).map(|scale| d * f32::from(scale));
    let integers = q6_k_integers(group, part).map(|q| f32::from(q) - 32.0);
    Group { integers, scales: scales.to_vec(), offset: None }
}

/// # Safety
/// The machine has AVX-512 with BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c")]
unsafe fn element(x: &[f32], groups: &[Group]) -> f32 {
    let mut total = 0.0f32;
    for (x, group) in x.chunks_exact(BLOCK).zip(groups) {
        // SAFETY: the machine has the instructions; the transmuted types are 64 bytes, of which all are values.
        unsafe {
            let pairs = rounded_pairs(x);
            let words: [u32; 16] = std::mem::transmute(bits(pairs));
            let sum_of_x = _mm512_dpbf16_ps(_mm512_setzero_ps(), pairs, bf16(_mm512_set1_epi32(0x3f80_3f80)));
            let pairs: Vec<_> = words.into_iter().zip(group.integers.as_chunks::<2>().0).collect();
            for (pairs, scale) in pairs.chunks(pairs.len() / group.scales.len()).zip(&group.scales) {
                let mut sum = _mm512_setzero_ps();
                for (x, [even, odd]) in pairs {
                    let weights = even.to_bits() >> 16 | odd.to_bits();
                    let [x, weights] = [*x, weights].map(|word| bf16(_mm512_set1_epi32(word as i32)));
                    sum = _mm512_dpbf16_ps(sum, x, weights);
                }
                total = _mm512_cvtss_f32(sum).mul_add(*scale, total);
            }
            if let Some(offset) = group.offset {
                total = _mm512_reduce_add_ps(sum_of_x).mul_add(offset, total);
            }
        }
    }
    total
}

#[test]
fn k_quants_keep_the_bits_of_their_order() {
    let Some(isa) = Isa::choose(IsaChoice::Avx512, false).filter(|isa| isa.rounds()) else {
        return eprintln!("not tested: this machine has no AVX-512 BF16");
    };
    let columns = 40;
    for dtype in [TensorType::Q4_K, TensorType::Q6_K] {
        // More than a slice.
        let (raw, k) = quantized_rows(dtype, 11, columns, super::SLICE + 8);
        let w = PackedMatrix::from_raw(WeightFormat::kept(dtype, isa), dtype, &raw, k);
        let parts = (0..columns * k / BLOCK).map(|i| (i / 8, i % 8));
        let groups: Vec<Group> = match dtype {
            TensorType::Q4_K => parts.map(|(group, part)| q4_k(&raw.as_chunks().0[group], part)).collect(),
            _ => parts.map(|(group, part)| q6_k(&raw.as_chunks().0[group], part)).collect(),
        };
        for rows in (1..=17).chain([31, 32, 33, 100]) {
            let (x, mut out) = (noise(rows as u32, rows * k), vec![0.0; rows * columns]);
            matmul(isa, &x, &w, &mut out, Output::Store);
            for (i, out) in out.into_iter().enumerate() {
                let (row, column) = (i / columns, i % columns);
                let groups = &groups[column * k / BLOCK..][..k / BLOCK];
                // SAFETY: the instruction set that rounds has them.
                let want = unsafe { element(&x[row * k..][..k], groups) };
                assert_eq!(out.to_bits(), want.to_bits(), "{dtype}, {rows} rows: row {row}, column {column}");
            }
        }
    }
}

/// One row has a way of its own in some formats.
#[test]
fn one_row_has_the_bits_of_a_row_among_others() {
    let Some(isa) = Isa::choose(IsaChoice::Avx512, false).filter(|isa| isa.rounds()) else {
        return eprintln!("not tested: this machine has no AVX-512 BF16");
    };
    for dtype in QUANTIZED {
        for (columns, groups) in [(1, 1), (33, 2), (64, 9), (40, 70)] {
            let (raw, k) = quantized_rows(dtype, 5, columns, groups);
            let w = PackedMatrix::from_raw(WeightFormat::kept(dtype, isa), dtype, &raw, k);
            for output in [Output::Store, Output::Add] {
                let product = |x: &[f32]| {
                    let mut out = vec![0.0; x.len() / k * columns];
                    out.chunks_exact_mut(columns).for_each(|row| row.copy_from_slice(&noise(4, columns)));
                    matmul(isa, x, &w, &mut out, output);
                    out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                };
                let x = noise(6, 97 * k);
                let each: Vec<u32> = x.chunks_exact(k).take(8).flat_map(product).collect();
                for rows in [2, 8, 97] {
                    let compared = rows.min(8) * columns;
                    assert_eq!(product(&x[..rows * k])[..compared], each[..compared], "{dtype}, {k} k, {rows} rows");
                }
            }
        }
    }
}
