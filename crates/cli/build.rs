//! Names what is built, for `cinch --version`: the commit where git knows one, and the kind of
//! build. Without git, or outside a repository, the version stands alone. Nothing of the machine
//! that builds is recorded.

use std::io::Write;
use std::path::Path;
use std::process::Command;

fn main() -> std::io::Result<()> {
    let mut out = std::io::stdout();
    writeln!(out, "cargo:rerun-if-changed=build.rs")?;
    let details: Vec<String> = [commit(), std::env::var("PROFILE").ok()]
        .into_iter()
        .flatten()
        .collect();
    writeln!(out, "cargo:rustc-env=CINCH_BUILD= ({})", details.join(", "))?;
    // What HEAD is at. A file that is not there would make every build run this again.
    for name in ["HEAD", "logs/HEAD"] {
        let path = git(&["rev-parse", "--git-path", name]);
        if let Some(path) = path.filter(|path| Path::new(path).exists()) {
            writeln!(out, "cargo:rerun-if-changed={path}")?;
        }
    }
    Ok(())
}

/// `7b64f68 of 2026-11-15`; nothing where a copy of the sources lies in another repository.
fn commit() -> Option<String> {
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    git(&["log", "-1", "--format=%h of %cs"])
}

/// What git answers in one line; nothing where it cannot.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let line = text.trim();
    let is_usable = output.status.success() && !line.is_empty() && !line.contains('\n');
    is_usable.then(|| line.to_owned())
}
