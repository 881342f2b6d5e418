//! From a message and what came before it to a cause, with the reasons in words.
//!
//! A cause must be sufficient: without it the request would have been met. Of several sufficient
//! ones the most particular is told, and only one that holds a fair share of the card.

use cinch_config::Bytes;

use crate::failure::{Cause, Run};
use crate::frame::Phase;
use crate::log::{Incident, Told};
use crate::message::{Event, Framework, Numbers};
use crate::words::Measure;

/// A cause, how sure it is, and why.
#[derive(Clone, Debug)]
pub struct Verdict {
    pub cause: Cause,
    pub confidence: f64,
    pub evidence: Vec<String>,
}

/// Step lines after which a step is a usual one.
const USUAL_STEPS: u64 = 3;
/// The last batch over the usual one, from which on it is a long one.
const LONG_BATCH: f64 = 1.3;
/// What context and libraries take on any card.
const CONTEXT: u64 = 1 << 30;

/// What PyTorch's allocator asks the driver for when it needs this much: whole segments.
fn segment(tried: u64) -> u64 {
    const MIB: u64 = 1 << 20;
    match tried {
        0 => 0,
        tried if tried <= MIB || tried == 2 * MIB => 2 * MIB,
        tried if tried < 10 * MIB => 20 * MIB,
        tried => tried,
    }
}

fn shown(bytes: u64) -> String {
    Bytes::new(bytes).to_string()
}

/// Figures that follow from others.
pub fn completed(mut numbers: Numbers) -> Numbers {
    if numbers.other.is_none()
        && let (Some(total), Some(free)) = (numbers.total, numbers.free)
    {
        let used = total.saturating_sub(free);
        let other = match (numbers.process, numbers.reserved) {
            (Some(process), _) => used.saturating_sub(process),
            // An old message names no processes: what is neither free nor reserved is a context
            // of this process, or somebody else's.
            (None, Some(reserved)) => used.saturating_sub(reserved).saturating_sub(CONTEXT),
            (None, None) => 0,
        };
        // Less than this is the driver's own.
        numbers.other = (other >= CONTEXT / 2).then_some(other);
    }
    numbers
}

pub fn verdict(incident: &Incident, told: &Told, run: Option<&Run>) -> Verdict {
    let numbers = completed(incident.message.numbers);
    let mut evidence = figures(&numbers, incident);
    evidence.extend(incident.message.remarks.iter().cloned());
    let (cause, confidence) = match &incident.message.event {
        Event::NotMemory(what) => {
            evidence.push((*what).to_owned());
            (Cause::NotOom, 0.95)
        }
        Event::AbsurdSize => {
            evidence.push("more than an exabyte was asked for: a size was computed from wrong numbers, or a rank received rubbish".to_owned());
            (Cause::NotOom, 0.9)
        }
        Event::Rejected => (Cause::Cap, 0.97),
        Event::CacheBlocks | Event::Pool => (Cause::Cap, 0.85),
        Event::Startup => (Cause::OtherProcess, 0.8),
        Event::Unified => unified(&numbers),
        Event::HostAllocation | Event::HostKilled => {
            if incident
                .trend
                .is_some_and(|(measure, _)| measure == Measure::Host)
            {
                climbing(incident, &mut evidence);
            }
            (Cause::Host, 0.95)
        }
        Event::SharedMemory => (Cause::Host, 0.9),
        Event::KilledBySignal => {
            evidence.push("signal 9 is what the kernel sends when host memory runs out; a person or a scheduler can send it too: `dmesg` and `journalctl -k` tell".to_owned());
            evidence.extend(incident.host.map(|bytes| {
                format!(
                    "the log tells of {} of host memory in use before",
                    shown(bytes.max(0.0) as u64)
                )
            }));
            (Cause::Host, 0.6)
        }
        Event::DoesNotFit => (Cause::Capacity, 0.99),
        Event::Collective => {
            evidence.push(
                "NCCL's buffers lie outside PyTorch's allocator, which had left nothing for them"
                    .to_owned(),
            );
            (Cause::NonPytorch, 0.8)
        }
        Event::Device | Event::Driver | Event::Library(_) => {
            device(incident, &numbers, told, &mut evidence)
        }
    };
    let mut verdict = Verdict {
        cause,
        confidence,
        evidence,
    };
    if let Some(run) = run {
        weigh(&mut verdict, &numbers, run);
    }
    verdict
}

