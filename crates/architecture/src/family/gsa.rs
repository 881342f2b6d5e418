//! A decoder with gated sparse attention: an indexer chooses the keys that each query sees.

use serde::{Deserialize, Serialize};

use crate::Architecture;
use crate::describe::Describe;
use crate::family::{Family, LayerCheckpointing, NamedSize, PLAIN};
use crate::setting::{
    MOST_HEADS, MOST_LAYERS, MOST_STEPS, MOST_TOKENS, MOST_WIDTH, Range, ShapeSetting, count,
    shape_setting,
};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gsa {
    pub vocabulary: u64,
    pub width: u64,
    pub layers: u64,
    pub heads: u64,
    pub key_heads: u64,
    pub inner: u64,
    pub indexer_heads: u64,
    pub indexer_width: u64,
    /// The most keys that a query attends to.
    pub most_keys: u64,
    /// The fewest, of those that it sees.
    pub least_keys: u64,
    /// Those of a query whose scores vary as much as the average query's; of every query where
    /// the number is not adaptive.
    pub base_keys: u64,
    /// Whether the number of keys follows the variance of a query's scores.
    pub adaptive_keys: bool,
    /// Whether values, and what attention makes of them, pass a gate.
    pub value_gate: bool,
    pub output_gate: bool,
    /// Whether the indexer is fitted to the attention. The published model's gets no gradient.
    pub train_indexer: bool,
    /// Steps in which attention sees all keys, while the indexer learns what it looks at.
    pub indexer_warmup: u64,
    /// What the learning rate is multiplied by for the indexer.
    pub indexer_rate: f64,
}

impl Default for Gsa {
    fn default() -> Gsa {
        low_memory()
    }
}

const fn low_memory() -> Gsa {
    Gsa {
        vocabulary: 151_936,
        width: 512,
        layers: 8,
        heads: 8,
        key_heads: 2,
        inner: 1536,
        indexer_heads: 4,
        indexer_width: 64,
        most_keys: 1024,
        least_keys: 64,
        base_keys: 512,
        adaptive_keys: true,
        value_gate: true,
        output_gate: true,
        train_indexer: true,
        indexer_warmup: 1000,
        indexer_rate: 10.0,
    }
}

/// Small enough to learn letters on a processor.
const fn tiny() -> Gsa {
    Gsa {
        // The bytes, and the end of a text.
        vocabulary: 257,
        width: 96,
        layers: 3,
        heads: 4,
        key_heads: 2,
        inner: 256,
        indexer_heads: 2,
        indexer_width: 16,
        most_keys: 48,
        least_keys: 8,
        base_keys: 24,
        indexer_warmup: 100,
        ..low_memory()
    }
}

impl Describe for Gsa {
    const FAMILY: &'static Family = &GSA;

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
        let d = self.width;
        let keys = d / self.heads * self.key_heads;
        let attention = d * d + 2 * d * keys + d * d;
        // Gates of values and outputs, with biases.
        let gate = |used: bool, width: u64| if used { d * width + width } else { 0 };
        let gates = gate(self.value_gate, keys) + gate(self.output_gate, d);
        let indexer = d * self.indexer_heads * self.indexer_width
            + d * self.indexer_width
            + (d * self.indexer_heads + self.indexer_heads)
            + self.indexer_heads;
        let feed = 3 * d * self.inner;
        let layer = attention + gates + indexer + feed + 2 * d;
        2 * self.vocabulary * d + self.layers * layer + d
    }

    fn depends_on_micro_batch(&self) -> Option<&'static str> {
        self.adaptive_keys.then_some(
            "the number of keys follows the variance of a query's scores over its mean in the micro batch",
        )
    }

    fn has_the_weights_of(&self, other: &Architecture) -> bool {
        // What is not trained otherwise may be chosen anew.
        let weights = |shape: &Gsa| Gsa {
            most_keys: 0,
            least_keys: 0,
            base_keys: 0,
            adaptive_keys: false,
            train_indexer: false,
            indexer_warmup: 0,
            indexer_rate: 1.0,
            ..shape.clone()
        };
        matches!(other, Architecture::Gsa(other) if weights(self) == weights(other))
    }

    fn beyond_the_replay(&self) -> Option<String> {
        let even =
            self.width.is_multiple_of(self.heads) && self.heads.is_multiple_of(self.key_heads);
        if !(self.value_gate && self.output_gate && self.adaptive_keys) {
            return Some(
                "model.use_value_gate, model.use_output_gate and model.use_adaptive_k: the model without one of them is not computed"
                    .to_owned(),
            );
        }
        (!even).then(|| {
            format!(
                "model.num_heads {} and model.num_kv_heads {}: the heads divide the width {}, and the key heads the heads",
                self.heads, self.key_heads, self.width
            )
        })
    }
}

