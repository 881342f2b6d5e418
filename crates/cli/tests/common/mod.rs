//! Running the real program in a folder of its own: no test sees another's files, cache or
//! environment.
#![allow(dead_code, reason = "each test file uses its own part of this")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

/// A model that takes a millisecond a step, on the built-in text.
pub const TINY: [&str; 20] = [
    "--set",
    "model.d_model=32",
    "--set",
    "model.n_layers=2",
    "--set",
    "model.max_seq_len=64",
    "--set",
    "model.vocab_size=257",
    "--tokenizer",
    "bytes",
    "--seq-len",
    "32",
    "--batch-size",
    "2",
    "--grad-accum",
    "2",
    "--lr",
    "3e-3",
    "--threads",
    "1",
];

/// A file of the predictor's own tests.
pub fn predictor_fixture(name: &str) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../torch/tests/fixtures");
    let path: PathBuf = [folder, name].iter().collect();
    path.to_string_lossy().into_owned()
}

/// A current folder and a cache that live as long as the test.
pub struct Sandbox {
    folder: TempDir,
}

impl Sandbox {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        fs::create_dir(folder.path().join("work")).expect("a current folder");
        Self { folder }
    }

    /// The current folder of the program.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("work")
    }

    pub fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.path().join(name)
    }

    pub fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        let path = self.join(name);
        let parent = path.parent().expect("a file lies in a folder");
        fs::create_dir_all(parent).expect("a folder for the file");
        fs::write(&path, contents).expect("a written file");
        path
    }

    /// Where the program looks for models that were downloaded.
    pub fn hub(&self) -> PathBuf {
        self.folder.path().join("hub")
    }

    /// The program, ready to be started with these arguments.
    pub fn command<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cinch"));
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("CINCH_") || text.starts_with("PYTORCH_") {
                command.env_remove(name);
            }
        }
        command
            .args(arguments)
            .env("CINCH_CACHE", self.folder.path().join("cache"))
            .env("HF_HUB_CACHE", self.folder.path().join("hub"))
            .env_remove("COLUMNS")
            .env_remove("NO_COLOR")
            // No card, so that the answers are the same on every machine.
            .env("CUDA_VISIBLE_DEVICES", "")
            .current_dir(self.path())
            .stdin(Stdio::null());
        command
    }

    /// Runs the program to its end.
    pub fn run<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> Ran {
        let mut command = self.command(arguments);
        let output = command.output().expect("the program starts");
        Ran::new(&command, &output)
    }

    /// Runs a command line without blanks inside its arguments.
    pub fn cinch(&self, line: &str) -> Ran {
        self.run(line.split_whitespace())
    }

    /// As [`Self::cinch`], in lines of so many columns.
    pub fn cinch_in(&self, columns: u16, line: &str) -> Ran {
        let mut command = self.command(line.split_whitespace());
        command.env("COLUMNS", columns.to_string());
        let output = command.output().expect("the program starts");
        Ran::new(&command, &output)
    }

    /// `cinch train` of the [`TINY`] model with more arguments.
    pub fn train_tiny(&self, line: &str) -> Ran {
        self.run(tiny(line))
    }

    /// Starts the program and lets it run.
    pub fn start<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> Child {
        self.command(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts")
    }
}

/// The arguments of `cinch train` for the [`TINY`] model, and more.
pub fn tiny(line: &str) -> Vec<&str> {
    let mut arguments = vec!["train"];
    arguments.extend(TINY);
    arguments.extend(line.split_whitespace());
    arguments
}

/// What a run of the program left behind.
pub struct Ran {
    pub line: String,
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    pub fn new(command: &Command, output: &Output) -> Self {
        Self {
            line: format!("{:?}", command.get_args().collect::<Vec<_>>()),
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    fn all(&self) -> String {
        format!(
            "{}\nexit code {:?}\n-- stdout --\n{}\n-- stderr --\n{}",
            self.line, self.code, self.stdout, self.stderr
        )
    }

    #[track_caller]
    pub fn exits(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{}", self.all());
        self
    }

    #[track_caller]
    pub fn succeeds(self) -> Self {
        self.exits(0)
    }

    /// Standard output holds each of these.
    #[track_caller]
    pub fn prints(self, parts: &[&str]) -> Self {
        for part in parts {
            assert!(self.stdout.contains(part), "no `{part}` in\n{}", self.all());
        }
        self
    }

    /// Standard error holds each of these.
    #[track_caller]
    pub fn says(self, parts: &[&str]) -> Self {
        for part in parts {
            assert!(self.stderr.contains(part), "no `{part}` in\n{}", self.all());
        }
        self
    }

    /// An error: its exit code, and a message with each of these parts that is no panic.
    #[track_caller]
    pub fn fails(self, code: i32, parts: &[&str]) -> Self {
        let ran = self.exits(code).says(&["error: "]).says(parts);
        assert!(!ran.stderr.contains("panicked"), "{}", ran.all());
        ran
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("not JSON: {error}\n{}", self.all()))
    }
}

/// The lines of a run's `metrics.jsonl`.
pub fn metrics(run: &Path) -> Vec<Value> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).expect("a run has metrics");
    text.lines()
        .map(|line| serde_json::from_str(line).expect("each line is JSON"))
        .collect()
}

/// The lines of a run's `metrics.jsonl` without what depends on the clock and the process.
pub fn record(run: &Path) -> Vec<Value> {
    let mut lines = metrics(run);
    for line in &mut lines {
        let fields = line.as_object_mut().expect("an object");
        for field in ["tokens_per_second", "step_seconds", "resident_bytes"] {
            fields.remove(field);
        }
    }
    lines
}

/// The names in a run's `checkpoints` folder, sorted.
pub fn checkpoints(run: &Path) -> Vec<String> {
    let entries = fs::read_dir(run.join("checkpoints")).expect("a run has checkpoints");
    let mut names: Vec<String> = entries
        .map(|entry| entry.expect("a name").file_name())
        .map(|name| name.to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// A file of the checkpoint of `step`.
pub fn checkpoint_file(run: &Path, step: u64, name: &str) -> Vec<u8> {
    let path = run.join(format!("checkpoints/step-{step:08}/{name}"));
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Weights and optimizer states of the checkpoint of `step`, byte by byte.
pub fn tensors(run: &Path, step: u64) -> (Vec<u8>, Vec<u8>) {
    (
        checkpoint_file(run, step, "model.safetensors"),
        checkpoint_file(run, step, "optimizer.safetensors"),
    )
}

/// Sends a signal by name to a process of the test.
pub fn signal(child: &Child, name: &str) {
    let status = Command::new("kill")
        .args([&format!("-{name}"), &child.id().to_string()])
        .status()
        .expect("kill starts");
    assert!(status.success(), "kill -{name} failed");
}
