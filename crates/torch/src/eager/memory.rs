//! Where tensors' bytes come from: a trait, so that the same program can run against PyTorch's
//! caching allocator or against a plain ledger.

use crate::allocator::{Allocator, AllocatorConfig, BlockId, MIN_BLOCK};

/// A block that is in use, as its allocator numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Block(pub u32);

/// A device's memory.
pub trait MemoryModel {
    /// A block for this many bytes, or none when the device is full.
    fn allocate(&mut self, bytes: u64) -> Option<Block>;
    fn free(&mut self, block: Block);
    /// Bytes in blocks that are in use, rests of unsplit blocks included.
    fn allocated(&self) -> u64;
    /// Bytes that were asked for, before rounding.
    fn requested(&self) -> u64;
    /// Bytes held from the driver.
    fn reserved(&self) -> u64;
    /// The largest `allocated` since the last reset.
    fn peak_allocated(&self) -> u64;
    /// The largest `reserved` since the last reset.
    fn peak_reserved(&self) -> u64;
    fn reset_peaks(&mut self);
    /// `torch.cuda.empty_cache()`: gives segments that hold nothing back to the driver.
    fn empty_cache(&mut self);
    /// A number that stands for where everything lies: equal ones mean that the same requests have the same effect.
    fn arrangement(&self) -> u64;
}

/// Counts bytes in multiples of 512 and has no segments: what the tensors need, without what the
/// allocator adds.
#[derive(Default)]
pub struct Ledger {
    /// Of each block, what was asked for.
    sizes: Vec<u64>,
    vacant: Vec<u32>,
    allocated: u64,
    requested: u64,
    peak: u64,
}

fn rounded(bytes: u64) -> u64 {
    bytes.div_ceil(MIN_BLOCK) * MIN_BLOCK
}

impl MemoryModel for Ledger {
    fn allocate(&mut self, bytes: u64) -> Option<Block> {
        self.allocated += rounded(bytes);
        self.requested += bytes;
        self.peak = self.peak.max(self.allocated);
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.sizes.push(0);
            self.sizes.len() as u32 - 1
        });
        self.sizes[index as usize] = bytes;
        Some(Block(index))
    }

    fn free(&mut self, block: Block) {
        let bytes = std::mem::take(&mut self.sizes[block.0 as usize]);
        self.allocated -= rounded(bytes);
        self.requested -= bytes;
        self.vacant.push(block.0);
    }

    fn allocated(&self) -> u64 {
        self.allocated
    }

    fn requested(&self) -> u64 {
        self.requested
    }

    fn reserved(&self) -> u64 {
        self.allocated
    }

    fn peak_allocated(&self) -> u64 {
        self.peak
    }

    fn peak_reserved(&self) -> u64 {
        self.peak
    }

    fn reset_peaks(&mut self) {
        self.peak = self.allocated;
    }

    fn empty_cache(&mut self) {}

    fn arrangement(&self) -> u64 {
        self.allocated
    }
}

/// PyTorch's caching allocator on one stream.
pub struct Caching {
    allocator: Allocator,
    /// Tensors that hold more than this end the run.
    ceiling: u64,
}

impl Caching {
    /// Without `device_total` memory never runs out.
    pub fn new(config: AllocatorConfig, device_total: Option<u64>) -> Caching {
        Caching {
            allocator: Allocator::new(config, device_total),
            ceiling: u64::MAX,
        }
    }

    /// The same for someone who only asks whether the run stays below.
    pub fn with_ceiling(self, ceiling: u64) -> Caching {
        Caching { ceiling, ..self }
    }
}

/// The stream that eager programs run on.
const DEFAULT_STREAM: u64 = 0;

impl MemoryModel for Caching {
    fn allocate(&mut self, bytes: u64) -> Option<Block> {
        let block = self.allocator.allocate(bytes, DEFAULT_STREAM).ok()?;
        let is_below = self.allocated() <= self.ceiling;
        is_below.then_some(Block(block.number()))
    }

    fn free(&mut self, block: Block) {
        self.allocator.free(BlockId::of_number(block.0));
    }

    fn allocated(&self) -> u64 {
        self.allocator.statistics().allocated.current
    }

    fn requested(&self) -> u64 {
        self.allocator.statistics().requested.current
    }

    fn reserved(&self) -> u64 {
        self.allocator.statistics().reserved.current
    }

    fn peak_allocated(&self) -> u64 {
        self.allocator.statistics().allocated.peak
    }

    fn peak_reserved(&self) -> u64 {
        self.allocator.statistics().reserved.peak
    }

    fn reset_peaks(&mut self) {
        self.allocator.reset_peaks();
    }

    fn empty_cache(&mut self) {
        self.allocator.release_cached();
    }

    fn arrangement(&self) -> u64 {
        self.allocator.arrangement()
    }
}
