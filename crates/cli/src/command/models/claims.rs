//! What five memory guides say of the sizes of models, beside what they are.
//!
//! Only what follows from the model itself: parameters, and what weights, gradients and moments of so
//! many take; of MU, whose guide counts the tensors of a layer, those. What a step takes besides is
//! held against the guides by `cinch plan --engine pytorch --guides`.

use std::sync::Arc;

use cinch_architecture::{Architecture, Mu};
use cinch_graph::DType;
use cinch_model::{AdapterShape, Build, Purpose, build, linear_modules};
use serde_json::{Value, json};

use crate::table::thousands;

use Figure::{AdapterBytes, Adapters, Bytes, LayerBytes, Parameters, Trainable, TrainableBytes};

/// What a guide says of one model.
struct Guide {
    number: &'static str,
    /// The name of its family, or its short name on the hub.
    model: &'static str,
    /// Of a family's sizes.
    size: &'static str,
    /// About what, as the guide writes the figure, and what it is.
    claims: &'static [(&'static str, &'static str, Figure)],
}

#[derive(Clone, Copy)]
enum Figure {
    Parameters,
    /// Those that are trained, of all.
    Trainable,
    /// Of a rank, on every linear layer of the blocks.
    Adapters(usize),
    AdapterBytes(DType, usize),
    /// So many numbers of a type for each parameter.
    Bytes(DType, u64),
    /// So many for each that is trained.
    TrainableBytes(DType, u64),
    /// Numbers in fp32 of each layer of MU, by its heads, micro batch and length.
    LayerBytes(fn(u64, u64, u64) -> u64),
}

/// Micro batch and length that the guide of MU calculates with.
const MU_STEP: (u64, u64) = (32, 512);

static GUIDES: &[Guide] = &[
    Guide {
        number: "000",
        model: "mamba",
        size: "small",
        claims: &[("weights", "~200 MB", Bytes(DType::F32, 1))],
    },
    Guide {
        number: "000",
        model: "mamba",
        size: "medium",
        claims: &[
            ("weights", "~600 MB", Bytes(DType::F32, 1)),
            ("optimizer states", "1200 MB", Bytes(DType::F32, 2)),
        ],
    },
    Guide {
        number: "000",
        model: "mamba",
        size: "large",
        claims: &[("weights", "~1.6 GB", Bytes(DType::F32, 1))],
    },
    Guide {
        number: "001",
        model: "gsa",
        size: "512m-low-memory",
        claims: &[
            ("parameters", "512M", Parameters),
            ("weights", "~7-8 GB", Bytes(DType::F32, 1)),
            ("optimizer states", "~14-16 GB", Bytes(DType::F32, 2)),
        ],
    },
    Guide {
        number: "001",
        model: "gsa",
        size: "1b",
        claims: &[("parameters, by its name", "1b", Parameters)],
    },
    Guide {
        number: "002",
        model: "qwen2.5-7b",
        size: "",
        claims: &[
            ("parameters", "7B", Parameters),
            ("weights in fp16", "14.0 GB", Bytes(DType::F16, 1)),
            ("trained at rank 128", "239M", Adapters(128)),
            ("adapters", "0.5 GB", AdapterBytes(DType::F32, 128)),
        ],
    },
    Guide {
        number: "003",
        model: "mu",
        size: "mu",
        claims: &[
            ("parameters", "26.9M", Parameters),
            ("block attention, QKV", "~1.57 GB", LayerBytes(block_inputs)),
            (
                "block attention, weights",
                "~2.15 GB",
                LayerBytes(block_weights),
            ),
            ("cross attention, QKV", "~0.12 GB", LayerBytes(cross_inputs)),
            (
                "cross attention, weights",
                "~1.07 GB",
                LayerBytes(cross_weights),
            ),
        ],
    },
    Guide {
        number: "004",
        model: "naics",
        size: "naics",
        claims: &[
            ("trained parameters", "~1%", Trainable),
            ("weights", "~200 MB", Bytes(DType::F32, 1)),
            ("optimizer states", "~800 MB", TrainableBytes(DType::F32, 2)),
            ("gradients", "~200 MB", TrainableBytes(DType::F32, 1)),
        ],
    },
];

/// Queries, keys and values of the attentions inside of blocks.
fn block_inputs(_heads: u64, batch: u64, length: u64) -> u64 {
    Mu::BLOCKS * batch * length * Mu::BLOCK * 3
}

