//! LLaMA, of which a `config.json` is all that is needed.

use serde::{Deserialize, Serialize};

use crate::Architecture;
use crate::error::ArchitectureError;
use crate::family::Family;
use crate::family::decoder::{Biases, Decoder, Defaults, GATED, describe_decoder};
use crate::fields::Fields;
use crate::window::Windows;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Llama(pub Decoder);

describe_decoder!(Llama, LLAMA);

static LLAMA: Family = Family {
    name: "llama",
    title: "LLaMA",
    model_types: &["llama"],
    classes: &["LlamaForCausalLM"],
    read: Some(|fields| Ok(Architecture::Llama(Llama(DEFAULTS.read(fields)?)))),
    ..GATED
};

const DEFAULTS: Defaults = Defaults {
    vocabulary: 32_000,
    width: 4096,
    inner: 11_008,
    heads: 32,
    key_heads: None,
    head_width: None,
    biases: Biases::Stated,
    head_norms: false,
    positions: 2048.0,
    windows: no_window,
};

fn no_window(_: &Fields<'_>, _: u64) -> Result<Windows, ArchitectureError> {
    Ok(Windows::Shared { window: None })
}
