//! Where each weight of a block lies: a model file's rows into the blocks of a panel, and a column of a block back as
//! f32. `weight_format.rs` has the pictures, `packed.rs` the matrices that are made of these blocks.
use half::f16;
use tandem_gguf::TensorType;

use super::dequantize::{
    dequantize, five_bits, nibbles, q4_k_integers, q5_k_integers, q6_k_integers, q6_k_scales, scale_and_minimum,
};
use super::simd::LANES;
use super::weight_format::{BLOCK, PANEL, Row, WeightFormat};

/// Puts a row into its column of a panel, `values` being memory for the row. False for what the format cannot hold.
pub(super) fn put_row(format: WeightFormat, panel: &mut [u8], column: usize, row: Row<'_>, values: &mut [f32]) -> bool {
    let mut column = Column { format, panel, column };
    match (format, row.dtype) {
        (WeightFormat::Bf16, TensorType::BF16) => column.put_bf16_bytes(row.bytes),
        (WeightFormat::F16, TensorType::F16) => column.put_by_row(row.bytes.as_chunks::<2>().0),
        (WeightFormat::F32, TensorType::F32) => column.put_by_row(row.bytes.as_chunks::<4>().0),
        (WeightFormat::Q4_1, TensorType::Q4_0) => return column.put_q4_0(row.bytes.as_chunks().0),
        (WeightFormat::Q4_1, TensorType::Q4_1) => column.put_q4_1(row.bytes.as_chunks().0),
        (WeightFormat::Q5_1, TensorType::Q5_0) => return column.put_q5_0(row.bytes.as_chunks().0),
        (WeightFormat::Q5_1, TensorType::Q5_1) => column.put_q5_1(row.bytes.as_chunks().0),
        (WeightFormat::Q8_0, TensorType::Q8_0) => return column.put_q8_0(row.bytes.as_chunks().0),
        (WeightFormat::Q4K, TensorType::Q4_K) => column.put_q4_k(row.bytes.as_chunks().0),
        (WeightFormat::Q5K, TensorType::Q5_K) => column.put_q5_k(row.bytes.as_chunks().0),
        (WeightFormat::Q6K, TensorType::Q6_K) => column.put_q6_k(row.bytes.as_chunks().0),
        (WeightFormat::F32, dtype) => {
            dequantize(dtype, row.bytes, values);
            values.iter().enumerate().for_each(|(k, value)| column.put_at(k, value.to_ne_bytes()));
        }
        (WeightFormat::Bf16, dtype) => {
            dequantize(dtype, row.bytes, values);
            put_bf16(column.panel, column.column, values);
        }
        (format, dtype) => panic!("weights of the type {dtype} are not kept in {format:?}"),
    }
    true
}

/// Puts a row into its column of a panel of bf16.
pub(super) fn put_bf16(panel: &mut [u8], column: usize, values: &[f32]) {
    for (k, &value) in values.iter().enumerate() {
        let at = k / BLOCK * WeightFormat::Bf16.block_bytes() + bf16_at(column, k % BLOCK);
        panel[at..at + 2].copy_from_slice(&half::bf16::from_f32(value).to_ne_bytes());
    }
}

/// The weights of a column of a panel's block, or the first of them.
pub(super) fn read_column(format: WeightFormat, panel: &[u8], block: usize, column: usize, out: &mut [f32]) {
    let [scales, block] = format.places(block).map(|at| &panel[at..]);
    let f16_at = |from: &[u8], at: usize| f16::from_ne_bytes([from[at], from[at + 1]]).to_f32();
    let (scale, offset) = (|| f16_at(scales, column * 2), || f16_at(scales, (PANEL + column) * 2));
    let factor = |which: usize| f32::from(block[column * 2 + which] as i8);
    let q = |k: usize| f32::from(integer(format, block, column, k));
    let weight: &dyn Fn(usize) -> f32 = match format {
        WeightFormat::F32 => &|k| {
            let at = (k * PANEL + column) * 4;
            f32::from_ne_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
        },
        WeightFormat::F16 => &|k| f16_at(block, (k * PANEL + column) * 2),
        WeightFormat::Bf16 => &|k| {
            let at = bf16_at(column, k);
            half::bf16::from_ne_bytes([block[at], block[at + 1]]).to_f32()
        },
        WeightFormat::Q4_1 | WeightFormat::Q5_1 => &|k| q(k) * scale() + offset(),
        WeightFormat::Q8_0 => &|k| f32::from(block[byte_at(column, k)] as i8) * scale(),
        WeightFormat::Q4K | WeightFormat::Q5K => &|k| scale() * factor(0) * q(k) + offset() * factor(1),
        WeightFormat::Q6K => &|k| scale() * factor(k / 16) * (q(k) - 32.0),
    };
    out.iter_mut().enumerate().for_each(|(k, out)| *out = weight(k));
}

