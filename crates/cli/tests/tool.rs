//! What people expect of any program on the command line: a file to start from, completions,
//! manual pages, quiet and verbose answers, lines that fit, colours only where they are seen.

mod common;

use std::fs;

use common::Sandbox;

#[test]
fn a_new_configuration_is_read_back_and_fits() {
    let sandbox = Sandbox::new();
    for file in ["run.yaml", "run.json", "run.toml"] {
        sandbox
            .cinch(&format!("init mamba --gpu-memory 8 --output {file}"))
            .succeeds()
            .prints(&[&format!("wrote {file}"), &format!("cinch train {file}")]);
        let plan = sandbox.cinch(&format!("plan {file} --json")).succeeds();
        let plan = plan.json();
        assert_eq!(plan["fits"], true, "{file}");
        assert_eq!(plan["settings"]["effective_batch"], 16, "{file}");
        let text = fs::read_to_string(sandbox.join(file)).expect("the file is there");
        assert!(text.contains("Sequences in one pass"), "{text}");
        assert!(text.contains(&format!("cinch train {file}")), "{text}");
    }
}

#[test]
fn a_new_configuration_states_what_was_asked_for() {
    let sandbox = Sandbox::new();
    sandbox
        .cinch("init gpt2 --gpu-memory 24 --seq-len 256 --lr 1e-3 --output run.yaml")
        .succeeds();
    let explained = sandbox.cinch("plan run.yaml --explain").succeeds();
    for (key, value) in [
        ("model.type", "gpt2"),
        ("vram.max_seq_len", "256"),
        ("training.learning_rate", "0.001"),
    ] {
        let row = explained.stdout.lines().find(|line| line.contains(key));
        let row = row.unwrap_or_else(|| panic!("no {key} in\n{}", explained.stdout));
        assert!(row.contains(value) && row.contains("run.yaml"), "{row}");
    }
}

#[test]
fn a_model_that_pytorch_trains_gets_a_configuration_that_fits_too() {
    let sandbox = Sandbox::new();
    sandbox
        .cinch("init google-bert/bert-base-uncased --gpu-memory 24 --output bert.toml")
        .succeeds()
        .prints(&["cinch plan bert.toml"]);
    let plan = sandbox.cinch("plan bert.toml --json").succeeds().json();
    assert_eq!(plan["engine"], "pytorch");
    assert_eq!(plan["fits"], true);
}

#[test]
fn a_file_that_is_there_is_left_alone() {
    let sandbox = Sandbox::new();
    sandbox.write("run.yaml", "mine");
    sandbox
        .cinch("init --output run.yaml")
        .fails(2, &["run.yaml is there already", "hint:"]);
    let text = fs::read_to_string(sandbox.join("run.yaml")).expect("the file is there");
    assert_eq!(text, "mine");
    sandbox
        .cinch("init --output run.ini")
        .fails(2, &["run.ini", ".yaml, .json or .toml"]);
}

#[test]
fn shells_complete_every_command() {
    let sandbox = Sandbox::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        sandbox
            .cinch(&format!("completions {shell}"))
            .succeeds()
            .prints(&["cinch", "model-size", "profile"]);
    }
    sandbox
        .cinch("completions tcsh")
        .fails(2, &["tcsh", "bash"]);
}

#[test]
fn every_command_has_a_manual_page() {
    let sandbox = Sandbox::new();
    sandbox.cinch("man").succeeds().prints(&[".TH cinch 1"]);
    sandbox.cinch("man --output pages").succeeds();
    for page in ["cinch", "cinch-plan", "cinch-init", "cinch-data-synth"] {
        let path = sandbox.join(format!("pages/{page}.1"));
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{page}: {error}"));
        assert!(text.contains(".SH SYNOPSIS"), "{page}");
    }
}

#[test]
fn help_can_be_asked_for_by_name() {
    Sandbox::new()
        .cinch("help plan")
        .succeeds()
        .prints(&["Usage: cinch plan"]);
}

#[test]
fn quiet_leaves_out_notes_and_verbose_adds_where_settings_came_from() {
    let sandbox = Sandbox::new();
    sandbox.write("run.json", "{\"vram\": {\"batch_size\": 2}}");
    let plain = sandbox
        .cinch("plan run.json")
        .succeeds()
        .prints(&["note: "]);
    assert!(plain.stderr.is_empty(), "{}", plain.stderr);
    let quiet = sandbox.cinch("plan run.json --quiet").succeeds();
    assert!(!quiet.stdout.contains("note: "), "{}", quiet.stdout);
    assert!(quiet.stdout.contains("total"), "{}", quiet.stdout);
    sandbox
        .cinch("--verbose plan run.json")
        .succeeds()
        .says(&["vram.batch_size", "run.json line 1"]);
    sandbox
        .cinch("plan -q -v")
        .fails(2, &["--quiet", "--verbose"]);
}

