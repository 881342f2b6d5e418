//! The element types of a GPU as numbers of the host: rounding to them, and back.

use cinch_graph::DType;

/// Rounds to nearest, ties to even.
pub fn encode(values: &[f32], dtype: DType) -> Vec<u8> {
    let words = |word: fn(f32) -> u16| {
        let words = values.iter().flat_map(|&value| word(value).to_le_bytes());
        words.collect()
    };
    match dtype {
        DType::Bf16 => words(|value| {
            let bits = value.to_bits();
            (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16
        }),
        DType::F16 => words(half_bits),
        _ => values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect(),
    }
}

pub fn decode(bytes: &[u8], dtype: DType) -> Vec<f32> {
    match dtype {
        DType::Bf16 => bytes
            .as_chunks::<2>()
            .0
            .iter()
            .map(|&word| f32::from_bits(u32::from(u16::from_le_bytes(word)) << 16))
            .collect(),
        DType::F16 => bytes
            .as_chunks::<2>()
            .0
            .iter()
            .map(|&word| half_value(u16::from_le_bytes(word)))
            .collect(),
        _ => bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|&word| f32::from_le_bytes(word))
            .collect(),
    }
}

/// How far rounding to a type moves a number at most.
pub fn roundoff(value: f32, dtype: DType) -> f64 {
    let magnitude = f64::from(value.abs());
    match dtype {
        // A zero is held as it is, and what depends on the sign (ReLU) must not be shaken by it.
        _ if value == 0.0 => 0.0,
        DType::Bf16 => magnitude * power(-8),
        // Below 2⁻¹⁴ the steps are even, of 2⁻²⁴.
        DType::F16 => magnitude.max(power(-14)) * power(-11),
        _ => magnitude * power(-24),
    }
}

/// 2 to a whole number.
fn power(exponent: i32) -> f64 {
    f64::from_bits(((1023 + exponent) as u64) << 52)
}

/// IEEE half precision, by value: exponent and mantissa from the rounded quotient.
fn half_bits(value: f32) -> u16 {
    let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
    let magnitude = f64::from(value.abs());
    if !magnitude.is_finite() || magnitude >= 65520.0 {
        return sign | if value.is_nan() { 0x7e00 } else { 0x7c00 };
    }
    let exponent = (magnitude.to_bits() >> 52) as i32 - 1023;
    let exponent = exponent.max(-14);
    let steps = (magnitude / power(exponent - 10)).round_ties_even() as u32;
    // A subnormal has exponent field 0; a carry into the next exponent comes out by addition.
    let bits = if steps < 1024 {
        steps
    } else {
        (((exponent + 15) as u32) << 10) + steps - 1024
    };
    sign | bits as u16
}

fn half_value(bits: u16) -> f32 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let (field, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    let magnitude = match field {
        0 => mantissa * power(-24),
        31 if mantissa == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (1024.0 + mantissa) * power(field - 25),
    };
    (sign * magnitude) as f32
}

#[test]
fn half_precision_round_trips() {
    for bits in 0..=u16::MAX {
        let value = half_value(bits);
        if !value.is_nan() {
            assert_eq!(half_bits(value), bits, "{value}");
        }
    }
}
