//! The checkpoints of one run: saving, listing, marking the best, pruning.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::checksums::{Checksums, FileDigest, Hashed};
use super::error::{CheckpointError, IoContext};
use super::folder::{self, Partial};
use super::tensor_file::{Layout, TensorView};
use super::{CHECKSUMS_FILE, MODEL_FILE, OPTIMIZER_FILE, STATE_FILE};

const CHECKPOINTS_FOLDER: &str = "checkpoints";
const BEST_FILE: &str = "best.json";

/// The checkpoints of one run, in `<run>/checkpoints/`. The folder is created by the first save.
#[derive(Clone, Debug)]
pub struct Store {
    folder: PathBuf,
    /// How files are created: a seam through which the tests reach a full disk.
    create_file: fn(&Path) -> io::Result<File>,
}

/// A complete checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub step: u64,
    pub path: PathBuf,
}

/// The checkpoint with the best metric so far.
#[derive(Clone, Debug, PartialEq)]
pub struct Best {
    pub step: u64,
    pub metric: f64,
    pub path: PathBuf,
}

/// What `best.json` holds.
#[derive(Serialize, Deserialize)]
struct BestRecord {
    step: u64,
    metric: f64,
}

/// Everything one save writes, except the checksums, which come out of the writing.
struct Contents<'a> {
    model: Layout<'a>,
    optimizer: Layout<'a>,
    state: Vec<u8>,
}

impl Store {
    /// Opens the checkpoints of a run and removes what killed processes left there.
    pub fn open(run_folder: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let store = Self::look(run_folder)?;
        folder::sweep(&store.folder);
        Ok(store)
    }

    /// As [`Self::open`], touching nothing.
    pub fn look(run_folder: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let folder = run_folder.as_ref().join(CHECKPOINTS_FOLDER);
        // Finds out now, and not at the first save hours later, that the name is taken by a file.
        folder::steps_in(&folder).at("read", &folder)?;
        Ok(Self {
            folder,
            create_file: |path| File::create_new(path),
        })
    }

    /// `<run>/checkpoints`.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where the checkpoint of `step` is or would be.
    pub fn path_of(&self, step: u64) -> PathBuf {
        self.folder.join(folder::step_name(step))
    }

