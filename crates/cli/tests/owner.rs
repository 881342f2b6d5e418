//! A run folder that is in use: a second run in it is refused and the first loses nothing.
#![cfg(unix)]

mod common;

use std::fs;
use std::process::Child;
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::{Sandbox, checkpoints, metrics, signal};

/// Ends by a signal alone.
const RUN: &str = "train --model mamba --model-size tiny --set model.d_model=16 \
                   --set model.n_layers=1 --set model.d_state=4 --tokenizer bytes \
                   --batch-size 2 --grad-accum 1 --seq-len 32 --warmup-steps 5 --threads 1 \
                   --max-steps 100000 --save-steps 20 --eval-steps 0 --log-steps 1 \
                   --output-dir run";

/// A run that is killed with the test.
struct Live(Child);

impl Live {
    /// Starts the run and waits for its first checkpoint.
    fn start(sandbox: &Sandbox) -> Self {
        let mut live = Self(sandbox.start(RUN.split_whitespace()));
        let deadline = Instant::now() + Duration::from_secs(300);
        let first = sandbox.join("run/checkpoints");
        while fs::read_dir(&first).map_or(0, Iterator::count) == 0 {
            let ended = live.0.try_wait().expect("a child can be asked");
            assert!(ended.is_none(), "the run ended early: {ended:?}");
            assert!(Instant::now() < deadline, "no checkpoint in 300 s");
            sleep(Duration::from_millis(2));
        }
        // A checkpoint under construction is followed by a whole one.
        while !checkpoints(&sandbox.join("run"))
            .iter()
            .any(|name| name.starts_with("step-"))
        {
            assert!(Instant::now() < deadline, "no checkpoint in 300 s");
            sleep(Duration::from_millis(2));
        }
        live
    }

    fn stop(mut self, name: &str) {
        signal(&self.0, name);
        self.0.wait().expect("the program ends");
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_second_run_in_a_folder_that_is_in_use_is_refused() {
    let sandbox = Sandbox::new();
    let live = Live::start(&sandbox);
    let process = format!("process {} on ", live.0.id());
    let stop = format!("kill {}", live.0.id());
    let parts = ["run is in use", &process, &stop, "hint:", "--output-dir"];
    sandbox.cinch(RUN).fails(2, &parts);
    sandbox.cinch("train --resume run").fails(2, &parts);
    live.stop("TERM");
    // Each step has its line: nobody else wrote into the record.
    let steps: Vec<u64> = metrics(&sandbox.join("run"))
        .iter()
        .filter_map(|line| line["step"].as_u64())
        .collect();
    assert!((1..).zip(&steps).all(|(want, &step)| want == step));
}

#[test]
fn a_killed_run_leaves_its_folder_to_the_next() {
    let sandbox = Sandbox::new();
    Live::start(&sandbox).stop("KILL");
    let text = fs::read_to_string(sandbox.join("run/owner.lock")).expect("a name");
    assert!(text.contains("\"process\""), "{text}");
    let names = checkpoints(&sandbox.join("run"));
    let steps = names.iter().filter_map(|name| name.strip_prefix("step-"));
    let newest = steps.filter_map(|step| step.parse::<u64>().ok()).max();
    let last = newest.expect("a checkpoint") + 2;
    sandbox
        .cinch(&format!("train --resume run --max-steps {last}"))
        .succeeds();
    // Who ended by itself owns nothing.
    assert_eq!(
        fs::read(sandbox.join("run/owner.lock")).expect("a file"),
        b""
    );
}
