//! FlashAttention 2, as PyTorch carries it.

use super::super::super::dtype::DType;
use super::super::super::node::{Step, grads};
use super::super::super::tensor::Tensor;
use super::super::pointwise::like;
use super::super::view;
use super::wanted;
use crate::chip::Chip;

/// Heads are padded to whole vectors of so many numbers.
const VECTOR: u64 = 8;

/// The result in the queries' order, the log-sum of each row, the state of the random numbers and a tensor that nobody reads; keeps
/// the inputs and all of these. Few rows are cut along their keys, so that every multiprocessor has work, and the parts are put
/// together. The backward takes a number for each row and the queries' gradient in fp32; where keys are shared, also their
/// gradients for every query head, which are summed.
pub(super) fn attend(query: &Tensor, key: &Tensor, value: &Tensor, dropout: f64) -> Tensor {
    let width = query.size(3);
    if width.is_multiple_of(VECTOR) {
        return kernel(query, key, value, dropout);
    }
    let query = padded(query);
    let key = padded(key);
    let value = padded(value);
    let out = kernel(&query, &key, &value, dropout);
    view::slice(out, 3, width)
}

fn padded(tensor: &Tensor) -> Tensor {
    const OP: &str = "constant_pad_nd";
    let mut sizes = tensor.sizes();
    sizes.as_mut_slice()[3] = tensor.size(3).next_multiple_of(VECTOR);
    let recorder = tensor.context().record(&[tensor]);
    let out = tensor.context().empty(OP, sizes, tensor.dtype());
    recorder.finish(&[&out], |step| {
        let dtype = step.grad().dtype();
        grads![Some(step.context.empty(OP, step.input_sizes(), dtype))]
    });
    out
}

fn kernel(query: &Tensor, key: &Tensor, value: &Tensor, dropout: f64) -> Tensor {
    const OP: &str = "_scaled_dot_product_flash_attention";
    let context = query.context().clone();
    let mut recorder = context.record(&[query, key, value]);
    recorder.save(key);
    recorder.save(query);
    recorder.save(value);
    let (batch, heads, length) = (query.size(0), query.size(1), query.size(2));
    let width = query.size(3);
    let out = like(query, query.dtype(), OP);
    let log_sum = context.empty(OP, [batch, heads, length], DType::Float32);
    let parts = match dropout > 0.0 {
        true => 1,
        false => parts(context.chip(), batch * heads, [length, key.size(2)], width),
    };
    let partial = (parts > 1).then(|| {
        let sums = context.empty(OP, [parts, batch, heads, length], DType::Float32);
        let sizes = [parts, batch, heads, length, rounded(width)];
        (sums, context.empty(OP, sizes, DType::Float32))
    });
    let random = || context.empty(OP, [2], DType::Int64);
    let mut state = random();
    let unread = context.empty(OP, [], DType::Int64);
    if dropout > 0.0 {
        state = random();
    }
    recorder.save_output(&log_sum);
    recorder.save_output(&out);
    recorder.save_output(&state);
    recorder.save_output(&unread);
    drop(partial);
    drop(log_sum);
    drop(state);
    drop(unread);
    recorder.finish(&[&out], gradients);
    out
}

fn gradients(step: &Step<'_>) -> super::Grads {
    const OP: &str = "_scaled_dot_product_flash_attention_backward";
    /// Rows are counted in whole blocks.
    const BLOCK: u64 = 128;
    let (key, query, value) = (step.saved(0), step.saved(1), step.saved(2));
    let (batch, heads, width) = (query.size(0), query.size(1), query.size(3));
    let grad = view::contiguous(view::transpose(step.grad(), 1, 2));
    let out = view::contiguous(view::transpose(step.saved(4), 1, 2));
    let of_query = like(query, query.dtype(), OP);
    let of_key = like(key, key.dtype(), OP);
    let of_value = like(value, value.dtype(), OP);
    let rows = query.size(2).next_multiple_of(BLOCK);
    let sums = step.context.empty(OP, [batch, heads, rows], DType::Float32);
    let sizes = [batch, rows, heads, rounded(width)];
    let gathered = step.context.empty(OP, sizes, DType::Float32);
    let expanded = || {
        let sizes = [batch, key.size(2), heads, width];
        step.context.empty(OP, sizes, key.dtype())
    };
    let is_shared = key.size(1) != heads;
    let for_key = is_shared.then(expanded);
    let for_value = is_shared.then(expanded);
    drop(for_value);
    drop(for_key);
    drop(gathered);
    drop(sums);
    drop(out);
    drop(grad);
    wanted(step, [of_query, of_key, of_value])
}

/// The width that a kernel computes with.
fn rounded(width: u64) -> u64 {
    match width {
        ..=128 => width.next_multiple_of(32),
        _ => width.next_multiple_of(64),
    }
}

/// How many parts the keys of a row are cut into: of the numbers of parts that use the card nearly as well as any, the smallest.
fn parts(chip: Chip, heads: u64, [queries, keys]: [u64; 2], width: u64) -> u64 {
    const MOST: u64 = 128;
    const QUERIES: u64 = 64;
    /// Blocks that a multiprocessor runs at once.
    const AT_ONCE: u64 = 2;
    /// What counts as nearly as well.
    const SHARE: f64 = 0.85;
    /// From this share of the card's blocks on, nothing is cut.
    const FILLED: f32 = 0.8;
    let keys_of_a_block = match width.div_ceil(64) {
        ..=1 => 256,
        2 => 128,
        _ => 64,
    };
    let at_once = AT_ONCE * chip.multiprocessors;
    let blocks = heads * queries.div_ceil(QUERIES);
    if blocks as f32 >= FILLED * at_once as f32 {
        return 1;
    }
    let key_blocks = keys.div_ceil(keys_of_a_block);
    // Where a part more makes none of them shorter, it is no candidate.
    let candidates = (1..=MOST.min(at_once).min(key_blocks)).filter(|&parts| {
        parts == 1 || key_blocks.div_ceil(parts) != key_blocks.div_ceil(parts - 1)
    });
    let used = |parts: u64| {
        let waves = (blocks * parts) as f32 / at_once as f32;
        waves / waves.ceil()
    };
    let best = candidates.clone().map(used).fold(0.0, f32::max);
    candidates
        .clone()
        .find(|&parts| f64::from(used(parts)) >= SHARE * f64::from(best))
        .unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What PyTorch 2.11 cuts 1000 keys of two heads into, on cards that are not there.
    #[test]
    fn keys_are_cut_as_pytorch_cuts_them() {
        for (card, of_widths) in [
            ("A100 SXM4 40GB", [(64, 4), (96, 4), (128, 4), (256, 6)]),
            ("RTX 4090", [(64, 4), (96, 8), (128, 8), (256, 8)]),
            ("B200", [(64, 4), (96, 8), (128, 8), (256, 8)]),
        ] {
            let chip = Chip::of(&cinch_device::find(card).unwrap().card()).unwrap();
            for (width, expected) in of_widths {
                let found = parts(chip, 2, [1000, 1000], width);
                assert_eq!(found, expected, "{card}, {width}");
            }
        }
    }
}
