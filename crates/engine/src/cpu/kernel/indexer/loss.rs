//! `KL_t = Σ_s p·(ln p − I + lse_I)` with p the mean over heads of the attention's
//! probabilities, and its gradient by the indexer: with `dI = g·(e^{I − lse_I} − p)`,
//!
//! ```text
//! dw_j = Σ_s dI·σ_j          dz_j = dI·w_j·σ_j·(1 − σ_j)/√width
//! dq_j = dz_j·K              dK = Σ_j dz_jᵀ·q_j              db_j = √width·Σ dz_j
//! ```

use crate::cpu::kernel::attention::{AttentionShape, Inputs as AttentionInputs};
use crate::cpu::kernel::gemm::{Matrix, gemm};
use crate::cpu::kernel::lanes;
use crate::cpu::parallel::{self, Accumulate, Shared};
use crate::cpu::real::Real;
use crate::cpu::simd::simd;

use super::{IndexerShape, Inputs, Part, WORD, has};

/// The indexer with the log-sum-exp of its scores `[rows]`, and the attention, whose values are
/// not read, with its own `[batch, heads, seq]`.
#[derive(Clone, Copy)]
pub struct LossInputs<'a, F> {
    pub indexer: Inputs<'a, F>,
    pub indexer_lse: &'a [F],
    pub attention: AttentionShape,
    pub sources: AttentionInputs<'a, F>,
    pub lse: &'a [F],
}

/// Where the gradients go: overwritten, but for the biases, which have their own way.
pub struct Gradients<'a, F> {
    pub queries: &'a mut [F],
    pub keys: &'a mut [F],
    pub weights: &'a mut [F],
    pub weight_bias: (&'a mut [F], Accumulate),
    pub score_bias: (&'a mut [F], Accumulate),
}

/// Tables of some rows.
struct Tables<'a, F> {
    /// Products of one head.
    products: &'a mut [F],
    scores: &'a mut [F],
    /// p, then dI.
    probabilities: &'a mut [F],
}

impl<'a, F: Real> Tables<'a, F> {
    fn split(shape: &IndexerShape, workspace: &'a mut [F]) -> (Self, &'a mut [F]) {
        let (products, rest) = workspace.split_at_mut(shape.table());
        let (scores, rest) = rest.split_at_mut(shape.table());
        let (probabilities, rest) = rest.split_at_mut(shape.table());
        let tables = Self {
            products,
            scores,
            probabilities,
        };
        (tables, rest)
    }
}

/// KL of every query `[rows]`, which the workspace has room for behind its tables.
///
/// # Panics
/// Where a buffer does not fit the shape.
pub fn loss<'a, F: Real>(
    shape: &IndexerShape,
    inputs: &LossInputs<'_, F>,
    workspace: &'a mut [F],
) -> &'a [F] {
    inputs.check(shape);
    let (mut tables, rest) = Tables::split(shape, workspace);
    let all = &mut rest[..shape.num_rows()];
    let kl = Shared::new(&mut *all);
    for part in shape.parts() {
        inputs.fill(shape, part, &mut tables);
        let (scores, probabilities) = (&*tables.scores, &*tables.probabilities);
        parallel::for_each(part.rows, |i| {
            let (t, row) = (part.t0 + i, part.b * shape.seq + part.t0 + i);
            let scores = &scores[i * part.columns()..][..=t];
            let p = &probabilities[i * part.columns()..][..=t];
            // SAFETY: each task has its own row.
            let kl = unsafe { kl.part(row, 1) };
            kl[0] = divergence(p, scores, inputs.indexer_lse[row]);
        });
    }
    all
}

/// The gradients of the indexer, where that of the KL of each query is `gradient`.
///
/// # Panics
/// Where a buffer does not fit the shape.
pub fn loss_backward<F: Real>(
    shape: &IndexerShape,
    gradient: F,
    inputs: &LossInputs<'_, F>,
    workspace: &mut [F],
    gradients: Gradients<'_, F>,
) {
    inputs.check(shape);
    let (mut tables, rest) = Tables::split(shape, workspace);
    let bias_rows = &mut rest[..shape.num_rows() * shape.heads];
    gradients.keys.fill(F::ZERO);
    for part in shape.parts() {
        inputs.fill(shape, part, &mut tables);
        inputs.score_gradients(shape, part, gradient, &mut tables);
        for head in 0..shape.heads {
            let weights = Shared::new(&mut *gradients.weights);
            let sums = Shared::new(&mut *bias_rows);
            inputs.head_gradients(shape, part, head, &mut tables, (&weights, &sums));
            inputs.products_backward(
                shape,
                part,
                head,
                tables.products,
                gradients.queries,
                gradients.keys,
            );
        }
    }
    sum_rows(shape.heads, gradients.weights, gradients.weight_bias);
    sum_rows(shape.heads, bias_rows, gradients.score_bias);
}

