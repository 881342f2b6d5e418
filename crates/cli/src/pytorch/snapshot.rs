//! Recorded runs: `cinch plan --snapshot` explains one, `cinch trace` replays it.

mod course;
mod table;

use std::path::{Path, PathBuf};

use cinch_torch::TorchError;
use cinch_torch::allocator::AllocatorConfig;
use cinch_torch::snapshot::{BatchEffect, Batches, CannotTell, Explanation, Snapshot, explain};
use cinch_torch::trace::{compare, what_if};
use serde_json::{Value, json};

use crate::command::{print, print_json};
use crate::failure::usage;
use crate::picture;
use crate::progress::Waiting;
use crate::table::thousands;
use crate::voice;

/// As the setting's limit.
const MOST_BATCH: u64 = 1 << 20;
/// Operations up to which the largest batch is searched for, which takes some forty replays.
const MOST_SEARCHED: usize = 1 << 20;

/// How a recorded run is to be shown.
pub struct Showing<'arguments> {
    pub batch: Option<&'arguments str>,
    pub timeline: bool,
    pub pictures: &'arguments [PathBuf],
    pub json: bool,
}

/// What a recorded run used its memory for.
pub fn explain_file(path: &Path, showing: &Showing<'_>) -> anyhow::Result<()> {
    let batch = showing.batch.map(batch_size).transpose()?;
    let waiting = Waiting::new("reading and replaying the recording");
    let snapshot = Snapshot::read(path)?;
    let explanation = explain(&snapshot)?;
    let others = OtherBatches::new(&snapshot, explanation.device, batch)?;
    drop(waiting);
    let course = picture(path, &snapshot, &explanation);
    for file in showing.pictures {
        picture::write(&cinch_report::timeline(&course), file)?;
    }
    if showing.json {
        return print_json(&json!({
            "snapshot": cinch_files::shown(path).to_string(),
            "device_name": snapshot.device_name,
            "torch_version": snapshot.torch_version,
            "device_used_bytes": snapshot.device_used,
            "device_total_bytes": snapshot.device_total,
            "explanation": explanation,
            "batches": others.as_ref().map_or_else(unknown, OtherBatches::as_json),
            "batch": batch.map(|batch| match &others {
                Ok(others) => json!(others.effect(batch)),
                Err(reason) => unknown(reason),
            }),
        }));
    }
    print(&text(&snapshot, &explanation, &others))?;
    if showing.timeline {
        print(&course::chart(&course, &explanation))?;
    }
    Ok(())
}

pub use course::picture;

/// Everything that is told of a recorded run, in lines.
pub fn explained(snapshot: &Snapshot, explanation: &Explanation) -> Result<String, TorchError> {
    let others = OtherBatches::new(snapshot, explanation.device, None)?;
    Ok(text(snapshot, explanation, &others))
}

fn unknown(reason: &CannotTell) -> Value {
    json!({ "cannot_tell": reason.to_string() })
}

fn batch_size(text: &str) -> anyhow::Result<u64> {
    let size = text.parse().ok();
    let size = size.filter(|size| (1..=MOST_BATCH).contains(size));
    size.ok_or_else(|| {
        usage(format!(
            "--batch-size {text} is no number of samples\nhint: a whole number from 1 to {MOST_BATCH}"
        ))
    })
}

/// What other batches would take.
struct OtherBatches {
    recorded: Vec<u64>,
    num_scaling: usize,
    /// Ascending.
    effects: Vec<BatchEffect>,
    largest_that_fits: Option<BatchEffect>,
}

impl OtherBatches {
    /// The recorded batches, half the smallest, twice and four times the largest, the asked one,
    /// and the largest that fits the card.
    fn new(
        snapshot: &Snapshot,
        device: usize,
        asked: Option<u64>,
    ) -> Result<Result<Self, CannotTell>, TorchError> {
        let config = snapshot.config()?;
        Ok(Batches::new(snapshot, device)?.map(|batches| {
            let recorded = batches.recorded().to_vec();
            let mut sizes = recorded.clone();
            sizes.extend(asked);
            if let [smallest, .., largest] = recorded[..] {
                sizes.extend([smallest / 2, largest * 2, largest * 4]);
            }
            sizes.retain(|size| (1..=MOST_BATCH).contains(size));
            sizes.sort_unstable();
            sizes.dedup();
            let mut effects: Vec<BatchEffect> = sizes
                .into_iter()
                .map(|size| batches.effect(&config, size))
                .collect();
            let searched = batches.num_operations() <= MOST_SEARCHED;
            let largest_that_fits = searched
                .then(|| batches.largest_that_fits(&config, MOST_BATCH))
                .flatten();
            if let Some(largest) = largest_that_fits
                && !effects.contains(&largest)
            {
                effects.push(largest);
                effects.sort_by_key(|effect| effect.batch);
            }
            Self {
                recorded,
                num_scaling: batches.num_scaling(),
                effects,
                largest_that_fits,
            }
        }))
    }

