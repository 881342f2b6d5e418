//! The run that a log is about, and what changes would save of it: by the planner for cinch, by
//! the replay for PyTorch.

use std::path::Path;

use cinch_config::remedy::{self, RemedyKind};
use cinch_config::{Application, FileChange, Program, Settings};
use cinch_diagnose::{Framework, Known, Log, Priced, Run, Told};
use cinch_fit::FitError;
use cinch_torch::convention::Convention;
use cinch_torch::model::Workload;
use cinch_torch::remedy::remedies;

use crate::args::{DiagnoseArguments, Engine};
use crate::failure::usage;
use crate::pytorch::estimate::{self, Estimate, optimizer_name, precision_name};
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
            Engine::Pytorch => in_torch(arguments, told, &asked),
            Engine::Cinch => in_cinch(&asked, limit),
        }
    });
    match found {
        Ok(run) => Ok(Some(run)),
        // What the user stated must be right; what a log tells may be a stranger's model.
        Err(error) if is_stated => Err(error),
        Err(error) => {
            let reason = error.to_string();
            let reason = reason.lines().next().unwrap_or_default();
            voice::aside(Some(format!("savings are not computed: {reason}")));
            Ok(None)
        }
    }
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
        base.load_text(Path::new(IN_THE_LOG), &as_arguments(told))?;
    }
    let settings = arguments.settings.settings_over(base)?;
    voice::explain(&settings);
    let config = settings.resolve()?;
    let files = arguments.settings.files()?;
    Ok(Asked {
        settings,
        config,
        engine,
        because: None,
        files,
    })
}

/// What the log tells, as a file of TrainingArguments.
fn as_arguments(told: &Told) -> String {
    let mut text = String::new();
    let mut has_batch = false;
    for (known, (value, _)) in &told.settings {
        has_batch |= *known == Known::Batch;
        // A model's name is text; the rest are words and numbers.
        match known {
            Known::Trainable => {}
            Known::Model => text += &format!("{}: {}\n", known.name(), serde_json::json!(value)),
            _ => text += &format!("{}: {value}\n", known.name()),
        }
    }
    if told.settings.contains_key(&Known::LoraRank) {
        text += "use_peft: true\n";
    }
    if !has_batch {
        // By this key the program is known; the value is its default.
        text += "num_train_epochs: 1\n";
    }
    text
}

