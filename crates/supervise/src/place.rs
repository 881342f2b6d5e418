//! Where the batch and the accumulation of a command stand: in its arguments, under a key of a
//! file, or in a trainer's configuration whose dialect is known.
//!
//! Files are always changed from what they held before the first attempt, so that one step back
//! is the beginning.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use cinch_config::{Application, Document, FileChange, Format, Scalar, Settings, edit};

use crate::error::SuperviseError;

const BATCH: &str = "{batch}";
const ACCUMULATION: &str = "{accum}";
const CHECKPOINT: &str = "{checkpoint}";

/// How a step's samples are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Batch {
    pub batch: usize,
    pub accumulation: usize,
}

/// A key of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileKey {
    pub path: PathBuf,
    pub key: String,
}

impl FileKey {
    /// Reads `FILE:KEY`.
    pub fn parse(text: &str, name: &'static str) -> Result<Self, SuperviseError> {
        match text.rsplit_once(':') {
            Some((path, key)) if !path.is_empty() && !key.is_empty() => Ok(Self {
                path: path.into(),
                key: key.to_owned(),
            }),
            _ => Err(SuperviseError::NotAPlace {
                given: text.to_owned(),
                name,
            }),
        }
    }

    fn text(&self) -> Result<String, SuperviseError> {
        let read = cinch_files::read_regular_text(&self.path, cinch_files::MAX_READ);
        read.map_err(|source| SuperviseError::Io {
            action: "read",
            path: self.path.clone(),
            source,
        })
    }

    /// The number under the key.
    fn count(&self) -> Result<usize, SuperviseError> {
        let text = self.text()?;
        let document = Document::read(&self.path, &text)?;
        let entry = document
            .entries
            .iter()
            .find(|entry| entry.key() == self.key);
        let entry = entry.ok_or_else(|| SuperviseError::NoKey {
            path: self.path.clone(),
            key: self.key.clone(),
        })?;
        let number = match &entry.scalar {
            Scalar::Number(digits) | Scalar::Text(digits) => digits.parse().ok(),
            _ => None,
        };
        number
            .filter(|number| *number > 0)
            .ok_or_else(|| SuperviseError::NotACount {
                path: self.path.clone(),
                key: self.key.clone(),
                found: entry.scalar.to_string(),
            })
    }
}

/// Where the batch stands.
#[derive(Debug)]
pub enum Place {
    /// `{batch}` and `{accum}` in the command.
    Arguments,
    Keys {
        batch: FileKey,
        accumulation: FileKey,
        /// The files as they were.
        before: Vec<(PathBuf, String)>,
    },
    /// A trainer's file.
    Config { path: PathBuf, is_applied: bool },
    /// Nowhere: nothing can be changed.
    Nowhere,
}

impl Place {
    /// What the user said: `set` are the texts of `--set`.
    pub fn new(
        command: &[OsString],
        set: &[String],
        config: Option<PathBuf>,
    ) -> Result<Self, SuperviseError> {
        if let Some(path) = config {
            return Ok(Self::Config {
                path,
                is_applied: false,
            });
        }
        let (mut batch, mut accumulation) = (None, None);
        for text in set {
            let (name, place) = text.split_once('=').unwrap_or((text, ""));
            match name.replace('-', "_").as_str() {
                "batch_size" | "batch" => batch = Some(FileKey::parse(place, "batch_size")?),
                "accumulation" | "gradient_accumulation_steps" | "grad_accum" => {
                    accumulation = Some(FileKey::parse(place, "accumulation")?);
                }
                _ => {
                    return Err(SuperviseError::UnknownName {
                        name: name.to_owned(),
                    });
                }
            }
        }
        let holds = |part: &str| command.iter().any(|word| find(word, part).is_some());
        match (batch, accumulation) {
            (Some(batch), Some(accumulation)) => {
                let mut before = vec![(batch.path.clone(), batch.text()?)];
                if accumulation.path != batch.path {
                    before.push((accumulation.path.clone(), accumulation.text()?));
                }
                Ok(Self::Keys {
                    batch,
                    accumulation,
                    before,
                })
            }
            // A file or key that is not there is told first.
            (Some(batch), None) => {
                batch.count()?;
                Err(SuperviseError::NoAccumulation)
            }
            (None, Some(_)) => Err(SuperviseError::NoBatch),
            (None, None) if holds(BATCH) && holds(ACCUMULATION) => Ok(Self::Arguments),
            (None, None) if holds(BATCH) => Err(SuperviseError::NoAccumulation),
            (None, None) => Ok(Self::Nowhere),
        }
    }

