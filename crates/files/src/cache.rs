//! Where tokenised data, compiled kernels and measurements are kept, and whether what lies there
//! can be trusted: kernels are loaded from it and run, so nobody else may be able to put them there.

use std::ffi::OsString;
use std::fmt;
use std::fs::{self, DirBuilder, Metadata};
use std::io;
use std::path::{Path, PathBuf};

/// The environment variable that names the cache folder.
pub const CACHE_VARIABLE: &str = "CINCH_CACHE";

/// Why a folder is not used.
#[derive(Debug, PartialEq, Eq)]
pub struct Refused {
    pub folder: PathBuf,
    pub reason: String,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the cache folder `{}` is not used: {}\n\
             hint: name a folder of your own by {CACHE_VARIABLE}",
            crate::shown(&self.folder),
            self.reason
        )
    }
}

impl std::error::Error for Refused {}

/// The cache folder, where there is one that can be trusted.
pub fn cache_folder() -> Option<PathBuf> {
    find_cache_folder().ok()
}

/// `$CINCH_CACHE`, or `cinch` in the user's cache folder, or, where the environment names neither,
/// a folder of this user's among the temporary files. It is made where it is missing.
pub fn find_cache_folder() -> Result<PathBuf, Refused> {
    let folder = match cache_folder_from(|name| std::env::var_os(name)) {
        Some(folder) => folder,
        None => temporary_folder(&std::env::temp_dir())?,
    };
    private_folder(&folder)?;
    Ok(folder)
}

fn cache_folder_from(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name: &str| {
        variable(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    set(CACHE_VARIABLE)
        .or_else(|| set("XDG_CACHE_HOME").map(|folder| folder.join("cinch")))
        .or_else(|| set("HOME").map(|folder| folder.join(".cache").join("cinch")))
}

/// Its name can be guessed, so anybody may have made it before, or a link of that name.
fn temporary_folder(temporary: &Path) -> Result<PathBuf, Refused> {
    let folder = temporary.join(format!("cinch-{}", user()));
    if fs::symlink_metadata(&folder).is_ok_and(|found| found.is_symlink()) {
        let reason = "it is a link".to_owned();
        return Err(Refused { folder, reason });
    }
    Ok(folder)
}

/// Makes a folder that only this user can read and write, or checks that nobody else can write
/// the one that is there.
pub fn private_folder(folder: &Path) -> Result<(), Refused> {
    let refuse = |reason| Refused {
        folder: folder.to_owned(),
        reason,
    };
    create(folder).map_err(|error| refuse(format!("it cannot be made: {error}")))?;
    let found = fs::metadata(folder).map_err(|error| refuse(error.to_string()))?;
    objection(&found).map_or(Ok(()), |reason| Err(refuse(reason)))
}

fn create(folder: &Path) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

#[cfg(unix)]
fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[cfg(not(unix))]
fn user() -> u32 {
    0
}

#[cfg(unix)]
fn objection(found: &Metadata) -> Option<String> {
    use std::os::unix::fs::MetadataExt;
    writer_beside(user(), found.uid(), found.gid(), found.mode())
}

/// Elsewhere a user's folders are the user's by what the system grants on them.
#[cfg(not(unix))]
fn objection(_: &Metadata) -> Option<String> {
    None
}

/// Who can write a folder beside this user and root, from whom nothing is safe. A group of the
/// owner's own number is taken to have the owner alone in it, as systems with such groups make
/// folders that it can write.
#[cfg(unix)]
fn writer_beside(user: u32, owner: u32, group: u32, mode: u32) -> Option<String> {
    const GROUP_WRITES: u32 = 0o020;
    const ALL_WRITE: u32 = 0o002;
    let permissions = mode & 0o7777;
    if owner != user && owner != 0 {
        return Some(format!("it belongs to user {owner}, not to {user}"));
    }
    if mode & ALL_WRITE != 0 {
        return Some(format!("everybody can write it (mode {permissions:o})"));
    }
    if mode & GROUP_WRITES != 0 && group != owner {
        return Some(format!("group {group} can write it (mode {permissions:o})"));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_folder_follows_the_environment() {
        let folder = |pairs: &[(&str, &str)]| {
            cache_folder_from(|name| {
                let pair = pairs.iter().find(|(key, _)| *key == name);
                pair.map(|(_, value)| OsString::from(value))
            })
        };
        let all = [
            ("HOME", "/h"),
            ("XDG_CACHE_HOME", "/x"),
            ("CINCH_CACHE", "/c"),
        ];
        let found = |path: &str| Some(PathBuf::from(path));
        assert_eq!(folder(&all), found("/c"));
        assert_eq!(folder(&all[..2]), found("/x/cinch"));
        assert_eq!(folder(&all[..1]), found("/h/.cache/cinch"));
        let empty = [("CINCH_CACHE", ""), ("HOME", "/h")];
        assert_eq!(folder(&empty), found("/h/.cache/cinch"));
        assert_eq!(folder(&[]), None);
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_refused() {
        let place = tempfile::tempdir().unwrap();
        fs::write(place.path().join("file"), "x").unwrap();
        let refused = private_folder(&place.path().join("file/below")).unwrap_err();
        assert!(refused.reason.contains("cannot be made"), "{refused}");
    }

    #[cfg(unix)]
    #[test]
    fn a_missing_folder_is_made_for_this_user_alone() {
        use std::os::unix::fs::PermissionsExt;
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("a/b");
        private_folder(&folder).unwrap();
        for made in [place.path().join("a"), folder.clone()] {
            let mode = fs::metadata(made).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o700);
        }
        private_folder(&folder).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
        let message = private_folder(&folder).unwrap_err().to_string();
        assert!(message.contains("mode 777"), "{message}");
        assert!(
            message.contains("a/b") && message.contains("hint:"),
            "{message}"
        );
    }

    #[cfg(unix)]
    #[test]
    fn a_folder_is_trusted_where_nobody_else_can_write() {
        for (owner, group, mode) in [
            (1000, 1000, 0o700),
            (1000, 100, 0o755),
            (1000, 1000, 0o775),
            (0, 0, 0o755),
        ] {
            assert_eq!(writer_beside(1000, owner, group, mode), None);
        }
        for (owner, group, mode, reason) in [
            (1001, 1000, 0o700, "belongs to user 1001"),
            (1000, 1000, 0o1777, "everybody can write it (mode 1777)"),
            (1000, 100, 0o770, "group 100 can write it"),
        ] {
            let found = writer_beside(1000, owner, group, mode).unwrap();
            assert!(found.contains(reason), "{found}");
        }
        // Root takes no folder of another user's.
        assert!(writer_beside(0, 1000, 1000, 0o700).is_some());
    }

    #[cfg(unix)]
    #[test]
    fn a_link_among_the_temporary_files_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let folder = temporary_folder(place.path()).unwrap();
        assert_eq!(folder.parent(), Some(place.path()));
        std::os::unix::fs::symlink(place.path(), &folder).unwrap();
        let refused = temporary_folder(place.path()).unwrap_err();
        assert_eq!(refused.reason, "it is a link");
    }
}
