//! How long planning takes, from configuration to offsets, and how long a whole search for the
//! best settings, as the best of several runs: `cargo bench -p cinch-fit --bench planning`.
#![expect(clippy::print_stdout, reason = "its output is its purpose")]

use std::time::Instant;

use cinch_architecture::trained_sizes;
use cinch_config::{Settings, Source};
use cinch_device::Card;
use cinch_fit::search::{Request, fit};
use cinch_graph::Target;
use cinch_step::StepPlan;

const RUNS: usize = 20;

/// A search is long enough to need fewer runs.
const SEARCHES: usize = 5;

fn main() {
    plans();
    searches();
}

/// `cinch fit --gpu-memory 24` with an effective batch of 24, one thread and all of them.
fn searches() {
    let card = Card::known("RTX 3090").expect("a known card");
    for (family, size) in trained_sizes() {
        let mut settings = Settings::new();
        for (key, value) in [("model.type", family.name), ("model.size", size.name)] {
            let source = Source::Flag("bench".to_owned());
            settings.set(key, value, source).expect("known keys");
        }
        let config = settings.resolve().expect("a named size resolves");
        let mut request = Request::new(&config, &card, 24 << 30);
        request.effective_batch = Some(24);
        let search = || {
            let mut best = f64::INFINITY;
            let mut looked_at = 0;
            for _ in 0..SEARCHES {
                let start = Instant::now();
                looked_at = fit(&request).expect("something fits").report.looked_at;
                best = best.min(start.elapsed().as_secs_f64());
            }
            (best * 1e3, looked_at)
        };
        let one = rayon::ThreadPoolBuilder::new().num_threads(1).build();
        let (alone, looked_at) = one.expect("a thread").install(search);
        let (together, _) = search();
        println!(
            "{:<18} {looked_at:>5} settings looked at in {alone:.0} ms on one thread, {together:.0} ms on all",
            family.title_of(size)
        );
    }
}

fn plans() {
    for (family, size) in trained_sizes() {
        let mut settings = Settings::new();
        for (key, value) in [
            ("model.type", family.name),
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
                family.name,
                size.name,
                best * 1e3
            );
        }
    }
}
