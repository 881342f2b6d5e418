//! `cinch train` and what follows it: the record of a run, its checkpoints, samples from it, and
//! the ways to data.

mod common;

use std::fs;

use common::{Sandbox, checkpoint_file, checkpoints, metrics, tensors, tiny};
use serde_json::Value;

/// The two numbers of "… loss A before, B after N steps", or of "… A at step 1, B at step N".
#[track_caller]
fn losses(stdout: &str) -> (f64, f64) {
    let line = stdout.lines().find(|line| line.contains(" loss "));
    let line = line.unwrap_or_else(|| panic!("no losses in\n{stdout}"));
    let mut numbers = line
        .split_whitespace()
        .filter(|word| word.contains('.'))
        .map(|word| word.parse::<f64>().expect("a number"));
    let mut next = || numbers.next().expect("two numbers");
    (next(), next())
}

#[test]
fn nothing_but_the_command_trains_a_model() {
    let sandbox = Sandbox::new();
    let trained = sandbox
        .cinch("train --max-steps 12 --eval-steps 6 --save-steps 4 --log-steps 3")
        .succeeds()
        .prints(&[
            "mamba tiny: 544,128 parameters",
            "weights",
            "activations",
            "total",
            "run: the built-in demo, in runs/mamba-tiny\n",
            "fits the free host memory of ",
            "validation loss ",
            "12 steps and 0.0803 epochs in ",
            "memory: ",
            "checkpoint: runs/mamba-tiny/checkpoints/step-00000012",
            "sample from it: cinch generate runs/mamba-tiny --prompt ",
            "tensorboard --logdir runs/mamba-tiny/tensorboard",
        ])
        .says(&[
            "data: ",
            "training steps 1 to 12 on ",
            ", 0.0803 epochs over the data",
            "step 0: validation loss ",
            "step 3/12  epoch 0.0201  loss ",
            "  lr ",
            "tok/s",
            "eta ",
            "step 12: saved runs/mamba-tiny/checkpoints/step-00000012",
        ]);
    let (before, after) = losses(&trained.stdout);
    assert!(after < before - 0.5, "{before} before, {after} after");

    let run = sandbox.join("runs/mamba-tiny");
    let lines = metrics(&run);
    let with = |key: &str| -> Vec<u64> {
        let lines = lines.iter().filter(|line| line.get(key).is_some());
        lines.filter_map(|line| line["step"].as_u64()).collect()
    };
    assert_eq!(with("loss"), [3, 6, 9, 12]);
    assert_eq!(with("validation_loss"), [0, 6, 12]);
    assert!(lines.iter().all(|line| {
        let loss = line.get("loss").or_else(|| line.get("validation_loss"));
        loss.and_then(Value::as_f64)
            .is_some_and(|loss| loss > 0.0 && loss < 7.0)
    }));
    let events: Vec<_> = fs::read_dir(run.join("tensorboard"))
        .expect("a folder of curves")
        .collect();
    assert_eq!(events.len(), 1);
}

#[test]
fn every_logged_step_has_its_time_and_memory() {
    let sandbox = Sandbox::new();
    let run = sandbox.join("run");
    sandbox
        .train_tiny("--max-steps 4 --log-steps 2 --output-dir run")
        .succeeds();
    // As a version before these fields wrote it.
    let old = "{\"step\":2,\"loss\":5.5,\"learning_rate\":0.1,\"gradient_norm\":1.0,\
               \"tokens_per_second\":1.0,\"tokens\":256}\n";
    fs::write(run.join("metrics.jsonl"), old).expect("a metrics file");
    sandbox
        .cinch("train --resume run --max-steps 6 --threads 1")
        .succeeds();
    let lines = metrics(&run);
    assert_eq!((lines.len(), &lines[0]["loss"]), (2, &Value::from(5.5)));
    let last = &lines[1];
    for field in ["loss", "learning_rate", "gradient_norm", "tokens"] {
        assert!(last[field].is_number(), "{field} in {last}");
    }
    let positive = |field: &str| {
        let number = last[field].as_f64();
        number.filter(|number| *number > 0.0).expect(field)
    };
    // One step of 4 sequences of 32 tokens.
    assert!(positive("step_seconds") < 60.0 && positive("tokens_per_second") > 1.0);
    assert!(positive("epoch") < 1.0);
    assert!(positive("arena_bytes") < positive("planned_bytes"));
    if cfg!(target_os = "linux") {
        assert!(positive("resident_bytes") > positive("arena_bytes"));
    }
    assert!(last.get("device_used_bytes").is_none());
    let curves: Vec<u8> = fs::read_dir(run.join("tensorboard"))
        .expect("a folder of curves")
        .flat_map(|file| fs::read(file.expect("a file").path()).expect("a readable file"))
        .collect();
    for tag in ["train/step_seconds", "memory/arena_bytes", "train/epoch"] {
        let mut windows = curves.windows(tag.len());
        assert!(windows.any(|window| window == tag.as_bytes()), "{tag}");
    }
}

