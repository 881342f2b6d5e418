//! GPT-2: token and learned position embedding, pre-norm blocks of causal attention and a
//! feed-forward part, and a head tied to the token embedding.

use serde::{Deserialize, Serialize};

use crate::activation::Activation;
use crate::describe::Describe;
use crate::error::ArchitectureError;
use crate::family::{Family, NamedSize, PLAIN};
use crate::fields::{Fields, LARGEST};
use crate::setting::{
    MOST_HEADS, MOST_LAYERS, MOST_TOKENS, MOST_WIDTH, Number, Range, count, shape_setting,
};
use crate::{Architecture, ShapeSetting};

/// GPT-2's byte-pair vocabulary.
pub(crate) const VOCABULARY: u64 = 50257;
/// The 256 bytes and an end-of-text token.
pub(crate) const BYTES_VOCABULARY: u64 = 257;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gpt2 {
    #[serde(rename = "vocab_size")]
    pub vocabulary: u64,
    #[serde(rename = "max_seq_len")]
    pub positions: u64,
    #[serde(rename = "d_model")]
    pub width: u64,
    #[serde(rename = "n_layers")]
    pub layers: u64,
    #[serde(rename = "n_heads")]
    pub heads: u64,
    /// Of the feed-forward part; four times the width unless given.
    #[serde(default)]
    pub inner: Option<u64>,
    #[serde(rename = "dropout")]
    pub residual_dropout: f64,
    /// As the residual one unless given.
    #[serde(default)]
    pub embedding_dropout: Option<f64>,
    #[serde(default)]
    pub attention_dropout: Option<f64>,
    #[serde(rename = "layer_norm_eps")]
    pub norm_epsilon: f64,
    #[serde(default = "usual_activation")]
    pub activation: Activation,
    #[serde(default = "usual_tying")]
    pub tied: bool,
}

fn usual_activation() -> Activation {
    Activation::GeluNew
}

fn usual_tying() -> bool {
    true
}

impl Default for Gpt2 {
    fn default() -> Gpt2 {
        small()
    }
}

const fn small() -> Gpt2 {
    Gpt2 {
        vocabulary: VOCABULARY,
        positions: 1024,
        width: 768,
        layers: 12,
        heads: 12,
        inner: None,
        residual_dropout: 0.1,
        embedding_dropout: None,
        attention_dropout: None,
        norm_epsilon: 1e-5,
        activation: Activation::GeluNew,
        tied: true,
    }
}

impl Gpt2 {
    pub fn inner(&self) -> u64 {
        self.inner.unwrap_or(4 * self.width)
    }

    pub fn embedding_dropout(&self) -> f64 {
        self.embedding_dropout.unwrap_or(self.residual_dropout)
    }

    pub fn attention_dropout(&self) -> f64 {
        self.attention_dropout.unwrap_or(self.residual_dropout)
    }
}

impl Describe for Gpt2 {
    const FAMILY: &'static Family = &GPT2;

    fn vocabulary(&self) -> u64 {
        self.vocabulary
    }

    fn layers(&self) -> u64 {
        self.layers
    }

    fn set_layers(&mut self, layers: u64) {
        self.layers = layers;
    }

    fn positions(&self) -> Option<u64> {
        Some(self.positions)
    }

    fn parameters(&self) -> u64 {
        let (d, inner) = (self.width, self.inner());
        let norms = 2 * 2 * d;
        let attention = (d * 3 * d + 3 * d) + (d * d + d);
        let feed = (d * inner + inner) + (inner * d + d);
        let head = match self.tied {
            true => 0,
            false => self.vocabulary * d,
        };
        let embeddings = (self.vocabulary + self.positions) * d;
        embeddings + self.layers * (norms + attention + feed) + 2 * d + head
    }

    fn has_the_weights_of(&self, other: &Architecture) -> bool {
        let Architecture::Gpt2(other) = other else {
            return false;
        };
        let shape = |model: &Gpt2| {
            let inner = model.inner();
            (
                model.width,
                model.layers,
                model.vocabulary,
                model.heads,
                inner,
                model.tied,
            )
        };
        shape(self) == shape(other)
    }

    fn beyond_the_engine(&self) -> Option<String> {
        let only = |what: &str| Some(format!("cinch's GPT-2 has {what} only"));
        let rate = self.residual_dropout;
        if self.inner() != 4 * self.width {
            only("a feed-forward part of four times the width")
        } else if self.embedding_dropout() != rate || self.attention_dropout() != rate {
            only("one dropout rate for all its parts")
        } else if !matches!(self.activation, Activation::Gelu | Activation::GeluNew) {
            only("GELU")
        } else if !self.tied {
            only("a head that is tied to the token embedding")
        } else {
            None
        }
    }
}

static GPT2: Family = Family {
    name: "gpt2",
    title: "GPT-2",
    model_types: &["gpt2"],
    classes: &["GPT2LMHeadModel"],
    read: Some(|fields| read(fields).map(Architecture::Gpt2)),
    settings: SETTINGS,
    sizes: SIZES,
    chooses_attention: true,
    ..PLAIN
};

