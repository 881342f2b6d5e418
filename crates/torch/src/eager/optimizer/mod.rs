//! Optimizers: state made in the first step, and the temporaries of each way to run one.

mod adam;
mod bits8;
mod sgd;

use super::tensor::Tensor;

/// An optimizer and the way it is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Optimizer {
    /// AdamW, and Adam: the same memory.
    Adam(Execution),
    Sgd {
        momentum: bool,
        execution: Execution,
    },
    /// bitsandbytes' AdamW with states of eight bits.
    Adam8Bit,
}

/// How PyTorch runs an optimizer over its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Execution {
    /// All parameters at once, op by op: temporaries of the size of all of them. The default on a GPU.
    Foreach,
    /// One kernel: no temporaries.
    Fused,
    /// Parameter by parameter.
    Loop,
}

/// The optimizer's state between steps.
pub struct State {
    optimizer: Optimizer,
    parameters: Vec<Tensor>,
    /// Of each parameter that had a gradient once.
    states: Vec<Vec<Tensor>>,
}

impl State {
    pub fn new(optimizer: Optimizer, parameters: Vec<Tensor>) -> State {
        let states = vec![Vec::new(); parameters.len()];
        State {
            optimizer,
            parameters,
            states,
        }
    }

    pub fn step(&mut self) {
        match self.optimizer {
            Optimizer::Adam(execution) => adam::step(execution, &self.parameters, &mut self.states),
            Optimizer::Sgd {
                momentum,
                execution,
            } => {
                sgd::step(momentum, execution, &self.parameters, &mut self.states);
            }
            Optimizer::Adam8Bit => bits8::step(&self.parameters, &mut self.states),
        }
    }

    /// `zero_grad(set_to_none=True)`.
    pub fn zero_grad(&self) {
        for parameter in &self.parameters {
            parameter.set_grad(None);
        }
    }
}

/// Parameters with a gradient, grouped by type: foreach ops take one type at a time.
fn groups(parameters: &[Tensor]) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for (index, parameter) in parameters.iter().enumerate() {
        if parameter.grad().is_none() {
            continue;
        }
        match groups
            .iter_mut()
            .find(|group| parameters[group[0]].dtype() == parameter.dtype())
        {
            Some(group) => group.push(index),
            None => groups.push(vec![index]),
        }
    }
    groups
}

/// A Python list of tensors goes from its end.
pub(super) fn drop_list(mut list: Vec<Tensor>) {
    while let Some(last) = list.pop() {
        drop(last);
    }
}
