//! Reading a part of an open file, from any number of threads at once.
//!
//! Files that another process may cut off are read this way and not mapped: what is missing is
//! then an error, where a mapping ends the process.

use std::fs::File;
use std::io;

/// Fills `into` with the bytes from `offset` on. A file that ends before is an error of the kind
/// `UnexpectedEof`.
pub fn read_exact_at(file: &File, into: &mut [u8], offset: u64) -> io::Result<()> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::read_exact_at(file, into, offset);
    #[cfg(windows)]
    return seek_read_exact(file, into, offset);
}

#[cfg(windows)]
fn seek_read_exact(file: &File, mut into: &mut [u8], mut offset: u64) -> io::Result<()> {
    use std::os::windows::fs::FileExt;
    while !into.is_empty() {
        match file.seek_read(into, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                into = &mut into[count..];
                offset += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_read_and_a_file_that_was_cut_off_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("numbers");
        std::fs::write(&path, [0, 1, 2, 3, 4, 5]).unwrap();
        let file = File::open(&path).unwrap();
        let mut part = [0; 3];
        read_exact_at(&file, &mut part, 2).unwrap();
        assert_eq!(part, [2, 3, 4]);
        let writer = File::options().write(true).open(&path).unwrap();
        writer.set_len(4).unwrap();
        let error = read_exact_at(&file, &mut part, 2).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
