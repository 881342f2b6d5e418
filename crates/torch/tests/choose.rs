//! The chosen settings against a search of everything that is permitted.

use cinch_architecture::configured;
use cinch_config::remedy::RemedyKind;
use cinch_torch::TorchError;
use cinch_torch::change;
use cinch_torch::choose::{Choice, Limits, Permissions, choose};
use cinch_torch::eager::optimizer::Optimizer;
use cinch_torch::eager::training::Precision;
use cinch_torch::model::Workload;
use cinch_torch::overhead::H200;
use cinch_torch::truth;
use serde_json::json;

const PEAKS: &str = include_str!("fixtures/peaks.jsonl");

/// GPT-2 with fewer layers, so that many runs can be predicted.
fn small() -> Workload {
    let measured = truth::parse(PEAKS, "fixture").unwrap();
    let mut workload = measured[0].case.workload().unwrap();
    let fields = json!({"n_layer": 3, "n_embd": 256, "n_head": 4, "vocab_size": 8192});
    workload.architecture = configured("gpt2", fields.as_object().unwrap())
        .unwrap()
        .architecture;
    workload
}

fn limits(mebibytes: u64, effective_batch: u64) -> Limits {
    Limits {
        budget_bytes: mebibytes << 20,
        overhead: H200,
        effective_batch,
        may: Permissions::default(),
        division: None,
    }
}

/// What the documented order charges: micro batches, twice under checkpointing.
fn cost(workload: &Workload) -> u64 {
    let weight = if workload.checkpoints.is_on() { 2 } else { 1 };
    weight * u64::from(workload.recipe.accumulation)
}

/// The least cost of all subsets of the permitted changes at all divisors.
fn exhaustive(base: &Workload, limits: &Limits) -> Option<u64> {
    let changes = [
        RemedyKind::FusedOptimizer,
        RemedyKind::ExpandableSegments,
        RemedyKind::Recomputation,
    ];
    let mut least = None;
    for subset in 0..1 << changes.len() {
        let mut workload = base.clone();
        for (bit, change) in changes.iter().enumerate() {
            if subset >> bit & 1 == 1 {
                workload = change::apply(*change, &workload).unwrap();
            }
        }
        for batch in
            (1..=limits.effective_batch).filter(|b| limits.effective_batch.is_multiple_of(*b))
        {
            workload.batch = batch;
            workload.recipe.accumulation = (limits.effective_batch / batch) as u32;
            if limits.overhead.safe_bytes(&workload.predict().unwrap()) <= limits.budget_bytes {
                let cost = cost(&workload);
                least = Some(least.map_or(cost, |least: u64| least.min(cost)));
            }
        }
    }
    least
}

fn check(choice: &Choice, limits: &Limits) {
    assert!(choice.safe_bytes <= limits.budget_bytes);
    let again = choice.workload.predict().unwrap();
    assert_eq!(limits.overhead.safe_bytes(&again), choice.safe_bytes);
    assert!(choice.device_bytes <= choice.safe_bytes);
    let rows = choice.workload.batch * u64::from(choice.micro_batches());
    assert_eq!(rows, limits.effective_batch);
    if let Some(next) = choice.next {
        assert!(next.batch > choice.workload.batch);
        assert!(
            next.safe_bytes
                .is_none_or(|bytes| bytes > limits.budget_bytes)
        );
    }
}

#[test]
fn the_choice_costs_no_more_than_any_that_fits() {
    let base = small();
    let mut fitting = 0;
    for effective_batch in [24, 64, 97] {
        for mebibytes in [950, 1100, 1300, 1600, 2500, 4000, 8000] {
            let limits = limits(mebibytes, effective_batch);
            match (choose(&base, &limits), exhaustive(&base, &limits)) {
                (Ok(choice), Some(least)) => {
                    check(&choice, &limits);
                    assert_eq!(
                        cost(&choice.workload),
                        least,
                        "{mebibytes} MiB, {effective_batch}"
                    );
                    fitting += 1;
                }
                (Err(TorchError::DoesNotFit { needed, .. }), None) => {
                    assert!(needed > limits.budget_bytes);
                }
                (chosen, least) => {
                    panic!("{mebibytes} MiB, {effective_batch}: {chosen:?}, {least:?}")
                }
            }
        }
    }
    assert!(fitting >= 12, "{fitting}");
}

#[test]
fn only_what_is_permitted_changes() {
    let base = small();
    let mut limits = limits(950, 64);
    limits.may = Permissions {
        checkpointing: false,
        expandable_segments: false,
        fused_optimizer: false,
        ..Permissions::default()
    };
    for mebibytes in [1000, 1200, 2000, 6000] {
        limits.budget_bytes = mebibytes << 20;
        if let Ok(choice) = choose(&base, &limits) {
            assert!(!choice.workload.checkpoints.is_on());
            assert!(!choice.workload.allocator.expandable_segments);
            assert_eq!(choice.workload.recipe.optimizer, base.recipe.optimizer);
        }
    }
}

/// A budget between what the run needs with and without them.
#[test]
fn settings_that_change_the_result_come_last() {
    let mut base = small();
    let fields = json!({"n_layer": 3, "n_embd": 1024, "n_head": 8});
    base.architecture = configured("gpt2", fields.as_object().unwrap())
        .unwrap()
        .architecture;
    base.length = 16;
    let mut limits = limits(1 << 20, 1);
    assert!(
        choose(&base, &limits)
            .unwrap()
            .changes
            .iter()
            .all(|change| change.starts_with("batch"))
    );
    limits.budget_bytes = 1;
    let Err(TorchError::DoesNotFit { needed, .. }) = choose(&base, &limits) else {
        panic!("a byte is enough");
    };
    limits.budget_bytes = needed - 1;
    let message = choose(&base, &limits).unwrap_err().to_string();
    assert!(message.contains("hint: "), "{message}");
    limits.may.optimizer_8bit = true;
    let choice = choose(&base, &limits).unwrap();
    check(&choice, &limits);
    assert_eq!(choice.workload.recipe.optimizer, Optimizer::Adam8Bit);
    limits.may.optimizer_8bit = false;
    limits.may.precision = true;
    let choice = choose(&base, &limits).unwrap();
    check(&choice, &limits);
    assert_eq!(
        choice.workload.recipe.precision,
        Precision::AutocastBFloat16
    );
    // Autocast leaves the states in fp32: far below, only weights in bf16 are left.
    limits.budget_bytes = needed / 4 * 3;
    let choice = choose(&base, &limits).unwrap();
    check(&choice, &limits);
    assert_eq!(choice.workload.recipe.precision, Precision::BFloat16);
}

#[test]
fn effective_batches_that_mean_nothing_are_refused() {
    let base = small();
    let none = choose(&base, &limits(8000, 0)).unwrap_err();
    assert!(matches!(none, TorchError::EmptyRun { .. }), "{none}");
    let huge = choose(&base, &limits(8000, u64::MAX)).unwrap_err();
    assert!(matches!(huge, TorchError::TooLarge { .. }), "{huge}");
}
