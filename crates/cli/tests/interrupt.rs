//! Ctrl-C: the micro batch in progress is finished and the last whole step saved, and the run
//! goes on later as if it had never stopped.
#![cfg(unix)]

mod common;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Child;
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::{Ran, Sandbox, metrics, record, signal, tensors, tiny};
use serde_json::Value;

/// Long enough that no machine finishes it between two looks at the metrics.
const RUN: &str = "--max-steps 3000 --save-steps 100000 --eval-steps 0 --log-steps 1 \
                   --save-total-limit 0 --set training.seed=5";

/// Waits until the run has done `steps` steps.
fn wait_for_steps(run: &Path, steps: usize, child: &mut Child) {
    let deadline = Instant::now() + Duration::from_secs(300);
    loop {
        let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
        if text.lines().count() >= steps {
            return;
        }
        let ended = child.try_wait().expect("a child can be asked");
        assert!(ended.is_none(), "the run ended early: {ended:?}");
        assert!(Instant::now() < deadline, "no {steps} steps in 300 s");
        sleep(Duration::from_millis(2));
    }
}

/// Waits until the run says something that begins so.
fn wait_for_line(lines: &mut impl BufRead, beginning: &str) {
    let mut line = String::new();
    while !line.starts_with(beginning) {
        line.clear();
        let read = lines.read_line(&mut line).expect("a line");
        assert!(read > 0, "the run ended early");
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
        .exits(130)
        .says(&["stopping: the last whole step is saved"])
        .prints(&["; go on with: cinch train --resume run"]);

    let steps = metrics(&run).len() as u64;
    assert!((20..3000).contains(&steps), "stopped after {steps}");
    let saved = format!("checkpoint: run/checkpoints/step-{steps:08}");
    let stopped = stopped.prints(&[&saved, &format!("stopped after step {steps} of 3000")]);
    assert!(!stopped.stderr.contains("error"), "{}", stopped.stderr);
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
        .exits(130)
        .prints(&["--resume parts"]);
    sandbox
        .cinch("train --resume parts --threads 1")
        .succeeds()
        .prints(&["checkpoint: parts/checkpoints/step-00000400"]);
    let whole = sandbox.join("whole");
    assert_eq!(tensors(&whole, 400), tensors(&parts, 400));
    // The record reads as if nothing had happened, but for the speed.
    assert_eq!(record(&whole), record(&parts));
}

#[test]
fn a_run_stopped_before_its_first_step_offers_nothing_to_resume() {
    let sandbox = Sandbox::new();
    // The evaluation of all batches before the first step leaves time to stop.
    let line = "--max-steps 5 --eval-steps 5 --set training.eval_batches=100000 \
                --set data.val_split=0.9 --set model.d_model=64 --output-dir run";
    let mut child = sandbox.start(tiny(line));
    let mut said = BufReader::new(child.stderr.take().expect("a pipe"));
    wait_for_line(&mut said, "training steps");
    signal(&child, "TERM");
    let stopped = finish(&sandbox, child)
        .exits(130)
        .prints(&["stopped before the first step"]);
    assert!(!stopped.stdout.contains("--resume"), "{}", stopped.stdout);
    // Neither was measured.
    assert!(!stopped.stdout.contains("loss"), "{}", stopped.stdout);
    sandbox
        .cinch("train --resume run")
        .fails(2, &["run", "no checkpoint", "hint:", "without --resume"]);
    // As the hint says.
    sandbox
        .train_tiny("--max-steps 5 --output-dir run")
        .succeeds();
}

/// A step of many micro batches, each of which takes some milliseconds.
const LONG_STEPS: &str = "train --model-size tiny --tokenizer bytes --seq-len 64 --batch-size 2 \
                          --grad-accum 100 --warmup-steps 1 --max-steps 3 --eval-steps 0 \
                          --log-steps 1 --threads 1 --output-dir";

#[test]
fn a_step_is_cut_off_between_micro_batches_and_comes_again() {
    let sandbox = Sandbox::new();
    sandbox.cinch(&format!("{LONG_STEPS} whole")).succeeds();
    let line = format!("{LONG_STEPS} parts");
    let mut child = sandbox.start(line.split_whitespace());
    let parts = sandbox.join("parts");
    wait_for_steps(&parts, 1, &mut child);
    // In the second step, of which a hundred micro batches are left: a run that ended its step
    // would say that it stopped after the second.
    signal(&child, "INT");
    finish(&sandbox, child)
        .exits(130)
        .prints(&["stopped after step 1 of 3", "--resume parts"]);
    sandbox
        .cinch("train --resume parts --threads 1")
        .succeeds()
        .says(&["training steps 2 to 3"]);
    let whole = sandbox.join("whole");
    assert_eq!(tensors(&whole, 3), tensors(&parts, 3));
    assert_eq!(record(&whole), record(&parts));
}

#[test]
fn an_evaluation_that_is_cut_off_comes_again() {
    let sandbox = Sandbox::new();
    // One step in a few milliseconds, then many batches of validation.
    let run = "--max-steps 2 --eval-steps 1 --log-steps 1 --set training.eval_batches=100000 \
               --set data.val_split=0.5 --set model.d_model=64 --output-dir";
    sandbox.train_tiny(&format!("{run} whole")).succeeds();
    let line = format!("{run} parts");
    let mut child = sandbox.start(tiny(&line));
    let parts = sandbox.join("parts");
    // The evaluation before the first step, and that step.
    wait_for_steps(&parts, 2, &mut child);
    signal(&child, "INT");
    finish(&sandbox, child)
        .exits(130)
        .prints(&["stopped after step 1 of 2", "validation loss"]);
    assert_eq!(metrics(&parts).len(), 2, "the evaluation was cut off");
    sandbox.cinch("train --resume parts --threads 1").succeeds();
    let whole = sandbox.join("whole");
    assert_eq!(tensors(&whole, 2), tensors(&parts, 2));
    assert_eq!(record(&whole), record(&parts));
    let best = |run: &Path| fs::read(run.join("checkpoints/best.json")).expect("a best");
    assert_eq!(best(&whole), best(&parts));
}

#[test]
fn losses_that_were_not_measured_are_not_told() {
    let sandbox = Sandbox::new();
    // The next evaluation would be long after the signal.
    let line = "--max-steps 3000 --eval-steps 2000 --log-steps 1 --output-dir run";
    let mut child = sandbox.start(tiny(line));
    wait_for_steps(&sandbox.join("run"), 10, &mut child);
    signal(&child, "INT");
    let stopped = finish(&sandbox, child)
        .exits(130)
        .prints(&["validation loss ", " before\n"]);
    for word in ["before,", " after "] {
        let told = stopped.stdout.lines().filter(|line| line.contains("loss"));
        assert!(
            told.clone().all(|line| !line.contains(word)),
            "{}",
            stopped.stdout
        );
    }
}

#[test]
fn data_that_is_being_prepared_can_be_interrupted() {
    let sandbox = Sandbox::new();
    sandbox.write(
        "data/a.txt",
        "some words of a long text\n".repeat(2_000_000),
    );
    let line = "train --model-size tiny --tokenizer gpt2 --set model.vocab_size=50257 \
                --data-dir data --cache-dir cache --max-steps 5 --output-dir run";
    let mut child = sandbox.start(line.split_whitespace());
    let cached = || fs::read_dir(sandbox.join("cache")).map_or(0, Iterator::count);
    let deadline = Instant::now() + Duration::from_secs(300);
    while cached() == 0 {
        let ended = child.try_wait().expect("a child can be asked");
        assert!(ended.is_none(), "the run ended early: {ended:?}");
        assert!(Instant::now() < deadline, "no data is prepared");
        sleep(Duration::from_millis(1));
    }
    signal(&child, "INT");
    finish(&sandbox, child)
        .exits(130)
        .says(&["stopped while the data was prepared"]);
    assert_eq!(cached(), 0, "what was begun is removed");
}

/// The first signal can arrive before the micro batch begins and is then answered at once; so it
/// is tried again until the second one has something to end.
#[test]
fn a_second_ctrl_c_ends_at_once() {
    let ended_by_the_second = (0..5).any(|_| {
        let sandbox = Sandbox::new();
        // One micro batch takes seconds, so that the first signal is not answered at once.
        let line = "train --model-size tiny --set model.max_seq_len=4096 --seq-len 4096 \
                    --batch-size 32 --grad-accum 2 --max-steps 2 --eval-steps 0 --threads 1 \
                    --output-dir run";
        let mut child = sandbox.start(line.split_whitespace());
        let mut said = BufReader::new(child.stderr.take().expect("a pipe"));
        wait_for_line(&mut said, "training steps");
        signal(&child, "INT");
        // The second signal is told from the first once that was heard.
        wait_for_line(&mut said, "stopping");
        signal(&child, "INT");
        let ended = finish(&sandbox, child);
        assert_eq!(ended.code, Some(130), "{}", ended.stderr);
        // The first would have had something to say.
        !ended.stdout.contains("stopped")
    });
    assert!(ended_by_the_second);
}
