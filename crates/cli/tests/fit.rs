//! `cinch fit`: what it recommends is planned and trained as recommended, stays within the
//! budget, keeps the effective batch, and is written into files and out of them again.

mod common;

use std::fs;

use common::Sandbox;
use serde_json::Value;

const SIZES: [(&str, &[&str]); 2] = [
    (
        "mamba",
        &[
            "tiny",
            "small",
            "medium-lite",
            "medium-plus",
            "medium-x",
            "medium",
            "medium-extra",
            "large-lite",
            "large-plus",
            "large",
            "xlarge",
            "xxlarge",
        ],
    ),
    ("gpt2", &["tiny", "gpt2", "medium", "large", "xl"]),
];

/// `cinch fit … --json`.
fn fit(sandbox: &Sandbox, line: &str) -> Value {
    let line = format!("fit {line} --json");
    sandbox.cinch(&line).succeeds().json()
}

fn bytes(value: &Value) -> u64 {
    value.as_u64().expect("a number of bytes")
}

/// What `cinch train` is told, as arguments of another command.
fn as_command(answer: &Value, command: &str) -> String {
    let train = answer["train"].as_str().expect("a command");
    train.replacen("cinch train", command, 1)
}

#[test]
fn every_size_is_answered_for_24_gb_and_planned_as_recommended() {
    let sandbox = Sandbox::new();
    for (model, sizes) in SIZES {
        for size in sizes {
            let answer = fit(
                &sandbox,
                &format!("--gpu-memory 24 --model {model} --model-size {size}"),
            );
            let recommended = &answer["fit"]["recommended"];
            let total = bytes(&recommended["total_bytes"]);
            assert!(
                total <= bytes(&answer["fit"]["budget_bytes"]),
                "{model} {size}"
            );
            let plan = as_command(&answer, "plan --device cuda --json");
            let plan = sandbox.cinch(&plan).succeeds().json();
            for key in [
                "batch_size",
                "accumulation",
                "seq_len",
                "precision",
                "checkpointing",
            ] {
                assert_eq!(
                    plan["settings"][key], recommended["settings"][key],
                    "{model} {size}: {key}"
                );
            }
            let memory = &plan["memory"];
            let planned = bytes(&memory["arena_bytes"]) + bytes(&memory["overhead_bytes"]);
            assert_eq!(planned, total, "{model} {size}");
        }
    }
}

#[test]
fn what_is_recommended_for_the_cpu_is_trained() {
    let sandbox = Sandbox::new();
    for model in ["mamba", "gpt2"] {
        let line = format!(
            "--vram 300mb --device cpu --model {model} --model-size tiny --tokenizer bytes"
        );
        let answer = fit(&sandbox, &line);
        let train = as_command(&answer, "train --max-steps 2 --json");
        let outcome = sandbox.cinch(&train).succeeds().json();
        assert_eq!(outcome["step"], 2, "{outcome}");
    }
}

#[test]
fn eight_gigabytes_keep_the_batch_and_the_sequences_of_the_small_mamba() {
    let answer = fit(&Sandbox::new(), "--gpu-memory 8 --model-size small");
    let settings = &answer["fit"]["recommended"]["settings"];
    assert_eq!(settings["effective_batch"], 16);
    assert_eq!(settings["seq_len"], 1024);
}

#[test]
fn the_effective_batch_is_exact_or_the_nearest_are_offered() {
    let sandbox = Sandbox::new();
    let answer = fit(
        &sandbox,
        "--gpu-memory 24 --model-size small --target-effective-batch 96",
    );
    let settings = &answer["fit"]["recommended"]["settings"];
    let product = |key: &str| settings[key].as_u64().unwrap();
    assert_eq!(product("batch_size") * product("accumulation"), 96);
    sandbox
        .cinch("fit --gpu-memory 24 --batch-size 3 --target-effective-batch 256")
        .fails(2, &["256", "255", "258", "hint:"]);
}

