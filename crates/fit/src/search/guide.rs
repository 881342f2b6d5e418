//! Guide 000 beside the plan: every row of its tables, its presets, its two configurations and
//! its estimates, as the guide's setting, the plan of it, and what is recommended instead.
//!
//! What the guide says is data (`data/guide_000.json`); the presets are those of the registry.
//! The recommendation keeps the guide's effective batch and its fp16, and trains at the full
//! sequence length of the model size, which the guide mostly gives up.

use cinch_architecture::{Describe, Mamba};
use cinch_config::{Bytes, Checkpointing, Config, Settings, Source, VRAM_PRESETS, VramPreset};
use cinch_device::{Gpu, find};
use cinch_step::{StepPlan, StepTarget};
use serde::{Deserialize, Serialize};

use super::answer::FitOutcome;
use super::request::Request;
use crate::FitError;

const FILE: &str = "data/guide_000.json";
const TEXT: &str = include_str!("../../data/guide_000.json");

/// One line of the guide.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GuideRow {
    /// Where in the guide it stands.
    pub source: String,
    pub size: String,
    /// The card that stands for the guide's memory.
    pub card: &'static str,
    pub memory_bytes: u64,
    /// What the guide sets.
    pub setting: String,
    /// What the guide says of it, where it gives a figure.
    pub claim: Option<GuideClaim>,
    /// The plan of the guide's setting.
    pub plan: FitOutcome,
    pub fits: bool,
    /// At the guide's effective batch and the full sequence length; none where nothing fits.
    pub recommendation: Option<FitOutcome>,
}

/// A figure of the guide, and the planned one beside it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GuideClaim {
    pub what: &'static str,
    pub claimed_bytes: u64,
    pub planned_bytes: u64,
}

/// What the file holds.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Guide {
    guide: String,
    /// A card of each memory that the guide names.
    cards: Vec<GuideCard>,
    /// The size that the guide's table has on cards from so much memory on, for presets that
    /// name none; in rising order.
    preset_sizes: Vec<PresetSize>,
    /// In the order of the guide.
    sections: Vec<Section>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GuideCard {
    memory_gb: u64,
    card: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PresetSize {
    from_gb: u64,
    size: String,
}

/// Rows of one place in the guide: those that are listed, or the presets behind `--vram`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Section {
    source: String,
    #[serde(default)]
    entries: Vec<Entry>,
    #[serde(default)]
    presets: bool,
}

/// What the guide puts into a configuration.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    size: String,
    memory_gb: u64,
    batch_size: usize,
    accumulation: usize,
    seq_len: usize,
    checkpointing: bool,
    #[serde(default)]
    offload: bool,
    claim: Option<Claim>,
}

/// What a figure of the guide is about, and the figure.
#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct Claim {
    part: ClaimedPart,
    bytes: u64,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ClaimedPart {
    Weights,
    Activations,
    Optimizer,
    Total,
}

/// Every row of the guide.
pub fn guide_rows() -> Result<Vec<GuideRow>, FitError> {
    let guide: Guide = serde_json::from_str(TEXT).map_err(|error| FitError::GuideData {
        file: FILE,
        problem: error.to_string(),
    })?;
    let mut known: Vec<(Entry, Option<FitOutcome>)> = Vec::new();
    let mut rows = Vec::new();
    for section in &guide.sections {
        let presets = VRAM_PRESETS.iter().filter(|_| section.presets);
        let presets = presets.map(|preset| guide.preset(preset));
        for entry in section.entries.iter().cloned().chain(presets) {
            rows.push(guide.row(&section.source, &entry, &mut known)?);
        }
    }
    Ok(rows)
}

impl Guide {
    fn preset(&self, preset: &VramPreset) -> Entry {
        let memory_gb = preset.memory.get() / Bytes::GIB.get();
        let mut sizes = self.preset_sizes.iter().rev();
        let by_table = sizes.find(|size| size.from_gb <= memory_gb);
        let size = match preset.size {
            Some(size) => size.to_owned(),
            None => by_table.map_or_else(String::new, |by_table| by_table.size.clone()),
        };
        Entry {
            size,
            memory_gb,
            batch_size: preset.batch_size,
            accumulation: preset.accumulation,
            seq_len: preset.seq_len,
            checkpointing: preset.checkpointing == Checkpointing::Full,
            offload: preset.offload,
            claim: None,
        }
    }

