//! `cinch trace`: the recorder for PyTorch runs, and recorded runs under other settings.

use cinch_torch::snapshot::RECORDER;

use super::print_raw;
use crate::args::TraceArguments;
use crate::pytorch::snapshot::replay_file;

pub fn run(arguments: &TraceArguments) -> anyhow::Result<()> {
    match &arguments.file {
        Some(path) => replay_file(path, &arguments.alloc_conf, arguments.json),
        None => print_raw(RECORDER.as_bytes()),
    }
}
