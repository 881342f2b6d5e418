use cinch_graph::expression::{Broadcast, Expr};
use cinch_graph::op::{Domain, Map, Op, Over, Reduce, ReduceKind};
use cinch_graph::{DType, Dropout as DropoutSpec, Graph, Shape};

use super::*;
use crate::cpu::dropout::Dropout;
use crate::cpu::kernel::check::*;
use crate::cpu::parallel::Accumulate;

const STATE: RandomState = RandomState {
    key: [11, 12],
    row_offset: 3,
};

/// A map over `shape` of tensors of these shapes.
fn map_of(shape: &[usize], inputs: &[&[usize]], write: impl FnOnce(&[Expr]) -> Expr) -> Map {
    let mut graph = Graph::new(DType::F64);
    let ids: Vec<_> = inputs
        .iter()
        .enumerate()
        .map(|(i, dims)| graph.batch(&format!("{i}"), Shape::new(dims), DType::F64))
        .collect();
    let domain = Domain {
        shape: Shape::new(shape),
        dtype: DType::F64,
    };
    graph.map_over("map", domain, &ids, write).unwrap();
    match graph.nodes.remove(0).op {
        Op::Map(op) => op,
        other => panic!("{other:?}"),
    }
}

fn reduce_of(
    (kind, over): (ReduceKind, Over),
    inputs: &[&[usize]],
    write: impl FnOnce(&[Expr]) -> Expr,
) -> Reduce {
    let mut graph = Graph::new(DType::F64);
    let ids: Vec<_> = inputs
        .iter()
        .enumerate()
        .map(|(i, dims)| graph.batch(&format!("{i}"), Shape::new(dims), DType::F64))
        .collect();
    graph
        .reduce("reduce", (kind, over, DType::F64), &ids, write)
        .unwrap();
    match graph.nodes.remove(0).op {
        Op::Reduce(op) => op,
        other => panic!("{other:?}"),
    }
}

fn sources<'a, F: Real>(
    pointwise: &cinch_graph::op::Pointwise,
    numbers: &'a [Vec<F>],
) -> Vec<Source<'a, F>> {
    let reads = pointwise.reads.iter().zip(numbers);
    reads
        .map(|(read, numbers)| Source {
            numbers: Numbers::Real(numbers),
            broadcast: read.broadcast,
        })
        .collect()
}

fn places<'a, F>(
    pointwise: &'a cinch_graph::op::Pointwise,
    sources: &'a [Source<'a, F>],
) -> Places<'a, F> {
    Places {
        expression: &pointwise.expression,
        sources,
        random: pointwise.expression.drops().then_some(STATE),
        rows: pointwise.shape.rows(),
        width: pointwise.shape.width(),
    }
}

fn run_map<F: Real>(op: &Map, numbers: &[Vec<F>]) -> Vec<F> {
    let sources = sources(&op.pointwise, numbers);
    let places = places(&op.pointwise, &sources);
    let mut output = vec![F::ZERO; places.elements()];
    map(&places, &mut [(&mut output[..], Accumulate::Overwrite)]);
    output
}

fn run_reduce<F: Real>(op: &Reduce, numbers: &[Vec<F>]) -> Vec<F> {
    let sources = sources(&op.pointwise, numbers);
    let places = places(&op.pointwise, &sources);
    let reduction = Reduction {
        kind: op.kind,
        broadcast: op.broadcast,
        parts: op.cpu_parts(),
    };
    let elements = op.broadcast.elements();
    let mut partials = vec![F::ZERO; op.cpu_parts() * elements];
    let mut output = vec![F::ZERO; elements];
    let mode = Accumulate::Overwrite;
    reduce(&places, &reduction, &mut partials, &mut output, mode);
    output
}

fn random_inputs(inputs: &[&[usize]]) -> Vec<Vec<f64>> {
    let lengths = inputs.iter().map(|dims| dims.iter().product());
    (1..)
        .zip(lengths)
        .map(|(seed, len)| random(len, seed))
        .collect()
}

#[test]
fn every_way_to_read_is_that_of_the_definition() {
    let domain = [3, 50, 24];
    let inputs: [&[usize]; 8] = [
        &[3, 50, 24],
        &[24],
        &[3, 50],
        &[3, 50, 6],
        &[50, 24],
        &[3, 1, 24],
        &[1],
        &[3, 1, 4],
    ];
    let numbers = random_inputs(&inputs);
    for (index, dims) in inputs.iter().enumerate() {
        let op = map_of(&domain, &[dims], |v| v[0].clone() * 2.0);
        let ours = run_map(&op, &numbers[index..=index]);
        let expected = |place: usize| {
            let (row, column) = (place / 24, place % 24);
            let (b, t) = (row / 50, row % 50);
            let at = [
                place,
                column,
                row,
                row * 6 + column / 4,
                t * 24 + column,
                b * 24 + column,
                0,
                b * 4 + column / 6,
            ][index];
            2.0 * numbers[index][at]
        };
        let expected: Vec<f64> = (0..ours.len()).map(expected).collect();
        assert_eq!(ours, expected, "{dims:?}");
    }
}

