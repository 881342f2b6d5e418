//! Forward: one task per (sequence, head, block of queries), which walks the blocks of keys
//! from the first that it sees on and keeps for each query the running maximum m, the sum l of `e^{s − m}`
//! and the unnormalised output; when m grows, l and the output shrink by `e^{m_old − m_new}`.

use crate::cpu::dropout::Dropout;
use crate::cpu::kernel::gemm::gemm_serial;
use crate::cpu::kernel::lanes::{self, LANES, Lanes};
use crate::cpu::kernel::scratch::{self, Owner};
use crate::cpu::parallel::{self, Accumulate, Shared};
use crate::cpu::real::Real;
use crate::cpu::simd::simd;

use super::{AttentionShape, BLOCK, Inputs, Matrix, Sight, TileMask, bits, narrow};

/// `o [rows, heads·head_dim]` and `lse [batch, heads, seq]`, the natural logarithm of
/// `Σ_s e^{scale·q·k_s}` before dropout; zeroes for queries beyond the length of their sequence.
///
/// # Panics
/// Where a buffer does not fit the shape.
pub fn forward<F: Real>(
    shape: &AttentionShape,
    inputs: &Inputs<'_, F>,
    dropout: Option<Dropout>,
    o: &mut [F],
    lse: &mut [F],
) {
    inputs.check(shape, shape.seq);
    let width = shape.heads * shape.head_dim;
    assert!(o.len() >= shape.rows() * width, "o is too short");
    assert!(lse.len() >= shape.rows() * shape.heads, "lse is too short");
    let dropout = dropout.map(|dropout| shape.mask(dropout));
    if narrow::suits(shape, inputs) {
        return narrow::forward(shape, inputs, dropout, o, lse);
    }
    let blocks = shape.seq.div_ceil(BLOCK);
    let (o, lse) = (Shared::new(o), Shared::new(lse));
    parallel::for_each(shape.batch * shape.heads * blocks, |task| {
        let (head, t0) = (task / blocks, task % blocks * BLOCK);
        let (b, h) = (head / shape.heads, head % shape.heads);
        let rows = BLOCK.min(shape.seq - t0);
        let length = inputs.length(shape, b);
        let live = rows.min(length.saturating_sub(t0));
        scratch::with(
            Owner::Attention,
            State::<F>::len(shape.head_dim),
            |block: &mut [F]| {
                let mut state = State::new(block, live, length, shape.head_dim);
                let keys = match (live, shape.causal) {
                    (0, _) => 0,
                    (_, true) => t0 + live,
                    (_, false) => length,
                };
                let sight = inputs.sight(shape, b);
                let first = sight.first_block(t0..t0 + live);
                for k0 in (first..keys).step_by(BLOCK) {
                    let mask = dropout.map(|dropout| TileMask {
                        dropout,
                        row: head * shape.seq + t0,
                        key: k0,
                    });
                    state.add_keys(shape, inputs, (b, h), t0, k0, mask);
                }
                // SAFETY: each task has its own queries of its own head.
                let lse = unsafe { lse.part(head * shape.seq + t0, rows) };
                for (i, lse) in lse.iter_mut().enumerate() {
                    let place = (b * shape.seq + t0 + i) * width + h * shape.head_dim;
                    // SAFETY: as above.
                    let out = unsafe { o.part(place, shape.head_dim) };
                    *lse = if i < live {
                        state.finish(i, out)
                    } else {
                        out.fill(F::ZERO);
                        F::ZERO
                    };
                }
            },
        );
    });
}

/// What a task keeps per query of its block.
pub(super) struct State<'a, F> {
    rows: usize,
    /// Keys of the sequence.
    length: usize,
    head_dim: usize,
    /// `[BLOCK, BLOCK]`: scores, then unnormalised probabilities.
    scores: &'a mut [F],
    /// `[rows, head_dim]`
    output: &'a mut [F],
    maxima: &'a mut [F],
    sums: &'a mut [F],
    /// `e^{m_old − m_new}` of the current block of keys.
    shrink: &'a mut [F],
}

/// Queries and keys that meet, and the values of the keys.
pub(super) struct Tile<'a, F> {
    pub q: Matrix<'a, F>,
    /// A key in each row.
    pub k: Matrix<'a, F>,
    pub v: Matrix<'a, F>,
    /// Keys, at most [`BLOCK`].
    pub columns: usize,
    /// Positions of the first query and the first key.
    pub query: usize,
    pub key: usize,
}

impl<'a, F: Real> State<'a, F> {
    /// Elements of the block that [`Self::new`] takes.
    pub(super) fn len(head_dim: usize) -> usize {
        BLOCK * (BLOCK + head_dim + 3)
    }

    pub(super) fn new(block: &'a mut [F], rows: usize, length: usize, head_dim: usize) -> Self {
        let (scores, rest) = block.split_at_mut(BLOCK * BLOCK);
        let (output, rest) = rest.split_at_mut(BLOCK * head_dim);
        let (maxima, rest) = rest.split_at_mut(BLOCK);
        let (sums, shrink) = rest.split_at_mut(BLOCK);
        output.fill(F::ZERO);
        maxima.fill(F::from_f64(f64::NEG_INFINITY));
        sums.fill(F::ZERO);
        Self {
            rows,
            length,
            head_dim,
            scores,
            output,
            maxima,
            sums,
            shrink,
        }
    }

