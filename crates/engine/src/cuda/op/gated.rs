//! Gated activations and their gradients.

use cinch_graph::op::{ActivationKind, Gated, GatedBackward};

use super::activation::elementwise;
use crate::cuda::command::{Argument, Kernel};
use crate::cuda::lowering::Lowering;

fn launch(x: &mut Lowering<'_>, function: &'static str, inputs: usize, outputs: usize) {
    let ty = x.output_type(0);
    let elements = ty.shape.elements();
    let mut arguments: Vec<Argument> = (0..inputs).map(|i| x.input_argument(i)).collect();
    arguments.extend((0..outputs).map(|i| x.output_argument(i)));
    arguments.push(Argument::U64(elements as u64));
    let kernel = Kernel {
        file: "activation",
        function,
    };
    let shape = elementwise(elements, 16 / ty.dtype.size() as usize);
    x.launch(kernel, shape, arguments);
}

pub fn gated(x: &mut Lowering<'_>, op: &Gated) {
    let function = match op.kind {
        ActivationKind::GeluTanh => "geglu_tanh",
        ActivationKind::Gelu => "geglu",
        ActivationKind::Silu => "swiglu",
        ActivationKind::Relu => "reglu",
    };
    launch(x, function, 2, 1);
}

pub fn gated_backward(x: &mut Lowering<'_>, op: &GatedBackward) {
    let function = match op.kind {
        ActivationKind::GeluTanh => "geglu_tanh_backward",
        ActivationKind::Gelu => "geglu_backward",
        ActivationKind::Silu => "swiglu_backward",
        ActivationKind::Relu => "reglu_backward",
    };
    launch(x, function, 3, 2);
}
