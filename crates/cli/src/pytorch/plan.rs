//! `cinch plan --engine pytorch`: what a run in PyTorch will take.

use cinch_config::Bytes;
use cinch_torch::model::{LINES_OF, Profile};
use cinch_torch::remedy::{Remedy, remedies};
use cinch_torch::sharding::Shares;
use serde_json::{Value, json};

use super::estimate::{self, Estimate, settings_json};
use super::workload::Run;
use super::{course, guides, read_as, refuse_flags_of_cinch, sharded, show, truth};
use crate::args::{Device, PlanArguments, given};
use crate::command::{print, print_json};
use crate::failure::DoesNotFit;
use crate::memory::Budget;
use crate::picture;
use crate::progress::Waiting;
use crate::settings::Asked;
use crate::voice;

/// Questions about measured runs and guides, which need no run of the user's.
pub fn questions(arguments: &PlanArguments) -> Option<anyhow::Result<()>> {
    if let Some(path) = &arguments.questions.truth {
        return Some(truth::run(path, arguments.json));
    }
    let asks = arguments.questions.guides;
    asks.then(|| guides::run(arguments.json))
}

pub fn run(arguments: &PlanArguments, asked: &Asked) -> anyhow::Result<()> {
    refuse_flags_of_cinch(&given(&[
        ("--graph", arguments.graph),
        ("--explain", arguments.explain),
        ("--device cpu", arguments.device == Device::Cpu),
    ]))?;
    let budget = budget(arguments, asked)?;
    let card = budget.as_ref().and_then(Budget::known_card);
    let run = Run::new(&arguments.settings, asked, card)?;
    let waiting = Waiting::new("replaying the run");
    let answer = Answer::new(arguments, &run, budget)?;
    drop(waiting);
    if !arguments.picture.is_empty() {
        let mut step = course::picture(&run, &answer.estimate, &answer.profile.alive)?;
        step.budget_bytes = answer.budget.as_ref().map(|budget| budget.bytes);
        step.capacity_bytes = answer.budget.as_ref().map(|budget| budget.capacity);
        for path in &arguments.picture {
            picture::write(&cinch_report::timeline(&step), path)?;
        }
    }
    match arguments.json {
        true => print_json(&answer.json(&run, arguments.timeline)?)?,
        false => print(&answer.text(&run, arguments.timeline)?)?,
    }
    answer.verdict()
}

/// By flags, else by the configuration.
fn budget(arguments: &PlanArguments, asked: &Asked) -> anyhow::Result<Option<Budget>> {
    let budget = match (
        arguments.settings.plain.memory.budget()?,
        asked.config.batch.budget,
    ) {
        (Some(budget), _) => Some(budget),
        (None, Some(size)) => Some(Budget::of_size(size.get(), "vram.budget")?),
        (None, None) => None,
    };
    Ok(budget.map(Budget::of_pytorch))
}

/// Everything that is told of a run.
struct Answer {
    estimate: Estimate,
    profile: Profile,
    /// Parameters that are trained, adapters among them.
    trainable: u64,
    budget: Option<Budget>,
    /// Asked for, or needed because the run does not fit.
    remedies: Vec<Remedy>,
    shares: Option<Shares>,
    what_if: bool,
    assumed: Vec<String>,
}

impl Answer {
    fn new(arguments: &PlanArguments, run: &Run, budget: Option<Budget>) -> anyhow::Result<Self> {
        let estimate = Estimate::new(&run.workload, estimate::overhead(budget.as_ref()))?;
        let what_if = arguments.questions.what_if;
        let fits = budget
            .as_ref()
            .is_none_or(|budget| estimate.safe_bytes <= budget.bytes);
        let remedies = match what_if || !fits {
            true => remedies(&run.workload, &estimate.overhead)?,
            false => Vec::new(),
        };
        let mut assumed = run.assumed.clone();
        let workload = run.workload.assumptions();
        assumed.extend(workload.into_iter().map(str::to_owned));
        assumed.push(format!(
            "outside the allocator: {}",
            estimate.overhead.basis.trim_start_matches("assumed: ")
        ));
        Ok(Self {
            profile: run.outline().profile()?,
            trainable: run.workload.weights()?.num_trainable(),
            shares: sharded::shares_of(&run.config.torch, &run.workload)?,
            budget,
            remedies,
            what_if,
            assumed,
            estimate,
        })
    }

