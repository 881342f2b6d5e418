//! Gemma 2: every second layer sees everything, and scores and logits are capped.

use serde::{Deserialize, Serialize};

use crate::Architecture;
use crate::family::Family;
use crate::family::decoder::{Biases, Defaults, GATED};
use crate::family::gemma::{Gemma, GemmaDefaults, describe_gemma};
use crate::window::Windows;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gemma2(pub Gemma);

describe_gemma!(Gemma2, GEMMA2);

static GEMMA2: Family = Family {
    name: "gemma2",
    title: "Gemma 2",
    model_types: &["gemma2"],
    classes: &["Gemma2ForCausalLM"],
    read: Some(|fields| Ok(Architecture::Gemma2(Gemma2(DEFAULTS.read(fields)?)))),
    ..GATED
};

const DEFAULTS: GemmaDefaults = GemmaDefaults {
    decoder: Defaults {
        vocabulary: 256_000,
        width: 2304,
        inner: 9216,
        heads: 8,
        key_heads: Some(4),
        head_width: Some(256),
        biases: Biases::Stated,
        head_norms: false,
        positions: 8192.0,
        windows: |_, _| Ok(Windows::ByKind { sliding: None }),
    },
    layers: 26,
    pattern: 2,
    is_capped: true,
};