/// What the message says, in a sentence or two.
fn figures(numbers: &Numbers, incident: &Incident) -> Vec<String> {
    let mut said = Vec::new();
    if let (Some(needed), Some(limit)) = (numbers.needed, numbers.limit) {
        said.push(format!(
            "{} is needed, and the budget is {}",
            shown(needed),
            shown(limit)
        ));
    }
    if let Some(tried) = numbers.tried {
        let of = match tried {
            // The allocator asks for whole segments.
            tried if tried == 2 << 20 => " (a segment for a tensor of at most 1 MiB)",
            tried if tried == 20 << 20 => " (a segment for a tensor of 1 to 10 MiB)",
            _ => "",
        };
        let free = numbers
            .free
            .map(|free| format!(", and {} was free", shown(free)));
        said.push(format!(
            "{} was asked for{of}{}",
            shown(tried),
            free.unwrap_or_default()
        ));
    }
    if let Some(needed) = numbers.needed.filter(|_| numbers.limit.is_none()) {
        said.push(format!("the program needs {} in all", shown(needed)));
    }
    if let Some(total) = numbers.total {
        let whose = match incident.message.event {
            Event::HostKilled => "the machine",
            _ => "the card",
        };
        let mut parts = vec![format!("{whose} has {}", shown(total))];
        parts.extend(
            numbers
                .allocated
                .map(|bytes| format!("tensors hold {}", shown(bytes))),
        );
        if numbers.allocated.is_none() {
            parts.extend(
                numbers
                    .process
                    .map(|bytes| format!("this process holds {}", shown(bytes))),
            );
        }
        parts.extend(
            numbers
                .reserved_unallocated
                .map(|bytes| format!("{} is reserved and idle", shown(bytes))),
        );
        parts.extend(
            numbers
                .non_pytorch
                .map(|bytes| format!("{} of this process is outside the allocator", shown(bytes))),
        );
        parts.extend(numbers.other.map(|bytes| {
            match numbers.process.is_some() || incident.message.names_a_holder() {
                true => format!("{} is held by others", shown(bytes)),
                false => format!(
                    "{} more is taken, by others or by this process outside the allocator",
                    shown(bytes)
                ),
            }
        }));
        said.push(parts.join("; "));
    } else if let Some(allocated) = numbers.allocated {
        let other = numbers
            .other
            .map(|bytes| format!(", and {} beside it", shown(bytes)));
        said.push(format!(
            "{} was allocated{}",
            shown(allocated),
            other.unwrap_or_default()
        ));
    }
    if let Some(limit) = numbers.limit.filter(|_| numbers.needed.is_none()) {
        said.push(format!("the limit is {}", shown(limit)));
    }
    if let Some(rss) = numbers.rss {
        said.push(format!("the process held {} of host memory", shown(rss)));
    }
    let holders = incident
        .message
        .holders
        .iter()
        .take(4)
        .filter(|holder| holder.process > 0 && holder.bytes > 0);
    said.extend(
        holders.map(|holder| format!("process {} holds {}", holder.process, shown(holder.bytes))),
    );
    if let Some(frame) = &incident.place {
        let line = match frame.line {
            0 => String::new(),
            line => format!(":{line}"),
        };
        said.push(format!("in {} ({}{line})", frame.function, frame.file));
    }
    said
}

fn unified(numbers: &Numbers) -> (Cause, f64) {
    let (Some(allocated), Some(other), Some(limit)) =
        (numbers.allocated, numbers.other, numbers.limit)
    else {
        return (Cause::Capacity, 0.5);
    };
    match other > allocated && other > limit / 10 * 3 {
        true => (Cause::NonPytorch, 0.6),
        false => (Cause::Capacity, 0.75),
    }
}