#[test]
fn little_data_is_warned_of_before_the_first_step() {
    let sandbox = Sandbox::new();
    sandbox.write("few/a.txt", "just a few words");
    let warned = sandbox
        .train_tiny("--max-steps 2 --data-dir few --output-dir run")
        .succeeds()
        .says(&[
            "warning: the data has 17 tokens, 1 sequence of 32 tokens to train on.",
            "4 sequences: it repeats",
            "hint: give more text with --data-dir",
            "8.00 epochs over the data",
        ]);
    let place = |part: &str| warned.stderr.find(part).expect(part);
    assert!(place("warning:") < place("training steps"));
    let enough = sandbox
        .train_tiny("--max-steps 2 --output-dir other")
        .succeeds();
    assert!(!enough.stderr.contains("warning"), "{}", enough.stderr);
}

/// What is printed is read at 80 columns, and nothing in it is the same in every run.
#[test]
fn the_output_is_narrow_and_without_standing_notes() {
    let sandbox = Sandbox::new();
    sandbox.write(
        "my.json",
        "{\"model\": {\"size\": \"tiny\", \"d_conv\": 4}, \"vram\": {\"batch_size\": 2, \
         \"gradient_accumulation_steps\": 1, \"max_seq_len\": 32}}",
    );
    for line in [
        "train --max-steps 30 --eval-steps 10 --log-steps 10",
        "train --config my.json --max-steps 2 --warmup-steps 1",
        "check",
        "check --config my.json",
        "check --all",
    ] {
        let ran = sandbox.cinch(line).succeeds();
        for text in [&ran.stdout, &ran.stderr] {
            assert!(!text.contains("note:"), "{line}:\n{text}");
            assert!(!text.contains('\r') && !text.contains('\u{1b}'), "{text:?}");
            let wide = text.lines().find(|line| line.chars().count() > 80);
            assert_eq!(wide, None, "{line}:\n{text}");
        }
    }
}

#[test]
fn old_checkpoints_go_and_the_best_stays() {
    let sandbox = Sandbox::new();
    sandbox
        .train_tiny("--max-steps 20 --save-steps 2 --save-total-limit 2 --output-dir run")
        .succeeds();
    let run = sandbox.join("run");
    assert_eq!(checkpoints(&run), ["step-00000018", "step-00000020"]);

    // A rate that spoils the weights from step 6 on: the best is an old one.
    sandbox
        .train_tiny(
            "--max-steps 6 --save-steps 2 --eval-steps 3 --save-total-limit 2 --output-dir rising",
        )
        .succeeds();
    sandbox
        .cinch("train --resume rising --max-steps 12 --lr 3 --threads 1")
        .succeeds()
        .prints(&["at step 6)"]);
    let run = sandbox.join("rising");
    let best: Value =
        serde_json::from_slice(&fs::read(run.join("checkpoints/best.json")).expect("best.json"))
            .expect("JSON");
    let lowest = metrics(&run)
        .iter()
        .filter(|line| line["step"] != 0)
        .filter_map(|line| Some((line["validation_loss"].as_f64()?, line["step"].as_u64()?)))
        .min_by(|a, b| a.0.total_cmp(&b.0))
        .expect("evaluations");
    assert_eq!(best["step"], lowest.1);
    assert_eq!(best["metric"], lowest.0);
    assert_eq!(lowest.1, 6, "the best of this run comes early");
    assert_eq!(
        checkpoints(&run),
        [
            "best.json".to_owned(),
            format!("step-{:08}", lowest.1),
            "step-00000010".to_owned(),
            "step-00000012".to_owned(),
        ]
    );
    let sampled = |flag: &str| {
        let line = format!("generate rising --max-tokens 1 --json {flag}");
        sandbox.cinch(&line).succeeds().json()["checkpoint"].clone()
    };
    let best = sampled("--best");
    let path = best.as_str().expect("the checkpoint's path");
    assert!(path.ends_with(&format!("step-{:08}", lowest.1)), "{path}");
    assert_ne!(best, sampled(""));
}

