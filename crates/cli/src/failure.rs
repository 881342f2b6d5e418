//! From an error to a message and an exit code: 1 failed, 2 wrong usage or configuration, 3
//! does not fit, 4 a log in which memory ran out, 5 another rank ended, 130 interrupted.

use std::io::ErrorKind;
use std::process::ExitCode;

use cinch_config::ConfigError;
use cinch_data::DataError;
use cinch_device::DeviceError;
use cinch_fit::FitError;
use cinch_model::ModelError;
use cinch_ranks::RanksError;
use cinch_step::StepError;
use cinch_torch::TorchError;
use cinch_torch::allocator::ConfigError as AllocatorSettings;
use cinch_train::TrainError;
use cinch_train::checkpoint::CheckpointError;
use cinch_weights::WeightError;

use crate::voice::{self, tell};

/// Something the user typed that cannot be done.
#[derive(Debug)]
pub struct Usage(pub String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// The answer of `cinch check` when a run should not start.
#[derive(Debug)]
pub struct NoGo {
    pub problems: String,
    pub does_not_fit: bool,
}

impl std::fmt::Display for NoGo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "no go: {}", self.problems)
    }
}

impl std::error::Error for NoGo {}

/// The exit code of a program that was told to stop: 128 and the number of SIGINT, as shells
/// have it.
pub const INTERRUPTED: u8 = 130;

/// The answer of `cinch diagnose` where memory ran out. What there is to say of it has been said.
#[derive(Debug)]
pub struct RanOut;

impl std::fmt::Display for RanOut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("memory ran out")
    }
}

impl std::error::Error for RanOut {}

/// The exit code of a log in which memory ran out.
const RAN_OUT: u8 = 4;

/// A run that was stopped by Ctrl-C or SIGTERM. What there is to say of it has been said.
#[derive(Debug)]
pub struct Interrupted;

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// A rehearsed script that ended with this code. What there is to say of it has been said.
#[derive(Debug)]
pub struct ScriptEnded(pub u8);

impl std::fmt::Display for ScriptEnded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the script ended with {}", self.0)
    }
}

impl std::error::Error for ScriptEnded {}

/// Ranks of which the first that failed ended with this code. What there is to say of it has been
/// said.
#[derive(Debug)]
pub struct RanksEnded(pub u8);

impl std::fmt::Display for RanksEnded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a rank ended with {}", self.0)
    }
}

impl std::error::Error for RanksEnded {}

/// The exit code of a rank that ends because another did.
pub const ANOTHER_RANK: u8 = cinch_ranks::launch::FOLLOWED;

/// A run that the budget has no room for, with the way out.
#[derive(Debug)]
pub struct DoesNotFit(pub String);

impl std::fmt::Display for DoesNotFit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for DoesNotFit {}

pub fn usage(message: impl Into<String>) -> anyhow::Error {
    Usage(message.into()).into()
}

/// What is wrong with standard input that could not be read.
pub fn unread_input(error: std::io::Error) -> anyhow::Error {
    match error.kind() {
        ErrorKind::InvalidData => usage(
            "standard input is not UTF-8 text\n\
             hint: convert it (`iconv -f LATIN1 -t UTF-8`)",
        ),
        _ => anyhow::Error::new(error).context("cannot read standard input"),
    }
}

/// Prints the error and gives its exit code.
pub fn report(error: &anyhow::Error) -> ExitCode {
    if is_broken_pipe(error) {
        return ExitCode::SUCCESS;
    }
    if error.is::<RanOut>() {
        return ExitCode::from(RAN_OUT);
    }
    if error.is::<Interrupted>() {
        return ExitCode::from(INTERRUPTED);
    }
    if let Some(ScriptEnded(code)) = error.downcast_ref() {
        return ExitCode::from(*code);
    }
    if let Some(RanksEnded(code)) = error.downcast_ref() {
        return ExitCode::from(*code);
    }
    tell(&voice::message(&printable(&format!("error: {error}"))));
    // Libraries' messages hold their causes already; what the binary adds does not.
    let mut last = error.to_string();
    for cause in error.chain().skip(1) {
        let text = cause.to_string();
        if !last.contains(&text) {
            tell(&printable(&format!("caused by: {text}")));
        }
        last = text;
    }
    ExitCode::from(exit_code(error))
}

/// Without what a terminal would obey: a file's key or value can hold any character.
fn printable(text: &str) -> String {
    text.chars().fold(String::new(), |mut shown, c| {
        match c.is_control() && c != '\n' {
            true => shown.extend(c.escape_default()),
            false => shown.push(c),
        }
        shown
    })
}

/// Whoever read our output has seen enough.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<std::io::Error>())
        .any(|cause| cause.kind() == ErrorKind::BrokenPipe)
}

