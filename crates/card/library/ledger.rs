//! What happened on the card, written to a file as it happens, so that it is there however the process ends.
//!
//! The file is `card-PID` in the folder that `CINCH_CARD_LEDGER` names: 64-bit little-endian numbers in the order of
//! `Entry`. It is made with the context: a process that never uses the card leaves none.

use std::fs::OpenOptions;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

pub const VARIABLE: &str = "CINCH_CARD_LEDGER";

/// The places of the file's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Entry {
    /// Bytes in use now, and the most there were at once, context and libraries included.
    Used,
    Peak,
    /// Of these, what is outside of allocations: context and libraries.
    Outside,
    /// Requests that were refused because the card was full, and the size of the last.
    Refused,
    RefusedBytes,
    Launches,
    /// Frees of addresses that were not handed out.
    WrongFrees,
    /// Calls that are answered by an estimate, because no public means gives the number: cuDNN's recurrent nets and
    /// batch norms outside of what was measured, transforms of cuFFT.
    Estimates,
    /// Bytes copied to and from the card.
    CopiedIn,
    CopiedOut,
    /// Communicators of NCCL.
    Communicators,
    /// Plans whose workspace cuDNN itself gave, and those it could not be asked for.
    AskedPlans,
    UnaskedPlans,
    /// Convolutions that cuDNN was asked about.
    Convolutions,
    /// The most bytes that pools of `cudaMallocAsync` had.
    PooledBytes,
}

const NUM_ENTRIES: usize = Entry::PooledBytes as usize + 1;

pub struct Ledger {
    entries: &'static [AtomicU64; NUM_ENTRIES],
}

impl Ledger {
    fn open() -> Self {
        let mapped = std::env::var_os(VARIABLE).and_then(|folder| {
            let path = Path::new(&folder).join(format!("card-{}", std::process::id()));
            let length = NUM_ENTRIES * size_of::<AtomicU64>();
            let mut options = OpenOptions::new();
            let file = options.read(true).write(true).create(true).truncate(false);
            let file = file.open(path).ok()?;
            file.set_len(length as u64).ok()?;
            super::host::map_file(&file, length)
        });
        let entries = match mapped {
            // SAFETY: the mapping is as long as the array, aligned to a page, and never unmapped; atomics allow that
            // another process reads the file meanwhile.
            Some(address) => unsafe { &*(address as *const [AtomicU64; NUM_ENTRIES]) },
            None => Box::leak(Box::new([const { AtomicU64::new(0) }; NUM_ENTRIES])),
        };
        Self { entries }
    }

    pub fn add(&self, entry: Entry, count: u64) {
        self.entries[entry as usize].fetch_add(count, Ordering::Relaxed);
    }

    pub fn set(&self, entry: Entry, value: u64) {
        self.entries[entry as usize].store(value, Ordering::Relaxed);
    }

    pub fn raise(&self, entry: Entry, value: u64) {
        self.entries[entry as usize].fetch_max(value, Ordering::Relaxed);
    }
}

/// The ledger of this process.
pub fn ledger() -> &'static Ledger {
    static LEDGER: OnceLock<Ledger> = OnceLock::new();
    LEDGER.get_or_init(Ledger::open)
}
