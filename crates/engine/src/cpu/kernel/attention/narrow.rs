//! Heads of a few columns, where a query sees all keys or those up to itself. A product of tiles
//! would spend more on packing than on its few multiplications, so queries stand side by side in
//! the lanes of vectors, their columns one below the other, and keys come one after the other.
//!
//! Forward: a task has a block of queries of one head. Backward: a task has a key/value head with
//! the query heads that it serves, and walks their blocks of queries; dQ stays in the block, what
//! it gives dK and dV of each key is summed over its lanes and added to them.

use std::ops::{Deref, DerefMut};

use crate::cpu::dropout::Dropout;
use crate::cpu::kernel::columns::{Columns, ColumnsMut};
use crate::cpu::kernel::lanes::{self, LANES, Lanes};
use crate::cpu::parallel::{self, Shared};
use crate::cpu::real::Real;
use crate::cpu::simd::simd;

use super::{AttentionShape, BLOCK, Inputs, Matrix};

/// The widest heads that are worth it.
pub(super) const WIDEST: usize = 8;
/// Keys that share a look for the largest score.
const STEP: usize = 8;

/// The columns of a block of positions, one below the other.
type Block<F> = [Line<F>; WIDEST];

/// A number for each query of a block, from the start of a cache line on: a register across two
/// lines is slow to store and slower to load again.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line<T>([T; BLOCK]);

impl<T> Deref for Line<T> {
    type Target = [T; BLOCK];

    #[inline(always)]
    fn deref(&self) -> &[T; BLOCK] {
        &self.0
    }
}

impl<T> DerefMut for Line<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [T; BLOCK] {
        &mut self.0
    }
}

impl<F: Real> Line<F> {
    const ZERO: Self = Self([F::ZERO; BLOCK]);
}

/// Whether a head is narrow, and nothing is hidden but by the order.
pub(super) fn suits<F>(shape: &AttentionShape, inputs: &Inputs<'_, F>) -> bool {
    let hides = shape.window.is_some()
        || inputs.lengths.is_some()
        || inputs.starts.is_some()
        || inputs.selection.is_some();
    shape.head_dim <= WIDEST && !hides
}

/// The columns `column..` of `rows` rows from `row` on, times `factor`; zeroes below.
fn read<F: Real>(
    from: &Columns<'_, F>,
    (row, column): (usize, usize),
    (rows, dim): (usize, usize),
    factor: F,
) -> Block<F> {
    let mut block = [Line::ZERO; WIDEST];
    let from = from.matrix_at(row, column);
    for l in 0..rows {
        let line = &from.data[l * from.row_stride..][..dim];
        for (column, &x) in block.iter_mut().zip(line) {
            column[l] = x * factor;
        }
    }
    block
}

/// The dropout of a block's queries, whose first has this row of the mask.
#[derive(Clone, Copy)]
struct Mask {
    dropout: Dropout,
    bases: Line<u32>,
}

impl Mask {
    fn new(dropout: Dropout, row: usize) -> Self {
        Self {
            dropout,
            bases: Line(std::array::from_fn(|l| dropout.row(row + l))),
        }
    }
}

/// What a task keeps of its queries: see `forward.rs`.
struct Forward<F> {
    query: Block<F>,
    output: Block<F>,
    largest: Line<F>,
    sum: Line<F>,
}

pub(super) fn forward<F: Real>(
    shape: &AttentionShape,
    inputs: &Inputs<'_, F>,
    dropout: Option<Dropout>,
    o: &mut [F],
    lse: &mut [F],
) {
    let (seq, dim) = (shape.seq, shape.head_dim);
    let width = shape.heads * dim;
    let blocks = seq.div_ceil(BLOCK);
    let (o, lse) = (Shared::new(o), Shared::new(lse));
    parallel::for_each(shape.batch * shape.heads * blocks, |task| {
        let (head, t0) = (task / blocks, task % blocks * BLOCK);
        let (b, h) = (head / shape.heads, head % shape.heads);
        let rows = BLOCK.min(seq - t0);
        let scale = F::from_f64(shape.scale);
        let mut block = Forward {
            query: read(&inputs.q, (b * seq + t0, h * dim), (rows, dim), scale),
            output: [Line::ZERO; WIDEST],
            largest: Line([F::from_f64(f64::NEG_INFINITY); BLOCK]),
            sum: Line::ZERO,
        };
        let mask = dropout.map(|dropout| Mask::new(dropout, head * seq + t0));
        let kv = h / shape.group() * dim;
        let keys = if shape.causal { t0 + rows } else { seq };
        add_keys(
            dim,
            shape.causal.then_some(t0),
            keys,
            &inputs.k.matrix_at(b * seq, kv),
            &inputs.v.matrix_at(b * seq, kv),
            mask.as_ref(),
            &mut block,
        );
        // SAFETY: each task has its own queries of its own head.
        let lse = unsafe { lse.part(head * seq + t0, rows) };
        for (l, lse) in lse.iter_mut().enumerate() {
            // SAFETY: as above.
            let out = unsafe { o.part((b * seq + t0 + l) * width + h * dim, dim) };
            for (out, column) in out.iter_mut().zip(&block.output) {
                *out = column[l] / block.sum[l];
            }
            *lse = block.largest[l] + block.sum[l].ln();
        }
    });
}

