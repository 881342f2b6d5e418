//! A terminal for the command, between it and the user's own: programs draw their progress bars,
//! Ctrl-C reaches them, and what they print can be read on its way.
//!
//! The command has to be the leader of a session whose terminal is the new one. A process can make
//! itself that and then become another program, so the program that runs here starts itself once
//! more, under a name that nobody types, and that becomes the command.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Pid, Signal};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{
    LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetpgrp, tcgetwinsize,
    tcsetattr, tcsetwinsize,
};

use crate::error::SuperviseError;

/// The first argument of a program that is to become a command on its terminal: the number of the
/// stream that is the terminal and the command follow.
pub const LAUNCHER: &str = "exec-on-terminal";

/// Becomes the command `arguments[1..]`, as the leader of a session on the terminal that stream
/// `arguments[0]` is. Returns only where that fails.
pub fn exec_on_terminal(arguments: &[OsString]) -> io::Error {
    let wrong = || io::Error::new(io::ErrorKind::InvalidInput, "no command was given");
    let [stream, program, rest @ ..] = arguments else {
        return wrong();
    };
    let session = rustix::process::setsid().and_then(|_| match stream.to_str() {
        Some("0") => rustix::process::ioctl_tiocsctty(rustix::stdio::stdin()),
        Some("1") => rustix::process::ioctl_tiocsctty(rustix::stdio::stdout()),
        _ => rustix::process::ioctl_tiocsctty(rustix::stdio::stderr()),
    });
    if let Err(error) = session {
        return error.into();
    }
    Command::new(program).args(rest).exec()
}

/// Whether the user's terminal is ours to read and to set: a job in the background would be
/// stopped by both.
pub(crate) fn is_foreground() -> bool {
    let stdin = rustix::stdio::stdin();
    tcgetpgrp(stdin).is_ok_and(|group| group == rustix::process::getpgrp())
}

/// The two ends of a terminal.
#[derive(Debug)]
pub(crate) struct Pair {
    pub ours: File,
    name: std::ffi::CString,
}

impl Pair {
    /// A new terminal with the size and the modes of the user's, which `raw` has changed.
    pub fn open(raw: Option<&Raw>) -> Result<Self, SuperviseError> {
        let failed = |error: rustix::io::Errno| SuperviseError::Terminal(error.into());
        let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).map_err(failed)?;
        grantpt(&ours).map_err(failed)?;
        unlockpt(&ours).map_err(failed)?;
        let name = ptsname(&ours, Vec::new()).map_err(failed)?;
        let pair = Self {
            ours: File::from(ours),
            name,
        };
        pair.copy_size();
        let modes = match raw {
            Some(raw) => Some(raw.before.clone()),
            None => users_terminal().and_then(|user| tcgetattr(user).ok()),
        };
        if let Some(modes) = modes {
            let _ = tcsetattr(&pair.ours, OptionalActions::Now, &modes);
        }
        Ok(pair)
    }

    /// The command's end.
    pub fn theirs(&self) -> Result<File, SuperviseError> {
        use std::os::unix::ffi::OsStrExt;
        let name = std::ffi::OsStr::from_bytes(self.name.to_bytes());
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true);
        // Not ours to be led by.
        use std::os::unix::fs::OpenOptionsExt;
        let options = options.custom_flags(rustix::fs::OFlags::NOCTTY.bits() as i32);
        options.open(name).map_err(SuperviseError::Terminal)
    }

    pub fn copy_size(&self) {
        copy_size(&self.ours);
    }
}

/// Gives the command's terminal the size of the user's.
pub(crate) fn copy_size(ours: &File) {
    if let Some(size) = users_terminal().and_then(|user| tcgetwinsize(user).ok()) {
        let _ = tcsetwinsize(ours, size);
    }
}

/// A stream that is the user's terminal.
fn users_terminal() -> Option<BorrowedFd<'static>> {
    let streams = [
        rustix::stdio::stdout(),
        rustix::stdio::stderr(),
        rustix::stdio::stdin(),
    ];
    streams
        .into_iter()
        .find(|stream| rustix::termios::isatty(stream))
}

/// The user's terminal in raw mode, until it is dropped: every key goes to the command's.
#[derive(Debug)]
pub(crate) struct Raw {
    before: Termios,
}

impl Raw {
    /// `None` where input is no terminal, or not ours.
    pub fn enter() -> Option<Self> {
        if !io::stdin().is_terminal() || !is_foreground() {
            return None;
        }
        let before = tcgetattr(rustix::stdio::stdin()).ok()?;
        let raw = Self { before };
        raw.again();
        Some(raw)
    }

    pub fn again(&self) {
        let mut modes = self.before.clone();
        modes.make_raw();
        let _ = tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, &modes);
    }

    pub fn leave(&self) {
        let _ = tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, &self.before);
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        self.leave();
    }
}

/// What a key means to the command's terminal, where the command has not taken keys over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meaning {
    Interrupt,
    Suspend,
    Plain,
}

pub(crate) fn meaning(ours: &File, byte: u8) -> Meaning {
    let Ok(modes) = tcgetattr(ours) else {
        return Meaning::Plain;
    };
    if !modes.local_modes.contains(LocalModes::ISIG) {
        return Meaning::Plain;
    }
    let codes = &modes.special_codes;
    match byte {
        _ if byte == codes[SpecialCodeIndex::VINTR] || byte == codes[SpecialCodeIndex::VQUIT] => {
            Meaning::Interrupt
        }
        _ if byte == codes[SpecialCodeIndex::VSUSP] => Meaning::Suspend,
        _ => Meaning::Plain,
    }
}

/// The byte that ends input.
pub(crate) fn end_of_input(ours: &mut File) {
    let code = tcgetattr(ours.as_fd()).map(|modes| modes.special_codes[SpecialCodeIndex::VEOF]);
    let _ = ours.write_all(&[code.unwrap_or(4)]);
}

/// Stops the command and this process, and lets both go on when the user says so. The command
/// cannot be stopped by its terminal: its session has no shell to go back to.
pub(crate) fn suspend(group: Pid, raw: Option<&Raw>, ours: &File) {
    let _ = rustix::process::kill_process_group(group, Signal::STOP);
    if let Some(raw) = raw {
        raw.leave();
    }
    let _ = rustix::process::kill_process(rustix::process::getpid(), Signal::STOP);
    // Here the user has said `fg`.
    if let Some(raw) = raw {
        raw.again();
    }
    copy_size(ours);
    let _ = rustix::process::kill_process_group(group, Signal::CONT);
}
