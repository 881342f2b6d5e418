//! What a model is: its family, shape, named sizes and settings, and how a Hugging Face
//! `config.json` or a hub id names it.
//!
//! One value, an [`Architecture`], is what `config` reads, `model` builds and `torch` replays. A
//! family is a file under `family/`; [`with_architectures`] is the one list of them. Names that
//! people have for models are in `catalogue` and `hub`.
//!
//! ```
//! use cinch_architecture::{Architecture, Family, Number};
//!
//! let gpt2 = Family::named("gpt2").and_then(|family| family.size("medium"));
//! let mut model = gpt2.map(|size| (size.shape)()).expect("a known size");
//! assert_eq!(model.parameters(), 354_823_168);
//! model.set("model.d_model", Number::Whole(512));
//! assert_eq!(model.get("model.d_model"), Some(Number::Whole(512)));
//! ```

mod activation;
mod adapter;
mod catalogue;
mod describe;
mod error;
mod family;
mod fields;
mod hub;
mod list;
mod model;
mod nearest;
mod rotary;
mod setting;
mod window;

use serde::{Deserialize, Serialize};

pub use activation::Activation;
pub use adapter::Adapters;
pub use catalogue::{Entry as CatalogueEntry, catalogue};
pub use describe::Describe;
pub use error::ArchitectureError;
pub use family::bert::Bert;
pub use family::decoder::Decoder;
pub use family::distilbert::DistilBert;
pub use family::gemma::Gemma;
pub use family::gemma2::Gemma2;
pub use family::gemma3::Gemma3;
pub use family::gpt_neox::GptNeoX;
pub use family::gpt2::Gpt2;
pub use family::gsa::Gsa;
pub use family::llama::Llama;
pub use family::mamba::Mamba;
pub use family::mamba_hugging_face::HuggingFaceMamba;
pub use family::mistral::Mistral;
pub use family::mu::Mu;
pub use family::naics::Naics;
pub use family::opt::Opt;
pub use family::phi3::Phi3;
pub use family::qwen2::Qwen2;
pub use family::qwen3::Qwen3;
pub use family::roberta::Roberta;
pub use family::t5::{T5, T5Variant};
pub use family::vit::Vit;
pub use family::{Family, LayerCheckpointing, NamedSize, families};
pub use hub::{HubFolders, configured, find};
pub use model::{Model, Quantization, TypeOfWeights};
pub use nearest::{nearest_key, nearest_name};
pub use rotary::{RotaryPositions, RotaryScaling};
pub use setting::{Number, Range, ShapeSetting, Tunable};
pub use window::{SlidingLayers, Windows};

/// A line of the list: a family, and whether cinch's engine trains it.
#[derive(Debug)]
pub struct Listed {
    pub family: &'static Family,
    pub is_trained: bool,
}

macro_rules! define {
    (trained { $($trained:ident),* } predicted { $($predicted:ident),* }) => {
        /// A model's shape.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "type", rename_all = "lowercase")]
        pub enum Architecture {
            $($trained($trained),)*
            $($predicted($predicted),)*
        }

        /// Every architecture there is.
        pub static ARCHITECTURES: &[Listed] = &[
            $(Listed { family: <$trained as Describe>::FAMILY, is_trained: true },)*
            $(Listed { family: <$predicted as Describe>::FAMILY, is_trained: false },)*
        ];

        /// Evaluates an expression with the shape of any architecture.
        macro_rules! of_shape {
            ($architecture:expr, $shape:ident => $value:expr) => {
                match $architecture {
                    $(Architecture::$trained($shape) => $value,)*
                    $(Architecture::$predicted($shape) => $value,)*
                }
            };
        }

        $(impl From<$trained> for Architecture {
            fn from(shape: $trained) -> Architecture {
                Architecture::$trained(shape)
            }
        })*
        $(impl From<$predicted> for Architecture {
            fn from(shape: $predicted) -> Architecture {
                Architecture::$predicted(shape)
            }
        })*
    };
}
with_architectures!(define);

/// The families that cinch's engine trains, with each of their sizes.
pub fn trained_sizes() -> impl Iterator<Item = (&'static Family, &'static NamedSize)> {
    let trained = ARCHITECTURES.iter().filter(|listed| listed.is_trained);
    trained.flat_map(|listed| listed.family.sizes.iter().map(|size| (listed.family, size)))
}

fn family_of<T: Describe>(_: &T) -> &'static Family {
    T::FAMILY
}

