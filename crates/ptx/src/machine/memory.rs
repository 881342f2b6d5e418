//! Memory that kernels reach, and what they may do there.

use std::ops::Range;

/// Bytes of a launch's memory, by address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    pub bytes: Range<u64>,
    pub is_written: bool,
}

/// Global memory: what there is, and what of it a launch may touch.
#[derive(Debug)]
pub struct Memory<'a> {
    bytes: &'a mut [u8],
    base: u64,
    regions: Vec<Region>,
    /// Who has read and written it in this launch.
    marks: Vec<Option<Box<[Mark; PAGE_WORDS]>>>,
    /// What was last read and written of them: mostly it is the same again.
    last: [Range<u64>; 2],
    /// Whether blocks tell each other how far they are.
    is_ordered: bool,
}

const WORD_BYTES: usize = 4;
const PAGE_WORDS: usize = 1024;

/// Clusters by number, from one.
#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    written: u32,
    read: u32,
}

/// Several have read it.
const MANY: u32 = u32::MAX;

impl<'a> Memory<'a> {
    pub fn new(bytes: &'a mut [u8], base: u64, regions: Vec<Region>) -> Self {
        let pages = bytes.len().div_ceil(WORD_BYTES * PAGE_WORDS);
        Self {
            bytes,
            base,
            regions,
            marks: std::iter::repeat_with(|| None).take(pages).collect(),
            last: [0..0, 0..0],
            is_ordered: false,
        }
    }

    /// Blocks of the launch order what they do by themselves.
    pub(crate) fn begin(&mut self, is_ordered: bool) {
        self.is_ordered = is_ordered;
        self.marks.fill_with(|| None);
    }

    /// Where some bytes are, if a launch may touch them.
    fn place(&mut self, address: u64, bytes: usize, writes: bool) -> Result<usize, String> {
        let end = address.wrapping_add(bytes as u64);
        let last = &self.last[usize::from(writes)];
        if last.start <= address && end <= last.end && address <= end {
            return Ok((address - self.base) as usize);
        }
        // Two tensors that lie beside each other are one for a copy of both.
        let mut at = address;
        while at < end {
            let region = self
                .regions
                .iter()
                .find(|region| region.bytes.contains(&at) && (region.is_written || !writes));
            let Some(region) = region else {
                let what = if writes { "writes" } else { "reads" };
                return Err(format!(
                    "{what} {bytes} bytes at {address:#x}, of which {at:#x} is nothing that it may touch: {}",
                    self.nearest(at)
                ));
            };
            at = region.bytes.end;
            self.last[usize::from(writes)] = region.bytes.clone();
        }
        Ok((address - self.base) as usize)
    }

    fn nearest(&self, address: u64) -> String {
        let distance = |region: &&Region| {
            let Range { start, end } = region.bytes;
            if address < start {
                start - address
            } else {
                (address + 1).saturating_sub(end)
            }
        };
        match self.regions.iter().min_by_key(distance) {
            Some(region) => format!("the nearest is {:#x?}", region.bytes),
            None => "there is nothing".to_owned(),
        }
    }

    fn mark(
        &mut self,
        place: usize,
        bytes: usize,
        cluster: u32,
        writes: bool,
    ) -> Result<(), String> {
        if self.is_ordered {
            return Ok(());
        }
        let is_others = |who: u32| who != 0 && who != cluster;
        // Neighbours of two bytes may be of different blocks.
        let is_whole = bytes >= WORD_BYTES;
        let end = (place + bytes).div_ceil(WORD_BYTES);
        let mut next = place / WORD_BYTES;
        while next < end {
            let page = self.marks[next / PAGE_WORDS]
                .get_or_insert_with(|| Box::new([Mark::default(); PAGE_WORDS]));
            let first = next % PAGE_WORDS;
            let count = (end - next).min(PAGE_WORDS - first);
            next += count;
            for mark in &mut page[first..first + count] {
                if is_whole && is_others(mark.written) {
                    let what = if writes { "writes" } else { "reads" };
                    return Err(format!(
                        "{what} what cluster {} has written in this launch",
                        mark.written - 1
                    ));
                }
                if writes {
                    if is_whole && is_others(mark.read) {
                        return Err(
                            "writes what another cluster has read in this launch".to_owned()
                        );
                    }
                    mark.written = if is_whole { cluster } else { 0 };
                } else {
                    mark.read = match mark.read {
                        0 => cluster,
                        who if who == cluster => who,
                        _ => MANY,
                    };
                }
            }
        }
        Ok(())
    }

    pub(crate) fn read(
        &mut self,
        address: u64,
        bytes: usize,
        cluster: u32,
    ) -> Result<&[u8], String> {
        let place = self.place(address, bytes, false)?;
        self.mark(place, bytes, cluster, false)?;
        Ok(&self.bytes[place..place + bytes])
    }

    pub(crate) fn write(&mut self, address: u64, from: &[u8], cluster: u32) -> Result<(), String> {
        let place = self.place(address, from.len(), true)?;
        self.mark(place, from.len(), cluster, true)?;
        self.bytes[place..place + from.len()].copy_from_slice(from);
        Ok(())
    }

    /// Adds in whatever order it happens; gives what was there.
    pub(crate) fn add(&mut self, address: u64, value: u32) -> Result<u32, String> {
        let place = self.place(address, 4, true)?;
        let word = &mut self.bytes[place..place + 4];
        let before = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
        word.copy_from_slice(&before.wrapping_add(value).to_le_bytes());
        Ok(before)
    }

    /// The same of floats, where blocks take turns.
    pub(crate) fn add_floats(&mut self, address: u64, from: &[u8]) -> Result<(), String> {
        let place = self.place(address, from.len(), true)?;
        let to = &mut self.bytes[place..place + from.len()];
        for (to, from) in to.chunks_exact_mut(4).zip(from.chunks_exact(4)) {
            let sum = float(to) + float(from);
            to.copy_from_slice(&sum.to_le_bytes());
        }
        Ok(())
    }
}

pub(crate) fn float(bytes: &[u8]) -> f32 {
    f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}