fn block_weights(_heads: u64, batch: u64, length: u64) -> u64 {
    Mu::BLOCKS * batch * Mu::BLOCK_HEADS * length * length
}

/// Queries, keys and values of the attention across blocks.
fn cross_inputs(_heads: u64, batch: u64, length: u64) -> u64 {
    batch * length * Mu::WIDTH * 3
}

fn cross_weights(heads: u64, batch: u64, length: u64) -> u64 {
    batch * heads * length * length
}

/// A claim beside what is true.
pub struct Answer {
    pub guide: &'static str,
    pub about: &'static str,
    pub claimed: &'static str,
    computed: Computed,
}

enum Computed {
    Parameters(u64),
    Share { part: u64, whole: u64 },
    Bytes(u64),
}

impl Answer {
    pub fn computed(&self) -> String {
        match self.computed {
            Computed::Parameters(number) => thousands(number),
            Computed::Share { part, whole } => {
                format!("{:.1} %", 100.0 * part as f64 / whole as f64)
            }
            // Powers of ten, as the guides have them.
            Computed::Bytes(bytes) if bytes < 1_000_000_000 => {
                format!("{:.1} MB", bytes as f64 / 1e6)
            }
            Computed::Bytes(bytes) => format!("{:.2} GB", bytes as f64 / 1e9),
        }
    }

    pub fn json(&self) -> Value {
        let (parameters, bytes) = match self.computed {
            Computed::Parameters(number) | Computed::Share { part: number, .. } => {
                (Some(number), None)
            }
            Computed::Bytes(bytes) => (None, Some(bytes)),
        };
        json!({
            "guide": self.guide,
            "about": self.about,
            "claimed": self.claimed,
            "computed": self.computed(),
            "computed_parameters": parameters,
            "computed_bytes": bytes,
        })
    }
}

/// What guides say of a model that goes by a name, and of a family by a size.
pub fn claims(name: &str, size: &str, model: &Architecture) -> anyhow::Result<Vec<Answer>> {
    let about = GUIDES
        .iter()
        .filter(|guide| guide.model == name && guide.size == size);
    let mut answers = Vec::new();
    for guide in about {
        for &(about, claimed, figure) in guide.claims {
            answers.push(Answer {
                guide: guide.number,
                about,
                claimed,
                computed: compute(figure, model)?,
            });
        }
    }
    Ok(answers)
}

fn compute(figure: Figure, model: &Architecture) -> anyhow::Result<Computed> {
    let parameters = model.parameters();
    Ok(match figure {
        Parameters => Computed::Parameters(parameters),
        Trainable => Computed::Share {
            part: trainable(model)?,
            whole: parameters,
        },
        Adapters(rank) => Computed::Parameters(adapted(model, Some(rank))?),
        AdapterBytes(dtype, rank) => Computed::Bytes(adapted(model, Some(rank))? * dtype.size()),
        Bytes(dtype, numbers) => Computed::Bytes(parameters * numbers * dtype.size()),
        TrainableBytes(dtype, numbers) => {
            Computed::Bytes(trainable(model)? * numbers * dtype.size())
        }
        LayerBytes(numbers) => {
            let heads = match model {
                Architecture::Mu(mu) => mu.heads,
                _ => Mu::CROSS_HEADS,
            };
            Computed::Bytes(numbers(heads, MU_STEP.0, MU_STEP.1) * DType::F32.size())
        }
    })
}

/// How many of a model's parameters are trained where nothing else is asked for.
pub fn trainable(model: &Architecture) -> anyhow::Result<u64> {
    adapted(model, None)
}

/// How many parameters are trained, with adapters of a rank on every linear layer or without any.
fn adapted(model: &Architecture, rank: Option<usize>) -> anyhow::Result<u64> {
    let purpose = Purpose::Train {
        label_smoothing: 0.0,
        loss_chunk: None,
    };
    // Parameters do not depend on the step.
    let length = model.positions().map_or(64, |most| most.min(64)) as usize;
    let mut plain = Build::plain(1, length, DType::F32, purpose);
    plain.adapters = rank.map(|rank| AdapterShape {
        rank,
        scale: 1.0,
        dropout: 0.0,
        modules: Arc::new(linear_modules(model).into_iter().collect()),
        whole: Arc::default(),
        quantisation: None,
    });
    Ok(build(model, &plain)?.num_trainable())
}
