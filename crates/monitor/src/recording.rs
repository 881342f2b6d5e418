//! Samples in a file, a line each: written as they come, read again line by line.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use crate::error::{IoContext, MonitorError};
use crate::sample::Sample;
use crate::source::Source;

/// The longest line that is read: 16 GPUs with 200 processes each take a tenth of it.
const LONGEST_LINE: u64 = 16 << 20;

/// Adds a sample to a recording. A line goes out in one write, so a kill tears only the last.
pub fn append_line(out: &mut impl Write, sample: &Sample) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(sample)?;
    line.push(b'\n');
    out.write_all(&line)
}

/// A recording that is read from its beginning.
#[derive(Debug)]
pub struct Recording {
    path: PathBuf,
    reader: BufReader<File>,
    line: u64,
    /// Whether no sample was found yet.
    is_blank: bool,
}

impl Recording {
    pub fn open(path: &Path) -> Result<Self, MonitorError> {
        let file = cinch_files::open_regular(path).at("read", path)?;
        Ok(Self {
            path: path.to_owned(),
            reader: BufReader::new(file),
            line: 0,
            is_blank: true,
        })
    }

    /// The next sample. A last line that a kill has torn is left out.
    pub fn next_sample(&mut self) -> Result<Option<Sample>, MonitorError> {
        loop {
            let mut line = Vec::new();
            let mut limited = self.reader.by_ref().take(LONGEST_LINE);
            let read = limited
                .read_until(b'\n', &mut line)
                .at("read", &self.path)?;
            if read == 0 && self.is_blank {
                let path = self.path.clone();
                return Err(MonitorError::Empty { path });
            }
            if read == 0 {
                return Ok(None);
            }
            self.line += 1;
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let is_whole = line.ends_with(b"\n");
            match serde_json::from_slice(&line) {
                Ok(sample) => {
                    self.is_blank = false;
                    return Ok(Some(sample));
                }
                Err(_) if !is_whole && self.line > 1 && (read as u64) < LONGEST_LINE => {
                    return Ok(None);
                }
                Err(error) => {
                    return Err(MonitorError::NotASample {
                        path: self.path.clone(),
                        line: self.line,
                        reason: error.to_string(),
                    });
                }
            }
        }
    }
}

impl Source for Recording {
    fn sample(&mut self) -> Result<Option<Sample>, MonitorError> {
        self.next_sample()
    }

    fn is_live(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use cinch_device::{Host, ReadBy};

    use super::*;

    fn sample(seconds: f64) -> Sample {
        Sample {
            at: 1e9 + seconds,
            seconds,
            read_by: ReadBy::Nobody,
            reason: Some("no NVIDIA driver on this machine".to_owned()),
            gpus: Vec::new(),
            host: Host::default(),
            processes: Vec::new(),
        }
    }

    #[test]
    fn what_is_written_is_read_and_a_torn_line_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("record.jsonl");
        let mut file = File::create(&path).unwrap();
        for second in 0..3 {
            append_line(&mut file, &sample(f64::from(second))).unwrap();
        }
        file.write_all(b"{\"at\": 17").unwrap();
        let mut recording = Recording::open(&path).unwrap();
        for second in 0..3 {
            let read = recording.next_sample().unwrap();
            assert_eq!(read, Some(sample(f64::from(second))));
        }
        assert_eq!(recording.next_sample().unwrap(), None);
    }

    #[test]
    fn a_file_that_is_none_is_named_with_its_line() {
        let folder = tempfile::tempdir().unwrap();
        for text in ["{\"at\":1}\n", "not json", "[]\n{}\n"] {
            let path = folder.path().join("other.txt");
            std::fs::write(&path, text).unwrap();
            let message = Recording::open(&path).unwrap().next_sample().unwrap_err();
            let message = message.to_string();
            assert!(message.contains("other.txt line 1"), "{message}");
        }
    }
}