/// What no weight of a super-block of a quantized format is greater than; no number if a scale or an offset is none.
pub(super) fn greatest_possible(format: WeightFormat, block: &[u8]) -> f32 {
    let (of_scale, of_offset) = match format {
        WeightFormat::F32 | WeightFormat::F16 | WeightFormat::Bf16 => panic!("{format:?} has no scales"),
        WeightFormat::Q4_1 => (15.0, 1.0),
        WeightFormat::Q5_1 => (31.0, 1.0),
        WeightFormat::Q8_0 => (128.0, 0.0),
        WeightFormat::Q4K => (15.0 * 63.0, 63.0),
        WeightFormat::Q5K => (31.0 * 63.0, 63.0),
        WeightFormat::Q6K => (32.0 * 128.0, 0.0),
    };
    let magnitude = |half: &[u8; 2]| f16::from_ne_bytes(*half).to_f32().abs();
    let (scales, offsets) = block[..format.scales_bytes()].as_chunks::<2>().0.split_at(PANEL);
    let greatest = (0..PANEL).map(|column| {
        let offset = offsets.get(column).map_or(0.0, magnitude);
        // The bits of magnitudes have their order; those of no numbers are greater.
        (of_scale * magnitude(&scales[column]) + of_offset * offset).abs().to_bits()
    });
    f32::from_bits(greatest.max().unwrap_or(0))
}

/// Multiplies a super-block's scales and offsets by a power of two that keeps them in f16.
pub(super) fn multiply_scales(format: WeightFormat, block: &mut [u8], factor: f32) {
    for half in block[..format.scales_bytes()].as_chunks_mut::<2>().0 {
        *half = f16::from_f32(f16::from_ne_bytes(*half).to_f32() * factor).to_ne_bytes();
    }
}

/// One column of a panel.
struct Column<'a> {
    format: WeightFormat,
    panel: &'a mut [u8],
    column: usize,
}

