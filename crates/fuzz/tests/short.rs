//! A short run of every target, the same inputs each time. The long ones are run by hand.

use std::path::Path;

use cinch_fuzz::{Campaign, Stop, TARGETS, watch};

/// Enough for a minute of all targets on a slow core; the seeds are the first of them.
const INPUTS: u64 = 3000;

#[test]
fn nothing_that_is_read_makes_a_reader_fail() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut failed = Vec::new();
    for target in &TARGETS {
        let campaign = Campaign {
            target,
            stop: Stop::Inputs(INPUTS),
            seed: 1,
            folder: folder.path().to_owned(),
        };
        let program = Path::new(env!("CARGO_BIN_EXE_cinch-fuzz"));
        let summary = watch(&campaign, program).expect("a worker can be started");
        assert!(summary.inputs >= INPUTS, "{}: {summary:?}", target.name);
        for find in summary.finds {
            let input = std::fs::read(&find.path).expect("a find is kept");
            let input = String::from_utf8_lossy(&input).into_owned();
            failed.push(format!("{}: {}\n{input:?}", target.name, find.reason));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
}
