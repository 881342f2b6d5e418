//! The speed of vector code on this machine, now: what ops are held against that compute more than
//! they move, but no matrix products.

use std::time::Instant;

use rayon::prelude::*;

use crate::Executor;
use crate::cpu::simd::simd;

/// In the nearest cache of a core.
const ELEMENTS: usize = 4096;
const PASSES: usize = 256;
const RUNS: usize = 5;

simd! {
    fn sigmoids<F: Real>(values: &mut [F]) {
        for value in values {
            *value = value.sigmoid();
        }
    }
}

/// Sigmoids per second, on the executor's threads: the best of a few runs.
pub fn sigmoid_rate(executor: &Executor) -> f64 {
    let threads = executor.num_threads();
    let mut all = vec![0.5_f32; threads * ELEMENTS];
    let mut run = || {
        let start = Instant::now();
        executor.install(|| {
            let lines = all.par_chunks_mut(ELEMENTS).with_max_len(1);
            lines.for_each(|line| (0..PASSES).for_each(|_| sigmoids(line)));
        });
        (threads * ELEMENTS * PASSES) as f64 / start.elapsed().as_secs_f64()
    };
    (0..RUNS).map(|_| run()).fold(0.0, f64::max)
}
