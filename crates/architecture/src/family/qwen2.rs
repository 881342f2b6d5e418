//! Qwen2, of which a `config.json` is all that is needed.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Architecture;
use crate::error::ArchitectureError;
use crate::family::Family;
use crate::family::decoder::{Biases, Decoder, Defaults, GATED, describe_decoder};
use crate::fields::Fields;
use crate::window::{SlidingLayers, Windows};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Qwen2(pub Decoder);

describe_decoder!(Qwen2, QWEN2);

static QWEN2: Family = Family {
    name: "qwen2",
    title: "Qwen2",
    model_types: &["qwen2"],
    classes: &["Qwen2ForCausalLM"],
    read: Some(|fields| Ok(Architecture::Qwen2(Qwen2(DEFAULTS.read(fields)?)))),
    ..GATED
};

const DEFAULTS: Defaults = Defaults {
    vocabulary: 151_936,
    width: 4096,
    inner: 22_016,
    heads: 32,
    key_heads: Some(32),
    head_width: None,
    biases: Biases::QueryKeyValue,
    head_norms: false,
    positions: 32_768.0,
    windows: window_of_late_layers,
};

/// Off unless asked for, and then for the layers from `max_window_layers` on. Newer files also list
/// the kind of every layer, and must say the same there.
pub(crate) fn window_of_late_layers(
    fields: &Fields<'_>,
    layers: u64,
) -> Result<Windows, ArchitectureError> {
    let (window, first) = (fields.window()?, fields.full_layers()?);
    let used = fields.flag("use_sliding_window", false)? && first < layers;
    let sliding = window
        .filter(|_| used)
        .map(|window| SlidingLayers { window, first });
    if let Some(Value::Array(kinds)) = fields.0.get("layer_types") {
        for (layer, kind) in (0..layers).zip(kinds) {
            let slides = sliding.is_some_and(|sliding| layer >= sliding.first);
            let due = ["full_attention", "sliding_attention"][usize::from(slides)];
            if kind != due {
                let key = format!("layer_types[{layer}]");
                let wanted = format!("{due:?}, as use_sliding_window and max_window_layers say");
                return Err(fields.problem(&key, kind, &wanted));
            }
        }
    }
    Ok(Windows::ByKind { sliding })
}
