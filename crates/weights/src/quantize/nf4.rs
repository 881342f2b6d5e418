//! NF4: sixteen values at quantiles of the normal distribution, and one scale for 64 elements.
//!
//! A tensor is cut row-major into blocks of 64 without regard to rows; the last may be shorter. A
//! block's scale is its largest magnitude; each element becomes the index of the value nearest to
//! `x / scale`, two to a byte, the first in the upper four bits. Double quantisation stores the
//! scales in 8 bits: less their mean (the offset), in blocks of 256, by the dynamic map.
//!
//! The arithmetic is that of bitsandbytes: elements are multiplied by the reciprocal of the scale,
//! a middle between two values goes to the lower one, a block of zeros is divided by 1e-38, and all
//! is f32. The mean alone is summed in f64: bitsandbytes sums in f32 in an order that differs
//! between its devices, and the results lie on both sides of this one.

use rayon::prelude::*;

use super::dynamic::{DYNAMIC_MAP, nearest};
use super::largest_magnitude;
use crate::half::bf16_value;

/// The values of the codes: quantiles of the normal distribution, scaled to reach -1 and 1.
pub const NF4_MAP: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Middles between neighbouring values.
const MIDDLES: [f32; 15] = middles();
/// The smallest scale that is divided by; below it a block counts as zeros.
const SMALLEST_SCALE: f32 = 1e-38;
/// Blocks that one thread quantises at once.
const BLOCKS_PER_PIECE: usize = 1024;

/// Values whose codes are counted at once, in as many registers as there are.
const GROUP: usize = 16;

const fn middles() -> [f32; 15] {
    let mut middles = [0.0; 15];
    let mut index = 0;
    while index < middles.len() {
        middles[index] = (NF4_MAP[index] + NF4_MAP[index + 1]) / 2.0;
        index += 1;
    }
    middles
}

/// The format: whether the scales are quantised too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nf4 {
    pub double: bool,
}

/// How many of each part a tensor takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nf4Layout {
    pub elements: usize,
    /// Blocks, each with a scale.
    pub blocks: usize,
    /// Bytes of codes, two elements each.
    pub codes: usize,
    /// Bytes of quantised scales, one for each block; none without double quantisation.
    pub scale_codes: usize,
    /// f32 scales: of the blocks, or, with double quantisation, of blocks of 256 scales.
    pub scales: usize,
    /// f32 offsets: one with double quantisation, else none.
    pub offsets: usize,
}

/// The parts of a quantised tensor, of the lengths that [`Nf4::layout`] gives.
#[derive(Debug)]
pub struct Nf4Parts<'a> {
    pub codes: &'a mut [u8],
    pub scale_codes: &'a mut [u8],
    pub scales: &'a mut [f32],
    pub offset: &'a mut [f32],
}

impl Nf4 {
    /// Elements that share a scale.
    pub const BLOCK: usize = 64;
    /// Scales that share a scale of their own.
    pub const SCALE_BLOCK: usize = 256;

    pub const fn codes_bytes(elements: usize) -> usize {
        elements.div_ceil(2)
    }

    pub const fn blocks(elements: usize) -> usize {
        elements.div_ceil(Self::BLOCK)
    }

    pub const fn layout(self, elements: usize) -> Nf4Layout {
        let blocks = Self::blocks(elements);
        let (scale_codes, scales, offsets) = match self.double {
            true => (blocks, blocks.div_ceil(Self::SCALE_BLOCK), 1),
            false => (0, blocks, 0),
        };
        Nf4Layout {
            elements,
            blocks,
            codes: Self::codes_bytes(elements),
            scale_codes,
            scales,
            offsets,
        }
    }
}

impl Nf4Layout {
    /// Bytes of all parts.
    pub const fn num_bytes(self) -> usize {
        self.codes + self.scale_codes + (self.scales + self.offsets) * size_of::<f32>()
    }
}

/// Quantises whole blocks; only the last may be shorter.
///
/// # Panics
/// Where `codes` and `absmax` have not the lengths of the values' codes and blocks.
pub fn quantize_nf4(values: &[f32], codes: &mut [u8], absmax: &mut [f32]) {
    quantize(values, |value| value, codes, absmax);
}

/// The same from the bits of bf16 numbers.
///
/// # Panics
/// As [`quantize_nf4`].
pub fn quantize_nf4_bf16(bits: &[u16], codes: &mut [u8], absmax: &mut [f32]) {
    quantize(bits, bf16_value, codes, absmax);
}

