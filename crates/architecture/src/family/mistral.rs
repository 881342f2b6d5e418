//! Mistral, of which a `config.json` is all that is needed.

use serde::{Deserialize, Serialize};
use serde_json::Value;

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

/// A file that lists the kinds of its layers is Ministral's: transformers gives each layer the
/// kind that is written there. Only where all are of one kind is that what a window means here.
fn window_of_all_layers(fields: &Fields<'_>, layers: u64) -> Result<Windows, ArchitectureError> {
    const KEY: &str = "layer_types";
    let window = fields.window()?;
    let kinds = match fields.0.get(KEY) {
        None | Some(Value::Null) => return Ok(Windows::Shared { window }),
        Some(Value::Array(kinds)) if kinds.len() as u64 == layers => kinds,
        Some(other) => {
            return Err(fields.problem(KEY, other, &format!("a list of {layers} kinds of layers")));
        }
    };
    let (full, sliding) = ("full_attention", "sliding_attention");
    let first = kinds.first().and_then(Value::as_str).unwrap_or_default();
    let is_known = [full, sliding].contains(&first);
    for (layer, kind) in kinds.iter().enumerate() {
        if !is_known || kind != first {
            let wanted = match is_known {
                true => format!(
                    "{first:?}, as in layer 0: windows in a part of the layers are not known for mistral"
                ),
                false => format!("{full:?} or {sliding:?}"),
            };
            return Err(fields.problem(&format!("{KEY}[{layer}]"), kind, &wanted));
        }
    }
    Ok(Windows::Shared {
        window: window.filter(|_| first == sliding),
    })
}
