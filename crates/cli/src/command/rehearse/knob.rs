//! What `--fit` turns: a flag of the script, or a key of a file that its command names. A file is never changed: the
//! command gets a copy of it, which lies beside it, so that what it names relative to itself is found, and goes with the
//! rehearsal.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use cinch_config::{Document, Format, KeyPath, Scalar, edit};
use rustix::process::{Pid, test_kill_process};

use crate::failure::usage;

/// As the setting's limit.
pub const MOST: u64 = 1 << 20;

/// Largest file that is read for a key.
const MOST_BYTES: u64 = 16 << 20;

/// Between the name of a file and the process whose copy it is.
const MARK: &str = ".rehearsal-";

/// A number of the script's, where it stands, and what it is now.
#[derive(Debug)]
pub struct Knob {
    name: String,
    pub value: u64,
    place: Place,
}

#[derive(Debug)]
enum Place {
    /// The word with the value, and whether the flag is in the same word; `None` where the flag is added.
    Flag(Option<(usize, bool)>),
    Key {
        file: PathBuf,
        key: KeyPath,
    },
}

impl Knob {
    /// Finds a knob: `--flag` or `FILE:KEY`. A flag that the command does not have stands at `absent`.
    pub fn find(asked: &str, command: &[OsString], absent: u64) -> anyhow::Result<Self> {
        if asked.starts_with('-') {
            return Self::flag(asked, command, absent);
        }
        match asked.rsplit_once(':') {
            Some((file, key)) if !file.is_empty() && !key.is_empty() => {
                Self::key(file, key, command)
            }
            _ => Err(usage(format!(
                "`{asked}` is neither a flag nor a key of a file\nhint: --batch-size, or config.yaml:training.batch_size"
            ))),
        }
    }

    fn flag(name: &str, command: &[OsString], absent: u64) -> anyhow::Result<Self> {
        let words: Vec<&str> = command
            .iter()
            .map(|word| word.to_str().unwrap_or_default())
            .collect();
        let joined = format!("{name}=");
        let place = words.iter().enumerate().find_map(|(index, word)| {
            if *word == name {
                return Some((index + 1, false));
            }
            word.starts_with(&joined).then_some((index, true))
        });
        let value = match place {
            Some((index, is_joined)) => {
                let word = words.get(index).copied().unwrap_or_default();
                number(
                    if is_joined {
                        &word[joined.len()..]
                    } else {
                        word
                    },
                    name,
                )?
            }
            None => absent,
        };
        Ok(Self {
            name: name.to_owned(),
            value,
            place: Place::Flag(place),
        })
    }

    fn key(file: &str, key: &str, command: &[OsString]) -> anyhow::Result<Self> {
        let path = PathBuf::from(file);
        if !command.iter().any(|word| naming(word, file).is_some()) {
            return Err(usage(format!(
                "the command does not name `{file}`\nhint: give the file as the script's command has it; a copy with another value takes its place there"
            )));
        }
        let text = read(&path)?;
        let document = Document::read(&path, &text)?;
        let key: KeyPath = key.split('.').map(str::to_owned).collect();
        let name = format!("{file}:{}", key.join("."));
        let Some(entry) = document.entries.iter().find(|entry| entry.path == key) else {
            let last = key.last().map(String::as_str).unwrap_or_default();
            let near = document
                .entries
                .iter()
                .find(|entry| entry.path.last().is_some_and(|name| name == last));
            let hint = near
                .map(|entry| format!("\nhint: {file}:{}", entry.key()))
                .unwrap_or_default();
            return Err(usage(format!(
                "`{file}` has no key `{}`{hint}",
                key.join(".")
            )));
        };
        let value = match &entry.scalar {
            Scalar::Number(text) => number(text, &name)?,
            _ => return Err(usage(format!("`{name}` is no number of samples"))),
        };
        Ok(Self {
            name,
            value,
            place: Place::Key { file: path, key },
        })
    }

    /// As the answer names it.
    pub fn name(&self) -> &str {
        &self.name
    }
}

fn number(text: &str, name: &str) -> anyhow::Result<u64> {
    let value = text.parse().ok().filter(|value| (1..=MOST).contains(value));
    value.ok_or_else(|| {
        usage(format!(
            "the script's {name} is `{text}`, which is no number of samples"
        ))
    })
}

fn read(path: &Path) -> anyhow::Result<String> {
    let shown = cinch_files::shown(path).to_string();
    cinch_files::read_regular_text(path, MOST_BYTES)
        .with_context(|| format!("cannot read `{shown}`"))
}

/// What stands before the file's name in a word that names it: nothing, or `--config=`.
fn naming(word: &OsString, file: &str) -> Option<String> {
    let before = word.to_str()?.strip_suffix(file)?;
    (before.is_empty() || before.ends_with('=')).then(|| before.to_owned())
}

/// Copies of files that a command is given. They go when this is dropped.
#[derive(Default)]
pub struct Copies {
    written: Vec<(PathBuf, PathBuf)>,
}

impl Drop for Copies {
    fn drop(&mut self) {
        for (_, copy) in &self.written {
            // One that stays is swept by the next rehearsal of the same file.
            let _ = fs::remove_file(copy);
        }
    }
}

