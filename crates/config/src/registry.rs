//! The settings there are, each declared once.
//!
//! Reading a file, reporting an unknown key, listing where values came from and
//! mapping flags all follow from this table; a new setting is one entry here
//! and one field of the typed config.
//!
//! The upper ends of ranges are far beyond any model that fits a machine. They
//! exist so that a slip of the keyboard is told here and not as an overflow.

use std::sync::LazyLock;

use cinch_architecture::{Range, families};

use crate::config::{GradientType, Precision, Schedule, StateFormat, TooLong};
use crate::pytorch::{Sharding, TorchAttention, TorchOptimizer, TorchPrecision};
use crate::setting::{Alias, Meaning, Setting, same, switch};
use crate::value::{Interval, Kind};

const fn count(max: u64) -> Kind {
    Kind::Unsigned { min: 1, max }
}

const fn count_from_zero(max: u64) -> Kind {
    Kind::Unsigned { min: 0, max }
}

const MAX_TOKENS: u64 = 1 << 24;
const MAX_STEPS: u64 = 1 << 48;

/// Every setting, in the order in which they are listed: which model, its shape as the
/// architectures declare it, and the rest.
pub static SETTINGS: LazyLock<Vec<Setting>> = LazyLock::new(|| {
    let mut settings = choice_of_model();
    settings.extend(shapes());
    settings.extend(others());
    settings
});

/// The numbers of all shapes; what several families have under one key is one setting.
fn shapes() -> Vec<Setting> {
    let mut settings: Vec<Setting> = Vec::new();
    for family in families() {
        for declared in family.settings {
            let known = settings
                .iter_mut()
                .find(|setting| setting.key == declared.key);
            if let Some(setting) = known {
                setting.families.push(family);
                let known = |key: &str| setting.aliases.iter().any(|alias| alias.key == key);
                let new = declared.aliases.iter().filter(|key| !known(key));
                let new: Vec<Alias> = new.map(|key| same(key)).collect();
                setting.aliases.extend(new);
                continue;
            }
            let kind = match declared.range {
                Range::Whole { min, max } => Kind::Unsigned { min, max },
                Range::Rate => Kind::Float(Interval::BELOW_ONE),
                Range::Positive => Kind::Float(Interval::ABOVE_ZERO),
                Range::Switch => Kind::Bool,
            };
            let aliases: Vec<Alias> = declared.aliases.iter().map(|key| same(key)).collect();
            let mut setting = Setting::new(declared.key, kind, declared.help).aliases(&aliases);
            setting.families.push(family);
            settings.push(setting);
        }
    }
    for (key, flag, value) in [
        ("model.dropout", "dropout", "RATE"),
        ("model.negatives", "negatives", "N"),
    ] {
        if let Some(index) = settings.iter().position(|setting| setting.key == key) {
            let setting = settings.remove(index).flag(flag, value);
            settings.insert(index, setting);
        }
    }
    settings
}

fn choice_of_model() -> Vec<Setting> {
    vec![
        Setting::new(
            "model.type",
            Kind::Text,
            "Architecture, hub id, or the path of a config.json",
        )
        .flag("model", "NAME")
        .flag_help("A model: mamba, gpt2, gsa, mu, naics, a hub id, a folder or a config.json (see `cinch models`)")
        .default("mamba")
        .aliases(&[same("model.model_type")]),
        Setting::new(
            "model.size",
            Kind::Text,
            "A named size, which supplies the shape",
        )
        .flag("model-size", "SIZE")
        .flag_help("Named size of mamba, gpt2 or gsa (see `cinch models`)")
        .aliases(&[same("model.model_size")]),
        Setting::new(
            "model.weights",
            Kind::Text,
            "Where the first weights come from: a folder, a file, or initial",
        )
        .flag("weights", "PATH")
        .flag_help("First weights: a folder or file of safetensors, or initial [default: the model's own files]"),
    ]
}

