//! From an op to its kernel: which tensor is which argument.

mod attention;
mod convolution;
mod embedding;
mod expression;
mod indexer;
mod linear;
mod loss;
mod moving;
mod norm;
mod optimizer;
mod pointwise;
mod scan;

use cinch_graph::op::{self, Op};

use super::kernel::activation;
use super::kernel::columns::Columns;
use super::operands::Operands;
use super::real::Real;
use crate::arena::Element;
use crate::error::EngineError;

/// Executes one node in the element type of its graph.
pub(crate) fn execute<F: Real + Element>(x: &Operands<'_>) -> Result<(), EngineError> {
    match &x.node.op {
        Op::Embedding(op) => return embedding::embed::<F>(x, op),
        Op::EmbeddingBackward(op) => return embedding::embed_backward::<F>(x, op),
        Op::Norm(op) => norm::normalize::<F>(x, op),
        Op::NormApply(op) => norm::normalize_again::<F>(x, op),
        Op::NormBackward(op) => norm::normalize_backward::<F>(x, op),
        Op::Linear(op) => linear::multiply::<F>(x, op),
        Op::LinearAdd(op) => linear::multiply_add::<F>(x, op),
        Op::LinearGradInput(op) => linear::multiply_grad_input::<F>(x, op),
        Op::LinearGradWeight(op) => linear::multiply_grad_weight::<F>(x, op),
        Op::Activation(op) => {
            let input = x.input_unless_in_place::<F>(0, 0);
            activation::forward(op.kind, input, x.output(0));
        }
        Op::ActivationBackward(op) => pointwise::activate_backward::<F>(x, op),
        Op::Gated(op) => pointwise::gate::<F>(x, op),
        Op::GatedBackward(op) => pointwise::gate_backward::<F>(x, op),
        Op::Add(op::Add) => pointwise::add::<F>(x),
        Op::Rotary(op) => pointwise::rotate::<F>(x, op),
        Op::View(_) => moving::view::<F>(x),
        Op::Map(op) => expression::map::<F>(x, op),
        Op::Reduce(op) => expression::reduce::<F>(x, op),
        Op::Concat(op) => moving::concat::<F>(x, op),
        Op::Split(op) => moving::split::<F>(x, op),
        Op::Dequantise(op) => moving::dequantise::<F>(x, op),
        Op::Fetch(op::Fetch) | Op::Store(op::Store) => moving::across(x),
        Op::Attention(op) => attention::attend::<F>(x, op),
        Op::AttentionBackward(op) => attention::attend_backward::<F>(x, &op.0),
        Op::CachedAttention(op) => return attention::attend_cached::<F>(x, op),
        Op::AttentionEntropy(op) => attention::entropy::<F>(x, op),
        Op::AttentionEntropyBackward(op) => attention::entropy_backward::<F>(x, &op.0),
        Op::CachedAttentionEntropy(op) => return attention::entropy_cached::<F>(x, &op.0),
        Op::IndexerSelection(op) => indexer::select_keys::<F>(x, op),
        Op::CachedSelection(op) => return indexer::select_cached::<F>(x, op),
        Op::IndexerLoss(op) => indexer::indexer_loss::<F>(x, op),
        Op::IndexerLossBackward(op) => indexer::indexer_loss_backward::<F>(x, &op.forward),
        Op::Convolution(op) => convolution::convolve::<F>(x, op),
        Op::ConvolutionBackward(op) => convolution::convolve_backward::<F>(x, op),
        Op::CachedConvolution(op) => return convolution::convolve_cached::<F>(x, op),
        Op::Scan(op) => scan::scan_forward::<F>(x, op),
        Op::ScanBackward(op) => scan::scan_backward::<F>(x, &op.0),
        Op::CachedScan(op) => return scan::scan_cached::<F>(x, &op.0),
        Op::CrossEntropy(op) => return loss::loss::<F>(x, op),
        Op::Logits(op) => return loss::logits::<F>(x, op),
        Op::GradientSquares(op) => optimizer::gradient_squares::<F>(x, op),
        Op::GradientNorm(op) => optimizer::gradient_norm::<F>(x, op),
        Op::AdamW(op) => optimizer::update::<F>(x, op),
        // The executor runs these with the other ranks, and looks for them before it begins.
        Op::AllReduce(_) | Op::ReduceScatter(_) | Op::AllGather(_) | Op::GatherRows(_) => {
            return Err(failed(x, "no other ranks are connected"));
        }
        // Nodes run one by one: what came before is done.
        Op::Await(_) => {}
    }
    Ok(())
}

fn failed(x: &Operands<'_>, problem: impl ToString) -> EngineError {
    EngineError::Op {
        op: x.node.op.name(),
        node: x.node.name.clone(),
        problem: problem.to_string(),
    }
}

/// A column block of an input.
fn columns<'a, F: Element>(
    x: &Operands<'a>,
    input: usize,
    offset: usize,
    width: usize,
) -> Columns<'a, F> {
    Columns {
        data: x.input(input),
        row_stride: x.input_type(input).width(),
        offset,
        width,
    }
}

/// The positions that rows of input `input` begin at.
fn first_positions(x: &Operands<'_>, input: usize) -> Result<Vec<usize>, EngineError> {
    let length = x.input_type(input).width().max(1);
    let firsts = x.input::<i32>(input).chunks_exact(length);
    firsts
        .map(|row| usize::try_from(row[0]).map_err(|_| failed(x, format!("position {}", row[0]))))
        .collect()
}

/// For each sequence, whether nothing came before its tokens.
fn begins(x: &Operands<'_>, input: usize) -> Result<Vec<bool>, EngineError> {
    let first = first_positions(x, input)?;
    Ok(first.into_iter().map(|first| first == 0).collect())
}
