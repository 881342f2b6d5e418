//! Qwen3: Qwen2 with norms over the heads of query and key, a head width of its own, and no biases
//! unless asked for.

use serde::{Deserialize, Serialize};

use crate::Architecture;
use crate::family::Family;
use crate::family::decoder::{Biases, Decoder, Defaults, GATED, describe_decoder};
use crate::family::qwen2::window_of_late_layers;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Qwen3(pub Decoder);

describe_decoder!(Qwen3, QWEN3);

static QWEN3: Family = Family {
    name: "qwen3",
    title: "Qwen3",
    model_types: &["qwen3"],
    classes: &["Qwen3ForCausalLM"],
    read: Some(|fields| Ok(Architecture::Qwen3(Qwen3(DEFAULTS.read(fields)?)))),
    ..GATED
};

const DEFAULTS: Defaults = Defaults {
    vocabulary: 151_936,
    width: 4096,
    inner: 22_016,
    heads: 32,
    key_heads: Some(32),
    head_width: Some(128),
    biases: Biases::Stated,
    head_norms: true,
    positions: 32_768.0,
    windows: window_of_late_layers,
};
