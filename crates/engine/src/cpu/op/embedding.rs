//! Rows of tables.

use cinch_graph::op;

use super::failed;
use crate::arena::Element;
use crate::cpu::kernel::embedding;
use crate::cpu::operands::Operands;
use crate::cpu::real::Real;
use crate::error::EngineError;

pub fn embed<F: Real + Element>(x: &Operands<'_>, op: &op::Embedding) -> Result<(), EngineError> {
    let seq = x.input_type(0).width();
    let positions = op.positions.then(|| x.input(2));
    let dropout = x.dropout(op.dropout, Some(x.node.inputs.len() - 1));
    embedding::forward::<F>(x.input(0), seq, x.input(1), positions, dropout, x.output(0))
        .map_err(|error| failed(x, error))
}

pub fn embed_backward<F: Real + Element>(
    x: &Operands<'_>,
    op: &op::EmbeddingBackward,
) -> Result<(), EngineError> {
    let seq = x.input_type(1).width();
    let dropout = x.dropout(op.dropout, Some(2));
    let table = op.table.map(|_| x.accumulator(0));
    let positions = op
        .positions
        .map(|_| x.accumulator(usize::from(op.table.is_some())));
    embedding::backward::<F>(x.input(1), seq, x.input(0), dropout, table, positions)
        .map_err(|error| failed(x, error))
}
