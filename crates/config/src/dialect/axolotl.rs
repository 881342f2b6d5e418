//! axolotl: one YAML file a run, everything at its top.

use super::draft::Draft;
use super::liger;
use super::optimizer;
use super::training_arguments::divided_by_fsdp;
use super::{
    ACCUMULATION, ADAPTER, ADAPTER_DROPOUT, ADAPTER_TYPE, ALPHA, ATTENTION, ATTENTION_WORDS,
    BARE_PARAMETERS, BATCH, BETA1, BETA2, CHECKPOINTING, CLIP, DECAY, DOUBLE_QUANTIZATION, Dialect,
    EPOCHS, EPSILON, EVALUATION, HELD_OUT, Keys, LOGGING, LOOP, MODEL, MODULES_TO_SAVE, ON_INPUTS,
    OPTIMIZER, OTHER_OPTIMIZER, OUTPUT, PREPARED, Program, QUANTIZATION, RANK, RANKS, RATE,
    REENTRANT, REPLICATED, ROOT_OF_RANK, Rule, SAVED, SAVING, SCHEDULE, SCHEDULE_WORDS, SEED,
    SEQUENCE, SHARDING, SMOOTHING, SOME_LAYERS, SOME_TOKENS, STEPS, TARGETS, TIED_COPIES, TOO_LONG,
    TORCH_PRECISION, WARMUP_RATIO, WholeBatch, combined, compiles, harmless, list, not_followed,
    refused, refused_unless, same, saves, saves_there, switch, switch_or, words,
};
use crate::error::ConfigError;
use crate::unfollowed::Instead;

pub(super) static AXOLOTL: Dialect = Dialect {
    name: "axolotl",
    program: Program::PyTorch,
    recognise,
    rules: &[RULES],
    defaults: &[
        (BATCH, "1"),
        (ACCUMULATION, "1"),
        (SEQUENCE, "512"),
        // Without one it trains the weights, whatever a file has left of lora_r.
        (ADAPTER, "none"),
        (CHECKPOINTING, "none"),
        (TORCH_PRECISION, "fp32"),
        (OPTIMIZER, "adamw_fused"),
        (LOOP, "trainer"),
        (DOUBLE_QUANTIZATION, "true"),
        // It converts norms and embeddings back once adapters are on.
        (PREPARED, "false"),
        (CLIP, "1.0"),
        // Of long runs it takes a hundred steps.
        (WARMUP_RATIO, "0.03"),
        (EPOCHS, "1"),
        (SCHEDULE, "cosine"),
        (DECAY, "0"),
        (BETA2, "0.999"),
        (HELD_OUT, "0"),
        (TOO_LONG, "drop"),
    ],
    adds_keys: true,
    // A file that states it leaves the accumulation out.
    whole_batch: Some(WholeBatch {
        whole: "batch_size",
        has_accumulation: false,
    }),
    arithmetic: Some(arithmetic),
};

fn recognise(keys: &Keys<'_>) -> Option<Vec<String>> {
    let own = [
        "base_model",
        "micro_batch_size",
        "sequence_len",
        "adapter",
        "sample_packing",
        "lora_target_linear",
        "dataset_prepared_path",
    ];
    let found = keys.of_these(&own);
    (keys.has("base_model") && found.len() >= 2).then_some(found)
}

const PARALLEL: &str = "one model divided over several GPUs is not computed";
const PREFERENCES: &str =
    "only supervised training is computed, not training on preferences or rewards";
const IMAGES: &str = "only text is computed, not images, video or audio";
const EXPERTS: &str = "mixtures of experts are not computed";
const PARTLY: &str = "training a part of the weights is not computed";

