//! The process that starts workers and tells what became of them.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::current;
use crate::find::{Find, digest};
use crate::target::Target;
use crate::worker::Stop;

/// An input that is not read after this long is a find.
const PATIENCE: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(20);
/// Workers that may die before a target is given up.
const DEATHS: usize = 16;

/// A run of one target.
pub struct Campaign {
    pub target: &'static Target,
    pub stop: Stop,
    pub seed: u64,
    /// Where each target has a folder for its corpus and its finds.
    pub folder: PathBuf,
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    pub inputs: u64,
    /// Edges of the program that were reached; 0 in a build that does not count them.
    pub edges: u64,
    /// Inputs that were kept because they reached new ones.
    pub kept: u64,
    /// Milliseconds of the slowest input.
    pub slowest: u64,
    pub finds: Vec<Find>,
}

/// Why a worker ended before its time.
enum Death {
    Hang,
    Crash(ExitStatus),
}

/// Runs a target in processes of its own until it is done.
pub fn watch(campaign: &Campaign, program: &Path) -> io::Result<Summary> {
    let folder = campaign.folder.join(campaign.target.name);
    let finds = folder.join("finds");
    // The finds are those of this run; the corpus grows from run to run.
    if finds.exists() {
        fs::remove_dir_all(&finds)?;
    }
    fs::create_dir_all(&folder)?;
    let start = Instant::now();
    let mut summary = Summary::default();
    for death in 0..DEATHS as u64 {
        let stop = match campaign.stop {
            Stop::Inputs(inputs) => Stop::Inputs(inputs.saturating_sub(summary.inputs)),
            Stop::After(time) => Stop::After(time.saturating_sub(start.elapsed())),
        };
        // A scratch folder in memory, where there is one: nothing in it is to last.
        let memory = Path::new("/dev/shm");
        let scratch = match memory.is_dir() {
            true => tempfile::tempdir_in(memory),
            false => tempfile::tempdir(),
        }?;
        let mut child = Command::new(program)
            .args([campaign.target.name, "--worker"])
            .arg(scratch.path())
            .arg("--folder")
            .arg(&campaign.folder)
            .args(["--seed", &(campaign.seed + death).to_string()])
            .args(match stop {
                Stop::Inputs(inputs) => ["--inputs".to_owned(), inputs.to_string()],
                Stop::After(time) => ["--seconds".to_owned(), time.as_secs().to_string()],
            })
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::null())
            .stdout(File::create(folder.join("stdout"))?)
            .stderr(File::create(folder.join("stderr"))?)
            .spawn()?;
        let Some(death) = wait(&mut child, &folder.join("current"))? else {
            read_result(&folder.join("stdout"), &mut summary)?;
            break;
        };
        let input = current::input(&folder.join("current"))?;
        summary.inputs += current::number(&folder.join("current"));
        let reason = match death {
            Death::Hang => format!("not read after {} s", PATIENCE.as_secs()),
            Death::Crash(status) => format!("{status}: {}", end_of(&folder.join("stderr"))?),
        };
        Find::keep(
            &finds,
            &format!("abort {}", digest(&input)),
            &input,
            &reason,
        )?;
    }
    summary.finds = Find::list(&finds);
    Ok(summary)
}

/// Waits for a worker: none if it ended well.
fn wait(child: &mut Child, current: &Path) -> io::Result<Option<Death>> {
    let mut last = (0, Instant::now());
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok((!status.success()).then_some(Death::Crash(status)));
        }
        let number = current::number(current);
        if number != last.0 {
            last = (number, Instant::now());
        } else if last.1.elapsed() > PATIENCE {
            child.kill()?;
            child.wait()?;
            return Ok(Some(Death::Hang));
        }
        sleep(PAUSE);
    }
}

/// Adds what a worker printed: four numbers.
fn read_result(path: &Path, summary: &mut Summary) -> io::Result<()> {
    let text = fs::read_to_string(path)?;
    let numbers: Vec<u64> = text
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    let [inputs, edges, kept, slowest] = numbers[..] else {
        return Err(io::Error::other(format!("a worker said `{text}`")));
    };
    summary.inputs += inputs;
    summary.edges = edges;
    summary.kept += kept;
    summary.slowest = slowest;
    Ok(())
}

fn end_of(path: &Path) -> io::Result<String> {
    const MOST: u64 = 2000;
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(MOST)))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
}
