//! Initial weights: each element is a function of the seed, the parameter's name and the
//! element's number, so that they do not depend on order or threads.

use cinch_graph::Init;
use rayon::prelude::*;

/// Elements filled by one task.
const TASK: usize = 1 << 16;

/// Fills a parameter whose last dimension is `width`, or a part of it that begins with the element
/// `first`.
pub(crate) fn initialize(
    values: &mut [f32],
    first: usize,
    width: usize,
    init: Init,
    name: &str,
    seed: u64,
) {
    let key = mix(seed ^ hash(name));
    values
        .par_chunks_mut(TASK)
        .enumerate()
        .for_each(|(task, chunk)| {
            for (i, value) in chunk.iter_mut().enumerate() {
                *value = element(init, key, first + task * TASK + i, width) as f32;
            }
        });
}

fn element(init: Init, key: u64, index: usize, width: usize) -> f64 {
    match init {
        Init::Zeros => 0.0,
        Init::Ones => 1.0,
        Init::Constant { value } => value,
        Init::Normal { std } => std * normal(key, index as u64),
        Init::Uniform { bound } => bound * (2.0 * uniform(key, index as u64) - 1.0),
        Init::LogRange => ((index % width.max(1) + 1) as f64).ln(),
        Init::InverseSoftplus { low, high } => {
            let spread = uniform(key, index as u64);
            let step = (low.ln() + spread * (high.ln() - low.ln())).exp();
            // softplus(x) = step  ⇔  x = step + ln(1 − e^{−step})
            step + (-(-step).exp_m1()).ln()
        }
    }
}

/// A standard normal number by Box and Muller's method.
fn normal(key: u64, index: u64) -> f64 {
    let radius = (-2.0 * (1.0 - uniform(key, 2 * index)).ln()).sqrt();
    radius * (2.0 * std::f64::consts::PI * uniform(key, 2 * index + 1)).cos()
}

/// In [0, 1), with 53 random bits.
fn uniform(key: u64, counter: u64) -> f64 {
    let bits = mix(key.wrapping_add(counter.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

/// A bijection of 64-bit words that scatters them (the finaliser of SplitMix64).
pub(crate) fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// FNV-1a.
fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(init: Init, name: &str) -> Vec<f32> {
        let mut values = vec![0.0; 200_000];
        initialize(&mut values, 0, 16, init, name, 7);
        values
    }

    #[test]
    fn normal_weights_have_the_right_moments() {
        let values = filled(Init::Normal { std: 0.02 }, "w");
        let n = values.len() as f64;
        let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
        let square = values.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / n;
        assert!(mean.abs() < 2e-4, "{mean}");
        assert!((square.sqrt() / 0.02 - 1.0).abs() < 0.01, "{square}");
        assert_ne!(values, filled(Init::Normal { std: 0.02 }, "v"));
        assert_eq!(values, filled(Init::Normal { std: 0.02 }, "w"));
    }

    #[test]
    fn time_steps_come_back_through_softplus() {
        let init = Init::InverseSoftplus {
            low: 0.001,
            high: 0.1,
        };
        for x in filled(init, "dt") {
            let step = f64::from(x).exp().ln_1p();
            assert!((0.0009..0.1001).contains(&step), "{step}");
        }
    }

    #[test]
    fn the_log_range_repeats_along_the_last_dimension() {
        let values = filled(Init::LogRange, "a");
        assert_eq!(values[0], 0.0);
        assert_eq!(values[16 + 4], 5_f32.ln());
    }
}
