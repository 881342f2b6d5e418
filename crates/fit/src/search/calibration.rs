//! What measured steps say about predicted ones: a factor for each card, model and precision.

use cinch_config::Precision;
use serde::{Deserialize, Serialize};

/// Measured step times over predicted ones. Where it is kept is the caller's business.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Calibration {
    factors: Vec<CalibrationFactor>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CalibrationFactor {
    pub card: String,
    /// The family's name.
    pub model: String,
    pub precision: Precision,
    /// Seconds measured over seconds predicted.
    pub factor: f64,
}

impl Calibration {
    /// What a prediction is multiplied by; 1 where nothing was measured.
    pub fn factor(&self, card: &str, model: &str, precision: Precision) -> f64 {
        let known = self
            .factors
            .iter()
            .find(|known| known.is_of(card, model, precision));
        known.map_or(1.0, |known| known.factor)
    }

    /// Whether a step like this one was measured.
    pub fn is_measured(&self, card: &str, model: &str, precision: Precision) -> bool {
        let mut factors = self.factors.iter();
        factors.any(|known| known.is_of(card, model, precision))
    }

    /// Keeps a measurement; the newest one holds. What is not a time is ignored.
    pub fn record(
        &mut self,
        card: &str,
        model: &str,
        precision: Precision,
        measured_seconds: f64,
        predicted_seconds: f64,
    ) {
        let factor = measured_seconds / predicted_seconds;
        if !(factor.is_finite() && factor > 0.0) {
            return;
        }
        self.factors
            .retain(|known| !known.is_of(card, model, precision));
        self.factors.push(CalibrationFactor {
            card: card.to_owned(),
            model: model.to_owned(),
            precision,
            factor,
        });
    }
}

impl CalibrationFactor {
    fn is_of(&self, card: &str, model: &str, precision: Precision) -> bool {
        self.card == card && self.model == model && self.precision == precision
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_measurement_of_a_kind_holds() {
        let mut calibration = Calibration::default();
        let (model, precision) = ("mamba", Precision::Bf16);
        assert_eq!(calibration.factor("H200", model, precision), 1.0);
        calibration.record("H200", model, precision, 3.0, 2.0);
        calibration.record("H200", model, precision, 2.5, 2.0);
        calibration.record("H200", model, precision, 1.0, 0.0);
        assert_eq!(calibration.factor("H200", model, precision), 1.25);
        assert!(!calibration.is_measured("H200", "gpt2", precision));
        assert!(!calibration.is_measured("A100", model, precision));
        let text = serde_json::to_string(&calibration).unwrap();
        assert_eq!(
            text,
            r#"[{"card":"H200","model":"mamba","precision":"bf16","factor":1.25}]"#
        );
        let read: Calibration = serde_json::from_str(&text).unwrap();
        assert_eq!(read, calibration);
    }
}
