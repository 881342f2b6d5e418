//! Matrix products: `C = A·B`, the bulk of the time of a training step.
//!
//! C is cut into tiles, one task each. A task walks k in blocks of `DEPTH`, packs its block
//! of A into panels, then packs and uses one panel of B at a time. Tasks share nothing, so
//! there are no barriers, and the scratch is per thread.
//!
//! An element of C is, per block of k, one chain of fused multiply-adds from zero in the order
//! of k, and the blocks are added in order. That holds in every tile, at every edge and for
//! every instruction set, so neither the other rows and columns nor the number of threads can
//! change a bit of it. The cut may therefore follow the number of threads.

mod dropped;
mod pack;
mod tile;

pub use dropped::Side;

use cinch_graph::CpuTiles;

use crate::cpu::dropout::Dropout;
use crate::cpu::parallel::{self, Accumulate};
use crate::cpu::real::Real;
use crate::cpu::simd::{self, Level};

use super::scratch::{self, Owner};
use dropped::Dropped;
use pack::Strided;
use tile::{Destination, TileShape};

/// See [`CpuTiles`].
const DEPTH: usize = CpuTiles::DEPTH;
/// What a task needs at the most in single precision: the packed block of A, its last panel
/// filled up to at most 16 rows, and a panel of B.
pub(super) const SCRATCH_BYTES: usize = (CpuTiles::MOST_ROWS + 16 + 32) * DEPTH * size_of::<f32>();

/// A matrix anywhere in a slice: element (i, j) is at `i·row_stride + j·col_stride`.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, F> {
    pub data: &'a [F],
    pub row_stride: usize,
    pub col_stride: usize,
}

impl<'a, F> Matrix<'a, F> {
    /// Rows of contiguous elements, `row_stride` apart.
    pub fn row_major(data: &'a [F], row_stride: usize) -> Self {
        Self {
            data,
            row_stride,
            col_stride: 1,
        }
    }

    #[must_use]
    pub fn transposed(self) -> Self {
        Self {
            data: self.data,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }

    fn check(&self, name: &str, rows: usize, columns: usize) {
        if rows == 0 || columns == 0 {
            return;
        }
        let down = (rows - 1).checked_mul(self.row_stride);
        let across = (columns - 1).checked_mul(self.col_stride);
        let last = down
            .zip(across)
            .and_then(|(down, across)| down.checked_add(across));
        assert!(
            last.is_some_and(|last| last < self.data.len()),
            "{name} [{rows}, {columns}] with strides {} and {} does not fit {} elements",
            self.row_stride,
            self.col_stride,
            self.data.len()
        );
    }
}

/// `C[m,n] (+)= A[m,k]·B[k,n] + bias[n]` on all cores.
///
/// # Panics
/// Where a matrix does not fit its slice.
#[expect(clippy::too_many_arguments, reason = "the operands of a product")]
pub fn gemm<F: Real>(
    m: usize,
    n: usize,
    k: usize,
    a: Matrix<'_, F>,
    b: Matrix<'_, F>,
    c: &mut [F],
    c_row_stride: usize,
    mode: Accumulate,
    bias: Option<&[F]>,
) {
    if let Some(product) = Product::new((m, n, k), (a, b), c, c_row_stride, mode, bias) {
        product.run();
    }
}

/// `C[m,n] (+)= scale·A[m,k]·B[k,n]` on all cores. A is scaled as it is packed.
///
/// # Panics
/// Where a matrix does not fit its slice.
#[expect(clippy::too_many_arguments, reason = "the operands of a product")]
pub fn gemm_scaled<F: Real>(
    m: usize,
    n: usize,
    k: usize,
    scale: F,
    a: Matrix<'_, F>,
    b: Matrix<'_, F>,
    c: &mut [F],
    c_row_stride: usize,
    mode: Accumulate,
) {
    if let Some(product) = Product::new((m, n, k), (a, b), c, c_row_stride, mode, None) {
        let scale = (scale != F::ONE).then_some(scale);
        Product { scale, ..product }.run();
    }
}

/// `C[m,n] (+)= scale·A[m,k]·B[k,n] + bias[n]` on all cores, where one of the matrices is dropped in
/// part. Of C it is what each block of k adds to it, the bias with the first.
///
/// # Panics
/// Where a matrix does not fit its slice.
#[expect(clippy::too_many_arguments, reason = "the operands of a product")]
pub fn gemm_dropped<F: Real>(
    m: usize,
    n: usize,
    k: usize,
    scale: F,
    a: Matrix<'_, F>,
    b: Matrix<'_, F>,
    c: &mut [F],
    c_row_stride: usize,
    mode: Accumulate,
    bias: Option<&[F]>,
    (side, dropout): (Side, Dropout),
) {
    if let Some(product) = Product::new((m, n, k), (a, b), c, c_row_stride, mode, bias) {
        let scale = (scale != F::ONE).then_some(scale);
        let dropped = Some(Dropped { side, dropout });
        Product {
            scale,
            dropped,
            ..product
        }
        .run();
    }
}

/// [`gemm`] on the calling thread, with the same bits.
///
/// # Panics
/// Where a matrix does not fit its slice.
#[expect(clippy::too_many_arguments, reason = "the operands of a product")]
pub fn gemm_serial<F: Real>(
    m: usize,
    n: usize,
    k: usize,
    a: Matrix<'_, F>,
    b: Matrix<'_, F>,
    c: &mut [F],
    c_row_stride: usize,
    mode: Accumulate,
    bias: Option<&[F]>,
) {
    if let Some(product) = Product::new((m, n, k), (a, b), c, c_row_stride, mode, bias) {
        product.run_serial();
    }
}

/// A checked product: every element it will touch is inside its slices.
struct Product<'a, F> {
    m: usize,
    n: usize,
    k: usize,
    a: Matrix<'a, F>,
    b: Matrix<'a, F>,
    c: Destination<'a, F>,
    mode: Accumulate,
    bias: Option<&'a [F]>,
    /// Of A.
    scale: Option<F>,
    dropped: Option<Dropped>,
    level: Level,
    shape: TileShape,
}

