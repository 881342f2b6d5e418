//! A training step as one of several ranks runs it, as a pass over the training graph: who keeps
//! what, and the collectives between them.
//!
//! A *rank* is one process with one device; the *world* is all of them. Every rank runs the same
//! graph on rows of its own, and what the ranks do together is in it as nodes ([`AllReduce`] and
//! its relatives), so that plan, timeline and predicted time of a rank follow as for any graph.
//!
//! | level | weights | gradients | states, masters | on the wire, of P bytes of weights |
//! |---|---|---|---|---|
//! | [`ShardLevel::None`] | whole | whole | whole | gradients around twice |
//! | [`ShardLevel::Optimizer`] | whole | whole | a part | gradients once, weights once |
//! | [`ShardLevel::Gradients`] | whole | a part | a part | gradients once a micro batch, weights once |
//! | [`ShardLevel::Weights`] | a part | a part | a part | that, and weights twice a micro batch |
//!
//! **The number of ranks is part of the graph, the rank is not.** Every tensor that is cut is a
//! list of as many elements on each rank: the whole's, divided and rounded up to
//! [`Shard::UNIT`]. What lies beyond the end is zero and stays zero. So all ranks have the same
//! plan to the byte, one is planned for all, and an executor that knows its rank knows where its
//! part begins. Uneven parts would save at most a unit for each tensor and rank, and make as many
//! plans as there are ranks.
//!
//! **Each tensor is cut by itself**, in the order of its elements, not by rows and not as one long
//! list of all weights: any number of ranks divides it, a parameter's part has the parameter's name,
//! and what is gathered for a block needs no copy out of a joint buffer. The unit is the block of
//! eight-bit states, so that a part is encoded as the whole would be.
//!
//! **When gradients are added up.** With whole gradients (the first two levels), in the last
//! micro batch, as soon as a bucket of them is complete: nodes of [`Phase::Exchange`], which an
//! executor leaves out in earlier micro batches. With parts of gradients, in every micro batch: a
//! whole gradient that outlived its micro batch would be what this level is there to avoid. It is
//! a transient tensor from the node that makes it to the end of its reduction; two buckets are
//! alive at most. One that several nodes add to (a tied table) stays a whole accumulator and is
//! cut in the last micro batch.
//!
//! **What the result is.** A term of the loss is divided by its count in the whole effective
//! batch, of all ranks: [`TermInputs::inverse_count`](crate::TermInputs) is filled from outside,
//! with one over the sum of all ranks' counts, and so gradients and values of the ranks add up to
//! those of one rank with the same effective batch. The values are added up by one more collective,
//! so that every rank has the loss. Where gradients are cut, so are the sums of their squares,
//! which are added up before the norm: all ranks clip by the same norm, which is that of one
//! rank but for the order in which doubles are added.
//!
//! **Weights.** With the optimizer's part cut, what a rank updates is its part of the master; the
//! whole weight that products read is a compute copy, in single precision too, and is gathered
//! after the update, rounded to its type before it is sent. Before the first step, and after
//! loading, the same nodes make it. With the weights themselves cut there is no whole copy: the
//! part is gathered ahead of each visit to a block, as offloaded weights are fetched
//! (`visit.rs`), frozen weights and codes too. What lies in host memory is not cut.

mod gradients;
mod rows;
mod update;
mod weights;

use crate::differentiate::TrainingGraph;
use crate::error::GraphError;
use crate::graph::Graph;
#[cfg(doc)]
use crate::graph::Phase;
#[cfg(doc)]
use crate::op::AllReduce;
use crate::op::MomentFormat;
use crate::types::{DType, TensorType};

/// What of a step is cut over the ranks; each level cuts what the one before does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ShardLevel {
    /// Replicas that add up their gradients.
    #[default]
    None,
    /// Optimizer states and masters.
    Optimizer,
    /// And gradients.
    Gradients,
    /// And weights, those that are not trained included.
    Weights,
}

/// Into how many ranks a step is cut, and what of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sharding {
    pub ranks: usize,
    pub level: ShardLevel,
}

/// How a tensor is cut over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shard {
    pub ranks: usize,
    /// Of the whole tensor.
    pub elements: usize,
}

impl Shard {
    /// A part is a multiple of this many elements.
    pub const UNIT: usize = MomentFormat::BLOCK;

    pub fn of(whole: &TensorType, ranks: usize) -> Self {
        Self {
            ranks,
            elements: whole.shape.elements(),
        }
    }

    /// Elements that every rank keeps.
    pub fn part(&self) -> usize {
        let part = self.elements.div_ceil(self.ranks.max(1));
        part.checked_next_multiple_of(Self::UNIT)
            .unwrap_or(usize::MAX)
    }

    /// The elements of the whole that a rank keeps; none where those before it keep all.
    pub fn range(&self, rank: usize) -> std::ops::Range<usize> {
        let begin = |rank: usize| self.part().saturating_mul(rank).min(self.elements);
        begin(rank)..begin(rank.saturating_add(1))
    }

    pub fn part_type(&self, dtype: DType) -> TensorType {
        TensorType::new([self.part()], dtype)
    }
}

impl Sharding {
    /// One rank, of whom nothing is cut off.
    pub const ALONE: Self = Self {
        ranks: 1,
        level: ShardLevel::None,
    };

    /// Whether there is anything to exchange.
    pub fn is_alone(self) -> bool {
        self.ranks <= 1
    }
}

impl Graph {
    /// A graph without gradients, such as that of evaluation, over the weights of a step that was
    /// cut in the same way. Weights in host memory have been chosen before.
    #[must_use]
    pub fn shard(&self, sharding: Sharding) -> Self {
        let mut graph = self.clone();
        if !sharding.is_alone() {
            weights::cut(&mut graph, sharding);
        }
        graph
    }
}

impl TrainingGraph {
    /// The step of one of several ranks. Recomputation, and weights in host memory, have been
    /// chosen before.
    pub fn shard(&self, sharding: Sharding) -> Result<Self, GraphError> {
        let mut result = self.clone();
        if sharding.is_alone() {
            return Ok(result);
        }
        if self.backward_passes.is_some() {
            let ranks = sharding.ranks;
            return Err(GraphError::UpdatedInBackward { ranks });
        }
        rows::meet(&mut result.graph, sharding)?;
        let cut = weights::cut(&mut result.graph, sharding);
        let parts = gradients::reduce(&mut result.graph, sharding);
        if sharding.level >= ShardLevel::Optimizer {
            update::update_parts(&mut result.graph, sharding, &parts, &cut);
        }
        Ok(result)
    }
}