    /// What the files say now; `None` where the command's arguments hold the values.
    pub fn stated(&self) -> Result<Option<Batch>, SuperviseError> {
        match self {
            Self::Arguments | Self::Nowhere => Ok(None),
            Self::Keys {
                batch,
                accumulation,
                ..
            } => Ok(Some(Batch {
                batch: batch.count()?,
                accumulation: accumulation.count()?,
            })),
            Self::Config { path, .. } => {
                let mut settings = Settings::new();
                settings.load_file(path)?;
                let config = settings.resolve()?;
                Ok(Some(Batch {
                    batch: config.batch.batch_size,
                    accumulation: config.batch.accumulation,
                }))
            }
        }
    }

    /// Writes the values into the files.
    pub fn write(&mut self, values: Batch) -> Result<(), SuperviseError> {
        match self {
            Self::Arguments | Self::Nowhere => Ok(()),
            Self::Keys {
                batch,
                accumulation,
                before,
            } => {
                for (path, text) in before.iter() {
                    let pairs = [
                        (&*batch, values.batch),
                        (&*accumulation, values.accumulation),
                    ];
                    let changes: Vec<_> = pairs
                        .into_iter()
                        .filter(|(place, _)| place.path == *path)
                        .map(|(place, value)| {
                            let key = place.key.split('.').map(str::to_owned).collect();
                            (key, Scalar::Number(value.to_string()))
                        })
                        .collect();
                    let edited = edit(path, Format::of(path, text), text, &changes)?;
                    replace(path, &edited)?;
                }
                Ok(())
            }
            Self::Config { path, is_applied } => {
                let files = [path.clone()];
                if *is_applied {
                    cinch_config::undo(&files, false)?;
                    *is_applied = false;
                }
                let changes = [
                    FileChange::parse("vram.batch_size", &values.batch.to_string())?,
                    FileChange::parse(
                        "vram.gradient_accumulation_steps",
                        &values.accumulation.to_string(),
                    )?,
                ];
                let application = Application::prepare(&files, &changes)?;
                if let Some(one) = application.unplaced().first() {
                    return Err(SuperviseError::Unplaced {
                        key: one.key.clone(),
                        value: one.value.to_string(),
                        reason: one.reason.clone(),
                    });
                }
                if !application.is_empty() {
                    application.commit()?;
                    *is_applied = true;
                }
                Ok(())
            }
        }
    }

    /// Puts the files back as they were before the first attempt.
    pub fn restore(&mut self) -> Result<(), SuperviseError> {
        match self {
            Self::Arguments | Self::Nowhere => Ok(()),
            Self::Keys { before, .. } => {
                for (path, text) in before {
                    replace(path, text)?;
                }
                Ok(())
            }
            Self::Config { path, is_applied } => {
                if std::mem::take(is_applied) {
                    cinch_config::undo(std::slice::from_ref(path), false)?;
                }
                Ok(())
            }
        }
    }

    pub fn can_change(&self) -> bool {
        !matches!(self, Self::Nowhere)
    }

