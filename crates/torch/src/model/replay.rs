//! How an architecture becomes a program that can be replayed.

use cinch_architecture::{Architecture, with_architectures};

use super::adapter::Lora;
use super::mask::Attention;
use super::module::Builder;
use crate::eager::checkpoint::Checkpointing;
use crate::eager::training::Program;
use crate::eager::{Context, DType};

/// What a model is made with.
pub struct Setup {
    pub context: Context,
    /// Of the weights.
    pub dtype: DType,
    pub lora: Option<Lora>,
    pub attention: Attention,
    pub checkpoints: Checkpointing,
    /// Rows and tokens of a micro batch.
    pub batch: [u64; 2],
}

impl Setup {
    pub fn builder(&self) -> Builder {
        Builder::new(&self.context, self.dtype, self.lora.clone())
    }
}

/// An architecture as its Python code runs it. Every one of the list has it.
pub trait Replay {
    fn program(&self, setup: &Setup) -> Box<dyn Program>;
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
    };
}
with_architectures!(dispatch);
