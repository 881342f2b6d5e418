//! Recorded runs of PyTorch: the pickle of its memory snapshot, and JSON lines.

use std::io::Cursor;
use std::path::Path;

use cinch_torch::snapshot::{Batches, Snapshot, explain};

use super::{Target, contents, no_words};

pub const PICKLE: Target = Target {
    name: "pickle",
    about: "a pickled memory snapshot of PyTorch",
    seeds: || contents(&["crates/torch/tests/fixtures"], &["pickle"]),
    words: no_words,
    run: |input, _| read(input, true),
};

pub const TRACE: Target = Target {
    name: "trace",
    about: "a recorded run as JSON lines",
    seeds: traces,
    words: no_words,
    run: |input, _| read(input, false),
};

/// The fixtures that are recordings, cut to what can be read often, with their end: that is
/// where segments and marks are.
fn traces() -> Vec<Vec<u8>> {
    const HALF: usize = 4 << 10;
    let recordings = contents(&["crates/torch/tests/fixtures"], &["jsonl"]).into_iter();
    let recordings = recordings.filter(|text| {
        let start = String::from_utf8_lossy(&text[..text.len().min(HALF)]).into_owned();
        start.contains("\"action\"") || start.contains("cinch_snapshot")
    });
    recordings
        .map(|text| {
            if text.len() <= 2 * HALF {
                return text;
            }
            let lines = |text: &[u8]| {
                text.split_inclusive(|&byte| byte == b'\n')
                    .map(<[u8]>::to_vec)
                    .collect::<Vec<_>>()
            };
            let mut cut = lines(&text[..HALF]);
            cut.pop();
            cut.extend(lines(&text[text.len() - HALF..]).into_iter().skip(1));
            cut.concat()
        })
        .collect()
}

fn read(input: &[u8], is_pickle: bool) {
    let name = Path::new("snapshot");
    let snapshot = match Snapshot::read_from(Cursor::new(input), is_pickle, name) {
        Ok(snapshot) => snapshot,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    match explain(&snapshot) {
        Ok(_) => {}
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    for device in 0..snapshot.devices.len() {
        snapshot.capacity(device);
        if let (Ok(Ok(batches)), Ok(config)) = (Batches::new(&snapshot, device), snapshot.config())
        {
            for batch in [1, 7, 64] {
                batches.effect(&config, batch);
            }
        }
    }
}
