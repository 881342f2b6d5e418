//! The selection of tokens that follow others, whose keys are in a cache. A query selects what it
//! would as the last of a text that ends with it.

use crate::cpu::parallel::Shared;
use crate::cpu::real::Real;

use super::selection::{Count, Threshold, for_each_row, mark, row_sum, squares};
use super::{IndexerShape, Inputs, Part, WORD};

/// Keys `[batch, slots, width]` of the tokens so far and, where the number of keys is adaptive, the
/// sums over the rows up to each `[batch, slots, 2]`: of squares of scores, and of squared sums of
/// scores.
pub struct Cache<'a, F> {
    pub keys: &'a mut [F],
    pub sums: Option<&'a mut [F]>,
    pub slots: usize,
}

/// Writes the selection `[rows, ⌈slots/32⌉]` of the tokens whose positions begin at `first` of
/// their sequence. The workspace has two tables of scores, and a number for each of their rows.
///
/// # Panics
/// Where a buffer does not fit the shape.
pub fn select_cached<F: Real>(
    shape: &IndexerShape,
    inputs: &Inputs<'_, F>,
    (first, count): (&[usize], Count),
    cache: Cache<'_, F>,
    workspace: &mut [F],
    bits: &mut [i32],
) {
    inputs.check(shape);
    let slots = cache.slots;
    let row_words = slots.div_ceil(WORD);
    let kept = shape.batch * slots;
    assert_eq!(first.len(), shape.batch, "positions");
    assert_eq!(cache.keys.len(), kept * shape.width, "the cache of keys");
    assert_eq!(bits.len(), shape.num_rows() * row_words, "the selection");
    append(shape, inputs.keys, first, slots, cache.keys);
    let shape = &IndexerShape {
        keys: slots,
        ..*shape
    };
    let inputs = Inputs {
        keys: &*cache.keys,
        ..*inputs
    };
    let mut sums = cache.sums;
    if let Some(sums) = &sums {
        assert_eq!(sums.len(), kept * 2, "the cache of sums");
    }
    let (products, rest) = workspace.split_at_mut(shape.table());
    let (scores, variances) = rest.split_at_mut(shape.table());
    let bits = Shared::new(bits);
    for part in shape.parts() {
        let part = Part {
            before: first[part.b],
            ..part
        };
        inputs.scores(shape, part, products, scores);
        let sums = sums
            .as_deref_mut()
            .map(|sums| &mut sums[part.b * slots * 2..][..slots * 2]);
        let sums = sums.map(|sums| {
            add_rows(shape, part, scores, variances, sums);
            &*sums
        });
        let variances = &*variances;
        let copies = Shared::new(&mut *products);
        for_each_row(shape, part, scores, |i, row, line| {
            let t = line.len() - 1;
            let keys = match sums {
                Some(sums) => count.keys(t, variances[i].to_f64(), mean(t, &sums[2 * t..])),
                None => count.keys(t, 0.0, 0.0),
            };
            let least = (keys < line.len()).then(|| {
                // SAFETY: each task has its own row.
                let copy = unsafe { copies.part(i * part.columns(), line.len()) };
                copy.copy_from_slice(line);
                Threshold::of(copy, keys)
            });
            // SAFETY: as above.
            let words = unsafe { bits.part(row * row_words, row_words) };
            mark(line, least, words);
        });
    }
}

/// Puts the keys of the new tokens into their slots.
fn append<F: Real>(
    shape: &IndexerShape,
    keys: &[F],
    first: &[usize],
    slots: usize,
    cache: &mut [F],
) {
    let run = shape.seq * shape.width;
    for (b, (keys, &first)) in keys.chunks_exact(run).zip(first).enumerate() {
        let start = (b * slots + first) * shape.width;
        cache[start..start + run].copy_from_slice(keys);
    }
}

/// The variance of each row of a part over the columns that it sees, and the sums over all rows up
/// to it. Rows are added in their order.
fn add_rows<F: Real>(
    shape: &IndexerShape,
    part: Part,
    scores: &[F],
    variances: &mut [F],
    sums: &mut [F],
) {
    let (shared, out) = (Shared::new(&mut *sums), Shared::new(variances));
    for_each_row(shape, part, scores, |i, _, line| {
        let n = F::from_f64(line.len() as f64);
        let total = row_sum(line);
        let mean = total / n;
        let deviations = squares(line, mean);
        // SAFETY: each task has its own row.
        let own = unsafe { shared.part(2 * (line.len() - 1), 2) };
        own[0] = deviations + total * mean;
        own[1] = total * total;
        // SAFETY: as above.
        let variance = unsafe { out.part(i, 1) };
        variance[0] = match line.len() {
            1 => F::ZERO,
            length => deviations / F::from_f64((length - 1) as f64),
        };
    });
    for i in 0..part.rows {
        let t = part.position(i);
        if t > 0 {
            let (before, own) = sums.split_at_mut(2 * t);
            own[0] += before[2 * t - 2];
            own[1] += before[2 * t - 1];
        }
    }
}

/// The mean of the variances of rows 0 to t over t + 1 columns, from their sums.
fn mean<F: Real>(t: usize, sums: &[F]) -> f64 {
    if t == 0 {
        return 0.0;
    }
    let columns = (t + 1) as f64;
    let total = sums[0].to_f64() - sums[1].to_f64() / columns;
    total / ((columns - 1.0) * columns)
}
