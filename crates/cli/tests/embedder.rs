//! The text embedder from the files of guide 004: a run in stages, what it finds afterwards,
//! embeddings in each format, and settings for a card, stage by stage.

mod common;

use std::fs;
use std::path::Path;

use common::{Sandbox, metrics};
use serde_json::Value;

/// An encoder that two cores train in seconds.
const SMALL: &str = "--set model.d_model=16 --set model.n_heads=2 --set model.n_layers=1 \
    --set model.d_ffn=16 --set model.d_expert=16 --set model.max_seq_len=32 \
    --set model.vocab_size=257 --seq-len 32 --device cpu";

/// The guide's files, as `examples` has them.
fn conf(sandbox: &Sandbox) {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/embedder/conf");
    let mut files = vec!["config.yaml".to_owned()];
    files.extend((1..=5).map(|stage| format!("text_curriculum/0{stage}_stage.yaml")));
    for file in files {
        sandbox.write(&format!("conf/{file}"), fs::read(from.join(&file)).unwrap());
    }
}

fn codes(sandbox: &Sandbox) {
    let line = "data taxonomy codes.jsonl --sectors 8 --children 2 --digits 4";
    sandbox.cinch(line).succeeds();
}

/// Losses of training.
fn losses(run: &Path) -> Vec<f64> {
    let loss = |line: Value| line.get("loss")?.as_f64();
    metrics(run).into_iter().filter_map(loss).collect()
}

/// The guide's files for two devices, on two that `launch` names, beside one with the anchors of
/// both in its micro batch; and gone on with on one.
fn two_devices_are_one_big_batch(launch: &str, device: &str) {
    let sandbox = Sandbox::new();
    conf(&sandbox);
    codes(&sandbox);
    let file = sandbox.join("conf/config.yaml");
    let text = fs::read_to_string(&file).unwrap();
    let two = text.replace("devices: 1", "devices: 2\n    strategy: ddp");
    assert_ne!(text, two);
    fs::write(&file, two).unwrap();
    let small = SMALL.replace("--device cpu", device);
    let train = |run: &str, batch: usize, steps: usize| {
        format!(
            "train --config-path conf --data-dir codes.jsonl --output-dir {run} {small} --stage 02 \
             --batch-size {batch} --grad-accum 1 --max-steps {steps} --log-steps 1 --eval-steps 0 \
             --precision fp32 --set training.schedule=constant"
        )
    };
    sandbox.cinch(&train("one", 8, 5)).succeeds();
    let together = format!("launch {launch} -- {}", train("two", 4, 5));
    sandbox.cinch(&together).succeeds();
    // As many micro batches as keep the effective batch are not what ran before, and it says so.
    let resume = format!("train --resume two --max-steps 6 {device}");
    sandbox.cinch(&resume).succeeds().says(&[
        "`moe.routed` is the mean over 4 sequences at a time, before over 8",
        "--batch-size 8 goes on exactly",
    ]);
    let (one, two) = (losses(&sandbox.join("one")), losses(&sandbox.join("two")));
    assert_eq!((one.len(), two.len()), (5, 6));
    for (step, (a, b)) in one.iter().zip(&two).enumerate() {
        assert!(
            (a - b).abs() < 1e-5 * a.abs(),
            "step {step}: {one:?}\n{two:?}"
        );
    }
}

#[test]
fn the_guides_two_devices_are_one_big_batch() {
    two_devices_are_one_big_batch("--ranks 2", "--device cpu --threads 1");
}

/// Two ranks on one card need NCCL_MULTI_RANK_GPU_ENABLE=1.
#[test]
#[ignore = "needs a GPU and NCCL 2.30, or two GPUs"]
fn the_guides_two_devices_are_one_big_batch_on_gpus() {
    two_devices_are_one_big_batch("--gpus 2", "--device cuda");
}

/// The example finds what it was never shown, by more than luck has: of 40 held-out pairs among
/// 104 codes, luck has a tenth of them among the first ten.
#[test]
fn the_example_learns() {
    let sandbox = Sandbox::new();
    let example = include_str!("../../../examples/embedder/config.json");
    sandbox.write("config.json", example);
    sandbox.cinch("data taxonomy codes.jsonl").succeeds();
    let line = "train --config config.json --data-dir codes.jsonl --output-dir run --max-steps 200";
    sandbox.cinch(line).succeeds();
    let found = |line: &str| {
        let answer = sandbox.cinch(line).succeeds().json();
        let share = answer["retrieval"]["recall"]["10"].as_f64().unwrap();
        let rank = answer["retrieval"]["mean_reciprocal_rank"]
            .as_f64()
            .unwrap();
        (share, rank)
    };
    let before = found("eval run --initial --device cpu --json");
    let after = found("eval run --device cpu --json");
    assert!(after.0 > before.0 + 0.2, "{before:?} {after:?}");
    assert!(after.1 > 2.0 * before.1, "{before:?} {after:?}");
}

