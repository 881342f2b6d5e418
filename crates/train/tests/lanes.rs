//! Steps of real models as they are recorded, with gradients of weights beside the chain of other
//! commands: whatever may run at the same time touches nothing of each other's memory.

use cinch_config::{Config, Settings, Source};
use cinch_engine::MicroBatch;
use cinch_engine::cuda::command::{Command, Lane, MatrixAt, Product};
use cinch_engine::cuda::lanes::spread;
use cinch_engine::cuda::lowering::Card;
use cinch_engine::cuda::op::{Bytes, Lowered, Memory, lower_all};
use cinch_graph::Target;
use cinch_step::StepPlan;

struct Model {
    settings: &'static [(&'static str, &'static str)],
    recomputed: usize,
    /// Gradients beside the chain, at least.
    beside: usize,
}

const fn model(
    settings: &'static [(&'static str, &'static str)],
    recomputed: usize,
    beside: usize,
) -> Model {
    Model {
        settings,
        recomputed,
        beside,
    }
}

const MODELS: [Model; 9] = [
    model(
        &[
            ("model.type", "gpt2"),
            ("vram.batch_size", "4"),
            ("vram.precision", "bf16"),
        ],
        0,
        40,
    ),
    model(
        &[
            ("model.type", "gpt2"),
            ("vram.batch_size", "4"),
            ("vram.precision", "bf16"),
            ("vram.offload_activations", "6"),
        ],
        usize::MAX,
        20,
    ),
    model(
        &[
            ("model.type", "mamba"),
            ("vram.batch_size", "8"),
            ("vram.precision", "bf16"),
        ],
        0,
        8,
    ),
    model(
        &[
            ("model.type", "gsa"),
            ("model.size", "512m-low-memory"),
            ("vram.batch_size", "2"),
            ("vram.max_seq_len", "1024"),
            ("vram.precision", "bf16"),
        ],
        0,
        20,
    ),
    model(
        &[
            ("model.type", "mu"),
            ("vram.batch_size", "8"),
            ("vram.max_seq_len", "512"),
            ("vram.precision", "fp16"),
        ],
        0,
        50,
    ),
    model(
        &[
            ("model.type", "qwen2.5-0.5b"),
            ("vram.batch_size", "2"),
            ("vram.max_seq_len", "1024"),
            ("vram.precision", "bf16"),
        ],
        4,
        50,
    ),
    model(
        &[
            ("model.type", "qwen2.5-7b"),
            ("lora.rank", "128"),
            ("vram.batch_size", "1"),
            ("vram.max_seq_len", "1536"),
            ("vram.precision", "bf16"),
        ],
        0,
        28,
    ),
    model(
        &[
            ("model.type", "qwen2.5-7b"),
            ("lora.rank", "16"),
            ("lora.dropout", "0.1"),
            ("vram.offload_frozen", "true"),
            ("vram.batch_size", "1"),
            ("vram.max_seq_len", "512"),
            ("vram.precision", "bf16"),
        ],
        usize::MAX,
        0,
    ),
    model(
        &[
            ("model.type", "naics"),
            ("model.negatives", "2"),
            ("vram.batch_size", "4"),
            ("vram.precision", "fp16"),
        ],
        usize::MAX,
        10,
    ),
];

fn config(own: &[(&str, &str)]) -> Config {
    let mut settings = Settings::new();
    let accumulation = ("vram.gradient_accumulation_steps", "1");
    for (key, value) in own.iter().chain([&accumulation]) {
        let source = Source::Flag("test".to_owned());
        settings.set(key, value, source).unwrap();
    }
    settings.resolve().unwrap()
}

/// From the first to the last element of a matrix.
fn extent(matrix: &MatrixAt, rows: usize, columns: usize) -> Bytes {
    let (rows, columns) = match matrix.transposed {
        true => (columns, rows),
        false => (rows, columns),
    };
    let last = (rows - 1) * matrix.row_stride + columns;
    let end = matrix.address + last as u64 * matrix.dtype.size();
    (matrix.address, end)
}

fn add_product(memory: &mut Memory, product: &Product) {
    let (m, n, k) = (product.m, product.n, product.k);
    memory.reads.push(extent(&product.a, m, k));
    memory.reads.push(extent(&product.b, k, n));
    memory.writes.push(extent(&product.c, m, n));
    let scratch = product.workspace;
    memory
        .writes
        .push((scratch, scratch + product.workspace_bytes));
    if let Some(bias) = product.bias {
        let (kept, copied) = (bias.kept, bias.copied);
        memory.reads.push((kept, kept + n as u64 * 4));
        memory
            .reads
            .push((copied, copied + n as u64 * product.c.dtype.size()));
    }
}

