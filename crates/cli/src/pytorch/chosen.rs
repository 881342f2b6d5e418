//! `cinch fit --engine pytorch`: the settings with which a PyTorch run fits a card.

use cinch_config::remedy::{self, RemedyKind};
use cinch_config::{Bytes, Program, Settings, Source};
use cinch_fit::search::SettingValue;
use cinch_torch::TorchError;
use cinch_torch::choose::{Choice, Limits, Permissions, choose};
use cinch_torch::eager::optimizer::Optimizer;
use cinch_torch::eager::training::Precision;
use cinch_torch::remedy::{Remedy, remedies};
use cinch_torch::sharding::Shares;
use serde_json::json;

use super::estimate::{
    self, Estimate, checkpointing_name, precision_name, settings_json, settings_text,
};
use super::workload::Run;
use super::{course, read_as, refuse_flags_of_cinch, sharded, show};
use crate::args::{Allowed, Device, FitArguments, given};
use crate::command::fit::{Written, apply, files_to_write};
use crate::command::init::Fitting;
use crate::command::{ahead, print, print_json};
use crate::failure::usage;
use crate::memory::{self, Budget};
use crate::picture;
use crate::progress::Waiting;
use crate::settings::Asked;
use crate::table::counted;

pub fn run(arguments: &FitArguments, asked: &Asked) -> anyhow::Result<()> {
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
    // Before the search, so that nothing is computed for a file that is not there.
    let files = files_to_write(arguments, asked)?;
    let budget = budget(arguments, asked)?;
    let run = Run::new(&arguments.settings, asked, budget.known_card())?;
    let limits = limits(arguments, &run, &budget)?;
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
        ahead(print(&fitted.text(arguments, &run, &budget)))?;
    }
    let applied = files
        .map(|files| apply(arguments, &files, &run.settings, &fitted.values(&run)))
        .transpose()?;
    match arguments.json {
        true => print_json(&fitted.json(&run, &budget, applied.as_ref())),
        false => Ok(()),
    }
}

/// What fits best, for `cinch init` to write down.
pub fn fitting(arguments: &FitArguments, asked: &Asked) -> anyhow::Result<Fitting> {
    let budget = budget(arguments, asked)?;
    let run = Run::new(&arguments.settings, asked, budget.known_card())?;
    let limits = limits(arguments, &run, &budget)?;
    let waiting = Waiting::new("replaying runs to find one that fits");
    let choice = choose(&run.workload, &limits)?;
    let fitted = Fitted::new(&run, &limits, choice)?;
    drop(waiting);
    Ok(Fitting {
        values: fitted.all_values(),
        bytes: fitted.choice.safe_bytes,
        budget,
    })
}

/// What each GPU of a run may take, and what may be chosen for it.
fn limits(arguments: &FitArguments, run: &Run, budget: &Budget) -> anyhow::Result<Limits> {
    let division = sharded::division(&run.config.torch);
    let ranks = division.map_or(1, |division| division.ranks.get());
    Ok(Limits {
        budget_bytes: budget.bytes,
        overhead: estimate::overhead(Some(budget)),
        effective_batch: match arguments.target_effective_batch {
            Some(rows) => of_each_rank(rows as u64, ranks)?,
            None => run.workload.batch * u64::from(run.workload.recipe.accumulation),
        },
        may: permissions(arguments, &run.settings),
        division,
    })
}

/// The memory to fit: by flags, by the configuration, else that of this machine's GPU.
fn budget(arguments: &FitArguments, asked: &Asked) -> anyhow::Result<Budget> {
    let budget = match (
        arguments.settings.plain.memory.budget()?,
        asked.config.batch.budget,
    ) {
        (Some(budget), _) => budget,
        (None, Some(size)) => Budget::of_size(size.get(), "vram.budget")?,
        (None, None) => memory::detected_now()?,
    }
    .of_pytorch();
    if budget.gpu.is_none() {
        return Err(usage(
            "there is no GPU here to fit for\n\
             hint: name one with --gpu \"RTX 4090\", or its size with --gpu-memory 24",
        ));
    }
    Ok(budget)
}

/// Rows of each rank's step.
fn of_each_rank(rows: u64, ranks: u64) -> anyhow::Result<u64> {
    if rows.is_multiple_of(ranks) {
        return Ok(rows / ranks);
    }
    let below = rows - rows % ranks;
    let near = match below {
        0 => ranks.to_string(),
        _ => format!("{below} or {}", below + ranks),
    };
    Err(usage(format!(
        "--target-effective-batch {rows} is not a multiple of the {ranks} ranks of this run\n\
         hint: {near} is"
    )))
}