#[test]
fn text_is_generated_the_same_for_a_seed() {
    let sandbox = Sandbox::new();
    sandbox
        .train_tiny("--max-steps 30 --output-dir run")
        .succeeds();
    let generate = |line: &str| {
        let ran = sandbox.cinch(&format!("generate run --max-tokens 60 {line}"));
        ran.succeeds().stdout
    };
    let first = generate("--prompt fn --seed 1");
    assert!(first.starts_with("fn") && first.len() > 30, "{first}");
    assert_eq!(first, generate("--prompt fn --seed 1"));
    assert_ne!(first, generate("--prompt fn --seed 2"));
    // Without chance the seed means nothing.
    assert_eq!(
        generate("--temperature 0 --seed 1"),
        generate("--temperature 0 --seed 2")
    );
    let json = sandbox
        .cinch("generate run --max-tokens 60 --prompt fn --seed 1 --json")
        .succeeds()
        .json();
    assert_eq!(json["prompt_tokens"], 2);
    assert!(json["tokens"].as_u64().is_some_and(|tokens| tokens <= 60));
    let text = json["text"].as_str().expect("text");
    assert!(first.trim_end().ends_with(text.trim_end()), "{text}");
}

#[test]
fn synthetic_data_is_written_prepared_and_trained_on() {
    let sandbox = Sandbox::new();
    let written = sandbox
        .cinch("data synth synthetic_data --files 30 --bytes 1500")
        .succeeds()
        .prints(&["wrote 30 files", "--data-dir synthetic_data"]);
    assert!(written.stdout.contains("python"), "{}", written.stdout);
    let prepared = sandbox
        .cinch("data prepare synthetic_data --tokenizer bytes --json")
        .succeeds()
        .json();
    assert_eq!(prepared["documents"], 30);
    sandbox
        .train_tiny("--max-steps 5 --data-dir synthetic_data --output-dir run")
        .succeeds()
        .says(&["in 30 documents (from the cache)"]);
    // A second call does not mix two generations of files.
    sandbox
        .cinch("data synth run --files 3")
        .fails(2, &["run", "hint:"]);
}

#[test]
fn a_column_of_jsonl_is_trained_on() {
    let sandbox = Sandbox::new();
    let lines: Vec<String> = (0..200)
        .map(|n| format!("{{\"id\": {n}, \"body\": \"the number {n} comes after the last one\"}}"))
        .collect();
    sandbox.write("texts.jsonl", lines.join("\n"));
    sandbox
        .train_tiny("--max-steps 5 --data-dir texts.jsonl --text-column body --output-dir run")
        .succeeds()
        .says(&["in 200 documents"]);
    sandbox
        .train_tiny("--max-steps 5 --data-dir texts.jsonl --output-dir other")
        .fails(
            2,
            &[
                "texts.jsonl` line 1",
                "`text`",
                "`body`",
                "hint:",
                "--text-column",
            ],
        );
}

#[test]
fn a_second_run_has_a_second_folder_and_a_named_one_is_not_overwritten() {
    let sandbox = Sandbox::new();
    for _ in 0..2 {
        sandbox.cinch("train --max-steps 1").succeeds();
    }
    let first = sandbox.join("runs/mamba-tiny");
    let second = sandbox.join("runs/mamba-tiny-2");
    // The same settings and seed: the same weights, in two places.
    assert_eq!(tensors(&first, 1), tensors(&second, 1));

    sandbox
        .cinch("train --max-steps 2 --output-dir runs/mamba-tiny")
        .fails(
            2,
            &[
                "runs/mamba-tiny already holds a run (step 1)",
                "hint:",
                "--resume runs/mamba-tiny",
            ],
        );
    assert_eq!(checkpoints(&first), ["step-00000001"]);
}

#[test]
fn a_run_does_not_end_because_nobody_watches_it() {
    let sandbox = Sandbox::new();
    let mut child = sandbox.start(tiny("--max-steps 5 --log-steps 1 --output-dir run"));
    drop(child.stderr.take());
    let output = child.wait_with_output().expect("the program ends");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(checkpoints(&sandbox.join("run")), ["step-00000005"]);
}

