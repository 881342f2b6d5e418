//! The entropy of attention, averaged over heads, without the T×T matrix: the probabilities of a
//! few queries and 64 keys exist at a time, of all heads, because their mean is what counts.
//!
//! ```text
//! p_hs = exp(scale·⟨q_h, k_hs⟩ − lse_h),   a_s = Σ_h p_hs / H
//! entropy = −Σ_s a_s·ln(a_s + ε),          w_s = ln(a_s + ε) + a_s / (a_s + ε)
//! D_h  = Σ_s p_hs·w_s
//! ds_hs = −g/H·p_hs·(w_s − D_h)
//! ```

use std::ops::Range;

use crate::cpu::kernel::columns::{Columns, ColumnsMut};
use crate::cpu::kernel::lanes;
use crate::cpu::kernel::scratch::{self, Owner};
use crate::cpu::parallel::{self, Shared};
use crate::cpu::real::Real;
use crate::cpu::simd::simd;

/// Sides of a tile: with eight heads its probabilities stay in the cache of a core.
const QUERIES: usize = 16;
const KEYS: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EntropyShape {
    pub batch: usize,
    pub seq: usize,
    pub heads: usize,
    pub head_dim: usize,
    pub causal: bool,
    pub scale: f64,
    pub epsilon: f64,
}

/// What the backward reads of each row: the log-sum-exp and D `[batch, heads, seq]`, and the
/// gradient of the entropy `[batch, seq]`.
#[derive(Clone, Copy, Debug)]
pub struct EntropyRows<'a, F> {
    pub lse: &'a [F],
    pub means: &'a [F],
    pub gradient: &'a [F],
}

impl EntropyShape {
    fn scratch_len(&self) -> usize {
        QUERIES * KEYS * (self.heads + 2) + self.head_dim * KEYS
    }

    /// Of the keys from `key` on, how many the query at `position` sees among `count`.
    #[inline(always)]
    fn visible(&self, position: usize, key: usize, count: usize) -> usize {
        match self.causal {
            true => count.min((position + 1).saturating_sub(key)),
            false => count,
        }
    }
}

/// Keys of a sequence: of head h at position s from `first + h·head_stride + s·row_stride` on.
#[derive(Clone, Copy)]
struct KeyRows<'a, F> {
    data: &'a [F],
    first: usize,
    head_stride: usize,
    row_stride: usize,
}

/// Some queries and some keys of one sequence.
struct Tile<'a, F> {
    shape: &'a EntropyShape,
    q: Columns<'a, F>,
    /// The row of the first query, in q.
    row: usize,
    queries: usize,
    /// The position of the first query.
    position: usize,
    keys: KeyRows<'a, F>,
    /// The position of the first key, and how many there are.
    key: usize,
    count: usize,
    /// Of the first query, heads `lse_stride` apart.
    lse: &'a [F],
    lse_stride: usize,
}

/// What is known of a tile, all in rows of `KEYS` numbers.
struct Numbers<'a, F> {
    /// A head's keys, a row to each column: what the products run along.
    columns: &'a mut [F],
    /// [heads][QUERIES]: p, zero where a query does not see a key.
    probabilities: &'a mut [F],
    /// [QUERIES]: a.
    means: &'a mut [F],
    /// [QUERIES]: w.
    weights: &'a mut [F],
}

impl<'a, F: Real> Numbers<'a, F> {
    fn new(shape: &EntropyShape, block: &'a mut [F]) -> Self {
        let (columns, rest) = block.split_at_mut(shape.head_dim * KEYS);
        let (probabilities, rest) = rest.split_at_mut(shape.heads * QUERIES * KEYS);
        let (means, weights) = rest.split_at_mut(QUERIES * KEYS);
        Self {
            columns,
            probabilities,
            means,
            weights,
        }
    }
}

/// The row of a tile.
#[inline(always)]
fn line<F>(numbers: &[F], row: usize) -> &[F] {
    &numbers[row * KEYS..][..KEYS]
}