static GSA: Family = Family {
    name: "gsa",
    title: "gated sparse attention",
    settings: SETTINGS,
    is_named: true,
    sizes: &[
        NamedSize {
            name: "tiny",
            aliases: &["demo"],
            shape: || Architecture::Gsa(tiny()),
            tokenizer: "bytes",
        },
        NamedSize {
            name: "512m-low-memory",
            aliases: &["pretrain-512m-low-memory", "gsa"],
            shape: || Architecture::Gsa(low_memory()),
            tokenizer: "gpt2",
        },
        NamedSize {
            name: "1b",
            aliases: &["pretrain-1b"],
            shape: || {
                Architecture::Gsa(Gsa {
                    width: 896,
                    layers: 14,
                    inner: 2304,
                    ..low_memory()
                })
            },
            tokenizer: "gpt2",
        },
    ],
    checkpointing: LayerCheckpointing::Usual,
    ..PLAIN
};

const SETTINGS: &[ShapeSetting] = &[
    shape_setting!(Gsa.width: whole, "d_model", ["hidden_size", "n_embd"], count(MOST_WIDTH), "Width of the residual stream"),
    shape_setting!(Gsa.layers: whole, "n_layers", ["num_layers", "n_layer", "num_hidden_layers"], count(MOST_LAYERS), "Number of blocks"),
    shape_setting!(Gsa.heads: whole, "n_heads", ["num_heads", "n_head", "num_attention_heads"], count(MOST_HEADS), "Attention heads; they divide d_model"),
    shape_setting!(Gsa.key_heads: whole, "n_kv_heads", ["num_kv_heads", "num_key_value_heads"], count(MOST_HEADS), "Heads of keys and values"),
    shape_setting!(Gsa.inner: whole, "d_ffn", ["intermediate_size", "ffn_dim"], count(MOST_TOKENS), "Width of the feed-forward part"),
    shape_setting!(Gsa.vocabulary: whole, "vocab_size", [], Range::Whole { min: 2, max: MOST_TOKENS }, "Tokens in the vocabulary"),
    shape_setting!(Gsa.indexer_width: whole, "d_indexer", [], count(MOST_WIDTH), "Width of an indexer head"),
    shape_setting!(Gsa.indexer_heads: whole, "n_indexer_heads", [], count(MOST_HEADS), "Heads of the indexer"),
    shape_setting!(Gsa.most_keys: whole, "k_max", [], count(MOST_TOKENS), "Most keys that a query sees"),
    shape_setting!(Gsa.least_keys: whole, "k_min", [], count(MOST_TOKENS), "Fewest keys that a query sees, where there are so many"),
    shape_setting!(Gsa.base_keys: whole, "k_base", [], count(MOST_TOKENS), "Keys of a query whose scores vary as much as the average"),
    shape_setting!(Gsa.adaptive_keys: switch, "use_adaptive_k", [], Range::Switch, "Whether the number of keys follows the variance of the scores"),
    shape_setting!(Gsa.value_gate: switch, "use_value_gate", [], Range::Switch, "Whether values pass a gate"),
    shape_setting!(Gsa.output_gate: switch, "use_output_gate", [], Range::Switch, "Whether the output of attention passes a gate"),
    shape_setting!(Gsa.train_indexer: switch, "train_indexer", [], Range::Switch, "Whether the indexer is fitted to the attention; the published model's is not"),
    shape_setting!(Gsa.indexer_warmup: whole, "indexer_warmup_steps", [], Range::Whole { min: 0, max: MOST_STEPS }, "Steps in which attention is dense and the indexer learns what it looks at"),
    shape_setting!(Gsa.indexer_rate: real, "indexer_lr_multiplier", [], Range::Positive, "What the learning rate is multiplied by for the indexer"),
];
