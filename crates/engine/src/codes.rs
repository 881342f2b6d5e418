//! The numbers behind the codes of quantised weights, as bitsandbytes defines them.

/// The sixteen numbers of the 4-bit normal float.
pub const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The 256 numbers of a scale's code: a sign, a decimal exponent of as many bits as lead with
/// zeroes, and an even grid of means between 0.1 and 1 in the bits that are left.
pub fn scale_values() -> [f32; 256] {
    const EXPONENTS: u32 = 7;
    let mut values = vec![0.0, 1.0];
    for exponent in 0..EXPONENTS {
        let steps = 1 << exponent;
        let power = 10_f64.powi(exponent as i32 - (EXPONENTS as i32 - 1));
        let edge = |step: usize| 0.1 + 0.9 * step as f64 / f64::from(steps);
        for step in 0..steps as usize {
            let mean = (edge(step) + edge(step + 1)) / 2.0;
            values.extend([power * mean, -power * mean]);
        }
    }
    values.sort_by(f64::total_cmp);
    let mut list = [0.0; 256];
    for (slot, value) in list.iter_mut().zip(values) {
        *slot = value as f32;
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_codes_are_ordered_and_all_there() {
        let values = scale_values();
        assert!(values.windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!(values[255], 1.0);
        assert!(values.contains(&0.0));
    }
}