impl<'a, F: Real> Product<'a, F> {
    /// `None` where C is empty.
    fn new(
        (m, n, k): (usize, usize, usize),
        (a, b): (Matrix<'a, F>, Matrix<'a, F>),
        c: &'a mut [F],
        c_row_stride: usize,
        mode: Accumulate,
        bias: Option<&'a [F]>,
    ) -> Option<Self> {
        if m == 0 || n == 0 {
            return None;
        }
        a.check("A", m, k);
        b.check("B", k, n);
        Matrix::row_major(c, c_row_stride).check("C", m, n);
        assert!(m == 1 || c_row_stride >= n, "rows of C overlap");
        if let Some(bias) = bias {
            assert!(bias.len() >= n, "the bias is shorter than a row of C");
        }
        let level = simd::level();
        Some(Self {
            m,
            n,
            k,
            a,
            b,
            c: Destination::new(c, c_row_stride),
            mode,
            bias,
            scale: None,
            dropped: None,
            level,
            shape: TileShape::of::<F>(level),
        })
    }

    fn run(&self) {
        if self.m * self.n * self.k.max(1) < CpuTiles::SERIAL_WORK {
            return self.run_serial();
        }
        let unit = [self.shape.rows, self.shape.columns];
        let tiles = CpuTiles::new([self.m, self.n], rayon::current_num_threads(), unit);
        let (rows, columns) = (tiles.rows, tiles.columns);
        // Neighbours in a column of tiles use the same panels of B.
        parallel::for_each(tiles.count(), |task| {
            let (down, across) = (task % tiles.down, task / tiles.down);
            self.tile(down * rows, across * columns, rows, columns);
        });
    }

    fn run_serial(&self) {
        for j in (0..self.n).step_by(CpuTiles::MOST_COLUMNS) {
            for i in (0..self.m).step_by(CpuTiles::MOST_ROWS) {
                self.tile(i, j, CpuTiles::MOST_ROWS, CpuTiles::MOST_COLUMNS);
            }
        }
    }

    /// The tile of C at (`i0`, `j0`), cut off at the edges of C, over all of k.
    fn tile(&self, i0: usize, j0: usize, rows: usize, columns: usize) {
        let TileShape {
            rows: height,
            columns: width,
        } = self.shape;
        let rows = rows.min(self.m - i0);
        let columns = columns.min(self.n - j0);
        let depth = self.k.min(DEPTH);
        let a_len = rows.div_ceil(height) * height * depth;
        scratch::with(Owner::Gemm, a_len + width * depth, |block: &mut [F]| {
            let (a_panels, b_panel) = block.split_at_mut(a_len);
            let mut p0 = 0;
            loop {
                let depth = (self.k - p0).min(DEPTH);
                self.depth_block((i0, rows), (j0, columns), (p0, depth), a_panels, b_panel);
                p0 += depth;
                if p0 >= self.k {
                    break;
                }
            }
        });
    }