/// What was typed now stays as it is. States in eight bits come last, as for cinch's own engine;
/// another precision only where that is allowed.
fn permissions(arguments: &FitArguments, settings: &Settings) -> Permissions {
    let explained = settings.explain();
    let typed = |kind: RemedyKind| {
        explained.iter().any(|one| {
            kind.writes(one.key) && matches!(one.source, Source::Flag(_) | Source::Environment(_))
        })
    };
    let allows = |what| arguments.allow.contains(&what);
    Permissions {
        checkpointing: !typed(RemedyKind::Recomputation),
        expandable_segments: !typed(RemedyKind::ExpandableSegments),
        // Another optimizer than AdamW is the user's choice, in a file as well.
        fused_optimizer: !settings.is_explicit(remedy::TORCH_OPTIMIZER),
        optimizer_8bit: !typed(RemedyKind::EightBitStates) && !arguments.strict,
        precision: allows(Allowed::Precision) && !typed(RemedyKind::Bf16),
    }
}

/// The chosen run, with its figures.
struct Fitted {
    choice: Choice,
    estimate: Estimate,
    alloc_conf: String,
    /// From there, each alone; none of a run on several ranks.
    remedies: Vec<Remedy>,
    /// Of all ranks.
    effective_batch: u64,
    shares: Option<Shares>,
}

