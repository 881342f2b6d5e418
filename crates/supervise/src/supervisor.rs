//! One process after the other, each as if it ran alone: streams, signals and terminal are passed
//! through, and what it prints is read on the way.

use std::ffi::OsString;
use std::io::{self, IsTerminal, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use signal_hook::consts::signal::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::Cause;

use crate::capture::Capture;
use crate::error::SuperviseError;
use crate::kernel::KernelKills;
use crate::terminal::{self, LAUNCHER, Meaning, Pair, Raw};

/// How long output is waited for after the command has ended: what it left running may hold its
/// streams open.
const LINGER: Duration = Duration::from_millis(300);
/// How long a command that was told to stop may take.
const GRACE: Duration = Duration::from_secs(20);
/// Bytes that are passed on at once.
const PIECE: usize = 64 << 10;

/// How a command ended.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    pub capture: Capture,
    /// Processes that the kernel ended meanwhile for want of memory.
    pub kernel_kills: u64,
    pub seconds: f64,
    /// It was stopped because it had run for as long as a trial takes.
    pub is_probe: bool,
}

/// The process that runs now.
#[derive(Debug, Default)]
struct Current {
    pid: Option<Pid>,
    /// Our end of its terminal.
    terminal: Option<std::fs::File>,
}

#[derive(Debug, Default)]
struct Shared {
    current: Mutex<Current>,
    stopped: AtomicBool,
}

impl Shared {
    fn current(&self) -> MutexGuard<'_, Current> {
        self.current
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Passes signals and input on for as long as the program runs.
#[derive(Debug)]
pub struct Supervisor {
    shared: Arc<Shared>,
    /// Whether the command gets a terminal of its own.
    on_terminal: bool,
    raw: Option<Arc<Raw>>,
}

impl Supervisor {
    /// From here on signals are passed on instead of ending this process.
    pub fn new() -> Result<Self, SuperviseError> {
        let shared = Arc::new(Shared::default());
        let shows = io::stdout().is_terminal() || io::stderr().is_terminal();
        let on_terminal = shows && (terminal::is_foreground() || !io::stdin().is_terminal());
        let signals = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH];
        let mut signals =
            SignalsInfo::<WithOrigin>::new(signals).map_err(SuperviseError::Signals)?;
        let receiver = Arc::clone(&shared);
        spawn("signals", move || {
            for origin in signals.forever() {
                pass_on(&receiver, origin.signal, &origin.cause, on_terminal);
            }
        })
        .map_err(SuperviseError::Signals)?;
        let raw = match on_terminal {
            true => Raw::enter().map(Arc::new),
            false => None,
        };
        if raw.is_some() {
            let (shared, raw) = (Arc::clone(&shared), raw.clone());
            spawn("input", move || pass_input(&shared, raw.as_deref()))
                .map_err(SuperviseError::Signals)?;
        }
        Ok(Self {
            shared,
            on_terminal,
            raw,
        })
    }

    /// Whether somebody asked for a stop.
    pub fn is_stopped(&self) -> bool {
        self.shared.stopped.load(Ordering::Relaxed)
    }

    /// The number of the process that runs now.
    pub fn process(&self) -> Option<u32> {
        let pid = self.shared.current().pid;
        pid.and_then(|pid| u32::try_from(pid.as_raw_nonzero().get()).ok())
    }

    /// Runs a command to its end. With `probe`, it is told to stop when it has run for so long.
    /// `started` is given its number.
    pub fn run(
        &self,
        command: &[OsString],
        probe: Option<Duration>,
        started: impl FnOnce(u32),
    ) -> Result<Ended, SuperviseError> {
        let before = KernelKills::now();
        let begin = Instant::now();
        let capture = Arc::new(Mutex::new(Capture::default()));
        let (done, relays) = mpsc::channel();
        let (mut child, num_relays) = match self.on_terminal {
            true => self.start_on_terminal(command, &capture, &done)?,
            false => start_on_pipes(command, &capture, &done)?,
        };
        drop(done);
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        self.shared.current().pid = pid;
        started(child.id());
        let (status, is_probe) = self.wait(&mut child, probe)?;
        self.shared.current().pid = None;
        drain(&relays, num_relays);
        *self.shared.current() = Current::default();
        let mut capture = capture
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut capture = std::mem::take(&mut *capture);
        capture.finish();
        Ok(Ended {
            status,
            capture,
            kernel_kills: KernelKills::now().since(&before),
            seconds: begin.elapsed().as_secs_f64(),
            is_probe,
        })
    }