    /// The command with the values and the checkpoint in their places.
    pub fn command(
        command: &[OsString],
        values: Option<Batch>,
        checkpoint: Option<&OsStr>,
    ) -> Vec<OsString> {
        let fill = |word: &OsString| {
            let mut word = word.clone();
            if let Some(values) = values {
                word = replaced(&word, BATCH, OsStr::new(&values.batch.to_string()));
                word = replaced(
                    &word,
                    ACCUMULATION,
                    OsStr::new(&values.accumulation.to_string()),
                );
            }
            match checkpoint {
                Some(checkpoint) => replaced(&word, CHECKPOINT, checkpoint),
                None => word,
            }
        };
        command.iter().map(fill).collect()
    }
}

fn replace(path: &std::path::Path, text: &str) -> Result<(), SuperviseError> {
    cinch_files::replace(path, text.as_bytes()).map_err(|source| SuperviseError::Io {
        action: "write",
        path: path.to_owned(),
        source,
    })
}

fn find(word: &OsStr, part: &str) -> Option<usize> {
    memchr::memmem::find(word.as_bytes(), part.as_bytes())
}

fn replaced(word: &OsStr, part: &str, with: &OsStr) -> OsString {
    let mut rest = word.as_bytes();
    let mut bytes = Vec::with_capacity(rest.len());
    while let Some(place) = memchr::memmem::find(rest, part.as_bytes()) {
        bytes.extend_from_slice(&rest[..place]);
        bytes.extend_from_slice(with.as_bytes());
        rest = &rest[place + part.len()..];
    }
    bytes.extend_from_slice(rest);
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    #[test]
    fn arguments_hold_the_values() {
        let command = words("python t.py --batch={batch} --accum {accum} --from {checkpoint}");
        assert!(matches!(
            Place::new(&command, &[], None).unwrap(),
            Place::Arguments
        ));
        let values = Batch {
            batch: 4,
            accumulation: 16,
        };
        let filled = Place::command(&command, Some(values), Some(OsStr::new("ckpt")));
        assert_eq!(
            filled,
            words("python t.py --batch=4 --accum 16 --from ckpt")
        );
        let half = Place::new(&words("t {batch}"), &[], None).unwrap_err();
        assert!(matches!(half, SuperviseError::NoAccumulation));
        assert!(matches!(
            Place::new(&words("t"), &[], None).unwrap(),
            Place::Nowhere
        ));
    }

    #[test]
    fn keys_of_a_file_are_edited_and_restored() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.yaml");
        let text = "data:\n  batch_size: 64  # as large as it goes\ntrainer:\n  accum: 2\n";
        fs::write(&path, text).unwrap();
        let shown = path.display();
        let set = [
            format!("batch_size={shown}:data.batch_size"),
            format!("accumulation={shown}:trainer.accum"),
        ];
        let mut place = Place::new(&words("t"), &set, None).unwrap();
        assert_eq!(
            place.stated().unwrap(),
            Some(Batch {
                batch: 64,
                accumulation: 2
            })
        );
        for batch in [32, 16] {
            place
                .write(Batch {
                    batch,
                    accumulation: 128 / batch,
                })
                .unwrap();
            let edited = fs::read_to_string(&path).unwrap();
            let expected = text.replace("64", &batch.to_string());
            let expected = expected.replace("accum: 2", &format!("accum: {}", 128 / batch));
            assert_eq!(edited, expected);
        }
        place.restore().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
    }

    #[test]
    fn places_that_are_none_are_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.json");
        fs::write(&path, "{\"batch\": \"many\", \"accum\": 1}").unwrap();
        let shown = path.display();
        let set = |key: &str| {
            [
                format!("batch_size={shown}:{key}"),
                format!("accumulation={shown}:accum"),
            ]
        };
        let message = |key| {
            let place = Place::new(&words("t"), &set(key), None).unwrap();
            place.stated().unwrap_err().to_string()
        };
        assert!(message("nothing").contains("has no key nothing"));
        assert!(
            message("batch").contains("no whole number"),
            "{}",
            message("batch")
        );
        for bad in ["batch_size=x", "size=a:b", "batch_size"] {
            let error = Place::new(&words("t"), &[bad.to_owned()], None).unwrap_err();
            assert!(error.to_string().contains("hint:"), "{error}");
        }
    }
}
