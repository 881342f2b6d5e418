//! Dynamic loss scaling for half precision: the gradient of the loss is multiplied by a scale
//! that keeps small gradients from vanishing, and divided by it where weights are updated.
//!
//! The scale adapts by itself. A step whose gradients are not finite changes no weight and halves
//! the scale; after [`LossScale::INTERVAL`] good steps in a row it doubles. The state is a tensor,
//! so that a device updates it without the host: [`LossScale::after`] is what its kernel does.

use super::{expect_dtype, expect_shape};
use crate::types::{DType, TensorType};

/// The values of the tensor `loss_scale`, in its order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    pub scale: f32,
    /// Steps since the scale last changed.
    pub good_steps: f32,
    /// Steps that changed no weight, since the start of training.
    pub skipped_steps: f32,
    /// 1 where the last step was one of them.
    pub skipped: f32,
}

impl LossScale {
    pub const NUM_VALUES: usize = 4;
    /// Good steps after which a larger scale is tried.
    pub const INTERVAL: u32 = 2000;
    pub const SMALLEST: f32 = 1.0;
    /// Gradients that all vanish would let the scale grow for ever.
    pub const LARGEST: f32 = 2_147_483_648.0;
    /// Where training begins.
    pub const START: Self = Self {
        scale: 65536.0,
        good_steps: 0.0,
        skipped_steps: 0.0,
        skipped: 0.0,
    };

    pub fn tensor_type() -> TensorType {
        TensorType::new([Self::NUM_VALUES], DType::F32)
    }

    pub fn values(self) -> [f32; Self::NUM_VALUES] {
        [
            self.scale,
            self.good_steps,
            self.skipped_steps,
            self.skipped,
        ]
    }

    pub fn from_values(values: [f32; Self::NUM_VALUES]) -> Self {
        let [scale, good_steps, skipped_steps, skipped] = values;
        Self {
            scale,
            good_steps,
            skipped_steps,
            skipped,
        }
    }

    /// The state after a step whose gradients were finite, or were not.
    #[must_use]
    pub fn after(self, finite: bool) -> Self {
        if !finite {
            return Self {
                scale: (self.scale / 2.0).max(Self::SMALLEST),
                good_steps: 0.0,
                skipped_steps: self.skipped_steps + 1.0,
                skipped: 1.0,
            };
        }
        let good_steps = self.good_steps + 1.0;
        let grows = good_steps >= Self::INTERVAL as f32;
        Self {
            scale: if grows {
                (self.scale * 2.0).min(Self::LARGEST)
            } else {
                self.scale
            },
            good_steps: if grows { 0.0 } else { good_steps },
            skipped: 0.0,
            ..self
        }
    }

    pub(super) fn expect(ty: &TensorType) -> Result<(), String> {
        expect_dtype("the loss scale", ty, DType::F32)?;
        expect_shape("the loss scale", ty, &[Self::NUM_VALUES])
    }
}

#[cfg(test)]
mod tests {
    use super::LossScale;

    fn steps(start: LossScale, finite: bool, count: u32) -> LossScale {
        (0..count).fold(start, |state, _| state.after(finite))
    }

    #[test]
    fn good_steps_double_the_scale() {
        let before = steps(LossScale::START, true, 1999);
        assert_eq!(before.values(), [65536.0, 1999.0, 0.0, 0.0]);
        assert_eq!(before.after(true).values(), [131_072.0, 0.0, 0.0, 0.0]);
        let again = steps(LossScale::START, true, 4000);
        assert_eq!(again.values(), [262_144.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn an_overflow_halves_the_scale_and_starts_counting_anew() {
        let state = steps(LossScale::START, true, 1999).after(false);
        assert_eq!(state.values(), [32768.0, 0.0, 1.0, 1.0]);
        let state = steps(state, true, 1999);
        assert_eq!(state.values(), [32768.0, 1999.0, 1.0, 0.0]);
        assert_eq!(state.after(true).values(), [65536.0, 0.0, 1.0, 0.0]);
    }

    #[test]
    fn the_scale_stays_between_its_ends() {
        let low = steps(LossScale::START, false, 40);
        assert_eq!(low.values(), [1.0, 0.0, 40.0, 1.0]);
        let high = steps(LossScale::START, true, 2000 * 40);
        assert_eq!(high.scale, LossScale::LARGEST);
    }

    #[test]
    fn values_and_fields_agree() {
        let state = LossScale::from_values([8.0, 1.0, 2.0, 0.0]);
        assert_eq!((state.scale, state.skipped_steps), (8.0, 2.0));
        assert_eq!(LossScale::from_values(state.values()), state);
    }
}