const RULES: &[Rule] = &[
    same("base_model", MODEL),
    same("micro_batch_size", BATCH),
    same("gradient_accumulation_steps", ACCUMULATION),
    combined("batch_size"),
    same("sequence_len", SEQUENCE),
    switch_or(
        "gradient_checkpointing",
        CHECKPOINTING,
        ["full", "none"],
        &[("unsloth", "full")],
    )
    .otherwise("keeping checkpoints elsewhere is not computed"),
    switch(
        "gradient_checkpointing_kwargs.use_reentrant",
        REENTRANT,
        "true",
        "false",
    ),
    switch_or(
        "bf16",
        TORCH_PRECISION,
        ["bf16_amp", "fp32"],
        &[("auto", "bf16_amp"), ("full", "bf16")],
    ),
    switch("fp16", TORCH_PRECISION, "fp16_amp", "fp32"),
    switch("bfloat16", TORCH_PRECISION, "bf16", "fp32"),
    switch("float16", TORCH_PRECISION, "fp16", "fp32"),
    words(
        "adapter",
        ADAPTER,
        &[("lora", "lora"), ("qlora", "lora"), ("none", "none")],
    )
    .otherwise("only LoRA adapters are known here"),
    same("lora_r", RANK),
    same("lora_alpha", ALPHA),
    same("lora_dropout", ADAPTER_DROPOUT),
    list("lora_target_modules", TARGETS),
    list("lora_modules_to_save", MODULES_TO_SAVE),
    combined("lora_target_linear"),
    switch("load_in_4bit", QUANTIZATION, "4bit", "none"),
    switch("load_in_8bit", QUANTIZATION, "8bit", "none"),
    switch(
        "bnb_kwargs.bnb_4bit_use_double_quant",
        DOUBLE_QUANTIZATION,
        "true",
        "false",
    ),
    words("optimizer", OPTIMIZER, optimizer::WORDS).otherwise(OTHER_OPTIMIZER),
    combined("attn_implementation"),
    combined("flash_attention"),
    combined("sdp_attention"),
    combined("xformers_attention"),
    combined("flex_attention"),
    combined("eager_attention"),
    combined("sample_packing"),
    combined("deepspeed"),
    combined("fsdp"),
    same("dp_shard_size", RANKS),
    refused(
        "fsdp.offload_params",
        "parameters in host memory are not computed",
    ),
    refused(
        "fsdp.fsdp_offload_params",
        "parameters in host memory are not computed",
    ),
    refused(
        "fsdp.cpu_offload_pin_memory",
        "parameters in host memory are not computed",
    ),
    combined("fsdp.activation_checkpointing"),
    harmless("fsdp_config*"),
    harmless("fsdp.*"),
    harmless("fsdp_version"),
    harmless("fsdp_final_state_dict_type"),
    refused_unless("tensor_parallel_size", &["1"], PARALLEL),
    refused_unless("context_parallel_size", &["1"], PARALLEL),
    refused_unless("sequence_parallel_degree", &["1"], PARALLEL),
    refused_unless("expert_parallel_size", &["1"], PARALLEL),
    refused_unless("dp_replicate_size", &["1"], PARALLEL),
    refused("rl", PREFERENCES),
    refused("reward_model", PREFERENCES),
    refused("process_reward_model", PREFERENCES),
    refused("trl*", PREFERENCES),
    refused("ebft*", PREFERENCES),
    refused(
        "num_labels",
        "another head than that of the language model is not computed",
    ),
    refused("processor_type", IMAGES),
    refused("image_size", IMAGES),
    refused("is_multimodal", IMAGES),
    refused("freeze_mm_modules", IMAGES),
    refused(
        "is_mistral_derived_model*",
        "nothing is computed from this key; leave it out",
    ),
    refused("unfrozen_parameters", PARTLY),
    refused("lora_target_parameters", BARE_PARAMETERS),
    refused("lora_layers_to_transform", SOME_LAYERS),
    refused("peft_layers_to_transform", SOME_LAYERS),
    refused("peft_use_dora", "DoRA is not computed"),
    refused("peft_trainable_token_indices", SOME_TOKENS),
    refused("peft_ensure_weight_tying", TIED_COPIES),
    refused("peft_layer_replication", REPLICATED),
    switch(
        "peft_autocast_adapter_dtype",
        ADAPTER_TYPE,
        "fp32",
        "weights",
    ),
    not_followed("peft_init_lora_weights"),
    refused("peft.loftq*", "LoftQ is not computed"),
    refused("lisa_*", PARTLY),
    refused_unless("device", &["cuda", "gpu"], "only NVIDIA GPUs are computed"),
    refused("relora*", "ReLoRA is not computed"),
    refused("qat*", "quantisation-aware training is not computed"),
    refused("gptq", "weights quantised by GPTQ are not computed"),
    harmless("gptq_*"),
    refused(
        "model_quantization*",
        "quantised weights of this kind are not computed",
    ),
    refused("quantize_moe_experts", EXPERTS),
    refused("llama4_linearized_experts", EXPERTS),
    refused("experts_implementation", EXPERTS),
    refused("use_scattermoe", EXPERTS),
    refused("use_sonicmoe", EXPERTS),
    refused(
        "model.*",
        "another configuration of the model than its own is not read",
    ),
    refused(
        "model_config*",
        "another configuration of the model than its own is not read",
    ),
    refused(
        "overrides_of_model*",
        "another configuration of the model than its own is not read",
    ),
    compiles("torch_compile"),
    refused("fp8", "fp8 is not computed"),
    refused("diffusion*", "only next-token training is computed"),
    refused(
        "llmcompressor*",
        "sparse or quantised training by llm-compressor is not computed",
    ),
    refused("kd_*", "distillation is not computed"),
    refused("neat_packing", "this packing is not computed"),
    combined("plugins"),
    combined("model_type"),
    combined("liger_fused_linear_cross_entropy"),
    combined("liger_cross_entropy"),
    combined("liger_rms_norm"),
    combined("liger_glu_activation"),
    combined("liger_swiglu"),
    combined("liger_rope"),
    refused(
        "liger_use_token_scaling",
        "a loss that Liger scales by token is not computed",
    ),
    // Of models that are not computed here.
    harmless("liger_rms_norm_gated"),
    harmless("liger_layer_norm"),
    saves("cut_cross_entropy", "the logits never exist whole"),
    saves("chunked_cross_entropy", "the logits never exist whole"),
    saves(
        "flash_attn_cross_entropy",
        "the gradient of the logits takes their place",
    ),
    saves(
        "unsloth_cross_entropy_loss",
        "the gradient of the logits takes their place",
    ),
    saves("flash_attn_rms_norm", "fused norms keep less"),
    saves("unsloth_rms_norm", "fused norms keep less"),
    saves(
        "flash_attn_fuse_mlp",
        "a fused feed-forward part keeps less",
    ),
    saves("flash_attn_fuse_qkv", "fused projections keep less"),
    saves("unsloth_rope", "fused rotary positions keep less"),
    saves("lora_mlp_kernel", "fused adapters keep less"),
    saves("lora_qkv_kernel", "fused adapters keep less"),
    saves("lora_o_kernel", "fused adapters keep less"),
    saves("lora_embedding_kernel", "fused adapters keep less"),
    saves("unsloth_lora_*", "fused adapters keep less"),
    saves("fused_attn_kernel", "fused attention keeps less"),
    saves("use_kernels", "kernels from the hub keep less"),
    saves_there(
        "activation_offloading",
        "checkpoints are kept in host memory",
        Instead::ActivationsOnDevice,
    ),
    harmless("flex_attn_compile_kwargs*"),
    harmless("lora_fan_in_fan_out"),
    not_followed("lora_model_dir"),
    harmless("lora_on_cpu"),
    not_followed("loraplus_lr_ratio"),
    switch("peft_use_rslora", ROOT_OF_RANK, "true", "false"),
    harmless("peft*"),
    harmless("pad_to_sequence_len"),
    harmless("eval_*"),
    harmless("max_packed_sequence_len"),
    harmless("group_by_length"),
    harmless("dataset_*"),
    harmless("datasets*"),
    harmless("special_tokens.pad_token"),
    not_followed("special_tokens*"),
    not_followed("tokens*"),
    not_followed("added_tokens_overrides*"),
    harmless("tokenizer_*"),
    harmless("wandb_*"),
    harmless("experimental_skip_move_to_device"),
    harmless("low_cpu_mem_usage"),
    harmless("flash_optimum"),
    harmless("batch_flattening"),
    harmless("sample_packing_*"),
    harmless("streaming_multipack_*"),
    harmless("pretrain_multipack_*"),
    words(
        "excess_length_strategy",
        TOO_LONG,
        &[
            ("drop", "drop"),
            ("truncate", "truncate"),
            ("raise", "error"),
        ],
    ),
    harmless("min_sample_len"),
    harmless("torchdistx_path"),
    harmless("bnb_kwargs*"),
    same("max_grad_norm", CLIP),
    same("learning_rate", RATE),
    words("lr_scheduler", SCHEDULE, SCHEDULE_WORDS),
    same("max_steps", STEPS),
    same("num_epochs", EPOCHS),
    same("val_set_size", HELD_OUT),
    switch("train_on_inputs", ON_INPUTS, "true", "false"),
    combined("chat_template"),
    not_followed("chat_template_jinja"),
    not_followed("neftune_noise_alpha"),
    not_followed("noisy_embedding_alpha"),
    not_followed("cosine_min_lr_ratio"),
    not_followed("cosine_constant_lr_ratio"),
    not_followed("lr_scheduler_kwargs*"),
    not_followed("embedding_lr*"),
    same("label_smoothing_factor", SMOOTHING),
    same("save_total_limit", SAVED),
    combined("warmup_steps"),
    combined("warmup_ratio"),
    same("weight_decay", DECAY),
    same("adam_beta1", BETA1),
    same("adam_beta2", BETA2),
    same("adam_epsilon", EPSILON),
    same("logging_steps", LOGGING),
    same("eval_steps", EVALUATION),
    same("save_steps", SAVING),
    same("seed", SEED),
    same("output_dir", OUTPUT),
];

