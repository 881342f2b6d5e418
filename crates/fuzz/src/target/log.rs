//! Logs and error messages, as `cinch diagnose` reads them.

use std::path::Path;

use cinch_diagnose::{Log, diagnose};

use super::{Target, contents};

pub const LOG: Target = Target {
    name: "log",
    about: "a training log or an error message that is diagnosed",
    seeds,
    words,
    run,
};

fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = contents(&["crates/diagnose/tests/fixtures"], &["log"]);
    // Long logs are beginnings of many inputs, and their lines are alike.
    seeds.iter_mut().for_each(|seed| seed.truncate(4096));
    seeds
}

fn words() -> Vec<String> {
    let words = [
        "CUDA out of memory. Tried to allocate ",
        "17179869184.00 GiB",
        " is reserved by PyTorch but unallocated",
        "[rank1]: ",
        "(RayTrainWorker pid=1)",
        "\u{1b}[31m",
        "Killed process 1 (python) anon-rss:1kB",
        "does not fit: needs 1.00 GiB (1,073,741,824 bytes), the budget is ",
        "what would fit",
        "step: 1 loss: 2.0 memory: 1.00GiB",
        "OOM when allocating tensor with shape[1,2] and type float",
        "  File \"a.py\", line 1, in evaluate",
    ];
    words.map(str::to_owned).to_vec()
}

fn read(input: &[u8], piece: usize) -> String {
    let mut log = Log::new();
    input.chunks(piece).for_each(|piece| log.feed(piece));
    log.finish();
    let failures = diagnose(&log, None);
    for failure in &failures {
        assert!((0.0..=1.0).contains(&failure.confidence));
        assert!(failure.line >= 1 && failure.line <= log.lines_read());
    }
    serde_json::to_string(&failures).expect("a diagnosis can be written")
}

fn run(input: &[u8], _folder: &Path) {
    // How the bytes come does not change what they say.
    assert_eq!(read(input, input.len().max(1)), read(input, 61));
}
