//! The vision transformer, trained to name what an image shows: patches of the image are its tokens.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Architecture;
use crate::activation::Activation;
use crate::adapter::Adapters;
use crate::describe::Describe;
use crate::error::ArchitectureError;
use crate::family::{Family, PLAIN};
use crate::fields::{Fields, LARGEST};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Vit {
    /// Height and width of an image, in pixels.
    pub image: [u64; 2],
    /// The same of a patch.
    pub patch: [u64; 2],
    pub channels: u64,
    pub width: u64,
    pub inner: u64,
    pub layers: u64,
    pub heads: u64,
    pub hidden_dropout: f64,
    pub attention_dropout: f64,
    pub activation: Activation,
    /// Whether queries, keys and values have biases.
    pub attention_bias: bool,
    pub labels: u64,
}

/// The most pixels on a side of an image.
const MOST_PIXELS: u64 = 1 << 14;

impl Vit {
    /// Patches over the height and over the width.
    pub fn grid(&self) -> [u64; 2] {
        [0, 1].map(|side| self.image[side] / self.patch[side])
    }

    /// The patches, and the token that stands for the whole image.
    pub fn tokens(&self) -> u64 {
        let [rows, columns] = self.grid();
        rows * columns + 1
    }
}

impl Describe for Vit {
    const FAMILY: &'static Family = &VIT;

    /// What its logits are over.
    fn vocabulary(&self) -> u64 {
        self.labels
    }

    fn layers(&self) -> u64 {
        self.layers
    }

    fn set_layers(&mut self, layers: u64) {
        self.layers = layers;
    }

    fn positions(&self) -> Option<u64> {
        Some(self.tokens())
    }

    fn has_one_length(&self) -> bool {
        true
    }

    fn parameters(&self) -> u64 {
        let (d, inner) = (self.width, self.inner);
        let norm = 2 * d;
        let patch = self.channels * self.patch[0] * self.patch[1];
        let embeddings = d + d * patch + d + self.tokens() * d;
        let biases = if self.attention_bias { 4 * d } else { d };
        let layer = 4 * d * d + biases + 2 * norm + d * inner + inner + inner * d + d;
        embeddings + self.layers * layer + norm + d * self.labels + self.labels
    }
}

static VIT: Family = Family {
    name: "vit",
    title: "ViT",
    model_types: &["vit"],
    classes: &["ViTForImageClassification", "ViTModel"],
    read: Some(|fields| read(fields).map(Architecture::Vit)),
    adapters: Some(&Adapters {
        linear: &["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"],
        usual: &["q_proj", "v_proj"],
    }),
    chooses_attention: true,
    assumptions: &["images come to the card as numbers of the weights' type, each with one label"],
    ..PLAIN
};

fn read(fields: &Fields<'_>) -> Result<Vit, ArchitectureError> {
    let width = fields.number(&["hidden_size"], 768)?;
    let (image, patch) = (sides(fields, "image_size")?, sides(fields, "patch_size")?);
    if (0..2).any(|side| patch[side] > image[side]) {
        let [height, breadth] = image;
        let wanted = format!("a patch that fits into an image of {height} × {breadth} pixels");
        let written = format!("{} × {}", patch[0], patch[1]);
        return Err(fields.problem("patch_size", written, &wanted));
    }
    Ok(Vit {
        image,
        patch,
        channels: fields.number(&["num_channels"], 3)?,
        width,
        inner: fields.number(&["intermediate_size"], 4 * 768)?,
        layers: fields.layers(&["num_hidden_layers"], 12)?,
        heads: fields.heads(&["num_attention_heads"], 12, width)?,
        hidden_dropout: fields.probability("hidden_dropout_prob", 0.0)?,
        attention_dropout: fields.probability("attention_probs_dropout_prob", 0.0)?,
        activation: fields.activation("hidden_act", Activation::Gelu)?,
        attention_bias: fields.flag("qkv_bias", true)?,
        labels: labels(fields)?,
    })
}

/// A number for both sides, or one for each. What an image measures decides everything, so that it has to be said.
fn sides(fields: &Fields<'_>, key: &str) -> Result<[u64; 2], ArchitectureError> {
    let wanted = "pixels of a side, as 224 for images and 16 for patches";
    let side = |value: &Value| fields.whole(key, value, 1..=MOST_PIXELS, "");
    match fields.0.get(key) {
        None | Some(Value::Null) => Err(fields.problem(key, Value::Null, wanted)),
        Some(Value::Array(both)) => match both.as_slice() {
            [height, breadth] => Ok([side(height)?, side(breadth)?]),
            _ => Err(fields.problem(key, Value::Array(both.clone()), "a number, or two of them")),
        },
        Some(value) => side(value).map(|side| [side; 2]),
    }
}

/// As many as have names; two, where none has.
fn labels(fields: &Fields<'_>) -> Result<u64, ArchitectureError> {
    const USUAL: u64 = 2;
    let named = fields.0.get("id2label").and_then(Value::as_object);
    match named.map(|names| names.len() as u64) {
        Some(labels) if (1..=LARGEST).contains(&labels) => Ok(labels),
        _ => fields.number(&["num_labels"], USUAL),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::model::Model;

    fn read(config: &Value) -> Result<Vit, String> {
        let model = Model::of_config(config, "a model", "config.json");
        match model.map_err(|problem| problem.to_string())?.architecture {
            Architecture::Vit(shape) => Ok(shape),
            other => Err(format!("{other:?}")),
        }
    }

    fn config(key: &str, value: Value) -> Value {
        let mut config = json!({
            "architectures": ["ViTForImageClassification"], "attention_probs_dropout_prob": 0.0, "encoder_stride": 16,
            "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "hidden_size": 768, "image_size": 224,
            "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-12, "model_type": "vit",
            "num_attention_heads": 12, "num_channels": 3, "num_hidden_layers": 12, "patch_size": 16, "qkv_bias": true,
        });
        config[key] = value;
        config
    }

    #[test]
    fn labels_are_counted_by_their_names() {
        let names: serde_json::Map<String, Value> = (0..1000)
            .map(|label| (label.to_string(), json!(format!("LABEL_{label}"))))
            .collect();
        let vit = read(&config("id2label", Value::Object(names))).unwrap();
        assert_eq!((vit.labels, vit.tokens()), (1000, 197));
        assert_eq!(vit.parameters(), 86_567_656);
        let two = read(&config("num_labels", Value::Null)).unwrap();
        assert_eq!(two.labels, 2);
    }

    #[test]
    fn an_image_may_have_two_sides() {
        let wide = read(&config("image_size", json!([64, 224]))).unwrap();
        assert_eq!((wide.grid(), wide.tokens()), ([4, 14], 57));
    }

    #[test]
    fn what_is_not_known_is_refused_by_its_name() {
        for (key, value, said) in [
            ("image_size", Value::Null, "image_size"),
            ("image_size", json!([224]), "image_size"),
            ("image_size", json!("large"), "image_size"),
            ("patch_size", json!(448), "patch_size"),
            ("hidden_act", json!("mish"), "mish"),
            (
                "architectures",
                json!(["ViTForMaskedImageModeling"]),
                "ViTForMaskedImageModeling",
            ),
        ] {
            let problem = read(&config(key, value)).unwrap_err();
            assert!(problem.contains(said), "{problem}");
        }
    }
}
