//! What ran, as a line of measurements has it, and the workload that it describes.

use std::collections::BTreeMap;

use cinch_architecture::{
    Architecture, Describe, Gsa, LayerCheckpointing, Mamba, Mu, Naics, configured,
};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::TorchError;
use crate::allocator::AllocatorConfig;
use crate::chip::Chip;
use crate::convention::Convention;
use crate::eager::checkpoint::Checkpointing;
use crate::eager::optimizer::{Execution, Optimizer};
use crate::eager::training::{Precision, Recipe};
use crate::model::Workload;
use crate::model::adapter::{Lora, LoraLibrary};
use crate::model::frozen::Frozen;
use crate::model::liger::Liger;
use crate::model::mask::Attention;

/// What ran. Fields that do not decide memory are not read.
#[derive(Clone, Debug, Deserialize)]
pub struct Case {
    pub name: String,
    /// The card, where it was no H200.
    #[serde(default)]
    pub gpu: Option<String>,
    #[serde(default = "default_family")]
    pub family: String,
    #[serde(default)]
    pub model: Option<String>,
    #[serde(default)]
    pub size: Option<String>,
    #[serde(default)]
    pub arch: Map<String, Value>,
    pub batch: u64,
    pub seq: u64,
    #[serde(default)]
    pub n_negatives: Option<u64>,
    #[serde(default)]
    pub precision: Option<String>,
    /// What autocast lowers to over weights that are in half precision already.
    #[serde(default)]
    pub autocast: Option<String>,
    #[serde(default)]
    pub ckpt: Option<bool>,
    /// Checkpointing with `use_reentrant=True`.
    #[serde(default)]
    pub reentrant: Option<bool>,
    /// Whose loop ran: `plain`, the file's own, or `trainer`.
    #[serde(default, rename = "loop")]
    pub convention: Option<String>,
    #[serde(default)]
    pub attn: Option<String>,
    #[serde(default)]
    pub optimizer: Option<String>,
    #[serde(default)]
    pub accum: Option<u32>,
    #[serde(default)]
    pub clip: Option<f64>,
    /// `true`, or which of Liger's kernels, by the names of its arguments.
    #[serde(default)]
    pub liger: Option<CaseLiger>,
    #[serde(default)]
    pub lora: Option<CaseLora>,
    #[serde(default)]
    pub quant: Option<CaseQuantization>,
    /// peft's `prepare_model_for_kbit_training`.
    #[serde(default)]
    pub kbit_prepare: Option<bool>,
    /// A cap on what may be reserved, in GiB.
    #[serde(default)]
    pub cap_gb: Option<f64>,
    #[serde(default)]
    pub alloc_conf: Option<String>,
    #[serde(default)]
    pub compile: Option<bool>,
}

fn default_family() -> String {
    "hf-causal".into()
}

#[derive(Clone, Debug, Deserialize)]
pub struct CaseLora {
    pub r: u64,
    #[serde(default)]
    pub dropout: f64,
    pub targets: Vec<String>,
    /// Modules that are trained whole beside them.
    #[serde(default)]
    pub modules_to_save: Vec<String>,
    /// Whether those are raised to fp32.
    #[serde(default)]
    pub whole_fp32: bool,
    #[serde(default = "default_adapter")]
    pub adapter_fp32: bool,
    /// Whose adapters they are: peft's, or else a module of one's own.
    #[serde(default)]
    pub library: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum CaseLiger {
    Whether(bool),
    Kernels(BTreeMap<String, bool>),
}

/// bitsandbytes' settings of frozen weights.
#[derive(Clone, Debug, Deserialize)]
pub struct CaseQuantization {
    pub bits: u64,
    /// The scales of four-bit weights are quantised too.
    #[serde(default)]
    pub double: bool,
}

fn default_adapter() -> bool {
    true
}

impl Case {
    fn problem(&self, key: &str, value: impl ToString, wanted: &str) -> TorchError {
        TorchError::Case {
            name: self.name.clone(),
            key: key.into(),
            value: value.to_string(),
            wanted: wanted.into(),
        }
    }

