//! Hugging Face's TrainingArguments and what people give beside them: as JSON or YAML, as a call
//! in Python, or as flags of a command line; TRL's configs, which extend them.

use super::draft::Draft;
use super::liger;
use super::optimizer;
use super::{
    ACCUMULATION, ADAPTER, ADAPTER_DROPOUT, ALPHA, ATTENTION, ATTENTION_WORDS, BATCH, BETA1, BETA2,
    CHECKPOINTING, CLIP, DECAY, DOUBLE_QUANTIZATION, Dialect, EPOCHS, EPSILON, EVALUATION,
    HELD_OUT, Keys, LOGGING, LOOP, MODEL, MODULES_TO_SAVE, NODES, OPTIMIZER, OTHER_OPTIMIZER,
    OUTPUT, PEFT, Program, QUANTIZATION, RANK, RANKS, RATE, REENTRANT, ROOT_OF_RANK, Rule, SAMPLES,
    SAVED, SAVING, SCHEDULE, SCHEDULE_WORDS, SEED, SEQUENCE, SHARDING, SMOOTHING, STEPS, TARGETS,
    TORCH_PRECISION, WARMUP, combined, compiles, harmless, list, not_followed, refused, same,
    saves_there, switch, words,
};
use crate::document::Scalar;
use crate::error::ConfigError;
use crate::format::Format;
use crate::unfollowed::Instead;

pub(super) static TRAINING_ARGUMENTS: Dialect = Dialect {
    name: "Hugging Face TrainingArguments",
    program: Program::PyTorch,
    recognise,
    rules: &[RULES, PEFT, COMMON],
    defaults: &[
        (BATCH, "8"),
        (ACCUMULATION, "1"),
        (CHECKPOINTING, "none"),
        (OPTIMIZER, "adamw_fused"),
        (LOOP, "trainer"),
        (CLIP, "1.0"),
        (EPOCHS, "3"),
        (RATE, "5e-5"),
        (WARMUP, "0"),
        (DECAY, "0"),
        (BETA2, "0.999"),
    ],
    adds_keys: true,
    whole_batch: None,
    arithmetic: Some(arithmetic),
};

fn recognise(keys: &Keys<'_>) -> Option<Vec<String>> {
    let own = [
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "num_train_epochs",
        "lr_scheduler_type",
        "gradient_checkpointing",
        "bf16",
        "fp16",
        "model_name_or_path",
        "dataset_text_field",
        "max_seq_length",
    ];
    let found = keys.of_these(&own);
    // Two of the rest may be anybody's.
    let certain = keys.has("per_device_train_batch_size")
        || keys.has("lr_scheduler_type")
        || keys.has("num_train_epochs");
    if certain || found.len() >= 3 {
        return Some(found);
    }
    // In a program the classes themselves say it.
    let called: Vec<String> = CLASSES
        .iter()
        .filter(|_| keys.document.format == Format::Python)
        .filter(|class| keys.document.sections.iter().any(|name| name == *class))
        .map(|class| (*class).to_owned())
        .collect();
    (!called.is_empty()).then_some(called)
}

/// Classes that no other library has.
const CLASSES: &[&str] = &[
    "TrainingArguments",
    "Seq2SeqTrainingArguments",
    "SFTConfig",
    "SFTTrainer",
    "DPOConfig",
    "DPOTrainer",
    "ORPOConfig",
    "KTOConfig",
    "CPOConfig",
    "GRPOConfig",
    "PPOConfig",
    "RLOOConfig",
    "RewardConfig",
    "FastLanguageModel",
];

const PARAMETERS_ON_HOST: &str = "parameters in host memory are not computed";
const PREFERENCES: &str =
    "only supervised training is computed, not training on preferences or rewards";