    fn fits(&self) -> Option<bool> {
        let budget = self.budget.as_ref()?;
        Some(self.needed_bytes() <= budget.bytes)
    }

    /// What a card must have: of several that share, each.
    fn needed_bytes(&self) -> u64 {
        match &self.shares {
            None => self.estimate.safe_bytes,
            Some(shares) => {
                let estimate = &self.estimate;
                shares.safe_bytes(&estimate.prediction, &estimate.overhead)
            }
        }
    }

    fn text(&self, run: &Run, timeline: bool) -> anyhow::Result<String> {
        let mut text = read_as::text(run);
        text += &show::heading(run, self.trainable);
        text += &show::memory(&self.estimate);
        if let Some(certainty) = read_as::certainty(&run.settings) {
            text += &format!("the figure is {certainty}\n");
        }
        text += &show::peak(run, &self.estimate, &self.profile);
        text += &show::assumed(&self.assumed);
        if let Some(shares) = &self.shares {
            text += &sharded::text(shares);
        }
        if timeline {
            let picture = course::picture(run, &self.estimate, &self.profile.alive)?;
            text += &course::chart(&picture);
        }
        if self.what_if {
            text += &super::remedies::table(&self.remedies);
        }
        if let Some(budget) = &self.budget {
            let share = 100.0 * self.needed_bytes() as f64 / budget.bytes as f64;
            text += &format!(
                "{} the budget of {}: {} is {share:.1} % of it\n",
                voice::verdict(self.fits() != Some(false)),
                Bytes::new(budget.bytes),
                match self.shares {
                    None => "the safe figure",
                    Some(_) => "each rank's safe figure",
                },
            );
        }
        Ok(text)
    }

    fn json(&self, run: &Run, timeline: bool) -> anyhow::Result<Value> {
        let phase = self.estimate.peak_phase();
        let scope = self.profile.peak.scope;
        let timeline = timeline
            .then(|| course::picture(run, &self.estimate, &self.profile.alive))
            .transpose()?;
        Ok(json!({
            "engine": "pytorch",
            "because": run.because,
            "read_as": run.settings.readings(),
            "certainty": read_as::certainty(&run.settings),
            "model": run.name,
            "family": run.workload.architecture.name(),
            "parameters": run.workload.architecture.parameters(),
            "trainable": self.trainable,
            "settings": settings_json(&run.workload, &run.alloc_conf),
            "memory": self.estimate.memory_json(),
            "peak": {
                "phase": phase.name(),
                "module": scope.name,
                "layer": scope.layer,
                "line": show::line_json(self.profile.peak.origin),
                "lines_of": show::names_files(&self.profile).then_some(LINES_OF),
                "alive": show::alive_json(&self.profile.alive),
            },
            "assumed": self.assumed,
            "budget_bytes": self.budget.as_ref().map(|budget| budget.bytes),
            "fits": self.fits(),
            "remedies": super::remedies::as_json(&self.remedies),
            "sharding": self.shares.as_ref().map(sharded::as_json),
            "timeline": timeline.as_ref().map(course::as_json),
            "milliseconds": self.estimate.milliseconds,
        }))
    }

    /// An error with the way out where the run does not fit.
    fn verdict(&self) -> anyhow::Result<()> {
        let Some(budget) = self.budget.as_ref().filter(|_| self.fits() == Some(false)) else {
            return Ok(());
        };
        let margin = budget
            .margin_hint(self.needed_bytes())
            .map_or_else(String::new, |hint| format!("\nhint: it {hint}"));
        Err(DoesNotFit(format!(
            "PyTorch needs {} to be safe, and the budget is {} ({}){margin}\nhint: {}",
            Bytes::new(self.needed_bytes()),
            Bytes::new(budget.bytes),
            budget.explained(),
            super::remedies::hint(&self.remedies, budget.bytes)
        ))
        .into())
    }
}
