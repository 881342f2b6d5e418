//! Weights: how they start, how they are kept, and what belongs to each.

use crate::graph::TensorId;
use crate::op::Quantisation;
use crate::shard::Shard;
use crate::types::Shape;

/// How a parameter starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    Zeros,
    Ones,
    Constant {
        value: f64,
    },
    Normal {
        std: f64,
    },
    Uniform {
        bound: f64,
    },
    /// `ln 1, ln 2, … ln N` along the last dimension: Mamba's `A_log`.
    LogRange,
    /// The inverse softplus of values spread log-uniformly over `low..high`: Mamba's time step
    /// bias.
    InverseSoftplus {
        low: f64,
        high: f64,
    },
}

/// How a parameter is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// Updated in the precision of sums; where products are in another, they read a copy.
    Trained,
    /// Updated in the type in which products read it, which is coarser than that of sums: one
    /// tensor, and each update is rounded to it.
    TrainedAsRead,
    /// Never updated: one tensor, in the type in which it is read.
    Frozen,
    /// Never updated, and kept as codes that become numbers only while they are read.
    Quantised(Quantisation),
}

/// Rows of a parameter as a model's files name them. A parameter that is one matrix here and
/// several there, such as a packed projection of queries, keys and values, has several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilePart {
    pub name: String,
    pub rows: usize,
}

/// A weight and all that belongs to it.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// What is updated, saved and loaded; the codes, where it is quantised.
    pub master: TensorId,
    /// What the forward and backward pass read; the master unless the precisions differ, or the
    /// numbers that the codes become.
    pub compute: TensorId,
    /// As a matrix of numbers, whatever it is kept as.
    pub shape: Shape,
    pub storage: Storage,
    /// Whether weight decay applies (not to biases, norms and the like).
    pub decay: bool,
    /// What the step's learning rate is multiplied by for this parameter, its decay included.
    pub learning_rate_scale: f64,
    pub init: Init,
    /// From the first row to the last.
    pub parts: Vec<FilePart>,
    /// The scales of the codes of a quantised one.
    pub code_scales: Vec<TensorId>,
    /// Set by differentiation, for a trained parameter; none where the gradient is gone
    /// before the backward is over.
    pub gradient: Option<TensorId>,
    /// First and second moment, or their codes; set by differentiation.
    pub moments: Option<[TensorId; 2]>,
    /// The scales of the codes, where moments are kept in eight bits.
    pub scales: Option<[TensorId; 2]>,
    /// Where ranks have a part each: how it is cut. Master, states, and the scales of codes are
    /// then this rank's part of them, each a list.
    pub shard: Option<Shard>,
}

impl Parameter {
    pub fn is_trained(&self) -> bool {
        matches!(self.storage, Storage::Trained | Storage::TrainedAsRead)
    }

    /// All that the optimizer remembers of it.
    pub fn states(&self) -> impl Iterator<Item = TensorId> + use<> {
        let moments = self.moments.into_iter().flatten();
        moments.chain(self.scales.into_iter().flatten())
    }
}