#[test]
fn the_guides_files_train_stage_by_stage() {
    let sandbox = Sandbox::new();
    conf(&sandbox);
    codes(&sandbox);
    let line = format!(
        "train --config conf/config.yaml --data-dir codes.jsonl --output-dir run {SMALL} \
         --batch-size 8 --grad-accum 1 --epochs 1"
    );
    let ran = sandbox.cinch(&line).succeeds();
    let ran = ran.prints(&["cinch eval run"]);
    ran.says(&[
        "stage 01_stage, 24 negatives",
        "stage 02_stage: steps",
        "stage 05_stage: steps",
    ]);
    let before = sandbox
        .cinch("eval run --initial --device cpu --json")
        .succeeds()
        .json();
    let after = sandbox
        .cinch("eval run --device cpu --json")
        .succeeds()
        .json();
    for answer in [&before, &after] {
        let share = answer["retrieval"]["recall"]["10"].as_f64().unwrap();
        assert!((0.0..=1.0).contains(&share), "{answer}");
    }
    assert_ne!(before["retrieval"], after["retrieval"]);
    sandbox.cinch("eval run --device cpu").succeeds().prints(&[
        "recall@1 ",
        "recall@10 ",
        "mean reciprocal rank",
    ]);

    // What a stage of the run has cannot change, and the file that says otherwise is named.
    let stage = "conf/text_curriculum/01_stage.yaml";
    let text = fs::read_to_string(sandbox.join(stage)).unwrap();
    sandbox.write(stage, text.replace("n_negatives: 24", "n_negatives: 20"));
    sandbox.cinch(&format!("{line} --resume run")).fails(
        2,
        &[
            "model.stages: [24,8,8,8,8]",
            "text_curriculum",
            "leave out --config",
        ],
    );
    sandbox.write(stage, text);

    // One of the stages by itself, and one that is not there.
    let line = line.replace("--output-dir run", "--output-dir alone");
    let alone = sandbox.cinch(&format!("{line} --stage 03")).succeeds();
    alone.says(&["stage 03_stage, 8 negatives"]);
    sandbox
        .cinch(&format!("{line} --stage 07"))
        .fails(2, &["data.stage", "07", "05_stage"]);
    let line = line.replace("--output-dir alone", "--output-dir other");
    sandbox
        .cinch(&format!("{line} --negatives 60"))
        .fails(2, &["60 negatives", "01_stage", "hint:"]);

    embeds(&sandbox);
}

/// Every format holds the same numbers.
fn embeds(sandbox: &Sandbox) {
    sandbox.write("texts.txt", "soy bean farming\n\noil\n");
    let lines = sandbox.cinch("embed run texts.txt --device cpu").succeeds();
    let rows: Vec<Value> = lines
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let numbers: Vec<f32> = rows
        .iter()
        .flat_map(|row| row["embedding"].as_array().unwrap())
        .map(|number| number.as_f64().unwrap() as f32)
        .collect();
    // Time, and one more than the width of space: cosh² − sinh² = 1.
    assert_eq!(numbers.len(), 2 * 18);
    for point in numbers.chunks_exact(18) {
        let square: f32 = point[1..].iter().map(|x| x * x).sum();
        assert!((point[0] * point[0] - square - 1.0).abs() < 1e-3);
    }
    let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    for file in ["out.npy", "out.safetensors"] {
        let line = format!("embed run texts.txt --output {file} --device cpu");
        sandbox.cinch(&line).succeeds();
        let written = fs::read(sandbox.join(file)).unwrap();
        assert!(written.ends_with(&bytes), "{file}");
        let head = String::from_utf8_lossy(&written[..written.len() - bytes.len()]).into_owned();
        assert!(
            head.contains("(2, 18)") || head.contains("[2,18]"),
            "{head}"
        );
    }
    sandbox
        .cinch("embed run texts.txt --output out.csv")
        .fails(2, &["out.csv", ".npy"]);
    sandbox.write("lines.jsonl", "{\"title\": \"oil\"}\n");
    sandbox
        .cinch("embed run lines.jsonl --output lines.jsonl --device cpu")
        .fails(2, &["lines.jsonl", "file of the texts", "hint:"]);
    sandbox.write("empty.txt", "\n");
    sandbox
        .cinch("embed run empty.txt --device cpu")
        .fails(2, &["empty.txt", "no texts"]);
    sandbox
        .cinch("embed run nowhere.txt --device cpu")
        .fails(2, &["cannot read nowhere.txt", "hint:"]);
    sandbox
        .cinch("eval run --k 0 --device cpu")
        .fails(2, &["--k"]);
}

