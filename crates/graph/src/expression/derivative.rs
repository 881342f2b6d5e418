//! The derivative of an expression, as scalars of the same kind: the chain rule from the results
//! back to the inputs.

use super::{Binary, Builder, Comparison, Expression, SMALLEST, Scalar, Unary};

/// The gradient that reaches each input, as a scalar of `builder`; `None` where none does.
/// `numbers` are those of the expression's scalars there, `seeds` what reaches its outputs.
pub(crate) fn adjoints(
    builder: &mut Builder,
    expression: &Expression,
    numbers: &[u32],
    seeds: &[Option<u32>],
) -> Vec<Option<u32>> {
    let mut sums: Vec<Option<u32>> = vec![None; expression.scalars().len()];
    for (&output, &seed) in expression.outputs().iter().zip(seeds) {
        if let Some(seed) = seed {
            contribute(builder, &mut sums[output as usize], seed);
        }
    }
    let mut inputs = vec![None; expression.num_inputs()];
    for (index, scalar) in expression.scalars().iter().enumerate().rev() {
        let Some(gradient) = sums[index] else {
            continue;
        };
        if let Scalar::Input(input) = *scalar {
            inputs[input as usize] = Some(gradient);
        }
        let value = numbers[index];
        for (operand, gradient) in through(builder, scalar, numbers, value, gradient) {
            if !builder.is_zero(gradient) {
                contribute(builder, &mut sums[operand as usize], gradient);
            }
        }
    }
    inputs
}

fn contribute(builder: &mut Builder, sum: &mut Option<u32>, gradient: u32) {
    *sum = Some(match *sum {
        None => gradient,
        Some(before) => builder.add(before, gradient),
    });
}

/// What the gradient `g` of one scalar, whose value is `y`, gives its operands.
fn through(b: &mut Builder, scalar: &Scalar, numbers: &[u32], y: u32, g: u32) -> Vec<(u32, u32)> {
    let at = |operand: u32| numbers[operand as usize];
    let zero = b.constant(0.0);
    match *scalar {
        Scalar::Unary(function, operand) => unary(b, function, at(operand), y, g)
            .map(|gradient| (operand, gradient))
            .into_iter()
            .collect(),
        Scalar::Binary(function, left, right) => {
            let (x, z) = (at(left), at(right));
            let (to_left, to_right) = match function {
                Binary::Add => (g, g),
                Binary::Subtract => (g, b.unary(Unary::Negate, g)),
                Binary::Multiply => (b.multiply(g, z), b.multiply(g, x)),
                // x/z: g/z, and −g·y/z.
                Binary::Divide => {
                    let to_left = b.binary(Binary::Divide, g, z);
                    let product = b.multiply(to_left, y);
                    (to_left, b.unary(Unary::Negate, product))
                }
                Binary::Max => {
                    let to_left = b.select(Comparison::Less, [z, x, g, zero]);
                    (to_left, b.select(Comparison::Less, [z, x, zero, g]))
                }
                Binary::Min => {
                    let to_left = b.select(Comparison::Less, [x, z, g, zero]);
                    (to_left, b.select(Comparison::Less, [x, z, zero, g]))
                }
            };
            vec![(left, to_left), (right, to_right)]
        }
        Scalar::Select(comparison, [p, q, then, otherwise]) => {
            let (x, z) = (at(p), at(q));
            let to_then = b.select(comparison, [x, z, g, zero]);
            let to_otherwise = b.select(comparison, [x, z, zero, g]);
            vec![(then, to_then), (otherwise, to_otherwise)]
        }
        Scalar::Input(_) | Scalar::Constant(_) | Scalar::Column | Scalar::Kept { .. } => Vec::new(),
    }
}

/// g·f′(x), where y = f(x).
fn unary(b: &mut Builder, function: Unary, x: u32, y: u32, g: u32) -> Option<u32> {
    let (one, half) = (b.constant(1.0), b.constant(0.5));
    Some(match function {
        Unary::Detach => return None,
        Unary::Negate => b.unary(Unary::Negate, g),
        Unary::Abs => {
            let (zero, negative) = (b.constant(0.0), b.unary(Unary::Negate, g));
            b.select(Comparison::Less, [x, zero, negative, g])
        }
        Unary::Exp => b.multiply(g, y),
        Unary::Ln => {
            let smallest = b.constant(SMALLEST);
            let x = b.binary(Binary::Max, x, smallest);
            b.binary(Binary::Divide, g, x)
        }
        // 1/(2y)
        Unary::Sqrt => {
            let half = b.multiply(half, g);
            b.binary(Binary::Divide, half, y)
        }
        // −y³/2
        Unary::InverseSqrt => {
            let square = b.multiply(y, y);
            let cube = b.multiply(square, y);
            let (factor, product) = (b.constant(-0.5), b.multiply(g, cube));
            b.multiply(factor, product)
        }
        // y·(1 − y)
        Unary::Sigmoid => {
            let rest = b.binary(Binary::Subtract, one, y);
            let slope = b.multiply(y, rest);
            b.multiply(g, slope)
        }
        // 1 − y²
        Unary::Tanh => {
            let square = b.multiply(y, y);
            let slope = b.binary(Binary::Subtract, one, square);
            b.multiply(g, slope)
        }
        Unary::Softplus => {
            let slope = b.unary(Unary::Sigmoid, x);
            b.multiply(g, slope)
        }
        // The normal density, e^{−x²/2}/√(2π).
        Unary::NormalDistribution => {
            let square = b.multiply(x, x);
            let factor = b.constant(-0.5);
            let exponent = b.multiply(factor, square);
            let exponential = b.unary(Unary::Exp, exponent);
            let factor = b.constant(1.0 / (2.0 * std::f64::consts::PI).sqrt());
            let density = b.multiply(factor, exponential);
            b.multiply(g, density)
        }
        Unary::Cosh => {
            let slope = b.unary(Unary::Sinh, x);
            b.multiply(g, slope)
        }
        Unary::Sinh => {
            let slope = b.unary(Unary::Cosh, x);
            b.multiply(g, slope)
        }
        // 1/√((x − 1)(x + 1)), which loses nothing near 1.
        Unary::Acosh => {
            let below = b.binary(Binary::Subtract, x, one);
            let above = b.add(x, one);
            let product = b.multiply(below, above);
            let slope = b.unary(Unary::InverseSqrt, product);
            b.multiply(g, slope)
        }
    })
}
