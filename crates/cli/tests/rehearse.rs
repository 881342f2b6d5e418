//! `cinch rehearse`: what passes through, what is refused, and that nothing stays behind. Scripts of PyTorch are rehearsed
//! by `benchmarks/rehearse.py`.
#![cfg(target_os = "linux")]

mod common;

use std::fs;
use std::path::Path;

use common::{Ran, Sandbox};
use serde_json::Value;

/// Rehearses a line of the shell.
fn rehearse(sandbox: &Sandbox, flags: &str, script: &str) -> Ran {
    let line = format!("rehearse --gpu H200 {flags} --");
    let arguments = line.split_whitespace().chain(["sh", "-c", script]);
    let ran = sandbox.run(arguments);
    let left: Vec<_> = fs::read_dir(sandbox.path().parent().unwrap().join("cache"))
        .map(|entries| entries.flatten().map(|entry| entry.file_name()).collect())
        .unwrap_or_default();
    let left: Vec<_> = left
        .iter()
        .filter(|name| name.to_string_lossy().starts_with("rehearsal-"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
    ran
}

#[test]
fn output_and_exit_code_pass_through() {
    let sandbox = Sandbox::new();
    let ran = rehearse(&sandbox, "", "echo out; exit 0").succeeds();
    assert_eq!(ran.stdout, "out\n");
    assert!(
        ran.stderr.contains("nothing to tell of the script"),
        "{}",
        ran.stderr
    );
    assert_eq!(rehearse(&sandbox, "", "exit 7").code, Some(7));
    assert_eq!(rehearse(&sandbox, "", "kill -SEGV $$").code, Some(139));
}

#[test]
fn underscores_and_negative_numbers_of_the_script_stay_its_own() {
    let sandbox = Sandbox::new();
    let ran = sandbox.run([
        "rehearse",
        "--gpu",
        "H200",
        "--",
        "echo",
        "--learning_rate",
        "-3",
        "--",
        "-1",
    ]);
    assert_eq!(ran.succeeds().stdout, "--learning_rate -3 -- -1\n");
}

#[test]
fn the_script_finds_the_card_in_its_environment() {
    let sandbox = Sandbox::new();
    let script =
        "echo $CINCH_CARD; test -f $LD_PRELOAD && test -f $CINCH_REHEARSAL/python/sitecustomize.py";
    let ran = rehearse(&sandbox, "--world 16 --rank 9 --until-step 3", script).succeeds();
    assert!(ran.stdout.contains("name=NVIDIA H200;"), "{}", ran.stdout);
    assert!(
        ran.stdout
            .contains("major=9;minor=0;multiprocessors=132;devices=8;"),
        "{}",
        ran.stdout
    );
    let script = "echo $RANK $WORLD_SIZE $LOCAL_RANK $CINCH_REHEARSAL_UNTIL";
    let ran = rehearse(&sandbox, "--world 16 --rank 9 --until-step 3", script).succeeds();
    assert_eq!(ran.stdout, "9 16 1 3\n");
}

#[test]
fn a_script_that_hangs_is_ended_with_its_children() {
    let sandbox = Sandbox::new();
    let script = "trap '' INT TERM; sleep 600 & echo $!; wait; sleep 600";
    let ran = rehearse(&sandbox, "--timeout 1", script);
    assert_eq!(ran.code, Some(124), "{}", ran.stderr);
    let child = ran.stdout.trim().parse::<u32>().unwrap();
    assert!(!is_running(child));
}

#[test]
fn what_a_script_leaves_running_ends_with_it() {
    let sandbox = Sandbox::new();
    let ran = rehearse(&sandbox, "", "sleep 600 >/dev/null 2>&1 & echo $!").succeeds();
    assert!(!is_running(ran.stdout.trim().parse().unwrap()));
}

/// A process that ended may still have its name, until somebody asks how it ended.
fn is_running(process: u32) -> bool {
    let state = fs::read_to_string(Path::new("/proc").join(process.to_string()).join("stat"));
    state.is_ok_and(|state| !state.contains(") Z "))
}

#[test]
fn a_report_is_written_however_the_script_ends() {
    let sandbox = Sandbox::new();
    assert_eq!(
        rehearse(&sandbox, "--report r.json", "exit 3").code,
        Some(3)
    );
    let report: Value = serde_json::from_slice(&fs::read(sandbox.join("r.json")).unwrap()).unwrap();
    assert_eq!(report["card"]["name"], "H200");
    assert_eq!(report["certain"], false);
    assert_eq!(report["fits"], false);
    assert_eq!(report["ended"]["code"], 3);
    assert_eq!(report["memory"]["device_bytes"], 0);
}

#[test]
fn what_cannot_be_rehearsed_is_refused() {
    let sandbox = Sandbox::new();
    for (line, words) in [
        ("rehearse --gpu H200", "COMMAND"),
        ("rehearse --gpu GTX1 -- true", "GTX1"),
        ("rehearse --gpu MI300X -- true", "no CUDA"),
        ("rehearse --gpu H200 --rank 1 -- true", "--world"),
        ("rehearse --gpu H200 --world 4 --rank 4 -- true", "--rank 4"),
        (
            "rehearse --gpu H200 --fit lr=--lr -- true",
            "hint: batch_size=--batch-size",
        ),
        (
            "rehearse --gpu H200 -- no-such-program-here",
            "no-such-program-here",
        ),
    ] {
        sandbox.cinch(line).fails(2, &[words]);
    }
}
