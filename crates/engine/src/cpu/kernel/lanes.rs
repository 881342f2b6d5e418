//! Sixteen numbers that move together: one 512-bit register of `f32`, and the unit in which
//! kernels sum. The compiler may not reorder floating-point additions, so a sum in a single
//! variable stays scalar; sums here run in lanes whose number and final order are fixed,
//! which makes them vector code and keeps their bits the same on every machine.

use crate::cpu::real::Real;

/// Lanes of one register.
pub const LANES: usize = 16;

/// One register of numbers.
pub type Lanes<F> = [F; LANES];

/// Lanes of a sum over a slice: two registers, to hide part of an addition's latency.
const SUM_LANES: usize = 2 * LANES;

/// The first `width` numbers of `source`; zero in the lanes above.
#[inline(always)]
pub fn load<F: Real>(source: &[F], width: usize) -> Lanes<F> {
    match source.first_chunk() {
        Some(full) if width == LANES => *full,
        _ => load_ragged(&source[..width]),
    }
}

/// Writes as many lanes as `target` has elements, at most all.
#[inline(always)]
pub fn store<F: Real>(lanes: &Lanes<F>, target: &mut [F]) {
    match target.first_chunk_mut() {
        Some(full) => *full = *lanes,
        None => store_ragged(lanes, target),
    }
}

// The ragged cases are functions of their own: merged with the full ones, both become a
// call of `memcpy` with a length known only at run time.
#[cold]
#[inline(never)]
fn load_ragged<F: Real>(source: &[F]) -> Lanes<F> {
    let mut lanes = [F::ZERO; LANES];
    for (lane, value) in lanes.iter_mut().zip(source) {
        *lane = *value;
    }
    lanes
}

#[cold]
#[inline(never)]
fn store_ragged<F: Real>(lanes: &Lanes<F>, target: &mut [F]) {
    for (value, lane) in target.iter_mut().zip(lanes) {
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
    let mut register = [F::ZERO; LANES];
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
}
