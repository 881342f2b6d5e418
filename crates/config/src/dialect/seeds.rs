//! The config files of the projects that cinch was made for: the sparse-attention model's YAML and
//! the text embedder's `conf/` with a file for each stage of its curriculum.

use super::draft::Draft;
use super::lightning::{PRECISION_WORDS, strategy};
use super::{
    ACCUMULATION, BATCH, BETA1, BETA2, CHECKPOINTING, CLIP, DECAY, Dialect, EPOCHS, EPSILON,
    EVALUATION, HELD_OUT, Keys, LOGGING, MODEL, OTHER_OPTIMIZER, Program, RANKS, RATE, Rule,
    SAVING, SCHEDULE, SCHEDULE_WORDS, SEED, SEQUENCE, STEPS, TORCH_PRECISION, WARMUP, WholeBatch,
    combined, harmless, refused, refused_unless, same, switch, words,
};
use crate::curriculum::Stage;
use crate::error::ConfigError;
use crate::settings::nearby;

pub(super) static SPARSE_ATTENTION: Dialect = Dialect {
    name: "gated sparse attention",
    program: Program::PyTorch,
    recognise: recognise_sparse_attention,
    rules: &[SPARSE_RULES, SPARSE_RULES_INSIDE_MODEL],
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
    arithmetic: Some(data_and_batch),
};

/// By its own section, at the top or, as the project's files have it, inside of `model`.
fn recognise_sparse_attention(keys: &Keys<'_>) -> Option<Vec<String>> {
    let mut sections = ["gsa", "model.gsa"].into_iter();
    let found = sections.find(|section| keys.has_section(section))?;
    Some(vec![found.to_owned()])
}

const SPARSE_RULES_INSIDE_MODEL: &[Rule] = &[
    same("model.gsa.d_indexer", "model.d_indexer"),
    same("model.gsa.n_indexer_heads", "model.n_indexer_heads"),
    same("model.gsa.k_max", "model.k_max"),
    same("model.gsa.k_base", "model.k_base"),
    same("model.gsa.k_min", "model.k_min"),
    refused("model.gsa.use_flash", OWN_KERNEL),
    same("model.gsa.use_value_gate", "model.use_value_gate"),
    same("model.gsa.use_output_gate", "model.use_output_gate"),
    same("model.gsa.use_adaptive_k", "model.use_adaptive_k"),
    same("model.gsa.train_indexer", "model.train_indexer"),
    harmless("model.gsa.*"),
];

const OWN_KERNEL: &str = "a kernel of one's own is not computed";

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
    same("gsa.k_base", "model.k_base"),
    same("gsa.k_min", "model.k_min"),
    refused("gsa.use_flash", OWN_KERNEL),
    same("gsa.use_value_gate", "model.use_value_gate"),
    same("gsa.use_output_gate", "model.use_output_gate"),
    same("gsa.use_adaptive_k", "model.use_adaptive_k"),
    same("gsa.train_indexer", "model.train_indexer"),
    harmless("gsa.*"),
    harmless("model.max_position_embeddings"),
    harmless("model.max_seq_len"),
    harmless("model.max_pos"),
    harmless("model.name"),
    harmless("model.rope_theta"),
    harmless("model.rms_norm_eps"),
    harmless("model.norm_eps"),
    harmless("model.initializer_range"),
    same("training.micro_batch_size", BATCH),
    same("training.gradient_accumulation_steps", ACCUMULATION),
    combined("training.global_batch_size"),
    same("training.max_seq_len", SEQUENCE),
    refused_unless("training.optimizer", &["adamw"], OTHER_OPTIMIZER),
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
    same(
        "training.indexer_warmup_steps",
        "model.indexer_warmup_steps",
    ),
    same(
        "training.indexer_lr_multiplier",
        "model.indexer_lr_multiplier",
    ),
    same("logging.log_interval", LOGGING),
    same("logging.eval_interval", EVALUATION),
    same("logging.save_interval", SAVING),
    combined("data.data_dir"),
    combined("data.local_dataset_path"),
    combined("data.tokenizer"),
    harmless("data.*"),
    harmless("logging.*"),
];

