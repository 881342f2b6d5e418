//! One file a command.

pub mod bench;
pub mod data;
pub mod generate;
pub mod models;
pub mod plan;
pub mod presets;
pub mod train;

use std::io::Write;

use serde::Serialize;

/// Writes to standard output; a closed pipe is an error, not a panic.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    if !text.ends_with('\n') {
        out.write_all(b"\n")?;
    }
    Ok(out.flush()?)
}

pub fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    print(&serde_json::to_string_pretty(value)?)
}
