//! `cinch diagnose`: exit codes, the form of its JSON, savings for runs that are known, cinch's own
//! messages, and logs that grow.

mod common;

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::Stdio;

use common::{Ran, Sandbox};
use serde_json::Value;

fn corpus(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../diagnose/tests/fixtures");
    let path = folder.join(format!("{name}.log"));
    path.to_str()
        .expect("the repository's path is text")
        .to_owned()
}

fn diagnose(name: &str, more: &str) -> Ran {
    let file = corpus(name);
    let mut arguments = vec!["diagnose", file.as_str()];
    arguments.extend(more.split_whitespace());
    Sandbox::new().run(arguments)
}

fn only(ran: &Ran) -> Value {
    let failures = ran.json()["failures"].as_array().expect("a list").clone();
    assert_eq!(failures.len(), 1, "{failures:#?}");
    failures[0].clone()
}

#[test]
fn exit_codes_say_whether_memory_ran_out() {
    diagnose("pytorch-2.4-capacity", "").exits(4).prints(&[
        "capacity",
        "22.57 GiB",
        "what will not help",
    ]);
    diagnose("not-triton", "").succeeds().prints(&["not_oom"]);
    diagnose("not-a-clean-run", "")
        .succeeds()
        .prints(&["no sign that memory ran out in 41 lines"]);
    let sandbox = Sandbox::new();
    sandbox.cinch("diagnose no.log").fails(2, &["no.log"]);
    sandbox.cinch("diagnose .").fails(2, &["folder"]);
    sandbox
        .cinch("diagnose --follow")
        .fails(2, &["--follow", "file"]);
    // Nothing on standard input is nothing found.
    sandbox.cinch("diagnose -").succeeds().prints(&["0 lines"]);
}

#[test]
fn the_json_has_its_form() {
    let ran = diagnose("pytorch-2.5-fragmented", "--json").exits(4);
    let failure = only(&ran);
    assert_eq!(failure["framework"], "pytorch");
    assert_eq!(failure["is_oom"], true);
    assert_eq!(failure["cause"], "fragmentation");
    assert!(
        failure["confidence"]
            .as_f64()
            .is_some_and(|sure| (0.5..=1.0).contains(&sure))
    );
    for name in [
        "tried",
        "total",
        "free",
        "allocated",
        "reserved",
        "reserved_unallocated",
    ] {
        assert!(
            failure["numbers"][format!("{name}_bytes")].is_u64(),
            "{name}"
        );
    }
    for name in ["limit_bytes", "other_bytes", "rss_bytes"] {
        assert!(
            failure["numbers"].get(name).is_some_and(Value::is_null),
            "{name}"
        );
    }
    assert!(
        failure["evidence"]
            .as_array()
            .is_some_and(|list| !list.is_empty())
    );
    let first = &failure["fixes"][0];
    assert!(
        first["command"]
            .as_str()
            .is_some_and(|text| text.contains("expandable_segments:True"))
    );
    assert!(
        first["saves_bytes"].is_null(),
        "nothing is known of the run"
    );
    assert!(failure["will_not_help"].is_array());
}

/// The guides' error texts, each with its guide's settings: the cause that is true, savings that
/// were computed, and none of the advice that does nothing.
#[test]
fn the_guides_errors_are_answered_with_computed_savings() {
    for (guide, settings) in [
        (
            "guide-000",
            "--model mamba --model-size medium --batch-size 4 --grad-accum 4 --seq-len 1024 --torch-precision amp_fp16",
        ),
        (
            "guide-001",
            "--model gsa --batch-size 8 --grad-accum 8 --seq-len 2048 --torch-precision amp_bf16",
        ),
        (
            "guide-002",
            "--model qwen2.5-7b --lora-rank 128 --batch-size 2 --grad-accum 8 --seq-len 2048 --torch-precision fp16",
        ),
        (
            "guide-003",
            "--model mu --batch-size 32 --grad-accum 1 --seq-len 512 --torch-precision amp_fp16",
        ),
        (
            "guide-004",
            "--model naics --batch-size 45 --grad-accum 5 --torch-precision amp_fp16",
        ),
    ] {
        let ran = diagnose(guide, &format!("{settings} --json")).exits(4);
        let failure = only(&ran);
        let cause = failure["cause"].as_str().expect("a cause");
        assert!(["capacity", "unclear"].contains(&cause), "{guide}: {cause}");
        assert!(failure["numbers"]["predicted_bytes"].is_u64(), "{guide}");
        let fixes = failure["fixes"].as_array().expect("a list");
        let computed = fixes
            .iter()
            .filter(|fix| fix["saves_bytes"].is_u64())
            .count();
        assert!(computed >= 2, "{guide}: {fixes:#?}");
        let batch = fixes.iter().find(|fix| {
            fix["what"]
                .as_str()
                .is_some_and(|text| text.starts_with("half the micro batch"))
        });
        assert!(
            batch.is_some_and(|fix| fix["saves_bytes"].as_u64() > Some(1 << 30)),
            "{guide}: {fixes:#?}"
        );
        for fix in fixes {
            let text = fix.to_string();
            for wrong in [
                "kill",
                "empty_cache",
                "expandable_segments",
                "reboot",
                "fp16 autocast",
            ] {
                let repeats = wrong == "fp16 autocast" && !settings.contains("amp_bf16");
                assert!(!text.contains(wrong) || repeats, "{guide}: {text}");
            }
        }
    }
}