#[inline(always)]
fn line_mut<F>(numbers: &mut [F], row: usize) -> &mut [F] {
    &mut numbers[row * KEYS..][..KEYS]
}

simd! {
    /// Fills in the numbers of a tile.
    fn fill<F: Real>(tile: &Tile<'_, F>, numbers: &mut Numbers<'_, F>) {
        let shape = tile.shape;
        let (dim, scale) = (shape.head_dim, F::from_f64(shape.scale));
        let share = F::from_f64(1.0 / shape.heads as f64);
        let epsilon = F::from_f64(shape.epsilon);
        numbers.means.fill(F::ZERO);
        for head in 0..shape.heads {
            transpose(tile, head, numbers.columns);
            for i in 0..tile.queries {
                let place = (tile.row + i) * tile.q.row_stride + tile.q.offset + head * dim;
                let query = &tile.q.data[place..place + dim];
                let scores = line_mut(numbers.probabilities, head * QUERIES + i);
                scores.fill(F::ZERO);
                for (d, &x) in query.iter().enumerate() {
                    let x = x * scale;
                    for (score, &k) in scores.iter_mut().zip(line(numbers.columns, d)) {
                        *score = x.fma(k, *score);
                    }
                }
                let lse = tile.lse[head * tile.lse_stride + i];
                for score in scores.iter_mut() {
                    *score = (*score - lse).exp();
                }
                let seen = shape.visible(tile.position + i, tile.key, tile.count);
                scores[seen..].fill(F::ZERO);
                for (mean, &p) in line_mut(numbers.means, i).iter_mut().zip(scores.iter()) {
                    *mean = p.fma(share, *mean);
                }
            }
        }
        let all = tile.queries * KEYS;
        for (w, &a) in numbers.weights[..all].iter_mut().zip(&numbers.means[..all]) {
            let shifted = a + epsilon;
            *w = shifted.ln() + a / shifted;
        }
    }
}

/// A head's keys as rows of columns; zero beyond the last.
#[inline(always)]
fn transpose<F: Real>(tile: &Tile<'_, F>, head: usize, columns: &mut [F]) {
    let (dim, keys) = (tile.shape.head_dim, &tile.keys);
    if tile.count < KEYS {
        columns.fill(F::ZERO);
    }
    for j in 0..tile.count {
        let place = keys.first + head * keys.head_stride + (tile.key + j) * keys.row_stride;
        for (d, &x) in keys.data[place..place + dim].iter().enumerate() {
            columns[d * KEYS + j] = x;
        }
    }
}

simd! {
    /// What a tile adds to the entropy of each query and to D, `sums` [QUERIES, heads], unless
    /// that is empty.
    fn add_entropy<F: Real>(
        tile: &Tile<'_, F>,
        numbers: &Numbers<'_, F>,
        entropies: &mut [F],
        sums: &mut [F],
    ) {
        let epsilon = F::from_f64(tile.shape.epsilon);
        let heads = sums.len() / QUERIES;
        let mut products = [F::ZERO; KEYS];
        for i in 0..tile.queries {
            let means = line(numbers.means, i);
            for (product, &a) in products.iter_mut().zip(means) {
                *product = a * (a + epsilon).ln();
            }
            entropies[i] -= lanes::sum(&products, |x| x);
            for (head, sum) in sums[i * heads..][..heads].iter_mut().enumerate() {
                let p = line(numbers.probabilities, head * QUERIES + i);
                for ((product, &p), &w) in products.iter_mut().zip(p).zip(line(numbers.weights, i)) {
                    *product = p * w;
                }
                *sum += lanes::sum(&products, |x| x);
            }
        }
    }
}

