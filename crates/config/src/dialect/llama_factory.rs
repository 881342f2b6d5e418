//! LLaMA-Factory: Hugging Face's TrainingArguments with keys of its own for model, adapters and
//! data; and its newer files, which have a section for each part.

use super::draft::Draft;
use super::scalar::word;
use super::training_arguments::{COMMON, shards};
use super::{
    ACCUMULATION, ADAPTER, ADAPTER_DROPOUT, ALPHA, ATTENTION, BATCH, BETA2, CHECKPOINTING, CLIP,
    DECAY, DOUBLE_QUANTIZATION, Dialect, EPOCHS, HELD_OUT, Keys, LIGER, LOOP, MODEL,
    MODULES_TO_SAVE, ON_INPUTS, OPTIMIZER, PREPARED, Program, QUANTIZATION, RANK, RATE, REENTRANT,
    ROOT_OF_RANK, Rule, SAMPLES, SEQUENCE, SHARDING, TARGETS, TORCH_PRECISION, WARMUP, WHOLE_TYPE,
    WholeBatch, combined, harmless, list, not_followed, refused, refused_unless, same, saves,
    stands_for, switch, words,
};
use crate::document::Entry;
use crate::error::ConfigError;

pub(super) static LLAMA_FACTORY: Dialect = Dialect {
    name: "LLaMA-Factory",
    program: Program::PyTorch,
    recognise,
    rules: &[RULES, COMMON],
    defaults: &[
        (BATCH, "8"),
        (ACCUMULATION, "1"),
        (SEQUENCE, "2048"),
        // It checkpoints unless told otherwise.
        (CHECKPOINTING, "full"),
        (REENTRANT, "true"),
        (ADAPTER, "lora"),
        (RANK, "8"),
        (TARGETS, "all-linear"),
        (TORCH_PRECISION, "fp32"),
        (OPTIMIZER, "adamw_fused"),
        (LOOP, "trainer"),
        (DOUBLE_QUANTIZATION, "true"),
        (PREPARED, "false"),
        (CLIP, "1.0"),
        (EPOCHS, "3"),
        (RATE, "5e-5"),
        (WARMUP, "0"),
        (DECAY, "0"),
        (BETA2, "0.999"),
        (HELD_OUT, "0"),
    ],
    adds_keys: true,
    whole_batch: None,
    arithmetic: Some(arithmetic),
};

fn recognise(keys: &Keys<'_>) -> Option<Vec<String>> {
    let own = [
        "finetuning_type",
        "stage",
        "cutoff_len",
        "template",
        "dataset_dir",
        "infer_backend",
        "export_dir",
        "lora_target",
        "quantization_bit",
    ];
    let mut found = keys.of_these(&own);
    // Other scripts have stages too.
    let of_its_own = |(name, entry): (&String, &Entry)| {
        stands_for("stage", name) && word(&entry.scalar).is_none_or(|word| is_stage(&word))
    };
    let mut entries = keys.names.iter().zip(&keys.document.entries);
    if !entries.any(of_its_own) {
        found.retain(|name| name != "stage");
    }
    let named = keys.has("model_name_or_path");
    (named && !found.is_empty() && !keys.has("base_model") || found.len() >= 3).then_some(found)
}

fn is_stage(word: &str) -> bool {
    ["pt", "sft", "rm", "ppo", "dpo", "kto"].contains(&word)
}

const PREFERENCES: &str =
    "only supervised training and pretraining are computed, not training on preferences or rewards";
const OPTIMIZERS: &str = super::OTHER_OPTIMIZER;
const PARALLEL: &str = "one model divided over several GPUs is not computed";
const PARTLY: &str = "training a part of the weights is not computed";
const NO_TRAINING: &str = "this file does not train";

