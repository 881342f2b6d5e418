//! `cinch plan`: the numbers, the names of the JSON fields, and what a budget does.

mod common;

use std::path::Path;

use common::Sandbox;
use serde_json::Value;

/// Parameters of each size of the published Mamba model.
const MAMBA_SIZES: [(&str, u64); 11] = [
    ("small", 40_306_176),
    ("medium-lite", 60_097_920),
    ("medium-plus", 72_690_112),
    ("medium-x", 81_462_688),
    ("medium", 87_118_080),
    ("medium-extra", 107_699_904),
    ("large-lite", 142_441_600),
    ("large-plus", 178_069_440),
    ("large", 219_646_976),
    ("xlarge", 411_918_080),
    ("xxlarge", 700_027_392),
];

fn plan(line: &str) -> Value {
    let ran = Sandbox::new().cinch(&format!("plan --json {line}"));
    ran.succeeds().json()
}

#[track_caller]
fn number(value: &Value, pointer: &str) -> u64 {
    let found = value.pointer(pointer).and_then(Value::as_u64);
    found.unwrap_or_else(|| panic!("{pointer} is no number in {value:#}"))
}

#[track_caller]
fn breakdown_adds_up(plan: &Value) {
    let parts = plan["memory"]["breakdown"].as_object().expect("an object");
    let sum: u64 = parts.values().filter_map(Value::as_u64).sum();
    let (arena, overhead) = ("/memory/arena_bytes", "/memory/overhead_bytes");
    assert_eq!(sum, number(plan, arena) + number(plan, overhead));
    assert!(number(plan, "/memory/peak_bytes") <= number(plan, arena));
    assert!(number(plan, "/memory/lower_bound_bytes") <= number(plan, "/memory/peak_bytes"));
}

#[test]
fn all_mamba_sizes_have_the_published_parameters() {
    for (size, parameters) in MAMBA_SIZES {
        let plan = plan(&format!("--model mamba --model-size {size}"));
        assert_eq!(plan["parameters"], parameters, "{size}");
        assert_eq!(plan["trainable"], parameters, "{size}");
        assert_eq!(plan["size"], size);
        // fp32 weights, their gradients and the two moments of Adam, each tensor of them rounded
        // up to whole cache lines at most.
        for (part, bytes) in [("weights", 4), ("gradients", 4), ("optimizer", 8)] {
            let exact = bytes * parameters;
            let planned = number(&plan, &format!("/memory/breakdown/{part}"));
            assert!(
                (exact..exact + 100_000).contains(&planned),
                "{size}: {part} take {planned} bytes, not {exact}"
            );
        }
        breakdown_adds_up(&plan);
    }
}

#[test]
fn gpt2_has_its_parameters() {
    let plan = plan("--model gpt2 --batch-size 1");
    assert_eq!(plan["parameters"], 124_439_808_u64);
    assert_eq!(plan["model"], "gpt2");
    breakdown_adds_up(&plan);
}

/// As the program of the file runs it, and as cinch does.
#[test]
fn files_of_the_examples_have_their_parameters_with_both_engines() {
    let low_memory = "183,662,144 parameters\n";
    let embedder = "105,542,277 parameters, 14,689,413 trainable\n";
    for (file, parameters, trainable, said) in [
        (
            "gsa_pretrain_512m_low_memory.yaml",
            183_662_144,
            183_662_144,
            low_memory,
        ),
        (
            "gsa_pretrain_1b.yaml",
            405_227_312,
            405_227_312,
            "405,227,312 parameters\n",
        ),
        (
            "embedder/conf/config.yaml",
            105_542_277,
            14_689_413,
            embedder,
        ),
    ] {
        let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
        let path = examples.join(file);
        let path = path.to_str().expect("a path of UTF-8");
        for engine in ["pytorch", "cinch"] {
            let line = ["plan", "--config", path, "--engine", engine];
            let told = Sandbox::new().run(line).succeeds();
            told.prints(&[said]);
            let told = Sandbox::new().run([&line[..], &["--json"]].concat());
            let told = told.succeeds().json();
            assert_eq!(number(&told, "/parameters"), parameters, "{file} {engine}");
            assert_eq!(number(&told, "/trainable"), trainable, "{file} {engine}");
        }
    }
}

