//! What a step did, and whether training can go on after it.

use cinch_graph::op::LossScale;

use crate::terms::TermValues;

/// What a step did.
#[derive(Clone, Debug, PartialEq)]
pub struct StepResult {
    /// Over the effective batch: the weighted sum of its terms.
    pub loss: f64,
    pub terms: TermValues,
    /// Before clipping.
    pub gradient_norm: f64,
    pub learning_rate: f64,
    /// In half precision, after the step.
    pub loss_scale: Option<LossScale>,
    /// Tokens that all ranks computed, padding included.
    pub tokens: u64,
}

impl StepResult {
    /// Whether gradients overflowed at their scale, so that no weight was changed.
    pub fn is_skipped(&self) -> bool {
        self.loss_scale.is_some_and(|state| state.skipped != 0.0)
    }

    /// Whether training cannot go on: a loss or gradients that are not finite. A skipped step is
    /// no such thing, because the next one has a smaller scale; unless `before`, the state that
    /// it began with, was at the smallest already.
    pub fn has_diverged(&self, before: Option<LossScale>) -> bool {
        let at_end = before.is_some_and(|state| state.scale <= LossScale::SMALLEST);
        let lost = !self.gradient_norm.is_finite() && (!self.is_skipped() || at_end);
        !self.loss.is_finite() || lost
    }
}

#[cfg(test)]
mod tests {
    use super::{LossScale, StepResult};

    fn result(loss: f64, gradient_norm: f64, loss_scale: Option<LossScale>) -> StepResult {
        StepResult {
            loss,
            terms: Default::default(),
            gradient_norm,
            learning_rate: 1e-3,
            loss_scale,
            tokens: 1,
        }
    }

    #[test]
    fn without_a_scale_nothing_may_overflow() {
        assert!(!result(2.0, 1.0, None).has_diverged(None));
        assert!(result(f64::NAN, 1.0, None).has_diverged(None));
        assert!(result(2.0, f64::INFINITY, None).has_diverged(None));
        assert!(result(2.0, f64::NAN, None).has_diverged(None));
    }

    #[test]
    fn a_skipped_step_goes_on_until_the_scale_is_at_its_end() {
        let overflow = |before: LossScale| result(2.0, f64::NAN, Some(before.after(false)));
        assert!(!overflow(LossScale::START).has_diverged(None));
        let mut state = LossScale::START;
        // 65536 is halved 16 times.
        for _ in 0..16 {
            let step = overflow(state);
            assert!(step.is_skipped() && !step.has_diverged(Some(state)));
            state = state.after(false);
        }
        assert!(overflow(state).has_diverged(Some(state)));
        // Gradients that are finite again are fine at any scale.
        let step = result(2.0, 1.0, Some(state.after(true)));
        assert!(!step.is_skipped() && !step.has_diverged(Some(state)));
    }

    #[test]
    fn a_loss_that_is_not_finite_is_no_matter_of_scale() {
        let state = Some(LossScale::START.after(false));
        assert!(result(f64::INFINITY, f64::INFINITY, state).has_diverged(None));
    }
}