fn arithmetic(draft: &mut Draft<'_>) -> Result<(), ConfigError> {
    if let Some(entry) = draft.find("lora_target_linear") {
        match draft.is_on("lora_target_linear") {
            // Of both, every linear layer is the wider.
            true => {
                draft.unsay(TARGETS);
                draft.say(entry, TARGETS, "all-linear");
            }
            false => draft.harmless(),
        }
    }
    draft.packs(&["sample_packing"]);
    if let Some(entry) = draft.find("chat_template") {
        draft.harmless();
        if draft.text(entry).as_deref() != Some("tokenizer_default") {
            draft.not_followed(entry);
        }
    }
    draft.warm_up();
    whole_batch(draft);
    attention(draft)?;
    if liger::by_kernel(draft, LIGER_KEYS) {
        needs_plugin(draft);
    }
    precision(draft);
    shards(draft)?;
    if let Some(entry) = draft.find("model_type") {
        let class = draft.text(entry).unwrap_or_default();
        if class.contains("Classification") || class.contains("Reward") {
            return Err(draft.refuse(
                entry,
                "another head than that of the language model is not computed",
            ));
        }
        draft.harmless();
    }
    if let Some(entry) = draft.find("plugins") {
        plugins(draft, entry)?;
    }
    if let Some(entry) = draft.find("bf16")
        && draft.text(entry).as_deref() == Some("auto")
    {
        draft.assume("bf16: auto means bf16, as on every card from the A100 and RTX 30 on");
    }
    Ok(())
}

