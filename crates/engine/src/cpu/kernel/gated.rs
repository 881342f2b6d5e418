//! The gated activation f(gate)·up and its gradient.

use cinch_graph::op::ActivationKind;

use crate::cpu::parallel::{Shared, for_each};
use crate::cpu::real::Real;
use crate::cpu::simd::simd;

use super::activation::{
    PIECE, TASK, check_len, for_each_task, gelu, gelu_slope, gelu_tanh, gelu_tanh_slope, map_with,
    relu, silu, silu_slope,
};

/// `y = f(gate)·up`. One of the two may be absent: it is then what `y` holds.
///
/// # Panics
/// Where lengths differ or both are absent.
pub fn forward<F: Real>(kind: ActivationKind, gate: Option<&[F]>, up: Option<&[F]>, y: &mut [F]) {
    assert!(gate.is_some() || up.is_some(), "y holds one of the two");
    check_len("gate", gate, y);
    check_len("up", up, y);
    for_each_task(y, |start, y| {
        let part = start..start + y.len();
        forward_block(
            kind,
            gate.map(|gate| &gate[part.clone()]),
            up.map(|up| &up[part.clone()]),
            y,
        );
    });
}

/// `dgate = dy·up·f′(gate)`, `dup = dy·f(gate)` and, where it is asked for, `y = f(gate)·up`.
/// What is absent is in the outputs' memory: gate in `dgate`, up in `dup`, dy in `y` or, without
/// that, in the one of the two that holds nothing else, `dgate` first.
///
/// # Panics
/// Where lengths differ, or more is absent than the outputs hold.
pub fn backward<F: Real>(
    kind: ActivationKind,
    dy: Option<&[F]>,
    gate: Option<&[F]>,
    up: Option<&[F]>,
    dgate: &mut [F],
    dup: &mut [F],
    y: Option<&mut [F]>,
) {
    assert!(
        dy.is_some() || gate.is_some() || up.is_some() || y.is_some(),
        "two gradients hold at most two of three"
    );
    for (name, given) in [("dy", dy), ("gate", gate), ("up", up)] {
        check_len(name, given, dgate);
    }
    assert_eq!(dup.len(), dgate.len(), "dup");
    check_len("y", y.as_deref(), dgate);
    let (dgate, dup, y) = (Shared::new(dgate), Shared::new(dup), y.map(Shared::new));
    for_each(dgate.len().div_ceil(TASK), |task| {
        let (start, len) = (task * TASK, TASK.min(dgate.len() - task * TASK));
        // SAFETY: each task takes its own block.
        let (dgate, dup) = unsafe { (dgate.part(start, len), dup.part(start, len)) };
        // SAFETY: as above.
        let y = y.map(|y| unsafe { y.part(start, len) });
        let [dy, gate, up] = [dy, gate, up].map(|x| x.map(|x| &x[start..start + len]));
        backward_block(kind, [dy, gate, up], dgate, dup, y);
    });
}

simd! {
    fn forward_block<F: Real>(kind: ActivationKind, gate: Option<&[F]>, up: Option<&[F]>, y: &mut [F]) {
        match kind {
            ActivationKind::GeluTanh => multiply(gate, up, y, gelu_tanh),
            ActivationKind::Gelu => multiply(gate, up, y, gelu),
            ActivationKind::Silu => multiply(gate, up, y, silu),
            ActivationKind::Relu => multiply(gate, up, y, relu),
        }
    }
}

#[inline(always)]
fn multiply<F: Real>(gate: Option<&[F]>, up: Option<&[F]>, y: &mut [F], f: impl Fn(F) -> F) {
    match (gate, up) {
        (gate, Some(up)) => map_with(gate, up, y, |gate, up| f(gate) * up),
        (Some(gate), None) => map_with(None, gate, y, |up, gate| f(gate) * up),
        (None, None) => {}
    }
}

