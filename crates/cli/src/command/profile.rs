//! `cinch profile`: real steps, their memory and time against the plan.

use std::collections::BTreeMap;
use std::time::Instant;

use cinch_config::Bytes;
use cinch_engine::EngineOptions;
use cinch_graph::{ALIGNMENT, Target};
use cinch_plan::Placement;
use cinch_step::{Prediction, StepPlan};
use cinch_train::{Batch, Session, resident_bytes};
use serde::Serialize;
use serde_json::json;

use super::{print, print_json};
use crate::args::ProfileArguments;
use crate::failure::usage;
use crate::measure::{card, median, synthetic_batch};
use crate::overhead::{self, Measured};
use crate::settings::for_the_engine;
use crate::table::{right, thousands};
use crate::unfollowed::before_figures;
use crate::{calibration, device, table, voice};

/// How far a GPU's memory may be from the plan.
const TOLERANCE: u64 = 16 << 20;

/// A GPU's memory in use, as its driver counts it.
#[derive(Clone, Debug, Serialize)]
struct DeviceMemory {
    after_context: u64,
    after_arena: u64,
    /// Kernels loaded, steps recorded, weights written.
    prepared: u64,
    after_step_2: u64,
    after_last_step: u64,
    /// What other programs hold, where an earlier run tells what the context alone takes.
    others: u64,
    /// What should be in use: arena, overhead and others.
    expected: u64,
    /// Whether the overhead that is expected was measured by an earlier run; else the reading
    /// before the first step is what later ones are held against.
    overhead_measured_before: bool,
}

impl DeviceMemory {
    fn difference(&self) -> u64 {
        [self.prepared, self.after_step_2, self.after_last_step]
            .map(|used| used.abs_diff(self.expected))
            .into_iter()
            .fold(0, u64::max)
    }

    fn agrees(&self) -> bool {
        self.difference() <= TOLERANCE
    }
}

/// What to run.
#[derive(Clone, Copy, Debug)]
pub struct Steps {
    /// After the first.
    pub count: usize,
    pub trace: bool,
    pub threads: Option<usize>,
    pub tf32: bool,
}

/// What a node of a step took.
#[derive(Clone, Debug, Serialize)]
struct TracedNode {
    op: &'static str,
    node: String,
    seconds: f64,
}

/// What was measured.
pub struct Profile {
    /// What ran it.
    name: String,
    step_seconds: Vec<f64>,
    device: Option<DeviceMemory>,
    /// On the CPU: how far into the arena a step writes.
    touched: Option<u64>,
    resident: Option<u64>,
    prediction: Option<Prediction>,
    /// What each node of one step took, in the order of the run, where asked for.
    traced: Vec<TracedNode>,
}

pub fn run(arguments: &ProfileArguments) -> anyhow::Result<()> {
    if arguments.steps < 2 {
        return Err(usage(format!(
            "--steps {} is too few to see whether memory moves\nhint: 10 is the default",
            arguments.steps
        )));
    }
    let target = device::train_target(arguments.device)?;
    let settings = arguments.settings.settings()?;
    voice::explain(&settings);
    let mut config = settings.resolve()?;
    for_the_engine(&arguments.settings, &settings, &config)?;
    for note in before_figures(&settings, &config) {
        voice::aside(Some(note));
    }
    if target == Target::Cpu {
        device::adapt_to_cpu(&mut config);
    }
    let plan = cinch_fit::plan(&config, overhead::machine(target))?;
    let steps = Steps {
        count: arguments.steps,
        trace: arguments.trace,
        threads: arguments.threads,
        tf32: arguments.tf32,
    };
    let profile = profile(&plan, steps)?;
    if arguments.json {
        print_json(&as_json(&plan, &profile))?;
    } else {
        print(&describe(&plan, &profile))?;
    }
    profile.verdict()
}

/// Runs real steps of a plan. What they say about overhead and time is kept for later plans.
pub fn profile(plan: &StepPlan, steps: Steps) -> anyhow::Result<Profile> {
    let options = EngineOptions {
        threads: steps.threads,
        tf32: steps.tf32,
        device: 0,
        other_ranks: 0,
        deterministic: false,
    };
    let mut session = Session::new(plan.clone(), options)?;
    let profile = measure(&mut session, steps)?;
    if let Some(prediction) = &profile.prediction {
        let (model, precision) = (plan.config.model.name(), plan.config.batch.precision);
        let measured = median(&profile.step_seconds);
        calibration::keep(|known| {
            known.record(
                &profile.name,
                model,
                precision,
                measured,
                prediction.seconds,
            );
        });
    }
    Ok(profile)
}

