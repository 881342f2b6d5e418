//! The memory-efficient kernels, of xFormers.

use super::super::super::dtype::DType;
use super::super::super::node::{Step, grads};
use super::super::super::tensor::Tensor;
use super::super::pointwise::like;
use super::super::{cast, view};
use super::{token_major, wanted};
use crate::chip::Chip;

/// Rows of the bias are read eight numbers at a time: others are padded in a copy.
pub(super) fn aligned(bias: Tensor) -> Tensor {
    const NUMBERS: u64 = 8;
    let mut sizes = bias.sizes();
    let (last, keys) = (sizes.len() - 1, sizes.last());
    if keys.is_multiple_of(NUMBERS) {
        return bias;
    }
    sizes.as_mut_slice()[last] = keys.next_multiple_of(NUMBERS);
    let recorder = bias.context().record(&[&bias]);
    let padded = bias.context().empty("constant_pad_nd", sizes, bias.dtype());
    recorder.finish(&[&padded], |step| {
        let dtype = step.grad().dtype();
        let cut = step
            .context
            .empty("constant_pad_nd", step.input_sizes(), dtype);
        grads![Some(cut)]
    });
    view::slice(padded, last, keys)
}

/// The tiles of a backward kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tiles {
    queries: u64,
    keys: u64,
    /// Whether the gradients of keys and values are gathered in fp32 outside of the kernel's registers: heads are wider than a
    /// tile has queries, and the gradients are of a half type.
    gathers: bool,
}

impl Tiles {
    /// Those of the first kernel for such heads whose shared memory the card has.
    fn of(chip: Chip, dtype: DType, width: u64, dropout: f64) -> Tiles {
        const WIDE: u64 = 128;
        let is_half = dtype.is_half();
        let [queries, keys] = match (is_half, width) {
            (_, ..=64) => [64, 64],
            (true, ..=96) if chip.has_tiles_of_96() && dropout == 0.0 => [128, 64],
            (true, ..=WIDE) if chip.has_large_shared_memory() => [128, 128],
            (true, ..=WIDE) if chip.has_bf16() => [64, 64],
            (true, _) => [128, 64],
            (false, _) if chip.has_large_shared_memory() => [128, 64],
            (false, _) => [64, 64],
        };
        Tiles {
            queries,
            keys,
            gathers: is_half && width > queries,
        }
    }

    /// What a backward takes while it runs, where each head of each row has so many queries and keys: the queries' gradient in
    /// fp32, a column of tiles for so many numbers of a head as a tile has keys, each tile with a lock and counters; and the
    /// gradients that are gathered, by as many blocks as share the keys.
    fn workspace(self, heads: u64, [queries, keys]: [u64; 2], width: u64) -> u64 {
        /// Blocks that may run at once before gathering would take too much.
        const MOST_BLOCKS: u64 = 200;
        /// From so many on a block takes two tiles of keys.
        const ENOUGH_BLOCKS: u64 = 256;
        let tile = self.queries * self.keys * 4 + 16;
        let tiles = queries.div_ceil(self.queries) * width.div_ceil(self.keys);
        let mut bytes = tiles * tile;
        if self.gathers {
            let mut blocks = keys.div_ceil(self.keys);
            if heads >= ENOUGH_BLOCKS && keys <= 2 * self.keys {
                blocks = 1;
            }
            let blocks = blocks.min(MOST_BLOCKS / heads).max(1);
            bytes += 2 * blocks * self.keys * width.next_multiple_of(self.queries) * 4;
        }
        heads * bytes
    }
}

/// Whether a kernel multiplies result and gradient by itself, and sums the rows.
fn sums_rows(chip: Chip, dtype: DType, width: u64) -> bool {
    const WIDEST_ON_VOLTA: u64 = 128;
    dtype.is_half() && (chip.is_after_volta() || width <= WIDEST_ON_VOLTA)
}

