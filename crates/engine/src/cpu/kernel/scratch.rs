//! Small per-thread blocks (packed panels, attention tiles) that a kernel needs while it
//! runs. Each thread allocates its block the first time and keeps it, so that a step does
//! not allocate.

use std::cell::Cell;

use crate::cpu::real::Real;

/// One cache line, so that a block starts on a line whatever the element type.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u64; 8]);

/// Which kernel's block: attention holds its own while it calls the matrix product.
#[derive(Clone, Copy)]
pub(super) enum Owner {
    Gemm,
    Attention,
}

thread_local! {
    static BLOCKS: [Cell<Vec<Line>>; 2] = const { [Cell::new(Vec::new()), Cell::new(Vec::new())] };
}

/// Runs `body` on `len` elements whose contents are left over from earlier calls.
pub(super) fn with<F: Real, R>(owner: Owner, len: usize, body: impl FnOnce(&mut [F]) -> R) -> R {
    let lines = (len * size_of::<F>()).div_ceil(size_of::<Line>());
    // The block is taken out while in use: a nested call of the same owner would then
    // allocate its own instead of sharing memory.
    let mut block = BLOCKS.with(|blocks| blocks[owner as usize].take());
    if block.len() < lines {
        block.resize(lines, Line([0; 8]));
    }
    // SAFETY: the block holds at least `len` elements, is aligned to 64 bytes and fully
    // initialised, and any bits are a value of `F`, which is f32 or f64.
    let elements = unsafe { std::slice::from_raw_parts_mut(block.as_mut_ptr().cast::<F>(), len) };
    let result = body(elements);
    BLOCKS.with(|blocks| blocks[owner as usize].set(block));
    result
}
