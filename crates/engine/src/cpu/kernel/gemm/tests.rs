use super::super::check::{random, with_threads};
use super::*;
use crate::cpu::dropout::RandomState;

fn numbers<F: Real>(seed: u64, len: usize) -> Vec<F> {
    random(len, seed).into_iter().map(F::from_f64).collect()
}

const SIZES: [(usize, usize, usize); 10] = [
    (1, 1, 1),
    (1, 70, 300),
    (5, 3, 0),
    (13, 33, 17),
    (37, 16, 256),
    (24, 64, 257),
    (64, 64, 64),
    (100, 97, 600),
    (7, 1100, 40),
    (530, 50, 31),
];

/// Operands in both orders, laid out with gaps between rows.
struct Case<F> {
    size: (usize, usize, usize),
    a: Vec<F>,
    b: Vec<F>,
    bias: Vec<F>,
    c: Vec<F>,
    transposed: (bool, bool),
}

impl<F: Real> Case<F> {
    fn new((m, n, k): (usize, usize, usize), transposed: (bool, bool)) -> Self {
        let length = |rows, columns, turned| {
            if turned {
                columns * (rows + 3)
            } else {
                rows * (columns + 3)
            }
        };
        Self {
            size: (m, n, k),
            a: numbers(1, length(m, k, transposed.0)),
            b: numbers(2, length(k, n, transposed.1)),
            bias: numbers(3, n),
            c: numbers(4, m * (n + 2)),
            transposed,
        }
    }

    fn a(&self) -> Matrix<'_, F> {
        let (m, _, k) = self.size;
        match self.transposed.0 {
            false => Matrix::row_major(&self.a, k + 3),
            true => Matrix::row_major(&self.a, m + 3).transposed(),
        }
    }

    fn b(&self) -> Matrix<'_, F> {
        let (_, n, k) = self.size;
        match self.transposed.1 {
            false => Matrix::row_major(&self.b, n + 3),
            true => Matrix::row_major(&self.b, k + 3).transposed(),
        }
    }

    fn run(&self, mode: Accumulate, bias: bool) -> Vec<F> {
        let (m, n, k) = self.size;
        let mut c = self.c.clone();
        let bias = bias.then_some(&self.bias[..]);
        gemm(m, n, k, self.a(), self.b(), &mut c, n + 2, mode, bias);
        c
    }

    fn naive(&self, mode: Accumulate, bias: bool) -> Vec<f64> {
        let (m, n, k) = self.size;
        let mut c: Vec<f64> = self.c.iter().map(|x| x.to_f64()).collect();
        let at = |x: &Matrix<'_, F>, i: usize, j: usize| {
            x.data[i * x.row_stride + j * x.col_stride].to_f64()
        };
        for i in 0..m {
            for j in 0..n {
                let mut sum = 0.0;
                for p in 0..k {
                    sum += at(&self.a(), i, p) * at(&self.b(), p, j);
                }
                if bias {
                    sum += self.bias[j].to_f64();
                }
                if mode == Accumulate::Add {
                    sum += c[i * (n + 2) + j];
                }
                c[i * (n + 2) + j] = sum;
            }
        }
        c
    }
}