impl Profile {
    /// Seconds of the traced step by op.
    fn by_op(&self) -> BTreeMap<&'static str, f64> {
        let mut by_op = BTreeMap::new();
        for traced in &self.traced {
            *by_op.entry(traced.op).or_insert(0.0) += traced.seconds;
        }
        by_op
    }

    /// An error where memory was not as planned.
    pub fn verdict(&self) -> anyhow::Result<()> {
        match &self.device {
            Some(memory) if !memory.agrees() => Err(anyhow::anyhow!(
                "the GPU's memory differs from the plan by {} (at most {} is allowed)\n\
                 hint: end other programs that use the GPU, and run this again",
                Bytes::new(memory.difference()),
                Bytes::new(TOLERANCE)
            )),
            _ => Ok(()),
        }
    }
}

/// How far into the arena a step writes: what lies beyond the persistent part is filled with a
/// pattern, and after a step the last byte that differs is looked for. Rounded up to the
/// alignment, as the plan's figure is.
fn touched_bytes(session: &mut Session, batch: &Batch, step: u64) -> anyhow::Result<Option<u64>> {
    const PATTERN: u8 = 0xA5;
    let plan = session.plan();
    let from = plan.plan.persistent_bytes;
    let region = Placement::in_arena(from, plan.arena_bytes() - from);
    let last = plan.training.nodes.len() - 1;
    if session.arena().is_none() {
        return Ok(None);
    }
    session.train_step_observed(batch, step, &mut |arena, node| {
        if node == last {
            arena.write::<u8>(region).fill(PATTERN);
        }
    })?;
    session.train_step(batch, step + 1)?;
    let highest = session.arena().map(|arena| {
        let bytes = arena.read::<u8>(region);
        bytes.iter().rposition(|&byte| byte != PATTERN)
    });
    let written = highest.map(|place| place.map_or(0, |place| place as u64 + 1));
    Ok(written.map(|bytes| (from + bytes).next_multiple_of(ALIGNMENT)))
}

fn measure(session: &mut Session, steps: Steps) -> anyhow::Result<Profile> {
    let plan = session.plan().clone();
    let config = &plan.config;
    session.initialize(config.training.seed)?;
    let known = overhead::known();
    let measured = Measured::read(session.engine(), &plan)?;
    let batch = synthetic_batch(session.plan());
    let mut step_seconds = Vec::new();
    let mut used = Vec::new();
    for step in 0..=steps.count as u64 {
        let start = Instant::now();
        session.train_step(&batch, step)?;
        step_seconds.push(start.elapsed().as_secs_f64());
        if let Some(executor) = session.engine().cuda() {
            used.push(executor.used_bytes()?);
        }
    }
    // The first step touches memory for the first time.
    step_seconds.remove(0);
    // Before the rates are measured, which takes memory.
    let resident = resident_bytes();
    let device = measured
        .as_ref()
        .and_then(|measured| device_memory(session, measured, known.as_ref(), &used));
    if let Some(measured) = &measured {
        overhead::keep(measured);
    }
    let mut traced = Vec::new();
    let mut next = steps.count as u64 + 1;
    if steps.trace {
        session.train_step_traced(&batch, next, &mut |op, node, time| {
            traced.push(TracedNode {
                op,
                node: node.to_owned(),
                seconds: time.as_secs_f64(),
            });
        })?;
        next += 1;
    }
    let touched = touched_bytes(session, &batch, next)?;
    let card = card(session.engine(), None);
    let prediction = card.map(|card| plan.predict(&card, steps.tf32));
    Ok(Profile {
        name: session.engine().describe(),
        step_seconds,
        device,
        touched,
        resident,
        prediction,
        traced,
    })
}

fn device_memory(
    session: &Session,
    measured: &Measured,
    known: Option<&Measured>,
    used: &[u64],
) -> Option<DeviceMemory> {
    let executor = session.engine().cuda()?;
    let recorded = session.plan().recorded_bytes();
    let (after_context, arena) = (executor.context_bytes(), executor.arena_bytes());
    let context = known.map_or(after_context, |known| known.context_bytes);
    let others = after_context.saturating_sub(context);
    let overhead = known.unwrap_or(measured).total_bytes();
    Some(DeviceMemory {
        after_context,
        after_arena: executor.allocated_bytes(),
        prepared: arena + recorded + measured.total_bytes(),
        after_step_2: *used.get(1)?,
        after_last_step: *used.last()?,
        others,
        expected: arena + recorded + overhead + others,
        overhead_measured_before: known.is_some(),
    })
}

pub fn as_json(plan: &StepPlan, profile: &Profile) -> serde_json::Value {
    let config = &plan.config;
    let seconds = median(&profile.step_seconds);
    json!({
        "model": config.model.name(),
        "size": config.model.size_name(),
        "batch_size": config.batch.batch_size,
        "accumulation": config.batch.accumulation,
        "seq_len": config.batch.seq_len,
        "precision": config.batch.precision.name(),
        "device": profile.name,
        "planned": {
            "arena_bytes": plan.arena_bytes(),
            "step_bytes": plan.plan.arena_bytes,
            "peak_bytes": plan.plan.peak_bytes,
            "overhead_bytes": plan.overhead_bytes(),
        },
        "device_memory": profile.device,
        "device_memory_difference": profile.device.as_ref().map(DeviceMemory::difference),
        "device_memory_agrees": profile.device.as_ref().map(DeviceMemory::agrees),
        "touched_bytes": profile.touched,
        "resident_bytes": profile.resident,
        "predicted_seconds": profile.prediction.as_ref().map(|p| p.seconds),
        "measured_seconds": seconds,
        "measured_seconds_all": profile.step_seconds,
        "predicted_by_op": profile.prediction.as_ref().map(|p| &p.by_op),
        "measured_by_op": profile.by_op(),
        "measured_nodes": profile.traced,
    })
}

