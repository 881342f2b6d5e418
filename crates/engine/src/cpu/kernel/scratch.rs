//! Small per-thread blocks (packed panels, attention tiles) that a kernel needs while it
//! runs. The executor's threads set them aside when they start, so that a step does not
//! allocate; any other thread allocates its block the first time and keeps it.

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
    Rotary,
    Expression,
}

thread_local! {
    static BLOCKS: [Cell<Vec<Line>>; 4] = const { [const { Cell::new(Vec::new()) }; 4] };
}

impl Owner {
    const ALL: [Self; 4] = [Self::Gemm, Self::Attention, Self::Rotary, Self::Expression];

    fn largest_bytes(self) -> usize {
        match self {
            Self::Gemm => super::gemm::SCRATCH_BYTES,
            Self::Attention => super::attention::SCRATCH_BYTES,
            Self::Rotary => super::rotary::SCRATCH_BYTES,
            Self::Expression => super::expression::SCRATCH_BYTES,
        }
    }
}

/// Sets aside what the kernels need on this thread at the most. That takes addresses, no
/// memory: pages come with their first use.
pub(in crate::cpu) fn reserve() {
    for owner in Owner::ALL {
        let lines = owner.largest_bytes().div_ceil(size_of::<Line>());
        BLOCKS.with(|blocks| {
            let mut block = blocks[owner as usize].take();
            block.reserve_exact(lines.saturating_sub(block.len()));
            blocks[owner as usize].set(block);
        });
    }
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
    // SAFETY: the block holds at least `len` elements and is fully initialised; it is aligned to
    // 64 bytes, and any bits are a value of `F`, by the contract of `Element`.
    let elements = unsafe { std::slice::from_raw_parts_mut(block.as_mut_ptr().cast::<F>(), len) };
    let result = body(elements);
    BLOCKS.with(|blocks| blocks[owner as usize].set(block));
    result
}
