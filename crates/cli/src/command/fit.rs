//! `cinch fit`: the best settings for a card, shown, drawn, proved and written.

mod apply;
mod ranks;
mod show;
mod stages;

use std::path::PathBuf;

use cinch_config::{Config, Settings};
use cinch_device::Card;
use cinch_engine::{Executor, cuda};
use cinch_fit::FitError;
use cinch_fit::search::{self, Fit, Permission, Permissions, Request};
use cinch_graph::Target;
use cinch_step::StepTarget;
use serde_json::json;

use super::init::Fitting;
use super::profile::{self, Steps};
use super::{ahead, print, print_all, print_json, print_raw};
use crate::args::{Allowed, Device, Engine, FitArguments};
use crate::failure::usage;
use crate::measure::cpu_card;
use crate::memory::{self, Budget};
use crate::progress::DataBar;
use crate::rows::Rows;
use crate::settings::{Asked, for_the_engine};
use crate::unfollowed::before_figures;
use crate::{budget, calibration, device, overhead, picture, pytorch, voice, world};

pub use apply::{Written, apply};

/// Real steps of `--profile`, after the first.
const PROFILED_STEPS: usize = 10;

pub fn run(arguments: &FitArguments) -> anyhow::Result<()> {
    if arguments.undo {
        return apply::undo(arguments);
    }
    if arguments.guide && arguments.engine != Some(Engine::Pytorch) {
        let rows = search::guide_rows()?;
        return match arguments.json {
            true => print_json(&rows),
            false => print(&show::guide(&rows)),
        };
    }
    let subject = arguments.subject.as_deref();
    let asked = Asked::read(&arguments.settings, subject, arguments.engine)?;
    if asked.engine == Engine::Pytorch {
        return pytorch::chosen::run(arguments, &asked);
    }
    for_the_engine(&arguments.settings, &asked.settings, &asked.config)?;
    // Before the search, so that nothing is computed for a file that is not there.
    let files = files_to_write(arguments, &asked)?;
    let Asked {
        mut settings,
        mut config,
        ..
    } = asked;
    let rows = Rows::settle(&mut settings, &mut config, &DataBar::default())?;
    let mut notes = settings.notes();
    let hardware = Hardware::new(arguments, &config)?;
    if hardware.target() == Target::Cpu {
        notes.extend(device::adapt_to_cpu(&mut config));
    }
    config.batch.budget = Some(cinch_config::Bytes::new(hardware.budget.bytes));
    // Of the stages of a curriculum the one that takes most decides; they share its settings.
    config.model = config.model.with_stages(Vec::new());
    let chosen = {
        let asked = request(arguments, &settings, &config, &hardware);
        ranks::choose(arguments, &settings, &asked)?
    };
    let chosen = chosen.map(|(choices, on_ranks)| {
        config = on_ranks;
        choices
    });
    let mut request = request(arguments, &settings, &config, &hardware);
    request.effective_batch = match &chosen {
        Some(choices) => Some(choices.effective_batch),
        None => request.effective_batch,
    };
    let mut fit = match search::fit(&request) {
        Err(FitError::DoesNotFit(answer)) => {
            let unfollowed = before_figures(&settings, &config);
            if arguments.json {
                print_json(&json!({
                    "fits": false,
                    "answer": answer,
                    "by_ranks": chosen,
                    "notes": unfollowed,
                }))?;
            } else {
                print_all(&voice::notes(&unfollowed))?;
                print_all(&chosen.as_ref().map(ranks::text).unwrap_or_default())?;
            }
            return Err(memory::refused(answer, &arguments.settings.plain.memory));
        }
        other => other?,
    };
    if chosen.is_some() {
        ranks::add_values(&mut fit.report, &fit.plan.config);
    }
    notes.extend(
        hardware
            .budget
            .lacks_on_host(fit.report.recommended.host_bytes),
    );
    notes.extend(other_mean(&settings, &config, &fit.plan.config));
    for path in &arguments.picture {
        let scene = picture::of_step(&fit.plan, Some(hardware.budget.capacity));
        picture::write(&scene, path)?;
    }
    for path in &arguments.front_picture {
        picture::write(
            &picture::of_front(&fit.report, &hardware.card_name(), hardware.stand_in()),
            path,
        )?;
    }
    notes.extend(device::stored_note(&fit.plan));
    notes.extend(rows.lines(&fit.plan.config.batch));
    let curriculum = &config.data.curriculum;
    let stages = stages::stages(curriculum, &fit, &request, arguments.details)?;
    let unfollowed = before_figures(&settings, &fit.plan.config);
    if !arguments.json {
        ahead(print_all(&voice::notes(&unfollowed)))?;
        ahead(print(&show::report(&fit, &hardware, arguments.details)))?;
        ahead(print_all(&stages::text(&stages)))?;
        let by_ranks = chosen.as_ref().map(ranks::text).unwrap_or_default();
        ahead(print_all(&by_ranks))?;
        ahead(print_all(&voice::notes(&notes)))?;
    }
    let profiled = arguments
        .profile
        .then(|| prove(arguments, &fit))
        .transpose()?;
    let applied = files
        .map(|files| apply(arguments, &files, &settings, &fit.report.values))
        .transpose()?;
    let command = show::train_command(
        arguments,
        &settings,
        &fit.report,
        hardware.target(),
        applied.as_ref(),
    );
    if arguments.json {
        notes.splice(0..0, unfollowed);
        print_json(&json!({
            "fits": true,
            "fit": fit.report,
            "by_ranks": chosen,
            "stages": stages,
            "memory": hardware.budget.whose,
            "train": command,
            "profile": profiled,
            "applied": applied,
            "notes": notes,
        }))
    } else {
        print_raw(format!("\ntrain with it: {command}").as_bytes())
    }
}

