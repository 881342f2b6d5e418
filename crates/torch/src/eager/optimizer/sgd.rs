//! Stochastic gradient descent.

use super::super::op::pointwise::like;
use super::super::tensor::Tensor;
use super::{Execution, groups};

/// Without momentum nothing is made. With momentum the first step copies each gradient; no way to run it
/// takes temporaries.
pub fn step(
    momentum: bool,
    execution: Execution,
    parameters: &[Tensor],
    states: &mut [Vec<Tensor>],
) {
    if !momentum {
        return;
    }
    let order: Vec<usize> = match execution {
        Execution::Foreach | Execution::Fused => groups(parameters).concat(),
        Execution::Loop => (0..parameters.len()).collect(),
    };
    for index in order {
        if let Some(grad) = parameters[index].grad()
            && states[index].is_empty()
        {
            states[index].push(like(&grad, grad.dtype(), "momentum"));
        }
    }
}