    fn wait(
        &self,
        child: &mut Child,
        probe: Option<Duration>,
    ) -> Result<(ExitStatus, bool), SuperviseError> {
        let failed = |source| SuperviseError::Start {
            command: "the command".to_owned(),
            source,
        };
        let Some(probe) = probe else {
            return Ok((child.wait().map_err(failed)?, false));
        };
        let pid = self.shared.current().pid;
        let end = Instant::now() + probe;
        let mut kill_at = None;
        loop {
            if let Some(status) = child.try_wait().map_err(failed)? {
                return Ok((status, kill_at.is_some()));
            }
            let now = Instant::now();
            match kill_at {
                None if now >= end => {
                    self.tell(pid, Signal::TERM);
                    kill_at = Some(now + GRACE);
                }
                Some(at) if now >= at => {
                    self.tell(pid, Signal::KILL);
                    kill_at = Some(now + GRACE);
                }
                _ => {}
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn tell(&self, pid: Option<Pid>, signal: Signal) {
        let Some(pid) = pid else { return };
        let _ = match self.on_terminal {
            true => rustix::process::kill_process_group(pid, signal),
            false => rustix::process::kill_process(pid, signal),
        };
    }

    fn start_on_terminal(
        &self,
        command: &[OsString],
        capture: &Arc<Mutex<Capture>>,
        done: &mpsc::Sender<()>,
    ) -> Result<(Child, usize), SuperviseError> {
        let pair = Pair::open()?;
        let program = std::env::current_exe().map_err(SuperviseError::Terminal)?;
        let shows = [
            io::stdin().is_terminal(),
            io::stdout().is_terminal(),
            io::stderr().is_terminal(),
        ];
        let stream = shows.iter().position(|shows| *shows).unwrap_or(1);
        let mut starting = Command::new(program);
        starting.arg(LAUNCHER).arg(stream.to_string()).args(command);
        if shows[0] {
            starting.stdin(pair.theirs()?);
        }
        starting.stdout(if shows[1] {
            pair.theirs()?.into()
        } else {
            Stdio::piped()
        });
        starting.stderr(if shows[2] {
            pair.theirs()?.into()
        } else {
            Stdio::piped()
        });
        let mut child = starting
            .spawn()
            .map_err(|source| start_error(command, source))?;
        // Only the command holds the other end now: reading ends when it does.
        drop(starting);
        let ours = pair.ours.try_clone().map_err(SuperviseError::Terminal)?;
        self.shared.current().terminal = Some(pair.ours);
        let mut num_relays = 1;
        match shows[1] {
            true => relay(ours, io::stdout(), capture, done),
            false => relay(ours, io::stderr(), capture, done),
        }
        num_relays += relay_pipes(&mut child, capture, done);
        Ok((child, num_relays))
    }
}

fn start_on_pipes(
    command: &[OsString],
    capture: &Arc<Mutex<Capture>>,
    done: &mpsc::Sender<()>,
) -> Result<(Child, usize), SuperviseError> {
    let Some((program, arguments)) = command.split_first() else {
        return Err(start_error(command, io::ErrorKind::InvalidInput.into()));
    };
    let mut child = Command::new(program)
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|source| start_error(command, source))?;
    let num_relays = relay_pipes(&mut child, capture, done);
    Ok((child, num_relays))
}

fn start_error(command: &[OsString], source: io::Error) -> SuperviseError {
    let name = command
        .first()
        .map(|program| program.to_string_lossy().into_owned());
    SuperviseError::Start {
        command: name.unwrap_or_default(),
        source,
    }
}

fn relay_pipes(child: &mut Child, capture: &Arc<Mutex<Capture>>, done: &mpsc::Sender<()>) -> usize {
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let count = usize::from(stdout.is_some()) + usize::from(stderr.is_some());
    if let Some(stdout) = stdout {
        relay(stdout, io::stdout(), capture, done);
    }
    if let Some(stderr) = stderr {
        relay(stderr, io::stderr(), capture, done);
    }
    count
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new()
        .name(name.to_owned())
        .spawn(work)
        .map(|_| ())
}

/// Passes on what comes, until it ends or nobody takes it any more. Then our end of a pipe is
/// closed, and the command is told as it would be by its reader.
fn relay(
    mut from: impl Read + Send + 'static,
    mut to: impl Write + Send + 'static,
    capture: &Arc<Mutex<Capture>>,
    done: &mpsc::Sender<()>,
) {
    let (capture, done) = (Arc::clone(capture), done.clone());
    let work = move || {
        let mut piece = vec![0; PIECE];
        loop {
            let length = match from.read(&mut piece) {
                Ok(0) => break,
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // A terminal whose other end is closed.
                Err(_) => break,
            };
            if let Ok(mut capture) = capture.lock() {
                capture.push(&piece[..length]);
            }
            if to
                .write_all(&piece[..length])
                .and_then(|()| to.flush())
                .is_err()
            {
                break;
            }
        }
        let _ = done.send(());
    };
    // Without a thread the stream is closed, and the command is told.
    let _ = spawn("relay", work);
}

/// Waits for the rest of the output.
fn drain(relays: &Receiver<()>, count: usize) {
    for _ in 0..count {
        match relays.recv_timeout(LINGER) {
            Ok(()) => {}
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Passes a signal on to the command.
fn pass_on(shared: &Shared, signal: i32, cause: &Cause, on_terminal: bool) {
    let current = shared.current();
    if signal == SIGWINCH {
        if let Some(ours) = &current.terminal {
            terminal::copy_size(ours);
        }
        return;
    }
    if ![SIGUSR1, SIGUSR2].contains(&signal) {
        shared.stopped.store(true, Ordering::Relaxed);
    }
    let (Some(pid), Some(signal)) = (current.pid, Signal::from_named_raw(signal)) else {
        return;
    };
    let _ = match (on_terminal, cause) {
        (true, _) => rustix::process::kill_process_group(pid, signal),
        // The terminal has sent it to the command as well: both are of one group.
        (false, Cause::Kernel) => Ok(()),
        (false, _) => rustix::process::kill_process(pid, signal),
    };
}

/// Passes keys on to the command's terminal.
fn pass_input(shared: &Shared, raw: Option<&Raw>) {
    let mut piece = [0; 4096];
    loop {
        let length = match io::stdin().read(&mut piece) {
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => return,
        };
        let (pid, terminal) = {
            let current = shared.current();
            let terminal = current
                .terminal
                .as_ref()
                .and_then(|file| file.try_clone().ok());
            (current.pid, terminal)
        };
        let Some(mut ours) = terminal else { continue };
        if length == 0 {
            terminal::end_of_input(&mut ours);
            return;
        }
        for byte in &piece[..length] {
            match (terminal::meaning(&ours, *byte), pid) {
                (Meaning::Suspend, Some(pid)) => {
                    terminal::suspend(pid, raw, &ours);
                    continue;
                }
                (Meaning::Interrupt, _) => shared.stopped.store(true, Ordering::Relaxed),
                _ => {}
            }
            if ours.write_all(&[*byte]).is_err() {
                break;
            }
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        if let Some(raw) = &self.raw {
            raw.leave();
        }
    }
}

/// Ends this process as the command ended: by the same signal, or `Some` exit code to return.
pub fn as_the_command_ended(status: ExitStatus) -> u8 {
    if let Some(signal) = status.signal() {
        // The core, if there is one, is the command's.
        let none = rustix::process::Rlimit {
            current: Some(0),
            maximum: Some(0),
        };
        let _ = rustix::process::setrlimit(rustix::process::Resource::Core, none);
        let _ = signal_hook::low_level::emulate_default_handler(signal);
        return u8::try_from(128 + signal).unwrap_or(u8::MAX);
    }
    status
        .code()
        .and_then(|code| u8::try_from(code).ok())
        .unwrap_or(1)
}
