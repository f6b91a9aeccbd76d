//! A row of a model file as f32. The formats are GGML's (`ggml-common.h`), the operations and their order those of its
//! `dequantize_row_…`: the same bits as `candle` gives, which the tests compare.
use half::{bf16, f16};
use tandem_gguf::TensorType;

/// The types that [`dequantize`] unpacks.
pub const SUPPORTED: [TensorType; 13] = [
    TensorType::F32,
    TensorType::F16,
    TensorType::BF16,
    TensorType::Q4_0,
    TensorType::Q4_1,
    TensorType::Q5_0,
    TensorType::Q5_1,
    TensorType::Q8_0,
    TensorType::Q2_K,
    TensorType::Q3_K,
    TensorType::Q4_K,
    TensorType::Q5_K,
    TensorType::Q6_K,
];

/// Unpacks whole groups.
///
/// # Panics
/// If `bytes` does not have as many values as `out`, or for a type that is not [`SUPPORTED`].
pub fn dequantize(dtype: TensorType, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        TensorType::F32 => groups(bytes, out, |raw: &[u8; 4], [x]: &mut [f32; 1]| *x = f32::from_le_bytes(*raw)),
        TensorType::F16 => {
            groups(bytes, out, |raw: &[u8; 2], [x]: &mut [f32; 1]| *x = f16::from_le_bytes(*raw).to_f32())
        }
        TensorType::BF16 => {
            groups(bytes, out, |raw: &[u8; 2], [x]: &mut [f32; 1]| *x = bf16::from_le_bytes(*raw).to_f32());
        }
        TensorType::Q4_0 => groups(bytes, out, q4_0),
        TensorType::Q4_1 => groups(bytes, out, q4_1),
        TensorType::Q5_0 => groups(bytes, out, q5_0),
        TensorType::Q5_1 => groups(bytes, out, q5_1),
        TensorType::Q8_0 => groups(bytes, out, q8_0),
        TensorType::Q2_K => groups(bytes, out, q2_k),
        TensorType::Q3_K => groups(bytes, out, q3_k),
        TensorType::Q4_K => groups(bytes, out, q4_k),
        TensorType::Q5_K => groups(bytes, out, q5_k),
        TensorType::Q6_K => groups(bytes, out, q6_k),
        other => panic!("{other} is not unpacked"),
    }
}

fn groups<const BYTES: usize, const VALUES: usize>(
    bytes: &[u8],
    out: &mut [f32],
    unpack: impl Fn(&[u8; BYTES], &mut [f32; VALUES]),
) {
    let ((groups, rest), (values, odd)) = (bytes.as_chunks::<BYTES>(), out.as_chunks_mut::<VALUES>());
    assert!(groups.len() == values.len() && rest.is_empty() && odd.is_empty());
    groups.iter().zip(values).for_each(|(group, values)| unpack(group, values));
}

fn half(group: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([group[at], group[at + 1]]).to_f32()
}

/// 16 bytes, whose low nibbles are the first 16 integers.
pub(super) fn nibbles(qs: &[u8]) -> [u8; 32] {
    std::array::from_fn(|j| if j < 16 { qs[j] & 15 } else { qs[j - 16] >> 4 })
}

/// 32 fifth bits, nibbles.
pub(super) fn five_bits(bits: &[u8], qs: &[u8]) -> [u8; 32] {
    let nibbles = nibbles(qs);
    std::array::from_fn(|j| nibbles[j] | (bits[j / 8] >> (j % 8) & 1) << 4)
}

/// f16 scale, nibbles.
fn q4_0(group: &[u8; 18], out: &mut [f32; 32]) {
    let d = half(group, 0);
    out.iter_mut().zip(nibbles(&group[2..])).for_each(|(out, q)| *out = f32::from(i16::from(q) - 8) * d);
}

/// f16 scale and minimum, nibbles.
fn q4_1(group: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (half(group, 0), half(group, 2));
    out.iter_mut().zip(nibbles(&group[4..])).for_each(|(out, q)| *out = f32::from(q) * d + m);
}

