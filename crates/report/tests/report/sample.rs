//! Pictures to test with: steps of a made-up model whose every byte follows from its settings.

use cinch_graph::Phase;
use cinch_plan::{BytesByCategory, Category};
use cinch_report::{FrontPicture, FrontPoint, Held, Moment, StepPicture};

pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

/// A model of equal blocks: what a block's ops hold, and which blocks are recomputed.
pub struct Sample {
    pub blocks: usize,
    pub ops: usize,
    pub recomputed: usize,
    pub seconds: bool,
}

impl Default for Sample {
    fn default() -> Self {
        Self {
            blocks: 12,
            ops: 9,
            recomputed: 5,
            seconds: true,
        }
    }
}

impl Sample {
    pub fn step(&self) -> StepPicture {
        let mut moments = Vec::new();
        let mut kept = 96 * MIB;
        let mut add = |phase, block: Option<usize>, op: &str, live: u64, scratch: u64| {
            let mut bytes = BytesByCategory::default();
            let mut set = |category: Category, amount| bytes[category.index()] = amount;
            set(Category::Weights, 475 * MIB);
            set(Category::ComputeCopies, 237 * MIB);
            set(Category::Gradients, 475 * MIB);
            set(Category::Optimizer, 950 * MIB);
            set(Category::Batch, MIB);
            set(Category::Other, 4096);
            set(Category::Activations, live);
            set(Category::Workspace, scratch);
            let place = block.map_or(String::new(), |block| format!("blocks.{block}."));
            moments.push(Moment {
                name: format!("{place}{op}"),
                phase,
                block,
                seconds: self.seconds.then_some(match phase {
                    Phase::Update => 2.1e-3,
                    Phase::Backward => 9e-4,
                    Phase::Forward | Phase::Recompute | Phase::Exchange => 4.2e-4,
                }),
                bytes,
            });
        };
        add(Phase::Forward, None, "embedding", kept, 0);
        let held = 24 * MIB;
        for block in 0..self.blocks {
            let entry = kept;
            for op in 0..self.ops {
                kept += held;
                let scratch = if op % 4 == 2 { 70 * MIB } else { 0 };
                add(
                    Phase::Forward,
                    Some(block),
                    &format!("op{op}"),
                    kept,
                    scratch,
                );
            }
            if block < self.recomputed {
                kept = entry + 24 * MIB;
            }
        }
        let logits = 512 * MIB;
        add(Phase::Forward, None, "loss", kept + logits, 128 * MIB);
        add(
            Phase::Backward,
            None,
            "loss.backward",
            kept + logits,
            256 * MIB,
        );
        for block in (0..self.blocks).rev() {
            if block < self.recomputed {
                kept -= 24 * MIB;
                for op in 0..self.ops {
                    kept += held;
                    add(Phase::Recompute, Some(block), &format!("op{op}"), kept, 0);
                }
            }
            for op in (0..self.ops).rev() {
                let name = format!("op{op}.backward");
                let scratch = if op % 4 == 2 { 130 * MIB } else { 0 };
                add(
                    Phase::Backward,
                    Some(block),
                    &name,
                    kept + 60 * MIB,
                    scratch,
                );
                kept -= held;
            }
        }
        for parameter in 0..8 {
            let name = format!("adamw.{parameter}");
            add(Phase::Update, None, &name, 0, 8 * MIB);
        }
        let mut picture = StepPicture {
            title: "GPT-2 small on a card of 8 GiB".to_owned(),
            subtitle: "bf16 · micro batch 8 × 16 · 1024 tokens · 5 of 12 blocks recomputed"
                .to_owned(),
            budget_bytes: Some(7 * GIB + GIB / 5),
            capacity_bytes: Some(8 * GIB),
            overhead_bytes: 621 * MIB,
            micro_batches: 16,
            moments,
            ..StepPicture::default()
        };
        picture.arena_bytes = picture.peak_bytes() - picture.overhead_bytes + 12 * MIB;
        let names = [
            "loss.logits",
            "loss.logits.gradient",
            "blocks.11.mlp.hidden.activation",
        ];
        for (index, name) in names.iter().cycle().take(20).enumerate() {
            picture.largest.push(Held {
                name: format!("{name}{}", if index < 3 { "" } else { ".copy" }),
                bytes: (512 - 20 * index as u64) * MIB,
            });
        }
        picture
    }
}

/// Settings of one model: what is faster needs more memory, and some are no good.
pub fn choices() -> FrontPicture {
    let point = |label: &str, gib: f64, rate: f64| FrontPoint {
        label: label.to_owned(),
        bytes: (gib * GIB as f64) as u64,
        rate,
        recommended: label == "aggressive",
    };
    FrontPicture {
        title: "Mamba small: memory against speed".to_owned(),
        subtitle: "effective batch 16 · 1024 tokens · bf16 · Quadro RTX 6000".to_owned(),
        unit: "tokens/s".to_owned(),
        budget_bytes: Some(22 * GIB),
        capacity_bytes: Some(24 * GIB),
        points: vec![
            point("micro batch 1, all recomputed", 3.1, 21_400.0),
            point("safe", 6.4, 29_900.0),
            point("balanced", 11.8, 35_600.0),
            point("micro batch 4, 8-bit states", 12.4, 34_000.0),
            point("micro batch 8, 6 recomputed", 16.2, 38_100.0),
            point("aggressive", 20.9, 41_300.0),
            point("maximum", 23.4, 42_000.0),
            point("", 9.0, 27_000.0),
            point("fp32", 21.5, 19_000.0),
        ],
    }
}