simd! {
    /// Turns a tile's probabilities into the gradients of its scores, times the scale. `means` and
    /// `gradient` are those of the first query, heads of the former `stride` apart.
    fn score_gradients<F: Real>(
        tile: &Tile<'_, F>,
        numbers: &mut Numbers<'_, F>,
        means: &[F],
        stride: usize,
        gradient: &[F],
    ) {
        let factor = F::from_f64(-tile.shape.scale / tile.shape.heads as f64);
        for head in 0..tile.shape.heads {
            for i in 0..tile.queries {
                let (mean, g) = (means[head * stride + i], gradient[i] * factor);
                let p = line_mut(numbers.probabilities, head * QUERIES + i);
                for (p, &w) in p.iter_mut().zip(line(numbers.weights, i)) {
                    *p = *p * (w - mean) * g;
                }
            }
        }
    }
}

simd! {
    /// Adds to dq [QUERIES, heads·head_dim] what the keys of a tile give.
    fn add_query_gradients<F: Real>(tile: &Tile<'_, F>, numbers: &mut Numbers<'_, F>, dq: &mut [F]) {
        let (heads, dim) = (tile.shape.heads, tile.shape.head_dim);
        let mut products = [F::ZERO; KEYS];
        for head in 0..heads {
            transpose(tile, head, numbers.columns);
            for i in 0..tile.queries {
                let ds = line(numbers.probabilities, head * QUERIES + i);
                for d in 0..dim {
                    let keys = line(numbers.columns, d);
                    for ((product, &x), &k) in products.iter_mut().zip(ds).zip(keys) {
                        *product = x * k;
                    }
                    dq[(i * heads + head) * dim + d] += lanes::sum(&products, |x| x);
                }
            }
        }
    }
}

simd! {
    /// Adds to dk [heads·head_dim][KEYS] what the queries of a tile give.
    fn add_key_gradients<F: Real>(tile: &Tile<'_, F>, numbers: &Numbers<'_, F>, dk: &mut [F]) {
        let dim = tile.shape.head_dim;
        for head in 0..tile.shape.heads {
            for i in 0..tile.queries {
                let ds = line(numbers.probabilities, head * QUERIES + i);
                let place = (tile.row + i) * tile.q.row_stride + tile.q.offset + head * dim;
                for (d, &x) in tile.q.data[place..place + dim].iter().enumerate() {
                    let sums = line_mut(dk, head * dim + d);
                    for (sum, &ds) in sums.iter_mut().zip(ds) {
                        *sum = x.fma(ds, *sum);
                    }
                }
            }
        }
    }
}

/// The keys of sequence `b` in a column block.
fn rows_of<'a, F>(shape: &EntropyShape, k: Columns<'a, F>, b: usize) -> KeyRows<'a, F> {
    KeyRows {
        data: k.data,
        first: b * shape.seq * k.row_stride + k.offset,
        head_stride: shape.head_dim,
        row_stride: k.row_stride,
    }
}

/// Where keys that the queries up to `last` see begin and end, tile by tile.
fn key_tiles(shape: &EntropyShape, last: usize, all: usize) -> impl Iterator<Item = Range<usize>> {
    let end = match shape.causal {
        true => all.min(last + 1),
        false => all,
    };
    (0..end)
        .step_by(KEYS)
        .map(move |key| key..end.min(key + KEYS))
}

fn check<F>(shape: &EntropyShape, q: &Columns<'_, F>, k: &Columns<'_, F>, lse: &[F]) {
    let width = shape.heads * shape.head_dim;
    assert!(q.width == width && k.width == width, "{shape:?}");
    q.check("q", shape.batch * shape.seq);
    k.check("k", shape.batch * shape.seq);
    assert!(lse.len() >= shape.batch * shape.heads * shape.seq, "lse");
}

