//! The learning rate over a run.

use std::f64::consts::PI;

use cinch_config::{Schedule, TrainingConfig};

/// The rate of a step, counted from 0: a linear warm-up that reaches the peak at its last
/// step, then the decay, which reaches the minimum at the last step of the run.
pub fn learning_rate(config: &TrainingConfig, step: u64) -> f64 {
    let (peak, minimum) = (config.learning_rate, config.min_learning_rate);
    if step < config.warmup_steps {
        return peak * (step + 1) as f64 / config.warmup_steps as f64;
    }
    let decay_steps = config.max_steps.saturating_sub(config.warmup_steps).max(1);
    let done = (step - config.warmup_steps) as f64 / decay_steps as f64;
    let left = match config.schedule {
        Schedule::Constant => 1.0,
        Schedule::Linear => 1.0 - done.min(1.0),
        Schedule::Cosine => 0.5 * (1.0 + (PI * done.min(1.0)).cos()),
    };
    minimum + (peak - minimum) * left
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(schedule: &str) -> TrainingConfig {
        let mut settings = cinch_config::Settings::new();
        for (key, value) in [
            ("training.learning_rate", "1e-3"),
            ("training.max_steps", "110"),
            ("training.warmup_steps", "10"),
            ("training.schedule", schedule),
        ] {
            let source = cinch_config::Source::Flag("test".to_owned());
            settings.set(key, value, source).unwrap();
        }
        settings.resolve().unwrap().training
    }

    #[test]
    fn warms_up_to_the_peak_and_decays() {
        let linear = config("linear");
        assert_eq!(learning_rate(&linear, 0), 1e-4);
        assert_eq!(learning_rate(&linear, 9), 1e-3);
        assert_eq!(learning_rate(&linear, 10), 1e-3);
        assert!((learning_rate(&linear, 60) - 5e-4).abs() < 1e-15);
        assert!((learning_rate(&linear, 109) - 1e-5).abs() < 1e-15);
        assert_eq!(learning_rate(&linear, 110), 0.0);
        let cosine = config("cosine");
        assert!((learning_rate(&cosine, 60) - 5e-4).abs() < 1e-15);
        assert!(learning_rate(&cosine, 35) > 8.5e-4);
        assert_eq!(learning_rate(&config("constant"), 109), 1e-3);
    }
}
