//! `cinch fit --engine pytorch`: the settings with which a PyTorch run fits a card.

use std::path::PathBuf;

use cinch_config::{Bytes, Settings, Source};
use cinch_fit::search::SettingValue;
use cinch_torch::TorchError;
use cinch_torch::choose::{Choice, Limits, Permissions, choose};
use cinch_torch::eager::optimizer::Optimizer;
use cinch_torch::eager::training::Precision;
use cinch_torch::remedy::{Remedy, remedies};
use serde_json::json;

use super::estimate::{
    self, Estimate, checkpointing_name, precision_name, settings_json, settings_text,
};
use super::workload::Run;
use super::{course, refuse_flags_of_cinch, show};
use crate::args::{Allowed, Device, FitArguments, given};
use crate::command::fit::{Written, apply, files_to_write};
use crate::command::{print, print_json};
use crate::failure::usage;
use crate::memory::{self, Budget};
use crate::picture;
use crate::progress::Waiting;

pub fn run(arguments: &FitArguments) -> anyhow::Result<()> {
    refuse_flags_of_cinch(&given(&[
        ("--tf32", arguments.tf32),
        ("--guide", arguments.guide),
        ("--profile", arguments.profile),
        ("--front-picture", !arguments.front_picture.is_empty()),
        ("--device cpu", arguments.device == Device::Cpu),
        (
            "--allow seq-len",
            arguments.allow.contains(&Allowed::SequenceLength),
        ),
    ]))?;
    if arguments.torch.ranks.is_some() {
        return Err(usage(
            "--ranks: settings are chosen for one GPU\n\
             hint: `cinch plan --engine pytorch` tells the sizes of each rank",
        ));
    }
    // Before the search, so that nothing is computed for a file that is not there.
    let files = files_to_write(arguments)?;
    let run = Run::read(&arguments.settings, &arguments.torch)?;
    let budget = match (arguments.settings.memory.budget()?, run.config.batch.budget) {
        (Some(budget), _) => budget,
        (None, Some(size)) => Budget::of_size(size.get(), "vram.budget")?,
        (None, None) => memory::detected_now()?,
    };
    if budget.gpu.is_none() {
        return Err(usage(
            "there is no GPU here to fit for\n\
             hint: name one with --gpu \"RTX 4090\", or its size with --gpu-memory 24",
        ));
    }
    let limits = Limits {
        budget_bytes: budget.bytes,
        overhead: estimate::overhead(Some(&budget)),
        effective_batch: match arguments.target_effective_batch {
            Some(rows) => rows as u64,
            None => run.workload.batch * u64::from(run.workload.recipe.accumulation),
        },
        may: permissions(arguments, &run.settings),
    };
    let waiting = Waiting::new("replaying runs to find one that fits");
    let choice = choose(&run.workload, &limits);
    if let (true, Err(TorchError::DoesNotFit { budget, needed, .. })) = (arguments.json, &choice) {
        print_json(&json!({
            "engine": "pytorch",
            "fits": false,
            "model": run.name,
            "budget_bytes": budget,
            "needed_bytes": needed,
        }))?;
    }
    let choice = choice?;
    let fitted = Fitted::new(&run, &limits, choice)?;
    drop(waiting);
    if !arguments.picture.is_empty() {
        let mut step = fitted.picture(&run)?;
        step.budget_bytes = Some(budget.bytes);
        step.capacity_bytes = Some(budget.capacity);
        for path in &arguments.picture {
            picture::write(&cinch_report::timeline(&step), path)?;
        }
    }
    if !arguments.json {
        print(&fitted.text(&run, &budget))?;
    }
    let applied = files
        .map(|files| fitted.apply(arguments, &files, &run.settings))
        .transpose()?;
    match arguments.json {
        true => print_json(&fitted.json(&run, &budget, applied.as_ref())),
        false => Ok(()),
    }
}

/// What was typed now stays as it is. States in eight bits come last, as for cinch's own engine;
/// another precision only where that is allowed.
fn permissions(arguments: &FitArguments, settings: &Settings) -> Permissions {
    let torch = &arguments.torch;
    let typed = |key: &str| {
        settings.explain().iter().any(|one| {
            one.key == key && matches!(one.source, Source::Flag(_) | Source::Environment(_))
        })
    };
    let allows = |what| arguments.allow.contains(&what);
    Permissions {
        checkpointing: !typed("vram.checkpointing"),
        expandable_segments: torch.alloc_conf.is_none(),
        fused_optimizer: torch.optimizer.is_none(),
        optimizer_8bit: torch.optimizer.is_none() && !arguments.strict,
        precision: allows(Allowed::Precision)
            && torch.torch_precision.is_none()
            && !typed("vram.precision"),
    }
}

/// The chosen run, with its figures.
struct Fitted {
    choice: Choice,
    estimate: Estimate,
    alloc_conf: String,
    /// From there, each alone.
    remedies: Vec<Remedy>,
    effective_batch: u64,
}

impl Fitted {
    fn new(run: &Run, limits: &Limits, choice: Choice) -> Result<Self, TorchError> {
        let was = run.workload.allocator.expandable_segments;
        let alloc_conf = match choice.workload.allocator.expandable_segments && !was {
            true if run.alloc_conf.is_empty() => "expandable_segments:True".to_owned(),
            true => format!("{},expandable_segments:True", run.alloc_conf),
            false => run.alloc_conf.clone(),
        };
        Ok(Self {
            estimate: Estimate::new(&choice.workload, limits.overhead)?,
            remedies: remedies(&choice.workload, &limits.overhead)?,
            effective_batch: limits.effective_batch,
            alloc_conf,
            choice,
        })
    }

