//! `cinch generate`: text from a checkpoint or a model's folder, or a conversation with it.

mod answer;
mod chat;
mod format;

use std::io::Write;
use std::path::{Path, PathBuf};

use cinch_config::{Bytes, Config};
use cinch_data::sample::{Prompter, TokenizerConfig, generation_ends};
use cinch_data::{Tokenizer, TokenizerSpec};
use cinch_engine::EngineOptions;
use cinch_graph::{DType, Target};
use cinch_step::adapter_shape;
use cinch_train::checkpoint;
use cinch_train::{
    FirstWeights, Generator, GeneratorOptions, Sampling, State, TOKENIZER_FILE, TunedWeights,
    WeightSource, open_weights,
};
use cinch_weights::{ADAPTER_CONFIG_FILE, WeightFiles};
use serde_json::json;

use super::{open_run, print_json};
use crate::args::{GenerateArguments, GeneratePrecision};
use crate::failure::usage;
use crate::model_folder::{described, model_folder, words_of};
use crate::settings::{NAME_TOKENIZER, refuse_foreign_tokenizer};
use crate::{device, voice};

use answer::{Ends, Writer};
use format::{ChatFormat, PlainFormat, TemplateFormat};

/// Tokens that a conversation has in sight, unless told, of a model that has positions for more.
const CHAT_CONTEXT: usize = 4096;

pub fn run(arguments: &GenerateArguments) -> anyhow::Result<()> {
    check(arguments)?;
    let target = device::train_target(arguments.device)?;
    let compute = compute_type(arguments, target)?;
    let subject = Subject::open(arguments)?;
    let tokenizer = subject.tokenizer(arguments)?;
    let words = words_of(&subject.config)?;
    let prompter = Prompter::new(&tokenizer, words.as_ref(), &subject.generation_ends()?)?;
    let prompt = match subject.is_pretrained {
        true => prompter.encode(&arguments.prompt)?,
        false => tokenizer.encode(&arguments.prompt)?,
    };
    let options = GeneratorOptions {
        context: arguments.context.unwrap_or(match arguments.chat {
            true => CHAT_CONTEXT,
            false => prompt.len().max(1).saturating_add(arguments.max_tokens),
        }),
        compute,
        adapters: adapter_shape(&subject.config)?,
        target,
        engine: EngineOptions {
            threads: arguments.threads,
            ..EngineOptions::default()
        },
    };
    let generator = subject.generator(&options)?;
    if voice::is_verbose() {
        voice::tell(&describe(&generator));
    }
    let mut writer = Writer {
        generator,
        tokenizer: &tokenizer,
        sampling: Sampling {
            temperature: arguments.temperature,
            top_k: arguments.top_k,
            top_p: arguments.top_p,
            repetition_penalty: arguments.repetition_penalty,
            seed: arguments.seed,
        },
        drawn: 0,
    };
    if arguments.chat {
        return converse(arguments, &mut writer, &prompter, words.as_ref());
    }
    let ends = Ends {
        max_tokens: arguments.max_tokens,
        tokens: prompter.ends().to_vec(),
        texts: Vec::new(),
    };
    match arguments.json {
        true => print_as_json(arguments, &subject.path, &mut writer, prompt, &ends),
        false => print_as_it_comes(arguments, &mut writer, prompt, &ends),
    }
}

fn converse(
    arguments: &GenerateArguments,
    writer: &mut Writer<'_>,
    prompter: &Prompter<'_>,
    words: Option<&TokenizerConfig>,
) -> anyhow::Result<()> {
    let tokenizer = writer.tokenizer;
    let format: &dyn ChatFormat = match words.filter(|words| words.template(false).is_some()) {
        Some(config) => &TemplateFormat { config, prompter },
        None => &PlainFormat { tokenizer },
    };
    let ends = (arguments.max_tokens, prompter.ends());
    chat::talk(writer, format, arguments.system.as_deref(), ends)
}

/// A text begins where another one ended.
fn begun(prompt: Vec<u32>, tokenizer: &Tokenizer) -> Vec<u32> {
    match prompt.is_empty() {
        true => vec![tokenizer.end_of_text().unwrap_or(0)],
        false => prompt,
    }
}