/// Keys that switch a kernel of Liger each.
const LIGER_KEYS: &[(&str, &str)] = &[
    ("liger_rope", "rope"),
    ("liger_rms_norm", "rms_norm"),
    ("liger_glu_activation", "swiglu"),
    ("liger_swiglu", "swiglu"),
    ("liger_cross_entropy", "cross_entropy"),
    (
        "liger_fused_linear_cross_entropy",
        "fused_linear_cross_entropy",
    ),
];

fn needs_plugin(draft: &mut Draft<'_>) {
    let plugins = draft.find("plugins").map(|entry| draft.items(entry));
    let is_listed = plugins.is_some_and(|plugins| {
        let mut plugins = plugins.iter();
        plugins.any(|plugin| plugin.ends_with("LigerPlugin"))
    });
    if !is_listed {
        draft.assume(
            "axolotl.integrations.liger.LigerPlugin is among the plugins: liger_* does nothing without it",
        );
    }
}

/// `batch_size` is the micro batch times the accumulation, in its place.
fn whole_batch(draft: &mut Draft<'_>) {
    let Some(entry) = draft.find("batch_size") else {
        return;
    };
    let micro = draft.number("micro_batch_size").unwrap_or(1).max(1);
    match draft.number("batch_size") {
        Some(whole) if whole.is_multiple_of(micro) && !draft.says(ACCUMULATION) => {
            draft.say(entry, ACCUMULATION, &(whole / micro).to_string());
        }
        _ => draft.not_understood(entry),
    }
}

