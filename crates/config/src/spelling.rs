//! The names other programs have for our settings: the one table of them.
//!
//! A name without a dot stands at the top of a file or in a section about
//! training; a name with dots stands exactly there. Letter case does not count,
//! and wrappings such as `TRAINING_CONFIG` or `TrainingArguments` are read as
//! `training` (see `dialect`). Where a dialect has several names for a setting,
//! the first is the one that is written when none stands in the file yet.

use crate::setting::Meaning;

/// How one family of programs names its settings.
#[derive(Debug)]
pub(crate) struct Dialect {
    /// As a note to the user names it.
    pub name: &'static str,
    /// Names by which a file is known to be of this family.
    pub marks: &'static [&'static str],
    pub spellings: &'static [Spelling],
}

#[derive(Debug)]
pub(crate) struct Spelling {
    pub name: &'static str,
    /// The setting's own key.
    pub key: &'static str,
    pub meaning: Meaning,
}

const fn same(name: &'static str, key: &'static str) -> Spelling {
    Spelling {
        name,
        key,
        meaning: Meaning::Same,
    }
}

const fn words(
    name: &'static str,
    key: &'static str,
    words: &'static [(&'static str, &'static str)],
) -> Spelling {
    Spelling {
        name,
        key,
        meaning: Meaning::Words(words),
    }
}

const fn switch(
    name: &'static str,
    key: &'static str,
    on: &'static str,
    off: &'static str,
) -> Spelling {
    Spelling {
        name,
        key,
        meaning: Meaning::Switch { on, off },
    }
}

const BATCH: &str = "vram.batch_size";
const ACCUMULATION: &str = "vram.gradient_accumulation_steps";
const SEQUENCE: &str = "vram.max_seq_len";
const PRECISION: &str = "vram.precision";
const CHECKPOINTING: &str = "vram.checkpointing";
const OFFLOAD: &str = "vram.use_cpu_offload";
const STATES: &str = "vram.optimizer_states";
const RATE: &str = "training.learning_rate";
const SCHEDULE: &str = "training.schedule";
const STEPS: &str = "training.max_steps";
const WARMUP: &str = "training.warmup_steps";
const DECAY: &str = "training.weight_decay";
const CLIP: &str = "training.max_grad_norm";
const BETA1: &str = "training.adam_beta1";
const BETA2: &str = "training.adam_beta2";
const EPSILON: &str = "training.adam_epsilon";
const LOGGING: &str = "training.logging_steps";
const EVALUATION: &str = "training.eval_interval";
const SAVING: &str = "training.save_interval";
const SEED: &str = "training.seed";
const OUTPUT: &str = "output.output_dir";

const PRECISION_WORDS: &[(&str, &str)] = &[
    ("bf16", "bf16"),
    ("fp16", "fp16"),
    ("fp32", "fp32"),
    ("bfloat16", "bf16"),
    ("float16", "fp16"),
    ("float32", "fp32"),
    ("no", "fp32"),
];

/// PyTorch Lightning's.
const TRAINER_PRECISION_WORDS: &[(&str, &str)] = &[
    ("bf16-mixed", "bf16"),
    ("16-mixed", "fp16"),
    ("32-true", "fp32"),
    ("bf16", "bf16"),
    ("16", "fp16"),
    ("32", "fp32"),
];

/// Accelerate's, where `no` means full precision.
const MIXED_PRECISION_WORDS: &[(&str, &str)] = &[
    ("bf16", "bf16"),
    ("fp16", "fp16"),
    ("no", "fp32"),
    ("none", "fp32"),
];

const OPTIMIZER_WORDS: &[(&str, &str)] = &[
    ("adamw_torch", "fp32"),
    ("adamw_bnb_8bit", "8bit"),
    ("adamw_torch_fused", "fp32"),
    ("adamw_hf", "fp32"),
    ("adamw", "fp32"),
    ("adamw_8bit", "8bit"),
    ("paged_adamw_8bit", "8bit"),
];

const SCHEDULE_WORDS: &[(&str, &str)] = &[
    ("linear", "linear"),
    ("cosine", "cosine"),
    ("constant", "constant"),
    ("constant_with_warmup", "constant"),
];

/// Hugging Face's TrainingArguments, as a dictionary, a call or a flat file.
static TRAINING_ARGUMENTS: Dialect = Dialect {
    name: "TrainingArguments",
    marks: &[
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "num_train_epochs",
        "lr_scheduler_type",
        "bf16",
        "fp16",
    ],
    spellings: &[
        same("per_device_train_batch_size", BATCH),
        same("gradient_accumulation_steps", ACCUMULATION),
        same("max_seq_length", SEQUENCE),
        same("max_length", SEQUENCE),
        switch("bf16", PRECISION, "bf16", "fp32"),
        switch("fp16", PRECISION, "fp16", "fp32"),
        words("mixed_precision", PRECISION, MIXED_PRECISION_WORDS),
        switch("gradient_checkpointing", CHECKPOINTING, "full", "none"),
        words("optim", STATES, OPTIMIZER_WORDS),
        same("learning_rate", RATE),
        words("lr_scheduler_type", SCHEDULE, SCHEDULE_WORDS),
        same("max_steps", STEPS),
        same("warmup_steps", WARMUP),
        same("weight_decay", DECAY),
        same("max_grad_norm", CLIP),
        same("adam_beta1", BETA1),
        same("adam_beta2", BETA2),
        same("adam_epsilon", EPSILON),
        same("label_smoothing_factor", "training.label_smoothing"),
        same("logging_steps", LOGGING),
        same("eval_steps", EVALUATION),
        same("save_steps", SAVING),
        same("save_total_limit", "training.save_total_limit"),
        same("seed", SEED),
        same("output_dir", OUTPUT),
    ],
};

