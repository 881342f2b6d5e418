//! Predictions against bounds, against each other, and against measured steps.

use cinch_config::{Config, Settings, Source};

use cinch_graph::{Graph, Node};

use super::*;

fn config(own: &[(&str, &str)]) -> Config {
    let mut settings = Settings::new();
    let shared = [
        ("vram.batch_size", "4"),
        ("vram.gradient_accumulation_steps", "1"),
        ("vram.max_seq_len", "1024"),
        ("vram.precision", "bf16"),
    ];
    for (key, value) in shared.iter().chain(own) {
        let source = Source::Flag("test".to_owned());
        settings.set(key, value, source).unwrap();
    }
    settings.resolve().unwrap()
}

fn card() -> Card {
    Card::known("NVIDIA H200").unwrap()
}

fn predict(own: &[(&str, &str)], card: &Card) -> Prediction {
    let step = StepPlan::new(&config(own), card.target, 0).unwrap();
    step.predict(card, false)
}

const GPT2: [(&str, &str); 2] = [("model.type", "gpt2"), ("model.size", "medium")];
const MAMBA: [(&str, &str); 2] = [("model.type", "mamba"), ("model.size", "large")];

/// Nothing runs faster than its arithmetic at the matrix rate, nor than its bytes.
#[test]
fn no_step_beats_the_card() {
    let card = card();
    for own in [GPT2, MAMBA] {
        let step = StepPlan::new(&config(&own), Target::Cuda, 0).unwrap();
        let predicted = step.predict(&card, false).seconds;
        let arithmetic = step.step_flops() as f64 / card.half_flops;
        let graph: &Graph = &step.training;
        let bytes: f64 = graph.nodes.iter().map(|n| graph.bytes(n) as f64).sum();
        assert!(predicted > arithmetic, "{own:?}: {predicted} {arithmetic}");
        assert!(predicted > bytes / card.bandwidth, "{own:?}");
        assert!(
            predicted < 20.0 * arithmetic,
            "{own:?}: {predicted} {arithmetic}"
        );
    }
}

/// The steps that were measured on an H200 (bf16, 1024 tokens, `cinch profile`).
#[test]
fn the_prediction_is_near_what_was_measured() {
    let mut errors: Vec<f64> = MEASURED
        .iter()
        .map(|&(model, size, batch, milliseconds)| {
            let own = [
                ("model.type", model),
                ("model.size", size),
                ("vram.batch_size", batch),
            ];
            let predicted = 1e3 * predict(&own, &card()).seconds;
            let error = (predicted / milliseconds - 1.0).abs();
            assert!(
                error < 0.25,
                "{model} {size} {batch}: {predicted} {milliseconds}"
            );
            error
        })
        .collect();
    errors.sort_by(f64::total_cmp);
    assert!(errors[errors.len() / 2] < 0.10, "{errors:?}");
}

/// Model, size, sequences, milliseconds a step.
const MEASURED: [(&str, &str, &str, f64); 10] = [
    ("mamba", "small", "8", 8.43),
    ("mamba", "small", "32", 29.90),
    ("mamba", "medium", "8", 16.25),
    ("mamba", "large", "8", 39.09),
    ("mamba", "xlarge", "4", 40.80),
    ("gpt2", "gpt2", "4", 11.07),
    ("gpt2", "gpt2", "32", 69.10),
    ("gpt2", "medium", "4", 27.51),
    ("gpt2", "medium", "16", 92.70),
    ("gpt2", "large", "8", 102.97),
];