    /// Saves a checkpoint and returns its folder.
    ///
    /// If the step is saved already, intact and with the same tensors, nothing is written. If what
    /// is there is damaged or holds other tensors (a run taken up again from an earlier step and
    /// led elsewhere), it is kept under an `aside-step-…` name: nothing is overwritten, and a run
    /// does not stop over it after hours of work.
    pub fn save(
        &self,
        step: u64,
        model: &[TensorView<'_>],
        optimizer: &[TensorView<'_>],
        state: &Value,
    ) -> Result<PathBuf, CheckpointError> {
        let contents = Contents {
            model: Layout::new(model)?,
            optimizer: Layout::new(optimizer)?,
            state: format!("{state:#}\n").into_bytes(),
        };
        let target = self.path_of(step);
        if contents.tensors_are_in(&target) {
            return Ok(target);
        }
        match self.write(step, &contents) {
            Ok(()) => Ok(target),
            Err(CheckpointError::Io { source, .. }) if is_full(&source) => {
                Err(CheckpointError::DiskFull {
                    folder: target,
                    needed: contents.num_bytes(),
                    free: folder::free_bytes(&self.folder),
                    previous: self.newest().ok().flatten().map(|entry| entry.path),
                    source,
                })
            }
            Err(error) => Err(error),
        }
    }

    /// A folder for a checkpoint that is being written.
    pub(super) fn begin(&self, step: u64) -> Result<Partial, CheckpointError> {
        cinch_files::create_folder(&self.folder).at("create", &self.folder)?;
        folder::sweep(&self.folder);
        Partial::create(&self.folder, step)
    }

    fn write(&self, step: u64, contents: &Contents<'_>) -> Result<(), CheckpointError> {
        let partial = self.begin(step)?;
        let folder = partial.path();

        let mut checksums = Checksums::default();
        let mut record = |name: &str, digest| checksums.files.insert(name.to_owned(), digest);
        record(
            MODEL_FILE,
            self.write_file(folder, MODEL_FILE, |out, path| {
                contents.model.write_to(out, path)
            })?,
        );
        record(
            OPTIMIZER_FILE,
            self.write_file(folder, OPTIMIZER_FILE, |out, path| {
                contents.optimizer.write_to(out, path)
            })?,
        );
        self.finish(step, partial, checksums, &contents.state)
    }

    /// Adds the state and the checksums to a folder that has everything else, and gives it its
    /// name.
    pub(super) fn finish(
        &self,
        step: u64,
        partial: Partial,
        mut checksums: Checksums,
        state: &[u8],
    ) -> Result<(), CheckpointError> {
        let folder = partial.path();
        let digest = self.write_file(folder, STATE_FILE, |out, path| {
            out.write_all(state).at("write", path)
        })?;
        checksums.files.insert(STATE_FILE.to_owned(), digest);
        let text = checksums_text(&checksums);
        self.write_file(folder, CHECKSUMS_FILE, |out, path| {
            out.write_all(&text).at("write", path)
        })?;

        // Only now, with the new one whole, does an unusable one of the same step make room.
        let target = self.path_of(step);
        if fs::symlink_metadata(&target).is_ok() {
            self.set_aside(step, &target)?;
        }
        partial.publish(&target)
    }

    /// Writes one file through to the disk and returns the digest of what was written.
    fn write_file(
        &self,
        folder: &Path,
        name: &str,
        write: impl FnOnce(&mut Hashed<BufWriter<File>>, &Path) -> Result<(), CheckpointError>,
    ) -> Result<FileDigest, CheckpointError> {
        let path = folder.join(name);
        let file = (self.create_file)(&path).at("create", &path)?;
        let mut out = Hashed::new(BufWriter::with_capacity(cinch_weights::WRITE_BUFFER, file));
        write(&mut out, &path)?;
        let (file, digest) = out.finish().at("write", &path)?;
        file.get_ref().sync_all().at("sync", &path)?;
        Ok(digest)
    }

    /// The complete checkpoints, oldest first. Complete means that every file is there with its
    /// length; contents are compared by [`verify`](super::verify) and [`load`](super::load).
    pub fn list(&self) -> Result<Vec<Entry>, CheckpointError> {
        let steps = folder::steps_in(&self.folder).at("read", &self.folder)?;
        let is_complete = |path: &Path| {
            Checksums::read(path).is_ok_and(|checksums| checksums.check_lengths(path).is_ok())
        };
        Ok(steps
            .into_iter()
            .filter(|(_, path)| is_complete(path))
            .map(|(step, path)| Entry { step, path })
            .collect())
    }

    /// The newest complete checkpoint.
    pub fn newest(&self) -> Result<Option<Entry>, CheckpointError> {
        Ok(self.list()?.pop())
    }

    /// Records that the checkpoint of `step` has the best metric so far.
    pub fn mark_best(&self, step: u64, metric: f64) -> Result<(), CheckpointError> {
        // JSON has no NaN, and a run that diverged has no best step.
        if !metric.is_finite() {
            return Err(CheckpointError::MetricNotFinite { step, metric });
        }
        if !self.list()?.iter().any(|entry| entry.step == step) {
            return Err(CheckpointError::BestWithoutCheckpoint {
                step,
                folder: self.folder.clone(),
            });
        }
        let text = format!("{}\n", serde_json::json!(BestRecord { step, metric }));
        folder::replace_file(&self.folder.join(BEST_FILE), text.as_bytes())
    }

    /// The checkpoint marked as best, unless none was marked or it has been removed.
    pub fn best(&self) -> Result<Option<Best>, CheckpointError> {
        let path = self.folder.join(BEST_FILE);
        let text = match cinch_files::read_regular(&path, cinch_files::MAX_READ) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            result => result.at("read", &path)?,
        };
        let BestRecord { step, metric } =
            serde_json::from_slice(&text).map_err(|error| CheckpointError::BestFile {
                path,
                reason: error.to_string(),
            })?;
        let checkpoint = self.path_of(step);
        Ok(checkpoint.is_dir().then_some(Best {
            step,
            metric,
            path: checkpoint,
        }))
    }

    /// Moves a `best.json` that cannot be read to an `aside-…` name, which is returned.
    pub fn set_aside_damaged_best(&self) -> Result<Option<PathBuf>, CheckpointError> {
        match self.best() {
            Ok(_) => Ok(None),
            Err(_) => folder::set_aside(&self.folder.join(BEST_FILE)).map(Some),
        }
    }

    /// Removes the oldest complete checkpoints until `keep_last` are left, and returns the
    /// removed ones. The newest and the best stay whatever the limit is. Folders that are not
    /// complete are left for the user to judge.
    pub fn prune(&self, keep_last: usize) -> Result<Vec<Entry>, CheckpointError> {
        self.prune_but(keep_last, &[])
    }

    /// As [`Self::prune`], sparing the checkpoints of these steps too.
    pub fn prune_but(
        &self,
        keep_last: usize,
        spared: &[u64],
    ) -> Result<Vec<Entry>, CheckpointError> {
        // An unreadable best.json stops here: without it the best could be removed.
        let best = self.best()?.map(|best| best.step);
        let mut entries = self.list()?;
        entries.truncate(entries.len().saturating_sub(keep_last.max(1)));
        entries.retain(|entry| Some(entry.step) != best && !spared.contains(&entry.step));
        for entry in &entries {
            folder::discard(&entry.path)?;
        }
        Ok(entries)
    }

    /// Moves every checkpoint after `step` to an `aside-step-…` name and returns the new names.
    ///
    /// For a run resumed from an earlier step than its newest: the later checkpoints belong to a
    /// course that the run no longer follows, and "the newest" must not mean one of them.
    pub fn set_aside_after(&self, step: u64) -> Result<Vec<PathBuf>, CheckpointError> {
        let steps = folder::steps_in(&self.folder).at("read", &self.folder)?;
        steps
            .iter()
            .filter(|(later, _)| *later > step)
            .map(|(later, path)| self.set_aside(*later, path))
            .collect()
    }

    fn set_aside(&self, step: u64, path: &Path) -> Result<PathBuf, CheckpointError> {
        // The mark belongs to these weights, and must not pass to others saved at the same step.
        if self.best()?.is_some_and(|best| best.step == step) {
            let mark = self.folder.join(BEST_FILE);
            fs::remove_file(&mark).at("remove", &mark)?;
        }
        folder::set_aside(path)
    }
}

impl Contents<'_> {
    /// Whether an intact checkpoint in `folder` holds exactly these tensors. The state is not
    /// compared: it may hold times of day.
    fn tensors_are_in(&self, folder: &Path) -> bool {
        let Ok(checksums) = Checksums::read(folder) else {
            return false;
        };
        let same = |name: &str, layout: &Layout<'_>| {
            checksums.files.get(name).is_some_and(|saved| {
                saved.bytes == layout.num_bytes() && digest_of(layout).is_some_and(|d| d == *saved)
            })
        };
        same(MODEL_FILE, &self.model)
            && same(OPTIMIZER_FILE, &self.optimizer)
            && checksums.check_contents(folder).is_ok()
    }

    /// Bytes of all files together. A hash has the same length whatever it is, so the length of
    /// the checksums is known before they are.
    fn num_bytes(&self) -> u64 {
        let lengths = [
            (MODEL_FILE, self.model.num_bytes()),
            (OPTIMIZER_FILE, self.optimizer.num_bytes()),
            (STATE_FILE, self.state.len() as u64),
        ];
        let mut checksums = Checksums::default();
        for (name, bytes) in lengths {
            let sha256 = "0".repeat(64);
            checksums.files.insert(
                name.to_owned(),
                FileDigest {
                    bytes,
                    sha256,
                    part_bytes: None,
                },
            );
        }
        let files: u64 = lengths.iter().map(|(_, bytes)| bytes).sum();
        files + checksums_text(&checksums).len() as u64
    }
}

fn digest_of(layout: &Layout<'_>) -> Option<FileDigest> {
    let mut out = Hashed::new(io::sink());
    layout.write_to(&mut out, Path::new("")).ok()?;
    out.finish().ok().map(|(_, digest)| digest)
}

fn checksums_text(checksums: &Checksums) -> Vec<u8> {
    format!("{:#}\n", serde_json::json!(checksums)).into_bytes()
}

fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

#[cfg(test)]
mod tests;
