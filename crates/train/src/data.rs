//! The data of a run: texts cut into windows or samples laid out in rows, those for training and
//! those for validation, and how often the run goes over them.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cinch_architecture::{Architecture, Naics};
use cinch_config::{Config, TrainingConfig};
use cinch_data::sample::{
    Kind, LONGEST_RECORD_BYTES, Moment, Row, RowStyle, Rows, SampleOptions, Samples,
    TokenizerConfig, TooLong, names_sample,
};
use cinch_data::taxonomy::Taxonomy;
use cinch_data::{
    Corpus, DataError, DataOptions, NoProgress, Progress, Source, Split, Tokenizer, TokenizerSpec,
    train_tokenizer,
};
use cinch_model::input;

use crate::batch::Batch;
use crate::curriculum;
use crate::error::TrainError;
use crate::rows::RowLengths;
use crate::share::Share;
use crate::texts::TextRows;

/// Fewer tokens than this are a page of text: a model can only learn them by heart.
const FEW_TOKENS: u64 = 500;

/// What there is to train on, and how much of it a run takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DataReport {
    pub tokens: u64,
    pub documents: u64,
    /// Sequences to train on.
    pub training: u64,
    /// Sequences to validate on.
    pub validation: u64,
    pub cached: bool,
    /// Tokens of a sequence.
    pub seq_len: u64,
    /// Sequences of a step.
    pub step_sequences: u64,
    pub max_steps: u64,
}

impl DataReport {
    /// Passes over the training sequences after that many of them were seen.
    pub fn epochs_of(&self, sequences: u64) -> f64 {
        sequences as f64 / self.training.max(1) as f64
    }

    /// Passes over the training sequences that the whole run makes.
    pub fn epochs(&self) -> f64 {
        self.epochs_of(self.max_steps.saturating_mul(self.step_sequences))
    }

    /// Steps of a run: those that were stated, or as many as the epochs take.
    pub(crate) fn steps_of(&self, training: &TrainingConfig) -> u64 {
        match training.epochs {
            None => training.max_steps,
            Some(epochs) => {
                let sequences = epochs * self.training as f64;
                (sequences / self.step_sequences.max(1) as f64)
                    .ceil()
                    .max(1.0) as u64
            }
        }
    }

    /// Whether one step takes some sequence more than once.
    pub fn is_less_than_a_step(&self) -> bool {
        self.training < self.step_sequences
    }

    /// Whether there is too little to learn a language from.
    pub fn is_small(&self) -> bool {
        self.is_less_than_a_step() || self.tokens < FEW_TOKENS
    }
}

/// Which rows of a batch are filled.
#[derive(Clone, Copy)]
struct Part {
    share: Share,
    /// Rows of a micro batch.
    micro: usize,
}

impl Part {
    /// All of them.
    const WHOLE: Self = Self {
        share: Share::WHOLE,
        micro: 1,
    };

    /// The places of so many own rows in the whole batch.
    fn places(self, rows: usize) -> impl Iterator<Item = u64> {
        (0..rows).map(move |row| self.share.sequence(row, self.micro) as u64)
    }
}

/// Where rows come from.
enum RowSource {
    /// Texts that follow each other, cut into windows.
    Windows(Split),
    /// Samples, one to a row or several.
    Samples(Rows),
    /// Anchors with their positives and negatives.
    Texts(Box<TextRows>),
}

impl RowSource {
    fn len(&self) -> u64 {
        match self {
            Self::Windows(split) => split.len(),
            Self::Samples(rows) => rows.len(),
            Self::Texts(texts) => texts.pairs.len(),
        }
    }