simd! {
    fn backward_block<F: Real>(
        kind: ActivationKind,
        inputs: [Option<&[F]>; 3],
        dgate: &mut [F],
        dup: &mut [F],
        y: Option<&mut [F]>,
    ) {
        match kind {
            ActivationKind::GeluTanh => slopes(inputs, dgate, dup, y, gelu_tanh, gelu_tanh_slope),
            ActivationKind::Gelu => slopes(inputs, dgate, dup, y, gelu, gelu_slope),
            ActivationKind::Silu => slopes(inputs, dgate, dup, y, silu, silu_slope),
            ActivationKind::Relu => slopes(inputs, dgate, dup, y, relu, |x| {
                if x > F::ZERO { F::ONE } else { F::ZERO }
            }),
        }
    }
}

#[inline(always)]
fn slopes<F: Real>(
    inputs: [Option<&[F]>; 3],
    dgate: &mut [F],
    dup: &mut [F],
    mut y: Option<&mut [F]>,
    f: impl Fn(F) -> F,
    slope: impl Fn(F) -> F,
) {
    let mut pieces = [[F::ZERO; PIECE]; 3];
    let starts = (0..dgate.len()).step_by(PIECE);
    for (start, (dgate, dup)) in starts.zip(dgate.chunks_mut(PIECE).zip(dup.chunks_mut(PIECE))) {
        let len = dgate.len();
        let [dy, gate, up] = inputs.map(|x| x.map(|x| &x[start..start + len]));
        let y = y.as_deref_mut().map(|y| &mut y[start..start + len]);
        let [d, g, u] = &mut pieces;
        let free = match (&y, gate) {
            (Some(y), _) => &**y,
            (None, Some(_)) => &*dgate,
            (None, None) => &*dup,
        };
        d[..len].copy_from_slice(dy.unwrap_or(free));
        g[..len].copy_from_slice(gate.unwrap_or(dgate));
        u[..len].copy_from_slice(up.unwrap_or(dup));
        match y {
            None => {
                for i in 0..len {
                    dgate[i] = d[i] * u[i] * slope(g[i]);
                    dup[i] = d[i] * f(g[i]);
                }
            }
            Some(y) => {
                for i in 0..len {
                    let active = f(g[i]);
                    dgate[i] = d[i] * u[i] * slope(g[i]);
                    dup[i] = d[i] * active;
                    y[i] = active * u[i];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::kernel::check::*;

    const KINDS: [ActivationKind; 4] = [
        ActivationKind::GeluTanh,
        ActivationKind::Gelu,
        ActivationKind::Silu,
        ActivationKind::Relu,
    ];

    fn gates(len: usize) -> Vec<f64> {
        random(len, 1).iter().map(|v| v * 6.0).collect()
    }

    /// The definitions, as the activations' own tests have them.
    fn reference(kind: ActivationKind, x: f64) -> f64 {
        match kind {
            ActivationKind::GeluTanh => {
                let k = (2.0 / std::f64::consts::PI).sqrt();
                0.5 * x * (1.0 + (k * (x + 0.044715 * x.powi(3))).tanh())
            }
            ActivationKind::Gelu => 0.5 * x * (1.0 + Real::erf(x / std::f64::consts::SQRT_2)),
            ActivationKind::Silu => x / (1.0 + (-x).exp()),
            ActivationKind::Relu => x.max(0.0),
        }
    }

    #[test]
    fn forward_is_the_definition_in_place_or_not() {
        let (gate, up) = (gates(1037), random(1037, 2));
        for kind in KINDS {
            let products = gate.iter().zip(&up);
            let expected: Vec<f64> = products.map(|(g, u)| reference(kind, *g) * u).collect();
            let mut y = vec![7.0; gate.len()];
            forward(kind, Some(&gate), Some(&up), &mut y);
            assert_close("y", &y, &expected, 1e-12);
            let mut over_gate = gate.clone();
            forward(kind, None, Some(&up), &mut over_gate);
            assert_eq!(over_gate, y);
            let mut over_up = up.clone();
            forward(kind, Some(&gate), None, &mut over_up);
            assert_eq!(over_up, y);
            let mut y = single(&gate);
            forward(kind, None, Some(&single(&up)), &mut y);
            assert_single_close("y in f32", &y, &expected, 1e-6);
        }
    }

    #[test]
    fn gradients_are_finite_differences() {
        let (gate, up, dy) = (gates(237), random(237, 2), random(237, 3));
        for kind in KINDS {
            let (mut dgate, mut dup) = (vec![7.0; 237], vec![7.0; 237]);
            backward(
                kind,
                Some(&dy),
                Some(&gate),
                Some(&up),
                &mut dgate,
                &mut dup,
                None,
            );
            let loss = |gate: &[f64], up: &[f64]| {
                let mut y = vec![0.0; gate.len()];
                forward(kind, Some(gate), Some(up), &mut y);
                inner_product(&y, &dy)
            };
            assert_gradient("gate", &gate, &dgate, |gate| loss(gate, &up));
            assert_gradient("up", &up, &dup, |up| loss(&gate, up));
            let (mut dgate32, mut dup32) = (single(&gate), single(&up));
            backward(
                kind,
                Some(&single(&dy)),
                None,
                None,
                &mut dgate32,
                &mut dup32,
                None,
            );
            assert_single_close("dgate in f32", &dgate32, &dgate, 2e-6);
            assert_single_close("dup in f32", &dup32, &dup, 2e-6);
        }
    }

    /// Each way in which a plan may put the gradients over the inputs.
    #[test]
    fn gradients_are_the_same_over_any_input() {
        let (gate, up, dy) = (gates(300), random(300, 2), random(300, 3));
        let nothing = vec![7.0; 300];
        let run = |held: [&[f64]; 2], absent: [bool; 3]| {
            let (mut dgate, mut dup) = (held[0].to_vec(), held[1].to_vec());
            let given = |x, absent: bool| (!absent).then_some(x);
            let [no_dy, no_gate, no_up] = absent;
            let (dy, gate, up) = (
                given(&dy[..], no_dy),
                given(&gate, no_gate),
                given(&up, no_up),
            );
            let (dgate_at, dup_at) = (&mut dgate[..], &mut dup[..]);
            backward(ActivationKind::Silu, dy, gate, up, dgate_at, dup_at, None);
            (dgate, dup)
        };
        let expected = run([&nothing, &nothing], [false, false, false]);
        for (held, absent) in [
            ([&gate, &up], [false, true, true]),
            ([&gate, &nothing], [false, true, false]),
            ([&nothing, &up], [false, false, true]),
            ([&dy, &nothing], [true, false, false]),
            ([&dy, &up], [true, false, true]),
            ([&gate, &dy], [true, true, false]),
        ] {
            assert_eq!(run(held.map(|x| &x[..]), absent), expected, "{absent:?}");
        }
    }

    /// Where it is written besides, over dy or not.
    #[test]
    fn the_value_is_that_of_the_forward() {
        let len = TASK + 301;
        let (gate, up, dy) = (gates(len), random(len, 2), random(len, 3));
        let nothing = vec![7.0; len];
        for kind in KINDS {
            let mut value = nothing.clone();
            forward(kind, Some(&gate), Some(&up), &mut value);
            let (mut dgate, mut dup) = (gate.clone(), up.clone());
            backward(kind, Some(&dy), None, None, &mut dgate, &mut dup, None);
            for in_place in [true, false] {
                let mut y = if in_place {
                    dy.clone()
                } else {
                    nothing.clone()
                };
                let (mut over_gate, mut over_up) = (gate.clone(), up.clone());
                let given = (!in_place).then_some(&dy[..]);
                backward(
                    kind,
                    given,
                    None,
                    None,
                    &mut over_gate,
                    &mut over_up,
                    Some(&mut y),
                );
                assert_eq!((&y, &over_gate, &over_up), (&value, &dgate, &dup));
            }
        }
    }

    #[test]
    fn threads_do_not_change_a_bit() {
        let len = 3 * TASK + 5;
        let (gate, up) = (single(&gates(len)), single(&random(len, 2)));
        let run = |threads| {
            with_threads(threads, || {
                let (mut y, mut dgate, mut dup) = (up.clone(), gate.clone(), up.clone());
                forward(ActivationKind::Silu, Some(&gate), None, &mut y);
                backward(
                    ActivationKind::GeluTanh,
                    Some(&y),
                    None,
                    None,
                    &mut dgate,
                    &mut dup,
                    None,
                );
                (y, dgate, dup)
            })
        };
        assert_eq!(run(1), run(2));
    }
}