#[test]
fn a_config_gives_the_lines_to_change_and_the_log_is_compared_with_it() {
    let sandbox = Sandbox::new();
    sandbox.write(
        "axolotl.yaml",
        "base_model: Qwen/Qwen2.5-7B-Instruct\nadapter: lora\nlora_r: 128\nlora_target_linear: true\n\
         sequence_len: 1536\nmicro_batch_size: 2\ngradient_accumulation_steps: 8\nbf16: true\n\
         optimizer: adamw_torch\n",
    );
    let log = corpus("transformers-log");
    let ran = sandbox
        .run([
            "diagnose",
            log.as_str(),
            "--config",
            "axolotl.yaml",
            "--json",
        ])
        .exits(4);
    let failure = only(&ran);
    let fixes = failure["fixes"].as_array().expect("a list");
    let batch = fixes
        .iter()
        .find(|fix| {
            fix["what"]
                .as_str()
                .is_some_and(|text| text.starts_with("half the micro batch"))
        })
        .expect("a smaller micro batch helps");
    assert_eq!(
        batch["command"],
        "micro_batch_size: 1\ngradient_accumulation_steps: 16"
    );
    assert!(batch["saves_bytes"].as_u64() > Some(1 << 30));
    // Few weights are trained: their states are small already.
    let useless = failure["will_not_help"].to_string();
    assert!(useless.contains("expandable_segments"), "{useless}");
}

#[test]
fn a_log_that_tells_too_little_is_given_no_figures() {
    let ran = diagnose("transformers-log", "--json")
        .exits(4)
        .says(&["savings are not computed"]);
    let failure = only(&ran);
    for fix in failure["fixes"].as_array().expect("a list") {
        assert!(fix["saves_bytes"].is_null(), "{fix}");
    }
    let more = "--seq-len 2048 --lora-rank 128 --torch-precision bf16 --json";
    let failure = only(&diagnose("transformers-log", more).exits(4));
    assert!(failure["numbers"]["predicted_bytes"].is_u64());
}

#[test]
fn a_log_that_tells_its_settings_needs_no_flags() {
    let failure = only(&diagnose("axolotl-log", "--json").exits(4));
    assert!(failure["numbers"]["predicted_bytes"].as_u64() > Some(24 << 30));
    let evidence = failure["evidence"].to_string();
    assert!(
        evidence.contains("batch 4 × 2 = 8 sequences of 4096 tokens, "),
        "{evidence}"
    );
    assert!(evidence.contains("LoRA of rank 32"), "{evidence}");
    let fixes = failure["fixes"].as_array().expect("a list");
    let fix = |what: &str| {
        let found = fixes.iter().find(|fix| {
            fix["what"]
                .as_str()
                .is_some_and(|text| text.starts_with(what))
        });
        found.unwrap_or_else(|| panic!("no {what} in {fixes:#?}"))
    };
    // In the words of the program that printed the log.
    let half = fix("half the micro batch");
    assert_eq!(
        half["command"],
        "micro_batch_size: 2\ngradient_accumulation_steps: 4"
    );
    assert!(half["saves_bytes"].is_u64());
    assert_eq!(fix("half the length")["command"], "sequence_len: 2048");
}

