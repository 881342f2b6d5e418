//! What can go wrong, by what caused it: each answer has its exit code, names the file, key and
//! value at fault, and says a way out.

mod common;

use common::Sandbox;

#[test]
fn a_data_folder_that_is_missing_or_useless() {
    let sandbox = Sandbox::new();
    sandbox
        .train_tiny("--data-dir absent")
        .fails(2, &["`absent` does not exist", "hint:"]);
    std::fs::create_dir(sandbox.join("empty")).expect("a folder");
    sandbox
        .train_tiny("--data-dir empty")
        .fails(2, &["`empty`", "hint: files ending in .txt"]);
    sandbox.write("blank/a.txt", "");
    sandbox
        .train_tiny("--data-dir blank")
        .fails(2, &["`blank`"]);
    sandbox.write("pictures/a.png", [137, 80, 78, 71]);
    sandbox
        .train_tiny("--data-dir pictures")
        .fails(2, &["`pictures`", "1 skipped", "hint:"]);
}

#[test]
fn a_file_that_is_not_utf8() {
    let sandbox = Sandbox::new();
    sandbox.write("data/good.txt", "words ".repeat(500));
    sandbox.write("data/latin.txt", b"caf\xe9 au lait");
    sandbox.train_tiny("--data-dir data").fails(
        2,
        &[
            "`data/latin.txt`",
            "not UTF-8",
            "offset 3",
            "hint:",
            "iconv",
        ],
    );
    sandbox.write("run.json", b"{\"model\": {\"size\": \"\xff\"}}");
    sandbox
        .cinch("plan --config run.json")
        .fails(2, &["run.json is not UTF-8", "offset", "hint:"]);
}

#[test]
fn a_key_that_does_not_exist() {
    let sandbox = Sandbox::new();
    sandbox.write("run.json", "{\n  \"vram\": {\n    \"batchsize\": 4\n  }\n}");
    sandbox.cinch("plan --config run.json").fails(
        2,
        &["`vram.batchsize`", "run.json line 3", "`vram.batch_size`"],
    );
    sandbox
        .cinch("plan --set model.d_modle=64")
        .fails(2, &["`model.d_modle`", "--set", "`model.d_model`"]);
    let variable = sandbox
        .command(["plan"])
        .env("CINCH_TRAINING_SEDE", "1")
        .output()
        .expect("the program starts");
    assert_eq!(variable.status.code(), Some(2));
    let message = String::from_utf8_lossy(&variable.stderr);
    assert!(message.contains("CINCH_TRAINING_SEDE"), "{message}");
    assert!(message.contains("CINCH_TRAINING_SEED"), "{message}");
}

#[test]
fn a_value_that_cannot_be() {
    let sandbox = Sandbox::new();
    sandbox.write("run.json", "{\"training\": {\n\"dropout\": 0.1}}");
    sandbox
        .cinch("plan --config run.json")
        .fails(2, &["training.dropout", "run.json line 2"]);
    sandbox.write("run.json", "{\"model\": {\n\"dropout\": 1.5}}");
    sandbox.cinch("plan --config run.json").fails(
        2,
        &["run.json line 2", "`model.dropout` is 1.5", "expected"],
    );
    sandbox.write("run.json", "{\"model\": {\"d_model\": \"wide\"}}");
    sandbox.cinch("plan --config run.json").fails(
        2,
        &["run.json line 1", "`model.d_model`", "wide", "integer"],
    );
    for (line, parts) in [
        (
            "--precision fp8",
            &["--precision", "fp8", "fp32", "bf16"][..],
        ),
        (
            "--batch-size -1",
            &["--batch-size", "`vram.batch_size` is -1", "from 1"],
        ),
        ("--lr -0.5", &["--lr", "-0.5", "above 0"]),
        ("--lr nan", &["`training.learning_rate` is nan", "above 0"]),
        ("--lr inf", &["`training.learning_rate` is inf"]),
        (
            "--max-steps 0",
            &["--max-steps", "`training.max_steps` is 0", "from 1"],
        ),
        ("--max-steps 1e99", &["--max-steps", "1e99"]),
        ("--seed -1", &["--seed", "-1"]),
        ("--vram nonsense", &["--vram", "nonsense", "8gb", "hint:"]),
        ("--vram -8", &["--vram", "-8", "negative"]),
        ("--vram=-8gb", &["--vram", "-8gb", "negative"]),
        ("--vram 0", &["--vram", "`vram.budget` is 0"]),
        ("--val-split 1", &["--val-split", "`data.val_split` is 1"]),
        ("--checkpointing most", &["--checkpointing", "most", "auto"]),
        ("--checkpointing 99", &["`vram.checkpointing`", "99", "8"]),
        (
            "--set model.d_model",
            &["--set", "`model.d_model`", "hint:"],
        ),
        ("--set =3", &["--set"]),
        (
            "--training-preset quick",
            &["\"quick\"", "hint:", "default, fast, careful"],
        ),
        ("--vram-preset 10gb", &["\"10gb\"", "hint:", "8gb, 12gb"]),
        (
            "--model-size smal",
            &["\"smal\"", "--model-size", "\"small\"", "medium-lite"],
        ),
        (
            "--model gpt3",
            &["gpt3", "gpt2", "cinch models", "cinch trace"],
        ),
    ] {
        sandbox.cinch(&format!("plan {line}")).fails(2, parts);
    }
}

