//! DistilBERT, trained as a masked language model: half of BERT's layers, and no token types.

use serde::{Deserialize, Serialize};

use crate::Architecture;
use crate::activation::Activation;
use crate::adapter::Adapters;
use crate::describe::Describe;
use crate::error::ArchitectureError;
use crate::family::{Family, PLAIN};
use crate::fields::Fields;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DistilBert {
    pub vocabulary: u64,
    pub positions: u64,
    pub width: u64,
    pub inner: u64,
    pub layers: u64,
    pub heads: u64,
    pub dropout: f64,
    pub attention_dropout: f64,
    pub activation: Activation,
    pub tied: bool,
}

impl Describe for DistilBert {
    const FAMILY: &'static Family = &DISTILBERT;

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

    /// The head has a layer, a norm, and the bias of its scores.
    fn parameters(&self) -> u64 {
        let (d, inner) = (self.width, self.inner);
        let norm = 2 * d;
        let embeddings = (self.vocabulary + self.positions) * d + norm;
        let layer = 4 * (d * d + d) + norm + d * inner + inner + inner * d + d + norm;
        let decoder = if self.tied { 0 } else { self.vocabulary * d };
        embeddings + self.layers * layer + (d * d + d) + norm + self.vocabulary + decoder
    }
}

static DISTILBERT: Family = Family {
    name: "distilbert",
    title: "DistilBERT",
    model_types: &["distilbert"],
    classes: &["DistilBertForMaskedLM", "DistilBertModel"],
    read: Some(|fields| read(fields).map(Architecture::DistilBert)),
    adapters: Some(&Adapters {
        linear: &["q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2"],
        usual: &["q_lin", "v_lin"],
    }),
    chooses_attention: true,
    ..PLAIN
};

/// Each size goes by its own name and by the one that other families have for it.
fn read(fields: &Fields<'_>) -> Result<DistilBert, ArchitectureError> {
    let width = fields.number(&["dim", "hidden_size"], 768)?;
    Ok(DistilBert {
        vocabulary: fields.number(&["vocab_size"], 30_522)?,
        positions: fields.number(&["max_position_embeddings"], 512)?,
        width,
        inner: fields.number(&["hidden_dim"], 4 * 768)?,
        layers: fields.layers(&["n_layers", "num_hidden_layers"], 6)?,
        heads: fields.heads(&["n_heads", "num_attention_heads"], 12, width)?,
        dropout: fields.probability("dropout", 0.1)?,
        attention_dropout: fields.probability("attention_dropout", 0.1)?,
        activation: fields.activation("activation", Activation::Gelu)?,
        tied: fields.flag("tie_word_embeddings", true)?,
    })
}