const RULES: &[Rule] = &[
    same("model_name_or_path", MODEL),
    refused_unless("stage", &["sft", "pt"], PREFERENCES),
    words(
        "finetuning_type",
        ADAPTER,
        &[("lora", "lora"), ("full", "none")],
    )
    .otherwise("only LoRA and full training are known here"),
    combined("do_train"),
    refused("do_predict", NO_TRAINING),
    refused("infer_backend", NO_TRAINING),
    refused("export_dir", NO_TRAINING),
    same("cutoff_len", SEQUENCE),
    same("lora_rank", RANK),
    same("lora_alpha", ALPHA),
    same("lora_dropout", ADAPTER_DROPOUT),
    list("lora_target", TARGETS),
    list("additional_target", MODULES_TO_SAVE),
    combined("bf16"),
    combined("fp16"),
    combined("pure_bf16"),
    switch(
        "disable_gradient_checkpointing",
        CHECKPOINTING,
        "none",
        "full",
    ),
    switch("use_reentrant_gc", REENTRANT, "true", "false"),
    words(
        "quantization_bit",
        QUANTIZATION,
        &[("4", "4bit"), ("8", "8bit")],
    )
    .otherwise("weights of this many bits are not computed"),
    refused_unless(
        "quantization_method",
        &["bnb", "bitsandbytes"],
        "weights quantised by this method are not computed",
    ),
    switch("double_quantization", DOUBLE_QUANTIZATION, "true", "false"),
    refused_unless(
        "quantization_type",
        &["nf4", "fp4"],
        "this quantisation is not computed",
    ),
    words(
        "flash_attn",
        ATTENTION,
        &[
            ("fa2", "flash_attention_2"),
            ("fa3", "flash_attention_3"),
            ("sdpa", "sdpa"),
            ("auto", "sdpa"),
            ("disabled", "eager"),
            ("no", "eager"),
        ],
    ),
    combined("packing"),
    combined("neat_packing"),
    switch("enable_liger_kernel", LIGER, "all", "none"),
    refused("use_unsloth", "unsloth's own model code is not computed"),
    refused(
        "use_unsloth_gc",
        "keeping checkpoints elsewhere is not computed",
    ),
    refused("use_galore", OPTIMIZERS),
    refused("use_apollo", OPTIMIZERS),
    refused("use_badam", OPTIMIZERS),
    refused("use_adam_mini", OPTIMIZERS),
    refused("use_muon", OPTIMIZERS),
    refused("use_dora", "DoRA is not computed"),
    refused("use_llama_pro", PARTLY),
    refused("freeze_trainable_layers", PARTLY),
    refused("freeze_trainable_modules", PARTLY),
    refused("freeze_extra_modules", PARTLY),
    refused("mixture_of_depths", "mixture of depths is not computed"),
    refused("shift_attn", "shifted attention is not computed"),
    refused("use_kt", "KTransformers is not computed"),
    refused("kt_*", "KTransformers is not computed"),
    refused("fp8", "fp8 is not computed"),
    harmless("fp8_*"),
    refused("oft_*", "only LoRA adapters are known here"),
    refused_unless("tensor_model_parallel_size", &["1"], PARALLEL),
    refused_unless("pipeline_model_parallel_size", &["1"], PARALLEL),
    refused_unless("expert_model_parallel_size", &["1"], PARALLEL),
    refused_unless("context_parallel_size", &["1"], PARALLEL),
    refused_unless("cp_size", &["1"], PARALLEL),
    refused("use_asft_loss", "this loss keeps a second model"),
    refused("ref_model*", PREFERENCES),
    refused(
        "upcast_lmhead_output",
        "logits raised to fp32 by the head are not computed",
    ),
    refused(
        "upcast_layernorm",
        "norms in fp32 beside weights in bf16 are not computed",
    ),
    refused(
        "train_from_scratch",
        "random weights in another type are not computed",
    ),
    refused("resize_vocab", "a larger vocabulary is not computed"),
    not_followed("use_dft_loss"),
    not_followed("use_eaft_loss"),
    harmless("eaft_*"),
    harmless("asft_alpha"),
    not_followed("pissa_init"),
    harmless("pissa_*"),
    not_followed("loraplus_lr_ratio"),
    harmless("loraplus_*"),
    not_followed("adapter_name_or_path"),
    switch("use_rslora", ROOT_OF_RANK, "true", "false"),
    harmless("galore_*"),
    harmless("apollo_*"),
    harmless("badam_*"),
    harmless("pref_*"),
    harmless("image_max_pixels"),
    harmless("image_min_pixels"),
    harmless("video_*"),
    harmless("crop_to_patches"),
    harmless("freeze_vision_tower"),
    harmless("freeze_multi_modal_projector"),
    harmless("freeze_language_model"),
    not_followed("template"),
    not_followed("neftune_noise_alpha"),
    not_followed("mask_history"),
    switch("train_on_prompt", ON_INPUTS, "true", "false"),
    same("val_size", HELD_OUT),
    harmless("use_v1_kernels"),
    harmless("ray_*"),
    refused(
        "use_distributed_optimizer",
        "Megatron's own model code is not computed",
    ),
    harmless("overlap_*"),
    harmless("bias_activation_fusion"),
    harmless("apply_rope_fusion"),
    harmless("moe_grouped_gemm"),
    harmless("sequence_parallel"),
    same("max_samples", SAMPLES),
];

