//! The process that reads inputs.

use std::fs;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::coverage::Coverage;
use crate::current::Current;
use crate::find::{Find, digest};
use crate::memory;
use crate::mutate::{Dictionary, LONGEST, mutate};
use crate::random::Random;
use crate::target::{Target, memory_bound};

/// When a run ends.
#[derive(Clone, Copy, Debug)]
pub enum Stop {
    Inputs(u64),
    After(Duration),
}

/// Runs that shrinking an input may take.
const SHRINKING: usize = 2000;

/// The last panic, which the hook notes: where, and what it said.
static PANIC: Mutex<Option<(String, String)>> = Mutex::new(None);

pub struct Worker {
    target: &'static Target,
    /// An empty folder for the files of an input.
    scratch: PathBuf,
    /// Where finds and inputs that reach new edges are kept.
    folder: PathBuf,
    current: Current,
    coverage: Coverage,
    corpus: Vec<Vec<u8>>,
    number: u64,
    /// Places of panics that were kept already.
    known: Vec<String>,
    longest: Duration,
}

/// What a worker says at its end.
#[derive(Clone, Copy, Debug, Default)]
pub struct Result {
    pub inputs: u64,
    pub edges: u64,
    pub kept: u64,
    /// Milliseconds of the slowest input.
    pub slowest: u64,
}

/// Runs a target on its seeds, on what once was a find, and then on mutations of those.
pub fn work(
    target: &'static Target,
    scratch: &Path,
    folder: &Path,
    stop: Stop,
    seed: u64,
) -> io::Result<Result> {
    panic::set_hook(Box::new(|info| {
        let place = info.location().map_or_else(String::new, |place| {
            format!("{}:{}:{}", place.file(), place.line(), place.column())
        });
        if let Ok(mut noted) = PANIC.lock() {
            *noted = Some((place, info.to_string()));
        }
    }));
    let mut worker = Worker {
        target,
        scratch: scratch.to_owned(),
        folder: folder.to_owned(),
        current: Current::create(&folder.join("current"))?,
        coverage: Coverage::new(),
        corpus: Vec::new(),
        number: 0,
        known: Vec::new(),
        longest: Duration::ZERO,
    };
    let start = Instant::now();
    let seeds = (target.seeds)();
    let words = Dictionary::new(&seeds, (target.words)());
    for mut input in seeds
        .into_iter()
        .chain(stored(&regressions(target)))
        .chain(stored(&folder.join("corpus")))
    {
        input.truncate(LONGEST);
        worker.take(&input)?;
        worker.corpus.push(input);
    }
    let num_given = worker.corpus.len();
    let mut random = Random::new(seed);
    let ended = |worker: &Worker| match stop {
        Stop::Inputs(inputs) => worker.number >= inputs,
        Stop::After(time) => start.elapsed() >= time,
    };
    while !ended(&worker) {
        // Half of the time one of the newest: it reached what none before it did.
        let newest = worker.corpus.len().saturating_sub(32);
        let from = if random.one_in(2) {
            &worker.corpus[newest..]
        } else {
            &worker.corpus
        };
        let mut input = random.choose(from).cloned().unwrap_or_default();
        mutate(&mut input, &worker.corpus, &words, &mut random);
        if worker.take(&input)? {
            worker.keep(&input)?;
        }
    }
    Ok(Result {
        inputs: worker.number,
        edges: worker.coverage.num_edges() as u64,
        kept: (worker.corpus.len() - num_given) as u64,
        slowest: worker.longest.as_millis() as u64,
    })
}

/// Reads one input as a worker does, without catching anything.
pub fn replay(target: &Target, input: &[u8]) -> io::Result<()> {
    let scratch = tempfile::tempdir()?;
    memory::bounded(memory_bound(input.len()), || {
        (target.run)(input, scratch.path())
    });
    Ok(())
}

impl Worker {
    /// Reads an input; says whether it reached something new.
    fn take(&mut self, input: &[u8]) -> io::Result<bool> {
        self.coverage.clear();
        let panic = self.run(input)?;
        let grown = self.coverage.has_grown();
        if let Some((place, _)) = &panic
            && !self.known.contains(place)
        {
            self.known.push(place.clone());
            let small = self.shrink(input, place)?;
            let (_, reason) = self.run(&small)?.unwrap_or_default();
            Find::keep(
                &self.folder.join("finds"),
                &format!("panic {place}"),
                &small,
                &reason,
            )?;
        }
        Ok(grown && panic.is_none())
    }

    /// Runs the target once. A panic is given back with its place.
    fn run(&mut self, input: &[u8]) -> io::Result<Option<(String, String)>> {
        self.number += 1;
        self.current.set(self.number, input)?;
        let start = Instant::now();
        let (target, scratch) = (self.target, self.scratch.as_path());
        let result = memory::bounded(memory_bound(input.len()), || {
            panic::catch_unwind(AssertUnwindSafe(|| (target.run)(input, scratch)))
        });
        if start.elapsed() > self.longest {
            self.longest = start.elapsed();
            fs::write(self.folder.join("slowest"), input)?;
        }
        for entry in fs::read_dir(scratch)? {
            let path = entry?.path();
            if path.is_dir() {
                fs::remove_dir_all(path)?
            } else {
                fs::remove_file(path)?
            }
        }
        let noted = PANIC.lock().ok().and_then(|mut noted| noted.take());
        Ok(result.err().map(|_| noted.unwrap_or_default()))
    }

    /// Takes pieces out as long as the panic is the same.
    fn shrink(&mut self, input: &[u8], place: &str) -> io::Result<Vec<u8>> {
        let mut small = input.to_vec();
        let mut runs = 0;
        let mut piece = small.len() / 2;
        while piece > 0 && runs < SHRINKING {
            let mut at = 0;
            while at < small.len() && runs < SHRINKING {
                let mut shorter = small.clone();
                shorter.drain(at..(at + piece).min(small.len()));
                runs += 1;
                match self.run(&shorter)? {
                    Some((found, _)) if found == place => small = shorter,
                    _ => at += piece,
                }
            }
            piece /= 2;
        }
        Ok(small)
    }

    fn keep(&mut self, input: &[u8]) -> io::Result<()> {
        let corpus = self.folder.join("corpus");
        fs::create_dir_all(&corpus)?;
        fs::write(corpus.join(digest(input)), input)?;
        self.corpus.push(input.to_vec());
        Ok(())
    }
}

/// Inputs that once made a target fail.
fn regressions(target: &Target) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("regressions")
        .join(target.name)
}

/// The files of a folder, in order.
fn stored(folder: &Path) -> Vec<Vec<u8>> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
        .iter()
        .filter_map(|path| fs::read(path).ok())
        .collect()
}
