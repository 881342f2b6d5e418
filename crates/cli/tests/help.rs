//! Help that shows what to type, and answers to names that do not exist.

mod common;

use common::Sandbox;

#[test]
fn every_command_has_examples() {
    let sandbox = Sandbox::new();
    for command in [
        "",
        "plan",
        "train",
        "generate",
        "embed",
        "eval",
        "bench",
        "profile",
        "trace",
        "diagnose",
        "rehearse",
        "data",
        "data synth",
        "data prepare",
        "models",
        "gpus",
        "monitor",
        "run",
        "report",
        "presets",
        "init",
        "completions",
        "man",
    ] {
        let help = sandbox.cinch(&format!("{command} --help")).succeeds();
        let help = help.prints(&["Usage: cinch", "Examples:\n  cinch "]);
        assert!(help.stderr.is_empty(), "{}", help.stderr);
    }
}

#[test]
fn the_help_names_exit_codes_and_underscores() {
    Sandbox::new().cinch("--help").succeeds().prints(&[
        "3 does not fit",
        "130 interrupted",
        "--model_size",
        "plan",
        "train",
        "generate",
    ]);
}

#[test]
fn the_version_is_that_of_the_package() {
    let ran = Sandbox::new().cinch("--version").succeeds();
    let version = concat!("cinch ", env!("CARGO_PKG_VERSION"), " (");
    assert!(ran.stdout.starts_with(version), "{}", ran.stdout);
    // What was built, and nothing of the machine that built it.
    assert!(!ran.stdout.contains(['/', '\\', '@']), "{}", ran.stdout);
}

#[test]
fn a_command_that_does_not_exist_is_met_with_the_nearest() {
    Sandbox::new()
        .cinch("trian")
        .fails(2, &["'trian'", "similar", "'train'"]);
}

#[test]
fn a_flag_that_does_not_exist_is_met_with_the_nearest() {
    Sandbox::new()
        .cinch("plan --modelsize small")
        .fails(2, &["'--modelsize'", "'--model-size'"]);
}

#[test]
fn lists_are_tables_and_json() {
    let sandbox = Sandbox::new();
    sandbox.cinch("models").succeeds().prints(&[
        "mamba",
        "xxlarge",
        "700,027,392",
        "gpt2",
        "124,439,808",
        "183,662,144",
        "any",
        "405,227,312",
        "26,940,112",
        "105,542,277",
    ]);
    let models = sandbox.cinch("models --json").succeeds().json();
    let small = models
        .as_array()
        .and_then(|list| list.iter().find(|one| one["size"] == "small"))
        .expect("mamba small is listed");
    assert_eq!(small["parameters"], 40_306_176);

    sandbox
        .cinch_in(120, "presets")
        .succeeds()
        .prints(&["--vram-preset 16gb-medium", "--training-preset careful"]);
    let presets = sandbox.cinch("presets --json").succeeds().json();
    let careful = presets
        .as_array()
        .and_then(|list| list.iter().find(|one| one["name"] == "training careful"))
        .expect("the preset is listed");
    assert_eq!(careful["values"]["training.warmup_steps"], "5000");
}
