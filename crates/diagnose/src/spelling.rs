//! How a program writes the settings that a fix changes.

use cinch_config::remedy::RemedyKind;

/// Whose words are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Spelling {
    /// Arguments of Hugging Face's Trainer, which most programs pass on.
    #[default]
    Trainer,
    Axolotl,
    LlamaFactory,
    Lightning,
    /// A loop of one's own.
    Loop,
}

/// The values that a change sets.
#[derive(Clone, Copy, Debug, Default)]
pub struct Values {
    pub batch: u64,
    pub accumulation: u64,
    pub length: u64,
    /// The rank of adapters, where there are some.
    pub rank: Option<u64>,
}

impl Spelling {
    /// By the programs that a log names: the outermost decides.
    pub fn of(programs: &[&'static str]) -> Self {
        let has = |name: &str| programs.contains(&name);
        match () {
            () if has("axolotl") => Self::Axolotl,
            () if has("LLaMA-Factory") => Self::LlamaFactory,
            () if has("transformers") => Self::Trainer,
            () if has("Lightning") => Self::Lightning,
            () => Self::Trainer,
        }
    }

    /// Micro batch and accumulation; what is not known is left open.
    pub fn micro_batch(self, known: Option<(u64, u64)>) -> String {
        let text =
            |number: Option<u64>| number.map_or("…".to_owned(), |number| number.to_string());
        let batch = text(known.map(|(batch, _)| batch));
        let accumulation = text(known.map(|(_, accumulation)| accumulation));
        match self {
            Self::Trainer => format!(
                "per_device_train_batch_size={batch}, gradient_accumulation_steps={accumulation}"
            ),
            Self::Axolotl => {
                format!("micro_batch_size: {batch}\ngradient_accumulation_steps: {accumulation}")
            }
            Self::LlamaFactory => format!(
                "per_device_train_batch_size: {batch}\ngradient_accumulation_steps: {accumulation}"
            ),
            Self::Lightning => format!(
                "DataLoader(…, batch_size={batch})\nTrainer(…, accumulate_grad_batches={accumulation})"
            ),
            Self::Loop => {
                format!("batch_size={batch}, gradient_accumulation_steps={accumulation}")
            }
        }
    }

    /// The lines of a change; nothing for one that has no line of its own.
    pub fn lines(self, kind: RemedyKind, values: Values) -> Option<String> {
        let text = match kind {
            RemedyKind::MicroBatch => self.micro_batch(Some((values.batch, values.accumulation))),
            RemedyKind::SequenceLength => match self {
                Self::Trainer => format!("max_length={}", values.length),
                Self::Axolotl => format!("sequence_len: {}", values.length),
                Self::LlamaFactory => format!("cutoff_len: {}", values.length),
                Self::Lightning | Self::Loop => format!("max_seq_len={}", values.length),
            },
            RemedyKind::Adapters => {
                let rank = values.rank?;
                match self {
                    Self::Axolotl => {
                        format!("adapter: lora\nlora_r: {rank}\nlora_target_linear: true")
                    }
                    Self::LlamaFactory => format!("finetuning_type: lora\nlora_rank: {rank}"),
                    _ => format!("LoraConfig(r={rank}, target_modules=\"all-linear\")"),
                }
            }
            RemedyKind::AdapterRank => {
                let rank = values.rank?;
                match self {
                    Self::Axolotl => format!("lora_r: {rank}"),
                    Self::LlamaFactory => format!("lora_rank: {rank}"),
                    _ => format!("LoraConfig(r={rank})"),
                }
            }
            _ => self.fixed(kind)?.to_owned(),
        };
        Some(text)
    }

    /// Lines without a value of the run.
    fn fixed(self, kind: RemedyKind) -> Option<&'static str> {
        // One column for each: Trainer, axolotl, LLaMA-Factory, Lightning, a loop.
        #[rustfmt::skip]
        let columns = match kind {
            RemedyKind::ExpandableSegments => ["export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"; 5],
            RemedyKind::Recomputation => [
                "gradient_checkpointing=True, gradient_checkpointing_kwargs={\"use_reentrant\": False}",
                "gradient_checkpointing: true",
                "disable_gradient_checkpointing: false",
                "torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)",
                "torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)",
            ],
            RemedyKind::Bf16 => [
                "bf16=True",
                "bf16: true",
                "bf16: true",
                "Trainer(…, precision=\"bf16-mixed\")",
                "with torch.autocast(\"cuda\", dtype=torch.bfloat16):",
            ],
            RemedyKind::Fp16 => [
                "fp16=True",
                "fp16: true",
                "fp16: true",
                "Trainer(…, precision=\"16-mixed\")",
                "with torch.autocast(\"cuda\", dtype=torch.float16):",
            ],
            RemedyKind::Bf16Weights => [
                "model.to(torch.bfloat16)",
                "bfloat16: true",
                "pure_bf16: true",
                "Trainer(…, precision=\"bf16-true\")",
                "model.to(torch.bfloat16)",
            ],
            RemedyKind::FusedOptimizer => [
                "optim=\"adamw_torch_fused\"",
                "optimizer: adamw_torch_fused",
                "optim: adamw_torch_fused",
                "torch.optim.AdamW(parameters, fused=True)",
                "torch.optim.AdamW(parameters, fused=True)",
            ],
            RemedyKind::EightBitStates => [
                "optim=\"adamw_bnb_8bit\"",
                "optimizer: adamw_bnb_8bit",
                "optim: adamw_bnb_8bit",
                "bitsandbytes.optim.AdamW8bit(parameters)",
                "bitsandbytes.optim.AdamW8bit(parameters)",
            ],
            RemedyKind::PlainSgd => [
                "optim=\"sgd\"",
                "optimizer: sgd",
                "optim: sgd",
                "torch.optim.SGD(parameters, momentum=0)",
                "torch.optim.SGD(parameters, momentum=0)",
            ],
            RemedyKind::FusedAttention => [
                "attn_implementation=\"sdpa\"",
                "sdp_attention: true",
                "flash_attn: sdpa",
                "attn_implementation=\"sdpa\"",
                "attn_implementation=\"sdpa\"",
            ],
            _ => return None,
        };
        let [trainer, axolotl, llama_factory, lightning, own] = columns;
        Some(match self {
            Self::Trainer => trainer,
            Self::Axolotl => axolotl,
            Self::LlamaFactory => llama_factory,
            Self::Lightning => lightning,
            Self::Loop => own,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_outermost_program_decides_the_words() {
        let of = |names: &[&'static str]| Spelling::of(names);
        assert_eq!(of(&["transformers", "axolotl"]), Spelling::Axolotl);
        assert_eq!(of(&["DeepSpeed", "Lightning"]), Spelling::Lightning);
        assert_eq!(of(&[]), Spelling::Trainer);
        let values = Values {
            batch: 2,
            accumulation: 8,
            length: 512,
            rank: Some(16),
        };
        let lines = |spelling: Spelling, kind| spelling.lines(kind, values);
        assert_eq!(
            lines(Spelling::Axolotl, RemedyKind::MicroBatch).as_deref(),
            Some("micro_batch_size: 2\ngradient_accumulation_steps: 8")
        );
        assert_eq!(
            lines(Spelling::LlamaFactory, RemedyKind::SequenceLength).as_deref(),
            Some("cutoff_len: 512")
        );
        assert_eq!(lines(Spelling::Loop, RemedyKind::EmptyCache), None);
        assert!(
            Spelling::Lightning
                .micro_batch(None)
                .contains("batch_size=…")
        );
    }
}
