//! What a recorded run used its memory for, what the allocator added, and what other settings
//! would have done.

use serde::Serialize;

use super::Snapshot;
use super::category::{Phases, RecordedPhase, categories};
use super::course::{Fragmentation, Run, TimelinePoint};
use super::origin::Origin;
use super::peak::{CategoryBytes, LiveBlock, LiveLine, Peak};
use super::steps::{Step, steps};
use crate::TorchError;
use crate::allocator::AllocatorConfig;
use crate::trace::{Action, Program, WhatIf, compare, what_if};

/// Settings that the guides recommend, to be tried on the recorded requests.
const SETTINGS: [&str; 6] = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:4",
    "expandable_segments:True,roundup_power2_divisions:8",
];

/// How well the allocator's copy repeats the recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Fidelity {
    pub exact: bool,
    pub num_segment_events: usize,
    pub num_matched_segment_events: usize,
    pub num_blocks: usize,
    pub num_matched_blocks: usize,
}

impl Fidelity {
    fn new(program: &Program, config: &AllocatorConfig) -> Self {
        let comparison = compare(program, config);
        Self {
            exact: comparison.is_exact(),
            num_segment_events: comparison.num_segment_events,
            num_matched_segment_events: comparison.num_matched_segment_events,
            num_blocks: comparison.num_places,
            num_matched_blocks: comparison.num_matched_places,
        }
    }
}

/// A request that the device had no memory for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RanOut {
    /// What was asked for, in whole blocks.
    pub bytes: u64,
    /// Free on the device then.
    pub device_free: u64,
    pub phase: RecordedPhase,
    #[serde(flatten)]
    pub origin: Origin,
}

/// Everything there is to say about a recorded run.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    pub device: usize,
    /// Those about memory.
    pub num_events: usize,
    pub settings: String,
    pub peak_allocated: u64,
    pub peak_reserved: u64,
    /// What the run was doing when the most was allocated.
    pub peak_phase: RecordedPhase,
    /// The marked step of that moment, counted from 1, if there are marks.
    pub peak_step: Option<Step>,
    /// Where memory ran out, if it did; of several times the last.
    pub ran_out: Option<RanOut>,
    /// At the peak of allocated bytes, the largest first.
    pub categories: Vec<CategoryBytes>,
    pub largest: Vec<LiveBlock>,
    /// The same, by line and op.
    pub lines: Vec<LiveLine>,
    pub timeline: Vec<TimelinePoint>,
    pub fragmentation: Fragmentation,
    /// `None` if the file has no segments: the start is not known then.
    pub fidelity: Option<Fidelity>,
    /// The first line is the recorded settings from an empty start, to compare the others with.
    pub what_if: Vec<WhatIf>,
    /// What limits the answer.
    pub notes: Vec<String>,
}

/// Explains the busiest device of a snapshot.
pub fn explain(snapshot: &Snapshot) -> Result<Explanation, TorchError> {
    let config = snapshot.config()?;
    let device = snapshot.busiest_device().unwrap_or(0);
    let Some(record) = snapshot.devices.get(device) else {
        return Ok(nothing(snapshot));
    };
    let program = snapshot.program(device)?;
    let phases = Phases::new(&snapshot.frames);
    let categories = categories(&program, &phases);
    let run = Run::new(&program, &config, &phases, &categories);
    let at = run.peak_allocated_at;
    let peak = Peak::new(snapshot, &program, &phases, &categories, at);
    let marked = steps(snapshot, device, &program);
    let events = record.trace.events.iter();
    let ran_out = events
        .clone()
        .rfind(|event| event.action == Action::OutOfMemory);

    let recorded = snapshot.settings.clone().unwrap_or_default();
    let mut settings = vec![(recorded.clone(), config.clone())];
    for text in SETTINGS {
        if text != recorded {
            settings.push((text.to_owned(), AllocatorConfig::parse(text)?));
        }
    }
    Ok(Explanation {
        device,
        num_events: events
            .clone()
            .filter(|event| event.action != Action::Other)
            .count(),
        settings: recorded,
        peak_allocated: run.peak_allocated,
        peak_reserved: run.peak_reserved,
        peak_phase: run.peak_phase,
        peak_step: marked
            .into_iter()
            .find(|step| (step.start..step.end).contains(&at)),
        ran_out: ran_out.map(|event| RanOut {
            bytes: event.size,
            device_free: event.address,
            phase: phases.get(event.stack),
            origin: Origin::new(&snapshot.frames, event.stack),
        }),
        categories: peak.categories,
        largest: peak.largest,
        lines: peak.lines,
        timeline: run.timeline,
        fragmentation: run.fragmentation,
        fidelity: program.initial().map(|_| Fidelity::new(&program, &config)),
        what_if: what_if(&program, &settings, snapshot.device_total),
        notes: notes(snapshot, device, &program),
    })
}

fn nothing(snapshot: &Snapshot) -> Explanation {
    Explanation {
        device: 0,
        num_events: 0,
        settings: snapshot.settings.clone().unwrap_or_default(),
        peak_allocated: 0,
        peak_reserved: 0,
        peak_phase: RecordedPhase::Unknown,
        peak_step: None,
        ran_out: None,
        categories: Vec::new(),
        largest: Vec::new(),
        lines: Vec::new(),
        timeline: Vec::new(),
        fragmentation: Fragmentation::default(),
        fidelity: None,
        what_if: Vec::new(),
        notes: vec!["The file holds no events and no segments.".into()],
    }
}

fn notes(snapshot: &Snapshot, device: usize, program: &Program) -> Vec<String> {
    let record = &snapshot.devices[device];
    let mut notes = Vec::new();
    if record.trace.events.is_empty() {
        notes.push(
            "No events were recorded: only the state at the end is known. Start the recording before the steps."
                .into(),
        );
    }
    match &record.segments {
        None => notes.push(
            "The file has events but no segments: what was allocated before the recording and not freed in it is missing from every figure."
                .into(),
        ),
        Some(_) if program.num_survivors() > 0 => notes.push(format!(
            "{} blocks were alive when the recording began. Under other settings they are placed in the order of their addresses, which may differ from the order in which they were allocated.",
            program.num_survivors()
        )),
        Some(_) => {}
    }
    if snapshot.complete == Some(false) {
        notes.push(
            "The recorder dropped its oldest events. Record fewer steps, or with more entries."
                .into(),
        );
    }
    if program.num_unknown_frees() > 0 {
        notes.push(format!(
            "{} frees are of blocks that nothing is known of; they are left out.",
            program.num_unknown_frees()
        ));
    }
    if snapshot.frames.num_stacks() <= 1 && !record.trace.events.is_empty() {
        notes.push(
            "No Python frames were recorded, so nothing can be said about categories.".into(),
        );
    }
    notes
}
