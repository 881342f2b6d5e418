//! A text embedder: four BERT encoders with adapters, a mixture of experts and a hyperbolic
//! embedding, trained on anchors, positives and negatives.

use serde::{Deserialize, Serialize};

use super::bert::Bert;
use crate::Architecture;
use crate::describe::Describe;
use crate::family::{Family, LayerCheckpointing, NamedSize, PLAIN};
use crate::setting::{ShapeSetting, count, shape_setting};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Naics {
    pub encoder: Bert,
    /// Negatives for each anchor.
    pub negatives: u64,
    /// Tokens of the first channel; the others have the run's length.
    pub title_length: u64,
    pub experts: u64,
    /// Experts that each text takes.
    pub chosen: u64,
    pub expert_width: u64,
    pub adapter_rank: u64,
}

/// Negatives of an anchor in the first stage of the published curriculum.
const NEGATIVES: u64 = 24;

impl Naics {
    /// Texts have four channels, each with its encoder.
    pub const CHANNELS: u64 = 4;

    pub fn new(negatives: u64) -> Naics {
        let encoder = Bert {
            width: 384,
            layers: 6,
            heads: 12,
            inner: 1536,
            ..Bert::default()
        };
        Naics {
            encoder,
            negatives,
            title_length: 24,
            experts: 4,
            chosen: 2,
            expert_width: 1024,
            adapter_rank: 8,
        }
    }
}

impl Default for Naics {
    fn default() -> Naics {
        Naics::new(NEGATIVES)
    }
}

impl Describe for Naics {
    const FAMILY: &'static Family = &NAICS;

    fn vocabulary(&self) -> u64 {
        self.encoder.vocabulary
    }

    fn layers(&self) -> u64 {
        self.encoder.layers
    }

    fn set_layers(&mut self, layers: u64) {
        self.encoder.layers = layers;
    }

    fn positions(&self) -> Option<u64> {
        Some(self.encoder.positions)
    }

    fn sequences_per_sample(&self) -> u64 {
        self.negatives
    }

    fn towers(&self) -> u64 {
        Naics::CHANNELS
    }

    fn parameters(&self) -> u64 {
        let linear = |from: u64, to: u64| from * to + to;
        let (d, inner, rank) = (self.encoder.width, self.encoder.inner, self.adapter_rank);
        let joined = Naics::CHANNELS * d;
        let pooler = linear(d, d);
        let adapters = self.encoder.layers * rank * (4 * 2 * d + 2 * (d + inner)) + rank * 2 * d;
        let encoders = Naics::CHANNELS * (self.encoder.encoder_parameters() + pooler + adapters);
        let expert = linear(joined, self.expert_width) + linear(self.expert_width, joined);
        encoders
            + linear(joined, self.experts)
            + self.experts * expert
            + linear(joined, d)
            + linear(d, d + 1)
    }

    fn has_the_weights_of(&self, other: &Architecture) -> bool {
        matches!(other, Architecture::Naics(other) if self.encoder == other.encoder)
    }
}

static NAICS: Family = Family {
    name: "naics",
    title: "NAICS text embedder",
    settings: SETTINGS,
    sizes: &[NamedSize {
        name: "naics",
        aliases: &[],
        shape: || Architecture::Naics(Naics::default()),
        tokenizer: "gpt2",
    }],
    checkpointing: LayerCheckpointing::Always,
    assumptions: &["all texts take the same experts, as they do before training"],
    ..PLAIN
};

const SETTINGS: &[ShapeSetting] = &[shape_setting!(
    Naics.negatives: whole,
    "negatives",
    ["n_negatives"],
    count(1 << 16),
    "Negatives for each anchor"
)];
