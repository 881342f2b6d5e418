//! Where a generator's weights come from: a checkpoint, a model folder, adapters.

use std::ops::Range;

use cinch_graph::DType;
use cinch_graph::op::Quantisation;
use safetensors::Dtype;

use crate::checkpoint::{TensorFile, TensorView};

/// A tensor as a model's files name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightPart<'a> {
    pub name: &'a str,
    /// Of the whole tensor.
    pub shape: &'a [usize],
}

/// Whatever holds weights by the names of [`cinch_graph::Parameter::parts`]. Those of adapters
/// are the module's name with `.lora_A.weight` and `.lora_B.weight`. What goes wrong is told in a
/// sentence that names the tensor.
pub trait WeightSource {
    /// Puts rows of a tensor into `into`, in `dtype` and row-major.
    fn read(
        &mut self,
        part: WeightPart<'_>,
        rows: Range<usize>,
        dtype: DType,
        into: &mut [u8],
    ) -> Result<(), String>;

    /// Puts the codes of a matrix into `codes` and its scales into `scales`, which are in the order
    /// of [`Quantisation::tensors`].
    fn read_codes(
        &mut self,
        part: WeightPart<'_>,
        _quantisation: Quantisation,
        _codes: &mut [u8],
        _scales: &mut [Vec<u8>],
    ) -> Result<(), String> {
        Err(format!("`{}` is not there as codes", part.name))
    }
}

/// The weights of a checkpoint, which are in single precision.
impl WeightSource for &TensorFile {
    fn read(
        &mut self,
        part: WeightPart<'_>,
        rows: Range<usize>,
        dtype: DType,
        into: &mut [u8],
    ) -> Result<(), String> {
        let Some(saved) = self.get(part.name) else {
            return Err(format!("it has no tensor `{}`", part.name));
        };
        if saved.shape != part.shape || saved.dtype != Dtype::F32 {
            return Err(format!(
                "`{}` is {:?} {:?}, the model's is {:?} {:?}",
                part.name,
                saved.dtype,
                saved.shape,
                Dtype::F32,
                part.shape
            ));
        }
        let width: usize = part.shape[1..].iter().product();
        let bytes = rows.start * width * size_of::<f32>()..rows.end * width * size_of::<f32>();
        let from = saved.bytes.get(bytes).ok_or_else(|| {
            let rows = part.shape[0];
            format!("`{}` has {rows} rows, fewer than are wanted", part.name)
        })?;
        match dtype {
            DType::F32 => {
                let rows = TensorView {
                    bytes: from,
                    ..saved
                };
                self.read_into(&rows, into)
                    .map_err(|error| format!("`{}` cannot be read: {error}", part.name))?;
            }
            DType::Bf16 => {
                let words = from.as_chunks::<4>().0;
                let halves = into.as_chunks_mut::<2>().0;
                for (to, &word) in halves.iter_mut().zip(words) {
                    *to = bf16_bits(f32::from_le_bytes(word)).to_ne_bytes();
                }
            }
            other => return Err(format!("`{}` cannot be had in {other}", part.name)),
        }
        Ok(())
    }
}

/// The nearest bf16, ties to even.
fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        // The quiet bit, or a payload in the lower half alone would become an infinity.
        return (bits >> 16) as u16 | 0x40;
    }
    let half = 0x7fff + ((bits >> 16) & 1);
    ((bits + half) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_to_the_nearest_and_ties_to_even() {
        for (value, bits) in [
            (0.0, 0x0000),
            (-1.0, 0xbf80),
            // Halfway between two, down and up to the even one; and a little more.
            (1.003_906_3, 0x3f80),
            (1.011_718_8, 0x3f82),
            (1.004, 0x3f81),
            (f32::MAX, 0x7f80),
            (f32::NEG_INFINITY, 0xff80),
        ] {
            assert_eq!(bf16_bits(value), bits, "{value}");
        }
        let nan = f32::from_bits(0x7f80_0001);
        assert!(f32::from_bits(u32::from(bf16_bits(nan)) << 16).is_nan());
    }
}
