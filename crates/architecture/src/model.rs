//! A model as a name or a file gives it: its shape, and what else the file says about its weights.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Architecture;
use crate::error::ArchitectureError;
use crate::family::{Family, families};
use crate::fields::Fields;

/// A model that was named.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// As people know it: a hub id, a name or a path.
    pub title: String,
    pub architecture: Architecture,
    /// The type of the weights as they are saved.
    pub weights: Option<TypeOfWeights>,
    pub quantization: Option<Quantization>,
    /// How the shape was found, in words: "the catalogue", a path.
    pub found_in: String,
    /// Where its files are, if they are here.
    pub folder: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TypeOfWeights {
    Fp32,
    Bf16,
    Fp16,
}

impl TypeOfWeights {
    pub fn named(name: &str) -> Option<TypeOfWeights> {
        match name.trim_start_matches("torch.") {
            "float32" | "float" | "fp32" => Some(TypeOfWeights::Fp32),
            "bfloat16" | "bf16" => Some(TypeOfWeights::Bf16),
            "float16" | "half" | "fp16" => Some(TypeOfWeights::Fp16),
            _ => None,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            TypeOfWeights::Fp32 => "fp32",
            TypeOfWeights::Bf16 => "bf16",
            TypeOfWeights::Fp16 => "fp16",
        }
    }
}

/// How frozen weights are kept in less than their type.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Quantization {
    /// bitsandbytes' four bits, with the scales quantised again or not.
    FourBit { double: bool },
    /// bitsandbytes' LLM.int8.
    EightBit,
    /// Another scheme, by its name in files.
    Other(String),
}

impl Quantization {
    pub fn name(&self) -> &str {
        match self {
            Quantization::FourBit { .. } => "4bit",
            Quantization::EightBit => "8bit",
            Quantization::Other(name) => name,
        }
    }

    /// `quantization_config` of a `config.json`.
    fn read(fields: &Fields<'_>) -> Option<Quantization> {
        let config = fields.0.get("quantization_config")?.as_object()?;
        let flag = |key: &str| config.get(key).and_then(Value::as_bool) == Some(true);
        let method = config.get("quant_method").and_then(Value::as_str);
        Some(match method {
            _ if flag("load_in_4bit") => Quantization::FourBit {
                double: flag("bnb_4bit_use_double_quant"),
            },
            _ if flag("load_in_8bit") => Quantization::EightBit,
            Some(name) => Quantization::Other(name.to_owned()),
            None => Quantization::Other("an unnamed scheme".to_owned()),
        })
    }
}

impl Model {
    /// The model of a `config.json`; `origin` names the file in errors.
    pub fn of_config(
        config: &Value,
        title: impl Into<String>,
        origin: &str,
    ) -> Result<Model, ArchitectureError> {
        let title = title.into();
        let fields = Fields(config);
        let in_place = |error: ArchitectureError| error.of(origin);
        let model_type = fields.text("model_type").map_err(in_place)?;
        let Some(family) = Family::of_model_type(model_type) else {
            return Err(ArchitectureError::KnownByName {
                title,
                family: model_type.to_owned(),
            });
        };
        check_class(&fields, family).map_err(in_place)?;
        let read = family.read.ok_or_else(|| ArchitectureError::KnownByName {
            title: title.clone(),
            family: model_type.to_owned(),
        })?;
        let architecture = read(&fields).map_err(in_place)?;
        Ok(Model {
            title,
            architecture,
            weights: type_of_weights(&fields).map_err(in_place)?,
            quantization: Quantization::read(&fields),
            found_in: origin.to_owned(),
            folder: None,
        })
    }

    /// The usual shape of a family, or one of its sizes.
    pub fn of_family(family: &'static Family, size: Option<&str>) -> Option<Model> {
        let size = match size {
            Some(name) => family.size(name)?,
            None => family.usual_size()?,
        };
        Some(Model {
            title: family.name.to_owned(),
            architecture: (size.shape)(),
            weights: None,
            quantization: None,
            found_in: format!("size {}", size.name),
            folder: None,
        })
    }
}

fn type_of_weights(fields: &Fields<'_>) -> Result<Option<TypeOfWeights>, ArchitectureError> {
    // The newer name first.
    for key in ["dtype", "torch_dtype"] {
        match fields.0.get(key) {
            None | Some(Value::Null) => {}
            Some(Value::String(name)) if name == "auto" => {}
            Some(value) => {
                let named = value.as_str().and_then(TypeOfWeights::named);
                return match named {
                    Some(found) => Ok(Some(found)),
                    None => Err(fields.problem(key, value, "float32, bfloat16 or float16")),
                };
            }
        }
    }
    Ok(None)
}

/// A model with another head is another program.
fn check_class(fields: &Fields<'_>, family: &Family) -> Result<(), ArchitectureError> {
    let Some(Value::Array(classes)) = fields.0.get("architectures") else {
        return Ok(());
    };
    let Some(class) = classes.first().and_then(Value::as_str) else {
        return Ok(());
    };
    if family.classes.contains(&class) {
        return Ok(());
    }
    let known = families()
        .flat_map(|family| family.classes)
        .any(|known| *known == class);
    let wanted = match known {
        true => format!("a class of the model_type {}", family.name),
        false => format!(
            "{}: the training step of another head is not known here (remove `architectures` to plan it as that)",
            family.classes.join(" or ")
        ),
    };
    Err(fields.problem("architectures", class, &wanted))
}
