//! Constants and attributes as people name them in a config of their own: a `config.py`, or a flat
//! JSON or YAML file.

use super::optimizer;
use super::{
    ACCUMULATION, ADAPTER_DROPOUT, ALPHA, BATCH, BETA1, BETA2, CHECKPOINTING, CLIP, DECAY, Dialect,
    EPOCHS, EVALUATION, HELD_OUT, Keys, LOGGING, MODEL, MODULES_TO_SAVE, OFFLOAD, OUTPUT, PEFT,
    PRECISION, Program, QUANTIZATION, RANK, RATE, Rule, SAMPLES, SAVING, SCHEDULE, SCHEDULE_WORDS,
    SEED, SEQUENCE, STEPS, Says, TARGETS, WARMUP, combined, compiles, list, same, stands_for,
    switch, words,
};
use crate::format::Format;

pub(super) static CONSTANTS: Dialect = Dialect {
    name: "constants of a program",
    program: Program::PyTorch,
    recognise,
    rules: &[RULES, PEFT],
    defaults: &[(ACCUMULATION, "1")],
    adds_keys: false,
    whole_batch: None,
    arithmetic: Some(optimizer::by_constant),
};

/// A Python file, or a flat one, with a name that speaks of memory.
fn recognise(keys: &Keys<'_>) -> Option<Vec<String>> {
    let document = keys.document;
    let flat = document.entries.iter().all(|entry| entry.path.len() == 1);
    let code = matches!(document.format, Format::Python | Format::Shell);
    if !flat && !code {
        return None;
    }
    let about_memory = |name: &&String| {
        RULES.iter().any(|rule| {
            let memory = matches!(rule.says, Says::Setting { key, .. }
                if key.starts_with("vram.") || key == MODEL || key.starts_with("lora."));
            memory && stands_for(rule.name, name)
        })
    };
    let found: Vec<String> = keys.names.iter().filter(about_memory).cloned().collect();
    (!found.is_empty() || code).then_some(found)
}

const PRECISION_WORDS: &[(&str, &str)] = &[
    ("bf16", "bf16"),
    ("fp16", "fp16"),
    ("fp32", "fp32"),
    ("bfloat16", "bf16"),
    ("float16", "fp16"),
    ("float32", "fp32"),
    ("torch.bfloat16", "bf16"),
    ("torch.float16", "fp16"),
    ("torch.float32", "fp32"),
    ("no", "fp32"),
];

pub(super) const RULES: &[Rule] = &[
    same("model_name_or_path", MODEL),
    same("model_name", MODEL),
    same("model_id", MODEL),
    same("base_model", MODEL),
    same("base_model_name", MODEL),
    same("pretrained_model", MODEL),
    same("hf_model", MODEL),
    same("model", MODEL),
    same("batch_size", BATCH),
    same("train_batch_size", BATCH),
    same("micro_batch_size", BATCH),
    same("gradient_accumulation_steps", ACCUMULATION),
    same("grad_accumulation_steps", ACCUMULATION),
    same("gradient_accumulation", ACCUMULATION),
    same("accumulation_steps", ACCUMULATION),
    same("grad_accum", ACCUMULATION),
    same("grad_accum_steps", ACCUMULATION),
    same("max_seq_length", SEQUENCE),
    same("max_seq_len", SEQUENCE),
    same("max_length", SEQUENCE),
    same("max_len", SEQUENCE),
    same("sequence_length", SEQUENCE),
    same("seq_length", SEQUENCE),
    same("seq_len", SEQUENCE),
    same("block_size", SEQUENCE),
    same("context_length", SEQUENCE),
    words("precision", PRECISION, PRECISION_WORDS),
    words("dtype", PRECISION, PRECISION_WORDS),
    switch("use_fp16", PRECISION, "fp16", "fp32"),
    switch("use_bf16", PRECISION, "bf16", "fp32"),
    switch("fp16", PRECISION, "fp16", "fp32"),
    switch("bf16", PRECISION, "bf16", "fp32"),
    switch("use_amp", PRECISION, "fp16", "fp32"),
    switch("use_gradient_checkpointing", CHECKPOINTING, "full", "none"),
    switch("gradient_checkpointing", CHECKPOINTING, "full", "none"),
    same("use_cpu_offload", OFFLOAD),
    same("cpu_offload", OFFLOAD),
    same("lora_r", RANK),
    same("lora_rank", RANK),
    same("lora.r", RANK),
    same("lora.rank", RANK),
    same("lora_alpha", ALPHA),
    same("lora.lora_alpha", ALPHA),
    same("lora.alpha", ALPHA),
    same("lora_dropout", ADAPTER_DROPOUT),
    same("lora.lora_dropout", ADAPTER_DROPOUT),
    same("lora.dropout", ADAPTER_DROPOUT),
    list("lora_target_modules", TARGETS),
    list("target_modules", TARGETS),
    list("lora.target_modules", TARGETS),
    list("lora_modules_to_save", MODULES_TO_SAVE),
    list("modules_to_save", MODULES_TO_SAVE),
    list("lora.modules_to_save", MODULES_TO_SAVE),
    switch("load_in_4bit", QUANTIZATION, "4bit", "none"),
    switch("load_in_8bit", QUANTIZATION, "8bit", "none"),
    compiles("torch_compile"),
    combined("optimizer"),
    combined("optim"),
    combined("optimizer_name"),
    combined("optimizer_type"),
    same("learning_rate", RATE),
    same("lr", RATE),
    words("lr_scheduler", SCHEDULE, SCHEDULE_WORDS),
    same("max_steps", STEPS),
    same("max_iters", STEPS),
    same("num_epochs", EPOCHS),
    same("epochs", EPOCHS),
    same("val_split", HELD_OUT),
    same("validation_split", HELD_OUT),
    same("max_samples", SAMPLES),
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
];
