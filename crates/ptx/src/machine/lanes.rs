//! What a lane computes from its own registers.
//!
//! Registers hold bits, from the lowest on; what is above a number's own bits is zero. Sums and
//! products in single precision that the card rounds once are computed in double precision and
//! rounded then.

use crate::program::{Comparison, Function, Half, Kind, Rounding, Type};

pub(crate) const LANES: usize = 32;
pub(crate) type Lanes = [u64; LANES];

pub(crate) fn f32_of(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

pub(crate) fn bits_of(x: f32) -> u64 {
    u64::from(x.to_bits())
}

/// Numbers that are too small to be normal are 0 where a function says so.
fn flushed(x: f32) -> f32 {
    if x.is_subnormal() {
        0.0_f32.copysign(x)
    } else {
        x
    }
}

fn toward_zero(x: f64) -> f32 {
    let near = x as f32;
    if f64::from(near).abs() > x.abs() {
        f32::from_bits(near.to_bits() - 1)
    } else {
        near
    }
}

fn downward(x: f64) -> f32 {
    let near = x as f32;
    if f64::from(near) > x {
        near.next_down()
    } else {
        near
    }
}

fn min_f32(a: f32, b: f32) -> f32 {
    a.min(b)
}

fn max_f32(a: f32, b: f32) -> f32 {
    a.max(b)
}

fn permute(a: u64, b: u64, selector: u64) -> u64 {
    let bytes = ((b & 0xffff_ffff) << 32 | (a & 0xffff_ffff)).to_le_bytes();
    let mut result = [0; 8];
    for (i, byte) in result.iter_mut().take(4).enumerate() {
        let select = (selector >> (4 * i)) as usize;
        let value = bytes[select & 7];
        *byte = match select & 8 {
            0 => value,
            // The sign of the byte, everywhere.
            _ => ((value.cast_signed()) >> 7).cast_unsigned(),
        };
    }
    u64::from_le_bytes(result)
}

fn mask(bytes: usize) -> u64 {
    if bytes >= 8 {
        u64::MAX
    } else {
        (1 << (8 * bytes)) - 1
    }
}

pub(crate) fn sign_extend(x: u64, bytes: usize) -> i64 {
    let shift = 64 - 8 * bytes as u32;
    ((x << shift).cast_signed()) >> shift
}

/// None where there is no such function of that type.
#[expect(clippy::too_many_lines, reason = "one line for each function")]
pub(crate) fn apply(
    function: Function,
    ty: Type,
    a: &Lanes,
    b: &Lanes,
    c: &Lanes,
) -> Option<Lanes> {
    use Function as F;

    macro_rules! lanes {
        (|$a:ident, $b:ident, $c:ident| $result:expr) => {{
            let mut result = [0; LANES];
            for lane in 0..LANES {
                let ($a, $b, $c) = (a[lane], b[lane], c[lane]);
                let _ = ($a, $b, $c);
                result[lane] = $result;
            }
            result
        }};
    }
    macro_rules! f32s {
        (|$a:ident, $b:ident, $c:ident| $result:expr) => {
            lanes!(|$a, $b, $c| {
                let ($a, $b, $c) = (f32_of($a), f32_of($b), f32_of($c));
                let _ = ($a, $b, $c);
                bits_of($result)
            })
        };
    }
    macro_rules! f64s {
        (|$a:ident, $b:ident, $c:ident| $result:expr) => {
            lanes!(|$a, $b, $c| {
                let ($a, $b, $c) = (f64::from_bits($a), f64::from_bits($b), f64::from_bits($c));
                let _ = ($a, $b, $c);
                f64::to_bits($result)
            })
        };
    }

    let Type { kind, bytes } = ty;
    let ones = mask(bytes);
    let bits = 8 * bytes as u32;
    let signed = |x: u64| sign_extend(x, bytes);
    let result = match (kind, bytes) {
        (Kind::Float, 4) => match function {
            F::Add => f32s!(|a, b, c| a + b),
            F::AddTowardZero => f32s!(|a, b, c| toward_zero(f64::from(a) + f64::from(b))),
            F::Sub => f32s!(|a, b, c| a - b),
            F::Mul => f32s!(|a, b, c| a * b),
            F::MulAdd => {
                f32s!(|a, b, c| (f64::from(a) * f64::from(b) + f64::from(c)) as f32)
            }
            F::MulAddDown => {
                f32s!(|a, b, c| downward(f64::from(a) * f64::from(b) + f64::from(c)))
            }
            F::Div => f32s!(|a, b, c| a / b),
            F::Min => f32s!(|a, b, c| min_f32(a, b)),
            F::Max => f32s!(|a, b, c| max_f32(a, b)),
            F::Neg => f32s!(|a, b, c| -a),
            F::Abs => f32s!(|a, b, c| a.abs()),
            F::SquareRoot => f32s!(|a, b, c| a.sqrt()),
            F::ReciprocalRoot => f32s!(|a, b, c| (1.0 / f64::from(a).sqrt()) as f32),
            F::Reciprocal => f32s!(|a, b, c| 1.0 / a),
            F::Exp2 => f32s!(|a, b, c| flushed(a.exp2())),
            F::Log2 => f32s!(|a, b, c| a.log2()),
            // The sign of the first, the rest of the second.
            F::CopySign => f32s!(|a, b, c| b.copysign(a)),
            F::Select => lanes!(|a, b, c| if c == 0 { b } else { a }),
            _ => return None,
        },
        (Kind::Float, 8) => match function {
            F::Add => f64s!(|a, b, c| a + b),
            F::Sub => f64s!(|a, b, c| a - b),
            F::Mul => f64s!(|a, b, c| a * b),
            F::MulAdd => f64s!(|a, b, c| a.mul_add(b, c)),
            F::Div => f64s!(|a, b, c| a / b),
            F::Min => f64s!(|a, b, c| a.min(b)),
            F::Reciprocal => f64s!(|a, b, c| 1.0 / a),
            F::SquareRoot => f64s!(|a, b, c| a.sqrt()),
            F::Select => lanes!(|a, b, c| if c == 0 { b } else { a }),
            _ => return None,
        },
        (Kind::Float, _) => return None,
        (_, 1) => match function {
            F::And => lanes!(|a, b, c| a & b & 1),
            F::Or => lanes!(|a, b, c| (a | b) & 1),
            F::Xor => lanes!(|a, b, c| (a ^ b) & 1),
            F::Not => lanes!(|a, b, c| !a & 1),
            _ => return None,
        },
        _ => match function {
            F::Add => lanes!(|a, b, c| a.wrapping_add(b) & ones),
            F::Sub => lanes!(|a, b, c| a.wrapping_sub(b) & ones),
            F::Mul => lanes!(|a, b, c| a.wrapping_mul(b) & ones),
            F::MulAdd => lanes!(|a, b, c| a.wrapping_mul(b).wrapping_add(c) & ones),
            F::MulWide => match kind {
                Kind::Signed => lanes!(|a, b, c| {
                    signed(a).wrapping_mul(signed(b)).cast_unsigned() & mask(2 * bytes)
                }),
                _ => lanes!(|a, b, c| (a & ones).wrapping_mul(b & ones) & mask(2 * bytes)),
            },
            F::MulHigh => match (kind, bytes) {
                (Kind::Signed, 4) => lanes!(|a, b, c| {
                    (signed(a).wrapping_mul(signed(b)) >> 32).cast_unsigned() & ones
                }),
                (_, 4) => lanes!(|a, b, c| (a & ones).wrapping_mul(b & ones) >> 32),
                (Kind::Unsigned, 8) => {
                    lanes!(|a, b, c| ((u128::from(a) * u128::from(b)) >> 64) as u64)
                }
                _ => return None,
            },
            F::Div => match kind {
                Kind::Signed => lanes!(|a, b, c| match signed(b & ones) {
                    0 => ones,
                    d => signed(a).wrapping_div(d).cast_unsigned() & ones,
                }),
                _ => lanes!(|a, b, c| (a & ones).checked_div(b & ones).unwrap_or(ones)),
            },
            F::Rem => match kind {
                Kind::Signed => lanes!(|a, b, c| match signed(b & ones) {
                    0 => ones,
                    d => signed(a).wrapping_rem(d).cast_unsigned() & ones,
                }),
                _ => lanes!(|a, b, c| (a & ones).checked_rem(b & ones).unwrap_or(ones)),
            },
            F::Min => match kind {
                Kind::Signed => lanes!(|a, b, c| signed(a).min(signed(b)).cast_unsigned() & ones),
                _ => lanes!(|a, b, c| (a & ones).min(b & ones)),
            },
            F::Max => match kind {
                Kind::Signed => lanes!(|a, b, c| signed(a).max(signed(b)).cast_unsigned() & ones),
                _ => lanes!(|a, b, c| (a & ones).max(b & ones)),
            },
            F::And => lanes!(|a, b, c| a & b & ones),
            F::Or => lanes!(|a, b, c| (a | b) & ones),
            F::Xor => lanes!(|a, b, c| (a ^ b) & ones),
            F::Not => lanes!(|a, b, c| !a & ones),
            F::Neg => lanes!(|a, b, c| a.wrapping_neg() & ones),
            // Counts have 32 bits, and what is shifted out is gone.
            F::ShiftLeft => lanes!(|a, b, c| {
                let count = b as u32;
                if count >= bits {
                    0
                } else {
                    (a << count) & ones
                }
            }),
            F::ShiftRight => match kind {
                Kind::Signed => {
                    lanes!(|a, b, c| (signed(a) >> (b as u32).min(63)).cast_unsigned() & ones)
                }
                _ => lanes!(|a, b, c| {
                    let count = b as u32;
                    if count >= bits {
                        0
                    } else {
                        (a & ones) >> count
                    }
                }),
            },
            F::Select => lanes!(|a, b, c| if c == 0 { b & ones } else { a & ones }),
            F::InsertBits | F::Permute => return None,
            F::LeadingZeros => lanes!(|a, b, c| u64::from((a as u32).leading_zeros())),
            F::Ones => lanes!(|a, b, c| u64::from((a as u32).count_ones())),
            F::Reverse => lanes!(|a, b, c| u64::from((a as u32).reverse_bits())),
            F::ShiftOfHighest => lanes!(|a, b, c| match a as u32 {
                0 => ones,
                x => u64::from(x.leading_zeros()),
            }),
            _ => return None,
        },
    };
    Some(result)
}

/// `bfi d, a, b, position, length`: the low bits of a in the middle of b.
pub(crate) fn insert_bits(a: &Lanes, b: &Lanes, position: u64, length: u64) -> Lanes {
    let mut result = [0; LANES];
    let ones = ((1_u64 << length.min(32)) - 1) << position.min(32);
    for lane in 0..LANES {
        let bits = (b[lane] & !ones) | ((a[lane] << position.min(32)) & ones);
        result[lane] = bits & 0xffff_ffff;
    }
    result
}

pub(crate) fn permute_bytes(a: &Lanes, b: &Lanes, selector: &Lanes) -> Lanes {
    std::array::from_fn(|lane| permute(a[lane], b[lane], selector[lane]))
}

pub(crate) fn compare(
    comparison: Comparison,
    ty: Type,
    unordered: bool,
    a: &Lanes,
    b: &Lanes,
) -> Lanes {
    fn holds<T: PartialOrd>(comparison: Comparison, unordered: bool, a: T, b: T) -> bool {
        let Some(order) = a.partial_cmp(&b) else {
            return unordered;
        };
        match comparison {
            Comparison::Eq => order.is_eq(),
            Comparison::Ne => order.is_ne(),
            Comparison::Lt => order.is_lt(),
            Comparison::Le => order.is_le(),
            Comparison::Gt => order.is_gt(),
            Comparison::Ge => order.is_ge(),
        }
    }
    let ones = mask(ty.bytes);
    let one = |lane: usize| -> bool {
        let (a, b) = (a[lane], b[lane]);
        match (ty.kind, ty.bytes) {
            (Kind::Float, 4) => holds(comparison, unordered, f32_of(a), f32_of(b)),
            (Kind::Float, _) => holds(comparison, unordered, f64::from_bits(a), f64::from_bits(b)),
            (Kind::Signed, bytes) => {
                let (a, b) = (sign_extend(a, bytes), sign_extend(b, bytes));
                holds(comparison, false, a, b)
            }
            _ => holds(comparison, false, a & ones, b & ones),
        }
    };
    std::array::from_fn(|lane| u64::from(one(lane)))
}

/// Ones in each 16 bits for which it holds.
pub(crate) fn compare_halves(half: Half, comparison: Comparison, a: &Lanes, b: &Lanes) -> Lanes {
    let single = Type {
        kind: Kind::Float,
        bytes: 4,
    };
    let part = |x: &Lanes, shift: u32| -> Lanes {
        x.map(|x| bits_of(from_half(half, (x >> shift) as u16)))
    };
    let [low, high] =
        [0, 16].map(|shift| compare(comparison, single, false, &part(a, shift), &part(b, shift)));
    std::array::from_fn(|lane| (low[lane] * 0xffff) | (high[lane] * 0xffff_0000))
}

pub(crate) fn from_half(half: Half, bits: u16) -> f32 {
    match half {
        Half::Bf16 => f32::from_bits(u32::from(bits) << 16),
        Half::F16 => {
            let sign = u32::from(bits >> 15) << 31;
            let exponent = u32::from(bits >> 10) & 0x1f;
            let fraction = u32::from(bits) & 0x3ff;
            let magnitude = match exponent {
                0 => fraction as f32 * (-24.0_f32).exp2(),
                0x1f => f32::from_bits(0x7f80_0000 | fraction << 13),
                _ => f32::from_bits((exponent + 112) << 23 | fraction << 13),
            };
            f32::from_bits(magnitude.to_bits() | sign)
        }
    }
}

/// To the nearest, of two that are as near to the even one.
pub(crate) fn to_half(half: Half, x: f32) -> u16 {
    let bits = x.to_bits();
    match half {
        Half::Bf16 => {
            if x.is_nan() {
                return 0x7fff;
            }
            let odd = bits >> 16 & 1;
            ((bits + 0x7fff + odd) >> 16) as u16
        }
        Half::F16 => {
            let sign = (bits >> 16) as u16 & 0x8000;
            if x.is_nan() {
                return 0x7fff;
            }
            let magnitude = f32::from_bits(bits & 0x7fff_ffff);
            if magnitude >= 65520.0 {
                return sign | 0x7c00;
            }
            let exponent = ((magnitude.to_bits() >> 23).max(113) - 113) as i32;
            // In units of the last place, of which there are ten in the fraction.
            let unit = f64::from(exponent - 24).exp2();
            let units = (f64::from(magnitude) / unit).round_ties_even() as u32;
            // A carry into the next exponent comes by itself.
            sign | (units + ((exponent as u32) << 10)) as u16
        }
    }
}

pub(crate) fn convert(
    to: Type,
    from: Type,
    rounding: Rounding,
    saturates: bool,
    half: Option<Half>,
    a: &Lanes,
) -> Lanes {
    let one = |bits: u64| -> u64 {
        if from.kind != Kind::Float && to.kind != Kind::Float {
            let value = match from.kind {
                Kind::Signed => sign_extend(bits, from.bytes).cast_unsigned(),
                _ => bits & mask(from.bytes),
            };
            return value & mask(to.bytes);
        }
        let value = match (from.kind, from.bytes) {
            (Kind::Float, 2) => half.map_or(f64::NAN, |h| from_half(h, bits as u16).into()),
            (Kind::Float, 4) => f32_of(bits).into(),
            (Kind::Float, _) => f64::from_bits(bits),
            (Kind::Signed, bytes) => sign_extend(bits, bytes) as f64,
            (_, bytes) => (bits & mask(bytes)) as f64,
        };
        let value = match rounding {
            Rounding::NearestInteger => value.round_ties_even(),
            Rounding::IntegerTowardZero => value.trunc(),
            Rounding::Nearest | Rounding::TowardZero => value,
        };
        match (to.kind, to.bytes) {
            (Kind::Float, 2) => half.map_or(0, |h| to_half(h, value as f32).into()),
            (Kind::Float, 4) => {
                let single = match rounding {
                    Rounding::TowardZero => toward_zero(value),
                    _ => value as f32,
                };
                // What is no number is 0.
                bits_of(match saturates {
                    true if single.is_nan() => 0.0,
                    true => single.clamp(0.0, 1.0),
                    false => single,
                })
            }
            (Kind::Float, _) => value.to_bits(),
            // Beyond the largest is the largest.
            (Kind::Signed, 4) => u64::from((value as i32).cast_unsigned()),
            (Kind::Signed, _) => (value as i64).cast_unsigned() & mask(to.bytes),
            (_, 4) => u64::from(value as u32),
            _ => value as u64 & mask(to.bytes),
        }
    };
    a.map(one)
}

/// The first is the upper half.
pub(crate) fn convert_pair(half: Half, a: &Lanes, b: &Lanes) -> Lanes {
    let part = |bits: u64| u64::from(to_half(half, f32_of(bits)));
    std::array::from_fn(|lane| part(a[lane]) << 16 | part(b[lane]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_rounded_to_the_nearest_and_come_back() {
        for half in [Half::Bf16, Half::F16] {
            for bits in 0..=u16::MAX {
                let x = from_half(half, bits);
                if x.is_nan() {
                    continue;
                }
                assert_eq!(to_half(half, x), bits, "{half:?} {bits:04x} {x}");
                // Half way to the next one is the even one of both.
                let next = from_half(half, bits.wrapping_add(1));
                if !next.is_finite() || bits & 0x7fff == 0x7fff {
                    continue;
                }
                let middle = ((f64::from(x) + f64::from(next)) / 2.0) as f32;
                let even = bits + (bits & 1);
                assert_eq!(to_half(half, middle), even, "{half:?} {bits:04x}");
            }
        }
        assert_eq!(to_half(Half::F16, 65519.0), 0x7bff);
        assert_eq!(to_half(Half::F16, 65520.0), 0x7c00);
        assert_eq!(to_half(Half::F16, -1e9), 0xfc00);
    }

    #[test]
    fn sums_are_rounded_as_they_say() {
        // 1 + 2⁻²⁴ lies between 1 and the next number.
        let tiny = (-24.0_f64).exp2();
        assert_eq!(downward(1.0 + tiny), 1.0);
        assert_eq!(downward(-1.0 - tiny), -1.0_f32.next_up());
        assert_eq!(toward_zero(-1.0 - 1.5 * tiny), -1.0);
        assert_eq!(toward_zero(1.0 + 1.5 * tiny), 1.0);
    }

    #[test]
    fn bytes_are_permuted() {
        assert_eq!(permute(0x3322_1100, 0x7766_5544, 0x7604), 0x7766_0044);
        assert_eq!(permute(0x80, 0, 0x9998), 0x0000_00ff);
    }
}
