//! The kernels against plain loops, on ragged shapes; and what they promise beyond closeness: the same bits in every
//! batch and on every instruction set.
//! Long because every kernel is held against its plain loop over the same ragged shapes and layouts.
use half::f16;
use proptest::prelude::*;
use tandem_gguf::TensorType;
use tandem_memory::HostMemory;

use super::attention::{Attention, PARTITION, Queries, Sequences};
use super::dequantize::{SUPPORTED, dequantize};
use super::kv::{KvArena, KvLayout, quantized, scale_of};
use super::lookup::RowTable;
use super::matmul::{Output, matmul};
use super::packed::{PackedMatrix, Row, WeightFormat};
use super::pool::Pool;
use super::simd::{Isa, IsaChoice};
use crate::numerics::KvDtype;
use crate::step::{Chunk, Place};

/// Numbers in -1..1 that look random.
pub(super) fn noise(seed: u32, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_769) | 1;
    let step = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(step).collect()
}

/// GGML rows of groups with `header` f16 numbers and `payload` bytes.
fn raw_groups(seed: u32, groups: usize, header: usize, payload: usize) -> Vec<u8> {
    let numbers = noise(seed, groups * (header + payload));
    let group = |numbers: &[f32]| -> Vec<u8> {
        let (head, tail) = numbers.split_at(header);
        let head = head.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes());
        head.chain(tail.iter().map(|&x| (x * 127.9) as i8 as u8)).collect()
    };
    numbers.chunks(header + payload).flat_map(group).collect()
}

/// f16 numbers of every size, subnormal ones among them.
fn halves(seed: u32, n: usize) -> Vec<u8> {
    noise(seed, n).iter().flat_map(|x| f16::from_f32(x.powi(9)).to_le_bytes()).collect()
}

/// The instruction sets that promise the same bits.
fn exact() -> impl Iterator<Item = Isa> {
    Isa::available().into_iter().filter(|isa| !isa.rounds())
}

fn rounding() -> impl Iterator<Item = Isa> {
    Isa::available().into_iter().filter(|isa| isa.rounds())
}

pub(super) fn round(x: f32) -> f32 {
    half::bf16::from_f32(x).to_f32()
}

/// What [`packed`] makes.
pub(super) const FORMATS: u8 = 11;

/// A matrix of `groups` × 32 values in a row, of formats that have groups of 256 of as many of these as hold them.
pub(super) fn packed(format: u8, seed: u32, columns: usize, groups: usize) -> PackedMatrix {
    let k = groups * 32;
    match format {
        0 => PackedMatrix::from_f32(&noise(seed, columns * k), k),
        3 => PackedMatrix::from_f32(&noise(seed, columns * k), k).rounded(),
        4 => PackedMatrix::from_raw(WeightFormat::F16, TensorType::F16, &halves(seed, columns * k), k),
        _ => {
            let dtype = match format {
                1 => TensorType::Q4_1,
                2 => TensorType::Q8_0,
                _ => QUANTIZED[format as usize - 3],
            };
            let (raw, k) = quantized_rows(dtype, seed, columns, groups);
            PackedMatrix::from_raw(WeightFormat::kept(dtype, Isa::detect()), dtype, &raw, k)
        }
    }
}

/// Types that are kept in about as many bytes as they have.
pub(super) const QUANTIZED: [TensorType; 8] = [
    TensorType::Q4_1,
    TensorType::Q8_0,
    TensorType::Q4_0,
    TensorType::Q5_0,
    TensorType::Q5_1,
    TensorType::Q4_K,
    TensorType::Q5_K,
    TensorType::Q6_K,
];

/// Rows of a quantized type, and the length of each.
pub(super) fn quantized_rows(dtype: TensorType, seed: u32, columns: usize, groups: usize) -> (Vec<u8>, usize) {
    let group = dtype.group().expect("sizes");
    let k = (groups * 32).next_multiple_of(group.values as usize);
    let halves = match dtype {
        TensorType::Q4_0 | TensorType::Q5_0 | TensorType::Q8_0 | TensorType::Q6_K => 1,
        _ => 2,
    };
    let payload = group.bytes as usize - 2 * halves;
    let mut raw = raw_groups(seed, columns * k / group.values as usize, halves, payload);
    if dtype == TensorType::Q6_K {
        // Its scale stands at the end.
        raw.chunks_exact_mut(group.bytes as usize).for_each(|group| group.rotate_left(2));
    }
    (raw, k)
}