/// Steps that were measured on an H200 with joined products (benchmarks/2026-11-16-h200.md and, of 7B, 0.5B
/// and the embedder, 2026-11-20-h200.md): with
/// adapters, dropped ones among them, gates, and what has none of these.
#[test]
fn joined_products_are_near_what_was_measured() {
    let qwen = [("model.type", "qwen2.5-7b"), ("lora.rank", "128")];
    let row = [("vram.batch_size", "1"), ("vram.max_seq_len", "1536")];
    let adapters = [qwen, row].concat();
    let whole = [("model.type", "qwen2.5-0.5b"), ("vram.batch_size", "8")];
    let sparse = [("model.type", "gsa"), ("model.size", "512m-low-memory")];
    let sparse = [&sparse[..], &[("vram.batch_size", "2")]].concat();
    let narrow = [("model.type", "mu"), ("vram.batch_size", "32")];
    let shape = [("vram.max_seq_len", "512"), ("vram.precision", "fp16")];
    let narrow = [narrow, shape].concat();
    let embedder = [("model.type", "naics"), ("vram.batch_size", "45")];
    let embedder = [&embedder[..], &shape, &[("model.negatives", "24")]].concat();
    let steps: [(&[_], bool, f64); 6] = [
        (&adapters, false, 83.4),
        (&adapters, true, 108.5),
        (&whole, false, 52.9),
        (&sparse, false, 7.51),
        (&narrow, false, 26.8),
        (&embedder, true, 542.3),
    ];
    for (own, again, milliseconds) in steps {
        let config = config(own);
        let blocks = if again { config.model.num_blocks() } else { 0 };
        let step = StepPlan::new(&config, Target::Cuda, blocks).unwrap();
        let predicted = 1e3 * step.predict(&card(), false).seconds;
        let error = (predicted / milliseconds - 1.0).abs();
        assert!(error < 0.15, "{own:?}: {predicted} {milliseconds}");
    }
}

/// What adds to a product costs nothing of its own where it is a term of it, and the product less
/// than both one by one; a card without such kernels computes it by itself.
#[test]
fn what_adds_to_a_product_is_a_term_of_it_on_a_hopper_card() {
    let own = [("model.type", "qwen2.5-0.5b"), ("lora.rank", "16")];
    let joined = predict(&own, &card());
    let apart = Card {
        generation: Some(Generation::Ampere),
        ..card()
    };
    let apart = predict(&own, &apart);
    for op in ["linear_add", "swiglu", "gated_backward"] {
        assert_eq!(joined.by_op[op], 0.0, "{op}");
        assert!(apart.by_op[op] > 0.0, "{op}");
    }
    let products = |of: &Prediction| {
        let ops = ["linear", "linear_add", "linear_grad_input", "swiglu"];
        ops.into_iter().map(|op| of.by_op[op]).sum::<f64>()
    };
    assert!(products(&joined) < products(&apart));
}

/// What an adapter of low rank drops in part is a term of whatever product it adds to, however long,
/// and also of one that adds to what is there; what is dropped in memory is a product by itself.
#[test]
fn what_is_dropped_in_part_joins_sums_of_any_length() {
    use cinch_graph::JoinKind;

    // How many join a product of the lengths of their sums, and how many there are.
    let count = |own: &[(&str, &str)]| {
        let step = StepPlan::new(&config(own), Target::Cuda, 0).unwrap();
        let graph: &Graph = &step.training;
        let costs = joined::costs(graph);
        let is_dropped = |node: &Node| {
            let kind = graph.joins(node).map(|joins| joins.kind);
            matches!(kind, Some(JoinKind::Term { dropped: true, .. }))
        };
        let dropped = graph.nodes.iter().zip(&costs);
        let dropped = dropped.filter(|(node, _)| is_dropped(node));
        let empty = dropped.clone().filter(|(_, cost)| cost.kernels.is_empty());
        (empty.count(), dropped.count())
    };
    let embedder = [
        ("model.type", "naics"),
        ("vram.batch_size", "1"),
        ("vram.max_seq_len", "128"),
        ("model.negatives", "1"),
    ];
    let (joined, all) = count(&embedder);
    assert!(all > 0 && joined == all, "{joined} of {all}");
    let wide = [
        ("model.type", "qwen2.5-0.5b"),
        ("lora.rank", "128"),
        ("lora.dropout", "0.1"),
    ];
    assert_eq!(count(&wide), (0, 0));
}

