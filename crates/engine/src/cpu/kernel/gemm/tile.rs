//! The register tile: the innermost product, `depth` fused multiply-adds per element with all
//! sums in registers. Every version computes the same chain, so they agree in every bit.

#[cfg(target_arch = "x86_64")]
use std::any::TypeId;
use std::marker::PhantomData;

use crate::cpu::real::Real;
use crate::cpu::simd::Level;

/// Sides of the register tile, and so the widths of the packed panels.
#[derive(Clone, Copy, Debug)]
pub(super) struct TileShape {
    pub rows: usize,
    pub columns: usize,
}

/// 24 of 32 vector registers hold sums, two a line of B, the rest broadcasts of A.
#[cfg(target_arch = "x86_64")]
const AVX512: TileShape = TileShape {
    rows: 12,
    columns: 32,
};
/// 12 of 16 vector registers hold sums.
#[cfg(target_arch = "x86_64")]
const AVX2: TileShape = TileShape {
    rows: 6,
    columns: 16,
};
const PLAIN: TileShape = TileShape {
    rows: 4,
    columns: 16,
};

impl TileShape {
    /// The most rows and columns that any has.
    pub(super) const LARGEST: Self = Self {
        rows: 12,
        columns: 32,
    };

    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(unused_variables, reason = "other machines have one level")
    )]
    pub(super) fn of<F: Real>(level: Level) -> Self {
        #[cfg(target_arch = "x86_64")]
        if TypeId::of::<F>() == TypeId::of::<f32>() {
            match level {
                Level::Avx512 => return AVX512,
                Level::Avx2 => return AVX2,
                Level::Baseline => {}
            }
        }
        PLAIN
    }
}

/// A row-major output that tasks write at once, each its own tiles.
pub(super) struct Destination<'a, F> {
    pointer: *mut F,
    row_stride: usize,
    slice: PhantomData<&'a mut [F]>,
}

// SAFETY: the pointer comes from a unique borrow of a slice of `F: Send`, and what dereferences it,
// `multiply` and what `row` returns, is unsafe to call by a contract that keeps writers apart.
unsafe impl<F: Send> Send for Destination<'_, F> {}
// SAFETY: as above.
unsafe impl<F: Send> Sync for Destination<'_, F> {}

impl<'a, F> Destination<'a, F> {
    pub(super) fn new(slice: &'a mut [F], row_stride: usize) -> Self {
        Self {
            pointer: slice.as_mut_ptr(),
            row_stride,
            slice: PhantomData,
        }
    }

    /// The same output from element (i, j) on.
    ///
    /// # Safety
    /// The element is inside the slice.
    pub(super) unsafe fn at(&self, i: usize, j: usize) -> Self {
        Self {
            // SAFETY: by the contract.
            pointer: unsafe { self.pointer.add(i * self.row_stride + j) },
            row_stride: self.row_stride,
            slice: PhantomData,
        }
    }

    /// The first elements of row `i`.
    ///
    /// # Safety
    /// They are inside the slice, and nobody else touches them.
    pub(super) unsafe fn row(&self, i: usize, columns: usize) -> &'a mut [F] {
        // SAFETY: by the contract.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.add(i * self.row_stride), columns) }
    }
}