#[test]
fn a_file_that_is_no_config() {
    let sandbox = Sandbox::new();
    sandbox
        .cinch("plan --config absent.json")
        .fails(2, &["absent.json does not exist", "hint:"]);
    sandbox
        .cinch("plan --config .")
        .fails(2, &["holds no config files", "hint:"]);
    for (text, parts) in [
        ("", &["run.json is empty", "hint:"][..]),
        ("[1, 2]", &["run.json", "hint:"]),
        (
            "{\"model\": {\"d_model\": NaN}}",
            &["run.json line 1", "hint:"],
        ),
        (
            "{\"model\": {\"d_model\": 64}",
            &["run.json line 1", "hint:"],
        ),
        (
            "{\"model\": {\"d_model\": 64,\n\"d_model\": 32}}",
            &["`model.d_model`", "lines 1 and 2", "hint:"],
        ),
    ] {
        sandbox.write("run.json", text);
        sandbox.cinch("plan --config run.json").fails(2, parts);
    }
}

#[test]
fn a_sequence_longer_than_the_positions() {
    let sandbox = Sandbox::new();
    let parts = [
        "`vram.max_seq_len`",
        "`model.max_seq_len`",
        "positions",
        "hint:",
    ];
    sandbox
        .cinch("train --model-size small --seq-len 4096")
        .fails(2, &parts)
        .says(&["4096 (--seq-len)", "lower vram.max_seq_len to 1024"]);
    sandbox.write(
        "run.json",
        "{\"model\": {\"max_seq_len\": 128},\n \"vram\": {\"max_seq_len\": 256}}",
    );
    sandbox
        .cinch("train --config run.json")
        .fails(2, &parts)
        .says(&["256 (run.json line 2)", "128 (run.json line 1)"]);
}

#[test]
fn a_config_for_another_model() {
    let sandbox = Sandbox::new();
    sandbox.write(
        "gpt2.json",
        "{\"model\": {\n  \"n_embd\": 64,\n  \"n_heads\": 4,\n  \"n_layers\": 2}}",
    );
    sandbox
        .cinch("plan --config gpt2.json --model mamba")
        .fails(2, &["gpt2.json", "gpt2", "mamba", "hint:"]);
    let pretrain = |gsa: &str, training: &str| {
        let text = format!(
            "model:\n  d_model: 512\n  n_heads: 8\ngsa:\n  {gsa}\ntraining:\n  {training}\n"
        );
        sandbox.write("pretrain.yaml", text);
    };
    pretrain("k_min: 300\n  k_max: 200", "max_steps: 10");
    sandbox.cinch("plan --config pretrain.yaml").fails(
        2,
        &["`model.k_min`", "300", "`model.k_max`", "200", "hint:"],
    );
    pretrain("k_max: 200", "max_steps: 10");
    sandbox
        .cinch("plan --config pretrain.yaml --set model.n_heads=7")
        .fails(2, &["`model.n_heads`", "512", "hint:"]);
    let medium = "micro_batch_size: 3\n  gradient_accumulation_steps: 21\n  global_batch_size: 256";
    pretrain("k_max: 200", medium);
    sandbox.cinch("plan --config pretrain.yaml").fails(
        2,
        &[
            "global_batch_size",
            "contradicts other settings",
            "hint: on 4 GPUs it is micro batch 2 with accumulation 32",
            "micro batch 4 with accumulation 16",
        ],
    );
    pretrain("k_max: 200", "max_steps: 10");
    sandbox
        .cinch("train --config pretrain.yaml")
        .fails(2, &["sparse attention", "--data-dir"]);
    sandbox
        .cinch("plan --model gpt2 --set model.d_state=16")
        .fails(2, &["`model.d_state`", "mamba", "gpt2", "hint:"]);
}