#[test]
fn the_fields_are_named_as_promised() {
    let plan = plan("--model-size small --vram 4gb --device cpu");
    for field in [
        "/model",
        "/parameters",
        "/trainable",
        "/settings/batch_size",
        "/settings/accumulation",
        "/settings/effective_batch",
        "/settings/seq_len",
        "/settings/precision",
        "/settings/checkpointing/blocks",
        "/settings/checkpointing/of",
        "/settings/offload",
        "/settings/optimizer_states",
        "/settings/update_in_backward",
        "/memory/host_bytes",
        "/memory/host/offloaded_states",
        "/memory/host/staging",
        "/memory/host/files/saving",
        "/memory/host/files/loading",
        "/memory/host/files/merging",
        "/memory/host/arena",
        "/memory/host/process",
        "/memory/peak_bytes",
        "/memory/arena_bytes",
        "/memory/overhead_bytes",
        "/memory/lower_bound_bytes",
        "/memory/breakdown/weights",
        "/memory/breakdown/gradients",
        "/memory/breakdown/optimizer",
        "/memory/breakdown/activations",
        "/memory/breakdown/batch",
        "/memory/breakdown/workspace",
        "/memory/breakdown/overhead",
        "/budget_bytes",
        "/fits",
        "/step_flops",
    ] {
        let value = plan.pointer(field);
        assert!(
            value.is_some_and(|value| !value.is_null()),
            "{field} is missing in {plan:#}"
        );
    }
    assert_eq!(plan["fits"], true);
    assert_eq!(plan["budget_bytes"], 4_u64 << 30);
    assert_eq!(
        plan["memory"]["overhead_bytes"],
        plan["memory"]["breakdown"]["overhead"]
    );
}

#[test]
fn without_a_budget_the_field_is_there_and_null() {
    let plan = plan("--model-size small");
    assert_eq!(plan.get("budget_bytes"), Some(&Value::Null));
    assert_eq!(plan["fits"], true);
}

#[test]
fn the_device_follows_the_precision_unless_it_is_given() {
    for (line, device, precision) in [
        ("", "cpu", "fp32"),
        ("--precision bf16", "cuda", "bf16"),
        ("--precision fp16", "cuda", "fp16"),
        ("--device cuda", "cuda", "fp32"),
        ("--device cpu --precision bf16", "cpu", "fp32"),
        // Naming a GPU means one.
        ("--gpu-memory 24", "cuda", "fp32"),
        ("--vram 24gb", "cuda", "fp32"),
        ("--vram 24gb --device cpu", "cpu", "fp32"),
    ] {
        let plan = plan(&format!("--model-size small --batch-size 1 {line}"));
        assert_eq!(plan["device"], device, "{line}");
        assert_eq!(plan["settings"]["precision"], precision, "{line}");
        breakdown_adds_up(&plan);
    }
    let halved = plan("--model-size small --precision bf16");
    let full = plan("--model-size small --device cuda");
    assert!(
        number(&halved, "/memory/breakdown/activations")
            < number(&full, "/memory/breakdown/activations")
    );
}

#[test]
fn the_same_question_has_the_same_answer() {
    let sandbox = Sandbox::new();
    for line in [
        "plan --json --model-size medium --vram 3gb --timeline",
        "plan --model gpt2 --vram 8gb --precision bf16 --graph --timeline --explain",
    ] {
        let first = sandbox.cinch(line).succeeds();
        assert_eq!(first.stdout, sandbox.cinch(line).succeeds().stdout);
    }
}

#[test]
fn the_graph_is_printed() {
    let ran = Sandbox::new().cinch("plan --model-size tiny --graph");
    let ran = ran
        .succeeds()
        .prints(&["f32[", "blocks.0.", "loss", "adamw("]);
    assert!(ran.stdout.lines().count() > 100);
}

#[test]
fn the_timeline_reaches_the_peak() {
    let sandbox = Sandbox::new();
    let text = sandbox
        .cinch("plan --model-size tiny --timeline")
        .succeeds();
    let text = text.prints(&["forward", "backward", "update"]);
    assert!(
        text.stdout.contains(&"█".repeat(50)),
        "one bar is full: the peak"
    );
    let plan = plan("--model-size tiny --timeline");
    let moments = plan["timeline"].as_array().expect("a list of moments");
    let highest = moments.iter().filter_map(|moment| moment["bytes"].as_u64());
    assert_eq!(highest.max(), plan["memory"]["peak_bytes"].as_u64());
}

