//! Attention of tokens that follow others: their keys and values go into a cache, and their
//! queries see what is there.

use crate::cpu::kernel::columns::Columns;
use crate::cpu::kernel::gemm::Matrix;
use crate::cpu::kernel::scratch::{self, Owner};
use crate::cpu::parallel::{self, Shared};
use crate::cpu::real::Real;

use super::forward::{State, Tile};
use super::{AttentionShape, BLOCK, Inputs, Sight};

/// Keys and values of the tokens so far, each `[batch, kv_heads, slots, head_dim]`; the token at
/// position p is in slot p mod `slots`.
pub struct Cache<'a, F> {
    pub keys: &'a mut [F],
    pub values: &'a mut [F],
    pub slots: usize,
}

/// `o [rows, heads·head_dim]` of the tokens whose positions begin at `first` of their sequence. A
/// selection has a bit for each slot.
///
/// # Panics
/// Where a buffer does not fit the shape.
pub fn forward_cached<F: Real>(
    shape: &AttentionShape,
    inputs: &Inputs<'_, F>,
    first: &[usize],
    cache: Cache<'_, F>,
    o: &mut [F],
) {
    let (dim, slots) = (shape.head_dim, cache.slots);
    inputs.check(shape, slots);
    let width = shape.heads * dim;
    assert!(o.len() >= shape.rows() * width, "o is too short");
    assert!(
        slots >= shape.seq && first.len() == shape.batch,
        "{shape:?}"
    );
    let cached = shape.batch * shape.kv_heads * slots * dim;
    assert_eq!(cache.keys.len(), cached, "the cache of keys");
    assert_eq!(cache.values.len(), cached, "the cache of values");
    append(shape, first, slots, inputs.k, cache.keys);
    append(shape, first, slots, inputs.v, cache.values);

    let (keys, values) = (&*cache.keys, &*cache.values);
    let blocks = shape.seq.div_ceil(BLOCK);
    let o = Shared::new(o);
    parallel::for_each(shape.batch * shape.heads * blocks, |task| {
        let (head, t0) = (task / blocks, task % blocks * BLOCK);
        let (b, h) = (head / shape.heads, head % shape.heads);
        let rows = BLOCK.min(shape.seq - t0);
        let query = first[b] + t0;
        let sight = Sight {
            selection: inputs.selection_of(shape, b, (first[b], slots)),
            causal: true,
            window: shape.window,
            starts: None,
        };
        let of_head = (b * shape.kv_heads + h / shape.group()) * slots;
        scratch::with(
            Owner::Attention,
            State::<F>::len(dim),
            |block: &mut [F]| {
                let end = query + rows;
                let mut state = State::new(block, rows, end, dim);
                let mut key = sight.first_block(query..end);
                while key < end {
                    let slot = key % slots;
                    let columns = BLOCK.min(end - key).min(slots - slot);
                    let at = |cache: &'_ [F]| (of_head + slot) * dim..cache.len();
                    let tile = Tile {
                        q: inputs.q.matrix_at(b * shape.seq + t0, h * dim),
                        k: Matrix::row_major(&keys[at(keys)], dim),
                        v: Matrix::row_major(&values[at(values)], dim),
                        columns,
                        query,
                        key,
                    };
                    state.add_tile(F::from_f64(shape.scale), &sight, &tile, None);
                    key += columns;
                }
                for i in 0..rows {
                    let place = (b * shape.seq + t0 + i) * width + h * dim;
                    // SAFETY: each task has its own queries of its own head.
                    state.finish(i, unsafe { o.part(place, dim) });
                }
            },
        );
    });
}

/// Puts the heads of the new tokens into their slots.
fn append<F: Real>(
    shape: &AttentionShape,
    first: &[usize],
    slots: usize,
    source: Columns<'_, F>,
    cache: &mut [F],
) {
    let dim = shape.head_dim;
    for row in 0..shape.rows() {
        let (b, t) = (row / shape.seq, row % shape.seq);
        let slot = (first[b] + t) % slots;
        let tokens = &source.data[row * source.row_stride + source.offset..][..source.width];
        for (head, part) in tokens.chunks_exact(dim).enumerate() {
            let place = ((b * shape.kv_heads + head) * slots + slot) * dim;
            cache[place..place + dim].copy_from_slice(part);
        }
    }
}
