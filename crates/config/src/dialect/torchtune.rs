//! torchtune: recipes whose parts are named by `_component_`.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use super::draft::Draft;
use super::optimizer;
use super::{
    ACCUMULATION, ADAPTER, ADAPTER_DROPOUT, ALPHA, BATCH, CHECKPOINTING, CLIP, Dialect, EPOCHS,
    Keys, MODEL, OUTPUT, Program, QUANTIZATION, RANK, RATE, Rule, SEED, SEQUENCE, SHARDING, STEPS,
    TARGETS, TORCH_PRECISION, combined, compiles, harmless, refused, refused_unless, same,
    saves_there, switch, words,
};
use crate::document::Scalar;
use crate::error::ConfigError;
use crate::unfollowed::Instead;

pub(super) static TORCHTUNE: Dialect = Dialect {
    name: "torchtune",
    program: Program::PyTorch,
    recognise,
    rules: &[RULES],
    defaults: &[
        (BATCH, "1"),
        (ACCUMULATION, "1"),
        (CHECKPOINTING, "none"),
        (TORCH_PRECISION, "fp32"),
        ("lora.dtype", "weights"),
        (CLIP, "0"),
    ],
    adds_keys: true,
    whole_batch: None,
    arithmetic: Some(arithmetic),
};

fn recognise(keys: &Keys<'_>) -> Option<Vec<String>> {
    let mut components = keys.document.entries.iter().filter(|entry| {
        let is_component = entry.path.last().is_some_and(|leaf| leaf == "_component_");
        let text = match &entry.scalar {
            Scalar::Text(text) => text.as_str(),
            _ => "",
        };
        is_component && text.starts_with("torchtune.")
    });
    components.next().map(|entry| vec![entry.key()])
}

const PARALLEL: &str = "one model divided over several GPUs is not computed";
const PREFERENCES: &str =
    "only supervised training is computed, not training on preferences, rewards or a teacher";
const NO_TRAINING: &str = "this file does not train";

const RULES: &[Rule] = &[
    combined("model._component_"),
    combined("model.lora_attn_modules"),
    combined("model.apply_lora_to_mlp"),
    refused(
        "model.apply_lora_to_output",
        "an adapter on the output head is not computed",
    ),
    same("model.lora_rank", RANK),
    same("model.lora_alpha", ALPHA),
    same("model.lora_dropout", ADAPTER_DROPOUT),
    switch("model.quantize_base", QUANTIZATION, "4bit", "none"),
    refused("model.use_dora", "DoRA is not computed"),
    refused("model.decoder_trainable", "images are not computed"),
    refused("model.encoder_trainable", "images are not computed"),
    refused("model.fusion_trainable", "images are not computed"),
    refused("model.image_size", "images are not computed"),
    same("batch_size", BATCH),
    same("gradient_accumulation_steps", ACCUMULATION),
    same("tokenizer.max_seq_len", SEQUENCE),
    combined("dataset.packed"),
    words(
        "dtype",
        TORCH_PRECISION,
        &[("bf16", "bf16"), ("fp32", "fp32"), ("fp16", "fp16")],
    ),
    switch(
        "enable_activation_checkpointing",
        CHECKPOINTING,
        "full",
        "none",
    ),
    refused_unless(
        "ac_mode",
        &["full"],
        "checkpointing of some of the layers is not computed",
    ),
    refused(
        "ac_option",
        "checkpointing of some of the layers is not computed",
    ),
    saves_there(
        "enable_activation_offloading",
        "checkpoints are kept in host memory",
        Instead::ActivationsOnDevice,
    ),
    combined("optimizer._component_"),
    combined("optimizer.fused"),
    saves_there(
        "optimizer_in_bwd",
        "gradients never exist all at once",
        Instead::WholeGradients,
    ),
    compiles("compile"),
    combined("loss._component_"),
    combined("clip_grad_norm"),
    refused(
        "fsdp_cpu_offload",
        "parameters in host memory are not computed",
    ),
    refused(
        "fsdp.cpu_offload",
        "parameters in host memory are not computed",
    ),
    refused_unless("tensor_parallel_dim", &["1"], PARALLEL),
    refused("tensor_parallel_plan*", PARALLEL),
    refused_unless("context_parallel_dim", &["1"], PARALLEL),
    refused_unless("data_parallel_replicate_dim", &["1"], PARALLEL),
    combined("data_parallel_shard_dim"),
    combined("custom_sharded_layers"),
    harmless("memory_efficient_fsdp_wrap"),
    harmless("fsdp.*"),
    refused("teacher_model*", PREFERENCES),
    refused("teacher_checkpointer*", PREFERENCES),
    refused("kd_*", PREFERENCES),
    refused("ref_checkpointer*", PREFERENCES),
    refused("ref_policy_checkpointer*", PREFERENCES),
    refused("policy_model*", PREFERENCES),
    refused("reward_and_value_model*", PREFERENCES),
    refused("value_checkpointer*", PREFERENCES),
    refused("reward_checkpointer*", PREFERENCES),
    refused("reward_functions*", PREFERENCES),
    refused("grpo_samples", PREFERENCES),
    refused("ppo_*", PREFERENCES),
    refused("training*", PREFERENCES),
    refused("inference*", PREFERENCES),
    refused("orchestration*", PREFERENCES),
    refused("postprocessing*", PREFERENCES),
    refused(
        "quantizer._component_",
        "quantisation-aware training and quantising are not computed",
    ),
    refused("prompt*", NO_TRAINING),
    refused("tasks", NO_TRAINING),
    refused("max_new_tokens", NO_TRAINING),
    refused("base_model_path", NO_TRAINING),
    refused("lora_adapter_path", NO_TRAINING),
    same("optimizer.lr", RATE),
    same("max_steps", STEPS),
    same("epochs", EPOCHS),
    same("seed", SEED),
    same("output_dir", OUTPUT),
    harmless("quantizer*"),
    harmless("checkpointer*"),
    harmless("tokenizer*"),
    harmless("dataset*"),
    harmless("optimizer*"),
    harmless("lr_scheduler*"),
    harmless("loss*"),
    harmless("metric_logger*"),
    harmless("profiler*"),
    harmless("log_peak_memory_stats"),
    harmless("batch_size_val"),
    harmless("device"),
    harmless("model.*"),
    harmless("low_cpu_ram"),
    harmless("save_adapter_weights_only"),
    harmless("packed"),
];

