//! What a user names first, a file, a folder or a model, is what is planned: read as its program
//! means it, never taken for another, and refused by name where it cannot be computed.

mod common;

use std::fs;

use common::Sandbox;
use serde_json::{Value, json};

const AXOLOTL: &str = "base_model: NousResearch/Llama-3.2-1B\n\
    adapter: lora\nlora_r: 16\nlora_alpha: 32\nlora_target_linear: true\n\
    sequence_len: 512\nmicro_batch_size: 2   # rows\ngradient_accumulation_steps: 4\n\
    bf16: auto\noptimizer: adamw_torch_fused\ngradient_checkpointing: true\n\
    sample_packing: true\nwandb_project: mine\n";

fn keys(answer: &Value) -> Vec<&str> {
    let read = answer["read_as"][0]["read"].as_array().expect("a list");
    read.iter().filter_map(|one| one["key"].as_str()).collect()
}

#[test]
fn a_file_of_another_trainer_is_planned_as_its_own_run() {
    let sandbox = Sandbox::new();
    sandbox.write("run.yaml", AXOLOTL);
    let answer = sandbox.cinch("plan run.yaml --json").succeeds().json();
    assert_eq!(answer["engine"], "pytorch");
    assert_eq!(answer["model"], "NousResearch/Llama-3.2-1B");
    assert_eq!(answer["family"], "llama");
    assert_eq!(answer["read_as"][0]["dialect"], "axolotl");
    let settings = &answer["settings"];
    for (key, value) in [
        ("batch_size", json!(2)),
        ("accumulation", json!(4)),
        ("seq_len", json!(512)),
        ("lora_rank", json!(16)),
        ("checkpointing", json!("full")),
        ("optimizer", json!("adamw_fused")),
    ] {
        assert_eq!(settings[key], value, "{key}");
    }
    assert!(keys(&answer).contains(&"micro_batch_size"));
    // The table comes before any figure, with lines.
    let text = sandbox.cinch("plan run.yaml").succeeds().stdout;
    let table = text.find("micro_batch_size").expect("what was read");
    assert!(table < text.find("reserved at the peak").expect("a figure"));
    assert!(text.contains("--engine pytorch"));
}

#[test]
fn what_was_not_understood_comes_first_and_lowers_the_certainty() {
    let sandbox = Sandbox::new();
    sandbox.write("run.yaml", format!("{AXOLOTL}my_offload_trick: deep\n"));
    let ran = sandbox.cinch("plan run.yaml").succeeds();
    let told = ran
        .stdout
        .find("my_offload_trick")
        .expect("the key is told");
    assert!(told < ran.stdout.find("micro_batch_size").expect("what was read"));
    assert!(ran.stdout.contains("uncertain"));
    sandbox.write(
        "run.yaml",
        format!("{AXOLOTL}chunked_cross_entropy: true\n"),
    );
    sandbox
        .cinch("plan run.yaml")
        .succeeds()
        .prints(&["an upper bound", "chunked_cross_entropy"]);
}

#[test]
fn what_cannot_be_computed_is_refused_by_name() {
    let sandbox = Sandbox::new();
    for (line, parts) in [
        ("rl: dpo", &["rl", "dpo", "line 14", "preferences"][..]),
        (
            "context_parallel_size: 2",
            &["context_parallel_size", "GPUs"],
        ),
        ("optimizer: muon", &["optimizer", "muon"]),
        ("torch_compile: true", &["torch_compile"]),
        (
            "processor_type: AutoProcessor",
            &["processor_type", "images"],
        ),
    ] {
        let text = match line.split_once(':') {
            Some(("optimizer", _)) => AXOLOTL.replace("optimizer: adamw_torch_fused", line),
            _ => format!("{AXOLOTL}{line}\n"),
        };
        sandbox.write("run.yaml", text);
        for command in [
            "plan run.yaml",
            "fit run.yaml --gpu-memory 24 --apply --yes",
        ] {
            sandbox.cinch(command).fails(2, parts);
        }
    }
}

