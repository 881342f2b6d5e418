//! The element types kernels run in, with the transcendental functions written so that a
//! loop over them becomes vector code: no branches, no calls, no tables.

use std::fmt::Debug;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, DivAssign, Mul, MulAssign, Neg, Sub, SubAssign};

use crate::arena::Element;

/// `f32` (training) or `f64` (gradient checks).
pub trait Real:
    Element
    + Debug
    + Default
    + PartialOrd
    + Send
    + Sync
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
    + DivAssign
    + Sum
{
    const ZERO: Self;
    const ONE: Self;

    fn from_f64(x: f64) -> Self;
    fn to_f64(self) -> f64;
    /// `self * a + b`, rounded once.
    fn fma(self, a: Self, b: Self) -> Self;
    fn exp(self) -> Self;
    /// Natural logarithm of a positive number.
    fn ln(self) -> Self;
    fn sqrt(self) -> Self;
    fn abs(self) -> Self;

    /// The larger of two; the second where they do not compare.
    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        if self > other { self } else { other }
    }

    #[inline(always)]
    fn sigmoid(self) -> Self {
        Self::ONE / (Self::ONE + (-self).exp())
    }

    /// `tanh x = 1 − 2/(e^{2x}+1)`: absolute error of one rounding, which is what GELU
    /// needs (it adds 1 to it).
    #[inline(always)]
    fn tanh(self) -> Self {
        let two = Self::ONE + Self::ONE;
        Self::ONE - two / ((two * self).exp() + Self::ONE)
    }

    /// `ln(1 + e^x)`, computed as `max(x, 0) + ln(1 + e^{−|x|})`.
    #[inline(always)]
    fn softplus(self) -> Self {
        let tail = (-self.abs()).exp();
        self.larger(Self::ZERO) + tail.ln_1p_unit()
    }

    /// `ln(1 + x)` for x in [0, 1], accurate relative to x for small x.
    fn ln_1p_unit(self) -> Self;

    #[inline(always)]
    fn cosh(self) -> Self {
        let half = Self::from_f64(0.5);
        half * self.exp() + half * (-self).exp()
    }

    /// `(eˣ − e⁻ˣ)/2`, and below 1 its series, where that difference loses digits.
    #[inline(always)]
    fn sinh(self) -> Self {
        let half = Self::from_f64(0.5);
        let far = half * self.exp() - half * (-self).exp();
        let square = self * self;
        let mut series = Self::from_f64(1.0 / 362_880.0);
        for denominator in [5_040.0, 120.0, 6.0, 1.0] {
            series = series.fma(square, Self::from_f64(1.0 / denominator));
        }
        if square < Self::ONE {
            self * series
        } else {
            far
        }
    }

    /// The inverse of cosh: `ln(1 + u)` with `u = t + √(t·(t + 2))` and `t = x − 1`, which loses
    /// nothing near 1.
    #[inline(always)]
    fn acosh(self) -> Self {
        let t = self - Self::ONE;
        let u = t + (t * (t + Self::ONE + Self::ONE)).sqrt();
        let near = if u < Self::ONE { u } else { Self::ONE };
        if u < Self::ONE {
            near.ln_1p_unit()
        } else {
            (Self::ONE + u).ln()
        }
    }

    /// The error function, with the absolute error of a few roundings.
    fn erf(self) -> Self;
}

