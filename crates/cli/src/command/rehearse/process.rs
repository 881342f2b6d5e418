//! The script's process: the folder it leaves its answers in, its environment, and its end.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context;
use cinch_card::library::{card, dnn_backend, ledger};
use cinch_card::{Emulated, LIBRARY, MODULES, deviceless};
use cinch_torch::snapshot::RECORDER;
use rustix::process::{
    Pid, Signal, WaitOptions, getpid, kill_process, kill_process_group, set_child_subreaper,
    test_kill_process, waitpid,
};

use crate::args::RehearseArguments;
use crate::failure::usage;
use crate::interrupt::{AGAIN, STOP};

/// How often the script is looked after, and how long it has between being asked to end and being ended.
const TICK: Duration = Duration::from_millis(20);
const PATIENCE: Duration = Duration::from_secs(5);
/// Signals so near each other are one.
const TOGETHER: Duration = Duration::from_millis(300);

/// Folders of rehearsals, by the process that made them.
const PREFIX: &str = "rehearsal-";

/// How a script came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Code(u8),
    Signal(u8),
    TimedOut,
    Interrupted,
}

/// A folder of the cache with the library, the Python modules, and what the script's processes leave. It goes when this
/// is dropped.
pub struct Rehearsal {
    folder: PathBuf,
    environment: Vec<(OsString, OsString)>,
    timeout: Option<Duration>,
    pub world: Option<(u32, u32)>,
}