simd! {
    /// Brings a block of queries up to date with `keys` keys. `first` is the position of its first
    /// query in a causal order.
    fn add_keys<F: Real>(
        dim: usize,
        first: Option<usize>,
        keys: usize,
        k: &Matrix<'_, F>,
        v: &Matrix<'_, F>,
        mask: Option<&Mask>,
        block: &mut Forward<F>,
    ) {
        let lowest = F::from_f64(f64::NEG_INFINITY);
        let Forward { query, output, largest, sum } = block;
        for s0 in (0..keys).step_by(STEP) {
            let count = STEP.min(keys - s0);
            let mut scores = [Line::<F>::ZERO; STEP];
            let mut top = *largest;
            for (j, score) in scores.iter_mut().enumerate().take(count) {
                let key = &k.data[(s0 + j) * k.row_stride..][..dim];
                for (column, &x) in query.iter().zip(key) {
                    for l in 0..BLOCK {
                        score[l] = column[l].fma(x, score[l]);
                    }
                }
                if let Some(first) = first {
                    let hidden = (s0 + j).saturating_sub(first).min(BLOCK);
                    score[..hidden].fill(lowest);
                }
                for l in 0..BLOCK {
                    top[l] = score[l].larger(top[l]);
                }
            }
            // Every query sees the first key, so that there is a largest score from here on.
            let mut shrink = Line::<F>::ZERO;
            for l in 0..BLOCK {
                shrink[l] = (largest[l] - top[l]).exp();
                sum[l] *= shrink[l];
            }
            for column in output.iter_mut().take(dim) {
                for l in 0..BLOCK {
                    column[l] *= shrink[l];
                }
            }
            for (j, score) in scores.iter_mut().enumerate().take(count) {
                for l in 0..BLOCK {
                    score[l] = (score[l] - top[l]).exp();
                    sum[l] += score[l];
                }
                if let Some(mask) = mask {
                    let mut factors = Line::<F>::ZERO;
                    mask.dropout.factors_of(&mask.bases, s0 + j, &mut factors);
                    for l in 0..BLOCK {
                        score[l] *= factors[l];
                    }
                }
                let value = &v.data[(s0 + j) * v.row_stride..][..dim];
                for (column, &x) in output.iter_mut().zip(value) {
                    for l in 0..BLOCK {
                        column[l] = score[l].fma(x, column[l]);
                    }
                }
            }
            *largest = top;
        }
    }
}

/// What the backward reads of attention and of what came of it.
pub(super) struct Given<'a, F> {
    pub grad_output: Columns<'a, F>,
    pub o: Columns<'a, F>,
    pub lse: &'a [F],
}

/// What a task keeps of a block of queries. The queries have the scale in them.
struct Backward<F> {
    query: Block<F>,
    grad_output: Block<F>,
    grad_query: Block<F>,
    lse: Line<F>,
    delta: Line<F>,
}

