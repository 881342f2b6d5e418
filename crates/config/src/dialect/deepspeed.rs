//! DeepSpeed's JSON: how a run is divided, and the identity
//! `train_batch_size = micro × accumulation × ranks`.

use super::draft::Draft;
use super::scalar::is_auto;
use super::{
    ACCUMULATION, BATCH, CLIP, Dialect, Keys, OPTIMIZER, Program, RANKS, Rule, SHARDING,
    TORCH_PRECISION, WholeBatch, combined, harmless, refused, refused_unless, same, switch,
};
use crate::error::ConfigError;
use crate::unfollowed::Instead;

pub(super) static DEEPSPEED: Dialect = Dialect {
    name: "DeepSpeed",
    program: Program::PyTorch,
    recognise,
    rules: &[RULES],
    defaults: &[(ACCUMULATION, "1")],
    adds_keys: true,
    whole_batch: Some(WholeBatch {
        whole: "train_batch_size",
        has_accumulation: true,
    }),
    arithmetic: Some(arithmetic),
};

fn recognise(keys: &Keys<'_>) -> Option<Vec<String>> {
    let own = [
        "train_micro_batch_size_per_gpu",
        "zero_allow_untested_optimizer",
    ];
    let mut found = keys.of_these(&own);
    if keys.has_section("zero_optimization") {
        found.push("zero_optimization".to_owned());
    }
    let sections = keys
        .names
        .iter()
        .any(|name| name == "bf16.enabled" || name == "fp16.enabled");
    if keys.has("train_batch_size") && sections {
        found.push("train_batch_size".to_owned());
    }
    (!found.is_empty()).then_some(found)
}

const RULES: &[Rule] = &[
    same("train_micro_batch_size_per_gpu", BATCH),
    same("gradient_accumulation_steps", ACCUMULATION),
    combined("train_batch_size"),
    same("gradient_clipping", CLIP),
    switch("bf16.enabled", TORCH_PRECISION, "bf16", "fp32"),
    switch("fp16.enabled", TORCH_PRECISION, "fp16", "fp32"),
    combined("zero_optimization.stage"),
    combined("zero_optimization.offload_optimizer.device"),
    refused_unless(
        "zero_optimization.offload_param.device",
        &["none"],
        "parameters in host memory are not computed",
    ),
    refused_unless(
        "tensor_parallel.autotp_size",
        &["1"],
        "one model divided over several GPUs is not computed",
    ),
    refused("pipeline*", "pipelines are not computed"),
    combined("optimizer.type"),
    refused(
        "activation_checkpointing.cpu_checkpointing",
        "checkpoints in host memory are not computed",
    ),
    harmless("zero_optimization*"),
    harmless("bf16*"),
    harmless("fp16*"),
    harmless("optimizer*"),
    harmless("scheduler*"),
    harmless("zero_*"),
    harmless("comms*"),
    harmless("monitor*"),
    harmless("activation_checkpointing*"),
    harmless("aio*"),
    harmless("flops_profiler*"),
    harmless("steps_per_print"),
    harmless("wall_clock_breakdown"),
    harmless("communication_data_type"),
];

fn arithmetic(draft: &mut Draft<'_>) -> Result<(), ConfigError> {
    if let Some(entry) = draft.find("zero_optimization.stage") {
        match draft.number("zero_optimization.stage") {
            Some(0) => draft.say(entry, SHARDING, "ddp"),
            Some(stage @ 1..=3) => draft.say(entry, SHARDING, &format!("zero{stage}")),
            _ => draft.not_understood(entry),
        }
    }
    if let Some(entry) = draft.find("zero_optimization.offload_optimizer.device") {
        let device = draft.text(entry).unwrap_or_default();
        match device.as_str() {
            "none" => draft.harmless(),
            _ => {
                draft.saves(entry, "the optimizer's states are kept outside the card");
                draft.done_instead(entry, Instead::StatesOnDevice);
            }
        }
    }
    if let Some(entry) = draft.find("optimizer.type") {
        let word = match draft
            .text(entry)
            .unwrap_or_default()
            .to_lowercase()
            .as_str()
        {
            "adamw" | "adam" => "adamw_fused",
            "sgd" => "sgd",
            _ => return Err(draft.refuse(entry, super::OTHER_OPTIMIZER)),
        };
        draft.say(entry, OPTIMIZER, word);
    }
    identity(draft)
}

/// Of the whole batch and its three factors, any one that is missing follows from the others.
fn identity(draft: &mut Draft<'_>) -> Result<(), ConfigError> {
    let Some(entry) = draft.find("train_batch_size") else {
        return Ok(());
    };
    if is_auto(draft.scalar(entry)) {
        draft.harmless();
        return Ok(());
    }
    let Some(whole) = draft.number("train_batch_size") else {
        draft.not_understood(entry);
        return Ok(());
    };
    let micro = draft.number("train_micro_batch_size_per_gpu");
    let accumulation = draft.number("gradient_accumulation_steps");
    match (micro, accumulation) {
        (Some(micro), Some(accumulation)) => {
            let step = micro.saturating_mul(accumulation);
            if step == 0 || whole % step != 0 {
                return Err(draft.refuse(
                    entry,
                    &format!("it is not micro batch {micro} × accumulation {accumulation} × a number of GPUs"),
                ));
            }
            draft.say(entry, RANKS, &(whole / step).to_string());
        }
        // DeepSpeed fills what is missing for the number of GPUs it finds; here for one.
        (Some(micro), None) if micro > 0 && whole % micro == 0 => {
            draft.say(entry, ACCUMULATION, &(whole / micro).to_string());
            draft.assume("train_batch_size is met by one GPU: say --ranks for more");
        }
        (None, Some(accumulation)) if accumulation > 0 && whole % accumulation == 0 => {
            draft.say(entry, BATCH, &(whole / accumulation).to_string());
            draft.assume("train_batch_size is met by one GPU: say --ranks for more");
        }
        (None, None) => {
            draft.say(entry, BATCH, &whole.to_string());
            draft.assume(
                "train_batch_size is met by one GPU in one micro batch: say --ranks for more",
            );
        }
        _ => draft.not_understood(entry),
    }
    Ok(())
}
