//! A text embedder: four BERT encoders with adapters, a mixture of experts and a hyperbolic
//! embedding, trained on anchors, positives and negatives.

use serde::{Deserialize, Serialize};

use super::bert::Bert;
use crate::Architecture;
use crate::describe::Describe;
use crate::family::{Family, LayerCheckpointing, NamedSize, PLAIN};
use crate::setting::{
    MOST_HEADS, MOST_LAYERS, MOST_TOKENS, MOST_WIDTH, Range, ShapeSetting, Tunable, count,
    shape_setting,
};

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
    pub expert_dropout: f64,
    pub adapter_rank: u64,
    /// What adapters add is multiplied by this over the rank.
    pub adapter_alpha: f64,
    pub adapter_dropout: f64,
    /// Of the contrastive loss.
    pub temperature: f64,
    pub curvature: f64,
    /// Of the term that keeps experts evenly in use.
    pub balance_weight: f64,
    /// Texts of each anchor that are encoded at once: what is recomputed together.
    pub text_chunk: u64,
    /// Whether titles are cut as the other channels are, however few their tokens.
    #[serde(skip)]
    pub titles_are_cut: bool,
    /// Negatives in each stage of a curriculum, where there is one; `negatives` are the most.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<u64>,
}

/// Negatives of an anchor in the first stage of the published curriculum.
const NEGATIVES: u64 = 24;
/// A few thousand tokens of each anchor's texts at once fill a card's products already.
const TEXT_CHUNK: u64 = 2;
const MOST_NEGATIVES: u64 = 1 << 16;
const MOST_EXPERTS: u64 = 32;