const RULES: &[Rule] = &[
    same("model_name_or_path", MODEL),
    same("model_name", MODEL),
    same("model_id", MODEL),
    same("base_model", MODEL),
    same("base_model_name", MODEL),
    same("pretrained_model_name_or_path", MODEL),
    same("model.pretrained_model_name_or_path", MODEL),
    same("max_seq_length", SEQUENCE),
    same("max_seq_len", SEQUENCE),
    same("max_length", SEQUENCE),
    same("model_max_length", SEQUENCE),
    same("block_size", SEQUENCE),
    combined("packing"),
    same("val_split", HELD_OUT),
    same("validation_split", HELD_OUT),
    same("max_samples", SAMPLES),
    same("max_train_samples", SAMPLES),
    combined("bf16"),
    combined("fp16"),
    combined("mixed_precision"),
    combined("torch_dtype"),
    combined("dtype"),
    combined("bf16_full_eval"),
    switch("gradient_checkpointing", CHECKPOINTING, "full", "none"),
    switch(
        "gradient_checkpointing_kwargs.use_reentrant",
        REENTRANT,
        "true",
        "false",
    ),
    words("attn_implementation", ATTENTION, ATTENTION_WORDS)
        .otherwise("this attention is not known here"),
    combined("use_flash_attention_2"),
    combined("use_flash_attn"),
    combined("use_peft"),
    combined("use_lora"),
    combined("use_peft_lora"),
    combined("train_mode"),
    same("lora_r", RANK),
    same("lora_rank", RANK),
    same("lora.r", RANK),
    same("peft.r", RANK),
    same("lora_alpha", ALPHA),
    same("lora.lora_alpha", ALPHA),
    same("lora_dropout", ADAPTER_DROPOUT),
    same("lora.lora_dropout", ADAPTER_DROPOUT),
    list("lora_target_modules", TARGETS),
    list("target_modules", TARGETS),
    list("lora.target_modules", TARGETS),
    list("peft.target_modules", TARGETS),
    list("lora_modules_to_save", MODULES_TO_SAVE),
    list("modules_to_save", MODULES_TO_SAVE),
    list("lora.modules_to_save", MODULES_TO_SAVE),
    list("peft.modules_to_save", MODULES_TO_SAVE),
    refused("use_dora", "DoRA is not computed"),
    refused("lora.use_dora", "DoRA is not computed"),
    switch("load_in_4bit", QUANTIZATION, "4bit", "none"),
    switch("load_in_8bit", QUANTIZATION, "8bit", "none"),
    switch("use_4bit_quantization", QUANTIZATION, "4bit", "none"),
    switch("use_8bit_quantization", QUANTIZATION, "8bit", "none"),
    switch("bits_and_bytes.load_in_4bit", QUANTIZATION, "4bit", "none"),
    switch("bits_and_bytes.load_in_8bit", QUANTIZATION, "8bit", "none"),
    // qlora.py and the many scripts that were made from it.
    words(
        "bits",
        QUANTIZATION,
        &[("4", "4bit"), ("8", "8bit"), ("16", "none"), ("32", "none")],
    ),
    switch("double_quant", DOUBLE_QUANTIZATION, "true", "false"),
    words("lora_modules", TARGETS, &[("all", "all-linear")]),
    harmless("quant_type"),
    switch("q_lora", QUANTIZATION, "4bit", "none"),
    switch(
        "bnb_4bit_use_double_quant",
        DOUBLE_QUANTIZATION,
        "true",
        "false",
    ),
    switch("use_bnb_nested_quant", DOUBLE_QUANTIZATION, "true", "false"),
    switch("use_nested_quant", DOUBLE_QUANTIZATION, "true", "false"),
    switch(
        "bits_and_bytes.bnb_4bit_use_double_quant",
        DOUBLE_QUANTIZATION,
        "true",
        "false",
    ),
    // The objects that programs hand on; what they hold stands where they are made.
    harmless("quantization_config"),
    harmless("peft_config"),
    harmless("bnb_4bit_*"),
    harmless("bits_and_bytes.*"),
    switch("use_rslora", ROOT_OF_RANK, "true", "false"),
    switch("lora.use_rslora", ROOT_OF_RANK, "true", "false"),
    harmless("lora.*"),
    harmless("lora_task_type"),
    combined("use_liger_kernel"),
    combined("use_liger"),
    combined("liger_kernel.rope"),
    combined("liger_kernel.rms_norm"),
    combined("liger_kernel.swiglu"),
    combined("liger_kernel.geglu"),
    combined("liger_kernel.cross_entropy"),
    combined("liger_kernel.fused_linear_cross_entropy"),
    saves_there(
        "activation_offloading",
        "activations are kept in host memory",
        Instead::ActivationsOnDevice,
    ),
    refused("dpo.*", PREFERENCES),
    refused("dpo_trainer.*", PREFERENCES),
    refused("orpo.*", PREFERENCES),
    refused("kto.*", PREFERENCES),
    refused("cpo.*", PREFERENCES),
    refused("grpo.*", PREFERENCES),
    refused("ppo.*", PREFERENCES),
    refused("rloo.*", PREFERENCES),
    refused("reward.*", PREFERENCES),
    refused(
        "fast_language_model.*",
        "unsloth's own model code is not computed",
    ),
    refused("beta", PREFERENCES),
    refused("loss_type", PREFERENCES),
    refused("max_prompt_length", PREFERENCES),
    refused("max_completion_length", PREFERENCES),
    refused("num_generations", PREFERENCES),
    refused("reward_model_path", PREFERENCES),
    refused("reward_funcs", PREFERENCES),
    refused("ref_model*", PREFERENCES),
    refused("sft_model_path", PREFERENCES),
    refused("teacher_model_name_or_path", "distillation is not computed"),
    refused(
        "auto_find_batch_size",
        "the batch is found while the program runs",
    ),
    compiles("torch_compile"),
    refused(
        "neftune_noise_alpha*",
        "noise on the embeddings is not computed",
    ),
    refused(
        "spectrum_config_path",
        "training a part of the weights is not computed",
    ),
    refused(
        "freeze_layers",
        "training a part of the weights is not computed",
    ),
    combined("task_type"),
];