/// A layer norm of 384 columns is the end of the product that is added before it, of another width a
/// pass by itself.
#[test]
fn a_norm_of_whole_rows_joins_the_product_before_it() {
    use cinch_graph::op::Op;

    let norms = |width: &str| {
        let own = [
            ("model.type", "naics"),
            ("vram.batch_size", "4"),
            ("vram.precision", "fp16"),
            ("vram.max_seq_len", "128"),
            ("model.negatives", "1"),
            ("model.d_model", width),
        ];
        let step = StepPlan::new(&config(&own), Target::Cuda, 0).unwrap();
        let graph: &Graph = &step.training;
        let nodes = graph.nodes.iter().zip(joined::costs(graph));
        let norms = nodes.filter(|(node, _)| matches!(&node.op, Op::Norm(norm) if norm.residual));
        let (joined, apart): (Vec<_>, Vec<_>) =
            norms.partition(|(_, cost)| cost.kernels.is_empty());
        (joined.len(), apart.len())
    };
    let (joined, apart) = norms("384");
    assert!(joined > 0 && apart == 0, "{joined} {apart}");
    assert_eq!(norms("192").0, 0);
}

#[test]
fn a_large_product_runs_at_the_matrix_rate_and_a_small_one_does_not() {
    let card = card();
    let rates = Rates {
        card: &card,
        matrix: card.half_flops,
        offloaded: false,
        update_launches: false,
    };
    let share = |m: usize, n: usize, k: usize| {
        let flops = 2.0 * m as f64 * n as f64 * k as f64;
        flops / rates.tiles([m, n, k], DType::Bf16) / card.half_flops
    };
    assert!(share(8192, 8192, 8192) > 0.9);
    // One tile keeps one multiprocessor busy; cutting the inner dimension employs more.
    assert!(share(128, 256, 512) < 0.02);
    assert!(share(128, 256, 32768) > 8.0 * share(128, 256, 512));
    // One tile more than fills the card is a second wave.
    let wave = |tiles: usize| rates.tiles([128 * tiles, 256, 200], DType::Bf16);
    assert!(wave(133) > 1.4 * wave(132));
}

#[test]
fn accumulation_repeats_everything_but_the_update() {
    let card = card();
    let once = predict(&GPT2, &card);
    let own = [GPT2[0], GPT2[1], ("vram.gradient_accumulation_steps", "3")];
    let thrice = predict(&own, &card);
    for (op, seconds) in &thrice.by_op {
        let times = if matches!(*op, "adamw" | "gradient_norm") {
            1.0
        } else {
            3.0
        };
        assert!((seconds / once.by_op[op] - times).abs() < 1e-9, "{op}");
    }
    assert!(thrice.seconds < 3.0 * once.seconds);
}

/// A step that clips runs its backward twice, and one that does not only pays for launches;
/// states in host memory cost the time of the bus, and a quarter of it in eight bits.
#[test]
fn what_saves_memory_has_its_price() {
    let card = card();
    let with = |more: &[(&str, &str)]| predict(&[&GPT2, more].concat(), &card);
    let plain = with(&[]);
    let inside = ("vram.update_in_backward", "true");
    let twice = with(&[inside]);
    let grad = |p: &Prediction| p.by_op["linear_grad_weight"];
    assert!((grad(&twice) / grad(&plain) - 2.0).abs() < 1e-9);
    let once = with(&[inside, ("training.max_grad_norm", "0")]);
    assert!((grad(&once) / grad(&plain) - 1.0).abs() < 1e-9);
    assert!(once.seconds < 1.06 * plain.seconds);

    let away = ("vram.use_cpu_offload", "true");
    let (offloaded, small) = (
        with(&[away]),
        with(&[away, ("vram.optimizer_states", "8bit")]),
    );
    let own = [&GPT2[..], &[away]].concat();
    let states = StepPlan::new(&config(&own), Target::Cuda, 0).unwrap();
    let bus = states.plan.host_bytes as f64 / card.host_bandwidth;
    assert!((offloaded.by_op["adamw"] / bus - 1.0).abs() < 0.01);
    let ratio = offloaded.by_op["adamw"] / small.by_op["adamw"];
    assert!((3.5..4.0).contains(&ratio), "{ratio}");
}