fn arithmetic(draft: &mut Draft<'_>) -> Result<(), ConfigError> {
    match draft.find("do_train") {
        Some(entry) if !draft.is_on("do_train") => return Err(draft.refuse(entry, NO_TRAINING)),
        Some(_) => draft.harmless(),
        None => {
            // Inference, web interfaces and merging have no training keys.
            let trains = [
                "stage",
                "dataset",
                "learning_rate",
                "output_dir",
                "num_train_epochs",
            ];
            if !trains.iter().any(|name| draft.find(name).is_some())
                && let Some(entry) = draft.find("model_name_or_path")
            {
                return Err(draft.refuse(entry, NO_TRAINING));
            }
        }
    }
    // Without a type of training it is LoRA, and then only its own keys count.
    let has_adapters = match draft.value(ADAPTER) {
        Some(adapter) => adapter.to_string() == "lora",
        None => true,
    };
    for name in ["pure_bf16", "bf16", "fp16"] {
        let Some(entry) = draft.find(name) else {
            continue;
        };
        if !draft.is_on(name) || draft.says(TORCH_PRECISION) {
            draft.harmless();
            continue;
        }
        // What is trained is raised to fp32 unless it is pure_bf16; frozen weights stay as loaded.
        let precision = match (name, has_adapters) {
            ("pure_bf16", _) => "bf16",
            ("bf16", true) => "bf16_amp",
            ("bf16", false) => "amp_bf16",
            (_, true) => "fp16_amp",
            _ => "amp_fp16",
        };
        draft.say(entry, TORCH_PRECISION, precision);
    }
    if !draft.is_on("pure_bf16") {
        draft.default(WHOLE_TYPE, "fp32");
    }
    draft.packs(&["packing", "neat_packing"]);
    draft.warm_up();
    shards(draft)
}

/// The files of its newer interface.
pub(super) static LLAMA_FACTORY_V1: Dialect = Dialect {
    name: "LLaMA-Factory (v1)",
    program: Program::PyTorch,
    recognise: recognise_v1,
    rules: &[RULES_V1],
    defaults: &[
        (BATCH, "1"),
        (ACCUMULATION, "1"),
        (SEQUENCE, "2048"),
        (CHECKPOINTING, "full"),
        (TORCH_PRECISION, "fp32"),
        (PREPARED, "false"),
        (CLIP, "1.0"),
    ],
    adds_keys: false,
    whole_batch: Some(WholeBatch {
        whole: "global_batch_size",
        has_accumulation: false,
    }),
    arithmetic: Some(arithmetic_v1),
};

