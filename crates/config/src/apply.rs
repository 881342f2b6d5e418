//! Writes settings into the user's own files: prepare, show the difference,
//! commit.
//!
//! ```no_run
//! # use cinch_config::{Application, ConfigError, FileChange, Value};
//! # fn main() -> Result<(), ConfigError> {
//! let files = cinch_config::config_files("conf".as_ref())?;
//! let changes = [FileChange::new("vram.batch_size", Value::Unsigned(8))];
//! let application = Application::prepare(&files, &changes)?;
//! let shown = application.diff();
//! let report = application.commit()?;
//! cinch_config::undo(&files, false)?;
//! # Ok(())
//! # }
//! ```

use std::fs;
use std::path::{Path, PathBuf};

use crate::derived::derived;
use crate::dialect::{ACCUMULATION, BATCH, Naming, plain_name, stands_for};
use crate::diff;
use crate::disk::{Disk, LocalDisk};
use crate::document::{Document, Scalar};
use crate::edit::{Edit, perform};
use crate::error::ConfigError;
use crate::file::{linked_file, read_text};
use crate::format::{Format, without_mark};
use crate::leftover;
use crate::lock::FolderLocks;
use crate::manifest::{self, Manifest, Record, RecordedFile};
use crate::outline::KeyPath;
use crate::place::{Candidate, FileChange, Placement, echo, place};
use crate::transaction::{self, Step};
use crate::value::Value;
use crate::whole_batch::{self, Changed, Following};

/// Keys whose value is another file of the same run.
const LINKS: [&str; 2] = ["deepspeed", "deepspeed.deepspeed_config_file"];

/// New texts for some files, not yet written.
#[derive(Debug)]
pub struct Application {
    targets: Vec<Target>,
    applied: Vec<Applied>,
    unplaced: Vec<Unplaced>,
    remarks: Vec<String>,
}

#[derive(Debug)]
struct Target {
    /// As the user named it.
    given: PathBuf,
    /// The file itself, where that is a link.
    path: PathBuf,
    before: String,
    after: String,
    naming: Naming,
    /// Named by another file and not by the user: it only follows.
    is_linked: bool,
}

/// A value that changes.
#[derive(Clone, Debug, PartialEq)]
pub struct Applied {
    /// The setting, or the path of a key that is none.
    pub key: String,
    pub file: PathBuf,
    /// The key as the file has it.
    pub spelled: String,
    /// The line of the new text it stands on.
    pub line: usize,
    /// As written; `None` where the key is new.
    pub before: Option<String>,
    pub after: String,
}

/// A value that could not be said in any of the files.
#[derive(Clone, Debug, PartialEq)]
pub struct Unplaced {
    pub key: String,
    pub value: Value,
    pub reason: String,
}

/// What was written.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    pub files: Vec<ChangedFile>,
    /// Temporary files that could not be removed.
    pub left_behind: Vec<PathBuf>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ChangedFile {
    pub path: PathBuf,
    /// Where its former content lies, if it was kept.
    pub backup: Option<PathBuf>,
}

impl Application {
    /// Works out the new texts. `files` are in the order in which they are
    /// loaded: what a later one says outweighs the earlier. Nothing is written.
    pub fn prepare(files: &[PathBuf], changes: &[FileChange]) -> Result<Application, ConfigError> {
        Application::prepare_with(files, changes, false)
    }

    /// The same; with `add_keys` also keys that a stranger's program may not read.
    pub fn prepare_with(
        files: &[PathBuf],
        changes: &[FileChange],
        add_keys: bool,
    ) -> Result<Application, ConfigError> {
        let mut application = Application {
            targets: Vec::new(),
            applied: Vec::new(),
            unplaced: Vec::new(),
            remarks: Vec::new(),
        };
        for given in files {
            application.add_target(given, false)?;
        }
        for given in application.linked_files()? {
            application.add_target(&given, true)?;
        }
        for change in changes {
            application.place(change, add_keys)?;
        }
        application.follow(changes)?;
        application.remark_on_half_a_batch();
        application.remark_on_hard_links();
        application.number_lines()?;
        Ok(application)
    }

