//! Remedies beside pairs of measured runs that differ in one setting, and the loops and cards they are priced for.

use cinch_config::remedy::RemedyKind;
use cinch_device::Generation;
use cinch_torch::change;
use cinch_torch::convention::Convention;
use cinch_torch::eager::optimizer::{Execution, Optimizer};
use cinch_torch::model::Workload;
use cinch_torch::model::frozen::Frozen;
use cinch_torch::overhead::{H200, Overhead};
use cinch_torch::remedy::{Remedy, remedies};
use cinch_torch::truth::{self, Measurement};

const PEAKS: &str = include_str!("fixtures/peaks.jsonl");

fn measured(name: &str) -> Measurement {
    truth::parse(PEAKS, "fixture")
        .unwrap()
        .into_iter()
        .find(|run| run.case.name == name)
        .unwrap()
}

fn workload(name: &str) -> Workload {
    measured(name).case.workload().unwrap()
}

fn remedy(list: &[Remedy], kind: RemedyKind) -> Option<&Remedy> {
    list.iter().find(|remedy| remedy.kind == kind)
}

#[test]
fn a_remedy_saves_what_two_measured_runs_differ_by() {
    let pairs = [
        (
            "gpt2-b8-t1024-amp_bf16",
            RemedyKind::Recomputation,
            "gpt2-b8-t1024-amp_bf16-ckpt",
        ),
        (
            "gpt2-b8-t1024-amp_bf16",
            RemedyKind::ExpandableSegments,
            "gpt2-b8-t1024-amp_bf16-expandable",
        ),
        (
            "gpt2-b4-t512-fp32",
            RemedyKind::PlainSgd,
            "gpt2-b4-t512-fp32-sgd",
        ),
        (
            "gpt2-b4-t512-fp32",
            RemedyKind::FusedOptimizer,
            "gpt2-b4-t512-fp32-adamw_fused",
        ),
        (
            "gpt2-b4-t512-amp_bf16-eager",
            RemedyKind::FusedAttention,
            "gpt2-b4-t512-amp_bf16",
        ),
        (
            "qwen2.5-0.5b-b4-t1024-bf16",
            RemedyKind::Recomputation,
            "qwen2.5-0.5b-b4-t1024-bf16-ckpt",
        ),
        (
            "qwen2.5-7b-lora128-b2-t2048-a32",
            RemedyKind::Recomputation,
            "qwen2.5-7b-lora128-b2-t2048-ckpt-a32",
        ),
    ];
    for (before, kind, after) in pairs {
        let list = remedies(&workload(before), &H200).unwrap();
        let remedy = remedy(&list, kind).unwrap();
        let (before, after) = (measured(before), measured(after));
        let difference = |read: fn(&Measurement) -> Option<u64>| {
            read(&after).unwrap() as i64 - read(&before).unwrap() as i64
        };
        let scale = before.peak_reserved.unwrap() as i64;
        for (what, computed, truth) in [
            (
                "allocated",
                remedy.allocated,
                difference(|run| run.peak_allocated),
            ),
            (
                "reserved",
                remedy.reserved,
                difference(|run| run.peak_reserved),
            ),
            ("device", remedy.device, difference(|run| run.device_used)),
        ] {
            assert!(
                (computed - truth).abs() * 100 <= scale,
                "{}, {what}: {computed} against {truth}",
                remedy.name
            );
        }
    }
}

#[test]
fn remedies_are_sorted_and_those_that_do_nothing_say_why() {
    let run = workload("gpt2-b8-t1024-amp_bf16");
    let list = remedies(&run, &H200).unwrap();
    assert!(list.is_sorted_by_key(|remedy| remedy.device));
    for kind in [RemedyKind::EmptyCache, RemedyKind::DeleteNames] {
        let remedy = remedy(&list, kind).unwrap();
        assert_eq!(
            (remedy.allocated, remedy.reserved, remedy.device),
            (0, 0, 0)
        );
        assert!(remedy.note.as_ref().unwrap().contains("frees nothing"));
    }
    // It has SDPA already, no adapters to shrink, and GPT-2's layers are not plain linear ones.
    for kind in [
        RemedyKind::FusedAttention,
        RemedyKind::AdapterRank,
        RemedyKind::Adapters,
        RemedyKind::SelectedKeys,
    ] {
        assert!(remedy(&list, kind).is_none(), "{kind:?}");
    }
}

