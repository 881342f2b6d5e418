//! Losses.

use std::borrow::Borrow;

use super::super::autocast;
use super::super::dtype::DType;
use super::super::node::grads;
use super::super::tensor::Tensor;
use super::{pointwise, softmax, view};

/// A cross entropy of logits in rows and a target.
pub type CrossEntropy = fn(&Tensor, &Tensor) -> Tensor;

/// `F.cross_entropy(logits, target)`, mean over rows: log-probabilities of the logits' size and type, then the
/// loss and the weight it was divided by. Keeps the log-probabilities, the target and the weight; the
/// gradient passes through two tensors of the logits' size. Under autocast the loss itself is fp32, of a
/// copy of half log-probabilities.
pub fn cross_entropy(logits: impl Borrow<Tensor>, target: impl Borrow<Tensor>) -> Tensor {
    let probabilities = softmax::log_softmax(logits.borrow(), Some(logits.borrow().dtype()));
    let probabilities = autocast::raise(&probabilities);
    let context = probabilities.context().clone();
    let mut recorder = context.record(&[&probabilities]);
    recorder.save(&probabilities);
    recorder.save(target.borrow());
    let loss = context.empty("nll_loss", [], probabilities.dtype());
    let weight = context.empty("nll_loss", [], probabilities.dtype());
    recorder.save_output(&weight);
    drop(weight);
    let (sizes, dtype) = (probabilities.sizes(), probabilities.dtype());
    recorder.finish(&[&loss], move |step| {
        grads![Some(step.context.empty("nll_loss_backward", sizes, dtype))]
    });
    drop(probabilities);
    drop(logits);
    drop(target);
    loss
}

/// `F.pad(labels, (0, 1))`: one column more.
pub fn pad_one(labels: &Tensor) -> Tensor {
    let mut sizes = labels.sizes();
    let last = sizes.len() - 1;
    sizes.as_mut_slice()[last] += 1;
    labels
        .context()
        .empty("constant_pad_nd", sizes, labels.dtype())
}

/// `ForCausalLMLoss` of transformers: logits in fp32; labels padded on the right and shifted by a copy,
/// so that logits need no shift. The mean over rows, or the sum over a number of items, by PyTorch's cross entropy or one in
/// its place.
pub fn causal_language_model(
    logits: &Tensor,
    labels: &Tensor,
    vocabulary: u64,
    items: Option<&Tensor>,
    cross_entropy: CrossEntropy,
) -> Tensor {
    let logits = super::cast::to(logits, DType::Float32);
    let padded = pad_one(labels);
    let last = padded.dim() - 1;
    let shifted = view::contiguous(view::slice(&padded, last, padded.size(last) - 1));
    let rows = logits.numel() / vocabulary;
    let logits = view::view(logits, [rows, vocabulary]);
    let shifted = view::view(shifted, [rows]);
    let mut loss = cross_entropy(&logits, &shifted);
    if let Some(items) = items {
        loss = pointwise::div(&loss, items);
    }
    drop(logits);
    drop(padded);
    loss
}
