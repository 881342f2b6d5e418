//! What a run looks like on a terminal of 80 columns.
#![cfg(target_os = "linux")]

mod common;

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::process::Stdio;

use common::{Sandbox, tiny};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

const COLUMNS: u16 = 80;

/// Runs the program with a terminal for its output and returns what was written there.
fn run_on_terminal(sandbox: &Sandbox, arguments: &[&str]) -> String {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
    grantpt(&ours).expect("a terminal of ours");
    unlockpt(&ours).expect("an open terminal");
    let name = ptsname(&ours, Vec::new()).expect("a name");
    let name = name.into_string().expect("a plain name");
    let size = Winsize {
        ws_row: 40,
        ws_col: COLUMNS,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    tcsetwinsize(&ours, size).expect("a size");
    let theirs = || -> Stdio {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).open(&name);
        file.expect("the other end").into()
    };
    let mut command = sandbox.command(arguments.iter().copied());
    command
        .stdout(theirs())
        .stderr(theirs())
        .env("TERM", "xterm");
    let mut child = command.spawn().expect("the program starts");
    // Its ends of the terminal are closed when it ends, and reading fails then.
    drop(command);
    let mut bytes = Vec::new();
    let _ = File::from(ours).read_to_end(&mut bytes);
    let status = child.wait().expect("the program ends");
    let text = String::from_utf8_lossy(&bytes).into_owned();
    assert!(status.success(), "{status}\n{text}");
    text
}

/// The lines that were drawn. Escapes move the cursor; a line that is padded to the whole width
/// ends there.
fn drawn(text: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        let is_full = lines
            .last()
            .is_some_and(|line| line.chars().count() == usize::from(COLUMNS));
        let is_escape = character == '\u{1b}';
        if is_escape {
            // `ESC [ numbers letter`
            let _ = characters.find(char::is_ascii_alphabetic);
        }
        if is_full || is_escape || ['\r', '\n'].contains(&character) {
            lines.push(String::new());
        }
        if !is_escape && let Some(line) = lines.last_mut() {
            line.extend(Some(character).filter(|one| !one.is_control()));
        }
    }
    lines
}

#[test]
fn nothing_is_lost_or_wrapped() {
    let sandbox = Sandbox::new();
    let arguments = tiny("--max-steps 60 --eval-steps 20 --log-steps 10 --output-dir run");
    let text = run_on_terminal(&sandbox, &arguments);
    let lines = drawn(&text);
    for part in [
        "run: a new one, in run",
        "data: ",
        "training steps 1 to 60 on 1 thread, ",
        "step 20: validation loss ",
        "step 60: saved run/checkpoints/step-00000060",
        "step 60/60 [========] epoch ",
        "checkpoint: ",
    ] {
        assert!(
            lines.iter().any(|line| line.starts_with(part)),
            "no {part} in\n{text}"
        );
    }
    // A bar that needs a second line moves the cursor up to draw itself again.
    assert!(!text.contains("\u{1b}[1A"), "{text:?}");
    let plain = text.split("\r\n").filter(|line| !line.contains('\u{1b}'));
    let wide = plain
        .clone()
        .find(|line| line.chars().count() > usize::from(COLUMNS));
    assert_eq!(wide, None);
}
