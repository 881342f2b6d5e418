//! What embeds: a run of `cinch train`, or an encoder by itself.

use std::path::{Path, PathBuf};

use cinch_architecture::{Architecture, Bert};
use cinch_config::Config;
use cinch_data::{Tokenizer, TokenizerSpec};
use cinch_engine::EngineOptions;
use cinch_graph::DType;
use cinch_model::Pooling;
use cinch_train::checkpoint;
use cinch_train::{Embedder, EmbedderFiles, EmbedderOptions, FirstWeights, SentenceForm, State};
use cinch_weights::WeightFiles;

use crate::args::EmbedderArguments;
use crate::command::open_run;
use crate::device;
use crate::failure::usage;
use crate::model_folder::described;
use crate::progress::shown;
use crate::settings::refuse_foreign_tokenizer;

/// A checkpoint of a run.
pub struct TrainedRun {
    pub config: Config,
    path: PathBuf,
    /// None for the weights that it began with.
    trained: Option<WeightFiles>,
    base: Option<WeightFiles>,
}

impl TrainedRun {
    /// `or_else` ends the hint where there is nothing.
    pub fn open(
        given: &Path,
        arguments: &EmbedderArguments,
        or_else: &str,
    ) -> anyhow::Result<Self> {
        if !given.exists() {
            return Err(usage(format!(
                "there is no {}\n\
                 hint: a run of `cinch train --model naics` or one of its checkpoints{or_else}",
                shown(given)
            )));
        }
        let store = open_run(given)?;
        let best = store.best()?.filter(|_| arguments.best);
        let path = match best {
            Some(best) => best.path,
            None => checkpoint::resolve(&store, Some(given))?,
        };
        let state = State::from_json(&path, checkpoint::load_state(&path)?)?;
        let base = match FirstWeights::of(&state.config)? {
            FirstWeights::Files(folder) => Some(WeightFiles::open(&folder)?),
            FirstWeights::Initial => None,
        };
        Ok(Self {
            trained: match arguments.initial {
                true => None,
                false => Some(checkpoint::load_weights(&path)?),
            },
            config: state.config,
            path,
            base,
        })
    }

    /// Whose weights they are.
    pub fn path(&self) -> String {
        match &self.trained {
            Some(_) => shown(&self.path),
            None => format!("{} before training", shown(&self.path)),
        }
    }

    /// Tokens of each channel of a text.
    pub fn channel_lengths(&self) -> anyhow::Result<Vec<usize>> {
        Ok(Embedder::channel_lengths(&self.config)?.to_vec())
    }

    pub fn tokenizer(&self) -> anyhow::Result<Tokenizer> {
        tokenizer(&self.config)
    }

    pub fn embedder(&self, arguments: &EmbedderArguments) -> anyhow::Result<Embedder> {
        let files = EmbedderFiles {
            trained: self.trained.as_ref(),
            base: self.base.as_ref(),
            seed: self.config.training.seed,
        };
        let options = options(arguments)?;
        Ok(Embedder::of_points(&self.config, files, &options)?)
    }
}

/// The folder of a BERT model.
pub struct SentenceModel {
    config: Config,
    encoder: Bert,
    form: SentenceForm,
    path: PathBuf,
    files: WeightFiles,
}

impl SentenceModel {
    pub fn open(folder: &Path, arguments: &EmbedderArguments) -> anyhow::Result<Self> {
        let of_runs = [(arguments.best, "--best"), (arguments.initial, "--initial")];
        if let Some((_, flag)) = of_runs.iter().find(|(is_asked, _)| *is_asked) {
            return Err(usage(format!(
                "{flag} is for the checkpoints of a run, and {} is a model's folder\n\
                 hint: leave out {flag}",
                shown(folder)
            )));
        }
        let config = described(folder)?;
        let Architecture::Bert(encoder) = &config.model else {
            return Err(usage(format!(
                "{} holds no BERT model but {}\nhint: give a run of an embedder, or the folder of \
                 a model such as all-MiniLM-L6-v2",
                shown(folder),
                config.model.family().title
            )));
        };
        refuse_foreign_tokenizer(&config, "")?;
        let encoder = encoder.clone();
        Ok(Self {
            form: SentenceForm::of(folder, &encoder)?,
            encoder,
            config,
            path: folder.to_owned(),
            files: WeightFiles::open(folder)?,
        })
    }

    pub fn form(&self) -> &SentenceForm {
        &self.form
    }

    pub fn path(&self) -> String {
        shown(&self.path)
    }

    /// What becomes of a sentence, and who says so.
    pub fn describe(&self) -> String {
        let form = &self.form;
        let pooling = match form.pooling {
            Pooling::Mean => "the average of a text's tokens",
            Pooling::First => "a text's first token",
        };
        let length = match form.normalised {
            true => ", at length 1",
            false => "",
        };
        let prompt = match form.prompt.as_str() {
            "" => String::new(),
            prompt => format!(", with {prompt:?} before each text"),
        };
        let whence = match form.is_said {
            true => "modules.json",
            false => "the usual; the folder has no modules.json",
        };
        format!(
            "embeddings are {pooling}{length}{prompt} ({whence}); up to {} tokens are read",
            form.longest
        )
    }

    pub fn tokenizer(&self) -> anyhow::Result<Tokenizer> {
        tokenizer(&self.config)
    }

    pub fn embedder(&self, arguments: &EmbedderArguments) -> anyhow::Result<Embedder> {
        let options = options(arguments)?;
        let (encoder, form) = (&self.encoder, &self.form);
        Ok(Embedder::of_sentences(
            encoder,
            form,
            &self.files,
            &options,
        )?)
    }
}

fn tokenizer(config: &Config) -> anyhow::Result<Tokenizer> {
    let spec: TokenizerSpec = match config.data.tokenizer.parse() {
        Ok(spec) => spec,
        Err(never) => match never {},
    };
    Ok(Tokenizer::load(&spec)?)
}

fn options(arguments: &EmbedderArguments) -> anyhow::Result<EmbedderOptions> {
    Ok(EmbedderOptions {
        texts: arguments.batch_size as usize,
        compute: DType::F32,
        target: device::train_target(arguments.device)?,
        engine: EngineOptions {
            threads: arguments.threads,
            ..EngineOptions::default()
        },
    })
}