/// The YAML of guide 001, and files like it.
static MICRO_BATCHES: Dialect = Dialect {
    name: "a micro-batch config",
    marks: &[
        "micro_batch_size",
        "global_batch_size",
        "training.max_seq_len",
        "training.precision",
        "training.gradient_checkpointing",
    ],
    spellings: &[
        same("micro_batch_size", BATCH),
        same("gradient_accumulation_steps", ACCUMULATION),
        same("max_seq_len", SEQUENCE),
        words("precision", PRECISION, PRECISION_WORDS),
        switch("gradient_checkpointing", CHECKPOINTING, "full", "none"),
        same("learning_rate", RATE),
        same("min_learning_rate", "training.min_learning_rate"),
        words("lr_scheduler", SCHEDULE, SCHEDULE_WORDS),
        same("max_steps", STEPS),
        same("warmup_steps", WARMUP),
        same("weight_decay", DECAY),
        same("beta1", BETA1),
        same("beta2", BETA2),
        same("eps", EPSILON),
        same("grad_clip", CLIP),
        same("logging.log_interval", LOGGING),
        same("logging.eval_interval", EVALUATION),
        same("logging.save_interval", SAVING),
    ],
};

/// PyTorch Lightning, as guide 004 has it: a data loader and a trainer.
static TRAINER: Dialect = Dialect {
    name: "a Lightning trainer's config",
    marks: &[
        "data_loader.batch_size",
        "accumulate_grad_batches",
        "gradient_clip_val",
        "n_positives",
        "n_negatives",
    ],
    spellings: &[
        same("data_loader.batch_size", BATCH),
        same("training.trainer.accumulate_grad_batches", ACCUMULATION),
        same("accumulate_grad_batches", ACCUMULATION),
        words(
            "training.trainer.precision",
            PRECISION,
            TRAINER_PRECISION_WORDS,
        ),
        words("precision", PRECISION, TRAINER_PRECISION_WORDS),
        same("training.learning_rate", RATE),
        same("training.weight_decay", DECAY),
        same("training.warmup_steps", WARMUP),
        same("training.trainer.max_steps", STEPS),
        same("training.trainer.gradient_clip_val", CLIP),
        same("gradient_clip_val", CLIP),
        same("training.trainer.log_every_n_steps", LOGGING),
        same("seed", SEED),
    ],
};

/// Constants and attributes as people name them in a config.py of their own,
/// among them guides 002 and 003.
static CONSTANTS: Dialect = Dialect {
    name: "constants of a program",
    marks: &[],
    spellings: &[
        same("batch_size", BATCH),
        same("train_batch_size", BATCH),
        same("gradient_accumulation_steps", ACCUMULATION),
        same("grad_accumulation_steps", ACCUMULATION),
        same("accumulation_steps", ACCUMULATION),
        same("grad_accum", ACCUMULATION),
        same("grad_accum_steps", ACCUMULATION),
        same("max_seq_length", SEQUENCE),
        same("max_seq_len", SEQUENCE),
        same("max_length", SEQUENCE),
        same("sequence_length", SEQUENCE),
        same("seq_length", SEQUENCE),
        same("seq_len", SEQUENCE),
        same("block_size", SEQUENCE),
        same("context_length", SEQUENCE),
        words("precision", PRECISION, PRECISION_WORDS),
        words("dtype", PRECISION, PRECISION_WORDS),
        switch("use_fp16", PRECISION, "fp16", "fp32"),
        switch("use_bf16", PRECISION, "bf16", "fp32"),
        switch("use_gradient_checkpointing", CHECKPOINTING, "full", "none"),
        switch("gradient_checkpointing", CHECKPOINTING, "full", "none"),
        same("use_cpu_offload", OFFLOAD),
        same("cpu_offload", OFFLOAD),
        same("learning_rate", RATE),
        same("lr", RATE),
        words("lr_scheduler", SCHEDULE, SCHEDULE_WORDS),
        same("max_steps", STEPS),
        same("max_iters", STEPS),
        same("warmup_steps", WARMUP),
        same("warmup_iters", WARMUP),
        same("weight_decay", DECAY),
        same("grad_clip", CLIP),
        same("max_grad_norm", CLIP),
        same("beta1", BETA1),
        same("beta2", BETA2),
        same("label_smoothing", "training.label_smoothing"),
        same("logging_steps", LOGGING),
        same("log_interval", LOGGING),
        same("eval_interval", EVALUATION),
        same("save_interval", SAVING),
        same("save_total_limit", "training.save_total_limit"),
        same("seed", SEED),
        same("output_dir", OUTPUT),
    ],
};

/// Most particular first.
pub(crate) static DIALECTS: [&Dialect; 4] =
    [&TRAINING_ARGUMENTS, &MICRO_BATCHES, &TRAINER, &CONSTANTS];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::registry;

    #[test]
    fn every_spelling_leads_to_a_value_of_its_setting() {
        for dialect in DIALECTS {
            let mut names = BTreeSet::new();
            for spelling in dialect.spellings {
                assert!(names.insert(spelling.name), "{} twice", spelling.name);
                let (setting, _) = registry::find(spelling.key).expect(spelling.key);
                assert_eq!(setting.key, spelling.key);
                let values: Vec<&str> = match spelling.meaning {
                    Meaning::Same => vec![],
                    Meaning::Switch { on, off } => vec![on, off],
                    Meaning::Words(words) => words.iter().map(|(_, own)| *own).collect(),
                };
                for value in values {
                    assert!(setting.kind.parse(value).is_ok(), "{}", spelling.name);
                }
            }
        }
    }
}
