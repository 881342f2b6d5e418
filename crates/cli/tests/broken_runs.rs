//! Runs that fail or are found damaged: what was saved stays, and the message says how to go on.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
#[cfg(unix)]
use std::thread::sleep;
#[cfg(unix)]
use std::time::{Duration, Instant};

use cinch_train::checkpoint::{Store, load_state};
#[cfg(unix)]
use common::{Ran, signal, tiny};
use common::{Sandbox, checkpoints, metrics};
use serde_json::json;

/// The path after `--resume` in a message.
#[track_caller]
fn offered(stderr: &str) -> String {
    let after = stderr.split("--resume ").nth(1);
    let after = after.unwrap_or_else(|| panic!("no --resume in\n{stderr}"));
    after.split_whitespace().next().expect("a path").to_owned()
}

#[test]
fn a_folder_without_a_run_is_not_resumed() {
    let sandbox = Sandbox::new();
    sandbox
        .cinch("train --resume absent")
        .fails(2, &["absent", "does not exist", "hint:"]);
    fs::create_dir(sandbox.join("empty")).expect("a folder");
    sandbox
        .cinch("train --resume empty")
        .fails(2, &["empty", "checkpoint", "hint:"]);
    sandbox.write("file.txt", "text");
    sandbox
        .cinch("train --resume file.txt")
        .fails(2, &["file.txt", "hint:"]);
    sandbox
        .cinch("train --resume")
        .fails(2, &["runs/mamba-tiny", "hint:"]);
}

#[test]
fn a_damaged_checkpoint_is_refused_and_the_one_before_it_offered() {
    let sandbox = Sandbox::new();
    let run = sandbox.join("run");
    sandbox
        .train_tiny("--max-steps 9 --save-steps 3 --output-dir run")
        .succeeds();
    let file = run.join("checkpoints/step-00000009/model.safetensors");
    let mut bytes = fs::read(&file).expect("weights");
    let last = bytes.last_mut().expect("not empty");
    *last ^= 0x10;
    fs::write(&file, bytes).expect("damage");

    let refused = sandbox.cinch("train --resume run --max-steps 12").fails(
        1,
        &[
            "run/checkpoints/step-00000009 is damaged",
            "model.safetensors",
            "sha256",
            "hint:",
        ],
    );
    sandbox
        .cinch("generate run")
        .fails(1, &["step-00000009 is damaged", "hint:"]);
    let path = offered(&refused.stderr);
    assert_eq!(path, "run/checkpoints/step-00000006");
    sandbox
        .run(["train", "--resume", &path, "--max-steps", "12"])
        .succeeds()
        .says(&["training steps 7 to 12"]);
    let names = checkpoints(&run);
    assert!(names.contains(&"step-00000009".to_owned()), "{names:?}");
    assert!(
        names.contains(&"aside-step-00000009-1".to_owned()),
        "the damaged one is kept under another name: {names:?}"
    );
    sandbox.cinch("generate run --max-tokens 3").succeeds();
}

#[test]
fn a_truncated_checkpoint_is_refused_too() {
    let sandbox = Sandbox::new();
    sandbox
        .train_tiny("--max-steps 4 --save-steps 2 --output-dir run")
        .succeeds();
    fs::write(
        sandbox.join("run/checkpoints/step-00000004/optimizer.safetensors"),
        "short",
    )
    .expect("damage");
    sandbox.cinch("train --resume run").fails(
        1,
        &[
            "optimizer.safetensors",
            "found 5",
            "--resume run/checkpoints/step-00000002",
        ],
    );
}

#[test]
fn a_best_checkpoint_saved_but_not_marked_is_marked_on_resume() {
    // What a kill between the save and the mark leaves.
    let sandbox = Sandbox::new();
    sandbox
        .train_tiny("--max-steps 6 --eval-steps 3 --output-dir run")
        .succeeds()
        .prints(&["at step 6)"]);
    let mark = sandbox.join("run/checkpoints/best.json");
    let before = fs::read_to_string(&mark).expect("a mark");
    fs::remove_file(&mark).expect("it can be removed");
    sandbox.cinch("train --resume run").succeeds();
    assert_eq!(fs::read_to_string(&mark).expect("a mark"), before);
}

