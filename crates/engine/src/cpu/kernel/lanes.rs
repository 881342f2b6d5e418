//! Sixteen numbers that move together: one 512-bit register of `f32`, and the unit in which
//! kernels sum. The compiler may not reorder floating-point additions, so a sum in a single
//! variable stays scalar; sums here run in lanes whose number and final order are fixed,
//! which makes them vector code and keeps their bits the same on every machine.

use std::ops::{Deref, DerefMut};

use crate::cpu::real::Real;

/// Lanes of one register.
pub const LANES: usize = 16;

/// One register of numbers. Aligned so that, in memory, `f32` lanes are one cache line: a
/// register across two lines is slow to store and slower to load again.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub struct Lanes<F>(pub [F; LANES]);

impl<F: Real> Lanes<F> {
    pub const ZERO: Self = Self([F::ZERO; LANES]);
}

impl<F> Deref for Lanes<F> {
    type Target = [F; LANES];

    #[inline(always)]
    fn deref(&self) -> &[F; LANES] {
        &self.0
    }
}

impl<F> DerefMut for Lanes<F> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [F; LANES] {
        &mut self.0
    }
}

/// Lanes of a sum over a slice: two registers, to hide part of an addition's latency.
const SUM_LANES: usize = 2 * LANES;

/// The first `width` numbers of `source`; zero in the lanes above.
#[inline(always)]
pub fn load<F: Real>(source: &[F], width: usize) -> Lanes<F> {
    match source.first_chunk() {
        Some(full) if width == LANES => Lanes(*full),
        _ => load_ragged(&source[..width]),
    }
}

/// Writes as many lanes as `target` has elements, at most all.
#[inline(always)]
pub fn store<F: Real>(lanes: &Lanes<F>, target: &mut [F]) {
    match target.first_chunk_mut() {
        Some(full) => *full = lanes.0,
        None => store_ragged(lanes, target),
    }
}

// The ragged cases are functions of their own: merged with the full ones, both become a
// call of `memcpy` with a length known only at run time.
#[cold]
#[inline(never)]
fn load_ragged<F: Real>(source: &[F]) -> Lanes<F> {
    let mut lanes = Lanes::ZERO;
    for (lane, value) in lanes.iter_mut().zip(source) {
        *lane = *value;
    }
    lanes
}

#[cold]
#[inline(never)]
fn store_ragged<F: Real>(lanes: &Lanes<F>, target: &mut [F]) {
    for (value, lane) in target.iter_mut().zip(&lanes.0) {
        *value = *lane;
    }
}

/// The sum of the lanes, by halves.
#[inline(always)]
pub fn total<F: Real>(lanes: &Lanes<F>) -> F {
    let mut by_eight = [F::ZERO; 8];
    for i in 0..8 {
        by_eight[i] = lanes[i] + lanes[i + 8];
    }
    let mut by_four = [F::ZERO; 4];
    for i in 0..4 {
        by_four[i] = by_eight[i] + by_eight[i + 4];
    }
    (by_four[0] + by_four[2]) + (by_four[1] + by_four[3])
}

/// Adds the [`total`] of each register to the number beside it.
///
/// Not inlined: with a count known at compile time the array in the middle would dissolve
/// into scalars, and with it the vector code.
#[inline(never)]
pub fn add_totals<F: Real>(registers: &[Lanes<F>], targets: &mut [F]) {
    for (registers, targets) in registers.chunks(16).zip(targets.chunks_mut(16)) {
        let mut by_four = [[F::ZERO; 4]; 16];
        for (sums, lanes) in by_four.iter_mut().zip(registers) {
            for i in 0..4 {
                sums[i] = (lanes[i] + lanes[i + 8]) + (lanes[i + 4] + lanes[i + 12]);
            }
        }
        for (target, sums) in targets.iter_mut().zip(&by_four) {
            *target += (sums[0] + sums[2]) + (sums[1] + sums[3]);
        }
    }
}

/// Asks for the cache line of `data[index]`, which need not exist. Rows a power of two apart
/// defeat the hardware's own prefetching.
#[inline(always)]
pub fn prefetch<F>(data: &[F], index: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let address = data.as_ptr().wrapping_add(index);
        // SAFETY: a hint; it reads nothing the program can see and does not fault.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (data, index);
}

