//! From a planned configuration to its picture, as the program does it.

use std::collections::BTreeSet;

use cinch_config::{Config, Settings, Source};
use cinch_graph::{Phase, Target};
use cinch_plan::Category;
use cinch_report::{Moment, StepPicture, timeline};
use cinch_step::StepPlan;

fn config() -> Config {
    let mut settings = Settings::new();
    let own = [
        ("model.type", "gpt2"),
        ("model.size", "gpt2"),
        ("vram.batch_size", "4"),
        ("vram.gradient_accumulation_steps", "8"),
        ("vram.max_seq_len", "1024"),
        ("vram.precision", "bf16"),
    ];
    for (key, value) in own {
        let source = Source::Flag("test".to_owned());
        settings.set(key, value, source).unwrap();
    }
    settings.resolve().unwrap()
}

/// What the program shows of a plan.
fn picture(step: &StepPlan, budget: u64) -> StepPicture {
    StepPicture {
        title: "GPT-2".to_owned(),
        subtitle: "bf16, micro batch 4 × 8, 1024 tokens".to_owned(),
        budget_bytes: Some(budget),
        // Evaluation runs in the same arena and may need the more of it.
        arena_bytes: step.arena_bytes(),
        micro_batches: step.config.batch.accumulation as u64,
        ..StepPicture::of_plan(&step.training, &step.plan)
    }
}

#[test]
fn a_plan_is_shown_to_the_byte() {
    let step = StepPlan::new(&config(), Target::Cuda, 4).unwrap();
    let budget = 8 << 30;
    let picture = picture(&step, budget);
    assert_eq!(picture.planned_bytes(), step.total_bytes());
    assert_eq!(picture.peak(), Some(step.plan.peak_node));
    assert_eq!(
        picture.peak_bytes(),
        step.plan.peak_bytes + step.overhead_bytes()
    );
    let totals: Vec<u64> = picture.moments.iter().map(Moment::total).collect();
    assert_eq!(totals, step.plan.timeline());
    let breakdown = step.breakdown();
    let peak = &picture.moments[step.plan.peak_node].bytes;
    assert_eq!(peak[Category::Gradients.index()], breakdown.gradients);
    assert_eq!(peak[Category::Optimizer.index()], breakdown.optimizer);
    let copies = peak[Category::ComputeCopies.index()];
    assert!(copies > 0 && copies + peak[Category::Weights.index()] == breakdown.weights);
    // Norms are had again everywhere; products only in the blocks that were chosen.
    let moments = picture.moments.iter().zip(&step.training.nodes);
    let recomputed = moments.filter(|(m, _)| m.phase == Phase::Recompute);
    let products = recomputed.filter(|(_, node)| node.op.name() == "linear");
    let blocks: BTreeSet<_> = products.filter_map(|(m, _)| m.block).collect();
    assert!(blocks.into_iter().eq(0..4));
    let sizes: Vec<u64> = picture.largest.iter().map(|held| held.bytes).collect();
    assert!(sizes.is_sorted_by(|a, b| a >= b) && sizes[0] > 0);
    let svg = timeline(&picture).to_svg();
    assert!(
        svg.contains("GPT-2") && svg.len() < 100_000,
        "{} bytes",
        svg.len()
    );
}
