//! What is exchanged with other ranks. Parts of a tensor need not have the same length, so each is
//! added up at, or sent from, the rank that keeps it; all of a node go together.

use cinch_graph::op::{AllGather, AllReduce, GatherRows, ReduceScatter};
use cinch_graph::{DType, Shard, TensorType};

use super::COPY_TO_REAL;
use super::activation::elementwise;
use crate::cuda::command::{Argument, Exchange, ExchangeKind, Kernel};
use crate::cuda::lowering::Lowering;

/// Each tensor becomes its sum, where it lies.
pub fn all_reduce(x: &mut Lowering<'_>, op: &AllReduce) {
    let exchanges = (0..op.tensors.len()).map(|tensor| {
        let (at, ty) = (x.output(tensor), x.output_type(tensor));
        Exchange {
            kind: ExchangeKind::Sum,
            from: at,
            to: at,
            elements: ty.shape.elements(),
            dtype: ty.dtype,
        }
    });
    let exchanges = exchanges.collect();
    x.exchange(exchanges);
}

/// Ranks with the first byte and the elements of what each keeps of a tensor.
fn parts(whole: TensorType, ranks: usize) -> impl Iterator<Item = (usize, u64, usize)> {
    let shard = Shard::of(&whole, ranks);
    (0..ranks).filter_map(move |rank| {
        let range = shard.range(rank);
        let first = range.start as u64 * whole.dtype.size();
        (!range.is_empty()).then_some((rank, first, range.len()))
    })
}

/// Each part becomes its sum at the rank that keeps it: in the part itself, or, where that is added
/// to, first in the whole tensor, which nobody reads afterwards.
pub fn reduce_scatter(x: &mut Lowering<'_>, op: &ReduceScatter) {
    let mut exchanges = Vec::new();
    for tensor in 0..x.node.inputs.len() {
        let (whole, ty) = (x.input(tensor), x.input_type(tensor));
        let (part, adds) = (x.output(tensor), x.adds(tensor));
        exchanges.extend(parts(ty, op.ranks).map(|(rank, first, elements)| Exchange {
            kind: ExchangeKind::SumAt(rank),
            from: whole + first,
            to: if adds { whole + first } else { part },
            elements,
            dtype: ty.dtype,
        }));
    }
    x.exchange(exchanges);
    for tensor in 0..x.node.inputs.len() {
        let (whole, ty) = (x.input(tensor), x.input_type(tensor));
        let (part, adds) = (x.output(tensor), x.adds(tensor));
        let own = parts(ty, op.ranks).find(|(rank, ..)| *rank == x.card.rank);
        let kept = own.map_or(0, |(_, _, elements)| elements);
        if let Some((_, first, elements)) = own.filter(|_| adds) {
            let function = match ty.dtype {
                DType::F32 => "add_single",
                _ => "add",
            };
            let kernel = Kernel {
                file: "activation",
                function,
            };
            let arguments = vec![
                Argument::Address(part),
                Argument::Address(whole + first),
                Argument::Address(part),
                Argument::U64(elements as u64),
            ];
            let shape = elementwise(elements, 16 / ty.dtype.size() as usize);
            x.launch(kernel, shape, arguments);
        }
        // Beyond the end of the tensor there are zeros.
        let beyond = (Shard::of(&ty, op.ranks).part() - kept) as u64 * ty.dtype.size();
        if beyond > 0 {
            x.clear(part + kept as u64 * ty.dtype.size(), beyond);
        }
    }
}

/// Each rank's part goes to its place in the whole tensors of all, rounded before where the part is
/// in the type of sums.
pub fn all_gather(x: &mut Lowering<'_>, op: &AllGather) {
    let mut exchanges = Vec::new();
    for tensor in 0..op.tensors.len() {
        let (part, whole) = (x.input(tensor), x.output(tensor));
        let (kept, ty) = (x.input_type(tensor).dtype, x.output_type(tensor));
        let rounds = kept != ty.dtype;
        let own = parts(ty, op.ranks).find(|(rank, ..)| *rank == x.card.rank);
        if let Some((_, first, elements)) = own.filter(|_| rounds) {
            let arguments = vec![
                Argument::Address(part),
                Argument::Address(whole + first),
                Argument::U64(elements as u64),
            ];
            x.launch(COPY_TO_REAL, elementwise(elements, 4), arguments);
        }
        exchanges.extend(parts(ty, op.ranks).map(|(rank, first, elements)| Exchange {
            kind: ExchangeKind::From(rank),
            from: if rounds { whole + first } else { part },
            to: whole + first,
            elements,
            dtype: ty.dtype,
        }));
    }
    x.exchange(exchanges);
}

/// What each rank has goes to its place among those of all.
pub fn gather_rows(x: &mut Lowering<'_>, op: &GatherRows) {
    let mut exchanges = Vec::new();
    for tensor in 0..x.node.inputs.len() {
        let (own, all, ty) = (x.input(tensor), x.output(tensor), x.input_type(tensor));
        exchanges.extend((0..op.ranks).map(|rank| Exchange {
            kind: ExchangeKind::From(rank),
            from: own,
            to: all + rank as u64 * ty.bytes(),
            elements: ty.shape.elements(),
            dtype: ty.dtype,
        }));
    }
    x.exchange(exchanges);
}