#[test]
fn the_outcome_is_json_on_request() {
    let sandbox = Sandbox::new();
    let outcome = sandbox
        .train_tiny("--max-steps 6 --eval-steps 3 --output-dir run --json")
        .succeeds()
        .json();
    assert_eq!(outcome["finished"], true);
    assert_eq!(outcome["step"], 6);
    assert_eq!(outcome["validated"], true);
    assert!(outcome["last_loss"].as_f64() < outcome["first_loss"].as_f64());
    assert_eq!(
        outcome["checkpoint"].as_str(),
        Some("run/checkpoints/step-00000006")
    );
}

#[test]
fn losses_are_told_without_evaluations_too() {
    let sandbox = Sandbox::new();
    let trained = sandbox
        .train_tiny("--max-steps 30 --eval-steps 0 --output-dir run")
        .succeeds()
        .prints(&["training loss ", " at step 1, ", " at step 30\n"]);
    let (before, after) = losses(&trained.stdout);
    assert!(after < before, "{before} before, {after} after");
}

#[test]
fn a_different_split_into_micro_batches_gives_nearly_the_same_weights() {
    // Neither the micro batch nor recomputation changes the gradient, only the order of sums.
    let sandbox = Sandbox::new();
    let last_loss = |line: &str| {
        let ran = sandbox.train_tiny(&format!("--max-steps 8 --dropout 0 --json {line}"));
        ran.succeeds().json()["last_loss"].as_f64().expect("a loss")
    };
    let loss = last_loss("--output-dir a");
    let split = |batch: usize, accumulation: usize| {
        last_loss(&format!(
            "--output-dir {batch} --set vram.batch_size={batch} \
             --set vram.gradient_accumulation_steps={accumulation}"
        ))
    };
    let (whole, single) = (split(4, 1), split(1, 4));
    let recomputed = last_loss("--output-dir d --checkpointing full");
    for (other, what) in [(whole, "4 × 1"), (single, "1 × 4")] {
        assert!((loss - other).abs() < 1e-3, "{loss} and {other} for {what}");
    }
    assert_eq!(loss, recomputed, "recomputed values are the same values");
}

#[test]
fn a_finished_run_goes_on_with_more_steps() {
    let sandbox = Sandbox::new();
    let run = sandbox.join("run");
    sandbox
        .train_tiny("--max-steps 4 --schedule constant --warmup-steps 2 --output-dir run")
        .succeeds();
    sandbox
        .cinch("train --resume run")
        .succeeds()
        .says(&["step 4 of 4 is done already", "--max-steps"]);
    sandbox
        .cinch("train --resume run --max-steps 9")
        .succeeds()
        .says(&["training steps 5 to 9"]);
    sandbox
        .train_tiny("--max-steps 9 --schedule constant --warmup-steps 2 --output-dir whole")
        .succeeds();
    assert_eq!(tensors(&run, 9), tensors(&sandbox.join("whole"), 9));
}

#[test]
fn a_moved_run_goes_on_where_it_is() {
    let sandbox = Sandbox::new();
    sandbox
        .train_tiny("--max-steps 4 --output-dir before")
        .succeeds();
    fs::rename(sandbox.join("before"), sandbox.join("after")).expect("a moved folder");
    sandbox
        .cinch("train --resume after --max-steps 6")
        .succeeds();
    assert!(!sandbox.join("before").exists());
    assert_eq!(checkpoints(&sandbox.join("after")).len(), 2);
}

#[test]
fn resume_without_a_folder_takes_the_one_a_new_run_would_have() {
    let sandbox = Sandbox::new();
    sandbox.cinch("train --max-steps 2").succeeds();
    sandbox
        .cinch("train --resume --max-steps 3")
        .succeeds()
        .prints(&["runs/mamba-tiny/checkpoints/step-00000003"]);
}

#[test]
fn losses_of_two_kinds_are_not_compared() {
    let sandbox = Sandbox::new();
    // Too short for an evaluation, and then long enough.
    sandbox
        .train_tiny("--max-steps 4 --eval-steps 5 --output-dir run")
        .succeeds()
        .prints(&["training loss "]);
    let longer = sandbox
        .cinch("train --resume run --max-steps 6 --threads 1")
        .succeeds()
        .prints(&["validation loss ", " after 6 steps"]);
    assert!(!longer.stdout.contains("before"), "{}", longer.stdout);
}

