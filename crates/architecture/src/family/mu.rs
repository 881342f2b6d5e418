//! MU: each token is an 8 × 8 matrix whose 2 × 2 blocks have attentions of their own.

use serde::{Deserialize, Serialize};

use crate::Architecture;
use crate::describe::Describe;
use crate::family::{Family, LayerCheckpointing, NamedSize, PLAIN};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Mu {
    pub vocabulary: u64,
    pub layers: u64,
    pub dropout: f64,
}

impl Default for Mu {
    fn default() -> Mu {
        Mu {
            vocabulary: 50_000,
            layers: 24,
            dropout: 0.1,
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
        let embeddings = (self.vocabulary + Mu::POSITIONS) * width;
        embeddings + self.layers * layer + 2 * width + linear(width, self.vocabulary)
    }

    fn has_the_weights_of(&self, other: &Architecture) -> bool {
        matches!(other, Architecture::Mu(other)
            if self.vocabulary == other.vocabulary && self.layers == other.layers)
    }
}

static MU: Family = Family {
    name: "mu",
    title: "MU block attention",
    sizes: &[NamedSize {
        name: "mu",
        aliases: &[],
        shape: || Architecture::Mu(Mu::default()),
        tokenizer: "gpt2",
    }],
    checkpointing: LayerCheckpointing::Never,
    ..PLAIN
};
