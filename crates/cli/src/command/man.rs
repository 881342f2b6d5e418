//! `cinch man`: manual pages, from the command line's own definition.

use anyhow::Context;
use clap_mangen::Man;

use super::{print, print_raw};
use crate::args::{ManArguments, command_line};

pub fn run(arguments: &ManArguments) -> anyhow::Result<()> {
    let Some(folder) = &arguments.output else {
        let mut page = Vec::new();
        Man::new(command_line()).render(&mut page)?;
        return print_raw(&page);
    };
    let cannot = || format!("{} cannot be written", folder.display());
    std::fs::create_dir_all(folder).with_context(cannot)?;
    clap_mangen::generate_to(command_line(), folder).with_context(cannot)?;
    let pages = std::fs::read_dir(folder).with_context(cannot)?;
    let pages = pages.filter_map(Result::ok).map(|entry| entry.file_name());
    let count = pages
        .filter(|name| is_page(&name.to_string_lossy()))
        .count();
    print(&format!(
        "{count} pages are in {}: man -l {}",
        folder.display(),
        folder.join("cinch.1").display()
    ))
}

fn is_page(name: &str) -> bool {
    name.starts_with("cinch") && name.ends_with(".1")
}
