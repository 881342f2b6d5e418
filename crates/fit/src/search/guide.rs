//! Guide 000 beside the plan: every row of its tables, its presets, its two configurations and
//! its estimates, as the guide's setting, the plan of it, and what is recommended instead.
//!
//! The recommendation keeps the guide's effective batch and its fp16, and trains at the full
//! sequence length of the model size, which the guide mostly gives up.

use cinch_architecture::{Describe, Mamba};
use cinch_config::{Bytes, Checkpointing, Config, Settings, Source, VRAM_PRESETS};
use cinch_device::{Gpu, find};
use cinch_step::{StepPlan, StepTarget};
use serde::Serialize;

use super::answer::FitOutcome;
use super::request::Request;
use crate::FitError;

/// One line of the guide.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GuideRow {
    /// Where in the guide it stands.
    pub source: &'static str,
    pub size: &'static str,
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

/// What the guide puts into a configuration.
#[derive(Clone, Copy)]
struct Entry {
    source: &'static str,
    size: &'static str,
    memory_gb: u64,
    batch_size: usize,
    accumulation: usize,
    seq_len: usize,
    checkpointed: bool,
    offload: bool,
    claim: Option<Claim>,
}

/// What a figure of the guide is about, and the figure.
#[derive(Clone, Copy)]
enum Claim {
    Weights(u64),
    Activations(u64),
    Optimizer(u64),
    Total(u64),
}

/// A card of each memory that the guide names.
const CARDS: [(u64, &str); 6] = [
    (8, "RTX 3070"),
    (12, "RTX 3060"),
    (16, "RTX 4080"),
    (24, "RTX 3090"),
    (32, "RTX 5090"),
    (48, "RTX A6000"),
];

const TABLE: &str = "Recommended Settings by GPU";
const PRESETS: &str = "VRAM presets";
const ESTIMATES: &str = "Memory Usage Estimation";

/// Below 24 GB the guide checkpoints.
const CHECKPOINTED_BELOW: u64 = 24;

const fn entry(
    source: &'static str,
    memory_gb: u64,
    size: &'static str,
    [batch_size, accumulation, seq_len]: [usize; 3],
) -> Entry {
    Entry {
        source,
        size,
        memory_gb,
        batch_size,
        accumulation,
        seq_len,
        checkpointed: memory_gb < CHECKPOINTED_BELOW,
        offload: false,
        claim: None,
    }
}

/// The estimates name neither a card nor checkpointing; the guide says of them that they "fit in
/// 16GB easily".
const fn estimate(size: &'static str, shape: [usize; 3], claim: Claim) -> Entry {
    Entry {
        checkpointed: false,
        claim: Some(claim),
        ..entry(ESTIMATES, 16, size, shape)
    }
}

const MB: u64 = 1_000_000;

/// What the guide prints, in its order.
const PRINTED: [Entry; 18] = [
    entry(TABLE, 8, "small", [1, 16, 256]),
    entry(TABLE, 12, "small", [2, 8, 512]),
    entry(TABLE, 16, "small", [2, 8, 512]),
    entry(TABLE, 16, "medium", [1, 16, 256]),
    entry(TABLE, 24, "medium", [4, 4, 1024]),
    entry("config_16gb_safe.json", 16, "small", [1, 16, 256]),
    entry("Ultra-Safe 16GB Config", 16, "small", [1, 16, 256]),
    entry("config_balanced_16gb.json", 16, "small", [2, 8, 512]),
    estimate("small", [1, 16, 256], Claim::Weights(200 * MB)),
    estimate("medium", [1, 16, 256], Claim::Weights(600 * MB)),
    estimate("large", [1, 16, 256], Claim::Weights(1600 * MB)),
    estimate("medium", [1, 16, 256], Claim::Activations(100 * MB)),
    estimate("medium", [2, 8, 512], Claim::Activations(400 * MB)),
    estimate("medium", [4, 4, 1024], Claim::Activations(1600 * MB)),
    estimate("small", [1, 16, 256], Claim::Optimizer(400 * MB)),
    estimate("medium", [1, 16, 256], Claim::Optimizer(1200 * MB)),
    estimate("large", [1, 16, 256], Claim::Optimizer(3200 * MB)),
    estimate("medium", [2, 8, 512], Claim::Total(2200 * MB)),
];

/// Every row of the guide.
pub fn guide_rows() -> Result<Vec<GuideRow>, FitError> {
    let mut known: Vec<(Entry, Option<FitOutcome>)> = Vec::new();
    let entries = PRINTED[..5].iter().copied().chain(presets());
    let entries = entries.chain(PRINTED[5..].iter().copied());
    entries.map(|entry| row(entry, &mut known)).collect()
}