    /// Writes a rank's rows of an effective batch, whose first row is `first`: in the order of
    /// epochs drawn by a seed, or in one that never changes. With `by_length`, the rows of the
    /// effective batch are put in the order of their lengths, so that those which share a micro
    /// batch are about as long.
    fn fill(
        &self,
        (first, part): (u64, Part),
        seed: Option<u64>,
        by_length: bool,
        seq_len: usize,
        batch: &mut Batch,
    ) -> Result<(), DataError> {
        let own = part.places(batch.num_sequences());
        if let Self::Texts(texts) = self {
            texts.fill(own.map(|place| first + place), seed, None, batch);
            return Ok(());
        }
        let numbers: Vec<u64> = match (self, seed) {
            (Self::Windows(_) | Self::Texts(_), _) | (_, None) => {
                own.map(|place| first + place).collect()
            }
            (Self::Samples(rows), Some(seed)) => {
                let all = (batch.num_sequences() * part.share.ranks) as u64;
                let drawn = (first..first.saturating_add(all)).map(|n| rows.index(n, seed));
                let mut drawn: Vec<u64> = drawn.collect();
                if by_length {
                    drawn.sort_by_key(|&index| rows.row_len(index));
                }
                own.map(|place| drawn[place as usize]).collect()
            }
        };
        if let Self::Samples(rows) = self {
            for (sequence, &index) in numbers.iter().enumerate() {
                batch.set_row_len(sequence, rows.row_len(index));
            }
        }
        let names = [
            input::TOKENS,
            input::TARGETS,
            input::POSITIONS,
            input::STARTS,
        ];
        let [tokens, targets, positions, starts] = batch.get_disjoint_mut(names);
        let tokens = tokens.chunks_exact_mut(seq_len);
        let targets = targets.chunks_exact_mut(seq_len);
        // A graph whose rows are of one piece has no tensors for these.
        let mut unread = [vec![0; seq_len], vec![0; seq_len]];
        let mut positions = positions.chunks_exact_mut(seq_len);
        let mut starts = starts.chunks_exact_mut(seq_len);
        for (number, (tokens, targets)) in numbers.into_iter().zip(tokens.zip(targets)) {
            match (self, seed) {
                (Self::Windows(split), Some(seed)) => split.fill(number, seed, tokens, targets)?,
                (Self::Windows(split), None) => split.fill_in_order(number, tokens, targets)?,
                (Self::Samples(rows), _) => {
                    let [unread_positions, unread_starts] = &mut unread;
                    let mut row = Row {
                        tokens,
                        targets,
                        positions: positions.next().unwrap_or(unread_positions),
                        starts: starts.next().unwrap_or(unread_starts),
                    };
                    rows.fill_in_order(number, &mut row);
                }
                (Self::Texts(_), _) => {}
            }
        }
        Ok(())
    }
}

pub(crate) struct Data {
    /// Never none; one where a run has no curriculum.
    stages: Vec<StageRows>,
    pub fingerprint: String,
    pub report: DataReport,
    /// What was found and what became of it, in sentences.
    pub notes: Vec<String>,
    /// What made the tokens; none where they were there already.
    pub tokenizer: Option<RunTokenizer>,
}

/// The tokenizer of a run.
pub(crate) struct RunTokenizer {
    pub tokenizer: Tokenizer,
    pub spec: TokenizerSpec,
    /// Where it lies, if it was trained on the data.
    pub trained: Option<PathBuf>,
}

/// The rows of a stage.
struct StageRows {
    /// Of the curriculum's file; empty where there is no curriculum.
    name: String,
    training: RowSource,
    validation: RowSource,
    steps: u64,
}

impl Data {
    pub fn prepare(config: &Config, progress: &dyn Progress) -> Result<Self, TrainError> {
        refuse_missing_source(config)?;
        if let Some(path) = &config.data.source
            && let Some(corpus) = Corpus::of_ids(path, config.model.vocab_size(), progress)?
        {
            return match config.data.packing {
                true => Err(TrainError::NothingToPack),
                false => Self::of_corpus(&corpus, config),
            };
        }
        let of_run = load_tokenizer(config, progress)?;
        let data = Self::of_tokenizer(&of_run, config, progress)?;
        Ok(Self {
            tokenizer: Some(of_run),
            ..data
        })
    }

