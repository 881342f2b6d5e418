//! From flags, files and environment to settings, each value with its source, and to the run that
//! they describe.

use std::path::{Path, PathBuf};

use cinch_config::{
    Config, ConfigError, Matters, Preset, Program, SETTINGS, Settings, Source, config_files,
};
use cinch_data::{Tokenizer, TokenizerSpec};
use cinch_train::FirstWeights;

use crate::args::{Engine, SettingArguments};
use crate::failure::usage;
use crate::model_folder::hub_folders;
use crate::pytorch::refuse_flags_of_pytorch;
use crate::voice;

/// Environment variables of cinch that are not settings.
const OTHER_VARIABLES: [&str; 1] = [cinch_files::CACHE_VARIABLE];

/// What a model that is the first argument of a command was given by.
pub const FIRST_ARGUMENT: &str = "the first argument";

/// Everything that was asked for, resolved: one value from flags to plan for every command.
pub struct Asked {
    pub settings: Settings,
    pub config: Config,
    pub engine: Engine,
    /// Why it is this engine, where nobody named one.
    pub because: Option<String>,
    /// The files that were read, and that `--apply` writes into.
    pub files: Vec<PathBuf>,
}

impl Asked {
    /// Reads what a command was given; `subject` is its first argument.
    pub fn read(
        arguments: &SettingArguments,
        subject: Option<&str>,
        engine: Option<Engine>,
    ) -> anyhow::Result<Asked> {
        let arguments = arguments.about(subject)?;
        let files = arguments.files()?;
        let settings = arguments.settings()?;
        voice::explain(&settings);
        voice::aside(arguments.plain.memory.board_note());
        let config = settings.resolve()?;
        let (engine, because) = match engine {
            Some(engine) => (engine, None),
            None => engine_of(&settings, &config),
        };
        if engine == Engine::Pytorch {
            settings.refuse_not_predicted()?;
        }
        Ok(Asked {
            settings,
            config,
            engine,
            because,
            files,
        })
    }
}

/// Whose run it is where nobody says: that of the file's program, or of what can run the model.
fn engine_of(settings: &Settings, config: &Config) -> (Engine, Option<String>) {
    let foreign = settings
        .readings()
        .iter()
        .find(|reading| reading.program == Program::PyTorch);
    if let Some(reading) = foreign {
        let because = format!(
            "{} is a file of {}",
            reading.path.display(),
            reading.dialect
        );
        return (Engine::Pytorch, Some(because));
    }
    let because = format!(
        "cinch's own engine does not train {} yet",
        config.model.family().title
    );
    match config.model.is_trained() {
        true => (Engine::Cinch, None),
        false => (Engine::Pytorch, Some(because)),
    }
}

/// Whether a path holds a model's `config.json` rather than settings of a run.
fn is_model(path: &Path) -> bool {
    let file = match path.is_dir() {
        true => path.join("config.json"),
        false => path.to_owned(),
    };
    let is_json = file.extension().is_some_and(|ending| ending == "json");
    let text = match is_json {
        true => cinch_files::read_regular_text(&file, cinch_files::MAX_READ).unwrap_or_default(),
        false => return false,
    };
    let value: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    value
        .get("model_type")
        .is_some_and(serde_json::Value::is_string)
}

impl SettingArguments {
    /// The arguments with the command's first one in its place: a file, a folder or a model.
    pub fn about(&self, subject: Option<&str>) -> anyhow::Result<SettingArguments> {
        let mut arguments = self.clone();
        let Some(subject) = subject else {
            return Ok(arguments);
        };
        let path = Path::new(subject);
        let taken = |flag: &str| {
            usage(format!(
                "{subject} and {flag} both say what is meant\nhint: give one of them"
            ))
        };
        if path.exists() && !is_model(path) && (path.is_file() || config_files(path).is_ok()) {
            if self.plain.config.is_some() || self.plain.config_path.is_some() {
                return Err(taken("--config"));
            }
            match path.is_dir() {
                true => arguments.plain.config_path = Some(path.to_owned()),
                false => arguments.plain.config = Some(path.to_owned()),
            }
            return Ok(arguments);
        }
        let endings = ["yaml", "yml", "toml", "py", "sh", "jsonc"];
        let ending = path.extension().and_then(|ending| ending.to_str());
        let names_a_file = ending.is_some_and(|ending| endings.contains(&ending));
        if !path.exists() && (names_a_file || subject.ends_with('/')) {
            let path = path.to_owned();
            return Err(ConfigError::NoSuchFile { path }.into());
        }
        if self.value("model.type").is_some() {
            return Err(taken("--model"));
        }
        arguments.flags.push(crate::args::SettingFlag {
            flag: FIRST_ARGUMENT.to_owned(),
            key: "model.type",
            text: subject.into(),
        });
        Ok(arguments)
    }

    /// The files that hold settings, in the order in which they are read.
    pub fn files(&self) -> anyhow::Result<Vec<PathBuf>> {
        match (&self.plain.config_path, &self.plain.config) {
            (Some(path), None) => Ok(config_files(path)?),
            (None, Some(file)) => Ok(config_files(file)?),
            (None, None) => Ok(Vec::new()),
            (Some(_), Some(file)) if self.plain.config_path.as_deref() == Some(file) => {
                Ok(vec![file.clone()])
            }
            (Some(folder), Some(file)) => {
                // The file first, then what the folder has besides.
                let mut files = vec![file.clone()];
                let others = config_files(folder)?.into_iter();
                files.extend(others.filter(|other| other != file));
                Ok(files)
            }
        }
    }