#[test]
fn where_no_change_is_enough_those_that_fit_together_are_told() {
    let sandbox = Sandbox::new();
    sandbox.write(
        "axolotl.yaml",
        "base_model: NousResearch/Llama-3.2-1B\nmicro_batch_size: 8\ngradient_accumulation_steps: 2\n\
         sequence_len: 4096\nadapter: lora\nlora_r: 32\nlora_target_linear: true\nbf16: true\n\
         optimizer: adamw_torch_fused\n",
    );
    sandbox.write(
        "train.log",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 15.66 GiB. GPU 0 has a total \
         capacity of 23.64 GiB of which 5.10 GiB is free. Of the allocated memory 17.90 GiB is allocated \
         by PyTorch, and 120.00 MiB is reserved by PyTorch but unallocated.\n",
    );
    let ran = sandbox.cinch("diagnose train.log --config axolotl.yaml --json");
    let failure = only(&ran.exits(4));
    let (fix, numbers) = (&failure["fixes"][0], &failure["numbers"]);
    let what = fix["what"].as_str().unwrap();
    assert!(what.starts_with("settings that fit: batch 8 → "), "{what}");
    let left = numbers["predicted_bytes"].as_u64().unwrap() - fix["saves_bytes"].as_u64().unwrap();
    assert!(left < numbers["total_bytes"].as_u64().unwrap(), "{left}");
    let command = fix["command"].as_str().unwrap();
    assert!(command.contains("micro_batch_size: "), "{command}");
    // What it says is what the planner finds.
    let line = "plan axolotl.yaml --gpu-memory 23.64 --json";
    let mut text = std::fs::read_to_string(sandbox.join("axolotl.yaml")).unwrap();
    for line in command.lines() {
        let (key, _) = line.split_once(':').unwrap();
        let old = text
            .lines()
            .find(|old| old.starts_with(key))
            .unwrap()
            .to_owned();
        text = text.replace(&old, line);
    }
    sandbox.write("axolotl.yaml", &text);
    sandbox.cinch(line).succeeds();
}

#[test]
fn cinchs_own_answer_is_diagnosed_in_the_same_form() {
    let sandbox = Sandbox::new();
    let refused = sandbox
        .cinch("fit --model gpt2 --vram 200mb --device cpu")
        .exits(3);
    let path = sandbox.write("refused.log", &refused.stderr);
    let ran = sandbox
        .run(["diagnose", path.to_str().expect("text"), "--json"])
        .exits(4);
    let failure = only(&ran);
    assert_eq!(failure["framework"], "cinch");
    assert_eq!(failure["cause"], "capacity");
    assert_eq!(failure["numbers"]["limit_bytes"], 200 << 20);
    assert!(failure["numbers"]["needed_bytes"].as_u64() > Some(200 << 20));
    let planned = sandbox
        .cinch("plan --engine pytorch --model gpt2 --batch-size 8 --seq-len 512 --vram 4gb")
        .exits(3);
    let path = sandbox.write("planned.log", &planned.stderr);
    let ran = sandbox
        .run(["diagnose", path.to_str().expect("text"), "--json"])
        .exits(4);
    let failure = only(&ran);
    assert_eq!(failure["framework"], "cinch");
    assert!(failure["fixes"][0]["saves_bytes"].is_u64(), "{failure:#}");
}

#[test]
fn a_log_that_grows_is_followed() {
    let sandbox = Sandbox::new();
    let path = sandbox.write("grows.log", "step: 1 loss: 2.0\n");
    let mut child = sandbox
        .command(["diagnose", "grows.log", "--follow", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the program starts");
    let mut out = BufReader::new(child.stdout.take().expect("it is piped")).lines();
    let grow = |text: &str| {
        let mut file = OpenOptions::new()
            .append(true)
            .open(&path)
            .expect("it is there");
        file.write_all(text.as_bytes()).expect("it can be written");
    };
    for (tried, bytes) in [("160.00 MiB", 160 << 20), ("512.00 MiB", 512 << 20)] {
        // In two parts, as a program writes.
        grow(&format!(
            "RuntimeError: CUDA out of memory. Tried to allocate {tried} (GPU 0; 3.81 GiB total cap"
        ));
        grow("acity; 3.08 GiB already allocated; 55.38 MiB free; 9.78 MiB cached)\nnext\n");
        let line = out.next().expect("an answer").expect("text");
        let told: Value = serde_json::from_str(&line).expect("JSON");
        assert_eq!(told["failures"][0]["numbers"]["tried_bytes"], bytes);
    }
    child.kill().expect("it runs");
    child.wait().expect("it ends");
}