#[test]
fn a_card_is_found_by_name_and_its_memory_less_the_margin_is_the_budget() {
    let sandbox = Sandbox::new();
    let run = |more: &str| {
        let mut line = vec![
            "fit",
            "--gpu",
            "A100 80GB",
            "--model-size",
            "small",
            "--json",
        ];
        line.extend(more.split_whitespace());
        sandbox.run(line).succeeds().json()
    };
    let whole = bytes(&run("")["fit"]["memory_bytes"]);
    assert!((79 << 30..=80 << 30).contains(&whole), "{whole}");
    let budget = |more: &str| bytes(&run(more)["fit"]["budget_bytes"]);
    assert!(budget("").abs_diff(whole / 10 * 9) < 16);
    assert!(budget("--safety-margin 0.25").abs_diff(whole / 4 * 3) < 16);
    assert_eq!(budget("--safety-margin 2gb"), whole - (2 << 30));
}

/// Settings, memory and speed come first; nothing else is asked for, so nothing else is shown.
#[test]
fn the_answer_is_the_first_three_lines() {
    let ran = Sandbox::new().cinch("fit --gpu-memory 12 --model-size medium");
    let ran = ran.succeeds();
    let lines: Vec<&str> = ran.stdout.lines().collect();
    assert!(
        lines[0].starts_with("mamba medium: micro batch "),
        "{lines:?}"
    );
    let memory = "of the budget of 10.80 GiB (--gpu-memory of 12.00 GiB, less a safety margin of";
    assert!(
        lines[1].starts_with("needs ") && lines[1].contains(memory),
        "{lines:?}"
    );
    assert!(
        lines[2].starts_with("predicted: ") && lines[2].contains("tokens/s"),
        "{lines:?}"
    );
    let ran = ran.prints(&[
        "--details",
        "train with it: cinch train --model-size medium",
    ]);
    assert!(!ran.stdout.contains("memory against speed"));
}

#[test]
fn details_show_all_that_was_found_in_tables_of_80_columns() {
    let sandbox = Sandbox::new();
    for size in ["small", "medium", "xxlarge"] {
        let ran = sandbox.cinch(&format!(
            "fit --gpu-memory 12 --model-size {size} --details"
        ));
        let ran = ran.succeeds();
        let ran = ran.prints(&[
            "activations",
            "instead of",
            "safe",
            "maximum",
            "from there, each alone:",
            "memory against speed:",
            "recommended",
        ]);
        let is_table = |line: &&str| line.starts_with(['│', '┌', '╞', '└']);
        for line in ran.stdout.lines().filter(is_table) {
            assert!(line.chars().count() <= 80, "{size}: {line}");
        }
    }
}

/// Without it, training would take a GPU where there is one.
#[test]
fn what_was_found_for_the_cpu_is_trained_there() {
    Sandbox::new()
        .cinch("fit --device cpu --vram 8 --model-size small")
        .succeeds()
        .prints(&["train with it: cinch train --device cpu --model-size small"]);
}

/// A card that holds far more than the model takes has one rung.
#[test]
fn rungs_that_end_at_the_same_settings_are_one() {
    Sandbox::new()
        .cinch("fit --vram 24 --model-size small --details")
        .succeeds()
        .prints(&["safe to maximum"]);
}

/// A point that only the card holds is marked, because the margin is the user's.
#[test]
fn what_is_over_the_budget_is_marked() {
    Sandbox::new()
        .cinch("fit --gpu-memory 12 --model-size xxlarge --details")
        .succeeds()
        .prints(&["over budget"]);
}

/// The micro batch of the file is weighed at the effective batch that is asked for.
#[test]
fn reasons_compare_equal_effective_batches() {
    let sandbox = Sandbox::new();
    for (preset, target, expected) in [
        ("8gb", 96, "micro batch 1 × 96"),
        ("48gb", 7, "the effective batch is 7"),
    ] {
        let answer = fit(
            &sandbox,
            &format!("--gpu-memory 24 --vram-preset {preset} --target-effective-batch {target}"),
        );
        let changes = answer["fit"]["changes"].as_array().unwrap();
        let batch = changes.iter().find(|change| {
            let from = change["from"].as_str();
            from.is_some_and(|from| from.starts_with("micro batch"))
        });
        let reason = batch.unwrap()["reason"].as_str().unwrap();
        assert!(reason.contains(expected), "{target}: {reason}");
    }
}

