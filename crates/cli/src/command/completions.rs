//! `cinch completions`: what a shell needs to complete commands and flags, from the command line's
//! own definition.

use super::print_raw;
use crate::args::{CompletionsArguments, command_line};

pub fn run(arguments: &CompletionsArguments) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command_line(), "cinch", &mut script);
    print_raw(&script)
}
