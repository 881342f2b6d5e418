//! Rows of samples: the longest is planned, shorter ones are padded to shorter lengths, and what is
//! learned does not change.

mod common;

use common::{Sandbox, metrics, tensors};
use serde_json::Value;

/// Prompts with answers of 5 to 8 words, and every fourth of 30 to 49.
fn pairs(sandbox: &Sandbox) {
    let line = |index: usize| {
        let words = match index % 4 {
            0 => 30 + index % 20,
            _ => 5 + index % 4,
        };
        let answer = vec!["word"; words].join(" ");
        format!("{{\"prompt\": \"{index} say\", \"completion\": \" {answer}.\"}}\n")
    };
    sandbox.write("pairs.jsonl", (0..48).map(line).collect::<String>());
}

/// Without `--seq-len`: the data decides.
const MODEL: &str = "--model gpt2 --set model.d_model=32 --set model.n_heads=2 \
                     --set model.n_layers=2 --set model.max_seq_len=256 --set model.vocab_size=257 \
                     --tokenizer bytes --data-dir pairs.jsonl --batch-size 2 --grad-accum 4 \
                     --device cpu";

fn planned(sandbox: &Sandbox, more: &str) -> Value {
    let ran = sandbox.cinch(&format!("plan {MODEL} --json {more}"));
    ran.succeeds().json()
}

#[test]
fn the_longest_row_is_planned_and_shorter_ones_beside_it() {
    let sandbox = Sandbox::new();
    pairs(&sandbox);
    let plan = planned(&sandbox, "");
    let longest = plan["rows"]["longest_sample"].as_u64().unwrap();
    let seq_len = plan["settings"]["seq_len"].as_u64().unwrap();
    assert_eq!(seq_len, longest.next_multiple_of(8), "{plan}");
    let buckets = plan["rows"]["buckets"].as_array().unwrap();
    assert!((2..=4).contains(&buckets.len()), "{buckets:?}");
    let rows = buckets.iter().map(|one| one["rows"].as_u64().unwrap());
    assert!(rows.clone().all(|rows| rows > 0), "{buckets:?}");
    // A twentieth is held out.
    assert_eq!(rows.sum::<u64>(), 46);
    assert_eq!(buckets[buckets.len() - 1]["length"], seq_len);
    let variants = plan["variants"].as_array().unwrap();
    assert_eq!(variants.len(), buckets.len());
    let peak = variants.iter().find(|one| one["is_peak"] == true).unwrap();
    assert_eq!(peak["seq_len"], seq_len);
    assert!(plan["memory"]["host"]["samples"].as_u64().unwrap() > 0);

    // One length: the same arena, and more padding.
    let one = planned(&sandbox, "--buckets off");
    assert_eq!(one["variants"], Value::Null);
    assert_eq!(one["memory"]["arena_bytes"], plan["memory"]["arena_bytes"]);
    let share = |plan: &Value| plan["rows"]["share"].as_f64().unwrap();
    assert!(
        share(&one) > share(&plan) + 0.1,
        "{} {}",
        share(&one),
        share(&plan)
    );

    // What was stated holds.
    let stated = planned(&sandbox, "--seq-len 256 --buckets 64,40");
    assert_eq!(stated["settings"]["seq_len"], 256);
    let lengths = stated["variants"].as_array().unwrap();
    let lengths: Vec<u64> = lengths
        .iter()
        .map(|one| one["seq_len"].as_u64().unwrap())
        .collect();
    assert_eq!(lengths, [256, 64, 40]);
    let text = sandbox.cinch(&format!("plan {MODEL} --explain"));
    text.succeeds()
        .prints(&["rows of", "the longest of 48 samples", "% of them padding"]);
    let text = sandbox.cinch(&format!("check {MODEL}"));
    text.succeeds()
        .prints(&["the longest of 48 samples", "host memory", "samples"]);
    let wrong = sandbox.cinch(&format!("plan {MODEL} --buckets some"));
    wrong.fails(2, &["data.buckets", "some", "auto, off, or lengths"]);
}

#[test]
fn fit_and_a_budget_see_the_longest() {
    let sandbox = Sandbox::new();
    pairs(&sandbox);
    let free = planned(&sandbox, "");
    let total = |plan: &Value| {
        let memory = &plan["memory"];
        memory["arena_bytes"].as_u64().unwrap() + memory["overhead_bytes"].as_u64().unwrap()
    };
    let fit = sandbox.cinch(&format!("fit {MODEL} --vram {}b --json", total(&free)));
    let fit = fit.succeeds().json();
    assert_eq!(
        fit["fit"]["recommended"]["settings"]["seq_len"],
        free["settings"]["seq_len"]
    );
}

fn losses(sandbox: &Sandbox, run: &str) -> Vec<f64> {
    let steps = metrics(&sandbox.join(run));
    steps
        .iter()
        .filter_map(|line| line["loss"].as_f64())
        .collect()
}

const TRAIN: &str = "--log-steps 1 --save-steps 5 --eval-steps 5 --lr 3e-3 --warmup-steps 0 \
                     --threads 1 --save-total-limit 0";

#[test]
fn shorter_rows_learn_the_same_and_resume_bit_for_bit() {
    let sandbox = Sandbox::new();
    pairs(&sandbox);
    let train = |more: &str| {
        sandbox
            .cinch(&format!("train {MODEL} {TRAIN} {more}"))
            .succeeds()
    };
    // Masks are drawn by place, so that the comparison is without dropout.
    train("--set model.dropout=0 --max-steps 10 --output-dir several");
    train("--set model.dropout=0 --max-steps 10 --output-dir one --buckets off");
    let (several, one) = (losses(&sandbox, "several"), losses(&sandbox, "one"));
    assert_eq!(several.len(), one.len());
    assert!(several.len() >= 10);
    for (several, one) in several.iter().zip(&one) {
        assert!((several - one).abs() <= 1e-5 * one, "{several} {one}");
    }
    let tokens = |run: &str| {
        metrics(&sandbox.join(run))
            .iter()
            .filter_map(|line| line["tokens"].as_u64())
            .max()
    };
    assert!(tokens("several") < tokens("one"));
    // What was planned is what was allocated.
    let plan = planned(&sandbox, "--set model.dropout=0");
    let steps = metrics(&sandbox.join("several"));
    let arena = steps.iter().find_map(|line| {
        line["memory/arena_bytes"]
            .as_u64()
            .or(line["arena_bytes"].as_u64())
    });
    assert_eq!(arena, plan["memory"]["arena_bytes"].as_u64());

    train("--max-steps 10 --output-dir whole");
    train("--max-steps 10 --output-dir half");
    std::fs::remove_dir_all(sandbox.join("half/checkpoints/step-00000010")).unwrap();
    sandbox
        .cinch("train --resume half --threads 1 --device cpu")
        .succeeds();
    assert!(tensors(&sandbox.join("whole"), 10) == tensors(&sandbox.join("half"), 10));
}