#[test]
fn no_model_is_made_up() {
    let sandbox = Sandbox::new();
    sandbox.write(
        "ds.json",
        r#"{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
            "train_batch_size": 16, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}"#,
    );
    sandbox
        .cinch("plan ds.json")
        .fails(2, &["ds.json names no model", "--model"]);
    let answer = sandbox
        .cinch("plan ds.json --model Qwen/Qwen2.5-0.5B --seq-len 256 --json")
        .succeeds()
        .json();
    assert_eq!(answer["settings"]["batch_size"], 4);
    assert_eq!(answer["sharding"]["ranks"], 2);
    assert_eq!(answer["sharding"]["scheme"], "ZeRO-2");
    sandbox.write("what.yaml", "colour: red\nshape: round\n");
    sandbox
        .cinch("plan what.yaml")
        .fails(2, &["what.yaml", "no program", "axolotl"]);
    sandbox
        .cinch("plan missing.yaml")
        .fails(2, &["missing.yaml does not exist"]);
    sandbox.write(
        "run.yaml",
        AXOLOTL.replace("micro_batch_size: 2", "micro_batch_size: -2"),
    );
    sandbox
        .cinch("plan run.yaml")
        .fails(2, &["run.yaml line 7", "micro_batch_size", "-2"]);
    sandbox
        .cinch("plan someone/unheard-of")
        .fails(2, &["someone/unheard-of", "config.json", "cinch trace"]);
    sandbox
        .cinch("plan google/gemma-2-2b")
        .succeeds()
        .prints(&["cinch's own engine does not train Gemma 2"]);
}

#[test]
fn a_model_is_found_by_id_name_folder_and_cache() {
    let sandbox = Sandbox::new();
    let short = "--batch-size 1 --grad-accum 1 --seq-len 64 --json";
    let plan = |subject: &str| {
        sandbox
            .cinch(&format!("plan {subject} {short}"))
            .succeeds()
            .json()
    };
    let by_id = plan("Qwen/Qwen2.5-0.5B-Instruct");
    assert_eq!(by_id["parameters"], 494_032_768);
    assert_eq!(by_id["settings"]["precision"], "bf16", "as it is saved");
    let reupload = plan("unsloth/Qwen2.5-0.5B-Instruct");
    assert_eq!(reupload["memory"], by_id["memory"]);
    // A short name is a shape, without a type.
    assert_eq!(plan("qwen2.5-0.5b")["settings"]["precision"], "fp32");
    let config = json!({"model_type": "qwen2", "vocab_size": 1000, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "torch_dtype": "float16"});
    sandbox.write("mine/config.json", config.to_string());
    let mine = plan("mine");
    assert_eq!(mine["settings"]["precision"], "fp16");
    assert_eq!(plan("mine/config.json")["memory"], mine["memory"]);
    let snapshot = sandbox.hub().join("models--me--mine/snapshots/abc");
    fs::create_dir_all(&snapshot).unwrap();
    fs::write(snapshot.join("config.json"), config.to_string()).unwrap();
    assert_eq!(plan("me/mine")["memory"], mine["memory"]);
}

#[test]
fn what_a_config_json_says_besides_the_shape_is_obeyed_or_refused() {
    let sandbox = Sandbox::new();
    let plan = |fields: Value| {
        sandbox.write("config.json", fields.to_string());
        sandbox.cinch("plan config.json --batch-size 1 --grad-accum 1 --seq-len 64")
    };
    let bert = |more: Value| {
        let mut fields = json!({"model_type": "bert", "num_hidden_layers": 2});
        let object = fields.as_object_mut().unwrap();
        object.extend(more.as_object().unwrap().clone());
        fields
    };
    plan(bert(json!({"architectures": ["BertForMaskedLM"]})))
        .succeeds()
        .prints(&["assumed: ", "fp32"]);
    plan(bert(
        json!({"architectures": ["BertForSequenceClassification"]}),
    ))
    .fails(
        2,
        &[
            "config.json",
            "architectures",
            "BertForSequenceClassification",
            "BertForMaskedLM",
        ],
    );
    plan(bert(json!({"torch_dtype": "float64"}))).fails(2, &["torch_dtype", "float64"]);
    plan(bert(
        json!({"quantization_config": {"quant_method": "gptq", "bits": 4}}),
    ))
    .fails(2, &["gptq"]);
}

