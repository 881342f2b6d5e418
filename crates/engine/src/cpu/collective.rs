//! Collectives between CPU ranks: the tensors of a node go to the other ranks by the connections
//! of [`World`], which adds in the order of ranks.

use cinch_graph::op::Op;
use cinch_graph::{DType, Shard};
use cinch_ranks::{Element as Sent, Number, World};

use super::operands::Operands;
use super::parallel::Accumulate;
use crate::arena::Element;
use crate::error::EngineError;

/// Whether a node needs the other ranks.
pub(super) fn is_collective(op: &Op) -> bool {
    matches!(
        op,
        Op::AllReduce(_) | Op::ReduceScatter(_) | Op::AllGather(_) | Op::GatherRows(_)
    )
}

/// Runs a collective, on every rank at the same place of its graph.
pub(super) fn exchange(x: &Operands<'_>, world: &mut World) -> Result<(), EngineError> {
    match &x.node.op {
        Op::AllReduce(_) => {
            for output in 0..x.node.outputs.len() {
                match x.output_type(output).dtype {
                    DType::F64 => world.all_reduce(x.output::<f64>(output))?,
                    DType::F32 => world.all_reduce(x.output::<f32>(output))?,
                    dtype => return Err(EngineError::Precision { dtype }),
                }
            }
        }
        Op::ReduceScatter(op) => {
            for tensor in 0..x.node.inputs.len() {
                match x.input_type(tensor).dtype {
                    DType::F64 => reduce_scatter::<f64>(x, tensor, op.ranks, world)?,
                    DType::F32 => reduce_scatter::<f32>(x, tensor, op.ranks, world)?,
                    dtype => return Err(EngineError::Precision { dtype }),
                }
            }
        }
        Op::AllGather(op) => {
            for tensor in 0..x.node.inputs.len() {
                match (x.input_type(tensor).dtype, x.output_type(tensor).dtype) {
                    (DType::F64, DType::F64) => all_gather::<f64>(x, tensor, op.ranks, world)?,
                    (DType::F32, DType::F32) => all_gather::<f32>(x, tensor, op.ranks, world)?,
                    (DType::I32, DType::I32) => all_gather::<i32>(x, tensor, op.ranks, world)?,
                    (DType::U8, DType::U8) => all_gather::<u8>(x, tensor, op.ranks, world)?,
                    (_, dtype) => return Err(EngineError::Precision { dtype }),
                }
            }
        }
        Op::GatherRows(_) => {
            for tensor in 0..x.node.inputs.len() {
                match x.input_type(tensor).dtype {
                    DType::F64 => gather_rows::<f64>(x, tensor, world)?,
                    DType::F32 => gather_rows::<f32>(x, tensor, world)?,
                    dtype => return Err(EngineError::Precision { dtype }),
                }
            }
        }
        _ => {}
    }
    Ok(())
}

fn reduce_scatter<T: Element + Number + Default>(
    x: &Operands<'_>,
    tensor: usize,
    ranks: usize,
    world: &mut World,
) -> Result<(), EngineError> {
    let shard = Shard::of(&x.input_type(tensor), ranks);
    let (own, mode) = x.accumulator::<T>(tensor);
    let adds = matches!(mode, Accumulate::Add);
    world.reduce_scatter(x.input::<T>(tensor), shard.part(), own, adds)?;
    // Beyond the end of the tensor there are zeros.
    own[shard.range(world.rank()).len()..].fill(T::default());
    Ok(())
}

fn all_gather<T: Element + Sent>(
    x: &Operands<'_>,
    tensor: usize,
    ranks: usize,
    world: &mut World,
) -> Result<(), EngineError> {
    let part = Shard::of(&x.output_type(tensor), ranks).part();
    Ok(world.all_gather(x.input::<T>(tensor), part, x.output::<T>(tensor))?)
}

fn gather_rows<T: Element + Sent>(
    x: &Operands<'_>,
    tensor: usize,
    world: &mut World,
) -> Result<(), EngineError> {
    let own = x.input::<T>(tensor);
    Ok(world.all_gather(own, own.len(), x.output::<T>(tensor))?)
}
