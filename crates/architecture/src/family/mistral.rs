//! Mistral, of which a `config.json` is all that is needed.

use serde::{Deserialize, Serialize};

use crate::Architecture;
use crate::error::ArchitectureError;
use crate::family::Family;
use crate::family::decoder::{Biases, Decoder, Defaults, GATED, describe_decoder};
use crate::fields::Fields;
use crate::window::Windows;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Mistral(pub Decoder);

describe_decoder!(Mistral, MISTRAL);

static MISTRAL: Family = Family {
    name: "mistral",
    title: "Mistral",
    model_types: &["mistral"],
    classes: &["MistralForCausalLM"],
    read: Some(|fields| Ok(Architecture::Mistral(Mistral(DEFAULTS.read(fields)?)))),
    ..GATED
};

const DEFAULTS: Defaults = Defaults {
    vocabulary: 32_000,
    width: 4096,
    inner: 14_336,
    heads: 32,
    key_heads: Some(8),
    head_width: None,
    biases: Biases::None,
    head_norms: false,
    positions: 131_072.0,
    windows: window_of_all_layers,
};

fn window_of_all_layers(fields: &Fields<'_>, _: u64) -> Result<Windows, ArchitectureError> {
    Ok(Windows::Shared {
        window: fields.window()?,
    })
}
