//! What a rehearsed process left: the card's ledger, read back.

use std::fs;
use std::io;
use std::path::Path;

pub use crate::library::ledger::Entry;

/// The numbers of one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub process: u32,
    entries: Vec<u64>,
}

impl Record {
    pub fn get(&self, entry: Entry) -> u64 {
        self.entries.get(entry as usize).copied().unwrap_or(0)
    }

    /// The records of all processes that used the card, in the order of how much they used.
    pub fn read_all(folder: &Path) -> io::Result<Vec<Self>> {
        let mut records = Vec::new();
        for file in fs::read_dir(folder)? {
            let file = file?;
            let name = file.file_name();
            let process = name.to_str().and_then(|name| name.strip_prefix("card-"));
            let Some(process) = process.and_then(|number| number.parse().ok()) else {
                continue;
            };
            let bytes = fs::read(file.path())?;
            let numbers = bytes.chunks_exact(8);
            let entries =
                numbers.filter_map(|bytes| Some(u64::from_le_bytes(bytes.try_into().ok()?)));
            records.push(Self {
                process,
                entries: entries.collect(),
            });
        }
        records.sort_by_key(|record| std::cmp::Reverse(record.get(Entry::Peak)));
        Ok(records)
    }
}
