//! Norms against their definition, in every combination of optional operands.

use super::*;
use crate::cpu::dropout::RandomState;
use crate::cpu::kernel::check::*;
use crate::cpu::parallel::Accumulate;

const EPSILON: f64 = 1e-5;

#[derive(Clone)]
struct Case {
    shape: NormShape,
    dropout: Option<Dropout>,
    x: Vec<f64>,
    branch: Vec<f64>,
    gamma: Vec<f64>,
    beta: Vec<f64>,
    dy: Vec<f64>,
    /// The gradient that reaches x_new from elsewhere.
    along: Vec<f64>,
}

fn case(kind: NormKind, rows: usize, width: usize, rate: Option<f64>) -> Case {
    let state = RandomState {
        key: [7, 8],
        row_offset: 3,
    };
    Case {
        shape: NormShape { kind, rows, width },
        dropout: rate.map(|rate| Dropout::new(state, 1, rate)),
        x: random(rows * width, 1).iter().map(|v| v + 0.3).collect(),
        branch: random(rows * width, 2),
        gamma: random(width, 3),
        beta: random(width, 4),
        dy: random(rows * width, 5),
        along: random(rows * width, 6),
    }
}

impl Case {
    fn mask(&self, row: usize, column: usize) -> f64 {
        let factor = |d: Dropout| d.factor(d.row(row), column);
        self.dropout.map_or(1.0, factor)
    }

    /// (x_new, y) by the definition.
    fn reference(&self) -> (Vec<f64>, Vec<f64>) {
        let NormShape { kind, rows, width } = self.shape;
        let mut x_new = self.x.clone();
        let mut y = vec![0.0; rows * width];
        for row in 0..rows {
            let line = row * width..(row + 1) * width;
            for (column, i) in line.clone().enumerate() {
                x_new[i] += self.mask(row, column) * self.branch[i];
            }
            let line = &x_new[line];
            let count = width as f64;
            let mean = match kind {
                NormKind::Layer => line.iter().sum::<f64>() / count,
                NormKind::Rms => 0.0,
            };
            let variance = line.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / count;
            for column in 0..width {
                let normed = (line[column] - mean) / (variance + EPSILON).sqrt();
                let beta = if kind == NormKind::Layer {
                    self.beta[column]
                } else {
                    0.0
                };
                y[row * width + column] = normed * self.gamma[column] + beta;
            }
        }
        (x_new, y)
    }

    /// A loss through both outputs.
    fn loss(&self) -> f64 {
        let (x_new, y) = self.reference();
        inner_product(&y, &self.dy) + inner_product(&x_new, &self.along)
    }
}

/// The outputs of a forward pass.
#[derive(Debug, PartialEq)]
struct Outputs<F> {
    x_new: Vec<F>,
    y: Vec<F>,
    mean: Option<Vec<F>>,
    rstd: Vec<F>,
}

fn cast<F: Real>(x: &[f64]) -> Vec<F> {
    x.iter().map(|v| F::from_f64(*v)).collect()
}

fn run_forward<F: Real>(case: &Case, in_place: bool) -> Outputs<F> {
    let shape = case.shape;
    let (x, branch) = (cast::<F>(&case.x), cast::<F>(&case.branch));
    let (gamma, beta) = (cast::<F>(&case.gamma), cast::<F>(&case.beta));
    let layer = shape.kind == NormKind::Layer;
    let mut outputs = Outputs {
        x_new: if in_place {
            x.clone()
        } else {
            vec![F::ZERO; x.len()]
        },
        y: vec![F::ZERO; x.len()],
        mean: layer.then(|| vec![F::ZERO; shape.rows]),
        rstd: vec![F::ZERO; shape.rows],
    };
    forward(
        shape,
        EPSILON,
        Forward {
            x: (!in_place).then_some(&x),
            branch: Some((&branch, case.dropout)),
            gamma: &gamma,
            beta: layer.then_some(&beta),
            x_new: Some(&mut outputs.x_new),
            y: &mut outputs.y,
            mean: outputs.mean.as_deref_mut(),
            rstd: &mut outputs.rstd,
        },
    );
    outputs
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in [NormKind::Layer, NormKind::Rms] {
        for (rows, width) in [(1, 1), (1, 7), (5, 37), (3, 64), (2, 131)] {
            for rate in [None, Some(0.3)] {
                cases.push(case(kind, rows, width, rate));
            }
        }
    }
    cases
}

