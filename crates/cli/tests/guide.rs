//! The memory guide of the Mamba trainer: each of its JSON blocks loads as it is printed, its two
//! whole files train, and the flags its users know are understood as they spell them.

mod common;

use std::fs;

use common::{Sandbox, checkpoints, metrics};
use serde_json::Value;

/// Every JSON block of the guide: whole files, files with keys left out, fragments, comments.
macro_rules! block {
    ($name:literal) => {
        (
            $name,
            include_str!(concat!("../../config/tests/fixtures/", $name)),
        )
    };
}

const BLOCKS: [(&str, &str); 9] = [
    block!("config_16gb_safe.json"),
    block!("config_balanced_16gb.json"),
    block!("reduced_sequence.json"),
    block!("gradient_checkpointing.json"),
    block!("mixed_precision.json"),
    block!("reduced_model.json"),
    block!("cpu_offload.json"),
    block!("sequence_too_long.json"),
    block!("batch_too_large.json"),
];

fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    for (name, text) in BLOCKS {
        sandbox.write(name, text);
    }
    sandbox
}

/// Text enough for a few sequences of 512 GPT-2 tokens.
fn write_data(sandbox: &Sandbox) {
    let lines: Vec<String> = (0..2000)
        .map(|n| format!("let total_{n} = {} + {};", n * 7 % 83, n * 5 % 61))
        .collect();
    sandbox.write("your_data/a.rs", lines.join("\n"));
}

#[test]
fn every_block_plans() {
    let sandbox = sandbox();
    for (name, _) in BLOCKS {
        let plan = sandbox.cinch(&format!("plan --json --config {name}"));
        assert_eq!(plan.succeeds().json()["model"], "mamba", "{name}");
    }
}

#[test]
fn the_blocks_mean_what_they_say() {
    let sandbox = sandbox();
    let settings = |name: &str| -> Value {
        let plan = sandbox.cinch(&format!("plan --json --config {name}"));
        plan.succeeds().json()
    };
    let shape = |name: &str| {
        let plan = settings(name);
        let s = &plan["settings"];
        let number = |key: &str| s[key].as_u64();
        (
            number("batch_size"),
            number("accumulation"),
            number("seq_len"),
        )
    };
    assert_eq!(
        shape("config_16gb_safe.json"),
        (Some(1), Some(16), Some(256))
    );
    assert_eq!(
        shape("config_balanced_16gb.json"),
        (Some(2), Some(8), Some(512))
    );
    // The effective batch of 16 stays when only the micro batch is named.
    assert_eq!(
        shape("reduced_sequence.json"),
        (Some(1), Some(16), Some(128))
    );
    assert_eq!(
        settings("sequence_too_long.json")["settings"]["seq_len"],
        256
    );

    for name in ["config_16gb_safe.json", "config_balanced_16gb.json"] {
        let plan = settings(name);
        assert_eq!(plan["settings"]["precision"], "fp16", "{name}");
        assert_eq!(plan["device"], "cuda", "{name}");
        assert_eq!(plan["settings"]["checkpointing"]["blocks"], 8, "{name}");
    }
    let checkpointing = settings("gradient_checkpointing.json");
    assert_eq!(checkpointing["settings"]["checkpointing"]["blocks"], 8);
    assert_eq!(
        settings("mixed_precision.json")["settings"]["precision"],
        "fp16"
    );
    let reduced = settings("reduced_model.json");
    assert_eq!(reduced["settings"]["checkpointing"]["of"], 4);
    assert!(reduced["parameters"].as_u64() < settings("cpu_offload.json")["parameters"].as_u64());
    let offloaded = sandbox.cinch("plan --json --device cuda --config cpu_offload.json");
    assert_eq!(offloaded.succeeds().json()["settings"]["offload"], true);
}

#[test]
fn missing_keys_are_named_with_what_they_became() {
    sandbox()
        .cinch("plan --config config_balanced_16gb.json --explain")
        .succeeds()
        .prints(&["training.adam_beta1", "0.9", "default"]);
}

/// One step of a whole file with its 40 million parameters, on the CPU.
#[track_caller]
fn trains_a_step(name: &str) {
    let sandbox = sandbox();
    write_data(&sandbox);
    let line = format!(
        "train --config {name} --data_dir your_data --max-steps 1 --batch-size 1 --grad-accum 1 \
         --output_dir run"
    );
    sandbox
        .cinch(&line)
        .succeeds()
        .prints(&[
            "fp16 is for GPUs: on the CPU this runs in fp32",
            "mamba small",
            "8 of 8 blocks recomputed",
            "shortened to 0",
            "checkpoint: run/checkpoints/step-00000001",
        ])
        .says(&["step 1/1  epoch ", "  loss "]);
    let run = sandbox.join("run");
    assert_eq!(checkpoints(&run), ["step-00000001"]);
    let loss = metrics(&run)[0]["loss"].as_f64().expect("a loss");
    // An untrained model knows nothing: the loss is near ln 50257.
    assert!((loss - 50257_f64.ln()).abs() < 0.5, "{loss}");
}

