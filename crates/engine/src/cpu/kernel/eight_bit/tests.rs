//! The codes over their whole range, the kernel against one that searches a table, and how far a
//! step can be off.

use super::*;
use crate::cpu::kernel::check::{random, single, with_threads};
use crate::cpu::kernel::optimizer;

fn settings(step: i32) -> AdamW {
    AdamW {
        beta1: 0.9,
        beta2: 0.999,
        epsilon: 1e-8,
        weight_decay: 0.1,
        learning_rate: 1e-3,
        bias_correction1: 1.0 - 0.9_f64.powi(step),
        bias_correction2: 1.0 - 0.999_f64.powi(step),
        gradient_scale: 1.0,
    }
}

fn round_trip(code: Code, values: &[f32]) -> Vec<f32> {
    let mut codes = vec![0; values.len()];
    let mut scales = vec![0.0; values.len().div_ceil(BLOCK)];
    code.encode(values, &mut codes, &mut scales);
    let mut decoded = vec![0.0; values.len()];
    code.decode(&codes, &scales, &mut decoded);
    decoded
}

/// `scale`, then a number so many decades below it.
fn below(scale: f32, decades: f32) -> [f32; 2] {
    [scale, scale * 10_f32.powf(-decades)]
}

#[test]
fn a_second_moment_is_off_by_a_sixteenth_at_most() {
    for scale in [3.7e-12_f32, 1.0, 2.5e9] {
        for i in 0..4000 {
            let values = below(scale, i as f32 * 0.004);
            let [largest, value] = values;
            let decoded = round_trip(Code::Unsigned, &values);
            assert_eq!(decoded[0], largest);
            let end = 1.25 * largest / 2_f32.powi(32);
            if value >= end {
                let error = (decoded[1] - value).abs() / value;
                assert!(error <= 0.062_501, "{value} of {largest}: {error}");
            } else {
                // Raised to the end of the range, never to zero.
                assert_eq!(decoded[1], end, "{value} of {largest}");
            }
        }
    }
}

/// `|q/127 − √r| ≤ 1/254`, so `|(q/127)² − r| ≤ √r/127 + 1/254²`.
#[test]
fn a_first_moment_is_off_by_half_a_step_of_the_square_law() {
    for scale in [3.7e-12_f32, 1.0, 2.5e9] {
        for i in 0..4000 {
            let values = below(scale, i as f32 * 0.002);
            let share = f64::from(values[1]) / f64::from(values[0]);
            let bound = share.sqrt() / 127.0 + 1.0 / (254.0 * 254.0);
            for sign in [1.0, -1.0] {
                let decoded = round_trip(Code::Signed, &[values[0], sign * values[1]]);
                let ratio = f64::from(sign * decoded[1]) / f64::from(values[0]);
                let error = (ratio - share).abs();
                assert!(error <= bound * (1.0 + 1e-5), "{share}: {ratio}");
                assert!((f64::from(decoded[0] / scale) - 1.0).abs() < 1e-6);
            }
        }
    }
}

#[test]
fn zero_stays_zero_and_so_do_blocks_of_it() {
    for code in [Code::Signed, Code::Unsigned] {
        assert_eq!(round_trip(code, &[0.0; 300]), [0.0; 300]);
        let mixed = round_trip(code, &[0.0, 1.0, 0.0]);
        assert_eq!((mixed[0], mixed[2]), (0.0, 0.0));
        // What a new session holds.
        let mut values = [7.0; 3];
        code.decode(&[0; 3], &[0.0], &mut values);
        assert_eq!(values, [0.0; 3]);
    }
}

/// Encoding what was decoded changes nothing: a state that is saved in full and loaded again is
/// the same.
#[test]
fn every_code_comes_back() {
    for (code, least) in [(Code::Signed, -127_i32), (Code::Unsigned, 0)] {
        // The first one fixes the scale.
        let all = (least..=least + 254 + i32::from(code == Code::Unsigned)).map(|q| q as u8);
        let largest = if code == Code::Signed { 127 } else { 255 };
        let codes: Vec<u8> = std::iter::once(largest).chain(all).collect();
        for scale in [3.7e-12_f32, 1.0, 0.3] {
            for block in codes.chunks(BLOCK - 1) {
                let codes: Vec<u8> = std::iter::once(largest).chain(block.to_vec()).collect();
                let mut values = vec![0.0; codes.len()];
                code.decode(&codes, &[scale], &mut values);
                let (mut again, mut scales) = (vec![0; codes.len()], [0.0]);
                code.encode(&values, &mut again, &mut scales);
                assert_eq!(again, codes, "{code:?}");
                assert!((scales[0] / scale - 1.0).abs() < 1e-6);
            }
        }
    }
}

/// The code whose value is nearest, by looking at all of them.
fn nearest(value: f64, scale: f64, code: Code) -> Vec<u8> {
    let decoded = |q: u8| match code {
        Code::Signed => {
            let q = f64::from(q.cast_signed()) / 127.0;
            (q != -128.0 / 127.0).then(|| q * q.abs() * scale)
        }
        Code::Unsigned if q == 0 => (value == 0.0).then_some(0.0),
        Code::Unsigned => {
            let (e, f) = ((i32::from(q) - 255).div_euclid(8), (u32::from(q) + 1) % 8);
            Some(2_f64.powi(e) * (1.0 + f64::from(f) / 8.0) * scale)
        }
    };
    // The first moment is rounded on the scale of its square roots.
    let on_scale = |x: f64| match code {
        Code::Signed => x.abs().sqrt().copysign(x),
        Code::Unsigned => x,
    };
    let distance = |q: &u8| {
        decoded(*q).map_or(f64::INFINITY, |x| {
            (on_scale(x) - on_scale(value)).abs() / on_scale(scale)
        })
    };
    let all: Vec<u8> = (0..=255).collect();
    let least = all.iter().map(distance).fold(f64::INFINITY, f64::min);
    // Ties, and what rounding of the arithmetic makes of them.
    all.into_iter()
        .filter(|q| distance(q) <= least + 1e-7 * on_scale(value.abs()) / on_scale(scale))
        .collect()
}

