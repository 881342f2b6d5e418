//! Recordings of PyTorch's memory by the real program: explained, replayed, and what is said of
//! broken ones.

mod common;

use std::fs;

use common::{Sandbox, predictor_fixture as fixture};

#[test]
fn a_recording_is_explained_and_replayed() {
    let sandbox = Sandbox::new();
    let file = fixture("snapshot.jsonl");
    let ran = sandbox.run(["plan", "--snapshot", &file, "--timeline"]);
    ran.succeeds().prints(&[
        "optimizer states",
        "activations",
        "holes between tensors",
        "event for event",
        "expandable_segments:True",
        "█",
    ]);
    let pickle = fixture("snapshot-4.pickle");
    let ran = sandbox.run([
        "plan",
        "--snapshot",
        &pickle,
        "--batch-size",
        "64",
        "--json",
    ]);
    let answer = ran.succeeds().json();
    assert_eq!(answer["explanation"]["fidelity"]["exact"], true);
    assert!(!answer["batch"].is_null());
    let setting = "expandable_segments:True";
    let ran = sandbox.run(["trace", &file, "--alloc-conf", setting, "--json"]);
    let answer = ran.succeeds().json();
    assert_eq!(answer["exact"], true);
    assert_eq!(
        answer["peak_reserved_recorded"],
        answer["peak_reserved_replayed"]
    );
    assert_eq!(answer["settings"][1]["settings"], setting);
    sandbox.cinch("trace --script").succeeds().prints(&[
        "import torch",
        "memory._snapshot()",
        "def start",
    ]);
    sandbox.cinch("trace").fails(2, &["FILE"]);
}

/// Three steps on an H200, of batches 8, 8 and 16: the peaks are PyTorch's own figures.
#[test]
fn a_real_recording_is_explained_in_the_users_lines() {
    let sandbox = Sandbox::new();
    for name in ["recorded.jsonl", "recorded.pickle"] {
        let file = fixture(name);
        let ran = sandbox.run([
            "plan",
            "--snapshot",
            &file,
            "--timeline",
            "--picture",
            "course.svg",
        ]);
        ran.succeeds().prints(&[
            "231,313,920",
            "375,390,208",
            "…/project/src/record.py:9",
            "linear.py:134",
            "(backward)",
            "event for event",
            "what helps: PYTORCH_ALLOC_CONF=expandable_segments:True",
            "‹ backward",
        ]);
        let drawn = fs::read_to_string(sandbox.join("course.svg")).unwrap();
        for text in ["<svg", name, "record.py:9"] {
            assert!(drawn.contains(text), "{text}");
        }
    }
    let file = fixture("recorded.jsonl");
    let ran = sandbox.run(["plan", "--snapshot", &file]);
    ran.succeeds()
        .prints(&["step 3 (batch 16)", "if every step had this batch", "fits"]);
    let ran = sandbox.run(["plan", "--snapshot", &file, "--batch-size", "24", "--json"]);
    let answer = ran.succeeds().json();
    assert_eq!(answer["explanation"]["peak_allocated"], 231_313_920);
    assert_eq!(answer["explanation"]["peak_step"]["batch"], 16);
    let effects = answer["batches"]["effects"].as_array().unwrap();
    let allocated = |batch: u64| -> u64 {
        let found = effects.iter().find(|effect| effect["batch"] == batch);
        found.unwrap()["peak_allocated"].as_u64().unwrap()
    };
    assert!(allocated(16) < allocated(24) && allocated(24) < allocated(32));
    assert_eq!(answer["batch"]["peak_allocated"], allocated(24));
    let file = fixture("recorded.pickle");
    let ran = sandbox.run(["plan", "--snapshot", &file]);
    ran.succeeds()
        .prints(&["another batch would take cannot be told", "hint:"]);
}

#[test]
fn broken_recordings_are_located() {
    let sandbox = Sandbox::new();
    for (name, garbage) in [
        ("garbage.pickle", &b"\x80\x04\xff\xff\xff\xff garbage"[..]),
        ("garbage.jsonl", &b"this is no recording\n"[..]),
        ("empty.jsonl", &b""[..]),
        (
            "cut.pickle",
            &b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}"[..],
        ),
    ] {
        sandbox.write(name, garbage);
        sandbox
            .cinch(&format!("plan --snapshot {name}"))
            .fails(2, &[name]);
        sandbox.cinch(&format!("trace {name}")).fails(2, &[name]);
    }
    sandbox
        .cinch("trace nothing.pickle")
        .fails(2, &["nothing.pickle"]);
    let file = fixture("snapshot.jsonl");
    let ran = sandbox.run(["plan", "--snapshot", &file, "--batch-size", "none"]);
    ran.fails(2, &["--batch-size", "none"]);
}