    fn row(
        &self,
        source: &str,
        entry: &Entry,
        known: &mut Vec<(Entry, Option<FitOutcome>)>,
    ) -> Result<GuideRow, FitError> {
        let gpu = self.gpu(entry.memory_gb)?;
        let (card, memory_bytes) = (gpu.card(), gpu.memory.usable_bytes());
        let cut = [entry.batch_size, entry.accumulation];
        let asked = self.config(entry, entry.seq_len, cut)?;
        let blocks = if entry.checkpointing {
            asked.model.num_blocks()
        } else {
            0
        };
        let step = StepPlan::new(&asked, StepTarget::from(card.target), blocks)?;
        let plan = FitOutcome::new(&step, &Request::new(&asked, &card, memory_bytes));
        let same = |(other, _): &&(Entry, _)| other.recommends_as(entry);
        let recommendation = match known.iter().find(same) {
            Some((_, outcome)) => outcome.clone(),
            None => {
                let outcome = self.recommend(entry, gpu)?;
                known.push((entry.clone(), outcome.clone()));
                outcome
            }
        };
        Ok(GuideRow {
            source: source.to_owned(),
            size: entry.size.clone(),
            card: gpu.name,
            memory_bytes,
            setting: entry.setting(),
            claim: entry.claim.map(|claim| claim.beside(&plan)),
            fits: plan.total_bytes <= memory_bytes,
            plan,
            recommendation,
        })
    }

    fn gpu(&self, memory_gb: u64) -> Result<&'static Gpu, FitError> {
        let mut cards = self.cards.iter();
        let card = cards.find(|card| card.memory_gb == memory_gb);
        Ok(find(card.map_or("", |card| &card.card))?)
    }

    fn config(
        &self,
        entry: &Entry,
        seq_len: usize,
        [micro, accumulation]: [usize; 2],
    ) -> Result<Config, FitError> {
        let mut settings = Settings::new();
        for (key, value) in [
            ("model.type", Mamba::FAMILY.name.to_owned()),
            ("model.size", entry.size.clone()),
            ("vram.batch_size", micro.to_string()),
            ("vram.gradient_accumulation_steps", accumulation.to_string()),
            ("vram.max_seq_len", seq_len.to_string()),
            ("vram.use_fp16", true.to_string()),
            ("vram.use_cpu_offload", entry.offload.to_string()),
        ] {
            let source = Source::Preset(format!("guide {}", self.guide));
            settings.set(key, &value, source)?;
        }
        Ok(settings.resolve()?)
    }

    /// The best at the guide's effective batch and the size's full sequence length.
    fn recommend(&self, entry: &Entry, gpu: &Gpu) -> Result<Option<FitOutcome>, FitError> {
        let size = Mamba::FAMILY.size(&entry.size);
        let positions = size.and_then(|size| (size.shape)().positions());
        let seq_len = positions.map_or(entry.seq_len, |positions| positions as usize);
        let config = self.config(entry, seq_len, [entry.effective_batch(), 1])?;
        let (card, memory_bytes) = (gpu.card(), gpu.memory.usable_bytes());
        let mut request = Request::new(&config, &card, memory_bytes);
        request.fixed = vec!["vram.precision", "vram.max_seq_len"];
        match super::best(&request) {
            Ok(step) => Ok(Some(FitOutcome::new(&step, &request))),
            Err(FitError::DoesNotFit(_)) => Ok(None),
            Err(other) => Err(other),
        }
    }
}

impl Entry {
    fn effective_batch(&self) -> usize {
        self.batch_size * self.accumulation
    }

    /// Whether the same is recommended for both.
    fn recommends_as(&self, other: &Self) -> bool {
        let key = |e: &Self| (e.memory_gb, e.effective_batch());
        self.size == other.size && key(self) == key(other)
    }

    fn setting(&self) -> String {
        let mut text = format!(
            "batch {} × {}, {} tokens, fp16",
            self.batch_size, self.accumulation, self.seq_len
        );
        if self.checkpointing {
            text += ", checkpointing";
        }
        if self.offload {
            text += ", CPU offload";
        }
        text
    }
}

impl Claim {
    fn beside(self, plan: &FitOutcome) -> GuideClaim {
        let parts = &plan.breakdown;
        let (what, planned_bytes) = match self.part {
            ClaimedPart::Weights => ("model weights", parts.weights),
            ClaimedPart::Activations => ("activations", parts.activations + parts.workspace),
            ClaimedPart::Optimizer => ("optimizer states", parts.optimizer),
            ClaimedPart::Total => {
                let planned = plan.total_bytes - parts.overhead;
                ("total without overhead", planned)
            }
        };
        GuideClaim {
            what,
            claimed_bytes: self.bytes,
            planned_bytes,
        }
    }
}