/// Activations that cross the bus while the forward runs save what would be computed again; more
/// than it moves in that time are waited for.
#[test]
fn stored_activations_cost_what_the_bus_takes_longer() {
    let card = card();
    let own = [
        ("model.type", "qwen2.5-7b"),
        ("lora.rank", "128"),
        ("vram.batch_size", "1"),
        ("vram.max_seq_len", "1536"),
    ];
    let step = |away: usize| {
        let mut config = config(&own);
        config.batch.offload_activations = away;
        let blocks = config.model.num_blocks();
        StepPlan::new(&config, Target::Cuda, blocks).unwrap()
    };
    let [none, some, all] = [0, 8, 28].map(step);
    let seconds = |step: &StepPlan, card: &Card| step.predict(card, false).seconds;
    assert!(seconds(&some, &card) < seconds(&none, &card));
    // All is stored before the loss, and fetched after it.
    let bus = 2.0 * all.plan.host_bytes as f64 / card.host_bandwidth;
    assert!(seconds(&all, &card) > bus);
    assert!(all.predict(&card, false).by_op["fetch"] > 0.0);
    let fast = Card {
        host_bandwidth: 1e15,
        ..card.clone()
    };
    assert!(seconds(&all, &fast) < seconds(&some, &fast));
    assert!(seconds(&all, &fast) < seconds(&all, &card));
    // What is on its way takes no more of the arena than recomputation does.
    assert_eq!(some.arena_bytes(), none.arena_bytes());
}

/// On the CPU time scales with the measured rates, but for what starts nodes and wakes threads.
#[test]
fn a_cpu_twice_as_fast_takes_half_the_time() {
    let own = [("model.size", "small"), ("vram.precision", "fp32")];
    let slow = predict(&own, &Card::cpu(2, 1e11, 3e9, 1e10)).seconds;
    let fast = predict(&own, &Card::cpu(2, 2e11, 6e9, 2e10)).seconds;
    assert!((1.95..2.0).contains(&(slow / fast)), "{}", slow / fast);
    assert_eq!(Card::known("GeForce 256"), None);
}

/// Measured on two cores of an EPYC of 2024, and on the same two without AVX-512
/// (`cinch profile --device cpu --precision fp32 --grad-accum 1`): the rates are those of the runs.
/// What has matrix products takes twice as long then, what has none far less than that.
#[test]
fn predicted_steps_on_a_cpu_are_the_measured_ones() {
    let processors = [
        Card::cpu(2, 490e9, 12.2e9, 110e9),
        Card::cpu(2, 247e9, 7.05e9, 110e9),
    ];
    let steps: [(&[_], [f64; 2]); 6] = [
        (
            &[
                ("model.type", "mamba"),
                ("model.size", "small"),
                ("vram.max_seq_len", "256"),
            ],
            [198.6, 357.8],
        ),
        (
            &[
                ("model.type", "gpt2"),
                ("model.size", "small"),
                ("vram.max_seq_len", "256"),
            ],
            [527.0, 998.2],
        ),
        (
            &[
                ("model.type", "gsa"),
                ("model.size", "512m-low-memory"),
                ("vram.max_seq_len", "256"),
            ],
            [553.0, 1042.3],
        ),
        (
            &[
                ("model.type", "qwen2.5-0.5b"),
                ("lora.rank", "16"),
                ("vram.max_seq_len", "256"),
            ],
            [1468.0, 2858.8],
        ),
        (
            &[
                ("model.type", "mu"),
                ("vram.batch_size", "4"),
                ("vram.max_seq_len", "256"),
            ],
            [394.1, 554.5],
        ),
        (
            &[
                ("model.type", "naics"),
                ("model.negatives", "2"),
                ("vram.max_seq_len", "512"),
            ],
            [1271.0, 2646.6],
        ),
    ];
    for (own, measured) in steps {
        for (card, milliseconds) in processors.iter().zip(measured) {
            let batch = [("vram.batch_size", "1"), ("vram.precision", "fp32")];
            let predicted = 1e3 * predict(&[&batch, own].concat(), card).seconds;
            let error = (predicted / milliseconds - 1.0).abs();
            assert!(error < 0.15, "{own:?}: {predicted} {milliseconds}");
        }
    }
}
