//! RoBERTa: BERT with positions that are counted after the padding's number.

use serde::{Deserialize, Serialize};

use crate::Architecture;
use crate::describe::Describe;
use crate::error::ArchitectureError;
use crate::family::bert::{self, Bert};
use crate::family::{Family, PLAIN};
use crate::fields::Fields;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Roberta(pub Bert);

/// Of the padding, where a file is silent: positions begin after it.
const PADDING: u64 = 1;

impl Describe for Roberta {
    const FAMILY: &'static Family = &ROBERTA;

    fn vocabulary(&self) -> u64 {
        self.0.vocabulary
    }

    fn layers(&self) -> u64 {
        self.0.layers
    }

    fn set_layers(&mut self, layers: u64) {
        self.0.layers = layers;
    }

    fn positions(&self) -> Option<u64> {
        Some(self.0.positions.saturating_sub(PADDING + 1))
    }

    fn is_masked(&self) -> bool {
        true
    }

    fn parameters(&self) -> u64 {
        self.0.parameters()
    }
}

static ROBERTA: Family = Family {
    name: "roberta",
    title: "RoBERTa",
    model_types: &["roberta"],
    classes: &["RobertaForMaskedLM", "RobertaModel"],
    read: Some(|fields| read(fields).map(Architecture::Roberta)),
    adapters: Some(&bert::ADAPTERS),
    chooses_attention: true,
    ..PLAIN
};

fn read(fields: &Fields<'_>) -> Result<Roberta, ArchitectureError> {
    if let Some(padding) = fields.0.get("pad_token_id")
        && padding.as_u64().is_some_and(|padding| padding != PADDING)
    {
        return Err(fields.problem(
            "pad_token_id",
            padding,
            "1, as positions are counted after it",
        ));
    }
    let default = Bert {
        vocabulary: 50_265,
        ..Bert::default()
    };
    Ok(Roberta(default.read(fields)?))
}
