//! T5 and mT5, which is T5 with another vocabulary: an encoder and a decoder, trained to continue an input by its labels.

use serde::{Deserialize, Serialize};

use crate::Architecture;
use crate::activation::Activation;
use crate::adapter::Adapters;
use crate::describe::Describe;
use crate::error::ArchitectureError;
use crate::family::{Family, PLAIN};
use crate::fields::{Fields, MOST_HEADS};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct T5 {
    pub variant: T5Variant,
    pub vocabulary: u64,
    pub width: u64,
    /// Of one head; heads need not fill the width.
    pub head_width: u64,
    pub heads: u64,
    pub inner: u64,
    /// Of the encoder.
    pub layers: u64,
    pub decoder_layers: u64,
    /// Distances that have a bias of their own.
    pub buckets: u64,
    pub dropout: f64,
    pub activation: Activation,
    /// Whether the feed-forward layer has a gate: T5 1.1, FLAN and mT5.
    pub gated: bool,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// Whether the decoder keeps keys and values in a cache, in training too: `use_cache`.
    pub caches: bool,
}

/// Whose file of transformers runs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum T5Variant {
    Original,
    Multilingual,
}

impl T5 {
    /// Whether the decoder's result is scaled down before the head: where the first T5 shares the embedding.
    pub fn scales_result(&self) -> bool {
        self.tied && self.variant == T5Variant::Original
    }
}

impl Describe for T5 {
    const FAMILY: &'static Family = &T5_FAMILY;

    fn vocabulary(&self) -> u64 {
        self.vocabulary
    }

    fn layers(&self) -> u64 {
        self.layers
    }

    fn set_layers(&mut self, layers: u64) {
        self.layers = layers;
        self.decoder_layers = layers;
    }

    fn blocks(&self) -> u64 {
        self.layers + self.decoder_layers
    }

    /// No layer has a bias; the first of each stack has the table of distances.
    fn parameters(&self) -> u64 {
        let (d, attended) = (self.width, self.heads * self.head_width);
        let attention = 4 * d * attended + d;
        let feed = (if self.gated { 3 } else { 2 }) * d * self.inner + d;
        let distances = self.buckets * self.heads;
        let encoder = self.layers * (attention + feed) + distances + d;
        let decoder = self.decoder_layers * (2 * attention + feed) + distances + d;
        let tables = if self.tied { 1 } else { 2 };
        tables * self.vocabulary * d + encoder + decoder
    }

    fn adapters(&self) -> Option<&'static Adapters> {
        Some(if self.gated { &GATED } else { &PLAIN_FEED })
    }
}

static PLAIN_FEED: Adapters = Adapters {
    linear: &["q", "k", "v", "o", "wi", "wo"],
    usual: &["q", "v"],
};
static GATED: Adapters = Adapters {
    linear: &["q", "k", "v", "o", "wi_0", "wi_1", "wo"],
    usual: &["q", "v"],
};

static T5_FAMILY: Family = Family {
    name: "t5",
    title: "T5",
    model_types: &["t5", "mt5"],
    classes: &[
        "T5ForConditionalGeneration",
        "T5Model",
        "T5WithLMHeadModel",
        "MT5ForConditionalGeneration",
        "MT5Model",
    ],
    read: Some(|fields| read(fields).map(Architecture::T5)),
    adapters: Some(&PLAIN_FEED),
    chooses_attention: true,
    assumptions: &["labels are as long as the input: both have the length of a sequence"],
    ..PLAIN
};

fn read(fields: &Fields<'_>) -> Result<T5, ArchitectureError> {
    if !fields.flag("is_encoder_decoder", true)? {
        let wanted = "true: one of its stacks alone is another program";
        return Err(fields.problem("is_encoder_decoder", false, wanted));
    }
    let variant = match fields.text("model_type")? {
        "mt5" => T5Variant::Multilingual,
        _ => T5Variant::Original,
    };
    let [vocabulary, inner, layers, heads] = match variant {
        T5Variant::Original => [32_128, 2048, 6, 8],
        T5Variant::Multilingual => [250_112, 1024, 8, 6],
    };
    let layers = fields.layers(&["num_layers", "num_hidden_layers"], layers)?;
    let (activation, gated) = feed_forward(fields, variant)?;
    let heads_of = ["num_heads", "num_attention_heads"];
    Ok(T5 {
        variant,
        vocabulary: fields.number(&["vocab_size"], vocabulary)?,
        width: fields.number(&["d_model", "hidden_size"], 512)?,
        head_width: fields.number(&["d_kv", "head_dim"], 64)?,
        heads: fields.optional(&heads_of, MOST_HEADS)?.unwrap_or(heads),
        inner: fields.number(&["d_ff"], inner)?,
        layers,
        decoder_layers: fields.layers(&["num_decoder_layers"], layers)?,
        buckets: fields.number(&["relative_attention_num_buckets"], 32)?,
        dropout: fields.probability("dropout_rate", 0.1)?,
        activation,
        gated,
        tied: fields.flag("tie_word_embeddings", true)?,
        caches: fields.flag("use_cache", true)?,
    })
}

