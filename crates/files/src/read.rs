//! Reading files that somebody else named: only regular ones, and those that are read whole only
//! up to a limit. A pipe would be waited for without end, `/dev/zero` fills any memory, and either
//! can stand behind a name that looks like any other.

use std::fs::{self, File, FileType, OpenOptions};
use std::io::{self, Read};
use std::path::Path;

/// The most that is read of a file that is read whole, unless its kind has a limit of its own:
/// configs, records, states. A thousand times what such files have.
pub const MAX_READ: u64 = 16 << 20;

/// Opens a regular file for reading. Anything else is refused before it can be waited for.
pub fn open_regular(path: &Path) -> io::Result<File> {
    // First by name: opening a device can already do something.
    refuse_others(&fs::metadata(path)?.file_type())?;
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        // What took the name's place in the meantime is not waited for either.
        let flags = rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::NOCTTY;
        options.custom_flags(flags.bits().cast_signed());
    }
    let file = options.open(path)?;
    refuse_others(&file.metadata()?.file_type())?;
    Ok(file)
}

/// The contents of a regular file of at most `limit` bytes.
pub fn read_regular(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let file = open_regular(path)?;
    let too_large = || {
        let message = format!(
            "it has more than {}, the most that is read of such a file",
            size(limit)
        );
        io::Error::new(io::ErrorKind::FileTooLarge, message)
    };
    let length = file.metadata()?.len();
    if length > limit {
        return Err(too_large());
    }
    // It may grow while it is read, and files of the system say that they are empty.
    let mut contents = Vec::with_capacity(usize::try_from(length).unwrap_or_default());
    file.take(limit.saturating_add(1))
        .read_to_end(&mut contents)?;
    match contents.len() as u64 > limit {
        true => Err(too_large()),
        false => Ok(contents),
    }
}

/// The same, as text.
pub fn read_regular_text(path: &Path, limit: u64) -> io::Result<String> {
    String::from_utf8(read_regular(path, limit)?)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

fn refuse_others(kind: &FileType) -> io::Result<()> {
    if kind.is_file() {
        return Ok(());
    }
    if kind.is_dir() {
        return Err(io::Error::new(
            io::ErrorKind::IsADirectory,
            "it is a folder, not a file",
        ));
    }
    let message = format!("it is {}, not a regular file", name_of(kind));
    Err(io::Error::new(io::ErrorKind::InvalidInput, message))
}

#[cfg(unix)]
fn name_of(kind: &FileType) -> &'static str {
    use std::os::unix::fs::FileTypeExt;
    match kind {
        kind if kind.is_fifo() => "a pipe",
        kind if kind.is_socket() => "a socket",
        kind if kind.is_char_device() || kind.is_block_device() => "a device",
        _ => "something else",
    }
}

#[cfg(not(unix))]
fn name_of(_: &FileType) -> &'static str {
    "something else"
}

fn size(bytes: u64) -> String {
    match bytes >> 20 {
        0 => format!("{bytes} bytes"),
        mebibytes => format!("{mebibytes} MiB"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_up_to_its_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "four").unwrap();
        assert_eq!(read_regular(&path, 4).unwrap(), b"four");
        assert_eq!(read_regular_text(&path, u64::MAX).unwrap(), "four");
        let error = read_regular(&path, 3).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        assert!(error.to_string().contains("3 bytes"), "{error}");
        fs::write(&path, b"\xff").unwrap();
        let error = read_regular_text(&path, 4).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    /// By its length alone: nothing of it is read.
    #[test]
    fn a_large_file_is_refused_without_a_look() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("large");
        File::create(&path).unwrap().set_len(3 << 30).unwrap();
        let error = read_regular(&path, MAX_READ).unwrap_err();
        assert!(error.to_string().contains("more than 16 MiB"), "{error}");
    }

    #[test]
    fn what_is_there_and_what_is_not_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let kind = |path: &Path| read_regular(path, 1).unwrap_err().kind();
        assert_eq!(kind(folder.path()), io::ErrorKind::IsADirectory);
        assert_eq!(kind(&folder.path().join("absent")), io::ErrorKind::NotFound);
    }

    #[cfg(unix)]
    #[test]
    fn pipes_sockets_and_devices_are_refused_at_once() {
        use rustix::fs::{CWD, Mode};
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mkfifoat(CWD, &pipe, Mode::RUSR | Mode::WUSR).unwrap();
        let socket = folder.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
        for (path, name) in [
            (pipe.as_path(), "a pipe"),
            (&socket, "a socket"),
            (Path::new("/dev/zero"), "a device"),
            (&link, "a device"),
        ] {
            let error = read_regular(path, MAX_READ).unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
            assert!(open_regular(path).is_err());
        }
    }
}
