//! `config.json` of Hugging Face models, and the models that are known by name.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::activation::Activation;
use super::bert::BertConfig;
use super::fields::{Fields, LARGEST, MOST_HEADS, MOST_STATES};
use super::gpt2::Gpt2Config;
use super::llama::LlamaConfig;
use super::llama_lines::{self, Lines};
use super::mamba_hugging_face::HuggingFaceMambaConfig;
use super::mask::{Masking, SlidingLayers};
use super::workload::Architecture;
use crate::TorchError;

/// A name, and the fields of its configuration.
type Preset = (&'static str, fn() -> Value);

/// Named sizes: the fields in which they differ from their family's defaults.
const PRESETS: [Preset; 15] = [
    ("gpt2", || json!({"model_type": "gpt2"})),
    (
        "gpt2-medium",
        || json!({"model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16}),
    ),
    ("qwen2.5-0.5b", || {
        gated("qwen2", [151_936, 896, 4864, 24, 14, 2], true)
    }),
    ("qwen2.5-1.5b", || {
        gated("qwen2", [151_936, 1536, 8960, 28, 12, 2], true)
    }),
    ("qwen2.5-7b", || {
        gated("qwen2", [152_064, 3584, 18944, 28, 28, 4], false)
    }),
    ("llama-1b", || {
        gated("llama", [128_256, 2048, 8192, 16, 32, 8], true)
    }),
    ("tinyllama", || {
        gated("llama", [32_000, 2048, 5632, 22, 32, 4], false)
    }),
    ("mistral-7b", || json!({"model_type": "mistral"})),
    ("bert-base", || json!({"model_type": "bert"})),
    ("minilm-l6", || {
        json!({"model_type": "bert", "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12,
               "intermediate_size": 1536})
    }),
    ("mamba-130m", || mamba(768, 24)),
    ("mamba-370m", || mamba(1024, 48)),
    ("mamba-790m", || mamba(1536, 48)),
    ("mamba-1.4b", || mamba(2048, 48)),
    ("mamba-2.8b", || mamba(2560, 64)),
];

fn gated(
    family: &str,
    [vocabulary, width, inner, layers, heads, key_heads]: [u64; 6],
    tied: bool,
) -> Value {
    json!({"model_type": family, "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": inner,
           "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": key_heads,
           "tie_word_embeddings": tied})
}

fn mamba(width: u64, layers: u64) -> Value {
    json!({"model_type": "mamba", "hidden_size": width, "num_hidden_layers": layers})
}

/// Names of the models that need no file.
pub fn preset_names() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|(name, _)| *name)
}

/// A model by name, with fields of its configuration replaced.
pub fn preset(name: &str, overrides: &Map<String, Value>) -> Result<Architecture, TorchError> {
    let Some((_, config)) = PRESETS.iter().find(|(preset, _)| *preset == name) else {
        return Err(TorchError::UnknownModel {
            name: name.into(),
            known: preset_names().collect::<Vec<_>>().join(", "),
        });
    };
    let mut config = config();
    if let Value::Object(fields) = &mut config {
        fields.extend(overrides.clone());
    }
    architecture(&config)
}

/// The architecture of a `config.json` file.
pub fn read(path: &Path) -> Result<Architecture, TorchError> {
    let text = std::fs::read_to_string(path).map_err(|source| TorchError::File {
        path: path.into(),
        source,
    })?;
    let config: Value = serde_json::from_str(&text).map_err(|problem| TorchError::NotJson {
        path: path.into(),
        problem: problem.to_string(),
    })?;
    architecture(&config).map_err(|error| match error {
        TorchError::ModelConfig {
            key, value, wanted, ..
        } => TorchError::ModelConfig {
            origin: path.display().to_string(),
            key,
            value,
            wanted,
        },
        other => other,
    })
}

/// The architecture that a parsed `config.json` describes.
pub fn architecture(config: &Value) -> Result<Architecture, TorchError> {
    let fields = Fields(config);
    match fields.text("model_type")? {
        "gpt2" => gpt2(&fields).map(Architecture::Gpt2),
        "llama" => gated_config(&fields, &LLAMA).map(Architecture::Llama),
        "mistral" => gated_config(&fields, &MISTRAL).map(Architecture::Llama),
        "qwen2" => gated_config(&fields, &QWEN2).map(Architecture::Llama),
        "bert" => bert(&fields).map(Architecture::Bert),
        "mamba" => mamba_config(&fields).map(Architecture::HuggingFaceMamba),
        other => Err(fields.problem(
            "model_type",
            other,
            "one of gpt2, llama, mistral, qwen2, bert, mamba",
        )),
    }
}

fn gpt2(fields: &Fields<'_>) -> Result<Gpt2Config, TorchError> {
    let default = Gpt2Config::default();
    fields.refuse(&["add_cross_attention", "reorder_and_upcast_attn"])?;
    let width = fields.number(&["n_embd", "hidden_size"], default.width)?;
    Ok(Gpt2Config {
        vocabulary: fields.number(&["vocab_size"], default.vocabulary)?,
        positions: fields.number(
            &["n_positions", "max_position_embeddings"],
            default.positions,
        )?,
        width,
        layers: fields.layers(&["n_layer", "num_hidden_layers"], default.layers)?,
        heads: fields.heads(&["n_head", "num_attention_heads"], default.heads, width)?,
        inner: fields.optional(&["n_inner"], LARGEST)?,
        residual_dropout: fields.probability("resid_pdrop", default.residual_dropout)?,
        embedding_dropout: fields.probability("embd_pdrop", default.embedding_dropout)?,
        attention_dropout: fields.probability("attn_pdrop", default.attention_dropout)?,
        activation: fields.activation("activation_function", default.activation)?,
        tied: fields.flag("tie_word_embeddings", true)?,
    })
}

/// Where the families of gated models differ in their defaults.
struct GatedDefaults {
    vocabulary: u64,
    inner: u64,
    key_heads: Option<u64>,
    /// Qwen2 always has biases of query, key and value and never others; LLaMA has all or none.
    fixed_bias: Option<bool>,
    masking: fn(&Fields<'_>, u64) -> Result<Masking, TorchError>,
    lines: &'static Lines,
}

const LLAMA: GatedDefaults = GatedDefaults {
    vocabulary: 32_000,
    inner: 11_008,
    key_heads: None,
    fixed_bias: None,
    masking: no_window,
    lines: &llama_lines::LLAMA,
};
const MISTRAL: GatedDefaults = GatedDefaults {
    vocabulary: 32_000,
    inner: 14_336,
    key_heads: Some(8),
    fixed_bias: Some(false),
    masking: window_of_all_layers,
    lines: &llama_lines::MISTRAL,
};
const QWEN2: GatedDefaults = GatedDefaults {
    vocabulary: 151_936,
    inner: 22_016,
    key_heads: Some(32),
    fixed_bias: Some(true),
    masking: window_of_late_layers,
    lines: &llama_lines::QWEN2,
};

fn gated_config(fields: &Fields<'_>, default: &GatedDefaults) -> Result<LlamaConfig, TorchError> {
    let width = fields.number(&["hidden_size"], 4096)?;
    let heads = fields
        .optional(&["num_attention_heads"], MOST_HEADS)?
        .unwrap_or(32);
    let head_width = match fields.optional(&["head_dim"], LARGEST)? {
        Some(head_width) => head_width,
        None => width / fields.heads(&["num_attention_heads"], 32, width)?,
    };
    let key_heads = fields.number(&["num_key_value_heads"], default.key_heads.unwrap_or(heads))?;
    if !heads.is_multiple_of(key_heads) {
        return Err(fields.problem(
            "num_key_value_heads",
            key_heads,
            &format!("a divisor of the {heads} heads"),
        ));
    }
    if !head_width.is_multiple_of(2) {
        return Err(fields.problem("head_dim", head_width, "an even number"));
    }
    let asked = fields.flag("attention_bias", false)?;
    let layers = fields.layers(&["num_hidden_layers"], 32)?;
    Ok(LlamaConfig {
        vocabulary: fields.number(&["vocab_size"], default.vocabulary)?,
        width,
        inner: fields.number(&["intermediate_size"], default.inner)?,
        layers,
        heads,
        key_heads,
        head_width,
        attention_bias: default.fixed_bias.unwrap_or(asked),
        output_bias: default.fixed_bias.is_none() && asked,
        feed_bias: default.fixed_bias.is_none() && fields.flag("mlp_bias", false)?,
        attention_dropout: fields.probability("attention_dropout", 0.0)?,
        activation: fields.activation("hidden_act", Activation::Silu)?,
        tied: fields.flag("tie_word_embeddings", false)?,
        masking: (default.masking)(fields, layers)?,
        lines: default.lines,
    })
}

fn no_window(_: &Fields<'_>, _: u64) -> Result<Masking, TorchError> {
    Ok(Masking::Shared { window: None })
}

fn window_of_all_layers(fields: &Fields<'_>, _: u64) -> Result<Masking, TorchError> {
    Ok(Masking::Shared {
        window: fields.window()?,
    })
}

/// Qwen2: off unless asked for, and then for the layers from `max_window_layers` on. Newer files also list the kind of every
/// layer, and must say the same there.
fn window_of_late_layers(fields: &Fields<'_>, layers: u64) -> Result<Masking, TorchError> {
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
    Ok(Masking::ByKind { sliding })
}

fn bert(fields: &Fields<'_>) -> Result<BertConfig, TorchError> {
    let default = BertConfig::default();
    fields.refuse(&["add_cross_attention", "is_decoder"])?;
    let width = fields.number(&["hidden_size"], default.width)?;
    Ok(BertConfig {
        vocabulary: fields.number(&["vocab_size"], default.vocabulary)?,
        positions: fields.number(&["max_position_embeddings"], default.positions)?,
        token_types: fields.number(&["type_vocab_size"], default.token_types)?,
        width,
        inner: fields.number(&["intermediate_size"], default.inner)?,
        layers: fields.layers(&["num_hidden_layers"], default.layers)?,
        heads: fields.heads(&["num_attention_heads"], default.heads, width)?,
        hidden_dropout: fields.probability("hidden_dropout_prob", default.hidden_dropout)?,
        attention_dropout: fields
            .probability("attention_probs_dropout_prob", default.attention_dropout)?,
        activation: fields.activation("hidden_act", default.activation)?,
        tied: fields.flag("tie_word_embeddings", true)?,
    })
}

fn mamba_config(fields: &Fields<'_>) -> Result<HuggingFaceMambaConfig, TorchError> {
    let width = fields.number(&["hidden_size"], 768)?;
    let expansion = fields.number(&["expand"], 2)?;
    let inner = match fields.optional(&["intermediate_size"], LARGEST)? {
        Some(inner) => inner,
        None if expansion * width <= LARGEST => expansion * width,
        None => {
            let most = format!("at most {LARGEST} / hidden_size {width}");
            return Err(fields.problem("expand", expansion, &most));
        }
    };
    let rank = match fields.0.get("time_step_rank") {
        Some(Value::String(text)) if text == "auto" => None,
        Some(Value::String(text)) => {
            return Err(fields.problem("time_step_rank", text, "a whole number or \"auto\""));
        }
        _ => fields.optional(&["time_step_rank"], LARGEST)?,
    };
    Ok(HuggingFaceMambaConfig {
        vocabulary: fields.number(&["vocab_size"], 50_280)?,
        width,
        layers: fields.layers(&["num_hidden_layers"], 32)?,
        inner,
        states: fields.optional(&["state_size"], MOST_STATES)?.unwrap_or(16),
        kernel: fields.number(&["conv_kernel"], 4)?,
        rank: rank.unwrap_or(width.div_ceil(16)),
        projection_bias: fields.flag("use_bias", false)?,
        convolution_bias: fields.flag("use_conv_bias", true)?,
        residual_in_float32: fields.flag("residual_in_fp32", true)?,
        tied: fields.flag("tie_word_embeddings", true)?,
    })
}
