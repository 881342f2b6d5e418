//! Expressions at random: their values against the same operations on numbers, their derivatives
//! against differences.

use proptest::prelude::*;

use super::*;

/// The value of an expression, one scalar after the other. Dropout keeps everything.
fn evaluate(expression: &Expression, inputs: &[f64], column: f64) -> Vec<f64> {
    let mut values: Vec<f64> = Vec::new();
    for scalar in expression.scalars() {
        let at = |operand: u32| values[operand as usize];
        let value = match *scalar {
            Scalar::Input(input) => inputs[input as usize],
            Scalar::Constant(value) => value.value(),
            Scalar::Column => column,
            Scalar::Kept { .. } => 1.0,
            Scalar::Unary(function, a) => match function {
                Unary::Detach => at(a),
                Unary::Negate => -at(a),
                Unary::Abs => at(a).abs(),
                Unary::Exp => at(a).exp(),
                Unary::Ln => at(a).max(SMALLEST).ln(),
                Unary::Sqrt => at(a).sqrt(),
                Unary::InverseSqrt => 1.0 / at(a).sqrt(),
                Unary::Sigmoid => 1.0 / (1.0 + (-at(a)).exp()),
                Unary::Tanh => at(a).tanh(),
                Unary::Softplus => at(a).exp().ln_1p(),
                Unary::NormalDistribution => normal_distribution(at(a)),
                Unary::Cosh => at(a).cosh(),
                Unary::Sinh => at(a).sinh(),
                Unary::Acosh => at(a).acosh(),
            },
            Scalar::Binary(function, a, b) => match function {
                Binary::Add => at(a) + at(b),
                Binary::Subtract => at(a) - at(b),
                Binary::Multiply => at(a) * at(b),
                Binary::Divide => at(a) / at(b),
                Binary::Max => at(a).max(at(b)),
                Binary::Min => at(a).min(at(b)),
            },
            Scalar::Select(comparison, [a, b, then, otherwise]) => {
                let holds = match comparison {
                    Comparison::Less => at(a) < at(b),
                    Comparison::Equal => at(a) == at(b),
                };
                at(if holds { then } else { otherwise })
            }
        };
        values.push(value);
    }
    let outputs = expression.outputs().iter();
    outputs.map(|&output| values[output as usize]).collect()
}

/// Φ by Simpson's rule.
fn normal_distribution(x: f64) -> f64 {
    let density = |t: f64| (-0.5 * t * t).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let steps = 400;
    let width = x / f64::from(steps);
    let inner = (1..steps).map(|i| {
        let weight = if i % 2 == 1 { 4.0 } else { 2.0 };
        weight * density(f64::from(i) * width)
    });
    let area = density(0.0) + inner.sum::<f64>() + density(x);
    0.5 + area * width / 3.0
}

const INPUTS: usize = 3;

/// What a step of a random expression does with two earlier ones, as an expression and on numbers.
/// Values stay of moderate size; the last few have kinks.
type Step = (fn(&Expr, &Expr) -> Expr, fn(f64, f64) -> f64);