/// All that commands touch: products by their matrices, everything else by its node.
fn touched(commands: &[Command], node: &Memory) -> Memory {
    let mut memory = Memory::default();
    for command in commands {
        match command {
            Command::Product(product) => add_product(&mut memory, product),
            Command::Products {
                heads,
                products,
                tails,
                ..
            } => {
                for product in products {
                    add_product(&mut memory, product);
                }
                if heads.len() + tails.len() > 0 {
                    memory.reads.extend(&node.reads);
                    memory.writes.extend(&node.writes);
                }
            }
            &Command::Clear { address, bytes } => memory.writes.push((address, address + bytes)),
            _ => {
                memory.reads.extend(&node.reads);
                memory.writes.extend(&node.writes);
            }
        }
    }
    memory
}

fn meet(a: &[Bytes], b: &[Bytes]) -> bool {
    let mut pairs = a.iter().flat_map(|a| b.iter().map(move |b| (a, b)));
    pairs.any(|(a, b)| a.0 < b.1 && b.0 < a.1)
}

fn disturb(a: &Memory, b: &Memory) -> bool {
    meet(&a.writes, &b.writes) || meet(&a.writes, &b.reads) || meet(&a.reads, &b.writes)
}

/// Something on a lane: which, and what it touches.
struct Run<'a> {
    node: &'a str,
    lane: Option<Lane>,
    number: usize,
    memory: Memory,
}

/// Holds every pair of commands that may run at once against each other: of those beside the chain,
/// all that were begun and not waited for, and whatever comes meanwhile. Returns how many were
/// beside.
fn check(nodes: &[Lowered]) -> usize {
    let mut under_way: Vec<Run<'_>> = Vec::new();
    let mut beside = 0;
    for Lowered {
        node,
        commands,
        memory,
        ..
    } in nodes
    {
        for command in commands {
            let run = match command {
                Command::Await { lane, number } => {
                    under_way.retain(|run| run.lane != Some(*lane) || run.number > *number);
                    continue;
                }
                Command::Beside {
                    lane,
                    number,
                    commands,
                } => Run {
                    node,
                    lane: Some(*lane),
                    number: *number,
                    memory: touched(commands, memory),
                },
                command => Run {
                    node,
                    lane: None,
                    number: 0,
                    memory: touched(std::slice::from_ref(command), memory),
                },
            };
            for other in under_way.iter().filter(|other| other.lane != run.lane) {
                let (a, b) = (run.node, other.node);
                assert!(!disturb(&run.memory, &other.memory), "{a} while {b} runs");
            }
            if let Some(lane) = run.lane {
                let mut earlier = under_way.iter().filter(|other| other.lane == Some(lane));
                assert!(earlier.all(|other| other.number < run.number));
                beside += usize::from(lane == Lane::Gradients);
                under_way.push(run);
            }
        }
    }
    assert!(under_way.is_empty(), "a recording ends with what is in it");
    beside
}

/// The commands in their order, those beside the chain where they begin.
fn in_order(nodes: &[Lowered]) -> Vec<&Command> {
    let commands = nodes.iter().flat_map(|node| &node.commands);
    let commands = commands.flat_map(|command| match command {
        Command::Beside {
            lane: Lane::Gradients,
            commands,
            ..
        } => commands.iter().collect(),
        Command::Await {
            lane: Lane::Gradients,
            ..
        } => Vec::new(),
        other => vec![other],
    });
    commands.collect()
}

#[test]
fn what_runs_at_once_touches_nothing_of_each_other() {
    for Model {
        settings,
        recomputed,
        beside,
    } in &MODELS
    {
        let config = config(settings);
        let blocks = (*recomputed).min(config.model.num_blocks());
        let mut step = StepPlan::new(&config, Target::Cuda, blocks).unwrap();
        let arena_bytes = step.arena_bytes();
        step.linger();
        assert_eq!(step.arena_bytes(), arena_bytes);
        for variant in step.variants() {
            for micro in [true, false].map(MicroBatch::of_one) {
                let (graph, plan) = (&variant.training, &variant.plan);
                let nodes = 0..graph.nodes.len();
                let lowered = lower_all(graph, plan, nodes, micro, Card::HOPPER);
                // As if the library computed all products, with its scratch memory.
                let spread = spread(&lowered, |_| false);
                assert_eq!(in_order(&spread), in_order(&lowered));
                let count = check(&spread);
                assert!(count >= *beside, "{settings:?}: {count}");
            }
        }
    }
}

/// The test can fail: without waiting, commands meet.
#[test]
#[should_panic(expected = "while")]
fn what_is_not_waited_for_is_noticed() {
    let config = config(MODELS[0].settings);
    let mut step = StepPlan::new(&config, Target::Cuda, 0).unwrap();
    step.linger();
    let nodes = 0..step.training.nodes.len();
    let micro = MicroBatch::of_one(true);
    let lowered = lower_all(&step.training, &step.plan, nodes, micro, Card::HOPPER);
    let mut spread = spread(&lowered, |_| false);
    for node in &mut spread {
        node.commands
            .retain(|command| !matches!(command, Command::Await { .. }));
    }
    check(&spread);
}
