//! How the machine is looked at: one trait, so that every machine can be shown to the code that
//! makes sense of it.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::machine::Readings;
use crate::nvml;

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Silence {
    /// There is nobody to ask.
    NotInstalled,
    /// What was said or happened instead.
    Failed(String),
}

impl Silence {
    /// In words; `missing` where there is nobody to ask.
    pub(crate) fn said(&self, missing: &str) -> String {
        match self {
            Self::NotInstalled => missing.to_owned(),
            Self::Failed(said) => said.clone(),
        }
    }
}

/// What can be asked of a machine. A reading that is not to be had is a value, never a panic.
pub trait Probe {
    /// What NVML says.
    fn nvml(&self) -> Result<Readings, Silence>;
    /// The output of `nvidia-smi` with these arguments.
    fn nvidia_smi(&self, arguments: &[&str]) -> Result<String, Silence>;
    /// The text of a file; `None` where it cannot be read.
    fn file(&self, path: &str) -> Option<String>;
    /// A variable of the environment.
    fn variable(&self, name: &str) -> Option<String>;
    /// Cores that this process may use.
    fn cores(&self) -> Option<usize>;
}

/// The machine this runs on.
#[derive(Clone, Copy, Debug, Default)]
pub struct ThisMachine;

/// How long a driver may take. A healthy one answers within a few hundredths of a second; one
/// that has to be loaded first, because nothing keeps it awake, takes up to two seconds; one
/// whose GPU has fallen off the bus never answers, and the program goes on without it.
const PATIENCE: Duration = Duration::from_secs(4);

impl Probe for ThisMachine {
    fn nvml(&self) -> Result<Readings, Silence> {
        let (sender, receiver) = mpsc::channel();
        let thread = thread::Builder::new().name("nvml".to_owned());
        thread
            .spawn(move || sender.send(nvml::read()))
            .map_err(|error| Silence::Failed(format!("no thread for NVML: {error}")))?;
        receiver.recv_timeout(PATIENCE).unwrap_or_else(|error| {
            Err(Silence::Failed(match error {
                mpsc::RecvTimeoutError::Timeout => late("NVML", PATIENCE),
                mpsc::RecvTimeoutError::Disconnected => "NVML broke off".to_owned(),
            }))
        })
    }

    fn nvidia_smi(&self, arguments: &[&str]) -> Result<String, Silence> {
        let mut child = Command::new("nvidia-smi")
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| match error.kind() {
                std::io::ErrorKind::NotFound => Silence::NotInstalled,
                _ => Silence::Failed(format!("nvidia-smi cannot be started: {error}")),
            })?;
        output(&mut child, PATIENCE).map_err(Silence::Failed)
    }

    fn file(&self, path: &str) -> Option<String> {
        std::fs::read_to_string(path).ok()
    }

    fn variable(&self, name: &str) -> Option<String> {
        // A value that is no text names no GPU that we could find; CUDA would find none either.
        let value = std::env::var_os(name)?;
        Some(value.to_string_lossy().into_owned())
    }

    fn cores(&self) -> Option<usize> {
        thread::available_parallelism().ok().map(Into::into)
    }
}

/// What a program prints until it ends; it is ended when it takes too long. It is read from the
/// side, because a full pipe would stop it.
fn output(child: &mut Child, patience: Duration) -> Result<String, String> {
    let Some(mut pipe) = child.stdout.take() else {
        return Err("nvidia-smi has no output".to_owned());
    };
    let (sender, receiver) = mpsc::channel();
    let thread = thread::Builder::new().name("nvidia-smi".to_owned());
    let spawned = thread.spawn(move || {
        let mut text = Vec::new();
        let read = pipe.read_to_end(&mut text);
        sender.send(read.map(|_| String::from_utf8_lossy(&text).into_owned()))
    });
    let text = match spawned {
        Ok(_) => receiver.recv_timeout(patience),
        Err(_) => Err(mpsc::RecvTimeoutError::Disconnected),
    };
    // What closed its output has nothing left to do but to end.
    let deadline = Instant::now() + Duration::from_millis(200);
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break Some(status),
            Ok(None) if text.is_ok() && Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(1));
            }
            _ => break None,
        }
    };
    let Some(status) = status else {
        let _ = child.kill();
        let _ = child.wait();
        return Err(late("nvidia-smi", patience));
    };
    match text {
        Ok(Ok(text)) if status.success() => Ok(text),
        // nvidia-smi prints its errors to standard output.
        Ok(Ok(text)) => Err(match text.trim() {
            "" => format!("nvidia-smi failed: {status}"),
            said => first_line(said).to_owned(),
        }),
        _ => Err("nvidia-smi's output cannot be read".to_owned()),
    }
}

