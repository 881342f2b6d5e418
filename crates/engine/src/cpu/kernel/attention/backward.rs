//! Backward: one task per (sequence, key/value head). With `P = e^{scale·s − lse}`, the dropout
//! factors M and `δ_t = do_t·o_t`:
//!
//! ```text
//! dV = (P∘M)ᵀ·dO
//! dS = P∘((dO·Vᵀ)∘M − δ)·scale
//! dQ = dS·K,   dK = dSᵀ·Q
//! ```
//!
//! The task walks blocks of keys and, inside, blocks of queries of every head of its group:
//! dK and dV of the block stay in scratch, dQ grows in its buffer in the order of the keys.
//! Beyond the length of a sequence all three are zero.

use crate::cpu::dropout::Dropout;
use crate::cpu::kernel::columns::{Columns, ColumnsMut};
use crate::cpu::kernel::gemm::gemm_serial;
use crate::cpu::kernel::lanes::{self, LANES, Lanes};
use crate::cpu::kernel::scratch::{self, Owner};
use crate::cpu::parallel::{self, Accumulate, Shared};
use crate::cpu::real::Real;
use crate::cpu::simd::simd;

use super::narrow::{self, Given};
use super::{AttentionShape, BLOCK, Inputs, Matrix, Sight, TileMask, bits};

/// Elements of workspace: δ for every sequence, head and query.
pub fn backward_workspace(shape: &AttentionShape) -> usize {
    shape.rows() * shape.heads
}

/// Overwrites dq, dk and dv, which have the widths of q, k and v.
///
/// # Panics
/// Where a buffer does not fit the shape.
#[expect(
    clippy::too_many_arguments,
    reason = "the operands and their gradients"
)]
pub fn backward<F: Real>(
    shape: &AttentionShape,
    grad_output: &[F],
    inputs: &Inputs<'_, F>,
    o: &[F],
    lse: &[F],
    dropout: Option<Dropout>,
    workspace: &mut [F],
    dq: &ColumnsMut<'_, F>,
    dk: &ColumnsMut<'_, F>,
    dv: &ColumnsMut<'_, F>,
) {
    inputs.check(shape, shape.seq);
    for (name, gradient, input) in [
        ("dq", dq, inputs.q),
        ("dk", dk, inputs.k),
        ("dv", dv, inputs.v),
    ] {
        gradient.check(name, shape.rows());
        assert!(
            gradient.width() == input.width,
            "{name} has another width than its input"
        );
    }
    // Different blocks never overlap; one block passed twice would be written by two tasks.
    let apart = |a, b| !std::ptr::eq::<ColumnsMut<'_, F>>(a, b);
    assert!(
        apart(dq, dk) && apart(dq, dv) && apart(dk, dv),
        "one block is the target of two gradients"
    );
    let width = shape.heads * shape.head_dim;
    let dropout = dropout.map(|dropout| shape.mask(dropout));
    let pass = Pass {
        shape,
        grad_output: Columns::whole(grad_output, width),
        inputs,
        o: Columns::whole(o, width),
        lse,
        dropout,
        delta: Shared::new(&mut workspace[..backward_workspace(shape)]),
        dq,
        dk,
        dv,
    };
    pass.grad_output.check("do", shape.rows());
    pass.o.check("o", shape.rows());
    assert!(lse.len() >= shape.rows() * shape.heads, "lse is too short");
    if narrow::suits(shape, inputs) {
        let given = Given {
            grad_output: pass.grad_output,
            o: pass.o,
            lse,
        };
        return narrow::backward(shape, inputs, &given, dropout, [dq, dk, dv]);
    }
    parallel::for_each(shape.batch * shape.kv_heads, |task| {
        pass.key_head(task / shape.kv_heads, task % shape.kv_heads);
    });
}

struct Pass<'a, F> {
    shape: &'a AttentionShape,
    grad_output: Columns<'a, F>,
    inputs: &'a Inputs<'a, F>,
    o: Columns<'a, F>,
    lse: &'a [F],
    dropout: Option<Dropout>,
    delta: Shared<'a, F>,
    dq: &'a ColumnsMut<'a, F>,
    dk: &'a ColumnsMut<'a, F>,
    dv: &'a ColumnsMut<'a, F>,
}