#[test]
fn a_damaged_mark_of_the_best_ends_no_run() {
    let sandbox = Sandbox::new();
    let run = sandbox.join("run");
    sandbox
        .train_tiny("--max-steps 6 --eval-steps 3 --output-dir run")
        .succeeds()
        .prints(&["at step 6)"]);
    let mark = run.join("checkpoints/best.json");
    let before = fs::read_to_string(&mark).expect("a mark");
    fs::write(&mark, before.replace('{', "[")).expect("damage");
    sandbox
        .cinch("train --resume run --max-steps 8 --save-total-limit 1")
        .succeeds()
        .says(&[
            "damaged and is kept as run/checkpoints/aside-best.json-1",
            "step 6 is marked again",
        ]);
    let names = checkpoints(&run);
    for name in ["aside-best.json-1", "best.json", "step-00000008"] {
        assert!(names.contains(&name.to_owned()), "{names:?}");
    }
    sandbox
        .cinch("generate run --best --max-tokens 3")
        .succeeds();
}

#[cfg(unix)]
#[test]
fn a_mark_that_is_damaged_during_a_run_ends_it_neither() {
    let sandbox = Sandbox::new();
    let line = "--max-steps 100000 --save-steps 2 --eval-steps 2 --output-dir run";
    let mut child = sandbox.start(tiny(line));
    let mark = sandbox.join("run/checkpoints/best.json");
    let aside = sandbox.join("run/checkpoints/aside-best.json-1");
    let deadline = Instant::now() + Duration::from_secs(300);
    while !aside.exists() {
        let ended = child.try_wait().expect("a child can be asked");
        assert!(ended.is_none(), "the run ended early: {ended:?}");
        assert!(Instant::now() < deadline, "nothing is set aside in 300 s");
        // A better checkpoint may have been marked since.
        if mark.exists() {
            fs::write(&mark, "{\"step\": ").expect("damage");
        }
        sleep(Duration::from_millis(2));
    }
    signal(&child, "TERM");
    let output = child.wait_with_output().expect("the program ends");
    Ran::new(&sandbox.command([]), &output)
        .exits(130)
        .says(&["the mark of the best checkpoint was damaged"]);
}

#[test]
fn a_damaged_line_of_the_metrics_ends_no_run() {
    let sandbox = Sandbox::new();
    let run = sandbox.join("run");
    sandbox
        .train_tiny("--max-steps 4 --eval-steps 0 --log-steps 1 --output-dir run")
        .succeeds();
    let file = run.join("metrics.jsonl");
    let mut bytes = fs::read(&file).expect("metrics");
    let second = 1 + bytes
        .iter()
        .position(|&byte| byte == b'\n')
        .expect("a line");
    bytes[second] ^= 1;
    fs::write(&file, &bytes).expect("damage");
    sandbox
        .cinch("train --resume run --max-steps 5")
        .succeeds()
        .says(&[
            "run/metrics.jsonl line 2 is damaged",
            "kept as run/metrics.1.jsonl",
        ]);
    let lines = metrics(&run);
    let steps: Vec<u64> = lines
        .iter()
        .filter_map(|line| line["step"].as_u64())
        .collect();
    assert_eq!(steps, [1, 3, 4, 5]);
    assert_eq!(
        fs::read(run.join("metrics.1.jsonl")).expect("a copy"),
        bytes
    );
}

/// Files with good checksums whose state no run has saved.
#[test]
fn a_state_of_a_model_that_cannot_be_is_refused() {
    let sandbox = Sandbox::new();
    let (mamba, gpt2) = ("mamba", "gpt2 --set model.n_heads=4");
    for (number, (model, field, value, key)) in [
        (mamba, "max_seq_len", json!(0), "model.max_seq_len is 0"),
        (mamba, "n_layers", json!(1_u64 << 31), "model.n_layers is 2"),
        (mamba, "d_model", json!(0), "model.d_model is 0"),
        (mamba, "dropout", json!(1.5), "model.dropout is 1.5"),
        (gpt2, "n_heads", json!(0), "model.n_heads is 0"),
        (gpt2, "n_heads", json!(3), "model.n_heads 3 does not"),
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("run-{number}");
        let line = format!("--model {model} --max-steps 1 --eval-steps 0 --output-dir {name}");
        sandbox.train_tiny(&line).succeeds();
        let store = Store::open(sandbox.join(&name)).expect("a run");
        let mut state = load_state(&store.path_of(1)).expect("a state");
        state["config"]["model"][field] = value;
        store.save(2, &[], &[], &state).expect("a checkpoint");
        let parts = ["step-00000002: state.json", "no such model", key, "hint:"];
        sandbox
            .cinch(&format!("generate {name} --max-tokens 1"))
            .fails(1, &parts);
        sandbox
            .cinch(&format!("train --resume {name}"))
            .fails(1, &parts);
    }
}