#[test]
fn functions_have_the_values_of_the_standard_library() {
    type Case = (fn(&Expr) -> Expr, fn(f64) -> f64);
    let cases: [Case; 14] = [
        (|x| x.exp(), f64::exp),
        (|x| (x.square() + 0.1).ln(), |x| (x * x + 0.1).ln()),
        (|x| x.abs().sqrt(), |x| x.abs().sqrt()),
        (
            |x| (x.square() + 0.1).rsqrt(),
            |x| 1.0 / (x * x + 0.1).sqrt(),
        ),
        (|x| x.sigmoid(), |x| 1.0 / (1.0 + (-x).exp())),
        (|x| x.tanh(), f64::tanh),
        (|x| x.softplus(), |x| x.exp().ln_1p()),
        (|x| x.silu(), |x| x / (1.0 + (-x).exp())),
        (|x| x.relu(), |x| x.max(0.0)),
        (|x| x.cosh(), f64::cosh),
        (|x| x.sinh(), f64::sinh),
        (|x| (x.square() + 1.5).acosh(), |x| (x * x + 1.5).acosh()),
        (|x| x.clamp(-0.5, 1.5), |x| x.clamp(-0.5, 1.5)),
        (
            |x| x.where_less(0.3, 1.0 / x, -x),
            |x| {
                if x < 0.3 { 1.0 / x } else { -x }
            },
        ),
    ];
    let numbers: Vec<f64> = random(1037, 5).iter().map(|x| x * 4.0).collect();
    for (index, (ours, expected)) in cases.into_iter().enumerate() {
        let op = map_of(&[1037], &[&[1037]], |v| ours(&v[0]));
        let expected: Vec<f64> = numbers.iter().map(|&x| expected(x)).collect();
        let double = run_map(&op, std::slice::from_ref(&numbers));
        assert_close(&format!("function {index}"), &double, &expected, 1e-12);
        let single = run_map(&op, &[single(&numbers)]);
        assert_single_close(&format!("function {index}"), &single, &expected, 2e-6);
    }
}

#[test]
fn what_is_small_keeps_its_digits_in_single_precision() {
    let x: Vec<f32> = (1..200).map(|i| i as f32 * 1e-3).collect();
    let op = map_of(&[199], &[&[199]], |v| v[0].sinh() / &v[0]);
    for (ours, x) in run_map(&op, std::slice::from_ref(&x)).iter().zip(&x) {
        let expected = f64::from(*x).sinh() / f64::from(*x);
        assert!((f64::from(*ours) - expected).abs() < 3e-7, "sinh {x}");
    }
    let x: Vec<f32> = (1..200).map(|i| 1.0 + i as f32 * 1e-5).collect();
    let op = map_of(&[199], &[&[199]], |v| v[0].acosh());
    for (ours, x) in run_map(&op, std::slice::from_ref(&x)).iter().zip(&x) {
        let expected = f64::from(*x).acosh();
        let error = (f64::from(*ours) - expected).abs() / expected;
        assert!(error < 1e-6, "acosh {x}: {error:e}");
    }
}

#[test]
fn a_logarithm_of_zero_is_finite() {
    let op = map_of(&[2], &[&[2]], |v| &v[0] * v[0].ln());
    assert_eq!(run_map(&op, &[vec![0.0_f32, 1.0]]), [0.0, 0.0]);
    assert_eq!(run_map(&op, &[vec![0.0_f64, 1.0]]), [0.0, 0.0]);
}

#[test]
fn dropout_is_that_of_the_other_ops() {
    let spec = DropoutSpec {
        rate: 0.3,
        stream: 7,
    };
    let op = map_of(&[40, 30], &[&[40, 30]], |v| v[0].dropout(Some(spec)));
    let numbers = random(1200, 1);
    let ours = run_map(&op, std::slice::from_ref(&numbers));
    let dropout = Dropout::new(STATE, 7, 0.3);
    let expected: Vec<f64> = (0..1200)
        .map(|i| numbers[i] * dropout.factor::<f64>(dropout.row(i / 30), i % 30))
        .collect();
    assert_eq!(ours, expected);
}

/// Several results, one of them an input, over memory that inputs were in.
#[test]
fn outputs_may_take_over_inputs() {
    let mut graph = Graph::new(DType::F64);
    let ids = ["a", "b"].map(|name| graph.batch(name, [700], DType::F64));
    let domain = Domain {
        shape: Shape::new(&[700]),
        dtype: DType::F64,
    };
    let write = |v: &[Expr]| [&v[0] * &v[1] + 1.0, v[0].clone()];
    graph.map_all("both", domain, &ids, write).unwrap();
    let Op::Map(op) = &graph.nodes[0].op else {
        panic!("not a map");
    };
    let (a, b) = (random(700, 1), random(700, 2));
    let expected: Vec<f64> = a.iter().zip(&b).map(|(a, b)| a * b + 1.0).collect();
    let broadcast = Broadcast::full(&Shape::new(&[700]));
    for taken in [[0, 1], [1, 0]] {
        let sources = taken.map(|output| Source {
            numbers: Numbers::InPlace(output),
            broadcast,
        });
        let mut memory = [a.clone(), b.clone()];
        if taken == [1, 0] {
            memory.reverse();
        }
        let [first, second] = &mut memory;
        let mut outputs = [
            (&mut first[..], Accumulate::Overwrite),
            (&mut second[..], Accumulate::Overwrite),
        ];
        map(&places(&op.pointwise, &sources), &mut outputs);
        assert_eq!(memory, [expected.clone(), a.clone()]);
    }
}

