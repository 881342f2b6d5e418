//! A plan: memory of a step by category, what is alive at the peak, the ladder of settings.

use cinch_config::Bytes;
use cinch_fit::search::FitReport;
use cinch_graph::Target;
use cinch_report::{Page, PageChart, Part, Section, StepPicture, held_table};
use cinch_step::StepPlan;
use cinch_torch::remedy::remedies;

use super::settings;
use crate::args::{Engine, FitArguments, PlainArguments, ReportArguments, SettingArguments};
use crate::command::fit;
use crate::device;
use crate::memory;
use crate::pytorch::estimate::{self, Estimate};
use crate::pytorch::workload::Run;
use crate::pytorch::{course, show};
use crate::settings::Asked;
use crate::table;

pub fn page(arguments: &ReportArguments) -> anyhow::Result<Page> {
    let given = SettingArguments {
        plain: PlainArguments {
            memory: arguments.memory.clone(),
            ..PlainArguments::default()
        },
        flags: Vec::new(),
    };
    let subject = arguments.subject.to_string_lossy();
    let asked = Asked::read(&given, Some(&subject), None)?;
    let given = given.about(Some(&subject))?;
    match asked.engine {
        Engine::Pytorch => of_pytorch(&given, &asked),
        Engine::Cinch => of_cinch(&given, &asked),
    }
}

fn of_cinch(given: &SettingArguments, asked: &Asked) -> anyhow::Result<Page> {
    let mut config = asked.config.clone();
    let names_a_gpu = given.plain.memory.names_a_gpu();
    let target = device::plan_target(crate::args::Device::Auto, &config, names_a_gpu);
    if target == Target::Cpu {
        device::adapt_to_cpu(&mut config);
    }
    let planned = crate::budget::plan(&asked.settings, &config, &given.plain.memory, target)?;
    let step = match planned {
        Err(cinch_fit::FitError::DoesNotFit(answer)) => {
            return Err(memory::refused(answer, &given.plain.memory));
        }
        other => other?,
    };
    let mut sections = of_step(&step);
    let has_budget = names_a_gpu || given.plain.memory.vram.is_some() || given.plain.memory.auto;
    if has_budget {
        sections.push(ladder(given, asked));
    }
    sections.push(settings(&asked.settings.explain()));
    let report = step.report(target, false);
    Ok(Page {
        title: format!(
            "{}: one step in {}",
            table::model_name(&report.model, report.size.as_deref()),
            Bytes::new(step.total_bytes())
        ),
        subtitle: table::settings_line(&report),
        sections,
        refresh_seconds: None,
    })
}

/// The memory of a planned step.
pub fn of_step(step: &StepPlan) -> Vec<Section> {
    let mut picture = StepPicture::of_plan(&step.training, &step.plan);
    picture.budget_bytes = step.config.batch.budget.map(Bytes::get);
    picture.micro_batches = step.config.batch.accumulation as u64;
    let report = step.report(step.plan.options.target, false);
    let memory = &report.memory;
    let figures = [
        (
            "allocated",
            memory.arena_bytes.saturating_add(memory.overhead_bytes),
        ),
        ("arena", memory.arena_bytes),
        ("alive at the peak", memory.peak_bytes),
        ("outside the arena", memory.overhead_bytes),
        ("no plan can be smaller than", memory.lower_bound_bytes),
    ];
    let mut figures: Vec<(String, String)> = figures
        .into_iter()
        .map(|(name, bytes)| (name.to_owned(), Bytes::new(bytes).to_string()))
        .collect();
    figures.push(("peak at".to_owned(), memory.peak_at.clone()));
    vec![Section {
        title: "Memory of a step".to_owned(),
        parts: vec![
            Part::Figures(figures),
            Part::Chart(PageChart::of_step(&picture)),
            held_table(&picture),
        ],
    }]
}

/// From safe to maximum, for the memory that was named.
fn ladder(given: &SettingArguments, asked: &Asked) -> Section {
    let arguments = FitArguments {
        settings: given.clone(),
        ..FitArguments::default()
    };
    let parts = match fit::found(&arguments, asked) {
        Ok(report) => vec![rungs(&report)],
        Err(error) => vec![Part::Text(format!("no ladder: {error}"))],
    };
    Section {
        title: "The ladder".to_owned(),
        parts,
    }
}

fn rungs(report: &FitReport) -> Part {
    let rows = report.ladder.iter().map(|rung| {
        let budget = Bytes::new(rung.budget_bytes).to_string();
        match &rung.outcome {
            Some(outcome) => vec![
                rung.name.to_owned(),
                budget,
                Bytes::new(outcome.total_bytes).to_string(),
                format!("{}tokens/s", table::scaled(outcome.tokens_per_second)),
                outcome.settings.text(),
            ],
            None => vec![
                rung.name.to_owned(),
                budget,
                "-".to_owned(),
                "-".to_owned(),
                "nothing fits".to_owned(),
            ],
        }
    });
    Part::Table {
        header: ["rung", "budget", "takes", "speed", "settings"]
            .map(str::to_owned)
            .to_vec(),
        rows: rows.collect(),
    }
}

fn of_pytorch(given: &SettingArguments, asked: &Asked) -> anyhow::Result<Page> {
    let budget = given.plain.memory.budget()?.map(memory::Budget::of_pytorch);
    let card = budget.as_ref().and_then(memory::Budget::known_card);
    let run = Run::new(given, asked, card)?;
    let estimate = Estimate::new(&run.workload, estimate::overhead(budget.as_ref()))?;
    let profile = run.outline().profile()?;
    let mut picture = course::picture(&run, &estimate, &profile.alive)?;
    picture.budget_bytes = budget.as_ref().map(|budget| budget.bytes);
    picture.capacity_bytes = budget.as_ref().map(|budget| budget.capacity);
    let figures = [
        ("of the card", estimate.device_bytes),
        ("to be safe", estimate.safe_bytes),
        ("reserved by PyTorch", estimate.prediction.peak_reserved),
        ("allocated by tensors", estimate.prediction.peak_allocated),
        ("context and libraries", estimate.outside_bytes()),
    ];
    let figures = figures.map(|(name, bytes)| (name.to_owned(), Bytes::new(bytes).to_string()));
    let remedies = remedies(&run.workload, &estimate.overhead)?;
    let rows = remedies.iter().map(|remedy| {
        let note = remedy.note.clone().unwrap_or_default();
        vec![
            remedy.name.to_owned(),
            show::signed(remedy.device),
            remedy.change.clone(),
            note,
        ]
    });
    let sections = vec![
        Section {
            title: "Memory of the steps".to_owned(),
            parts: vec![
                Part::Figures(figures.to_vec()),
                Part::Chart(PageChart::of_step(&picture)),
                held_table(&picture),
            ],
        },
        Section {
            title: "What each change would do".to_owned(),
            parts: vec![Part::Table {
                header: ["change", "of the card", "what to set", "note"]
                    .map(str::to_owned)
                    .to_vec(),
                rows: rows.collect(),
            }],
        },
        settings(&asked.settings.explain()),
    ];
    Ok(Page {
        title: picture.title.clone(),
        subtitle: picture.subtitle.clone(),
        sections,
        refresh_seconds: None,
    })
}