pub fn describe(plan: &StepPlan, profile: &Profile) -> String {
    let config = &plan.config;
    let mut text = format!(
        "{} {}: batch {} × {}, {} tokens, {}, {}\n",
        config.model.name(),
        config.model.size_name().unwrap_or("custom"),
        config.batch.batch_size,
        config.batch.accumulation,
        config.batch.seq_len,
        config.batch.precision.name(),
        profile.name,
    );
    let mut memory = table::new(&["memory", "size", "bytes"]);
    let mut row = |name: &str, bytes: u64| {
        memory.add_row([
            name.into(),
            right(Bytes::new(bytes)),
            right(thousands(bytes)),
        ]);
    };
    row("planned peak", plan.plan.peak_bytes);
    row("planned arena", plan.arena_bytes());
    row("planned overhead", plan.overhead_bytes());
    if let Some(device) = &profile.device {
        row("GPU after the context", device.after_context);
        row("GPU after the arena", device.after_arena);
        row("GPU before the first step", device.prepared);
        row("GPU after step 2", device.after_step_2);
        row("GPU after the last step", device.after_last_step);
        if device.others > 0 {
            row("of other programs", device.others);
        }
        row("GPU expected", device.expected);
    }
    if let Some(touched) = profile.touched {
        row("planned for a step", plan.plan.arena_bytes);
        row("measured: written to by a step", touched);
    }
    if let (None, Some(resident)) = (&profile.device, profile.resident) {
        row("resident", resident);
        row(
            "resident beyond the arena",
            resident.saturating_sub(plan.arena_bytes()),
        );
    }
    text += &memory.to_string();
    text.push('\n');
    if let Some(device) = &profile.device {
        text += &verdict(plan, device);
    }
    if let Some(touched) = profile.touched {
        text += &match touched.abs_diff(plan.plan.arena_bytes) {
            0 => "measured equals planned\n".to_owned(),
            apart => format!("measured is {} bytes from planned\n", thousands(apart)),
        };
    }
    text += &predicted_and_measured(profile.prediction.as_ref(), median(&profile.step_seconds));
    if !profile.traced.is_empty() {
        text += &by_op(profile);
    }
    text
}

fn verdict(plan: &StepPlan, device: &DeviceMemory) -> String {
    let mut text = format!(
        "memory {} the plan: {} apart; between step 2 and the last it {}\n",
        if device.agrees() {
            "agrees with"
        } else {
            "differs from"
        },
        Bytes::new(device.difference()),
        match device.after_last_step.abs_diff(device.after_step_2) {
            0 => "did not move".to_owned(),
            moved => format!("moved by {}", Bytes::new(moved)),
        }
    );
    if !device.overhead_measured_before {
        text += &format!(
            "note: the plan held a built-in overhead of {}; this card's, {}, is kept for later \
             plans\n",
            Bytes::new(plan.overhead_bytes()),
            Bytes::new(device.expected.saturating_sub(plan.arena_bytes()))
        );
    }
    text
}

/// `predicted 12.3 ms, measured 12.0 ms (+2.5 %)`
pub fn predicted_and_measured(prediction: Option<&Prediction>, seconds: f64) -> String {
    let measured = seconds * 1e3;
    match prediction {
        Some(prediction) => format!(
            "step: predicted {:.2} ms, measured {measured:.2} ms ({:+.1} %)\n",
            prediction.seconds * 1e3,
            100.0 * (prediction.seconds / seconds - 1.0)
        ),
        None => format!("step: measured {measured:.2} ms; this card's rates are not known\n"),
    }
}

/// Time by op, longest first. Op by op, short kernels take longer than in a recorded step.
fn by_op(profile: &Profile) -> String {
    let predicted = profile
        .prediction
        .as_ref()
        .map(|prediction| &prediction.by_op);
    let mut rows: Vec<_> = profile.by_op().into_iter().collect();
    rows.sort_by(|a, b| b.1.total_cmp(&a.1));
    let mut table = table::new(&["op", "predicted ms", "measured ms"]);
    for (op, seconds) in rows {
        let predicted = predicted.and_then(|by_op| by_op.get(op));
        table.add_row([
            op.into(),
            right(predicted.map_or_else(String::new, |s| format!("{:.3}", s * 1e3))),
            right(format!("{:.3}", seconds * 1e3)),
        ]);
    }
    format!("{table}\n")
}