/// The presets behind `--vram`, with the size that the guide's table has on such a card.
fn presets() -> impl Iterator<Item = Entry> {
    VRAM_PRESETS.iter().map(|preset| {
        let memory_gb = preset.memory.get() / Bytes::GIB.get();
        let by_table = match memory_gb {
            ..CHECKPOINTED_BELOW => "small",
            _ => "medium",
        };
        let shape = [preset.batch_size, preset.accumulation, preset.seq_len];
        let size = preset.size.unwrap_or(by_table);
        Entry {
            checkpointed: preset.checkpointing == Checkpointing::Full,
            offload: preset.offload,
            ..entry(PRESETS, memory_gb, size, shape)
        }
    })
}

fn row(entry: Entry, known: &mut Vec<(Entry, Option<FitOutcome>)>) -> Result<GuideRow, FitError> {
    let gpu = entry.gpu()?;
    let (card, memory_bytes) = (gpu.card(), gpu.memory.usable_bytes());
    let asked = entry.config(entry.seq_len, [entry.batch_size, entry.accumulation])?;
    let blocks = if entry.checkpointed {
        asked.model.num_blocks()
    } else {
        0
    };
    let step = StepPlan::new(&asked, StepTarget::from(card.target), blocks)?;
    let plan = FitOutcome::new(&step, &Request::new(&asked, &card, memory_bytes));
    let same = |(other, _): &&(Entry, _)| {
        let key = |e: &Entry| (e.size, e.memory_gb, e.effective_batch());
        key(other) == key(&entry)
    };
    let recommendation = match known.iter().find(same) {
        Some((_, outcome)) => outcome.clone(),
        None => {
            let outcome = entry.recommend(gpu)?;
            known.push((entry, outcome.clone()));
            outcome
        }
    };
    Ok(GuideRow {
        source: entry.source,
        size: entry.size,
        card: gpu.name,
        memory_bytes,
        setting: entry.setting(),
        claim: entry.claim.map(|claim| claim.beside(&plan)),
        fits: plan.total_bytes <= memory_bytes,
        plan,
        recommendation,
    })
}

impl Entry {
    fn effective_batch(&self) -> usize {
        self.batch_size * self.accumulation
    }

    fn setting(&self) -> String {
        let mut text = format!(
            "batch {} × {}, {} tokens, fp16",
            self.batch_size, self.accumulation, self.seq_len
        );
        if self.checkpointed {
            text += ", checkpointing";
        }
        if self.offload {
            text += ", CPU offload";
        }
        text
    }

    fn gpu(&self) -> Result<&'static Gpu, FitError> {
        let card = CARDS.iter().find(|(memory, _)| *memory == self.memory_gb);
        Ok(find(card.map_or("", |(_, name)| name))?)
    }

    fn config(
        &self,
        seq_len: usize,
        [micro, accumulation]: [usize; 2],
    ) -> Result<Config, FitError> {
        let mut settings = Settings::new();
        for (key, value) in [
            ("model.type", Mamba::FAMILY.name.to_owned()),
            ("model.size", self.size.to_owned()),
            ("vram.batch_size", micro.to_string()),
            ("vram.gradient_accumulation_steps", accumulation.to_string()),
            ("vram.max_seq_len", seq_len.to_string()),
            ("vram.use_fp16", true.to_string()),
            ("vram.use_cpu_offload", self.offload.to_string()),
        ] {
            settings.set(key, &value, Source::Preset("guide 000".to_owned()))?;
        }
        Ok(settings.resolve()?)
    }

    /// The best at the guide's effective batch and the size's full sequence length.
    fn recommend(&self, gpu: &Gpu) -> Result<Option<FitOutcome>, FitError> {
        let size = Mamba::FAMILY.size(self.size);
        let positions = size.and_then(|size| (size.shape)().positions());
        let seq_len = positions.map_or(self.seq_len, |positions| positions as usize);
        let config = self.config(seq_len, [self.effective_batch(), 1])?;
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

impl Claim {
    fn beside(self, plan: &FitOutcome) -> GuideClaim {
        let parts = &plan.breakdown;
        let (what, claimed_bytes, planned_bytes) = match self {
            Self::Weights(claimed) => ("model weights", claimed, parts.weights),
            Self::Activations(claimed) => {
                let planned = parts.activations + parts.workspace;
                ("activations", claimed, planned)
            }
            Self::Optimizer(claimed) => ("optimizer states", claimed, parts.optimizer),
            Self::Total(claimed) => {
                let planned = plan.total_bytes - parts.overhead;
                ("total without overhead", claimed, planned)
            }
        };
        GuideClaim {
            what,
            claimed_bytes,
            planned_bytes,
        }
    }
}