    fn of_tokenizer(
        of_run: &RunTokenizer,
        config: &Config,
        progress: &dyn Progress,
    ) -> Result<Self, TrainError> {
        let tokenizer = &of_run.tokenizer;
        if let Architecture::Naics(shape) = &config.model {
            return Self::of_texts(shape, config, tokenizer);
        }
        if let Some(path) = &config.data.source
            && holds_samples(path, config, tokenizer)?
        {
            return Self::of_samples(path, config, tokenizer, progress);
        }
        if config.data.packing {
            return Err(TrainError::NothingToPack);
        }
        let options = text_options(config, of_run.spec.clone());
        let corpus = Corpus::prepare(&options, tokenizer, progress)?;
        Self::of_corpus(&corpus, config)
    }

    fn of_corpus(corpus: &Corpus, config: &Config) -> Result<Self, TrainError> {
        let windows = corpus.windows(config.batch.seq_len)?;
        let (training, validation) = windows.split(config.data.val_split, config.training.seed);
        let report = DataReport {
            tokens: corpus.num_tokens(),
            documents: corpus.num_documents(),
            training: training.len(),
            validation: validation.len(),
            cached: corpus.was_cached(),
            seq_len: config.batch.seq_len as u64,
            step_sequences: config.batch.effective_batch() as u64,
            max_steps: 0,
        };
        let parts = (RowSource::Windows(training), RowSource::Windows(validation));
        let fingerprint = corpus.fingerprint().to_owned();
        let notes = corpus.cut_note().into_iter().collect();
        Ok(Self::new(parts, fingerprint, report, notes, config))
    }

    /// Pairs of a taxonomy's codes.
    fn of_texts(shape: &Naics, config: &Config, tokenizer: &Tokenizer) -> Result<Self, TrainError> {
        let seq_len = config.batch.seq_len;
        let taxonomy = Arc::new(read_taxonomy(shape, config, tokenizer)?);
        let mut notes = Vec::new();
        if config.data.source.is_none() {
            notes.push("no --data-dir is given: this trains on a made-up taxonomy".to_owned());
        }
        let mut stages = Vec::new();
        for rules in curriculum::rules(config, shape.negatives)? {
            let (held_out, seed) = (config.data.val_split, config.training.seed);
            let (training, validation) = taxonomy.pairs(&rules, held_out, seed)?;
            let stage = match rules.name.as_str() {
                "" => String::new(),
                name => format!("stage {name}, {} negatives: ", rules.negatives),
            };
            notes.push(format!(
                "{stage}{} pairs to train on, {} held out",
                training.len(),
                validation.len()
            ));
            let rows = |pairs| {
                RowSource::Texts(Box::new(TextRows {
                    taxonomy: taxonomy.clone(),
                    pairs,
                    shape: Naics {
                        negatives: rules.negatives as u64,
                        ..shape.clone()
                    },
                    seq_len,
                }))
            };
            stages.push(StageRows {
                training: rows(training),
                validation: rows(validation),
                name: rules.name,
                steps: 0,
            });
        }
        let entries = taxonomy.entries();
        let tokens = entries.iter().flat_map(|entry| &entry.channels);
        let most = |of: fn(&StageRows) -> u64| stages.iter().map(of).max().unwrap_or(0);
        let report = DataReport {
            tokens: tokens.map(|channel| channel.len() as u64).sum(),
            documents: entries.len() as u64,
            training: most(|stage| stage.training.len()),
            validation: most(|stage| stage.validation.len()),
            cached: false,
            seq_len: seq_len as u64,
            step_sequences: config.batch.effective_batch() as u64,
            max_steps: 0,
        };
        let fingerprint = taxonomy.fingerprint().to_owned();
        Ok(Self::of_stages(stages, fingerprint, report, notes, config))
    }

