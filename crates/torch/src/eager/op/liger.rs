//! The functions of liger-kernel: Triton kernels in the place of several ops, each a `torch.autograd.Function` in Python. A
//! kernel asks for no memory; what a function makes beside it, keeps, and overwrites decides. Sizes follow version 0.8.5.

use super::super::autocast;
use super::super::context::Context;
use super::super::dtype::DType;
use super::super::line::at;
use super::super::node::grads;
use super::super::tensor::Tensor;
use super::pointwise::{self, like};
use super::{cast, loss, matmul, reduce, view};

/// Where the gradient of a norm's input is put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormGradient {
    /// Over the gradient that came.
    InPlace,
    /// Beside it: a residual needs what came.
    Apart,
}

/// The rows of a tensor whose elements lie side by side.
fn rows_of(x: &Tensor) -> Tensor {
    let width = x.sizes().last();
    view::view(view::contiguous(x), [x.numel() / width, width])
}

/// `LigerRMSNormFunction`: the result, and 1/σ of each row in fp32. Keeps input, weight and 1/σ. The weight's gradient is
/// summed in fp32 by multiprocessor, then over them.
pub fn rms_norm(x: &Tensor, weight: &Tensor, gradient: NormGradient) -> Tensor {
    let context = x.context().clone();
    at!(context, "y = LigerRMSNormFunction.apply(x, weight)");
    let mut recorder = context.record(&[x, weight]);
    let (rows, out, deviations) = context.no_grad(|| {
        let rows = rows_of(x);
        let out = context.empty("rms_norm_forward", x.sizes(), x.dtype());
        let deviations = context.empty("rms_norm_forward", [rows.size(0)], DType::Float32);
        (rows, out, deviations)
    });
    recorder.save(&rows);
    recorder.save(weight);
    recorder.save(&deviations);
    drop(rows);
    drop(deviations);
    let (sizes, width, dtype) = (x.sizes(), x.sizes().last(), weight.dtype());
    recorder.finish(&[&out], move |step| {
        let op = "rms_norm_backward";
        let grad = rows_of(step.grad());
        let partial = step.needs(1).then(|| {
            let sizes = [step.context.chip().multiprocessors, width];
            step.context.empty(op, sizes, DType::Float32)
        });
        let input = match gradient {
            NormGradient::InPlace => grad.clone(),
            NormGradient::Apart => like(&grad, grad.dtype(), op),
        };
        let weight = partial.as_ref().map(|partial| {
            let sum = reduce::plain(partial, &[0], false, DType::Float32);
            cast::to(sum, dtype)
        });
        drop(partial);
        drop(grad);
        step.runs_in_python();
        let input = view::view(input, sizes);
        grads![step.needs(0).then_some(input), weight]
    });
    out
}

/// `LigerSiLUMulFunction`, `LigerGELUMulFunction`: the activation of a gate times another tensor, one result. Keeps both,
/// and puts their gradients over them.
pub fn gate_mul(gate: &Tensor, up: &Tensor) -> Tensor {
    let context = gate.context().clone();
    let mut recorder = context.record(&[gate, up]);
    let (gate_rows, up_rows, out) = context.no_grad(|| {
        let (gate_rows, up_rows) = (rows_of(gate), rows_of(up));
        let out = context.empty("gate_mul_forward", gate.sizes(), gate.dtype());
        (gate_rows, up_rows, out)
    });
    recorder.save(&gate_rows);
    recorder.save(&up_rows);
    drop(gate_rows);
    drop(up_rows);
    let sizes = gate.sizes();
    recorder.finish(&[&out], move |step| {
        let grad = rows_of(step.grad());
        let [gate, up] = [0, 1].map(|index| view::view(step.saved(index), sizes));
        drop(grad);
        step.runs_in_python();
        grads![Some(gate), Some(up)]
    });
    out
}

