//! What was applied, and which backup belongs to which application, so that it
//! can be undone.
//!
//! Each folder in which a file was changed has a hidden file with the list of
//! applications that touched it, oldest first. Paths are relative to that
//! folder, so that a project can be moved as a whole.

use std::io;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::disk::Disk;
use crate::error::ConfigError;
use crate::lossless;
use crate::transaction::Step;

pub(crate) const MANIFEST: &str = ".cinch-applied.json";

/// One application: the files it changed, with absolute paths in memory and
/// relative ones on disk.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// The same in every folder.
    pub id: String,
    pub files: Vec<RecordedFile>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RecordedFile {
    #[serde(with = "lossless")]
    pub path: PathBuf,
    #[serde(with = "lossless")]
    pub backup: PathBuf,
    /// Fingerprints of the content before and after.
    pub before: String,
    pub after: String,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Manifest {
    path: PathBuf,
    /// The bytes it was read from.
    stored: Option<Vec<u8>>,
    pub records: Vec<Record>,
}

pub(crate) fn fingerprint(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Manifest {
    /// The manifest of a folder; empty where there is none.
    pub(crate) fn read(disk: &dyn Disk, folder: &Path) -> Result<Manifest, ConfigError> {
        Manifest::read_from(disk, folder.join(MANIFEST))
    }

    /// The same, of a file in its folder that need not have the manifest's name.
    pub(crate) fn read_from(disk: &dyn Disk, path: PathBuf) -> Result<Manifest, ConfigError> {
        let folder = path.parent().unwrap_or(Path::new(".")).to_owned();
        let stored = match disk.read(&path) {
            Ok(bytes) => Some(bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(source) => return Err(ConfigError::Unreadable { path, source }),
        };
        let mut records: Vec<Record> = match &stored {
            Some(bytes) => {
                serde_json::from_slice(bytes).map_err(|error| ConfigError::DamagedManifest {
                    path: path.clone(),
                    reason: error.to_string(),
                })?
            }
            None => Vec::new(),
        };
        for file in records.iter_mut().flat_map(|record| &mut record.files) {
            file.path = plain(&folder.join(&file.path));
            file.backup = plain(&folder.join(&file.backup));
            // Undoing removes the backup: a record from elsewhere must not
            // choose which file that is.
            if !is_backup_of(&file.path, &file.backup) {
                return Err(ConfigError::DamagedManifest {
                    path,
                    reason: format!(
                        "{} is no backup of {}",
                        file.backup.display(),
                        file.path.display()
                    ),
                });
            }
        }
        Ok(Manifest {
            path,
            stored,
            records,
        })
    }

    /// Every file of every application.
    pub(crate) fn files(&self) -> impl Iterator<Item = &RecordedFile> {
        self.records.iter().flat_map(|record| &record.files)
    }

    pub(crate) fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("."))
    }

    /// The step that brings the manifest onto disk; no file for no records.
    pub(crate) fn step(self) -> Result<Step, ConfigError> {
        let folder = self.folder().to_owned();
        let relative: Vec<Record> = self
            .records
            .iter()
            .cloned()
            .map(|mut record| {
                for file in &mut record.files {
                    file.path = relative_to(&folder, &file.path);
                    file.backup = relative_to(&folder, &file.backup);
                }
                record
            })
            .collect();
        let after =
            serde_json::to_vec_pretty(&relative).map_err(|error| ConfigError::NotWritten {
                path: self.path.clone(),
                what: "be written",
                source: error.into(),
            })?;
        Ok(Step {
            target: self.path,
            before: self.stored,
            after: (!relative.is_empty()).then_some(after),
            backup: None,
        })
    }

    /// The steps that record an application in every folder it touches.
    pub(crate) fn add(disk: &dyn Disk, mut record: Record) -> Result<Vec<Step>, ConfigError> {
        let mut manifests = Vec::new();
        for folder in folders(&record) {
            manifests.push(Manifest::read(disk, &folder)?);
        }
        let mut identity = Sha256::new();
        for manifest in &manifests {
            identity.update(manifest.stored.as_deref().unwrap_or_default());
        }
        for file in &record.files {
            identity.update(file.path.as_os_str().as_encoded_bytes());
            identity.update(&file.before);
            identity.update(&file.after);
        }
        let identity = identity.finalize();
        record.id = identity
            .iter()
            .take(8)
            .map(|byte| format!("{byte:02x}"))
            .collect();
        manifests
            .into_iter()
            .map(|mut manifest| {
                manifest.records.push(record.clone());
                manifest.step()
            })
            .collect()
    }

    /// The last application that changed a file.
    pub(crate) fn last_of(&self, path: &Path) -> Option<&Record> {
        self.records
            .iter()
            .rfind(|record| record.files.iter().any(|file| file.path == path))
    }
}

/// The folders of a record's files, each once, in the order of the files: those that the user
/// named come first.
pub(crate) fn folders(record: &Record) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = Vec::new();
    for folder in record.files.iter().filter_map(|file| file.path.parent()) {
        if !folders.iter().any(|known| known == folder) {
            folders.push(folder.to_owned());
        }
    }
    folders
}

/// Whether a path is one that backups of a file have: in its folder, `NAME.backup`
/// or `NAME.backup.1` and so on.
fn is_backup_of(path: &Path, backup: &Path) -> bool {
    let (Some(name), Some(kept)) = (path.file_name(), backup.file_name()) else {
        return false;
    };
    let ending = kept
        .as_encoded_bytes()
        .strip_prefix(name.as_encoded_bytes())
        .and_then(|rest| rest.strip_prefix(b".backup"));
    let is_named_so = match ending {
        Some([]) => true,
        Some([b'.', number @ ..]) => !number.is_empty() && number.iter().all(u8::is_ascii_digit),
        _ => false,
    };
    is_named_so && path.parent() == backup.parent()
}

/// `path` seen from `folder`; both are absolute.
fn relative_to(folder: &Path, path: &Path) -> PathBuf {
    let common = folder
        .components()
        .zip(path.components())
        .take_while(|(left, right)| left == right)
        .count();
    let up = folder
        .components()
        .skip(common)
        .map(|_| Component::ParentDir);
    up.chain(path.components().skip(common)).collect()
}

/// Without `..`, which the folders of a manifest reach each other by.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                plain.pop();
            }
            Component::CurDir => {}
            other => plain.push(other),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_go_there_and_back() {
        for (folder, path, relative) in [
            ("/a/conf", "/a/conf/x.yaml", "x.yaml"),
            ("/a/conf/stages", "/a/conf/x.yaml", "../x.yaml"),
            ("/a/conf", "/a/conf/stages/1.yaml", "stages/1.yaml"),
            ("/a/b", "/c/d.json", "../../c/d.json"),
        ] {
            let (folder, path) = (Path::new(folder), Path::new(path));
            assert_eq!(relative_to(folder, path), Path::new(relative));
            assert_eq!(plain(&folder.join(relative)), path);
        }
    }
}
