//! The promise of checkpoints, tested by breaking processes: a child saves and prunes without
//! pause, is killed at an arbitrary moment, and what it leaves must be whole.
//!
//! A program of its own, because it starts itself again as the child.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use cinch_train::checkpoint::{Dtype, Store, TensorView, load, verify};
use serde_json::json;

/// Set for the child: the run folder.
const RUN_VARIABLE: &str = "CINCH_KILL_TEST_RUN";
const ROUNDS: u64 = 20;
/// Only ends the wait for a child that never saves.
const HANG: Duration = Duration::from_secs(300);

fn main() {
    match env::var_os(RUN_VARIABLE) {
        Some(run) => save_until_killed(Path::new(&run)),
        None => a_process_killed_at_any_moment_leaves_whole_checkpoints_or_none(),
    }
}

fn save_until_killed(run: &Path) {
    let store = Store::open(run).unwrap();
    let first = store.newest().unwrap().map_or(1, |entry| entry.step + 1);
    for step in first.. {
        save(&store, step);
        store.mark_best(step - step % 3, 1.0).ok();
        store.prune(2).unwrap();
    }
}

fn save(store: &Store, step: u64) {
    let weights = vec![step as u8; 300_000];
    let tensor = |name| TensorView {
        name,
        shape: &[75_000],
        dtype: Dtype::F32,
        bytes: &weights,
    };
    let state = json!({ "step": step });
    store
        .save(step, &[tensor("w")], &[tensor("m"), tensor("v")], &state)
        .unwrap();
}

fn a_process_killed_at_any_moment_leaves_whole_checkpoints_or_none() {
    let run = tempfile::tempdir().unwrap();
    let mut newest = 0;
    for round in 0..ROUNDS {
        let mut child = Command::new(env::current_exe().unwrap())
            .env(RUN_VARIABLE, run.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        wait_for_activity(run.path(), newest, &mut child);
        // Another place in the child's work each time; which one does not matter.
        thread::sleep(Duration::from_micros(700 * round));
        child.kill().unwrap();
        child.wait().unwrap();

        let store = Store::open(run.path()).unwrap();
        let entries = store.list().unwrap();
        for entry in &entries {
            verify(&entry.path).unwrap();
            let loaded = load(&entry.path).unwrap();
            assert_eq!(loaded.state["step"], entry.step);
            let weight = loaded.model.tensor("w").unwrap();
            let mut bytes = vec![0; weight.num_bytes() as usize];
            loaded
                .model
                .read("w", 0..weight.rows(), &mut bytes)
                .unwrap();
            assert!(bytes.iter().all(|&byte| byte == entry.step as u8));
        }
        // Nothing but complete checkpoints and the mark: every step folder is whole, and the
        // dead child's leftovers went when the store was opened.
        for child in fs::read_dir(store.folder()).unwrap() {
            let name = child.unwrap().file_name().into_string().unwrap();
            assert!(
                name == "best.json" || entries.iter().any(|entry| entry.path.ends_with(&name)),
                "left over: {name}"
            );
        }
        let now = entries.last().map_or(0, |entry| entry.step);
        assert!(now > newest, "step {newest} was lost, or none was saved");
        newest = now;
    }
}

/// Returns once the child has finished a save beyond `newest`, so that the kill hits its work and
/// not its start.
fn wait_for_activity(run: &Path, newest: u64, child: &mut Child) {
    let deadline = Instant::now() + HANG;
    let has_saved = || {
        let entries = fs::read_dir(run.join("checkpoints"));
        let mut names = entries.into_iter().flatten().flatten();
        names.any(|entry| {
            let name = entry.file_name();
            let step = name.to_str().and_then(|name| name.strip_prefix("step-"));
            step.and_then(|step| step.parse::<u64>().ok())
                .is_some_and(|step| step > newest)
        })
    };
    while !has_saved() {
        assert!(child.try_wait().unwrap().is_none(), "the child ended");
        assert!(Instant::now() < deadline, "the child does not save");
        thread::sleep(Duration::from_micros(200));
    }
}
