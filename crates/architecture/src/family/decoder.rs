//! The gated decoder that LLaMA, Mistral and Qwen2 share: RMS norms, rotary positions, grouped key
//! heads and a gated feed-forward part. The families differ in their defaults, biases and windows.

use serde::{Deserialize, Serialize};

use crate::activation::Activation;
use crate::adapter::Adapters;
use crate::error::ArchitectureError;
use crate::family::{Family, PLAIN};
use crate::fields::{Fields, LARGEST, MOST_HEADS};
use crate::rotary::{RotaryPositions, RotaryScaling};
use crate::window::Windows;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decoder {
    pub vocabulary: u64,
    pub width: u64,
    /// Of the gated feed-forward part.
    pub inner: u64,
    pub layers: u64,
    pub heads: u64,
    /// Heads of keys and values, shared by groups of query heads.
    pub key_heads: u64,
    pub head_width: u64,
    /// Biases of query, key and value (Qwen2 has them).
    pub attention_bias: bool,
    /// A bias of the output projection.
    pub output_bias: bool,
    pub feed_bias: bool,
    /// RMS norms over each head of query and key (Qwen3 has them).
    pub head_norms: bool,
    pub attention_dropout: f64,
    pub activation: Activation,
    pub tied: bool,
    pub windows: Windows,
    pub rotary: RotaryPositions,
    pub norm_epsilon: f64,
    /// Of new weights.
    pub initial_std: f64,
}

impl Decoder {
    pub fn parameters(&self) -> u64 {
        let bias = |is_there: bool, numbers: u64| if is_there { numbers } else { 0 };
        let queries = self.heads * self.head_width;
        let keys = self.key_heads * self.head_width;
        let attention = self.width * (2 * queries + 2 * keys)
            + bias(self.attention_bias, queries + 2 * keys)
            + bias(self.output_bias, self.width);
        let feed = 3 * self.width * self.inner + bias(self.feed_bias, 2 * self.inner + self.width);
        let norms = 2 * self.width + bias(self.head_norms, 2 * self.head_width);
        let table = self.vocabulary * self.width;
        let tables = if self.tied { table } else { 2 * table };
        tables + self.layers * (attention + feed + norms) + self.width
    }
}

impl Decoder {
    /// The layer's window, where it looks back over one only.
    pub fn window(&self, layer: u64) -> Option<u64> {
        match self.windows {
            Windows::Shared { window } => window,
            Windows::ByKind { sliding } => sliding
                .filter(|sliding| layer >= sliding.first)
                .map(|sliding| sliding.window),
        }
    }

    pub(crate) fn beyond_the_engine(&self) -> Option<String> {
        if let RotaryScaling::Other(name) = &self.rotary.scaling {
            return Some(format!("cinch's engine does not have {name} yet"));
        }
        let known = matches!(self.activation, Activation::Silu | Activation::Relu);
        (!known).then(|| {
            let name = self.activation.name();
            format!("cinch's decoders have gates of silu and relu, and hidden_act is {name}")
        })
    }
}

static ADAPTERS: Adapters = Adapters {
    linear: &[
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ],
    usual: &["q_proj", "v_proj"],
};

/// What families of this kind have in common.
pub(crate) const GATED: Family = Family {
    adapters: Some(&ADAPTERS),
    chooses_attention: true,
    ..PLAIN
};

/// Where the families differ.
pub(crate) struct Defaults {
    pub vocabulary: u64,
    pub width: u64,
    pub inner: u64,
    pub heads: u64,
    /// As many as there are query heads where there is no other default.
    pub key_heads: Option<u64>,
    /// The width over the heads where there is no other default.
    pub head_width: Option<u64>,
    pub biases: Biases,
    pub head_norms: bool,
    /// The longest sequence that the model was made for.
    pub positions: f64,
    pub windows: fn(&Fields<'_>, u64) -> Result<Windows, ArchitectureError>,
}

/// Which linear layers have a bias.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Biases {
    /// As `attention_bias` and `mlp_bias` say, the output projection included.
    Stated,
    None,
    /// Query, key and value always, nothing else ever.
    QueryKeyValue,
}

impl Defaults {
    pub fn read(&self, fields: &Fields<'_>) -> Result<Decoder, ArchitectureError> {
        fields.refuse(&["use_mrope"])?;
        let width = fields.number(&["hidden_size"], self.width)?;
        let heads = fields
            .optional(&["num_attention_heads"], MOST_HEADS)?
            .unwrap_or(self.heads);
        let head_width = match (fields.optional(&["head_dim"], LARGEST)?, self.head_width) {
            (Some(head_width), _) | (None, Some(head_width)) => head_width,
            (None, None) => width / fields.heads(&["num_attention_heads"], self.heads, width)?,
        };
        let key_heads = self.key_heads.unwrap_or(heads);
        let key_heads = fields.number(&["num_key_value_heads"], key_heads)?;
        if !heads.is_multiple_of(key_heads) {
            return Err(fields.problem(
                "num_key_value_heads",
                key_heads,
                &format!("a divisor of the {heads} heads"),
            ));
        }
        if !head_width.is_multiple_of(2) {
            return Err(fields.problem("head_dim", head_width, "an even number"));
        }
        let asked = fields.flag("attention_bias", false)?;
        let (attention_bias, output_bias, feed_bias) = match self.biases {
            Biases::Stated => (asked, asked, fields.flag("mlp_bias", false)?),
            Biases::None => (false, false, false),
            Biases::QueryKeyValue => (true, false, false),
        };
        let layers = fields.layers(&["num_hidden_layers"], 32)?;
        Ok(Decoder {
            vocabulary: fields.number(&["vocab_size"], self.vocabulary)?,
            width,
            inner: fields.number(&["intermediate_size"], self.inner)?,
            layers,
            heads,
            key_heads,
            head_width,
            attention_bias,
            output_bias,
            feed_bias,
            head_norms: self.head_norms,
            attention_dropout: fields.probability("attention_dropout", 0.0)?,
            activation: fields.activation("hidden_act", Activation::Silu)?,
            tied: fields.flag("tie_word_embeddings", false)?,
            windows: (self.windows)(fields, layers)?,
            rotary: {
                let positions = fields.positive("max_position_embeddings")?;
                RotaryPositions::read(fields, positions.unwrap_or(self.positions))?
            },
            norm_epsilon: fields.positive("rms_norm_eps")?.unwrap_or(1e-6),
            initial_std: fields.positive("initializer_range")?.unwrap_or(0.02),
        })
    }
}

/// Every method of a family whose shape is a decoder and nothing more.
macro_rules! describe_decoder {
    ($family:ident, $description:ident) => {
        impl $crate::describe::Describe for $family {
            const FAMILY: &'static $crate::family::Family = &$description;

            fn vocabulary(&self) -> u64 {
                self.0.vocabulary
            }

            fn layers(&self) -> u64 {
                self.0.layers
            }

            fn set_layers(&mut self, layers: u64) {
                self.0.layers = layers;
            }

            fn is_tied(&self) -> bool {
                self.0.tied
            }

            fn parameters(&self) -> u64 {
                self.0.parameters()
            }

            fn beyond_the_engine(&self) -> Option<String> {
                self.0.beyond_the_engine()
            }
        }
    };
}
pub(crate) use describe_decoder;