fn attention(draft: &mut Draft<'_>) -> Result<(), ConfigError> {
    if let Some(entry) = draft.find("attn_implementation") {
        let name = draft.text(entry).unwrap_or_default();
        let known = ATTENTION_WORDS.iter().find(|(word, _)| *word == name);
        match (known, name.as_str()) {
            (Some((_, kind)), _) => draft.say(entry, ATTENTION, kind),
            (None, "xformers" | "sage") => draft.say(entry, ATTENTION, "sdpa"),
            (None, name) if name.contains("flash-attn") => {
                draft.say(entry, ATTENTION, "flash_attention_2");
            }
            _ => return Err(draft.refuse(entry, "this attention is not known here")),
        }
    }
    for (name, kind) in [
        ("flash_attention", "flash_attention_2"),
        ("sdp_attention", "sdpa"),
        ("xformers_attention", "sdpa"),
        ("flex_attention", "flex_attention"),
        ("eager_attention", "eager"),
    ] {
        let Some(entry) = draft.find(name) else {
            continue;
        };
        if draft.is_on(name) && !draft.says(ATTENTION) {
            draft.say(entry, ATTENTION, kind);
        } else {
            draft.harmless();
        }
    }
    Ok(())
}

/// `bf16` outweighs `bfloat16`, which converts the weights alone.
fn precision(draft: &mut Draft<'_>) {
    for (stronger, weaker) in [("bf16", "bfloat16"), ("fp16", "float16")] {
        if let (Some(entry), true) = (draft.find(stronger), draft.is_on(stronger))
            && draft.is_on(weaker)
        {
            let word = match draft.text(entry).as_deref() {
                Some("full") => stronger.to_owned(),
                _ => format!("{stronger}_amp"),
            };
            draft.unsay(TORCH_PRECISION);
            draft.say(entry, TORCH_PRECISION, &word);
        }
    }
}

fn shards(draft: &mut Draft<'_>) -> Result<(), ConfigError> {
    if let Some(entry) = draft.find("deepspeed") {
        draft.link(entry);
    }
    if let Some(entry) = draft.find("fsdp") {
        divided_by_fsdp(draft, entry)?;
    } else if let Some(&entry) = draft.beginning("fsdp.").first() {
        draft.say(entry, SHARDING, "fsdp");
    }
    if let Some(entry) = draft.find("fsdp.activation_checkpointing") {
        match draft.is_on("fsdp.activation_checkpointing") && !draft.says(CHECKPOINTING) {
            true => draft.say(entry, CHECKPOINTING, "full"),
            false => draft.harmless(),
        }
    }
    Ok(())
}

fn plugins(draft: &mut Draft<'_>, entry: usize) -> Result<(), ConfigError> {
    for plugin in draft.items(entry) {
        let name = plugin.rsplit('.').next().unwrap_or(&plugin);
        match name {
            // Its switches are keys of their own.
            "LigerPlugin" | "SpectrumPlugin" | "GrokfastPlugin" | "SwanLabPlugin"
            | "DenseMixerPlugin" => {}
            "CutCrossEntropyPlugin" => {
                draft.saves(entry, "the logits never exist whole");
            }
            _ => {
                let why = format!("what {name} does to memory is not known here");
                return Err(draft.refuse(entry, &why));
            }
        }
    }
    draft.harmless();
    Ok(())
}
