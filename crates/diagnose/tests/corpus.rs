//! Every message and log of the corpus is diagnosed to its class and its figures.
//!
//! `cargo test -p cinch-diagnose --test corpus -- --nocapture` prints them as a table.

use std::collections::BTreeMap;
use std::path::Path;

use cinch_diagnose::{Failure, Log, diagnose};
use serde_json::Value;

fn folder() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn expected() -> BTreeMap<String, Vec<Value>> {
    let text = std::fs::read_to_string(folder().join("expected.json")).expect("it is there");
    serde_json::from_str(&text).expect("it is JSON")
}

fn failures(bytes: &[u8], piece: usize) -> Vec<Failure> {
    let mut log = Log::new();
    bytes.chunks(piece).for_each(|piece| log.feed(piece));
    log.finish();
    diagnose(&log, None)
}

/// What differs between a failure and what is expected of it.
fn differences(failure: &Failure, expected: &Value) -> Vec<String> {
    let found = serde_json::to_value(failure).expect("it can be written");
    let mut wrong = Vec::new();
    let mut compare = |name: &str, found: &Value, expected: &Value| {
        if found != expected {
            wrong.push(format!("{name} is {found}, not {expected}"));
        }
    };
    for name in ["framework", "cause", "rank", "phase"] {
        compare(name, &found[name], &expected[name]);
    }
    compare(
        "is_oom",
        &found["is_oom"],
        &Value::Bool(expected["cause"] != "not_oom"),
    );
    for (name, value) in expected["numbers"].as_object().expect("a table") {
        compare(name, &found["numbers"][name], value);
    }
    wrong
}

#[test]
#[expect(
    clippy::print_stdout,
    reason = "the table is what the test is run for by hand"
)]
fn class_and_figures_are_right_for_each() {
    let expected = expected();
    let mut wrong = Vec::new();
    let mut without_oom = 0;
    for (name, expected) in &expected {
        let bytes = std::fs::read(folder().join(format!("{name}.log"))).expect("it is there");
        let found = failures(&bytes, 1 << 16);
        without_oom += usize::from(found.iter().all(|failure| !failure.is_oom));
        for failure in &found {
            let numbers: Vec<String> = failure
                .numbers
                .named()
                .iter()
                .filter_map(|(name, value, _)| {
                    Some(format!("{}={}", name.trim_end_matches("_bytes"), (*value)?))
                })
                .collect();
            println!(
                "{name:36} {:14} {:3.0} %  {:?}  {}",
                failure.cause.name(),
                100.0 * failure.confidence,
                failure.framework,
                numbers.join(" ")
            );
        }
        if found.is_empty() {
            println!("{name:36} nothing");
        }
        if found.len() != expected.len() {
            wrong.push(format!(
                "{name}: {} failures, not {}: {found:#?}",
                found.len(),
                expected.len()
            ));
            continue;
        }
        for (failure, expected) in found.iter().zip(expected) {
            let differs = differences(failure, expected);
            if !differs.is_empty() {
                wrong.push(format!("{name}: {}", differs.join("; ")));
            }
        }
    }
    println!(
        "{} files, {without_oom} without a lack of memory",
        expected.len()
    );
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(expected.len() >= 80 && without_oom >= 20);
}

#[test]
fn the_pieces_in_which_a_log_comes_do_not_matter() {
    for name in expected().keys() {
        let bytes = std::fs::read(folder().join(format!("{name}.log"))).expect("it is there");
        let whole = serde_json::to_string(&failures(&bytes, 1 << 20)).expect("it can be written");
        for piece in [1, 7, 100] {
            let cut = serde_json::to_string(&failures(&bytes, piece)).expect("it can be written");
            assert_eq!(cut, whole, "{name} in pieces of {piece}");
        }
    }
}

#[test]
fn a_log_that_is_cut_off_anywhere_is_read() {
    for name in expected().keys() {
        let bytes = std::fs::read(folder().join(format!("{name}.log"))).expect("it is there");
        let step = (bytes.len() / 40).max(1);
        for end in (0..bytes.len()).step_by(step) {
            for failure in failures(&bytes[..end], 1 << 20) {
                assert!(
                    (0.0..=1.0).contains(&failure.confidence),
                    "{name} up to {end}"
                );
            }
        }
    }
}

#[test]
fn advice_is_never_what_does_harm_or_nothing() {
    for name in expected().keys() {
        let bytes = std::fs::read(folder().join(format!("{name}.log"))).expect("it is there");
        for failure in failures(&bytes, 1 << 20) {
            for fix in &failure.fixes {
                let text = format!("{} {}", fix.what, fix.command.clone().unwrap_or_default());
                for harm in ["kill", "gpu-reset", "reboot", "torch.cuda.empty_cache"] {
                    let reads = text.contains("killed process");
                    assert!(!text.contains(harm) || reads, "{name}: {text}");
                }
                let expandable = text.contains("expandable_segments");
                assert!(
                    !expandable || failure.cause.name() == "fragmentation",
                    "{name}: {text}"
                );
                assert_eq!(
                    fix.saves_bytes.filter(|_| !name.starts_with("cinch")),
                    None,
                    "{name}: nothing was computed"
                );
            }
        }
    }
}

#[test]
fn advice_fits_the_program_and_the_moment() {
    let advice = |name: &str| {
        let bytes = std::fs::read(folder().join(format!("{name}.log"))).expect("it is there");
        let found = failures(&bytes, 1 << 20);
        let fixes = found.iter().flat_map(|failure| &failure.fixes);
        let lines =
            fixes.map(|fix| format!("{} {}", fix.what, fix.command.clone().unwrap_or_default()));
        lines.collect::<Vec<_>>().join("\n")
    };
    // Nothing is trained, or nothing is trained yet.
    for name in [
        "loading",
        "vllm-runs-out-in-a-step",
        "diffusers-pipeline",
        "comfy-report",
        "comfy-console",
        "llama-cpp",
    ] {
        let advice = advice(name);
        assert!(!advice.is_empty(), "{name}");
        for none in ["gradient_checkpointing", "per_device_train_batch_size"] {
            assert!(!advice.contains(none), "{name}: {advice}");
        }
    }
    assert!(advice("vllm-runs-out-in-a-step").contains("--gpu-memory-utilization"));
    assert!(advice("pytorch-processes-of-0-bytes").contains("LOCAL_RANK"));
    // Each maker has its own command, and each system its own remedy.
    assert!(!advice("pytorch-hip").contains("nvidia-smi"));
    assert!(!advice("pytorch-mps-others-hold-it").contains("nvidia-smi"));
    assert!(advice("host-windows").contains("paging file"));
    assert!(advice("host-deepspeed-offload").contains("offload_optimizer"));
    // Names in place of descriptors take as much of /dev/shm.
    assert!(!advice("host-torch-file").contains("file_system"));
    assert!(advice("not-open-files").contains("file_system"));
    // Nobody was killed where memory was refused.
    assert!(!advice("host-numpy").contains("killed process"));
}
