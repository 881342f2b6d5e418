//! What all graphs of the tests have in common.

use cinch_graph::Optimizer;
use cinch_graph::op::{GradientFormat, MomentFormat};

/// What tokens and targets are drawn from, in every graph here.
pub const VOCABULARY: usize = 17;

/// Its large epsilon keeps the update smooth where a gradient is next to nothing, so that two
/// precisions can be compared.
pub const OPTIMIZER: Optimizer = Optimizer {
    beta1: 0.9,
    beta2: 0.95,
    epsilon: 1e-2,
    weight_decay: 0.1,
    max_norm: Some(0.5),
    moments: MomentFormat::Full,
    gradients: GradientFormat::Full,
};
