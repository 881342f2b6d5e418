//! How an architecture becomes a program that can be replayed.

use cinch_architecture::{Architecture, with_architectures};

use super::adapter::Lora;
use super::frozen::Frozen;
use super::liger::Liger;
use super::load::Loader;
use super::mask::Attention;
use super::module::Builder;
use super::workload::Workload;
use crate::eager::checkpoint::Checkpointing;
use crate::eager::training::Program;
use crate::eager::{Context, DType};

/// What a model is made with.
pub struct Setup {
    pub context: Context,
    /// Of the weights.
    pub dtype: DType,
    pub lora: Option<Lora>,
    pub frozen: Frozen,
    /// `prepare_model_for_kbit_training`.
    pub prepared: bool,
    pub attention: Attention,
    pub checkpoints: Checkpointing,
    /// Kernels that take the place of the model's own ops.
    pub liger: Liger,
    /// Rows and tokens of a micro batch.
    pub batch: [u64; 2],
}

impl Setup {
    pub fn builder(&self) -> Builder {
        let loader = self
            .frozen
            .format()
            .map(|format| Loader::new(format, self.dtype, self.prepared));
        Builder::new(&self.context, self.dtype, self.lora.clone())
            .loading(loader)
            .with_liger(self.liger)
    }
}

/// An architecture as its Python code runs it. Every one of the list has it.
pub trait Replay {
    fn program(&self, setup: &Setup) -> Box<dyn Program>;

    /// Whether all its linear layers are made by [`Builder::linear`], so that they can be quantised.
    fn can_be_quantised(&self) -> bool {
        false
    }

    /// What of these kernels takes effect: none in a model that Liger does not know.
    fn liger(&self, _wanted: Liger) -> Liger {
        Liger::default()
    }

    /// Why a run of it is not written down here, as a sentence.
    fn refuses(&self, _workload: &Workload) -> Option<String> {
        None
    }
}

macro_rules! dispatch {
    (trained { $($trained:ident),* } predicted { $($predicted:ident),* }) => {
        /// The program of any architecture.
        pub fn program(architecture: &Architecture, setup: &Setup) -> Box<dyn Program> {
            match architecture {
                $(Architecture::$trained(shape) => shape.program(setup),)*
                $(Architecture::$predicted(shape) => shape.program(setup),)*
            }
        }

        pub fn liger(architecture: &Architecture, wanted: Liger) -> Liger {
            match architecture {
                $(Architecture::$trained(shape) => shape.liger(wanted),)*
                $(Architecture::$predicted(shape) => shape.liger(wanted),)*
            }
        }

        pub fn refuses(workload: &Workload) -> Option<String> {
            match &workload.architecture {
                $(Architecture::$trained(shape) => shape.refuses(workload),)*
                $(Architecture::$predicted(shape) => shape.refuses(workload),)*
            }
        }

        pub fn can_be_quantised(architecture: &Architecture) -> bool {
            match architecture {
                $(Architecture::$trained(shape) => shape.can_be_quantised(),)*
                $(Architecture::$predicted(shape) => shape.can_be_quantised(),)*
            }
        }
    };
}
with_architectures!(dispatch);
