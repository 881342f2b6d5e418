//! Prints the rate of the matrix product for the shapes of a training step, next to a large
//! square product. Run with `cargo bench -p cinch-engine --bench gemm`.
#![expect(clippy::print_stdout, reason = "the rates are the program's output")]

use std::time::Instant;

use cinch_engine::cpu::kernel::gemm::{Matrix, gemm};
use cinch_engine::cpu::parallel::Accumulate;

/// Which operand is stored the other way round.
#[derive(Clone, Copy)]
enum Form {
    /// x·Wᵀ
    Forward,
    /// dy·W
    GradInput,
    /// dyᵀ·x
    GradWeight,
}

const SHAPES: [(Form, usize, usize, usize); 16] = [
    (Form::GradInput, 2048, 2048, 2048),
    (Form::Forward, 2048, 2048, 2048),
    (Form::Forward, 256, 2048, 512),
    (Form::Forward, 256, 1536, 512),
    (Form::Forward, 256, 3072, 768),
    (Form::Forward, 256, 50257, 512),
    (Form::Forward, 256, 96, 1024),
    (Form::Forward, 256, 1024, 64),
    (Form::GradInput, 256, 512, 2048),
    (Form::GradInput, 256, 768, 50257),
    (Form::GradWeight, 2048, 512, 256),
    (Form::GradWeight, 50257, 512, 256),
    (Form::GradWeight, 50257, 768, 256),
    (Form::GradWeight, 3072, 768, 256),
    (Form::Forward, 64, 64, 64),
    (Form::Forward, 1, 50257, 512),
];

fn main() {
    println!("threads: {}", rayon::current_num_threads());
    let mut square = 0.0;
    for (form, m, n, k) in SHAPES {
        let a: Vec<f32> = (0..m * k).map(|i| (i % 17) as f32 - 8.0).collect();
        let b: Vec<f32> = (0..k * n).map(|i| (i % 13) as f32 - 6.0).collect();
        let mut c = vec![0.0_f32; m * n];
        let (name, a, b) = match form {
            Form::Forward => (
                "x·Wᵀ ",
                Matrix::row_major(&a, k),
                Matrix::row_major(&b, k).transposed(),
            ),
            Form::GradInput => ("dy·W ", Matrix::row_major(&a, k), Matrix::row_major(&b, n)),
            Form::GradWeight => (
                "dyᵀ·x",
                Matrix::row_major(&a, m).transposed(),
                Matrix::row_major(&b, n),
            ),
        };
        let work = 2.0 * (m * n * k) as f64;
        let inner = (2e7 / work).ceil() as usize;
        let mut best = f64::INFINITY;
        let begin = Instant::now();
        while begin.elapsed().as_secs_f64() < 0.6 {
            let start = Instant::now();
            for _ in 0..inner {
                gemm(m, n, k, a, b, &mut c, n, Accumulate::Overwrite, None);
            }
            best = best.min(start.elapsed().as_secs_f64() / inner as f64);
        }
        let rate = work / best / 1e9;
        if square == 0.0 {
            square = rate;
        }
        println!(
            "{name} {m:>6} × {n:>6} × {k:>6}  {rate:>7.1} GFLOP/s  {:>4.0} % of the square",
            100.0 * rate / square
        );
    }
}
