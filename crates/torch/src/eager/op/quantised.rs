//! Products with weights that bitsandbytes keeps in four or eight bits. The weight is frozen: only the input has a gradient.

use super::super::dtype::DType;
use super::super::node::grads;
use super::super::shape::Dims;
use super::super::tensor::Tensor;
use super::pointwise::like;
use super::{cast, matmul, reduce, view};
use crate::chip::Chip;

/// Values that share one scale of a four-bit weight.
const BLOCK: u64 = 64;

/// A weight in four bits, as its product sees it.
#[derive(Clone, Copy, Debug)]
pub struct FourBit {
    pub rows: u64,
    pub columns: u64,
    /// Scales are kept in eight bits and brought to fp32 for each use.
    pub has_quantised_scales: bool,
    /// Of the weight before it was quantised.
    pub dtype: DType,
}

impl FourBit {
    /// Blocks of values, each with its scale.
    pub fn scales(&self) -> u64 {
        (self.rows * self.columns).div_ceil(BLOCK)
    }

    /// The weight in full, made for one product. In the forward the shift of the scales is a tensor of its own.
    fn restored(&self, x: &Tensor, is_forward: bool, dtype: DType) -> (Tensor, Vec<Tensor>) {
        let context = x.context();
        let scale = || context.empty("dequantize_blockwise", [self.scales()], DType::Float32);
        let tensors = match (self.has_quantised_scales, is_forward) {
            (false, _) => 0,
            (true, true) => 2,
            (true, false) => 1,
        };
        let scales = (0..tensors).map(|_| scale()).collect();
        let sizes = [self.rows, self.columns];
        (context.empty("dequantize_4bit", sizes, dtype), scales)
    }
}

/// `bnb.matmul_4bit`: the weight is restored, used and dropped, in the forward and again in the backward. Nothing is kept, and
/// nothing that the hooks of checkpointing could hold.
pub fn four_bit_linear(x: &Tensor, weight: FourBit, bias: Option<&Tensor>) -> Tensor {
    let context = x.context().clone();
    let recorder = context.record(&[x]);
    let tokens = x.numel() / x.sizes().last();
    let mut sizes = x.sizes();
    let last = sizes.len() - 1;
    sizes.as_mut_slice()[last] = weight.rows;
    let out = context.no_grad(|| {
        if takes_fused_kernel(context.chip(), tokens, weight, x.dtype()) {
            return context.empty("gemm_4bit", sizes, x.dtype());
        }
        let (restored, mut scales) = weight.restored(x, true, x.dtype());
        let out = matmul::linear(x, &restored, bias);
        while let Some(last) = scales.pop() {
            drop(last);
        }
        drop(restored);
        out
    });
    let input = x.sizes();
    recorder.finish(&[&out], move |step| {
        let grad = step.grad();
        let (restored, scales) = weight.restored(grad, false, weight.dtype);
        drop(scales);
        grads![Some(input_gradient(
            grad,
            cast::to(restored, grad.dtype()),
            input
        ))]
    });
    out
}

/// Few tokens are multiplied without restoring the weight. bitsandbytes' thresholds for a card like the H200, by how many of
/// its multiprocessors a column of blocks fills.
fn takes_fused_kernel(chip: Chip, tokens: u64, weight: FourBit, dtype: DType) -> bool {
    const SMALL_WEIGHT: u64 = 4 << 20;
    let FourBit { rows, columns, .. } = weight;
    let all = chip.multiprocessors;
    let blocks = rows.div_ceil(64);
    let fills = |multiprocessors: u64| blocks >= multiprocessors;
    if tokens <= 4 {
        return true;
    }
    if dtype == DType::Float32 {
        return tokens < 8;
    }
    if rows * columns < SMALL_WEIGHT {
        let most = if columns * 2 < rows {
            if blocks * 3 < all { 512 } else { 320 }
        } else if blocks * 4 <= all {
            32
        } else if blocks * 2 <= all {
            16
        } else {
            0
        };
        return tokens <= most;
    }
    let is_narrow = blocks * 4 < all * 3;
    if tokens < 8 {
        let is_slow = tokens >= 6
            && blocks >= 36
            && is_narrow
            && (columns > rows || (columns == rows && blocks * 5 >= all * 3));
        return !is_slow;
    }
    let most = if fills(3 * all) {
        64
    } else if fills(2 * all) {
        48
    } else if fills(all) {
        32
    } else if fills(all / 2) && !(columns >= rows && is_narrow) {
        16
    } else {
        0
    };
    tokens <= most
}

/// grad · W, over the flattened rows.
fn input_gradient(grad: &Tensor, weight: Tensor, input: Dims) -> Tensor {
    let rows = grad.numel() / grad.sizes().last();
    let flat = view::reshape(grad, [rows, grad.sizes().last()]);
    let out = matmul::mm(flat, &weight);
    drop(weight);
    view::unsafe_view(out, input)
}

/// `bnb.matmul` of an eight-bit weight: the input is quantised row by row, multiplied in integers, and the sums are brought back
/// through fp16. Python's context keeps the input itself, past the hooks of checkpointing, for as long as the graph lives.
/// That columns of outliers are left out is data; none are assumed.
pub fn eight_bit_linear(x: &Tensor, rows: u64, columns: u64) -> Tensor {
    let context = x.context().clone();
    let recorder = context.record(&[x]);
    let (dtype, input) = (x.dtype(), x.sizes());
    let tokens = x.numel() / columns;
    context.uses(|libraries| libraries.int8 = true);
    let held = recorder.is_recording().then(|| x.clone());
    let out = context.no_grad(|| {
        let (quantised, scales) = quantised_rows(x, tokens, columns);
        let sums = context.empty("int8_linear_matmul", [tokens, rows], DType::Int32);
        let half = context.empty("int8_mm_dequant", [tokens, rows], DType::Float16);
        // The bias is added in the kernel or in place.
        let out = cast::to(half, dtype);
        drop(sums);
        drop(quantised);
        drop(scales);
        let mut sizes = input;
        let last = sizes.len() - 1;
        sizes.as_mut_slice()[last] = rows;
        view::view(out, sizes)
    });
    recorder.finish_holding(&[&out], move |step| {
        let (grad, _) = (step.grad(), &held);
        let restored = step.context.empty("_to_copy", [rows, columns], dtype);
        drop(step.context.empty("mul", [rows], DType::Float32));
        grads![Some(input_gradient(
            &cast::to(grad, dtype),
            restored,
            input
        ))]
    });
    out
}

/// `int8_vectorwise_quant` of the input in fp16, with a look for outliers.
fn quantised_rows(x: &Tensor, tokens: u64, columns: u64) -> (Tensor, Tensor) {
    let context = x.context();
    let flat = view::reshape(x, [tokens, columns]);
    let half = cast::to(&flat, DType::Float16);
    let scales = context.empty("int8_vectorwise_quant", [tokens], DType::Float32);
    let quantised = context.empty("int8_vectorwise_quant", [tokens, columns], DType::UInt8);
    let outliers = {
        let magnitudes = like(&half, DType::Float16, "abs");
        like(&magnitudes, DType::Bool, "ge")
    };
    drop(reduce::plain(&outliers, &[0, 1], false, DType::Bool));
    if tokens > 1 {
        // A zero for the columns of outliers.
        drop(context.empty("index_put_", [], DType::UInt8));
    }
    drop(outliers);
    drop(half);
    drop(flat);
    (quantised, scales)
}