impl Naics {
    /// Texts have four channels, each with its encoder.
    pub const CHANNELS: u64 = 4;
    /// Their names, in the order in which they are joined.
    pub const CHANNEL_NAMES: [&'static str; Self::CHANNELS as usize] =
        ["title", "description", "excluded", "examples"];

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
            expert_dropout: 0.1,
            adapter_rank: 8,
            adapter_alpha: 16.0,
            adapter_dropout: 0.1,
            temperature: 0.07,
            curvature: 1.0,
            balance_weight: 0.01,
            text_chunk: TEXT_CHUNK,
            titles_are_cut: false,
            stages: Vec::new(),
        }
    }

    /// Stretches of stages with as many negatives: the first stage of each, and the negatives.
    pub fn stretches(&self) -> Vec<(usize, u64)> {
        let mut stretches: Vec<(usize, u64)> = Vec::new();
        for (stage, &negatives) in self.stages.iter().enumerate() {
            if stretches.last().is_none_or(|&(_, last)| last != negatives) {
                stretches.push((stage, negatives));
            }
        }
        stretches
    }

    /// The model as one of the stretches trains it.
    pub fn in_stretch(&self, stretch: usize) -> Naics {
        let negatives = self
            .stretches()
            .get(stretch)
            .map(|&(_, negatives)| negatives);
        Naics {
            negatives: negatives.unwrap_or(self.negatives),
            ..self.clone()
        }
    }

    /// Texts of an anchor: itself, its positive and its negatives.
    pub fn texts(&self) -> u64 {
        self.negatives.saturating_add(2)
    }

    /// How many of an anchor's texts each chunk of each channel has. Titles are one chunk.
    pub fn chunks(&self) -> [Vec<u64>; Self::CHANNELS as usize] {
        let (texts, most) = (self.texts(), self.text_chunk.max(1));
        let first = (0..texts).step_by(most as usize);
        let chunks: Vec<u64> = first.map(|first| most.min(texts - first)).collect();
        let titles = match self.titles_are_one_chunk() {
            true => vec![texts],
            false => chunks.clone(),
        };
        [titles, chunks.clone(), chunks.clone(), chunks]
    }

    /// Titles are a few tokens each: cut as the other channels are, they would be many small
    /// launches. All of them together, unless they are more than a chunk of the longest texts.
    fn titles_are_one_chunk(&self) -> bool {
        let titles = self.texts().saturating_mul(self.title_length);
        let chunk = self
            .text_chunk
            .max(1)
            .saturating_mul(self.encoder.positions);
        !self.titles_are_cut && titles <= chunk
    }

    /// Tokens of each channel, where the run's length is `seq_len`.
    pub fn channel_lengths(&self, seq_len: u64) -> [u64; Self::CHANNELS as usize] {
        [self.title_length, seq_len, seq_len, seq_len]
    }

    /// Numbers of an embedding: one of time, the others of space.
    pub fn embedding_width(&self) -> u64 {
        self.encoder.width + 2
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

    fn mean_of_micro_batches(&self) -> Option<&'static str> {
        (self.balance_weight > 0.0)
            .then_some("the term that keeps experts evenly in use is that of each micro batch")
    }

    fn set_layers(&mut self, layers: u64) {
        self.encoder.layers = layers;
    }

    /// Each encoder over each chunk of texts.
    fn blocks(&self) -> u64 {
        let chunks = self.texts().div_ceil(self.text_chunk.max(1));
        let titles = match self.titles_are_one_chunk() {
            true => 1,
            false => chunks,
        };
        chunks
            .saturating_mul(Naics::CHANNELS - 1)
            .saturating_add(titles)
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

    /// Whole chunks of texts. What is left over stays.
    fn repeats(&self) -> u64 {
        self.texts() / self.text_chunk.max(1)
    }

    /// Titles stay cut where they are: fewer of them would fit in one chunk.
    fn set_repeats(&mut self, repeats: u64) {
        self.titles_are_cut = !self.titles_are_one_chunk();
        let chunk = self.text_chunk.max(1);
        let texts = repeats.saturating_mul(chunk) + self.texts() % chunk;
        self.negatives = texts.saturating_sub(2).max(1);
        self.stages.clear();
    }

    fn has_logits(&self) -> bool {
        false
    }

    fn set_stages(&mut self, negatives: Vec<u64>) {
        self.negatives = negatives.iter().copied().max().unwrap_or(self.negatives);
        self.stages = negatives;
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

    fn beyond_the_engine(&self) -> Option<String> {
        self.encoder.beyond_the_engine()
    }
}

static NAICS: Family = Family {
    name: "naics",
    title: "NAICS text embedder",
    settings: SETTINGS,
    is_named: true,
    sizes: &[NamedSize {
        name: "naics",
        aliases: &[],
        shape: || Architecture::Naics(Naics::default()),
        // Needs no file; an encoder that was trained before comes with its own.
        tokenizer: "bytes",
    }],
    tunables: &[Tunable {
        key: "model.text_chunk",
        candidates: &[1, 2, 4, 8],
        describe: |texts| format!("{texts} of an anchor's texts at once"),
    }],
    checkpointing: LayerCheckpointing::Always,
    assumptions: &["all texts take the same experts, as they do before training"],
    ..PLAIN
};

/// Declares a setting that is one field of the encoders.
macro_rules! encoder_setting {
    ($field:ident, $key:literal, [$($alias:literal),*], $range:expr, $help:literal) => {
        ShapeSetting {
            key: concat!("model.", $key),
            aliases: &[$(concat!("model.", $alias)),*],
            range: $range,
            help: $help,
            get: |architecture| match architecture {
                Architecture::Naics(shape) => Some(shape.encoder.$field.into()),
                _ => None,
            },
            set: |architecture, number| {
                if let (Architecture::Naics(shape), Some(number)) = (architecture, number.whole()) {
                    shape.encoder.$field = number;
                }
            },
        }
    };
}

const SETTINGS: &[ShapeSetting] = &[
    encoder_setting!(
        vocabulary,
        "vocab_size",
        [],
        count(MOST_TOKENS),
        "Rows of the token embedding"
    ),
    ShapeSetting {
        key: "model.layer_norm_eps",
        aliases: &[],
        range: Range::Positive,
        help: "Added to the variance in the encoders' LayerNorm",
        get: |architecture| match architecture {
            Architecture::Naics(shape) => Some(shape.encoder.norm_epsilon.into()),
            _ => None,
        },
        set: |architecture, number| {
            if let (Architecture::Naics(shape), Some(number)) = (architecture, number.real()) {
                shape.encoder.norm_epsilon = number;
            }
        },
    },
    encoder_setting!(
        width,
        "d_model",
        ["hidden_size"],
        count(MOST_WIDTH),
        "Width of the residual stream"
    ),
    encoder_setting!(
        layers,
        "n_layers",
        ["num_layers"],
        count(MOST_LAYERS),
        "Blocks"
    ),
    encoder_setting!(
        heads,
        "n_heads",
        ["num_heads"],
        count(MOST_HEADS),
        "Attention heads"
    ),
    encoder_setting!(
        inner,
        "d_ffn",
        ["intermediate_size"],
        count(MOST_WIDTH),
        "Width inside the feed-forward layers"
    ),
    encoder_setting!(
        positions,
        "max_seq_len",
        [],
        count(MOST_TOKENS),
        "Positions that the model has"
    ),
    ShapeSetting {
        key: "model.dropout",
        aliases: &[],
        range: Range::Rate,
        help: "Dropout rate",
        get: |architecture| match architecture {
            Architecture::Naics(shape) => Some(shape.encoder.hidden_dropout.into()),
            _ => None,
        },
        set: |architecture, number| {
            if let (Architecture::Naics(shape), Some(rate)) = (architecture, number.real()) {
                shape.encoder.hidden_dropout = rate;
                shape.encoder.attention_dropout = rate;
            }
        },
    },
    shape_setting!(
        Naics.negatives: whole,
        "negatives",
        ["n_negatives"],
        count(MOST_NEGATIVES),
        "Negatives for each anchor"
    ),
    shape_setting!(
        Naics.title_length: whole,
        "title_length",
        [],
        count(MOST_TOKENS),
        "Tokens of the title channel"
    ),
    shape_setting!(
        Naics.experts: whole,
        "n_experts",
        ["num_experts"],
        count(MOST_EXPERTS),
        "Experts of the mixture"
    ),
    shape_setting!(
        Naics.chosen: whole,
        "top_k",
        [],
        count(MOST_EXPERTS),
        "Experts that each text takes"
    ),
    shape_setting!(
        Naics.expert_width: whole,
        "d_expert",
        ["expert_hidden_dim"],
        count(MOST_WIDTH),
        "Width inside an expert"
    ),
    shape_setting!(
        Naics.expert_dropout: real,
        "expert_dropout",
        [],
        Range::Rate,
        "Dropout inside experts"
    ),
    shape_setting!(
        Naics.adapter_rank: whole,
        "adapter_rank",
        [],
        count(MOST_WIDTH),
        "Rank of the encoders' adapters"
    ),
    shape_setting!(
        Naics.adapter_alpha: real,
        "adapter_alpha",
        [],
        Range::Positive,
        "Scale of what adapters add, over the rank"
    ),
    shape_setting!(
        Naics.adapter_dropout: real,
        "adapter_dropout",
        [],
        Range::Rate,
        "Dropout on what adapters read"
    ),
    shape_setting!(
        Naics.temperature: real,
        "temperature",
        [],
        Range::Positive,
        "Temperature of the contrastive loss"
    ),
    shape_setting!(
        Naics.curvature: real,
        "curvature",
        [],
        Range::Positive,
        "Curvature of the space of embeddings"
    ),
    shape_setting!(
        Naics.balance_weight: real,
        "balance_weight",
        [],
        Range::Rate,
        "Weight of the term that keeps experts evenly in use"
    ),
    shape_setting!(
        Naics.text_chunk: whole,
        "text_chunk",
        [],
        count(MOST_NEGATIVES),
        "Texts of each anchor that are encoded, and recomputed, at once"
    ),
];