/// The sums of columns, in the order of the rows.
fn sum_rows<F: Real>(heads: usize, rows: &[F], (out, mode): (&mut [F], Accumulate)) {
    for (head, out) in out.iter_mut().enumerate().take(heads) {
        let column = rows.iter().skip(head).step_by(heads);
        let total: f64 = column.map(|x| x.to_f64()).sum();
        mode.put(out, F::from_f64(total));
    }
}

impl<F: Real> LossInputs<'_, F> {
    fn check(&self, shape: &IndexerShape) {
        self.indexer.check(shape);
        let attention = self.attention;
        assert_eq!((attention.batch, attention.seq), (shape.batch, shape.seq));
        assert_eq!(
            self.indexer_lse.len(),
            shape.num_rows(),
            "the indexer's log-sum-exp"
        );
        assert_eq!(
            self.lse.len(),
            shape.num_rows() * attention.heads,
            "the log-sum-exp"
        );
    }

    /// The words of a row of the selection.
    fn words(&self, shape: &IndexerShape, row: usize) -> Option<&[i32]> {
        let row_words = shape.seq.div_ceil(WORD);
        self.sources
            .selection
            .map(|selection| &selection[row * row_words..][..row_words])
    }

    /// Scores and probabilities of a part. Where a query has not selected a key, p is 0 and the
    /// score −∞.
    fn fill(&self, shape: &IndexerShape, part: Part, tables: &mut Tables<'_, F>) {
        let attention = &self.attention;
        let columns = part.columns();
        let first = part.b * shape.seq + part.t0;
        let group = attention.heads / attention.kv_heads;
        let scale = F::from_f64(attention.scale);
        let share = F::from_f64(1.0 / attention.heads as f64);
        for head in 0..attention.heads {
            let dim = attention.head_dim;
            let q = self.sources.q.matrix_at(first, head * dim);
            let k = self
                .sources
                .k
                .matrix_at(part.b * shape.seq, head / group * dim);
            gemm(
                part.rows,
                columns,
                dim,
                q,
                k.transposed(),
                tables.products,
                columns,
                Accumulate::Overwrite,
                None,
            );
            let products = &*tables.products;
            let table = Shared::new(&mut *tables.probabilities);
            parallel::for_each(part.rows, |i| {
                let t = part.t0 + i;
                // SAFETY: each task has its own row.
                let line = unsafe { table.part(i * columns, t + 1) };
                let products = &products[i * columns..][..=t];
                let lse = self.lse[(part.b * attention.heads + head) * shape.seq + t];
                add_probabilities(scale, lse, share, head == 0, products, line);
            });
        }
        self.indexer
            .scores(shape, part, tables.products, tables.scores);
        let scores = Shared::new(&mut *tables.scores);
        let probabilities = Shared::new(&mut *tables.probabilities);
        parallel::for_each(part.rows, |i| {
            let t = part.t0 + i;
            let Some(words) = self.words(shape, first + i) else {
                return;
            };
            // SAFETY: each task has its own row.
            let (scores, p) = unsafe {
                let at = i * columns;
                (scores.part(at, t + 1), probabilities.part(at, t + 1))
            };
            for (key, (score, p)) in scores.iter_mut().zip(p).enumerate() {
                if !has(words, key) {
                    *score = F::from_f64(f64::NEG_INFINITY);
                    *p = F::ZERO;
                }
            }
        });
    }

    /// Turns p into dI.
    fn score_gradients(
        &self,
        shape: &IndexerShape,
        part: Part,
        gradient: F,
        tables: &mut Tables<'_, F>,
    ) {
        let columns = part.columns();
        let scores = &*tables.scores;
        let table = Shared::new(&mut *tables.probabilities);
        parallel::for_each(part.rows, |i| {
            let (t, row) = (part.t0 + i, part.b * shape.seq + part.t0 + i);
            // SAFETY: each task has its own row.
            let line = unsafe { table.part(i * columns, t + 1) };
            let scores = &scores[i * columns..][..=t];
            differences(gradient, self.indexer_lse[row], scores, line);
        });
    }

    /// dz of one head in place of its products, and the sums of its rows: gradients of the
    /// weights before their sigmoid, and of the bias of the scores.
    fn head_gradients(
        &self,
        shape: &IndexerShape,
        part: Part,
        head: usize,
        tables: &mut Tables<'_, F>,
        (weights, sums): (&Shared<'_, F>, &Shared<'_, F>),
    ) {
        let columns = part.columns();
        self.indexer.products(shape, part, head, tables.products);
        let differences = &*tables.probabilities;
        let table = Shared::new(&mut *tables.products);
        parallel::for_each(part.rows, |i| {
            let (t, row) = (part.t0 + i, part.b * shape.seq + part.t0 + i);
            // SAFETY: each task has its own row.
            let line = unsafe { table.part(i * columns, columns) };
            let (line, hidden) = line.split_at_mut(t + 1);
            hidden.fill(F::ZERO);
            let weight = self.indexer.weight(shape, row, head);
            let bias = self.indexer.score_bias[head];
            let differences = &differences[i * columns..][..=t];
            let (of_weight, of_bias) =
                sigmoid_gradients(weight, shape.scale(), bias, differences, line);
            // SAFETY: as above.
            unsafe {
                let at = row * shape.heads + head;
                weights.part(at, 1)[0] = of_weight * weight * (F::ONE - weight);
                sums.part(at, 1)[0] = of_bias;
            }
        });
    }

    /// `dq_j = dz·K`, and `dzᵀ·q_j` added to dK.
    fn products_backward(
        &self,
        shape: &IndexerShape,
        part: Part,
        head: usize,
        dz: &[F],
        queries: &mut [F],
        keys: &mut [F],
    ) {
        let (columns, stride) = (part.columns(), shape.heads * shape.width);
        let first = part.b * shape.seq + part.t0;
        let dz = Matrix::row_major(dz, columns);
        gemm(
            part.rows,
            shape.width,
            columns,
            dz,
            self.indexer.key(shape, part.b),
            &mut queries[first * stride + head * shape.width..],
            stride,
            Accumulate::Overwrite,
            None,
        );
        gemm(
            columns,
            shape.width,
            part.rows,
            dz.transposed(),
            self.indexer.query(shape, first, head),
            &mut keys[part.b * shape.seq * shape.width..],
            shape.width,
            Accumulate::Add,
            None,
        );
    }
}