#[test]
fn there_is_one_safety_margin() {
    let sandbox = Sandbox::new();
    let base =
        "plan Qwen/Qwen2.5-0.5B --engine pytorch --batch-size 4 --grad-accum 1 --seq-len 512";
    let answer = sandbox.cinch(&format!("{base} --json")).succeeds().json();
    let memory = &answer["memory"];
    let bytes = |key: &str| memory[key].as_u64().expect("bytes");
    let exact = bytes("reserved_bytes") + bytes("outside_allocator_bytes");
    // A card that has the safe figure is enough: nothing more is taken off.
    let of_size =
        |bytes: u64, more: &str| sandbox.cinch(&format!("{base} --gpu-memory {bytes}b {more}"));
    of_size(bytes("safe_bytes") + (1 << 20), "").succeeds();
    of_size(bytes("safe_bytes") - (1 << 20), "").fails(3, &["to be safe"]);
    // The user's margin takes the place of the figure's.
    let card = exact + exact / 50;
    of_size(card, "--safety-margin 0.01").succeeds();
    of_size(card, "--safety-margin 0.1").fails(3, &["fits with --safety-margin 0.01"]);
}

#[test]
fn the_default_effective_batch_does_not_depend_on_the_card() {
    let sandbox = Sandbox::new();
    for card in [
        "--vram 8gb",
        "--gpu-memory 24",
        "--vram 80gb",
        "--gpu-memory 141",
    ] {
        let answer = sandbox
            .cinch(&format!("plan --model-size small {card} --json"))
            .succeeds()
            .json();
        assert_eq!(answer["settings"]["effective_batch"], 16, "{card}");
    }
}

#[test]
fn settings_are_written_where_they_were_read_and_nowhere_else() {
    let sandbox = Sandbox::new();
    let path = sandbox.write("run.yaml", AXOLOTL);
    sandbox
        .cinch("fit run.yaml --gpu-memory 80 --apply --yes")
        .succeeds();
    let written = fs::read_to_string(&path).unwrap();
    let changed: Vec<(&str, &str)> = AXOLOTL
        .lines()
        .zip(written.lines())
        .filter(|(before, after)| before != after)
        .collect();
    assert_eq!(
        written.lines().count(),
        AXOLOTL.lines().count(),
        "{written}"
    );
    for (before, _) in &changed {
        let key = before.split(':').next().unwrap_or_default();
        assert!(
            [
                "micro_batch_size",
                "gradient_accumulation_steps",
                "gradient_checkpointing"
            ]
            .contains(&key),
            "{before}"
        );
    }
    assert!(written.contains("# rows"));
    sandbox.cinch("fit run.yaml --undo").succeeds();
    assert_eq!(fs::read_to_string(&path).unwrap(), AXOLOTL);
    // A stranger's constants get no key that their program may not read.
    let own = "MODEL_NAME = 'Qwen/Qwen2.5-0.5B'\nBATCH_SIZE = 32\nMAX_SEQ_LENGTH = 512\n";
    let path = sandbox.write("config.py", own);
    sandbox
        .cinch("fit config.py --gpu-memory 8 --apply --yes")
        .fails(2, &["nothing was written", "effective batch", "--add-keys"]);
    assert_eq!(fs::read_to_string(&path).unwrap(), own);
    sandbox
        .cinch("fit config.py --gpu-memory 8 --apply --yes --add-keys")
        .succeeds();
    let written = fs::read_to_string(&path).unwrap();
    assert!(
        written.contains("GRADIENT_ACCUMULATION_STEPS = "),
        "{written}"
    );
}

