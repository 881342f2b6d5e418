//! Frozen weights in four or eight bits, with the values that bitsandbytes gives them.
//!
//! A model is quantised while it is loaded: [`WeightFiles::read_nf4`](crate::WeightFiles::read_nf4)
//! and [`WeightFiles::read_int8`](crate::WeightFiles::read_int8) read a piece, quantise it in the
//! thread that read it, and write codes and scales to where they stay. The tensor in its own type
//! never exists whole.

mod dynamic;
mod int8;
mod load;
mod nf4;

pub use dynamic::DYNAMIC_MAP;
pub use int8::{dequantize_int8, quantize_int8};
pub use nf4::{
    NF4_MAP, Nf4, Nf4Layout, Nf4Parts, dequantize_nf4, dequantize_scales, quantize_nf4,
    quantize_nf4_bf16, quantize_scales, scale_offset,
};

/// The largest magnitude; a NaN counts as larger than any number. Compared as integers, which have
/// the order of the magnitudes and, unlike floats, are compared by vectors.
fn largest_magnitude(values: &[f32]) -> f32 {
    let bits = values.iter().map(|value| value.abs().to_bits() as i32);
    f32::from_bits(bits.fold(0, i32::max) as u32)
}