    /// The text that was typed for a setting.
    pub fn value(&self, key: &str) -> Option<&str> {
        let mut flags = self.flags.iter();
        let found = flags.find(|flag| flag.key == key);
        found.and_then(|flag| flag.text.to_str())
    }

    /// Flags that only a PyTorch run has, where one was given.
    pub fn of_pytorch(&self) -> Option<String> {
        let mut flags = self.flags.iter();
        let flag = flags.find(|flag| flag.key.starts_with("pytorch."))?;
        Some(flag.flag.clone())
    }

    /// The settings: defaults, presets, file, environment, flags.
    pub fn settings(&self) -> anyhow::Result<Settings> {
        self.settings_over(Settings::new())
    }

    /// As [`Self::settings`], on top of what `settings` holds.
    pub fn settings_over(&self, mut settings: Settings) -> anyhow::Result<Settings> {
        let plain = &self.plain;
        settings.look_for_models_in(hub_folders());
        if let Some(name) = &plain.vram_preset {
            settings.apply_preset(Preset::vram(name)?)?;
        }
        if let Some(name) = &plain.training_preset {
            settings.apply_preset(Preset::training(name)?)?;
        }
        settings.load_files(&self.files()?)?;
        let variables = std::env::vars_os()
            .filter(|(name, _)| OTHER_VARIABLES.iter().all(|other| name != *other));
        settings.load_environment(variables)?;
        for flag in &self.flags {
            let source = Source::Flag(flag.flag.clone());
            settings.set_path(flag.key, Path::new(&flag.text), source)?;
        }
        if let Some(stage) = plain.zero {
            let source = Source::Flag("--zero".to_owned());
            settings.set("world.shard", &format!("zero{stage}"), source)?;
        }
        if plain.fsdp {
            let source = Source::Flag("--fsdp".to_owned());
            settings.set("world.shard", "fsdp", source)?;
        }
        if let Some(budget) = plain.memory.budget()? {
            let source = Source::Flag(budget.flag.to_owned());
            settings.set("vram.budget", &budget.setting(), source)?;
        }
        for pair in &plain.set {
            let Some((key, value)) = pair.split_once('=') else {
                return Err(usage(format!(
                    "--set takes KEY=VALUE, not `{pair}`\nhint: for example --set model.d_state=32"
                )));
            };
            settings.set(key.trim(), value.trim(), Source::Flag("--set".to_owned()))?;
        }
        Ok(settings)
    }
}

/// Settings for cinch's own engine: those of a PyTorch run, mistakes in the files of another
/// program, and models that it does not train, are refused with the way out.
pub fn for_the_engine(
    arguments: &SettingArguments,
    settings: &Settings,
    config: &Config,
) -> anyhow::Result<()> {
    refuse_flags_of_pytorch(arguments.of_pytorch().as_deref())?;
    settings.refuse_mistakes(Matters::Memory)?;
    if config.model.is_trained() {
        return Ok(());
    }
    Err(usage(format!(
        "cinch's engine does not train {} yet ({})\n\
         hint: `cinch plan` with the same arguments predicts what PyTorch takes for it; \
         `cinch models` lists what can be trained",
        config.model.family().title,
        config.model_title()
    )))
}

/// Data that a file of another program names is not read: training on something else in its place
/// would be another run than the file asks for.
pub fn refuse_unread_data(settings: &Settings) -> anyhow::Result<()> {
    let mut readings = settings.readings().iter();
    let foreign = readings.find(|reading| reading.program == Program::PyTorch);
    match foreign {
        Some(reading) if !settings.is_explicit("data.source") => Err(usage(format!(
            "{} is a file of {}, and cinch does not read the data that it names\n\
             hint: give the data with --data-dir FILE; `cinch plan` with the same file predicts \
             what PyTorch takes",
            cinch_files::shown(&reading.path),
            reading.dialect
        ))),
        _ => Ok(()),
    }
}

/// What else one can do about weights without a tokenizer, where a command has the flag.
pub const NAME_TOKENIZER: &str = ", or name a tokenizer with --tokenizer";

/// Weights know the tokens that they were trained on: read with those of another model they know
/// nothing, and no error tells it. Files of another program without a tokenizer are taken to be of
/// a built-in one only where they have as many tokens as it has. `or_else` ends the hint.
pub fn refuse_foreign_tokenizer(config: &Config, or_else: &str) -> anyhow::Result<()> {
    let is_foreign = config.named.title.is_some() || cinch_model::embeds(&config.model);
    let folder = match FirstWeights::of(config) {
        Ok(FirstWeights::Files(folder)) if is_foreign => folder,
        _ => return Ok(()),
    };
    let spec = match config.data.tokenizer.parse() {
        Ok(spec) => spec,
        Err(never) => match never {},
    };
    let is_its_own = match spec {
        TokenizerSpec::Trained | TokenizerSpec::File(_) => true,
        TokenizerSpec::Bytes | TokenizerSpec::Gpt2 => {
            Tokenizer::load(&spec)?.vocab_size() == config.model.vocab_size()
        }
    };
    if is_its_own {
        return Ok(());
    }
    Err(usage(format!(
        "{} has weights and no tokenizer.json: with which tokens they were trained is not known\n\
         hint: put it there (`AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)` of \
         transformers writes one){or_else}",
        cinch_files::shown(&folder)
    )))
}

/// The flag that stands for a key.
pub fn flag_of(key: &str) -> Option<String> {
    let mut settings = SETTINGS.iter();
    let setting = settings.find(|setting| setting.key == key)?;
    setting.flag.map(|flag| format!("--{}", flag.name))
}