fn device(
    incident: &Incident,
    numbers: &Numbers,
    told: &Told,
    evidence: &mut Vec<String>,
) -> (Cause, f64) {
    let is_torch = incident.message.framework == Framework::PyTorch;
    let tried = numbers.tried.unwrap_or(0);
    let asked = if is_torch { segment(tried) } else { tried };
    let free = numbers.free.unwrap_or(0);
    let total = numbers.total.unwrap_or(0);
    let is_far_above = tried > 0 && free >= asked.saturating_mul(2) && free >= total / 20;
    let held = numbers
        .process
        .or(numbers.reserved)
        .or(numbers.allocated)
        .unwrap_or(0);
    // Without it the request would have been met, and it is a fair share of the card.
    let explains = |bytes: Option<u64>, percent: u64| {
        bytes.is_some_and(|bytes| {
            total > 0
                && bytes >= total / 100 * percent
                && bytes.saturating_add(free) >= tried
                // Where far more is free than was asked for, nothing that is held explains it.
                && (tried == 0 || free < asked.saturating_mul(2))
        })
    };
    if let Some(limit) = numbers.limit
        && (total == 0 || limit < total)
        // Figures are told with two digits behind the point.
        && (held.saturating_add(asked) > limit - limit / 100 || is_far_above)
        && is_torch
    {
        return (Cause::Cap, 0.95);
    }
    let is_larger = total > 0 && tried > total;
    if is_larger {
        evidence.push(
            "one request is larger than the card: no setting of the allocator meets it".to_owned(),
        );
    }
    if lends_from_host(numbers) {
        evidence.push(
            "tensors hold more than the card has: Windows' driver lends host memory (shared GPU memory), over the bus and many times slower, and that ran out too"
                .to_owned(),
        );
        return (Cause::Capacity, 0.97);
    }
    if is_larger {
        return (Cause::Capacity, 0.99);
    }
    if let Some(contiguous) = numbers.contiguous
        && contiguous < tried
        && tried <= free
    {
        evidence.push(format!(
            "a program needs one piece, and the largest that is free has {}",
            shown(contiguous)
        ));
        return (Cause::Fragmentation, 0.9);
    }
    if is_far_above {
        evidence.push(
            "far more was free than was asked for: a fraction set for the process, a partition of the card, \
             or another process that let go in between"
                .to_owned(),
        );
        return (Cause::Unclear, 0.5);
    }
    if explains(numbers.other, 20) {
        let is_named = incident.message.names_a_holder();
        return (Cause::OtherProcess, if is_named { 0.95 } else { 0.75 });
    }
    if let Some(found) = climbing(incident, evidence) {
        return found;
    }
    let is_idle =
        |percent| explains(numbers.reserved_unallocated, percent) && !told.expandable_segments;
    if is_idle(20) {
        return (Cause::Fragmentation, 0.9);
    }
    let outside = numbers.non_pytorch.filter(|bytes| *bytes >= 2 * CONTEXT);
    if explains(outside, 15) {
        return (Cause::NonPytorch, 0.85);
    }
    if let Some(found) = beside_the_step(incident, evidence) {
        return found;
    }
    if is_idle(5) {
        return (Cause::Fragmentation, 0.7);
    }
    // An old message names nobody: where tensors fill the card, a context, a display or NCCL is no
    // reason.
    let is_full = total > 0 && numbers.allocated.unwrap_or(0) >= total / 10 * 7;
    let is_named = incident.message.names_a_holder();
    if explains(numbers.other, 5) && (is_named || !is_full) {
        return (Cause::OtherProcess, 0.65);
    }
    if explains(outside, 10) {
        return (Cause::NonPytorch, 0.65);
    }
    if let Some(found) = long_batch(incident, evidence) {
        return found;
    }
    // All that a compiled program needs, and it is little: the rest was taken before it.
    if let Some(needed) = numbers.needed
        && total == 0
        && needed.max(tried) < CONTEXT
    {
        evidence.push(format!(
            "the program that failed needs {} in all: arrays that were made before it hold the memory, or another process does",
            shown(needed.max(tried))
        ));
        return (Cause::Unclear, 0.6);
    }
    capacity(numbers, incident)
}

/// Whether more is allocated than the card has, which only a driver that lends host memory allows.
pub fn lends_from_host(numbers: &Numbers) -> bool {
    let allocated = numbers.allocated.unwrap_or(0);
    numbers
        .total
        .is_some_and(|total| total > 0 && allocated > total)
}

fn capacity(numbers: &Numbers, incident: &Incident) -> (Cause, f64) {
    let total = numbers.total.unwrap_or(0);
    let share = |bytes: Option<u64>| match total {
        0 => 0.0,
        total => bytes.unwrap_or(0) as f64 / total as f64,
    };
    if share(numbers.allocated) >= 0.7 {
        return (Cause::Capacity, 0.95);
    }
    // With all that is idle given back it would not fit either.
    let needed = numbers
        .allocated
        .zip(numbers.tried)
        .map(|(allocated, tried)| allocated.saturating_add(tried));
    if share(needed) > 1.0 {
        return (Cause::Capacity, 0.95);
    }
    if share(numbers.process) >= 0.8 || share(numbers.needed) > 1.0 {
        return (Cause::Capacity, 0.85);
    }
    if numbers.free.is_some() && total > 0 {
        return (Cause::Capacity, 0.65);
    }
    if numbers.tried.is_some() || numbers.allocated.is_some() {
        return (Cause::Capacity, 0.6);
    }
    match incident.message.event {
        // Alone, with nothing but its name.
        Event::Device => (Cause::Unclear, 0.5),
        _ => (Cause::Unclear, 0.4),
    }
}