fn exit_code(error: &anyhow::Error) -> u8 {
    if error.is::<Usage>() || error.is::<ConfigError>() || error.is::<DeviceError>() {
        return 2;
    }
    if let Some(error) = error.downcast_ref::<NoGo>() {
        return if error.does_not_fit { 3 } else { 1 };
    }
    if error.is::<DoesNotFit>() {
        return 3;
    }
    if let Some(error) = error.downcast_ref::<RanksError>() {
        return ranks_code(error);
    }
    if let Some(error) = error.downcast_ref::<TorchError>() {
        // Everything else is about names, files and sizes that the user gave.
        return match error {
            TorchError::DoesNotFit { .. } => 3,
            _ => 2,
        };
    }
    if error.is::<AllocatorSettings>() {
        return 2;
    }
    if let Some(error) = error.downcast_ref::<FitError>() {
        return fit_code(error);
    }
    if let Some(error) = error.downcast_ref::<DataError>() {
        return data_code(error);
    }
    if let Some(error) = error.downcast_ref::<CheckpointError>() {
        return checkpoint_code(error);
    }
    if let Some(error) = error.downcast_ref::<WeightError>() {
        return weight_code(error);
    }
    match error.downcast_ref::<TrainError>() {
        Some(TrainError::Step(error)) => step_code(error),
        Some(TrainError::RankLost { .. }) => ANOTHER_RANK,
        Some(TrainError::Ranks(error)) => ranks_code(error),
        Some(TrainError::Data(error)) => data_code(error),
        Some(TrainError::Checkpoint(error)) => checkpoint_code(error),
        Some(
            TrainError::Vocabulary { .. }
            | TrainError::OtherData { .. }
            | TrainError::OtherSettings { .. }
            | TrainError::OtherModel { .. }
            | TrainError::RunExists { .. }
            | TrainError::InUse { .. }
            | TrainError::NoWeights { .. }
            | TrainError::WeightShape { .. }
            | TrainError::OtherBase { .. }
            | TrainError::OtherAdapter { .. }
            | TrainError::NothingToPack
            | TrainError::StageLimit { .. }
            | TrainError::NothingToExport { .. },
        ) => 2,
        Some(TrainError::Weights(error)) => weight_code(error),
        // A full disk is a failure; else the path is one that nobody can make.
        Some(TrainError::Folder { source, .. }) if source.kind() != ErrorKind::StorageFull => 2,
        _ => 1,
    }
}

/// What the environment and the arguments cause is wrong usage; what another rank causes is its
/// failure.
fn ranks_code(error: &RanksError) -> u8 {
    match error {
        RanksError::Lost(_) => ANOTHER_RANK,
        RanksError::Variable { .. } | RanksError::Nodes { .. } | RanksError::Refused { .. } => 2,
        _ => 1,
    }
}

fn fit_code(error: &FitError) -> u8 {
    match error {
        FitError::DoesNotFit(_) => 3,
        FitError::Step(error) => step_code(error),
        FitError::Config(_)
        | FitError::Device(_)
        | FitError::EmptyBatch
        | FitError::EffectiveBatch { .. }
        | FitError::NothingToChoose { .. }
        | FitError::Margin { .. } => 2,
        FitError::GuideData { .. } => 1,
    }
}

fn step_code(error: &StepError) -> u8 {
    match error {
        StepError::Model(ModelError::SequenceTooLong { .. })
        | StepError::Model(
            ModelError::WholeOnly { .. }
            | ModelError::NotTrained { .. }
            | ModelError::NotGenerated { .. }
            | ModelError::Beyond { .. },
        )
        | StepError::QuantisedAndTrained
        | StepError::WholeLinear { .. }
        | StepError::NothingWhole { .. }
        | StepError::SavedQuantised
        | StepError::StatesInHalf
        | StepError::WholeBatch { .. }
        | StepError::WholeBatchOfRanks { .. }
        | StepError::UpdateInBackwardOfRanks { .. }
        | StepError::UpdateInBackward { .. } => 2,
        StepError::Adapters(error) => weight_code(error),
        error if error.is_too_large() => 2,
        _ => 1,
    }
}

/// What the user's files and names cause is wrong input; what the disk causes is a failure.
fn weight_code(error: &WeightError) -> u8 {
    match error {
        WeightError::Io { .. } => 1,
        _ => 2,
    }
}

/// A path to no checkpoint is wrong usage; a damaged checkpoint or a full disk is a failure.
fn checkpoint_code(error: &CheckpointError) -> u8 {
    match error {
        CheckpointError::NoCheckpoint { .. } | CheckpointError::NotACheckpoint { .. } => 2,
        _ => 1,
    }
}

/// What the user's files and folders cause is wrong input; what the disk causes is a failure.
fn data_code(error: &DataError) -> u8 {
    match error {
        DataError::Read { .. }
        | DataError::Changed { .. }
        | DataError::CacheRead { .. }
        | DataError::CacheWrite { .. }
        | DataError::Stuck { .. }
        | DataError::Write { .. } => 1,
        _ => 2,
    }
}
