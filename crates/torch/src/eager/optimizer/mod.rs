//! Optimizers: state made in the first step, and the temporaries of each way to run one.

mod adafactor;
mod adam;
mod bits_and_bytes;
mod sgd;

use super::tensor::Tensor;
use bits_and_bytes::States;

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
    /// The same, or with states of 32 bits, in memory that the driver pages between the card and the host.
    PagedAdam { eight_bit: bool },
    /// bitsandbytes' Lion: one state of eight bits.
    Lion8Bit,
    /// Adafactor of transformers, without a first moment.
    Adafactor,
}

impl Optimizer {
    /// What bitsandbytes keeps; none of other optimizers.
    fn bits_and_bytes(self) -> Option<States> {
        let (count, eight_bit, paged) = match self {
            Optimizer::Adam8Bit => (2, true, false),
            Optimizer::PagedAdam { eight_bit } => (2, eight_bit, true),
            Optimizer::Lion8Bit => (1, true, false),
            Optimizer::Adam(_) | Optimizer::Sgd { .. } | Optimizer::Adafactor => return None,
        };
        Some(States {
            count,
            eight_bit,
            paged,
        })
    }
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
    /// bitsandbytes' code books.
    books: Vec<Tensor>,
    /// Parameters whose states bitsandbytes keeps in fp32.
    in_float32: Vec<Tensor>,
}

impl State {
    pub fn new(optimizer: Optimizer, parameters: Vec<Tensor>) -> State {
        let states = vec![Vec::new(); parameters.len()];
        State {
            optimizer,
            parameters,
            states,
            books: Vec::new(),
            in_float32: Vec::new(),
        }
    }

    /// What bitsandbytes is told to keep in 32 bits: the Trainer says so of embeddings.
    pub fn keep_in_float32(&mut self, parameters: Vec<Tensor>) {
        self.in_float32 = parameters;
    }

    pub fn step(&mut self) {
        if let Some(kind) = self.optimizer.bits_and_bytes() {
            let in_float32 =
                |parameter: &Tensor| self.in_float32.iter().any(|kept| kept.same_as(parameter));
            bits_and_bytes::step(
                kind,
                &self.parameters,
                in_float32,
                &mut self.states,
                &mut self.books,
            );
        }
        match self.optimizer {
            Optimizer::Adam(execution) => adam::step(execution, &self.parameters, &mut self.states),
            Optimizer::Sgd {
                momentum,
                execution,
            } => {
                sgd::step(momentum, execution, &self.parameters, &mut self.states);
            }
            Optimizer::Adafactor => adafactor::step(&self.parameters, &mut self.states),
            Optimizer::Adam8Bit | Optimizer::PagedAdam { .. } | Optimizer::Lion8Bit => {}
        }
    }

    /// `zero_grad(set_to_none=True)`.
    pub fn zero_grad(&self) {
        for parameter in &self.parameters {
            parameter.set_grad(None);
        }
    }
}

/// Parameters with a gradient, grouped by type: foreach ops take one type at a time. PyTorch gathers the groups in a hash
/// table, which is walked from the newest to the oldest.
pub(super) fn groups(parameters: &[Tensor]) -> Vec<Vec<usize>> {
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
    groups.reverse();
    groups
}

/// A Python list of tensors goes from its end.
pub(super) fn drop_list(mut list: Vec<Tensor>) {
    while let Some(last) = list.pop() {
        drop(last);
    }
}