fn late(who: &str, patience: Duration) -> String {
    format!(
        "{who} did not answer within {:.1} s",
        patience.as_secs_f64()
    )
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default().trim()
}

#[cfg(test)]
pub(crate) mod recorded {
    //! A machine made of what was written down.

    use std::collections::HashMap;

    use super::{Probe, Silence};
    use crate::machine::Readings;

    pub struct Recorded {
        pub nvml: Result<Readings, Silence>,
        /// The answers of `nvidia-smi`, by what its first argument begins with.
        pub smi: Vec<(&'static str, Result<String, Silence>)>,
        pub files: HashMap<String, String>,
        pub variables: HashMap<String, String>,
    }

    impl Default for Recorded {
        fn default() -> Self {
            Self {
                nvml: Err(Silence::NotInstalled),
                smi: Vec::new(),
                files: HashMap::new(),
                variables: HashMap::new(),
            }
        }
    }

    impl Recorded {
        pub fn write(&mut self, path: &str, text: &str) {
            self.files.insert(path.to_owned(), text.to_owned());
        }
    }

    impl Probe for Recorded {
        fn nvml(&self) -> Result<Readings, Silence> {
            self.nvml.clone()
        }

        fn nvidia_smi(&self, arguments: &[&str]) -> Result<String, Silence> {
            let first = arguments.first().copied().unwrap_or_default();
            let answer = self.smi.iter().find(|(start, _)| first.starts_with(start));
            match answer {
                Some((_, answer)) => answer.clone(),
                None => Err(Silence::NotInstalled),
            }
        }

        fn file(&self, path: &str) -> Option<String> {
            self.files.get(path).cloned()
        }

        fn variable(&self, name: &str) -> Option<String> {
            self.variables.get(name).cloned()
        }

        fn cores(&self) -> Option<usize> {
            Some(4)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, patience: Duration) -> Result<String, String> {
        let mut child = Command::new("sh")
            .args(["-c", script])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        output(&mut child, patience)
    }

    #[test]
    #[cfg(unix)]
    fn a_program_is_heard_out_but_not_forever() {
        let patience = Duration::from_secs(20);
        assert_eq!(shell("echo yes", patience), Ok("yes\n".to_owned()));
        // More than a pipe holds.
        let long = shell("head -c 300000 /dev/zero | tr '\\0' x", patience);
        assert_eq!(long.map(|text| text.len()), Ok(300_000));
        let said = "NVIDIA-SMI has failed\nMake sure that\n";
        let failed = shell(&format!("printf '{said}'; exit 9"), patience);
        assert_eq!(failed, Err("NVIDIA-SMI has failed".to_owned()));
        // Without an end of its own.
        let silent = shell("exec tail -f /dev/null", Duration::from_millis(50));
        assert!(silent.unwrap_err().contains("did not answer"));
    }

    #[test]
    fn this_machine_answers_without_a_driver_too() {
        let machine = ThisMachine;
        assert!(machine.cores().is_some_and(|cores| cores > 0));
        assert_eq!(machine.file("/nowhere/at/all"), None);
        if let Err(Silence::Failed(reason)) = machine.nvml() {
            assert!(!reason.is_empty());
        }
    }
}
