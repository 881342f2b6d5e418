//! Ctrl-C and SIGTERM in commands that have something to finish: the first asks, the second ends.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use signal_hook::consts::SIGUSR1;
use signal_hook::iterator::Signals;

use crate::failure::INTERRUPTED;
use crate::voice::{is_hushed, tell};

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

/// Whether somebody asked by Ctrl-C or SIGTERM. SIGUSR1, which a cluster sends some time before it
/// ends a job, is no first request: SIGTERM may follow while the last step is saved.
static ASKED: AtomicBool = AtomicBool::new(false);

/// From now on SIGUSR1 sets [`STOP`].
pub fn listen_for_the_cluster() -> anyhow::Result<()> {
    let mut signals = Signals::new([SIGUSR1]).context("cannot listen for SIGUSR1")?;
    std::thread::spawn(move || {
        for _ in signals.forever() {
            STOP.store(true, Ordering::Relaxed);
        }
    });
    Ok(())
}

/// From now on the first Ctrl-C sets [`STOP`] and says `answer`, and the second ends the program.
pub fn listen(answer: &'static str) -> anyhow::Result<()> {
    ctrlc::set_handler(move || {
        STOP.store(true, Ordering::Relaxed);
        if ASKED.swap(true, Ordering::Relaxed) {
            #[expect(clippy::exit, reason = "the user asked twice")]
            std::process::exit(INTERRUPTED.into());
        }
        // On a terminal the cursor stands behind a progress bar.
        let above = match std::io::stderr().is_terminal() {
            true => "\n",
            false => "",
        };
        if !is_hushed() {
            tell(&format!("{above}{answer}"));
        }
    })
    .context("cannot listen for Ctrl-C")
}