#[test]
fn cinch_trains_what_it_trains_and_says_so_of_the_rest() {
    let sandbox = Sandbox::new();
    sandbox.write("run.yaml", AXOLOTL);
    sandbox
        .cinch("train run.yaml")
        .fails(2, &["axolotl", "--data-dir"]);
    sandbox.write("data.jsonl", "{\"prompt\": \"a\", \"completion\": \"b\"}\n");
    sandbox
        .cinch("train run.yaml --data-dir data.jsonl")
        .fails(2, &["weights of NousResearch/Llama-3.2-1B", "--weights"]);
    sandbox
        .cinch("train --model bert-base-uncased")
        .fails(2, &["does not train BERT", "cinch models"]);
    sandbox
        .cinch("plan --model bert-base-uncased --batch-size 1 --seq-len 64")
        .succeeds()
        .prints(&["--engine pytorch", "does not train BERT yet"]);
    sandbox.cinch("models").succeeds().prints(&[
        "trained by cinch",
        "Qwen/Qwen2.5-7B",
        "predicted",
        "cinch trace",
    ]);
}

#[test]
fn a_run_of_another_trainers_file_ends_where_the_file_says() {
    let sandbox = Sandbox::new();
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let config = format!("{root}/examples/finetune/base/config.json");
    sandbox.write("model/config.json", fs::read(config).unwrap());
    let line = "{\"prompt\": \"1 + 1 =\", \"completion\": \" 2\", \"source\": \"mine\"}\n";
    sandbox.write("sums.jsonl", line.repeat(8));
    sandbox.write(
        "run.yaml",
        "base_model: model\nsequence_len: 64\nmicro_batch_size: 4\ngradient_accumulation_steps: 1\n\
         num_epochs: 2\nlearning_rate: 1e-3\nneftune_noise_alpha: 5\nlogging_steps: 1\noutput_dir: out\n",
    );
    let train = "train run.yaml --tokenizer bytes --data-dir sums.jsonl --device cpu";
    sandbox
        .cinch(train)
        .succeeds()
        .says(&["training steps 1 to 4", "not read: `source`"])
        .prints(&[
            "note: run.yaml: training here does not follow neftune_noise_alpha = 5 (line 7)",
        ]);
    // A plan does not ask what is learned.
    let plan = sandbox.cinch("plan run.yaml --gpu A100").stdout;
    assert!(!plan.contains("does not follow"), "{plan}");
}

/// PyTorch's compiler keeps a prediction from being made, and cinch's own run from nothing.
#[test]
fn a_compiler_is_pytorchs_own_matter() {
    let sandbox = Sandbox::new();
    sandbox.write("run.yaml", format!("{AXOLOTL}torch_compile: true\n"));
    sandbox
        .cinch("plan run.yaml")
        .fails(2, &["torch_compile", "line 14", "not predicted"]);
    sandbox
        .cinch("plan run.yaml --engine cinch --model qwen2.5-0.5b")
        .succeeds();
    // Nor are savings told of a run without it; the log is diagnosed all the same.
    let message = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 \
                   has a total capacity of 23.50 GiB of which 10.00 MiB is free.\n";
    sandbox.write("train.log", message);
    let told = ["savings are not computed", "torch_compile", "line 14"];
    let ran = sandbox.cinch("diagnose train.log --config run.yaml");
    assert_eq!(ran.code, Some(4));
    ran.says(&told).prints(&["ran out of GPU memory"]);
    sandbox.write("run.yaml", format!("{AXOLOTL}torch_compile: false\n"));
    sandbox.cinch("plan run.yaml").succeeds();
}