fn quantize<T: Copy + Sync>(
    values: &[T],
    value: impl Fn(T) -> f32 + Sync,
    codes: &mut [u8],
    absmax: &mut [f32],
) {
    assert_eq!(codes.len(), Nf4::codes_bytes(values.len()), "codes");
    assert_eq!(absmax.len(), Nf4::blocks(values.len()), "absmax");
    let elements = BLOCKS_PER_PIECE * Nf4::BLOCK;
    (
        values.par_chunks(elements),
        codes.par_chunks_mut(Nf4::codes_bytes(elements)),
        absmax.par_chunks_mut(BLOCKS_PER_PIECE),
    )
        .into_par_iter()
        .for_each(|(values, codes, absmax)| quantize_blocks(values, &value, codes, absmax));
}

/// The work of one thread. Loops run over arrays of a fixed length, so that they become vector
/// instructions; what a short block lacks counts as zeros.
pub(super) fn quantize_blocks<T: Copy>(
    values: &[T],
    value: impl Fn(T) -> f32,
    codes: &mut [u8],
    absmax: &mut [f32],
) {
    let blocks = values.chunks(Nf4::BLOCK);
    let codes = codes.chunks_mut(Nf4::codes_bytes(Nf4::BLOCK));
    for ((block, bytes), absmax) in blocks.zip(codes).zip(absmax) {
        let mut scaled = [0.0; Nf4::BLOCK];
        for (scaled, &element) in scaled.iter_mut().zip(block) {
            *scaled = value(element);
        }
        *absmax = largest_magnitude(&scaled);
        let reciprocal = 1.0 / absmax.max(SMALLEST_SCALE);
        for scaled in &mut scaled {
            *scaled *= reciprocal;
        }
        let (groups, _) = scaled.as_chunks();
        for (group, bytes) in groups.iter().zip(bytes.chunks_mut(GROUP / 2)) {
            let codes = codes_of(group);
            for (pair, byte) in codes.as_chunks::<2>().0.iter().zip(bytes) {
                *byte = (pair[0] << 4 | pair[1]) as u8;
            }
        }
    }
}

/// The codes of scaled values: as many as there are middles below each.
fn codes_of(scaled: &[f32; GROUP]) -> [u32; GROUP] {
    let mut codes = [0; GROUP];
    for &middle in &MIDDLES {
        for (code, &scaled) in codes.iter_mut().zip(scaled) {
            *code += u32::from(scaled > middle);
        }
    }
    codes
}

/// What double quantisation subtracts from the scales: their mean.
pub fn scale_offset(absmax: &[f32]) -> f32 {
    let sum: f64 = absmax.iter().map(|&scale| f64::from(scale)).sum();
    (sum / absmax.len().max(1) as f64) as f32
}

/// Quantises the scales of blocks to 8 bits, less their offset.
///
/// # Panics
/// Where `codes` has not the length of `absmax`, or `scales` not that of its blocks of 256.
pub fn quantize_scales(absmax: &[f32], offset: f32, codes: &mut [u8], scales: &mut [f32]) {
    assert_eq!(codes.len(), absmax.len(), "codes of scales");
    let blocks = absmax.len().div_ceil(Nf4::SCALE_BLOCK);
    assert_eq!(scales.len(), blocks, "scales of scales");
    (
        absmax.par_chunks(Nf4::SCALE_BLOCK),
        codes.par_chunks_mut(Nf4::SCALE_BLOCK),
        scales.par_iter_mut(),
    )
        .into_par_iter()
        .for_each(|(absmax, codes, scale)| {
            let largest = absmax.iter().fold(0.0_f32, |largest, &value| {
                largest.max((value - offset).abs())
            });
            *scale = largest;
            let reciprocal = 1.0 / largest.max(SMALLEST_SCALE);
            for (&value, code) in absmax.iter().zip(codes) {
                *code = nearest(&DYNAMIC_MAP, (value - offset) * reciprocal);
            }
        });
}