/// Which shape each builder makes.
static BUILDERS: LazyLock<BTreeMap<String, String>> = LazyLock::new(|| {
    // A test reads it, so that a mistake is found before it is shipped.
    serde_json::from_str(include_str!("../../data/torchtune.json")).unwrap_or_default()
});

fn arithmetic(draft: &mut Draft<'_>) -> Result<(), ConfigError> {
    draft.packs(&["dataset.packed"]);
    model(draft)?;
    updates(draft)?;
    loss(draft)?;
    if let Some(entry) = draft.find("clip_grad_norm") {
        let norm = draft.text(entry).unwrap_or_default();
        draft.say(entry, CLIP, &norm);
    }
    for name in ["data_parallel_shard_dim", "custom_sharded_layers"] {
        if let Some(entry) = draft.find(name) {
            match draft.says(SHARDING) {
                true => draft.harmless(),
                false => draft.say(entry, SHARDING, "fsdp"),
            }
        }
    }
    if !draft.says(SEQUENCE) {
        draft.assume("tokenizer.max_seq_len is not set: samples are as long as they are; say --seq-len for the longest");
    }
    draft.assume(
        "torchtune's own model code is replayed as that of transformers with the same shape",
    );
    Ok(())
}

fn model(draft: &mut Draft<'_>) -> Result<(), ConfigError> {
    let Some(entry) = draft.find("model._component_") else {
        return Ok(());
    };
    let component = draft.text(entry).unwrap_or_default();
    let builder = component
        .rsplit('.')
        .next()
        .unwrap_or(&component)
        .to_owned();
    let (builder, adapter, quantized) = match builder.as_str() {
        name if name.starts_with("qlora_") => (&name[6..], true, true),
        name if name.starts_with("lora_") => (&name[5..], true, false),
        name => (name, false, false),
    };
    let Some(id) = BUILDERS.get(builder) else {
        let why = format!("the shape that {component} builds is not known here");
        return Err(draft.refuse(entry, &why));
    };
    draft.say(entry, MODEL, id);
    draft.say(entry, ADAPTER, if adapter { "lora" } else { "none" });
    if quantized {
        draft.say(entry, QUANTIZATION, "4bit");
    }
    if adapter {
        targets(draft, entry);
    }
    Ok(())
}

/// Its names of the layers, with those of the shape it shares with transformers.
const LAYERS: [(&str, &str); 4] = [
    ("q_proj", "q_proj"),
    ("k_proj", "k_proj"),
    ("v_proj", "v_proj"),
    ("output_proj", "o_proj"),
];

fn targets(draft: &mut Draft<'_>, model: usize) {
    let modules = draft.find("model.lora_attn_modules");
    let named = modules.map(|entry| draft.items(entry)).unwrap_or_default();
    let mut targets: Vec<&str> = Vec::new();
    for name in &named {
        let known = LAYERS.iter().find(|(theirs, _)| theirs == name);
        match (known, modules) {
            (Some((_, ours)), _) => targets.push(ours),
            (None, Some(entry)) => draft.not_understood(entry),
            (None, None) => {}
        }
    }
    if draft.is_on("model.apply_lora_to_mlp") {
        targets.extend(["gate_proj", "up_proj", "down_proj"]);
    }
    if !targets.is_empty() {
        draft.say(modules.unwrap_or(model), TARGETS, &targets.join(","));
    }
}

fn updates(draft: &mut Draft<'_>) -> Result<(), ConfigError> {
    let Some(entry) = draft.find("optimizer._component_") else {
        return Ok(());
    };
    let is_fused = draft.is_on("optimizer.fused");
    optimizer::by_class(draft, entry, is_fused)
}

fn loss(draft: &mut Draft<'_>) -> Result<(), ConfigError> {
    let Some(entry) = draft.find("loss._component_") else {
        return Ok(());
    };
    let component = draft.text(entry).unwrap_or_default();
    match component.rsplit('.').next().unwrap_or_default() {
        "CEWithChunkedOutputLoss" => {
            draft.saves(
                entry,
                "the loss is computed in chunks, from logits that exist whole",
            );
        }
        "LinearCrossEntropyLoss" => draft.saves(entry, "the logits never exist whole"),
        "CrossEntropyLoss" => draft.harmless(),
        _ => return Err(draft.refuse(entry, "this loss is not known here")),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_builder_is_a_model_of_the_catalogue() {
        assert!(!BUILDERS.is_empty());
        for (builder, id) in BUILDERS.iter() {
            let known = cinch_architecture::catalogue()
                .iter()
                .any(|entry| entry.ids.contains(id));
            assert!(known, "{builder}: {id}");
        }
    }
}
