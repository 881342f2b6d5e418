//! MU: each token is an 8 × 8 matrix whose 2 × 2 blocks have attentions of their own.

use serde::{Deserialize, Serialize};

use crate::describe::Describe;
use crate::family::{Family, LayerCheckpointing, NamedSize, PLAIN};
use crate::setting::{MOST_LAYERS, MOST_TOKENS, Range, count, shape_setting};
use crate::{Architecture, Number, ShapeSetting};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Mu {
    #[serde(rename = "vocab_size")]
    pub vocabulary: u64,
    #[serde(rename = "n_layers")]
    pub layers: u64,
    #[serde(rename = "max_seq_len", default = "published_positions")]
    pub positions: u64,
    /// Heads of the attention across blocks.
    #[serde(rename = "n_heads", default = "published_heads")]
    pub heads: u64,
    pub dropout: f64,
    /// Whether a token sees none after it. The published program lets each see the one that it
    /// has to predict.
    #[serde(default = "usual_order")]
    pub causal: bool,
    /// Whether the values that change together are neighbours in the rows of the matrix, as in the
    /// published program, instead of the blocks that the attentions have.
    #[serde(default)]
    pub published_order: bool,
}

fn published_positions() -> u64 {
    Mu::POSITIONS
}

fn published_heads() -> u64 {
    Mu::CROSS_HEADS
}

fn usual_order() -> bool {
    true
}

impl Default for Mu {
    fn default() -> Mu {
        Mu {
            vocabulary: 50_000,
            layers: 24,
            positions: Mu::POSITIONS,
            heads: Mu::CROSS_HEADS,
            dropout: 0.1,
            causal: true,
            published_order: false,
        }
    }
}

impl Mu {
    /// Blocks of the matrix, and values of each.
    pub const BLOCKS: u64 = 16;
    pub const BLOCK: u64 = 4;
    pub const WIDTH: u64 = Mu::BLOCKS * Mu::BLOCK;
    /// Learned positions of the published program.
    pub const POSITIONS: u64 = 512;
    /// Units of the network that says how much each group of values may change.
    pub const SENSITIVITY: u64 = 32;
    /// Heads of the attention inside a block, and of the published one across blocks.
    pub const BLOCK_HEADS: u64 = 2;
    pub const CROSS_HEADS: u64 = 8;
    /// The most heads whose entropy is computed.
    const MOST_HEADS: u64 = 16;
}

impl Describe for Mu {
    const FAMILY: &'static Family = &MU;

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

    /// Every layer has a table of its own over the vocabulary.
    fn is_chain(&self) -> bool {
        false
    }

    fn parameters(&self) -> u64 {
        let linear = |from: u64, to: u64| from * to + to;
        let attention = |width: u64| 4 * linear(width, width);
        let (width, blocks) = (Mu::WIDTH, Mu::BLOCKS);
        let feed = linear(width, 4 * width) + linear(4 * width, width);
        let sensitivity = linear(blocks + 1, Mu::SENSITIVITY) + linear(Mu::SENSITIVITY, blocks);
        let layer = blocks * attention(Mu::BLOCK)
            + attention(width)
            + 2 * 2 * width
            + feed
            + self.vocabulary * blocks
            + sensitivity
            + blocks;
        let embeddings = (self.vocabulary + self.positions) * width;
        embeddings + self.layers * layer + 2 * width + linear(width, self.vocabulary)
    }

    fn has_the_weights_of(&self, other: &Architecture) -> bool {
        matches!(other, Architecture::Mu(other)
            if self.vocabulary == other.vocabulary
                && self.layers == other.layers
                && self.heads == other.heads)
    }
}

static MU: Family = Family {
    name: "mu",
    title: "MU block attention",
    sizes: &[NamedSize {
        name: "mu",
        aliases: &[],
        shape: || Architecture::Mu(Mu::default()),
        tokenizer: "train",
    }],
    training: TRAINING,
    settings: SETTINGS,
    checkpointing: LayerCheckpointing::Never,
    is_named: true,
    ..PLAIN
};

const TRAINING: &[(&str, &str)] = &[
    ("training.learning_rate", "1e-4"),
    ("training.weight_decay", "0.01"),
    ("training.schedule", "onecycle"),
    ("training.warmup_steps", "1000"),
    ("training.epochs", "5"),
    ("training.eval_epochs", "1"),
    ("training.sample_tokens", "100"),
];

const SETTINGS: &[ShapeSetting] = &[
    shape_setting!(Mu.layers: whole, "n_layers", ["n_layer"], count(MOST_LAYERS), "Number of blocks"),
    shape_setting!(Mu.heads: whole, "n_heads", ["n_head"], count(Mu::MOST_HEADS), "Heads of the attention across blocks"),
    // The width is that of the matrix: what is said of it can only agree.
    ShapeSetting {
        key: "model.d_model",
        aliases: &[],
        range: Range::Whole {
            min: Mu::WIDTH,
            max: Mu::WIDTH,
        },
        help: "Values of a token",
        get: |architecture| match architecture {
            Architecture::Mu(_) => Some(Number::Whole(Mu::WIDTH)),
            _ => None,
        },
        set: |_, _| {},
    },
    shape_setting!(Mu.dropout: real, "dropout", [], Range::Rate, "Dropout rate"),
    shape_setting!(Mu.positions: whole, "max_seq_len", ["n_positions"], count(MOST_TOKENS), "Positions the model has"),
    shape_setting!(Mu.vocabulary: whole, "vocab_size", [], Range::Whole { min: 2, max: MOST_TOKENS }, "Tokens in the vocabulary"),
    shape_setting!(Mu.causal: switch, "causal", [], Range::Switch, "Whether a token sees none after it"),
    shape_setting!(Mu.published_order: switch, "published_order", [], Range::Switch, "Whether values change in the groups of the published program"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_size_has_its_parameters() {
        assert_eq!(Mu::default().parameters(), 26_940_112);
    }
}
