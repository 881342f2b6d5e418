//! Gated activations and their gradients.

use cinch_graph::op::{ActivationKind, Gated, GatedBackward};

use super::activation::launch;
use crate::cuda::lowering::Lowering;

pub fn gated(x: &mut Lowering<'_>, op: &Gated) {
    let function = match op.kind {
        ActivationKind::GeluTanh => "geglu_tanh",
        ActivationKind::Gelu => "geglu",
        ActivationKind::Silu => "swiglu",
        ActivationKind::Relu => "reglu",
    };
    launch(x, function, &[Some(0)]);
}

pub fn gated_backward(x: &mut Lowering<'_>, op: &GatedBackward) {
    let function = match op.kind {
        ActivationKind::GeluTanh => "geglu_tanh_backward",
        ActivationKind::Gelu => "geglu_backward",
        ActivationKind::Silu => "swiglu_backward",
        ActivationKind::Relu => "reglu_backward",
    };
    launch(x, function, &[Some(0), Some(1), op.value.then_some(2)]);
}
