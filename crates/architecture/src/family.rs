//! What a family of models has in common, whatever its sizes.

pub mod bert;
pub mod decoder;
pub mod distilbert;
pub mod gemma;
pub mod gemma2;
pub mod gemma3;
pub mod gpt2;
pub mod gpt_neox;
pub mod gsa;
pub mod llama;
pub mod mamba;
pub mod mamba_hugging_face;
pub mod mistral;
pub mod mu;
pub mod naics;
pub mod opt;
pub mod phi3;
pub mod qwen2;
pub mod qwen3;
pub mod roberta;
pub mod t5;
pub mod vit;

use crate::adapter::Adapters;
use crate::error::ArchitectureError;
use crate::fields::Fields;
use crate::nearest::nearest_name;
use crate::setting::{ShapeSetting, Tunable};
use crate::{ARCHITECTURES, Architecture};

/// A shape from the fields of a `config.json`.
pub type ReadShape = fn(&Fields<'_>) -> Result<Architecture, ArchitectureError>;

/// The description of a family. Every field is a fact or a function of the shape alone.
#[derive(Debug)]
pub struct Family {
    /// As settings, flags and reports name it.
    pub name: &'static str,
    /// As people write it.
    pub title: &'static str,
    /// `model_type` of its `config.json`; empty where it has none.
    pub model_types: &'static [&'static str],
    /// Classes of `architectures` in a `config.json` whose training step is known here.
    pub classes: &'static [&'static str],
    /// The shape that a `config.json` describes.
    pub read: Option<ReadShape>,
    pub settings: &'static [ShapeSetting],
    /// Named shapes, smallest first.
    pub sizes: &'static [NamedSize],
    /// Settings of the training with which it was published, where they are not the usual ones:
    /// keys and values of the registry.
    pub training: &'static [(&'static str, &'static str)],
    pub tunables: &'static [Tunable],
    pub adapters: Option<&'static Adapters>,
    /// Whether the model's PyTorch code lets one choose how attention is computed.
    pub chooses_attention: bool,
    /// Whether a file has to name it: others have its keys too, and mean something plainer.
    pub is_named: bool,
    pub checkpointing: LayerCheckpointing,
    /// What a prediction takes for granted of this family, because only the run can tell.
    pub assumptions: &'static [&'static str],
}

/// Whether the model's PyTorch code can checkpoint its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerCheckpointing {
    /// Where it is asked for.
    Chosen,
    /// Unless it is turned off.
    Usual,
    /// It has no such code.
    Never,
    /// It always does.
    Always,
}

/// One named size of a family.
#[derive(Debug)]
pub struct NamedSize {
    pub name: &'static str,
    pub aliases: &'static [&'static str],
    pub shape: fn() -> Architecture,
    /// The tokenizer whose vocabulary it has.
    pub tokenizer: &'static str,
}

impl NamedSize {
    fn answers_to(&self, name: &str) -> bool {
        let name = name.trim().replace('_', "-");
        std::iter::once(&self.name)
            .chain(self.aliases)
            .any(|known| known.eq_ignore_ascii_case(&name))
    }
}

/// What the families have where nothing else is said.
pub(crate) const PLAIN: Family = Family {
    name: "",
    title: "",
    model_types: &[],
    classes: &[],
    read: None,
    settings: &[],
    sizes: &[],
    training: &[],
    tunables: &[],
    adapters: None,
    chooses_attention: false,
    is_named: false,
    checkpointing: LayerCheckpointing::Chosen,
    assumptions: &[],
};

impl Family {
    /// The family of a name, however it is written.
    pub fn named(name: &str) -> Option<&'static Family> {
        let name = name.trim().replace('_', "-");
        let mut families = families();
        families.find(|family| family.name.eq_ignore_ascii_case(&name))
    }

    /// The family of a `model_type`.
    pub fn of_model_type(model_type: &str) -> Option<&'static Family> {
        families().find(|family| family.model_types.contains(&model_type))
    }

    /// Whether settings and named sizes make its shape, rather than a `config.json` alone.
    pub fn has_settings(&self) -> bool {
        !self.settings.is_empty()
    }

    pub fn setting(&self, key: &str) -> Option<&'static ShapeSetting> {
        self.settings.iter().find(|setting| setting.key == key)
    }

    /// The size that a family has where none is named.
    pub fn usual_size(&self) -> Option<&'static NamedSize> {
        // Sizes over bytes are for demonstrations.
        let usual = self.sizes.iter().find(|size| size.tokenizer != "bytes");
        usual.or_else(|| self.sizes.first())
    }

    pub fn size(&self, name: &str) -> Option<&'static NamedSize> {
        self.sizes.iter().find(|size| size.answers_to(name))
    }

    /// The known size that a misspelt name is closest to.
    pub fn nearest_size(&self, name: &str) -> Option<&'static str> {
        let names = self
            .sizes
            .iter()
            .flat_map(|size| std::iter::once(&size.name).chain(size.aliases));
        nearest_name(name, names.copied())
    }

    /// "mamba small": unique among all sizes.
    pub fn title_of(&self, size: &NamedSize) -> String {
        format!("{} {}", self.name, size.name)
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Family) -> bool {
        self.name == other.name
    }
}

impl Eq for Family {}

/// Every family, in the order of the list.
pub fn families() -> impl Iterator<Item = &'static Family> {
    ARCHITECTURES.iter().map(|listed| listed.family)
}
