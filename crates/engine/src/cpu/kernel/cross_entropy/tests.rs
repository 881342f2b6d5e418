use super::super::check::{assert_gradient, random, single, with_threads};
use super::*;

const SHAPES: [CrossEntropyShape; 4] = [
    CrossEntropyShape {
        rows: 1,
        width: 3,
        vocab: 5,
        chunk_rows: 4,
    },
    CrossEntropyShape {
        rows: 7,
        width: 5,
        vocab: 37,
        chunk_rows: 3,
    },
    CrossEntropyShape {
        rows: 6,
        width: 4,
        vocab: 33,
        chunk_rows: 2,
    },
    CrossEntropyShape {
        rows: 5,
        width: 2,
        vocab: 1,
        chunk_rows: 5,
    },
];

fn targets(shape: CrossEntropyShape) -> Vec<i32> {
    (0..shape.rows)
        .map(|row| {
            if row % 3 == 1 {
                IGNORE
            } else {
                (row * 11 % shape.vocab) as i32
            }
        })
        .collect()
}

/// The definition, term by term.
fn naive(
    shape: CrossEntropyShape,
    h: &[f64],
    w: &[f64],
    b: &[f64],
    targets: &[i32],
    weighting: Weighting,
) -> f64 {
    let mut total = 0.0;
    for (row, &target) in targets.iter().enumerate() {
        if target == IGNORE {
            continue;
        }
        let z: Vec<f64> = (0..shape.vocab)
            .map(|v| {
                let products =
                    (0..shape.width).map(|p| h[row * shape.width + p] * w[v * shape.width + p]);
                b[v] + products.sum::<f64>()
            })
            .collect();
        let normaliser: f64 = z.iter().map(|z| z.exp()).sum();
        for (v, z) in z.iter().enumerate() {
            let wanted = weighting.label_smoothing / shape.vocab as f64
                + if v == target as usize {
                    1.0 - weighting.label_smoothing
                } else {
                    0.0
                };
            total -= wanted * (z.exp() / normaliser).ln() * weighting.inverse_count;
        }
    }
    total
}

#[derive(Debug, PartialEq)]
struct Outcome<F> {
    loss: F,
    dh: Vec<F>,
    dw: Vec<F>,
    db: Vec<F>,
}

fn bias(shape: CrossEntropyShape) -> Vec<f64> {
    random(shape.vocab, 9)
}

fn run<F: Real>(
    shape: CrossEntropyShape,
    h: &[F],
    w: &[F],
    weighting: Weighting,
    mode: Accumulate,
) -> Outcome<F> {
    let apart = vec![F::from_f64(9.0); h.len()];
    run_into(shape, (Some(h), apart), w, weighting, mode)
}

/// With what dh holds before it is written: anything, or h.
fn run_into<F: Real>(
    shape: CrossEntropyShape,
    (h, dh): (Option<&[F]>, Vec<F>),
    w: &[F],
    weighting: Weighting,
    mode: Accumulate,
) -> Outcome<F> {
    let mut space = vec![F::from_f64(f64::NAN); workspace(shape)];
    let mut out = Outcome {
        loss: F::from_f64(2.0),
        dh,
        dw: vec![F::from_f64(0.5); w.len()],
        db: vec![F::from_f64(0.5); shape.vocab],
    };
    let (loss, dh) = (&mut out.loss, &mut out.dh);
    let b: Vec<F> = bias(shape).into_iter().map(F::from_f64).collect();
    let head = Head {
        weight: w,
        bias: Some(&b),
    };
    let gradients = HeadGradients {
        weight: Some((&mut out.dw, mode)),
        bias: Some((&mut out.db, mode)),
    };
    forward_backward(
        shape,
        h,
        head,
        &targets(shape),
        weighting,
        &mut space,
        (loss, mode),
        dh,
        gradients,
    )
    .expect("targets are tokens");
    out
}

#[test]
fn the_gradient_over_h_is_the_same() {
    let weighting = Weighting {
        inverse_count: 0.3,
        weight: 1.0,
        label_smoothing: 0.1,
    };
    for shape in SHAPES {
        let h = random(shape.rows * shape.width, 3);
        let w = random(shape.vocab * shape.width, 4);
        let mode = Accumulate::Overwrite;
        let over_h = run_into(shape, (None, h.clone()), &w, weighting, mode);
        assert_eq!(over_h, run(shape, &h, &w, weighting, mode));
    }
}

#[test]
fn loss_is_the_definition() {
    for shape in SHAPES {
        for label_smoothing in [0.0, 0.1] {
            let weighting = Weighting {
                inverse_count: 0.3,
                weight: 1.0,
                label_smoothing,
            };
            let h = random(shape.rows * shape.width, 1);
            let w = random(shape.vocab * shape.width, 2);
            let b = bias(shape);
            let exact = naive(shape, &h, &w, &b, &targets(shape), weighting);
            let ours = run(shape, &h, &w, weighting, Accumulate::Overwrite).loss;
            assert!(
                (ours - exact).abs() < 1e-12 * exact.abs().max(1.0),
                "{ours} {exact}"
            );
            let added = run(shape, &h, &w, weighting, Accumulate::Add).loss;
            assert!((added - 2.0 - exact).abs() < 1e-12 * exact.abs().max(1.0));
            let mut evaluated = 0.0;
            let mut space = vec![f64::NAN; workspace(shape)];
            let mode = Accumulate::Overwrite;
            let head = Head {
                weight: &w,
                bias: Some(&b),
            };
            forward_only(
                shape,
                &h,
                head,
                &targets(shape),
                weighting,
                &mut space,
                (&mut evaluated, mode),
            )
            .expect("targets are tokens");
            assert_eq!(evaluated, ours);
        }
    }
}