/// cinch's own engine follows eight-bit states, and says before any figure what it does otherwise.
#[test]
fn cinchs_own_engine_says_what_it_does_otherwise_before_any_figure() {
    let sandbox = Sandbox::new();
    let with = |optimizer: &str| AXOLOTL.replace("adamw_torch_fused", optimizer);
    sandbox.write("run.yaml", with("adamw_bnb_8bit"));
    let own = "plan run.yaml --engine cinch";
    let eight = sandbox.cinch(own).succeeds();
    assert!(eight.stdout.contains(", 8bit optimizer states, on cuda"));
    assert!(!eight.stdout.contains("not followed"), "{}", eight.stdout);
    sandbox
        .cinch(&format!("{own} --explain"))
        .succeeds()
        .prints(&["vram.optimizer_states", "line 10 "]);
    let typed = sandbox.cinch(&format!("{own} --optimizer-states fp32"));
    assert!(!typed.succeeds().stdout.contains("8bit"));

    sandbox.write("run.yaml", with("sgd") + "my_offload_trick: deep\n");
    let sgd = "note: run.yaml: optimizer = \"sgd\" (line 10) is not followed: it is AdamW here, \
               with fp32 states";
    let unread = "note: run.yaml: my_offload_trick = \"deep\" (line 14) is not understood";
    for command in [
        own,
        "fit run.yaml --engine cinch --gpu-memory 24",
        "plan run.yaml --engine cinch --scaling 2 --gpu H200",
    ] {
        let text = sandbox.cinch(command).succeeds().stdout;
        let figure = text.find("GiB").expect("a figure");
        for note in [sgd, unread] {
            assert!(text.find(note).expect(note) < figure, "{text}");
        }
    }
    for command in [own, "fit run.yaml --engine cinch --gpu-memory 24"] {
        let answer = sandbox.cinch(&format!("{command} --json")).succeeds();
        let notes = answer.json()["notes"].clone();
        assert!(notes[1].as_str().unwrap().contains("optimizer"), "{notes}");
    }
    // Also where it does not fit.
    let small = "plan run.yaml --engine cinch --gpu-memory 2";
    let ran = sandbox.cinch(small).fails(3, &["1.80 GiB"]);
    assert!(ran.stdout.contains(sgd), "{}", ran.stdout);

    // What the search does after all is not told.
    sandbox.write(
        "run.yaml",
        "base_model: NousResearch/Llama-3.2-1B\nmicro_batch_size: 1\nsequence_len: 512\n\
         bf16: auto\noptimizer: paged_adamw_8bit\n",
    );
    for (budget, stays) in [("24", true), ("10", false)] {
        let command = format!("fit run.yaml --engine cinch --gpu-memory {budget}");
        let text = sandbox.cinch(&command).succeeds().stdout;
        let states = "paged_adamw_8bit\" (line 5) is not followed: optimizer states stay";
        assert_eq!(text.contains(states), stays, "{text}");
        assert_eq!(text.contains("states in host memory"), !stays, "{text}");
        assert!(text.contains("--master-weights false"), "{text}");
    }
}

#[test]
fn a_run_of_another_trainers_file_keeps_its_states_as_the_file_says() {
    let sandbox = Sandbox::new();
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let config = format!("{root}/examples/finetune/base/config.json");
    sandbox.write("model/config.json", fs::read(config).unwrap());
    let line = "{\"prompt\": \"1 + 1 =\", \"completion\": \" 2\"}\n";
    sandbox.write("sums.jsonl", line.repeat(8));
    let file = |optimizer: &str| {
        format!(
            "base_model: model\nsequence_len: 64\nmicro_batch_size: 4\nnum_epochs: 2\n\
             learning_rate: 1e-3\noptimizer: {optimizer}\noutput_dir: out\n"
        )
    };
    sandbox.write("run.yaml", file("paged_adamw_8bit"));
    let told = "note: run.yaml: optimizer = \"paged_adamw_8bit\" (line 6) is not followed";
    let flags = "run.yaml --tokenizer bytes --data-dir sums.jsonl --device cpu";
    let checked = sandbox.cinch(&format!("check {flags} --json")).succeeds();
    let answer = checked.json();
    assert_eq!(answer["plan"]["settings"]["optimizer_states"], "8bit");
    let first = format!("note: {}", answer["notes"][0].as_str().unwrap());
    assert!(first.starts_with(told), "{first}");
    let text = sandbox.cinch(&format!("train {flags}")).succeeds().stdout;
    let states = text.find("8bit optimizer states").expect("the plan");
    assert!(text.find(told).expect(told) < states, "{text}");
    // It goes on as it began, without the file.
    let text = sandbox
        .cinch("train --resume out --epochs 3 --device cpu")
        .succeeds()
        .stdout;
    assert!(text.contains("8bit optimizer states"), "{text}");
}