simd! {
    /// `line (+)= share·e^{scale·products − lse}`.
    fn add_probabilities<F: Real>(
        scale: F,
        lse: F,
        share: F,
        first: bool,
        products: &[F],
        line: &mut [F],
    ) {
        let products = &products[..line.len()];
        for (x, &product) in line.iter_mut().zip(products) {
            let p = share * product.fma(scale, -lse).exp();
            *x = if first { p } else { *x + p };
        }
    }
}

simd! {
    /// `Σ p·(ln p − I + lse)`; keys whose p is 0 add nothing, whatever their score.
    fn divergence<F: Real>(p: &[F], scores: &[F], lse: F) -> F {
        let smallest = F::from_f64(1e-37);
        lanes::two_sums(p, scores, p, |p, score, _| {
            let some = p > smallest;
            let term = p * (p.larger(smallest).ln() - score + lse);
            (if some { term } else { F::ZERO }, F::ZERO)
        })
        .0
    }
}

simd! {
    /// `p = g·(e^{I − lse} − p)`.
    fn differences<F: Real>(gradient: F, lse: F, scores: &[F], p: &mut [F]) {
        let scores = &scores[..p.len()];
        for (p, &score) in p.iter_mut().zip(scores) {
            *p = gradient * ((score - lse).exp() - *p);
        }
    }
}

simd! {
    /// Products become dz; the sums of `dI·σ` and of `dI·w·σ·(1 − σ)`.
    fn sigmoid_gradients<F: Real>(
        weight: F,
        scale: F,
        bias: F,
        differences: &[F],
        products: &mut [F],
    ) -> (F, F) {
        for product in &mut *products {
            *product = product.fma(scale, bias).sigmoid();
        }
        let sums = lanes::two_sums(products, differences, products, |sigmoid, difference, _| {
            let of_score = difference * weight * sigmoid * (F::ONE - sigmoid);
            (difference * sigmoid, of_score)
        });
        for (product, &difference) in products.iter_mut().zip(differences) {
            let sigmoid = *product;
            *product = difference * weight * sigmoid * (F::ONE - sigmoid) * scale;
        }
        sums
    }
}
