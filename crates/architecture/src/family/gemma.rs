//! What Gemma 2 and Gemma 3 share: the gated decoder with norms before and after each part of a layer, scaled embeddings,
//! and layers of two kinds, of which one looks back over a window only.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::activation::Activation;
use crate::error::ArchitectureError;
use crate::family::decoder::{Decoder, Defaults};
use crate::fields::{Fields, LARGEST};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gemma {
    pub decoder: Decoder,
    /// Of the layers that have one.
    pub window: u64,
    /// Of each layer, whether it looks back over the window only.
    pub slides: Vec<bool>,
    /// Whether scores of eager attention are capped.
    pub caps_scores: bool,
    pub caps_logits: bool,
}

impl Gemma {
    /// Two norms more than the decoder has in each layer.
    pub fn parameters(&self) -> u64 {
        self.decoder.parameters() + self.decoder.layers * 2 * self.decoder.width
    }

    pub(crate) fn set_layers(&mut self, layers: u64) {
        let kinds = self.slides.iter().copied().cycle();
        self.slides = kinds.take(layers as usize).collect();
        self.decoder.layers = layers;
    }
}

/// Where the two differ, besides the decoder.
pub(crate) struct GemmaDefaults {
    pub decoder: Defaults,
    pub layers: u64,
    /// Every so many-th layer sees everything.
    pub pattern: u64,
    pub is_capped: bool,
}

const WINDOW: u64 = 4096;

impl GemmaDefaults {
    pub fn read(&self, fields: &Fields<'_>) -> Result<Gemma, ArchitectureError> {
        fields.refuse(&["use_bidirectional_attention"])?;
        let mut decoder = self.decoder.read(fields)?;
        decoder.layers = fields.layers(&["num_hidden_layers"], self.layers)?;
        decoder.activation = fields.activation("hidden_activation", Activation::Gelu)?;
        decoder.tied = fields.flag("tie_word_embeddings", true)?;
        let cap = |key: &str| match fields.0.get(key) {
            None => Ok(self.is_capped),
            Some(_) => fields.positive(key).map(|cap| cap.is_some()),
        };
        Ok(Gemma {
            window: fields.number(&["sliding_window"], WINDOW)?,
            slides: self.slides(fields, decoder.layers)?,
            caps_scores: cap("attn_logit_softcapping")?,
            caps_logits: cap("final_logit_softcapping")?,
            decoder,
        })
    }

    fn slides(&self, fields: &Fields<'_>, layers: u64) -> Result<Vec<bool>, ArchitectureError> {
        if let Some(Value::Array(kinds)) = fields.0.get("layer_types") {
            let slides: Option<Vec<bool>> = kinds
                .iter()
                .map(|kind| match kind.as_str() {
                    Some("sliding_attention") => Some(true),
                    Some("full_attention") => Some(false),
                    _ => None,
                })
                .collect();
            return slides
                .filter(|slides| slides.len() as u64 >= layers)
                .map(|slides| slides[..layers as usize].to_vec())
                .ok_or_else(|| {
                    let wanted = format!(
                        "sliding_attention or full_attention for each of the {layers} layers"
                    );
                    fields.problem("layer_types", Value::Array(kinds.clone()), &wanted)
                });
        }
        let keys = ["sliding_window_pattern", "_sliding_window_pattern"];
        let pattern = fields.optional(&keys, LARGEST)?.unwrap_or(self.pattern);
        Ok((1..=layers).map(|layer| layer % pattern != 0).collect())
    }
}

/// Every method of a family whose shape is this and nothing more.
macro_rules! describe_gemma {
    ($family:ident, $description:ident) => {
        impl $crate::describe::Describe for $family {
            const FAMILY: &'static $crate::family::Family = &$description;

            fn vocabulary(&self) -> u64 {
                self.0.decoder.vocabulary
            }

            fn layers(&self) -> u64 {
                self.0.decoder.layers
            }

            fn set_layers(&mut self, layers: u64) {
                self.0.set_layers(layers);
            }

            fn parameters(&self) -> u64 {
                self.0.parameters()
            }
        }
    };
}
pub(crate) use describe_gemma;