/// `Σ term(xᵢ)`.
#[inline(always)]
pub fn sum<F: Real>(x: &[F], term: impl Fn(F) -> F) -> F {
    let mut lanes = [F::ZERO; SUM_LANES];
    let blocks = x.chunks_exact(SUM_LANES);
    let rest = blocks.remainder();
    for block in blocks {
        for i in 0..SUM_LANES {
            lanes[i] += term(block[i]);
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane += term(*value);
    }
    fold(&lanes)
}

/// `Σ xᵢ·yᵢ` over as many elements as both have.
#[inline(always)]
pub fn dot<F: Real>(x: &[F], y: &[F]) -> F {
    let len = x.len().min(y.len());
    let (x, y) = (&x[..len], &y[..len]);
    let mut lanes = [F::ZERO; SUM_LANES];
    let whole = len / SUM_LANES * SUM_LANES;
    for start in (0..whole).step_by(SUM_LANES) {
        let x = &x[start..start + SUM_LANES];
        let y = &y[start..start + SUM_LANES];
        for i in 0..SUM_LANES {
            lanes[i] = x[i].fma(y[i], lanes[i]);
        }
    }
    for i in whole..len {
        lanes[i - whole] = x[i].fma(y[i], lanes[i - whole]);
    }
    fold(&lanes)
}

/// `Σ (a(xᵢ, yᵢ, zᵢ), b(xᵢ, yᵢ, zᵢ))`: two sums in one pass over three slices of one length.
#[inline(always)]
pub fn two_sums<F: Real>(x: &[F], y: &[F], z: &[F], terms: impl Fn(F, F, F) -> (F, F)) -> (F, F) {
    let (y, z) = (&y[..x.len()], &z[..x.len()]);
    let mut first = [F::ZERO; SUM_LANES];
    let mut second = [F::ZERO; SUM_LANES];
    let whole = x.len() / SUM_LANES * SUM_LANES;
    for start in (0..whole).step_by(SUM_LANES) {
        let x = &x[start..start + SUM_LANES];
        let y = &y[start..start + SUM_LANES];
        let z = &z[start..start + SUM_LANES];
        for i in 0..SUM_LANES {
            let (a, b) = terms(x[i], y[i], z[i]);
            first[i] += a;
            second[i] += b;
        }
    }
    for i in whole..x.len() {
        let (a, b) = terms(x[i], y[i], z[i]);
        first[i - whole] += a;
        second[i - whole] += b;
    }
    (fold(&first), fold(&second))
}

/// Both registers of a sum into one number.
#[inline(always)]
fn fold<F: Real>(lanes: &[F; SUM_LANES]) -> F {
    let mut register = Lanes::ZERO;
    for i in 0..LANES {
        register[i] = lanes[i] + lanes[i + LANES];
    }
    total(&register)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_every_element_once_at_any_length() {
        for len in [0, 1, 15, 16, 31, 32, 33, 100] {
            let x: Vec<f64> = (1..=len).map(|i| i as f64).collect();
            let n = len as f64;
            let squares = n * (n + 1.0) * (2.0 * n + 1.0) / 6.0;
            assert_eq!(sum(&x, |v| v), n * (n + 1.0) / 2.0);
            let both = two_sums(&x, &x, &x, |a, b, c| (a * b, c));
            assert_eq!(both, (squares, n * (n + 1.0) / 2.0));
            assert_eq!(dot(&x, &x), squares);
        }
    }

    #[test]
    fn loads_and_stores_a_ragged_register() {
        let source: Vec<f32> = (0..16).map(|i| i as f32 + 1.0).collect();
        let lanes = load(&source, 5);
        assert_eq!(total(&lanes), 15.0);
        assert_eq!(total(&load(&source, 16)), 136.0);
        let mut target = [9.0; 3];
        store(&lanes, &mut target);
        assert_eq!(target, [1.0, 2.0, 3.0]);
    }

    #[test]
    fn totals_together_are_the_totals_one_by_one() {
        for count in [0, 1, 5, 16, 37] {
            let registers: Vec<Lanes<f32>> = (0..count * LANES)
                .step_by(LANES)
                .map(|i| Lanes(std::array::from_fn(|lane| ((i + lane) as f32 * 0.7).sin())))
                .collect();
            let mut targets = vec![2.0; count];
            add_totals(&registers, &mut targets);
            let expected: Vec<f32> = registers.iter().map(|r| 2.0 + total(r)).collect();
            assert_eq!(targets, expected);
        }
    }
}
