//! Fine-tuning from files to files: a model in Hugging Face's format, adapters trained on it, whole
//! or quantised, resumed, exported and merged; and what is said where the files are wrong.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{Ran, Sandbox};
use serde_json::Value;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

fn run(sandbox: &Sandbox, line: &str) -> Ran {
    sandbox.run(words(line))
}

fn fixture(name: &str) -> PathBuf {
    Path::new(ROOT)
        .join("crates/train/tests/fixtures/decoder")
        .join(name)
}

/// A small model with the bytes' vocabulary, trained for a few steps, as a folder of files.
fn base(sandbox: &Sandbox) {
    let config = Path::new(ROOT).join("examples/finetune/base/config.json");
    let config = fs::read_to_string(config).unwrap();
    let config = config
        .replace("\"hidden_size\": 128", "\"hidden_size\": 64")
        .replace("\"intermediate_size\": 320", "\"intermediate_size\": 128")
        .replace("\"num_hidden_layers\": 3", "\"num_hidden_layers\": 2");
    sandbox.write("base/config.json", config);
    let differences = Path::new(ROOT).join("examples/finetune/differences.txt");
    sandbox.write("differences.txt", fs::read(differences).unwrap());
    let line = "train --model base --tokenizer bytes --data-dir differences.txt --batch-size 8 \
                --grad-accum 1 --seq-len 64 --max-steps 200 --warmup-steps 10 --lr 3e-3 \
                --eval-steps 0 --output-dir first";
    assert_eq!(run(sandbox, line).code, Some(0));
    let exported = run(sandbox, "export first --to model");
    assert_eq!(exported.code, Some(0), "{}", exported.stderr);
}

const TUNE: &str = "train --model model --tokenizer bytes --data-dir sums.jsonl --lora-rank 16 \
                    --batch-size 4 --grad-accum 1 --seq-len 48 --packing --warmup-steps 5 --lr 3e-3 \
                    --val-split 0 --log-steps 1 --save-steps 50 --save-total-limit 0 --threads 1";

fn sums(sandbox: &Sandbox) {
    let sums = Path::new(ROOT).join("examples/finetune/sums.jsonl");
    sandbox.write("sums.jsonl", fs::read(sums).unwrap());
}

fn losses(sandbox: &Sandbox, run: &str) -> Vec<f64> {
    let text = fs::read_to_string(sandbox.join(run).join("metrics.jsonl")).unwrap();
    text.lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok()?["loss"].as_f64())
        .collect()
}

#[test]
fn adapters_learn_on_whole_and_on_quantised_weights_and_resume_bit_for_bit() {
    let sandbox = Sandbox::new();
    base(&sandbox);
    sums(&sandbox);
    for (name, how) in [
        ("whole", ""),
        ("four", "--quantization 4bit"),
        ("eight", "--quantization 8bit"),
    ] {
        let line = format!("{TUNE} {how} --max-steps 100 --output-dir {name}");
        let ran = run(&sandbox, &line);
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        let losses = losses(&sandbox, name);
        let (first, last) = (losses[0], losses[losses.len() - 1]);
        assert!(last < 0.6 * first, "{name}: {first} to {last}");

        let half = format!("{name}-half");
        let line = format!("{TUNE} {how} --max-steps 100 --output-dir {half}");
        assert_eq!(run(&sandbox, &line).code, Some(0));
        fs::remove_dir_all(sandbox.join(&half).join("checkpoints/step-00000100")).unwrap();
        let resumed = run(&sandbox, &format!("train --resume {half} --threads 1"));
        assert_eq!(resumed.code, Some(0), "{}", resumed.stderr);
        let adapter = |run: &str| {
            let path = sandbox.join(run).join("adapter/adapter_model.safetensors");
            fs::read(path).unwrap()
        };
        assert!(adapter(name) == adapter(&half), "{name}");
    }
    // Epochs are counted in rows, and a warm-up that is longer than the run is cut.
    let line = TUNE.replace("--warmup-steps 5 ", "");
    let ran = run(&sandbox, &format!("{line} --epochs 2 --output-dir epochs"));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stderr.contains("its warm-up takes"), "{}", ran.stderr);
    let merged = run(&sandbox, "merge whole --to merged");
    assert_eq!(merged.code, Some(0), "{}", merged.stderr);
    for file in ["config.json", "model.safetensors"] {
        assert!(sandbox.join("merged").join(file).is_file(), "{file}");
    }
    // What was learned is told by the run and by the merged model alike.
    let asked = [
        "--prompt",
        "7 + 8 =",
        "--temperature",
        "0",
        "--max-tokens",
        "4",
    ];
    let answers = [
        vec!["generate", "whole"],
        vec!["generate", "merged", "--tokenizer", "bytes"],
        vec!["generate", "four"],
    ]
    .map(|words| sandbox.run(words.into_iter().chain(asked)));
    for answer in &answers {
        assert_eq!(answer.code, Some(0), "{}", answer.stderr);
        assert!(answer.stdout.starts_with("7 + 8 ="), "{}", answer.stdout);
    }
    assert_eq!(answers[0].stdout, answers[1].stdout);
    let other = run(&sandbox, "generate merged --tokenizer gpt2");
    assert_eq!(other.code, Some(2), "{}", other.stderr);
    assert!(other.stderr.contains("--tokenizer"), "{}", other.stderr);
    let again = run(&sandbox, "merge whole --to merged");
    assert_eq!(again.code, Some(2), "{}", again.stderr);
}