fn others() -> Vec<Setting> {
    vec![
    Setting::new(
        "vram.budget",
        Kind::Size,
        "Memory the plan must stay within",
    ),
    Setting::new(
        "vram.batch_size",
        count(1 << 20),
        "Sequences in one pass (micro batch)",
    ).flag("batch-size", "N").flag_aliases(&["per-device-train-batch-size", "micro-batch-size"])
    .aliases(&[same("vram.micro_batch_size")]),
    Setting::new(
        "vram.gradient_accumulation_steps",
        count(1 << 20),
        "Passes per optimizer step",
    ).flag("grad-accum", "N").flag_aliases(&["gradient-accumulation-steps"])
    .aliases(&[same("vram.accumulation")]),
    Setting::new(
        "vram.max_seq_len",
        count(MAX_TOKENS),
        "Tokens of a training sequence",
    ).flag("seq-len", "N").flag_aliases(&["max-seq-len", "max-seq-length", "max-length"])
    .aliases(&[same("vram.seq_len")]),
    Setting::new(
        "vram.precision",
        Kind::Choice(&Precision::NAMES),
        "Type of the computation",
    ).synonyms(PRECISION_SYNONYMS).flag("precision", "TYPE").flag_help("fp32, bf16 or fp16")
    .default("fp32")
    .aliases(&[switch("vram.use_fp16", "fp16", "fp32")]),
    Setting::new(
        "vram.checkpointing",
        Kind::ChoiceOrCount(&["auto", "none", "full"]),
        "Blocks whose activations are recomputed in backward",
    ).synonyms(CHECKPOINTING_SYNONYMS).flag("checkpointing", "BLOCKS").flag_aliases(&["recompute"]).flag_help("Blocks to recompute: none, full, auto or a number")
    .default("auto")
    .aliases(&[switch("vram.use_gradient_checkpointing", "full", "none")]),
    Setting::new(
        "vram.use_cpu_offload",
        Kind::Bool,
        "Keep optimizer state in host memory",
    ).switch_flag("offload")
    .default("false")
    .aliases(&[same("vram.offload")]),
    Setting::new(
        "vram.offload_frozen",
        Kind::Bool,
        "Keep frozen weights in host memory and fetch them block by block",
    ).switch_flag("offload-frozen")
    .default("false"),
    Setting::new(
        "vram.offload_activations",
        Kind::ChoiceOrCount(&["none"]),
        "Recomputed blocks that keep in host memory what takes longest to make again",
    ).flag("offload-activations", "BLOCKS").flag_help("Of the recomputed blocks, how many keep in host memory what takes longest to make again")
    .default("none"),
    Setting::new(
        "vram.optimizer_states",
        Kind::Choice(&StateFormat::NAMES),
        "How the optimizer's two moments are kept",
    ).flag("optimizer-states", "FORMAT").flag_help("How optimizer states are kept: fp32, 8bit, or in the type of the weights")
    .default("fp32"),
    Setting::new(
        "vram.gradients",
        Kind::Choice(&GradientType::NAMES),
        "How gradients of weights without fp32 masters are kept",
    )
    .default("auto"),
    Setting::new(
        "vram.update_in_backward",
        Kind::Bool,
        "Update each weight as soon as its gradient is complete",
    ).switch_flag("update-in-backward")
    .default("false"),
    Setting::new(
        "vram.loss_chunk",
        count(MAX_TOKENS),
        "Rows of logits that exist at once",
    ),
    Setting::new(
        "training.learning_rate",
        Kind::Float(Interval::ABOVE_ZERO),
        "Peak learning rate",
    ).flag("lr", "RATE").flag_aliases(&["learning-rate"])
    .default("3e-4")
    .aliases(&[same("training.lr")]),
    Setting::new(
        "training.master_weights",
        Kind::Bool,
        "Keep an fp32 master of each weight that is trained in bf16 or fp16",
    ).flag("master-weights", "BOOL").flag_help("Whether weights trained in bf16 or fp16 have fp32 masters [default: true]")
    .default("true"),
    Setting::new(
        "training.min_learning_rate",
        Kind::Float(Interval::FROM_ZERO),
        "Where the schedule ends",
    )
    .default("0"),
    Setting::new(
        "training.schedule",
        Kind::Choice(&Schedule::NAMES),
        "Course of the learning rate after warm-up",
    ).flag("schedule", "NAME").flag_help("Learning rate after warm-up: linear, cosine or constant; or onecycle, with its own warm-up")
    .default("linear")
    .aliases(&[same("training.lr_scheduler")]),
    Setting::new(
        "training.max_steps",
        count(MAX_STEPS),
        "Optimizer steps of the run",
    ).flag("max-steps", "N")
    .default("100000"),
    Setting::new(
        "training.epochs",
        Kind::Float(Interval::ABOVE_ZERO),
        "Passes over the data, where no steps are stated",
    ).flag("epochs", "N").flag_aliases(&["num-train-epochs"])
    .aliases(&[same("training.num_train_epochs"), same("training.num_epochs")]),
    Setting::new(
        "training.warmup_steps",
        count_from_zero(MAX_STEPS),
        "Steps of linear warm-up",
    ).flag("warmup-steps", "N")
    .default("2000"),
    Setting::new(
        "training.warmup_ratio",
        Kind::Float(Interval::BELOW_ONE),
        "Share of the run that warm-up takes, where no steps of it are stated",
    ).flag("warmup-ratio", "X"),
    Setting::new(
        "training.weight_decay",
        Kind::Float(Interval::FROM_ZERO),
        "AdamW weight decay",
    )
    .default("0.1"),
    Setting::new(
        "training.adam_beta1",
        Kind::Float(Interval::BELOW_ONE),
        "Decay of the first moment",
    )
    .default("0.9")
    .aliases(&[same("training.beta1")]),
    Setting::new(
        "training.adam_beta2",
        Kind::Float(Interval::BELOW_ONE),
        "Decay of the second moment",
    )
    .default("0.95")
    .aliases(&[same("training.beta2")]),
    Setting::new(
        "training.adam_epsilon",
        Kind::Float(Interval::ABOVE_ZERO),
        "Added to Adam's divisor",
    )
    .default("1e-8")
    .aliases(&[same("training.eps")]),
    Setting::new(
        "training.max_grad_norm",
        Kind::Float(Interval::FROM_ZERO),
        "Gradients are scaled down to this norm; 0 for no clipping",
    )
    .default("1.0")
    .aliases(&[same("training.grad_clip")]),
    Setting::new(
        "training.label_smoothing",
        Kind::Float(Interval::BELOW_ONE),
        "Probability spread over the other tokens",
    ).flag("label-smoothing", "SHARE")
    .default("0"),
    Setting::new(
        "training.eval_interval",
        count_from_zero(MAX_STEPS),
        "Steps between evaluations; 0 for none",
    ).flag("eval-steps", "N").flag_aliases(&["eval-interval"])
    .default("1000"),
    Setting::new(
        "training.eval_epochs",
        Kind::Float(Interval::ABOVE_ZERO),
        "Epochs between evaluations, in place of steps",
    ),
    Setting::new(
        "training.patience",
        count_from_zero(1 << 20),
        "Evaluations without a better one after which training ends; 0 for never",
    )
    .default("0"),
    Setting::new(
        "training.save_top",
        count_from_zero(1 << 10),
        "Checkpoints with the lowest validation loss kept besides the newest",
    )
    .default("0"),
    Setting::new(
        "training.eval_batches",
        count(1 << 20),
        "Micro batches read per evaluation",
    )
    .default("20"),
    Setting::new(
        "training.save_interval",
        count_from_zero(MAX_STEPS),
        "Steps between checkpoints; 0 for only the last",
    ).flag("save-steps", "N").flag_aliases(&["save-interval"])
    .default("5000"),
    Setting::new(
        "training.save_total_limit",
        count_from_zero(1 << 20),
        "Checkpoints kept; 0 keeps all",
    ).flag("save-total-limit", "N")
    .default("3"),
    Setting::new(
        "training.logging_steps",
        count(MAX_STEPS),
        "Steps between lines of the log",
    ).flag("log-steps", "N").flag_aliases(&["logging-steps"])
    .default("10"),
    Setting::new(
        "training.seed",
        count_from_zero(u64::MAX),
        "Seed of every random number",
    ).flag("seed", "N")
    .default("42"),
    Setting::new(
        "training.sample_tokens",
        count_from_zero(1 << 20),
        "Tokens of a text that is written after each pass over the data; 0 for none",
    ).flag("sample-tokens", "N")
    .default("0"),
    Setting::new(
        "training.sample_prompt",
        Kind::Text,
        "What that text begins with",
    ).flag("sample-prompt", "TEXT"),
    Setting::new(
        "data.source",
        Kind::Path,
        "Folder or file to train on; without it, the built-in text",
    ).flag("data-dir", "PATH").flag_help("A folder of text and source files, a text file or a .jsonl file")
    .aliases(&[same("data.data_dir")]),
    Setting::new(
        "data.text_column",
        Kind::Text,
        "Field that holds the text, in files with fields",
    ).flag("text-column", "NAME").flag_help("The field of .jsonl lines that holds the text")
    .default("text"),
    Setting::new(
        "data.tokenizer",
        Kind::Text,
        "gpt2, bytes, train (byte pairs of the data), or the path of a tokenizer",
    ).flag("tokenizer", "NAME")
    .default("gpt2"),
    Setting::new(
        "data.val_split",
        Kind::Float(Interval::BELOW_ONE),
        "Share of the data kept for evaluation",
    ).flag("val-split", "SHARE")
    .default("0.05"),
    Setting::new(
        "data.packing",
        Kind::Bool,
        "Whether several samples share a row, none of which sees another",
    )
    .switch_flag("packing"),
    Setting::new(
        "data.buckets",
        Kind::Text,
        "Lengths that rows of samples are padded to, besides the longest",
    )
    .flag("buckets", "LENGTHS")
    .flag_help("Pad rows of samples to several lengths: auto, off, or such as 128,256 [default: auto]")
    .default("auto"),
    Setting::new(
        "data.too_long",
        Kind::Choice(&TooLong::NAMES),
        "What becomes of a sample that is longer than a row",
    )
    .flag("too-long", "WHAT")
    .flag_help("A sample longer than a row: truncate, drop or error [default: truncate]")
    .default("truncate"),
    Setting::new(
        "data.positives",
        count(1 << 20),
        "Positives of each anchor that pairs are made of at most",
    ).default(crate::config::USUAL_POSITIVES),
    Setting::new(
        "data.curriculum",
        Kind::Text,
        "Stages of a curriculum, as a JSON list; the files in text_curriculum/ say it",
    ),
    Setting::new(
        "data.stage",
        Kind::Text,
        "The one stage of the curriculum to train, such as 01",
    ).flag("stage", "NAME"),
    Setting::new(
        "data.cluster_epoch",
        count_from_zero(MAX_STEPS),
        "Epoch from which negatives in the anchor's cluster are left out; 0 for never",
    ).default("10"),
    Setting::new(
        "data.clusters",
        count(1 << 20),
        "Clusters of embeddings that such negatives are looked for in",
    ),
    Setting::new(
        "data.max_samples",
        count(1 << 40),
        "Samples that are read at most",
    )
    .flag("max-samples", "N"),
    Setting::new(
        "data.train_on_inputs",
        Kind::Bool,
        "Whether prompts are learned too, not only what follows them",
    )
    .switch_flag("train-on-inputs"),
    Setting::new("data.cache_dir", Kind::Path, "Where tokenised data is kept").flag("cache-dir", "FOLDER"),
    Setting::new(
        "output.output_dir",
        Kind::Path,
        "Folder of the run: log and checkpoints",
    ).flag("output-dir", "FOLDER")
    .aliases(&[same("output.dir")]),
    Setting::new("world.ranks", count(1 << 20), "GPUs, or processes on CPUs, that train together")
        .flag("world", "N")
        .flag_aliases(&["ranks", "world-size"])
        .flag_help("GPUs that train together; batch size and accumulation are those of each [default: 1]")
        .aliases(&[same("pytorch.ranks")]),
    Setting::new("world.nodes", count(1 << 20), "Machines that the ranks are on, as many on each")
        .default("1")
        .flag("nodes", "N")
        .flag_aliases(&["nnodes"])
        .flag_help("Machines that they are in, as many on each [default: 1]"),
    Setting::new("world.shard", Kind::Choice(&Sharding::NAMES), "What each rank keeps only a part of")
        .synonyms(SHARDING_SYNONYMS)
        .default("none")
        .flag("shard", "KIND")
        .flag_aliases(&["sharding"])
        .flag_help("What each rank keeps only a part of: none (ddp), optimizer (zero1), gradients too (zero2), weights too (zero3, fsdp)")
        .aliases(&[same("pytorch.sharding")]),
    Setting::new("world.link", Kind::Text, "How the GPUs of a machine reach each other")
        .flag("link", "NAME")
        .flag_help("How GPUs of a machine reach each other: nvlink3, nvlink4, nvlink5, pcie4, … or GB/s [default: the card's]"),
    Setting::new("world.network", Kind::Text, "How machines reach each other")
        .flag("network", "NAME")
        .flag_help("How machines reach each other: infiniband-400, roce-200, ethernet-100, … or GB/s of a GPU [default: the card's usual]"),
    Setting::new("lora.adapter", Kind::Choice(&ADAPTERS), "Whether adapters are trained in place of the weights"),
    Setting::new("lora.rank", count(1 << 16), "Rank of the adapters")
        .flag("lora-rank", "N")
        .flag_help("Train adapters of this rank, as peft does it"),
    Setting::new("lora.alpha", Kind::Float(Interval::ABOVE_ZERO), "Scale of the adapters, over their rank; twice the rank unless given")
        .flag("lora-alpha", "X"),
    Setting::new("lora.dropout", Kind::Float(Interval::BELOW_ONE), "Dropout before the adapters").default("0").flag("lora-dropout", "RATE"),
    Setting::new("lora.targets", Kind::Text, "Layers that get adapters: names, a regular expression, or all-linear")
        .default("all-linear")
        .flag("lora-targets", "NAMES"),
    Setting::new("lora.modules_to_save", Kind::Text, "Modules that are trained whole beside the adapters, such as embed_tokens and lm_head")
        .flag("lora-modules-to-save", "NAMES"),
    Setting::new("lora.from", Kind::Text, "Adapters to begin with: a folder that peft or cinch wrote")
        .flag("lora-from", "FOLDER")
        .flag_help("Go on from the adapters of a folder that peft or cinch wrote [default: new ones]"),
    Setting::new("lora.dtype", Kind::Choice(&ADAPTER_TYPES), "Type of the adapters: fp32, or that of the weights")
        .default("fp32")
        .flag("lora-dtype", "TYPE")
        .flag_help("How adapters are kept: fp32, or in the type of the weights [default: fp32]"),
    Setting::new("lora.quantization", Kind::Choice(&QUANTIZATIONS), "How frozen weights are kept")
        .flag("quantization", "KIND")
        .flag_help("How frozen weights are kept: none, 4bit (NF4) or 8bit")
        .aliases(&[same("pytorch.quantization")]),
    Setting::new("lora.double_quantization", Kind::Bool, "Whether the scales of four-bit weights are quantised too")
        .default("false")
        .aliases(&[same("pytorch.double_quantization")]),
    Setting::new("lora.rank_stabilised", Kind::Bool, "Whether the scale is over the root of the rank (rsLoRA)")
        .default("false")
        .aliases(&[same("lora.use_rslora")]),
    Setting::new("pytorch.precision", Kind::Choice(&TorchPrecision::NAMES), "Types of weights and computation in PyTorch")
        .flag("torch-precision", "TYPE")
        .flag_help("Weights and computation: fp32, amp_bf16 and amp_fp16 (fp32 weights under autocast), bf16, fp16 (weights in it), bf16_amp (bf16 weights under autocast)"),
    Setting::new("pytorch.attention", Kind::Choice(&TorchAttention::NAMES), "How attention is computed")
        .synonyms(ATTENTION_SYNONYMS)
        .default("sdpa")
        .flag("attention", "KIND")
        .flag_help("How attention is computed: sdpa or eager [default: sdpa]"),
    Setting::new("pytorch.optimizer", Kind::Choice(&TorchOptimizer::NAMES), "The optimizer and how it runs")
        .synonyms(OPTIMIZER_SYNONYMS)
        .flag("optimizer", "NAME")
        .flag_help("adamw, adamw_fused, adamw_loop, adamw_8bit, paged_adamw_8bit, sgd, sgdm, … [default: adamw]"),
    Setting::new("pytorch.alloc_conf", Kind::Text, "Settings of the allocator, as in PYTORCH_ALLOC_CONF")
        .flag("alloc-conf", "TEXT")
        .flag_help("Settings of the allocator, as in PYTORCH_ALLOC_CONF [default: that variable]"),
    Setting::new("pytorch.loop", Kind::Choice(&["plain", "trainer"]), "Whose training loop runs")
        .default("plain")
        .flag("loop", "KIND")
        .flag_help("Whose training loop runs: plain, or trainer (Hugging Face's) [default: plain]"),
    Setting::new(
        "pytorch.prepared",
        Kind::Bool,
        "Whether what is not quantised is raised to fp32, as prepare_model_for_kbit_training does",
    )
    .default("true"),
    Setting::new(
        "pytorch.whole_dtype",
        Kind::Choice(&ADAPTER_TYPES),
        "Type of modules that are trained whole beside adapters: fp32, or that of the weights",
    )
    .default("weights"),
    Setting::new("pytorch.reentrant", Kind::Bool, "Checkpointing with use_reentrant=True").default("false"),
    Setting::new("pytorch.liger", Kind::Text, "Kernels of Liger in the place of the model's own: all, none, or names with commas")
        .synonyms(LIGER_SYNONYMS)
        .default("none")
        .flag("liger", "KERNELS")
        .flag_help("Liger's kernels in the place of the model's own: all, or some of rope, rms_norm, swiglu, geglu, cross_entropy, fused_linear_cross_entropy [default: none]"),
    Setting::new("pytorch.packing", Kind::Bool, "Whether samples are packed into full sequences").default("false"),
    ]
}