#[test]
fn explain_tells_where_values_came_from() {
    let sandbox = Sandbox::new();
    sandbox.write("run.json", "{\"training\": {\"learning_rate\": 0.001}}");
    let ran = sandbox
        .command("plan --config run.json --lr 0.002 --training-preset fast --explain".split(' '))
        .env("CINCH_TRAINING_SEED", "7")
        .env("COLUMNS", "160")
        .output()
        .expect("the program starts");
    let text = String::from_utf8_lossy(&ran.stdout);
    let row = |key: &str| {
        let row = text.lines().find(|line| line.contains(key));
        row.unwrap_or_else(|| panic!("no {key} in {text}"))
    };
    let rate = row("training.learning_rate");
    for part in ["0.002", "--lr", "0.001"] {
        assert!(rate.contains(part), "no `{part}` in {rate}");
    }
    assert!(row("training.seed").contains("environment CINCH_TRAINING_SEED"));
    assert!(row("training.weight_decay").contains("default"));
}

#[test]
fn a_smaller_micro_batch_meets_a_budget_and_keeps_the_effective_batch() {
    let free = plan("--model-size small --batch-size 8 --grad-accum 2");
    let tight = plan("--model-size small --batch-size 8 --grad-accum 2 --vram 1200mb --device cpu");
    assert_eq!(tight["settings"]["effective_batch"], 16);
    assert_eq!(tight["settings"]["seq_len"], free["settings"]["seq_len"]);
    assert_eq!(tight["settings"]["checkpointing"]["blocks"], 0);
    let micro = number(&tight, "/settings/batch_size");
    assert!(micro < 8);
    assert_eq!(micro * number(&tight, "/settings/accumulation"), 16);
    assert!(number(&tight, "/memory/arena_bytes") < number(&free, "/memory/arena_bytes"));
    // The next larger one does not fit: it takes more than the budget when nothing bounds it.
    let larger = 2 * micro;
    let accumulation = 16 / larger;
    let next = plan(&format!(
        "--model-size small --batch-size {larger} --grad-accum {accumulation}"
    ));
    let total = number(&next, "/memory/arena_bytes") + number(&next, "/memory/overhead_bytes");
    assert!(total > number(&tight, "/budget_bytes"));
}

#[test]
fn a_tight_budget_recomputes_the_fewest_blocks() {
    let sandbox = Sandbox::new();
    for device in ["cpu", "cuda"] {
        // With the rows of logits fixed, recomputation is all that can give way.
        let line = format!(
            "--model gpt2 --batch-size 1 --grad-accum 4 --seq-len 1024 --device {device} \
             --set vram.loss_chunk=128"
        );
        let total = |plan: &Value| {
            number(plan, "/memory/arena_bytes") + number(plan, "/memory/overhead_bytes")
        };
        let none = total(&plan(&format!("{line} --checkpointing none")));
        let full = total(&plan(&format!("{line} --checkpointing full")));
        assert!(full < none, "{device}: recomputing saves memory");
        let budget = usize::midpoint(full as usize, none as usize);
        let fitted = plan(&format!("{line} --vram {budget}b"));
        let blocks = number(&fitted, "/settings/checkpointing/blocks");
        assert!(blocks > 0 && blocks < 12, "{device}: {blocks} blocks");
        assert!(total(&fitted) <= budget as u64);
        assert!(number(&fitted, "/step_flops") > number(&fitted, "/useful_flops"));
        let fewer = blocks - 1;
        sandbox
            .cinch(&format!(
                "plan {line} --vram {budget}b --checkpointing {fewer}"
            ))
            .fails(3, &["does not fit", &format!("--checkpointing {blocks}")]);
    }
}

#[test]
fn recomputation_asked_for_is_taken_at_its_word() {
    for (asked, blocks) in [("none", 0), ("full", 8), ("3", 3)] {
        let plan = plan(&format!("--model-size small --checkpointing {asked}"));
        assert_eq!(plan["settings"]["checkpointing"]["blocks"], blocks);
        assert_eq!(plan["settings"]["checkpointing"]["of"], 8);
    }
}

#[test]
fn activations_in_host_memory_take_the_place_of_recomputation() {
    let line = "--model-size small --precision bf16 --device cuda --checkpointing full";
    let (again, away) = (plan(line), plan(&format!("{line} --offload-activations 3")));
    assert_eq!(again["settings"]["offload_activations"], 0);
    assert_eq!(away["settings"]["offload_activations"], 3);
    let stored = &away["memory"]["host"]["offloaded_activations"];
    assert!(stored.as_u64().is_some_and(|bytes| bytes > 0), "{stored}");
    assert_eq!(stored, &away["memory"]["host_bytes"]);
    // Blocks that nobody asked to recompute are, where they are stored.
    let alone = plan("--model-size small --precision bf16 --device cuda --offload-activations 3");
    assert_eq!(alone["settings"]["checkpointing"]["blocks"], 3);
    assert_eq!(alone["settings"]["offload_activations"], 3);
}

