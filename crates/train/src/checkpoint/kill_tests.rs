//! The promise of the module, tested by breaking processes: a child saves and prunes without
//! pause, is killed at an arbitrary moment, and what it leaves must be whole.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use serde_json::json;

use super::{Dtype, Store, TensorView, folder, load, verify};

const RUN_VARIABLE: &str = "CINCH_KILL_TEST_RUN";

/// The child's part. Without the variable, as in an ordinary test run, there is nothing to do.
#[test]
fn child_saves_until_killed() {
    let Ok(run) = env::var(RUN_VARIABLE) else {
        return;
    };
    let store = Store::open(&run).unwrap();
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

#[test]
fn a_process_killed_at_any_moment_leaves_whole_checkpoints_or_none() {
    let run = tempfile::tempdir().unwrap();
    // The test's own name, as the test runner of this very binary knows it.
    let (_, module) = module_path!().split_once("::").unwrap();
    let child_test = format!("{module}::child_saves_until_killed");
    let mut newest = 0;
    for round in 0..20_u64 {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", &child_test])
            .env(RUN_VARIABLE, run.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        wait_for_activity(run.path(), newest);
        thread::sleep(Duration::from_micros(700 * round));
        child.kill().unwrap();
        child.wait().unwrap();

        let store = Store::open(run.path()).unwrap();
        let entries = store.list().unwrap();
        for entry in &entries {
            verify(&entry.path).unwrap();
            let loaded = load(&entry.path).unwrap();
            assert_eq!(loaded.state["step"], entry.step);
            let weight = loaded.model.get("w").unwrap();
            let bytes = loaded.model.read(&weight).unwrap();
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
        assert!(now >= newest, "step {newest} was lost");
        newest = now;
    }
    assert!(newest >= 20, "the children must have saved: {newest}");
}

/// Returns once the child has finished a save beyond `newest`, so that the kill hits its work and
/// not its start.
fn wait_for_activity(run: &Path, newest: u64) {
    let deadline = Instant::now() + Duration::from_secs(10);
    let has_saved = || {
        folder::steps_in(&run.join("checkpoints"))
            .is_ok_and(|steps| steps.last().is_some_and(|(step, _)| *step > newest))
    };
    while !has_saved() && Instant::now() < deadline {
        thread::sleep(Duration::from_micros(200));
    }
}
