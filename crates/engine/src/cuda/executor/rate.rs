//! The rate of a card's large products.

use std::time::Instant;

use cinch_graph::DType;
use cinch_plan::Placement;

use super::CudaExecutor;
use crate::cuda::command::{Command, MatrixAt, Product};
use crate::engine::EngineOptions;
use crate::error::EngineError;

/// Operations per second of a large square product on the first card: what a step is held
/// against. The operands are random, because zeros run faster.
pub fn matrix_rate(dtype: DType, tf32: bool) -> Result<f64, EngineError> {
    const SIZE: usize = 8192;
    const RUNS: usize = 10;
    let bytes = (SIZE * SIZE) as u64 * dtype.size();
    let workspace_bytes = 32 << 20;
    let options = EngineOptions {
        tf32,
        ..EngineOptions::default()
    };
    let mut executor = CudaExecutor::new(3 * bytes + workspace_bytes, options)?;
    let mut state = 1_u32;
    let mut operand = vec![0_u8; bytes as usize];
    for (index, byte) in operand.iter_mut().enumerate() {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // The high byte of each element holds sign and exponent: numbers around one.
        let high = index as u64 % dtype.size() == dtype.size() - 1;
        *byte = if high {
            0x3f | ((state >> 24) as u8 & 0x80)
        } else {
            (state >> 16) as u8
        };
    }
    let at = |address| MatrixAt {
        address,
        row_stride: SIZE,
        dtype,
        transposed: false,
    };
    let product = Command::Product(Product {
        m: SIZE,
        n: SIZE,
        k: SIZE,
        a: at(0),
        b: at(bytes),
        c: at(2 * bytes),
        scale: 1.0,
        accumulate: false,
        bias: None,
        workspace: 3 * bytes,
        workspace_bytes,
    });
    // Choosing an algorithm leaves zeros in the operands.
    executor.make_ready(&product, dtype)?;
    for offset in [0, bytes] {
        executor.write(Placement::in_arena(offset, bytes), &operand)?;
    }
    let mut best = 0.0_f64;
    for _ in 0..3 {
        executor.synchronize()?;
        let start = Instant::now();
        for _ in 0..RUNS {
            executor.issue(&product, dtype, &executor.stream)?;
        }
        executor.synchronize()?;
        let rate = 2.0 * (SIZE as f64).powi(3) * RUNS as f64 / start.elapsed().as_secs_f64();
        best = best.max(rate);
    }
    Ok(best)
}
