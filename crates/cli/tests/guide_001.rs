//! The memory guide of the sparse-attention project: each of its settings plans as it is printed,
//! with the parameters that the model really has, its token files are read or refused by name, and
//! what was trained generates.

mod common;

use std::process::Stdio;

use common::Sandbox;

const LOW_MEMORY: &str = include_str!("../../../examples/gsa_pretrain_512m_low_memory.yaml");
const PRETRAIN_1B: &str = include_str!("../../../examples/gsa_pretrain_1b.yaml");

/// The file with some of its lines as the guide has them: `key: value`.
fn with_lines(file: &str, lines: &[&str]) -> String {
    let key = |line: &str| line.trim().split(':').next().unwrap_or_default().to_owned();
    file.lines()
        .map(|line| {
            let indent = &line[..line.len() - line.trim_start().len()];
            let other = lines.iter().find(|other| key(other) == key(line));
            other.map_or(line.to_owned(), |other| format!("{indent}{other}"))
        })
        .collect::<Vec<_>>()
        .join("\n")
}

fn plan(file: &str, lines: &[&str]) -> serde_json::Value {
    let sandbox = Sandbox::new();
    sandbox.write("pretrain.yaml", with_lines(file, lines));
    let ran = sandbox.cinch("plan --config pretrain.yaml --engine cinch --device cuda --json");
    ran.succeeds().json()
}

#[test]
fn every_setting_of_the_guide_plans() {
    for (lines, [micro, accumulation, length]) in [
        (&[][..], [2, 32, 1024]),
        (
            &["micro_batch_size: 4", "gradient_accumulation_steps: 16"],
            [4, 16, 1024],
        ),
        (&["max_seq_len: 1536"], [2, 32, 1536]),
        (
            &[
                "micro_batch_size: 8",
                "gradient_accumulation_steps: 8",
                "max_seq_len: 2048",
            ],
            [8, 8, 2048],
        ),
        (
            &["micro_batch_size: 1", "gradient_accumulation_steps: 64"],
            [1, 64, 1024],
        ),
        (&["precision: fp16"], [2, 32, 1024]),
        (&["k_base: 256", "k_max: 512"], [2, 32, 1024]),
    ] {
        let told = plan(LOW_MEMORY, lines);
        assert_eq!(told["model"], "gsa", "{lines:?}");
        assert_eq!(told["parameters"], 183_662_144, "{lines:?}");
        let settings = &told["settings"];
        assert_eq!(settings["batch_size"], micro, "{lines:?}");
        assert_eq!(settings["accumulation"], accumulation, "{lines:?}");
        assert_eq!(settings["effective_batch"], 256, "{lines:?}");
        assert_eq!(settings["seq_len"], length, "{lines:?}");
    }
    assert_eq!(plan(PRETRAIN_1B, &[])["parameters"], 405_227_312);
    // "Reduce model size": two layers of 3.5 million less, and a third of the rest's feed-forward.
    let smaller = plan(LOW_MEMORY, &["n_layers: 6", "d_ffn: 1024"]);
    assert!(smaller["parameters"].as_u64() < Some(183_662_144));
}

#[test]
fn the_guides_medium_step_is_refused_with_its_neighbours() {
    let sandbox = Sandbox::new();
    let medium = ["micro_batch_size: 3", "gradient_accumulation_steps: 21"];
    sandbox.write("pretrain.yaml", with_lines(LOW_MEMORY, &medium));
    sandbox.cinch("plan --config pretrain.yaml").fails(
        2,
        &[
            "global_batch_size",
            "256",
            "micro batch 2 with accumulation 32",
            "micro batch 4 with accumulation 16",
        ],
    );
}

/// A model of the project's form that takes a millisecond.
const TINY: &str = "\
model: {vocab_size: 61, d_model: 16, n_layers: 2, n_heads: 4, n_kv_heads: 2, d_ffn: 24}
gsa: {d_indexer: 4, n_indexer_heads: 2, k_base: 8, k_min: 2, k_max: 12}
training: {micro_batch_size: 2, gradient_accumulation_steps: 1, max_seq_len: 24, max_steps: 2,
  precision: fp32, indexer_warmup_steps: 1}
data: {data_dir: tokens}
";