    /// The settings that a configuration file can hold, as the user would write them.
    fn values(&self) -> Vec<SettingValue> {
        let workload = &self.choice.workload;
        let precision = match workload.recipe.precision {
            Precision::Float32 => "fp32",
            Precision::AutocastBFloat16 | Precision::BFloat16 => "bf16",
            Precision::AutocastFloat16 | Precision::Float16 => "fp16",
        };
        let states = match workload.recipe.optimizer {
            Optimizer::Adam8Bit => "8bit",
            _ => "fp32",
        };
        let value = |key, value: String| SettingValue {
            key,
            value: Some(value),
        };
        vec![
            value("vram.batch_size", workload.batch.to_string()),
            value(
                "vram.gradient_accumulation_steps",
                workload.recipe.accumulation.to_string(),
            ),
            value(
                "vram.checkpointing",
                checkpointing_name(workload.checkpoints).to_owned(),
            ),
            value("vram.precision", precision.to_owned()),
            value("vram.optimizer_states", states.to_owned()),
        ]
    }

    /// What a configuration file has no word for.
    fn unwritten(&self, run: &Run) -> Vec<String> {
        let (before, after) = (&run.workload, &self.choice.workload);
        let mut sentences = Vec::new();
        if self.alloc_conf != run.alloc_conf {
            sentences.push(format!(
                "set PYTORCH_ALLOC_CONF={} in the environment of the run",
                self.alloc_conf
            ));
        }
        let fused = |optimizer| estimate::optimizer_name(optimizer) == "adamw_fused";
        if fused(after.recipe.optimizer) && !fused(before.recipe.optimizer) {
            sentences.push("give AdamW the argument fused=True".to_owned());
        }
        let is_half = after.recipe.precision.weights() != Precision::Float32.weights();
        if is_half && after.recipe.precision != before.recipe.precision {
            sentences.push(format!(
                "the model itself is in {}, not under autocast",
                precision_name(after.recipe.precision)
            ));
        }
        sentences
    }

    fn picture(&self, run: &Run) -> anyhow::Result<cinch_report::StepPicture> {
        let chosen = Run {
            name: run.name.clone(),
            workload: self.choice.workload.clone(),
            alloc_conf: self.alloc_conf.clone(),
            settings: run.settings.clone(),
            config: run.config.clone(),
            assumed: Vec::new(),
        };
        let alive = chosen.outline().profile()?.alive;
        Ok(course::picture(&chosen, &self.estimate, &alive)?)
    }

    fn text(&self, run: &Run, budget: &Budget) -> String {
        let mut text = format!(
            "{} in eager PyTorch on {}\nbudget {} of {} ({})\n\nrecommended: {}\n",
            run.name,
            budget.whose,
            Bytes::new(budget.bytes),
            Bytes::new(budget.capacity),
            budget.flag,
            settings_text(&self.choice.workload, &self.alloc_conf)
        );
        text += &show::memory(&self.estimate);
        text += &format!(
            "the safe figure is {:.1} % of the budget\n",
            100.0 * self.choice.safe_bytes as f64 / budget.bytes as f64
        );
        match &self.choice.changes[..] {
            [] => text += "nothing changes: these are the settings already\n",
            changes => {
                for change in changes {
                    text += &format!("changed: {change}\n");
                }
            }
        }
        if let Some(next) = &self.choice.next {
            text += &match next.safe_bytes {
                Some(bytes) => format!(
                    "a micro batch of {} would need {}\n",
                    next.batch,
                    Bytes::new(bytes)
                ),
                None => format!("a micro batch of {} is too large to replay\n", next.batch),
            };
        }
        for sentence in self.unwritten(run) {
            text += &format!("by hand: {sentence}\n");
        }
        text += &show::assumed(&run.assumed);
        text += &super::remedies::table(&self.remedies);
        text
    }

    fn json(&self, run: &Run, budget: &Budget, applied: Option<&Written>) -> serde_json::Value {
        let values: serde_json::Map<_, _> = self
            .values()
            .into_iter()
            .map(|one| (one.key.to_owned(), json!(one.value)))
            .collect();
        json!({
            "engine": "pytorch",
            "fits": true,
            "model": run.name,
            "effective_batch": self.effective_batch,
            "settings": settings_json(&self.choice.workload, &self.alloc_conf),
            "memory": self.estimate.memory_json(),
            "budget_bytes": budget.bytes,
            "values": values,
            "changes": self.choice.changes,
            "by_hand": self.unwritten(run),
            "next": self.choice.next.as_ref().map(|next| json!({
                "batch_size": next.batch,
                "safe_bytes": next.safe_bytes,
            })),
            "remedies": super::remedies::as_json(&self.remedies),
            "assumed": run.assumed,
            "applied": applied,
        })
    }

    fn apply(
        &self,
        arguments: &FitArguments,
        files: &[PathBuf],
        settings: &Settings,
    ) -> anyhow::Result<Written> {
        apply(arguments, files, settings, &self.values())
    }
}
