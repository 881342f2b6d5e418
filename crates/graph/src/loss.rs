//! The loss as a sum of terms. Each has a weight, which may change from step to step, and says
//! what it is averaged over; its op turns both into the scale of its value and of its gradient.

use crate::graph::{Graph, Role, TensorId};
use crate::types::{DType, TensorType};

/// What a term is the average over, in the effective batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// Elements of a tensor of the batch that are targets: all but
    /// [`IGNORE_INDEX`](crate::op::IGNORE_INDEX).
    Targets(TensorId),
    /// This many in every micro batch: rows, pairs.
    Rows(usize),
    /// The batch as a whole, which can then not be cut into micro batches.
    Batch,
}

/// One of the terms of the loss.
#[derive(Clone, Debug, PartialEq)]
pub struct LossTerm {
    pub name: String,
    /// The average without the weight, added up over the micro batches of a step.
    pub value: TensorId,
    pub inputs: TermInputs,
    pub count: Count,
    /// The weight unless the loop sets another.
    pub weight: f64,
}

/// The two numbers that a term's op reads, filled before each step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TermInputs {
    /// One over what the term is averaged over: multiplies its value and its gradient.
    pub inverse_count: TensorId,
    /// The term's weight: multiplies its gradient.
    pub weight: TensorId,
}

impl TermInputs {
    /// Of either.
    pub fn ty() -> TensorType {
        TensorType::new([1], DType::F32)
    }
}

/// Why the batch of a step may not be cut into micro batches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WholeBatch {
    /// The op and its node, or the term.
    pub what: String,
    pub reason: &'static str,
}

impl Graph {
    pub fn term_inputs(&mut self, name: &str) -> TermInputs {
        let mut input =
            |what: &str| self.add_tensor(format!("{name}.{what}"), TermInputs::ty(), Role::Control);
        TermInputs {
            inverse_count: input("inverse_count"),
            weight: input("weight"),
        }
    }

    /// Makes an op's value, one number, a term of the loss.
    pub fn add_term(&mut self, term: LossTerm) {
        self.tensors[term.value.index()].role = Role::Result;
        self.terms.push(term);
    }

    /// Sets the weight that a term has unless the loop sets another; whether there is such a
    /// term.
    pub fn weigh_term(&mut self, name: &str, weight: f64) -> bool {
        let term = self.terms.iter_mut().find(|term| term.name == name);
        term.map(|term| term.weight = weight).is_some()
    }

    /// The term whose value a tensor is.
    pub fn term_of(&self, id: TensorId) -> Option<&LossTerm> {
        self.terms.iter().find(|term| term.value == id)
    }

    /// The first node or term that depends on all rows of the batch, so that several micro
    /// batches would give another result than one.
    pub fn whole_batch(&self) -> Option<WholeBatch> {
        let mut nodes = self.nodes.iter();
        let node = nodes.find_map(|node| {
            Some(WholeBatch {
                what: format!("{} `{}`", node.op.name(), node.name),
                reason: node.op.declaration().whole_batch()?,
            })
        });
        node.or_else(|| {
            let term = self.terms.iter().find(|term| term.count == Count::Batch)?;
            Some(WholeBatch {
                what: format!("the term `{}`", term.name),
                reason: "it is one number of the whole batch",
            })
        })
    }
}