/// A task's tiles.
struct Tiles<'a, F> {
    /// `[BLOCK, BLOCK]`: scores, then P∘M.
    p: &'a mut [F],
    /// `[BLOCK, BLOCK]`: dO·Vᵀ, then dS.
    ds: &'a mut [F],
    /// `[BLOCK, head_dim]` each.
    dq: &'a mut [F],
    dk: &'a mut [F],
    dv: &'a mut [F],
}

impl<F: Real> Pass<'_, F> {
    fn key_head(&self, b: usize, kv: usize) {
        let shape = self.shape;
        let (dim, length) = (shape.head_dim, self.inputs.length(shape, b));
        let heads = kv * shape.group()..(kv + 1) * shape.group();
        for h in heads.clone() {
            // SAFETY: a query head belongs to one task.
            let delta = unsafe {
                self.delta
                    .part((b * shape.heads + h) * shape.seq, shape.seq)
            };
            self.fill_delta(b, h, delta);
        }
        scratch::with(
            Owner::Attention,
            BLOCK * (2 * BLOCK + 3 * dim),
            |block: &mut [F]| {
                let (p, rest) = block.split_at_mut(BLOCK * BLOCK);
                let (ds, rest) = rest.split_at_mut(BLOCK * BLOCK);
                let (dq, rest) = rest.split_at_mut(BLOCK * dim);
                let (dk, dv) = rest.split_at_mut(BLOCK * dim);
                let mut tiles = Tiles { p, ds, dq, dk, dv };
                for k0 in (0..length).step_by(BLOCK) {
                    tiles.dk.fill(F::ZERO);
                    tiles.dv.fill(F::ZERO);
                    // Blocks above the diagonal hold no visible key.
                    let first_query = if shape.causal { k0 } else { 0 };
                    for h in heads.clone() {
                        for t0 in (first_query..length).step_by(BLOCK) {
                            self.add_tile((b, h, kv), length, t0, k0, &mut tiles);
                        }
                    }
                    for j in 0..BLOCK.min(length - k0) {
                        let row = b * shape.seq + k0 + j;
                        // SAFETY: each task has its own key/value head of its own sequence.
                        let (dk, dv) = unsafe {
                            (
                                self.dk.part(row, kv * dim, dim),
                                self.dv.part(row, kv * dim, dim),
                            )
                        };
                        dk.copy_from_slice(&tiles.dk[j * dim..][..dim]);
                        dv.copy_from_slice(&tiles.dv[j * dim..][..dim]);
                    }
                }
            },
        );
        for row in b * shape.seq + length..(b + 1) * shape.seq {
            // SAFETY: each task has its own key/value head, and its query heads, of its own
            // sequence.
            unsafe {
                self.dk.part(row, kv * dim, dim).fill(F::ZERO);
                self.dv.part(row, kv * dim, dim).fill(F::ZERO);
                let width = heads.len() * dim;
                self.dq.part(row, heads.start * dim, width).fill(F::ZERO);
            }
        }
    }

    fn fill_delta(&self, b: usize, h: usize, delta: &mut [F]) {
        let (seq, dim) = (self.shape.seq, self.shape.head_dim);
        let grad_output = self.grad_output.matrix_at(b * seq, h * dim);
        let o = self.o.matrix_at(b * seq, h * dim);
        row_products(dim, grad_output.row_stride, grad_output.data, o.data, delta);
    }

    /// Adds what queries `t0..` of head h and keys `k0..` give each other.
    fn add_tile(
        &self,
        (b, h, kv): (usize, usize, usize),
        length: usize,
        t0: usize,
        k0: usize,
        tiles: &mut Tiles<'_, F>,
    ) {
        let shape = self.shape;
        let (seq, dim) = (shape.seq, shape.head_dim);
        let (rows, columns) = (BLOCK.min(length - t0), BLOCK.min(length - k0));
        let sight = self.inputs.sight(shape, b);
        let first_block = sight.first_block(t0..t0 + rows);
        if k0 < first_block {
            return;
        }
        let q = self.inputs.q.matrix_at(b * seq + t0, h * dim);
        let k = self.inputs.k.matrix_at(b * seq + k0, kv * dim);
        let v = self.inputs.v.matrix_at(b * seq + k0, kv * dim);
        let grad_output = self.grad_output.matrix_at(b * seq + t0, h * dim);
        let write = Accumulate::Overwrite;
        gemm_serial(
            rows,
            columns,
            dim,
            q,
            k.transposed(),
            tiles.p,
            BLOCK,
            write,
            None,
        );
        gemm_serial(
            rows,
            columns,
            dim,
            grad_output,
            v.transposed(),
            tiles.ds,
            BLOCK,
            write,
            None,
        );

        let row = (b * shape.heads + h) * seq + t0;
        let lse = &self.lse[row..][..rows];
        // SAFETY: a query head belongs to one task.
        let delta = unsafe { self.delta.part(row, rows) };
        let mask = self.dropout.map(|dropout| TileMask {
            dropout,
            row,
            key: k0,
        });
        let scale = F::from_f64(shape.scale);
        score_gradients(
            scale, &sight, columns, t0, k0, lse, delta, tiles.p, tiles.ds, mask,
        );

        let p = Matrix::row_major(&*tiles.p, BLOCK);
        let ds = Matrix::row_major(&*tiles.ds, BLOCK);
        let (down, add) = (p.transposed(), Accumulate::Add);
        gemm_serial(
            columns,
            dim,
            rows,
            down,
            grad_output,
            tiles.dv,
            dim,
            add,
            None,
        );
        gemm_serial(
            columns,
            dim,
            rows,
            ds.transposed(),
            q,
            tiles.dk,
            dim,
            add,
            None,
        );
        gemm_serial(rows, dim, columns, ds, k, tiles.dq, dim, write, None);
        for i in 0..rows {
            // SAFETY: a query head belongs to one task.
            let dq = unsafe { self.dq.part(b * seq + t0 + i, h * dim, dim) };
            let new = &tiles.dq[i * dim..][..dim];
            if k0 == first_block {
                dq.copy_from_slice(new);
            } else {
                for (dq, &new) in dq.iter_mut().zip(new) {
                    *dq += new;
                }
            }
        }
    }
}