impl Real for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;

    #[inline(always)]
    fn from_f64(x: f64) -> Self {
        x as Self
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        f64::from(self)
    }

    #[inline(always)]
    fn fma(self, a: Self, b: Self) -> Self {
        self.mul_add(a, b)
    }

    /// `e^x = 2^n · e^r` with `n = round(x / ln 2)` and `|r| ≤ ln2/2`, the second factor by
    /// a polynomial of degree 6. Relative error below 2e-7; 0 below −87.3, capped above 88.3.
    #[inline(always)]
    fn exp(self) -> Self {
        /// 1.5·2²³: adding it leaves the nearest integer in the low mantissa bits.
        const ROUNDING: f32 = 12_582_912.0;
        /// ln 2 in two parts, so that `x − n·ln 2` loses nothing.
        const LN_2_HIGH: f32 = 0.693_359_4;
        const LN_2_LOW: f32 = -2.121_944_4e-4;
        let x = if self > 88.3 { 88.3 } else { self };
        let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUNDING);
        let n = shifted - ROUNDING;
        let r = n.mul_add(-LN_2_LOW, n.mul_add(-LN_2_HIGH, x));
        let mut p = 1.0 / 720.0_f32;
        p = p.mul_add(r, 1.0 / 120.0);
        p = p.mul_add(r, 1.0 / 24.0);
        p = p.mul_add(r, 1.0 / 6.0);
        p = p.mul_add(r, 0.5);
        p = p.mul_add(r, 1.0);
        p = p.mul_add(r, 1.0);
        let scale = Self::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
        if x < -87.3 { 0.0 } else { p * scale }
    }

    /// `ln x = e·ln 2 + ln m`, m in [√½, √2), the second term by a polynomial in `m − 1`.
    #[inline(always)]
    fn ln(self) -> Self {
        /// The bits of √½: subtracting them makes the exponent field count from there.
        const SQRT_HALF_BITS: u32 = 0x3f35_04f3;
        let bits = self.to_bits().wrapping_sub(SQRT_HALF_BITS);
        let exponent = ((bits as i32) >> 23) as f32;
        let mantissa = Self::from_bits((bits & 0x007f_ffff).wrapping_add(SQRT_HALF_BITS));
        let r = mantissa - 1.0;
        exponent.mul_add(std::f32::consts::LN_2, ln_1p_polynomial(r))
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        self.sqrt()
    }

    #[inline(always)]
    fn abs(self) -> Self {
        self.abs()
    }

    /// The same polynomial; above √2 − 1 the argument is first halved.
    #[inline(always)]
    fn ln_1p_unit(self) -> Self {
        let halve = self > std::f32::consts::SQRT_2 - 1.0;
        let r = if halve { (self - 1.0) * 0.5 } else { self };
        let base = if halve { std::f32::consts::LN_2 } else { 0.0 };
        base + ln_1p_polynomial(r)
    }

    /// `erf x = 1 − t·P(t)·e^{−x²}` with `t = 1/(1 + 0.3275911·x)` for x ≥ 0: formula 7.1.26
    /// of Abramowitz and Stegun, absolute error 1.5e-7, and branch-free.
    #[inline(always)]
    fn erf(self) -> Self {
        let x = self.abs();
        let t = 1.0 / x.mul_add(0.327_591_1, 1.0);
        let mut p = 1.061_405_4_f32;
        p = p.mul_add(t, -1.453_152);
        p = p.mul_add(t, 1.421_413_7);
        p = p.mul_add(t, -0.284_496_72);
        p = p.mul_add(t, 0.254_829_6);
        let value = 1.0 - p * t * Real::exp(-x * x);
        value.copysign(self)
    }
}

/// `ln(1 + r)` for r in [√½ − 1, √2 − 1], by the minimax polynomial of degree 11 that the
/// Cephes library made common: `r − r²/2 + r³·P(r)`.
#[inline(always)]
fn ln_1p_polynomial(r: f32) -> f32 {
    let mut p = 7.037_683_6e-2_f32;
    p = p.mul_add(r, -1.151_461e-1);
    p = p.mul_add(r, 1.167_699_9e-1);
    p = p.mul_add(r, -1.242_014_1e-1);
    p = p.mul_add(r, 1.424_932_3e-1);
    p = p.mul_add(r, -1.666_805_8e-1);
    p = p.mul_add(r, 2.000_071_5e-1);
    p = p.mul_add(r, -2.499_999_4e-1);
    p = p.mul_add(r, 3.333_333e-1);
    let square = r * r;
    (square * r).mul_add(p, square.mul_add(-0.5, r))
}

