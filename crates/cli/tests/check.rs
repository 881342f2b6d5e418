//! `cinch check`: go or no go, and why.

mod common;

use std::fs;

use common::Sandbox;

#[test]
fn a_run_that_can_start_is_a_go() {
    Sandbox::new()
        .cinch("check --model-size tiny --device cpu")
        .succeeds()
        .prints(&[
            "vram.batch_size",
            "--model-size",
            "ok  device",
            "ok  plan",
            "ok  free memory",
            "ok  disk",
            "ok  data              the built-in text",
            "\ngo\n",
        ]);
}

#[test]
fn check_and_train_speak_of_the_same_run() {
    let sandbox = Sandbox::new();
    for (flags, run) in [
        ("", "run: the built-in demo, in runs/mamba-tiny\n"),
        ("", "run: the built-in demo, in runs/mamba-tiny-2\n"),
        (
            "--model gpt2 --model-size tiny --warmup-steps 0",
            "run: a new one, in runs/gpt2-tiny\n",
        ),
    ] {
        let line = format!("{flags} --max-steps 1");
        let check = sandbox.cinch(&format!("check {line}")).succeeds();
        let train = sandbox.cinch(&format!("train {line}")).succeeds();
        assert!(check.stdout.starts_with(run), "{}", check.stdout);
        assert!(train.stdout.starts_with(run), "{}", train.stdout);
        let batch = |text: &str| {
            let from = text.find(" × ").expect("a batch") - 1;
            let end = from + text[from..].find(" tokens").expect("a length");
            text[from..end].to_owned()
        };
        assert_eq!(batch(&check.stdout), batch(&train.stdout));
    }
    sandbox
        .cinch("check --output-dir runs/mamba-tiny")
        .fails(1, &["no go: folder"])
        .prints(&["runs/mamba-tiny already holds a run (step 1)", "--resume"]);
    let json = sandbox.cinch("check --json").succeeds().json();
    assert_eq!(json["run"]["demo"], true);
    assert_eq!(json["run"]["folder"], "runs/mamba-tiny-3");
}

#[test]
fn little_data_is_a_warning() {
    let sandbox = Sandbox::new();
    sandbox.write("few/a.txt", "just a few words");
    sandbox
        .cinch("check --model-size tiny --data-dir few")
        .succeeds()
        .prints(&["!  data", "fewer than the 16", "\ngo\n"]);
}

#[test]
fn samples_are_counted_and_not_estimated_by_their_text() {
    let sandbox = Sandbox::new();
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let config = format!("{root}/examples/finetune/base/config.json");
    sandbox.write("model/config.json", fs::read(config).unwrap());
    let line = "{\"prompt\": \"1 + 1 =\", \"completion\": \" 2\"}\n";
    sandbox.write("sums.jsonl", line.repeat(20));
    // Twenty short samples are twenty rows, however little text they are.
    let check = "check --model model --tokenizer bytes --data-dir sums.jsonl --seq-len 128 --device cpu \
                 --warmup-steps 0";
    let enough = sandbox.cinch(&format!("{check} --batch-size 4 --grad-accum 2"));
    let enough = enough.succeeds();
    assert!(!enough.stdout.contains("!  data"), "{}", enough.stdout);
    assert!(!enough.stdout.contains("on disk"), "{}", enough.stdout);
    sandbox
        .cinch(&format!("{check} --batch-size 16 --grad-accum 2"))
        .succeeds()
        .prints(&["!  data", "at most 20 sequences", "fewer than the 32"]);
}

#[test]
fn every_value_has_its_origin() {
    let sandbox = Sandbox::new();
    sandbox.write("my.json", "{\"vram\": {\"max_seq_len\": 128}}");
    let check = sandbox
        .cinch("check --config my.json --model-size tiny --seq-len 64 --device cpu --json")
        .succeeds()
        .json();
    assert_eq!(check["go"], true);
    let settings = check["settings"].as_array().unwrap();
    let length = settings
        .iter()
        .find(|one| one["key"] == "vram.max_seq_len")
        .unwrap();
    assert_eq!(length["value"], 64);
    assert!(
        length["source"].to_string().contains("--seq-len"),
        "{length}"
    );
    let overridden = length["overridden"].to_string();
    assert!(
        overridden.contains("128") && overridden.contains("my.json"),
        "{overridden}"
    );
    assert_eq!(check["plan"]["settings"]["seq_len"], 64);
}

#[test]
fn what_stands_in_the_way_is_a_no_go() {
    let sandbox = Sandbox::new();
    sandbox
        .cinch("check --model-size tiny --device cpu --data-dir nowhere")
        .fails(1, &["no go: data"])
        .prints(&["NO  data", "nowhere does not exist"]);
    sandbox
        .cinch("check --model-size xxlarge --vram 2gb --device cpu")
        .fails(3, &["no go: plan"])
        .prints(&["NO  plan", "does not fit", "what would fit"]);
    sandbox
        .cinch("check --model-size tiny --batch-size 0")
        .fails(2, &["`vram.batch_size` is 0"]);
    sandbox
        .cinch("check --model-size tiny --device cuda")
        .fails(1, &["GPU"]);
    // A file where the folder of the run should be.
    sandbox.write("taken", "");
    sandbox
        .cinch("check --model-size tiny --device cpu --output-dir taken/run")
        .fails(1, &["no go: disk"])
        .prints(&["NO  disk", "--output-dir"]);
}

#[test]
fn variables_that_matter_are_named() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(["check", "--model-size", "tiny", "--device", "cpu"]);
    command.env("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True");
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        text.contains("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        "{text}"
    );
}

/// Nothing is written by looking.
#[test]
fn nothing_is_left_behind() {
    let sandbox = Sandbox::new();
    sandbox
        .cinch("check --model-size tiny --device cpu")
        .succeeds();
    assert_eq!(fs::read_dir(sandbox.path()).unwrap().count(), 0);
}