/// The entropy `[batch, seq]` and, where it is kept, D `[batch, heads, seq]`.
///
/// # Panics
/// Where a buffer does not fit the shape.
pub fn entropy<F: Real>(
    shape: &EntropyShape,
    q: Columns<'_, F>,
    k: Columns<'_, F>,
    lse: &[F],
    entropy: &mut [F],
    means: Option<&mut [F]>,
) {
    check(shape, &q, &k, lse);
    let (seq, heads) = (shape.seq, shape.heads);
    let blocks = seq.div_ceil(QUERIES);
    let (entropy, means) = (Shared::new(entropy), means.map(Shared::new));
    parallel::for_each(shape.batch * blocks, |task| {
        let (b, t0) = (task / blocks, task % blocks * QUERIES);
        let queries = QUERIES.min(seq - t0);
        let len = shape.scratch_len() + QUERIES * heads;
        scratch::with(Owner::Attention, len, |block: &mut [F]| {
            let (sums, block) = block.split_at_mut(QUERIES * heads);
            sums.fill(F::ZERO);
            let mut numbers = Numbers::new(shape, block);
            // SAFETY: each task has its own queries.
            let out = unsafe { entropy.part(b * seq + t0, queries) };
            out.fill(F::ZERO);
            for keys in key_tiles(shape, t0 + queries - 1, seq) {
                let tile = Tile {
                    shape,
                    q,
                    row: b * seq + t0,
                    queries,
                    position: t0,
                    keys: rows_of(shape, k, b),
                    key: keys.start,
                    count: keys.len(),
                    lse: &lse[b * heads * seq + t0..],
                    lse_stride: seq,
                };
                fill(&tile, &mut numbers);
                add_entropy(&tile, &numbers, out, sums);
            }
            let Some(means) = means else { return };
            for head in 0..heads {
                // SAFETY: each task has its own queries.
                let out = unsafe { means.part((b * heads + head) * seq + t0, queries) };
                for (i, out) in out.iter_mut().enumerate() {
                    *out = sums[i * heads + head];
                }
            }
        });
    });
}