    fn add_target(&mut self, given: &Path, is_linked: bool) -> Result<(), ConfigError> {
        let text = read_text(given)?;
        let path = fs::canonicalize(given).map_err(|source| ConfigError::Unreadable {
            path: given.to_owned(),
            source,
        })?;
        if self.targets.iter().any(|target| target.path == path) {
            return Ok(());
        }
        self.targets.push(Target {
            given: given.to_owned(),
            path,
            naming: Naming::of(&Document::read(given, &text)?),
            after: text.clone(),
            before: text,
            is_linked,
        });
        Ok(())
    }

    /// The files that the user's name, such as DeepSpeed's, where they are here.
    fn linked_files(&self) -> Result<Vec<PathBuf>, ConfigError> {
        let mut files = Vec::new();
        for target in &self.targets {
            let document = Document::read(&target.given, &target.before)?;
            let foreign = matches!(target.naming, Naming::Foreign(_));
            for entry in document.entries.iter().filter(|_| foreign) {
                let name = plain_name(&entry.path);
                if let Scalar::Text(value) = &entry.scalar
                    && LINKS.iter().any(|known| stands_for(known, &name))
                {
                    files.extend(linked_file(&target.given, value));
                }
            }
        }
        Ok(files)
    }

    fn candidates(&self) -> Result<Vec<Candidate<'_>>, ConfigError> {
        let mut candidates = Vec::new();
        for target in &self.targets {
            candidates.push(Candidate {
                path: &target.given,
                document: Document::read(&target.given, &target.after)?,
                naming: target.naming,
                is_linked: target.is_linked,
            });
        }
        Ok(candidates)
    }

    fn place(&mut self, change: &FileChange, add_keys: bool) -> Result<(), ConfigError> {
        let candidates = self.candidates()?;
        let by_whole = change.key == ACCUMULATION
            && candidates.iter().any(|candidate| {
                whole_batch::says_accumulation_by_whole(candidate.naming, &candidate.document)
            });
        if by_whole {
            return Ok(());
        }
        let num_given = self.targets.iter().filter(|one| !one.is_linked).count();
        let mut placements = Vec::new();
        match place(&candidates[..num_given], change, add_keys)? {
            Placement::Implied => return Ok(()),
            Placement::Nowhere(reason) => {
                self.unplaced.push(Unplaced {
                    key: change.key.clone(),
                    value: change.value.clone(),
                    reason,
                });
                return Ok(());
            }
            Placement::Edits {
                file,
                edits,
                remark,
            } => {
                // The factors of a step are the same in every file of a run.
                if [BATCH, ACCUMULATION].contains(&change.key.as_str()) {
                    placements.extend(echo(&candidates, file, change)?);
                }
                let primary = Placement::Edits {
                    file,
                    edits,
                    remark,
                };
                placements.insert(0, primary);
            }
        }
        drop(candidates);
        for placement in placements {
            match placement {
                Placement::Edits {
                    file,
                    edits,
                    remark,
                } => self.perform(file, &change.key, edits, remark)?,
                Placement::Nowhere(remark) => self.remarks.push(remark),
                Placement::Implied => {}
            }
        }
        Ok(())
    }

    /// Keeps the whole batch that a file states beside its factors the product of them.
    fn follow(&mut self, changes: &[FileChange]) -> Result<(), ConfigError> {
        let mut documents = Vec::new();
        for target in &self.targets {
            documents.push((
                Document::read(&target.given, &target.before)?,
                Document::read(&target.given, &target.after)?,
            ));
        }
        let files: Vec<Changed<'_>> = documents
            .iter()
            .zip(&self.targets)
            .map(|((before, after), target)| Changed {
                before,
                after,
                naming: target.naming,
            })
            .collect();
        let mut following = Vec::new();
        for index in 0..files.len() {
            following.push(whole_batch::follow(&files, index, changes)?);
        }
        for (index, following) in following.into_iter().enumerate() {
            match following {
                Some(Following::Edit(edit)) => {
                    let key = edit.path.join(".");
                    self.perform(index, &key, vec![edit], None)?;
                }
                Some(Following::Broken(remark)) => self.remarks.push(remark),
                None => {}
            }
        }
        Ok(())
    }

    /// Micro batch and accumulation keep the effective batch only together.
    fn remark_on_half_a_batch(&mut self) {
        for (written, missing) in [(BATCH, ACCUMULATION), (ACCUMULATION, BATCH)] {
            let unplaced = self.unplaced.iter().find(|one| one.key == missing);
            if let (Some(unplaced), true) =
                (unplaced, self.applied.iter().any(|one| one.key == written))
            {
                self.remarks.push(format!(
                    "{written} alone changes the effective batch, because {missing} = {} has no place in these files",
                    unplaced.value
                ));
            }
        }
    }

    /// A file is replaced by a new one, and only under the name it was found by.
    fn remark_on_hard_links(&mut self) {
        let changed = self.targets.iter().filter(|one| one.before != one.after);
        for target in changed {
            let num_others = num_hard_links(&target.path).saturating_sub(1);
            if num_others > 0 {
                self.remarks.push(format!(
                    "{} is a hard link: the other names of the file ({num_others}) keep the former text and are cut off from it; --undo does not join them again",
                    target.given.display(),
                ));
            }
        }
    }

    /// Makes edits of one file, and tells what else they change.
    fn perform(
        &mut self,
        file: usize,
        key: &str,
        edits: Vec<Edit>,
        remark: Option<String>,
    ) -> Result<(), ConfigError> {
        let target = &mut self.targets[file];
        let format = Format::of(&target.given, &target.before);
        let mut touched = false;
        for edit in edits {
            let text = perform(&target.given, format, &target.after, &edit)?;
            if text == target.after {
                continue;
            }
            touched = true;
            let body = without_mark(&target.after);
            let outline = format
                .outline(body)
                .map_err(|fault| fault.in_file(&target.given, format, body))?;
            let derived = derived(format, body, &outline, target.naming, &edit.path);
            self.remarks.extend(derived);
            let mut path = edit.path.clone();
            let before = written(&target.given, format, &target.after, &path)?;
            if let (Some(name), Some(last)) = (&edit.rename, path.last_mut()) {
                last.clone_from(name);
            }
            let after = written(&target.given, format, &text, &path)?;
            self.applied.push(Applied {
                key: key.to_owned(),
                file: target.given.clone(),
                spelled: path.join("."),
                line: 0,
                before,
                after: after.unwrap_or_default(),
            });
            target.after = text;
        }
        self.remarks.extend(remark.filter(|_| touched));
        Ok(())
    }

    /// Lines are counted when all keys are in.
    fn number_lines(&mut self) -> Result<(), ConfigError> {
        for applied in &mut self.applied {
            for target in &self.targets {
                if target.given == applied.file {
                    let document = Document::read(&target.given, &target.after)?;
                    let entry = document
                        .entries
                        .iter()
                        .find(|entry| entry.key() == applied.spelled);
                    applied.line = entry.map_or(1, |entry| entry.value_at.line);
                }
            }
        }
        Ok(())
    }

    /// The values that change, in the order they were asked for.
    pub fn applied(&self) -> &[Applied] {
        &self.applied
    }

    /// The values that have no place in these files.
    pub fn unplaced(&self) -> &[Unplaced] {
        &self.unplaced
    }

    /// What should be known about how values are said, in sentences.
    pub fn remarks(&self) -> &[String] {
        &self.remarks
    }

    /// Whether the files say everything already.
    pub fn is_empty(&self) -> bool {
        self.applied.is_empty()
    }

    /// The unified diff of all files, with three lines of context.
    pub fn diff(&self) -> String {
        self.targets
            .iter()
            .map(|target| {
                let name = target.given.display().to_string();
                diff::unified(&name, &target.before, &target.after)
            })
            .collect()
    }

    /// Writes all files or none. The former content of each stays beside it as
    /// `NAME.backup`, or `NAME.backup.1` and so on where that exists already.
    pub fn commit(self) -> Result<Report, ConfigError> {
        self.commit_on(&LocalDisk)
    }

    /// As [`Self::commit`], on a disk of the caller's choice.
    pub fn commit_on(self, disk: &dyn Disk) -> Result<Report, ConfigError> {
        let changed: Vec<&Target> = self
            .targets
            .iter()
            .filter(|target| target.before != target.after)
            .collect();
        if changed.is_empty() {
            return Ok(Report::default());
        }
        let locks = FolderLocks::of(changed.iter().map(|target| target.path.as_path()))?;
        leftover::clear(disk, &locks);
        let mut steps = Vec::new();
        let mut record = Record::default();
        for target in &changed {
            check_writable(&target.path)?;
            let backup = free_backup(&target.path);
            record.files.push(RecordedFile {
                path: target.path.clone(),
                backup: backup.clone(),
                before: manifest::fingerprint(target.before.as_bytes()),
                after: manifest::fingerprint(target.after.as_bytes()),
            });
            steps.push(Step {
                target: target.path.clone(),
                before: Some(target.before.clone().into_bytes()),
                after: Some(target.after.clone().into_bytes()),
                backup: Some(backup),
            });
        }
        let files = changed
            .iter()
            .zip(&record.files)
            .map(|(target, recorded)| ChangedFile {
                path: target.given.clone(),
                backup: Some(recorded.backup.clone()),
            })
            .collect();
        // First: what is killed on the way can be undone, and its backups are known.
        steps.splice(..0, Manifest::add(disk, record)?);
        let left_behind = transaction::perform(disk, &steps)?;
        Ok(Report { files, left_behind })
    }
}