#[test]
fn token_files_that_do_not_fit_are_refused_by_name() {
    let sandbox = Sandbox::new();
    sandbox.write("tiny.yaml", TINY);
    let ids: Vec<u8> = (0..2000_u16).flat_map(|i| (i % 60).to_le_bytes()).collect();
    let train = "train --config tiny.yaml --output_dir run --threads 1";
    sandbox.write("tokens/train.bin", &ids);
    let metadata = |text: &str| sandbox.write("tokens/metadata.json", text);
    for (text, problem) in [
        (r#"{"dtype": "uint16", "vocab_size": 70}"#, "70"),
        (r#"{"dtype": "float", "vocab_size": 60}"#, "float"),
        (
            r#"{"dtype": "uint16", "vocab_size": 60, "num_tokens": 9}"#,
            "9",
        ),
    ] {
        metadata(text);
        sandbox.cinch(train).fails(2, &[problem, "hint:"]);
    }
    metadata(r#"{"dtype": "uint16", "vocab_size": 60, "num_tokens": 2000}"#);
    sandbox.cinch(train).succeeds();
    // Data that are not there come before the tokenizer that would read them.
    let other = TINY.replace(
        "data_dir: tokens",
        "data_dir: nowhere, tokenizer: somebody/model",
    );
    sandbox.write("tiny.yaml", other);
    let fresh = train.replace("--output_dir run", "--output_dir other");
    sandbox
        .cinch(&fresh)
        .fails(2, &["`nowhere` does not exist", "tiny.yaml line 5"]);
}

/// A mistake of the file is no run with something else in its place, and nothing is written.
#[test]
fn mistakes_of_the_file_are_refused() {
    let sandbox = Sandbox::new();
    let ids: Vec<u8> = (0..2000_u16).flat_map(|i| (i % 60).to_le_bytes()).collect();
    sandbox.write("tokens/train.bin", &ids);
    let slip = TINY.replace("d_ffn", "d_fnn");
    let rate = TINY.replace("max_steps: 2", "max_steps: 2, learning_rate: fast");
    for command in ["train", "check"] {
        for (file, part) in [(&slip, "`model.d_ffn`"), (&rate, "\"fast\"")] {
            sandbox.write("tiny.yaml", file);
            let line = format!("{command} --config tiny.yaml --output_dir run");
            sandbox.cinch(&line).fails(2, &["tiny.yaml line", part]);
        }
    }
    assert!(!sandbox.join("run").exists());
    // The rate bears on no plan, the slip does.
    let plan = "plan --config tiny.yaml --engine cinch";
    sandbox.cinch(plan).succeeds();
    sandbox.write("tiny.yaml", &slip);
    sandbox.cinch(plan).fails(2, &["`model.d_ffn`"]);
    sandbox
        .cinch("plan --config tiny.yaml")
        .succeeds()
        .prints(&["not understood: model.d_fnn = 24"]);
}

/// Ids do not say of which tokenizer they are: no other one is taken for it.
#[test]
fn a_run_on_ids_generates_with_a_tokenizer_that_is_named() {
    let sandbox = Sandbox::new();
    let ids: Vec<u8> = (0..2000_u16).flat_map(|i| (i % 60).to_le_bytes()).collect();
    sandbox.write("tokens/train.bin", &ids);
    let file = TINY.replace("vocab_size: 61", "vocab_size: 51000");
    sandbox.write("tiny.yaml", &file);
    let train = "train --config tiny.yaml --threads 1 --output_dir run";
    sandbox
        .cinch(train)
        .succeeds()
        .prints(&["cinch generate run --tokenizer FILE"]);
    let generate = "generate run --max-tokens 2 --prompt a";
    sandbox
        .cinch(generate)
        .fails(2, &["ids of another program", "--tokenizer"]);
    sandbox
        .cinch(&format!("{generate} --tokenizer gpt2"))
        .succeeds();
    // One that the file names is the run's.
    let named = file.replace("data_dir: tokens", "data_dir: tokens, tokenizer: gpt2");
    sandbox.write("tiny.yaml", named);
    let train = train.replace("output_dir run", "output_dir named");
    sandbox.cinch(&train).succeeds();
    sandbox
        .cinch("generate named --max-tokens 2 --prompt a")
        .succeeds();
    // It is a language model, and no embedder.
    sandbox
        .cinch("eval run")
        .fails(2, &["embeds no texts", "cinch report run"]);
}

/// A reader who has seen enough of the plan does not keep the run from happening.
#[test]
fn a_closed_pipe_does_not_undo_what_was_asked_for() {
    let sandbox = Sandbox::new();
    let ids: Vec<u8> = (0..2000_u16).flat_map(|i| (i % 60).to_le_bytes()).collect();
    sandbox.write("tokens/train.bin", &ids);
    sandbox.write("tiny.yaml", TINY);
    sandbox.write("pretrain.yaml", LOW_MEMORY);
    for line in [
        "train --config tiny.yaml --threads 1 --output_dir run",
        "fit --config pretrain.yaml --gpu-memory 44 --apply --yes",
    ] {
        let mut child = sandbox
            .command(line.split_whitespace())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        assert!(child.wait().unwrap().success(), "{line}");
    }
    assert!(sandbox.join("run/checkpoints/step-00000002").exists());
    let written = std::fs::read_to_string(sandbox.join("pretrain.yaml")).unwrap();
    assert!(written.contains("micro_batch_size: 4\n"));
}

/// Where another micro batch is another run, what is found for PyTorch says so.
#[test]
fn another_micro_batch_is_told_as_another_run() {
    let sandbox = Sandbox::new();
    sandbox.write("pretrain.yaml", LOW_MEMORY);
    let fit = "fit --config pretrain.yaml --gpu-memory 44";
    let note = "micro batch 4 instead of 2: the number of keys follows";
    sandbox.cinch(fit).succeeds().prints(&[note]);
    let answer = sandbox.cinch(&format!("{fit} --json")).succeeds().json();
    assert!(answer["note"].as_str().unwrap().starts_with(note));
    sandbox
        .cinch("plan --config pretrain.yaml --what-if")
        .succeeds()
        .prints(&["half the micro batch: the effective batch stays, but the number of keys"]);
}

/// Two dense steps, then sparse ones; the text is the same however it is asked for.
#[test]
fn a_run_with_sparse_attention_generates() {
    let sandbox = Sandbox::new();
    let lines: Vec<String> = (0..400).map(|n| format!("let x{n} = {n};")).collect();
    sandbox.write("text/a.rs", lines.join("\n"));
    sandbox
        .cinch(
            "train --model gsa --model-size tiny --tokenizer bytes --data-dir text --seq-len 48 \
             --batch-size 2 --grad-accum 1 --max-steps 4 --output-dir run --threads 1 \
             --set model.indexer_warmup_steps=2 --set model.k_base=8 --set model.k_min=4 \
             --set model.k_max=16",
        )
        .succeeds()
        .prints(&["cinch generate"]);
    let line = "generate run --max-tokens 40 --prompt let --temperature 0 --json";
    let first = sandbox.cinch(line).succeeds().json();
    assert_eq!(first["tokens"], 40);
    // The indexer's keys and sums are cached beside keys and values.
    assert!(first["cache_bytes"].as_u64() > Some(0));
    assert_eq!(first["text"], sandbox.cinch(line).succeeds().json()["text"]);
}

/// What a resumed run is told: by the keys of the file, and what another micro batch changes.
#[test]
fn a_resumed_run_is_the_same_run() {
    let sandbox = Sandbox::new();
    sandbox.write("tiny.yaml", TINY);
    let ids: Vec<u8> = (0..2000_u16).flat_map(|i| (i % 60).to_le_bytes()).collect();
    sandbox.write("tokens/train.bin", &ids);
    sandbox.write(
        "tokens/metadata.json",
        r#"{"dtype": "uint16", "vocab_size": 60}"#,
    );
    let train = "train --config tiny.yaml --threads 1 --output_dir";
    sandbox.cinch(&format!("{train} run")).succeeds();
    let resume = format!("{train} run --resume_from run/step_2 --max-steps 3");
    sandbox.write("tiny.yaml", TINY.replace("k_max: 12", "k_max: 10"));
    sandbox.cinch(&resume).fails(
        2,
        &[
            "model.k_max: 12 in the checkpoint, 10 asked for",
            "tiny.yaml line 2",
            "leave out --config",
        ],
    );
    let larger = "micro_batch_size: 1, gradient_accumulation_steps: 2";
    let smaller = "micro_batch_size: 2, gradient_accumulation_steps: 1";
    sandbox.write("tiny.yaml", TINY.replace(smaller, larger));
    sandbox.cinch(&resume).succeeds().prints(&[
        "micro batch 1 × 2, before 2 × 1: another run than an uninterrupted one",
        "--batch-size 2 goes on as before",
    ]);
    sandbox.write("tiny.yaml", TINY);
    sandbox
        .cinch(&format!("{train} run --resume_from run/step_7"))
        .fails(
            2,
            &[
                "run/step_7 is not a checkpoint",
                "has those of the steps 2, 3",
            ],
        );
}
