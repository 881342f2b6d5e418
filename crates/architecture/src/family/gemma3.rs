//! Gemma 3 as a model of text: every sixth layer sees everything, queries and keys have norms, and each kind of layer has
//! rotary positions of its own.

use serde::{Deserialize, Serialize};

use crate::Architecture;
use crate::family::Family;
use crate::family::decoder::{Biases, Defaults, GATED};
use crate::family::gemma::{Gemma, GemmaDefaults, describe_gemma};
use crate::window::Windows;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gemma3(pub Gemma);

describe_gemma!(Gemma3, GEMMA3);

static GEMMA3: Family = Family {
    name: "gemma3",
    title: "Gemma 3",
    model_types: &["gemma3_text"],
    classes: &["Gemma3ForCausalLM"],
    read: Some(|fields| Ok(Architecture::Gemma3(Gemma3(DEFAULTS.read(fields)?)))),
    ..GATED
};

const DEFAULTS: GemmaDefaults = GemmaDefaults {
    decoder: Defaults {
        vocabulary: 262_208,
        width: 2304,
        inner: 9216,
        heads: 8,
        key_heads: Some(4),
        head_width: Some(256),
        biases: Biases::Stated,
        head_norms: true,
        positions: 131_072.0,
        windows: |_, _| Ok(Windows::ByKind { sliding: None }),
    },
    layers: 26,
    pattern: 6,
    is_capped: false,
};
