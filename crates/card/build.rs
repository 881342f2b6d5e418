//! Compiles `library/` once more, as the shared object that is loaded into a rehearsed process. It has no dependencies,
//! so that the compiler that builds this crate is all it takes; the crate carries the result as bytes.

use std::env;
use std::io::{Error, Write};
use std::path::PathBuf;
use std::process::Command;

fn main() -> Result<(), Error> {
    let mut out = std::io::stdout();
    writeln!(out, "cargo:rerun-if-changed=build.rs")?;
    writeln!(out, "cargo:rerun-if-changed=library")?;
    writeln!(
        out,
        "cargo:rerun-if-changed=../torch/src/allocator/address.rs"
    )?;
    writeln!(out, "cargo:rustc-check-cfg=cfg(exported)")?;
    let variable =
        |name: &str| env::var_os(name).ok_or_else(|| Error::other(format!("{name} is not set")));
    let target = variable("TARGET")?;
    let object = PathBuf::from(variable("OUT_DIR")?).join("libcuda.so.1");
    // There are no rehearsals elsewhere; the crate still builds.
    if !target.to_string_lossy().contains("linux") {
        return std::fs::write(object, []);
    }
    let mut compiler = Command::new(variable("RUSTC")?);
    compiler
        .args([
            "--edition=2024",
            "--crate-type=cdylib",
            "--crate-name=cinch_card_library",
        ])
        .args([
            "--cfg=exported",
            "-Copt-level=3",
            "-Cpanic=abort",
            "-Cstrip=symbols",
            "-Clto=fat",
            "-Ccodegen-units=1",
        ])
        // Triton and PyTorch's run-time compiler look for the driver under this name.
        .arg("-Clink-arg=-Wl,-soname,libcuda.so.1")
        .arg("--target")
        .arg(&target)
        .arg("library/lib.rs")
        .arg("-o")
        .arg(&object);
    if let Some(linker) = env::var_os("RUSTC_LINKER") {
        let mut argument = std::ffi::OsString::from("-Clinker=");
        argument.push(linker);
        compiler.arg(argument);
    }
    match compiler.status()?.success() {
        true => Ok(()),
        false => Err(Error::other("the card's library does not compile")),
    }
}