/// The gradients of queries, keys and values, of which the last are zero.
///
/// # Panics
/// Where a buffer does not fit the shape.
pub fn entropy_backward<F: Real>(
    shape: &EntropyShape,
    q: Columns<'_, F>,
    k: Columns<'_, F>,
    rows: &EntropyRows<'_, F>,
    [dq, dk, dv]: &[ColumnsMut<'_, F>; 3],
) {
    check(shape, &q, &k, rows.lse);
    let (seq, heads) = (shape.seq, shape.heads);
    let width = heads * shape.head_dim;
    for gradient in [dq, dk, dv] {
        gradient.check("a gradient", shape.batch * seq);
    }
    let tile = |b: usize, t0: usize, keys: Range<usize>| Tile {
        shape,
        q,
        row: b * seq + t0,
        queries: QUERIES.min(seq - t0),
        position: t0,
        keys: rows_of(shape, k, b),
        key: keys.start,
        count: keys.len(),
        lse: &rows.lse[b * heads * seq + t0..],
        lse_stride: seq,
    };
    let differentiate = |b: usize, t0: usize, tile: &Tile<'_, F>, numbers: &mut Numbers<'_, F>| {
        fill(tile, numbers);
        let means = &rows.means[b * heads * seq + t0..];
        score_gradients(tile, numbers, means, seq, &rows.gradient[b * seq + t0..]);
    };

    let blocks = seq.div_ceil(QUERIES);
    parallel::for_each(shape.batch * blocks, |task| {
        let (b, t0) = (task / blocks, task % blocks * QUERIES);
        let queries = QUERIES.min(seq - t0);
        let len = shape.scratch_len() + QUERIES * width;
        scratch::with(Owner::Attention, len, |block: &mut [F]| {
            let (sums, block) = block.split_at_mut(QUERIES * width);
            sums.fill(F::ZERO);
            let mut numbers = Numbers::new(shape, block);
            for keys in key_tiles(shape, t0 + queries - 1, seq) {
                let tile = tile(b, t0, keys);
                differentiate(b, t0, &tile, &mut numbers);
                add_query_gradients(&tile, &mut numbers, sums);
            }
            for (i, sums) in sums.chunks_exact(width).take(queries).enumerate() {
                let row = b * seq + t0 + i;
                // SAFETY: each task has its own queries.
                unsafe {
                    dq.part(row, 0, width).copy_from_slice(sums);
                    dv.part(row, 0, width).fill(F::ZERO);
                }
            }
        });
    });

    let blocks = seq.div_ceil(KEYS);
    parallel::for_each(shape.batch * blocks, |task| {
        let (b, key) = (task / blocks, task % blocks * KEYS);
        let count = KEYS.min(seq - key);
        let len = shape.scratch_len() + KEYS * width;
        scratch::with(Owner::Attention, len, |block: &mut [F]| {
            let (sums, block) = block.split_at_mut(KEYS * width);
            sums.fill(F::ZERO);
            let mut numbers = Numbers::new(shape, block);
            let first = if shape.causal { key } else { 0 };
            for t0 in (first..seq).step_by(QUERIES) {
                let tile = tile(b, t0, key..key + count);
                differentiate(b, t0, &tile, &mut numbers);
                add_key_gradients(&tile, &numbers, sums);
            }
            for j in 0..count {
                // SAFETY: each task has its own keys.
                let out = unsafe { dk.part(b * seq + key + j, 0, width) };
                for (column, out) in out.iter_mut().enumerate() {
                    *out = sums[column * KEYS + j];
                }
            }
        });
    });
}

/// The entropy `[batch, seq]` of tokens whose positions begin at `first` of their sequence, over
/// the keys `[batch, heads, slots, head_dim]` of all tokens up to each.
///
/// # Panics
/// Where a buffer does not fit the shape, or positions reach beyond the slots.
pub fn entropy_cached<F: Real>(
    shape: &EntropyShape,
    q: Columns<'_, F>,
    (keys, slots): (&[F], usize),
    first: &[usize],
    entropy: &mut [F],
) {
    let (seq, heads, dim) = (shape.seq, shape.heads, shape.head_dim);
    q.check("q", shape.batch * seq);
    assert!(
        first.len() == shape.batch && first.iter().all(|first| first + seq <= slots),
        "positions beyond {slots} slots"
    );
    let entropy = Shared::new(entropy);
    parallel::for_each(shape.batch * seq, |row| {
        let (b, t) = (row / seq, row % seq);
        let position = first[b] + t;
        let key_rows = KeyRows {
            data: keys,
            first: b * heads * slots * dim,
            head_stride: slots * dim,
            row_stride: dim,
        };
        let len = shape.scratch_len() + heads;
        scratch::with(Owner::Attention, len, |block: &mut [F]| {
            let (lse, block) = block.split_at_mut(heads);
            for (head, lse) in lse.iter_mut().enumerate() {
                let query = &q.data[row * q.row_stride + q.offset + head * dim..][..dim];
                *lse = log_sum(shape, query, &key_rows, head, position + 1);
            }
            let mut numbers = Numbers::new(shape, block);
            // SAFETY: each task has its own row.
            let out = unsafe { entropy.part(row, 1) };
            out[0] = F::ZERO;
            for keys in key_tiles(shape, position, position + 1) {
                let tile = Tile {
                    shape,
                    q,
                    row,
                    queries: 1,
                    position,
                    keys: key_rows,
                    key: keys.start,
                    count: keys.len(),
                    lse,
                    lse_stride: 1,
                };
                fill(&tile, &mut numbers);
                add_entropy(&tile, &numbers, out, &mut []);
            }
        });
    });
}

/// `ln Σ_s exp(scale·⟨q, k_s⟩)` over the first `count` keys of a head.
fn log_sum<F: Real>(
    shape: &EntropyShape,
    query: &[F],
    keys: &KeyRows<'_, F>,
    head: usize,
    count: usize,
) -> F {
    let scale = F::from_f64(shape.scale);
    let score = |s: usize| {
        let place = keys.first + head * keys.head_stride + s * keys.row_stride;
        let key = &keys.data[place..place + query.len()];
        let product = query.iter().zip(key);
        product.fold(F::ZERO, |sum, (&a, &b)| a.fma(b, sum)) * scale
    };
    let largest = (1..count).fold(score(0), |largest, s| score(s).larger(largest));
    let sum = (0..count).fold(F::ZERO, |sum, s| sum + (score(s) - largest).exp());
    largest + sum.ln()
}
