//! Writing synthetic files into a folder without touching anything of the user's.
//!
//! A hidden manifest lists each file with a hash of its content. It is what tells the
//! generator's files from others: one that is not listed, or whose content is another one by
//! now, belongs to the user.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Component, Path, PathBuf};

use cinch_files::{Replacement, parent_of, read_regular};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{Language, sized_program};
use crate::error::DataError;
use crate::progress::Progress;
use crate::random::mix;

const MANIFEST: &str = ".cinch-synth.json";

/// What to write, and where.
#[derive(Debug, Clone)]
pub struct SynthOptions {
    pub folder: PathBuf,
    pub num_files: usize,
    pub seed: u64,
    /// Taken in turns; all of them when empty.
    pub languages: Vec<Language>,
    pub approx_bytes_per_file: usize,
    /// Write even if the folder holds files of the user's. Those with other names stay.
    pub overwrite: bool,
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SynthReport {
    pub num_files: usize,
    pub num_bytes: u64,
    /// How many files each language got, in the order in which they were asked for.
    pub per_language: Vec<(Language, usize)>,
}

/// Path below the folder → SHA-256 of the content.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Manifest {
    files: BTreeMap<String, String>,
}

fn write_error(path: &Path) -> impl FnOnce(io::Error) -> DataError {
    let path = path.to_path_buf();
    move |source| DataError::Write { path, source }
}

/// Writes the files. The outcome depends on the options only.
pub fn generate(options: &SynthOptions, progress: &dyn Progress) -> Result<SynthReport, DataError> {
    let languages: &[Language] = match options.languages.as_slice() {
        [] => &Language::ALL,
        chosen => chosen,
    };
    let folder = &options.folder;
    let before = read_manifest(folder);
    if !options.overwrite
        && let Some(example) = foreign_file(folder, folder, &before)?
    {
        return Err(DataError::FolderInUse {
            folder: folder.clone(),
            example,
        });
    }
    fs::create_dir_all(folder).map_err(write_error(folder))?;

    // The manifest comes first, so that a run that is cut short leaves no file it does not list.
    // That takes a pass of its own, because keeping all texts meanwhile would take their size.
    let file = |index: usize| {
        let language = languages[index % languages.len()];
        let seed = mix(mix(options.seed) ^ index as u64);
        let (module, text) = sized_program(language, seed, options.approx_bytes_per_file);
        (
            format!("{language}/{module}_{index:05}.{}", language.extension()),
            text,
        )
    };
    let files: BTreeMap<String, String> = (0..options.num_files)
        .into_par_iter()
        .map(|index| {
            let (name, text) = file(index);
            (name, format!("{:x}", Sha256::digest(&text)))
        })
        .collect();
    for stale in before
        .files
        .keys()
        .filter(|name| !files.contains_key(*name))
    {
        let path = folder.join(stale);
        if is_ours(&path, stale, &before) {
            fs::remove_file(&path).map_err(write_error(&path))?;
        }
    }
    let manifest = Manifest { files };
    let json = serde_json::to_string_pretty(&manifest).unwrap_or_default();
    place(&folder.join(MANIFEST), json.as_bytes())?;

    let total = options.num_files as u64 * options.approx_bytes_per_file as u64;
    progress.begin("writing", total);
    let sizes: Result<Vec<u64>, DataError> = (0..options.num_files)
        .into_par_iter()
        .map(|index| {
            let (name, text) = file(index);
            place(&folder.join(name), text.as_bytes())?;
            progress.advance(options.approx_bytes_per_file as u64);
            Ok(text.len() as u64)
        })
        .collect();
    progress.end();
    let per_language = languages
        .iter()
        .enumerate()
        .map(|(turn, &language)| {
            (
                language,
                (options.num_files + languages.len() - 1 - turn) / languages.len(),
            )
        })
        .collect();
    Ok(SynthReport {
        num_files: options.num_files,
        num_bytes: sizes?.into_iter().sum(),
        per_language,
    })
}

/// The most that is read of a generated file, and of the list of them.
const MAX_GENERATED: u64 = 256 << 20;

/// A missing or damaged manifest lists nothing, which makes every file the user's.
fn read_manifest(folder: &Path) -> Manifest {
    read_regular(&folder.join(MANIFEST), MAX_GENERATED)
        .ok()
        .and_then(|json| serde_json::from_slice(&json).ok())
        .unwrap_or_default()
}

fn is_ours(path: &Path, name: &str, manifest: &Manifest) -> bool {
    // A manifest that was tampered with must not reach out of the folder.
    let inside = Path::new(name)
        .components()
        .all(|part| matches!(part, Component::Normal(_)));
    let Some(hash) = manifest.files.get(name).filter(|_| inside) else {
        return false;
    };
    read_regular(path, MAX_GENERATED)
        .is_ok_and(|content| format!("{:x}", Sha256::digest(&content)) == *hash)
}

