//! `kill -9` at any moment: what is on disk is whole, and the resumed run ends with the same
//! bytes as one that was never killed.
#![cfg(unix)]

mod common;

use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use common::{Sandbox, checkpoints, record, tensors, tiny};

const REPETITIONS: u64 = 20;
/// Kills of one run, after which it is left alone: a machine so slow that no checkpoint is
/// reached before the next kill must not make the test endless.
const KILLS: u32 = 4;
const STEPS: u64 = 48;
const RUN: &str = "--max-steps 48 --save-steps 3 --eval-steps 8 --log-steps 1 \
                   --save-total-limit 2 --set training.eval_batches=2 --set model.d_model=64 \
                   --output-dir";

/// A stream of numbers that is the same in every run of the test (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % limit
    }
}

/// Starts the program, kills it after `delay` and says whether it was still running.
fn killed(sandbox: &Sandbox, arguments: &[&str], delay: Duration) -> bool {
    let mut child = sandbox.start(arguments.iter().copied());
    sleep(delay);
    let running = child.try_wait().expect("a child can be asked").is_none();
    child.kill().expect("a child of ours can be killed");
    child.wait().expect("it ends");
    running
}

#[test]
fn a_killed_run_ends_with_the_same_bytes() {
    let sandbox = Sandbox::new();
    let whole = sandbox.join("whole");
    sandbox.train_tiny(&format!("{RUN} whole")).succeeds();
    let best = |run: &Path| std::fs::read(run.join("checkpoints/best.json")).expect("a best");
    let expected = (
        tensors(&whole, STEPS),
        record(&whole),
        (checkpoints(&whole), best(&whole)),
    );

    let mut random = Random(2026);
    let mut resumed = 0;
    for repetition in 0..REPETITIONS {
        let name = format!("run-{repetition}");
        let run = sandbox.join(&name);
        let line = format!("{RUN} {name}");
        let fresh = tiny(&line);
        let resume = ["train", "--resume", &name, "--threads", "1"];
        let mut delays = Vec::new();
        // The first kill must hit, later ones may come too late.
        let mut limit = 400;
        while delays.is_empty() || (delays.len() as u32) < KILLS && random.below(2) == 0 {
            let delay = 5 + random.below(limit);
            let arguments = if has_checkpoint(&run) {
                &resume[..]
            } else {
                &fresh[..]
            };
            if killed(&sandbox, arguments, Duration::from_millis(delay)) {
                delays.push(delay);
            } else if delays.is_empty() {
                std::fs::remove_dir_all(&run).expect("a finished run can be removed");
                limit = (limit / 2).max(1);
            } else {
                break;
            }
        }
        let context = format!("{name}, killed after {delays:?} ms (seed 2026)");
        if !has_checkpoint(&run) {
            // Too early for a checkpoint: the answer is what to do, and doing it works.
            let early = sandbox.run(resume);
            assert_eq!(early.code, Some(2), "{context}: {}", early.stderr);
            assert!(
                early.stderr.contains("hint:"),
                "{context}: {}",
                early.stderr
            );
            sandbox.run(fresh).succeeds();
        } else {
            sandbox.run(resume).succeeds();
            resumed += 1;
        }
        assert!(
            expected.0 == tensors(&run, STEPS),
            "other weights or states: {context}"
        );
        assert_eq!(expected.1, record(&run), "{context}");
        // Neither unfinished saves nor unfinished removals are left.
        assert_eq!(expected.2, (checkpoints(&run), best(&run)), "{context}");
    }
    assert!(resumed > 0, "every kill came before the first checkpoint");
}

/// A kill right after a save, before older checkpoints were removed and the new one was marked as
/// the best, leaves what the resumed run removes and marks.
#[test]
fn what_a_save_had_yet_to_remove_is_removed_by_the_resumed_run() {
    let sandbox = Sandbox::new();
    sandbox.train_tiny(&format!("{RUN} whole")).succeeds();
    let whole = sandbox.join("whole");
    let expected = checkpoints(&whole);
    let marked = std::fs::read_to_string(whole.join("checkpoints/best.json")).unwrap();
    assert!(marked.contains("\"step\":48"), "{marked}");
    assert!(
        !expected.contains(&"step-00000042".to_owned()),
        "{expected:?}"
    );
    // As it was between the two: one more checkpoint, and the mark of the best before.
    let from = whole.join("checkpoints/step-00000045");
    let old = whole.join("checkpoints/step-00000042");
    std::fs::create_dir(&old).unwrap();
    for file in std::fs::read_dir(&from).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), old.join(file.file_name())).unwrap();
    }
    let earlier = marked.replace("\"step\":48", "\"step\":40");
    std::fs::write(whole.join("checkpoints/best.json"), earlier).unwrap();
    sandbox
        .run(["train", "--resume", "whole", "--threads", "1"])
        .succeeds();
    assert_eq!(checkpoints(&whole), expected);
    let again = std::fs::read_to_string(whole.join("checkpoints/best.json")).unwrap();
    assert_eq!(again, marked);
}

/// Whether there is something to resume, judged from outside by the name alone.
fn has_checkpoint(run: &Path) -> bool {
    run.join("checkpoints").is_dir()
        && checkpoints(run)
            .iter()
            .any(|name| name.starts_with("step-"))
}
