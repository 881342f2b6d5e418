//! The convolution against its definition, its gradient against differences.

use super::*;
use crate::cpu::kernel::check::*;

/// x is a column block of [rows, channels + 4], from column 3.
#[derive(Clone)]
struct Case {
    shape: ConvolutionShape,
    packed: Vec<f64>,
    w: Vec<f64>,
    b: Vec<f64>,
    dy: Vec<f64>,
}

fn case(batch: usize, seq: usize, channels: usize, width: usize) -> Case {
    Case {
        shape: ConvolutionShape {
            batch,
            seq,
            channels,
            width,
        },
        packed: random(batch * seq * (channels + 4), 1),
        w: random(channels * width, 2),
        b: random(channels, 3),
        dy: random(batch * seq * channels, 4),
    }
}

fn cases() -> [Case; 6] {
    [
        case(1, 1, 1, 4),
        case(2, 7, 5, 4),
        case(1, 37, 70, 4),
        case(2, 3, 17, 4),
        case(2, 7, 3, 1),
        case(1, 9, 16, 16),
    ]
}

fn columns<F>(shape: ConvolutionShape, packed: &[F]) -> Columns<'_, F> {
    Columns {
        data: packed,
        row_stride: shape.channels + 4,
        offset: 3,
        width: shape.channels,
    }
}

impl Case {
    fn reference(&self) -> Vec<f64> {
        let ConvolutionShape {
            batch,
            seq,
            channels,
            width,
        } = self.shape;
        let mut y = Vec::new();
        for b in 0..batch {
            for t in 0..seq {
                for c in 0..channels {
                    let mut u = self.b[c];
                    for j in 0..width {
                        if t + j + 1 >= width {
                            let row = b * seq + t + j + 1 - width;
                            let x = self.packed[row * (channels + 4) + 3 + c];
                            u += self.w[c * width + j] * x;
                        }
                    }
                    y.push(u / (1.0 + (-u).exp()));
                }
            }
        }
        y
    }

    /// (gradient of the packed buffer on top of ones, dw, db), both on top of twos.
    fn gradients<F: Real>(&self, mode: Accumulate) -> (Vec<F>, Vec<F>, Vec<F>) {
        let cast = |x: &[f64]| x.iter().map(|v| F::from_f64(*v)).collect::<Vec<F>>();
        let (packed, w, b, dy) = (
            cast(&self.packed),
            cast(&self.w),
            cast(&self.b),
            cast(&self.dy),
        );
        let mut dpacked = vec![F::ONE; packed.len()];
        let mut dw = vec![F::from_f64(2.0); w.len()];
        let mut db = vec![F::from_f64(2.0); b.len()];
        let channels = self.shape.channels;
        let [dx] = ColumnsMut::split(&mut dpacked, channels + 4, [(3, channels)]);
        let x = columns(self.shape, &packed);
        let (dw_out, db_out) = ((&mut dw[..], mode), (&mut db[..], mode));
        backward(self.shape, &dy, x, &w, &b, &dx, Some([dw_out, db_out]));
        (dpacked, dw, db)
    }
}

#[test]
fn forward_is_the_definition() {
    for case in cases() {
        let expected = case.reference();
        let mut y = vec![0.0; expected.len()];
        let x = columns(case.shape, &case.packed);
        forward(case.shape, x, &case.w, &case.b, &mut y);
        assert_close("y", &y, &expected, 1e-14);
        let (packed, w, b) = (single(&case.packed), single(&case.w), single(&case.b));
        let mut y = vec![0.0; expected.len()];
        forward(case.shape, columns(case.shape, &packed), &w, &b, &mut y);
        assert_single_close("y in f32", &y, &expected, 1e-5);
    }
}

#[test]
fn gradients_are_those_of_the_definition() {
    for case in cases() {
        let (dpacked, dw, db) = case.gradients::<f64>(Accumulate::Overwrite);
        let with = |change: &dyn Fn(&mut Case)| {
            let mut moved = case.clone();
            change(&mut moved);
            inner_product(&moved.reference(), &case.dy)
        };
        // The ones that were there stay, in the columns beside x too.
        let added: Vec<f64> = dpacked.iter().map(|v| v - 1.0).collect();
        assert_gradient("x", &case.packed, &added, |v| {
            with(&|c| c.packed = v.to_vec())
        });
        assert_gradient("w", &case.w, &dw, |v| with(&|c| c.w = v.to_vec()));
        assert_gradient("b", &case.b, &db, |v| with(&|c| c.b = v.to_vec()));

        let (_, more_w, more_b) = case.gradients::<f64>(Accumulate::Add);
        let plus_two = |x: &[f64]| x.iter().map(|v| v + 2.0).collect::<Vec<_>>();
        assert_eq!((more_w, more_b), (plus_two(&dw), plus_two(&db)));
        let (_, dw32, db32) = case.gradients::<f32>(Accumulate::Overwrite);
        assert_single_close("dw in f32", &dw32, &dw, 1e-5);
        assert_single_close("db in f32", &db32, &db, 1e-5);
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let case = case(3, 37, 200, 4);
    let run = |threads| {
        with_threads(threads, || {
            let x = single(&case.packed);
            let mut y = vec![0.0; case.dy.len()];
            let (w, b) = (single(&case.w), single(&case.b));
            forward(case.shape, columns(case.shape, &x), &w, &b, &mut y);
            (y, case.gradients::<f32>(Accumulate::Overwrite))
        })
    };
    assert_eq!(run(1), run(2));
}
