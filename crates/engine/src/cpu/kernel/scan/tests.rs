//! The scan against its definition, its gradient against differences, and what must not
//! change a bit: the chunk length and the number of threads.

use super::*;
use crate::cpu::kernel::check::*;
use crate::cpu::real::Real;

/// Every input of one case. x and z are column blocks of `packed` [rows, inner + 3 + inner],
/// x first, so that strides and offsets matter.
#[derive(Clone)]
struct Case<F> {
    shape: ScanShape,
    gated: bool,
    packed: Vec<F>,
    dt: Vec<F>,
    projection: Vec<F>,
    a_log: Vec<F>,
    skip: Vec<F>,
    dy: Vec<F>,
}

/// Every result of the two passes.
#[derive(Debug, PartialEq)]
struct Results<F> {
    y: Vec<F>,
    packed: Vec<F>,
    dt: Vec<F>,
    projection: Vec<F>,
    a_log: Vec<F>,
    skip: Vec<F>,
}

/// What the columns between x and z hold before and after.
const UNTOUCHED: f64 = 5.0;

fn shape(batch: usize, seq: usize, inner: usize, state: usize, chunk: usize) -> ScanShape {
    ScanShape {
        batch,
        seq,
        inner,
        state,
        rank: 3,
        chunk,
    }
}

fn case(shape: ScanShape, gated: bool) -> Case<f64> {
    let rows = shape.rows();
    let times = |factor: f64, x: Vec<f64>| x.into_iter().map(|v| v * factor).collect();
    Case {
        shape,
        gated,
        packed: times(1.5, random(rows * (2 * shape.inner + 3), 1)),
        dt: times(2.0, random(rows * shape.inner, 2)),
        projection: random(rows * shape.projection(), 3),
        a_log: random(shape.inner * shape.state, 4),
        skip: random(shape.inner, 5),
        dy: random(rows * shape.inner, 6),
    }
}

impl Case<f64> {
    fn single(&self) -> Case<f32> {
        Case {
            shape: self.shape,
            gated: self.gated,
            packed: single(&self.packed),
            dt: single(&self.dt),
            projection: single(&self.projection),
            a_log: single(&self.a_log),
            skip: single(&self.skip),
            dy: single(&self.dy),
        }
    }

    /// ⟨y, dy⟩ by the definition, one number at a time.
    fn reference(&self) -> Vec<f64> {
        let ScanShape {
            batch,
            seq,
            inner,
            state,
            rank,
            ..
        } = self.shape;
        let stride = 2 * inner + 3;
        let mut y = vec![0.0; batch * seq * inner];
        for b in 0..batch {
            for c in 0..inner {
                let mut h = vec![0.0; state];
                for t in 0..seq {
                    let row = b * seq + t;
                    let x = self.packed[row * stride + c];
                    let delta = self.dt[row * inner + c].exp().ln_1p();
                    let p = &self.projection[row * self.shape.projection() + rank..];
                    let mut s = self.skip[c] * x;
                    for n in 0..state {
                        let a = -self.a_log[c * state + n].exp();
                        h[n] = (delta * a).exp() * h[n] + delta * x * p[n];
                        s += h[n] * p[state + n];
                    }
                    let z = self.packed[row * stride + inner + 3 + c];
                    let gate = if self.gated {
                        z / (1.0 + (-z).exp())
                    } else {
                        1.0
                    };
                    y[row * inner + c] = s * gate;
                }
            }
        }
        y
    }
}

impl<F: Real> Case<F> {
    fn inputs(&self) -> Inputs<'_, F> {
        let stride = 2 * self.shape.inner + 3;
        let columns = |offset| Columns {
            data: &self.packed,
            row_stride: stride,
            offset,
            width: self.shape.inner,
        };
        Inputs {
            x: columns(0),
            gate: self.gated.then(|| columns(self.shape.inner + 3)),
            dt: &self.dt,
            projection: &self.projection,
            a_log: &self.a_log,
            skip: &self.skip,
        }
    }

    fn forward(&self) -> (Vec<F>, Vec<F>) {
        let mut y = vec![F::ZERO; self.shape.rows() * self.shape.inner];
        let mut states = vec![F::from_f64(f64::NAN); self.shape.states_len()];
        forward(self.shape, &self.inputs(), &mut y, Some(&mut states));
        (y, states)
    }

    fn run(&self, mode: Accumulate) -> Results<F> {
        let (y, states) = self.forward();
        let inner = self.shape.inner;
        let stride = 2 * inner + 3;
        let stale = |len: usize| vec![F::from_f64(UNTOUCHED); len];
        let mut results = Results {
            y,
            packed: stale(self.packed.len()),
            dt: stale(self.dt.len()),
            projection: stale(self.projection.len()),
            a_log: stale(self.a_log.len()),
            skip: stale(self.skip.len()),
        };
        let blocks = [(0, inner), (inner + 3, inner)];
        let [x, gate] = ColumnsMut::split(&mut results.packed, stride, blocks);
        let mut workspace = vec![F::from_f64(f64::NAN); backward_workspace(self.shape)];
        backward(
            self.shape,
            &self.inputs(),
            &states,
            &self.dy,
            &mut workspace,
            Gradients {
                x,
                gate: self.gated.then_some(gate),
                dt: &mut results.dt,
                projection: &mut results.projection,
                a_log: (&mut results.a_log, mode),
                skip: (&mut results.skip, mode),
            },
        );
        results
    }
}

