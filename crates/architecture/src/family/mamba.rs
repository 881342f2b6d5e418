//! The Mamba language model that cinch began with: token and learned position embedding, blocks of
//! a gated selective scan, and a head tied to the token embedding.

use serde::{Deserialize, Serialize};

use crate::describe::Describe;
use crate::family::{Family, NamedSize, PLAIN};
use crate::setting::{MOST_LAYERS, MOST_TOKENS, MOST_WIDTH, Range, Tunable, count, shape_setting};
use crate::{Architecture, ShapeSetting};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Mamba {
    #[serde(rename = "vocab_size")]
    pub vocabulary: u64,
    #[serde(rename = "d_model")]
    pub width: u64,
    #[serde(rename = "n_layers")]
    pub layers: u64,
    /// Learned positions.
    #[serde(rename = "max_seq_len")]
    pub positions: u64,
    /// N, the state kept per channel.
    #[serde(rename = "d_state")]
    pub states: u64,
    /// The scan has this many times the width in channels.
    #[serde(rename = "expand_factor")]
    pub expansion: u64,
    /// Width of the causal depthwise convolution; 0 means there is none.
    #[serde(rename = "d_conv")]
    pub convolution: u64,
    pub dropout: f64,
    /// Timesteps between two kept states of the scan; inside a chunk the state is recomputed in
    /// backward.
    pub scan_chunk: u64,
}

impl Default for Mamba {
    fn default() -> Mamba {
        small()
    }
}

const fn small() -> Mamba {
    Mamba {
        vocabulary: super::gpt2::VOCABULARY,
        width: 512,
        layers: 8,
        positions: 1024,
        states: 16,
        expansion: 2,
        convolution: 0,
        dropout: 0.1,
        scan_chunk: 64,
    }
}

impl Mamba {
    pub fn channels(&self) -> u64 {
        self.expansion * self.width
    }

    /// Rank of the projection to step sizes.
    pub fn rank(&self) -> u64 {
        self.channels().div_ceil(16)
    }

    fn block_parameters(&self) -> u64 {
        let (d, inner, states, rank) = (self.width, self.channels(), self.states, self.rank());
        let norm = 2 * d;
        let input = d * 2 * inner;
        let selection = inner * (rank + 2 * states);
        let step = rank * inner + inner;
        let decay = inner * states + inner;
        let convolution = match self.convolution {
            0 => 0,
            width => inner * width + inner,
        };
        norm + input + selection + step + decay + convolution + inner * d
    }
}

impl Describe for Mamba {
    const FAMILY: &'static Family = &MAMBA;

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

    fn scanned_states(&self) -> Option<u64> {
        Some(self.channels().saturating_mul(self.states))
    }

    fn parameters(&self) -> u64 {
        let embeddings = (self.vocabulary + self.positions) * self.width;
        embeddings + self.layers * self.block_parameters() + 2 * self.width
    }

    fn has_the_weights_of(&self, other: &Architecture) -> bool {
        let Architecture::Mamba(other) = other else {
            return false;
        };
        let same = Mamba {
            positions: other.positions,
            dropout: other.dropout,
            scan_chunk: other.scan_chunk,
            ..self.clone()
        };
        same == *other
    }

    fn beyond_the_replay(&self) -> Option<String> {
        (self.convolution > 0).then(|| {
            "model.d_conv: the PyTorch program of this Mamba has no convolution".to_owned()
        })
    }
}

static MAMBA: Family = Family {
    name: "mamba",
    title: "Mamba",
    settings: SETTINGS,
    sizes: SIZES,
    tunables: &[Tunable {
        key: "model.scan_chunk",
        // Fewer kept states against a backward that is cut into fewer parts: below 64 steps the
        // states outweigh everything else, beyond 256 they no longer count.
        candidates: &[64, 256],
        describe: |steps| format!("scan states every {steps} steps"),
    }],
    ..PLAIN
};