pub(super) fn backward<F: Real>(
    shape: &AttentionShape,
    inputs: &Inputs<'_, F>,
    given: &Given<'_, F>,
    dropout: Option<Dropout>,
    [dq, dk, dv]: [&ColumnsMut<'_, F>; 3],
) {
    let (seq, dim) = (shape.seq, shape.head_dim);
    let scale = F::from_f64(shape.scale);
    parallel::for_each(shape.batch * shape.kv_heads, |task| {
        let (b, kv) = (task / shape.kv_heads, task % shape.kv_heads);
        let mut gradients = KeyGradients {
            parts: [dk, dv],
            row: b * seq,
            column: kv * dim,
        };
        for s in 0..seq {
            let [dk, dv] = gradients.of_key(s, dim);
            dk.fill(F::ZERO);
            dv.fill(F::ZERO);
        }
        let k = inputs.k.matrix_at(b * seq, kv * dim);
        let v = inputs.v.matrix_at(b * seq, kv * dim);
        for h in kv * shape.group()..(kv + 1) * shape.group() {
            for t0 in (0..seq).step_by(BLOCK) {
                let (rows, row) = (BLOCK.min(seq - t0), (b * shape.heads + h) * seq + t0);
                let (place, size) = ((b * seq + t0, h * dim), (rows, dim));
                let mut block = Backward {
                    query: read(&inputs.q, place, size, scale),
                    grad_output: read(&given.grad_output, place, size, F::ONE),
                    grad_query: [Line::ZERO; WIDEST],
                    lse: Line::ZERO,
                    delta: Line::ZERO,
                };
                block.lse[..rows].copy_from_slice(&given.lse[row..][..rows]);
                let o = read(&given.o, place, size, F::ONE);
                for (o, grad) in o.iter().zip(&block.grad_output) {
                    for l in 0..BLOCK {
                        block.delta[l] = o[l].fma(grad[l], block.delta[l]);
                    }
                }
                let mask = dropout.map(|dropout| Mask::new(dropout, row));
                let keys = if shape.causal { t0 + rows } else { seq };
                add_gradients(
                    dim,
                    shape.causal.then_some(t0),
                    keys,
                    &k,
                    &v,
                    mask.as_ref(),
                    &mut block,
                    &mut gradients,
                );
                for l in 0..rows {
                    // SAFETY: a query head belongs to one task.
                    let out = unsafe { dq.part(b * seq + t0 + l, h * dim, dim) };
                    for (out, column) in out.iter_mut().zip(&block.grad_query) {
                        *out = column[l] * scale;
                    }
                }
            }
        }
    });
}

simd! {
    /// What `keys` keys and a block of queries give each other. `first` is the position of its
    /// first query in a causal order, and `gradients` are dk and dv of a key. Queries below the
    /// last have no gradient, and give none.
    fn add_gradients<F: Real>(
        dim: usize,
        first: Option<usize>,
        keys: usize,
        k: &Matrix<'_, F>,
        v: &Matrix<'_, F>,
        mask: Option<&Mask>,
        block: &mut Backward<F>,
        gradients: &mut KeyGradients<'_, F>,
    ) {
        let Backward { query, grad_output, grad_query, lse, delta } = block;
        for s in 0..keys {
            let key = &k.data[s * k.row_stride..][..dim];
            let value = &v.data[s * v.row_stride..][..dim];
            let mut p = Line::<F>::ZERO;
            let mut ds = Line::<F>::ZERO;
            for (column, &x) in query.iter().zip(key) {
                for l in 0..BLOCK {
                    p[l] = column[l].fma(x, p[l]);
                }
            }
            for (column, &x) in grad_output.iter().zip(value) {
                for l in 0..BLOCK {
                    ds[l] = column[l].fma(x, ds[l]);
                }
            }
            for l in 0..BLOCK {
                p[l] = (p[l] - lse[l]).exp();
            }
            if let Some(first) = first {
                let hidden = s.saturating_sub(first).min(BLOCK);
                p[..hidden].fill(F::ZERO);
            }
            if let Some(mask) = mask {
                let mut factors = Line::<F>::ZERO;
                mask.dropout.factors_of(&mask.bases, s, &mut factors);
                for l in 0..BLOCK {
                    ds[l] = p[l] * (ds[l] * factors[l] - delta[l]);
                    p[l] *= factors[l];
                }
            } else {
                for l in 0..BLOCK {
                    ds[l] = p[l] * (ds[l] - delta[l]);
                }
            }
            for (column, &x) in grad_query.iter_mut().zip(key) {
                for l in 0..BLOCK {
                    column[l] = ds[l].fma(x, column[l]);
                }
            }
            let [dk, dv] = gradients.of_key(s, dim);
            add_products(&ds, query, dk);
            add_products(&p, grad_output, dv);
        }
    }
}

/// dK and dV of one key/value head of one sequence, which one task has.
struct KeyGradients<'a, F> {
    parts: [&'a ColumnsMut<'a, F>; 2],
    row: usize,
    column: usize,
}

impl<F: Real> KeyGradients<'_, F> {
    #[inline(always)]
    fn of_key(&mut self, s: usize, dim: usize) -> [&mut [F]; 2] {
        // SAFETY: each task has its own key/value head of its own sequence, and takes one key
        // after the other.
        self.parts
            .map(|gradient| unsafe { gradient.part(self.row + s, self.column, dim) })
    }
}

/// `sums[c] += a·columns[c]`, for as many columns as there are sums.
#[inline(always)]
fn add_products<F: Real>(a: &Line<F>, columns: &Block<F>, sums: &mut [F]) {
    let mut products = [Lanes::ZERO; WIDEST];
    for (product, column) in products.iter_mut().zip(columns).take(sums.len()) {
        for c in (0..BLOCK).step_by(LANES) {
            for l in 0..LANES {
                product[l] = a[c + l].fma(column[c + l], product[l]);
            }
        }
    }
    lanes::add_totals(&products[..sums.len()], sums);
}