impl Drop for Rehearsal {
    fn drop(&mut self) {
        // What cannot be removed now, the next rehearsal sweeps.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

impl Rehearsal {
    pub fn new(emulated: &Emulated, arguments: &RehearseArguments) -> anyhow::Result<Self> {
        let cache = cinch_files::find_cache_folder()?;
        sweep(&cache);
        let folder = cache.join(format!("{PREFIX}{}", std::process::id()));
        // The loader of programs takes both for the end of a name, and has no way to quote them.
        if folder.to_string_lossy().contains([' ', ':']) {
            return Err(usage(format!(
                "a library cannot be loaded from `{}`, because of its space or colon\nhint: name another cache folder by {}",
                cinch_files::shown(&folder),
                cinch_files::CACHE_VARIABLE
            )));
        }
        cinch_files::private_folder(&folder)?;
        let rehearsal = Self {
            environment: environment(&folder, emulated, arguments)?,
            folder,
            timeout: arguments
                .timeout
                .map(|seconds| Duration::from_secs(seconds.into())),
            world: arguments.world.map(|world| (world, arguments.rank)),
        };
        rehearsal.unpack()?;
        Ok(rehearsal)
    }

    fn unpack(&self) -> anyhow::Result<()> {
        let recorder = ("cinch_recorder.py", RECORDER);
        let texts = MODULES.iter().copied().chain([recorder]);
        let texts = texts.map(|(name, text)| (format!("python/{name}"), text.as_bytes()));
        fs::create_dir_all(self.folder.join("python"))?;
        for (name, bytes) in texts.chain([("libcuda.so.1".to_owned(), LIBRARY)]) {
            let path = self.folder.join(name);
            fs::write(&path, bytes)
                .with_context(|| format!("cannot write `{}`", cinch_files::shown(&path)))?;
        }
        let stand_ins = self.folder.join(dnn_backend::STAND_INS);
        fs::create_dir_all(&stand_ins)?;
        for name in [
            "libcublas.so.12",
            "libcublas.so.13",
            "libcublasLt.so.12",
            "libcublasLt.so.13",
        ] {
            std::os::unix::fs::symlink(self.folder.join("libcuda.so.1"), stand_ins.join(name))?;
        }
        Ok(())
    }

    /// Where the processes leave their answers.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The allocator's record of a process, in the recorder's form.
    pub fn recording(&self, process: u32) -> PathBuf {
        self.folder.join(format!("trace-{process}.jsonl"))
    }

    /// Forgets what an earlier run left.
    pub fn clear(&self) -> anyhow::Result<()> {
        for file in fs::read_dir(&self.folder)? {
            let file = file?;
            if file.file_name().to_string_lossy().contains('-') {
                fs::remove_file(file.path())?;
            }
        }
        Ok(())
    }

    /// Runs a command to its end. Its processes are a group of their own, and those that leave it become children of
    /// this process when their parents end, so that none is left.
    pub fn run(&self, command: &[OsString]) -> anyhow::Result<Ended> {
        let Some((program, rest)) = command.split_first() else {
            return Err(usage("there is no command after `--`"));
        };
        set_child_subreaper(Some(getpid())).context("cannot have orphans of the script")?;
        let mut child = Command::new(program)
            .args(rest)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .process_group(0)
            .spawn()
            .map_err(|error| not_started(program, rest, &error))?;
        let ended = wait(&mut child, self.timeout);
        signal(&child, Signal::KILL);
        end_orphans();
        ended
    }
}

/// Why a command did not start, and the way out: most often the file of a script stands where its Python should.
fn not_started(program: &OsStr, rest: &[OsString], error: &io::Error) -> anyhow::Error {
    let shown = program.to_string_lossy();
    let is_script = Path::new(program).extension() == Some(OsStr::new("py"));
    let hint = match error.kind() {
        _ if is_script => {
            let rest: Vec<_> = rest.iter().map(|word| word.to_string_lossy()).collect();
            let line = [shown.as_ref(), &rest.join(" ")].join(" ");
            format!(
                "a script is started by its Python: `-- python {}`",
                line.trim_end()
            )
        }
        io::ErrorKind::NotFound => {
            "name the Python that has the script's PyTorch, such as `-- .venv/bin/python train.py`"
                .to_owned()
        }
        _ => "the command is what stands after `--`, as it would be typed without cinch".to_owned(),
    };
    usage(format!("cannot start `{shown}`: {error}\nhint: {hint}"))
}

/// Ends what the script has left that is no longer of its group. Each that ends may leave others.
fn end_orphans() {
    const ROUNDS: usize = 100;
    for _ in 0..ROUNDS {
        let orphans = children();
        if orphans.is_empty() {
            return;
        }
        for orphan in orphans {
            // One that has ended by itself needs no signal; waiting for it takes its name away.
            let _ = kill_process(orphan, Signal::KILL);
            let _ = waitpid(Some(orphan), WaitOptions::empty());
        }
    }
}

/// The processes whose parent is this one.
fn children() -> Vec<Pid> {
    let own = std::process::id().to_string();
    let is_child = |process: &Pid| {
        let stat = fs::read_to_string(format!("/proc/{}/stat", process.as_raw_nonzero()));
        // Its name, in parentheses, may hold anything; then come its state and its parent.
        let stat = stat.unwrap_or_default();
        let rest = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
        rest.split(' ').nth(1) == Some(own.as_str())
    };
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.filter_map(Pid::from_raw).filter(is_child).collect()
}

fn signal(child: &Child, signal: Signal) {
    if let Some(group) = Pid::from_raw(child.id() as i32) {
        // A group that is gone needs no signal.
        let _ = kill_process_group(group, signal);
    }
}

fn wait(child: &mut Child, timeout: Option<Duration>) -> anyhow::Result<Ended> {
    let start = Instant::now();
    let mut asked: Option<(Instant, Ended)> = None;
    loop {
        if let Some(status) = child.try_wait()? {
            let code = status.code().map(|code| Ended::Code(code as u8));
            let killed = Ended::Signal(status.signal().unwrap_or_default() as u8);
            return Ok(asked.map_or(code.unwrap_or(killed), |(_, ended)| ended));
        }
        match asked {
            None if STOP.load(Ordering::Relaxed) => {
                signal(child, Signal::INT);
                asked = Some((Instant::now(), Ended::Interrupted));
            }
            None if timeout.is_some_and(|timeout| start.elapsed() >= timeout) => {
                // As Ctrl-C, so that the script's process still writes what it used.
                signal(child, Signal::INT);
                asked = Some((Instant::now(), Ended::TimedOut));
            }
            // Some programs send a signal to the process and then to its group.
            Some((since, _)) if since.elapsed() < TOGETHER => AGAIN.store(false, Ordering::Relaxed),
            Some((since, _)) if since.elapsed() >= PATIENCE || AGAIN.load(Ordering::Relaxed) => {
                signal(child, Signal::KILL)
            }
            _ => {}
        }
        std::thread::sleep(TICK);
    }
}

/// What the script's process finds in its environment, beside what cinch was started with.
fn environment(
    folder: &Path,
    emulated: &Emulated,
    arguments: &RehearseArguments,
) -> anyhow::Result<Vec<(OsString, OsString)>> {
    let library = folder.join("libcuda.so.1");
    let before = |name: &str, first: &OsStr, separator: &str| {
        let mut value = first.to_owned();
        if let Some(old) = std::env::var_os(name).filter(|old| !old.is_empty()) {
            value.push(separator);
            value.push(old);
        }
        (OsString::from(name), value)
    };
    let set = |name: &str, value: &OsStr| (OsString::from(name), value.to_owned());
    let program = std::env::current_exe().context("cannot tell where cinch is")?;
    let mut environment = vec![
        before("LD_PRELOAD", library.as_os_str(), ":"),
        before("LD_LIBRARY_PATH", folder.as_os_str(), ":"),
        before("PYTHONPATH", folder.join("python").as_os_str(), ":"),
        set("TRITON_LIBCUDA_PATH", folder.as_os_str()),
        set(card::VARIABLE, OsStr::new(&emulated.variable())),
        set(ledger::VARIABLE, folder.as_os_str()),
        set(dnn_backend::PROGRAM, program.as_os_str()),
        set(
            deviceless::DEVICE_VARIABLE,
            OsStr::new(&emulated.cudnn_device()),
        ),
        set("CINCH_REHEARSAL", folder.as_os_str()),
    ];
    // A card that the user has hidden would hide this one too.
    environment.push(set("CUDA_VISIBLE_DEVICES", OsStr::new(&visible(emulated))));
    if let Some(step) = arguments.until_step {
        environment.push(set("CINCH_REHEARSAL_UNTIL", OsStr::new(&step.to_string())));
    }
    if arguments.explain || arguments.timeline || arguments.recording.is_some() {
        environment.push(set("CINCH_REHEARSAL_TRACE", OsStr::new("1")));
    }
    if let Some(world) = arguments.world {
        let devices = emulated.card.devices as u32;
        let local = (arguments.rank % devices).to_string();
        for (name, value) in [
            ("CINCH_REHEARSAL_WORLD", world.to_string()),
            ("WORLD_SIZE", world.to_string()),
            ("RANK", arguments.rank.to_string()),
            ("LOCAL_RANK", local),
            ("LOCAL_WORLD_SIZE", devices.to_string()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("MASTER_PORT", "29500".to_owned()),
        ] {
            environment.push(set(name, OsStr::new(&value)));
        }
    }
    Ok(environment)
}

fn visible(emulated: &Emulated) -> String {
    let numbers: Vec<String> = (0..emulated.card.devices)
        .map(|number| number.to_string())
        .collect();
    numbers.join(",")
}

/// Removes folders of rehearsals whose process is gone.
fn sweep(cache: &Path) {
    for entry in fs::read_dir(cache).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        let process = process
            .and_then(|number| number.parse().ok())
            .and_then(Pid::from_raw);
        if process.is_some_and(|process| test_kill_process(process).is_err()) {
            // A folder that stays is swept next time.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