/// Some file below `current` that the generator did not write. Hidden ones are left alone by it
/// and do not count.
fn foreign_file(
    folder: &Path,
    current: &Path,
    manifest: &Manifest,
) -> Result<Option<String>, DataError> {
    let entries = match fs::read_dir(current) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(write_error(current)(error)),
    };
    let mut paths: Vec<PathBuf> = Vec::new();
    for entry in entries {
        paths.push(entry.map_err(write_error(current))?.path());
    }
    paths.sort();
    for path in paths {
        if path
            .file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with('.'))
        {
            continue;
        }
        // A link may lead anywhere: it is looked at, never through.
        let kind = fs::symlink_metadata(&path).map_err(write_error(&path))?;
        if kind.is_dir() {
            if let Some(found) = foreign_file(folder, &path, manifest)? {
                return Ok(Some(found));
            }
            continue;
        }
        let below = path.strip_prefix(folder).unwrap_or(&path);
        let parts: Vec<_> = below
            .components()
            .map(|part| part.as_os_str().to_string_lossy())
            .collect();
        let name = parts.join("/");
        if !kind.is_file() || !is_ours(&path, &name, manifest) {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// Complete or absent, like everything that is written.
fn place(path: &Path, content: &[u8]) -> Result<(), DataError> {
    let parent = parent_of(path);
    let write = || -> io::Result<()> {
        fs::create_dir_all(parent)?;
        let mut file = Replacement::create(path)?;
        file.write_all(content)?;
        // The same options make it again, so nothing waits for the disk.
        file.put_unsynced()
    };
    write().map_err(write_error(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::NoProgress;

    fn options(folder: &Path) -> SynthOptions {
        SynthOptions {
            folder: folder.to_path_buf(),
            num_files: 23,
            seed: 5,
            languages: Vec::new(),
            approx_bytes_per_file: 1500,
            overwrite: false,
        }
    }

    fn listing(folder: &Path) -> BTreeMap<String, String> {
        let mut found = BTreeMap::new();
        for language in fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
        {
            if language.is_dir() {
                for file in fs::read_dir(language)
                    .unwrap()
                    .map(|entry| entry.unwrap().path())
                {
                    let name = file.strip_prefix(folder).unwrap().display().to_string();
                    found.insert(name, fs::read_to_string(file).unwrap());
                }
            }
        }
        found
    }

    #[test]
    fn files_do_not_depend_on_the_number_of_threads() {
        let (one, many) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let single = rayon::ThreadPoolBuilder::new()
            .num_threads(1)
            .build()
            .unwrap();
        let report = single
            .install(|| generate(&options(one.path()), &NoProgress))
            .unwrap();
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(4)
            .build()
            .unwrap();
        assert_eq!(
            report,
            pool.install(|| generate(&options(many.path()), &NoProgress))
                .unwrap()
        );
        let files = listing(one.path());
        assert_eq!(files, listing(many.path()));
        assert_eq!(files.len(), 23);
        assert_eq!(
            report.num_bytes,
            files.values().map(|text| text.len() as u64).sum::<u64>()
        );
        for &(language, count) in &report.per_language {
            let prefix = format!("{language}/");
            assert_eq!(
                files
                    .keys()
                    .filter(|name| name.starts_with(&prefix))
                    .count(),
                count
            );
        }
    }

    #[test]
    fn its_own_files_are_replaced_and_stale_ones_go() {
        let folder = tempfile::tempdir().unwrap();
        let mut options = options(folder.path());
        generate(&options, &NoProgress).unwrap();
        options.num_files = 4;
        options.languages = vec![Language::Go];
        generate(&options, &NoProgress).unwrap();
        let files = listing(folder.path());
        assert_eq!(files.len(), 4);
        assert!(files.keys().all(|name| name.starts_with("go/")));
    }

    #[test]
    fn files_of_others_and_edited_files_stop_it() {
        let folder = tempfile::tempdir().unwrap();
        let mut options = options(folder.path());
        fs::write(folder.path().join("thesis.txt"), "mine").unwrap();
        let error = generate(&options, &NoProgress).unwrap_err();
        assert!(error.to_string().contains("thesis.txt"), "{error}");
        assert!(!folder.path().join(MANIFEST).exists());

        options.overwrite = true;
        generate(&options, &NoProgress).unwrap();
        assert_eq!(
            fs::read_to_string(folder.path().join("thesis.txt")).unwrap(),
            "mine"
        );
        fs::remove_file(folder.path().join("thesis.txt")).unwrap();

        options.overwrite = false;
        generate(&options, &NoProgress).unwrap();
        let name = listing(folder.path()).into_keys().next().unwrap();
        fs::write(folder.path().join(&name), "edited").unwrap();
        let error = generate(&options, &NoProgress).unwrap_err();
        assert!(matches!(error, DataError::FolderInUse { example, .. } if example == name));
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let result = generate(&options(&file.join("below")), &NoProgress);
        assert!(matches!(result, Err(DataError::Write { .. })));
    }
}