/// f16 scale, 32 fifth bits, nibbles.
fn q5_0(group: &[u8; 22], out: &mut [f32; 32]) {
    let (d, qs) = (half(group, 0), five_bits(&group[2..6], &group[6..]));
    out.iter_mut().zip(qs).for_each(|(out, q)| *out = f32::from(i16::from(q) - 16) * d);
}

/// f16 scale and minimum, 32 fifth bits, nibbles.
fn q5_1(group: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m, qs) = (half(group, 0), half(group, 2), five_bits(&group[4..8], &group[8..]));
    out.iter_mut().zip(qs).for_each(|(out, q)| *out = f32::from(q) * d + m);
}

/// f16 scale, 32 i8.
fn q8_0(group: &[u8; 34], out: &mut [f32; 32]) {
    let d = half(group, 0);
    out.iter_mut().zip(&group[2..]).for_each(|(out, q)| *out = f32::from(*q as i8) * d);
}

/// 16 bytes of scale and minimum (4 bits each) for 16 weights; 64 bytes of 2 bits; f16 scale and minimum of those.
fn q2_k(group: &[u8; 84], out: &mut [f32; 256]) {
    let (scales, qs, d, min) = (&group[..16], &group[16..80], half(group, 80), half(group, 82));
    for (index, out) in out.chunks_exact_mut(16).enumerate() {
        let (shift, qs) = (index % 8 / 2 * 2, &qs[index / 8 * 32 + index % 2 * 16..]);
        let (scale, offset) = (d * f32::from(scales[index] & 15), min * f32::from(scales[index] >> 4));
        out.iter_mut().zip(qs).for_each(|(out, q)| *out = scale * f32::from(q >> shift & 3) - offset);
    }
}

/// 32 bytes of third bits, 64 bytes of 2 bits, 16 scales of 6 bits in 12 bytes, f16 scale of those.
fn q3_k(group: &[u8; 110], out: &mut [f32; 256]) {
    let (third, qs, packed, d) = (&group[..32], &group[32..96], &group[96..108], half(group, 108));
    let scale = |index: usize| {
        let low = if index < 8 { packed[index] & 15 } else { packed[index - 8] >> 4 };
        let high = packed[8 + index % 4] >> (index / 4 * 2) & 3;
        f32::from(low | high << 4) - 32.0
    };
    for (index, out) in out.chunks_exact_mut(16).enumerate() {
        let (shift, at) = (index % 8 / 2 * 2, index % 2 * 16);
        let (qs, bit, scale) = (&qs[index / 8 * 32 + at..], 1u8 << (index / 2), d * scale(index));
        for ((out, q), third) in out.iter_mut().zip(qs).zip(&third[at..]) {
            let below = if third & bit == 0 { 4 } else { 0 };
            *out = scale * f32::from((q >> shift & 3) as i8 - below);
        }
    }
}

/// Scale and minimum (6 bits each) number `index` of the eight in the 12 bytes of a group of Q4_K or Q5_K.
pub(super) fn scale_and_minimum(index: usize, group: &[u8]) -> (u8, u8) {
    let packed = &group[4..16];
    match index {
        0..4 => (packed[index] & 63, packed[index + 4] & 63),
        _ => (packed[index + 4] & 15 | packed[index - 4] >> 6 << 4, packed[index + 4] >> 4 | packed[index] >> 6 << 4),
    }
}

/// f16 scale and minimum of the eight scales and minima that 12 bytes hold, one for 32 weights; nibbles.
fn q4_k(group: &[u8; 144], out: &mut [f32; 256]) {
    for (index, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
        with_minimum(group, index, q4_k_integers(group, index), out);
    }
}

/// As Q4_K, with 32 bytes of fifth bits before the nibbles.
fn q5_k(group: &[u8; 176], out: &mut [f32; 256]) {
    for (index, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
        with_minimum(group, index, q5_k_integers(group, index), out);
    }
}

fn with_minimum(group: &[u8], index: usize, qs: [u8; 32], out: &mut [f32; 32]) {
    let (scale, minimum) = scale_and_minimum(index, group);
    let (scale, offset) = (half(group, 0) * f32::from(scale), half(group, 2) * f32::from(minimum));
    out.iter_mut().zip(qs).for_each(|(out, q)| *out = scale * f32::from(q) - offset);
}

