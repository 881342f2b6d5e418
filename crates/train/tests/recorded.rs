//! What recorded steps take of a GPU: the launches that ops declare against the commands that they
//! become, and the memory that follows from them against what a card's driver showed.

use cinch_config::{Config, Settings, Source};
use cinch_engine::MicroBatch;
use cinch_engine::cuda::command::{Command, Tail};
use cinch_engine::cuda::lowering::Card;
use cinch_engine::cuda::op::lower_all;
use cinch_graph::{Graph, Target};
use cinch_plan::{Plan, num_micro_nodes};
use cinch_step::{StepPlan, num_micro_recordings, training_launches, whole_launches};

/// A session on an H200 with driver 580, and the MiB that it took besides context and arena until
/// its first step.
struct Reading {
    settings: &'static [(&'static str, &'static str)],
    recomputed: usize,
    mib: f64,
}

const READINGS: [Reading; 7] = [
    Reading {
        settings: &[
            ("model.type", "gpt2"),
            ("vram.batch_size", "32"),
            ("vram.precision", "bf16"),
            ("model.dropout", "0"),
        ],
        recomputed: 0,
        mib: 6.7,
    },
    Reading {
        settings: &[
            ("model.type", "mamba"),
            ("vram.batch_size", "8"),
            ("vram.precision", "bf16"),
        ],
        recomputed: 0,
        mib: 6.6,
    },
    Reading {
        settings: &[
            ("model.type", "gsa"),
            ("model.size", "512m-low-memory"),
            ("vram.batch_size", "2"),
            ("vram.max_seq_len", "1024"),
            ("vram.precision", "bf16"),
        ],
        recomputed: 0,
        mib: 17.6,
    },
    Reading {
        settings: &[
            ("model.type", "mu"),
            ("vram.batch_size", "32"),
            ("vram.max_seq_len", "512"),
            ("vram.precision", "fp16"),
        ],
        recomputed: 0,
        mib: 14.7,
    },
    Reading {
        settings: &[
            ("model.type", "qwen2.5-0.5b"),
            ("vram.batch_size", "8"),
            ("vram.max_seq_len", "1024"),
            ("vram.precision", "bf16"),
        ],
        recomputed: 0,
        mib: 11.1,
    },
    Reading {
        settings: &[
            ("model.type", "qwen2.5-7b"),
            ("lora.rank", "128"),
            ("vram.batch_size", "1"),
            ("vram.max_seq_len", "1536"),
            ("vram.precision", "bf16"),
        ],
        recomputed: 0,
        mib: 12.8,
    },
    Reading {
        settings: &[
            ("model.type", "naics"),
            ("model.negatives", "24"),
            // Titles in as many chunks as other texts, as they were when this was read.
            ("model.title_length", "40"),
            ("vram.batch_size", "45"),
            ("vram.precision", "fp16"),
        ],
        recomputed: usize::MAX,
        mib: 88.0,
    },
];

fn config(own: &[(&str, &str)], accumulation: &str) -> Config {
    let mut settings = Settings::new();
    let accumulation = ("vram.gradient_accumulation_steps", accumulation);
    for (key, value) in own.iter().chain([&accumulation]) {
        let source = Source::Flag("test".to_owned());
        settings.set(key, value, source).unwrap();
    }
    settings.resolve().unwrap()
}

fn plan(reading: &Reading, accumulation: &str) -> StepPlan {
    let config = config(reading.settings, accumulation);
    let blocks = reading.recomputed.min(config.model.num_blocks());
    StepPlan::new(&config, Target::Cuda, blocks).unwrap()
}

/// What is put on the stream when joined products are computed one by one.
fn num_commands(graph: &Graph, plan: &Plan, micro: MicroBatch) -> u64 {
    let nodes = 0..graph.nodes.len();
    let lowered = lower_all(graph, plan, nodes, micro, Card::HOPPER);
    let commands = lowered.iter().flat_map(|lowered| &lowered.commands);
    let apart = commands.flat_map(|command| match command {
        Command::Ways(ways) => &ways[0][..],
        command => std::slice::from_ref(command),
    });
    // The tail of a pass may be more than one launch.
    let tail = |tail: &Tail| match &tail.command {
        Command::Ways(ways) => ways[0].len(),
        _ => 1,
    };
    let each = apart.map(|command| match command {
        Command::Products {
            heads,
            products,
            tails,
            ..
        } => (heads.len() + products.len() + tails.iter().map(tail).sum::<usize>()) as u64,
        Command::Await { .. } => 0,
        _ => 1,
    });
    each.sum()
}

/// Declared launches are those that are recorded, but for a few of each hundred.
#[test]
fn declared_launches_are_commands() {
    for reading in &READINGS {
        let step = plan(reading, "1");
        for variant in step.variants() {
            let graphs: [(&Graph, &Plan, Vec<u64>); 2] = [
                (
                    &variant.training,
                    &variant.plan,
                    training_launches(&variant.training, 1),
                ),
                (
                    &variant.evaluation,
                    &variant.evaluation_plan,
                    whole_launches(&variant.evaluation),
                ),
            ];
            for (graph, plan, declared) in graphs {
                let commands = num_commands(graph, plan, MicroBatch::of_one(true)) as f64;
                let declared = declared.iter().sum::<u64>() as f64;
                assert!(
                    (declared - commands).abs() <= 0.06 * commands,
                    "{:?}: {declared} for {commands}",
                    reading.settings
                );
            }
        }
    }
}

/// What is left of each reading without its recorded steps is nearly one figure, so that the
/// reading of one model serves another: the driver shows what is planned within 16 MiB.
#[test]
fn the_rest_of_each_reading_is_nearly_the_same() {
    let rest: Vec<f64> = READINGS
        .iter()
        .map(|reading| {
            let step = plan(reading, "1");
            reading.mib - step.recorded_bytes() as f64 / f64::from(1 << 20)
        })
        .collect();
    let least = rest.iter().copied().fold(f64::INFINITY, f64::min);
    let most = rest.iter().copied().fold(0.0, f64::max);
    assert!(least > 0.0 && most - least < 12.0, "{rest:?}");
}

/// The first micro batch of a step is recorded by itself where others follow it.
#[test]
fn accumulation_records_the_micro_batch_twice() {
    let reading = &READINGS[0];
    let [one, two, eight] = ["1", "2", "8"].map(|accumulation| plan(reading, accumulation));
    let micro = num_micro_nodes(&one.training);
    let launches = training_launches(&one.training, 1);
    let once: u64 = launches[..micro].iter().sum();
    let per_launch = one.recorded_bytes()
        / (launches.iter().sum::<u64>() + whole_launches(&one.evaluation).iter().sum::<u64>());
    assert_eq!(
        two.recorded_bytes(),
        one.recorded_bytes() + once * per_launch
    );
    assert_eq!(eight.recorded_bytes(), two.recorded_bytes());
    assert_eq!(num_micro_recordings(&two.training, 2), 2);
    // Nothing is recorded on the CPU.
    let cpu = StepPlan::new(&one.config, Target::Cpu, 0).unwrap();
    assert_eq!(cpu.recorded_bytes(), 0);
}
