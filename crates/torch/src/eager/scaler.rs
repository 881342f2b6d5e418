//! `GradScaler`: a handful of numbers on the device.

use super::context::Context;
use super::dtype::DType;
use super::op::pointwise::mul;
use super::tensor::Tensor;

/// The scale and its counter, made with the first loss; the flag for infinities lives from `unscale` to `update`.
pub struct GradScaler {
    context: Context,
    scale: Option<(Tensor, Tensor)>,
    found_infinity: Option<Tensor>,
}

impl GradScaler {
    pub fn new(context: &Context) -> GradScaler {
        GradScaler {
            context: context.clone(),
            scale: None,
            found_infinity: None,
        }
    }

    fn number(&self, op: &'static str, dtype: DType) -> Tensor {
        self.context.empty(op, [], dtype)
    }

    pub fn scale(&mut self, loss: &Tensor) -> Tensor {
        if self.scale.is_none() {
            let scale = self.number("scale", DType::Float32);
            let tracker = self.number("growth tracker", DType::Int32);
            self.scale = Some((scale, tracker));
        }
        match &self.scale {
            Some((scale, _)) => mul(loss, scale),
            None => loss.clone(),
        }
    }

    /// The inverse scale through a double, the flag, a copy of both on the gradients' device, and the gradients in place.
    /// Only the copy of the flag stays.
    pub fn unscale(&mut self) {
        let double = self.number("double", DType::Int64);
        let inverse = self.number("reciprocal", DType::Int64);
        drop(double);
        let scale = self.number("float", DType::Float32);
        drop(inverse);
        let flag = self.number("found_inf", DType::Float32);
        self.found_infinity = Some(self.number("found_inf", DType::Float32));
        drop(self.number("scale", DType::Float32));
        drop(scale);
        drop(flag);
    }

    pub fn update(&mut self) {
        self.found_infinity = None;
    }
}
