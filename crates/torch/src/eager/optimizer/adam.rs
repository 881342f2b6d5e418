//! Adam and AdamW.

use super::super::dtype::DType;
use super::super::op::pointwise::like;
use super::super::tensor::Tensor;
use super::{Execution, drop_list, groups};

/// Both moments of a parameter in its own type, made when it first has a gradient. The step count is a
/// number in host memory, but on the device for the fused kernel.
pub fn step(execution: Execution, parameters: &[Tensor], states: &mut [Vec<Tensor>]) {
    for (parameter, state) in parameters.iter().zip(states.iter_mut()) {
        if parameter.grad().is_none() || !state.is_empty() {
            continue;
        }
        if execution == Execution::Fused {
            state.push(parameter.context().empty("step", [], DType::Float32));
        }
        state.push(like(parameter, parameter.dtype(), "exp_avg"));
        state.push(like(parameter, parameter.dtype(), "exp_avg_sq"));
    }
    match execution {
        Execution::Fused => {}
        Execution::Foreach => {
            // √v of every parameter of a group lives until the name is bound to the next group's.
            let mut roots = Vec::new();
            for group in groups(parameters) {
                let next = group
                    .iter()
                    .map(|&i| like(&parameters[i], parameters[i].dtype(), "_foreach_sqrt"))
                    .collect();
                drop_list(std::mem::replace(&mut roots, next));
            }
            drop_list(roots);
        }
        Execution::Loop => {
            let mut denominator: Option<Tensor> = None;
            for parameter in parameters
                .iter()
                .filter(|parameter| parameter.grad().is_some())
            {
                let root = like(parameter, parameter.dtype(), "sqrt");
                let corrected = like(parameter, parameter.dtype(), "div");
                drop(root);
                // The last round's denominator goes when the name is bound again.
                drop(denominator.replace(corrected));
            }
        }
    }
}
