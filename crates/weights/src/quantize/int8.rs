//! Eight bits with one scale for each row, as LLM.int8() keeps weights.
//!
//! A row's scale is its largest magnitude; `code = round(x · (1 / scale · 127))`, a half to even, and
//! `x ≈ code · scale · (1 / 127)`. The reciprocal comes first, as PyTorch divides a number by a
//! tensor and CUDA's fast division works; in bf16, where many values lie on a half, a quotient of
//! 127 would give one code in some thousands otherwise. bitsandbytes rounds weights to fp16 first; what is read from bf16
//! or fp16 files has the same value there, unless it is below 2^-24 or above 65504.

use rayon::prelude::*;

use super::largest_magnitude;

/// The largest code.
const LARGEST_CODE: f32 = 127.0;
/// Added to a small number, it leaves no bits for a fraction: what is lost is rounded to nearest,
/// a half to even. Unlike the rounding of the library this is done in vectors.
const ROUNDER: f32 = (3 << 22) as f32;

/// Quantises whole rows.
///
/// # Panics
/// Where `codes` has not the length of `values`, or `scales` not that of the rows.
pub fn quantize_int8(values: &[f32], columns: usize, codes: &mut [i8], scales: &mut [f32]) {
    check_lengths(values.len(), columns, codes.len(), scales.len());
    if columns == 0 {
        scales.fill(0.0);
        return;
    }
    (
        values.par_chunks(columns),
        codes.par_chunks_mut(columns),
        scales.par_iter_mut(),
    )
        .into_par_iter()
        .for_each(|(values, codes, scale)| *scale = quantize_row(values, codes));
}

/// Quantises a row and gives its scale.
pub(super) fn quantize_row(values: &[f32], codes: &mut [i8]) -> f32 {
    let largest = largest_magnitude(values);
    let factor = 1.0 / largest * LARGEST_CODE;
    for (&value, code) in values.iter().zip(codes) {
        // A row of zeros gives NaN here, and the conversion makes 0 of it.
        *code = (value * factor + ROUNDER - ROUNDER) as i8;
    }
    largest
}

/// The values of whole rows.
///
/// # Panics
/// As [`quantize_int8`].
pub fn dequantize_int8(codes: &[i8], columns: usize, scales: &[f32], values: &mut [f32]) {
    check_lengths(values.len(), columns, codes.len(), scales.len());
    if columns == 0 {
        return;
    }
    (
        codes.par_chunks(columns),
        scales.par_iter(),
        values.par_chunks_mut(columns),
    )
        .into_par_iter()
        .for_each(|(codes, &scale, values)| {
            for (&code, value) in codes.iter().zip(values) {
                *value = f32::from(code) * scale * (1.0 / LARGEST_CODE);
            }
        });
}

fn check_lengths(values: usize, columns: usize, codes: usize, scales: usize) {
    assert_eq!(codes, values, "codes");
    assert_eq!(scales * columns, values, "scales");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_half_goes_to_the_even_code() {
        let values: Vec<f32> = (-254..=254).map(|n: i16| f32::from(n) / 2.0).collect();
        let mut codes = vec![0; values.len()];
        assert_eq!(quantize_row(&values, &mut codes), LARGEST_CODE);
        for (&value, &code) in values.iter().zip(&codes) {
            assert_eq!(f32::from(code), value.round_ties_even());
        }
        let mut codes = [1; 3];
        assert_eq!(quantize_row(&[0.0; 3], &mut codes), 0.0);
        assert_eq!(codes, [0; 3]);
    }
}