const SMOOTH: usize = 16;
const STEPS: [Step; 21] = [
    (|a, b| a + b, |a, b| a + b),
    (|a, b| a - b, |a, b| a - b),
    (|a, b| a * b.tanh(), |a, b| a * b.tanh()),
    (|a, b| a / (b.square() + 1.0), |a, b| a / (b * b + 1.0)),
    (|a, _| -a, |a, _| -a),
    (|a, _| 0.5 * a + 1.0, |a, _| 0.5 * a + 1.0),
    (|a, b| (a * 1.0) + b * 0.0, |a, _| a),
    (|a, _| a.tanh().exp(), |a, _| a.tanh().exp()),
    (|a, _| (a.square() + 0.5).ln(), |a, _| (a * a + 0.5).ln()),
    (
        |a, b| (a.square() + b.square() + 0.3).sqrt(),
        |a, b| (a * a + b * b + 0.3).sqrt(),
    ),
    (
        |a, _| (a.square() + 0.3).rsqrt(),
        |a, _| 1.0 / (a * a + 0.3).sqrt(),
    ),
    (
        |a, b| a.silu() - b.softplus(),
        |a, b| a / (1.0 + (-a).exp()) - b.exp().ln_1p(),
    ),
    (
        |a, _| a.tanh().gelu(),
        |a, _| {
            let x = a.tanh();
            x * normal_distribution(x)
        },
    ),
    (
        |a, b| a.tanh().cosh() * b.tanh().sinh(),
        |a, b| a.tanh().cosh() * b.tanh().sinh(),
    ),
    (
        |a, _| (a.square() + 1.2).acosh(),
        |a, _| (a * a + 1.2).acosh(),
    ),
    (
        |a, _| a.tanh().gelu_tanh(),
        |a, _| {
            let x = a.tanh();
            let k = (2.0 / std::f64::consts::PI).sqrt();
            0.5 * x * (1.0 + (k * (x + 0.044_715 * x.powi(3))).tanh())
        },
    ),
    (|a, b| a.max(b), f64::max),
    (|a, b| a.min(b), f64::min),
    (|a, _| a.abs(), |a, _| a.abs()),
    (|a, _| a.clamp(-0.5, 0.5), |a, _| a.clamp(-0.5, 0.5)),
    (
        |a, b| a.where_less(b, b * 2.0, 0.3),
        |a, b| {
            if a < b { b * 2.0 } else { 0.3 }
        },
    ),
];

/// Random steps, each with the numbers of two earlier results.
fn programs(kinds: usize) -> impl Strategy<Value = Vec<(usize, usize, usize)>> {
    proptest::collection::vec((0..kinds, any::<usize>(), any::<usize>()), 1..20)
}

/// The program as an expression of two results, and the inputs that it reads.
fn build(program: &[(usize, usize, usize)]) -> (Expression, Vec<usize>) {
    Expr::build(0..INPUTS, |inputs| {
        let mut steps = inputs.to_vec();
        for &(kind, a, b) in program {
            let (a, b) = (&steps[a % steps.len()], &steps[b % steps.len()]);
            steps.push(STEPS[kind].0(a, b));
        }
        [
            steps[steps.len() - 1].clone(),
            steps[steps.len() / 2].clone(),
        ]
    })
}

fn expected(program: &[(usize, usize, usize)], inputs: &[f64]) -> [f64; 2] {
    let mut steps = inputs.to_vec();
    for &(kind, a, b) in program {
        let (a, b) = (steps[a % steps.len()], steps[b % steps.len()]);
        steps.push(STEPS[kind].1(a, b));
    }
    [steps[steps.len() - 1], steps[steps.len() / 2]]
}

/// The gradients of the inputs that are read, where the two results have gradients 0.7 and −1.3.
fn derivative(expression: &Expression) -> (Expression, Vec<usize>) {
    let mut builder = Builder::default();
    let numbers = builder.import(expression);
    let seeds = [0.7, -1.3].map(|seed| Some(builder.constant(seed)));
    let gradients = adjoints(&mut builder, expression, &numbers, &seeds);
    let zero = builder.constant(0.0);
    let gradients: Vec<u32> = gradients.iter().map(|g| g.unwrap_or(zero)).collect();
    builder.extract(&gradients, &[])
}

