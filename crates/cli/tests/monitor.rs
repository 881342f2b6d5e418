//! `cinch monitor` without a terminal: one look, lines, tables, recordings.

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;

use common::Sandbox;
use serde_json::Value;

fn recording(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../monitor/tests/fixtures");
    folder.join(name).display().to_string()
}

#[test]
fn one_look_is_printed() {
    let sandbox = Sandbox::new();
    sandbox
        .cinch("monitor --once")
        .succeeds()
        .prints(&["host memory: "]);
    let ran = sandbox.cinch("monitor --once --json").succeeds();
    let sample = ran.json();
    assert!(sample["host"]["total_bytes"].as_u64() > Some(0), "{sample}");
    let own = format!("monitor --once --json --pid {}", std::process::id());
    let sample = sandbox.cinch(&own).succeeds().json();
    assert_eq!(sample["processes"][0]["pid"], std::process::id());
    assert!(
        sample["processes"][0]["resident_bytes"].as_u64() > Some(0),
        "{sample}"
    );
}

#[test]
fn a_recording_is_shown_with_its_signs() {
    let sandbox = Sandbox::new();
    let path = recording("training.jsonl");
    let ran = sandbox
        .run(["monitor", "--once", "--replay", &path])
        .succeeds();
    ran.prints(&[
        "GPU 0: NVIDIA H200",
        "planned 9.30 GiB, /home/ann/runs/gpt2",
        "process 4800: creep: rises by 2880.0 MiB a minute",
        "waiting for data",
    ]);
    let ran = sandbox
        .run(["monitor", "--json", "--csv", "table.csv", "--replay", &path])
        .succeeds();
    let lines: Vec<Value> = ran
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), 60);
    let table = fs::read_to_string(sandbox.join("table.csv")).unwrap();
    assert_eq!(table.lines().count(), 1 + 60 * 3);
    let columns = |line: &str| line.split(',').count();
    let header = columns(table.lines().next().unwrap());
    assert!(table.lines().all(|line| columns(line) == header), "{table}");
}

#[test]
fn what_is_recorded_can_be_read_again() {
    let sandbox = Sandbox::new();
    sandbox
        .cinch("monitor --once --record kept.jsonl")
        .succeeds();
    sandbox
        .cinch("monitor --once --replay kept.jsonl")
        .succeeds()
        .prints(&["host memory"]);
    sandbox.write("other.txt", "no sample\n");
    sandbox
        .cinch("monitor --once --replay other.txt")
        .fails(1, &["other.txt line 1"]);
    sandbox
        .cinch("monitor --run nowhere")
        .fails(2, &["nowhere"]);
    sandbox.cinch("monitor --interval 0").fails(2, &["0.1"]);
}

#[test]
fn prometheus_is_answered_on_this_machine() {
    let sandbox = Sandbox::new();
    let mut child = sandbox.start(["monitor", "--json", "--prometheus", "0"]);
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    stderr.read_line(&mut line).unwrap();
    let address = line
        .split("http://")
        .nth(1)
        .and_then(|rest| rest.split('/').next());
    let address = address.unwrap_or_else(|| panic!("no address in {line}"));
    // A first sample has been taken when its line is printed.
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    stdout.read_line(&mut String::new()).unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(address.starts_with("127.0.0.1:"), "{address}");
    assert!(
        answer.contains("# TYPE cinch_host_memory_used_bytes gauge\ncinch_host_memory_used_bytes "),
        "{answer}"
    );
}