pub(super) fn unpacked(w: &PackedMatrix) -> Vec<f32> {
    let mut weights = vec![0.0; w.columns() * w.k()];
    for (n, row) in weights.chunks_exact_mut(w.k()).enumerate() {
        w.column(n, row);
    }
    weights
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn matmul_is_a_chain_of_fused_multiply_adds(
        format in 0..FORMATS, rows in 1usize..30, columns in 1usize..100, groups in 1usize..4, seed: u32, add: bool,
    ) {
        let w = packed(format, seed, columns, groups);
        let (x, weights) = (noise(seed ^ 1, rows * w.k()), unpacked(&w));
        let (before, output) = match add {
            true => (noise(seed ^ 2, rows * columns), Output::Add),
            false => (vec![0.0; rows * columns], Output::Store),
        };
        let dot = |row: &[f32], n: usize| {
            row.iter().zip(&weights[n * w.k()..]).fold(0.0f32, |sum, (a, b)| a.mul_add(*b, sum))
        };
        let want: Vec<f32> = x.chunks_exact(w.k()).flat_map(|row| (0..columns).map(move |n| (row, n)))
            .zip(&before).map(|((row, n), before)| before + dot(row, n)).collect();
        for isa in exact() {
            let mut out = before.clone();
            matmul(isa, &x, &w, &mut out, output);
            prop_assert_eq!(&out, &want, "{}", isa.name());
        }
    }

    #[test]
    fn f32_matrices_of_any_input_length(k in 1usize..70, columns in 1usize..40, seed: u32) {
        let weights = noise(seed, columns * k);
        let w = PackedMatrix::from_f32(&weights, k);
        prop_assert_eq!(&unpacked(&w), &weights);
        let mut out = vec![0.0; columns];
        matmul(Isa::choose(IsaChoice::Auto, true).expect("one"), &weights[..k], &w, &mut out, Output::Store);
        let first = weights[..k].iter().fold(0.0f32, |sum, a| a.mul_add(*a, sum));
        prop_assert_eq!(out[0], first);
    }

    /// What is kept in few bytes gives the bits of the f32 weights that it stands for.
    #[test]
    fn few_bytes_a_weight_give_the_bits_of_four(
        kind in 0..SMALL.len(), rows in 1usize..200, columns in 1usize..100, k in 1usize..130, seed: u32, add: bool,
    ) {
        let Small { few, four, exact_zeros } = Small::new(SMALL[kind], seed, columns, k);
        prop_assert!(few.size_bytes() * 4 <= four.size_bytes() * 2 && few.format() != WeightFormat::F32);
        let bits_of = |values: Vec<f32>| -> Vec<u32> {
            values.into_iter().map(|value| if exact_zeros { value } else { value + 0.0 }.to_bits()).collect()
        };
        prop_assert_eq!(bits_of(unpacked(&few)), bits_of(unpacked(&four)));
        let x = noise(seed ^ 1, rows * few.k());
        let (before, output) = match add {
            true => (noise(seed ^ 2, rows * columns), Output::Add),
            false => (vec![0.0; rows * columns], Output::Store),
        };
        let bits = |w: &PackedMatrix, isa: Isa| -> Vec<u32> {
            let mut out = before.clone();
            matmul(isa, &x, w, &mut out, output);
            out.into_iter().map(f32::to_bits).collect()
        };
        for isa in exact() {
            prop_assert_eq!(bits(&few, isa), bits(&four, isa), "{} {}", isa.name(), SMALL[kind]);
        }
    }

    /// A matrix packed by threads from rows in another order, of several tensors, is the one packed alone.
    #[test]
    fn rows_are_packed_where_they_are_asked_for(
        index in 0..SUPPORTED.len(), columns in 1usize..100, groups in 1usize..3, threads in 1usize..4, seed: u32,
    ) {
        let dtype = SUPPORTED[index];
        let group = dtype.group().expect("sizes");
        let k = (groups * group.values as usize).next_multiple_of(32);
        let row_bytes = k / group.values as usize * group.bytes as usize;
        // Bytes that are small scales in every format.
        let raw: Vec<u8> = noise(seed, columns * row_bytes).iter().map(|x| (x * 60.0) as i8 as u8).collect();
        let row = |n: usize| Row { dtype, bytes: &raw[(columns - 1 - n) * row_bytes..][..row_bytes] };
        let mut want = vec![0.0; columns * k];
        for (n, want) in want.chunks_exact_mut(k).enumerate() {
            dequantize(dtype, row(n).bytes, want);
        }
        let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a == b || a.is_nan() && b.is_nan());
        let exact = Isa::choose(IsaChoice::Portable, true).expect("runs everywhere");
        let mut pool = Pool::new(threads, Vec::new()).expect("threads");
        let format = WeightFormat::kept(dtype, exact);
        let packed = pool.install(|| PackedMatrix::pack(format, columns, k, &row));
        prop_assert!(same(&unpacked(&packed), &want), "{}", dtype);
        let table = pool.install(|| RowTable::new(RowTable::kept(dtype, exact), columns, k, &row));
        let numbers: Vec<u32> = (0..columns as u32).rev().chain([0]).collect();
        let mut rows = vec![0.0; numbers.len() * k];
        pool.install(|| table.look_up(&numbers, &mut rows));
        for (n, row) in numbers.iter().zip(rows.chunks_exact(k)) {
            prop_assert!(same(row, &want[*n as usize * k..][..k]), "{} {}", dtype, n);
        }
        let mut columns_of = vec![0.0; numbers.len() * k];
        pool.install(|| packed.look_up(&numbers, &mut columns_of));
        prop_assert!(same(&columns_of, &rows));
        // As kernels that round keep it.
        let rounded = RowTable::new(TensorType::BF16, columns, k, &row);
        rounded.look_up(&numbers, &mut columns_of);
        let half: Vec<f32> = rows.iter().map(|x| round(*x)).collect();
        prop_assert!(same(&columns_of, &half));
    }

    #[test]
    fn attention_is_a_softmax_over_the_past_and_the_same_in_chunks(
        tokens in 1usize..70, cut in 0usize..70, kv_heads in 1usize..3, group in 1usize..4,
        head_dim in prop::sample::select(vec![16, 32, 64, 80]),
        dtype in prop::sample::select(vec![KvDtype::F32, KvDtype::Bf16, KvDtype::Int8]),
        block_tokens in prop::sample::select(vec![16, 32, 64]),
        window in prop::option::of(1usize..80), seed: u32,
    ) {
        let cut = cut.min(tokens - 1);
        let layout = KvLayout { layers: 2, kv_heads, head_dim, dtype, block_tokens };
        let case = Case { window, ..Case::new(layout, group, tokens, seed) };
        let whole = case.attend(Isa::choose(IsaChoice::Auto, true).expect("one"), &[(0, tokens)]);
        case.check(&whole, 1e-4)?;
        for isa in exact() {
            prop_assert_eq!(&case.attend(isa, &[(0, cut), (cut, tokens)]), &whole, "{}", isa.name());
        }
        let small = Case { window, ..Case::new(KvLayout { block_tokens: 16, ..layout }, group, tokens, seed) };
        prop_assert_eq!(&small.attend(Isa::detect(), &[(0, tokens)]), &case.attend(Isa::detect(), &[(0, tokens)]));
    }

    #[test]
    fn rounded_products_are_near_and_the_same_for_every_row_count(
        format in 0..FORMATS, rows in 1usize..120, columns in 1usize..100, groups in 1usize..4, cut in 0usize..120,
        ragged in 0usize..32, seed: u32, add: bool,
    ) {
        let w = match format {
            0 => PackedMatrix::from_f32(&noise(seed, columns * (groups * 32 + ragged)), groups * 32 + ragged),
            _ => packed(format, seed, columns, groups),
        };
        let (x, weights) = (noise(seed ^ 1, rows * w.k()), unpacked(&w));
        let (before, output) = match add {
            true => (noise(seed ^ 2, rows * columns), Output::Add),
            false => (vec![0.0; rows * columns], Output::Store),
        };
        // What tiles give is tested beside them.
        for isa in rounding().filter(|isa| !isa.has_tiles()) {
            let mut whole = before.clone();
            matmul(isa, &x, &w, &mut whole, output);
            for (i, got) in whole.iter().enumerate() {
                let (row, n) = (i / columns, i % columns);
                let terms = x[row * w.k()..][..w.k()].iter().zip(&weights[n * w.k()..]).map(|(x, w)| {
                    f64::from(round(*x)) * f64::from(if [0, 4].contains(&format) { round(*w) } else { *w })
                });
                let (sum, size) = terms.fold((f64::from(before[i]), 0.0), |(sum, size), t| (sum + t, size + t.abs()));
                // The integers of a group are summed before their offset takes most of them away again.
                let bound = 1e-5 * (size * 16.0 + 1.0);
                prop_assert!((f64::from(*got) - sum).abs() < bound, "{} {} {} {}", row, n, got, sum);
            }
            let at = cut.min(rows);
            let (mut top, mut bottom) = (before[..at * columns].to_vec(), before[at * columns..].to_vec());
            matmul(isa, &x[..at * w.k()], &w, &mut top, output);
            matmul(isa, &x[at * w.k()..], &w, &mut bottom, output);
            prop_assert_eq!([top, bottom].concat(), whole);
        }
    }

    #[test]
    fn rounded_attention_is_near_and_the_same_in_chunks(
        tokens in 1usize..200, cut in 0usize..200, kv_heads in 1usize..3, group in 1usize..8, wide in 1usize..9,
        int8: bool, block_tokens in prop::sample::select(vec![16, 32, 64]), window in prop::option::of(1usize..80), seed: u32,
    ) {
        let cut = cut.min(tokens - 1);
        let dtype = if int8 { KvDtype::Int8 } else { KvDtype::Bf16 };
        let layout = KvLayout { layers: 2, kv_heads, head_dim: wide * 16, dtype, block_tokens };
        let case = Case { window, ..Case::new(layout, group, tokens, seed) };
        for isa in rounding() {
            let whole = case.attend(isa, &[(0, tokens)]);
            // Weights of 8 bits: each is off by 2^-9 of itself at most, and the values are below 1. Unpacked 8-bit
            // values are off by as much again.
            case.check(&whole, if int8 { 8e-3 } else { 4e-3 })?;
            prop_assert_eq!(&case.attend(isa, &[(0, cut), (cut, tokens)]), &whole);
            let single: Vec<(usize, usize)> = (0..tokens).map(|i| (i, i + 1)).collect();
            prop_assert_eq!(&case.attend(isa, &single), &whole);
            // Tiles: the emulated ones everywhere, and where there are real ones, which give the same bits.
            let emulated = |pieces: &[(usize, usize)]| case.attend_by(&mut Attention::emulated(isa), pieces);
            let in_tiles = emulated(&[(0, tokens)]);
            case.check(&in_tiles, if int8 { 8e-3 } else { 4e-3 })?;
            prop_assert_eq!(&emulated(&[(0, cut), (cut, tokens)]), &in_tiles);
            if isa.has_tiles() {
                prop_assert_eq!(&in_tiles, &whole);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn neither_partitions_nor_threads_nor_chunks_change_a_bit(
        partitions in 0..4usize, more in 1..PARTITION, cut in 0..4 * PARTITION, kv_heads in 1usize..3, group in 1usize..4,
        wide in 1usize..3, dtype in prop::sample::select(vec![KvDtype::F32, KvDtype::Bf16, KvDtype::Int8]),
        window in prop::option::of(1..2 * PARTITION), seed: u32,
    ) {
        let tokens = partitions * PARTITION + more;
        let cut = cut.min(tokens - 1);
        let layout = KvLayout { layers: 2, kv_heads, head_dim: 16 * wide, dtype, block_tokens: 64 };
        let case = Case { window, ..Case::new(layout, group, tokens, seed) };
        let exact = case.attend(Isa::choose(IsaChoice::Auto, true).expect("one"), &[(0, tokens)]);
        case.check(&exact, 1e-4)?;
        for isa in Isa::available() {
            let whole = case.attend(isa, &[(0, tokens)]);
            match isa.rounds() && dtype != KvDtype::F32 {
                true => case.check(&whole, if dtype == KvDtype::Int8 { 8e-3 } else { 4e-3 })?,
                false => prop_assert_eq!(&whole, &exact, "{}", isa.name()),
            }
            prop_assert_eq!(&case.attend(isa, &[(0, cut), (cut, tokens)]), &whole);
            // One after another by one kernel: what it keeps from a step must not show in the next.
            let mut kernel = Attention::new(isa);
            for (threads, rows) in [(1, 1), (2, 1), (4, 3), (3, 1), (3, 20)] {
                let from = tokens.saturating_sub(rows);
                let mut pool = Pool::new(threads, Vec::new()).expect("threads");
                let last = pool.install(|| case.attend_by(&mut kernel, &[(from, tokens)]));
                let at = from * whole.len() / tokens;
                prop_assert_eq!(&last[at..], &whole[at..], "{} {} {}", isa.name(), threads, rows);
            }
        }
    }
}

/// Every row count has its own cut into tiles.
#[test]
fn no_row_count_changes_what_few_bytes_a_weight_give() {
    let (columns, k) = (70, 96);
    let formats = SMALL.map(|dtype| Small::new(dtype, 3, columns, k));
    let mut pool = Pool::new(2, Vec::new()).expect("threads");
    for rows in 1..=130 {
        for (isa, Small { few, four, .. }) in exact().flat_map(|isa| formats.iter().map(move |pair| (isa, pair))) {
            let x = noise(rows as u32, rows * few.k());
            let product = |w: &PackedMatrix| {
                let mut out = vec![0.0; rows * columns];
                matmul(isa, &x, w, &mut out, Output::Store);
                out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            assert_eq!(pool.install(|| product(few)), product(four), "{rows} rows, {}, {:?}", isa.name(), few.format());
        }
    }
}

/// Types that take two bytes a weight or less, and are kept so where nothing is rounded.
const SMALL: [TensorType; 10] = {
    let mut all = [TensorType::BF16; 10];
    all[1] = TensorType::F16;
    let mut i = 0;
    while i < QUANTIZED.len() {
        all[2 + i] = QUANTIZED[i];
        i += 1;
    }
    all
};

/// The same weights in their own format and in f32.
struct Small {
    few: PackedMatrix,
    four: PackedMatrix,
    /// Whether zeros keep their sign: as a sum of scale and offset they do not.
    exact_zeros: bool,
}

impl Small {
    fn new(dtype: TensorType, seed: u32, columns: usize, k: usize) -> Self {
        let (raw, k) = match dtype {
            TensorType::BF16 | TensorType::F16 => (halves(seed, columns * k), k),
            _ => quantized_rows(dtype, seed, columns, k.div_ceil(32)),
        };
        let exact = Isa::choose(IsaChoice::Portable, true).expect("runs everywhere");
        let [few, four] = [WeightFormat::kept(dtype, exact), WeightFormat::F32]
            .map(|format| PackedMatrix::from_raw(format, dtype, &raw, k));
        Self { few, four, exact_zeros: !matches!(dtype, TensorType::Q4_0 | TensorType::Q5_0) }
    }
}

/// Scales that have no offset: the weights are kept in f32.
#[test]
fn scales_that_a_format_cannot_hold_are_unpacked() {
    for (dtype, format, bytes, greatest) in
        [(TensorType::Q4_0, WeightFormat::Q4_1, 18, 8188.0), (TensorType::Q5_0, WeightFormat::Q5_1, 22, 4092.0)]
    {
        let scales = [greatest, -greatest, 2.0 * greatest, f32::INFINITY, f32::NAN];
        for (scale, held) in scales.into_iter().zip([true, true, false, false, false]) {
            let mut raw: Vec<u8> = (0..bytes).map(|i| i * 37).collect();
            raw[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
            let w = PackedMatrix::from_raw(format, dtype, &raw, 32);
            assert_eq!(w.format() == format, held, "{dtype} {scale}");
            let mut want = vec![0.0; 32];
            dequantize(dtype, &raw, &mut want);
            let same = |(a, b): (&f32, &f32)| a == b || a.is_nan() && b.is_nan();
            assert!(unpacked(&w).iter().zip(&want).all(same), "{dtype} {scale}");
        }
    }
}

/// What is no finite number, in a Q or a K: every result that it has a part in is NaN, and no other one changes.
#[test]
fn what_is_no_finite_number_in_a_query_or_key_is_seen_in_all_that_it_scores() {
    const TOKENS: usize = PARTITION + 21;
    let (kv_heads, group, window) = (2, 3, PARTITION + 5);
    for (index, head_dim) in [16, 32, 64].into_iter().enumerate() {
        for dtype in [KvDtype::F32, KvDtype::Bf16, KvDtype::Int8] {
            let layout = KvLayout { layers: 2, kv_heads, head_dim, dtype, block_tokens: 32 };
            let case = |window, change: &dyn Fn(&mut [f32])| {
                let case = Case::changed(layout, group, TOKENS, 7, |rows, stride| {
                    assert_eq!(stride, (group + 2) * kv_heads * head_dim);
                    change(rows);
                });
                Case { window, ..case }
            };
            let (stride, width) = ((group + 2) * kv_heads * head_dim, group * kv_heads * head_dim);
            for (row, head, value, window) in [
                (0, 0, f32::NAN, None),
                (TOKENS - 2, 4, f32::INFINITY, Some(window)),
                (0, 6, -f32::NAN, None),
                (17, 7, f32::INFINITY, None),
                (PARTITION - 1, 6, f32::NEG_INFINITY, Some(window)),
            ] {
                let at = row * stride + head * head_dim + 5 * (index + 1);
                let (broken, whole) = (case(window, &|rows| rows[at] = value), case(window, &|_| {}));
                let sees = |query_row: usize, query: usize| match head.checked_sub(group * kv_heads) {
                    Some(kv_head) => {
                        let seen = query_row >= row && window.is_none_or(|window| query_row < row + window);
                        seen && query / group == kv_head
                    }
                    None => query_row == row && query == head,
                };
                // All rows at once, and the last ones alone: these are split among threads.
                for (isa, from) in Isa::available().into_iter().flat_map(|isa| [(isa, 0), (isa, TOKENS - 3)]) {
                    let mut pool = Pool::new(2, Vec::new()).expect("threads");
                    let [broken, whole] =
                        [&broken, &whole].map(|case| pool.install(|| case.attend(isa, &[(from, TOKENS)])));
                    let heads = broken.chunks_exact(head_dim).zip(whole.chunks_exact(head_dim)).enumerate();
                    for (i, (broken, whole)) in heads.skip(from * width / head_dim) {
                        let (query_row, query) = (i / (group * kv_heads), i % (group * kv_heads));
                        let good = match sees(query_row, query) {
                            true => broken.iter().all(|x| x.is_nan()),
                            false => broken == whole,
                        };
                        assert!(
                            good,
                            "{value} in head {head} of row {row}, {dtype:?} of {head_dim}, {}: row {query_row}, query {query}: {broken:?}",
                            isa.name(),
                        );
                    }
                }
            }
        }
    }
}

/// One sequence in scattered blocks, whose unused slots hold NaN.
struct Case {
    kv: KvArena,
    blocks: Vec<u32>,
    group: usize,
    window: Option<usize>,
    rows: Vec<f32>,
}

impl Case {
    const LAYER: usize = 1;

    fn new(layout: KvLayout, group: usize, tokens: usize, seed: u32) -> Self {
        Self::changed(layout, group, tokens, seed, |_, _| {})
    }

    /// With `change` made to the rows, which are so long, before K and V go into the arena.
    fn changed(
        layout: KvLayout,
        group: usize,
        tokens: usize,
        seed: u32,
        change: impl FnOnce(&mut [f32], usize),
    ) -> Self {
        let KvLayout { block_tokens, .. } = layout;
        let used = tokens.div_ceil(block_tokens);
        let words = vec![u64::MAX; layout.block_bytes() / 8 * (2 * used + 1)];
        let kv = KvArena::new(HostMemory::holding(&words).expect("little"), layout).expect("fits");
        let blocks: Vec<u32> = (0..used as u32).rev().map(|i| 2 * i + 1).collect();
        let stride = layout.head_dim * layout.kv_heads * (group + 2);
        let mut rows = noise(seed, tokens * stride);
        if layout.dtype != KvDtype::F32 {
            rows.iter_mut().for_each(|x| *x = round(*x));
        }
        change(&mut rows, stride);
        let place = |i| Place { block: blocks[i / block_tokens], slot: i % block_tokens };
        let places: Vec<Place> = (0..tokens).map(place).collect();
        kv.write(Self::LAYER, &rows, stride, &places);
        if layout.dtype == KvDtype::Int8 {
            // From here on K and V are what was kept of them.
            let kept = |row: &mut [f32]| {
                row[group * layout.kv_heads * layout.head_dim..].chunks_exact_mut(layout.head_dim).for_each(|head| {
                    let scale = scale_of(head).to_f32();
                    head.iter_mut().for_each(|x| *x = f32::from(quantized(*x, scale)) * scale);
                })
            };
            rows.chunks_exact_mut(stride).for_each(kept);
        }
        Self { kv, blocks, group, window: None, rows }
    }

    fn stride(&self) -> usize {
        self.kv.layout().head_dim * self.kv.layout().kv_heads * (self.group + 2)
    }

    fn heads(&self) -> usize {
        self.kv.layout().kv_heads * self.group
    }

    /// In pieces of the positions `from..to`, all in one step.
    fn attend(&self, isa: Isa, pieces: &[(usize, usize)]) -> Vec<f32> {
        self.attend_by(&mut Attention::new(isa), pieces)
    }

    fn attend_by(&self, kernel: &mut Attention, pieces: &[(usize, usize)]) -> Vec<f32> {
        let chunk = |&(from, to): &(usize, usize)| Chunk {
            first_block: 0,
            blocks: self.blocks.len(),
            first_row: from,
            rows: to - from,
            start: from,
        };
        let chunks: Vec<Chunk> = pieces.iter().map(chunk).collect();
        let mut out = vec![0.0; self.rows.len() / self.stride() * self.heads() * self.kv.layout().head_dim];
        let queries = Queries { values: &self.rows, stride: self.stride(), heads: self.heads(), window: self.window };
        let sequences = Sequences { blocks: &self.blocks, chunks: &chunks };
        kernel.compute(&self.kv, Self::LAYER, sequences, queries, &mut out);
        out
    }

    fn check(&self, out: &[f32], bound: f64) -> Result<(), TestCaseError> {
        let (dim, heads) = (self.kv.layout().head_dim, self.heads());
        let head = |row: usize, head: usize| &self.rows[row * self.stride() + head * dim..][..dim];
        for (i, got) in out.chunks_exact(dim).enumerate() {
            let (row, query) = (i / heads, i % heads);
            let (k, v) = (heads + query / self.group, heads + self.kv.layout().kv_heads + query / self.group);
            let score = |past: usize| -> f64 {
                let dot: f64 = head(row, query).iter().zip(head(past, k)).map(|(a, b)| f64::from(a * b)).sum();
                (dot / (dim as f64).sqrt()).exp()
            };
            let first = (row + 1).saturating_sub(self.window.unwrap_or(usize::MAX));
            let weights: Vec<f64> = (first..=row).map(score).collect();
            let total: f64 = weights.iter().sum();
            for (d, got) in got.iter().enumerate() {
                let want: f64 = weights.iter().zip(first..).map(|(w, past)| w * f64::from(head(past, v)[d])).sum();
                prop_assert!((f64::from(*got) - want / total).abs() < bound, "row {} head {} value {}", row, query, d);
            }
        }
        Ok(())
    }
}