const SETTINGS: &[ShapeSetting] = &[
    shape_setting!(Mamba.width: whole, "d_model", ["n_embd"], count(MOST_WIDTH), "Width of the residual stream"),
    shape_setting!(Mamba.layers: whole, "n_layers", ["n_layer"], count(MOST_LAYERS), "Number of blocks"),
    shape_setting!(Mamba.states: whole, "d_state", [], count(1 << 10), "State kept per channel of the scan"),
    shape_setting!(Mamba.expansion: whole, "expand_factor", [], count(16), "Inner width as a multiple of d_model"),
    shape_setting!(Mamba.convolution: whole, "d_conv", [], Range::Whole { min: 0, max: 64 }, "Width of the causal convolution; 0 for none"),
    shape_setting!(Mamba.scan_chunk: whole, "scan_chunk", [], count(1 << 16), "Timesteps between kept states of the scan"),
    shape_setting!(Mamba.dropout: real, "dropout", [], Range::Rate, "Dropout rate"),
    shape_setting!(Mamba.positions: whole, "max_seq_len", ["n_positions"], count(MOST_TOKENS), "Positions the model has"),
    shape_setting!(Mamba.vocabulary: whole, "vocab_size", [], Range::Whole { min: 2, max: MOST_TOKENS }, "Tokens in the vocabulary"),
];

macro_rules! size {
    ($name:literal, $width:literal, $layers:literal, $positions:literal) => {
        NamedSize {
            name: $name,
            aliases: &[],
            shape: || {
                Architecture::Mamba(Mamba {
                    width: $width,
                    layers: $layers,
                    positions: $positions,
                    ..small()
                })
            },
            tokenizer: "gpt2",
        }
    };
}

static SIZES: &[NamedSize] = &[
    NamedSize {
        name: "tiny",
        aliases: &[],
        shape: || {
            Architecture::Mamba(Mamba {
                vocabulary: super::gpt2::BYTES_VOCABULARY,
                width: 128,
                layers: 4,
                positions: 256,
                ..small()
            })
        },
        tokenizer: "bytes",
    },
    size!("small", 512, 8, 1024),
    size!("medium-lite", 640, 10, 1024),
    size!("medium-plus", 704, 11, 1536),
    size!("medium-x", 736, 12, 1792),
    size!("medium", 768, 12, 2048),
    size!("medium-extra", 832, 14, 2048),
    size!("large-lite", 896, 18, 2048),
    size!("large-plus", 960, 21, 2048),
    size!("large", 1024, 24, 2048),
    size!("xlarge", 1280, 32, 2048),
    size!("xxlarge", 1536, 40, 2048),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_those_of_the_published_sizes() {
        for (name, parameters) in [
            ("tiny", 544_128),
            ("small", 40_306_176),
            ("medium-lite", 60_097_920),
            ("medium-plus", 72_690_112),
            ("medium-x", 81_462_688),
            ("medium", 87_118_080),
            ("medium-extra", 107_699_904),
            ("large-lite", 142_441_600),
            ("large-plus", 178_069_440),
            ("large", 219_646_976),
            ("xlarge", 411_918_080),
            ("xxlarge", 700_027_392),
        ] {
            let size = MAMBA.size(name).unwrap();
            assert_eq!((size.shape)().parameters(), parameters, "{name}");
        }
    }

    #[test]
    fn a_shape_is_named_by_its_weights() {
        let Architecture::Mamba(medium) = (MAMBA.size("medium").unwrap().shape)() else {
            panic!("a size of Mamba");
        };
        let name = |shape: Mamba| Architecture::from(shape).size().map(|size| size.name);
        let shorter = Mamba {
            positions: 512,
            dropout: 0.0,
            ..medium.clone()
        };
        assert_eq!(name(shorter), Some("medium"));
        assert_eq!(
            name(Mamba {
                convolution: 4,
                ..medium
            }),
            None
        );
    }
}