#[test]
fn an_output_folder_that_cannot_be_made() {
    let sandbox = Sandbox::new();
    sandbox.write("file", "");
    sandbox
        .cinch("train --device cpu --output-dir file/run")
        .fails(2, &["file/run cannot be made", "hint: --output-dir"]);
}

#[test]
fn a_tokenizer_with_more_tokens_than_the_model() {
    let sandbox = Sandbox::new();
    sandbox
        .cinch("train --model-size tiny --tokenizer gpt2")
        .fails(2, &["`model.vocab_size` = 257", "gpt2", "hint:", "50257"]);
    // One in a file is counted when it is read.
    let vocabulary: Vec<String> = (0..400).map(|id| format!("\"word{id}\": {id}")).collect();
    sandbox.write(
        "tokenizer.json",
        format!(
            "{{\"version\": \"1.0\", \"truncation\": null, \"padding\": null, \
             \"added_tokens\": [], \"normalizer\": null, \
             \"pre_tokenizer\": {{\"type\": \"Whitespace\"}}, \"post_processor\": null, \
             \"decoder\": null, \"model\": {{\"type\": \"WordLevel\", \"unk_token\": \"word0\", \
             \"vocab\": {{{}}}}}}}",
            vocabulary.join(", ")
        ),
    );
    sandbox
        .cinch("train --model-size tiny --tokenizer tokenizer.json")
        .fails(
            2,
            &[
                "`tokenizer.json` has 400 tokens",
                "vocabulary of 257",
                "hint: set model.vocab_size to 400",
            ],
        );
    sandbox
        .cinch("train --model-size tiny --tokenizer absent.json")
        .fails(2, &["absent.json", "hint:"]);
}

#[test]
fn sampling_that_cannot_be() {
    let sandbox = Sandbox::new();
    for (line, parts) in [
        ("--temperature -1", &["--temperature -1", "hint:"][..]),
        ("--temperature nan", &["--temperature NaN", "hint:"]),
        ("--top-p 0", &["--top-p 0", "hint:"]),
        (
            "--repetition-penalty 0",
            &["--repetition-penalty 0", "hint:"],
        ),
    ] {
        sandbox
            .cinch(&format!("generate run {line}"))
            .fails(2, parts);
    }
    sandbox
        .cinch("generate absent")
        .fails(2, &["absent", "does not exist", "hint:"]);
}

/// The flags of the first change that an answer offers, and what it says they take.
#[track_caller]
fn first_change(stderr: &str) -> String {
    let mut lines = stderr.lines();
    lines
        .find(|line| line.starts_with("what would fit"))
        .unwrap_or_else(|| panic!("no changes in\n{stderr}"));
    let line = lines.next().expect("a change");
    let flags: Vec<&str> = line
        .split_whitespace()
        .take_while(|word| !word.ends_with(|c: char| c.is_ascii_digit()) || !word.contains('.'))
        .collect();
    flags.join(" ")
}