/// Odd sizes: one step, one state, a ragged register, a ragged group, a ragged chunk.
fn odd_shapes() -> [ScanShape; 6] {
    [
        shape(1, 1, 1, 1, 1),
        shape(2, 7, 5, 16, 3),
        shape(1, 37, 70, 16, 8),
        shape(3, 5, 17, 3, 100),
        shape(1, 9, 130, 64, 4),
        shape(2, 6, 64, 16, 6),
    ]
}

#[test]
fn forward_is_the_definition() {
    for shape in odd_shapes() {
        for gated in [false, true] {
            let case = case(shape, gated);
            let expected = case.reference();
            let (y, _) = case.forward();
            assert_close("y", &y, &expected, 1e-13);
            let (y, _) = case.single().forward();
            assert_single_close("y in f32", &y, &expected, 1e-5);
            let mut without_states = vec![0.0; y.len()];
            forward(shape, &case.single().inputs(), &mut without_states, None);
            assert_eq!(without_states, y);
        }
    }
}

#[test]
fn gradients_are_those_of_the_definition() {
    for (shape, gated) in [
        (shape(2, 7, 5, 3, 3), true),
        (shape(2, 5, 3, 16, 2), false),
        (shape(1, 3, 67, 2, 2), true),
    ] {
        let case = case(shape, gated);
        let results = case.run(Accumulate::Overwrite);
        let (inner, stride) = (shape.inner, 2 * shape.inner + 3);
        let loss = |case: &Case<f64>| inner_product(&case.reference(), &case.dy);

        // Outside the written columns the buffer keeps what it held, where differences give 0.
        let mut packed = results.packed.clone();
        for (i, value) in packed.iter_mut().enumerate() {
            let column = i % stride;
            let written = column < inner || (gated && column >= inner + 3);
            if !written {
                assert_eq!(*value, UNTOUCHED);
                *value = 0.0;
            }
        }
        let with = |change: &dyn Fn(&mut Case<f64>)| {
            let mut moved = case.clone();
            change(&mut moved);
            loss(&moved)
        };
        assert_gradient("packed", &case.packed, &packed, |v| {
            with(&|c| c.packed = v.to_vec())
        });
        assert_gradient("dt", &case.dt, &results.dt, |v| {
            with(&|c| c.dt = v.to_vec())
        });
        assert_gradient("projection", &case.projection, &results.projection, |v| {
            with(&|c| c.projection = v.to_vec())
        });
        assert_gradient("a_log", &case.a_log, &results.a_log, |v| {
            with(&|c| c.a_log = v.to_vec())
        });
        assert_gradient("skip", &case.skip, &results.skip, |v| {
            with(&|c| c.skip = v.to_vec())
        });
    }
}

#[test]
fn parameter_gradients_are_added_to_what_is_there() {
    let case = case(shape(2, 4, 5, 3, 2), true);
    let first = case.run(Accumulate::Overwrite);
    let added = case.run(Accumulate::Add);
    let sum = |x: &[f64]| x.iter().map(|v| v + UNTOUCHED).collect::<Vec<_>>();
    assert_close("a_log", &added.a_log, &sum(&first.a_log), 1e-14);
    assert_close("skip", &added.skip, &sum(&first.skip), 1e-14);
    assert_eq!(added.dt, first.dt);
}

#[test]
fn single_precision_follows_double() {
    for shape in odd_shapes() {
        let case = case(shape, true);
        let double = case.run(Accumulate::Overwrite);
        let single = case.single().run(Accumulate::Overwrite);
        assert_single_close("packed", &single.packed, &double.packed, 1e-5);
        assert_single_close("dt", &single.dt, &double.dt, 1e-5);
        assert_single_close("projection", &single.projection, &double.projection, 1e-5);
        assert_single_close("a_log", &single.a_log, &double.a_log, 1e-5);
        assert_single_close("skip", &single.skip, &double.skip, 1e-5);
    }
}

#[test]
fn neither_chunk_length_nor_threads_change_a_bit() {
    let mut reference = None;
    for chunk in [1, 5, 16, 37, 64] {
        for threads in [1, 2] {
            let case = case(shape(2, 37, 150, 16, chunk), true).single();
            let results = with_threads(threads, || case.run(Accumulate::Overwrite));
            let reference = reference.get_or_insert_with(|| case.run(Accumulate::Overwrite));
            assert_eq!(*reference, results, "chunk {chunk}, {threads} threads");
        }
    }
}