/// What TrainingArguments have in every program that is built on them.
pub(super) const COMMON: &[Rule] = &[
    same("per_device_train_batch_size", BATCH),
    same("gradient_accumulation_steps", ACCUMULATION),
    words("optim", OPTIMIZER, optimizer::WORDS).otherwise(OTHER_OPTIMIZER),
    combined("deepspeed"),
    combined("deepspeed_config"),
    combined("fsdp"),
    combined("nproc_per_node"),
    combined("num_processes"),
    combined("num_gpus"),
    combined("nnodes"),
    harmless("fsdp_config"),
    harmless("fsdp_transformer_layer_cls_to_wrap"),
    refused("fsdp.offload_params", PARAMETERS_ON_HOST),
    refused("fsdp.fsdp_offload_params", PARAMETERS_ON_HOST),
    combined("fsdp.activation_checkpointing"),
    harmless("fsdp.*"),
    same("max_grad_norm", CLIP),
    same("learning_rate", RATE),
    words("lr_scheduler_type", SCHEDULE, SCHEDULE_WORDS),
    same("max_steps", STEPS),
    same("num_train_epochs", EPOCHS),
    combined("warmup_steps"),
    combined("warmup_ratio"),
    not_followed("lr_scheduler_kwargs*"),
    same("weight_decay", DECAY),
    same("adam_beta1", BETA1),
    same("adam_beta2", BETA2),
    same("adam_epsilon", EPSILON),
    same("label_smoothing_factor", SMOOTHING),
    same("logging_steps", LOGGING),
    same("eval_steps", EVALUATION),
    same("save_steps", SAVING),
    same("save_total_limit", SAVED),
    same("seed", SEED),
    same("output_dir", OUTPUT),
    harmless("per_device_eval_batch_size"),
    harmless("per_gpu_eval_batch_size"),
    harmless("eval_accumulation_steps"),
    harmless("dataloader_*"),
    harmless("group_by_length"),
    harmless("dataset_*"),
    harmless("trust_remote_code"),
    harmless("tf32"),
    not_followed("optim_args"),
    harmless("gradient_checkpointing_kwargs"),
    harmless("ddp_*"),
    harmless("preprocessing_num_workers"),
];

fn arithmetic(draft: &mut Draft<'_>) -> Result<(), ConfigError> {
    draft.packs(&["packing"]);
    draft.warm_up();
    task(draft)?;
    flash(draft);
    liger::switched(draft, &["use_liger_kernel", "use_liger"], "liger_kernel");
    adapters(draft)?;
    shards(draft)?;
    precision(draft);
    if !draft.says(MODEL) && !draft.says(SEQUENCE) {
        return Ok(());
    }
    if !draft.says(SEQUENCE) {
        draft.assume("the length is not in the file: say --seq-len");
    }
    Ok(())
}

/// peft's name of a head or, in some scripts, of a way to train.
fn task(draft: &mut Draft<'_>) -> Result<(), ConfigError> {
    let Some(entry) = draft.find("task_type") else {
        return Ok(());
    };
    let word = draft.text(entry).unwrap_or_default().to_lowercase();
    let why = match word.as_str() {
        "causal_lm" | "sft" | "pt" | "pretrain" => {
            draft.harmless();
            return Ok(());
        }
        "dpo" | "orpo" | "kto" | "cpo" | "simpo" | "ppo" | "grpo" | "rm" | "reward" => PREFERENCES,
        "seq_cls" | "token_cls" | "seq_2_seq_lm" | "question_ans" | "feature_extraction" => {
            "another head than that of the language model is not computed"
        }
        _ => "what is trained for this task is not known here",
    };
    Err(draft.refuse(entry, why))
}