fn read(fields: &Fields<'_>) -> Result<Gpt2, ArchitectureError> {
    let default = small();
    fields.refuse(&["add_cross_attention", "reorder_and_upcast_attn"])?;
    let width = fields.number(&["n_embd", "hidden_size"], default.width)?;
    let residual = fields.probability("resid_pdrop", default.residual_dropout)?;
    Ok(Gpt2 {
        vocabulary: fields.number(&["vocab_size"], default.vocabulary)?,
        positions: fields.number(
            &["n_positions", "max_position_embeddings"],
            default.positions,
        )?,
        width,
        layers: fields.layers(&["n_layer", "num_hidden_layers"], default.layers)?,
        heads: fields.heads(&["n_head", "num_attention_heads"], default.heads, width)?,
        inner: fields.optional(&["n_inner"], LARGEST)?,
        residual_dropout: residual,
        embedding_dropout: Some(fields.probability("embd_pdrop", default.residual_dropout)?),
        attention_dropout: Some(fields.probability("attn_pdrop", default.residual_dropout)?),
        norm_epsilon: default.norm_epsilon,
        activation: fields.activation("activation_function", default.activation)?,
        tied: fields.flag("tie_word_embeddings", true)?,
    })
}

const SETTINGS: &[ShapeSetting] = &[
    shape_setting!(Gpt2.width: whole, "d_model", ["n_embd"], count(MOST_WIDTH), "Width of the residual stream"),
    shape_setting!(Gpt2.layers: whole, "n_layers", ["n_layer"], count(MOST_LAYERS), "Number of blocks"),
    shape_setting!(Gpt2.heads: whole, "n_heads", ["n_head"], count(MOST_HEADS), "Attention heads; they divide d_model"),
    ShapeSetting {
        key: "model.dropout",
        aliases: &[],
        range: Range::Rate,
        help: "Dropout rate",
        get: |architecture| match architecture {
            Architecture::Gpt2(shape) => Some(shape.residual_dropout.into()),
            _ => None,
        },
        // One rate for embedding, attention and residual stream.
        set: |architecture, number| {
            if let (Architecture::Gpt2(shape), Number::Real(rate)) = (architecture, number) {
                shape.residual_dropout = rate;
                shape.embedding_dropout = None;
                shape.attention_dropout = None;
            }
        },
    },
    shape_setting!(Gpt2.positions: whole, "max_seq_len", ["n_positions"], count(MOST_TOKENS), "Positions the model has"),
    shape_setting!(Gpt2.vocabulary: whole, "vocab_size", [], Range::Whole { min: 2, max: MOST_TOKENS }, "Tokens in the vocabulary"),
    shape_setting!(Gpt2.norm_epsilon: real, "layer_norm_eps", ["layer_norm_epsilon"], Range::Positive, "Added to the variance in LayerNorm"),
];

macro_rules! size {
    ($name:literal, $aliases:expr, $width:literal, $layers:literal, $heads:literal) => {
        NamedSize {
            name: $name,
            aliases: &$aliases,
            shape: || {
                Architecture::Gpt2(Gpt2 {
                    width: $width,
                    layers: $layers,
                    heads: $heads,
                    ..small()
                })
            },
            tokenizer: "gpt2",
        }
    };
}

static SIZES: &[NamedSize] = &[
    NamedSize {
        name: "tiny",
        aliases: &[],
        shape: || {
            Architecture::Gpt2(Gpt2 {
                vocabulary: BYTES_VOCABULARY,
                positions: 256,
                width: 128,
                layers: 4,
                heads: 4,
                ..small()
            })
        },
        tokenizer: "bytes",
    },
    size!("gpt2", ["small", "124m"], 768, 12, 12),
    size!("medium", ["gpt2-medium", "355m"], 1024, 24, 16),
    size!("large", ["gpt2-large", "774m"], 1280, 36, 20),
    size!("xl", ["gpt2-xl", "1558m", "1.5b"], 1600, 48, 25),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_those_of_the_published_sizes() {
        for (name, parameters) in [
            ("tiny", 859_008),
            ("small", 124_439_808),
            ("355M", 354_823_168),
            ("gpt2_large", 774_030_080),
            ("xl", 1_557_611_200),
        ] {
            let size = GPT2.size(name).unwrap();
            assert_eq!((size.shape)().parameters(), parameters, "{name}");
        }
        assert_eq!(GPT2.nearest_size("mediun"), Some("medium"));
    }

    #[test]
    fn what_the_engine_lacks_is_said() {
        let lacks = |shape: Gpt2| shape.beyond_the_engine();
        assert_eq!(lacks(small()), None);
        for other in [
            Gpt2 {
                inner: Some(100),
                ..small()
            },
            Gpt2 {
                attention_dropout: Some(0.0),
                ..small()
            },
            Gpt2 {
                activation: Activation::Relu,
                ..small()
            },
            Gpt2 {
                tied: false,
                ..small()
            },
        ] {
            assert!(lacks(other.clone()).is_some(), "{other:?}");
        }
    }
}
