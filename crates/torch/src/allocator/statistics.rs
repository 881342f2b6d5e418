//! The counters of `torch.cuda.memory_stats()`.

use serde::Serialize;

/// A value and the highest it has been since the peaks were reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Gauge {
    pub current: u64,
    pub peak: u64,
}

impl Gauge {
    #[inline]
    pub(super) fn add(&mut self, amount: u64) {
        self.current += amount;
        self.peak = self.peak.max(self.current);
    }

    #[inline]
    pub(super) fn subtract(&mut self, amount: u64) {
        self.current -= amount;
    }
}

/// What the allocator has done. Bytes unless the name says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Statistics {
    /// Blocks that tensors own, in block sizes: `memory_allocated()`.
    pub allocated: Gauge,
    /// What the driver gave: `memory_reserved()`.
    pub reserved: Gauge,
    /// What tensors asked for, before rounding.
    pub requested: Gauge,
    /// Allocated blocks and those that wait for another stream.
    pub active: Gauge,
    /// Free blocks that share a segment with others and so cannot go back to the driver.
    pub inactive_split: Gauge,
    /// Segments held. Expandable ones count once for each range of addresses.
    pub num_segments: Gauge,
    pub num_allocations: u64,
    pub num_frees: u64,
    /// How often every free segment was given back to serve one request: each stalls the device.
    pub num_alloc_retries: u64,
    pub num_ooms: u64,
    /// Calls of `cudaMalloc`, or mappings of pages.
    pub num_device_alloc: u64,
    pub num_device_free: u64,
}

impl Statistics {
    /// `torch.cuda.reset_peak_memory_stats()`.
    pub fn reset_peaks(&mut self) {
        for gauge in [
            &mut self.allocated,
            &mut self.reserved,
            &mut self.requested,
            &mut self.active,
            &mut self.inactive_split,
            &mut self.num_segments,
        ] {
            gauge.peak = gauge.current;
        }
    }
}
