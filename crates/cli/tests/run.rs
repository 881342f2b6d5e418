//! `cinch run` with trainers that die in every way: a shell script stands for each.
#![cfg(target_os = "linux")]

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;

use common::{Sandbox, signal};
use serde_json::{Value, json};

/// Dies as PyTorch does where its batch (`$1`) is above `$3`; `$2` is the accumulation.
const TRAINER: &str = r#"
echo "batch $1 accum $2" >> log
if [ "$1" -gt "$3" ]; then
  echo "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB" >&2
  exit 1
fi
echo trained
"#;

/// The same, with batch and accumulation in a file.
const READER: &str = r#"
batch=$(sed -n 's/.*batch_size: \([0-9]*\).*/\1/p' config.yaml)
accum=$(sed -n 's/.*accumulate_grad_batches: \([0-9]*\).*/\1/p' config.yaml)
sh trainer.sh "$batch" "$accum" "$1"
"#;

const CONFIG: &str = "data_loader:\n  batch_size: 48  # was 45\ntraining:\n  trainer:\n    accumulate_grad_batches: 1\n";

const PLACES: [&str; 4] = [
    "--set",
    "batch_size=config.yaml:data_loader.batch_size",
    "--set",
    "accumulation=config.yaml:training.trainer.accumulate_grad_batches",
];

fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write("trainer.sh", TRAINER);
    sandbox.write("reader.sh", READER);
    sandbox.write("config.yaml", CONFIG);
    sandbox
}