/// The word of a precision under autocast; none where the weights are in it too.
fn plain_precision(precision: Precision) -> Option<&'static str> {
    match precision {
        Precision::Float32 => Some("fp32"),
        Precision::AutocastBFloat16 => Some("bf16"),
        Precision::AutocastFloat16 => Some("fp16"),
        Precision::BFloat16
        | Precision::Float16
        | Precision::BFloat16UnderAutocast
        | Precision::Float16UnderAutocast => None,
    }
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
            remedies: match limits.division {
                None => remedies(&choice.workload, &limits.overhead)?,
                Some(_) => Vec::new(),
            },
            effective_batch: limits.effective_batch
                * limits.division.map_or(1, |division| division.ranks.get()),
            shares: limits
                .division
                .map(|division| division.shares(&choice.workload))
                .transpose()?,
            alloc_conf,
            choice,
        })
    }

    /// The settings that changed and that a configuration file can hold, as the user would write
    /// them. What another program names is named by its own setting, what cinch's files name by
    /// theirs.
    fn values(&self, run: &Run) -> Vec<SettingValue> {
        let (before, after) = (&run.workload, &self.choice.workload);
        let own = run.settings.program() != Some(Program::PyTorch);
        let mut values = Vec::new();
        let mut value = |key, value: &str| {
            values.push(SettingValue {
                key,
                value: Some(value.to_owned()),
            });
        };
        value(remedy::BATCH_SIZE, &after.batch.to_string());
        value(remedy::ACCUMULATION, &after.recipe.accumulation.to_string());
        let checkpointing = checkpointing_name(after.checkpoints);
        if own || before.checkpoints.is_on() != after.checkpoints.is_on() {
            value(remedy::CHECKPOINTING, checkpointing);
        }
        let precision = after.recipe.precision;
        if before.recipe.precision != precision {
            // Our own key means autocast; weights in another type have a key of their own.
            match plain_precision(precision).filter(|_| own) {
                Some(word) => value(remedy::PRECISION, word),
                None => value(remedy::TORCH_PRECISION, precision_name(precision)),
            }
        }
        let optimizer = after.recipe.optimizer;
        match own {
            true if optimizer == Optimizer::Adam8Bit => value(remedy::OPTIMIZER_STATES, "8bit"),
            true => value(remedy::OPTIMIZER_STATES, "fp32"),
            false if before.recipe.optimizer != optimizer => {
                value(remedy::TORCH_OPTIMIZER, estimate::optimizer_name(optimizer));
            }
            false => {}
        }
        values
    }

    /// All that decides the run's memory, whatever was stated before, for a file that is new.
    fn all_values(&self) -> Vec<SettingValue> {
        let workload = &self.choice.workload;
        let recipe = &workload.recipe;
        let mut values = vec![
            (remedy::BATCH_SIZE, workload.batch.to_string()),
            (remedy::ACCUMULATION, recipe.accumulation.to_string()),
            (remedy::SEQUENCE, workload.length.to_string()),
            (
                remedy::CHECKPOINTING,
                checkpointing_name(workload.checkpoints).to_owned(),
            ),
            (
                remedy::TORCH_PRECISION,
                precision_name(recipe.precision).to_owned(),
            ),
            (
                remedy::TORCH_OPTIMIZER,
                estimate::optimizer_name(recipe.optimizer).to_owned(),
            ),
        ];
        if !self.alloc_conf.is_empty() {
            values.push((remedy::ALLOC_CONF, self.alloc_conf.clone()));
        }
        let value = |(key, value)| SettingValue {
            key,
            value: Some(value),
        };
        values.into_iter().map(value).collect()
    }

    /// What is not the same where a step is cut otherwise than it was.
    fn other_cut(&self, run: &Run) -> Option<String> {
        let (stated, found) = (run.workload.batch, self.choice.workload.batch);
        let model = &run.workload.architecture;
        let why = match (
            model.depends_on_micro_batch(),
            model.mean_of_micro_batches(),
        ) {
            (Some(why), _) => format!("micro batch {found} instead of {stated}: {why}"),
            (None, Some(part)) => format!("{part}, of {found} instead of {stated}"),
            (None, None) => return None,
        };
        (stated != found).then(|| format!("{why}: training is not quite the same"))
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
            because: None,
        };
        let alive = chosen.outline().profile()?.alive;
        Ok(course::picture(&chosen, &self.estimate, &alive)?)
    }

    /// The answer first; the rest with `--details`.
    fn text(&self, arguments: &FitArguments, run: &Run, budget: &Budget) -> String {
        let mut text = format!(
            "{}: {}\n",
            run.name,
            settings_text(&self.choice.workload, &self.alloc_conf)
        );
        let each = match &self.shares {
            None => String::new(),
            Some(shares) => {
                text += &format!(
                    "on {} by {}: {} sequences a step in all\n",
                    counted(shares.ranks.get(), "rank"),
                    shares.scheme.name(),
                    self.effective_batch
                );
                "each ".to_owned()
            }
        };
        text += &format!(
            "{each}needs {} to be safe, {:.0} % of the budget of {} ({})\n",
            Bytes::new(self.choice.safe_bytes),
            100.0 * self.choice.safe_bytes as f64 / budget.bytes as f64,
            Bytes::new(budget.bytes),
            budget.explained(),
        );
        text += &match &self.choice.changes[..] {
            [] => "nothing changes: these are the settings already\n".to_owned(),
            changes => format!("changed: {}\n", changes.join("; ")),
        };
        if let Some(note) = self.other_cut(run) {
            text += &format!("note: {note}\n");
        }
        for sentence in self.unwritten(run) {
            text += &format!("by hand: {sentence}\n");
        }
        text += &read_as::text(run);
        if let Some(certainty) = read_as::certainty(&run.settings) {
            text += &format!("the figure is {certainty}\n");
        }
        text += &show::assumed(&run.assumed);
        if !arguments.details {
            text += "more: --details shows the parts, the next larger batch and each remedy\n";
            return text;
        }
        match &self.shares {
            None => text += &show::memory(&self.estimate),
            Some(shares) => text += &sharded::text(shares),
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
        if self.shares.is_none() {
            text += &super::remedies::table(&self.remedies);
        }
        text
    }

    fn json(&self, run: &Run, budget: &Budget, applied: Option<&Written>) -> serde_json::Value {
        let values: serde_json::Map<_, _> = self
            .values(run)
            .into_iter()
            .map(|one| (one.key.to_owned(), json!(one.value)))
            .collect();
        json!({
            "engine": "pytorch",
            "because": run.because,
            "read_as": run.settings.readings(),
            "certainty": read_as::certainty(&run.settings),
            "fits": true,
            "model": run.name,
            "effective_batch": self.effective_batch,
            "settings": settings_json(&self.choice.workload, &self.alloc_conf),
            "memory": self.estimate.memory_json(),
            "sharding": self.shares.as_ref().map(sharded::as_json),
            "safe_bytes": self.choice.safe_bytes,
            "budget_bytes": budget.bytes,
            "values": values,
            "changes": self.choice.changes,
            "note": self.other_cut(run),
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
}