    fn of_samples(
        path: &Path,
        config: &Config,
        tokenizer: &Tokenizer,
        progress: &dyn Progress,
    ) -> Result<Self, TrainError> {
        let (seq_len, seed) = (config.batch.seq_len, config.training.seed);
        let samples = read_samples(path, config, tokenizer, progress)?;
        let mut notes: Vec<String> = samples
            .files()
            .iter()
            .map(|file| {
                let count = file.num_samples;
                let unread = unread_columns(&file.unread);
                format!(
                    "{}: {count} samples, {}{unread}",
                    file.path.display(),
                    file.kind
                )
            })
            .collect();
        notes.push(format!("lengths: {}", samples.lengths()));
        let (samples, limited) = samples.limit(seq_len, too_long(config))?;
        notes.push(limited.to_string());
        let style = row_style(config);
        let (tokens, documents) = (samples.lengths().num_tokens, samples.len() as u64);
        let (training, validation) = samples.split(config.data.val_split, seed);
        let training = training.rows(seq_len, style, seed)?;
        let validation = validation.rows(seq_len, style, seed)?;
        notes.push(
            RowLengths::of(&training, seed)
                .padding(&config.batch)
                .to_string(),
        );
        let report = DataReport {
            tokens,
            documents,
            training: training.len(),
            validation: validation.len(),
            cached: false,
            seq_len: seq_len as u64,
            step_sequences: config.batch.effective_batch() as u64,
            max_steps: 0,
        };
        let fingerprint = training.fingerprint();
        let parts = (RowSource::Samples(training), RowSource::Samples(validation));
        Ok(Self::new(parts, fingerprint, report, notes, config))
    }

    fn new(
        (training, validation): (RowSource, RowSource),
        fingerprint: String,
        report: DataReport,
        notes: Vec<String>,
        config: &Config,
    ) -> Self {
        let whole = StageRows {
            name: String::new(),
            training,
            validation,
            steps: 0,
        };
        Self::of_stages(vec![whole], fingerprint, report, notes, config)
    }

    /// Each stage is as long as its epochs take; steps that were stated are shared out.
    fn of_stages(
        mut stages: Vec<StageRows>,
        fingerprint: String,
        report: DataReport,
        mut notes: Vec<String>,
        config: &Config,
    ) -> Self {
        let count = stages.len().max(1) as u64;
        let stated = config.training.max_steps;
        if config.training.epochs.is_none() && stated < count {
            notes.push(format!(
                "each of the {count} stages takes a step at least: {count} steps, not {stated}"
            ));
        }
        for (index, stage) in (0..).zip(&mut stages) {
            let training = stage.training.len();
            let of_stage = DataReport { training, ..report };
            let steps = of_stage.steps_of(&config.training);
            stage.steps = match config.training.epochs {
                Some(_) => steps,
                None => (steps / count + u64::from(index < steps % count)).max(1),
            };
        }
        Self {
            fingerprint,
            report: DataReport {
                max_steps: stages.iter().map(|stage| stage.steps).sum(),
                ..report
            },
            stages,
            notes,
            tokenizer: None,
        }
    }

    /// Steps of each stage.
    pub fn stage_steps(&self) -> Vec<u64> {
        self.stages.iter().map(|stage| stage.steps).collect()
    }

    /// The name that a stage has in the curriculum's files.
    pub fn stage_name(&self, stage: usize) -> Option<&str> {
        let name = self.stages.get(stage)?.name.as_str();
        (!name.is_empty()).then_some(name)
    }

    fn stage(&self, stage: usize) -> &StageRows {
        &self.stages[stage.min(self.stages.len() - 1)]
    }

    /// Rows to validate on, in the stage that has the fewest.
    pub fn num_validation(&self) -> u64 {
        let rows = self.stages.iter().map(|stage| stage.validation.len());
        rows.min().unwrap_or(0)
    }

    /// Rows of a stage to validate on.
    pub fn validation_of(&self, stage: usize) -> u64 {
        self.stage(stage).validation.len()
    }

    /// Passes over a stage's rows after so many of them.
    pub fn epochs_of(&self, stage: usize, samples: u64) -> f64 {
        samples as f64 / self.stage(stage).training.len().max(1) as f64
    }

    /// Steps that so many passes over a stage's rows take, at least one.
    pub fn steps_of_epochs(&self, stage: usize, epochs: f64) -> u64 {
        let sequences = epochs * self.stage(stage).training.len() as f64;
        let steps = sequences / self.report.step_sequences.max(1) as f64;
        (steps.ceil() as u64).max(1)
    }

    /// The taxonomy whose texts a run embeds, where it does.
    pub fn taxonomy(&self) -> Option<&Taxonomy> {
        match &self.stage(0).training {
            RowSource::Texts(texts) => Some(&texts.taxonomy),
            RowSource::Windows(_) | RowSource::Samples(_) => None,
        }
    }

