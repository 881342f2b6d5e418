//! Codes of quantised weights back into numbers.

use cinch_graph::op::Quantisation;
use cinch_weights::{DYNAMIC_MAP, NF4_MAP};

use crate::cpu::parallel::{self, Shared};
use crate::cpu::real::Real;

/// Numbers of one task: whole blocks of either format.
const TASK: usize = Quantisation::NF4_BLOCK * Quantisation::SCALE_BLOCK;

/// The largest numbers of blocks of [`Quantisation::NF4_BLOCK`].
#[derive(Clone, Copy)]
pub enum Scales<'a> {
    Numbers(&'a [f32]),
    /// Codes in units of the largest of a block of [`Quantisation::SCALE_BLOCK`], less the mean.
    Codes {
        codes: &'a [u8],
        units: &'a [f32],
        mean: f32,
    },
}

/// `out` from two codes a byte, the higher half first.
///
/// # Panics
/// Where there are fewer codes or scales than numbers.
pub fn nf4<F: Real>(packed: &[u8], scales: Scales<'_>, out: &mut [F]) {
    let values = &DYNAMIC_MAP;
    let scale = |block: usize| match scales {
        Scales::Numbers(numbers) => numbers[block],
        Scales::Codes { codes, units, mean } => {
            values[usize::from(codes[block])] * units[block / Quantisation::SCALE_BLOCK] + mean
        }
    };
    let len = out.len();
    let out = Shared::new(out);
    parallel::for_each(len.div_ceil(TASK), |task| {
        let start = task * TASK;
        let end = len.min(start + TASK);
        // SAFETY: each task has its own numbers.
        let part = unsafe { out.part(start, end - start) };
        for (index, block) in part.chunks_mut(Quantisation::NF4_BLOCK).enumerate() {
            let first = start + index * Quantisation::NF4_BLOCK;
            let scale = scale(first / Quantisation::NF4_BLOCK);
            for (offset, x) in block.iter_mut().enumerate() {
                let at = first + offset;
                let byte = packed[at / 2];
                let code = if at.is_multiple_of(2) {
                    byte >> 4
                } else {
                    byte & 15
                };
                *x = F::from_f64(f64::from(NF4_MAP[usize::from(code)] * scale));
            }
        }
    });
}

/// `out [rows, width]` from a signed byte a number, in units of a 127th of its row's scale.
///
/// # Panics
/// Where there are fewer codes or scales than numbers.
pub fn int8<F: Real>(bytes: &[u8], scales: &[f32], out: &mut [F]) {
    let rows = scales.len();
    let width = out.len() / rows.max(1);
    let out = Shared::new(out);
    parallel::for_each(rows, |row| {
        // SAFETY: each task has its own row.
        let part = unsafe { out.part(row * width, width) };
        let unit = scales[row] / 127.0;
        for (x, &byte) in part.iter_mut().zip(&bytes[row * width..]) {
            *x = F::from_f64(f64::from(f32::from(byte.cast_signed()) * unit));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_become_numbers_in_units_of_their_block() {
        // Two blocks; the second one's codes count down from the largest.
        let packed: Vec<u8> = (0..64).map(|i| if i < 32 { 0x7f } else { 0xf0 }).collect();
        let mut out = vec![9.0_f32; 128];
        nf4(&packed, Scales::Numbers(&[2.0, 3.0]), &mut out);
        assert_eq!(out[..2], [0.0, 2.0]);
        assert_eq!(out[64..66], [3.0, -3.0]);
        let scales = Scales::Codes {
            codes: &[255, 0],
            units: &[0.5],
            mean: 4.0,
        };
        nf4(&packed, scales, &mut out);
        assert_eq!(out[1], 4.5);
        assert_eq!(out[64], 4.0 + 0.5 * DYNAMIC_MAP[0]);
    }

    #[test]
    fn bytes_become_numbers_in_units_of_their_row() {
        let mut out = vec![9.0_f64; 4];
        int8(&[127, 0, 0x81, 64], &[1.0, 2.0], &mut out);
        assert_eq!(out[..3], [1.0, 0.0, -2.0]);
    }
}