/// The 32 from `32 * index` on. Those of an even and the next odd index are the low and the high nibbles of 32 bytes.
pub(super) fn q4_k_integers(group: &[u8; 144], index: usize) -> [u8; 32] {
    let qs = &group[16 + index / 2 * 32..];
    std::array::from_fn(|j| qs[j] >> (index % 2 * 4) & 15)
}

/// Likewise; bit `index` of the bytes before is the fifth.
pub(super) fn q5_k_integers(group: &[u8; 176], index: usize) -> [u8; 32] {
    let (fifth, qs) = (&group[16..48], &group[48 + index / 2 * 32..]);
    std::array::from_fn(|j| qs[j] >> (index % 2 * 4) & 15 | (fifth[j] >> index & 1) << 4)
}

/// 128 bytes of 4 bits, 64 bytes of 2 bits above them, 16 scales of i8, f16 scale of those.
fn q6_k(group: &[u8; 210], out: &mut [f32; 256]) {
    let d = half(group, 208);
    for (index, out) in out.chunks_exact_mut(32).enumerate() {
        let scales = q6_k_scales(group, index).map(|scale| d * f32::from(scale));
        for (l, (out, q)) in out.iter_mut().zip(q6_k_integers(group, index)).enumerate() {
            *out = scales[l / 16] * f32::from(i16::from(q) - 32);
        }
    }
}

/// Of the first and of the last 16 of the 32 from `32 * index` on.
pub(super) fn q6_k_scales(group: &[u8; 210], index: usize) -> [i8; 2] {
    [group[192 + index * 2] as i8, group[193 + index * 2] as i8]
}

/// The 32 from `32 * index` on, 32 too great. In each half of 128: the low nibbles of 64 bytes, then the high ones.
pub(super) fn q6_k_integers(group: &[u8; 210], index: usize) -> [u8; 32] {
    let (part, quarter) = (index / 4, index % 4);
    let (low, high) = (&group[part * 64 + quarter % 2 * 32..], &group[128 + part * 32..]);
    std::array::from_fn(|l| low[l] >> (quarter / 2 * 4) & 15 | (high[l] >> (quarter * 2) & 3) << 4)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use candle_core::quantized::GgmlDType;
    use candle_core::quantized::ggml_file::qtensor_from_ggml;
    use proptest::prelude::*;

    use super::*;

    const THEIRS: [GgmlDType; 13] = [
        GgmlDType::F32,
        GgmlDType::F16,
        GgmlDType::BF16,
        GgmlDType::Q4_0,
        GgmlDType::Q4_1,
        GgmlDType::Q5_0,
        GgmlDType::Q5_1,
        GgmlDType::Q8_0,
        GgmlDType::Q2K,
        GgmlDType::Q3K,
        GgmlDType::Q4K,
        GgmlDType::Q5K,
        GgmlDType::Q6K,
    ];

    proptest! {
        #[test]
        fn any_bytes_are_the_numbers_that_candle_finds(index in 0..SUPPORTED.len(), groups in 1usize..4, seed: u64) {
            let (dtype, theirs) = (SUPPORTED[index], THEIRS[index]);
            let group = dtype.group().expect("sizes");
            prop_assert_eq!((group.values as usize, group.bytes as usize), (theirs.block_size(), theirs.type_size()));
            let mut state = seed | 1;
            let byte = |_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 56) as u8
            };
            let bytes: Vec<u8> = (0..groups * group.bytes as usize).map(byte).collect();
            let count = groups * group.values as usize;
            let mut ours = vec![0.0; count];
            dequantize(dtype, &bytes, &mut ours);
            let theirs = qtensor_from_ggml(theirs, &bytes, vec![count], &Device::Cpu).expect("a tensor");
            let theirs = theirs.dequantize(&Device::Cpu).expect("numbers").to_vec1::<f32>().expect("numbers");
            // What is no number has no bits to compare.
            let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
            let odd = ours.iter().zip(&theirs).position(|(a, b)| !same(*a, *b));
            prop_assert_eq!(odd, None, "{}: {:?} {:?}", dtype, ours, theirs);
        }
    }
}