fn print_as_json(
    arguments: &GenerateArguments,
    path: &Path,
    writer: &mut Writer<'_>,
    prompt: Vec<u32>,
    ends: &Ends,
) -> anyhow::Result<()> {
    let num_prompt = prompt.len();
    let mut text = begun(prompt, writer.tokenizer);
    let answer = writer.write(&mut text, ends, &mut |_| Ok(true))?;
    let memory = writer.generator.memory();
    print_json(&json!({
        "checkpoint": cinch_files::shown(path).to_string(),
        "prompt": arguments.prompt,
        "text": answer.text,
        "prompt_tokens": num_prompt,
        "tokens": answer.tokens,
        "seconds_to_first_token": answer.first_after.map(|first| first.as_secs_f64()),
        "tokens_per_second": answer.tokens_per_second(),
        "context": writer.generator.context(),
        "weights_bytes": memory.weights,
        "cache_bytes": memory.cache,
        "transient_bytes": memory.transient,
    }))
}

fn print_as_it_comes(
    arguments: &GenerateArguments,
    writer: &mut Writer<'_>,
    prompt: Vec<u32>,
    ends: &Ends,
) -> anyhow::Result<()> {
    let mut text = begun(prompt, writer.tokenizer);
    let mut out = std::io::stdout().lock();
    out.write_all(arguments.prompt.as_bytes())?;
    let answer = writer.write(&mut text, ends, &mut |piece| {
        out.write_all(piece.as_bytes())?;
        out.flush()?;
        Ok(true)
    })?;
    out.write_all(b"\n")?;
    out.flush()?;
    if !voice::is_quiet() {
        voice::tell(&answer.speed());
    }
    Ok(())
}

/// What is asked: a checkpoint, or a model's folder.
struct Subject {
    path: PathBuf,
    config: Config,
    /// What was trained, or all of it.
    weights: WeightFiles,
    /// What adapters were trained on.
    base: Option<WeightFiles>,
    /// Whether it is known which tokenizer its tokens are of.
    has_tokenizer: bool,
    /// Whether it began with a model's files, and so with texts that begin as their tokenizer
    /// has it.
    is_pretrained: bool,
}

impl Subject {
    fn open(arguments: &GenerateArguments) -> anyhow::Result<Self> {
        let given = &arguments.checkpoint;
        if let Some(folder) = model_folder(given) {
            return Self::of_model(&folder, arguments.tokenizer.is_some());
        }
        if given.join(ADAPTER_CONFIG_FILE).is_file() {
            let given = cinch_files::shown(given);
            return Err(usage(format!(
                "{given} is the folder of an adapter, and its base writes too\n\
                 hint: `cinch merge {given} --to FOLDER` adds one to the other; generate from FOLDER"
            )));
        }
        let path = checkpoint_folder(arguments)?;
        let state = State::from_json(&path, checkpoint::load_state(&path)?)?;
        let is_tuned = state.config.tuning.lora.is_some();
        let first = FirstWeights::of(&state.config)?;
        let is_pretrained = matches!(first, FirstWeights::Files(_));
        let base = match is_tuned {
            false => None,
            true => match first {
                FirstWeights::Files(folder) => Some(open_weights(&state.config, &folder)?),
                FirstWeights::Initial => {
                    return Err(usage(
                        "these adapters were trained on random weights, which are not kept\n\
                         hint: train them on a model's files",
                    ));
                }
            },
        };
        Ok(Self {
            weights: checkpoint::load_weights(&path)?,
            has_tokenizer: !state.of_ids || state.settings.contains_key("data.tokenizer"),
            config: state.config,
            path,
            base,
            is_pretrained,
        })
    }

    fn of_model(folder: &Path, is_named: bool) -> anyhow::Result<Self> {
        let config = described(folder)?;
        if !is_named {
            refuse_foreign_tokenizer(&config, NAME_TOKENIZER)?;
        }
        Ok(Self {
            path: folder.to_owned(),
            config,
            weights: WeightFiles::open(folder)?,
            base: None,
            has_tokenizer: true,
            is_pretrained: true,
        })
    }