    /// A rank's share of the batch that follows after `samples` sequences of a stage. Negatives in their anchor's
    /// cluster are left out.
    pub fn fill_training(
        &self,
        (stage, samples): (usize, u64),
        share: Share,
        clusters: Option<&[u32]>,
        config: &Config,
        batch: &mut Batch,
    ) -> Result<(), DataError> {
        let rows = &self.stage(stage).training;
        let micro = config.batch.batch_size;
        let part = Part { share, micro };
        if let RowSource::Texts(texts) = rows {
            let own = part.places(batch.num_sequences());
            let own = own.map(|place| samples + place);
            texts.fill(own, Some(config.training.seed), clusters, batch);
            return Ok(());
        }
        let by_length = config.batch.lengths().len() > 1;
        let (seed, seq_len) = (config.training.seed, config.batch.seq_len);
        rows.fill((samples, part), Some(seed), by_length, seq_len, batch)
    }

    /// The batch of a stage's validation sequences from `first` on.
    pub fn fill_validation(
        &self,
        (stage, first): (usize, u64),
        seq_len: usize,
        batch: &mut Batch,
    ) -> Result<(), DataError> {
        let rows = &self.stage(stage).validation;
        rows.fill((first, Part::WHOLE), None, false, seq_len, batch)
    }
}

/// The taxonomy that a configuration names, or one that is made up where it names none.
pub(crate) fn read_taxonomy(
    shape: &Naics,
    config: &Config,
    tokenizer: &Tokenizer,
) -> Result<Taxonomy, TrainError> {
    let lengths = shape.channel_lengths(config.batch.seq_len as u64);
    let lengths = lengths.map(|length| length as usize);
    Ok(match &config.data.source {
        Some(path) => Taxonomy::read(path, tokenizer, lengths)?,
        None => Taxonomy::made_up(config.training.seed, tokenizer, lengths)?,
    })
}

/// The samples of a file, encoded.
pub(crate) fn read_samples(
    path: &Path,
    config: &Config,
    tokenizer: &Tokenizer,
    progress: &dyn Progress,
) -> Result<Samples, TrainError> {
    let template = tokenizer_config(config)?;
    let options = sample_options(path, config, config.data.max_samples);
    let samples = Samples::prepare(&options, tokenizer, template.as_ref(), progress)?;
    Ok(samples)
}

pub(crate) fn too_long(config: &Config) -> TooLong {
    match config.data.too_long {
        cinch_config::TooLong::Truncate => TooLong::Truncate,
        cinch_config::TooLong::Drop => TooLong::Drop,
        cinch_config::TooLong::Error => TooLong::Error,
    }
}

pub(crate) fn row_style(config: &Config) -> RowStyle {
    match config.data.packing {
        true => RowStyle::Packed,
        false => RowStyle::Padded,
    }
}

/// The texts of a run that has no samples.
fn text_options(config: &Config, tokenizer: TokenizerSpec) -> DataOptions {
    let source = match &config.data.source {
        None => Source::Embedded,
        Some(path) if path.is_file() => Source::File(path.clone()),
        Some(path) => Source::Folder(path.clone()),
    };
    DataOptions {
        source,
        tokenizer,
        text_column: config.data.text_column.clone(),
        cache_dir: config.data.cache_dir.clone(),
    }
}

/// An error where the data are not there: to be told before a tokenizer is asked for.
fn refuse_missing_source(config: &Config) -> Result<(), TrainError> {
    let Some(path) = config.data.source.as_ref().filter(|path| !path.exists()) else {
        return Ok(());
    };
    let what = match path.extension() {
        Some(_) => "file",
        None => "folder",
    };
    let path = path.clone();
    Err(DataError::SourceMissing { what, path }.into())
}