#[test]
fn the_safe_file_trains() {
    trains_a_step("config_16gb_safe.json");
}

#[test]
fn the_balanced_file_trains() {
    trains_a_step("config_balanced_16gb.json");
}

#[test]
fn flags_with_underscores_are_the_same_flags() {
    let sandbox = Sandbox::new();
    sandbox.write("corpus.jsonl", "{\"code\": \"fn main() {}\"}\n".repeat(400));
    let explained = sandbox
        .cinch(
            "plan --model_size medium-lite --data_dir corpus.jsonl --text_column code \
             --training_preset fast --vram_auto --vram_safety_margin 0.25 --output_dir out \
             --explain",
        )
        .succeeds();
    for (key, value, flag) in [
        ("model.size", "medium-lite", "--model-size"),
        ("data.source", "corpus.jsonl", "--data-dir"),
        ("data.text_column", "code", "--text-column"),
        ("training.max_steps", "50000", "preset training fast"),
        ("vram.budget", "iB", "--auto"),
        ("output.output_dir", "out", "--output-dir"),
    ] {
        let row = explained.stdout.lines().find(|line| line.contains(key));
        let row = row.unwrap_or_else(|| panic!("no {key} in\n{}", explained.stdout));
        assert!(row.contains(value) && row.contains(flag), "{row}");
    }
    let both = sandbox.cinch("plan --model_size=medium_lite --json");
    assert_eq!(both.succeeds().json()["size"], "medium-lite");
}

#[test]
fn the_safety_margin_is_what_stays_free() {
    let sandbox = Sandbox::new();
    let budget = |margin: &str| {
        let plan = sandbox.cinch(&format!(
            "plan --model_size tiny --vram_auto --vram_safety_margin {margin} --json"
        ));
        let plan = plan.succeeds().json();
        plan["budget_bytes"].as_u64().expect("a budget") as f64
    };
    // Free memory moves while other programs run, so the ratio is only near 4.
    let ratio = budget("0.2") / budget("0.8");
    assert!((3.0..5.5).contains(&ratio), "{ratio}");
    sandbox
        .cinch("plan --vram_auto --vram_safety_margin 1.5")
        .fails(2, &["--safety-margin 1.5", "hint:"]);
    sandbox
        .cinch("plan --vram_safety_margin 0.1")
        .fails(2, &["--safety-margin", "--auto"]);
    sandbox
        .cinch("plan --vram_auto --vram 8gb")
        .fails(2, &["--auto", "--vram"]);
}

#[test]
fn the_quick_fix_plans_inside_its_card() {
    // `--model_size small --vram 8gb` and the medium model on 16 GB, as the guide's table has it.
    let sandbox = Sandbox::new();
    for (size, memory) in [
        ("small", "8gb"),
        ("small", "12gb"),
        ("small", "16gb"),
        ("medium", "16gb"),
        ("medium", "24gb"),
    ] {
        let line = format!("plan --model_size {size} --vram {memory} --precision fp16 --json");
        let plan = sandbox.cinch(&line).succeeds().json();
        assert_eq!(plan["fits"], true, "{line}");
        assert_eq!(plan["settings"]["effective_batch"], 16, "{line}");
    }
    let preset = sandbox.cinch("plan --model_size small --vram_preset 8gb --json");
    let preset = preset.succeeds().json();
    assert_eq!(preset["settings"]["batch_size"], 1);
    assert_eq!(preset["settings"]["seq_len"], 256);
}

#[test]
fn prepared_data_is_reused() {
    let sandbox = Sandbox::new();
    write_data(&sandbox);
    let cold = sandbox.cinch("data prepare your_data --json").succeeds();
    let warm = sandbox.cinch("data prepare your_data --json").succeeds();
    let (cold, warm) = (cold.json(), warm.json());
    assert_eq!(
        (&cold["was_cached"], &warm["was_cached"]),
        (&Value::Bool(false), &Value::Bool(true))
    );
    assert_eq!(cold["tokens"], warm["tokens"]);
    let cache = cold["cache"].as_str().expect("a path");
    assert!(fs::metadata(cache).is_ok(), "{cache}");
}
