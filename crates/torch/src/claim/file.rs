//! A guide's claims as its file holds them, and what becomes of each once its figure is computed.
//!
//! The names of figures are those of the guide's own module, with the run that each is about.

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::{GuideClaim, percent, size};
use crate::TorchError;
use crate::model::{Prediction, Workload};
use crate::overhead::H200;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GuideFile<F> {
    guide: String,
    claims: Vec<Claim<F>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Claim<F> {
    /// What is claimed about, in a few words.
    about: String,
    claimed: Claimed,
    /// What is computed for it.
    figure: F,
    /// Of a size, the reason for the difference; else the whole verdict. A name in braces stands for a computed value.
    #[serde(default)]
    verdict: String,
    /// The verdict where the computed figure agrees, if that may happen.
    verdict_if_it_holds: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Claimed {
    /// A range of sizes.
    Gigabytes(f64, f64),
    Words(String),
}

/// What was computed for a claim.
pub(super) struct Figure {
    measure: Measure,
    /// What names in the verdict stand for.
    values: Vec<(&'static str, String)>,
    holds: bool,
}

enum Measure {
    Bytes(u64),
    /// A size, in words that say more.
    Described(u64, String),
    Words(String),
}

impl Figure {
    pub fn bytes(bytes: u64) -> Self {
        Self::of(Measure::Bytes(bytes))
    }

    /// No single size.
    pub fn words(words: impl Into<String>) -> Self {
        Self::of(Measure::Words(words.into()))
    }

    /// What a whole run takes: held against the tensors' peak, which is the least that the guide can have meant.
    pub fn peak(workload: &Workload) -> Result<Self, TorchError> {
        let prediction = workload.predict()?;
        let words = format!(
            "{} in tensors, {} reserved, {} of the card",
            size(prediction.peak_allocated as f64),
            size(prediction.peak_reserved as f64),
            size(H200.device_bytes(&prediction) as f64)
        );
        Ok(Self::of(Measure::Described(
            prediction.peak_allocated,
            words,
        )))
    }

    /// What going from one run to another saves, in the tensors' peak.
    pub fn saving(before: &Workload, after: &Workload) -> Result<Self, TorchError> {
        let (before, after) = (before.predict()?, after.predict()?);
        let saved = saved(&before, &after);
        let words = format!(
            "{} of {} in tensors ({}); {} on the card",
            size(saved as f64),
            size(before.peak_allocated as f64),
            percent(saved, before.peak_allocated),
            size(before.peak_reserved as f64 - after.peak_reserved as f64)
        );
        Ok(Self::of(Measure::Described(saved, words)))
    }

    /// The share that going from one run to another saves.
    pub fn saved_share(before: &Workload, after: &Workload) -> Result<Self, TorchError> {
        let (before, after) = (before.predict()?, after.predict()?);
        let share = percent(saved(&before, &after), before.peak_allocated);
        Ok(Self::words(format!("saves {share} of the tensors' peak")))
    }

    /// With a value for a name of the verdict.
    pub fn with(mut self, name: &'static str, value: impl ToString) -> Self {
        self.values.push((name, value.to_string()));
        self
    }

    /// Whether the claim holds, for one that has a verdict for either case.
    pub fn holding(self, holds: bool) -> Self {
        Self { holds, ..self }
    }

    fn of(measure: Measure) -> Self {
        Self {
            measure,
            values: Vec::new(),
            holds: false,
        }
    }
}

fn saved(before: &Prediction, after: &Prediction) -> u64 {
    before.peak_allocated.saturating_sub(after.peak_allocated)
}

/// The claims of a guide's file, each beside what is computed for it.
pub(super) fn answer<F: DeserializeOwned>(
    file: &'static str,
    text: &str,
    mut compute: impl FnMut(F) -> Result<Figure, TorchError>,
) -> Result<Vec<GuideClaim>, TorchError> {
    let fail = |problem: String| TorchError::GuideFile { file, problem };
    let guide: GuideFile<F> =
        serde_json::from_str(text).map_err(|error| fail(error.to_string()))?;
    let answered = guide.claims.into_iter().map(|claim| {
        let verdict = Verdict {
            always: claim.verdict,
            if_it_holds: claim.verdict_if_it_holds,
        };
        let figure = compute(claim.figure)?;
        let reason = verdict.text(&figure);
        let (computed_bytes, computed) = match figure.measure {
            Measure::Bytes(bytes) => (Some(bytes), size(bytes as f64)),
            Measure::Described(bytes, words) => (Some(bytes), words),
            Measure::Words(words) => (None, words),
        };
        let (claimed, verdict) = match (claim.claimed, computed_bytes) {
            (Claimed::Gigabytes(low, high), Some(bytes)) => {
                let claimed = Gigabytes(low, high);
                (claimed.text(), with_reason(claimed.verdict(bytes), &reason))
            }
            (Claimed::Words(words), None) => (words, reason),
            _ => {
                let about = &claim.about;
                return Err(fail(format!(
                    "`{about}` claims a size where words are computed, or words where a size is"
                )));
            }
        };
        Ok(GuideClaim {
            guide: guide.guide.clone(),
            quote: claim.about,
            claimed,
            computed_bytes,
            computed,
            verdict,
        })
    });
    answered.collect()
}

struct Verdict {
    always: String,
    if_it_holds: Option<String>,
}

impl Verdict {
    fn text(self, figure: &Figure) -> String {
        let text = match self.if_it_holds {
            Some(text) if figure.holds => text,
            _ => self.always,
        };
        figure.values.iter().fold(text, |text, (name, value)| {
            text.replace(&format!("{{{name}}}"), value)
        })
    }
}

fn with_reason(verdict: String, reason: &str) -> String {
    if reason.is_empty() {
        verdict
    } else {
        format!("{verdict}: {reason}")
    }
}

/// How far from the claimed range a figure may be and still agree with it.
const TOLERANCE: f64 = 0.1;

/// A claimed range of sizes, in GB.
#[derive(Clone, Copy)]
struct Gigabytes(f64, f64);

impl Gigabytes {
    fn text(self) -> String {
        if self.0 == self.1 {
            size(self.0 * 1e9)
        } else {
            format!("{} to {}", size(self.0 * 1e9), size(self.1 * 1e9))
        }
    }

    fn verdict(self, bytes: u64) -> String {
        let gigabytes = bytes as f64 / 1e9;
        if bytes == 0 {
            "wrong, it is nothing".into()
        } else if gigabytes > self.1 * (1.0 + TOLERANCE) {
            format!("{:.1} times too low", gigabytes / self.1)
        } else if gigabytes < self.0 * (1.0 - TOLERANCE) {
            format!("{:.1} times too high", self.0 / gigabytes)
        } else {
            "right".into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Known {
        Weights,
        Names,
    }

    fn compute(figure: Known) -> Result<Figure, TorchError> {
        Ok(match figure {
            Known::Weights => Figure::bytes(2_000_000_000).with("count", 7),
            Known::Names => Figure::words("none").holding(true),
        })
    }

    fn file(claimed: &str, figure: &str) -> Result<Vec<GuideClaim>, TorchError> {
        let text = format!(
            r#"{{"guide": "9", "claims": [{{"about": "it", "claimed": {claimed},
                "figure": "{figure}", "verdict": "{{count}} of them",
                "verdict_if_it_holds": "so it is"}}]}}"#
        );
        answer("guide.json", &text, compute)
    }

    #[test]
    fn a_claim_is_held_against_its_figure() {
        let claims = file(r#"{"gigabytes": [0.5, 1.0]}"#, "weights").unwrap();
        assert_eq!(claims[0].claimed, "500 MB to 1.00 GB");
        assert_eq!(claims[0].computed_bytes, Some(2_000_000_000));
        assert_eq!(claims[0].verdict, "2.0 times too low: 7 of them");
        let claims = file(r#"{"words": "a lot"}"#, "names").unwrap();
        assert_eq!(claims[0].computed_bytes, None);
        assert_eq!(claims[0].verdict, "so it is");
    }

    #[test]
    fn a_file_that_does_not_fit_its_module_is_named() {
        for (claimed, figure) in [
            (r#"{"words": "a lot"}"#, "weights"),
            (r#"{"gigabytes": [0.5, 1.0]}"#, "names"),
            (r#"{"gigabytes": [0.5, 1.0]}"#, "unknown"),
            (r#"{"gigabytes": [0.5]}"#, "weights"),
        ] {
            let error = file(claimed, figure).unwrap_err().to_string();
            assert!(error.starts_with("guide.json: "), "{error}");
        }
    }
}
