//! What the ranks of a run exchange: sums of what each has, and whole tensors from their parts.
//!
//! All ranks run the same graph, so each runs the same collectives in the same order, and nothing
//! but the order says which belong together. A node takes several tensors, a *bucket*, so that few
//! messages are long ones. None needs a workspace: sums are written where the summands are, and
//! the executor sends and receives where tensors lie. What a library of collectives keeps for
//! itself is outside the arena, and a line of the plan's overhead.
//!
//! A collective may run beside the nodes that follow it. Who names one of its tensors afterwards,
//! as an input or as an output, waits for it; [`Await`] does nothing else, and keeps the place of
//! what is being sent from being used again.

use super::{Declare, expect, expect_float, product, sum};
use crate::cost::{Cost, KernelCost, Wire};
use crate::differentiate::Backward;
use crate::error::GraphError;
use crate::graph::Node;
use crate::shard::Shard;
use crate::types::{Shape, TensorType};

/// Outputs: tensors of these types, in place: each becomes its sum over all ranks, on all ranks
/// with the same bits. Summands are added in the order of the ranks where the executor's
/// transport can; its documentation says where.
#[derive(Clone, Debug, PartialEq)]
pub struct AllReduce {
    pub ranks: usize,
    pub tensors: Vec<TensorType>,
}

/// Inputs: whole tensors. Outputs: of each the sum over all ranks, of which a rank gets its own
/// part ([`Shard::range`]), as a list of [`Shard::part`] elements; those beyond the end of the
/// tensor are written as zeros.
///
/// An output that is an accumulator is added to, as by any other node: in the first micro batch of
/// a step it is overwritten. Inputs may be used as scratch memory where they are transient: their
/// values are not what they were afterwards.
#[derive(Clone, Debug, PartialEq)]
pub struct ReduceScatter {
    pub ranks: usize,
}

/// Inputs: this rank's parts, as [`ReduceScatter`] leaves them. Outputs: the whole tensors, of
/// these types. A part in the type of sums is rounded to the output's type before it is sent.
#[derive(Clone, Debug, PartialEq)]
pub struct AllGather {
    pub ranks: usize,
    pub tensors: Vec<TensorType>,
}

/// Inputs: what this rank has. Outputs: of each what all ranks have, with one dimension more in
/// front, the ranks in their order. For results of a micro batch, which are small and of which
/// every rank goes on with all.
#[derive(Clone, Debug, PartialEq)]
pub struct GatherRows {
    pub ranks: usize,
}

/// Inputs: tensors that collectives were given. Waits until these are done with them. On an
/// executor that runs nodes one by one there is nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Await;

fn expect_ranks(ranks: usize, tensors: usize) -> Result<(), String> {
    expect(ranks > 1, || format!("between {ranks} ranks, expected two"))?;
    expect(tensors > 0, || "has nothing to exchange".to_owned())
}

fn total(types: &[TensorType]) -> u64 {
    sum(types.iter().map(TensorType::bytes))
}

/// A ring in which every rank passes on a part at a time: of so many bytes each rank sends all but
/// one part, in one round less than there are ranks.
fn ring(ranks: usize, bytes: u64) -> Wire {
    let ranks = ranks.max(1) as u64;
    Wire {
        bytes: (u128::from(bytes) * u128::from(ranks - 1) / u128::from(ranks)) as u64,
        rounds: ranks - 1,
    }
}

/// Sending is the network's: what the memory of a card adds is hidden behind it.
fn sent() -> Cost {
    Cost::of([KernelCost::streamed(0, 0)])
}

impl Declare for AllReduce {
    fn name(&self) -> &'static str {
        "all_reduce"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect(inputs.is_empty(), || {
            format!("adds up in place, got {} inputs", inputs.len())
        })?;
        expect_ranks(self.ranks, self.tensors.len())?;
        for ty in &self.tensors {
            expect_float("a tensor", ty)?;
        }
        Ok(self.tensors.clone())
    }

    fn flops(&self, _inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        sum(outputs.iter().map(|ty| ty.shape.elements() as u64))
    }

    fn bytes(&self, _inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        product([2, total(outputs)])
    }

    fn cuda_cost(&self, _inputs: &[TensorType], _outputs: &[TensorType]) -> Cost {
        sent()
    }

    /// Once around for the sums and once for what they are.
    fn wire(&self, _inputs: &[TensorType], outputs: &[TensorType]) -> Option<Wire> {
        let once = ring(self.ranks, total(outputs));
        Some(Wire {
            bytes: once.bytes.saturating_mul(2),
            rounds: once.rounds.saturating_mul(2),
        })
    }
}