/// How adapters can be asked for.
pub(crate) const ADAPTERS: [&str; 2] = ["none", "lora"];
const ADAPTER_TYPES: [&str; 2] = ["fp32", "weights"];
pub(crate) const QUANTIZATIONS: [&str; 3] = ["none", "4bit", "8bit"];

const PRECISION_SYNONYMS: &[(&str, &str)] = &[
    ("half", "fp16"),
    ("float16", "fp16"),
    ("16", "fp16"),
    ("bfloat16", "bf16"),
    ("float32", "fp32"),
    ("float", "fp32"),
    ("single", "fp32"),
    ("32", "fp32"),
];

const CHECKPOINTING_SYNONYMS: &[(&str, &str)] = &[
    ("true", "full"),
    ("yes", "full"),
    ("on", "full"),
    ("all", "full"),
    ("false", "none"),
    ("no", "none"),
    ("off", "none"),
];

const SHARDING_SYNONYMS: &[(&str, &str)] = &[
    ("replicas", "ddp"),
    ("no_shard", "ddp"),
    ("optimizer", "zero1"),
    ("gradients", "zero2"),
    ("shard_grad_op", "zero2"),
    ("weights", "zero3"),
    ("full_shard", "fsdp"),
    ("fsdp1", "fsdp"),
    ("fsdp2", "fsdp"),
    ("0", "ddp"),
    ("1", "zero1"),
    ("2", "zero2"),
    ("3", "zero3"),
];