/// `LigerRopeFunction` over queries and keys of sizes batch, heads, tokens, width: both turned in place, or in a copy where
/// tokens do not come before heads in memory. Keeps cosines and sines; gradients are turned the same way.
pub fn rotate(query: &Tensor, key: &Tensor, cos: &Tensor, sin: &Tensor) -> (Tensor, Tensor) {
    let context = query.context().clone();
    at!(context, "q, k = LigerRopeFunction.apply(q, k, cos, sin)");
    let mut recorder = context.record(&[query, key]);
    let by_tokens = |states: &Tensor| view::contiguous(view::transpose(states, 1, 2));
    let (turned_query, turned_key) = context.no_grad(|| {
        let (query, key) = (by_tokens(query), by_tokens(key));
        (view::transpose(query, 1, 2), view::transpose(key, 1, 2))
    });
    recorder.save(cos);
    recorder.save(sin);
    recorder.finish(&[&turned_query, &turned_key], move |step| {
        let turned = |output: usize| {
            let grad = step.grad_of(output)?;
            Some(view::contiguous(view::transpose(grad, 1, 2)))
        };
        let (query, key) = (turned(0), turned(1));
        step.runs_in_python();
        let back = |states: Option<Tensor>| states.map(|states| view::transpose(states, 1, 2));
        grads![back(query), back(key)]
    });
    (turned_query, turned_key)
}

/// `LigerForCausalLMLoss`: labels padded and shifted, then the head and the loss in one, over chunks of rows.
pub fn causal_language_model(
    hidden: &Tensor,
    head: &Tensor,
    labels: &Tensor,
    items: Option<&Tensor>,
) -> Tensor {
    at!(
        hidden.context(),
        "loss = LigerForCausalLMLoss(hidden, head)"
    );
    let padded = loss::pad_one(labels);
    let last = padded.dim() - 1;
    let shifted = view::contiguous(view::slice(&padded, last, padded.size(last) - 1));
    let width = hidden.sizes().last();
    let rows = hidden.numel() / width;
    let hidden = view::view(hidden, [rows, width]);
    let shifted = view::view(shifted, [rows]);
    let mut result = fused_linear_cross_entropy(&hidden, head, &shifted);
    if let Some(items) = items {
        result = pointwise::div(&result, items);
    }
    drop(hidden);
    drop(padded);
    drop(shifted);
    result
}

/// Rows of hidden states whose logits exist at once: as many logits as there are hidden values, brought up to a power of two.
pub fn chunk(rows: u64, width: u64, vocabulary: u64) -> u64 {
    let chunks = vocabulary.div_ceil(width);
    rows.div_ceil(chunks).next_power_of_two().min(rows)
}

/// `LigerFusedLinearCrossEntropyFunction`: logits of a chunk of rows, the loss and their gradient over them, and from it the
/// gradients of hidden states and head, all in the forward. Keeps the two gradients and nothing else; backward gives them on.
fn fused_linear_cross_entropy(hidden: &Tensor, head: &Tensor, target: &Tensor) -> Tensor {
    let context = hidden.context().clone();
    let op = "fused_linear_cross_entropy_forward";
    let mut recorder = context.record(&[hidden, head]);
    let (result, hidden_grad, head_grad) = context.no_grad(|| {
        let rows = hidden.size(0);
        let hidden_grad = like(hidden, hidden.dtype(), op);
        let trains_head = recorder.needs(0) && head.requires_grad();
        let head_grad = trains_head.then(|| like(head, head.dtype(), op));
        let losses = context.empty(op, [rows], DType::Float32);
        let is_counted = count_labels(target);
        let at_once = chunk(rows, hidden.size(1), head.size(0));
        let chunks = Chunks {
            hidden,
            head,
            trains_head,
            takes_gradient: recorder.needs(0),
        };
        chunks.run(rows, at_once);
        let result = reduce::plain(&losses, &[0], false, DType::Float32);
        drop(is_counted);
        drop(losses);
        (result, hidden_grad, head_grad)
    });
    recorder.save(&hidden_grad);
    recorder.save_if(head_grad.is_some(), head_grad.as_ref().unwrap_or(hidden));
    drop(hidden_grad);
    drop(head_grad);
    recorder.finish(&[&result], |step| {
        compare_with_one(step.context);
        let hidden = step.saved(0).clone();
        let head = step.needs(1).then(|| step.saved(1).clone());
        step.runs_in_python();
        grads![Some(hidden), head]
    });
    result
}

/// `(target != ignored).sum().item()`: the mask, which stays.
fn count_labels(target: &Tensor) -> Tensor {
    let context = target.context();
    let is_label = like(target, DType::Bool, "ne");
    let number = context.empty("sum", [], DType::Int64);
    drop(like(&is_label, DType::Int64, "_to_copy"));
    drop(number);
    is_label
}

