//! Pointwise functions and the sum of two tensors.

use cinch_graph::DType;
use cinch_graph::op::{Activation, ActivationBackward, ActivationKind, Add};

use crate::cuda::command::{Argument, Kernel, LaunchShape};
use crate::cuda::lowering::{Lowering, MULTIPROCESSORS};

const THREADS: usize = 256;

/// A launch over elements, `vector` of them to a thread at a time: a thread for each vector as
/// far as several waves of blocks go, each thread taking several beyond.
pub(super) fn elementwise(elements: usize, vector: usize) -> LaunchShape {
    let blocks = elements.div_ceil(vector * THREADS);
    LaunchShape::linear(blocks.min(64 * MULTIPROCESSORS), THREADS as u32)
}

/// A kernel of a thread to each element: inputs, outputs, of which some may be missing, and count.
pub(super) fn launch(x: &mut Lowering<'_>, function: &'static str, outputs: &[Option<usize>]) {
    let ty = x.output_type(0);
    let elements = ty.shape.elements();
    let inputs = 0..x.node.inputs.len();
    let mut arguments: Vec<Argument> = inputs.map(|i| x.input_argument(i)).collect();
    arguments.extend(outputs.iter().map(|&i| x.optional_output(i)));
    arguments.push(Argument::U64(elements as u64));
    let kernel = Kernel {
        file: "activation",
        function,
    };
    let shape = elementwise(elements, 16 / ty.dtype.size() as usize);
    x.launch(kernel, shape, arguments);
}

pub fn activation(x: &mut Lowering<'_>, op: &Activation) {
    let function = match op.kind {
        ActivationKind::GeluTanh => "gelu_tanh",
        ActivationKind::Gelu => "gelu",
        ActivationKind::Silu => "silu",
        ActivationKind::Relu => "relu",
    };
    launch(x, function, &[Some(0)]);
}

pub fn activation_backward(x: &mut Lowering<'_>, op: &ActivationBackward) {
    let function = match op.kind {
        ActivationKind::GeluTanh => "gelu_tanh_backward",
        ActivationKind::Gelu => "gelu_backward",
        ActivationKind::Silu => "silu_backward",
        ActivationKind::Relu => "relu_backward",
    };
    launch(x, function, &[Some(0), op.value.then_some(1)]);
}

pub fn add(x: &mut Lowering<'_>, _op: &Add) {
    let function = match x.output_type(0).dtype {
        DType::F32 => "add_single",
        _ => "add",
    };
    launch(x, function, &[Some(0)]);
}