/// The tokenizer of a run, whose tokens the model has embeddings for. One that is to be trained
/// is trained here, unless it was for the same text before.
pub(crate) fn load_tokenizer(
    config: &Config,
    progress: &dyn Progress,
) -> Result<RunTokenizer, TrainError> {
    let spec: TokenizerSpec = match config.data.tokenizer.parse() {
        Ok(spec) => spec,
        Err(never) => match never {},
    };
    let vocabulary = config.model.vocab_size();
    let trained = match &spec {
        TokenizerSpec::Trained => {
            refuse_samples(config)?;
            let options = text_options(config, spec.clone());
            Some(train_tokenizer(&options, vocabulary, progress)?)
        }
        _ => None,
    };
    let tokenizer = Tokenizer::load(&match &trained {
        Some(path) => TokenizerSpec::File(path.clone()),
        None => spec.clone(),
    })?;
    if tokenizer.vocab_size() > vocabulary {
        return Err(TrainError::Vocabulary {
            tokenizer: config.data.tokenizer.clone(),
            tokens: tokenizer.vocab_size(),
            vocabulary,
        });
    }
    Ok(RunTokenizer {
        tokenizer,
        spec,
        trained,
    })
}

/// Prompts with their answers are written with a model's own tokenizer; none is trained on them.
fn refuse_samples(config: &Config) -> Result<(), TrainError> {
    let Some(path) = &config.data.source else {
        return Ok(());
    };
    let bytes = Tokenizer::load(&TokenizerSpec::Bytes)?;
    match holds_samples(path, config, &bytes)? || matches!(config.model, Architecture::Naics(_)) {
        true => Err(TrainError::TokenizerOfSamples { path: path.clone() }),
        false => Ok(()),
    }
}

/// The day on which chat templates that print a date are rendered, 1 January 2025: a run that is
/// resumed later sees the same tokens.
const TEMPLATE_DAY: Moment = Moment(1_735_689_600);

/// What the model's folder says of its text, where there is such a folder.
fn tokenizer_config(config: &Config) -> Result<Option<TokenizerConfig>, TrainError> {
    let folder = config.named.folder.as_deref();
    let folder = folder.filter(|folder| folder.join("tokenizer_config.json").is_file());
    let read = folder.map(|folder| TokenizerConfig::from_folder(folder, TEMPLATE_DAY));
    Ok(read.transpose()?)
}

fn sample_options(path: &Path, config: &Config, max_samples: Option<usize>) -> SampleOptions {
    SampleOptions {
        paths: vec![path.to_owned()],
        train_on_inputs: config.data.train_on_inputs,
        max_samples,
        ..SampleOptions::default()
    }
}

/// Whether the data is prompts with what follows them, by its first record. Plain texts, also
/// those in the text column of a `.jsonl` file, are cut into windows instead.
pub(crate) fn holds_samples(
    path: &Path,
    config: &Config,
    tokenizer: &Tokenizer,
) -> Result<bool, TrainError> {
    if !may_hold_samples(path) {
        return Ok(false);
    }
    let ending = path.extension().and_then(|ending| ending.to_str());
    let template = tokenizer_config(config)?;
    let options = sample_options(path, config, Some(1));
    let first = Samples::prepare(&options, tokenizer, template.as_ref(), &NoProgress);
    match (first, ending) {
        // A text that is no list of samples is read as a text, and what is wrong with it is
        // told there.
        (Err(_), Some("txt")) => Ok(false),
        (first, _) => {
            let kind = first?.files().first().map(|file| file.kind);
            let plain = matches!(kind, None | Some(Kind::Text | Kind::Lines | Kind::File));
            Ok(!plain)
        }
    }
}

/// Whether the name and the first line of a file are those of samples, as far as they tell.
pub(crate) fn may_hold_samples(path: &Path) -> bool {
    let ending = path.extension().and_then(|ending| ending.to_str());
    match ending.filter(|_| path.is_file()) {
        Some("json" | "txt" | "amr") => true,
        // What has none of these is text in a column, also where the column's name is another.
        Some("jsonl" | "ndjson") => begins_with_sample(path),
        _ => false,
    }
}

/// Whether the first line of a file that is not blank is a sample by its columns.
fn begins_with_sample(path: &Path) -> bool {
    let Ok(file) = File::open(path) else {
        return false;
    };
    let start = BufReader::new(file).take(LONGEST_RECORD_BYTES as u64);
    let mut lines = start.lines().map_while(Result::ok);
    let is_blank = |line: &str| line.trim_matches(is_space).is_empty();
    let Some(line) = lines.find(|line| !is_blank(line)) else {
        return false;
    };
    let value: serde_json::Value =
        serde_json::from_str(line.trim_matches(is_space)).unwrap_or_default();
    names_sample(|column| value.get(column).is_some())
}

