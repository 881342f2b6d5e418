//! The speed of copying memory on this machine, now: what ops are held against that do little
//! arithmetic.

use std::time::Instant;

use rayon::prelude::*;

use crate::Executor;

/// Read and written bytes of a copy that is larger than the caches of the cores that copy.
pub const LARGE: u64 = 128 << 20;
/// Elements copied by one task.
const TASK: usize = 1 << 16;
const RUNS: usize = 5;

/// Bytes per second of copies of so many, read and written ones counted, on the executor's threads:
/// the best of a few, after one that touches the memory.
pub fn copy_rate(executor: &Executor, bytes: u64) -> f64 {
    let elements = bytes as usize / (2 * size_of::<f32>());
    let from = vec![1.0_f32; elements];
    let mut to = vec![0.0_f32; elements];
    let mut copy = || {
        let start = Instant::now();
        executor.install(|| {
            let pairs = to.par_chunks_mut(TASK).zip(from.par_chunks(TASK));
            pairs.for_each(|(to, from)| to.copy_from_slice(from));
        });
        bytes as f64 / start.elapsed().as_secs_f64()
    };
    copy();
    (0..RUNS).map(|_| copy()).fold(0.0, f64::max)
}