fn check_against_naive<F: Real>(tolerance: f64) {
    for size in SIZES {
        for transposed in [(false, false), (false, true), (true, false), (true, true)] {
            for mode in [Accumulate::Overwrite, Accumulate::Add] {
                for bias in [false, true] {
                    let case = Case::<F>::new(size, transposed);
                    let ours = case.run(mode, bias);
                    let exact = case.naive(mode, bias);
                    for (place, (x, e)) in ours.iter().zip(&exact).enumerate() {
                        let error = (x.to_f64() - e).abs();
                        assert!(
                            error <= tolerance * (1.0 + size.2 as f64).sqrt(),
                            "{size:?} {transposed:?} {mode:?} bias {bias} at {place}: {x:?} {e}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn f32_agrees_with_the_definition() {
    check_against_naive::<f32>(1e-6);
}

#[test]
fn f64_agrees_with_the_definition() {
    check_against_naive::<f64>(1e-14);
}

#[test]
fn strides_on_both_axes_work() {
    let data = numbers::<f32>(5, 400);
    let spaced = Matrix {
        data: &data,
        row_stride: 40,
        col_stride: 2,
    };
    let ones = vec![1.0_f32; 20];
    let mut c = vec![0.0; 10];
    gemm(
        10,
        1,
        20,
        spaced,
        Matrix::row_major(&ones, 1),
        &mut c,
        1,
        Accumulate::Overwrite,
        None,
    );
    for (i, &sum) in c.iter().enumerate() {
        let exact: f32 = (0..20).map(|p| data[40 * i + 2 * p]).sum();
        assert!((sum - exact).abs() < 1e-5);
    }
}

/// Each element must be the documented chain exactly, in every tile and at every level.
#[test]
fn every_level_computes_the_same_chain() {
    let (m, n, k) = (29, 71, 530);
    let case = Case::<f32>::new((m, n, k), (false, true));
    let chain = |i: usize, j: usize| {
        let mut value = case.c[i * (n + 2) + j];
        for p0 in (0..k).step_by(DEPTH) {
            let mut sum = 0.0_f32;
            for p in p0..k.min(p0 + DEPTH) {
                sum = case.a[i * (k + 3) + p].mul_add(case.b[j * (k + 3) + p], sum);
            }
            if p0 == 0 {
                sum += case.bias[j];
            }
            value += sum;
        }
        value
    };
    for level in [Level::Baseline, Level::Avx2, Level::Avx512] {
        if level > simd::level() {
            continue;
        }
        let mut c = case.c.clone();
        let operands = (case.a(), case.b());
        let mut product = Product::new(
            (m, n, k),
            operands,
            &mut c,
            n + 2,
            Accumulate::Add,
            Some(&case.bias),
        )
        .expect("C is not empty");
        product.level = level;
        product.shape = TileShape::of::<f32>(level);
        product.run_serial();
        for i in 0..m {
            for j in 0..n {
                assert_eq!(c[i * (n + 2) + j], chain(i, j), "{level:?} ({i}, {j})");
            }
        }
    }
}

#[test]
fn threads_tiles_and_other_rows_do_not_change_a_bit() {
    let (m, n, k) = (300, 200, 300);
    let case = Case::<f32>::new((m, n, k), (false, true));
    let run = |threads| with_threads(threads, || case.run(Accumulate::Add, true));
    let one = run(1);
    assert_eq!(one, run(2));
    assert_eq!(one, run(7));
    for row in [0, 11, 12, 299] {
        let a = Matrix::row_major(&case.a[row * (k + 3)..], k + 3);
        let mut c = case.c[row * (n + 2)..][..n].to_vec();
        gemm_serial(
            1,
            n,
            k,
            a,
            case.b(),
            &mut c,
            n,
            Accumulate::Add,
            Some(&case.bias),
        );
        assert_eq!(c[..], one[row * (n + 2)..][..n]);
    }
}

#[test]
#[should_panic(expected = "B [4, 5] with strides 5 and 1 does not fit 19 elements")]
fn a_short_operand_is_caught() {
    let x = [0.0_f32; 19];
    let y = Matrix::row_major(&x, 5);
    gemm(
        2,
        5,
        4,
        y,
        y,
        &mut [0.0; 10],
        5,
        Accumulate::Overwrite,
        None,
    );
}

/// A dropped operand gives what its product gives after it was dropped as a whole, and a dropped
/// result what each block of k adds to it, in every bit.
#[test]
fn dropped_matrices_are_dropped_by_their_own_rows_and_columns() {
    let state = RandomState {
        key: [3, 4],
        row_offset: 2,
    };
    let dropout = Dropout::new(state, 7, 0.3);
    let drop = |(rows, columns, stride): (usize, usize, usize), x: &mut [f32]| {
        for row in 0..rows {
            let base = dropout.row(row);
            for column in 0..columns {
                x[row * stride + column] *= dropout.factor::<f32>(base, column);
            }
        }
    };
    for (m, n, k) in [
        (8, 150, 700),
        (530, 8, 300),
        (130, 97, 8),
        (40, 1100, 300),
        (1, 5, 3),
    ] {
        let case = Case::<f32>::new((m, n, k), (false, false));
        for mode in [Accumulate::Overwrite, Accumulate::Add] {
            let run = |side| {
                let mut c = case.c.clone();
                let bias = Some(&case.bias[..]);
                let mask = (side, dropout);
                gemm_dropped(
                    m,
                    n,
                    k,
                    0.5,
                    case.a(),
                    case.b(),
                    &mut c,
                    n + 2,
                    mode,
                    bias,
                    mask,
                );
                c
            };
            // Halving is exact, so that it may come before the product.
            let mut halved = Case::<f32>::new((m, n, k), (false, false));
            halved.a.iter_mut().for_each(|x| *x *= 0.5);
            let a = halved.a.clone();
            drop((m, k, k + 3), &mut halved.a);
            assert_eq!(run(Side::A), halved.run(mode, true), "A of {m} {n} {k}");
            halved.a = a;
            drop((k, n, n + 3), &mut halved.b);
            assert_eq!(run(Side::B), halved.run(mode, true), "B of {m} {n} {k}");
            halved.b.clone_from(&case.b);

            let mut expected = case.c.clone();
            for p in (0..k).step_by(DEPTH) {
                let mut block = vec![0.0; m * (n + 2)];
                let a = Matrix::row_major(&halved.a[p..], k + 3);
                let b = Matrix::row_major(&halved.b[p * (n + 3)..], n + 3);
                let bias = (p == 0).then_some(&case.bias[..]);
                let (depth, overwrite) = (DEPTH.min(k - p), Accumulate::Overwrite);
                gemm_serial(m, n, depth, a, b, &mut block, n + 2, overwrite, bias);
                drop((m, n, n + 2), &mut block);
                for (place, (c, &x)) in expected.iter_mut().zip(&block).enumerate() {
                    if place % (n + 2) < n {
                        let add = p > 0 || mode == Accumulate::Add;
                        *c = if add { *c + x } else { x };
                    }
                }
            }
            assert_eq!(run(Side::C), expected, "C of {m} {n} {k}");
        }
    }
}