impl Copies {
    /// The command with knobs at other values.
    pub fn command(
        &mut self,
        command: &[OsString],
        turned: &[(&Knob, u64)],
    ) -> anyhow::Result<Vec<OsString>> {
        let mut command = command.to_vec();
        let mut texts: Vec<(&Path, String)> = Vec::new();
        for &(knob, value) in turned {
            match &knob.place {
                Place::Flag(Some((index, false))) => command[*index] = value.to_string().into(),
                Place::Flag(Some((index, true))) => {
                    command[*index] = format!("{}={value}", knob.name).into()
                }
                Place::Flag(None) => {
                    command.extend([knob.name.clone().into(), value.to_string().into()])
                }
                Place::Key { file, key } => {
                    let known = texts.iter().position(|(path, _)| path == file);
                    let text = match known {
                        Some(index) => texts[index].1.clone(),
                        None => read(file)?,
                    };
                    let format = Format::of(file, &text);
                    let text = edit(
                        file,
                        format,
                        &text,
                        &[(key.clone(), Scalar::Number(value.to_string()))],
                    )?;
                    match known {
                        Some(index) => texts[index].1 = text,
                        None => texts.push((file, text)),
                    }
                }
            }
        }
        for (file, text) in texts {
            let copy = self.write(file, &text)?;
            let name = file.to_string_lossy();
            for word in &mut command {
                if let Some(before) = naming(word, &name) {
                    let mut changed = OsString::from(before);
                    changed.push(&copy);
                    *word = changed;
                }
            }
        }
        Ok(command)
    }

    fn write(&mut self, file: &Path, text: &str) -> anyhow::Result<PathBuf> {
        let known = self.written.iter().find(|(of, _)| of == file);
        let copy = match known {
            Some((_, copy)) => copy.clone(),
            None => {
                let name = file.file_name().unwrap_or_default().to_string_lossy();
                sweep(cinch_files::parent_of(file), &name);
                let (stem, extension) = match name.rsplit_once('.') {
                    Some((stem, extension)) => (stem, format!(".{extension}")),
                    None => (name.as_ref(), String::new()),
                };
                let copy =
                    file.with_file_name(format!(".{stem}{MARK}{}{extension}", std::process::id()));
                self.written.push((file.to_owned(), copy.clone()));
                copy
            }
        };
        let shown = cinch_files::shown(&copy).to_string();
        fs::write(&copy, text).with_context(|| {
            format!("cannot write `{shown}`, a copy of the file for the rehearsal")
        })?;
        Ok(copy)
    }
}

/// Removes copies whose process is gone.
fn sweep(folder: &Path, name: &str) {
    let (stem, extension) = name.rsplit_once('.').unwrap_or((name, ""));
    let before = format!(".{stem}{MARK}");
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix(&before));
        let process = process.map(|rest| {
            rest.strip_suffix(extension)
                .unwrap_or(rest)
                .trim_end_matches('.')
        });
        let process = process
            .and_then(|number| number.parse().ok())
            .and_then(Pid::from_raw);
        if process.is_some_and(|process| test_kill_process(process).is_err()) {
            // One that stays is swept next time.
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn a_flag_is_found_in_both_forms_or_added() {
        for (text, changed) in [
            ("python t.py --b 4 -x", "python t.py --b 9 -x"),
            ("python t.py --b=4", "python t.py --b=9"),
            ("python t.py", "python t.py --b 9"),
        ] {
            let command = words(text);
            let knob = Knob::find("--b", &command, 1).unwrap();
            assert_eq!(
                Copies::default().command(&command, &[(&knob, 9)]).unwrap(),
                words(changed)
            );
        }
        for (asked, text) in [
            ("b", "p"),
            (":b", "p"),
            ("--b", "p --b many"),
            ("--b", "p --b 0"),
            ("c.yaml:b", "p"),
        ] {
            assert!(Knob::find(asked, &words(text), 1).is_err(), "{asked}");
        }
    }

    #[test]
    fn a_key_is_turned_in_a_copy_that_goes() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("c.yaml");
        let text = "train:\n  batch: 8 # large\n  steps: 4\n";
        fs::write(&file, text).unwrap();
        let left = folder.path().join(format!(".c{MARK}999999999.yaml"));
        fs::write(&left, "").unwrap();
        let name = file.to_str().unwrap();
        let command = vec![
            OsString::from("python"),
            format!("--config={name}").into(),
            name.into(),
        ];
        let knob = Knob::find(&format!("{name}:train.batch"), &command, 1).unwrap();
        let steps = Knob::find(&format!("{name}:train.steps"), &command, 1).unwrap();
        assert_eq!((knob.value, steps.value), (8, 4));
        let mut copies = Copies::default();
        let changed = copies
            .command(&command, &[(&knob, 2), (&steps, 16)])
            .unwrap();
        assert!(!left.exists(), "a copy of a process that is gone");
        let copy = PathBuf::from(&changed[2]);
        assert_eq!(
            changed[1],
            OsString::from(format!("--config={}", copy.display()))
        );
        assert_eq!(
            fs::read_to_string(&copy).unwrap(),
            "train:\n  batch: 2 # large\n  steps: 16\n"
        );
        assert_eq!(fs::read_to_string(&file).unwrap(), text);
        drop(copies);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let wrong = Knob::find(&format!("{name}:batch"), &command, 1)
            .unwrap_err()
            .to_string();
        assert!(wrong.contains("train.batch"), "{wrong}");
        assert!(Knob::find(&format!("{name}:train"), &command, 1).is_err());
    }
}
