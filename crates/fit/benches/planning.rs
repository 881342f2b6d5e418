//! How long planning takes, from configuration to offsets, as the best of several runs:
//! `cargo bench -p cinch-fit --bench planning`.
#![expect(clippy::print_stdout, reason = "its output is its purpose")]

use std::time::Instant;

use cinch_config::{ModelKind, Settings, Source, sizes_of};
use cinch_fit::StepPlan;
use cinch_graph::Target;

const RUNS: usize = 20;

fn main() {
    for kind in ModelKind::ALL {
        for size in sizes_of(kind) {
            let mut settings = Settings::new();
            for (key, value) in [
                ("model.type", kind.name()),
                ("model.size", size.name),
                ("vram.batch_size", "8"),
                ("vram.gradient_accumulation_steps", "1"),
            ] {
                let source = Source::Flag("bench".to_owned());
                settings.set(key, value, source).expect("known keys");
            }
            let config = settings.resolve().expect("a named size resolves");
            for blocks in [0, config.model.num_blocks()] {
                let mut best = f64::INFINITY;
                let mut nodes = 0;
                for _ in 0..RUNS {
                    let start = Instant::now();
                    let step = StepPlan::new(&config, Target::Cpu, blocks).expect("a plan");
                    best = best.min(start.elapsed().as_secs_f64());
                    nodes = step.training.nodes.len();
                }
                println!(
                    "{:<6} {:<13} {blocks:>2} blocks recomputed: {nodes:>5} nodes in {:.2} ms",
                    kind.name(),
                    size.name,
                    best * 1e3
                );
            }
        }
    }
}