#[test]
fn forward_is_the_definition() {
    for case in cases() {
        let (x_new, y) = case.reference();
        let ours = run_forward::<f64>(&case, false);
        assert_close("x_new", &ours.x_new, &x_new, 1e-14);
        assert_close("y", &ours.y, &y, 1e-12);
        assert_eq!(run_forward::<f64>(&case, true), ours);
        let single = run_forward::<f32>(&case, false);
        assert_single_close("y in f32", &single.y, &y, 1e-5);
    }
}

#[test]
fn without_a_branch_it_norms_x() {
    for kind in [NormKind::Layer, NormKind::Rms] {
        let mut case = case(kind, 3, 37, None);
        case.branch.fill(0.0);
        let (_, expected) = case.reference();
        let mut y = vec![0.0; expected.len()];
        let layer = kind == NormKind::Layer;
        let mut mean = vec![0.0; 3];
        forward(
            case.shape,
            EPSILON,
            Forward {
                x: Some(&case.x),
                branch: None,
                gamma: &case.gamma,
                beta: layer.then_some(&case.beta),
                x_new: None,
                y: &mut y,
                mean: layer.then_some(&mut mean),
                rstd: &mut [0.0; 3],
            },
        );
        assert_close("y", &y, &expected, 1e-13);
    }
}

#[test]
fn applying_kept_statistics_gives_the_same_bits() {
    for case in cases() {
        let ours = run_forward::<f32>(&case, false);
        let (gamma, beta) = (single(&case.gamma), single(&case.beta));
        let beta = (case.shape.kind == NormKind::Layer).then_some(&beta[..]);
        let mut y = vec![0.0; ours.y.len()];
        let mean = ours.mean.as_deref();
        apply(
            case.shape,
            &ours.x_new,
            mean,
            &ours.rstd,
            &gamma,
            beta,
            &mut y,
        );
        assert_eq!(y, ours.y);
    }
}

/// Where the incoming gradients are.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Placement {
    Apart,
    DyInPlace,
    ResidualInPlace,
}

#[derive(Debug, PartialEq)]
struct Gradients<F> {
    dx: Vec<F>,
    dbranch: Vec<F>,
    dgamma: Vec<F>,
    dbeta: Vec<F>,
}

fn run_backward<F: Real>(case: &Case, placement: Placement, mode: Accumulate) -> Gradients<F> {
    let kept = run_forward::<F>(case, false);
    let (dy, along) = (cast::<F>(&case.dy), cast::<F>(&case.along));
    let gamma = cast::<F>(&case.gamma);
    let width = case.shape.width;
    let mut out = Gradients {
        dx: match placement {
            Placement::Apart => vec![F::ZERO; dy.len()],
            Placement::DyInPlace => dy.clone(),
            Placement::ResidualInPlace => along.clone(),
        },
        dbranch: vec![F::ZERO; dy.len()],
        dgamma: vec![F::ONE; width],
        dbeta: vec![F::ONE; width],
    };
    let layer = case.shape.kind == NormKind::Layer;
    backward(
        case.shape,
        Backward {
            dy: (placement != Placement::DyInPlace).then_some(&dy),
            residual: match placement {
                Placement::ResidualInPlace => Residual::InPlace,
                _ => Residual::At(&along),
            },
            x_new: &kept.x_new,
            mean: kept.mean.as_deref(),
            rstd: &kept.rstd,
            gamma: &gamma,
            dx: &mut out.dx,
            dbranch: Some((&mut out.dbranch, case.dropout)),
            dgamma: Some((&mut out.dgamma, mode)),
            dbeta: layer.then_some((&mut out.dbeta, mode)),
        },
    );
    out
}

