//! The 8-bit dynamic map: 256 values between -1 and 1 that are denser around zero.
//!
//! Seven decades from 1e-6 to 1; in decade `i` there are `2^i` values on each side, the middles of
//! as many equal steps between a tenth of the decade and the decade. With 0 and 1 these are 256.

/// Decades of the map.
const DECADES: u32 = 7;

/// The map that bitsandbytes calls `create_dynamic_map()`, in rising order.
pub const DYNAMIC_MAP: [f32; 256] = dynamic_map();

const fn dynamic_map() -> [f32; 256] {
    // Around zero at 127: positive values from 128 upward, and 1 at the end.
    const ZERO: usize = 127;
    let mut map = [0.0; 256];
    let mut place = 1;
    let mut decade = 0;
    while decade < DECADES {
        let steps = 1 << decade;
        let mut step = 0;
        while step < steps {
            let middle = (boundary(step, steps) + boundary(step + 1, steps)) / 2.0;
            let value = power_of_ten(DECADES - 1 - decade) * middle;
            map[ZERO + place] = value;
            map[ZERO - place] = -value;
            place += 1;
            step += 1;
        }
        decade += 1;
    }
    map[255] = 1.0;
    map
}

/// 10 to the power of `-exponent`, the nearest f32.
const fn power_of_ten(exponent: u32) -> f32 {
    (1.0 / 10_u64.pow(exponent) as f64) as f32
}

/// The boundary `number` of `steps` steps from 0.1 to 1: counted from the nearer end in multiples
/// of an f32 step and rounded once, as `torch.linspace` does, so that the last bits agree.
const fn boundary(number: u32, steps: u32) -> f32 {
    let step = ((1.0 - 0.1_f32) / steps as f32) as f64;
    // Products of so few bits are exact in f64.
    if number < steps.div_ceil(2) {
        (0.1_f32 as f64 + step * number as f64) as f32
    } else {
        (1.0 - step * (steps - number) as f64) as f32
    }
}

/// The index of the value of a rising table that is nearest; a middle goes to the even index, as
/// the binary search of bitsandbytes' CUDA kernel has it.
pub(super) fn nearest(map: &[f32; 256], value: f32) -> u8 {
    let above = map.partition_point(|&entry| entry < value).min(255);
    let below = above.saturating_sub(1);
    let middle = (map[below] + map[above]) * 0.5;
    let index = if value > middle || value == middle && above % 2 == 0 {
        above
    } else {
        below
    };
    index as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_map_rises_from_nearly_minus_one_to_one() {
        assert!(DYNAMIC_MAP.windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!(DYNAMIC_MAP[127], 0.0);
        assert_eq!(DYNAMIC_MAP[255], 1.0);
    }

    #[test]
    fn the_nearest_value_is_found() {
        for (index, &value) in DYNAMIC_MAP.iter().enumerate() {
            assert_eq!(usize::from(nearest(&DYNAMIC_MAP, value)), index);
        }
        for index in 0..255 {
            let (low, high) = (DYNAMIC_MAP[index], DYNAMIC_MAP[index + 1]);
            let middle = (low + high) * 0.5;
            let even = index + index % 2;
            let found = |value| usize::from(nearest(&DYNAMIC_MAP, value));
            assert_eq!(found(middle), even);
            assert_eq!(found(middle.next_down()), index);
            assert_eq!(found(middle.next_up()), index + 1);
        }
        assert_eq!(nearest(&DYNAMIC_MAP, -1.0), 0);
        assert_eq!(nearest(&DYNAMIC_MAP, 2.0), 255);
    }
}
