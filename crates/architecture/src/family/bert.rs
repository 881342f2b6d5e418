//! BERT and its small relatives (MiniLM), trained as masked language models.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Architecture;
use crate::activation::Activation;
use crate::adapter::Adapters;
use crate::describe::Describe;
use crate::error::ArchitectureError;
use crate::family::{Family, PLAIN};
use crate::fields::Fields;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bert {
    pub vocabulary: u64,
    pub positions: u64,
    pub token_types: u64,
    pub width: u64,
    pub inner: u64,
    pub layers: u64,
    pub heads: u64,
    pub hidden_dropout: f64,
    pub attention_dropout: f64,
    pub activation: Activation,
    /// Added to the variance in LayerNorm.
    #[serde(default = "norm_epsilon")]
    pub norm_epsilon: f64,
    pub tied: bool,
}

fn norm_epsilon() -> f64 {
    1e-12
}

/// How positions are told, of which there is one way here.
const POSITIONS: &str = "position_embedding_type";

impl Default for Bert {
    fn default() -> Bert {
        Bert {
            vocabulary: 30522,
            positions: 512,
            token_types: 2,
            width: 768,
            inner: 3072,
            layers: 12,
            heads: 12,
            hidden_dropout: 0.1,
            attention_dropout: 0.1,
            activation: Activation::Gelu,
            norm_epsilon: norm_epsilon(),
            tied: true,
        }
    }
}

impl Bert {
    /// Embeddings and layers, without pooler and head.
    pub fn encoder_parameters(&self) -> u64 {
        let (d, inner) = (self.width, self.inner);
        let norm = 2 * d;
        let embeddings = (self.vocabulary + self.positions + self.token_types) * d + norm;
        let attention = 4 * (d * d + d) + norm;
        let feed = d * inner + inner + inner * d + d + norm;
        embeddings + self.layers * (attention + feed)
    }

    /// What makes it another encoder than those that cinch's engine computes.
    pub fn beyond_the_engine(&self) -> Option<String> {
        let known = [
            Activation::Gelu,
            Activation::GeluNew,
            Activation::Relu,
            Activation::Silu,
        ];
        (!known.contains(&self.activation))
            .then(|| "an encoder with another activation than GELU, ReLU or SiLU".to_owned())
    }

    /// What a `config.json` says, and this where it is silent.
    pub(crate) fn read(&self, fields: &Fields<'_>) -> Result<Bert, ArchitectureError> {
        fields.refuse(&["add_cross_attention", "is_decoder"])?;
        match fields.0.get(POSITIONS) {
            None | Some(Value::Null) => {}
            Some(kind) if kind == "absolute" => {}
            Some(kind) => return Err(fields.problem(POSITIONS, kind, "absolute")),
        }
        let width = fields.number(&["hidden_size"], self.width)?;
        Ok(Bert {
            vocabulary: fields.number(&["vocab_size"], self.vocabulary)?,
            positions: fields.number(&["max_position_embeddings"], self.positions)?,
            token_types: fields.number(&["type_vocab_size"], self.token_types)?,
            width,
            inner: fields.number(&["intermediate_size"], self.inner)?,
            layers: fields.layers(&["num_hidden_layers"], self.layers)?,
            heads: fields.heads(&["num_attention_heads"], self.heads, width)?,
            hidden_dropout: fields.probability("hidden_dropout_prob", self.hidden_dropout)?,
            attention_dropout: fields
                .probability("attention_probs_dropout_prob", self.attention_dropout)?,
            activation: fields.activation("hidden_act", self.activation)?,
            norm_epsilon: fields
                .positive("layer_norm_eps")?
                .unwrap_or(self.norm_epsilon),
            tied: fields.flag("tie_word_embeddings", true)?,
        })
    }
}

impl Describe for Bert {
    const FAMILY: &'static Family = &BERT;

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

    fn is_masked(&self) -> bool {
        true
    }

    fn beyond_the_engine(&self) -> Option<String> {
        Bert::beyond_the_engine(self)
    }

    /// The masked language model: its head has a layer, a norm and a bias of its own.
    fn parameters(&self) -> u64 {
        let d = self.width;
        let decoder = if self.tied { 0 } else { self.vocabulary * d };
        self.encoder_parameters() + (d * d + d) + 2 * d + self.vocabulary + decoder
    }
}

pub(crate) static ADAPTERS: Adapters = Adapters {
    linear: &["query", "key", "value", "dense"],
    usual: &["query", "value"],
};

static BERT: Family = Family {
    name: "bert",
    title: "BERT",
    model_types: &["bert"],
    classes: &["BertForMaskedLM", "BertForPreTraining", "BertModel"],
    read: Some(|fields| Bert::default().read(fields).map(Architecture::Bert)),
    adapters: Some(&ADAPTERS),
    chooses_attention: true,
    ..PLAIN
};
