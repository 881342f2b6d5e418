//! The learning rate over a run.

use std::f64::consts::PI;

use cinch_config::{Schedule, TrainingConfig};

/// The rate of a step, counted from 0: a linear warm-up that reaches the peak at its last
/// step, then the decay, which reaches the minimum at the last step of the run.
pub fn learning_rate(config: &TrainingConfig, step: u64) -> f64 {
    let (peak, minimum) = (config.learning_rate, config.min_learning_rate);
    if config.schedule == Schedule::OneCycle {
        return one_cycle(config, step);
    }
    if step < config.warmup_steps {
        return peak * (step + 1) as f64 / config.warmup_steps as f64;
    }
    let decay_steps = config.max_steps.saturating_sub(config.warmup_steps).max(1);
    let done = (step - config.warmup_steps) as f64 / decay_steps as f64;
    let left = match config.schedule {
        Schedule::Constant | Schedule::OneCycle => 1.0,
        Schedule::Linear => 1.0 - done.min(1.0),
        Schedule::Cosine => 0.5 * (1.0 + (PI * done.min(1.0)).cos()),
    };
    minimum + (peak - minimum) * left
}

/// What PyTorch's OneCycleLR divides the peak by for the first rate, and that for the last.
const FIRST_DIVISOR: f64 = 25.0;
const LAST_DIVISOR: f64 = 1e4;

/// From a 25th of the peak up to it during the warm-up, then down to the minimum, or where there
/// is none to a 10,000th of the first rate; by cosines, as PyTorch counts the steps: the peak is
/// reached at the last step of the warm-up.
fn one_cycle(config: &TrainingConfig, step: u64) -> f64 {
    let peak = config.learning_rate;
    let first = peak / FIRST_DIVISOR;
    let last = match config.min_learning_rate {
        0.0 => first / LAST_DIVISOR,
        minimum => minimum,
    };
    let (warm, end) = (
        config.warmup_steps as f64 - 1.0,
        config.max_steps as f64 - 1.0,
    );
    let step = (step as f64).min(end);
    let between =
        |from: f64, to: f64, share: f64| to + (from - to) / 2.0 * (1.0 + (PI * share).cos());
    match step <= warm {
        // A warm-up of one step has no way to go.
        true if warm <= 0.0 => peak,
        true => between(first, peak, step / warm),
        false => between(peak, last, (step - warm) / (end - warm)),
    }
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

    /// `OneCycleLR(optimizer, max_lr=1e-3, total_steps=110, pct_start=10/110)` of PyTorch 2.11.
    #[test]
    fn one_cycle_has_the_rates_of_pytorch() {
        let config = config("onecycle");
        for (step, expected) in [
            (0, 3.999_999_999_999_999_6e-5),
            (1, 6.894_754_202_276_4e-5),
            (4, 4.366_488_747_198_733_4e-4),
            (9, 1e-3),
            (10, 9.997_532_811_697_452e-4),
            (35, 8.422_741_838_701_324e-4),
            (60, 4.842_966_832_824_54e-4),
            (100, 1.985_707_774_889_982e-5),
            (108, 2.507_188_302_549_314e-7),
            (109, 4e-9),
            // A run that goes on beyond its end stays there.
            (500, 4e-9),
        ] {
            let rate = learning_rate(&config, step);
            assert!((rate - expected).abs() < 1e-12, "step {step}: {rate:e}");
        }
    }

    #[test]
    fn one_cycle_needs_no_warm_up_and_ends_where_it_is_told() {
        let mut config = config("onecycle");
        config.min_learning_rate = 1e-5;
        for warmup in [0, 1] {
            config.warmup_steps = warmup;
            let rates: Vec<f64> = (0..110).map(|step| learning_rate(&config, step)).collect();
            assert!(rates.is_sorted_by(|a, b| a > b), "{rates:?}");
            assert!(rates[0] > 9.9e-4 && (rates[109] - 1e-5).abs() < 1e-15);
        }
    }
}
