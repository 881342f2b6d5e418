//! accelerate's YAML, as `accelerate config` writes it: how a run is launched.

use super::draft::Draft;
use super::{
    ACCUMULATION, CLIP, Dialect, Keys, NODES, Program, RANKS, Rule, SHARDING, TORCH_PRECISION,
    combined, harmless, refused, same, words,
};
use crate::error::ConfigError;
use crate::unfollowed::Instead;

pub(super) static ACCELERATE: Dialect = Dialect {
    name: "accelerate",
    program: Program::PyTorch,
    recognise,
    rules: &[RULES],
    defaults: &[],
    adds_keys: false,
    whole_batch: None,
    arithmetic: Some(arithmetic),
};

fn recognise(keys: &Keys<'_>) -> Option<Vec<String>> {
    let mut found = keys.of_these(&["compute_environment", "distributed_type", "num_processes"]);
    // A launcher's command line may name the rest. Other programs have these sections too.
    if keys.has("distributed_type") {
        let sections = ["fsdp_config", "deepspeed_config"].into_iter();
        found.extend(
            sections
                .filter(|name| keys.has_section(name))
                .map(str::to_owned),
        );
    }
    (found.len() >= 2).then_some(found)
}

const RULES: &[Rule] = &[
    combined("distributed_type"),
    same("num_processes", RANKS),
    words(
        "mixed_precision",
        TORCH_PRECISION,
        &[("bf16", "amp_bf16"), ("fp16", "amp_fp16"), ("no", "fp32")],
    )
    .otherwise("this precision is not computed"),
    combined("deepspeed.zero_stage"),
    same("deepspeed.gradient_accumulation_steps", ACCUMULATION),
    same("deepspeed.gradient_clipping", CLIP),
    combined("deepspeed.deepspeed_config_file"),
    refused(
        "deepspeed.offload_param_device",
        "parameters in host memory are not computed",
    ),
    combined("deepspeed.offload_optimizer_device"),
    refused(
        "fsdp.fsdp_offload_params",
        "parameters in host memory are not computed",
    ),
    refused("use_cpu", "a run on the CPU is not computed"),
    refused(
        "megatron_lm*",
        "one model divided over several GPUs is not computed",
    ),
    refused("dynamo*", "what torch.compile allocates is not predicted"),
    harmless("deepspeed.*"),
    harmless("fsdp.*"),
    harmless("compute_environment"),
    harmless("downcast_bf16"),
    harmless("machine_rank"),
    same("num_machines", NODES),
    harmless("gpu_ids"),
    harmless("rdzv_backend"),
    harmless("same_network"),
    harmless("main_*"),
    harmless("tpu_*"),
];

fn arithmetic(draft: &mut Draft<'_>) -> Result<(), ConfigError> {
    if let Some(entry) = draft.find("deepspeed.zero_stage") {
        match draft.number("deepspeed.zero_stage") {
            Some(0) => draft.say(entry, SHARDING, "ddp"),
            Some(stage @ 1..=3) => draft.say(entry, SHARDING, &format!("zero{stage}")),
            _ => draft.not_understood(entry),
        }
    }
    if let Some(entry) = draft.find("deepspeed.deepspeed_config_file") {
        draft.link(entry);
    }
    if let Some(entry) = draft.find("deepspeed.offload_optimizer_device") {
        match draft.is_on("deepspeed.offload_optimizer_device") {
            true => {
                draft.saves(entry, "the optimizer's states are kept outside the card");
                draft.done_instead(entry, Instead::StatesOnDevice);
            }
            false => draft.harmless(),
        }
    }
    if let Some(entry) = draft.find("distributed_type") {
        let kind = draft.text(entry).unwrap_or_default().to_uppercase();
        match kind.as_str() {
            "FSDP" => draft.say(entry, SHARDING, "fsdp"),
            "MULTI_GPU" => draft.say(entry, SHARDING, "ddp"),
            "DEEPSPEED" | "NO" => draft.harmless(),
            _ => {
                let why = "runs of this kind are not computed";
                return Err(draft.refuse(entry, why));
            }
        }
    }
    Ok(())
}