#[test]
fn gradients_are_those_of_the_definition() {
    for case in cases() {
        // A row of one element has no gradient to compare: layer norm of it is constant.
        if case.shape.width == 1 {
            continue;
        }
        let ours = run_backward::<f64>(&case, Placement::Apart, Accumulate::Overwrite);
        let with = |change: &dyn Fn(&mut Case)| {
            let mut moved = case.clone();
            change(&mut moved);
            moved.loss()
        };
        assert_gradient("x", &case.x, &ours.dx, |v| with(&|c| c.x = v.to_vec()));
        assert_gradient("branch", &case.branch, &ours.dbranch, |v| {
            with(&|c| c.branch = v.to_vec())
        });
        assert_gradient("gamma", &case.gamma, &ours.dgamma, |v| {
            with(&|c| c.gamma = v.to_vec())
        });
        if case.shape.kind == NormKind::Layer {
            assert_gradient("beta", &case.beta, &ours.dbeta, |v| {
                with(&|c| c.beta = v.to_vec())
            });
        }
        let single = run_backward::<f32>(&case, Placement::Apart, Accumulate::Overwrite);
        assert_single_close("dx in f32", &single.dx, &ours.dx, 1e-4);
        assert_single_close("dgamma in f32", &single.dgamma, &ours.dgamma, 1e-5);
    }
}

#[test]
fn placement_and_threads_do_not_change_a_bit() {
    for kind in [NormKind::Layer, NormKind::Rms] {
        let case = case(kind, 300, 131, Some(0.1));
        let reference = run_backward::<f32>(&case, Placement::Apart, Accumulate::Overwrite);
        let kept = run_forward::<f32>(&case, false);
        for placement in [
            Placement::Apart,
            Placement::DyInPlace,
            Placement::ResidualInPlace,
        ] {
            for threads in [1, 2] {
                with_threads(threads, || {
                    let mode = Accumulate::Overwrite;
                    assert_eq!(run_backward::<f32>(&case, placement, mode), reference);
                    assert_eq!(run_forward::<f32>(&case, true), kept);
                });
            }
        }
    }
}

#[test]
fn without_a_residual_only_the_norm_counts() {
    let mut case = case(NormKind::Layer, 4, 37, None);
    case.along.fill(0.0);
    let expected = run_backward::<f64>(&case, Placement::Apart, Accumulate::Overwrite);
    let kept = run_forward::<f64>(&case, false);
    for in_place in [false, true] {
        let mut dx = if in_place {
            case.dy.clone()
        } else {
            vec![9.0; case.dy.len()]
        };
        backward(
            case.shape,
            Backward {
                dy: (!in_place).then_some(&case.dy),
                residual: Residual::Absent,
                x_new: &kept.x_new,
                mean: kept.mean.as_deref(),
                rstd: &kept.rstd,
                gamma: &case.gamma,
                dx: &mut dx,
                dbranch: None,
                dgamma: None,
                dbeta: None,
            },
        );
        assert_eq!(dx, expected.dx);
    }
}

#[test]
fn parameter_gradients_are_added_to_what_is_there() {
    let case = case(NormKind::Layer, 5, 37, None);
    let first = run_backward::<f64>(&case, Placement::Apart, Accumulate::Overwrite);
    let added = run_backward::<f64>(&case, Placement::Apart, Accumulate::Add);
    let plus_one = |x: &[f64]| x.iter().map(|v| v + 1.0).collect::<Vec<_>>();
    assert_eq!(added.dgamma, plus_one(&first.dgamma));
    assert_eq!(added.dbeta, plus_one(&first.dbeta));
}