/// Positions that the program makes, by its files' names for them.
const POSITIONS: [&str; 3] = [
    "model.max_position_embeddings",
    "model.max_seq_len",
    "model.max_pos",
];

/// What is read, how long it may be, and `global_batch_size = micro_batch_size × gradient_accumulation_steps × GPUs`.
fn data_and_batch(draft: &mut Draft<'_>) -> Result<(), ConfigError> {
    // Prepared tokens before the text that they were made from.
    let mut source = None;
    for key in ["data.data_dir", "data.local_dataset_path"] {
        if let Some(entry) = draft.find(key) {
            match source {
                None if draft.text(entry).is_some() => source = Some(entry),
                _ => draft.harmless(),
            }
        }
    }
    if let Some(entry) = source {
        let path = draft.text(entry).unwrap_or_default();
        draft.say(entry, "data.source", &path);
    }
    if let Some(entry) = draft.find("data.tokenizer") {
        match draft.text(entry) {
            Some(name) => draft.say(entry, "data.tokenizer", &name),
            None => draft.harmless(),
        }
    }
    let positions = POSITIONS
        .iter()
        .find_map(|key| Some((key, draft.number(key)?)));
    let length = draft.find("training.max_seq_len");
    if let (Some((key, positions)), Some(entry)) = (positions, length)
        && draft
            .number("training.max_seq_len")
            .is_some_and(|length| length > positions)
    {
        let why = format!("the model has {positions} positions ({key})");
        let way_out = format!("lower it to {positions}, or raise {key}");
        return Err(draft.contradiction(entry, &why, &way_out));
    }
    let Some(entry) = draft.find("training.global_batch_size") else {
        return Ok(());
    };
    let micro = draft.number("training.micro_batch_size");
    let accumulation = draft.number("training.gradient_accumulation_steps");
    let whole = draft.number("training.global_batch_size");
    let whole = whole.filter(|&whole| whole > 0);
    let (Some(whole), Some(micro)) = (whole, micro) else {
        let accepted = match whole {
            None => "an integer, 1 or more",
            Some(_) => "a training.micro_batch_size beside it",
        };
        draft.mistaken(entry, None, accepted.to_owned());
        return Ok(());
    };
    let step = micro.saturating_mul(accumulation.unwrap_or(1));
    if step == 0 || whole % step != 0 {
        let accumulation = accumulation.unwrap_or(1);
        let [why, way_out] = not_a_product(whole, micro, accumulation);
        return Err(draft.contradiction(entry, &why, &way_out));
    }
    match (accumulation, whole / step) {
        (Some(_), 1) => draft.harmless(),
        (Some(_), ranks) => draft.say(entry, RANKS, &ranks.to_string()),
        (None, steps) => draft.say(entry, ACCUMULATION, &steps.to_string()),
    }
    Ok(())
}

/// Why a global batch is not met; and what meets it on as many GPUs: the accumulation of this
/// micro batch or, where none does, the micro batches around it.
fn not_a_product(whole: u64, micro: u64, accumulation: u64) -> [String; 2] {
    let why =
        format!("it is not micro batch {micro} × accumulation {accumulation} × a number of GPUs");
    let step = micro.saturating_mul(accumulation);
    if step == 0 {
        let way_out = "state sizes of 1 or more, or leave global_batch_size out";
        return [why, way_out.to_owned()];
    }
    // The number of GPUs that was meant: the one that comes closest.
    let far = |ranks: &u64| step.saturating_mul(*ranks).abs_diff(whole);
    let most = (whole / step).saturating_add(1).min(whole);
    let counts = (1..=most).filter(|ranks| whole.is_multiple_of(*ranks));
    let ranks = counts.min_by_key(far).unwrap_or(1);
    let each = whole / ranks;
    let micros = if each.is_multiple_of(micro) {
        vec![micro]
    } else {
        let divides = |micro: &u64| each.is_multiple_of(*micro);
        let below = (1..micro).rev().find(divides);
        let above = (micro.saturating_add(1)..=each).find(divides);
        below.into_iter().chain(above).collect()
    };
    [
        why,
        format!("on {ranks} GPUs it is {}", nearby(micros, each)),
    ]
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
        (SCHEDULE, "cosine"),
        ("training.eval_epochs", "1"),
        ("training.patience", "5"),
        ("training.save_top", "3"),
    ],
    adds_keys: true,
    whole_batch: None,
    arithmetic: Some(embedder),
};