/// Everything that the search found, for a page.
pub fn found(arguments: &FitArguments, asked: &Asked) -> anyhow::Result<search::FitReport> {
    let mut config = asked.config.clone();
    let hardware = Hardware::new(arguments, &config)?;
    if hardware.target() == Target::Cpu {
        device::adapt_to_cpu(&mut config);
    }
    config.batch.budget = Some(cinch_config::Bytes::new(hardware.budget.bytes));
    let fit = search::fit(&request(arguments, &asked.settings, &config, &hardware))?;
    Ok(fit.report)
}

/// What fits best, for `cinch init` to write down.
pub fn fitting(arguments: &FitArguments, asked: &Asked) -> anyhow::Result<Fitting> {
    let mut config = asked.config.clone();
    let hardware = Hardware::new(arguments, &config)?;
    if hardware.target() == Target::Cpu {
        device::adapt_to_cpu(&mut config);
    }
    config.batch.budget = Some(cinch_config::Bytes::new(hardware.budget.bytes));
    let fit = search::fit(&request(arguments, &asked.settings, &config, &hardware))?;
    Ok(Fitting {
        values: fit.report.values,
        bytes: fit.report.recommended.total_bytes,
        budget: hardware.budget,
    })
}

/// The files of `--apply`, where it was given.
pub fn files_to_write(
    arguments: &FitArguments,
    asked: &Asked,
) -> anyhow::Result<Option<Vec<PathBuf>>> {
    match (arguments.apply, asked.files.is_empty()) {
        (false, _) => Ok(None),
        (true, false) => Ok(Some(asked.files.clone())),
        (true, true) => Err(apply::no_file()),
    }
}

/// What is planned for.
pub struct Hardware {
    pub budget: Budget,
    pub card: Card,
    /// Whether the rates are those of the card that was named or found.
    pub is_known: bool,
    machine: StepTarget,
}

