//! The two 16-bit floats, as bits.
//!
//! Conversion from f32 rounds to nearest, ties to even, as PyTorch's does; a NaN stays a NaN.

/// Bits of a bf16 that are the upper half of an f32.
const BF16_SHIFT: u32 = 16;
/// Fraction bits of an f32 and of an f16.
const F32_FRACTION: u32 = 23;
const F16_FRACTION: u32 = 10;
/// What is added to the exponent of an f32 and of an f16.
const F32_BIAS: i32 = 127;
const F16_BIAS: i32 = 15;
/// Infinity of an f16; beyond it are NaNs.
const F16_INFINITY: u16 = 0x7c00;
/// The bit of a fraction that makes a NaN quiet.
const F16_QUIET: u16 = 0x0200;
const BF16_QUIET: u16 = 0x0040;

/// The nearest bf16.
pub fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> BF16_SHIFT) as u16 | BF16_QUIET;
    }
    // Half of the last place, less one where the kept part is even: ties then stay there.
    let half = (1 << (BF16_SHIFT - 1)) - 1 + ((bits >> BF16_SHIFT) & 1);
    ((bits + half) >> BF16_SHIFT) as u16
}

pub fn bf16_value(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << BF16_SHIFT)
}

/// The nearest f16; infinity beyond its range.
pub fn f16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16) as u16 & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    if value.is_nan() {
        return sign
            | F16_INFINITY
            | F16_QUIET
            | (magnitude >> (F32_FRACTION - F16_FRACTION)) as u16;
    }
    let exponent = (magnitude >> F32_FRACTION) as i32 - F32_BIAS + F16_BIAS;
    if exponent > 30 {
        return sign | F16_INFINITY;
    }
    let fraction = (magnitude & ((1 << F32_FRACTION) - 1)) | 1 << F32_FRACTION;
    // A subnormal loses one more bit for each step below the smallest normal exponent, 1.
    let lost = F32_FRACTION - F16_FRACTION + u32::try_from(1 - exponent).unwrap_or(0);
    if lost > F32_FRACTION + 1 {
        return sign;
    }
    let kept = fraction >> lost;
    let rest = fraction & ((1 << lost) - 1);
    let half = 1 << (lost - 1);
    let rounded = kept + u32::from(rest > half || rest == half && kept & 1 == 1);
    // Of a normal number `kept` has the leading one, which is a step of the exponent; a fraction
    // that rounds up to the next power of two carries into it likewise, up to infinity.
    let below = exponent.max(1) as u32 - 1;
    sign | ((below << F16_FRACTION) + rounded) as u16
}

pub fn f16_value(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let exponent = i32::from((bits & F16_INFINITY) >> F16_FRACTION);
    let fraction = u32::from(bits & ((1 << F16_FRACTION) - 1));
    let shift = F32_FRACTION - F16_FRACTION;
    match exponent {
        // A multiple of 2^-24, which an f32 has exactly.
        0 => {
            let value = fraction as f32 / (1 << (F16_BIAS - 1 + F16_FRACTION as i32)) as f32;
            f32::from_bits(value.to_bits() | sign)
        }
        31 => f32::from_bits(sign | 0x7f80_0000 | fraction << shift),
        _ => {
            let exponent = (exponent - F16_BIAS + F32_BIAS) as u32;
            f32::from_bits(sign | exponent << F32_FRACTION | fraction << shift)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_comes_back() {
        for bits in 0..=u16::MAX {
            let value = f16_value(bits);
            let back = f16_bits(value);
            assert!(
                back == bits || value.is_nan() && f16_value(back).is_nan(),
                "f16 {bits:04x} {value} {back:04x}"
            );
            let value = bf16_value(bits);
            let back = bf16_bits(value);
            assert!(
                back == bits || value.is_nan() && bf16_value(back).is_nan(),
                "bf16 {bits:04x} {value} {back:04x}"
            );
        }
    }

    /// Between two neighbours a value goes to the nearer one, and from the middle to the even one.
    fn check_rounding(bits: fn(f32) -> u16, value: fn(u16) -> f32, last: u16) {
        for low in 0..last {
            let (a, b) = (value(low), value(low + 1));
            let middle = ((f64::from(a) + f64::from(b)) / 2.0) as f32;
            let even = low + (low & 1);
            assert_eq!(bits(middle), even, "{a} {b}");
            assert_eq!(bits(-middle), even | 0x8000, "{a} {b}");
            assert_eq!(bits(middle.next_down()), low, "{a} {b}");
            assert_eq!(bits(middle.next_up()), low + 1, "{a} {b}");
        }
    }

    #[test]
    fn rounding_is_to_nearest_and_to_even() {
        check_rounding(f16_bits, f16_value, F16_INFINITY - 1);
        check_rounding(bf16_bits, bf16_value, 0x7f7f);
    }

    #[test]
    fn values_beyond_the_range_are_infinite() {
        assert_eq!(f16_value(0x7bff), 65504.0);
        assert_eq!(f16_bits(65519.0), 0x7bff);
        assert_eq!(f16_bits(65520.0), F16_INFINITY);
        assert_eq!(f16_bits(f32::NEG_INFINITY), 0xfc00);
        assert_eq!(bf16_value(bf16_bits(f32::MAX)), f32::INFINITY);
        assert_eq!(f16_bits(f32::from_bits(1)), 0);
        assert!(f16_value(f16_bits(f32::NAN)).is_nan());
        assert!(bf16_value(bf16_bits(f32::from_bits(0x7f80_0001))).is_nan());
    }
}