#[test]
fn quantised_weights_are_not_cast() {
    let mut run = workload("gpt2-b4-t512-fp32");
    assert!(change::apply(RemedyKind::Bf16Weights, &run).is_some());
    run.frozen = Frozen::FourBit { double: true };
    assert!(change::apply(RemedyKind::Bf16Weights, &run).is_none());
}

#[test]
fn half_the_batch_keeps_the_effective_batch() {
    for (batch, accumulation, half) in [(8, 1, 4), (45, 1, 15), (5, 3, 1), (7, 2, 2), (3, 4, 1)] {
        let mut run = workload("gpt2-b4-t512-fp32");
        run.batch = batch;
        run.recipe.accumulation = accumulation;
        let changed = change::apply(RemedyKind::MicroBatch, &run).unwrap();
        assert_eq!(changed.batch, half, "{batch} × {accumulation}");
        assert_eq!(
            changed.batch * u64::from(changed.recipe.accumulation),
            batch * u64::from(accumulation)
        );
    }
    let mut run = workload("gpt2-b4-t512-fp32");
    run.batch = 1;
    assert!(change::apply(RemedyKind::MicroBatch, &run).is_none());
}

#[test]
fn adapters_train_a_fraction() {
    let run = workload("qwen2.5-0.5b-b4-t1024-bf16");
    let tuned = change::apply(RemedyKind::Adapters, &run).unwrap();
    // r·(in + out) for each of the seven linear layers of the 24 layers of Qwen2.5-0.5B.
    let shapes = [
        (896, 896),
        (896, 128),
        (896, 128),
        (896, 896),
        (896, 4864),
        (896, 4864),
        (4864, 896),
    ];
    let expected: u64 = shapes
        .iter()
        .map(|(input, output)| 24 * 16 * (input + output))
        .sum();
    let trained: u64 = tuned
        .weights()
        .unwrap()
        .trainable
        .iter()
        .map(|(values, _)| values)
        .sum();
    assert_eq!(trained, expected);
}

#[test]
fn the_trainer_fuses_adam_and_clips() {
    let mut recipe = workload("gpt2-b4-t512-fp32").recipe;
    recipe.clips_gradients = false;
    let adjusted = Convention::Trainer.recipe(recipe);
    assert_eq!(adjusted.optimizer, Optimizer::Adam(Execution::Fused));
    assert!(adjusted.clips_gradients);
    let plain = Convention::PlainLoop.recipe(recipe);
    assert_eq!(plain.optimizer, Optimizer::Adam(Execution::Foreach));
    assert!(!plain.clips_gradients);
    recipe.optimizer = Optimizer::Adam8Bit;
    assert_eq!(
        Convention::Trainer.recipe(recipe).optimizer,
        Optimizer::Adam8Bit
    );
}

#[test]
fn only_what_was_measured_is_called_measured() {
    assert_eq!(Overhead::of(Some(Generation::Hopper)), H200);
    let unknown = Overhead::of(None);
    for generation in [
        Generation::Volta,
        Generation::Turing,
        Generation::Ampere,
        Generation::Ada,
        Generation::Blackwell,
        Generation::Cdna3,
    ] {
        let overhead = Overhead::of(Some(generation));
        assert!(!overhead.measured && overhead.basis.starts_with("assumed"));
        assert!(overhead.context <= unknown.context, "{generation}");
    }
    assert!(unknown.context > H200.context);
}

/// Each model's code has its own settings; none of the changes may fail on any of them.
#[test]
fn every_architecture_has_remedies_that_save() {
    for name in [
        "bert-base-b16-t128-amp_fp16",
        "mamba-small-b1-t256-amp_fp16",
        "gsa-b1-t1024-amp_bf16-ckpt",
        "mu-b4-t256-amp_fp16",
        "naics-b4-n24-t512-amp_fp16",
        "tinyllama-b2-t1024-bf16",
    ] {
        let list = remedies(&workload(name), &H200).unwrap();
        assert!(list.len() >= 8, "{name}: {}", list.len());
        let length = remedy(&list, RemedyKind::SequenceLength).unwrap();
        assert!(length.device < 0, "{name}");
    }
}