/// A value as it is written.
fn written(
    path: &Path,
    format: Format,
    text: &str,
    key: &KeyPath,
) -> Result<Option<String>, ConfigError> {
    let text = without_mark(text);
    let outline = format
        .outline(text)
        .map_err(|fault| fault.in_file(path, format, text))?;
    let leaf = outline.find(key).next();
    Ok(leaf.map(|leaf| text[leaf.value.clone()].to_owned()))
}

/// How many names a file has; one where the system does not tell.
fn num_hard_links(path: &Path) -> u64 {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        fs::metadata(path).map_or(1, |metadata| metadata.nlink())
    }
    #[cfg(not(unix))]
    {
        let _ = path;
        1
    }
}

/// Told before anything is written, and for the superuser too, whom the system
/// would not stop.
pub(crate) fn check_writable(path: &Path) -> Result<(), ConfigError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    for (place, what) in [(path, "file"), (folder, "folder")] {
        let metadata = fs::metadata(place).map_err(|source| ConfigError::Unreadable {
            path: place.to_owned(),
            source,
        })?;
        if metadata.permissions().readonly() {
            return Err(ConfigError::ReadOnly {
                path: path.to_owned(),
                what,
                place: place.to_owned(),
            });
        }
    }
    Ok(())
}

/// The first backup name that is free.
pub(crate) fn free_backup(path: &Path) -> PathBuf {
    let with_ending = |ending: &str| {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(ending);
        path.with_file_name(name)
    };
    let first = with_ending(".backup");
    let numbered = (1_u64..).map(|number| with_ending(&format!(".backup.{number}")));
    std::iter::once(first.clone())
        .chain(numbered)
        .find(|backup| fs::symlink_metadata(backup).is_err())
        .unwrap_or(first)
}