proptest! {
    #[test]
    fn a_random_expression_has_the_value_of_its_operations(
        program in programs(STEPS.len()),
        inputs in proptest::array::uniform3(-2.0_f64..2.0),
    ) {
        let (expression, used) = build(&program);
        let read: Vec<f64> = used.iter().map(|&input| inputs[input]).collect();
        let ours = evaluate(&expression, &read, 0.0);
        for (ours, expected) in ours.iter().zip(expected(&program, &inputs)) {
            prop_assert!((ours - expected).abs() <= 1e-9 * (1.0 + expected.abs()));
        }
        assert_slots_hold(&expression);
    }

    #[test]
    fn a_random_derivative_is_that_of_differences(
        program in programs(SMOOTH),
        inputs in proptest::array::uniform3(-1.5_f64..1.5),
    ) {
        let (expression, used) = build(&program);
        let (gradient, read) = derivative(&expression);
        let at: Vec<f64> = used.iter().map(|&input| inputs[input]).collect();
        let at_read: Vec<f64> = read.iter().map(|&input| at[input]).collect();
        let gradients = evaluate(&gradient, &at_read, 0.0);
        for (position, &input) in used.iter().enumerate() {
            const STEP: f64 = 1e-5;
            let value = |moved: f64| {
                let mut inputs = inputs;
                inputs[input] += moved;
                let [first, second] = expected(&program, &inputs);
                0.7 * first - 1.3 * second
            };
            let difference = (8.0 * (value(STEP) - value(-STEP))
                - (value(2.0 * STEP) - value(-2.0 * STEP))) / (12.0 * STEP);
            let error = (gradients[position] - difference).abs();
            prop_assert!(
                error <= 1e-6 * (1.0 + difference.abs()),
                "input {input}: {} for {difference}", gradients[position]
            );
        }
        assert_slots_hold(&gradient);
    }
}

/// No cell is written while what it holds is still read, and none by a scalar that reads it.
fn assert_slots_hold(expression: &Expression) {
    let mut holds: Vec<Option<usize>> = vec![None; expression.num_slots()];
    let is_kept = |scalar: &Scalar| matches!(scalar, Scalar::Constant(_) | Scalar::Input(_));
    for (number, scalar) in expression.scalars().iter().enumerate() {
        if is_kept(scalar) {
            holds[expression.slots()[number] as usize] = Some(number);
        }
    }
    for (number, scalar) in expression.scalars().iter().enumerate() {
        let slot = expression.slots()[number] as usize;
        for operand in scalar.operands() {
            let held = holds[expression.slots()[operand as usize] as usize];
            assert_eq!(held, Some(operand as usize), "{expression:?}");
            assert_ne!(expression.slots()[operand as usize] as usize, slot);
        }
        holds[slot] = Some(number);
    }
    for &output in expression.outputs() {
        let held = holds[expression.slots()[output as usize] as usize];
        assert_eq!(held, Some(output as usize));
    }
}

fn one(write: impl FnOnce(&[Expr]) -> Expr) -> Vec<Scalar> {
    let (expression, _) = Expr::build(0..2, |v| [write(v)]);
    expression.scalars().to_vec()
}

#[test]
fn what_changes_nothing_vanishes() {
    let x = vec![Scalar::Input(0)];
    assert_eq!(one(|v| v[0].clone() * 1.0), x);
    assert_eq!(one(|v| &v[0] + 0.0), x);
    assert_eq!(one(|v| -(-&v[0])), x);
    assert_eq!(one(|v| (&v[0] + &v[1]) * 0.0 + &v[0]), x);
    assert_eq!(one(|v| v[0].max(&v[0])), x);
    assert_eq!(one(|v| &v[0] - &v[0]).len(), 1);
    // Constants are folded, and equal parts are one.
    assert_eq!(one(|v| (&v[0] * 2.0) * 3.0).len(), 3);
    assert_eq!(one(|v| v[0].exp() * v[0].exp()).len(), 3);
    assert_eq!(one(|v| (&v[0] * &v[1]) + (&v[1] * &v[0])).len(), 4);
}

#[test]
fn nothing_goes_through_what_is_detached() {
    let (expression, _) = Expr::build(0..1, |v| [&v[0] * v[0].detach().exp()]);
    let mut builder = Builder::default();
    let numbers = builder.import(&expression);
    let seed = Some(builder.constant(1.0));
    let gradients = adjoints(&mut builder, &expression, &numbers, &[seed]);
    let (gradient, _) = builder.extract(&[gradients[0].unwrap()], &[]);
    assert_eq!(evaluate(&gradient, &[0.5], 0.0), [0.5_f64.exp()]);
}