const LIGER_SYNONYMS: &[(&str, &str)] = &[
    ("true", "all"),
    ("on", "all"),
    ("false", "none"),
    ("off", "none"),
];

const ATTENTION_SYNONYMS: &[(&str, &str)] = &[
    ("flash_attn", "flash_attention_2"),
    ("flash-attn", "flash_attention_2"),
    ("flash_attention", "flash_attention_2"),
    ("fa2", "flash_attention_2"),
    ("fa3", "flash_attention_3"),
    ("flex", "flex_attention"),
];

const OPTIMIZER_SYNONYMS: &[(&str, &str)] = &[
    ("adamw8bit", "adamw_8bit"),
    ("adamw_bnb_8bit", "adamw_8bit"),
    ("adamw_torch", "adamw"),
    ("adamw_torch_fused", "adamw_fused"),
    ("adamw_hf", "adamw_loop"),
];

/// The setting a key or alias names.
pub fn find(key: &str) -> Option<(&'static Setting, Meaning)> {
    SETTINGS.iter().find_map(|setting| {
        if setting.key == key {
            return Some((setting, Meaning::Same));
        }
        setting
            .aliases
            .iter()
            .find(|alias| alias.key == key)
            .map(|alias| (setting, alias.meaning))
    })
}

/// Every key and alias.
pub fn keys() -> impl Iterator<Item = &'static str> {
    SETTINGS.iter().flat_map(|setting| {
        std::iter::once(setting.key).chain(setting.aliases.iter().map(|alias| alias.key))
    })
}