impl Architecture {
    pub fn family(&self) -> &'static Family {
        of_shape!(self, shape => family_of(shape))
    }

    /// The family's name, as settings and reports have it.
    pub fn name(&self) -> &'static str {
        self.family().name
    }

    pub fn vocabulary(&self) -> u64 {
        of_shape!(self, shape => shape.vocabulary())
    }

    pub fn layers(&self) -> u64 {
        of_shape!(self, shape => shape.layers())
    }

    /// The same model with another number of layers.
    pub fn with_layers(&self, layers: u64) -> Architecture {
        let mut changed = self.clone();
        of_shape!(&mut changed, shape => shape.set_layers(layers));
        changed
    }

    pub fn positions(&self) -> Option<u64> {
        of_shape!(self, shape => shape.positions())
    }

    /// Whether all its sequences have its number of positions.
    pub fn has_one_length(&self) -> bool {
        of_shape!(self, shape => shape.has_one_length())
    }

    /// Like parts of a sample that follow each other.
    pub fn repeats(&self) -> u64 {
        of_shape!(self, shape => shape.repeats())
    }

    /// The same model with another number of such parts.
    pub fn with_repeats(&self, repeats: u64) -> Architecture {
        let mut changed = self.clone();
        of_shape!(&mut changed, shape => shape.set_repeats(repeats));
        changed
    }

    /// Whether it is trained on masked tokens, rather than on the next one.
    pub fn is_masked(&self) -> bool {
        of_shape!(self, shape => shape.is_masked())
    }

    /// Whether its loss is over a vocabulary.
    pub fn has_logits(&self) -> bool {
        of_shape!(self, shape => shape.has_logits())
    }

    /// The same model, trained in stages with so many negatives each.
    pub fn with_stages(&self, negatives: Vec<u64>) -> Architecture {
        let mut changed = self.clone();
        of_shape!(&mut changed, shape => shape.set_stages(negatives));
        changed
    }

    pub fn sequences_per_sample(&self) -> u64 {
        of_shape!(self, shape => shape.sequences_per_sample())
    }

    pub fn towers(&self) -> u64 {
        of_shape!(self, shape => shape.towers())
    }

    pub fn scanned_states(&self) -> Option<u64> {
        of_shape!(self, shape => shape.scanned_states())
    }

    pub fn depends_on_micro_batch(&self) -> Option<&'static str> {
        of_shape!(self, shape => shape.depends_on_micro_batch())
    }

    pub fn mean_of_micro_batches(&self) -> Option<&'static str> {
        of_shape!(self, shape => shape.mean_of_micro_batches())
    }

    pub fn is_tied(&self) -> bool {
        of_shape!(self, shape => shape.is_tied())
    }

    pub fn parameters(&self) -> u64 {
        of_shape!(self, shape => shape.parameters())
    }

    pub fn adapters(&self) -> Option<&'static Adapters> {
        of_shape!(self, shape => shape.adapters())
    }

    pub fn beyond_the_engine(&self) -> Option<String> {
        of_shape!(self, shape => shape.beyond_the_engine())
    }

    pub fn beyond_the_replay(&self) -> Option<String> {
        of_shape!(self, shape => shape.beyond_the_replay())
    }

    /// Whether cinch's engine trains the family.
    pub fn is_trained(&self) -> bool {
        let family = self.family();
        let mut listed = ARCHITECTURES.iter();
        listed.any(|one| one.family == family && one.is_trained)
    }

    /// Blocks, as a planner counts them.
    pub fn num_blocks(&self) -> usize {
        of_shape!(self, shape => shape.blocks()) as usize
    }

    /// Whether its blocks are a chain of like layers, so that a few of them say all about many.
    pub fn is_chain(&self) -> bool {
        of_shape!(self, shape => shape.is_chain())
    }

    /// Rows of the token embedding, as a planner counts them.
    pub fn vocab_size(&self) -> usize {
        self.vocabulary() as usize
    }

    /// The name of the size whose shape this is; none for a shape of its own.
    pub fn size_name(&self) -> Option<&'static str> {
        self.size().map(|size| size.name)
    }

    /// The value of one of the family's settings.
    pub fn get(&self, key: &str) -> Option<Number> {
        let setting = self.family().setting(key)?;
        (setting.get)(self)
    }

    /// Changes one of the family's settings; others are left alone.
    pub fn set(&mut self, key: &str, number: Number) {
        if let Some(setting) = self.family().setting(key) {
            (setting.set)(self, number);
        }
    }

    /// The named size whose weights have this shape, however the shape was arrived at. A shorter
    /// position table, another dropout rate or chunk leaves the name in place; any other width,
    /// depth or vocabulary makes it a shape of its own.
    pub fn size(&self) -> Option<&'static NamedSize> {
        let mut sizes = self.family().sizes.iter();
        sizes.find(|size| of_shape!(self, shape => shape.has_the_weights_of(&(size.shape)())))
    }
}