    /// The tokenizer that was named, or the subject's own.
    fn tokenizer(&self, arguments: &GenerateArguments) -> anyhow::Result<Tokenizer> {
        let named = arguments.tokenizer.as_ref();
        let named = named.unwrap_or(&self.config.data.tokenizer);
        let spec: TokenizerSpec = match named.parse() {
            Ok(TokenizerSpec::Trained) => TokenizerSpec::File(self.trained_tokenizer()?),
            Ok(spec) => spec,
            Err(never) => match never {},
        };
        let tokenizer = Tokenizer::load(&spec)?;
        let vocabulary = self.config.model.vocab_size();
        let is_named = arguments.tokenizer.is_some() || self.has_tokenizer;
        if !is_named && tokenizer.vocab_size() != vocabulary {
            return Err(usage(format!(
                "{} was trained on ids of another program, which do not say of which tokenizer they \
                 are\n\
                 hint: name it with --tokenizer: gpt2, bytes, or the path of a tokenizer.json",
                cinch_files::shown(&self.path)
            )));
        }
        if tokenizer.vocab_size() > vocabulary {
            return Err(usage(format!(
                "the tokenizer {named} has {} tokens, the model a vocabulary of {vocabulary}\n\
                 hint: name the model's own with --tokenizer",
                tokenizer.vocab_size()
            )));
        }
        Ok(tokenizer)
    }

    fn generator(&self, options: &GeneratorOptions) -> anyhow::Result<Generator> {
        let mut tuned = self.base.as_ref().map(|base| TunedWeights {
            trained: &self.weights,
            base,
        });
        let mut whole = &self.weights;
        let source: &mut dyn WeightSource = match &mut tuned {
            Some(tuned) => tuned,
            None => &mut whole,
        };
        Ok(Generator::new(&self.config.model, source, options)?)
    }

    /// The tokenizer that the run has trained: in the folder of the run, which is that of the
    /// checkpoint's folder.
    fn trained_tokenizer(&self) -> anyhow::Result<PathBuf> {
        let folders = self.path.ancestors().take(3);
        let run = folders.chain([self.config.output.output_dir.as_path()]);
        let mut found = run.map(|folder| folder.join(TOKENIZER_FILE));
        found.find(|path| path.is_file()).ok_or_else(|| {
            usage(format!(
                "the tokenizer that this run has trained is not there: {} is no folder of a run with {TOKENIZER_FILE}\n\
                 hint: name it with --tokenizer",
                cinch_files::shown(&self.path)
            ))
        })
    }

    /// The ids at which the model's folder says to stop.
    fn generation_ends(&self) -> anyhow::Result<Vec<u32>> {
        let folder = self.config.named.folder.as_deref();
        Ok(folder.map_or_else(|| Ok(Vec::new()), generation_ends)?)
    }
}

fn describe(generator: &Generator) -> String {
    let memory = generator.memory();
    format!(
        "on {}: weights {}, cache {} for {} tokens, {} besides",
        generator.describe(),
        Bytes::new(memory.weights),
        Bytes::new(memory.cache),
        generator.context(),
        Bytes::new(memory.transient)
    )
}

fn compute_type(arguments: &GenerateArguments, target: Target) -> anyhow::Result<DType> {
    match (arguments.precision, target) {
        (GeneratePrecision::Fp32, _) => Ok(DType::F32),
        (GeneratePrecision::Bf16, Target::Cuda) => Ok(DType::Bf16),
        (GeneratePrecision::Bf16, Target::Cpu) => Err(usage(
            "--precision bf16 is for GPUs: the CPU generates in fp32\n\
             hint: leave out --precision, or add --device cuda",
        )),
    }
}

fn check(arguments: &GenerateArguments) -> anyhow::Result<()> {
    if arguments.temperature.is_nan() || arguments.temperature < 0.0 {
        return Err(usage(format!(
            "--temperature {} is negative\nhint: 0 takes the likeliest token, 1 follows the model",
            arguments.temperature
        )));
    }
    if !(arguments.top_p > 0.0 && arguments.top_p <= 1.0) {
        return Err(usage(format!(
            "--top-p {} is not a probability\nhint: above 0, up to 1",
            arguments.top_p
        )));
    }
    if arguments.repetition_penalty.is_nan() || arguments.repetition_penalty <= 0.0 {
        return Err(usage(format!(
            "--repetition-penalty {} must be above 0\nhint: 1 is none, 1.2 is usual",
            arguments.repetition_penalty
        )));
    }
    if arguments.context == Some(0) {
        return Err(usage(
            "--context 0 leaves nothing in sight\nhint: leave it out, or give some thousands",
        ));
    }
    Ok(())
}

fn checkpoint_folder(arguments: &GenerateArguments) -> anyhow::Result<PathBuf> {
    let store = open_run(&arguments.checkpoint)?;
    if arguments.best
        && let Some(best) = store.best()?
    {
        return Ok(best.path);
    }
    Ok(checkpoint::resolve(&store, Some(&arguments.checkpoint))?)
}
