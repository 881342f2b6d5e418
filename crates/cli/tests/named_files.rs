//! Files that a user names: pipes, devices and files without end are refused at once, by name.
#![cfg(unix)]

mod common;

use std::fs::{self, File};
use std::os::unix::net::UnixListener;
use std::process::Stdio;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use common::{Ran, Sandbox, tiny};
use rustix::fs::{CWD, Mode, mkfifoat};

/// Only ends the wait for a program that waits or reads without end.
const HANG: Duration = Duration::from_secs(300);

fn pipe(sandbox: &Sandbox, name: &str) {
    let mode = Mode::RUSR | Mode::WUSR;
    mkfifoat(CWD, sandbox.join(name), mode).unwrap();
}

/// Runs the program, but not without end.
fn ran(sandbox: &Sandbox, line: &str) -> Ran {
    let mut command = sandbox.command(line.split_whitespace());
    command.stdin(Stdio::null());
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let output = command.output().unwrap();
        sender.send(Ran::new(&command, &output)).unwrap();
    });
    let ended = receiver.recv_timeout(HANG);
    ended.unwrap_or_else(|error| panic!("{line}: {error}"))
}

#[test]
fn only_regular_files_of_a_sane_size_are_read() {
    let sandbox = Sandbox::new();
    pipe(&sandbox, "pipe.json");
    let _socket = UnixListener::bind(sandbox.join("socket.json")).unwrap();
    let large = File::create(sandbox.join("large.json")).unwrap();
    large.set_len(3 << 30).unwrap();
    std::os::unix::fs::symlink("/dev/zero", sandbox.join("link.json")).unwrap();
    fs::create_dir(sandbox.join("folder")).unwrap();
    let cases = [
        ("pipe.json", "a pipe"),
        ("socket.json", "a socket"),
        ("large.json", "more than 16 MiB"),
        ("link.json", "a device"),
        ("/dev/zero", "a device"),
        ("folder", "holds no config files"),
    ];
    for (file, reason) in cases {
        ran(&sandbox, &format!("plan --config {file}"))
            .exits(2)
            .says(&[file, reason]);
    }
    for (flags, limit) in [
        ("plan --engine pytorch --model ./", "more than 16 MiB"),
        ("train --max-steps 1 --tokenizer ", "more than 64 MiB"),
    ] {
        for (file, reason) in cases {
            if file == "folder" || (file == "/dev/zero" && flags.ends_with("./")) {
                continue;
            }
            let reason = match file {
                "large.json" => limit,
                _ => reason,
            };
            let told = ran(&sandbox, &format!("{flags}{file}"));
            assert!(
                told.code == Some(1) || told.code == Some(2),
                "{}",
                told.stderr
            );
            told.says(&[file, reason]);
        }
    }
    for file in ["pipe.json", "socket.json", "/dev/zero"] {
        let told = ran(&sandbox, &format!("plan --snapshot {file}"));
        assert!(
            told.code == Some(1) || told.code == Some(2),
            "{}",
            told.stderr
        );
        told.says(&[file, "not a regular file"]);
    }
}

/// Files that are named inside others, or lie in a folder that is named.
#[test]
fn files_beside_are_held_to_the_same() {
    let sandbox = Sandbox::new();
    sandbox.write("a.yaml", "vram: {batch_size: 1}\n");
    pipe(&sandbox, ".cinch-applied.json");
    ran(&sandbox, "fit --config a.yaml --undo")
        .exits(2)
        .says(&[".cinch-applied.json", "a pipe"]);
    sandbox
        .train_tiny("--max-steps 2 --save-steps 1 --eval-steps 1 --output-dir run")
        .succeeds();
    let resume = "train --resume run --max-steps 3 --threads 1";
    for name in ["run/checkpoints/step-00000002/state.json", "run/owner.lock"] {
        let whole = fs::read(sandbox.join(name)).unwrap();
        fs::remove_file(sandbox.join(name)).unwrap();
        pipe(&sandbox, name);
        let told = ran(&sandbox, resume);
        assert_eq!(told.code, Some(1), "{name}: {}", told.stderr);
        fs::remove_file(sandbox.join(name)).unwrap();
        fs::write(sandbox.join(name), whole).unwrap();
    }
    ran(&sandbox, resume).succeeds();
}

/// A run that another process uses is not looked at before it is its own: its newest checkpoint
/// may be another one a moment later.
#[test]
fn a_run_is_taken_before_its_checkpoint_is_chosen() {
    let sandbox = Sandbox::new();
    sandbox.write("run/metrics.jsonl", "");
    fs::create_dir(sandbox.join("run/checkpoints")).unwrap();
    let owner = File::create(sandbox.join("run/owner.lock")).unwrap();
    owner.lock().unwrap();
    for from in ["run", "run/checkpoints", "--output-dir run"] {
        ran(&sandbox, &format!("train --resume {from}"))
            .exits(2)
            .says(&["is in use"]);
    }
    drop(owner);
    ran(&sandbox, "train --resume run")
        .exits(2)
        .says(&["has no checkpoint"]);
    // Where there is no run, none is made.
    ran(&sandbox, "train --resume other").exits(2);
    assert!(!sandbox.join("other").exists());
}

/// Names that are no text, or more than a line, are those of the folders that are made.
#[test]
fn a_run_folder_has_the_name_that_it_was_given() {
    use std::ffi::{OsStr, OsString};
    use std::os::unix::ffi::OsStrExt;
    for (name, shown) in [
        (&b"run\xff"[..], "$'run\\xff'"),
        (b"a\nb\x1b[2Jc", "$'a\\nb\\u001b[2Jc'"),
        (b" two words ", " two words "),
    ] {
        let sandbox = Sandbox::new();
        let name = OsStr::from_bytes(name);
        let run = |line: &str, folder: &str| {
            let mut words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
            words.push(folder.into());
            words.push(name.into());
            let mut command = sandbox.command([]);
            command.args(words);
            let output = command.output().unwrap();
            Ran::new(&command, &output)
        };
        let before = tiny("--max-steps 2 --save-steps 1 --eval-steps 1").join(" ");
        run(&before, "--output-dir").succeeds().prints(&[shown]);
        let folders = || {
            let entries = fs::read_dir(sandbox.join(".")).unwrap();
            let names = entries.map(|entry| entry.unwrap().file_name());
            names.filter(|name| name != "cache").collect::<Vec<_>>()
        };
        assert_eq!(folders(), [name]);
        let resumed = run("train --max-steps 3 --threads 1", "--resume").succeeds();
        assert!(!resumed.stderr.contains('\u{1b}'), "{}", resumed.stderr);
        assert_eq!(folders(), [name]);
        let step = sandbox.join(name).join("checkpoints/step-00000003");
        assert!(step.is_dir());
        run("generate --max-tokens 2 --json", "--prompt=a").succeeds();
        // In a message about what is wrong it is one line too.
        run("train --max-steps 4 --seq-len 16 --threads 1", "--resume")
            .exits(2)
            .says(&[shown]);
    }
}
