//! The course of a recorded run as a chart and as a picture.

use std::path::Path;

use cinch_config::Bytes;
use cinch_graph::Phase;
use cinch_plan::{BytesByCategory, Category};
use cinch_report::{Held, Moment, StepPicture, Words, sparkline, text_chart};
use cinch_torch::snapshot::{
    Explanation, LiveLine, RecordedCategory, RecordedPhase, Snapshot, TimelinePoint,
};

use super::table::{known, nobody};
use crate::picture;

/// The chart's scale stands left of its curve, and so does the name of the line below it.
const NAME: &str = "reserved  ";

/// What tensors asked for over the recording, below what was reserved.
pub fn picture(path: &Path, snapshot: &Snapshot, explanation: &Explanation) -> StepPicture {
    let name = path.file_name().unwrap_or(path.as_os_str());
    let held = explanation.lines.iter().filter(|line| {
        use RecordedCategory::{Gradients, OptimizerStates, Parameters};
        !matches!(line.category, Parameters | Gradients | OptimizerStates)
    });
    StepPicture {
        title: format!(
            "{}: {} allocated, {} reserved",
            name.display(),
            Bytes::new(explanation.peak_allocated),
            Bytes::new(explanation.peak_reserved)
        ),
        subtitle: format!(
            "{} events{}{}{}",
            explanation.num_events,
            known(", ", snapshot.device_name.as_deref()),
            known(", PyTorch ", snapshot.torch_version.as_deref()),
            known(
                ", ",
                Some(explanation.settings.as_str()).filter(|text| !text.is_empty())
            ),
        ),
        arena_bytes: explanation.peak_reserved,
        micro_batches: 1,
        moments: moments(&explanation.timeline),
        largest: held
            .map(|line| Held {
                name: match line.num_blocks {
                    1 => short_name(line),
                    count => format!("{count} × {}", short_name(line)),
                },
                bytes: line.bytes,
            })
            .collect(),
        words: Words {
            unused: "rounding, holes, cache",
            total: "reserved",
            meaning: "reserved at the peak",
            axis: Some("the recording, request by request".to_owned()),
            ..Words::default()
        },
        ..StepPicture::default()
    }
}

/// The user's line and the op's file, without folders and functions: a picture has little room.
fn short_name(line: &LiveLine) -> String {
    let place = |text: &str| -> String {
        let place = text.split(' ').next().unwrap_or(text);
        place.rsplit('/').next().unwrap_or(place).to_owned()
    };
    let op = line.origin.op.as_deref().map(place);
    match (line.origin.line.as_deref().map(place), op) {
        (Some(own), Some(op)) => {
            let file = op.split(':').next().unwrap_or(&op);
            format!("{own} {file}")
        }
        (own, op) => own.or(op).unwrap_or_else(|| nobody(line).to_owned()),
    }
}

pub fn chart(picture: &StepPicture, explanation: &Explanation) -> String {
    let reserved: Vec<u64> = explanation
        .timeline
        .iter()
        .map(|point| point.reserved)
        .collect();
    let size = picture::terminal_chart();
    let width = size.width.saturating_sub(NAME.len());
    format!(
        "what tensors asked for, over the recording:\n{}\n{NAME}{}\n",
        text_chart(picture, size),
        sparkline(&reserved, width)
    )
}

fn moments(timeline: &[TimelinePoint]) -> Vec<Moment> {
    let mut phase = Phase::Forward;
    timeline
        .iter()
        .map(|point| {
            phase = phase_of(point.phase, phase);
            let mut bytes = BytesByCategory::default();
            for (&category, &size) in &point.categories {
                bytes[category_of(category).index()] += size;
            }
            Moment {
                name: format!("request {}", point.operation + 1),
                phase,
                block: None,
                seconds: None,
                bytes,
            }
        })
        .collect()
}

/// Pictures know the phases of a step alone; what lies between two steps belongs to the next.
fn phase_of(phase: RecordedPhase, before: Phase) -> Phase {
    match phase {
        RecordedPhase::Build | RecordedPhase::Forward | RecordedPhase::Loop => Phase::Forward,
        RecordedPhase::Backward => Phase::Backward,
        RecordedPhase::Recompute => Phase::Recompute,
        RecordedPhase::Optimizer => Phase::Update,
        RecordedPhase::Unknown => before,
    }
}

fn category_of(category: RecordedCategory) -> Category {
    match category {
        RecordedCategory::Parameters => Category::Weights,
        RecordedCategory::Gradients => Category::Gradients,
        RecordedCategory::OptimizerStates => Category::Optimizer,
        RecordedCategory::Activations => Category::Activations,
        RecordedCategory::Temporaries | RecordedCategory::Workspaces => Category::Workspace,
        RecordedCategory::Loop => Category::Batch,
        RecordedCategory::BeforeRecording | RecordedCategory::Unknown => Category::Other,
    }
}
