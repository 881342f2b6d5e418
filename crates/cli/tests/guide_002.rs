//! Guide 002: a `config.py` of constants and dictionaries, its commands and its checklist, as the
//! guide's reader would use them.

mod common;

use std::fs;
use std::path::Path;

use common::{Ran, Sandbox};
use serde_json::Value;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// The guide's own file; the model, the length, the batch and the accumulation are given.
fn config_py(model: &str, length: u32, batch: u32, accumulation: u32) -> String {
    format!(
        r#""""Baseline training."""
from pathlib import Path

DATA_DIR = Path(__file__).parent.parent / "data"

MODEL_NAME = "{model}"
MAX_SEQ_LENGTH = {length}  # Down from 2048

LORA_CONFIG = {{
    "r": 128,
    "lora_alpha": 256,
    "lora_dropout": 0.05,
    "target_modules": [
        "q_proj", "k_proj", "v_proj", "o_proj",
        "gate_proj", "up_proj", "down_proj",
    ],
    "bias": "none",
    "task_type": "CAUSAL_LM",
}}

TRAINING_CONFIG = {{
    "learning_rate": 2e-4,
    "num_train_epochs": 15,
    "per_device_train_batch_size": {batch},     # Down from 2
    "gradient_accumulation_steps": {accumulation},    # Up from 8
    "warmup_steps": 100,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "cosine",
    "fp16": True,
    "gradient_checkpointing": True,
    "logging_steps": 10,
    "save_steps": 200,
    "save_total_limit": 5,
    "seed": 42,
}}

VAL_SPLIT = 0.1
"#
    )
}

const SEVEN: &str = "Qwen/Qwen2.5-7B-Instruct";

/// A model of the same kind that trains in milliseconds, in the real file format.
fn small_model(sandbox: &Sandbox) {
    let config = Path::new(ROOT).join("examples/finetune/base/config.json");
    let config = fs::read_to_string(config).unwrap();
    let config = config
        .replace("\"hidden_size\": 128", "\"hidden_size\": 64")
        .replace("\"intermediate_size\": 320", "\"intermediate_size\": 128")
        .replace("\"num_hidden_layers\": 3", "\"num_hidden_layers\": 2");
    sandbox.write("base/config.json", config);
    for line in [
        "train --model base --tokenizer bytes --batch-size 2 --grad-accum 1 --seq-len 32 \
         --max-steps 1 --warmup-steps 0 --eval-steps 0 --output-dir first --threads 1",
        "export first --to model",
    ] {
        let ran = run(sandbox, line);
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    }
    sandbox.write("config/config.py", config_py("model", 96, 1, 16));
}

/// Sentences with their graphs, in the guide's format.
fn sentences(sandbox: &Sandbox) {
    let mut text = String::new();
    for number in 0..24 {
        text += &format!("#::snt Sentence {number} .\n(s / sentence\n    :mod {number})\n\n");
    }
    sandbox.write("data/train.txt", text);
}

fn run(sandbox: &Sandbox, line: &str) -> Ran {
    sandbox.run(line.split_whitespace())
}

fn setting<'a>(check: &'a Value, key: &str) -> &'a Value {
    let settings = check["settings"].as_array().unwrap();
    let found = settings.iter().find(|one| one["key"] == key);
    found.unwrap_or_else(|| panic!("no {key}"))
}

#[test]
fn every_flag_of_the_guide_trains() {
    let sandbox = Sandbox::new();
    small_model(&sandbox);
    sentences(&sandbox);
    let ran = run(
        &sandbox,
        "train config/config.py --data-dir data/train.txt --tokenizer bytes --epochs 2 \
         --batch-size 1 --grad-accum 4 --lr 1e-3 --max-samples 20 --val-split 0.2 \
         --max-seq-length 64 --log-steps 1 --save-steps 4 --eval-steps 4 --output-dir run \
         --threads 1",
    );
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let state = sandbox.join("run/checkpoints/step-00000008/state.json");
    let state: Value = serde_json::from_slice(&fs::read(state).unwrap()).unwrap();
    // 16 of 20 samples are trained on, twice, four to a step.
    assert_eq!((&state["step"], &state["samples"]), (&8.into(), &32.into()));
    let training = &state["config"]["training"];
    assert_eq!(training["logging_steps"], 1);
    assert_eq!(
        (&training["save_interval"], &training["eval_interval"]),
        (&4.into(), &4.into())
    );
    assert_eq!(state["config"]["batch"]["seq_len"], 64);
    let folder = sandbox.join("run/adapter");
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        assert!(folder.join(file).is_file(), "{file}");
    }
}

