//! The run that a log is about, and what changes would save of it: by the planner for cinch, by
//! the replay for PyTorch.

use std::path::Path;

use cinch_config::remedy;
use cinch_config::{ConfigError, Settings};
use cinch_diagnose::{Framework, Known, Log, Numbers, Priced, Run, Spelling, Told};
use cinch_fit::FitError;
use cinch_torch::convention::Convention;
use cinch_torch::model::Workload;
use cinch_torch::remedy::remedies;

use super::together::{is_enough, together};
use super::wording::Wording;
use crate::args::{DiagnoseArguments, Engine};
use crate::failure::usage;
use crate::memory::Budget;
use crate::pytorch::estimate::{self, Estimate};
use crate::pytorch::workload::Run as TorchRun;
use crate::settings::Asked;
use crate::{overhead, voice};

/// What a log's own settings are called in messages; the ending says how they are written.
const IN_THE_LOG: &str = "the log.yaml";

/// The run, where a config, flags or the log name one.
pub fn of(arguments: &DiagnoseArguments, log: &Log) -> anyhow::Result<Option<Run>> {
    let incidents = log.incidents();
    let Some(first) = incidents.first() else {
        return Ok(None);
    };
    let plain = &arguments.settings.plain;
    let has_file = plain.config.is_some() || plain.config_path.is_some();
    let has_model = arguments.settings.value("model.type").is_some()
        || arguments.settings.value("model.size").is_some();
    let is_stated = has_file || has_model;
    let told = log.told();
    let is_told = told.settings.contains_key(&Known::Model);
    if !is_stated && !is_told {
        return Ok(None);
    }
    let engine = arguments.engine.unwrap_or(match first.message.framework {
        Framework::Cinch => Engine::Cinch,
        _ => Engine::Pytorch,
    });
    let limit = first.message.numbers.limit;
    let found = asked(arguments, told, engine, has_file).and_then(|asked| {
        if !is_stated {
            says_enough(&asked, told)?;
        }
        match engine {
            Engine::Pytorch => in_torch(arguments, told, &asked, &first.message.numbers),
            Engine::Cinch => in_cinch(&asked, limit),
        }
    });
    match found {
        Ok(run) => Ok(Some(run)),
        // What the user stated must be right, and may be right and not predicted; what a log tells may
        // be a stranger's model.
        Err(error) if is_stated && !is_not_predicted(&error) => Err(error),
        Err(error) => {
            let reason = error.to_string();
            let reason = reason.lines().next().unwrap_or_default();
            voice::aside(Some(format!("savings are not computed: {reason}")));
            Ok(None)
        }
    }
}

/// Whether a file says what its program does and what is not computed here: the log is diagnosed
/// all the same.
fn is_not_predicted(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(ConfigError::NotComputed { .. }))
}

/// A log seldom tells all of a run, and a figure for another one would mislead.
fn says_enough(asked: &Asked, told: &Told) -> anyhow::Result<()> {
    for (key, flag) in [
        (remedy::BATCH_SIZE, "--batch-size"),
        (remedy::SEQUENCE, "--seq-len"),
    ] {
        if !asked.settings.is_explicit(key) {
            return Err(usage(format!(
                "the log does not tell {key}\nhint: say {flag}"
            )));
        }
    }
    let trainable = told
        .settings
        .get(&Known::Trainable)
        .and_then(|(text, _)| text.parse::<u64>().ok());
    let all = asked.config.model.parameters();
    match trainable {
        Some(trainable) if trainable < all / 10 * 9 && asked.config.tuning.lora.is_none() => {
            Err(usage(format!(
                "the log tells {trainable} trainable parameters of {all}, and no adapters\nhint: say --lora-rank"
            )))
        }
        _ => Ok(()),
    }
}

fn asked(
    arguments: &DiagnoseArguments,
    told: &Told,
    engine: Engine,
    has_file: bool,
) -> anyhow::Result<Asked> {
    let mut base = Settings::new();
    if !has_file && engine == Engine::Pytorch && !told.settings.is_empty() {
        base.load_text(Path::new(IN_THE_LOG), &as_file(told))?;
    }
    let settings = arguments.settings.settings_over(base)?;
    voice::explain(&settings);
    let config = settings.resolve()?;
    if engine == Engine::Pytorch {
        settings.refuse_not_predicted()?;
    }
    let files = arguments.settings.files()?;
    Ok(Asked {
        settings,
        config,
        engine,
        because: None,
        files,
    })
}