impl Real for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;

    #[inline(always)]
    fn from_f64(x: f64) -> Self {
        x
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        self
    }

    #[inline(always)]
    fn fma(self, a: Self, b: Self) -> Self {
        self.mul_add(a, b)
    }

    #[inline(always)]
    fn exp(self) -> Self {
        self.exp()
    }

    #[inline(always)]
    fn ln(self) -> Self {
        self.ln()
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        self.sqrt()
    }

    #[inline(always)]
    fn abs(self) -> Self {
        self.abs()
    }

    #[inline(always)]
    fn ln_1p_unit(self) -> Self {
        self.ln_1p()
    }

    #[inline(always)]
    fn sinh(self) -> Self {
        self.sinh()
    }

    /// Below 3 the series `2/√π · e^{−x²} · Σ 2ⁿ x^{2n+1} / (2n+1)!!`, whose terms are all
    /// positive; above, one minus Laplace's continued fraction for erfc. Not vector code: in
    /// double precision only gradient checks run.
    #[inline(always)]
    fn erf(self) -> Self {
        let x = self.abs();
        let square = x * x;
        let value = if x < 3.0 {
            let mut term = x;
            let mut sum = x;
            let mut odd = 1.0;
            while term > sum * 1e-17 {
                odd += 2.0;
                term *= 2.0 * square / odd;
                sum += term;
            }
            std::f64::consts::FRAC_2_SQRT_PI * (-square).exp() * sum
        } else {
            let tail = (1..=60)
                .rev()
                .fold(x, |tail, k| x + 0.5 * f64::from(k) / tail);
            1.0 - (-square).exp() * 0.5 * std::f64::consts::FRAC_2_SQRT_PI / tail
        };
        value.copysign(self)
    }
}

#[cfg(test)]
mod tests {
    use super::Real;

    /// The largest relative error of `ours` against `exact` on a grid.
    fn worst(from: f32, to: f32, ours: fn(f32) -> f32, exact: fn(f64) -> f64) -> f64 {
        (0..200_000)
            .map(|i| from + (to - from) * i as f32 / 200_000.0)
            .map(|x| {
                let e = exact(f64::from(x));
                (f64::from(ours(x)) - e).abs() / e.abs().max(1e-30)
            })
            .fold(0.0, f64::max)
    }

    #[test]
    fn exp_is_accurate_to_a_few_roundings() {
        assert!(worst(-87.0, 88.0, <f32 as Real>::exp, f64::exp) < 3e-7);
        assert_eq!(Real::exp(-200.0_f32), 0.0);
        assert_eq!(Real::exp(0.0_f32), 1.0);
        assert!(Real::exp(f32::NAN).is_nan());
    }

    #[test]
    fn ln_is_accurate_to_a_few_roundings() {
        assert!(worst(1.5, 1000.0, <f32 as Real>::ln, f64::ln) < 3e-7);
        assert!(worst(1e-6, 0.7, <f32 as Real>::ln, f64::ln) < 3e-7);
        assert!(worst(1e-6, 1.0, <f32 as Real>::ln_1p_unit, f64::ln_1p) < 3e-7);
    }

    #[test]
    fn softplus_keeps_small_values() {
        let exact = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
        assert!(worst(-60.0, 60.0, <f32 as Real>::softplus, exact) < 5e-7);
    }

    #[test]
    fn tanh_has_the_absolute_error_of_one_rounding() {
        for i in -1000..=1000 {
            let x = i as f32 / 100.0;
            assert!((f64::from(Real::tanh(x)) - f64::from(x).tanh()).abs() < 2e-7);
        }
    }

    #[test]
    fn erf_has_the_tabulated_values() {
        // From tables to 16 digits: erf(0.5), erf(1), erf(2), erf(3), erf(3.5).
        let table = [
            (0.5, 0.520_499_877_813_046_5),
            (1.0, 0.842_700_792_949_714_9),
            (2.0, 0.995_322_265_018_952_7),
            (3.0, 0.999_977_909_503_001_4),
            (3.5, 0.999_999_256_901_627_7),
        ];
        for (x, expected) in table {
            assert!((Real::erf(x) - expected).abs() < 1e-15, "{x}");
            assert!((Real::erf(-x) + expected).abs() < 1e-15, "{x}");
        }
        assert!(Real::erf(f64::NAN).is_nan() && Real::erf(f32::NAN).is_nan());
        for i in -6000..=6000 {
            let x = i as f32 / 1000.0;
            let error = (f64::from(Real::erf(x)) - Real::erf(f64::from(x))).abs();
            assert!(error < 5e-7, "{x}: {error:e}");
        }
    }
}