simd! {
    /// `out[t] = a_t·b_t` over `dim` elements of rows `stride` apart.
    fn row_products<F: Real>(dim: usize, stride: usize, a: &[F], b: &[F], out: &mut [F]) {
        for (t, out) in out.iter_mut().enumerate() {
            let (a, b) = (&a[t * stride..][..dim], &b[t * stride..][..dim]);
            let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
            let rest = a_chunks.remainder().iter().zip(b_chunks.remainder());
            let mut lanes = [F::ZERO; LANES];
            for (lane, (&a, &b)) in lanes.iter_mut().zip(rest) {
                *lane = a * b;
            }
            for (a, b) in a_chunks.zip(b_chunks) {
                for l in 0..LANES {
                    lanes[l] = a[l].fma(b[l], lanes[l]);
                }
            }
            *out = lanes::total(&Lanes(lanes));
        }
    }
}

simd! {
    /// Turns a tile of raw scores into P∘M and `dO·Vᵀ` into dS; 0 where a query does not see
    /// a key.
    fn score_gradients<F: Real>(
        scale: F,
        sight: &Sight<'_>,
        columns: usize,
        t0: usize,
        k0: usize,
        lse: &[F],
        delta: &[F],
        p: &mut [F],
        ds: &mut [F],
        mask: Option<TileMask>,
    ) {
        let width = columns.next_multiple_of(LANES);
        for i in 0..lse.len() {
            let visible = sight.visible(t0 + i, k0, columns);
            let seen = bits(visible.start, visible.end) & sight.selected(t0 + i, k0);
            let (lse, delta) = (lse[i], delta[i]);
            let p = &mut p[i * BLOCK..][..width];
            let ds = &mut ds[i * BLOCK..][..width];
            if let Some(mask) = mask {
                mask.apply(i, ds);
            }
            let chunks = p.chunks_exact_mut(LANES).zip(ds.chunks_exact_mut(LANES));
            for (c, (p, ds)) in chunks.enumerate() {
                let chunk = (seen >> (c * LANES)) as u32;
                for l in 0..LANES {
                    let seen = chunk >> l & 1 == 1;
                    let probability = (p[l] * scale - lse).exp();
                    let gradient = probability * (ds[l] - delta) * scale;
                    p[l] = if seen { probability } else { F::ZERO };
                    ds[l] = if seen { gradient } else { F::ZERO };
                }
            }
            if let Some(mask) = mask {
                mask.apply(i, p);
            }
        }
    }
}