#[test]
fn a_budget_that_is_too_small() {
    let sandbox = Sandbox::new();
    for line in [
        "--model-size small --vram 680mb --device cpu",
        "--model-size small --vram 1050mb --precision bf16 --seq-len 1024",
        "--model-size large --vram 2gb --device cpu",
        "--model gpt2 --vram 1990mb --device cpu",
        "--model-size small --vram 760mb --checkpointing none --seq-len 1024 --device cpu",
    ] {
        let answer = sandbox.cinch(&format!("plan {line}")).fails(
            3,
            &[
                "does not fit: needs ",
                " bytes), the budget is ",
                "largest parts: ",
                "largest tensors at the peak:",
            ],
        );
        let json = sandbox
            .cinch(&format!("plan {line} --json"))
            .exits(3)
            .json();
        assert_eq!(json["fits"], false);
        assert!(json["needed_bytes"].as_u64() > json["budget_bytes"].as_u64());
        let changes = json["changes"].as_array().expect("a list");
        assert!(!changes.is_empty(), "nothing is offered for {line}");
        let first = first_change(&answer.stderr);
        assert_eq!(changes[0]["change"].as_str(), Some(first.as_str()));
        // Every change that is offered does what it promises.
        for change in changes {
            let change = change["change"].as_str().expect("flags");
            let names: Vec<&str> = change
                .split_whitespace()
                .filter(|word| word.starts_with("--"))
                .collect();
            let kept = without(line, &names);
            let plan = sandbox.cinch(&format!("plan {kept} {change} --json"));
            assert_eq!(plan.succeeds().json()["fits"], true, "{line}: {change}");
        }
    }
    sandbox
        .cinch("train --model-size small --vram 100mb")
        .fails(3, &["does not fit", "100.0 MiB", "hint:"]);
    assert!(!sandbox.join("runs").exists(), "nothing is left behind");
}

/// A command line without these flags and their values.
fn without(line: &str, names: &[&str]) -> String {
    let mut words = line.split_whitespace();
    let mut kept = Vec::new();
    while let Some(word) = words.next() {
        if names.contains(&word) {
            words.next();
        } else {
            kept.push(word);
        }
    }
    kept.join(" ")
}

/// More threads than the cores have use for, of each command that takes a number.
#[test]
fn threads_without_sense() {
    let sandbox = Sandbox::new();
    let cores = std::thread::available_parallelism().expect("cores").get();
    let beyond = 8 * cores + 1;
    for command in ["train", "generate run", "bench", "profile"] {
        for wrong in ["20000", "0", "18446744073709551616", &beyond.to_string()] {
            sandbox
                .cinch(&format!("{command} --threads {wrong}"))
                .fails(
                    2,
                    &[
                        wrong,
                        "--threads",
                        &format!("from 1 to {}", 8 * cores),
                        "hint: leave --threads out",
                    ],
                );
        }
    }
    let most = format!("--max-steps 1 --threads {}", 8 * cores);
    let mut line = vec!["train", "--model-size", "tiny", "--batch-size", "1"];
    line.extend(["--grad-accum", "1", "--seq-len", "32", "--eval-steps", "0"]);
    line.extend(most.split_whitespace());
    sandbox.run(line).succeeds();
}

/// Settings that are each within bounds and together beyond what 64 bits count.
#[test]
fn sizes_that_cannot_be_counted() {
    let sandbox = Sandbox::new();
    let wide = "plan --set model.d_model=65536 --set model.max_seq_len=16777216 \
                --batch-size 1000000 --seq-len 16777216";
    for line in [wide.to_owned(), format!("{wide} --json")] {
        let parts = ["more than 2^64 operations", "hint: a smaller batch"];
        sandbox.cinch(&line).fails(2, &parts);
    }
    // A smaller micro batch of the same effective batch can be counted, and fits.
    let cut = "plan --model-size small --set model.max_seq_len=16777216 --seq-len 1048576 \
               --batch-size 1048576 --grad-accum 1 --vram 2000gb --json";
    assert_eq!(sandbox.cinch(cut).succeeds().json()["fits"], true);
    // Operations of a step may be more than 64 bits hold: nothing wraps.
    let many = "plan --model-size small --batch-size 1048576 --grad-accum 4096 --json";
    let plan = sandbox.cinch(many).succeeds().json();
    assert!(plan["step_flops"].as_f64().expect("a number") > 1e21);
}