/// `torch.equal(grad, torch.tensor(1.0))`.
fn compare_with_one(context: &Context) {
    let one = context.empty("tensor", [], DType::Float32);
    let is_equal = context.empty("eq", [], DType::Bool);
    drop(context.empty("all", [], DType::Bool));
    drop(is_equal);
    drop(one);
}

/// Chunks that are run at most: each leaves memory as the one before.
const MOST_CHUNKS: u64 = 1 << 12;

/// What a chunk's products are made of.
struct Chunks<'a> {
    hidden: &'a Tensor,
    head: &'a Tensor,
    trains_head: bool,
    takes_gradient: bool,
}

impl Chunks<'_> {
    /// All chunks of so many rows. Where the types of both are those in which products are made, all use one buffer for their
    /// logits, and gradients are written where they belong.
    fn run(&self, rows: u64, at_once: u64) {
        let context = self.hidden.context();
        let (width, vocabulary, dtype) =
            (self.hidden.size(1), self.head.size(0), self.hidden.dtype());
        let lowered = context.autocast.borrow().dtype();
        let shares_buffer = dtype == self.head.dtype() && lowered.is_none_or(|to| to == dtype);
        let buffer = shares_buffer.then(|| {
            let logits = context.empty("logits", [at_once, vocabulary], dtype);
            context.use_cublas();
            logits
        });
        let (whole, rest) = (rows / at_once, rows % at_once);
        let sizes = std::iter::repeat_n(at_once, whole.min(MOST_CHUNKS) as usize)
            .chain((rest > 0).then_some(rest));
        for here in sizes {
            let input = view::slice(self.hidden, 0, here);
            let logits = match &buffer {
                Some(buffer) => view::slice(buffer, 0, here),
                None => product(&input, &view::transpose(self.head, 0, 1)),
            };
            if self.takes_gradient && buffer.is_none() {
                drop(product(&logits, self.head));
            }
            if self.trains_head && self.takes_gradient {
                self.add_to_head([vocabulary, width], &logits, &input);
            }
        }
    }

    /// The head's gradient of one chunk: multiplied and added at once where the logits are in half precision, through a copy of
    /// the hidden states in their type; else a product of the head's size that is added.
    fn add_to_head(&self, sizes: [u64; 2], logits: &Tensor, input: &Tensor) {
        let head = self.head.dtype();
        if logits.dtype().is_half() && (head == DType::Float32 || head == logits.dtype()) {
            drop(cast::to(input, logits.dtype()));
            return;
        }
        let context = input.context();
        let gradient = context.empty("mm", sizes, logits.dtype());
        context.use_cublas();
        drop(cast::to(gradient, DType::Float32));
    }
}

/// `a @ b` under autocast, which casts the arguments from the last to the first.
fn product(a: &Tensor, b: &Tensor) -> Tensor {
    let second = autocast::lower(b);
    let first = autocast::lower(a);
    let out = matmul::mm(&first, &second);
    drop(first);
    drop(second);
    out
}

/// `LigerCrossEntropyFunction` of logits in rows: the loss of each row and its sum. The gradient is written over the logits,
/// which are kept.
pub fn cross_entropy(logits: &Tensor, target: &Tensor) -> Tensor {
    let context = logits.context().clone();
    let mut recorder = context.record(&[logits]);
    let result = context.no_grad(|| {
        let losses = context.empty("cross_entropy_forward", [logits.size(0)], logits.dtype());
        let is_counted = count_labels(target);
        // No label may be beyond the vocabulary: the largest, then the smallest of those that count.
        for op in ["max", "min"] {
            let labels = like(target, target.dtype(), "mul");
            let extreme = reduce::plain(labels, &[0], false, target.dtype());
            let is_within = context.empty(op, [], DType::Bool);
            drop(extreme);
            drop(is_within);
        }
        let result = reduce::plain(&losses, &[0], false, logits.dtype());
        drop(losses);
        drop(is_counted);
        result
    });
    recorder.save_output(logits);
    recorder.finish(&[&result], |step| {
        compare_with_one(step.context);
        let logits = step.saved(0).clone();
        step.runs_in_python();
        grads![Some(logits)]
    });
    result
}
