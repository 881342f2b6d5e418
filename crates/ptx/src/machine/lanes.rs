//! What a lane computes from its own registers.
//!
//! Registers hold bits, from the lowest on; what is above a number's own bits is zero. Sums and
//! products in single precision that the card rounds once are computed in double precision and
//! rounded then.

use crate::program::{Comparison, Function, Half, Kind, Rounding, Type};

pub(crate) const LANES: usize = 32;
/// A register of a warp, as a row of them has it, and as two have it.
pub(crate) type Words = [u32; LANES];
pub(crate) type Lanes = [u64; LANES];

fn f32_of(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

fn bits_of(x: f32) -> u64 {
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

fn permute(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = (u64::from(b) << 32 | u64::from(a)).to_le_bytes();
    let mut result = [0; 4];
    for (i, byte) in result.iter_mut().enumerate() {
        let select = (selector >> (4 * i)) as usize;
        let value = bytes[select & 7];
        *byte = match select & 8 {
            0 => value,
            // The sign of the byte, everywhere.
            _ => ((value.cast_signed()) >> 7).cast_unsigned(),
        };
    }
    u32::from_le_bytes(result)
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

macro_rules! each {
    ($result:expr; |$a:ident, $b:ident, $c:ident| $one:expr) => {{
        let mut result = [$result; LANES];
        for lane in 0..LANES {
            let ($a, $b, $c) = ($a[lane], $b[lane], $c[lane]);
            let _ = ($a, $b, $c);
            result[lane] = $one;
        }
        result
    }};
}

/// Of 32 bits and fewer. None where there is no such function of that type.
#[expect(clippy::too_many_lines, reason = "one line for each function")]
pub(crate) fn apply(
    function: Function,
    Type { kind, bytes }: Type,
    [a, b, c]: [&Words; 3],
) -> Option<Words> {
    use Function as F;

    macro_rules! words {
        (|$a:ident, $b:ident, $c:ident| $result:expr) => {
            each!(0_u32; |$a, $b, $c| $result)
        };
    }
    macro_rules! floats {
        (|$a:ident, $b:ident, $c:ident| $result:expr) => {
            words!(|$a, $b, $c| {
                let [$a, $b, $c] = [$a, $b, $c].map(f32::from_bits);
                let _ = ($a, $b, $c);
                f32::to_bits($result)
            })
        };
    }

    let ones = mask(bytes) as u32;
    let bits = 8 * bytes as u32;
    let extension = 32_u32.wrapping_sub(bits) & 31;
    let signed = |x: u32| (x << extension).cast_signed() >> extension;
    let result = match (kind, bytes) {
        (Kind::Float, 4) => match function {
            F::Add => floats!(|a, b, c| a + b),
            F::AddTowardZero => floats!(|a, b, c| toward_zero(f64::from(a) + f64::from(b))),
            F::Sub => floats!(|a, b, c| a - b),
            F::Mul => floats!(|a, b, c| a * b),
            // The product and what is added to it have twice the width.
            F::MulAdd => {
                floats!(|a, b, c| (f64::from(a) * f64::from(b) + f64::from(c)) as f32)
            }
            F::MulAddDown => {
                floats!(|a, b, c| downward(f64::from(a) * f64::from(b) + f64::from(c)))
            }
            F::Div => floats!(|a, b, c| a / b),
            F::Min => floats!(|a, b, c| a.min(b)),
            F::Max => floats!(|a, b, c| a.max(b)),
            F::Neg => floats!(|a, b, c| -a),
            F::Abs => floats!(|a, b, c| a.abs()),
            F::SquareRoot => floats!(|a, b, c| a.sqrt()),
            F::ReciprocalRoot => floats!(|a, b, c| (1.0 / f64::from(a).sqrt()) as f32),
            F::Reciprocal => floats!(|a, b, c| 1.0 / a),
            F::Exp2 => floats!(|a, b, c| flushed(a.exp2())),
            F::Log2 => floats!(|a, b, c| a.log2()),
            // The sign of the first, the rest of the second.
            F::CopySign => floats!(|a, b, c| b.copysign(a)),
            F::Select => words!(|a, b, c| if c == 0 { b } else { a }),
            _ => return None,
        },
        (Kind::Float, _) => return None,
        (_, 1) => match function {
            F::And => words!(|a, b, c| a & b & 1),
            F::Or => words!(|a, b, c| (a | b) & 1),
            F::Xor => words!(|a, b, c| (a ^ b) & 1),
            F::Not => words!(|a, b, c| !a & 1),
            _ => return None,
        },
        _ => match function {
            F::Add => words!(|a, b, c| a.wrapping_add(b) & ones),
            F::Sub => words!(|a, b, c| a.wrapping_sub(b) & ones),
            F::Mul => words!(|a, b, c| a.wrapping_mul(b) & ones),
            F::MulAdd => words!(|a, b, c| a.wrapping_mul(b).wrapping_add(c) & ones),
            F::MulWide if bytes == 2 => match kind {
                Kind::Signed => words!(|a, b, c| (signed(a) * signed(b)).cast_unsigned()),
                _ => words!(|a, b, c| (a & ones) * (b & ones)),
            },
            F::MulHigh if bytes == 4 => match kind {
                Kind::Signed => words!(|a, b, c| {
                    let product = i64::from(signed(a)) * i64::from(signed(b));
                    (product >> 32) as u32
                }),
                _ => words!(|a, b, c| ((u64::from(a) * u64::from(b)) >> 32) as u32),
            },
            F::Div => match kind {
                Kind::Signed => words!(|a, b, c| match signed(b) {
                    0 => ones,
                    d => signed(a).wrapping_div(d).cast_unsigned() & ones,
                }),
                _ => words!(|a, b, c| (a & ones).checked_div(b & ones).unwrap_or(ones)),
            },
            F::Rem => match kind {
                Kind::Signed => words!(|a, b, c| match signed(b) {
                    0 => ones,
                    d => signed(a).wrapping_rem(d).cast_unsigned() & ones,
                }),
                _ => words!(|a, b, c| (a & ones).checked_rem(b & ones).unwrap_or(ones)),
            },
            F::Min => match kind {
                Kind::Signed => words!(|a, b, c| signed(a).min(signed(b)).cast_unsigned() & ones),
                _ => words!(|a, b, c| (a & ones).min(b & ones)),
            },
            F::Max => match kind {
                Kind::Signed => words!(|a, b, c| signed(a).max(signed(b)).cast_unsigned() & ones),
                _ => words!(|a, b, c| (a & ones).max(b & ones)),
            },
            F::And => words!(|a, b, c| a & b & ones),
            F::Or => words!(|a, b, c| (a | b) & ones),
            F::Xor => words!(|a, b, c| (a ^ b) & ones),
            F::Not => words!(|a, b, c| !a & ones),
            F::Neg => words!(|a, b, c| a.wrapping_neg() & ones),
            // What is shifted out is gone.
            F::ShiftLeft => words!(|a, b, c| if b >= bits { 0 } else { (a << (b & 31)) & ones }),
            F::ShiftRight => match kind {
                Kind::Signed => words!(|a, b, c| (signed(a) >> b.min(31)).cast_unsigned() & ones),
                _ => words!(|a, b, c| if b >= bits { 0 } else { (a & ones) >> (b & 31) }),
            },
            F::Select => words!(|a, b, c| if c == 0 { b & ones } else { a & ones }),
            F::Permute => words!(|a, b, c| permute(a, b, c)),
            F::LeadingZeros => words!(|a, b, c| a.leading_zeros()),
            F::Ones => words!(|a, b, c| a.count_ones()),
            F::Reverse => words!(|a, b, c| a.reverse_bits()),
            F::ShiftOfHighest => words!(|a, b, c| match a {
                0 => ones,
                x => x.leading_zeros(),
            }),
            _ => return None,
        },
    };
    Some(result)
}

/// Of 64 bits, or from 32 bits to 64.
pub(crate) fn apply_wide(
    function: Function,
    Type { kind, bytes }: Type,
    [a, b, c]: [&Lanes; 3],
) -> Option<Lanes> {
    use Function as F;

    macro_rules! lanes {
        (|$a:ident, $b:ident, $c:ident| $result:expr) => {
            each!(0_u64; |$a, $b, $c| $result)
        };
    }
    macro_rules! floats {
        (|$a:ident, $b:ident, $c:ident| $result:expr) => {
            lanes!(|$a, $b, $c| {
                let [$a, $b, $c] = [$a, $b, $c].map(f64::from_bits);
                let _ = ($a, $b, $c);
                f64::to_bits($result)
            })
        };
    }

    let result = match (function, kind, bytes) {
        (F::MulWide, Kind::Signed, 4) => lanes!(|a, b, c| {
            let (a, b) = (a as u32, b as u32);
            (i64::from(a.cast_signed()) * i64::from(b.cast_signed())).cast_unsigned()
        }),
        (F::MulWide, _, 4) => lanes!(|a, b, c| u64::from(a as u32) * u64::from(b as u32)),
        (F::Select, _, 8) => lanes!(|a, b, c| if c == 0 { b } else { a }),
        (_, Kind::Float, 8) => match function {
            F::Add => floats!(|a, b, c| a + b),
            F::Sub => floats!(|a, b, c| a - b),
            F::Mul => floats!(|a, b, c| a * b),
            F::MulAdd => floats!(|a, b, c| a.mul_add(b, c)),
            F::Div => floats!(|a, b, c| a / b),
            F::Min => floats!(|a, b, c| a.min(b)),
            F::Reciprocal => floats!(|a, b, c| 1.0 / a),
            F::SquareRoot => floats!(|a, b, c| a.sqrt()),
            _ => return None,
        },
        (_, _, 8) => match function {
            F::Add => lanes!(|a, b, c| a.wrapping_add(b)),
            F::Sub => lanes!(|a, b, c| a.wrapping_sub(b)),
            F::Mul => lanes!(|a, b, c| a.wrapping_mul(b)),
            F::MulAdd => lanes!(|a, b, c| a.wrapping_mul(b).wrapping_add(c)),
            F::MulHigh if kind == Kind::Unsigned => {
                lanes!(|a, b, c| ((u128::from(a) * u128::from(b)) >> 64) as u64)
            }
            F::Div => match kind {
                Kind::Signed => lanes!(|a, b, c| match b {
                    0 => u64::MAX,
                    d => a
                        .cast_signed()
                        .wrapping_div(d.cast_signed())
                        .cast_unsigned(),
                }),
                _ => lanes!(|a, b, c| a.checked_div(b).unwrap_or(u64::MAX)),
            },
            F::Rem => match kind {
                Kind::Signed => lanes!(|a, b, c| match b {
                    0 => u64::MAX,
                    d => a
                        .cast_signed()
                        .wrapping_rem(d.cast_signed())
                        .cast_unsigned(),
                }),
                _ => lanes!(|a, b, c| a.checked_rem(b).unwrap_or(u64::MAX)),
            },
            F::Min => match kind {
                Kind::Signed => {
                    lanes!(|a, b, c| a.cast_signed().min(b.cast_signed()).cast_unsigned())
                }
                _ => lanes!(|a, b, c| a.min(b)),
            },
            F::Max => match kind {
                Kind::Signed => {
                    lanes!(|a, b, c| a.cast_signed().max(b.cast_signed()).cast_unsigned())
                }
                _ => lanes!(|a, b, c| a.max(b)),
            },
            F::And => lanes!(|a, b, c| a & b),
            F::Or => lanes!(|a, b, c| a | b),
            F::Xor => lanes!(|a, b, c| a ^ b),
            F::Not => lanes!(|a, b, c| !a),
            F::Neg => lanes!(|a, b, c| a.wrapping_neg()),
            // Counts have 32 bits, and what is shifted out is gone.
            F::ShiftLeft => lanes!(|a, b, c| a.checked_shl(b as u32).unwrap_or(0)),
            F::ShiftRight => match kind {
                Kind::Signed => {
                    lanes!(|a, b, c| (a.cast_signed() >> (b as u32).min(63)).cast_unsigned())
                }
                _ => lanes!(|a, b, c| a.checked_shr(b as u32).unwrap_or(0)),
            },
            _ => return None,
        },
        _ => return None,
    };
    Some(result)
}

/// `bfi d, a, b, position, length`: the low bits of a in the middle of b.
pub(crate) fn insert_bits([a, b, position, length]: [&Words; 4]) -> Words {
    std::array::from_fn(|lane| {
        let position = position[lane].min(32);
        let ones = ((1_u64 << length[lane].min(32)) - 1) << position;
        let bits = (u64::from(b[lane]) & !ones) | ((u64::from(a[lane]) << position) & ones);
        bits as u32
    })
}

macro_rules! compared {
    ($comparison:expr; |$lane:ident| $a:expr, $b:expr) => {{
        let mut result = [0; LANES];
        macro_rules! by {
            ($op:tt) => {
                for $lane in 0..LANES {
                    result[$lane] = u32::from($a $op $b);
                }
            };
        }
        match $comparison {
            Comparison::Eq => by!(==),
            Comparison::Ne => by!(!=),
            Comparison::Lt => by!(<),
            Comparison::Le => by!(<=),
            Comparison::Gt => by!(>),
            Comparison::Ge => by!(>=),
        }
        result
    }};
}

/// Ones where it holds, of 32 bits and fewer.
pub(crate) fn compare(
    comparison: Comparison,
    ty: Type,
    unordered: bool,
    a: &Words,
    b: &Words,
) -> Words {
    if ty.kind == Kind::Float {
        let (a, b) = (a.map(f32::from_bits), b.map(f32::from_bits));
        let mut result = compared!(comparison; |lane| a[lane], b[lane]);
        for lane in 0..LANES {
            if a[lane].is_nan() | b[lane].is_nan() {
                result[lane] = u32::from(unordered);
            }
        }
        return result;
    }
    // What is above a number's own bits goes out of the way.
    let shift = 32_u32.wrapping_sub(8 * ty.bytes as u32) & 31;
    let (a, b) = (a.map(|a| a << shift), b.map(|b| b << shift));
    match ty.kind {
        Kind::Signed => compared!(comparison; |lane| a[lane].cast_signed(), b[lane].cast_signed()),
        _ => compared!(comparison; |lane| a[lane], b[lane]),
    }
}

/// The same of 64 bits.
pub(crate) fn compare_wide(
    comparison: Comparison,
    kind: Kind,
    unordered: bool,
    a: &Lanes,
    b: &Lanes,
) -> Words {
    match kind {
        Kind::Float => {
            let (a, b) = (a.map(f64::from_bits), b.map(f64::from_bits));
            let mut result = compared!(comparison; |lane| a[lane], b[lane]);
            for lane in 0..LANES {
                if a[lane].is_nan() | b[lane].is_nan() {
                    result[lane] = u32::from(unordered);
                }
            }
            result
        }
        Kind::Signed => compared!(comparison; |lane| a[lane].cast_signed(), b[lane].cast_signed()),
        _ => compared!(comparison; |lane| a[lane], b[lane]),
    }
}

/// Ones in each 16 bits for which it holds.
pub(crate) fn compare_halves(half: Half, comparison: Comparison, a: &Words, b: &Words) -> Words {
    let single = Type {
        kind: Kind::Float,
        bytes: 4,
    };
    let part = |x: &Words, shift: u32| x.map(|x| from_half(half, (x >> shift) as u16).to_bits());
    let [low, high] =
        [0, 16].map(|shift| compare(comparison, single, false, &part(a, shift), &part(b, shift)));
    std::array::from_fn(|lane| (low[lane] * 0xffff) | (high[lane] * 0xffff_0000))
}

/// Without branches, so that many are converted at once.
pub(crate) fn from_half(half: Half, bits: u16) -> f32 {
    match half {
        Half::Bf16 => f32::from_bits(u32::from(bits) << 16),
        Half::F16 => {
            let sign = u32::from(bits >> 15) << 31;
            let magnitude = u32::from(bits & 0x7fff);
            // Below the smallest normal number, in units of 2⁻²⁴.
            let small = (magnitude.cast_signed() as f32 * f32::from_bits(103 << 23)).to_bits();
            let normal = (magnitude << 13) + (112 << 23);
            let beyond = (magnitude << 13) | 0x7f80_0000;
            let magnitude = if magnitude < 0x400 {
                small
            } else if magnitude < 0x7c00 {
                normal
            } else {
                beyond
            };
            f32::from_bits(magnitude | sign)
        }
    }
}

/// To the nearest, of two that are as near to the even one.
pub(crate) fn to_half(half: Half, x: f32) -> u16 {
    let bits = x.to_bits();
    let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
    let rounded = match half {
        Half::Bf16 => {
            let odd = bits >> 16 & 1;
            bits.wrapping_add(0x7fff + odd) >> 16
        }
        Half::F16 => {
            let magnitude = bits & 0x7fff_ffff;
            // Sums with 1/2 are rounded to 2⁻²⁴, the unit of numbers that are not normal.
            let small = (f32::from_bits(magnitude) + 0.5)
                .to_bits()
                .wrapping_sub(0.5_f32.to_bits());
            // A carry into the next exponent comes by itself.
            let odd = magnitude >> 13 & 1;
            let normal = (magnitude.wrapping_add(0xfff + odd) >> 13).wrapping_sub(112 << 10);
            let units = if magnitude < 113 << 23 { small } else { normal };
            (bits >> 16 & 0x8000) | units.min(0x7c00)
        }
    };
    if is_nan { 0x7fff } else { rounded as u16 }
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
pub(crate) fn convert_pair(half: Half, a: &Words, b: &Words) -> Words {
    // Each kind has a loop of its own.
    macro_rules! pairs {
        ($half:expr) => {
            std::array::from_fn(|lane| {
                let half = |bits| u32::from(to_half($half, f32::from_bits(bits)));
                half(a[lane]) << 16 | half(b[lane])
            })
        };
    }
    match half {
        Half::Bf16 => pairs!(Half::Bf16),
        Half::F16 => pairs!(Half::F16),
    }
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
