//! `cinch bench`: that it measures, and that its numbers agree with each other.

mod common;

use common::Sandbox;

#[test]
fn the_numbers_agree() {
    let sandbox = Sandbox::new();
    let line = "bench --model-size tiny --batch-size 2 --grad-accum 2 --seq-len 32 --steps 1";
    let bench = sandbox.cinch(&format!("{line} --json")).succeeds().json();
    let number = |key: &str| {
        let value = bench[key].as_f64();
        value.unwrap_or_else(|| panic!("no {key} in {bench:#}"))
    };
    let seconds = number("step_seconds");
    let tokens = number("tokens_per_second") * seconds;
    assert!((tokens - 2.0 * 2.0 * 32.0).abs() < 1e-6, "{tokens}");
    let share = number("useful_flops") / seconds / number("gemm_flops_per_second");
    assert!((share - number("share_of_gemm")).abs() < 1e-9, "{share}");
    assert!(share > 0.0 && share < 1.0, "{share}");
    // What is planned is what `cinch plan` says.
    let plan = line.replace("bench", "plan").replace("--steps 1", "--json");
    let plan = sandbox.cinch(&plan).succeeds().json();
    assert_eq!(bench["arena_bytes"], plan["memory"]["arena_bytes"]);
}

#[test]
fn the_table_of_ops_and_the_empty_measurement() {
    let sandbox = Sandbox::new();
    sandbox
        .cinch(
            "bench --model-size tiny --batch-size 1 --grad-accum 1 --seq-len 16 --steps 1 --trace",
        )
        .succeeds()
        .prints(&["% of the matrix product's rate", "ms a step", "adamw"]);
    sandbox
        .cinch("bench --steps 0")
        .fails(2, &["--steps 0", "hint:"]);
}

/// Flags that name a model leave nothing for all of them. Running them takes gigabytes.
#[test]
fn all_systems_are_not_one_of_them() {
    let sandbox = Sandbox::new();
    sandbox
        .cinch("bench --all --model gsa")
        .fails(2, &["--all", "--model", "hint:"]);
    sandbox
        .cinch("bench --all --steps 0")
        .fails(2, &["--steps 0", "hint:"]);
}
