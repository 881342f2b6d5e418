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

/// Whether there is something to resume, judged from outside by the name alone.
fn has_checkpoint(run: &Path) -> bool {
    run.join("checkpoints").is_dir()
        && checkpoints(run)
            .iter()
            .any(|name| name.starts_with("step-"))
}
