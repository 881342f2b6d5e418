//! Where text comes from: which files of a folder are read, and in which order.
//!
//! The order decides the token stream, so it depends on names only: never on the order in which
//! the file system happens to list them.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::DataError;
use crate::progress::Progress;
use crate::sample::UNREAD_EXTENSIONS;

/// Folders this many levels below the one that was named are refused: deeper than people nest
/// them, and shallow enough that a path stays short for the system.
const DEEPEST_FOLDER: usize = 256;

/// Endings of the files that a folder is searched for, compared without regard to case. `.json`
/// is left out on purpose: it is mostly configuration and data, while `.jsonl` is text.
pub const READ_EXTENSIONS: [&str; 25] = [
    "txt", "md", "rst", "py", "rs", "go", "c", "cc", "cpp", "h", "hpp", "java", "js", "ts", "tsx",
    "jsx", "rb", "sh", "sql", "toml", "yaml", "yml", "adb", "ads", "jsonl",
];

/// What the user wants to train on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// The text compiled into the program.
    Embedded,
    /// Every readable file below a folder.
    Folder(PathBuf),
    /// One file, with any ending but those of tables and packed files.
    File(PathBuf),
}

/// One file to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SourceFile {
    pub(crate) path: PathBuf,
    /// The path below the folder with `/` between its parts: a moved folder stays the same corpus.
    pub(crate) name: String,
    pub(crate) json_lines: bool,
}

fn extension(path: &Path) -> String {
    path.extension()
        .map(|e| e.to_string_lossy().to_ascii_lowercase())
        .unwrap_or_default()
}

fn is_hidden(path: &Path) -> bool {
    path.file_name()
        .is_some_and(|name| name.to_string_lossy().starts_with('.'))
}

fn read_error(path: &Path) -> impl FnOnce(io::Error) -> DataError {
    let path = path.to_path_buf();
    move |source| DataError::Read { path, source }
}

/// The metadata of a path the user named.
fn named(path: &Path, what: &'static str) -> Result<fs::Metadata, DataError> {
    fs::metadata(path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => DataError::SourceMissing {
            what,
            path: path.to_path_buf(),
        },
        _ => DataError::Read {
            path: path.to_path_buf(),
            source,
        },
    })
}

/// The file at `path`, checked to be one.
pub(crate) fn single_file(path: &Path) -> Result<SourceFile, DataError> {
    let metadata = named(path, "file")?;
    if !metadata.is_file() {
        return Err(DataError::WrongKind {
            path: path.to_path_buf(),
            wanted: "file",
            // Reading a pipe or a device may never end.
            found: if metadata.is_dir() {
                "a folder"
            } else {
                "not a regular file"
            },
        });
    }
    let ending = extension(path);
    if UNREAD_EXTENSIONS.contains(&ending.as_str()) {
        return Err(DataError::SampleFormat {
            path: path.to_path_buf(),
            ending,
        });
    }
    Ok(SourceFile {
        path: path.to_path_buf(),
        name: path
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default(),
        json_lines: ending == "jsonl",
    })
}

/// Something that a search has come across.
struct Place {
    path: PathBuf,
    /// The same without links, by which it is known whether it was seen.
    resolved: PathBuf,
    /// Folders between it and the one that was named.
    depth: usize,
}

/// What a search of a folder has found so far.
#[derive(Default)]
struct Search {
    found: Vec<PathBuf>,
    num_skipped: usize,
    /// Links with their depth, followed only after everything that is really there: what is
    /// reachable both ways is then read once, under its own name.
    links: Vec<(PathBuf, usize)>,
    /// Resolved paths of visited folders and listed files, so that a loop of links ends.
    seen: HashSet<PathBuf>,
}

impl Search {
    /// Searches a folder or looks at a file. The way to it is resolved once; below it no
    /// component is a link, so that names are only appended.
    fn visit(
        &mut self,
        path: PathBuf,
        depth: usize,
        progress: &dyn Progress,
    ) -> Result<(), DataError> {
        // A broken link or a link to itself leads nowhere: nothing to read there.
        let Ok(resolved) = fs::canonicalize(&path) else {
            self.num_skipped += 1;
            return Ok(());
        };
        let mut waiting = vec![Place {
            path,
            resolved,
            depth,
        }];
        while let Some(place) = waiting.pop() {
            if progress.is_interrupted() {
                return Err(DataError::Interrupted);
            }
            let path = &place.path;
            let Ok(metadata) = fs::metadata(path) else {
                self.num_skipped += 1;
                continue;
            };
            let usable = metadata.is_file() && READ_EXTENSIONS.contains(&extension(path).as_str());
            if !metadata.is_dir() && !usable {
                self.num_skipped += 1;
                continue;
            }
            if self.seen.contains(&place.resolved) {
                continue;
            }
            if usable {
                self.seen.insert(place.resolved);
                self.found.push(place.path);
                continue;
            }
            if place.depth > DEEPEST_FOLDER {
                return Err(DataError::TooDeep {
                    folder: place.path,
                    deepest: DEEPEST_FOLDER,
                });
            }
            self.list(&place, &mut waiting)?;
            self.seen.insert(place.resolved);
        }
        Ok(())
    }

    /// Adds what a folder holds to what is waiting.
    fn list(&mut self, folder: &Place, waiting: &mut Vec<Place>) -> Result<(), DataError> {
        let entries = fs::read_dir(&folder.path).map_err(read_error(&folder.path))?;
        for entry in entries {
            let entry = entry.map_err(read_error(&folder.path))?;
            let child = entry.path();
            let depth = folder.depth + 1;
            if is_hidden(&child) {
                self.num_skipped += 1;
            } else if entry.file_type().map_err(read_error(&child))?.is_symlink() {
                self.links.push((child, depth));
            } else {
                waiting.push(Place {
                    resolved: folder.resolved.join(entry.file_name()),
                    path: child,
                    depth,
                });
            }
        }
        Ok(())
    }
}