/// The section names, in listing order.
pub fn sections() -> Vec<&'static str> {
    let mut sections: Vec<&'static str> = SETTINGS.iter().map(Setting::section).collect();
    sections.dedup();
    sections
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn keys_are_unique_and_dotted() {
        let mut seen = BTreeSet::new();
        for key in keys() {
            assert!(seen.insert(key), "{key} is declared twice");
            assert_eq!(key.split('.').count(), 2, "{key}");
        }
    }

    #[test]
    fn variables_of_two_keys_never_collide() {
        let names: BTreeSet<String> = keys().map(|key| key.replace('.', "_")).collect();
        assert_eq!(names.len(), keys().count());
    }

    #[test]
    fn defaults_and_switches_pass_their_own_type() {
        for setting in SETTINGS.iter() {
            if let Some(default) = setting.default {
                assert!(setting.kind.parse(default).is_ok(), "{}", setting.key);
            }
            for alias in &setting.aliases {
                if let Meaning::Switch { on, off } = alias.meaning {
                    assert!(setting.kind.parse(on).is_ok(), "{}", alias.key);
                    assert!(setting.kind.parse(off).is_ok(), "{}", alias.key);
                }
            }
        }
    }

    #[test]
    fn sections_stand_together() {
        assert_eq!(
            sections(),
            [
                "model", "vram", "training", "data", "output", "world", "lora", "pytorch"
            ]
        );
    }
}