#[test]
fn gradients_are_finite_differences() {
    for shape in SHAPES {
        for (label_smoothing, mode) in [(0.0, Accumulate::Add), (0.2, Accumulate::Overwrite)] {
            let weighting = Weighting {
                inverse_count: 0.3,
                weight: 0.7,
                label_smoothing,
            };
            let h = random(shape.rows * shape.width, 3);
            let w = random(shape.vocab * shape.width, 4);
            let out = run(shape, &h, &w, weighting, mode);
            let b = bias(shape);
            let loss = |h: &[f64], w: &[f64], b: &[f64]| {
                weighting.weight * naive(shape, h, w, b, &targets(shape), weighting)
            };
            assert_gradient("h", &h, &out.dh, |h| loss(h, &w, &b));
            let before = if mode == Accumulate::Add { 0.5 } else { 0.0 };
            let dw: Vec<f64> = out.dw.iter().map(|dw| dw - before).collect();
            assert_gradient("w", &w, &dw, |w| loss(&h, w, &b));
            let db: Vec<f64> = out.db.iter().map(|db| db - before).collect();
            assert_gradient("bias", &b, &db, |b| loss(&h, &w, b));
        }
    }
}

#[test]
fn f32_is_close_and_large_logits_are_safe() {
    let shape = CrossEntropyShape {
        rows: 9,
        width: 20,
        vocab: 301,
        chunk_rows: 4,
    };
    let weighting = Weighting {
        inverse_count: 0.2,
        weight: 1.0,
        label_smoothing: 0.1,
    };
    let h = random(shape.rows * shape.width, 5);
    for scale in [1.0, 100.0] {
        let w: Vec<f64> = random(shape.vocab * shape.width, 6)
            .iter()
            .map(|w| w * scale)
            .collect();
        let wide = run(shape, &h, &w, weighting, Accumulate::Overwrite);
        let single = run(
            shape,
            &single(&h),
            &single(&w),
            weighting,
            Accumulate::Overwrite,
        );
        assert!((f64::from(single.loss) - wide.loss).abs() < 1e-5 * wide.loss);
        for (a, b) in single.dh.iter().zip(&wide.dh) {
            assert!((f64::from(*a) - b).abs() < 1e-4 * scale);
        }
        for (a, b) in single.dw.iter().zip(&wide.dw) {
            assert!((f64::from(*a) - b).abs() < 1e-4);
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let shape = CrossEntropyShape {
        rows: 40,
        width: 32,
        vocab: 1501,
        chunk_rows: 16,
    };
    let weighting = Weighting {
        inverse_count: 0.03,
        weight: 1.0,
        label_smoothing: 0.1,
    };
    let h = single(&random(shape.rows * shape.width, 7));
    let w = single(&random(shape.vocab * shape.width, 8));
    let on = |threads| {
        let out = with_threads(threads, || run(shape, &h, &w, weighting, Accumulate::Add));
        (out.loss, out.dh, out.dw, out.db)
    };
    assert_eq!(on(1), on(2));
}

#[test]
fn logits_of_one_row_are_the_products() {
    let (h, w, b) = (random(6, 1), random(6 * 45, 2), random(45, 3));
    let mut out = vec![0.0; 45];
    for bias in [None, Some(&b[..])] {
        logits(&h, Head { weight: &w, bias }, &mut out);
        for (v, &z) in out.iter().enumerate() {
            let exact: f64 = h.iter().zip(&w[6 * v..]).map(|(h, w)| h * w).sum();
            let exact = exact + bias.map_or(0.0, |bias| bias[v]);
            assert!((z - exact).abs() < 1e-12);
        }
    }
}

#[test]
fn a_target_outside_the_vocabulary_is_named() {
    let shape = CrossEntropyShape {
        rows: 3,
        width: 1,
        vocab: 4,
        chunk_rows: 2,
    };
    let weighting = Weighting {
        inverse_count: 1.0,
        weight: 1.0,
        label_smoothing: 0.0,
    };
    let (h, w) = ([0.0_f32; 3], [0.0_f32; 4]);
    for value in [4, -1] {
        let mut loss = 0.0;
        let error = forward_only(
            shape,
            &h,
            Head {
                weight: &w,
                bias: None,
            },
            &[0, 3, value],
            weighting,
            &mut [0.0; 20],
            (&mut loss, Accumulate::Add),
        );
        assert_eq!(
            error,
            Err(TargetOutOfRange {
                row: 2,
                value,
                vocab: 4
            })
        );
    }
}