fn in_torch(arguments: &DiagnoseArguments, told: &Told, asked: &Asked) -> anyhow::Result<Run> {
    let run = TorchRun::new(&arguments.settings, asked)?;
    let mut assumed = run.assumed.clone();
    assumed.extend(contradictions(told, &run.workload));
    let budget = arguments.settings.plain.memory.budget()?;
    let estimate = Estimate::new(&run.workload, estimate::overhead(budget.as_ref()))?;
    let found = remedies(&run.workload, &estimate.overhead)?;
    let priced = found
        .iter()
        .map(|remedy| Priced {
            kind: remedy.kind,
            change: remedy.change.clone(),
            saves: -remedy.device,
            leaves: remedy.totals.device,
            safe: remedy.totals.safe,
            command: command(asked, &run.workload, &remedy.workload, remedy.kind),
        })
        .collect();
    Ok(Run {
        title: format!(
            "{} ({})",
            run.name,
            estimate::settings_text(&run.workload, &run.alloc_conf)
        ),
        by: "the replay of PyTorch",
        predicted: estimate.device_bytes,
        card: budget.map(|budget| budget.capacity),
        priced,
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

/// The exact lines: of the user's file, or as arguments of a Trainer.
fn command(asked: &Asked, before: &Workload, after: &Workload, kind: RemedyKind) -> Option<String> {
    let values = changed(asked, before, after, kind);
    if !asked.files.is_empty() && !values.is_empty() {
        let changes: Option<Vec<FileChange>> = values
            .iter()
            .map(|(key, value)| FileChange::parse(key, value).ok())
            .collect();
        let application = Application::prepare(&asked.files, &changes?).ok()?;
        let lines: Vec<String> = application
            .diff()
            .lines()
            .filter(|line| line.starts_with('+') && !line.starts_with("+++"))
            .map(|line| line[1..].trim().to_owned())
            .collect();
        if application.unplaced().is_empty() && !lines.is_empty() {
            return Some(lines.join("\n"));
        }
    }
    let is_trainer = before.recipe.convention == Convention::Trainer;
    let text = match kind {
        RemedyKind::ExpandableSegments => {
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True".to_owned()
        }
        RemedyKind::MicroBatch if is_trainer => format!(
            "per_device_train_batch_size={}, gradient_accumulation_steps={}",
            after.batch, after.recipe.accumulation
        ),
        RemedyKind::MicroBatch => format!(
            "batch_size={}, gradient_accumulation_steps={}",
            after.batch, after.recipe.accumulation
        ),
        RemedyKind::Recomputation if is_trainer => {
            "gradient_checkpointing=True, gradient_checkpointing_kwargs={\"use_reentrant\": False}"
                .to_owned()
        }
        RemedyKind::Recomputation => {
            "torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)".to_owned()
        }
        RemedyKind::SequenceLength if is_trainer => format!("max_length={}", after.length),
        RemedyKind::SequenceLength => format!("max_seq_len={}", after.length),
        RemedyKind::Bf16 if is_trainer => "bf16=True".to_owned(),
        RemedyKind::Bf16 => "with torch.autocast(\"cuda\", dtype=torch.bfloat16):".to_owned(),
        RemedyKind::Fp16 if is_trainer => "fp16=True".to_owned(),
        RemedyKind::Fp16 => "with torch.autocast(\"cuda\", dtype=torch.float16):".to_owned(),
        RemedyKind::Bf16Weights => "model.to(torch.bfloat16)".to_owned(),
        RemedyKind::FusedOptimizer if is_trainer => "optim=\"adamw_torch_fused\"".to_owned(),
        RemedyKind::FusedOptimizer => "torch.optim.AdamW(parameters, fused=True)".to_owned(),
        RemedyKind::EightBitStates if is_trainer => "optim=\"adamw_bnb_8bit\"".to_owned(),
        RemedyKind::EightBitStates => "bitsandbytes.optim.AdamW8bit(parameters)".to_owned(),
        RemedyKind::PlainSgd => "torch.optim.SGD(parameters, momentum=0)".to_owned(),
        RemedyKind::FusedAttention => "attn_implementation=\"sdpa\"".to_owned(),
        RemedyKind::Adapters => format!(
            "LoraConfig(r={}, target_modules=\"all-linear\")",
            after.lora.as_ref()?.rank
        ),
        RemedyKind::AdapterRank => format!("LoraConfig(r={})", after.lora.as_ref()?.rank),
        _ => return None,
    };
    Some(text)
}

/// The settings that a change writes, with their values, as the file's program takes them.
fn changed(
    asked: &Asked,
    before: &Workload,
    after: &Workload,
    kind: RemedyKind,
) -> Vec<(&'static str, String)> {
    let is_foreign = asked.settings.program() == Some(Program::PyTorch);
    match kind {
        RemedyKind::MicroBatch => vec![
            (remedy::BATCH_SIZE, after.batch.to_string()),
            (remedy::ACCUMULATION, after.recipe.accumulation.to_string()),
        ],
        RemedyKind::Recomputation => vec![(remedy::CHECKPOINTING, "full".to_owned())],
        RemedyKind::SequenceLength => vec![(remedy::SEQUENCE, after.length.to_string())],
        RemedyKind::FusedOptimizer | RemedyKind::EightBitStates | RemedyKind::PlainSgd
            if is_foreign =>
        {
            vec![(
                remedy::TORCH_OPTIMIZER,
                optimizer_name(after.recipe.optimizer).to_owned(),
            )]
        }
        RemedyKind::Bf16 | RemedyKind::Fp16 | RemedyKind::Bf16Weights
            if is_foreign && before.recipe.precision != after.recipe.precision =>
        {
            vec![(
                remedy::TORCH_PRECISION,
                precision_name(after.recipe.precision).to_owned(),
            )]
        }
        _ => Vec::new(),
    }
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
        assumed: Vec::new(),
    })
}