/// The result, and the log-sum of each row in tiles of 32. Keeps the inputs and both. Its backward multiplies result and gradient
/// first, sums the rows, and gathers the queries' gradient in a workspace of tiles.
pub(super) fn attend(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    bias: Option<&Tensor>,
    dropout: f64,
) -> Tensor {
    const OP: &str = "_scaled_dot_product_efficient_attention";
    /// Wider results of a half type are summed in fp32 outside of the kernel's registers.
    const WIDEST_IN_REGISTERS: u64 = 128;
    let context = query.context().clone();
    // The kernel takes [batch, length, heads, width]: views.
    let mut inputs = vec![query, key, value];
    inputs.extend(bias);
    let mut recorder = context.record(&inputs);
    recorder.save_if(bias.is_some(), bias.unwrap_or(query));
    recorder.save(key);
    recorder.save(query);
    recorder.save(value);
    let out = token_major(query, OP);
    let (batch, heads, length, width) =
        (query.size(0), query.size(1), query.size(2), query.size(3));
    let summed = if recorder.is_recording() { length } else { 0 };
    let log_sum = context.empty(OP, [batch, heads, summed.div_ceil(32) * 32], DType::Float32);
    if query.dtype().is_half() && value.size(3) > WIDEST_IN_REGISTERS {
        drop(context.empty(OP, out.sizes(), DType::Float32));
    }
    recorder.save_output(&log_sum);
    recorder.save_output(&out);
    drop(log_sum);
    let tiles = Tiles::of(context.chip(), query.dtype(), width, dropout);
    let workspace = tiles.workspace(batch * heads, [length, key.size(2)], width);
    let chip = context.chip();
    let bias_sizes = bias.map(|_| [batch, heads, length, key.size(2)]);
    recorder.finish(&[&out], move |step| {
        const OP: &str = "_scaled_dot_product_efficient_attention_backward";
        let (key, query, value) = (step.saved(1), step.saved(2), step.saved(3));
        let grad = step.grad();
        let query = token_major(query, OP);
        let key = token_major(key, OP);
        let value = token_major(value, OP);
        let wants_bias = bias_sizes.filter(|_| step.needs(3));
        let bias = wants_bias.map(|sizes| bias_gradient(step, sizes, grad.dtype()));
        let rows = [batch, heads, length];
        let ordered = match sums_rows(chip, grad.dtype(), width) {
            true => step.context.empty(OP, rows, DType::Float32),
            false => {
                let raised = cast::to(grad, DType::Float32);
                let result = cast::to(step.saved(5), DType::Float32);
                let product = like(&raised, DType::Float32, OP);
                let by_tokens = [batch, length, heads];
                let delta = step.context.empty(OP, by_tokens, DType::Float32);
                let ordered = step.context.empty(OP, rows, DType::Float32);
                drop(delta);
                drop(product);
                drop(result);
                drop(raised);
                ordered
            }
        };
        let workspace = step.context.workspace(OP, workspace);
        drop(ordered);
        drop(workspace);
        let mut gradients = wanted(step, [query, key, value]);
        if bias_sizes.is_some() {
            gradients.push(bias);
        }
        gradients
    });
    out
}

/// The gradient of a bias, for every row of the batch: rows are padded to whole vectors.
fn bias_gradient(step: &Step<'_>, sizes: [u64; 4], dtype: DType) -> Tensor {
    const NUMBERS: u64 = 16;
    const OP: &str = "_scaled_dot_product_efficient_attention_backward";
    let mut padded = sizes;
    padded[3] = padded[3].next_multiple_of(NUMBERS);
    let whole = step.context.empty(OP, padded, dtype);
    view::slice(whole, 3, sizes[3])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What PyTorch 2.11 asks for in backward on cards that are not there: 200 queries and keys in each of six heads.
    #[test]
    fn workspaces_are_those_that_pytorch_takes() {
        let half = DType::Float16;
        let single = DType::Float32;
        for (card, dtype, width, dropout, bytes) in [
            ("T4", half, 64, 0.0, 393_600),
            ("T4", half, 96, 0.1, 786_816),
            ("T4", half, 160, 0.0, 4_325_952),
            ("T4", single, 128, 0.0, 787_200),
            ("V100 SXM2 16GB", half, 256, 0.0, 4_719_360),
            ("A100 SXM4 40GB", half, 80, 0.0, 786_624),
            ("A100 SXM4 40GB", half, 256, 0.1, 4_719_360),
            ("A100 SXM4 40GB", single, 96, 0.0, 786_816),
            ("A100 SXM4 40GB", single, 160, 0.0, 1_180_224),
            ("RTX 4090", half, 96, 0.0, 786_816),
            ("RTX 4090", half, 96, 0.1, 2_360_064),
            ("RTX 4090", half, 128, 0.0, 2_360_064),
            ("RTX 4090", single, 160, 0.0, 1_180_800),
            ("RTX 5090", half, 96, 0.0, 2_360_064),
            ("B200", half, 128, 0.0, 786_624),
        ] {
            let chip = Chip::of(&cinch_device::find(card).unwrap().card()).unwrap();
            let tiles = Tiles::of(chip, dtype, width, dropout);
            let found = tiles.workspace(6, [200, 200], width);
            assert_eq!(found, bytes, "{card}, {dtype:?}, {width}, {dropout}");
        }
    }
}