    fn effect(&self, batch: u64) -> Option<&BatchEffect> {
        self.effects.iter().find(|effect| effect.batch == batch)
    }

    fn as_json(&self) -> Value {
        json!({
            "recorded": self.recorded,
            "requests_that_grow": self.num_scaling,
            "effects": self.effects,
            "largest_that_fits": self.largest_that_fits.map(|effect| effect.batch),
        })
    }

    fn text(&self, outside: Option<u64>) -> String {
        let mut text = table::batches(&self.recorded, &self.effects, outside);
        if let Some(largest) = &self.largest_that_fits {
            text += &format!(
                "the largest batch that fits is {}, if the {} requests of a step that grow with the batch go on as they did\n",
                thousands(largest.batch),
                thousands(self.num_scaling as u64)
            );
        }
        text
    }
}

fn text(
    snapshot: &Snapshot,
    explanation: &Explanation,
    others: &Result<OtherBatches, CannotTell>,
) -> String {
    let mut text = table::heading(snapshot, explanation);
    if let Some(ran_out) = &explanation.ran_out {
        text += &table::ran_out(ran_out);
    }
    text += &table::memory(snapshot, explanation);
    text += &table::peak(explanation);
    text += &table::fragmentation(&explanation.fragmentation);
    text += &table::settings(&explanation.what_if);
    if let Some(fidelity) = &explanation.fidelity {
        text += &match fidelity.exact {
            true => {
                "these are replays; the one as recorded repeats the recording event for event\n"
                    .to_owned()
            }
            false => format!(
                "these are replays; the one as recorded repeats {} of {} segment events and {} of {} blocks\n",
                fidelity.num_matched_segment_events,
                fidelity.num_segment_events,
                fidelity.num_matched_blocks,
                fidelity.num_blocks
            ),
        };
    }
    text += &match others {
        Ok(others) => others.text(table::outside(snapshot, explanation.device)),
        Err(reason) => format!("what another batch would take cannot be told: {reason}\n"),
    };
    for line in table::advice(explanation) {
        text += &format!("what helps: {line}\n");
    }
    text += &voice::notes(&explanation.notes);
    text
}

/// The requests of a recorded run under other settings of the allocator.
pub fn replay_file(path: &Path, alloc_confs: &[String], as_json: bool) -> anyhow::Result<()> {
    let mut configs = Vec::new();
    for text in alloc_confs {
        configs.push((text.clone(), AllocatorConfig::parse(text)?));
    }
    let snapshot = Snapshot::read(path)?;
    let Some(device) = snapshot.busiest_device() else {
        return Err(usage(format!(
            "{} holds no events and no segments\n\
             hint: record some steps with the script of `cinch trace --script`",
            path.display()
        )));
    };
    let config = snapshot.config()?;
    let recorded = snapshot.settings.clone().unwrap_or_default();
    configs.insert(0, (recorded, config.clone()));
    let program = snapshot.program(device)?;
    let lines = what_if(&program, &configs, snapshot.device_total);
    let comparison = program.initial().map(|_| compare(&program, &config));
    if as_json {
        return print_json(&json!({
            "trace": cinch_files::shown(path).to_string(),
            "device": device,
            "operations": program.operations().len(),
            "exact": comparison.as_ref().map(|comparison| comparison.is_exact()),
            "peak_reserved_recorded":
                comparison.as_ref().map(|comparison| comparison.peak_reserved_recorded),
            "peak_reserved_replayed":
                comparison.as_ref().map(|comparison| comparison.peak_reserved_replayed),
            "settings": lines,
        }));
    }
    let mut text = format!(
        "{} requests of device {device}\n",
        thousands(program.operations().len() as u64)
    );
    if let Some(comparison) = comparison {
        text += &format!(
            "reserved at the peak: recorded {}, replayed {}\n",
            thousands(comparison.peak_reserved_recorded),
            thousands(comparison.peak_reserved_replayed)
        );
    }
    print(&(text + &table::settings(&lines)))
}
