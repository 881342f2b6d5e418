//! GPT-NeoX and Pythia: attention and feed-forward part beside each other, from one input, and rotary positions on a part of
//! each head.

use serde::{Deserialize, Serialize};

use crate::Architecture;
use crate::activation::Activation;
use crate::adapter::Adapters;
use crate::describe::Describe;
use crate::error::ArchitectureError;
use crate::family::{Family, PLAIN};
use crate::fields::Fields;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GptNeoX {
    pub vocabulary: u64,
    pub width: u64,
    pub inner: u64,
    pub layers: u64,
    pub heads: u64,
    /// Numbers of a head that are turned by its position.
    pub rotary_width: u64,
    pub attention_bias: bool,
    /// Both parts of a layer read its input, rather than one after the other.
    pub parallel: bool,
    pub hidden_dropout: f64,
    pub attention_dropout: f64,
    pub activation: Activation,
    pub tied: bool,
}

impl Describe for GptNeoX {
    const FAMILY: &'static Family = &GPT_NEOX;

    fn vocabulary(&self) -> u64 {
        self.vocabulary
    }

    fn layers(&self) -> u64 {
        self.layers
    }

    fn set_layers(&mut self, layers: u64) {
        self.layers = layers;
    }

    fn parameters(&self) -> u64 {
        let (d, inner) = (self.width, self.inner);
        let norm = 2 * d;
        let bias = if self.attention_bias { 4 * d } else { 0 };
        let layer = 4 * d * d + bias + d * inner + inner + inner * d + d + 2 * norm;
        let table = self.vocabulary * d;
        let tables = if self.tied { table } else { 2 * table };
        tables + self.layers * layer + norm
    }
}

static GPT_NEOX: Family = Family {
    name: "gpt-neox",
    title: "GPT-NeoX",
    model_types: &["gpt_neox"],
    classes: &["GPTNeoXForCausalLM"],
    read: Some(|fields| read(fields).map(Architecture::GptNeoX)),
    adapters: Some(&Adapters {
        linear: &["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
        usual: &["query_key_value"],
    }),
    chooses_attention: true,
    ..PLAIN
};

fn read(fields: &Fields<'_>) -> Result<GptNeoX, ArchitectureError> {
    let width = fields.number(&["hidden_size"], 6144)?;
    let heads = fields.heads(&["num_attention_heads"], 64, width)?;
    let stated = fields.rotary_share()?.or(fields.positive("rotary_pct")?);
    Ok(GptNeoX {
        vocabulary: fields.number(&["vocab_size"], 50_432)?,
        width,
        inner: fields.number(&["intermediate_size"], 24_576)?,
        layers: fields.layers(&["num_hidden_layers"], 44)?,
        heads,
        rotary_width: fields.rotary_width(width / heads, stated.unwrap_or(0.25))?,
        attention_bias: fields.flag("attention_bias", true)?,
        parallel: fields.flag("use_parallel_residual", true)?,
        hidden_dropout: fields.probability("hidden_dropout", 0.0)?,
        attention_dropout: fields.probability("attention_dropout", 0.0)?,
        activation: fields.activation("hidden_act", Activation::Gelu)?,
        tied: fields.flag("tie_word_embeddings", false)?,
    })
}