fn flash(draft: &mut Draft<'_>) {
    for name in ["use_flash_attention_2", "use_flash_attn"] {
        if let Some(entry) = draft.find(name) {
            match draft.is_on(name) {
                true => draft.say(entry, ATTENTION, "flash_attention_2"),
                false => draft.harmless(),
            }
        }
    }
}

/// Adapters are on where a switch says so, or, without one, where a rank is given: but TRL then trains
/// all weights.
fn adapters(draft: &mut Draft<'_>) -> Result<(), ConfigError> {
    let switches = ["use_peft", "use_lora", "use_peft_lora"];
    let switch = switches.iter().find_map(|name| draft.find(name));
    let switch_on = switches.iter().any(|name| draft.is_on(name));
    if draft.find("use_peft").is_some() {
        trl_by_itself(draft);
    }
    match switch {
        Some(entry) if switch_on => {
            draft.say(entry, ADAPTER, "lora");
            // peft's own, where a program asks for adapters and names no rank.
            draft.default(RANK, "16");
        }
        Some(entry) => draft.say(entry, ADAPTER, "none"),
        None => {
            let of_trl = ["lora_r", "lora_alpha", "lora_target_modules"];
            let adapted = of_trl.iter().find_map(|name| draft.find(name));
            let trl = ["model_name_or_path", "dataset_name"];
            if let Some(entry) = adapted
                && trl.iter().all(|name| draft.find(name).is_some())
            {
                let why = "without use_peft TRL trains all weights, and other scripts with keys \
                     like these train adapters: use_peft says which";
                return Err(draft.refuse(entry, why));
            }
            train_mode(draft);
        }
    }
    Ok(())
}

/// What TRL switches on where a file is silent; which version runs is not known.
fn trl_by_itself(draft: &mut Draft<'_>) {
    let silent = |names: &[&str]| names.iter().all(|name| draft.find(name).is_none());
    let precision = silent(&["bf16", "fp16"]);
    let checkpointing = silent(&["gradient_checkpointing"]);
    let keys = match (precision, checkpointing) {
        (true, true) => "bf16 and gradient_checkpointing",
        (true, false) => "bf16",
        (false, true) => "gradient_checkpointing",
        (false, false) => return,
    };
    draft.assume(format!(
        "{keys} off: TRL 0.22 and later switch what a file leaves out on, so write it"
    ));
}

/// Firefly's word for what is trained.
fn train_mode(draft: &mut Draft<'_>) {
    let Some(entry) = draft.find("train_mode") else {
        return;
    };
    match draft.text(entry).as_deref() {
        Some("full") => draft.say(entry, ADAPTER, "none"),
        Some(mode @ ("lora" | "qlora")) => {
            draft.say(entry, ADAPTER, "lora");
            draft.default(RANK, "64");
            if mode == "qlora" {
                draft.say(entry, QUANTIZATION, "4bit");
            }
        }
        _ => draft.harmless(),
    }
}

pub(super) fn shards(draft: &mut Draft<'_>) -> Result<(), ConfigError> {
    // Without a value it only says that DeepSpeed runs; its file may have a flag of its own.
    let file = draft.find("deepspeed_config");
    if let Some(entry) = draft.find("deepspeed") {
        match (draft.scalar(entry), file) {
            (Scalar::Bool(true), None) => {
                let why = "it names no file: the script makes the configuration of DeepSpeed by \
                     itself, and its precision, stage and optimizer are not known here";
                return Err(draft.refuse(entry, why));
            }
            (Scalar::Bool(_), _) => draft.harmless(),
            _ => draft.link(entry),
        }
    }
    if let Some(entry) = file {
        draft.link(entry);
    }
    if let Some(entry) = draft.find("fsdp") {
        match draft.is_on("fsdp") {
            true => divided_by_fsdp(draft, entry)?,
            false => draft.harmless(),
        }
    }
    if let Some(entry) = draft.find("fsdp.activation_checkpointing") {
        match draft.is_on("fsdp.activation_checkpointing") && !draft.says(CHECKPOINTING) {
            true => draft.say(entry, CHECKPOINTING, "full"),
            false => draft.harmless(),
        }
    }
    launched(draft);
    Ok(())
}

