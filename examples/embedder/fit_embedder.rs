//! The settings of a text embedder for several cards, by the library alone: what one configuration
//! takes, what it takes with a wider encoder, more experts and shorter rows, then the best settings
//! for cards of 24, 40 and 80 GB.
//!
//!     cargo run --release -p cinch-fit --example fit_embedder

use std::io::Write;

use cinch_config::{Bytes, Config, Settings, Source};
use cinch_device::Card;
use cinch_fit::search::{Request, best, budget_with_margin};
use cinch_graph::Target;
use cinch_step::StepPlan;

/// What of a card's memory is left alone.
const MARGIN: f64 = 0.15;

fn config(own: &[(&str, &str)]) -> Result<Config, cinch_config::ConfigError> {
    let mut settings = Settings::new();
    let shared = [
        ("model.type", "naics"),
        ("vram.precision", "fp16"),
        ("vram.checkpointing", "full"),
    ];
    for (key, value) in shared.iter().chain(own) {
        settings.set(key, value, Source::Flag("example".to_owned()))?;
    }
    settings.resolve()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut out = std::io::stdout().lock();
    let one = config(&[
        ("model.negatives", "8"),
        ("vram.batch_size", "32"),
        ("vram.gradient_accumulation_steps", "8"),
    ])?;
    let step = StepPlan::new(&one, Target::Cuda, one.model.num_blocks())?;
    writeln!(
        out,
        "batch 32, 8 negatives: {} for {} anchors a step",
        Bytes::new(step.total_bytes()),
        one.batch.effective_batch()
    )?;
    for (part, bytes) in step.breakdown().parts() {
        writeln!(out, "  {part:<20} {}", Bytes::new(bytes))?;
    }
    let wider = config(&[
        ("model.d_model", "768"),
        ("model.d_ffn", "3072"),
        ("model.adapter_rank", "16"),
        ("model.adapter_alpha", "32"),
        ("model.n_experts", "8"),
        ("model.title_length", "32"),
        ("model.negatives", "8"),
        ("vram.max_seq_len", "256"),
        ("vram.batch_size", "32"),
        ("vram.gradient_accumulation_steps", "8"),
    ])?;
    let step = StepPlan::new(&wider, Target::Cuda, wider.model.num_blocks())?;
    writeln!(
        out,
        "encoders of 768, rank 16, 8 experts, rows of 256: {} parameters, {}",
        wider.model.parameters(),
        Bytes::new(step.total_bytes())
    )?;
    for (name, gib) in [("RTX 3090", 24), ("A100 40GB", 40), ("A100 80GB", 80)] {
        let card = Card::known(name).ok_or("a card that the table lacks")?;
        let memory = Bytes::from_gib(gib).get();
        for (stage, negatives) in [("stage 01", "24"), ("later stages", "8")] {
            let asked = config(&[("model.negatives", negatives)])?;
            let mut request = Request::new(&asked, &card, memory);
            request.budget_bytes = budget_with_margin(memory, MARGIN)?;
            request.effective_batch = Some(256);
            let plan = best(&request)?;
            let batch = &plan.config.batch;
            writeln!(
                out,
                "{name}, {stage}: batch {}, accumulation {}, {negatives} negatives: {} ({:.0} %)",
                batch.batch_size,
                batch.accumulation,
                Bytes::new(plan.total_bytes()),
                100.0 * plan.total_bytes() as f64 / memory as f64
            )?;
        }
    }
    Ok(())
}
