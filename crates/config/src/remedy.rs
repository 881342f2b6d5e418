//! The changes that alter what a run takes, each declared once: what it is called, which settings
//! it writes, what it does to the result, and which is preferred to which.
//!
//! cinch's own planner and search and the replay of PyTorch each know how to apply those that
//! they have; what else there is to say of a change they take from here.

use serde::Serialize;

use crate::registry::SETTINGS;

pub const BATCH_SIZE: &str = "vram.batch_size";
pub const ACCUMULATION: &str = "vram.gradient_accumulation_steps";
pub const CHECKPOINTING: &str = "vram.checkpointing";
pub const PRECISION: &str = "vram.precision";
pub const OPTIMIZER_STATES: &str = "vram.optimizer_states";
pub const TORCH_PRECISION: &str = "pytorch.precision";
pub const TORCH_OPTIMIZER: &str = "pytorch.optimizer";
const LOSS_CHUNK: &str = "vram.loss_chunk";
const UPDATE_IN_BACKWARD: &str = "vram.update_in_backward";
const OFFLOAD: &str = "vram.use_cpu_offload";
const OFFLOAD_FROZEN: &str = "vram.offload_frozen";
const OFFLOAD_ACTIVATIONS: &str = "vram.offload_activations";
pub const RANKS: &str = "world.ranks";
pub const SHARD: &str = "world.shard";
pub const SEQUENCE: &str = "vram.max_seq_len";
pub const ALLOC_CONF: &str = "pytorch.alloc_conf";
const ATTENTION: &str = "pytorch.attention";
const LORA_RANK: &str = "lora.rank";
const LORA_TARGETS: &str = "lora.targets";
const MODEL_SIZE: &str = "model.size";
const NEGATIVES: &str = "model.negatives";
const MOST_KEYS: &str = "model.k_max";

/// What a change does to what is learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// The same gradient, up to the order of additions.
    KeepsResult,
    ChangesResult,
    /// Another model or another loss, no longer the run that was asked for.
    ChangesModel,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RemedyKind {
    ExpandableSegments,
    SplitLimit,
    FusedOptimizer,
    FusedAttention,
    /// A smaller micro batch, with more of them: the effective batch stays.
    MicroBatch,
    Recomputation,
    /// Parts of what every rank keeps whole.
    Shard,
    Offload,
    /// The matrices of blocks that are not trained, fetched from host memory for each pass.
    OffloadFrozen,
    /// Of some recomputed blocks, what takes longest to make again.
    OffloadActivations,
    UpdateInBackward,
    LossChunk,
    /// The computation in bf16, the weights in fp32.
    Bf16,
    /// The same in fp16.
    Fp16,
    EightBitStates,
    Bf16Weights,
    PlainSgd,
    Adapters,
    AdapterRank,
    Negatives,
    SelectedKeys,
    SequenceLength,
    ModelSize,
    EmptyCache,
    DeleteNames,
}

/// All there is to say of a change before it meets a run.
#[derive(Clone, Copy, Debug)]
pub struct Declaration {
    pub kind: RemedyKind,
    /// As guides call it.
    pub name: &'static str,
    /// The settings that it writes, of cinch's engine and of both.
    pub keys: &'static [&'static str],
    /// The settings that it writes for PyTorch alone.
    pub torch_keys: &'static [&'static str],
    pub effect: Effect,
    /// What to write in a PyTorch program, where that is the same for every run.
    pub in_torch: Option<&'static str>,
    /// What else it does, or why it does nothing.
    pub note: Option<&'static str>,
}

impl Declaration {
    /// A change that keeps the result and has no more to say.
    const fn new(kind: RemedyKind, name: &'static str) -> Self {
        Self {
            kind,
            name,
            keys: &[],
            torch_keys: &[],
            effect: Effect::KeepsResult,
            in_torch: None,
            note: None,
        }
    }

    const fn keys(mut self, keys: &'static [&'static str]) -> Self {
        self.keys = keys;
        self
    }

    const fn torch_keys(mut self, keys: &'static [&'static str]) -> Self {
        self.torch_keys = keys;
        self
    }

    const fn changes_result(mut self) -> Self {
        self.effect = Effect::ChangesResult;
        self
    }

    const fn changes_model(mut self) -> Self {
        self.effect = Effect::ChangesModel;
        self
    }

    const fn in_torch(mut self, text: &'static str) -> Self {
        self.in_torch = Some(text);
        self
    }

    const fn note(mut self, note: &'static str) -> Self {
        self.note = Some(note);
        self
    }
}

