//! Quantising a tensor while it is read.

use rayon::prelude::*;

use super::int8::quantize_row;
use super::nf4::{Nf4, Nf4Parts, quantize_blocks, quantize_scales, scale_offset};
use crate::error::WeightError;
use crate::open::{Tensor, WeightFiles};
use crate::read::CONVERTED_PIECE;

impl WeightFiles {
    /// Reads a tensor into NF4. Besides its destination this takes a piece for each thread, and
    /// with double quantisation the scales in f32, a sixteenth of a byte for each element.
    pub fn read_nf4(&self, name: &str, format: Nf4, into: Nf4Parts<'_>) -> Result<(), WeightError> {
        let tensor = self.tensor(name)?;
        let layout = format.layout(tensor.num_elements());
        for (unit, expected, found) in [
            ("bytes of codes", layout.codes, into.codes.len()),
            (
                "bytes of scales",
                layout.scale_codes,
                into.scale_codes.len(),
            ),
            ("scales", layout.scales, into.scales.len()),
            ("offsets", layout.offsets, into.offset.len()),
        ] {
            self.check_length(tensor, unit, expected, found)?;
        }
        if !format.double {
            return self.quantize_nf4(tensor, into.codes, into.scales);
        }
        let mut absmax = vec![0.0; layout.blocks];
        self.quantize_nf4(tensor, into.codes, &mut absmax)?;
        let offset = scale_offset(&absmax);
        into.offset.fill(offset);
        quantize_scales(&absmax, offset, into.scale_codes, into.scales);
        Ok(())
    }

    fn quantize_nf4(
        &self,
        tensor: &Tensor,
        codes: &mut [u8],
        absmax: &mut [f32],
    ) -> Result<(), WeightError> {
        const { assert!(CONVERTED_PIECE.is_multiple_of(Nf4::BLOCK)) };
        let elements = tensor.num_elements();
        let work =
            |values: &mut Vec<f32>, (number, (codes, absmax)): (usize, (&mut [u8], &mut [f32]))| {
                let start = number * CONVERTED_PIECE;
                let end = (start + CONVERTED_PIECE).min(elements);
                values.resize(end - start, 0.0);
                self.read_elements_f32(&tensor.name, start..end, values)?;
                quantize_blocks(values, |value| value, codes, absmax);
                Ok(())
            };
        codes
            .par_chunks_mut(Nf4::codes_bytes(CONVERTED_PIECE))
            .zip(absmax.par_chunks_mut(CONVERTED_PIECE / Nf4::BLOCK))
            .enumerate()
            .try_for_each_init(Vec::new, work)
    }

    /// Reads a tensor into eight bits with one scale for each row. Besides its destination this
    /// takes a piece for each thread, one row at least.
    pub fn read_int8(
        &self,
        name: &str,
        codes: &mut [i8],
        scales: &mut [f32],
    ) -> Result<(), WeightError> {
        let tensor = self.tensor(name)?;
        self.check_length(tensor, "codes", tensor.num_elements(), codes.len())?;
        self.check_length(tensor, "scales", tensor.rows(), scales.len())?;
        let columns = tensor.row_elements();
        if columns == 0 {
            scales.fill(0.0);
            return Ok(());
        }
        let rows = (CONVERTED_PIECE / columns).max(1);
        let work = |values: &mut Vec<f32>, (number, (codes, scales)): (usize, Piece<'_, i8>)| {
            let start = number * rows;
            values.resize(codes.len(), 0.0);
            self.read_f32(&tensor.name, start..start + scales.len(), values)?;
            let rows = values.chunks(columns).zip(codes.chunks_mut(columns));
            for ((values, codes), scale) in rows.zip(scales) {
                *scale = quantize_row(values, codes);
            }
            Ok(())
        };
        codes
            .par_chunks_mut(rows * columns)
            .zip(scales.par_chunks_mut(rows))
            .enumerate()
            .try_for_each_init(Vec::new, work)
    }
}

/// The codes and scales of a piece.
type Piece<'a, Code> = (&'a mut [Code], &'a mut [f32]);