#[test]
fn pictures_are_drawn_by_their_ending() {
    let sandbox = Sandbox::new();
    sandbox
        .cinch(
            "fit --gpu-memory 8 --model-size small --picture a.svg --picture b.png \
             --front-picture c.png",
        )
        .succeeds();
    assert!(
        fs::read_to_string(sandbox.join("a.svg"))
            .unwrap()
            .contains("<svg")
    );
    for name in ["b.png", "c.png"] {
        assert!(
            fs::read(sandbox.join(name))
                .unwrap()
                .starts_with(b"\x89PNG")
        );
    }
    sandbox
        .cinch("plan --model-size tiny --picture plan.jpg")
        .fails(2, &["plan.jpg", ".svg or .png"]);
    sandbox
        .cinch("plan --model-size tiny --picture nowhere/plan.svg")
        .fails(1, &["nowhere/plan.svg"]);
}

const YAML: &str = "# my run\nmodel:\n  type: mamba\n  size: small   # fits\nvram:\n  \
    batch_size: 1      # was too small\n  gradient_accumulation_steps: 16\n  use_fp16: true\n";

#[test]
fn settings_are_written_into_a_file_and_taken_back() {
    let sandbox = Sandbox::new();
    let path = sandbox.write("my.yaml", YAML);
    let line = "fit --gpu-memory 8 --config my.yaml --apply";
    // Nobody confirms.
    sandbox.cinch(line).fails(2, &["--yes"]);
    assert_eq!(fs::read_to_string(&path).unwrap(), YAML);
    let ran = sandbox.cinch(&format!("{line} --yes")).succeeds();
    ran.prints(&["-  batch_size: 1      # was too small", "wrote my.yaml"])
        .prints(&["train with it: cinch train --config my.yaml\n"]);
    let written = fs::read_to_string(&path).unwrap();
    assert!(written.contains("  size: small   # fits\n"), "{written}");
    assert!(!written.contains("batch_size: 1 "), "{written}");
    assert!(
        !written.contains("optimizer_states"),
        "a default is not written: {written}"
    );
    assert_eq!(
        fs::read_to_string(sandbox.join("my.yaml.backup")).unwrap(),
        YAML
    );
    // What was written is what is planned, and says the same when asked again.
    let plan = sandbox.cinch("plan --config my.yaml --device cuda --json");
    let settings = plan.succeeds().json()["settings"].clone();
    assert_eq!(settings["effective_batch"], 16);
    sandbox
        .cinch(&format!("{line} --yes"))
        .succeeds()
        .prints(&["nothing to write"]);
    sandbox
        .cinch("fit --config my.yaml --undo")
        .succeeds()
        .prints(&["restored my.yaml"]);
    assert_eq!(fs::read_to_string(&path).unwrap(), YAML);
}

#[test]
fn guide_004s_files_are_written_together() {
    let sandbox = Sandbox::new();
    let main = "data_loader:\n  batch_size: 45   # per step\ntraining:\n  trainer:\n    \
        accumulate_grad_batches: 5\n";
    sandbox.write("conf/config.yaml", main);
    sandbox.write("conf/text_curriculum/01_stage.yaml", "n_negatives: 24\n");
    sandbox
        .cinch("fit conf --gpu-memory 24 --target-effective-batch 256 --apply --yes")
        .succeeds()
        .prints(&[
            "naics",
            "text embedder",
            "data_loader.batch_size",
            "negatives",
        ]);
    let written = fs::read_to_string(sandbox.join("conf/config.yaml")).unwrap();
    assert!(written.contains("# per step"), "{written}");
    assert!(!written.contains("batch_size: 45"), "{written}");
    sandbox.cinch("fit --config-path conf --undo").succeeds();
    assert_eq!(
        fs::read_to_string(sandbox.join("conf/config.yaml")).unwrap(),
        main
    );
}