/// `feed_forward_proj`: an activation, or `gated-` and one. `gated-gelu` is the formula that is written out.
fn feed_forward(
    fields: &Fields<'_>,
    variant: T5Variant,
) -> Result<(Activation, bool), ArchitectureError> {
    const KEY: &str = "feed_forward_proj";
    let usual = match variant {
        T5Variant::Original => "relu",
        T5Variant::Multilingual => "gated-gelu",
    };
    let written = match fields.0.get(KEY) {
        None | Some(serde_json::Value::Null) => usual,
        Some(_) => fields.text(KEY)?,
    };
    let (name, gated) = match written.strip_prefix("gated-") {
        Some(name) => (name, true),
        None => (written, false),
    };
    let activation = match written {
        "gated-gelu" => Some(Activation::GeluNew),
        _ => Activation::named(name),
    };
    let wanted = || {
        format!(
            "one of {}, or `gated-` and one of them",
            Activation::names()
        )
    };
    activation
        .map(|activation| (activation, gated))
        .ok_or_else(|| fields.problem(KEY, written, &wanted()))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::model::Model;

    fn read(config: &Value) -> Result<T5, String> {
        let model = Model::of_config(config, "a model", "config.json");
        match model.map_err(|problem| problem.to_string())?.architecture {
            Architecture::T5(shape) => Ok(shape),
            other => Err(format!("{other:?}")),
        }
    }

    /// FLAN-T5 has the gate and a head of its own; transformers counts as many weights.
    #[test]
    fn flan_t5_base_is_read() {
        let config = json!({
            "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_ff": 2048, "d_kv": 64, "d_model": 768,
            "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1, "feed_forward_proj": "gated-gelu",
            "initializer_factor": 1.0, "is_encoder_decoder": true, "layer_norm_epsilon": 1e-06, "n_positions": 512,
            "num_decoder_layers": 12, "num_heads": 12, "num_layers": 12, "output_past": true, "pad_token_id": 0,
            "relative_attention_max_distance": 128, "relative_attention_num_buckets": 32, "tie_word_embeddings": false,
            "use_cache": true, "vocab_size": 32128,
        });
        let flan = read(&config).unwrap();
        assert_eq!(flan.parameters(), 247_577_856);
        assert!(flan.gated && !flan.tied && !flan.scales_result());
        assert_eq!(flan.activation, Activation::GeluNew);
        assert_eq!(flan.adapters().unwrap().linear.len(), 7);
    }

    #[test]
    fn mt5_has_defaults_of_its_own() {
        let mt5 = read(&json!({"model_type": "mt5", "tie_word_embeddings": false})).unwrap();
        assert_eq!(mt5.parameters(), 300_176_768);
        let tied = read(&json!({"model_type": "mt5"})).unwrap();
        assert!(tied.tied && !tied.scales_result());
    }

    #[test]
    fn what_is_not_known_is_refused_by_its_name() {
        for (key, value, said) in [
            ("feed_forward_proj", json!("gated-mish"), "gated-mish"),
            ("feed_forward_proj", json!("reglu"), "feed_forward_proj"),
            ("feed_forward_proj", json!(3), "feed_forward_proj"),
            ("is_encoder_decoder", json!(false), "is_encoder_decoder"),
            (
                "architectures",
                json!(["T5ForTokenClassification"]),
                "T5ForTokenClassification",
            ),
            ("d_kv", json!(0), "d_kv"),
        ] {
            let problem = read(&json!({"model_type": "t5", key: value})).unwrap_err();
            assert!(problem.contains(said), "{problem}");
        }
    }
}