    /// The run that was measured.
    pub fn workload(&self) -> Result<Workload, TorchError> {
        let accumulation = self.accum.unwrap_or(1);
        let architecture = self.architecture()?;
        let by_itself = matches!(
            architecture.family().checkpointing,
            LayerCheckpointing::Usual | LayerCheckpointing::Always
        );
        Ok(Workload {
            architecture,
            batch: self.batch,
            length: self.seq,
            attention: match self.attn.as_deref() {
                None | Some("sdpa") => Attention::Sdpa,
                Some("eager") => Attention::Eager,
                Some(other) => return Err(self.problem("attn", other, "sdpa or eager")),
            },
            checkpoints: match self.ckpt.unwrap_or(by_itself) {
                true if self.reentrant == Some(true) => Checkpointing::Reentrant,
                true => Checkpointing::NonReentrant,
                false => Checkpointing::Off,
            },
            liger: self.liger()?,
            lora: self.lora()?,
            frozen: self.frozen()?,
            prepared: self.kbit_prepare.unwrap_or(false),
            recipe: self.convention()?.recipe(Recipe {
                precision: self.precision()?,
                optimizer: self.optimizer()?,
                accumulation,
                clips_gradients: self.clip.is_none_or(|clip| clip != 0.0),
                convention: Convention::PlainLoop,
            }),
            memory_limit: self
                .cap_gb
                .map(|cap| (cap.max(0.0) * (1u64 << 30) as f64) as u64),
            chip: self.chip()?,
            allocator: match &self.alloc_conf {
                Some(text) => AllocatorConfig::parse(text)?,
                None => AllocatorConfig::default(),
            },
        })
    }

    fn chip(&self) -> Result<Chip, TorchError> {
        let Some(name) = &self.gpu else {
            return Ok(Chip::H200);
        };
        let found = cinch_device::find(name).ok();
        found
            .and_then(|gpu| Chip::of(&gpu.card()))
            .ok_or_else(|| self.problem("gpu", name, "a card with CUDA that `cinch gpus` lists"))
    }

    fn architecture(&self) -> Result<Architecture, TorchError> {
        match self.family.as_str() {
            "hf-causal" | "hf-mlm" | "hf-seq2seq" | "hf-image" => {
                let name = self.model.as_deref().unwrap_or_default();
                let architecture = configured(name, &self.arch)?.architecture;
                let family = match architecture {
                    Architecture::T5(_) => "hf-seq2seq",
                    Architecture::Vit(_) => "hf-image",
                    _ if architecture.is_masked() => "hf-mlm",
                    _ => "hf-causal",
                };
                if family != self.family {
                    return Err(self.problem("family", &self.family, family));
                }
                Ok(architecture)
            }
            "mamba" => {
                let size = self.size.as_deref().unwrap_or_default();
                match Mamba::FAMILY.size(size) {
                    Some(size) => Ok((size.shape)()),
                    None => Err(self.problem("size", size, "a size of the family mamba")),
                }
            }
            "gsa" => Ok(Architecture::Gsa(Gsa::default())),
            "mu" => Ok(Architecture::Mu(Mu::default())),
            "naics" => match self.n_negatives {
                Some(negatives) if negatives > 0 => Ok(Architecture::Naics(Naics::new(negatives))),
                other => {
                    Err(self.problem("n_negatives", other.unwrap_or(0), "the number of negatives"))
                }
            },
            other => Err(self.problem(
                "family",
                other,
                "one of hf-causal, hf-mlm, hf-seq2seq, hf-image, mamba, gsa, mu, naics",
            )),
        }
    }

    fn lora(&self) -> Result<Option<Lora>, TorchError> {
        let Some(lora) = &self.lora else {
            return Ok(None);
        };
        let library = match lora.library.as_deref() {
            None => LoraLibrary::Plain,
            Some("peft") => LoraLibrary::Peft,
            Some(other) => return Err(self.problem("lora.library", other, "peft, or none")),
        };
        Ok(Some(Lora {
            rank: lora.r,
            dropout: lora.dropout,
            targets: lora.targets.clone(),
            whole: lora.modules_to_save.clone(),
            whole_in_float32: lora.whole_fp32,
            in_float32: lora.adapter_fp32,
            library,
        }))
    }