fn climbing(incident: &Incident, evidence: &mut Vec<String>) -> Option<(Cause, f64)> {
    let (measure, trend) = incident.trend?;
    let what = match measure {
        Measure::Allocated => "allocated memory",
        Measure::Reserved => "reserved memory",
        Measure::Used => "memory",
        Measure::Host => "host memory",
    };
    let level = shown(trend.level.max(0.0) as u64);
    if !trend.is_rising {
        evidence.push(format!(
            "{what} stayed at {level} over {} readings: no leak",
            trend.samples
        ));
        return None;
    }
    evidence.push(format!(
        "{what} climbed by {} a step over {} readings, to {level}",
        shown(trend.slope.max(0.0) as u64),
        trend.samples
    ));
    (measure != Measure::Host).then_some((Cause::Leak, 0.9))
}

/// Moments that a step line does not show.
fn beside_the_step(incident: &Incident, evidence: &mut Vec<String>) -> Option<(Cause, f64)> {
    let phase = incident.phase.filter(|phase| phase.is_beside_the_step())?;
    let why = match phase {
        Phase::EvaluationOutputs => {
            "outputs of all evaluation batches are kept on the GPU until metrics are computed; for a language model these are logits of length × vocabulary for each sample"
        }
        Phase::Evaluation => {
            "evaluation has its own batch size, and the memory of training stays reserved beside it"
        }
        Phase::Saving => {
            "gathering or copying the state for a checkpoint needs room beside the run"
        }
        Phase::Resuming => {
            "the loaded checkpoint lies in memory beside the states it fills; without map_location it goes to the GPU it was saved from"
        }
        Phase::Merging => "merging needs the base, the adapters and their product at once",
        Phase::OptimizerStep if incident.steps <= USUAL_STEPS => {
            "the first step of the optimizer makes its states, which stay from then on"
        }
        Phase::OptimizerStep => return None,
        _ => "generation keeps keys and values for every token beside the weights",
    };
    evidence.push(why.to_owned());
    Some((Cause::Spike, 0.9))
}

/// Many steps went well, and this one did not.
fn long_batch(incident: &Incident, evidence: &mut Vec<String>) -> Option<(Cause, f64)> {
    if let Some(length) = incident.length
        && length.last >= LONG_BATCH * length.usual
    {
        evidence.push(format!(
            "the last batch had length {}, and {} is usual",
            length.last, length.usual
        ));
        return Some((Cause::Spike, 0.9));
    }
    let in_step = !matches!(
        incident.phase,
        Some(Phase::Loading | Phase::Setup | Phase::DataParallel)
    );
    if incident.steps <= USUAL_STEPS || !in_step {
        return None;
    }
    let is_flat = incident.trend.is_some_and(|(_, trend)| !trend.is_rising);
    evidence.push(match incident.step {
        Some(step) => format!("the steps before went well, the last that was told is {step}: this batch is longer or larger than those, or memory was nearly full all along"),
        None => format!("{} step lines went well before: this batch is longer or larger than those, or memory was nearly full all along", incident.steps),
    });
    Some((Cause::Spike, if is_flat { 0.75 } else { 0.55 }))
}

/// What is computed for the run beside what the message says.
fn weigh(verdict: &mut Verdict, numbers: &Numbers, run: &Run) {
    let is_of_device = !matches!(verdict.cause, Cause::Host | Cause::NotOom);
    if !is_of_device {
        return;
    }
    let predicted = shown(run.predicted);
    verdict
        .evidence
        .push(format!("{} computes {predicted} for {}", run.by, run.title));
    let assumed = run
        .assumed
        .iter()
        .map(|one| format!("taken for granted: {one}"));
    verdict.evidence.extend(assumed);
    let Some(total) = numbers.limit.or(numbers.total).or(run.card) else {
        return;
    };
    let is_open = matches!(verdict.cause, Cause::Capacity | Cause::Unclear);
    if run.predicted >= total / 100 * 97 && is_open {
        verdict.cause = Cause::Capacity;
        verdict.confidence = verdict.confidence.max(0.97);
    } else if run.predicted < total / 10 * 6 && is_open {
        verdict.evidence.push(format!(
            "that is far below {}: the run that failed had other settings, or something else holds memory",
            shown(total)
        ));
        verdict.confidence = verdict.confidence.min(0.6);
    }
}