/// Every file below `folder` that is read, sorted by name.
pub(crate) fn folder_files(
    folder: &Path,
    progress: &dyn Progress,
) -> Result<Vec<SourceFile>, DataError> {
    if !named(folder, "folder")?.is_dir() {
        return Err(DataError::WrongKind {
            path: folder.to_path_buf(),
            wanted: "folder",
            found: "not one",
        });
    }
    let mut search = Search::default();
    search.visit(folder.to_path_buf(), 0, progress)?;
    while !search.links.is_empty() {
        let mut links = std::mem::take(&mut search.links);
        links.sort();
        for (link, depth) in links {
            search.visit(link, depth, progress)?;
        }
    }
    if search.found.is_empty() {
        return Err(DataError::NoUsableFile {
            folder: folder.to_path_buf(),
            num_skipped: search.num_skipped,
        });
    }
    let mut files: Vec<SourceFile> = search
        .found
        .into_iter()
        .map(|path| SourceFile {
            name: name_below(folder, &path),
            json_lines: extension(&path) == "jsonl",
            path,
        })
        .collect();
    files.sort_by(|a, b| (&a.name, &a.path).cmp(&(&b.name, &b.path)));
    Ok(files)
}

fn name_below(folder: &Path, path: &Path) -> String {
    let below = path.strip_prefix(folder).unwrap_or(path);
    let parts: Vec<String> = below
        .components()
        .map(|part| part.as_os_str().to_string_lossy().into_owned())
        .collect();
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::NoProgress;

    fn write(folder: &Path, name: &str) {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, name).unwrap();
    }

    fn names(folder: &Path) -> Vec<String> {
        let files = folder_files(folder, &NoProgress).unwrap();
        files.into_iter().map(|file| file.name).collect()
    }

    #[test]
    fn folders_are_read_recursively_in_name_order() {
        let folder = tempfile::tempdir().unwrap();
        for name in [
            "z.txt",
            "b/y.RS",
            "b/a.jsonl",
            "a.md",
            "skip.json",
            "skip.bin",
            ".hidden.txt",
            ".git/config.txt",
            "noending",
            "b/deep/er/x.Py",
        ] {
            write(folder.path(), name);
        }
        assert_eq!(
            names(folder.path()),
            ["a.md", "b/a.jsonl", "b/deep/er/x.Py", "b/y.RS", "z.txt"]
        );
        assert!(folder_files(folder.path(), &NoProgress).unwrap()[1].json_lines);
    }

    #[cfg(unix)]
    #[test]
    fn links_are_followed_once_and_loops_end() {
        use std::os::unix::fs::symlink;
        let outside = tempfile::tempdir().unwrap();
        write(outside.path(), "more.txt");
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "real/one.txt");
        symlink(folder.path(), folder.path().join("real/up")).unwrap();
        symlink(folder.path().join("real"), folder.path().join("again")).unwrap();
        symlink(
            folder.path().join("real/one.txt"),
            folder.path().join("copy.txt"),
        )
        .unwrap();
        symlink(outside.path(), folder.path().join("outside")).unwrap();
        symlink("nowhere", folder.path().join("broken.txt")).unwrap();
        symlink("self.txt", folder.path().join("self.txt")).unwrap();
        assert_eq!(names(folder.path()), ["outside/more.txt", "real/one.txt"]);
    }

    #[test]
    fn a_folder_that_is_too_deep_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let below = |levels: usize| {
            let mut path = folder.path().to_path_buf();
            path.extend(std::iter::repeat_n("d", levels));
            path
        };
        fs::create_dir_all(below(DEEPEST_FOLDER)).unwrap();
        fs::write(below(DEEPEST_FOLDER).join("a.txt"), "x").unwrap();
        assert_eq!(names(folder.path()).len(), 1);
        fs::create_dir_all(below(DEEPEST_FOLDER + 1)).unwrap();
        let message = folder_files(folder.path(), &NoProgress)
            .unwrap_err()
            .to_string();
        assert!(
            message.contains("256") && message.contains("/d/d/d") && message.contains("hint:"),
            "{message}"
        );
    }

    #[cfg(unix)]
    #[test]
    fn a_loop_of_links_is_no_deep_folder() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "one/a.txt");
        std::os::unix::fs::symlink("..", folder.path().join("one/up")).unwrap();
        std::os::unix::fs::symlink("one", folder.path().join("two")).unwrap();
        assert_eq!(names(folder.path()), ["one/a.txt"]);
    }

    #[test]
    fn a_folder_without_text_says_what_is_read() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "a.bin");
        write(folder.path(), "b.json");
        let message = folder_files(folder.path(), &NoProgress)
            .unwrap_err()
            .to_string();
        assert!(message.contains("2 skipped"), "{message}");
        assert!(
            message.contains(".jsonl") && message.contains(".adb"),
            "{message}"
        );
    }

    #[test]
    fn wrong_paths_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "odd.ending");
        let file = folder.path().join("odd.ending");
        assert_eq!(single_file(&file).unwrap().name, "odd.ending");
        let missing = folder.path().join("missing");
        assert!(matches!(
            folder_files(&missing, &NoProgress),
            Err(DataError::SourceMissing { what: "folder", .. })
        ));
        assert!(matches!(
            single_file(&missing),
            Err(DataError::SourceMissing { what: "file", .. })
        ));
        assert!(matches!(
            folder_files(&file, &NoProgress),
            Err(DataError::WrongKind { .. })
        ));
        assert!(matches!(
            single_file(folder.path()),
            Err(DataError::WrongKind { .. })
        ));
    }
}