#[test]
fn the_kernel_is_adamw_between_decoding_and_encoding() {
    let len = 2 * BLOCK + 37;
    let blocks = len.div_ceil(BLOCK);
    let mut p = single(&random(len, 1));
    let (mut m, mut v) = (vec![0_u8; len], vec![0_u8; len]);
    let (mut ms, mut vs) = (vec![0.0; blocks], vec![0.0; blocks]);
    for step in 1..=5 {
        // Gradients over six decades within a block.
        let gradient: Vec<f32> = random(len, 10 + step as u64)
            .iter()
            .enumerate()
            .map(|(i, r)| (r * 10_f64.powf(-((i % 7) as f64))) as f32)
            .collect();
        let (mut rp, mut rm, mut rv) = (p.clone(), vec![0.0; len], vec![0.0; len]);
        Code::Signed.decode(&m, &ms, &mut rm);
        Code::Unsigned.decode(&v, &vs, &mut rv);
        optimizer::adamw(&mut rp, &gradient, &mut rm, &mut rv, &settings(step));
        let first = Moment {
            codes: &mut m,
            scales: &mut ms,
        };
        let second = Moment {
            codes: &mut v,
            scales: &mut vs,
        };
        adamw(&mut p, &gradient, first, second, &settings(step));
        assert_eq!(p, rp, "step {step}");
        for (code, exact, codes, scales) in
            [(Code::Signed, &rm, &m, &ms), (Code::Unsigned, &rv, &v, &vs)]
        {
            for (i, (&value, &q)) in exact.iter().zip(codes).enumerate() {
                let block = &exact[i / BLOCK * BLOCK..len.min((i / BLOCK + 1) * BLOCK)];
                let scale = block.iter().fold(0.0_f32, |a, x| a.max(x.abs()));
                assert_eq!(scales[i / BLOCK], scale);
                let allowed = nearest(f64::from(value), f64::from(scale), code);
                assert!(
                    allowed.contains(&q),
                    "{code:?} {value}/{scale}: {q} {allowed:?}"
                );
            }
        }
    }
}

/// Over many steps with gradients that differ by eight decades within a block, that stop, come
/// back and jump, no step is longer than Adam's can be with moments in full, where the worst is a
/// gradient after none: `lr·(1−β₁)/√(1−β₂)`.
#[test]
fn no_step_explodes() {
    let len = 4 * BLOCK;
    let start = vec![0.0_f32; len];
    let (mut p, mut q) = (start.clone(), start);
    let (mut m, mut v) = (vec![0_u8; len], vec![0_u8; len]);
    let (mut ms, mut vs) = (vec![0.0; 4], vec![0.0; 4]);
    let (mut fm, mut fv) = (vec![0.0; len], vec![0.0; len]);
    let (mut longest, mut longest_full) = (0.0_f32, 0.0_f32);
    for step in 1..=600 {
        let settings = AdamW {
            weight_decay: 0.0,
            ..settings(step)
        };
        let silent = (200..300).contains(&step);
        let jump = if step % 97 == 0 { 100.0 } else { 1.0 };
        let gradient: Vec<f32> = random(len, step as u64)
            .iter()
            .enumerate()
            .map(|(i, r)| match i % 9 {
                _ if silent && i % 2 == 0 => 0.0,
                decade => (jump * r * 10_f64.powi(-(decade as i32))) as f32,
            })
            .collect();
        let (before, before_full) = (p.clone(), q.clone());
        let first = Moment {
            codes: &mut m,
            scales: &mut ms,
        };
        let second = Moment {
            codes: &mut v,
            scales: &mut vs,
        };
        adamw(&mut p, &gradient, first, second, &settings);
        optimizer::adamw(&mut q, &gradient, &mut fm, &mut fv, &settings);
        let length = |now: &[f32], before: &[f32]| {
            let steps = now.iter().zip(before).map(|(a, b)| (a - b).abs());
            steps.fold(0.0, f32::max)
        };
        longest = longest.max(length(&p, &before));
        longest_full = longest_full.max(length(&q, &before_full));
    }
    let bound = 1e-3 * (0.1 / 0.001_f32.sqrt());
    assert!(longest_full > 0.5 * bound && longest_full <= bound);
    assert!(longest <= 1.05 * bound, "{longest} {bound}");
}

#[test]
fn threads_do_not_change_a_bit() {
    let len = 3 * TASK + 77;
    let gradient = single(&random(len, 1));
    let run = |threads| {
        with_threads(threads, || {
            let mut p = single(&random(len, 2));
            let (mut m, mut v) = (vec![0; len], vec![0; len]);
            let mut scales = [
                vec![0.0; len.div_ceil(BLOCK)],
                vec![0.0; len.div_ceil(BLOCK)],
            ];
            for step in 1..=3 {
                let [ms, vs] = &mut scales;
                let first = Moment {
                    codes: &mut m,
                    scales: ms,
                };
                let second = Moment {
                    codes: &mut v,
                    scales: vs,
                };
                adamw(&mut p, &gradient, first, second, &settings(step));
            }
            (p, m, v, scales)
        })
    };
    assert_eq!(run(1), run(2));
}