#[test]
fn a_quiet_training_run_says_how_it_ended() {
    let sandbox = Sandbox::new();
    let ran = sandbox
        .train_tiny("--max-steps 2 --output-dir run --quiet")
        .succeeds();
    assert!(ran.stderr.is_empty(), "{}", ran.stderr);
    let ran = ran.prints(&["run/checkpoints/step-00000002"]);
    assert!(!ran.stdout.contains("activations"), "{}", ran.stdout);
}

#[test]
fn nothing_is_coloured_where_no_terminal_is() {
    let sandbox = Sandbox::new();
    let plan = sandbox.cinch("plan --vram 8gb").succeeds();
    assert!(!plan.stdout.contains('\u{1b}'), "{}", plan.stdout);
    let error = sandbox.cinch("plan --vram -8gb").fails(2, &["hint:"]);
    assert!(!error.stderr.contains('\u{1b}'), "{}", error.stderr);
}

#[test]
fn sizes_that_are_slips_are_met_with_the_way_out() {
    let sandbox = Sandbox::new();
    for flag in ["--vram", "--gpu-memory"] {
        sandbox
            .cinch(&format!("plan {flag} 8000"))
            .fails(2, &[flag, "GiB", "8000mb is 7.81 GiB"]);
    }
    for typed in ["--vram -8gb", "--vram=-8gb", "--gpu-memory -24"] {
        sandbox
            .cinch(&format!("plan {typed}"))
            .fails(2, &["a size cannot be negative"]);
    }
    sandbox.cinch("plan --vram 8000mb").succeeds();
}

#[test]
fn words_of_other_programs_are_understood() {
    let sandbox = Sandbox::new();
    for (typed, key, value) in [
        ("--precision half", "precision", "fp16"),
        ("--precision float16", "precision", "fp16"),
        ("--precision bfloat16", "precision", "bf16"),
    ] {
        let plan = sandbox.cinch(&format!("plan {typed} --json")).succeeds();
        assert_eq!(plan.json()["settings"][key], value, "{typed}");
    }
    let plan = sandbox.cinch("plan --checkpointing true --json").succeeds();
    assert_eq!(plan.json()["settings"]["checkpointing"]["blocks"], 8);
}

#[test]
fn a_card_with_two_boards_is_named_and_listed() {
    let sandbox = Sandbox::new();
    let plan = sandbox.run(["plan", "--gpu", "A100 80GB"]);
    plan.succeeds()
        .says(&["A100 SXM4 80GB", "A100 PCIe 80GB is planned for"]);
    let gpus = sandbox.run(["gpus", "a100 80"]);
    gpus.succeeds()
        .prints(&["A100 PCIe 80GB", "A100 SXM4 80GB"]);
}

/// Where no terminal says how wide it is, tables and charts take 80 columns, and `--timeline` a
/// screen.
#[test]
fn tables_and_charts_fit_a_terminal() {
    let sandbox = Sandbox::new();
    for line in [
        "plan --explain --timeline",
        "plan Qwen/Qwen2.5-0.5B --engine pytorch --batch-size 2 --seq-len 256 --timeline --what-if",
        "fit --gpu-memory 8 --model-size tiny --details",
        "fit --guide",
        "models --all",
        "gpus",
        "presets",
        "check",
        "plan --engine pytorch --guides",
    ] {
        let ran = sandbox.cinch(line).succeeds();
        let drawn = |line: &&str| line.contains(['│', '┌', '╞', '└', '┤']);
        for row in ran.stdout.lines().filter(drawn) {
            assert!(row.chars().count() <= 80, "{line}: {row}");
        }
        let chart = ran.stdout.lines().filter(|row| row.contains('┤')).count();
        assert!(chart <= 20, "{line}: {chart} lines of chart");
    }
}

/// Debug builds have symbols and are not optimised; what is given to people is small.
#[cfg(not(debug_assertions))]
#[test]
fn the_program_is_small() {
    let size = fs::metadata(env!("CARGO_BIN_EXE_cinch")).expect("the program is built");
    assert!(size.len() < 30_000_000, "{} bytes", size.len());
}