/// The scales of blocks from their codes.
///
/// # Panics
/// As [`quantize_scales`].
pub fn dequantize_scales(codes: &[u8], scales: &[f32], offset: f32, absmax: &mut [f32]) {
    assert_eq!(codes.len(), absmax.len(), "codes of scales");
    let blocks = absmax.len().div_ceil(Nf4::SCALE_BLOCK);
    assert_eq!(scales.len(), blocks, "scales of scales");
    let blocks = codes
        .chunks(Nf4::SCALE_BLOCK)
        .zip(absmax.chunks_mut(Nf4::SCALE_BLOCK));
    for ((codes, absmax), &scale) in blocks.zip(scales) {
        for (&code, absmax) in codes.iter().zip(absmax) {
            *absmax = DYNAMIC_MAP[usize::from(code)] * scale + offset;
        }
    }
}

/// The values of a range of whole blocks; only the last may be shorter.
///
/// # Panics
/// As [`quantize_nf4`].
pub fn dequantize_nf4(codes: &[u8], absmax: &[f32], values: &mut [f32]) {
    assert_eq!(codes.len(), Nf4::codes_bytes(values.len()), "codes");
    assert_eq!(absmax.len(), Nf4::blocks(values.len()), "absmax");
    (
        codes.par_chunks(Nf4::codes_bytes(Nf4::BLOCK)),
        absmax.par_iter(),
        values.par_chunks_mut(Nf4::BLOCK),
    )
        .into_par_iter()
        .with_min_len(BLOCKS_PER_PIECE)
        .for_each(|(codes, &scale, values)| {
            for (&byte, pair) in codes.iter().zip(values.chunks_mut(2)) {
                for (value, code) in pair.iter_mut().zip([byte >> 4, byte & 0xf]) {
                    *value = NF4_MAP[usize::from(code)] * scale;
                }
            }
        });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The probability that a standard normal number lies between 0 and `x`: Simpson's rule.
    fn probability(x: f64) -> f64 {
        let steps = 4000;
        let width = x / f64::from(steps);
        let density = |n: i32| (-(width * f64::from(n)).powi(2) / 2.0).exp();
        let sum: f64 = (1..steps)
            .map(|n| density(n) * if n % 2 == 1 { 4.0 } else { 2.0 })
            .sum();
        (density(0) + sum + density(steps)) * width / 3.0 / std::f64::consts::TAU.sqrt()
    }

    fn quantile(above_half: f64) -> f64 {
        let (mut low, mut high) = (0.0, 4.0);
        for _ in 0..60 {
            let middle = (low + high) / 2.0;
            match probability(middle) < above_half {
                true => low = middle,
                false => high = middle,
            }
        }
        low
    }

    /// Eight positive and seven negative quantiles, at even steps up to the probability that the
    /// format was made with, over the largest.
    #[test]
    fn the_values_are_quantiles_of_the_normal_distribution() {
        const LARGEST: f64 = 0.967_708_3 - 0.5;
        let largest = quantile(LARGEST);
        for (count, sign) in [(8, 1.0), (7, -1.0)] {
            for step in 1..=count {
                let expected = quantile(LARGEST * f64::from(step) / f64::from(count)) / largest;
                let code = 7.0 + sign * f64::from(step);
                let found = f64::from(NF4_MAP[code as usize]) * sign;
                assert!(
                    (found - expected).abs() < 2e-6,
                    "{code}: {found} {expected}"
                );
            }
        }
        assert_eq!(NF4_MAP[7], 0.0);
    }

    #[test]
    fn a_middle_goes_to_the_lower_value() {
        let code_of = |value| codes_of(&[value; GROUP])[GROUP - 1] as usize;
        for (code, &middle) in MIDDLES.iter().enumerate() {
            assert_eq!(code_of(middle), code);
            assert_eq!(code_of(middle.next_up()), code + 1);
        }
        for (code, &value) in NF4_MAP.iter().enumerate() {
            assert_eq!(code_of(value), code);
        }
    }

    #[test]
    fn sizes_of_a_layout() {
        let elements = 64 * 256 * 3 + 65;
        let double = Nf4 { double: true }.layout(elements);
        assert_eq!(double.blocks, 256 * 3 + 2);
        assert_eq!(double.codes, elements.div_ceil(2));
        assert_eq!((double.scale_codes, double.scales), (double.blocks, 4));
        assert_eq!(double.num_bytes(), double.codes + double.blocks + 5 * 4);
        let single = Nf4 { double: false }.layout(elements);
        assert_eq!(single.num_bytes(), single.codes + single.blocks * 4);
        assert_eq!(Nf4 { double: true }.layout(0).num_bytes(), 4);
    }
}