/// The words that FSDP is switched on with: `full_shard auto_wrap offload`, or a list of them.
pub(super) fn divided_by_fsdp(draft: &mut Draft<'_>, entry: usize) -> Result<(), ConfigError> {
    let items = draft.items(entry);
    let says = |known: &str| {
        items
            .iter()
            .flat_map(|item| item.split_whitespace())
            .any(|word| word == known)
    };
    if says("offload") {
        return Err(draft.refuse(entry, PARAMETERS_ON_HOST));
    }
    let part = match (says("shard_grad_op"), says("no_shard")) {
        (true, _) => "zero2",
        (_, true) => "ddp",
        _ => "fsdp",
    };
    draft.say(entry, SHARDING, part);
    Ok(())
}

/// The GPUs that a launcher is given; without a word more, each holds everything. torchrun's are
/// those of each machine.
fn launched(draft: &mut Draft<'_>) {
    let mut nodes = 1;
    if let Some(entry) = draft.find("nnodes") {
        match draft.number("nnodes") {
            Some(1) => draft.harmless(),
            Some(number) => {
                nodes = number;
                draft.say(entry, NODES, &number.to_string());
            }
            None => draft.not_understood(entry),
        }
    }
    let linked = ["deepspeed", "deepspeed_config"];
    let alone = linked.iter().all(|name| draft.find(name).is_none()) && !draft.says(SHARDING);
    for name in ["nproc_per_node", "num_processes", "num_gpus"] {
        let Some(entry) = draft.find(name) else {
            continue;
        };
        let machines = match name {
            "nproc_per_node" => nodes,
            _ => 1,
        };
        match draft.number(name).map(|here| here.saturating_mul(machines)) {
            Some(1) => draft.harmless(),
            Some(ranks) => {
                draft.say(entry, RANKS, &ranks.to_string());
                if alone {
                    draft.say(entry, SHARDING, "ddp");
                }
            }
            None => draft.not_understood(entry),
        }
    }
}

/// The type that the model is loaded in, and the autocast that runs over it.
fn precision(draft: &mut Draft<'_>) {
    for name in ["torch_dtype", "dtype"] {
        if let Some(entry) = draft
            .find(name)
            .filter(|entry| draft.text(*entry).is_none())
        {
            draft.not_understood(entry);
        }
    }
    let loaded = draft
        .find("torch_dtype")
        .or_else(|| draft.find("dtype"))
        .and_then(|entry| Some((entry, draft.text(entry)?)));
    let weights = loaded.as_ref().and_then(|(_, text)| half(text));
    let mixed = draft
        .find("mixed_precision")
        .and_then(|entry| Some((entry, draft.text(entry)?)));
    let autocast = ["bf16", "fp16"]
        .into_iter()
        .find(|name| draft.is_on(name))
        .and_then(|name| Some((draft.find(name)?, name)))
        .or_else(|| mixed.and_then(|(entry, text)| Some((entry, half(&text)?))));
    let said = match (&loaded, weights, autocast) {
        (_, Some("bf16"), Some((entry, "bf16"))) => Some((entry, "bf16_amp")),
        (_, Some("fp16"), Some((entry, "fp16"))) => Some((entry, "fp16_amp")),
        (Some((entry, _)), Some(weights), None) => Some((*entry, weights)),
        (_, _, Some((entry, "bf16"))) => Some((entry, "amp_bf16")),
        (_, _, Some((entry, _))) => Some((entry, "amp_fp16")),
        (Some((entry, text)), None, None) if text.contains("32") => Some((*entry, "fp32")),
        _ => None,
    };
    if let Some((entry, word)) = said {
        draft.say(entry, TORCH_PRECISION, word);
    }
    if draft.says(MODEL) && said.is_none() {
        draft.default(TORCH_PRECISION, "fp32");
    }
    let says_weights = loaded.is_some_and(|(_, text)| text != "auto");
    if draft.says(MODEL) && !says_weights {
        draft.assume(match said {
            Some(_) => "the weights are loaded in fp32, as from_pretrained did before transformers 5; newer ones load them as they are saved: say --torch-precision bf16_amp",
            None => "weights and computation are in fp32: say --torch-precision",
        });
    }
}

fn half(text: &str) -> Option<&'static str> {
    match text.trim_start_matches("torch.") {
        "bf16" | "bfloat16" => Some("bf16"),
        "fp16" | "float16" | "half" => Some("fp16"),
        _ => None,
    }
}
