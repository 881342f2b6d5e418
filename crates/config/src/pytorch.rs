//! What decides a PyTorch run's memory besides batch, length and model.

use cinch_architecture::TypeOfWeights;
use serde::{Deserialize, Serialize};

use crate::config::Precision;

/// A choice among words, each of which is a value.
macro_rules! words {
    ($(#[$meta:meta])* $name:ident { $($(#[$about:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum $name {
            $($(#[$about])* #[serde(rename = $word)] $variant,)*
        }

        impl $name {
            pub const NAMES: [&'static str; [$($word),*].len()] = [$($word),*];

            pub fn name(self) -> &'static str {
                match self {
                    $($name::$variant => $word,)*
                }
            }

            pub fn named(name: &str) -> Option<$name> {
                match name {
                    $($word => Some($name::$variant),)*
                    _ => None,
                }
            }
        }
    };
}

words! {
    /// Types of weights and of computation.
    TorchPrecision {
        Fp32 = "fp32",
        /// fp32 weights under autocast.
        AmpBf16 = "amp_bf16",
        /// The same in fp16, with a gradient scaler.
        AmpFp16 = "amp_fp16",
        /// Weights in bf16.
        Bf16 = "bf16",
        /// Weights in fp16.
        Fp16 = "fp16",
        /// Weights in bf16 under autocast.
        Bf16Amp = "bf16_amp",
        /// Weights in fp16 under autocast, with a gradient scaler.
        Fp16Amp = "fp16_amp",
    }
}

impl TorchPrecision {
    /// Autocast in a precision, which is how most people train in it.
    fn autocast(precision: Precision) -> TorchPrecision {
        match precision {
            Precision::Fp32 => TorchPrecision::Fp32,
            Precision::Bf16 => TorchPrecision::AmpBf16,
            Precision::Fp16 => TorchPrecision::AmpFp16,
        }
    }

    /// The type that activations have.
    pub(crate) fn compute(self) -> Precision {
        match self {
            TorchPrecision::Fp32 => Precision::Fp32,
            TorchPrecision::AmpBf16 | TorchPrecision::Bf16 | TorchPrecision::Bf16Amp => {
                Precision::Bf16
            }
            TorchPrecision::AmpFp16 | TorchPrecision::Fp16 | TorchPrecision::Fp16Amp => {
                Precision::Fp16
            }
        }
    }

    /// What holds where nobody says it, and the sentence that says so: autocast in the precision
    /// of the settings, else the type that the weights are saved in.
    pub(crate) fn usual(
        stated: Option<Precision>,
        saved: Option<TypeOfWeights>,
    ) -> (TorchPrecision, Option<String>) {
        const FLAG: &str = "say --torch-precision";
        match (stated, saved) {
            (Some(precision), None) => (TorchPrecision::autocast(precision), None),
            (Some(precision), Some(saved)) => {
                let note = (saved != TypeOfWeights::Fp32).then(|| {
                    format!(
                        "weights in fp32, not in {} as they are saved: {FLAG}",
                        saved.name()
                    )
                });
                (TorchPrecision::autocast(precision), note)
            }
            (None, Some(saved)) => {
                let precision = match saved {
                    TypeOfWeights::Fp32 => TorchPrecision::Fp32,
                    TypeOfWeights::Bf16 => TorchPrecision::Bf16,
                    TypeOfWeights::Fp16 => TorchPrecision::Fp16,
                };
                let note = format!("weights in {}, as they are saved: {FLAG}", saved.name());
                (precision, Some(note))
            }
            (None, None) => {
                let note = format!("weights and computation in fp32: {FLAG}");
                (TorchPrecision::Fp32, Some(note))
            }
        }
    }
}

words! {
    /// How attention is computed.
    TorchAttention {
        Sdpa = "sdpa",
        Eager = "eager",
        Flash2 = "flash_attention_2",
        Flash3 = "flash_attention_3",
        Flex = "flex_attention",
    }
}

words! {
    /// An optimizer and the way it runs.
    TorchOptimizer {
        Adamw = "adamw",
        AdamwFused = "adamw_fused",
        AdamwLoop = "adamw_loop",
        Adamw8bit = "adamw_8bit",
        PagedAdamw8bit = "paged_adamw_8bit",
        PagedAdamw32bit = "paged_adamw_32bit",
        Adam = "adam",
        Sgd = "sgd",
        Sgdm = "sgdm",
    }
}

impl TorchOptimizer {
    /// Whether it is AdamW with states in eight bits.
    pub(crate) fn is_eight_bit(self) -> bool {
        matches!(
            self,
            TorchOptimizer::Adamw8bit | TorchOptimizer::PagedAdamw8bit
        )
    }
}

words! {
    /// How states are divided among GPUs.
    Sharding {
        None = "none",
        /// Every GPU holds all of it.
        Replicated = "ddp",
        Zero1 = "zero1",
        Zero2 = "zero2",
        Zero3 = "zero3",
        FullShard = "fsdp",
    }
}

words! {
    /// Whose training loop runs.
    TrainingLoop {
        Plain = "plain",
        /// Hugging Face's Trainer.
        Trainer = "trainer",
    }
}

words! {
    /// How frozen weights are kept.
    FrozenWeights {
        InTheirType = "none",
        FourBit = "4bit",
        EightBit = "8bit",
    }
}

/// A run in PyTorch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TorchConfig {
    pub precision: TorchPrecision,
    pub attention: TorchAttention,
    /// None for AdamW as the loop runs it.
    pub optimizer: Option<TorchOptimizer>,
    /// The allocator's settings; none for those of the environment.
    pub alloc_conf: Option<String>,
    pub training_loop: TrainingLoop,
    /// Whether what is not quantised is raised to fp32 beside weights that are.
    pub prepared: bool,
    /// Whether modules that are trained whole beside adapters are raised to fp32.
    #[serde(default)]
    pub whole_in_float32: bool,
    pub reentrant: bool,
    pub packing: bool,
    /// Kernels of Liger, by the names of its arguments; none where it is off.
    #[serde(default)]
    pub liger: Option<String>,
    pub sharding: Sharding,
    pub ranks: Option<u64>,
    /// What nobody said of it, in sentences.
    #[serde(default)]
    pub assumed: Vec<String>,
}

impl Default for TorchConfig {
    fn default() -> Self {
        Self {
            precision: TorchPrecision::Fp32,
            attention: TorchAttention::Sdpa,
            optimizer: None,
            alloc_conf: None,
            training_loop: TrainingLoop::Plain,
            prepared: true,
            whole_in_float32: false,
            reentrant: false,
            packing: false,
            liger: None,
            sharding: Sharding::None,
            ranks: None,
            assumed: Vec::new(),
        }
    }
}

#[expect(clippy::derivable_impls, reason = "the words are a macro's")]
impl Default for FrozenWeights {
    fn default() -> Self {
        Self::InTheirType
    }
}
