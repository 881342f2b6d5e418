//! `cinch profile`: that its numbers are the plan's and the machine's, and what it says where
//! there is nothing to measure on.

mod common;

use common::Sandbox;

const LINE: &str = "--model-size tiny --batch-size 2 --grad-accum 2 --seq-len 32";

#[test]
fn the_plan_is_that_of_cinch_plan_and_the_times_are_measured() {
    let sandbox = Sandbox::new();
    let line = format!("profile {LINE} --device cpu --threads 1 --steps 2 --trace --json");
    let profile = sandbox.cinch(&line).succeeds().json();
    let plan = sandbox
        .cinch(&format!("plan {LINE} --device cpu --json"))
        .succeeds()
        .json();
    for key in ["arena_bytes", "peak_bytes", "overhead_bytes"] {
        assert_eq!(profile["planned"][key], plan["memory"][key], "{key}");
    }
    // How far a step writes into the arena is measured, and is what was planned.
    assert_eq!(profile["touched_bytes"], profile["planned"]["step_bytes"]);
    let number = |key: &str| profile[key].as_f64().unwrap_or_else(|| panic!("no {key}"));
    assert!(number("measured_seconds") > 0.0);
    assert!(number("predicted_seconds") > 0.0);
    assert_eq!(
        profile["measured_seconds_all"].as_array().map(Vec::len),
        Some(2)
    );
    let arena = plan["memory"]["arena_bytes"].as_f64().unwrap();
    assert!(number("resident_bytes") > arena);
    // The same ops are predicted and measured, and the prediction is their sum.
    let ops = |key: &str| -> Vec<String> {
        let by_op = profile[key].as_object().expect("an object by op");
        by_op.keys().cloned().collect()
    };
    assert_eq!(ops("predicted_by_op"), ops("measured_by_op"));
    let by_op = profile["predicted_by_op"].as_object().unwrap();
    let sum: f64 = by_op.values().filter_map(serde_json::Value::as_f64).sum();
    assert!((sum - number("predicted_seconds")).abs() < 1e-9, "{sum}");
    let of = |key: &str| profile[key].as_object().unwrap().values();
    let by_op: f64 = of("measured_by_op")
        .filter_map(serde_json::Value::as_f64)
        .sum();
    let nodes = profile["measured_nodes"]
        .as_array()
        .expect("a list of nodes");
    let by_node: f64 = nodes
        .iter()
        .filter_map(|node| node["seconds"].as_f64())
        .sum();
    assert!((by_op - by_node).abs() < 1e-9 && by_node > 0.0);
    assert!(
        nodes
            .iter()
            .any(|node| node["op"] == "linear" && node["node"] != "")
    );
    assert!(profile["device_memory"].is_null());
}

#[test]
fn the_report_is_a_table_with_both_times() {
    let line = format!("profile {LINE} --device cpu --threads 1 --steps 2 --trace");
    Sandbox::new().cinch(&line).succeeds().prints(&[
        "planned arena",
        "planned for a step",
        "measured: written to by a step",
        "measured equals planned",
        "resident beyond the arena",
        "step: predicted ",
        " ms, measured ",
        "adamw",
    ]);
}

#[test]
fn too_few_steps_are_refused() {
    Sandbox::new()
        .cinch("profile --steps 1")
        .fails(2, &["--steps 1", "hint:"]);
}

/// Where a GPU is present the command would run on it.
#[test]
fn without_a_gpu_asking_for_one_is_a_clear_error() {
    if cinch_engine::cuda::is_available() {
        return;
    }
    let sandbox = Sandbox::new();
    for command in ["profile", "bench", "train"] {
        sandbox
            .cinch(&format!("{command} {LINE} --device cuda"))
            .fails(1, &["no CUDA driver", "hint:", "--device cpu"]);
    }
    sandbox
        .train_tiny("--max-steps 1 --output-dir run")
        .succeeds();
    sandbox
        .cinch("generate run --device cuda")
        .fails(1, &["no CUDA driver", "hint:"]);
    sandbox
        .cinch("generate run --device cpu --max-tokens 2")
        .succeeds();
}