#[test]
fn offload_moves_the_states_to_the_host() {
    let plan = plan("--model-size small --precision bf16 --offload");
    assert_eq!(plan["settings"]["offload"], true);
    assert_eq!(number(&plan, "/memory/host_bytes"), 8 * 40_306_176);
    assert_eq!(number(&plan, "/memory/breakdown/optimizer"), 0);
    // Tokens and targets wait for their turn in pinned memory.
    let settings = &plan["settings"];
    let tokens = settings["batch_size"].as_u64().unwrap() * settings["seq_len"].as_u64().unwrap();
    assert_eq!(number(&plan, "/memory/host/staging"), 2 * 4 * tokens);
    breakdown_adds_up(&plan);
}

#[test]
fn the_optimizers_variants_show_in_the_breakdown() {
    const SMALL: &str = "--model-size small --batch-size 1 --grad-accum 1";
    let plain = plan(SMALL);
    let small = plan(&format!("{SMALL} --optimizer-states 8bit"));
    assert_eq!(small["settings"]["optimizer_states"], "8bit");
    let ratio = number(&plain, "/memory/breakdown/optimizer") as f64
        / number(&small, "/memory/breakdown/optimizer") as f64;
    assert!((3.8..4.0).contains(&ratio), "{ratio}");
    let inside = plan(&format!("{SMALL} --update-in-backward"));
    assert_eq!(inside["settings"]["update_in_backward"], true);
    let gradients = |plan| number(plan, "/memory/breakdown/gradients");
    // What is left is the table, tied to the head, and the positions.
    let kept = 4 * 512 * (50_257 + 1024);
    assert!(gradients(&inside) < gradients(&plain));
    assert_eq!(gradients(&inside), kept);
    assert!(number(&inside, "/step_flops") > number(&plain, "/step_flops"));
    assert_eq!(inside["useful_flops"], plain["useful_flops"]);
    let once = plan(&format!(
        "{SMALL} --update-in-backward --set training.max_grad_norm=0"
    ));
    assert_eq!(once["step_flops"], plain["step_flops"]);
    for plan in [&small, &inside, &once] {
        breakdown_adds_up(plan);
    }
    let text = Sandbox::new().cinch("plan --optimizer-states 8bit --offload --device cuda");
    text.succeeds().prints(&[
        "8bit optimizer states in host memory",
        "in host memory: optimizer states",
    ]);
}

#[test]
fn updates_inside_the_backward_take_one_micro_batch() {
    let sandbox = Sandbox::new();
    let refused = sandbox.cinch("plan --update-in-backward --batch-size 2 --grad-accum 4");
    refused.fails(
        2,
        &[
            "vram.update_in_backward",
            "vram.gradient_accumulation_steps",
            "hint:",
        ],
    );
}

#[test]
fn a_reader_that_leaves_early_is_no_error() {
    let sandbox = Sandbox::new();
    let mut child = sandbox.start(["plan", "--graph"]);
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("the program ends");
    assert!(output.status.success(), "{output:?}");
    assert!(output.stderr.is_empty(), "{output:?}");
}

#[test]
fn sizes_of_memory_are_read_with_any_unit() {
    for (text, bytes) in [
        ("8gb", 8 << 30),
        ("8192mb", 8 << 30),
        ("8", 8 << 30),
        ("8589934592b", 8_u64 << 30),
        ("7.5GB", 15 << 29),
    ] {
        assert_eq!(plan(&format!("--vram {text}"))["budget_bytes"], bytes);
    }
}

/// Every rank has one plan; the words of other programs say what it keeps.
#[test]
fn several_ranks_are_planned_without_any() {
    let of = |shard: &str| {
        plan(&format!(
            "--model gpt2 --precision bf16 --batch-size 2 --grad-accum 1 --world 8 --nodes 2 \
             --gpu A100-SXM4-80GB --shard {shard}"
        ))
    };
    let mut before = u64::MAX;
    for shard in ["ddp", "optimizer", "zero2", "full_shard"] {
        let plan = of(shard);
        breakdown_adds_up(&plan);
        assert_eq!(plan["settings"]["effective_batch"], 16);
        let world = &plan["world"];
        assert_eq!((&world["ranks"], &world["nodes"]), (&8.into(), &2.into()));
        let bytes = number(&plan, "/world/bytes_per_rank");
        assert!(bytes < before, "{shard}: {bytes} of {before}");
        before = bytes;
        let speed = |key: &str| world["speed"][key].as_f64().expect("a number");
        // What is not hidden is waited for.
        let told = speed("exposed_seconds") + speed("hidden_seconds");
        assert!((told - speed("network_seconds")).abs() < 1e-9, "{shard}");
        assert!(speed("hidden_seconds") > 0.0, "{shard}");
        assert!(speed("step_seconds") > speed("exposed_seconds"), "{shard}");
        assert_eq!(number(&plan, "/world/fewest_ranks/ranks"), 1, "{shard}");
    }
}

