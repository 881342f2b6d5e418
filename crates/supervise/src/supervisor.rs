//! One process after the other, each as if it ran alone: streams, signals and terminal are passed
//! through, and what it prints is read on the way.

use std::ffi::OsString;
use std::io::{self, IsTerminal, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use signal_hook::consts::signal::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::Cause;

use crate::capture::{Capture, Stream};
use crate::error::SuperviseError;
use crate::kernel::KernelKills;
use crate::terminal::{self, LAUNCHER, Meaning, Pair, Raw};

/// How long nothing may come after the command has ended, before its output is taken for whole:
/// what it left running may hold its streams open. A reader that is slow is waited for.
const LINGER: Duration = Duration::from_secs(2);
/// How often that is looked at.
const LOOK: Duration = Duration::from_millis(50);
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

/// How far the relays of a command are.
#[derive(Debug, Default)]
struct Progress {
    /// Pieces that were read and written.
    count: AtomicU64,
    /// Relays that wait for whoever reads from us.
    num_writing: AtomicUsize,
}

/// What the relays of a command share.
#[derive(Clone, Debug)]
struct Relays {
    capture: Arc<Mutex<Capture>>,
    progress: Arc<Progress>,
    done: mpsc::Sender<()>,
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

    /// Says something while the terminal breaks lines as usual.
    pub fn aside(&self, say: impl FnOnce()) {
        if let Some(raw) = &self.raw {
            raw.leave();
        }
        say();
        if let Some(raw) = &self.raw {
            raw.again();
        }
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
        let (done, ended) = mpsc::channel();
        let relays = Relays {
            capture: Arc::default(),
            progress: Arc::default(),
            done,
        };
        let (mut child, num_relays) = match self.on_terminal {
            true => self.start_on_terminal(command, &relays)?,
            false => start_on_pipes(command, &relays)?,
        };
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        self.shared.current().pid = pid;
        // A stop that came while there was nobody to pass it on to.
        if self.is_stopped() {
            self.tell(pid, Signal::INT);
        }
        started(child.id());
        let (status, is_probe) = self.wait(&mut child, probe)?;
        self.shared.current().pid = None;
        drain(&ended, num_relays, &relays.progress);
        *self.shared.current() = Current::default();
        let mut kept = relays
            .capture
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut capture = std::mem::take(&mut *kept);
        drop(kept);
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
        relays: &Relays,
    ) -> Result<(Child, usize), SuperviseError> {
        let pair = Pair::open(self.raw.as_deref())?;
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
            true => relay(ours, io::stdout(), Stream::Output, relays),
            false => relay(ours, io::stderr(), Stream::Error, relays),
        }
        num_relays += relay_pipes(&mut child, relays);
        Ok((child, num_relays))
    }
}

fn start_on_pipes(command: &[OsString], relays: &Relays) -> Result<(Child, usize), SuperviseError> {
    let Some((program, arguments)) = command.split_first() else {
        return Err(start_error(command, io::ErrorKind::InvalidInput.into()));
    };
    let mut child = Command::new(program)
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|source| start_error(command, source))?;
    let num_relays = relay_pipes(&mut child, relays);
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

fn relay_pipes(child: &mut Child, relays: &Relays) -> usize {
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let count = usize::from(stdout.is_some()) + usize::from(stderr.is_some());
    if let Some(stdout) = stdout {
        relay(stdout, io::stdout(), Stream::Output, relays);
    }
    if let Some(stderr) = stderr {
        relay(stderr, io::stderr(), Stream::Error, relays);
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
    stream: Stream,
    relays: &Relays,
) {
    let relays = relays.clone();
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
            let progress = &relays.progress;
            progress.num_writing.fetch_add(1, Ordering::Relaxed);
            if let Ok(mut capture) = relays.capture.lock() {
                capture.push(stream, &piece[..length]);
            }
            let written = to.write_all(&piece[..length]).and_then(|()| to.flush());
            progress.num_writing.fetch_sub(1, Ordering::Relaxed);
            progress.count.fetch_add(1, Ordering::Relaxed);
            if written.is_err() {
                break;
            }
        }
        let _ = relays.done.send(());
    };
    // Without a thread the stream is closed, and the command is told.
    let _ = spawn("relay", work);
}

/// Waits for the rest of the output.
fn drain(ended: &Receiver<()>, count: usize, progress: &Progress) {
    let mut left = count;
    let mut seen = progress.count.load(Ordering::Relaxed);
    let mut since = Instant::now();
    while left > 0 {
        match ended.recv_timeout(LOOK) {
            Ok(()) => left -= 1,
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {
                let now = progress.count.load(Ordering::Relaxed);
                if now != seen || progress.num_writing.load(Ordering::Relaxed) > 0 {
                    (seen, since) = (now, Instant::now());
                } else if since.elapsed() >= LINGER {
                    return;
                }
            }
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
