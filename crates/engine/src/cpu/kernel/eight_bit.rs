//! AdamW with moments of one byte a number: decoded, updated and encoded in one pass, without
//! anything kept in between.
//!
//! Numbers share a scale in blocks of [`BLOCK`], the largest magnitude of the block: one large
//! gradient costs the precision of its neighbours, not that of the tensor. In units of the scale:
//!
//! ```text
//! m, signed:    m = sign(q)·(q/127)²              q = −127 … 127
//! v, unsigned:  v = 2^e·(1 + f/8), 0 for code 0   code − 255 = 8·e + f, from 1 down to 1.25·2⁻³²
//! ```
//!
//! Both have a wide range, because gradients of one block differ by decades: a linear code would
//! make every v below 1/510 of the largest zero, and the step `m/√v` of its weight huge.
//!
//! The second moment divides. Its code is a float of five bits of exponent and three of mantissa,
//! so the relative error is at most 1/16 wherever v is in the range, and what is below the range
//! is raised to its end: a number that is not zero never becomes zero. The step that is computed
//! from a decoded v is therefore at most √(16/15) ≈ 1.033 times too long.
//!
//! The first moment multiplies, and what matters is its error beside the larger ones. The square
//! law has steps of 1.6 % of the value at the top, 16 % at a hundredth of the scale, and reaches
//! down to 6·10⁻⁵ of it, about where √v ends too. Smaller ones round to zero, which only waits.
//!
//! Rounding is to the nearest code and depends on nothing but the block. A moving average whose
//! steps are finer than the code still moves: when all of a block decays, its scale does.

#[cfg(test)]
mod tests;

use cinch_graph::op::MomentFormat;

use super::optimizer::{AdamW, TASK, Update};
use crate::cpu::parallel::{Shared, for_each};
use crate::cpu::real::Real;
use crate::cpu::simd::simd;

/// Numbers of one scale.
pub const BLOCK: usize = MomentFormat::BLOCK;

/// Scales of a task's blocks.
const TASK_SCALES: usize = TASK / BLOCK;

/// The largest code of the first moment.
const LARGEST: f32 = 127.0;

/// Mantissa bits of an `f32` below those that the second moment's code keeps.
const DROPPED_BITS: u32 = 20;

/// What the kept bits of 1.0 exceed code 255 by.
const CODE_OFFSET: i32 = (0x3f80_0000 >> DROPPED_BITS) - 255;

/// Which of the two codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// Of first moments.
    Signed,
    /// Of second moments, which are not negative.
    Unsigned,
}

/// A moment: codes, and the scale of each block.
pub struct Moment<'a> {
    pub codes: &'a mut [u8],
    pub scales: &'a mut [f32],
}

#[inline(always)]
fn decode_signed(code: u8, unit: f32) -> f32 {
    let q = f32::from(code.cast_signed());
    q * q.abs() * unit
}

/// What [`decode_signed`] multiplies with.
#[inline(always)]
fn unit(scale: f32) -> f32 {
    scale / (LARGEST * LARGEST)
}

#[inline(always)]
fn encode_signed(value: f32, scale: f32) -> u8 {
    /// 1.5·2²³: adding it leaves the nearest integer, as two's complement, in the low bits.
    const ROUNDING: f32 = 12_582_912.0;
    let q = LARGEST * (value.abs() / scale).sqrt();
    (q.copysign(value) + ROUNDING).to_bits() as u8
}

#[inline(always)]
fn decode_unsigned(code: u8, scale: f32) -> f32 {
    let bits = (i32::from(code) + CODE_OFFSET) << DROPPED_BITS;
    let value = f32::from_bits(bits.cast_unsigned()) * scale;
    if code == 0 { 0.0 } else { value }
}

#[inline(always)]
fn encode_unsigned(value: f32, scale: f32) -> u8 {
    const HALF: i32 = 1 << (DROPPED_BITS - 1);
    let bits = (value / scale).to_bits().cast_signed();
    let code = ((bits + HALF) >> DROPPED_BITS) - CODE_OFFSET;
    let code = code.clamp(1, 255);
    if value > 0.0 { code as u8 } else { 0 }
}

/// The largest magnitude, or 1 where all are zero, which has the same codes. Magnitudes compare
/// like the integers of their bits, and integers are what a vector finds the largest of.
#[inline(always)]
fn largest(values: &[f32]) -> f32 {
    let bits = values.iter().fold(0, |most, x| x.abs().to_bits().max(most));
    if bits == 0 { 1.0 } else { f32::from_bits(bits) }
}

