//! Rotary positions as a `config.json` describes them, in the form of transformers 5
//! (`rope_parameters`) or the one before (`rope_theta` and `rope_scaling`).

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::ArchitectureError;
use crate::fields::Fields;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RotaryPositions {
    pub base: f64,
    pub scaling: RotaryScaling,
}

/// How frequencies are changed for sequences longer than a model was first trained on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum RotaryScaling {
    None,
    Linear {
        factor: f64,
    },
    /// The base grows with the sequence once that is longer than `original`.
    Dynamic {
        factor: f64,
        original: f64,
    },
    Llama3 {
        factor: f64,
        low: f64,
        high: f64,
        original: f64,
    },
    Yarn {
        factor: f64,
        original: f64,
        fast: f64,
        slow: f64,
        /// Of cosines and sines.
        attention: f64,
        truncate: bool,
    },
    /// One that cinch's engine does not have, by its name.
    Other(String),
}

impl RotaryPositions {
    /// What transformers takes where a file is silent.
    const BASE: f64 = 10_000.0;

    pub(crate) fn read(fields: &Fields<'_>, positions: f64) -> Result<Self, ArchitectureError> {
        let parameters = ["rope_parameters", "rope_scaling"].into_iter();
        let found = parameters
            .filter_map(|key| fields.0.get(key).map(|value| (key, value)))
            .find(|(_, value)| !value.is_null());
        let top = fields.positive("rope_theta")?;
        let Some((key, value)) = found else {
            return Ok(Self {
                base: top.unwrap_or(Self::BASE),
                scaling: RotaryScaling::None,
            });
        };
        if !value.is_object() {
            return Err(fields.problem(key, value, "an object, or null"));
        }
        let inner = Fields(value);
        let base = inner.positive("rope_theta")?.or(top).unwrap_or(Self::BASE);
        let name = ["rope_type", "type"].into_iter();
        let name = name.filter_map(|key| value.get(key)?.as_str()).next();
        let scaling = scaling(&inner, name.unwrap_or("default"), positions)?;
        Ok(Self { base, scaling })
    }
}

fn scaling(
    fields: &Fields<'_>,
    name: &str,
    positions: f64,
) -> Result<RotaryScaling, ArchitectureError> {
    if let Some(share) = fields.positive("partial_rotary_factor")?
        && share != 1.0
    {
        return Ok(RotaryScaling::Other(format!(
            "partial_rotary_factor {share}"
        )));
    }
    let needed = |key: &str| {
        let found = fields.positive(key)?;
        found.ok_or_else(|| fields.problem(key, Value::Null, "a positive number"))
    };
    let original = fields
        .positive("original_max_position_embeddings")?
        .unwrap_or(positions);
    Ok(match name {
        "default" => RotaryScaling::None,
        "linear" => RotaryScaling::Linear {
            factor: needed("factor")?,
        },
        "dynamic" => RotaryScaling::Dynamic {
            factor: needed("factor")?,
            original: positions,
        },
        "llama3" => RotaryScaling::Llama3 {
            factor: needed("factor")?,
            low: needed("low_freq_factor")?,
            high: needed("high_freq_factor")?,
            original,
        },
        "yarn" => {
            let factor = needed("factor")?;
            let magnitude = |scale: f64| match factor > 1.0 {
                true => 0.1 * scale * factor.ln() + 1.0,
                false => 1.0,
            };
            let scales = fields.positive("mscale")?;
            let scales = scales.zip(fields.positive("mscale_all_dim")?);
            RotaryScaling::Yarn {
                factor,
                original,
                fast: fields.positive("beta_fast")?.unwrap_or(32.0),
                slow: fields.positive("beta_slow")?.unwrap_or(1.0),
                attention: match (fields.positive("attention_factor")?, scales) {
                    (Some(factor), _) => factor,
                    (None, Some((scale, all))) => magnitude(scale) / magnitude(all),
                    (None, None) => magnitude(1.0),
                },
                truncate: fields.flag("truncate", true)?,
            }
        }
        other => RotaryScaling::Other(format!("rope_type {other}")),
    })
}