#[test]
fn a_plan_of_a_model_that_is_not_here_is_quick_and_has_its_numbers() {
    let sandbox = Sandbox::new();
    let line = "plan --model qwen2.5-7b --lora-rank 128 --device cuda --precision bf16 \
                --batch-size 1 --grad-accum 1 --seq-len 1536 --json";
    let ran = run(&sandbox, line);
    let plan: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(plan["parameters"], 7_615_616_512_u64);
    assert_eq!(plan["trainable"], 322_961_408_u64);
    let arena = plan["memory"]["arena_bytes"].as_u64().unwrap();
    assert!(arena < 25 << 30, "{arena}");
}

/// Copies a fixture's folder.
fn copy(sandbox: &Sandbox, name: &str) -> PathBuf {
    let to = sandbox.join(name);
    fs::create_dir_all(&to).unwrap();
    for entry in fs::read_dir(fixture(name)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    to
}

/// Runs a fine-tuning of a folder that must fail, and returns what is said.
fn refusal(sandbox: &Sandbox, model: &str, more: &str) -> String {
    let line = format!(
        "train --model {model} --tokenizer bytes --data-dir sums.jsonl --lora-rank 4 --batch-size 1 \
         --grad-accum 1 --seq-len 16 --max-steps 1 {more}"
    );
    let ran = run(sandbox, &line);
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    ran.stderr
}

#[test]
fn wrong_files_and_settings_are_told_by_name() {
    let sandbox = Sandbox::new();
    base(&sandbox);
    sums(&sandbox);
    let says = |said: String, parts: &[&str]| {
        for part in parts {
            assert!(said.contains(part), "no `{part}` in: {said}");
        }
    };
    says(
        refusal(&sandbox, "model", "--lora-targets q_proj,qproj"),
        &["qproj", "q_proj, up_proj"],
    );
    says(
        refusal(
            &sandbox,
            "model",
            "--lora-modules-to-save embed_tokens,q_proj",
        ),
        &["q_proj", "linear layer"],
    );
    says(
        refusal(&sandbox, "model", "--lora-modules-to-save score"),
        &["score", "embed_tokens, input_layernorm, lm_head"],
    );
    says(
        refusal(&sandbox, "qwen2.5-0.5b", ""),
        &["weights", "--weights"],
    );
    says(refusal(&sandbox, "mamba", ""), &["adapters", "--lora-rank"]);

    // A shard cut off, one that is not there, and a tensor of another size.
    let model = sandbox.join("model/model.safetensors");
    let whole = fs::read(&model).unwrap();
    fs::write(&model, &whole[..whole.len() - 100]).unwrap();
    says(refusal(&sandbox, "model", ""), &["model.safetensors"]);
    fs::write(&model, &whole).unwrap();
    let config = sandbox.join("model/config.json");
    let text = fs::read_to_string(&config).unwrap();
    let other = text.replace("\"intermediate_size\": 128", "\"intermediate_size\": 160");
    fs::write(&config, other).unwrap();
    says(
        refusal(&sandbox, "model", ""),
        &["gate_proj", "[128, 64]", "[160, 64]"],
    );
    let fewer = text.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1");
    fs::write(&config, fewer).unwrap();
    let line = "train --model model --tokenizer bytes --data-dir sums.jsonl --lora-rank 4 \
                --seq-len 16 --max-steps 1 --val-split 0 --output-dir fewer";
    let ran = run(&sandbox, line).succeeds();
    says(
        ran.stderr,
        &["has no place for 12 tensors", "model.layers.1."],
    );
    let gelu = text.replace("\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu\"");
    fs::write(&config, gelu).unwrap();
    says(refusal(&sandbox, "model", ""), &["hidden_act is gelu"]);
    fs::write(&config, text).unwrap();
    let sharded = copy(&sandbox, "qwen3");
    fs::remove_file(sharded.join("model-00003-of-00005.safetensors")).unwrap();
    says(
        refusal(&sandbox, "qwen3", ""),
        &["model-00003-of-00005.safetensors"],
    );

    // A sample that is longer than a row.
    sandbox.write(
        "sums.jsonl",
        "{\"prompt\": \"1 + 1 =\", \"completion\": \" two, which is a very long way of saying it\"}\n",
    );
    says(
        refusal(&sandbox, "model", "--too-long error"),
        &["sums.jsonl", "line 1", "16"],
    );
    let line = "train --model model --tokenizer bytes --data-dir sums.jsonl --lora-rank 4 \
                --batch-size 1 --grad-accum 1 --seq-len 16 --max-steps 1 --val-split 0 --output-dir cut";
    let cut = run(&sandbox, line);
    assert_eq!(cut.code, Some(0), "{}", cut.stderr);
    says(cut.stderr, &["1 cut at the end"]);

    // A template that fails, and adapters of another base.
    sandbox.write(
        "model/tokenizer_config.json",
        "{\"chat_template\": \"{{ raise_exception('only poems') }}\", \"eos_token\": \"<|endoftext|>\"}",
    );
    sandbox.write(
        "sums.jsonl",
        "{\"messages\": [{\"role\": \"user\", \"content\": \"1\"}, \
         {\"role\": \"assistant\", \"content\": \"2\"}]}\n",
    );
    says(
        refusal(&sandbox, "model", ""),
        &["only poems", "sums.jsonl"],
    );
    let adapter = fixture("qwen2_lora").display().to_string();
    let narrow = fixture("llama2").display().to_string();
    let line = format!("merge {adapter} --base {narrow} --to other");
    let ran = run(&sandbox, &line);
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    says(ran.stderr, &["adapter", "layers"]);
    assert!(!sandbox.join("other").exists());

    // Embedding and head stay on the card: more than the budget wherever the blocks lie.
    let line = "plan --model qwen2.5-7b --lora-rank 8 --device cuda --precision bf16 --seq-len 512 \
                --vram 2";
    let ran = run(&sandbox, line);
    assert_eq!(ran.code, Some(3), "{}", ran.stderr);
    says(ran.stderr, &["does not fit", "weights"]);
}

/// What a run of adapters began with is what it goes on with: their scale, the weights below them
/// and what is read of the data.
#[test]
fn a_run_of_adapters_goes_on_with_what_it_began() {
    let sandbox = Sandbox::new();
    base(&sandbox);
    sums(&sandbox);
    let ran = run(&sandbox, &format!("{TUNE} --max-steps 6 --output-dir run"));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let resume = |more: &str| {
        run(
            &sandbox,
            &format!("train --resume run --max-steps 8 {more}"),
        )
    };
    for (more, key) in [
        ("--lora-rank 8", "lora.rank"),
        ("--lora-alpha 7", "lora.alpha"),
        ("--lora-modules-to-save lm_head", "lora.modules_to_save"),
        ("--set lora.rank_stabilised=true", "lora.rank_stabilised"),
        ("--quantization 4bit", "lora.quantization"),
        ("--too-long drop", "data.too_long"),
        ("--train-on-inputs", "data.train_on_inputs"),
        ("--max-samples 3", "data.max_samples"),
    ] {
        let flag = more.split_whitespace().next().unwrap();
        resume(more).fails(2, &[key, flag, "--output-dir"]);
    }
    let model = sandbox.join("model/model.safetensors");
    let whole = fs::read(&model).unwrap();
    let mut other = whole.clone();
    *other.last_mut().unwrap() ^= 1;
    fs::write(&model, other).unwrap();
    resume("").fails(2, &["model", "other weights", "--weights"]);
    fs::write(&model, whole).unwrap();
    resume("--lora-dropout 0.1 --lr 1e-3").succeeds();
}

#[test]
fn training_goes_on_from_adapters_of_a_folder() {
    let sandbox = Sandbox::new();
    base(&sandbox);
    sums(&sandbox);
    let ran = run(&sandbox, &format!("{TUNE} --max-steps 60 --output-dir run"));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let before = losses(&sandbox, "run");
    let line = format!("{TUNE} --max-steps 5 --lora-from run/adapter");
    run(&sandbox, &format!("{line} --output-dir on")).succeeds();
    let after = losses(&sandbox, "on");
    assert!(after[0] < 0.8 * before[0], "{before:?}, then {after:?}");
    run(&sandbox, &format!("{line} --lora-alpha 3 --output-dir no"))
        .fails(2, &["run/adapter", "is scaled by 2", "--lora-alpha"]);
    run(
        &sandbox,
        &format!("{line} --lora-targets q_proj --output-dir no"),
    )
    .fails(2, &["run/adapter", "--lora-targets"]);
    run(&sandbox, "generate run/adapter").fails(2, &["cinch merge run/adapter"]);
}

/// Embeddings and head beside adapters: learned, resumed bit for bit, merged into two tensors.
#[test]
fn modules_that_are_trained_whole_go_on_and_are_merged() {
    let sandbox = Sandbox::new();
    base(&sandbox);
    sums(&sandbox);
    let tune = format!("{TUNE} --max-steps 100 --lora-modules-to-save embed_tokens,lm_head");
    for name in ["run", "half"] {
        run(&sandbox, &format!("{tune} --output-dir {name}")).succeeds();
    }
    fs::remove_dir_all(sandbox.join("half/checkpoints/step-00000100")).unwrap();
    // The order of the names is no matter.
    let resumed = "train --resume half --threads 1 --lora-modules-to-save lm_head,embed_tokens";
    run(&sandbox, resumed).succeeds();
    let adapter = |name: &str| {
        let path = sandbox.join(name).join("adapter/adapter_model.safetensors");
        fs::read(path).unwrap()
    };
    assert!(adapter("run") == adapter("half"));
    run(&sandbox, "merge run --to merged").succeeds();
    let config = fs::read_to_string(sandbox.join("merged/config.json")).unwrap();
    assert!(
        config.contains(r#""tie_word_embeddings": false"#),
        "{config}"
    );
    let asked = "--temperature 0 --max-tokens 4 --prompt 7+8=";
    let own = run(&sandbox, &format!("generate run {asked}"));
    let merged = run(
        &sandbox,
        &format!("generate merged --tokenizer bytes {asked}"),
    );
    assert_eq!(own.code, Some(0), "{}", own.stderr);
    assert_eq!(own.stdout, merged.stdout);
    run(
        &sandbox,
        &format!("{TUNE} --max-steps 5 --lora-from run/adapter --output-dir no"),
    )
    .fails(
        2,
        &["run/adapter", "lm_head.weight", "--lora-modules-to-save"],
    );
}

/// Adapters belong to the weights below them, which need not be those of the model's folder.
#[test]
fn adapters_name_the_weights_they_were_trained_on() {
    let sandbox = Sandbox::new();
    base(&sandbox);
    sums(&sandbox);
    run(&sandbox, "export first --to other").succeeds();
    let line = format!("{TUNE} --max-steps 5");
    run(
        &sandbox,
        &format!("{line} --weights other --output-dir run"),
    )
    .succeeds();
    let config = fs::read_to_string(sandbox.join("run/adapter/adapter_config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config["base_model_name_or_path"], "other");
    run(&sandbox, "merge run --to merged").succeeds();
}

#[test]
fn adapters_are_found_and_asked_for_by_rank() {
    let sandbox = Sandbox::new();
    for command in ["train", "check", "profile", "bench", "plan"] {
        let help = run(&sandbox, &format!("{command} --help")).succeeds();
        let text = help.stdout;
        assert!(
            text.contains("--lora-rank") && text.contains("--quantization"),
            "{text}"
        );
    }
    run(&sandbox, "plan --model qwen2.5-0.5b --lora-alpha 8")
        .fails(2, &["lora.alpha", "--lora-rank"]);
}

/// Files as editors and other programs leave them.
#[test]
fn samples_are_known_by_their_columns() {
    let sandbox = Sandbox::new();
    base(&sandbox);
    let pair = "{\"prompt\": \"1 + 1 =\", \"completion\": \" 2\"}\n";
    let other = "{\"query\": \"1 + 1 =\", \"response\": \" 2\"}\n";
    for (name, text) in [
        ("mark.jsonl", format!("\u{FEFF}{pair}")),
        ("blank.jsonl", format!("\r\n\n{pair}")),
        ("lines.ndjson", pair.to_owned()),
        ("other.jsonl", other.to_owned()),
    ] {
        sandbox.write(name, text);
        let line = format!(
            "train --model model --tokenizer bytes --data-dir {name} --lora-rank 4 --batch-size 1 \
             --grad-accum 1 --seq-len 32 --max-steps 1 --val-split 0 --output-dir {name}-run"
        );
        run(&sandbox, &line).succeeds().says(&["1 sample"]);
    }
    // Shards whose index is missing are not a model without weights.
    let sharded = copy(&sandbox, "qwen3");
    fs::remove_file(sharded.join("model.safetensors.index.json")).unwrap();
    sandbox.write("folder/sums.jsonl", pair);
    let line = "train --model model --tokenizer bytes --data-dir folder --seq-len 32 --max-steps 1";
    run(&sandbox, line).fails(2, &["folder/sums.jsonl", "prompts with answers"]);
    let line =
        "train --model qwen3 --tokenizer bytes --data-dir mark.jsonl --seq-len 32 --max-steps 1";
    run(&sandbox, line).fails(2, &["qwen3", "model.safetensors.index.json too"]);
}

#[test]
fn tables_and_packed_files_are_refused_with_the_way_out() {
    let sandbox = Sandbox::new();
    for (name, way_out) in [
        ("pairs.csv", "ends in .txt"),
        ("pairs.parquet", "to_json"),
        ("pairs.jsonl.gz", "unpack it"),
    ] {
        sandbox.write(name, "prompt,completion\na,b\n");
        let line =
            format!("train --model-size tiny --device cpu --data-dir {name} --output-dir out");
        sandbox
            .cinch(&line)
            .fails(2, &[name, "is not supported", way_out]);
    }
}

#[test]
fn weights_without_their_tokenizer_are_not_read_with_another() {
    let sandbox = Sandbox::new();
    // As many tokens as the built-in tokenizer has would fit.
    let config = Path::new(ROOT).join("examples/finetune/base/config.json");
    let config: Value = serde_json::from_str(&fs::read_to_string(config).unwrap()).unwrap();
    let mut larger = config.clone();
    for (key, size) in [
        ("vocab_size", 50_300),
        ("hidden_size", 16),
        ("intermediate_size", 16),
        ("num_hidden_layers", 1),
        ("num_attention_heads", 2),
        ("num_key_value_heads", 2),
    ] {
        larger[key] = size.into();
    }
    sandbox.write("new/config.json", larger.to_string());
    let train = "--data-dir text.txt --batch-size 1 --grad-accum 1 --seq-len 16 --max-steps 1 \
                 --warmup-steps 0 --device cpu";
    sandbox.write("text.txt", "A text of a few words. ".repeat(20));
    // Weights from the seed know no tokens yet.
    sandbox
        .cinch(&format!("train --model new {train} --output-dir first"))
        .succeeds();
    sandbox.cinch("export first --to model").succeeds();
    let told = ["model has weights and no tokenizer.json", "--tokenizer"];
    for line in [
        &format!("train --model model {train} --output-dir second"),
        &format!("check --model model {train} --output-dir third"),
        "generate model --prompt a --max-tokens 1",
    ] {
        sandbox.cinch(line).fails(2, &told);
        sandbox
            .cinch(&format!("{line} --tokenizer gpt2"))
            .succeeds();
    }
}
