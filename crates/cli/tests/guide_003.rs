//! The memory guide of the MU project: its `config.py` is read, planned, edited and trained from,
//! with the rates, the texts and the best checkpoint that the published program has.

mod common;

use std::fs;

use common::{Sandbox, metrics};

/// The guide's settings before its fix, and what else such a file holds.
const CONFIG: &str = "\
\"\"\"Settings of a run.\"\"\"
import os


class MUConfig:
    # Model
    n_layers = 24      # Half the layers, half the memory
    n_heads = 8
    vocab_size = 50_000
    max_seq_len = 512  # Was 256
    dropout = 0.1

    # Training
    batch_size = 32    # Was 4
    gradient_accumulation_steps = 1
    learning_rate = 1e-4
    checkpoint_dir = os.path.join(\"out\", \"mu\")
";

#[test]
fn the_guides_file_plans_for_both_engines() {
    let sandbox = Sandbox::new();
    sandbox.write("src/config.py", CONFIG);
    // As the program runs it, the guide's card is too small.
    sandbox
        .cinch("plan --config src/config.py --gpu-memory 14.74")
        .fails(3, &["PyTorch needs", "14.74 GiB", "hint:"]);
    let line = "plan --config src/config.py --engine cinch --gpu-memory 14.74 --json";
    let plan = sandbox.cinch(line).succeeds().json();
    assert_eq!(plan["parameters"], 26_940_112);
    assert_eq!(plan["settings"]["batch_size"], 32);
    assert_eq!(plan["settings"]["seq_len"], 512);
    // Texts after each epoch are part of what is planned, in host memory: at the least the
    // weights in single precision.
    let text = plan["memory"]["host"]["text"].as_u64().unwrap();
    assert!(text > 4 * 26_940_112, "{text}");
    // The program makes as many positions as its sequences have tokens, and trains all it has.
    sandbox.write("src/config.py", CONFIG.replace("= 512", "= 256"));
    let line = "plan --config src/config.py";
    let plan = sandbox.cinch(&format!("{line} --json")).succeeds().json();
    assert_eq!(plan["parameters"], 26_923_728);
    assert_eq!(plan["trainable"], 26_923_728);
    // Another matrix is another model.
    let other = CONFIG.replace("    n_heads", "    d_model = 128\n    n_heads");
    sandbox.write("src/config.py", other);
    sandbox
        .cinch(line)
        .fails(2, &["MUConfig.d_model", "128", "8 × 8"]);
}

#[test]
fn the_guides_file_is_edited_where_it_was_read() {
    let sandbox = Sandbox::new();
    let path = sandbox.write("src/config.py", CONFIG);
    let line = "fit --config src/config.py --gpu-memory 14.74 --apply --yes";
    sandbox.cinch(line).succeeds();
    // Nothing but the two numbers changes.
    let expected = CONFIG
        .replace("batch_size = 32 ", "batch_size = 4 ")
        .replace(
            "gradient_accumulation_steps = 1",
            "gradient_accumulation_steps = 8",
        );
    assert_eq!(fs::read_to_string(&path).unwrap(), expected);
    sandbox
        .cinch("fit --config src/config.py --undo")
        .succeeds();
    assert_eq!(fs::read_to_string(&path).unwrap(), CONFIG);

    // A program without accumulation cannot keep its batch, so nothing is written.
    let without = CONFIG.replace("    gradient_accumulation_steps = 1\n", "");
    sandbox.write("src/config.py", &without);
    sandbox.cinch(line).fails(
        2,
        &[
            "nothing was written",
            "gradient_accumulation_steps",
            "--add-keys",
        ],
    );
    assert_eq!(fs::read_to_string(&path).unwrap(), without);
}

#[test]
fn the_guides_file_trains_as_published() {
    let sandbox = Sandbox::new();
    let small = CONFIG
        .replace("n_layers = 24", "n_layers = 1")
        .replace("vocab_size = 50_000", "vocab_size = 300")
        .replace("max_seq_len = 512", "max_seq_len = 32")
        .replace("batch_size = 32 ", "batch_size = 2 ");
    sandbox.write("src/config.py", small);
    let lines: Vec<String> = (0..200).map(|n| format!("let x{n} = {n};")).collect();
    sandbox.write("texts/a.rs", lines.join("\n"));
    sandbox
        .cinch(
            "train --config src/config.py --data-dir texts --gpu-memory 14.74 --epochs 2 \
             --sample-prompt let --output-dir run --device cpu --threads 1",
        )
        .succeeds()
        // A text after each of the two epochs, and the best by perplexity.
        .says(&["writes: let", "(best so far)"])
        .prints(&["best ", "cinch generate run"]);
    let steps = metrics(&sandbox.join("run"));
    let rates: Vec<f64> = steps
        .iter()
        .filter_map(|line| line["learning_rate"].as_f64())
        .collect();
    // One cycle: up to the rate of the file, and down to next to nothing.
    let most = rates.iter().copied().fold(0.0, f64::max);
    assert!((0.9e-4..=1e-4).contains(&most), "{most}");
    assert!(rates.last().is_some_and(|&last| last < 1e-8), "{rates:?}");
    let best = steps
        .iter()
        .filter_map(|line| line["validation_perplexity"].as_f64())
        .fold(f64::INFINITY, f64::min);
    assert!(best < 400.0, "{best}");
    assert!(sandbox.join("run/checkpoints/best.json").exists());
    let line = "generate run --prompt let --top-p 0.9 --repetition-penalty 1.2 --max-tokens 8";
    sandbox.cinch(line).succeeds();
}