/// A tiny encoder in the files of transformers, made in `crates/train/tests/fixtures/sentences`.
fn encoder(sandbox: &Sandbox) {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../train/tests/fixtures/sentences");
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        sandbox.write(&format!("bert/{file}"), fs::read(from.join(file)).unwrap());
    }
}

fn vectors(lines: &str) -> Vec<Vec<f64>> {
    let vector = |line: &str| {
        let row: Value = serde_json::from_str(line).unwrap();
        let numbers = row["embedding"].as_array().unwrap().iter();
        numbers.map(|number| number.as_f64().unwrap()).collect()
    };
    lines.lines().map(vector).collect()
}

#[test]
fn sentences_are_embedded_as_the_folder_says() {
    let sandbox = Sandbox::new();
    encoder(&sandbox);
    let long = vec!["w7"; 80].join(" ");
    sandbox.write("texts.txt", format!("w1 w2\n\n{long}\n"));
    let line = "embed bert texts.txt --device cpu";
    let usual = sandbox.cinch(line).succeeds().says(&[
        "the average of a text's tokens, at length 1",
        "no modules.json",
        "1 empty line left out",
        "1 of 2 texts cut to what the model reads: 64 tokens",
    ]);
    let usual = vectors(&usual.stdout);
    assert_eq!(usual.len(), 2);
    let length = |vector: &[f64]| vector.iter().map(|x| x * x).sum::<f64>().sqrt();
    assert!(
        usual
            .iter()
            .all(|vector| (length(vector) - 1.0).abs() < 1e-6)
    );

    let modules = r#"[{"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]"#;
    sandbox.write("bert/modules.json", modules);
    sandbox.write("bert/1_Pooling/config.json", r#"{"pooling_mode": "cls"}"#);
    let first = sandbox.cinch(line).succeeds();
    let first = first.says(&["a text's first token (modules.json)"]);
    let first = vectors(&first.stdout);
    assert!(
        first
            .iter()
            .all(|vector| (length(vector) - 1.0).abs() > 1e-3)
    );

    sandbox.write("bert/1_Pooling/config.json", r#"{"pooling_mode": "max"}"#);
    sandbox
        .cinch(line)
        .fails(1, &["1_Pooling/config.json", "\"max\"", "hint:"]);
    sandbox.write("bert/1_Pooling/config.json", "{}");
    sandbox.write("codes.jsonl", "{\"text\": \"w1\"}\n{\"title\": \"w2\"}\n");
    sandbox
        .cinch("embed bert codes.jsonl --device cpu")
        .fails(2, &["codes.jsonl line 2", "no `text`", "hint:"]);
    // A hub id stands for what was downloaded.
    let snapshot = sandbox.hub().join("models--someone--bert/snapshots/1");
    fs::create_dir_all(snapshot.parent().unwrap()).unwrap();
    fs::rename(sandbox.join("bert"), &snapshot).unwrap();
    let refs = sandbox.hub().join("models--someone--bert/refs");
    fs::create_dir_all(&refs).unwrap();
    fs::write(refs.join("main"), "1").unwrap();
    let line = "embed someone/bert texts.txt --device cpu";
    let downloaded = sandbox.cinch(line).succeeds();
    assert_eq!(vectors(&downloaded.stdout).len(), 2);
    sandbox
        .cinch("embed someone/other texts.txt --device cpu")
        .fails(2, &["there is no someone/other", "hint:", "hub id"]);
    encoder(&sandbox);
    sandbox
        .cinch("embed bert texts.txt --best --device cpu")
        .fails(2, &["--best", "bert", "hint: leave out --best"]);
    sandbox
        .cinch("eval bert --device cpu")
        .fails(2, &["bert is a model's folder", "--weights bert"]);
    let nowhere = sandbox.cinch("eval nowhere --device cpu");
    let nowhere = nowhere.fails(2, &["there is no nowhere", "hint:"]);
    assert!(!nowhere.stderr.contains("hub id"), "{}", nowhere.stderr);
}

/// The folder is the model, whatever it is called.
#[test]
fn a_folder_may_be_called_as_a_family_is() {
    let sandbox = Sandbox::new();
    encoder(&sandbox);
    fs::rename(sandbox.join("bert"), sandbox.join("naics")).unwrap();
    sandbox.write("texts.txt", "w1 w2\n");
    let embedded = sandbox
        .cinch("embed naics texts.txt --device cpu")
        .succeeds();
    assert_eq!(vectors(&embedded.stdout).len(), 1);
}

/// No vector comes from tokens that an encoder was not trained on.
#[test]
fn an_encoder_without_its_tokenizer_is_refused() {
    let sandbox = Sandbox::new();
    encoder(&sandbox);
    codes(&sandbox);
    fs::remove_file(sandbox.join("bert/tokenizer.json")).unwrap();
    sandbox.write("texts.txt", "w1 w2\n");
    let told = "bert has weights and no tokenizer.json";
    let embed = sandbox.cinch("embed bert texts.txt --device cpu");
    let embed = embed.fails(2, &[told, "hint:"]);
    assert!(!embed.stderr.contains("--tokenizer"), "{}", embed.stderr);
    let train = "train --model naics --weights bert --data-dir codes.jsonl --device cpu \
                 --max-steps 1";
    sandbox.cinch(train).fails(2, &[told, "--tokenizer"]);
}

/// Heads and epsilons are in no tensor's shape.
#[test]
fn weights_of_an_encoder_that_is_described_otherwise_are_told() {
    let sandbox = Sandbox::new();
    encoder(&sandbox);
    codes(&sandbox);
    let small = SMALL
        .replace("n_layers=1", "n_layers=2")
        .replace("d_ffn=16", "d_ffn=24")
        .replace("max_seq_len=32", "max_seq_len=64")
        .replace("vocab_size=257", "vocab_size=40");
    let line = format!(
        "--model naics {small} --data-dir codes.jsonl --weights bert --negatives 4 --batch-size 2 \
         --grad-accum 1 --max-steps 1"
    );
    let parts = [
        "bert/config.json describes another model",
        "norm_epsilon 0.05 (here 1e-12)",
    ];
    sandbox
        .cinch(&format!("train {line} --output-dir run"))
        .succeeds()
        .says(&parts);
    sandbox.cinch(&format!("check {line}")).succeeds().prints(&[
        "bert/config.json describes another model",
        "norm_epsilon 0.05",
        "each in its shape and",
    ]);
    // The same with what the file says, which nothing is said of then; and the run embeds.
    let line = format!("train {line} --output-dir same --set model.layer_norm_eps=0.05");
    let same = sandbox.cinch(&line).succeeds();
    assert!(
        !same.stderr.contains("describes another"),
        "{}",
        same.stderr
    );
    sandbox.write("texts.txt", "w1 w2\n");
    let made = sandbox
        .cinch("embed same texts.txt --device cpu")
        .succeeds();
    assert_eq!(vectors(&made.stdout)[0].len(), 18);
}

#[test]
fn settings_are_found_for_every_stage_and_written_into_the_files() {
    let sandbox = Sandbox::new();
    conf(&sandbox);
    let line = "fit --engine cinch --config-path conf --gpu-memory 24 --target-effective-batch 256";
    let answer = sandbox.cinch(&format!("{line} --json")).succeeds().json();
    let stages = answer["stages"].as_array().unwrap();
    assert_eq!(stages.len(), 5);
    let notes = answer["notes"].to_string();
    assert!(
        notes.contains("evenly in use is that of each micro batch"),
        "{notes}"
    );
    let total = |stage: &Value| stage["total_bytes"].as_u64().unwrap();
    let recommended = &answer["fit"]["recommended"];
    // The first stage has the most negatives, and decides.
    assert_eq!(
        total(&stages[0]),
        recommended["total_bytes"].as_u64().unwrap()
    );
    assert!(total(&stages[1]) < total(&stages[0]));
    assert_eq!(stages[4]["effective_batch"], 256);
    let parts = stages[1]["breakdown"].as_object().unwrap();
    let sum: u64 = parts.values().map(|part| part.as_u64().unwrap()).sum();
    assert_eq!(sum, total(&stages[1]));
    let before = fs::read_to_string(sandbox.join("conf/config.yaml")).unwrap();
    sandbox
        .cinch(&format!("{line} --apply --yes"))
        .succeeds()
        .prints(&[
            "01_stage",
            "05_stage",
            "of the card",
            "= 256",
            "+  batch_size: ",
            "wrote conf/config.yaml",
            "cinch train --config-path conf ",
        ]);
    let written = fs::read_to_string(sandbox.join("conf/config.yaml")).unwrap();
    assert!(written.contains("# anchors of a micro batch"), "{written}");
    let batch = recommended["settings"]["batch_size"].to_string();
    assert!(
        written.contains(&format!("batch_size: {batch} ")),
        "{written}"
    );
    sandbox.cinch("fit --config-path conf --undo").succeeds();
    let restored = fs::read_to_string(sandbox.join("conf/config.yaml")).unwrap();
    assert_eq!(restored, before);
}

#[test]
fn an_embedder_trains_and_is_measured_with_nothing_given() {
    let sandbox = Sandbox::new();
    let line = format!(
        "train --model naics {SMALL} --negatives 4 --batch-size 4 --grad-accum 1 --max-steps 2 \
         --output-dir run"
    );
    sandbox.cinch(&line).succeeds().says(&["made-up taxonomy"]);
    let line = format!(
        "bench --model naics {SMALL} --negatives 4 --batch-size 4 --grad-accum 1 --steps 1 --json"
    );
    let answer = sandbox.cinch(&line).succeeds().json();
    assert!(answer.is_object(), "{answer}");
}

/// The stages alone, on a card, where the batch is free: phases with fewer blocks than the largest.
#[test]
fn a_folder_of_stages_alone_is_planned() {
    let sandbox = Sandbox::new();
    conf(&sandbox);
    sandbox
        .cinch("plan --engine cinch --gpu h200 --config-path conf/text_curriculum")
        .succeeds()
        .prints(&["fits the budget"]);
}

#[test]
fn mistakes_of_the_files_are_refused() {
    let sandbox = Sandbox::new();
    let plan = "plan --engine cinch --gpu h200 --config-path conf";
    let replaced = |file: &str, was: &str, is: &str| {
        conf(&sandbox);
        let path = sandbox.join(format!("conf/{file}"));
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(was), "{was}");
        fs::write(path, text.replace(was, is)).unwrap();
    };
    let first = "text_curriculum/01_stage.yaml";
    for (file, [was, is], parts) in [
        (
            "config.yaml",
            ["top_k: 2", "top_k: 5"],
            &["`model.top_k` = 5", "config.yaml line 23", "4 or less"][..],
        ),
        (
            first,
            ["n_negatives", "n_negative"],
            &["01_stage.yaml line 8", "did you mean `n_negatives`"],
        ),
        (
            first,
            ["n_negatives: 24", "n_negatives: lots"],
            &["01_stage.yaml line 8", "\"lots\""],
        ),
    ] {
        replaced(file, was, is);
        sandbox.cinch(plan).fails(2, parts);
    }
    // Quotation marks are no other number.
    replaced(first, "n_negatives: 24", "n_negatives: \"24\"");
    let answer = sandbox.cinch(&format!("{plan} --json")).succeeds().json();
    conf(&sandbox);
    let plain = sandbox.cinch(&format!("{plan} --json")).succeeds().json();
    assert_eq!(answer["memory"], plain["memory"]);
    codes(&sandbox);
    let train = format!("train --config-path conf --output-dir run {SMALL} --max-steps 2");
    replaced(first, "[child, sibling]", "[chlid, sibling]");
    sandbox
        .cinch(&format!("{train} --data-dir codes.jsonl"))
        .fails(2, &["01_stage", "`chlid`, which is no relation", "hint:"]);
    conf(&sandbox);
    sandbox
        .cinch(&format!("{train} --data-dir conf"))
        .fails(2, &["`conf` is a folder", "file of codes"]);
    // Each stage takes a step.
    sandbox
        .cinch(&format!("{train} --data-dir codes.jsonl"))
        .succeeds()
        .says(&["5 steps, not 2"]);
}
