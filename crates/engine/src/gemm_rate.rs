//! The speed of a plain matrix product on this machine, now: what a step is held against.

use std::time::Instant;

use crate::Executor;
use crate::cpu::kernel::gemm::{Matrix, gemm};
use crate::cpu::parallel::Accumulate;

/// A square product with its operands.
pub struct Product {
    size: usize,
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
}

impl Product {
    pub fn new(size: usize) -> Self {
        let fill = |factor: f32| -> Vec<f32> {
            let values = (0..size * size).map(|i| factor * ((i % 97) as f32 - 48.0));
            values.collect()
        };
        Self {
            size,
            a: fill(0.01),
            b: fill(0.02),
            c: vec![0.0; size * size],
        }
    }

    /// Operations per second of one product on the executor's threads.
    pub fn rate(&mut self, executor: &Executor) -> f64 {
        let n = self.size;
        let (a, b) = (Matrix::row_major(&self.a, n), Matrix::row_major(&self.b, n));
        let c = &mut self.c;
        let start = Instant::now();
        executor.install(|| gemm(n, n, n, a, b, c, n, Accumulate::Overwrite, None));
        2.0 * (n as f64).powi(3) / start.elapsed().as_secs_f64()
    }
}