impl Column<'_> {
    /// In the layout of rows of 32 columns.
    fn put_by_row<const N: usize>(&mut self, values: &[[u8; N]]) {
        values.iter().enumerate().for_each(|(k, value)| self.put_at(k, *value));
    }

    fn put_at<const N: usize>(&mut self, k: usize, value: [u8; N]) {
        self.panel[(k * PANEL + self.column) * N..][..N].copy_from_slice(&value);
    }

    /// Pair by pair, as they lie in the file.
    fn put_bf16_bytes(&mut self, row: &[u8]) {
        let (pairs, last) = row.as_chunks::<4>();
        let at =
            |pair: usize| pair * 2 / BLOCK * WeightFormat::Bf16.block_bytes() + bf16_at(self.column, pair * 2 % BLOCK);
        for (index, pair) in pairs.iter().enumerate() {
            self.panel[at(index)..][..4].copy_from_slice(pair);
        }
        if !last.is_empty() {
            self.panel[at(pairs.len())..][..last.len()].copy_from_slice(last);
        }
    }

    /// f16 scale, nibbles. False when a scale has no offset.
    fn put_q4_0(&mut self, groups: &[[u8; 18]]) -> bool {
        let mut fits = true;
        for (index, group) in groups.iter().enumerate() {
            fits &= self.put_centred(index, [group[0], group[1]], 8, nibbles(&group[2..]));
        }
        fits
    }

    /// f16 scale, 32 fifth bits, nibbles. False when a scale has no offset.
    fn put_q5_0(&mut self, groups: &[[u8; 22]]) -> bool {
        let mut fits = true;
        for (index, group) in groups.iter().enumerate() {
            fits &= self.put_centred(index, [group[0], group[1]], 16, five_bits(&group[2..6], &group[6..]));
        }
        fits
    }

    /// f16 scale, f16 minimum, nibbles.
    fn put_q4_1(&mut self, groups: &[[u8; 20]]) {
        for (index, group) in groups.iter().enumerate() {
            let halves = [[group[0], group[1]], [group[2], group[3]]].map(f16::from_le_bytes);
            self.put_group(index, &halves, nibbles(&group[4..]));
        }
    }

    /// f16 scale, f16 minimum, 32 fifth bits, nibbles.
    fn put_q5_1(&mut self, groups: &[[u8; 24]]) {
        for (index, group) in groups.iter().enumerate() {
            let halves = [[group[0], group[1]], [group[2], group[3]]].map(f16::from_le_bytes);
            self.put_group(index, &halves, five_bits(&group[4..8], &group[8..]));
        }
    }

    /// f16 scale and 32 i8. False when one is -128.
    fn put_q8_0(&mut self, groups: &[[u8; 34]]) -> bool {
        let column = self.column;
        let mut in_range = true;
        for (index, group) in groups.iter().enumerate() {
            let block = self.with_scales(index, &[f16::from_le_bytes([group[0], group[1]])]);
            for (k, &q) in group[2..].iter().enumerate() {
                in_range &= q != 0x80;
                block[byte_at(column, k)] = q;
            }
        }
        in_range
    }

    fn put_q4_k(&mut self, groups: &[[u8; 144]]) {
        for (index, part, group) in parts(groups) {
            self.put_with_minimum(index, part, group, q4_k_integers(group, part));
        }
    }

    fn put_q5_k(&mut self, groups: &[[u8; 176]]) {
        for (index, part, group) in parts(groups) {
            self.put_with_minimum(index, part, group, q5_k_integers(group, part));
        }
    }

    fn put_q6_k(&mut self, groups: &[[u8; 210]]) {
        for (index, part, group) in parts(groups) {
            self.put_group(index, &[f16::from_le_bytes([group[208], group[209]])], q6_k_integers(group, part));
            self.put_factors(index, q6_k_scales(group, part));
        }
    }

    /// Part `part` of a group of Q4_K or Q5_K. What the minimum is multiplied by is negated: then the offset is added.
    fn put_with_minimum(&mut self, index: usize, part: usize, group: &[u8], qs: [u8; BLOCK]) {
        let halves = [[group[0], group[1]], [group[2], group[3]]].map(f16::from_le_bytes);
        self.put_group(index, &[halves[0], -halves[1]], qs);
        let (scale, minimum) = scale_and_minimum(part, group);
        self.put_factors(index, [scale as i8, minimum as i8]);
    }

    /// `d * (q - centre)` as `d * q + m`. False when there is no such `m` or `d`.
    fn put_centred(&mut self, index: usize, scale: [u8; 2], centre: i8, qs: [u8; BLOCK]) -> bool {
        let scale = f16::from_le_bytes(scale);
        // Exact: a power of two times the scale, unless it is too great.
        let offset = f16::from_f32(scale.to_f32() * f32::from(-centre));
        self.put_group(index, &[scale, offset], qs);
        scale.is_finite() && offset.is_finite()
    }

    /// Scale, offset, and integers of 32 weights.
    fn put_group(&mut self, index: usize, halves: &[f16], qs: [u8; BLOCK]) {
        let (format, column) = (self.format, self.column);
        let block = self.with_scales(index, halves);
        let integers = &mut block[format.factors_bytes()..];
        let mut put = |(byte, shift): (usize, u32), bits: u8| integers[byte] |= bits << shift;
        for (k, q) in qs.into_iter().enumerate() {
            put(nibble_at(format, column, k), q & 15);
            if matches!(format, WeightFormat::Q5_1 | WeightFormat::Q5K | WeightFormat::Q6K) {
                put(upper_at(format, column, k), q >> 4);
            }
        }
    }

    /// A block, its scale and offset put before it. Of NaNs only one: of another, rounded to bf16 by its bits, an
    /// infinity could be left.
    fn with_scales(&mut self, index: usize, halves: &[f16]) -> &mut [u8] {
        let [scales, block] = self.format.places(index);
        for (which, half) in halves.iter().enumerate() {
            let half = if half.is_nan() { f16::NAN } else { *half };
            self.panel[scales + (which * PANEL + self.column) * 2..][..2].copy_from_slice(&half.to_ne_bytes());
        }
        &mut self.panel[block..][..self.format.block_bytes()]
    }

    fn put_factors(&mut self, index: usize, factors: [i8; 2]) {
        let at = self.format.places(index)[1] + self.column * 2;
        self.panel[at..at + 2].copy_from_slice(&factors.map(|factor| factor as u8));
    }
}