#[test]
fn a_resumed_run_has_the_settings_it_began_with() {
    let sandbox = Sandbox::new();
    // 24 sequences a step come from the preset, 6 of them at a time from the flag, their length
    // from the model's positions; the budget has more digits than are shown.
    sandbox
        .cinch(
            "train --set model.d_model=32 --set model.n_layers=2 --set model.max_seq_len=16 \
             --set model.vocab_size=257 --tokenizer bytes --vram-preset 48gb --batch-size 6 \
             --training-preset careful --vram 1234567891b --max-steps 2 --threads 1 \
             --output-dir run",
        )
        .succeeds()
        .prints(&["batch 6 × 4 = 24 sequences of 16 tokens"]);
    let settings = |step: u64| -> Value {
        let state = checkpoint_file(&sandbox.join("run"), step, "state.json");
        let state: Value = serde_json::from_slice(&state).expect("JSON");
        state["config"].clone()
    };
    sandbox
        .cinch("train --resume run --max-steps 3 --threads 1")
        .succeeds();
    let (before, mut after) = (settings(2), settings(3));
    assert_eq!(after["training"]["max_steps"], 3);
    after["training"]["max_steps"] = before["training"]["max_steps"].clone();
    assert_eq!(before, after);
}

/// A share of warm-up is one of the run as it is, also where that was made longer.
#[test]
fn a_run_that_goes_on_for_longer_warms_up_for_its_share() {
    let sandbox = Sandbox::new();
    sandbox
        .train_tiny("--max-steps 2 --warmup-ratio 0.5 --log-steps 1 --output-dir run")
        .succeeds();
    sandbox
        .cinch("train --resume run --max-steps 8 --threads 1")
        .succeeds();
    let rate = |line: &Value| line.get("learning_rate")?.as_f64();
    let lines = metrics(&sandbox.join("run"));
    let rates: Vec<f64> = lines.iter().filter_map(rate).collect();
    // The third and the last of four steps to the peak.
    assert!((rates[2] / rates[3] - 0.75).abs() < 1e-9, "{rates:?}");
}

/// A file of the sparse-attention project, with ids that another program wrote, four GPUs that are
/// one device here, and a checkpoint named as there.
#[test]
fn sparse_attention_goes_on_as_if_it_had_not_been_interrupted() {
    let sandbox = Sandbox::new();
    let ids: Vec<u8> = (0..4000_u32)
        .flat_map(|i| ((i * i / 7 % 60) as u16).to_le_bytes())
        .collect();
    sandbox.write("tokens/train.bin", ids);
    sandbox.write(
        "tokens/metadata.json",
        r#"{"dtype": "uint16", "vocab_size": 60, "num_tokens": 4000}"#,
    );
    sandbox.write(
        "gsa.yaml",
        "model: {vocab_size: 61, d_model: 16, n_layers: 2, n_heads: 4, n_kv_heads: 2, d_ffn: 24}\n\
         gsa: {d_indexer: 4, n_indexer_heads: 2, k_base: 8, k_min: 2, k_max: 12}\n\
         training:\n  micro_batch_size: 2\n  gradient_accumulation_steps: 1\n  \
         global_batch_size: 8\n  max_seq_len: 24\n  max_steps: 6\n  warmup_steps: 2\n  \
         learning_rate: 3.0e-3\n  indexer_warmup_steps: 3\n  precision: fp32\n\
         data: {data_dir: tokens}\nlogging: {log_interval: 1, eval_interval: 9, save_interval: 2}\n",
    );
    sandbox
        .cinch("train --config gsa.yaml --output_dir whole --seed 5 --threads 1")
        .succeeds()
        .prints(&[
            "batch 2 × 4 = 8 sequences of 24 tokens",
            "4 GPUs are one device",
        ]);
    sandbox
        .cinch("train --config gsa.yaml --output_dir cut --seed 5 --threads 1")
        .succeeds();
    for step in [6, 4] {
        let folder = sandbox.join(format!("cut/checkpoints/step-{step:08}"));
        fs::remove_dir_all(folder).expect("a checkpoint");
    }
    sandbox
        .cinch("train --config gsa.yaml --output_dir cut --resume_from cut/step_2 --threads 1 --seed 5")
        .succeeds();
    let weights = |run: &str| checkpoint_file(&sandbox.join(run), 6, "model.safetensors");
    assert!(weights("whole") == weights("cut"));
}