/// A file's number of GPUs is told with the keys that it follows from.
#[test]
fn the_gpus_of_a_file_are_named() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../examples/gsa_pretrain_512m_low_memory.yaml");
    let plan = plan(&format!("--engine cinch --config {}", file.display()));
    let notes = plan["notes"].to_string();
    for part in [
        "4 GPUs: training.global_batch_size 256",
        "training.micro_batch_size 2 × training.gradient_accumulation_steps 32 × 4",
    ] {
        assert!(notes.contains(part), "{notes}");
    }
    assert_eq!(plan["settings"]["effective_batch"], 256);
}

/// A model that one card does not hold, and how few cards do.
#[test]
fn the_fewest_cards_are_told() {
    let plan = plan(
        "--model meta-llama/Llama-3.1-8B --precision bf16 --batch-size 1 --grad-accum 1 \
         --checkpointing full --world 8 --shard zero3 --gpu RTX-4090",
    );
    let fewest = number(&plan, "/world/fewest_ranks/ranks");
    // Sixteen bytes a weight over cards of less than 24 GiB.
    assert!((6..=8).contains(&fewest), "{fewest}");
}

#[test]
fn scaling_is_a_table() {
    let plan = plan(
        "--model gpt2 --precision bf16 --batch-size 4 --grad-accum 1 --shard zero1 \
         --gpu H100-SXM5 --scaling 64",
    );
    let rows = plan["scaling"].as_array().expect("a list");
    let ranks: Vec<u64> = rows
        .iter()
        .filter_map(|row| row["ranks"].as_u64())
        .collect();
    assert_eq!(ranks, [1, 2, 4, 8, 16, 32, 64]);
    assert_eq!(rows[0]["speed"]["efficiency"], 1.0);
    let nodes: Vec<u64> = rows
        .iter()
        .filter_map(|row| row["nodes"].as_u64())
        .collect();
    assert_eq!(nodes, [1, 1, 1, 1, 2, 4, 8]);
}

#[test]
fn worlds_that_cannot_be_are_told() {
    let refused = |line: &str, texts: &[&str]| {
        Sandbox::new()
            .cinch(&format!("plan {line}"))
            .fails(2, texts);
    };
    refused("--model gpt2 --world 3", &["3 ranks", "2 or 4 ranks do"]);
    refused("--model gpt2 --world 4 --nodes 3", &["world.nodes"]);
    refused(
        "--model gpt2 --world 2 --gpu RTX-4090 --link string",
        &["`string`", "pcie4"],
    );
    refused("--model gpt2 --scaling 8", &["--gpu"]);
    refused(
        "--model gpt2 --world 2 --update-in-backward --batch-size 1 --grad-accum 1",
        &["one rank", "--shard gradients"],
    );
}

/// Only recomputed blocks keep activations in host memory: fewer than asked are told.
#[test]
fn fewer_blocks_in_host_memory_than_asked_are_told() {
    let sandbox = Sandbox::new();
    let line = "plan --model gpt2 --gpu H200 --device cuda --offload-activations 4 --checkpointing";
    let told = "not of 4";
    let none = sandbox.cinch(&format!("{line} none")).succeeds();
    none.prints(&["activations of 0 blocks", told, "0 are recomputed"]);
    let some = sandbox.cinch(&format!("{line} 2")).succeeds();
    some.prints(&["activations of 2 blocks", told, "2 are recomputed"]);
    let all = sandbox.cinch(&format!("{line} 4 --json")).succeeds().json();
    assert!(!all["notes"].to_string().contains(told), "{}", all["notes"]);
    // They are cinch's own, not PyTorch's.
    for flag in ["--offload-activations 4", "--offload-frozen"] {
        sandbox
            .cinch(&format!("plan --engine pytorch --model gpt2 {flag}"))
            .fails(2, &["about cinch's own engine"]);
    }
}