fn recognise_v1(keys: &Keys<'_>) -> Option<Vec<String>> {
    let own = [
        "train_dataset",
        "model_class",
        "sample_backend",
        "dist_config.name",
        "kernel_config.name",
        "peft_config.name",
        "init_config.name",
    ];
    let found: Vec<String> = own
        .iter()
        .filter(|name| {
            let plain = name.replace("_config.", ".");
            keys.names
                .iter()
                .any(|known| known == *name || *known == plain)
        })
        .map(|name| (*name).to_owned())
        .collect();
    let has_model = keys.names.iter().any(|name| name == "model");
    (has_model && !found.is_empty()).then_some(found)
}

const RULES_V1: &[Rule] = &[
    same("model", MODEL),
    same("micro_batch_size", BATCH),
    same("cutoff_len", SEQUENCE),
    combined("global_batch_size"),
    combined("bf16"),
    switch(
        "enable_activation_checkpointing",
        CHECKPOINTING,
        "full",
        "none",
    ),
    words("peft.name", ADAPTER, &[("lora", "lora")])
        .otherwise("only LoRA and full training are known here"),
    same("peft.r", RANK),
    same("peft.lora_alpha", ALPHA),
    same("peft.lora_dropout", ADAPTER_DROPOUT),
    list("peft.target_modules", TARGETS),
    list("peft.modules_to_save", MODULES_TO_SAVE),
    refused("peft.export_dir", NO_TRAINING),
    words(
        "dist.name",
        SHARDING,
        &[
            ("fsdp2", "fsdp"),
            ("fsdp", "fsdp"),
            ("ddp", "ddp"),
            // Its file says more.
            ("deepspeed", "ddp"),
        ],
    )
    .otherwise("this way to divide a run is not computed"),
    refused_unless("dist.ep_size", &["1"], PARALLEL),
    harmless("dist.*"),
    refused_unless(
        "quant.name",
        &["bnb", "auto"],
        "weights quantised by this method are not computed",
    ),
    words(
        "quant.quantization_bit",
        QUANTIZATION,
        &[("4", "4bit"), ("8", "8bit")],
    )
    .otherwise("weights of this many bits are not computed"),
    combined("dist.config_file"),
    refused("optim.name", OPTIMIZERS),
    harmless("optim.*"),
    saves("kernel.name", "fused kernels keep less"),
    harmless("kernel.*"),
    combined("sample_backend"),
    refused_unless("cp_size", &["1"], PARALLEL),
    refused_unless("model_class", &["llm"], "only language models are computed"),
    refused_unless(
        "batching_strategy",
        &["normal"],
        "batches of another kind than padded rows are not computed",
    ),
    harmless("cp_mode"),
    harmless("init.*"),
    harmless("train_dataset"),
];

fn arithmetic_v1(draft: &mut Draft<'_>) -> Result<(), ConfigError> {
    if let Some(entry) = draft.find("dist.config_file") {
        draft.link(entry);
    }
    if let Some(entry) = draft.find("sample_backend") {
        if draft.find("train_dataset").is_none() {
            return Err(draft.refuse(entry, NO_TRAINING));
        }
        draft.harmless();
    }
    if let Some(entry) = draft.find("bf16") {
        let word = match draft.is_on("bf16") {
            true => "bf16",
            false => "fp32",
        };
        draft.say(entry, TORCH_PRECISION, word);
    }
    if let Some(entry) = draft.find("global_batch_size") {
        let ranks = 1;
        match (
            draft.number("global_batch_size"),
            draft.number("micro_batch_size"),
        ) {
            (Some(all), Some(micro)) if micro > 0 && all % (micro * ranks) == 0 => {
                draft.say(entry, ACCUMULATION, &(all / micro).to_string());
                draft.assume(format!(
                    "global_batch_size {all} is met by one GPU: {} micro batches",
                    all / micro
                ));
            }
            _ => draft.not_understood(entry),
        }
    }
    Ok(())
}