impl Code {
    /// Decodes a tensor.
    pub fn decode(self, codes: &[u8], scales: &[f32], values: &mut [f32]) {
        let blocks = codes.chunks(BLOCK).zip(values.chunks_mut(BLOCK));
        for ((codes, values), &scale) in blocks.zip(scales) {
            for (value, &code) in values.iter_mut().zip(codes) {
                *value = match self {
                    Self::Signed => decode_signed(code, unit(scale)),
                    Self::Unsigned => decode_unsigned(code, scale),
                };
            }
        }
    }

    /// Encodes a tensor.
    pub fn encode(self, values: &[f32], codes: &mut [u8], scales: &mut [f32]) {
        let blocks = values.chunks(BLOCK).zip(codes.chunks_mut(BLOCK));
        for ((values, codes), scale) in blocks.zip(scales) {
            *scale = largest(values);
            for (code, &value) in codes.iter_mut().zip(values) {
                *code = match self {
                    Self::Signed => encode_signed(value, *scale),
                    Self::Unsigned => encode_unsigned(value, *scale),
                };
            }
        }
    }
}

/// One step of a parameter, its moments being encoded again.
///
/// # Panics
/// Where the lengths do not belong together.
pub fn adamw<F: Real>(
    parameter: &mut [F],
    gradient: &[F],
    m: Moment<'_>,
    v: Moment<'_>,
    settings: &AdamW,
) {
    let len = parameter.len();
    let blocks = len.div_ceil(BLOCK);
    assert_eq!(
        (gradient.len(), m.codes.len(), v.codes.len()),
        (len, len, len),
        "AdamW operands"
    );
    assert_eq!((m.scales.len(), v.scales.len()), (blocks, blocks), "scales");
    let parameter = Shared::new(parameter);
    let codes = [m.codes, v.codes].map(Shared::new);
    let scales = [m.scales, v.scales].map(Shared::new);
    for_each(len.div_ceil(TASK), |task| {
        let start = task * TASK;
        let count = TASK.min(len - start);
        let first = task * TASK_SCALES;
        let num_scales = count.div_ceil(BLOCK);
        // SAFETY: each task takes its own elements, and the scales of its own blocks: a task is
        // a whole number of blocks.
        let (parameter, codes, scales) = unsafe {
            (
                parameter.part(start, count),
                codes.map(|codes| codes.part(start, count)),
                scales.map(|scales| scales.part(first, num_scales)),
            )
        };
        let gradient = &gradient[start..start + count];
        adamw_blocks(parameter, gradient, codes, scales, settings);
    });
}

simd! {
    fn adamw_blocks<F: Real>(
        parameter: &mut [F],
        gradient: &[F],
        codes: [&mut [u8]; 2],
        scales: [&mut [f32]; 2],
        settings: &AdamW,
    ) {
        let update = Update::<F>::new(settings);
        let [m_codes, v_codes] = codes;
        let codes = m_codes.chunks_mut(BLOCK).zip(v_codes.chunks_mut(BLOCK));
        let [m_scales, v_scales] = scales;
        let scales = m_scales.iter_mut().zip(v_scales.iter_mut());
        let numbers = parameter.chunks_mut(BLOCK).zip(gradient.chunks(BLOCK));
        let (mut m, mut v) = ([0.0_f32; BLOCK], [0.0_f32; BLOCK]);
        for ((parameter, gradient), ((m_codes, v_codes), (m_scale, v_scale))) in
            numbers.zip(codes.zip(scales))
        {
            let len = parameter.len().min(BLOCK);
            let (gradient, m) = (&gradient[..len], &mut m[..len]);
            let v = &mut v[..len];
            let (m_codes, v_codes) = (&mut m_codes[..len], &mut v_codes[..len]);
            let (m_unit, v_unit) = (unit(*m_scale), *v_scale);
            for i in 0..len {
                let mut first = F::from_f64(f64::from(decode_signed(m_codes[i], m_unit)));
                let mut second = F::from_f64(f64::from(decode_unsigned(v_codes[i], v_unit)));
                update.apply(&mut parameter[i], gradient[i], &mut first, &mut second);
                m[i] = first.to_f64() as f32;
                v[i] = second.to_f64() as f32;
            }
            *m_scale = largest(m);
            *v_scale = largest(v);
            for i in 0..len {
                m_codes[i] = encode_signed(m[i], *m_scale);
                v_codes[i] = encode_unsigned(v[i], *v_scale);
            }
        }
    }
}