/// What the log tells, as a file of the program that wrote it: what such a file leaves out is then
/// taken as that program takes it.
fn as_file(told: &Told) -> String {
    let spelling = Spelling::of(&told.programs);
    let mut text = String::new();
    for (known, (value, _)) in &told.settings {
        let name = match (spelling, known) {
            (_, Known::Trainable) => continue,
            (Spelling::Axolotl, Known::Model) => "base_model",
            (Spelling::Axolotl, Known::Batch) => "micro_batch_size",
            (Spelling::Axolotl, Known::Length) => "sequence_len",
            (Spelling::Axolotl, Known::Optimizer) => "optimizer",
            (Spelling::LlamaFactory, Known::Length) => "cutoff_len",
            (Spelling::LlamaFactory, Known::LoraRank) => "lora_rank",
            (_, known) => known.name(),
        };
        // A model's name is text; the rest are words and numbers.
        text += &match known {
            Known::Model => format!("{name}: {}\n", serde_json::json!(value)),
            _ => format!("{name}: {value}\n"),
        };
    }
    let has = |known| told.settings.contains_key(&known);
    let has_rank = has(Known::LoraRank);
    text += match spelling {
        Spelling::Axolotl if has(Known::FourBit) && has_rank => {
            "adapter: qlora\nlora_target_linear: true\n"
        }
        Spelling::Axolotl if has_rank => "adapter: lora\nlora_target_linear: true\n",
        Spelling::LlamaFactory if has_rank => "stage: sft\nfinetuning_type: lora\n",
        Spelling::LlamaFactory => "stage: sft\n",
        _ if has_rank => "use_peft: true\n",
        _ => "",
    };
    if !has(Known::Batch) && !matches!(spelling, Spelling::Axolotl | Spelling::LlamaFactory) {
        // By this key the program is known; the value is its default.
        text += "num_train_epochs: 1\n";
    }
    text
}

fn in_torch(
    arguments: &DiagnoseArguments,
    told: &Told,
    asked: &Asked,
    numbers: &Numbers,
) -> anyhow::Result<Run> {
    let budget = arguments.settings.plain.memory.budget()?;
    let card = budget.as_ref().and_then(Budget::known_card);
    let run = TorchRun::new(&arguments.settings, asked, card)?;
    let mut assumed = run.assumed.clone();
    assumed.extend(contradictions(told, &run.workload));
    let estimate = Estimate::new(&run.workload, estimate::overhead(budget.as_ref()))?;
    let found = remedies(&run.workload, &estimate.overhead)?;
    let spelling = match (run.workload.recipe.convention, Spelling::of(&told.programs)) {
        (Convention::PlainLoop, Spelling::Trainer) => Spelling::Loop,
        (_, spelling) => spelling,
    };
    let wording = Wording { asked, spelling };
    let priced: Vec<Priced> = found
        .iter()
        .map(|remedy| Priced {
            kind: remedy.kind,
            change: remedy.change.clone(),
            saves: -remedy.device,
            leaves: remedy.totals.device,
            safe: remedy.totals.safe,
            command: wording.lines(&run.workload, &remedy.workload, &[remedy.kind]),
        })
        .collect();
    let card = budget.map(|budget| budget.capacity);
    let total = numbers.limit.or(numbers.total).or(card);
    // What others hold stays theirs.
    let room = total.map(|total| total.saturating_sub(numbers.other.unwrap_or(0)));
    let together = room
        .filter(|room| estimate.device_bytes > *room && !is_enough(&priced, *room))
        .and_then(|room| together(&run.workload, estimate.overhead, room, &wording));
    Ok(Run {
        title: format!(
            "{} ({})",
            run.name,
            estimate::settings_text(&run.workload, &run.alloc_conf)
        ),
        by: "the replay of PyTorch",
        predicted: estimate.device_bytes,
        card,
        priced,
        together,
        assumed,
    })
}

/// Where the log tells another run than the config: the log is what ran.
fn contradictions(told: &Told, workload: &Workload) -> Vec<String> {
    let pairs = [
        (Known::Batch, workload.batch),
        (Known::Accumulation, u64::from(workload.recipe.accumulation)),
        (Known::Length, workload.length),
    ];
    let differs = |(known, value): &(Known, u64)| {
        let (text, line) = told.settings.get(known)?;
        let in_log: u64 = text.parse().ok()?;
        (in_log != *value).then(|| {
            format!(
                "{} is {value} here, and line {line} of the log says {in_log}",
                known.name()
            )
        })
    };
    pairs.iter().filter_map(differs).collect()
}

/// cinch's own plan of the run, and the changes with which it fits.
fn in_cinch(asked: &Asked, limit: Option<u64>) -> anyhow::Result<Run> {
    let mut config = asked.config.clone();
    let target = crate::device::plan_target(crate::args::Device::Auto, &config, false);
    if target == cinch_graph::Target::Cpu {
        crate::device::adapt_to_cpu(&mut config);
    }
    config.batch.budget = limit.map(cinch_config::Bytes::new).or(config.batch.budget);
    let machine = overhead::machine(target);
    let title = config.model_title();
    let (predicted, priced) = match cinch_fit::plan(&config, machine) {
        Ok(step) => (step.total_bytes(), Vec::new()),
        Err(FitError::DoesNotFit(answer)) => {
            let needed = answer.needed_bytes;
            let priced = answer.changes.iter().map(|change| Priced {
                kind: change.kind,
                change: change.change.clone(),
                saves: needed as i64 - change.bytes as i64,
                leaves: change.bytes,
                safe: change.bytes,
                command: Some(format!("cinch train {}", change.change)),
            });
            (needed, priced.collect())
        }
        Err(error) => return Err(error.into()),
    };
    Ok(Run {
        title,
        by: "the planner",
        predicted,
        card: None,
        priced,
        together: None,
        assumed: Vec::new(),
    })
}