impl Declare for ReduceScatter {
    fn name(&self) -> &'static str {
        "reduce_scatter"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_ranks(self.ranks, inputs.len())?;
        for ty in inputs {
            expect_float("a tensor", ty)?;
        }
        let part = |ty: &TensorType| Shard::of(ty, self.ranks).part_type(ty.dtype);
        Ok(inputs.iter().map(part).collect())
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        sum(inputs.iter().map(|ty| ty.shape.elements() as u64))
    }

    fn cuda_cost(&self, _inputs: &[TensorType], _outputs: &[TensorType]) -> Cost {
        sent()
    }

    fn wire(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> Option<Wire> {
        Some(ring(self.ranks, total(inputs)))
    }
}

impl Declare for AllGather {
    fn name(&self) -> &'static str {
        "all_gather"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_ranks(self.ranks, self.tensors.len())?;
        expect(inputs.len() == self.tensors.len(), || {
            format!("{} parts of {} tensors", inputs.len(), self.tensors.len())
        })?;
        for (part, whole) in inputs.iter().zip(&self.tensors) {
            let expected = Shard::of(whole, self.ranks).part_type(part.dtype);
            expect(*part == expected, || {
                format!("a part is {part}, expected {expected} of {whole}")
            })?;
            let rounds = part.dtype.is_float() && part.dtype == whole.dtype.accumulator();
            expect(part.dtype == whole.dtype || rounds, || {
                format!("a part in {} of a tensor in {}", part.dtype, whole.dtype)
            })?;
        }
        Ok(self.tensors.clone())
    }

    /// Gathered weights get their gradients where they are read.
    fn backward(&self, _: &mut Backward<'_>, _: &Node) -> Result<(), GraphError> {
        Ok(())
    }

    fn brings_weights(&self) -> bool {
        true
    }

    fn flops(&self, _inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        0
    }

    fn cuda_cost(&self, _inputs: &[TensorType], _outputs: &[TensorType]) -> Cost {
        sent()
    }

    fn wire(&self, _inputs: &[TensorType], outputs: &[TensorType]) -> Option<Wire> {
        Some(ring(self.ranks, total(outputs)))
    }
}

impl Declare for GatherRows {
    fn name(&self) -> &'static str {
        "gather_rows"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_ranks(self.ranks, inputs.len())?;
        let all = |ty: &TensorType| {
            expect_float("a tensor", ty)?;
            let room = ty.shape.rank() < Shape::MAX_RANK;
            expect(room, || format!("{ty} has no room for a dimension more"))?;
            let dims: Vec<usize> = [self.ranks]
                .iter()
                .chain(ty.shape.dims())
                .copied()
                .collect();
            Ok(TensorType::new(Shape::new(&dims), ty.dtype))
        };
        inputs.iter().map(all).collect()
    }

    fn flops(&self, _inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        0
    }

    fn cuda_cost(&self, _inputs: &[TensorType], _outputs: &[TensorType]) -> Cost {
        sent()
    }

    fn wire(&self, _inputs: &[TensorType], outputs: &[TensorType]) -> Option<Wire> {
        Some(ring(self.ranks, total(outputs)))
    }
}

impl Declare for Await {
    fn name(&self) -> &'static str {
        "await"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect(!inputs.is_empty(), || "has nothing to wait for".to_owned())?;
        Ok(Vec::new())
    }

    fn flops(&self, _inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        0
    }

    fn bytes(&self, _inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        0
    }

    fn cuda_cost(&self, _inputs: &[TensorType], _outputs: &[TensorType]) -> Cost {
        Cost::of([KernelCost::streamed(0, 0)])
    }
}