/// Columns of samples that say nothing to a run, at the end of a line about them.
fn unread_columns(columns: &[String]) -> String {
    const MOST_SHOWN: usize = 6;
    let shown: Vec<String> = columns
        .iter()
        .take(MOST_SHOWN)
        .map(|column| format!("`{column}`"))
        .collect();
    let more = match columns.len().saturating_sub(MOST_SHOWN) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    match columns.is_empty() {
        true => String::new(),
        false => format!("; not read: {}{more}", shown.join(", ")),
    }
}

/// White space, or the mark that some editors put before a file.
fn is_space(character: char) -> bool {
    character.is_whitespace() || character == '\u{FEFF}'
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: DataReport = DataReport {
        tokens: 100_000,
        documents: 3,
        training: 200,
        validation: 10,
        cached: false,
        seq_len: 256,
        step_sequences: 8,
        max_steps: 50,
    };

    /// With lengths and without, a step has the same samples, and an epoch each of them once.
    #[test]
    fn lengths_change_the_order_within_a_step_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pairs.jsonl");
        let line = |index: usize| {
            let words = "word ".repeat(1 + index * 7 % 12);
            format!("{{\"prompt\": \"{index}\", \"completion\": \"{words}\"}}\n")
        };
        std::fs::write(&path, (0..24).map(line).collect::<String>()).unwrap();
        let mut settings = cinch_config::Settings::new();
        for (key, value) in [
            ("model.size", "tiny"),
            ("data.tokenizer", "bytes"),
            ("data.val_split", "0"),
            ("vram.max_seq_len", "80"),
            ("vram.batch_size", "2"),
            ("vram.gradient_accumulation_steps", "4"),
        ] {
            let source = cinch_config::Source::Flag("test".to_owned());
            settings.set(key, value, source).unwrap();
        }
        let source = cinch_config::Source::Flag("test".to_owned());
        settings.set_path("data.source", &path, source).unwrap();
        let one = settings.resolve().unwrap();
        let mut several = one.clone();
        several.batch.buckets = vec![24, 48];
        let data = Data::prepare(&one, &NoProgress).unwrap();
        assert_eq!(data.stages[0].training.len(), 24);
        let mut batch = Batch::new(8, 80);
        let mut rows_of = |config: &Config, step: u64| {
            data.fill_training((0, 8 * step), Share::WHOLE, None, config, &mut batch)
                .unwrap();
            let rows = batch.tokens().chunks_exact(80).map(<[i32]>::to_vec);
            let micros = (0..4).map(|micro| batch.longest(2 * micro..2 * micro + 2));
            (rows.collect::<Vec<_>>(), micros.collect::<Vec<_>>())
        };
        for epoch in 0..2 {
            let mut seen = std::collections::BTreeSet::new();
            for step in 3 * epoch..3 * epoch + 3 {
                let (mut plain, _) = rows_of(&one, step);
                let (mut sorted, longest) = rows_of(&several, step);
                assert!(longest.is_sorted(), "{longest:?}");
                plain.sort();
                sorted.sort();
                assert_eq!(plain, sorted);
                seen.extend(sorted);
            }
            assert_eq!(seen.len(), 24);
        }
    }

    #[test]
    fn epochs_are_passes_over_the_training_sequences() {
        assert_eq!(REPORT.epochs(), 2.0);
        assert_eq!(REPORT.epochs_of(50), 0.25);
    }

    #[test]
    fn data_below_one_step_or_a_page_is_small() {
        assert!(!REPORT.is_small());
        let few = DataReport {
            training: 7,
            ..REPORT
        };
        assert!(few.is_small() && few.is_less_than_a_step());
        let page = DataReport {
            tokens: FEW_TOKENS - 1,
            ..REPORT
        };
        assert!(page.is_small() && !page.is_less_than_a_step());
    }
}
