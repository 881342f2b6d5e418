//! Ctrl-C and SIGTERM in commands that have something to finish: the first asks, the second ends.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;

use crate::failure::INTERRUPTED;
use crate::voice::tell;

/// Whether the command was asked to stop.
pub static STOP: AtomicBool = AtomicBool::new(false);

/// Whether it was asked again, by a command that has to clean up even then.
pub static AGAIN: AtomicBool = AtomicBool::new(false);

/// As [`listen`], but the second Ctrl-C sets [`AGAIN`] and ends nothing.
pub fn listen_twice(answer: &'static str) -> anyhow::Result<()> {
    ctrlc::set_handler(move || match STOP.swap(true, Ordering::Relaxed) {
        true => AGAIN.store(true, Ordering::Relaxed),
        false => tell(answer),
    })
    .context("cannot listen for Ctrl-C")
}

/// From now on the first Ctrl-C sets [`STOP`] and says `answer`, and the second ends the program.
pub fn listen(answer: &'static str) -> anyhow::Result<()> {
    ctrlc::set_handler(move || {
        if STOP.swap(true, Ordering::Relaxed) {
            #[expect(clippy::exit, reason = "the user asked twice")]
            std::process::exit(INTERRUPTED.into());
        }
        // On a terminal the cursor stands behind a progress bar.
        let above = match std::io::stderr().is_terminal() {
            true => "\n",
            false => "",
        };
        tell(&format!("{above}{answer}"));
    })
    .context("cannot listen for Ctrl-C")
}
