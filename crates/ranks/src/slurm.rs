//! The machines of a Slurm job.

use std::process::Command;

/// The names in a list such as `node[01-04,07]`, which only Slurm itself reads rightly.
pub(crate) fn hosts(list: &str) -> Result<Vec<String>, String> {
    // One name needs no reading, and containers often have no Slurm inside.
    if !list.contains(['[', ',']) {
        return Ok(vec![list.trim().to_owned()]);
    }
    let arguments = ["show", "hostnames", list];
    let output = Command::new("scontrol").args(arguments).output();
    let output = output.map_err(|error| format!("`scontrol show hostnames {list}`: {error}"))?;
    if !output.status.success() {
        let told = String::from_utf8_lossy(&output.stderr);
        return Err(format!("`scontrol show hostnames {list}`: {}", told.trim()));
    }
    let names = String::from_utf8_lossy(&output.stdout);
    Ok(names
        .lines()
        .map(|name| name.trim().to_owned())
        .filter(|name| !name.is_empty())
        .collect())
}