fn report(sandbox: &Sandbox) -> Value {
    let text = fs::read_to_string(sandbox.join("report.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn tried(report: &Value) -> Vec<u64> {
    let attempts = report["attempts"].as_array().unwrap();
    attempts
        .iter()
        .map(|one| one["batch"].as_u64().unwrap())
        .collect()
}

#[test]
fn the_largest_batch_that_fits_is_found_and_the_effective_one_kept() {
    let sandbox = sandbox();
    let ran = sandbox.cinch(
        "run --retry 10 --effective-batch 64 --report report.json -- sh trainer.sh {batch} {accum} 12",
    );
    let ran = ran.succeeds().prints(&["trained\n"]);
    ran.says(&[
        "CUDA out of memory",
        "attempt 1 with batch 64 × 1 ran out of memory",
        "batch 8 × 8 works",
    ]);
    let report = report(&sandbox);
    assert_eq!(tried(&report), [64, 32, 16, 8]);
    assert_eq!(
        (&report["batch"], &report["accumulation"]),
        (&8.into(), &8.into())
    );
    let log = fs::read_to_string(sandbox.join("log")).unwrap();
    assert_eq!(
        log,
        "batch 64 accum 1\nbatch 32 accum 2\nbatch 16 accum 4\nbatch 8 accum 8\n"
    );
}

/// Divisors of 720 are many: halves are tried, and with probing the largest of all is found.
#[test]
fn the_largest_of_many_divisors_takes_a_logarithm_of_trials() {
    for threshold in ["1", "7", "12", "100", "719", "720"] {
        let sandbox = sandbox();
        let line = format!(
            "run --retry 12 --effective-batch 720 --largest 60 --report report.json -- sh trainer.sh {{batch}} {{accum}} {threshold}"
        );
        sandbox.cinch(&line).succeeds();
        let report = report(&sandbox);
        let threshold: u64 = threshold.parse().unwrap();
        let largest = (1..=threshold).filter(|one| 720 % one == 0).max().unwrap();
        assert_eq!(report["batch"], largest, "{report}");
        // Thirty divisors: the first trial and five halvings.
        assert!(tried(&report).len() <= 6, "{report}");
    }
}

#[test]
fn a_file_is_changed_where_it_says_and_put_back_where_nothing_works() {
    let sandbox = sandbox();
    let mut arguments = vec!["run", "--retry", "10", "--report", "report.json"];
    arguments.extend(PLACES);
    let command = ["--", "sh", "reader.sh"];
    let with = |threshold| [&arguments[..], &command, &[threshold]].concat();
    sandbox.run(with("15")).succeeds();
    let edited = fs::read_to_string(sandbox.join("config.yaml")).unwrap();
    let expected = CONFIG
        .replace(": 48", ": 12")
        .replace("batches: 1", "batches: 4");
    assert_eq!(edited, expected);
    assert_eq!(report(&sandbox)["effective_batch"], 48);
    sandbox.write("config.yaml", CONFIG);
    sandbox
        .run(with("0"))
        .exits(1)
        .says(&["no batch that was tried works"]);
    assert_eq!(
        fs::read_to_string(sandbox.join("config.yaml")).unwrap(),
        CONFIG
    );
}

#[test]
fn a_known_configuration_needs_no_places() {
    let sandbox = sandbox();
    let config =
        "model:\n  type: gpt2\nvram:\n  batch_size: 16\n  gradient_accumulation_steps: 2\n";
    sandbox.write("cinch.yaml", config);
    let reader = "batch=$(sed -n 's/.*batch_size: //p' cinch.yaml)\nsh trainer.sh \"$batch\" x 4\n";
    sandbox.write("own.sh", reader);
    sandbox
        .cinch("run --retry 5 --config cinch.yaml --report report.json -- sh own.sh")
        .succeeds();
    assert_eq!(tried(&report(&sandbox)), [16, 8, 4]);
    let edited = fs::read_to_string(sandbox.join("cinch.yaml")).unwrap();
    assert!(
        edited.contains("batch_size: 4\n") && edited.contains("steps: 8\n"),
        "{edited}"
    );
    // One step back is the beginning.
    sandbox.cinch("fit cinch.yaml --undo").succeeds();
    assert_eq!(
        fs::read_to_string(sandbox.join("cinch.yaml")).unwrap(),
        config
    );
}

#[test]
fn a_checkpoint_is_gone_on_from() {
    let sandbox = sandbox();
    let script = "echo \"$@\" >> log\nmkdir -p out/checkpoint-100\n[ \"$1\" -gt 4 ] && echo 'CUDA out of memory' && exit 1\nexit 0\n";
    sandbox.write("saves.sh", script);
    sandbox
        .cinch(
            "run --retry 3 --batch 8 --checkpoints out --resume-with=--resume={checkpoint} -- sh saves.sh {batch} {accum}",
        )
        .succeeds();
    let log = fs::read_to_string(sandbox.join("log")).unwrap();
    assert_eq!(log, "8 1\n4 2 --resume=out/checkpoint-100\n");
}

#[test]
fn what_ran_out_is_diagnosed_and_told_on_a_page() {
    let sandbox = sandbox();
    sandbox.write(
        "fails.sh",
        "exec 2>&1
         for step in $(seq 60); do echo \"step: $step loss: 1.5 memory: $((2000 + 90 * step)) MiB\"; done
         echo 'RuntimeError: CUDA out of memory. Tried to allocate 96.00 MiB (GPU 0; 7.79 GiB total \
         capacity; 7.25 GiB already allocated; 55.38 MiB free; 7.30 GiB reserved in total by PyTorch)' >&2
         exit 3",
    );
    let ran = sandbox
        .cinch("run --report report.json -- sh fails.sh")
        .exits(3);
    ran.says(&[
        "PyTorch ran out of GPU memory (GPU 0), after step 60",
        "cause: leak",
        "memory climbed by 90.0 MiB a step over 60 readings",
        "total += loss.item()",
    ]);
    let told = report(&sandbox);
    let failure = &told["attempts"][0]["diagnosis"]["failures"][0];
    assert_eq!(failure["cause"], "leak");
    assert_eq!(failure["numbers"]["tried_bytes"], 96 << 20);
    assert_eq!(failure["step"], 60);
    sandbox.cinch("report report.json").succeeds();
    let page = fs::read_to_string(sandbox.join("report.html")).unwrap();
    for part in [
        "Attempts",
        "Diagnosis",
        "out of memory",
        "leak",
        "loss.item()",
    ] {
        assert!(page.contains(part), "no {part}");
    }
    // What no line tells is not made up.
    sandbox.write("fails.sh", "echo 'ValueError: shapes' >&2; exit 3");
    let ran = sandbox
        .cinch("run --report report.json -- sh fails.sh")
        .exits(3);
    assert!(!ran.stderr.contains("cause:"), "{}", ran.stderr);
    let told = report(&sandbox);
    assert_eq!(told["attempts"][0]["diagnosis"]["failures"], json!([]));
}

#[test]
fn other_failures_are_not_tried_again() {
    let sandbox = sandbox();
    let line = "run --retry 5 --batch 8 --report report.json -- sh fails.sh {batch} {accum}";
    sandbox.write(
        "fails.sh",
        "echo 'ValueError: memory of shapes' >&2; exit 7",
    );
    sandbox.cinch(line).exits(7);
    let told = report(&sandbox);
    assert_eq!(
        (tried(&told), &told["attempts"][0]["end"]),
        (vec![8], &"failed".into())
    );
    // Nobody knows who sent it, and the kernel counted nothing.
    sandbox.write("fails.sh", "kill -9 $$");
    let mut command = sandbox.command(line.split_whitespace());
    let status = command.stderr(Stdio::null()).status().unwrap();
    assert_eq!(status.signal(), Some(9));
    assert_eq!(tried(&report(&sandbox)), [8]);
    sandbox.write("fails.sh", "kill -ABRT $$");
    let status = sandbox
        .command(line.split_whitespace())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.signal(), Some(6));
}

#[test]
fn a_stop_reaches_the_command_and_nothing_is_tried_again() {
    let sandbox = sandbox();
    // Even where it says that memory ran out on its way down.
    let script = "trap 'echo \"CUDA out of memory\"; echo saved; exit 3' INT TERM\necho ready\nwhile :; do sleep 0.05; done\n";
    sandbox.write("waits.sh", script);
    for name in ["INT", "TERM"] {
        let line = "run --retry 5 --batch 8 --report report.json -- sh waits.sh {batch} {accum}";
        let mut child = sandbox.start(line.split_whitespace());
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut ready = String::new();
        output.read_line(&mut ready).unwrap();
        assert_eq!(ready, "ready\n");
        signal(&child, name);
        let mut rest = String::new();
        output.read_to_string(&mut rest).unwrap();
        assert!(rest.contains("saved"), "{rest}");
        assert_eq!(child.wait().unwrap().code(), Some(3));
        let told = report(&sandbox);
        assert_eq!(
            (tried(&told), &told["attempts"][0]["end"]),
            (vec![8], &"interrupted".into())
        );
    }
}

#[test]
fn much_output_passes_through_whole() {
    let sandbox = sandbox();
    let mut command = sandbox.command([
        "run",
        "--report",
        "report.json",
        "--",
        "head",
        "-c",
        "1000000000",
        "/dev/zero",
    ]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut output = child.stdout.take().unwrap();
    let (mut piece, mut count) = (vec![0; 1 << 20], 0_u64);
    let mut peak_kib = 0;
    loop {
        let length = output.read(&mut piece).unwrap();
        if length == 0 {
            break;
        }
        count += length as u64;
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok());
        peak_kib = peak_kib.max(kib.unwrap_or(0));
    }
    assert!(child.wait().unwrap().success());
    assert_eq!(count, 1_000_000_000);
    assert_eq!(report(&sandbox)["attempts"][0]["output_bytes"], count);
    assert!((1..64 << 10).contains(&peak_kib), "{peak_kib} KiB");
}

#[test]
fn streams_and_codes_are_those_of_the_command() {
    let sandbox = sandbox();
    let ran = sandbox
        .run(["run", "--", "sh", "-c", "echo out; echo err >&2; exit 42"])
        .exits(42);
    assert_eq!(
        (ran.stdout.as_str(), ran.stderr.as_str()),
        ("out\n", "err\n")
    );
    sandbox
        .cinch("run -- no-such-program-here")
        .exits(127)
        .says(&["no-such-program-here"]);
    sandbox.cinch("run -- ./config.yaml").exits(126);
    // What reads our input reads it as if we were not there.
    let mut command = sandbox.command(["run", "--", "cat"]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"hello").unwrap();
    assert_eq!(child.wait_with_output().unwrap().stdout, b"hello");
}

#[test]
fn what_cannot_be_changed_is_refused_before_anything_runs() {
    let sandbox = sandbox();
    for (line, part) in [
        (
            "run --retry 3 -- sh trainer.sh 1 1 1",
            "nothing says where the batch stands",
        ),
        (
            "run --retry 3 --batch 4 -- sh trainer.sh {batch} 1 1",
            "effective batch cannot be kept",
        ),
        (
            "run --retry 3 -- sh trainer.sh {batch} {accum} 1",
            "--batch N",
        ),
        (
            "run --retry 3 --batch 3 --effective-batch 64 -- sh trainer.sh {batch} {accum} 1",
            "no multiple",
        ),
        (
            "run --retry 3 --set batch_size=config.yaml:nothing --set accumulation=config.yaml:x -- true",
            "no key nothing",
        ),
        (
            "run --retry 3 --set batch_size=config.yaml -- true",
            "FILE:KEY",
        ),
    ] {
        sandbox.cinch(line).fails(2, &[part, "hint:"]);
        assert!(!sandbox.join("log").exists(), "{line}");
    }
}