/// Ranks, how rows are filled up, and what a stage is limited to.
fn embedder(draft: &mut Draft<'_>) -> Result<(), ConfigError> {
    strategy(draft)?;
    for limit in Stage::LIMITS {
        for entry in draft.beginning(&format!("{limit}.")) {
            draft.mistaken(
                entry,
                None,
                "a number, a name, or a list of them".to_owned(),
            );
        }
        draft.slip_of(limit);
    }
    if let Some(entry) = draft.find("data_loader.tokenization.padding") {
        if draft.items(entry) != ["max_length"] {
            draft.assume(
                "data_loader.tokenization.padding fills rows up to the longest of a batch at most: they are computed as long as max_length, so that the figure is an upper bound",
            );
        }
        draft.harmless();
    }
    Ok(())
}

fn recognise_embedder(keys: &Keys<'_>) -> Option<Vec<String>> {
    if keys.has_section("data_loader") {
        return Some(vec!["data_loader".to_owned()]);
    }
    let stage = keys.of_these(&["n_negatives", "n_positives"]);
    (!stage.is_empty()).then_some(stage)
}

/// The encoder that the embedder has, by its names.
const ENCODERS: &[&str] = &["sentence-transformers/all-MiniLM-L6-v2", "all-MiniLM-L6-v2"];
const OTHER_ENCODER: &str = "the embedder is computed with encoders of all-MiniLM-L6-v2's sizes; \
    for another one take this key out and give model.d_model, n_layers, n_heads and d_ffn by --set";

const OTHER_TERM: &str =
    "of the loss, the contrastive term and the balance of experts are computed";

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
    combined("data_loader.tokenization.padding"),
    same("n_negatives", "model.negatives"),
    same("n_positives", "data.positives"),
    combined("training.trainer.devices"),
    combined("training.trainer.strategy"),
    combined("training.trainer.num_nodes"),
    harmless("training.trainer.*"),
    same("training.learning_rate", RATE),
    same("training.weight_decay", DECAY),
    same("training.warmup_steps", WARMUP),
    same("training.trainer.max_steps", STEPS),
    same("training.trainer.max_epochs", EPOCHS),
    same("data_loader.val_split", HELD_OUT),
    same("model.lora.r", "model.adapter_rank"),
    same("model.lora.alpha", "model.adapter_alpha"),
    same("model.lora.dropout", "model.adapter_dropout"),
    same("model.moe.num_experts", "model.n_experts"),
    same("model.moe.top_k", "model.top_k"),
    same("model.moe.hidden_dim", "model.d_expert"),
    same("model.moe.load_balancing_coef", "model.balance_weight"),
    same("loss.temperature", "model.temperature"),
    same("loss.curvature", "model.curvature"),
    refused("loss.hierarchy_weight", OTHER_TERM),
    refused("loss.rank_order_weight", OTHER_TERM),
    refused("loss.radius_reg_weight", OTHER_TERM),
    same("training.trainer.log_every_n_steps", LOGGING),
    same("seed", SEED),
    harmless("data_loader.*"),
    refused_unless("model.base", ENCODERS, OTHER_ENCODER),
    refused_unless("model.base_model", ENCODERS, OTHER_ENCODER),
    refused_unless("model.base_model_name", ENCODERS, OTHER_ENCODER),
    refused_unless("model.encoder", ENCODERS, OTHER_ENCODER),
    harmless("model.name"),
    harmless("model.lora.*"),
    harmless("model.moe.*"),
    harmless("loss.*"),
    harmless("curriculum*"),
    harmless("anchor_level"),
    harmless("positive_*"),
    harmless("negative_*"),
    harmless("relation_margin"),
    harmless("distance_margin"),
];
