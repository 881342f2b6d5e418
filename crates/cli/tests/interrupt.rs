//! Ctrl-C: the step in progress is finished and saved, and the run goes on later as if it had
//! never stopped.
#![cfg(unix)]

mod common;

use std::fs;
use std::path::Path;
use std::process::Child;
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::{Ran, Sandbox, metrics, signal, tensors, tiny};
use serde_json::Value;

/// Long enough that no machine finishes it between two looks at the metrics.
const RUN: &str = "--max-steps 3000 --save-steps 100000 --eval-steps 0 --log-steps 1 \
                   --save-total-limit 0 --set training.seed=5";

/// Waits until the run has done `steps` steps.
fn wait_for_steps(run: &Path, steps: usize, child: &mut Child) {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
        if text.lines().count() >= steps {
            return;
        }
        let ended = child.try_wait().expect("a child can be asked");
        assert!(ended.is_none(), "the run ended early: {ended:?}");
        assert!(Instant::now() < deadline, "no {steps} steps in 30 s");
        sleep(Duration::from_millis(2));
    }
}

fn finish(sandbox: &Sandbox, child: Child) -> Ran {
    let output = child.wait_with_output().expect("the program ends");
    Ran::new(&sandbox.command([]), &output)
}

#[test]
fn ctrl_c_ends_the_step_and_saves() {
    let sandbox = Sandbox::new();
    let run = sandbox.join("run");
    let line = format!("{RUN} --output-dir run");
    let mut child = sandbox.start(tiny(&line));
    wait_for_steps(&run, 20, &mut child);
    signal(&child, "INT");
    let stopped = finish(&sandbox, child)
        .succeeds()
        .says(&["finishing the step, then saving"])
        .prints(&["stopped; go on with: cinch train --resume run"]);

    let steps = metrics(&run).len() as u64;
    assert!((20..3000).contains(&steps), "stopped after {steps}");
    let saved = format!("checkpoint: run/checkpoints/step-{steps:08}");
    stopped.prints(&[&saved]);
    for file in ["state.json", "checksums.json"] {
        let path = run.join(format!("checkpoints/step-{steps:08}/{file}"));
        let text = fs::read(&path).expect("a whole checkpoint");
        serde_json::from_slice::<Value>(&text).expect("JSON");
    }

    // A shorter end than first asked for, so that the test is short too.
    let end = steps + 15;
    sandbox
        .cinch(&format!("train --resume run --max-steps {end} --threads 1"))
        .succeeds()
        .says(&[&format!("training steps {} to {end}", steps + 1)]);
    assert_eq!(metrics(&run).len() as u64, end);
}

#[test]
fn an_interrupted_and_resumed_run_equals_an_uninterrupted_one() {
    let sandbox = Sandbox::new();
    let run = "--max-steps 400 --save-steps 150 --eval-steps 100 --log-steps 1 --output-dir";
    sandbox.train_tiny(&format!("{run} whole")).succeeds();
    let line = format!("{run} parts");
    let parts = sandbox.join("parts");
    let mut child = sandbox.start(tiny(&line));
    wait_for_steps(&parts, 30, &mut child);
    signal(&child, "INT");
    finish(&sandbox, child)
        .succeeds()
        .prints(&["--resume parts"]);
    sandbox
        .cinch("train --resume parts --threads 1")
        .succeeds()
        .prints(&["checkpoint: parts/checkpoints/step-00000400"]);
    let whole = sandbox.join("whole");
    assert_eq!(tensors(&whole, 400), tensors(&parts, 400));
    // The record reads as if nothing had happened, but for the speed.
    let record = |run: &Path| -> Vec<Value> {
        let mut lines = metrics(run);
        for line in &mut lines {
            let fields = line.as_object_mut().expect("an object");
            fields.remove("tokens_per_second");
        }
        lines
    };
    assert_eq!(record(&whole), record(&parts));
}

#[test]
fn a_run_stopped_before_its_first_step_offers_nothing_to_resume() {
    let sandbox = Sandbox::new();
    // The evaluation of 300 batches before the first step leaves time to stop.
    let line = "--max-steps 5 --eval-steps 5 --set training.eval_batches=100000 \
                --set data.val_split=0.9 --set model.d_model=64 --output-dir run";
    let mut child = sandbox.start(tiny(line));
    wait_for_folder(&sandbox.join("run/tensorboard"), &mut child);
    signal(&child, "INT");
    let stopped = finish(&sandbox, child)
        .succeeds()
        .prints(&["stopped before the first step"]);
    assert!(!stopped.stdout.contains("--resume"), "{}", stopped.stdout);
    sandbox
        .cinch("train --resume run")
        .fails(2, &["run", "no checkpoint", "hint:", "without --resume"]);
    // As the hint says.
    sandbox
        .train_tiny("--max-steps 5 --output-dir run")
        .succeeds();
}

fn wait_for_folder(folder: &Path, child: &mut Child) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !folder.exists() {
        let ended = child.try_wait().expect("a child can be asked");
        assert!(ended.is_none(), "the run ended early: {ended:?}");
        assert!(Instant::now() < deadline, "the run does not begin");
        sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_second_ctrl_c_ends_at_once() {
    let sandbox = Sandbox::new();
    // One step takes many seconds, and is in progress half a second after the folder is made.
    let line = "train --model-size tiny --seq-len 256 --batch-size 8 --grad-accum 400 \
                --max-steps 2 --eval-steps 0 --threads 1 --output-dir run";
    let mut child = sandbox.start(line.split_whitespace());
    wait_for_folder(&sandbox.join("run/tensorboard"), &mut child);
    sleep(Duration::from_millis(500));
    signal(&child, "INT");
    sleep(Duration::from_millis(100));
    signal(&child, "INT");
    let begun = Instant::now();
    let ended = finish(&sandbox, child);
    assert_eq!(ended.code, Some(130), "{}", ended.stderr);
    assert!(begun.elapsed() < Duration::from_secs(3));
}