/// `c[rows, columns] = [c +] (a·b [+ bias])` for one tile of at most [`TileShape`].
///
/// # Safety
/// The tile at `c` is inside the output and nobody else touches it during the call; `level` is
/// one this machine has.
#[expect(clippy::too_many_arguments, reason = "the operands of a product")]
pub(super) unsafe fn multiply<F: Real>(
    level: Level,
    depth: usize,
    a: &[F],
    b: &[F],
    (rows, columns): (usize, usize),
    c: &Destination<'_, F>,
    add: bool,
    bias: Option<&[F]>,
) {
    let shape = TileShape::of::<F>(level);
    assert!(a.len() >= depth * shape.rows && b.len() >= depth * shape.columns);
    assert!(rows <= shape.rows && columns <= shape.columns);
    assert!(bias.is_none_or(|bias| bias.len() >= columns));
    #[cfg(target_arch = "x86_64")]
    if TypeId::of::<F>() == TypeId::of::<f32>() && level != Level::Baseline {
        let operands = x86::Operands {
            depth,
            a: a.as_ptr().cast(),
            b: b.as_ptr().cast(),
            c: c.pointer.cast(),
            row_stride: c.row_stride,
            columns,
            add,
            bias: bias.map(|bias| bias.as_ptr().cast()),
        };
        // SAFETY: F is f32; lengths are asserted above, the rest is this function's contract.
        unsafe {
            match level {
                Level::Avx512 => x86::avx512_rows(rows, &operands),
                _ => x86::avx2_rows(rows, &operands),
            }
        }
        return;
    }
    let mut sums = [[F::ZERO; PLAIN.columns]; PLAIN.rows];
    plain(depth, a, b, &mut sums);
    for (i, sums) in sums.iter().enumerate().take(rows) {
        // SAFETY: row i of the tile, by the contract.
        let row = unsafe { c.row(i, columns) };
        store(row, sums, add, bias);
    }
}

/// `row = [row +] (sums [+ bias])`.
pub(super) fn store<F: Real>(row: &mut [F], sums: &[F], add: bool, bias: Option<&[F]>) {
    for (j, (out, &sum)) in row.iter_mut().zip(sums).enumerate() {
        let value = bias.map_or(sum, |bias| sum + bias[j]);
        *out = if add { *out + value } else { value };
    }
}