    fn liger(&self) -> Result<Liger, TorchError> {
        let kernels = match &self.liger {
            None | Some(CaseLiger::Whether(false)) => return Ok(Liger::default()),
            Some(CaseLiger::Whether(true)) => return Ok(Liger::USUAL),
            Some(CaseLiger::Kernels(kernels)) => kernels,
        };
        let mut liger = Liger::USUAL;
        for (kernel, &is_on) in kernels {
            if !liger.switch(kernel, is_on) {
                let known = Liger::KERNELS.join(", ");
                return Err(self.problem("liger", kernel, &format!("one of {known}")));
            }
        }
        Ok(liger)
    }

    fn frozen(&self) -> Result<Frozen, TorchError> {
        Ok(match &self.quant {
            None => Frozen::InTheirType,
            Some(quant) if quant.bits == 4 => Frozen::FourBit {
                double: quant.double,
            },
            Some(quant) if quant.bits == 8 => Frozen::EightBit,
            Some(quant) => return Err(self.problem("quant.bits", quant.bits, "4 or 8")),
        })
    }

    fn convention(&self) -> Result<Convention, TorchError> {
        match self.convention.as_deref() {
            None | Some("plain") => Ok(Convention::PlainLoop),
            Some("trainer") => Ok(Convention::Trainer),
            Some(other) => Err(self.problem("loop", other, "plain or trainer")),
        }
    }

    fn precision(&self) -> Result<Precision, TorchError> {
        let under_autocast = match (self.precision.as_deref(), self.autocast.as_deref()) {
            (_, None) => None,
            (Some("bf16"), Some("bf16")) => Some(Precision::BFloat16UnderAutocast),
            (Some("fp16"), Some("fp16")) => Some(Precision::Float16UnderAutocast),
            (_, Some(other)) => {
                let wanted = "bf16 or fp16, and the same as the precision";
                return Err(self.problem("autocast", other, wanted));
            }
        };
        if let Some(precision) = under_autocast {
            return Ok(precision);
        }
        Ok(match self.precision.as_deref() {
            None | Some("fp32") => Precision::Float32,
            Some("amp_bf16") => Precision::AutocastBFloat16,
            Some("amp_fp16") => Precision::AutocastFloat16,
            Some("bf16") => Precision::BFloat16,
            Some("fp16") => Precision::Float16,
            Some(other) => {
                return Err(self.problem(
                    "precision",
                    other,
                    "one of fp32, amp_bf16, amp_fp16, bf16, fp16",
                ));
            }
        })
    }

    fn optimizer(&self) -> Result<Optimizer, TorchError> {
        let sgd = |momentum| Optimizer::Sgd {
            momentum,
            execution: Execution::Foreach,
        };
        Ok(match self.optimizer.as_deref() {
            None | Some("adamw" | "adam") => Optimizer::Adam(Execution::Foreach),
            Some("adamw_fused") => Optimizer::Adam(Execution::Fused),
            Some("adamw_loop") => Optimizer::Adam(Execution::Loop),
            Some("adamw_8bit") => Optimizer::Adam8Bit,
            Some("paged_adamw_8bit") => Optimizer::PagedAdam { eight_bit: true },
            Some("paged_adamw_32bit") => Optimizer::PagedAdam { eight_bit: false },
            Some("lion_8bit") => Optimizer::Lion8Bit,
            Some("adafactor") => Optimizer::Adafactor,
            Some("sgd") => sgd(false),
            Some("sgdm") => sgd(true),
            Some(other) => {
                let known = "one of adamw, adamw_fused, adamw_loop, adamw_8bit, paged_adamw_8bit, paged_adamw_32bit, lion_8bit, adafactor, adam, sgd, sgdm";
                return Err(self.problem("optimizer", other, known));
            }
        })
    }
}