#[test]
fn other_data_and_other_models_are_not_mixed_into_a_run() {
    let sandbox = Sandbox::new();
    sandbox.write("a/a.txt", "some words of the first text. ".repeat(100));
    sandbox.write("b/b.txt", "other words of a second text. ".repeat(100));
    sandbox
        .train_tiny("--max-steps 2 --data-dir a --output-dir run")
        .succeeds();
    sandbox
        .cinch("train --resume run --max-steps 4 --data-dir b")
        .fails(2, &["other data", "run/checkpoints/step-00000002", "hint:"]);
    sandbox
        .cinch("train --resume run --max-steps 4 --set model.d_model=48")
        .fails(2, &["the run in run ", "model.d_model: 32", "48", "hint:"]);
    sandbox.cinch("train --resume run --max-steps 4").succeeds();
}

/// What a flag asks for, what the checkpoint has, and the way out, in one message.
#[test]
fn a_run_does_not_go_on_as_another_one() {
    let sandbox = Sandbox::new();
    sandbox
        .cinch("train --max-steps 2 --output-dir run")
        .succeeds();
    sandbox.write("other.json", "{\"model\": {\"n_layers\": 3}}");
    for (flags, difference, culprit) in [
        (
            "--model-size small",
            "model.size: tiny in the checkpoint, small asked for (--model-size)",
            "--model-size",
        ),
        (
            "--model gpt2",
            "model.type: mamba in the checkpoint, gpt2 asked for (--model)",
            "--model",
        ),
        (
            "--set model.d_model=64",
            "model.d_model: 128 in the checkpoint, 64 asked for (--set)",
            "--set",
        ),
        (
            "--set model.vocab_size=300",
            "model.vocab_size: 257 in the checkpoint, 300 asked for (--set)",
            "--set",
        ),
        (
            "--config other.json",
            "model.n_layers: 4 in the checkpoint, 3 asked for (other.json line 1)",
            "--config",
        ),
        // The tokenizer and the vocabulary do not even go together.
        (
            "--tokenizer gpt2",
            "data.tokenizer: bytes in the checkpoint, gpt2 asked for (--tokenizer)",
            "--tokenizer",
        ),
        (
            "--batch-size 4",
            "effective batch: 8 in the checkpoint, 4 asked for (--batch-size)",
            "--batch-size",
        ),
        (
            "--seq-len 128",
            "vram.max_seq_len: 256 in the checkpoint, 128 asked for (--seq-len)",
            "--seq-len",
        ),
        (
            "--seed 1",
            "training.seed: 42 in the checkpoint, 1 asked for (--seed)",
            "--seed",
        ),
        (
            "--val-split 0.2",
            "data.val_split: 0.05 in the checkpoint, 0.2 asked for (--val-split)",
            "--val-split",
        ),
    ] {
        let hint = format!("hint: leave out {culprit}");
        sandbox
            .cinch(&format!("train --resume run --max-steps 4 {flags}"))
            .fails(
                2,
                &["the run in run ", difference, &hint, "another --output-dir"],
            );
    }
    let mut command = sandbox.command(["train", "--resume", "run"]);
    let output = command.env("CINCH_MODEL_SIZE", "small").output();
    let output = output.expect("the program starts");
    assert_eq!(output.status.code(), Some(2));
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(stderr.contains("the variable CINCH_MODEL_SIZE"), "{stderr}");
    assert_eq!(checkpoints(&sandbox.join("run")), ["step-00000002"]);
}

#[test]
fn a_size_by_name_is_no_shape_of_its_own() {
    let sandbox = Sandbox::new();
    let line = "train --model-size tiny --set model.d_model=16 --set model.n_layers=1 \
                --set model.d_state=4 --tokenizer bytes --batch-size 2 --grad-accum 1 \
                --seq-len 32 --warmup-steps 1";
    sandbox
        .cinch(&format!("{line} --max-steps 2 --output-dir run"))
        .succeeds();
    sandbox
        .cinch("train --resume run --max-steps 4 --model-size small")
        .fails(2, &["model.size: a shape of its own", "small asked for"]);
    // The flags that it began with are no others.
    sandbox
        .cinch(&format!("{line} --max-steps 4 --resume run"))
        .succeeds()
        .says(&["training steps 3 to 4"]);
}