crate::cpu::simd::simd! {
    fn plain<F: Real>(
        depth: usize,
        a: &[F],
        b: &[F],
        out: &mut [[F; PLAIN.columns]; PLAIN.rows],
    ) {
        let mut sums = [[F::ZERO; PLAIN.columns]; PLAIN.rows];
        let lines = a.chunks_exact(PLAIN.rows).zip(b.chunks_exact(PLAIN.columns));
        for (a, b) in lines.take(depth) {
            for i in 0..PLAIN.rows {
                for j in 0..PLAIN.columns {
                    sums[i][j] = a[i].fma(b[j], sums[i][j]);
                }
            }
        }
        *out = sums;
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{AVX2, AVX512};

    pub(super) struct Operands {
        pub depth: usize,
        pub a: *const f32,
        pub b: *const f32,
        pub c: *mut f32,
        pub row_stride: usize,
        pub columns: usize,
        pub add: bool,
        pub bias: Option<*const f32>,
    }

    /// A tile with fewer rows or half the columns has its own version: the last rows of a
    /// matrix, or one as narrow as a small attention head, then cost their share.
    ///
    /// # Safety
    /// `operands` describe valid panels and a valid tile; the machine has AVX-512.
    pub(super) unsafe fn avx512_rows(rows: usize, operands: &Operands) {
        // SAFETY: this function's contract.
        unsafe {
            if operands.columns <= 16 {
                avx512_width::<1>(rows, operands);
            } else {
                avx512_width::<2>(rows, operands);
            }
        }
    }

    /// # Safety
    /// See [`avx512_rows`].
    unsafe fn avx512_width<const VECTORS: usize>(rows: usize, operands: &Operands) {
        // SAFETY: this function's contract.
        unsafe {
            match rows {
                1 => avx512::<1, VECTORS>(operands),
                2 => avx512::<2, VECTORS>(operands),
                3 => avx512::<3, VECTORS>(operands),
                4 => avx512::<4, VECTORS>(operands),
                5 => avx512::<5, VECTORS>(operands),
                6 => avx512::<6, VECTORS>(operands),
                7 => avx512::<7, VECTORS>(operands),
                8 => avx512::<8, VECTORS>(operands),
                9 => avx512::<9, VECTORS>(operands),
                10 => avx512::<10, VECTORS>(operands),
                11 => avx512::<11, VECTORS>(operands),
                _ => avx512::<12, VECTORS>(operands),
            }
        }
    }

    /// # Safety
    /// `operands` describe valid panels and a valid tile; the machine has AVX2 and FMA.
    pub(super) unsafe fn avx2_rows(rows: usize, operands: &Operands) {
        // SAFETY: this function's contract.
        unsafe {
            match rows {
                1 => avx2::<1>(operands),
                2 => avx2::<2>(operands),
                3 => avx2::<3>(operands),
                4 => avx2::<4>(operands),
                5 => avx2::<5>(operands),
                _ => avx2::<6>(operands),
            }
        }
    }

    /// Up to 16·`VECTORS` columns.
    ///
    /// # Safety
    /// See [`avx512_rows`].
    #[target_feature(enable = "avx512f")]
    unsafe fn avx512<const ROWS: usize, const VECTORS: usize>(operands: &Operands) {
        let &Operands {
            depth,
            mut a,
            mut b,
            c,
            row_stride,
            columns,
            add,
            bias,
        } = operands;
        let mut masks: [__mmask16; VECTORS] = [!0; VECTORS];
        if columns < 16 * VECTORS {
            masks[VECTORS - 1] = (1 << (columns % 16)) - 1;
        }
        // SAFETY: panels hold `depth` lines; masks keep reads and writes of C and of the bias
        // inside the tile; a prefetch may name any address.
        unsafe {
            for i in 0..ROWS {
                for vector in 0..VECTORS {
                    let place = c.wrapping_add(i * row_stride + 16 * vector);
                    _mm_prefetch::<_MM_HINT_T0>(place.cast());
                }
            }
            let mut sums = [[_mm512_setzero_ps(); VECTORS]; ROWS];
            for _ in 0..depth {
                let mut line = [_mm512_setzero_ps(); VECTORS];
                for (vector, line) in line.iter_mut().enumerate() {
                    *line = _mm512_loadu_ps(b.add(16 * vector));
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    let x = _mm512_set1_ps(*a.add(i));
                    for (sum, &line) in sums.iter_mut().zip(&line) {
                        *sum = _mm512_fmadd_ps(x, line, *sum);
                    }
                }
                a = a.add(AVX512.rows);
                b = b.add(AVX512.columns);
            }
            for (i, sums) in sums.iter().enumerate() {
                for (vector, &sum) in sums.iter().enumerate() {
                    let mask = masks[vector];
                    let mut value = sum;
                    if let Some(bias) = bias {
                        let bias = _mm512_maskz_loadu_ps(mask, bias.wrapping_add(16 * vector));
                        value = _mm512_add_ps(value, bias);
                    }
                    let place = c.wrapping_add(i * row_stride + 16 * vector);
                    if add {
                        value = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, place), value);
                    }
                    _mm512_mask_storeu_ps(place, mask, value);
                }
            }
        }
    }

    /// # Safety
    /// See [`avx2_rows`].
    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2<const ROWS: usize>(operands: &Operands) {
        let &Operands {
            depth,
            mut a,
            mut b,
            c,
            row_stride,
            columns,
            add,
            bias,
        } = operands;
        // SAFETY: panels hold `depth` lines; rows of C and the bias hold `columns` elements.
        unsafe {
            let mut sums = [[_mm256_setzero_ps(); 2]; ROWS];
            for _ in 0..depth {
                let line = [_mm256_loadu_ps(b), _mm256_loadu_ps(b.add(8))];
                for (i, sums) in sums.iter_mut().enumerate() {
                    let x = _mm256_set1_ps(*a.add(i));
                    sums[0] = _mm256_fmadd_ps(x, line[0], sums[0]);
                    sums[1] = _mm256_fmadd_ps(x, line[1], sums[1]);
                }
                a = a.add(AVX2.rows);
                b = b.add(AVX2.columns);
            }
            let bias = bias.map(|bias| std::slice::from_raw_parts(bias, columns));
            for (i, sums) in sums.iter().enumerate() {
                let mut values = [0.0_f32; AVX2.columns];
                _mm256_storeu_ps(values.as_mut_ptr(), sums[0]);
                _mm256_storeu_ps(values.as_mut_ptr().add(8), sums[1]);
                let row = std::slice::from_raw_parts_mut(c.add(i * row_stride), columns);
                super::store(row, &values, add, bias);
            }
        }
    }
}
