//! Steps of several ranks: what each keeps to the byte, what the network adds to its time, and
//! what is refused.

use cinch_config::{Config, Settings, Source};
use cinch_device::{Card, Fabric};
use cinch_graph::Target;
use cinch_step::{StepError, StepPlan};

/// GPT-2 of 124M in bf16, one sequence of 256 tokens.
const GPT2: &[(&str, &str)] = &[
    ("model.type", "gpt2"),
    ("vram.precision", "bf16"),
    ("vram.batch_size", "1"),
    ("vram.gradient_accumulation_steps", "1"),
    ("vram.max_seq_len", "256"),
];

fn config(own: &[(&str, &str)]) -> Config {
    let mut settings = Settings::new();
    for (key, value) in GPT2.iter().chain(own) {
        let source = Source::Flag("test".to_owned());
        settings.set(key, value, source).unwrap();
    }
    settings.resolve().unwrap()
}

fn plan(own: &[(&str, &str)], target: Target) -> StepPlan {
    StepPlan::new(&config(own), target, 0).unwrap()
}

/// Parts are rounded up to 256 elements and places to 256 bytes: with 148 tensors that is little,
/// so weights, gradients and states are the published formula within a thousandth.
#[test]
fn what_a_rank_keeps_is_the_formula() {
    let alone = plan(&[], Target::Cuda);
    let parameters = alone.training.num_trainable() as f64;
    for ranks in [2_usize, 8] {
        let share = 1.0 / ranks as f64;
        for (level, weights, gradients, states) in [
            ("none", 6.0, 4.0, 8.0),
            ("zero1", 2.0 + 4.0 * share, 4.0, 8.0 * share),
            // The tied table, which two nodes add to, is kept whole.
            ("zero2", 2.0 + 4.0 * share, f64::NAN, 8.0 * share),
            ("zero3", 4.0 * share, f64::NAN, 8.0 * share),
        ] {
            let own = [
                ("world.ranks", ranks.to_string()),
                ("world.shard", level.to_owned()),
            ];
            let own: Vec<_> = own
                .iter()
                .map(|(key, value)| (*key, value.as_str()))
                .collect();
            let step = plan(&own, Target::Cuda);
            let parts = step.breakdown();
            let table = 50257.0 * 768.0 / parameters;
            let gradients = match gradients.is_nan() {
                // Its own and the positions', which its node writes too.
                true => 4.0 * share + 4.0 * table * (1.0 - share),
                false => gradients,
            };
            for (what, bytes, each) in [
                ("weights", parts.weights, weights),
                ("gradients", parts.gradients, gradients),
                ("states", parts.optimizer, states),
            ] {
                let expected = each * parameters;
                let off = (bytes as f64 / expected - 1.0).abs();
                assert!(
                    off < 1e-2,
                    "{level} on {ranks}, {what}: {bytes} of {expected}"
                );
            }
            assert_eq!(parts.total(), step.total_bytes());
        }
    }
}

/// On the CPU messages are sent from where tensors lie.
#[test]
fn only_gpus_have_memory_for_the_network() {
    let own = [("world.ranks", "2")];
    assert!(plan(&own, Target::Cuda).breakdown().network > 0);
    assert_eq!(plan(&own, Target::Cpu).breakdown().network, 0);
    assert_eq!(plan(&[], Target::Cuda).breakdown().network, 0);
}

#[test]
fn every_level_has_one_arena_for_training_and_evaluation() {
    for level in ["none", "zero1", "zero2", "zero3"] {
        let step = plan(&[("world.ranks", "4"), ("world.shard", level)], Target::Cpu);
        for id in step.training.parameters.iter().map(|one| one.master) {
            let name = &step.training.tensor(id).name;
            let other = step.evaluation.find(name).unwrap();
            let place = step.plan.placement(id);
            assert_eq!(
                place,
                step.evaluation_plan.placement(other),
                "{level} {name}"
            );
        }
    }
}

#[test]
fn a_faster_network_is_waited_for_less() {
    let card = |link: &str| {
        let card = Card::known("H100 SXM5").unwrap();
        let fabric = card.fabric.with(Some(link), None).unwrap();
        Card { fabric, ..card }
    };
    for level in ["none", "zero1", "zero2", "zero3"] {
        let own = [
            ("world.ranks", "8"),
            ("world.shard", level),
            ("vram.batch_size", "8"),
            ("vram.max_seq_len", "1024"),
        ];
        let step = plan(&own, Target::Cuda);
        let [slow, fast] = ["pcie3", "nvlink5"].map(|link| step.predict(&card(link), false));
        assert_eq!(slow.network.bytes, fast.network.bytes);
        assert!(fast.network.exposed() < slow.network.exposed(), "{level}");
        // Something is hidden, and never all.
        for predicted in [&slow, &fast] {
            let network = &predicted.network;
            assert!(
                0.0 < network.exposed() && network.exposed() < network.seconds,
                "{level}"
            );
        }
        let computing = |p: &cinch_step::Prediction| p.seconds - p.network.exposed();
        assert!((computing(&slow) - computing(&fast)).abs() < 1e-9);
    }
}

/// Nothing hides what CPU ranks exchange: nodes run one by one on the threads that would compute.
#[test]
fn cpu_ranks_hide_nothing() {
    let step = plan(&[("world.ranks", "2")], Target::Cpu);
    let network = step.predict(&Card::cpu(2, 1e11, 3e9, 1e10), false).network;
    assert!(network.seconds > 0.0);
    assert!((network.exposed() - network.seconds).abs() < 1e-12);
}

/// Whole gradients are exchanged once a step, parts of them in every micro batch.
#[test]
fn accumulation_decides_what_is_sent() {
    let sent = |level: &str, accumulation: &str| {
        let own = [
            ("world.ranks", "4"),
            ("world.shard", level),
            ("vram.gradient_accumulation_steps", accumulation),
        ];
        let card = Card::known("A100 SXM4 80GB").unwrap();
        plan(&own, Target::Cuda).predict(&card, false).network.bytes
    };
    assert_eq!(sent("none", "1"), sent("none", "4"));
    assert_eq!(sent("zero1", "1"), sent("zero1", "4"));
    assert!(sent("zero2", "4") > 2 * sent("zero2", "1"));
    assert!(sent("zero3", "4") > 3 * sent("zero3", "1"));
}

#[test]
fn machines_are_joined_by_their_network() {
    let seconds = |nodes: &str| {
        let own = [("world.ranks", "8"), ("world.nodes", nodes)];
        let mut card = Card::known("A100 SXM4 80GB").unwrap();
        card.fabric = Fabric::A100_SXM;
        plan(&own, Target::Cuda)
            .predict(&card, false)
            .network
            .seconds
    };
    assert!(seconds("1") < seconds("2"));
    assert!(seconds("2") < seconds("8"));
}

#[test]
fn what_ranks_cannot_do_is_refused() {
    let own = [("world.ranks", "2"), ("vram.update_in_backward", "true")];
    let error = StepPlan::new(&config(&own), Target::Cuda, 0).unwrap_err();
    assert!(matches!(
        error,
        StepError::UpdateInBackwardOfRanks { ranks: 2 }
    ));
}