    fn depth_block(
        &self,
        (i0, rows): (usize, usize),
        (j0, columns): (usize, usize),
        (p0, depth): (usize, usize),
        a_panels: &mut [F],
        b_panel: &mut [F],
    ) {
        let TileShape {
            rows: height,
            columns: width,
        } = self.shape;
        for i in (0..rows).step_by(height) {
            let lanes = height.min(rows - i);
            let mut source = Strided {
                data: self.a.data,
                start: (i0 + i) * self.a.row_stride + p0 * self.a.col_stride,
                lane_stride: self.a.row_stride,
                depth_stride: self.a.col_stride,
            };
            if let Some(dropout) = self.dropped(Side::A) {
                // The panel of B is filled later.
                let strip = &mut b_panel[..lanes * depth];
                dropped::drop_strip(dropout, i0 + i, p0, depth, source, strip);
                source = Strided {
                    data: strip,
                    start: 0,
                    lane_stride: depth,
                    depth_stride: 1,
                };
            }
            let panel = &mut a_panels[i * depth..][..height * depth];
            pack::panel(self.level, source, lanes, depth, height, panel);
            if let Some(scale) = self.scale {
                for x in panel {
                    *x *= scale;
                }
            }
        }
        let first = p0 == 0;
        let add = !first || self.mode == Accumulate::Add;
        for j in (0..columns).step_by(width) {
            let source = Strided {
                data: self.b.data,
                start: p0 * self.b.row_stride + (j0 + j) * self.b.col_stride,
                lane_stride: self.b.col_stride,
                depth_stride: self.b.row_stride,
            };
            let tile_columns = width.min(columns - j);
            let b_panel = &mut b_panel[..width * depth];
            pack::panel(self.level, source, tile_columns, depth, width, b_panel);
            if let Some(dropout) = self.dropped(Side::B) {
                dropped::drop_lines(dropout, p0, j0 + j, width, b_panel);
            }
            let bias = self
                .bias
                .filter(|_| first)
                .map(|bias| &bias[j0 + j..][..tile_columns]);
            for i in (0..rows).step_by(height) {
                let size = (height.min(rows - i), tile_columns);
                let a_panel = &a_panels[i * depth..][..height * depth];
                // SAFETY: the tile is inside C by the checks in `new`; tiles of different
                // tasks do not overlap, and a task works on one tile at a time.
                unsafe {
                    let c = self.c.at(i0 + i, j0 + j);
                    let operands = (depth, a_panel, &*b_panel, bias);
                    match self.dropped(Side::C) {
                        None => self.store_tile(operands, size, &c, add),
                        Some(dropout) => {
                            let mask = (dropout, i0 + i, j0 + j);
                            self.store_dropped_tile(operands, size, &c, add, mask);
                        }
                    }
                }
            }
        }
    }

    fn dropped(&self, side: Side) -> Option<Dropout> {
        self.dropped.and_then(|dropped| dropped.of(side))
    }

    /// # Safety
    /// See [`tile::multiply`].
    unsafe fn store_tile(
        &self,
        (depth, a, b, bias): TileOperands<'_, F>,
        size: (usize, usize),
        c: &Destination<'_, F>,
        add: bool,
    ) {
        // SAFETY: this function's contract.
        unsafe { tile::multiply(self.level, depth, a, b, size, c, add, bias) };
    }

    /// What the mask keeps of the tile, which begins at a row and a column of it.
    ///
    /// # Safety
    /// See [`tile::multiply`].
    unsafe fn store_dropped_tile(
        &self,
        operands: TileOperands<'_, F>,
        (rows, columns): (usize, usize),
        c: &Destination<'_, F>,
        add: bool,
        (dropout, row, column): (Dropout, usize, usize),
    ) {
        let mut sums = [F::ZERO; TileShape::LARGEST.rows * TileShape::LARGEST.columns];
        let apart = Destination::new(&mut sums, columns);
        // SAFETY: no tile is larger than `sums`; the rest is this function's contract.
        unsafe { self.store_tile(operands, (rows, columns), &apart, false) };
        let sums = &mut sums[..rows * columns];
        dropped::drop_lines(dropout, row, column, columns, sums);
        for (i, sums) in sums.chunks_exact(columns).enumerate() {
            // SAFETY: row i of the tile, by the contract.
            let c = unsafe { c.row(i, columns) };
            tile::store(c, sums, add, None);
        }
    }
}

/// The depth of two panels, the panels, and a bias.
type TileOperands<'a, F> = (usize, &'a [F], &'a [F], Option<&'a [F]>);

#[cfg(test)]
mod tests;