/// Every change in the order of preference: what costs least comes first. The last two are what
/// guides recommend and what does nothing.
#[rustfmt::skip]
pub const REMEDIES: [Declaration; 25] = {
    use RemedyKind as Kind;
    [
        Declaration::new(Kind::ExpandableSegments, "expandable segments")
            .torch_keys(&[ALLOC_CONF])
            .in_torch("PYTORCH_ALLOC_CONF=expandable_segments:True"),
        Declaration::new(Kind::SplitLimit, "max_split_size_mb")
            .torch_keys(&[ALLOC_CONF]),
        Declaration::new(Kind::FusedOptimizer, "fused optimizer")
            .torch_keys(&[TORCH_OPTIMIZER])
            .in_torch("AdamW(fused=True)"),
        Declaration::new(Kind::FusedAttention, "SDPA attention")
            .torch_keys(&[ATTENTION])
            .in_torch("attn_implementation=\"sdpa\""),
        Declaration::new(Kind::MicroBatch, "half the micro batch")
            .keys(&[BATCH_SIZE, ACCUMULATION])
            .note("the effective batch stays: the same gradients, up to rounding; gradients and optimizer states do not shrink with the batch"),
        Declaration::new(Kind::Recomputation, "activation checkpointing")
            .keys(&[CHECKPOINTING])
            .in_torch("checkpoint every layer, use_reentrant=False")
            .note("the same loss; each layer's forward runs twice (measured steps take 1.4 to 1.9 times as long)"),
        Declaration::new(Kind::Shard, "parts of states, gradients or weights on each rank")
            .keys(&[SHARD])
            .note("the same result; what a rank lacks crosses the network"),
        Declaration::new(Kind::Offload, "optimizer states in host memory")
            .keys(&[OFFLOAD]),
        Declaration::new(Kind::OffloadFrozen, "frozen weights in host memory")
            .keys(&[OFFLOAD_FROZEN])
            .note("the same bits; each block's weights cross the bus once for its forward and once for its backward"),
        Declaration::new(Kind::OffloadActivations, "activations in host memory")
            .keys(&[OFFLOAD_ACTIVATIONS])
            .note("the same bits; they cross the bus while other blocks are computed"),
        Declaration::new(Kind::UpdateInBackward, "update inside backward")
            .keys(&[UPDATE_IN_BACKWARD]),
        Declaration::new(Kind::LossChunk, "fewer rows of logits at once")
            .keys(&[LOSS_CHUNK]),
        Declaration::new(Kind::Bf16, "bf16 autocast")
            .keys(&[PRECISION])
            .torch_keys(&[TORCH_PRECISION])
            .changes_result()
            .in_torch("torch.autocast(dtype=torch.bfloat16), weights in fp32")
            .note("weights, gradients and states stay in fp32, and a copy of the weights in half precision is added"),
        Declaration::new(Kind::Fp16, "fp16 autocast")
            .keys(&[PRECISION])
            .torch_keys(&[TORCH_PRECISION])
            .changes_result()
            .in_torch("torch.autocast(dtype=torch.float16) with a GradScaler, weights in fp32")
            .note("takes as much memory as bf16, and needs a gradient scaler"),
        Declaration::new(Kind::EightBitStates, "8-bit AdamW")
            .keys(&[OPTIMIZER_STATES])
            .torch_keys(&[TORCH_OPTIMIZER])
            .changes_result()
            .in_torch("bitsandbytes.optim.AdamW8bit")
            .note("changes the result slightly: states are rounded to a byte"),
        Declaration::new(Kind::Bf16Weights, "bf16 weights")
            .torch_keys(&[TORCH_PRECISION])
            .changes_result()
            .in_torch("the model in bfloat16: weights, gradients and states")
            .note("changes the result: updates smaller than 1/256 of a weight are lost"),
        Declaration::new(Kind::PlainSgd, "SGD without momentum")
            .torch_keys(&[TORCH_OPTIMIZER])
            .changes_result()
            .in_torch("torch.optim.SGD(momentum=0)")
            .note("changes the result: no moments are kept"),
        Declaration::new(Kind::Adapters, "LoRA")
            .torch_keys(&[LORA_RANK, LORA_TARGETS])
            .changes_result()
            .note("changes what is trained: the base is frozen"),
        Declaration::new(Kind::AdapterRank, "half the LoRA rank")
            .torch_keys(&[LORA_RANK])
            .changes_result()
            .note("changes what is trained"),
        Declaration::new(Kind::Negatives, "fewer negatives")
            .torch_keys(&[NEGATIVES])
            .changes_model()
            .note("changes the loss"),
        Declaration::new(Kind::SelectedKeys, "half the selected keys")
            .torch_keys(&[MOST_KEYS])
            .changes_model()
            .note("changes the model: each query sees fewer keys"),
        Declaration::new(Kind::SequenceLength, "half the length")
            .keys(&[SEQUENCE])
            .changes_result()
            .note("longer texts are cut or split, and a step sees half as many tokens"),
        Declaration::new(Kind::ModelSize, "half the layers")
            .keys(&[MODEL_SIZE])
            .changes_model()
            .note("changes the model"),
        Declaration::new(Kind::EmptyCache, "empty_cache")
            .in_torch("torch.cuda.empty_cache() in the loop")
            .note("frees nothing that is needed: it gives back segments that are wholly free, and the next step asks the driver for them again, slowly; called in another process it does nothing"),
        Declaration::new(Kind::DeleteNames, "del")
            .in_torch("del of intermediate tensors in forward")
            .note("frees nothing that autograd holds: a tensor saved for backward lives until backward has used it, whatever its name"),
    ]
};