/// Each wrong input has its message and its exit code.
#[test]
fn wrong_input_is_told() {
    let sandbox = Sandbox::new();
    sandbox
        .run(["fit", "--gpu", "RTX 5099"])
        .fails(2, &["RTX 5099", "RTX 5090", "hint:"]);
    for memory in ["-24", "0", "lots"] {
        sandbox
            .run(["fit", &format!("--gpu-memory={memory}")])
            .fails(2, &["--gpu-memory", memory]);
    }
    for margin in ["1.5", "-0.1", "a bit"] {
        let margin = format!("--safety-margin={margin}");
        sandbox
            .run(["fit", "--gpu-memory", "24", &margin])
            .fails(2, &["--safety-margin", "hint:"]);
    }
    for batch in ["0", "-4", "many"] {
        let batch = format!("--target-effective-batch={batch}");
        sandbox
            .run(["fit", "--gpu-memory", "24", &batch])
            .fails(2, &["--target-effective-batch", "from 1 on"]);
    }
    sandbox
        .cinch("fit --apply")
        .fails(2, &["--config-path FOLDER"]);
    sandbox.write("broken.yaml", "vram:\n  batch_size: [1\nmodel: x\n");
    sandbox
        .cinch("fit --gpu-memory 8 --config broken.yaml")
        .fails(2, &["broken.yaml", "line ", "column "]);
    sandbox
        .cinch("fit --gpu-memory 8 --config broken.yaml --undo")
        .fails(2, &["broken.yaml"]);
    sandbox
        .cinch("fit --vram 200mb --model-size xxlarge --strict")
        .fails(3, &["does not fit", "200.0 MiB"]);
    sandbox
        .cinch("fit --auto --device cuda")
        .fails(2, &["no GPU", "--gpu"]);
    sandbox
        .cinch("fit --gpu-memory 8 --model-size tiny --profile")
        .fails(2, &["--profile", "no GPU"]);
}

/// A file, a flag and a second file that do not agree are named, each with its value.
#[test]
fn a_config_that_two_places_disagree_on_is_told() {
    let sandbox = Sandbox::new();
    sandbox.write(
        "both.json",
        "{\"vram\": {\"use_fp16\": true, \"precision\": \"bf16\"}}",
    );
    for command in ["plan", "fit --gpu-memory 8", "check", "train"] {
        sandbox
            .cinch(&format!("{command} --config both.json"))
            .fails(2, &["use_fp16", "precision", "both.json"]);
    }
}

#[test]
fn a_file_that_cannot_be_written_stays_as_it_is() {
    let sandbox = Sandbox::new();
    let path = sandbox.write("my.yaml", YAML);
    let mut permissions = fs::metadata(&path).unwrap().permissions();
    permissions.set_readonly(true);
    fs::set_permissions(&path, permissions).unwrap();
    sandbox
        .cinch("fit --gpu-memory 8 --config my.yaml --apply --yes")
        .fails(2, &["my.yaml", "read-only"]);
    assert_eq!(fs::read_to_string(&path).unwrap(), YAML);
    assert!(!sandbox.join("my.yaml.backup").exists());
}

#[test]
fn real_steps_prove_what_is_recommended() {
    let sandbox = Sandbox::new();
    let answer = fit(
        &sandbox,
        "--vram 300mb --device cpu --model-size tiny --seq-len 32 --profile",
    );
    let profile = &answer["profile"];
    assert_eq!(profile["touched_bytes"], profile["planned"]["step_bytes"]);
    assert_eq!(answer["fit"]["is_calibrated"], false);
    // The next prediction knows what was measured.
    let again = fit(
        &sandbox,
        "--vram 300mb --device cpu --model-size tiny --seq-len 32",
    );
    assert_eq!(again["fit"]["is_calibrated"], true);
}

/// The table of the guide in the documents is the one that the program prints.
#[test]
fn the_guides_rows_are_in_the_documents() {
    let printed = Sandbox::new().cinch("fit --guide").succeeds().stdout;
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/guides/000-mamba.md"
    );
    let page = fs::read_to_string(path).unwrap();
    assert!(
        page.contains(printed.trim_end()),
        "docs/guides/000-mamba.md does not hold what `cinch fit --guide` prints:\n{printed}"
    );
}

