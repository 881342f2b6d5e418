//! The driver's memory pools, from which `cudaMallocAsync` takes: what is freed stays with the pool, up to a threshold, until the
//! pool is trimmed. There is one pool for each device, its default. How a real pool cuts its memory is not documented: this one
//! has no gaps, and grows by as much as is missing, so that a run which uses it is not called certain.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};

use super::host::put;
use super::ledger::{Entry, ledger};
use super::memory::{self, Device, Full};
use super::runtime::{
    INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, SUCCESS, exported, failed, nothing_to_do,
};

/// Allocations are multiples of this.
const ALIGNMENT: u64 = 512;

/// A device's default pool.
#[derive(Default)]
pub struct Pool {
    live: BTreeMap<u64, u64>,
    /// Freed bytes above this go back to the device.
    threshold: u64,
    used: u64,
    most_used: u64,
    reserved: u64,
    most_reserved: u64,
}

impl Device {
    /// Memory of the pool; what it has not, it takes from the device.
    pub fn allocate_pooled(&mut self, bytes: u64) -> Result<u64, Full> {
        let size = bytes
            .max(1)
            .checked_next_multiple_of(ALIGNMENT)
            .ok_or(Full)?;
        let needed = self.pool.used.checked_add(size).ok_or(Full)?;
        let missing = needed.saturating_sub(self.pool.reserved);
        if missing > 0 {
            self.take(missing)?;
            self.pool.reserved += missing;
        }
        ledger().raise(Entry::PooledBytes, self.pool.reserved);
        let pool = &mut self.pool;
        pool.used = needed;
        pool.most_used = pool.most_used.max(pool.used);
        pool.most_reserved = pool.most_reserved.max(pool.reserved);
        let address = self.new_address(size);
        self.pool.live.insert(address, size);
        Ok(address)
    }

    /// Takes an allocation of the pool back; `false` where there is none at that address.
    pub fn release_pooled(&mut self, address: u64) -> bool {
        let Some(size) = self.pool.live.remove(&address) else {
            return false;
        };
        self.pool.used -= size;
        self.forget_address(address, size);
        self.trim_pool(self.pool.threshold);
        true
    }

    /// Gives back what is unused above so many reserved bytes.
    fn trim_pool(&mut self, keep: u64) {
        let kept = self.pool.used.max(keep.min(self.pool.reserved));
        let spare = self.pool.reserved - kept;
        self.pool.reserved = kept;
        self.give(spare);
    }
}

/// Attributes of a pool that are numbers of bytes.
const RELEASE_THRESHOLD: c_int = 4;
const RESERVED: c_int = 5;
const MOST_RESERVED: c_int = 6;
const USED: c_int = 7;
const MOST_USED: c_int = 8;

/// The number of the device whose pool it is: pools are numbers that are not null.
fn device_of_pool(pool: *mut c_void) -> Option<usize> {
    (pool as usize).checked_sub(1)
}

/// # Safety
/// `to` is null or valid for a write.
pub unsafe fn allocate(to: *mut *mut c_void, bytes: usize, device: usize) -> c_int {
    let Some(mut device) = memory::device(device) else {
        return failed(INVALID_VALUE);
    };
    match device.allocate_pooled(bytes as u64) {
        Ok(address) => {
            // SAFETY: by the caller's word.
            unsafe { put(to, address as *mut c_void) };
            SUCCESS
        }
        Err(Full) => failed(OUT_OF_MEMORY),
    }
}

exported! {
    fn cudaMallocAsync(to: *mut *mut c_void, bytes: usize, _stream: *mut c_void) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { allocate(to, bytes, memory::current()) }
    }

    fn cuMemAllocAsync(to: *mut *mut c_void, bytes: usize, _stream: *mut c_void) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { allocate(to, bytes, memory::current()) }
    }

    fn cudaMallocFromPoolAsync(to: *mut *mut c_void, bytes: usize, pool: *mut c_void, _stream: *mut c_void) -> c_int {
        match device_of_pool(pool) {
            // SAFETY: as documented for this function.
            Some(device) => unsafe { allocate(to, bytes, device) },
            None => failed(INVALID_VALUE),
        }
    }

    fn cudaDeviceGetDefaultMemPool(pool: *mut *mut c_void, device: c_int) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(pool, (device as usize + 1) as *mut c_void) };
        SUCCESS
    }

    fn cudaDeviceGetMemPool(pool: *mut *mut c_void, device: c_int) -> c_int {
        // SAFETY: the same contract.
        unsafe { cudaDeviceGetDefaultMemPool(pool, device) }
    }

    /// Attributes that are not bytes are switches of reuse, all of which are on.
    fn cudaMemPoolGetAttribute(pool: *mut c_void, attribute: c_int, value: *mut c_void) -> c_int {
        let Some(device) = device_of_pool(pool).and_then(memory::device) else {
            return failed(INVALID_VALUE);
        };
        let bytes = match attribute {
            RELEASE_THRESHOLD => device.pool.threshold,
            RESERVED => device.pool.reserved,
            MOST_RESERVED => device.pool.most_reserved,
            USED => device.pool.used,
            MOST_USED => device.pool.most_used,
            _ => {
                // SAFETY: as documented for this function: these are of type int.
                unsafe { put(value.cast::<c_int>(), 1) };
                return SUCCESS;
            }
        };
        // SAFETY: as documented for this function: these are of type cuuint64_t.
        unsafe { put(value.cast::<u64>(), bytes) };
        SUCCESS
    }

    fn cudaMemPoolSetAttribute(pool: *mut c_void, attribute: c_int, value: *const c_void) -> c_int {
        let Some(mut device) = device_of_pool(pool).and_then(memory::device) else {
            return failed(INVALID_VALUE);
        };
        let is_bytes = matches!(attribute, RELEASE_THRESHOLD | MOST_RESERVED | MOST_USED);
        if !is_bytes || value.is_null() {
            return SUCCESS;
        }
        // SAFETY: as documented for this function: these are of type cuuint64_t.
        let bytes = unsafe { value.cast::<u64>().read_unaligned() };
        let pool = &mut device.pool;
        match attribute {
            RELEASE_THRESHOLD => pool.threshold = bytes,
            // The highest marks can only be set back, to what there is now.
            MOST_RESERVED => pool.most_reserved = pool.reserved,
            _ => pool.most_used = pool.used,
        }
        SUCCESS
    }

    fn cudaMemPoolTrimTo(pool: *mut c_void, keep: usize) -> c_int {
        match device_of_pool(pool).and_then(memory::device) {
            Some(mut device) => {
                device.trim_pool(keep as u64);
                SUCCESS
            }
            None => failed(INVALID_VALUE),
        }
    }

    /// Pools of one's own.
    fn cudaMemPoolCreate(_pool: *mut *mut c_void, _properties: *const c_void) -> c_int {
        failed(NOT_SUPPORTED)
    }

    fn cudaDeviceSetMemPool(_device: c_int, _pool: *mut c_void) -> c_int {
        failed(NOT_SUPPORTED)
    }

    fn cudaMemPoolGetAccess(flags: *mut c_uint, _pool: *mut c_void, _location: *const c_void) -> c_int {
        const READ_AND_WRITE: c_uint = 3;
        // SAFETY: as documented for this function.
        unsafe { put(flags, READ_AND_WRITE) };
        SUCCESS
    }
}

nothing_to_do! { cudaMemPoolSetAccess }
