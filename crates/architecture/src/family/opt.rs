//! OPT: learned positions, norms before or (350M) after each part of a layer, and embeddings that may be narrower than the
//! layers.

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
pub struct Opt {
    pub vocabulary: u64,
    pub positions: u64,
    /// Of a token's embedding; brought to the layers' width by a projection where it is another.
    pub embedding_width: u64,
    pub width: u64,
    pub inner: u64,
    pub layers: u64,
    pub heads: u64,
    /// Norms stand before attention and feed-forward part, rather than after them.
    pub norm_first: bool,
    /// A norm after the last layer.
    pub final_norm: bool,
    pub biases: bool,
    pub dropout: f64,
    pub attention_dropout: f64,
    pub activation: Activation,
    pub tied: bool,
}

impl Opt {
    /// Rows of the position table before that of the first position.
    pub const OFFSET: u64 = 2;

    pub fn is_projected(&self) -> bool {
        self.embedding_width != self.width
    }
}

impl Describe for Opt {
    const FAMILY: &'static Family = &OPT;

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
        let (d, inner) = (self.width, self.inner);
        let bias = |numbers: u64| if self.biases { numbers } else { 0 };
        let norm = 2 * d;
        let table = self.vocabulary * self.embedding_width;
        let tables = if self.tied { table } else { 2 * table };
        let positions = (self.positions + Opt::OFFSET) * d;
        let projections = if self.is_projected() {
            2 * self.embedding_width * d
        } else {
            0
        };
        let attention = 4 * (d * d + bias(d)) + norm;
        let feed = d * inner + bias(inner) + inner * d + bias(d) + norm;
        let last = if self.final_norm { norm } else { 0 };
        tables + positions + projections + self.layers * (attention + feed) + last
    }
}

static OPT: Family = Family {
    name: "opt",
    title: "OPT",
    model_types: &["opt"],
    classes: &["OPTForCausalLM"],
    read: Some(|fields| read(fields).map(Architecture::Opt)),
    adapters: Some(&Adapters {
        linear: &["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
        usual: &["q_proj", "v_proj"],
    }),
    chooses_attention: true,
    ..PLAIN
};

fn read(fields: &Fields<'_>) -> Result<Opt, ArchitectureError> {
    if fields.probability("layerdrop", 0.0)? > 0.0 {
        let value = fields.0.get("layerdrop").unwrap_or(&Value::Null);
        let wanted = "0: which layers are left out, only chance decides";
        return Err(fields.problem("layerdrop", value, wanted));
    }
    if !fields.flag("layer_norm_elementwise_affine", true)? {
        let wanted = "true: the replay has norms with weights only";
        return Err(fields.problem("layer_norm_elementwise_affine", false, wanted));
    }
    let width = fields.number(&["hidden_size"], 768)?;
    let norm_first = fields.flag("do_layer_norm_before", true)?;
    Ok(Opt {
        vocabulary: fields.number(&["vocab_size"], 50_272)?,
        positions: fields.number(&["max_position_embeddings"], 2048)?,
        embedding_width: fields.number(&["word_embed_proj_dim"], width)?,
        width,
        inner: fields.number(&["ffn_dim"], 3072)?,
        layers: fields.layers(&["num_hidden_layers"], 12)?,
        heads: fields.heads(&["num_attention_heads"], 12, width)?,
        norm_first,
        final_norm: norm_first && !fields.flag("_remove_final_layer_norm", false)?,
        biases: fields.flag("enable_bias", true)?,
        dropout: fields.probability("dropout", 0.1)?,
        attention_dropout: fields.probability("attention_dropout", 0.0)?,
        activation: fields.activation("activation_function", Activation::Relu)?,
        tied: fields.flag("tie_word_embeddings", true)?,
    })
}
