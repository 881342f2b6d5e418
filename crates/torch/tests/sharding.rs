//! Shares per rank against the formulas of the papers, and their division.

use std::num::NonZeroU64;

use cinch_architecture::configured;
use cinch_torch::eager::training::Precision;
use cinch_torch::model::Workload;
use cinch_torch::sharding::{Scheme, Shares, shares};
use cinch_torch::truth;
use serde_json::Map;

const PEAKS: &str = include_str!("fixtures/peaks.jsonl");

fn run(model: &str, precision: Precision) -> Workload {
    let measured = truth::parse(PEAKS, "fixture").unwrap();
    let mut workload = measured[0].case.workload().unwrap();
    workload.architecture = configured(model, &Map::new()).unwrap().architecture;
    workload.recipe.precision = precision;
    workload
}

fn divided(workload: &Workload, ranks: u64) -> Vec<Shares> {
    shares(workload, NonZeroU64::new(ranks).unwrap()).unwrap()
}

fn of(list: &[Shares], scheme: Scheme) -> Shares {
    *list.iter().find(|share| share.scheme == scheme).unwrap()
}

/// ψ parameters in half precision take 2ψ + 2ψ + 12ψ bytes, of which stage 1 divides the last, stage 2 the last two and
/// stage 3 all.
#[test]
fn stages_divide_what_the_paper_says() {
    let parameters = 7_241_732_096u64;
    let list = divided(&run("mistral-7b", Precision::BFloat16), 64);
    let states = |share: Shares| (share.parameters + share.gradients + share.optimizer) as f64;
    let per_parameter = [
        (Scheme::Zero1, 2.0 + 2.0 + 12.0 / 64.0),
        (Scheme::Zero2, 2.0 + 14.0 / 64.0),
        (Scheme::Zero3, 16.0 / 64.0),
        // Without the fp32 copy, and with moments in bf16.
        (Scheme::FullShard, 8.0 / 64.0),
    ];
    for (scheme, bytes) in per_parameter {
        let expected = bytes * parameters as f64;
        let found = states(of(&list, scheme));
        assert!(
            (found / expected - 1.0).abs() < 1e-5,
            "{scheme:?}: {found} against {expected}"
        );
    }
}

#[test]
fn uneven_division_rounds_up() {
    let workload = run("gpt2", Precision::Float32);
    let trainable = workload.weights().unwrap().trainable;
    let elements: u64 = trainable.iter().map(|(values, _)| values).sum();
    assert_eq!(elements, 124_439_808);
    for ranks in [1, 3, 7, 1000] {
        let list = divided(&workload, ranks);
        // The flat buffer is padded to an even number of values for each rank.
        let flat = elements.div_ceil(2 * ranks) * 2;
        assert_eq!(of(&list, Scheme::Zero1).optimizer, 12 * flat);
        assert_eq!(of(&list, Scheme::Zero2).gradients, 4 * flat);
        let parts: u64 = trainable
            .iter()
            .map(|(values, _)| values.div_ceil(ranks))
            .sum();
        assert_eq!(of(&list, Scheme::Zero3).gradients, 4 * parts);
        assert_eq!(of(&list, Scheme::FullShard).optimizer, 8 * parts);
        for share in &list {
            assert!(share.optimizer * ranks >= 8 * elements, "{share:?}");
        }
    }
}

#[test]
fn more_ranks_take_less_each_and_never_below_activations() {
    let workload = run("qwen2.5-0.5b", Precision::BFloat16);
    let mut before = divided(&workload, 1);
    for ranks in [2, 4, 8, 64] {
        let list = divided(&workload, ranks);
        for (more, less) in before.iter().zip(&list) {
            // A replica holds everything, however many there are.
            match less.scheme {
                Scheme::Replicated => assert_eq!(less.total, more.total),
                _ => assert!(less.total < more.total, "{less:?}"),
            }
            assert!(less.total > less.activations + less.gathered);
        }
        before = list;
    }
    // Gathered for FSDP: embeddings and norm (tied head) with two of 24 layers; d 896, FFN 4864, 2 of 14 key heads.
    let (d, inner, keys) = (896u64, 4864u64, 128u64);
    let layer = 2 * d * d + d + 2 * (d * keys + keys) + 3 * d * inner + 2 * d;
    let around = 151_936 * d + d;
    let gathered = of(&before, Scheme::FullShard).gathered;
    let expected = 2 * (around + 2 * layer);
    assert!(
        gathered.abs_diff(expected) < 4096,
        "{gathered} against {expected}"
    );
}

#[test]
fn every_architecture_is_divided() {
    for run in truth::parse(PEAKS, "fixture").unwrap() {
        let families = [
            "mu-b4-t256",
            "gsa-b1",
            "naics-b4",
            "bert-base-b16",
            "qwen2.5-7b",
        ];
        if families
            .iter()
            .any(|family| run.case.name.starts_with(family))
        {
            let workload = run.case.workload().unwrap();
            let weights = workload.weights().unwrap().bytes;
            for share in divided(&workload, 4) {
                assert!(share.gathered <= weights, "{}: {share:?}", run.case.name);
                assert!(
                    share.parameters * 4 >= weights,
                    "{}: {share:?}",
                    run.case.name
                );
            }
        }
    }
}
