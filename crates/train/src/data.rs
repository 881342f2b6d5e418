//! The data of a run: tokens cut into windows, those for training and those for validation, and
//! how often the run goes over them.

use cinch_config::Config;
use cinch_data::{
    Corpus, DataError, DataOptions, Progress, Source, Split, Tokenizer, TokenizerSpec,
};

use crate::error::TrainError;
use crate::session::Batch;

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

    /// Whether one step takes some sequence more than once.
    pub fn is_less_than_a_step(&self) -> bool {
        self.training < self.step_sequences
    }

    /// Whether there is too little to learn a language from.
    pub fn is_small(&self) -> bool {
        self.is_less_than_a_step() || self.tokens < FEW_TOKENS
    }
}

pub(crate) struct Data {
    pub training: Split,
    pub validation: Split,
    pub fingerprint: String,
    pub report: DataReport,
    /// What is worth saying of how the text was read.
    pub note: Option<String>,
}

impl Data {
    pub fn prepare(config: &Config, progress: &dyn Progress) -> Result<Self, TrainError> {
        let spec: TokenizerSpec = match config.data.tokenizer.parse() {
            Ok(spec) => spec,
            Err(never) => match never {},
        };
        let tokenizer = Tokenizer::load(&spec)?;
        let vocabulary = config.model.vocab_size();
        if tokenizer.vocab_size() > vocabulary {
            return Err(TrainError::Vocabulary {
                tokenizer: config.data.tokenizer.clone(),
                tokens: tokenizer.vocab_size(),
                vocabulary,
            });
        }
        let source = match &config.data.source {
            None => Source::Embedded,
            Some(path) if path.is_file() => Source::File(path.clone()),
            Some(path) => Source::Folder(path.clone()),
        };
        let options = DataOptions {
            source,
            tokenizer: spec,
            text_column: config.data.text_column.clone(),
            cache_dir: config.data.cache_dir.clone(),
        };
        let corpus = Corpus::prepare(&options, &tokenizer, progress)?;
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
            max_steps: config.training.max_steps,
        };
        Ok(Self {
            training,
            validation,
            fingerprint: corpus.fingerprint().to_owned(),
            report,
            note: corpus.cut_note(),
        })
    }

    /// The batch that follows after `samples` sequences.
    pub fn fill_training(
        &self,
        samples: u64,
        seed: u64,
        seq_len: usize,
        batch: &mut Batch,
    ) -> Result<(), DataError> {
        let tokens = batch.tokens.chunks_exact_mut(seq_len);
        let targets = batch.targets.chunks_exact_mut(seq_len);
        for (sample, (tokens, targets)) in (samples..).zip(tokens.zip(targets)) {
            self.training.fill(sample, seed, tokens, targets)?;
        }
        Ok(())
    }

    /// The batch of validation sequences from `first` on.
    pub fn fill_validation(
        &self,
        first: u64,
        seq_len: usize,
        batch: &mut Batch,
    ) -> Result<(), DataError> {
        let tokens = batch.tokens.chunks_exact_mut(seq_len);
        let targets = batch.targets.chunks_exact_mut(seq_len);
        for (index, (tokens, targets)) in (first..).zip(tokens.zip(targets)) {
            self.validation.fill_in_order(index, tokens, targets)?;
        }
        Ok(())
    }
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