    fn add_keys(
        &mut self,
        shape: &AttentionShape,
        inputs: &Inputs<'_, F>,
        (b, h): (usize, usize),
        t0: usize,
        k0: usize,
        mask: Option<TileMask>,
    ) {
        let columns = BLOCK.min(self.length - k0);
        let kv = h / shape.group() * self.head_dim;
        let tile = Tile {
            q: inputs.q.matrix_at(b * shape.seq + t0, h * self.head_dim),
            k: inputs.k.matrix_at(b * shape.seq + k0, kv),
            v: inputs.v.matrix_at(b * shape.seq + k0, kv),
            columns,
            query: t0,
            key: k0,
        };
        self.add_tile(
            F::from_f64(shape.scale),
            &inputs.sight(shape, b),
            &tile,
            mask,
        );
    }

    /// Brings the queries of a tile up to date with its keys.
    pub(super) fn add_tile(
        &mut self,
        scale: F,
        sight: &Sight<'_>,
        tile: &Tile<'_, F>,
        mask: Option<TileMask>,
    ) {
        let (rows, dim, columns) = (self.rows, self.head_dim, tile.columns);
        let scores = &mut *self.scores;
        if rows == 1 {
            row_scores(dim, columns, tile, scores);
        } else {
            gemm_serial(
                rows,
                columns,
                dim,
                tile.q,
                tile.k.transposed(),
                scores,
                BLOCK,
                Accumulate::Overwrite,
                None,
            );
        }
        exponentials(
            scale,
            sight,
            rows,
            columns,
            tile.query,
            tile.key,
            scores,
            self.maxima,
            self.sums,
            self.shrink,
            mask,
        );
        scale_rows(rows, dim, self.shrink, self.output);
        if rows == 1 {
            add_values(dim, columns, tile, scores, self.output);
        } else {
            let p = Matrix::row_major(&*scores, BLOCK);
            gemm_serial(
                rows,
                dim,
                columns,
                p,
                tile.v,
                self.output,
                dim,
                Accumulate::Add,
                None,
            );
        }
    }

    /// Writes the output of query `i`; its log-sum-exp.
    pub(super) fn finish(&self, i: usize, out: &mut [F]) -> F {
        let output = &self.output[i * self.head_dim..][..self.head_dim];
        normalise(output, self.maxima[i], self.sums[i], out)
    }
}

simd! {
    /// The scores of one query: packing keys for a matrix product would cost more than it.
    fn row_scores<F: Real>(dim: usize, columns: usize, tile: &Tile<'_, F>, scores: &mut [F]) {
        let q = &tile.q.data[..dim];
        for (j, score) in scores[..columns].iter_mut().enumerate() {
            let k = &tile.k.data[j * tile.k.row_stride..][..dim];
            *score = lanes::dot(q, k);
        }
    }
}

simd! {
    /// Adds the values of one query, weighted.
    fn add_values<F: Real>(
        dim: usize,
        columns: usize,
        tile: &Tile<'_, F>,
        weights: &[F],
        output: &mut [F],
    ) {
        let output = &mut output[..dim];
        for (j, &weight) in weights[..columns].iter().enumerate() {
            let v = &tile.v.data[j * tile.v.row_stride..][..dim];
            for (out, &v) in output.iter_mut().zip(v) {
                *out = weight.fma(v, *out);
            }
        }
    }
}

simd! {
    fn normalise<F: Real>(output: &[F], largest: F, sum: F, out: &mut [F]) -> F {
        let inverse = F::ONE / sum;
        for (out, &x) in out.iter_mut().zip(output) {
            *out = x * inverse;
        }
        largest + sum.ln()
    }
}

simd! {
    fn scale_rows<F: Real>(rows: usize, dim: usize, factors: &[F], output: &mut [F]) {
        for (row, &factor) in output.chunks_exact_mut(dim).zip(factors).take(rows) {
            for x in row {
                *x *= factor;
            }
        }
    }
}

simd! {
    /// Turns a tile of raw scores into `e^{s − m}` and brings m and l up to date. Keys that a
    /// query does not see, and the columns that fill up the last lanes, become 0.
    fn exponentials<F: Real>(
        scale: F,
        sight: &Sight<'_>,
        rows: usize,
        columns: usize,
        t0: usize,
        k0: usize,
        scores: &mut [F],
        maxima: &mut [F],
        sums: &mut [F],
        shrink: &mut [F],
        mask: Option<TileMask>,
    ) {
        let lowest = F::from_f64(f64::NEG_INFINITY);
        let width = columns.next_multiple_of(LANES);
        for i in 0..rows {
            let visible = sight.visible(t0 + i, k0, columns);
            let selected = sight.selected(t0 + i, k0);
            let line = &mut scores[i * BLOCK..][..width];
            // Its window or its document begins behind this block, or it has selected none of it:
            // there may be no maximum yet.
            let seen = bits(visible.start, visible.end) & selected;
            if seen == 0 {
                line.fill(F::ZERO);
                shrink[i] = F::ONE;
                continue;
            }
            let mut lanes = [maxima[i]; LANES];
            for (c, chunk) in line.chunks_exact_mut(LANES).enumerate() {
                let seen = (seen >> (c * LANES)) as u32;
                for l in 0..LANES {
                    let x = if seen >> l & 1 == 1 { chunk[l] * scale } else { lowest };
                    chunk[l] = x;
                    lanes[l] = x.larger(lanes[l]);
                }
            }
            let largest = lanes.into_iter().fold(lanes[0], |best, x| x.larger(best));
            let mut lanes = [F::ZERO; LANES];
            for chunk in line.chunks_exact_mut(LANES) {
                for l in 0..LANES {
                    chunk[l] = (chunk[l] - largest).exp();
                    lanes[l] += chunk[l];
                }
            }
            shrink[i] = (maxima[i] - largest).exp();
            sums[i] = sums[i] * shrink[i] + lanes::total(&Lanes(lanes));
            maxima[i] = largest;
            if let Some(mask) = mask {
                mask.apply(i, line);
            }
        }
    }
}