impl Hardware {
    fn new(arguments: &FitArguments, config: &Config) -> anyhow::Result<Self> {
        let mut budget = match (
            arguments.settings.plain.memory.budget()?,
            config.batch.budget,
        ) {
            (Some(budget), _) => budget,
            (None, Some(size)) => Budget::of_size(size.get(), "vram.budget")?,
            (None, None) => memory::detected_now()?,
        };
        match arguments.device {
            Device::Auto => {}
            Device::Cpu => budget.gpu = None,
            Device::Cuda if budget.gpu.is_none() => {
                return Err(usage(
                    "there is no GPU here to fit for\n\
                     hint: name one with --gpu \"RTX 4090\", or its size with --gpu-memory 24",
                ));
            }
            Device::Cuda => {}
        }
        let target = budget.target();
        let (card, is_known) = match &budget.gpu {
            Some(rates) => (rates.card.clone(), rates.is_known),
            None => (cpu_card(&Executor::new(0, None)?, None), true),
        };
        Ok(Self {
            budget,
            card: world::joined(card, config)?,
            is_known,
            machine: overhead::machine(target),
        })
    }

    fn target(&self) -> Target {
        self.machine.target
    }

    /// The card that is planned for; one that only its size is known of is none by name.
    fn card_name(&self) -> String {
        match self.is_known {
            true => self.card.name.to_string(),
            false => format!(
                "a card of {}",
                cinch_config::Bytes::new(self.budget.capacity)
            ),
        }
    }

    /// The card whose rates stand for those of one that only its size is known of.
    fn stand_in(&self) -> Option<&str> {
        (!self.is_known).then_some(self.card.name.as_str())
    }
}

fn request<'a>(
    arguments: &FitArguments,
    settings: &Settings,
    config: &'a Config,
    hardware: &'a Hardware,
) -> Request<'a> {
    let allows = |what| arguments.allow.contains(&what);
    let permission = |what| match (allows(what), arguments.strict) {
        (true, _) => Permission::Free,
        (false, true) => Permission::Never,
        (false, false) => Permission::LastResort,
    };
    let fixed = budget::fixed(settings, allows(Allowed::Precision));
    Request {
        machine: hardware.machine,
        tf32: arguments.tf32,
        budget_bytes: hardware.budget.bytes,
        effective_batch: arguments.target_effective_batch,
        fixed,
        permissions: Permissions {
            states: permission(Allowed::EightBit),
            sequence_length: permission(Allowed::SequenceLength),
            precisions: None,
        },
        calibration: calibration::known(),
        ..Request::new(config, &hardware.card, hardware.budget.capacity)
    }
}

/// Runs what is recommended, where the device for it is here.
fn prove(arguments: &FitArguments, fit: &Fit) -> anyhow::Result<serde_json::Value> {
    if fit.plan.plan.options.target == Target::Cuda && !cuda::is_available() {
        return Err(usage(
            "--profile runs real steps, and there is no GPU here\n\
             hint: leave it out, or fit for the CPU with --device cpu",
        ));
    }
    let steps = Steps {
        count: PROFILED_STEPS,
        trace: false,
        threads: None,
        tf32: arguments.tf32,
    };
    let profile = profile::profile(&fit.plan, steps)?;
    if !arguments.json {
        ahead(print(&profile::describe(&fit.plan, &profile)))?;
    }
    profile.verdict()?;
    Ok(profile::as_json(&fit.plan, &profile))
}

/// What to say where a step that was found is cut otherwise than the one that was stated, and a
/// part of it is a mean over micro batches.
fn other_mean(settings: &Settings, stated: &Config, found: &Config) -> Option<String> {
    let part = found.model.mean_of_micro_batches()?;
    let [stated, found] = [stated, found].map(|config| config.batch.batch_size);
    let differs = settings.is_explicit("vram.batch_size") && stated != found;
    differs
        .then(|| format!("{part}, of {found} instead of {stated}: training is not quite the same"))
}
