//! The record of a run that is resumed: metrics.jsonl and the events of TensorBoard.

use std::fs;
use std::path::Path;

use cinch_train::record::{EventWriter, MetricsLog};

use super::{Target, no_words};

pub const METRICS: Target = Target {
    name: "record",
    about: "metrics.jsonl and TensorBoard's events of a run that is resumed",
    seeds,
    words: no_words,
    run,
};

/// The step from which the run goes on.
const STEP: u64 = 4;

fn seeds() -> Vec<Vec<u8>> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut log = MetricsLog::create(folder.path()).expect("the folder can be written");
    let mut events = EventWriter::create(folder.path()).expect("the folder can be written");
    for step in 1..=6 {
        let fields = serde_json::json!({ "loss": 1.5, "lr": 1e-3, "tokens": step * 64 });
        log.append(step, &fields)
            .expect("the folder can be written");
        events
            .scalar("loss", step, 1.5)
            .expect("the folder can be written");
    }
    events.flush().expect("the folder can be written");
    let paths = [log.path().to_owned(), events.path().to_owned()];
    let read = |path: &std::path::PathBuf| fs::read(path).expect("it was written");
    paths.iter().map(read).collect()
}

fn run(input: &[u8], folder: &Path) {
    let create = MetricsLog::create(folder).map(|log| log.path().to_owned());
    fs::write(create.expect("the folder can be written"), input).expect("it can be written");
    match MetricsLog::resume(folder, STEP, true) {
        Ok(mut log) => log
            .append(STEP + 1, &serde_json::json!({ "loss": 1.5 }))
            .expect("a resumed log can be written"),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    let events = folder.join("events");
    fs::create_dir_all(&events).expect("the folder can be written");
    let create = EventWriter::create(&events).map(|events| events.path().to_owned());
    fs::write(create.expect("the folder can be written"), input).expect("it can be written");
    match EventWriter::resume(&events, STEP) {
        Ok(mut events) => events
            .scalar("loss", STEP + 1, 1.0)
            .expect("it can be written"),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