/// `plan --vram` and `fit` give one answer to one budget, where nothing else is stated.
#[test]
fn one_budget_has_one_answer() {
    let sandbox = Sandbox::new();
    for model in [
        "--model-size small",
        "--model-size medium",
        "--model gpt2",
        "--model gpt2 --model-size large",
        "--model gpt2 --precision fp16",
    ] {
        for budget in [
            "--vram 3gb",
            "--vram 8gb",
            "--gpu-memory 24",
            "--vram 1800mb",
        ] {
            let planned = sandbox.cinch(&format!("plan {model} {budget} --json"));
            let fitted = sandbox.cinch(&format!("fit {model} {budget} --strict --json"));
            let line = format!("{model} {budget}");
            if fitted.code == Some(3) {
                assert_eq!(planned.code, Some(3), "{line}");
                continue;
            }
            let (planned, fitted) = (planned.succeeds().json(), fitted.succeeds().json());
            let recommended = &fitted["fit"]["recommended"];
            for key in [
                "batch_size",
                "accumulation",
                "seq_len",
                "precision",
                "checkpointing",
                "optimizer_states",
                "update_in_backward",
                "offload",
            ] {
                assert_eq!(
                    planned["settings"][key], recommended["settings"][key],
                    "{line}: {key}"
                );
            }
            assert_eq!(
                planned["memory"]["breakdown"], recommended["breakdown"],
                "{line}"
            );
        }
    }
}

/// Every number of GPUs that divides the batch has its best settings, and the answer says how to
/// start as many processes.
#[test]
fn numbers_of_gpus_are_searched_with_the_batch_kept() {
    let sandbox = Sandbox::new();
    let line = "--model gpt2 --seq-len 512 --gpu RTX-4090 --target-effective-batch 12";
    let answer = fit(&sandbox, &format!("{line} --max-ranks 8"));
    let rows = answer["by_ranks"]["rows"].as_array().expect("rows");
    let numbers: Vec<u64> = rows.iter().map(|row| bytes(&row["ranks"])).collect();
    assert_eq!(numbers, [1, 2, 3, 4, 6]);
    for row in rows {
        let settings = &row["outcome"]["settings"];
        assert_eq!(settings["effective_batch"], 12, "{row}");
    }
    let fastest = bytes(&answer["by_ranks"]["fastest"]);
    assert_eq!(answer["by_ranks"]["fewest"], 1);
    let recommended = &answer["fit"]["recommended"]["settings"];
    assert_eq!(bytes(&recommended["ranks"]), fastest);
    let train = answer["train"].as_str().expect("a command");
    let started = format!("cinch launch --gpus {fastest} -- train ");
    assert!(train.starts_with(&started), "{train}");
    assert!(train.contains(&format!("--world {fastest}")), "{train}");
    // The plan of that command is the recommended one.
    let planned = train.replacen(&started, "plan --gpu RTX-4090 --json ", 1);
    let planned = sandbox.cinch(&planned).succeeds().json();
    let total = &answer["fit"]["recommended"]["total_bytes"];
    assert_eq!(planned["world"]["bytes_per_rank"], *total);
}

#[test]
fn a_stated_level_is_kept_and_ranks_are_counted_once() {
    let sandbox = Sandbox::new();
    let line = "fit --model gpt2 --seq-len 512 --gpu RTX-4090 --world 2";
    let stated = format!("{line} --shard zero3 --json");
    let answer = sandbox.cinch(&stated).succeeds().json();
    let settings = &answer["fit"]["recommended"]["settings"];
    assert_eq!(settings["shard"], "weights", "{settings}");
    assert_eq!(settings["ranks"], 2, "{settings}");
    sandbox
        .cinch(&format!("{line} --max-ranks 4"))
        .fails(2, &["--max-ranks", "--world"]);
    sandbox
        .cinch("fit --model gpt2 --gpu-memory 24 --device cpu --max-ranks 4")
        .fails(2, &["--max-ranks counts GPUs"]);
}
