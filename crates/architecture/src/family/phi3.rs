//! Phi-3 and Phi-4: the gated decoder with query, key and value from one projection, gate and values of the feed-forward
//! part from another, and rotary positions on a part of each head.

use serde::{Deserialize, Serialize};

use crate::Architecture;
use crate::adapter::Adapters;
use crate::describe::Describe;
use crate::error::ArchitectureError;
use crate::family::decoder::{Biases, Decoder, Defaults};
use crate::family::{Family, PLAIN};
use crate::fields::{Fields, LARGEST};
use crate::window::Windows;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Phi3 {
    pub decoder: Decoder,
    /// Numbers of a head that are turned by its position; the others are left as they are.
    pub rotary_width: u64,
    /// Of what each part of a layer adds.
    pub residual_dropout: f64,
}

impl Describe for Phi3 {
    const FAMILY: &'static Family = &PHI3;

    fn vocabulary(&self) -> u64 {
        self.decoder.vocabulary
    }

    fn layers(&self) -> u64 {
        self.decoder.layers
    }

    fn set_layers(&mut self, layers: u64) {
        self.decoder.layers = layers;
    }

    fn parameters(&self) -> u64 {
        self.decoder.parameters()
    }
}

static PHI3: Family = Family {
    name: "phi3",
    title: "Phi-3",
    model_types: &["phi3"],
    classes: &["Phi3ForCausalLM"],
    read: Some(|fields| read(fields).map(Architecture::Phi3)),
    adapters: Some(&Adapters {
        linear: &["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
        // peft names none for this family; what it takes of others, query and value, is this one.
        usual: &["qkv_proj"],
    }),
    chooses_attention: true,
    ..PLAIN
};

const DEFAULTS: Defaults = Defaults {
    vocabulary: 32_064,
    width: 3072,
    inner: 8192,
    heads: 32,
    key_heads: None,
    head_width: None,
    biases: Biases::None,
    head_norms: false,
    positions: 4096.0,
    windows: |fields, _| {
        Ok(Windows::Shared {
            window: fields.optional(&["sliding_window"], LARGEST)?,
        })
    },
};

fn read(fields: &Fields<'_>) -> Result<Phi3, ArchitectureError> {
    let decoder = DEFAULTS.read(fields)?;
    let share = fields.rotary_share()?.unwrap_or(1.0);
    Ok(Phi3 {
        rotary_width: fields.rotary_width(decoder.head_width, share)?,
        residual_dropout: fields.probability("resid_pdrop", 0.0)?,
        decoder,
    })
}
