//! `cinch launch`: ranks on one machine.

use cinch_ranks::launch::{Launch, launch};

use crate::args::LaunchArguments;
use crate::failure::{RanksEnded, usage};
use crate::ranks::LOG_VARIABLE;
use crate::voice::{self, tell};

pub fn run(arguments: &LaunchArguments) -> anyhow::Result<()> {
    let Some((command, rest)) = arguments.command.split_first() else {
        return Err(usage("there is nothing to start"));
    };
    if command.to_str() != Some("train") {
        return Err(usage(format!(
            "`cinch launch` starts `train`, not `{}`\n\
             hint: cinch launch --ranks 2 -- train …",
            command.to_string_lossy()
        )));
    }
    let device = match arguments.gpus {
        Some(_) => "cuda",
        None => "cpu",
    };
    let mut all = vec![command.clone()];
    let names_device = |word: &std::ffi::OsString| {
        let word = word.to_string_lossy();
        word == "--device" || word.starts_with("--device=")
    };
    if !rest.iter().any(names_device) {
        all.extend(["--device", device].map(Into::into));
    }
    all.extend(rest.iter().cloned());
    let mut variables = Vec::new();
    if arguments.log_all_ranks.is_some() {
        variables.push((LOG_VARIABLE.into(), "1".into()));
    }
    let ended = launch(&Launch {
        program: std::env::current_exe()?,
        arguments: all,
        variables,
        num_ranks: arguments.ranks.or(arguments.gpus).unwrap_or(1),
        logs: arguments.log_all_ranks.clone(),
    })?;
    if let Some(told) = &ended.told {
        tell(&voice::message(told));
    }
    match ended.code {
        0 => Ok(()),
        code => Err(RanksEnded(code).into()),
    }
}
