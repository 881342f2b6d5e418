//! PyTorch Lightning's command line and the Hydra layouts that people build on it: a section for
//! the trainer, one for the data, and a model of the user's own.

use super::draft::Draft;
use super::optimizer;
use super::{
    ACCUMULATION, BATCH, CLIP, DECAY, Dialect, EPOCHS, Keys, LOGGING, MODEL, NODES, Program, RANKS,
    RATE, Rule, SEED, SEQUENCE, SHARDING, STEPS, TORCH_PRECISION, WARMUP, combined, harmless,
    refused, same, words,
};
use crate::error::ConfigError;

pub(super) static LIGHTNING: Dialect = Dialect {
    name: "Lightning",
    program: Program::PyTorch,
    recognise,
    rules: &[TRAINER, RULES],
    defaults: &[(ACCUMULATION, "1"), (TORCH_PRECISION, "fp32"), (CLIP, "0")],
    adds_keys: true,
    whole_batch: None,
    arithmetic: Some(arithmetic),
};

fn recognise(keys: &Keys<'_>) -> Option<Vec<String>> {
    let own = [
        "trainer.accumulate_grad_batches",
        "trainer.gradient_clip_val",
        "trainer.precision",
        "trainer.max_epochs",
        "trainer.devices",
        "trainer.strategy",
        "fit.trainer.precision",
        "model.class_path",
        "data.class_path",
        "model._target_",
        "trainer._target_",
        // Hydra's: the list of a layout's parts, and a part in a file of its own.
        "defaults",
        "_target_",
    ];
    let found: Vec<String> = own
        .iter()
        .filter(|name| keys.names.iter().any(|known| known == *name))
        .map(|name| (*name).to_owned())
        .collect();
    let bare = keys.of_these(&["accumulate_grad_batches", "gradient_clip_val"]);
    match found.is_empty() {
        false => Some(found),
        true => (!bare.is_empty()).then_some(bare),
    }
}

/// Lightning's words; the plain ones convert the weights too where they end in `true`.
pub(super) const PRECISION_WORDS: &[(&str, &str)] = &[
    ("bf16-mixed", "amp_bf16"),
    ("16-mixed", "amp_fp16"),
    ("32-true", "fp32"),
    ("bf16-true", "bf16"),
    ("16-true", "fp16"),
    ("bf16", "amp_bf16"),
    ("16", "amp_fp16"),
    ("32", "fp32"),
    ("32-bit", "fp32"),
];

const TRAINER: &[Rule] = &[
    same("trainer.accumulate_grad_batches", ACCUMULATION),
    same("accumulate_grad_batches", ACCUMULATION),
    words("trainer.precision", TORCH_PRECISION, PRECISION_WORDS)
        .otherwise("this precision is not computed"),
    same("trainer.gradient_clip_val", CLIP),
    same("gradient_clip_val", CLIP),
    same("trainer.max_steps", STEPS),
    same("trainer.max_epochs", EPOCHS),
    same("trainer.log_every_n_steps", LOGGING),
    combined("trainer.devices"),
    combined("trainer.strategy"),
    combined("trainer.num_nodes"),
    words("precision", TORCH_PRECISION, PRECISION_WORDS)
        .otherwise("this precision is not computed"),
    combined("devices"),
    combined("strategy"),
    combined("num_nodes"),
    harmless("trainer.*"),
];

/// `init_args` is a section `init` once plain.
const RULES: &[Rule] = &[
    same("data.batch_size", BATCH),
    same("data.init.batch_size", BATCH),
    same("datamodule.batch_size", BATCH),
    same("data_module.batch_size", BATCH),
    same("batch_size", BATCH),
    same("data.init.max_length", SEQUENCE),
    same("data.max_length", SEQUENCE),
    same("data.init.block_size", SEQUENCE),
    same("data.block_size", SEQUENCE),
    same("datamodule.max_length", SEQUENCE),
    same("max_length", SEQUENCE),
    same("block_size", SEQUENCE),
    same("model_name_or_path", MODEL),
    same("model_name", MODEL),
    same("model.model_name_or_path", MODEL),
    same("model.init.model_name_or_path", MODEL),
    same("model.init.model_name", MODEL),
    same("model.model_name", MODEL),
    refused(
        "model.init.compile",
        "what torch.compile allocates is not predicted",
    ),
    same("seed_everything", SEED),
    same("seed", SEED),
    same("model.init.lr", RATE),
    same("model.init.learning_rate", RATE),
    same("model.init.weight_decay", DECAY),
    same("model.init.warmup_steps", WARMUP),
    combined("optimizer.class_path"),
    combined("optimizer._target_"),
    harmless("optimizer*"),
    harmless("lr_scheduler*"),
    harmless("ckpt_path"),
    harmless("defaults"),
    harmless("hydra*"),
    harmless("callbacks*"),
    harmless("logger*"),
    harmless("paths*"),
];

fn arithmetic(draft: &mut Draft<'_>) -> Result<(), ConfigError> {
    for [class, fused] in [
        ["optimizer.class_path", "optimizer.init.fused"],
        ["optimizer._target_", "optimizer.fused"],
    ] {
        if let Some(entry) = draft.find(class) {
            let is_fused = draft.is_on(fused);
            optimizer::by_class(draft, entry, is_fused)?;
        }
    }
    strategy(draft)
}

/// GPUs and how they share. Devices are those of each machine.
pub(super) fn strategy(draft: &mut Draft<'_>) -> Result<(), ConfigError> {
    let mut nodes = 1;
    for name in [
        "trainer.num_nodes",
        "training.trainer.num_nodes",
        "num_nodes",
    ] {
        let Some(entry) = draft.find(name) else {
            continue;
        };
        match draft.number(name) {
            Some(1) => draft.harmless(),
            Some(number) => {
                nodes = number;
                draft.say(entry, NODES, &number.to_string());
            }
            None => draft.not_understood(entry),
        }
    }
    let devices = ["trainer.devices", "training.trainer.devices", "devices"];
    if let Some(entry) = devices.iter().find_map(|name| draft.find(name)) {
        let items = draft.items(entry);
        match items.as_slice() {
            [one] if one == "auto" => draft.harmless(),
            [one] => {
                let here: Option<u64> = one.parse().ok();
                let ranks = here.map(|here| here.saturating_mul(nodes).to_string());
                draft.say(entry, RANKS, &ranks.unwrap_or_else(|| one.clone()));
            }
            many => {
                let ranks = (many.len() as u64).saturating_mul(nodes);
                draft.say(entry, RANKS, &ranks.to_string());
            }
        }
    }
    let strategies = ["trainer.strategy", "training.trainer.strategy", "strategy"];
    if let Some(entry) = strategies.iter().find_map(|name| draft.find(name)) {
        let word = draft.text(entry).unwrap_or_default();
        let sharding = match word.as_str() {
            "auto" | "single_device" => None,
            word if word.starts_with("ddp") => Some("ddp"),
            "deepspeed" | "deepspeed_stage_2" => Some("zero2"),
            "deepspeed_stage_1" => Some("zero1"),
            "deepspeed_stage_3" => Some("zero3"),
            "fsdp" => Some("fsdp"),
            _ => return Err(draft.refuse(entry, "this way to divide a run is not computed")),
        };
        match sharding {
            Some(sharding) => draft.say(entry, SHARDING, sharding),
            None => draft.harmless(),
        }
    }
    Ok(())
}