/// Groups of 256 as eight blocks each: the block, its part of the group, and the group.
fn parts<const N: usize>(groups: &[[u8; N]]) -> impl Iterator<Item = (usize, usize, &[u8; N])> {
    (0..groups.len() * 8).map(|index| (index, index % 8, &groups[index / 8]))
}

/// A weight's integer of up to six bits, as the file has it.
fn integer(format: WeightFormat, block: &[u8], column: usize, k: usize) -> u8 {
    let integers = &block[format.factors_bytes()..];
    let bits = |(byte, shift): (usize, u32)| integers[byte] >> shift;
    let upper = match format {
        WeightFormat::Q5_1 | WeightFormat::Q5K => bits(upper_at(format, column, k)) & 1,
        WeightFormat::Q6K => bits(upper_at(format, column, k)) & 3,
        _ => 0,
    };
    bits(nibble_at(format, column, k)) & 15 | upper << 4
}

/// Byte of a weight in its block of bf16.
fn bf16_at(column: usize, k: usize) -> usize {
    (k / 2 * PANEL + column) * 4 + k % 2 * 2
}

/// Likewise of Q8_0.
fn byte_at(column: usize, k: usize) -> usize {
    let (four, half) = (k / 4, column / LANES);
    (((four * 2 + half) * 2 + k / 2 % 2) * LANES + column % LANES) * 2 + k % 2
}

/// Byte and shift of a nibble behind the block's factors.
fn nibble_at(format: WeightFormat, column: usize, k: usize) -> (usize, u32) {
    in_lane(format.nibbles_at(column / LANES, k / 8), column, nibble_shift(k))
}

/// Likewise of the bit above it, or of Q6_K the two bits.
fn upper_at(format: WeightFormat, column: usize, k: usize) -> (usize, u32) {
    let shift = if format == WeightFormat::Q6K { upper_shift(k) } else { fifth_shift(k) };
    in_lane(format.upper_at(column / LANES, k / 8), column, shift)
}

/// Byte and shift in a row of 16 lanes of 32 bits that begins at `row`.
fn in_lane(row: usize, column: usize, shift: u32) -> (usize, u32) {
    (row + column % LANES * 4 + shift as usize / 8, shift % 8)
}

/// Of the nibble of a block's `k` in its lane, the column's next four pairs of `k`.
pub(super) const fn nibble_shift(k: usize) -> u32 {
    (k / 2 % 4 * 4 + k % 2 * 16) as u32
}

/// Of its fifth bit in the column's lane.
pub(super) const fn fifth_shift(k: usize) -> u32 {
    nibble_shift(k) / 8 * 8 + nibble_shift(k) / 4 % 2 + k as u32 / 8 * 2
}

/// Of the two bits above it in their lane, of 16 `k`.
pub(super) const fn upper_shift(k: usize) -> u32 {
    nibble_shift(k) / 8 * 8 + nibble_shift(k) / 4 % 2 * 2 + k as u32 / 8 % 2 * 4
}
