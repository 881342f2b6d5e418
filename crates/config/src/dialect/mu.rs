//! The `config.py` of the block-attention model MU: constants, or attributes of a class whose name
//! begins with `MU`.

use super::constants::RULES as CONSTANTS;
use super::optimizer;
use super::{
    ACCUMULATION, Dialect, Keys, MODEL, PRECISION, Program, Rule, harmless, refused_unless, same,
    switch,
};
use crate::format::Format;

pub(super) static MU: Dialect = Dialect {
    name: "MU block attention",
    program: Program::PyTorch,
    recognise,
    rules: &[RULES, CONSTANTS],
    defaults: &[(MODEL, "mu"), (ACCUMULATION, "1")],
    adds_keys: false,
    whole_batch: None,
    arithmetic: Some(optimizer::by_constant),
};

/// What a file of a model that has no width of its own says all the same.
const SIZES: [&str; 4] = ["n_layers", "vocab_size", "max_seq_len", "batch_size"];
/// What the files of other models say beside it.
const OTHERS: [&str; 14] = [
    "model",
    "model_name",
    "model_name_or_path",
    "model_id",
    "model_type",
    "base_model",
    "d_model",
    "hidden_size",
    "hidden_dim",
    "embed_dim",
    "embedding_dim",
    "n_embd",
    "dim",
    "d_state",
];

/// By the name of its class; or by sizes of a model without a width, which no other has.
fn recognise(keys: &Keys<'_>) -> Option<Vec<String>> {
    let document = keys.document;
    if !matches!(document.format, Format::Python) {
        return None;
    }
    let is_class = |name: &&String| {
        let name = name.to_lowercase();
        name == "mu" || name.starts_with("mu_") || name.starts_with("musota") || name == "muconfig"
    };
    let sections = document.entries.iter().filter_map(|entry| {
        let (_, sections) = entry.path.split_last()?;
        sections.first()
    });
    if let Some(class) = sections.into_iter().find(is_class) {
        return Some(vec![class.clone()]);
    }
    let sizes = keys.of_these(&SIZES);
    let whole = sizes.len() == SIZES.len() && keys.of_these(&OTHERS).is_empty();
    whole.then_some(sizes)
}

const OTHER_MATRIX: &str =
    "the model is computed with a matrix of 8 × 8 for each token, in 16 blocks of 2 × 2";

const RULES: &[Rule] = &[
    same("n_layers", "model.n_layers"),
    same("num_layers", "model.n_layers"),
    same("n_heads", "model.n_heads"),
    same("num_heads", "model.n_heads"),
    same("vocab_size", "model.vocab_size"),
    same("dropout", "model.dropout"),
    switch("mixed_precision", PRECISION, "fp16", "fp32"),
    switch("use_mixed_precision", PRECISION, "fp16", "fp32"),
    refused_unless("d_model", &["64"], OTHER_MATRIX),
    refused_unless("matrix_size", &["8"], OTHER_MATRIX),
    // A side of a block, where other programs call the length so.
    refused_unless("block_size", &["2"], OTHER_MATRIX),
    refused_unless("n_blocks", &["16"], OTHER_MATRIX),
    refused_unless("num_blocks", &["16"], OTHER_MATRIX),
    refused_unless("num_semantic_blocks", &["16"], OTHER_MATRIX),
    harmless("max_gen_length"),
    harmless("max_new_tokens"),
    harmless("top_k"),
    harmless("top_p"),
];
