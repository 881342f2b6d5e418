//! The input that is being read, where it outlives the process that reads it.
//!
//! A write to a file is in the system's hands as soon as it returns: whatever ends the process
//! then, an abort, a full stack, a kill, the file says what it was doing.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::Path;

/// Number of the input and its length, little-endian.
const HEADER: usize = 16;

pub struct Current {
    file: File,
    buffer: Vec<u8>,
}

impl Current {
    pub fn create(path: &Path) -> io::Result<Current> {
        let mut file = File::create(path)?;
        file.write_all(&[0; HEADER])?;
        Ok(Current {
            file,
            buffer: Vec::new(),
        })
    }

    /// Notes an input before it is read.
    pub fn set(&mut self, number: u64, input: &[u8]) -> io::Result<()> {
        self.buffer.clear();
        self.buffer.extend(number.to_le_bytes());
        self.buffer.extend((input.len() as u64).to_le_bytes());
        self.buffer.extend(input);
        self.file.rewind()?;
        self.file.write_all(&self.buffer)
    }
}

/// The number of the last input that was noted, 0 where there is none.
pub fn number(path: &Path) -> u64 {
    let mut number = [0; 8];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut number));
    read.map_or(0, |()| u64::from_le_bytes(number))
}

/// The last input that was noted.
pub fn input(path: &Path) -> io::Result<Vec<u8>> {
    let bytes = std::fs::read(path)?;
    let length = bytes
        .get(HEADER / 2..HEADER)
        .and_then(|length| length.try_into().ok())
        .map_or(0, u64::from_le_bytes);
    let bytes = bytes.into_iter().skip(HEADER);
    Ok(bytes.take(usize::try_from(length).unwrap_or(0)).collect())
}
