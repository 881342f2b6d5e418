//! Why a run ends early.

use std::path::PathBuf;

use cinch_data::DataError;
use cinch_engine::EngineError;
use cinch_ranks::{Loss, RanksError};
use cinch_step::StepError;
use thiserror::Error;

use cinch_weights::WeightError;

use crate::checkpoint::CheckpointError;
use crate::owner::Owner;
use crate::record::RecordError;
use crate::state::Difference;

#[derive(Debug, Error)]
pub enum TrainError {
    #[error(transparent)]
    Step(#[from] StepError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Ranks(#[from] RanksError),
    #[error(
        "{loss}: the run of {num_ranks} ranks ends, in step {step}\n\
         hint: {}",
        .last.as_ref().map_or_else(
            || "nothing was saved yet: start all ranks again".to_owned(),
            |path| format!(
                "the newest checkpoint is {0}; go on with `cinch launch --ranks {num_ranks} -- train \
                 --resume {0}`, or as the ranks were started before",
                cinch_files::shown(&path)
            )
        )
    )]
    RankLost {
        loss: Box<Loss>,
        num_ranks: usize,
        step: u64,
        last: Option<PathBuf>,
    },
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error(
        "the tokenizer `{tokenizer}` has {tokens} tokens, the model a vocabulary of {vocabulary}\n\
         hint: set model.vocab_size to {tokens}, or choose another data.tokenizer"
    )]
    Vocabulary {
        tokenizer: String,
        tokens: usize,
        vocabulary: usize,
    },
    #[error(
        "{} holds samples, and a tokenizer is trained on plain texts only\n\
         hint: name one that exists with --tokenizer: gpt2, bytes, or a tokenizer.json",
        cinch_files::shown(&path)
    )]
    TokenizerOfSamples { path: PathBuf },
    #[error("cannot keep the tokenizer in {}: {source}", cinch_files::shown(&path))]
    KeepTokenizer {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "the loss at step {step} is {loss}: training has diverged\n\
         hint: lower training.learning_rate, which was {learning_rate:e} at that step{}",
        .last.as_ref().map_or_else(String::new, |path| format!(
            ", and go on from the last checkpoint with --resume {}", cinch_files::shown(&path)
        ))
    )]
    Diverged {
        step: u64,
        loss: f64,
        learning_rate: f64,
        last: Option<PathBuf>,
    },
    #[error(
        "the GPU failed at step {step}: {problem}\n\
         hint: {}",
        .last.as_ref().map_or_else(
            || "nothing was saved yet: start again, with a shorter training.save_interval".to_owned(),
            |path| format!(
                "the last checkpoint is {0}; once the GPU answers again, go on with --resume {0}",
                cinch_files::shown(&path)
            )
        )
    )]
    DeviceFailed {
        step: u64,
        problem: Box<EngineError>,
        last: Option<PathBuf>,
    },
    #[error(
        "there are no gradients to look at: each is gone after its update\n\
         hint: leave out --update-in-backward (vram.update_in_backward)"
    )]
    NoGradients,
    #[error("the batch has {found} numbers for `{name}`, the step reads {needed}")]
    BatchTensor {
        name: String,
        needed: usize,
        found: usize,
    },
    #[error(transparent)]
    Weights(#[from] WeightError),
    #[error(
        "the weights of {model} are not here, and adapters are trained on weights that were trained\n\
         hint: give the folder with its config.json and .safetensors files as --model, or \
         --weights FOLDER; --weights initial trains adapters on random weights"
    )]
    NoWeights { model: String },
    #[error(
        "{}: config.json has `\"tie_word_embeddings\": true`, and `lm_head.weight` holds other numbers \
         than `model.embed_tokens.weight`\n\
         hint: `\"tie_word_embeddings\": false` in config.json takes both; without `lm_head.weight` \
         in the files the embeddings are the head",
        cinch_files::shown(path)
    )]
    OtherHead { path: PathBuf },
    #[error(
        "{path}: `{name}` is {found:?}, the model's is {expected:?}\n\
         hint: these are the weights of another model: name the folder of one with these sizes, or give \
         the model theirs, as --set model.d_model and the like"
    )]
    WeightShape {
        path: PathBuf,
        name: String,
        found: Vec<usize>,
        expected: Vec<usize>,
    },
    #[error(
        "{folder}: {problem}\n\
         hint: give the --lora-rank, --lora-alpha, --lora-targets and --lora-modules-to-save that these \
         adapters were made with (--set lora.rank_stabilised=true for rsLoRA), and their base as --model"
    )]
    OtherAdapter { folder: PathBuf, problem: String },
    #[error(
        "there is nothing to pack: the data is plain text, which is cut into full rows anyway\n\
         hint: leave out --packing, or give --data-dir a file of prompts and completions"
    )]
    NothingToPack,
    #[error(
        "the run holds out no pairs, so there are none to look for\n\
         hint: train with --val-split 0.1"
    )]
    NothingHeldOut,
    #[error(
        "the stage {stage} of the curriculum limits {key} to `{value}`, which is no {}\n\
         hint: levels are digits of codes, distances steps in the tree; relations are numbers or \
         names such as child, sibling and cousin; one margin alone may be 0.5, the least",
        match key.contains("relation") && !key.ends_with("_margin") {
            true => "relation",
            false => "whole number",
        }
    )]
    StageLimit {
        stage: String,
        key: String,
        value: String,
    },
    #[error(
        "{model} has no form that other programs load\n\
         hint: adapters are exported for peft, and models that were named by a folder with their \
         config.json for transformers"
    )]
    NothingToExport { model: String },
    #[error("no token of the batch at step {step} counts for the loss: the data is empty")]
    NoTargets { step: u64 },
    #[error(
        "{path} was trained on other data: its fingerprint is {saved}, that of {source_name} is {now}\n\
         hint: give the same --data-dir and --tokenizer, or start a new run in another --output-dir"
    )]
    OtherData {
        path: PathBuf,
        saved: String,
        now: String,
        source_name: String,
    },
    #[error(
        "{path} cannot go on with other settings\n{}\n\
         hint: leave them as they were, or start a new run in another --output-dir",
        .differences.iter().map(|one| format!("  {one}")).collect::<Vec<_>>().join("\n")
    )]
    OtherSettings {
        path: PathBuf,
        differences: Vec<Difference>,
    },
    #[error(
        "{base} holds other weights than those that were frozen when {path} was saved\n\
         hint: give the folder that has them with --weights, or start a new run in another \
         --output-dir"
    )]
    OtherBase { path: PathBuf, base: PathBuf },
    #[error(
        "{path}: {problem}\n\
         hint: the checkpoint is of another model; check --model, the sizes and --lora-targets"
    )]
    OtherModel { path: PathBuf, problem: String },
    #[error(
        "{}: {problem}\n\
         hint: cinch embeds with BERT encoders and the average of their tokens or the first one; \
         for others take sentence-transformers",
        cinch_files::shown(&path)
    )]
    SentenceModel { path: PathBuf, problem: String },
    #[error("{path}: state.json: {problem}")]
    State { path: PathBuf, problem: String },
    #[error(
        "{folder} already holds a run (step {step})\n\
         hint: go on with --resume {folder}, or choose another --output-dir"
    )]
    RunExists { folder: PathBuf, step: u64 },
    #[error(
        "{folder} is in use: {} trains there\n\
         hint: wait until it ends, stop it there with `kill {}`, which saves its last step, or \
         choose another --output-dir",
        .owner.as_ref().map_or_else(|| "another process".to_owned(), Owner::to_string),
        .owner.as_ref().map_or_else(|| "PID".to_owned(), |owner| owner.process.to_string())
    )]
    InUse {
        folder: PathBuf,
        /// None where it did not say.
        owner: Option<Owner>,
    },
    #[error("{path}: {problem}")]
    Output { path: PathBuf, problem: String },
    #[error(
        "the folder {} cannot be made: {source}\n\
         hint: --output-dir names another, below a folder that can be written",
        cinch_files::shown(.folder)
    )]
    Folder {
        folder: PathBuf,
        source: std::io::Error,
    },
}