#[test]
fn what_leaves_the_run_the_same_may_change() {
    let sandbox = Sandbox::new();
    sandbox
        .train_tiny("--max-steps 2 --output-dir run")
        .succeeds();
    sandbox
        .cinch(
            "train --resume run --max-steps 4 --save-steps 1 --log-steps 1 --eval-steps 2 \
             --lr 1e-4 --dropout 0.2 --checkpointing full --threads 2 --device cpu \
             --batch-size 1 --grad-accum 4 --vram 1gb --save-total-limit 2",
        )
        .succeeds()
        .prints(&["micro batch 1 × 4, before 2 × 2"])
        .says(&["training steps 3 to 4"]);
}

#[test]
fn a_checkpoint_elsewhere_becomes_the_first_of_a_new_run() {
    let sandbox = Sandbox::new();
    sandbox
        .train_tiny("--max-steps 2 --output-dir first")
        .succeeds();
    let from = "train --resume first/checkpoints/step-00000002 --output-dir second";
    sandbox
        .cinch(from)
        .succeeds()
        .prints(&["checkpoint: second/checkpoints/step-00000002"]);
    sandbox
        .cinch("train --resume second --max-steps 3")
        .succeeds()
        .prints(&["checkpoint: second/checkpoints/step-00000003"]);
    assert_eq!(checkpoints(&sandbox.join("first")), ["step-00000002"]);
}

#[test]
fn a_run_that_diverges_names_the_last_checkpoint() {
    let sandbox = Sandbox::new();
    sandbox
        .train_tiny("--max-steps 6 --save-steps 6 --output-dir run")
        .succeeds();
    let diverged = sandbox
        .cinch(
            "train --resume run --lr 1e6 --max-steps 200 --save-steps 1000 --eval-steps 0 \
             --threads 1",
        )
        .fails(
            1,
            &[
                "diverged",
                "loss at step ",
                "hint: lower training.learning_rate",
            ],
        );
    let path = offered(&diverged.stderr);
    assert_eq!(path, "run/checkpoints/step-00000006");
    // As the hint says, and the record holds nothing of the course that failed.
    sandbox
        .run([
            "train",
            "--resume",
            &path,
            "--lr",
            "1e-3",
            "--max-steps",
            "8",
        ])
        .succeeds();
    let lines = metrics(&sandbox.join("run"));
    let steps: Vec<u64> = lines
        .iter()
        .filter_map(|line| line["step"].as_u64())
        .collect();
    assert!(steps.is_sorted() && steps.last() == Some(&8), "{steps:?}");
}

/// A small file system of its own, gone when dropped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Needs the right to mount, which a test seldom has.
    fn mount(folder: &Path, size: &str) -> Option<Self> {
        fs::create_dir_all(folder).ok()?;
        let options = format!("size={size}");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "tmpfs"])
            .arg(folder)
            .output()
            .is_ok_and(|output| output.status.success());
        mounted.then(|| Self(folder.to_owned()))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).output();
    }
}

#[test]
#[expect(clippy::print_stderr, reason = "a skipped test says so")]
fn a_full_disk_keeps_the_last_checkpoint() {
    let sandbox = Sandbox::new();
    let run = sandbox.join("run");
    let Some(disk) = SmallDisk::mount(&run, "1m") else {
        eprintln!("skipped: cannot mount");
        return;
    };
    let full = sandbox
        .train_tiny("--max-steps 30 --save-steps 3 --save-total-limit 0 --output-dir run")
        .fails(
            1,
            &[
                "the disk is full",
                "run/checkpoints/step-",
                "needs ",
                "are free",
                "the previous checkpoint is untouched: run/checkpoints/step-",
                "hint:",
            ],
        );
    let names = checkpoints(&run);
    assert!(
        !names.is_empty() && names.iter().all(|name| name.starts_with("step-")),
        "{names:?}"
    );
    let newest = names.last().expect("not empty");
    assert!(
        full.stderr
            .contains(&format!("untouched: run/checkpoints/{newest}"))
    );
    // With room made, the run goes on from there.
    for name in &names[..names.len() - 1] {
        fs::remove_dir_all(run.join("checkpoints").join(name)).expect("room");
    }
    sandbox
        .cinch("train --resume run --save-total-limit 1 --threads 1")
        .succeeds()
        .prints(&["run/checkpoints/step-00000030"]);
    drop(disk);
}