#[test]
fn reductions_are_those_of_the_definition() {
    /// The element that a place belongs to, and how many there are.
    type Outputs = (fn(usize, usize) -> usize, usize);
    let cases: [(Over, Outputs); 5] = [
        (Over::Columns, (|row, _| row, 600)),
        (Over::Groups(4), (|row, column| row * 6 + column / 4, 3600)),
        (Over::Rows, (|_, column| column, 24)),
        (Over::Sequence, (|row, column| row / 300 * 24 + column, 48)),
        (Over::All, (|_, _| 0, 1)),
    ];
    let inputs: [&[usize]; 2] = [&[2, 300, 24], &[24]];
    let numbers = random_inputs(&inputs);
    for (over, (place, outputs)) in cases {
        let value =
            |row: usize, column: usize| numbers[0][row * 24 + column] * numbers[1][column] + 0.5;
        let mut sums = vec![0.0; outputs];
        let mut largest = vec![f64::NEG_INFINITY; outputs];
        for row in 0..600 {
            for column in 0..24 {
                let at = place(row, column);
                sums[at] += value(row, column);
                largest[at] = f64::max(largest[at], value(row, column));
            }
        }
        let write = |v: &[Expr]| &v[0] * &v[1] + 0.5;
        let sum = reduce_of((ReduceKind::Sum, over), &inputs, write);
        let name = format!("{over:?}");
        assert_close(&name, &run_reduce(&sum, &numbers), &sums, 1e-12);
        let numbers: Vec<_> = numbers.iter().map(|x| single(x)).collect();
        assert_single_close(&name, &run_reduce(&sum, &numbers), &sums, 1e-6);
        let max = reduce_of((ReduceKind::Max, over), &inputs, write);
        assert_single_close(&name, &run_reduce(&max, &numbers), &largest, 1e-6);
    }
}

/// Where a part of an output's rows is a task, and where rows repeat.
#[test]
fn parts_of_a_sum_are_the_sum() {
    let (rows, width) = (4099, 32);
    let numbers = vec![random(rows * width, 3)];
    let mut sums = vec![0.0; width];
    for row in numbers[0].chunks(width) {
        for (sum, value) in sums.iter_mut().zip(row) {
            *sum += value;
        }
    }
    let op = reduce_of((ReduceKind::Sum, Over::Rows), &[&[rows, width]], |v| {
        v[0].clone()
    });
    assert!(op.cpu_parts() > 1);
    assert_close("rows", &run_reduce(&op, &numbers), &sums, 1e-11);
    // The gradient of a table of two positions.
    let (rows, repeated) = (4098, 2);
    let op = Reduce {
        pointwise: cinch_graph::op::Pointwise {
            shape: Shape::new(&[rows, width]),
            ..op.pointwise
        },
        broadcast: Broadcast {
            row_group: 1,
            rows: repeated,
            column_group: 1,
            columns: width,
        },
        ..op
    };
    assert!(op.cpu_parts() > 1);
    let mut pointwise = op.pointwise.clone();
    pointwise.reads[0].broadcast = Broadcast::full(&pointwise.shape);
    let op = Reduce { pointwise, ..op };
    let numbers = vec![numbers[0][..rows * width].to_vec()];
    let mut sums = vec![0.0; repeated * width];
    for (i, value) in numbers[0].iter().enumerate() {
        sums[i % (repeated * width)] += value;
    }
    assert_close("positions", &run_reduce(&op, &numbers), &sums, 1e-11);
}

#[test]
fn threads_do_not_change_a_bit() {
    let inputs: [&[usize]; 2] = [&[3001, 33], &[33]];
    let numbers: Vec<_> = random_inputs(&inputs).iter().map(|x| single(x)).collect();
    let write = |v: &[Expr]| (&v[0] * &v[1]).gelu();
    let map = map_of(&[3001, 33], &inputs, write);
    let sums = [Over::Columns, Over::Rows, Over::All].map(|over| {
        let op = reduce_of((ReduceKind::Sum, over), &inputs, write);
        let run = |threads| with_threads(threads, || run_reduce(&op, &numbers));
        (run(1), run(2))
    });
    for (one, two) in sums {
        assert_eq!(one, two);
    }
    let run = |threads| with_threads(threads, || run_map(&map, &numbers));
    assert_eq!(run(1), run(2));
}