impl RemedyKind {
    pub const fn declaration(self) -> &'static Declaration {
        // The list has every kind in the order of the enum, as a test below makes sure.
        &REMEDIES[self as usize]
    }

    pub const fn effect(self) -> Effect {
        self.declaration().effect
    }

    /// Its place in the order of preference.
    pub const fn rank(self) -> usize {
        self as usize
    }

    /// Whether it writes a setting, for either engine.
    pub fn writes(self, key: &str) -> bool {
        let Declaration {
            keys, torch_keys, ..
        } = self.declaration();
        keys.contains(&key) || torch_keys.contains(&key)
    }

    /// A value in a sentence: "micro batch 4 × 4". The values are those of its keys; no value is
    /// what is left to the planner. Recomputation is said with the blocks and of how many.
    pub fn said(self, values: &[&str]) -> String {
        match (self, values) {
            (Self::MicroBatch, [micro, accumulation]) => {
                format!("micro batch {micro} × {accumulation}")
            }
            (Self::Recomputation, ["0", _]) => "no recomputation".to_owned(),
            (Self::Recomputation, [blocks, of]) => format!("recompute {blocks} of {of} blocks"),
            (Self::Shard, ["zero1"]) => "a part of the optimizer on each rank".to_owned(),
            (Self::Shard, ["zero2"]) => "a part of optimizer and gradients on each rank".to_owned(),
            (Self::Shard, ["zero3"]) => "a part of all weights on each rank".to_owned(),
            (Self::Shard, _) => "everything on each rank".to_owned(),
            (Self::Offload, ["false"]) => "optimizer states on the card".to_owned(),
            (Self::OffloadFrozen, ["false"]) => "frozen weights on the card".to_owned(),
            (Self::OffloadActivations, [blocks]) => {
                format!("activations of {blocks} recomputed blocks in host memory")
            }
            (Self::UpdateInBackward, ["false"]) => "update after backward".to_owned(),
            (Self::LossChunk, []) => "as many rows of logits as run well".to_owned(),
            (Self::LossChunk, [rows]) => format!("{rows} rows of logits at once"),
            (Self::Bf16 | Self::Fp16, [precision]) => (*precision).to_owned(),
            (Self::EightBitStates, [format]) => format!("{format} optimizer states"),
            (Self::SequenceLength, [length]) => format!("sequences of {length} tokens"),
            _ => self.declaration().name.to_owned(),
        }
    }

    /// The same as flags: "--seq-len 512".
    pub fn flags(self, values: &[&str]) -> String {
        let pairs = self.declaration().keys.iter().zip(values);
        let flag = |(key, value): (&&str, &&str)| {
            let setting = SETTINGS.iter().find(|setting| setting.key == *key);
            match setting.and_then(|setting| setting.flag) {
                Some(flag) if flag.value.is_none() => format!("--{}", flag.name),
                Some(flag) => format!("--{} {value}", flag.name),
                None => format!("--set {key}={value}"),
            }
        };
        let flags: Vec<String> = pairs.map(flag).collect();
        flags.join(" ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_finds_its_own_declaration() {
        for (place, declared) in REMEDIES.iter().enumerate() {
            assert_eq!(declared.kind.rank(), place, "{:?}", declared.kind);
            assert_eq!(declared.kind.declaration().name, declared.name);
        }
        assert_eq!(RemedyKind::DeleteNames.rank() + 1, REMEDIES.len());
    }

    #[test]
    fn every_key_is_a_setting() {
        for declared in &REMEDIES {
            for key in declared.keys.iter().chain(declared.torch_keys) {
                let found = SETTINGS.iter().any(|setting| setting.key == *key);
                assert!(found, "{:?}: {key}", declared.kind);
            }
        }
    }

    #[test]
    fn values_are_said_in_words_and_in_flags() {
        let split = ["4", "8"];
        assert_eq!(RemedyKind::MicroBatch.said(&split), "micro batch 4 × 8");
        assert_eq!(
            RemedyKind::MicroBatch.flags(&split),
            "--batch-size 4 --grad-accum 8"
        );
        assert_eq!(
            RemedyKind::Offload.said(&["true"]),
            "optimizer states in host memory"
        );
        assert_eq!(RemedyKind::Offload.flags(&["true"]), "--offload");
        assert_eq!(
            RemedyKind::LossChunk.flags(&["16"]),
            "--set vram.loss_chunk=16"
        );
    }
}
