//! `cinch rehearse`: what passes through, what is refused, and that nothing stays behind. Scripts of PyTorch are rehearsed
//! by `benchmarks/rehearse.py`.
#![cfg(target_os = "linux")]

mod common;

use std::fs;
use std::path::Path;
use std::time::Duration;

use common::{Ran, Sandbox};
use rustix::process::{Pid, Signal, kill_process};
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
fn a_command_that_does_not_start_is_told_with_the_way_out() {
    let sandbox = Sandbox::new();
    let told = |program: &str, rest: &[&str]| {
        let line = ["rehearse", "--gpu", "H200", "--", program];
        let ran = sandbox.run(line.iter().chain(rest).copied());
        assert_eq!(ran.code, Some(2), "{}", ran.stderr);
        ran.stderr
    };
    let missing = told("no-such-python", &["train.py"]);
    assert!(
        missing.contains("cannot start `no-such-python`"),
        "{missing}"
    );
    assert!(missing.contains("hint: name the Python"), "{missing}");
    fs::write(sandbox.path().join("train.py"), "").unwrap();
    let script = told("./train.py", &["--batch", "8"]);
    assert!(
        script
            .contains("hint: a script is started by its Python: `-- python ./train.py --batch 8`"),
        "{script}"
    );
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

#[test]
fn what_leaves_the_scripts_group_ends_with_it() {
    let sandbox = Sandbox::new();
    // The second is a child of one that has ended, in a session of its own.
    let script = "setsid sleep 600 >/dev/null 2>&1 & echo $!; \
                  (setsid sh -c 'sleep 600 & echo $! > part; mv part whole; wait' >/dev/null 2>&1 &); \
                  until test -f whole; do :; done; cat whole";
    let ran = rehearse(&sandbox, "", script).succeeds();
    let children: Vec<u32> = ran
        .stdout
        .lines()
        .map(|line| line.parse().unwrap())
        .collect();
    assert_eq!(children.len(), 2, "{}", ran.stdout);
    for child in children {
        assert!(!is_running(child), "{child}");
    }
}

#[test]
fn an_interrupted_script_is_ended_though_it_does_not_listen() {
    let sandbox = Sandbox::new();
    let script = "trap '' INT TERM; echo $$ > ready; while true; do sleep 1; done";
    let arguments = [
        "rehearse", "--gpu", "H200", "--report", "r.json", "--", "sh", "-c", script,
    ];
    let mut cinch = sandbox.start(arguments);
    let ready = sandbox.join("ready");
    let child = loop {
        let text = fs::read_to_string(&ready).unwrap_or_default();
        match text.trim().parse::<u32>() {
            Ok(child) => break child,
            Err(_) => assert!(cinch.try_wait().unwrap().is_none(), "it ended before"),
        }
    };
    let process = Pid::from_child(&cinch);
    // Once asks the script, twice ends it.
    kill_process(process, Signal::INT).unwrap();
    while cinch.try_wait().unwrap().is_none() {
        // Signals without a pause would leave it no time for anything else.
        std::thread::sleep(Duration::from_millis(20));
        let _ = kill_process(process, Signal::INT);
    }
    assert_eq!(cinch.wait().unwrap().code(), Some(130));
    assert!(!is_running(child));
    let report: Value = serde_json::from_slice(&fs::read(sandbox.join("r.json")).unwrap()).unwrap();
    assert_eq!(report["ended"], "interrupted");
}

/// As `timeout` sends them, to the process and to its group: the script has the time of one.
#[test]
fn two_signals_at_once_ask_the_script_once() {
    let sandbox = Sandbox::new();
    let script =
        "trap 'sleep 0.6; echo > done; exit 0' INT; echo > ready; while :; do sleep 0.05; done";
    let mut cinch = sandbox.start(["rehearse", "--gpu", "H200", "--", "sh", "-c", script]);
    while !sandbox.join("ready").exists() {
        assert!(cinch.try_wait().unwrap().is_none(), "it ended before");
    }
    let process = Pid::from_child(&cinch);
    for _ in 0..2 {
        kill_process(process, Signal::INT).unwrap();
        std::thread::sleep(Duration::from_millis(40));
    }
    assert_eq!(cinch.wait().unwrap().code(), Some(130));
    assert!(sandbox.join("done").exists());
}

#[test]
fn the_largest_batch_is_looked_for_in_a_copy_of_a_file() {
    let sandbox = Sandbox::new();
    let text = "batch: 4\naccumulation: 2\n";
    sandbox.write("c.yaml", text);
    let fit = "batch_size=c.yaml:batch,accumulation=c.yaml:accumulation";
    let script = [
        "sh",
        "-c",
        "cat $1; grep -q 'batch: [12]$' $1",
        "sh",
        "c.yaml",
    ];
    let arguments = ["rehearse", "--gpu", "H200", "--fit", fit, "--"];
    // The script fails for a reason of its own: that is told, and what was tried.
    let ran = sandbox.run(arguments.into_iter().chain(script));
    assert_eq!(ran.stdout, text);
    ran.fails(
        2,
        &[
            "c.yaml:batch 4 c.yaml:accumulation 2",
            "not for want of memory",
        ],
    );
    // One that ends well without using the card takes any batch that divides the whole.
    let script = ["sh", "-c", "cat $1", "sh", "c.yaml"];
    let ran = sandbox.run(arguments.into_iter().chain(script)).succeeds();
    assert!(
        ran.stdout.ends_with("batch: 8\naccumulation: 1\n"),
        "{}",
        ran.stdout
    );
    assert!(
        ran.stderr.contains("keeps the batch of 8"),
        "{}",
        ran.stderr
    );
    assert_eq!(fs::read_to_string(sandbox.join("c.yaml")).unwrap(), text);
    assert_eq!(fs::read_dir(sandbox.path()).unwrap().count(), 1);
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
fn a_module_to_rehearse_from_within_is_printed() {
    let sandbox = Sandbox::new();
    let ran = sandbox.cinch("rehearse --script").succeeds();
    assert!(
        ran.stdout.contains("class RehearseCallback"),
        "{}",
        ran.stdout
    );
    sandbox
        .cinch("rehearse --script -- true")
        .fails(2, &["--script"]);
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
