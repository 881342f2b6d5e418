//! The frequencies of rotary positions, with the scalings that stretch them to longer sequences.
//!
//! Computed in double precision. transformers computes them in single precision, which turns a
//! position of 10⁵ by up to a hundredth of a radian more or less.

use std::f64::consts::TAU;
use std::sync::Arc;

use cinch_architecture::{RotaryPositions, RotaryScaling};
use cinch_graph::op::Rotary;

/// What each pair of a head turns by from one position to the next, and the factor of its cosines
/// and sines.
pub fn frequencies(rotary: &RotaryPositions, head_dim: usize, seq_len: usize) -> (Arc<[f64]>, f64) {
    let plain = Rotary::frequencies(rotary.base, head_dim);
    match rotary.scaling {
        RotaryScaling::None | RotaryScaling::Other(_) => (plain, 1.0),
        RotaryScaling::Linear { factor } => (plain.iter().map(|f| f / factor).collect(), 1.0),
        RotaryScaling::Dynamic { factor, original } => {
            let dim = head_dim as f64;
            let stretch = factor * (seq_len as f64).max(original) / original - (factor - 1.0);
            let base = rotary.base * stretch.powf(dim / (dim - 2.0));
            (Rotary::frequencies(base, head_dim), 1.0)
        }
        RotaryScaling::Llama3 {
            factor,
            low,
            high,
            original,
        } => {
            let scaled = |&frequency: &f64| {
                // Turns over the original length: many stay as they are, few are stretched.
                let turns = original * frequency / TAU;
                let smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                frequency * ((1.0 - smooth) / factor + smooth)
            };
            (plain.iter().map(scaled).collect(), 1.0)
        }
        RotaryScaling::Yarn {
            factor,
            original,
            fast,
            slow,
            attention,
            truncate,
        } => {
            let dim = head_dim as f64;
            // The pair that turns so often over the original length.
            let pair =
                |turns: f64| dim * (original / (turns * TAU)).ln() / (2.0 * rotary.base.ln());
            let (mut first, mut last) = (pair(fast), pair(slow));
            if truncate {
                (first, last) = (first.floor(), last.ceil());
            }
            let (first, mut last) = (first.max(0.0), last.min(dim - 1.0));
            if first == last {
                // transformers' way around a division by zero.
                last += 0.001;
            }
            let scaled = |(i, &frequency): (usize, &f64)| {
                let stretched = ((i as f64 - first) / (last - first)).clamp(0.0, 1.0);
                frequency * (stretched / factor + 1.0 - stretched)
            };
            let frequencies = plain.iter().enumerate().map(scaled).collect();
            (frequencies, attention)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(scaling: RotaryScaling, seq_len: usize) -> (Vec<f64>, f64) {
        let base = 10_000.0;
        let (frequencies, scale) = frequencies(&RotaryPositions { base, scaling }, 8, seq_len);
        (frequencies.to_vec(), scale)
    }

    #[test]
    fn a_dynamic_scaling_does_nothing_within_the_original_length() {
        let dynamic = || RotaryScaling::Dynamic {
            factor: 2.0,
            original: 64.0,
        };
        assert_eq!(of(dynamic(), 64), of(RotaryScaling::None, 64));
        assert!(of(dynamic(), 128).0[3] < of(RotaryScaling::None, 128).0[3]);
    }

    #[test]
    fn llama3_keeps_fast_turns_and_stretches_slow_ones() {
        let scaling = RotaryScaling::Llama3 {
            factor: 8.0,
            low: 1.0,
            high: 4.0,
            original: 64.0,
        };
        let (plain, _) = of(RotaryScaling::None, 64);
        let (scaled, _) = of(scaling, 64);
        assert_eq!(scaled[0], plain[0]);
        assert_eq!(scaled[3], plain[3] / 8.0);
    }
}