#[test]
fn the_value_that_holds_is_told_with_its_place() {
    let sandbox = Sandbox::new();
    sandbox.write("config/config.py", config_py(SEVEN, 1536, 1, 16));
    let line = "check config/config.py --device cpu --vram 8gb --json";
    let check = run(&sandbox, line).json();
    for (key, value, line) in [
        ("vram.max_seq_len", Value::from(1536), 7),
        ("vram.batch_size", 1.into(), 24),
        ("vram.gradient_accumulation_steps", 16.into(), 25),
        ("vram.precision", "fp16".into(), 30),
        ("vram.checkpointing", "full".into(), 31),
        ("training.epochs", 15.0.into(), 23),
        ("training.learning_rate", 2e-4.into(), 22),
        ("training.save_total_limit", 5.into(), 34),
        ("data.val_split", 0.1.into(), 38),
        ("lora.rank", 128.into(), 10),
    ] {
        let one = setting(&check, key);
        assert_eq!(one["value"], value, "{one}");
        assert_eq!(one["source"]["file"]["line"], line, "{one}");
    }
    // The guide's 1536 never applied, because a flag's own value was 2048: here that is told.
    let check = run(&sandbox, &format!("{line} --max-seq-length 2048")).json();
    let length = setting(&check, "vram.max_seq_len");
    assert_eq!(length["value"], 2048);
    assert_eq!(length["source"]["flag"], "--seq-len", "{length}");
    let others = length["overridden"].to_string();
    assert!(
        others.contains("1536") && others.contains("config.py"),
        "{others}"
    );
}

#[test]
fn the_checklist_is_a_command() {
    let sandbox = Sandbox::new();
    small_model(&sandbox);
    sentences(&sandbox);
    let line = "check config/config.py --data-dir data/train.txt --tokenizer bytes --device cpu";
    let mut command = sandbox.command(line.split_whitespace());
    command
        .env(
            "PYTORCH_CUDA_ALLOC_CONF",
            "max_split_size_mb:128,expandable_segments:True",
        )
        .env("TOKENIZERS_PARALLELISM", "false");
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    for part in [
        "config/confi",
        "ok  free memory",
        "ok  model files",
        "readable",
        "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128",
        "TOKENIZERS_PARALLELISM=false",
        "\ngo\n",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // A test load finds what would end the run minutes later.
    let weights = sandbox.join("model/model.safetensors");
    let whole = fs::read(&weights).unwrap();
    fs::write(&weights, &whole[..whole.len() - 64]).unwrap();
    run(&sandbox, line)
        .fails(1, &["no go: model files"])
        .prints(&["NO  model files"]);
    fs::remove_file(&weights).unwrap();
    run(&sandbox, line).fails(1, &["no go: model files"]);
}

#[test]
fn the_file_is_edited_in_place_and_back() {
    let sandbox = Sandbox::new();
    let before = config_py(SEVEN, 2048, 2, 8);
    let file = sandbox.write("config/config.py", &before);
    let line = "fit config/config.py --engine cinch --gpu RTX3090 --apply --yes";
    let fit = run(&sandbox, line);
    assert_eq!(fit.code, Some(0), "{}", fit.stderr);
    let after = fs::read_to_string(&file).unwrap();
    let keys = [
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "gradient_checkpointing",
    ];
    let lines = || before.lines().zip(after.lines());
    let changed: Vec<(&str, &str)> = lines().filter(|(old, new)| old != new).collect();
    assert!(!changed.is_empty());
    for (old, new) in changed {
        assert!(keys.iter().any(|key| old.contains(key)), "{old}");
        let tail = |line: &str| line.split_once(',').map(|(_, tail)| tail.to_owned());
        assert_eq!(tail(old), tail(new));
    }
    let number = |key: &str| -> u64 {
        let line = after.lines().find(|line| line.contains(key)).unwrap();
        let digits = line.split([':', ',']).nth(1).unwrap();
        digits.trim().parse().unwrap()
    };
    assert_eq!(number(keys[0]) * number(keys[1]), 16);
    // What the file has no name for stands in the command, beside the file.
    let command = fit.stdout.lines().last().unwrap();
    assert!(
        command.contains("cinch train --config config/config.py"),
        "{command}"
    );
    assert!(!command.contains("--batch-size"), "{command}");
    let undone = run(&sandbox, "fit config/config.py --undo");
    assert_eq!(undone.code, Some(0), "{}", undone.stderr);
    assert_eq!(fs::read_to_string(&file).unwrap(), before);
}
