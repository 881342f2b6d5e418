//! The indexer's scores of some rows at a time, and what is made of them: a selection of keys,
//! and the loss that fits them to the attention.
//!
//! ```text
//! I[t,s] = Σ_j w[t,j]·σ(q[t,j]·k[s]/√width + b_j),   w = σ(c + b_w),   s ≤ t
//! ```

mod cached;
mod loss;
mod selection;

pub use cached::{Cache, select_cached};
pub use loss::{Gradients, LossInputs, loss, loss_backward};
pub use selection::{Count, select};

use crate::cpu::parallel::{self, Accumulate, Shared};
use crate::cpu::real::Real;
use crate::cpu::simd::simd;

use super::gemm::{Matrix, gemm};

/// Keys in a word of a selection.
const WORD: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexerShape {
    pub batch: usize,
    pub seq: usize,
    pub heads: usize,
    /// Columns of a head.
    pub width: usize,
    /// Keys of a sequence: `seq`, or the slots of a cache.
    pub keys: usize,
    /// Rows whose scores exist at once.
    pub rows: usize,
}

impl IndexerShape {
    fn num_rows(&self) -> usize {
        self.batch * self.seq
    }

    fn scale<F: Real>(&self) -> F {
        F::from_f64(1.0 / (self.width as f64).sqrt())
    }

    /// Elements of a table of scores.
    fn table(&self) -> usize {
        self.rows * self.keys
    }

    /// The rows of all sequences, so many at a time.
    fn parts(&self) -> impl Iterator<Item = Part> + use<> {
        let Self {
            batch, seq, rows, ..
        } = *self;
        (0..batch).flat_map(move |b| {
            (0..seq).step_by(rows.max(1)).map(move |t0| Part {
                b,
                before: 0,
                t0,
                rows: rows.min(seq - t0),
            })
        })
    }
}

/// Queries `[rows, heads·width]`, keys `[rows, width]`, weights before bias and sigmoid
/// `[rows, heads]`, and the biases `[heads]`.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a, F> {
    pub queries: &'a [F],
    pub keys: &'a [F],
    pub weights: &'a [F],
    pub weight_bias: &'a [F],
    pub score_bias: &'a [F],
}

/// Some rows of a sequence. Their tables have as many columns as the last of them sees.
#[derive(Clone, Copy, Debug)]
struct Part {
    b: usize,
    /// Tokens that are in a cache, before the first of the sequence.
    before: usize,
    t0: usize,
    rows: usize,
}

impl Part {
    fn columns(&self) -> usize {
        self.before + self.t0 + self.rows
    }

    /// The position of a row.
    fn position(&self, row: usize) -> usize {
        self.before + self.t0 + row
    }
}

impl<'a, F: Real> Inputs<'a, F> {
    fn check(&self, shape: &IndexerShape) {
        let rows = shape.num_rows();
        assert_eq!(
            self.queries.len(),
            rows * shape.heads * shape.width,
            "queries"
        );
        let keys = shape.batch * shape.keys * shape.width;
        assert_eq!(self.keys.len(), keys, "keys");
        assert_eq!(self.weights.len(), rows * shape.heads, "weights");
        assert_eq!(
            self.weight_bias.len(),
            shape.heads,
            "the bias of the weights"
        );
        assert_eq!(self.score_bias.len(), shape.heads, "the bias of the scores");
    }

    /// w of a row, numbered over all sequences.
    fn weight(&self, shape: &IndexerShape, row: usize, head: usize) -> F {
        (self.weights[row * shape.heads + head] + self.weight_bias[head]).sigmoid()
    }

    /// The queries of one head, from a row on.
    fn query(&self, shape: &IndexerShape, row: usize, head: usize) -> Matrix<'a, F> {
        let stride = shape.heads * shape.width;
        let start = row * stride + head * shape.width;
        Matrix::row_major(&self.queries[start..], stride)
    }

    fn key(&self, shape: &IndexerShape, b: usize) -> Matrix<'a, F> {
        let sequence = shape.keys * shape.width;
        Matrix::row_major(&self.keys[b * sequence..][..sequence], shape.width)
    }

    /// `q·k` of one head, for all rows and columns of a part.
    fn products(&self, shape: &IndexerShape, part: Part, head: usize, products: &mut [F]) {
        let columns = part.columns();
        let first = part.b * shape.seq + part.t0;
        gemm(
            part.rows,
            columns,
            shape.width,
            self.query(shape, first, head),
            self.key(shape, part.b).transposed(),
            products,
            columns,
            Accumulate::Overwrite,
            None,
        );
    }

    /// The scores of a part; `products` is a table of its own. What a row does not see is left
    /// as it was.
    fn scores(&self, shape: &IndexerShape, part: Part, products: &mut [F], scores: &mut [F]) {
        let columns = part.columns();
        let table = Shared::new(scores);
        for head in 0..shape.heads {
            self.products(shape, part, head, products);
            let products = &*products;
            parallel::for_each(part.rows, |i| {
                let t = part.position(i);
                // SAFETY: each task has its own row.
                let line = unsafe { table.part(i * columns, t + 1) };
                let weight = self.weight(shape, part.b * shape.seq + part.t0 + i, head);
                let products = &products[i * columns..][..=t];
                let bias = self.score_bias[head];
                add_sigmoids(weight, shape.scale(), bias, head == 0, products, line);
            });
        }
    }
}

simd! {
    /// `line (+)= weight·σ(products·scale + bias)`.
    fn add_sigmoids<F: Real>(
        weight: F,
        scale: F,
        bias: F,
        first: bool,
        products: &[F],
        line: &mut [F],
    ) {
        let products = &products[..line.len()];
        if first {
            for (x, &product) in line.iter_mut().zip(products) {
                *x = weight * product.fma(scale, bias).sigmoid();
            }
        } else {
            for (x, &product) in line.iter_mut().zip(products) {
                *x = weight.fma(product.fma(scale, bias).sigmoid(), *x);
            }
        }
    }
}

/// Whether a row of a selection has a key.
#[inline(always)]
fn has(words: &[i32], key: usize) -> bool {
    words[key / WORD] >> (key % WORD) & 1 == 1
}

#[cfg(test)]
mod tests;
