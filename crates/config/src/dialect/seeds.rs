//! The config files of the projects that cinch was made for: the sparse-attention model's YAML and
//! the text embedder's `conf/` with a file for each stage of its curriculum.

use super::draft::Draft;
use super::lightning::{PRECISION_WORDS, strategy};
use super::{
    ACCUMULATION, BATCH, BETA1, BETA2, CHECKPOINTING, CLIP, DECAY, Dialect, EPSILON, EVALUATION,
    Keys, LOGGING, MODEL, Program, RANKS, RATE, Rule, SAVING, SCHEDULE, SCHEDULE_WORDS, SEED,
    SEQUENCE, STEPS, TORCH_PRECISION, WARMUP, WholeBatch, combined, harmless, refused, same,
    switch, words,
};
use crate::error::ConfigError;

pub(super) static SPARSE_ATTENTION: Dialect = Dialect {
    name: "gated sparse attention",
    program: Program::PyTorch,
    recognise: |keys| keys.has_section("gsa").then(|| vec!["gsa".to_owned()]),
    rules: &[SPARSE_RULES],
    defaults: &[
        (MODEL, "gsa"),
        (ACCUMULATION, "1"),
        (CHECKPOINTING, "full"),
        (CLIP, "1.0"),
    ],
    adds_keys: true,
    whole_batch: Some(WholeBatch {
        whole: "training.global_batch_size",
        has_accumulation: true,
    }),
    arithmetic: Some(global_batch),
};

const SPARSE_RULES: &[Rule] = &[
    same("model.d_model", "model.d_model"),
    same("model.hidden_size", "model.d_model"),
    same("model.n_layers", "model.n_layers"),
    same("model.num_layers", "model.n_layers"),
    same("model.n_heads", "model.n_heads"),
    same("model.num_heads", "model.n_heads"),
    same("model.n_kv_heads", "model.n_kv_heads"),
    same("model.num_kv_heads", "model.n_kv_heads"),
    same("model.d_ffn", "model.d_ffn"),
    same("model.ffn_dim", "model.d_ffn"),
    same("model.intermediate_size", "model.d_ffn"),
    same("model.vocab_size", "model.vocab_size"),
    same("gsa.d_indexer", "model.d_indexer"),
    same("gsa.n_indexer_heads", "model.n_indexer_heads"),
    same("gsa.k_max", "model.k_max"),
    harmless("gsa.k_base"),
    harmless("gsa.k_min"),
    refused("gsa.use_flash", "a kernel of one's own is not computed"),
    combined("gsa.use_value_gate"),
    combined("gsa.use_output_gate"),
    combined("gsa.use_adaptive_k"),
    harmless("gsa.*"),
    harmless("model.max_position_embeddings"),
    harmless("model.max_seq_len"),
    harmless("model.max_pos"),
    harmless("model.*"),
    same("training.micro_batch_size", BATCH),
    same("training.gradient_accumulation_steps", ACCUMULATION),
    combined("training.global_batch_size"),
    same("training.max_seq_len", SEQUENCE),
    words(
        "training.precision",
        TORCH_PRECISION,
        &[
            ("bf16", "amp_bf16"),
            ("fp16", "amp_fp16"),
            ("fp32", "fp32"),
            ("bfloat16", "amp_bf16"),
            ("float16", "amp_fp16"),
        ],
    )
    .otherwise("this precision is not computed"),
    switch(
        "training.gradient_checkpointing",
        CHECKPOINTING,
        "full",
        "none",
    ),
    same("training.learning_rate", RATE),
    same("training.min_learning_rate", "training.min_learning_rate"),
    words("training.lr_scheduler", SCHEDULE, SCHEDULE_WORDS),
    same("training.max_steps", STEPS),
    same("training.warmup_steps", WARMUP),
    same("training.weight_decay", DECAY),
    same("training.beta1", BETA1),
    same("training.beta2", BETA2),
    same("training.eps", EPSILON),
    same("training.grad_clip", CLIP),
    harmless("training.indexer_*"),
    same("logging.log_interval", LOGGING),
    same("logging.eval_interval", EVALUATION),
    same("logging.save_interval", SAVING),
    harmless("data.*"),
    harmless("logging.*"),
];

/// `global_batch_size = micro_batch_size × gradient_accumulation_steps × GPUs`.
fn global_batch(draft: &mut Draft<'_>) -> Result<(), ConfigError> {
    for gate in [
        "gsa.use_value_gate",
        "gsa.use_output_gate",
        "gsa.use_adaptive_k",
    ] {
        if let Some(entry) = draft.find(gate) {
            if !draft.is_on(gate) {
                return Err(draft.refuse(entry, "the model without it is not computed"));
            }
            draft.harmless();
        }
    }
    let Some(entry) = draft.find("training.global_batch_size") else {
        return Ok(());
    };
    let micro = draft.number("training.micro_batch_size");
    let accumulation = draft.number("training.gradient_accumulation_steps");
    let whole = draft.number("training.global_batch_size");
    let (Some(whole), Some(micro)) = (whole, micro) else {
        draft.not_understood(entry);
        return Ok(());
    };
    let step = micro.saturating_mul(accumulation.unwrap_or(1));
    if step == 0 || whole % step != 0 {
        draft.assume(format!(
            "global_batch_size {whole} is not micro batch {micro} × accumulation {} × a number of GPUs: the two are taken as they are",
            accumulation.unwrap_or(1)
        ));
        draft.harmless();
        return Ok(());
    }
    match (accumulation, whole / step) {
        (Some(_), 1) => draft.harmless(),
        (Some(_), ranks) => draft.say(entry, RANKS, &ranks.to_string()),
        (None, steps) => draft.say(entry, ACCUMULATION, &steps.to_string()),
    }
    Ok(())
}

pub(super) static EMBEDDER: Dialect = Dialect {
    name: "text embedder (Lightning)",
    program: Program::PyTorch,
    recognise: recognise_embedder,
    rules: &[EMBEDDER_RULES],
    defaults: &[
        (MODEL, "naics"),
        (ACCUMULATION, "1"),
        (SEQUENCE, "512"),
        (CHECKPOINTING, "full"),
        (CLIP, "1.0"),
    ],
    adds_keys: true,
    whole_batch: None,
    arithmetic: Some(strategy),
};

fn recognise_embedder(keys: &Keys<'_>) -> Option<Vec<String>> {
    if keys.has_section("data_loader") {
        return Some(vec!["data_loader".to_owned()]);
    }
    let stage = keys.of_these(&["n_negatives", "n_positives"]);
    (!stage.is_empty()).then_some(stage)
}

const EMBEDDER_RULES: &[Rule] = &[
    same("data_loader.batch_size", BATCH),
    same("training.trainer.accumulate_grad_batches", ACCUMULATION),
    words(
        "training.trainer.precision",
        TORCH_PRECISION,
        PRECISION_WORDS,
    )
    .otherwise("this precision is not computed"),
    same("training.trainer.gradient_clip_val", CLIP),
    same("data_loader.tokenization.max_length", SEQUENCE),
    same("n_negatives", "model.negatives"),
    same("n_positives", "data.positives"),
    combined("training.trainer.devices"),
    combined("training.trainer.strategy"),
    harmless("training.trainer.*"),
    same("training.learning_rate", RATE),
    same("training.weight_decay", DECAY),
    same("training.warmup_steps", WARMUP),
    same("training.trainer.max_steps", STEPS),
    same("training.trainer.log_every_n_steps", LOGGING),
    same("seed", SEED),
    harmless("data_loader.*"),
    harmless("model.*"),
    harmless("loss.*"),
    harmless("curriculum*"),
];
