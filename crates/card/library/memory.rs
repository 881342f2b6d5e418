//! The card's memory: which addresses are handed out, and how much is left.
//!
//! Addresses lie in space that is reserved for each device and mapped by the kernel when it is first written to. Only
//! small copies write to it, so that a card of 141 GB costs some megabytes here.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use super::address::AddressSpace;
use super::card::card;
use super::host;
use super::ledger::{Entry, ledger};
use super::pool::Pool;

/// Copies and fills up to this size are really made. Above it nothing is: weights and activations are never real.
pub const REAL_BYTES: u64 = 4 << 20;

/// The driver takes device memory in multiples of this.
const GRANULE: u64 = 2 << 20;
/// Smaller requests share a granule.
const SHARED_BELOW: u64 = 1 << 20;

/// Address space of a device: for segments, and below it for ranges that are mapped by hand.
const SPACE: u64 = 1 << 41;
const VIRTUAL_SPACE: u64 = 1 << 42;

/// One of the cards.
pub struct Device {
    start: u64,
    addresses: AddressSpace,
    live: BTreeMap<u64, u64>,
    /// Bytes of allocations, of shared granules before rounding, and outside of allocations.
    large: u64,
    small: u64,
    outside: u64,
    /// Ranges of `cuMemAddressReserve` begin here.
    next_range: u64,
    pub(super) pool: Pool,
    pub has_context: bool,
}

/// Memory ran out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

impl Device {
    fn new() -> Option<Self> {
        let start = host::reserve(SPACE + VIRTUAL_SPACE)?;
        Some(Self {
            start,
            addresses: AddressSpace::of_context(start + SPACE + VIRTUAL_SPACE),
            live: BTreeMap::new(),
            large: 0,
            small: 0,
            outside: 0,
            next_range: start.next_multiple_of(GRANULE),
            pool: Pool::default(),
            has_context: false,
        })
    }

    pub fn used(&self) -> u64 {
        self.large + self.small.next_multiple_of(GRANULE) + self.outside
    }

    pub fn free_bytes(&self) -> u64 {
        card().memory.saturating_sub(self.used())
    }

    fn note(&self) {
        let ledger = ledger();
        ledger.set(Entry::Used, self.used());
        ledger.set(Entry::Outside, self.outside);
        ledger.raise(Entry::Peak, self.used());
    }

    /// Brings the context up, which takes memory of its own.
    pub fn context(&mut self) {
        if !self.has_context {
            self.has_context = true;
            self.take_outside(card().context);
        }
    }

    /// Counts what a library or the driver keeps for itself.
    pub fn take_outside(&mut self, bytes: u64) {
        self.outside += bytes;
        self.note();
    }

    /// Counts memory without an address, as `cuMemCreate` does.
    pub fn take(&mut self, bytes: u64) -> Result<(), Full> {
        self.context();
        if bytes > self.free_bytes() {
            ledger().add(Entry::Refused, 1);
            ledger().set(Entry::RefusedBytes, bytes);
            return Err(Full);
        }
        self.large += bytes;
        self.note();
        Ok(())
    }

    pub fn give(&mut self, bytes: u64) {
        self.large = self.large.saturating_sub(bytes);
        self.note();
    }

    pub fn allocate(&mut self, bytes: u64) -> Result<u64, Full> {
        let bytes = bytes.max(1);
        let size = match bytes < SHARED_BELOW {
            true => bytes.next_multiple_of(512),
            false => bytes.checked_next_multiple_of(GRANULE).ok_or(Full)?,
        };
        self.take(size)?;
        if size < SHARED_BELOW {
            self.large -= size;
            self.small += size;
        }
        let address = self.new_address(size);
        self.live.insert(address, size);
        Ok(address)
    }

    /// Takes an allocation back; `false` where there is none at that address.
    pub fn release(&mut self, address: u64) -> bool {
        if self.release_pooled(address) {
            return true;
        }
        let Some(size) = self.live.remove(&address) else {
            ledger().add(Entry::WrongFrees, 1);
            return false;
        };
        match size < SHARED_BELOW {
            true => self.small -= size,
            false => self.large -= size,
        }
        self.forget_address(address, size);
        self.note();
        true
    }

    pub(super) fn new_address(&mut self, size: u64) -> u64 {
        self.addresses.allocate(size)
    }

    /// What was written there goes too.
    pub(super) fn forget_address(&mut self, address: u64, size: u64) {
        self.addresses.release(address, size);
        if size >= GRANULE {
            host::forget(address, size);
        }
    }

    /// Address space to be mapped by hand. It is not handed out twice: there is more of it than any process uses.
    pub fn reserve_range(&mut self, bytes: u64) -> Option<u64> {
        let size = bytes.checked_next_multiple_of(GRANULE)?;
        let end = self.next_range.checked_add(size)?;
        (end <= self.start + VIRTUAL_SPACE).then(|| std::mem::replace(&mut self.next_range, end))
    }

    fn contains(&self, address: u64) -> bool {
        (self.start..self.start + SPACE + VIRTUAL_SPACE).contains(&address)
    }
}

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

fn devices() -> &'static [OnceLock<Option<Mutex<Device>>>] {
    static DEVICES: OnceLock<Vec<OnceLock<Option<Mutex<Device>>>>> = OnceLock::new();
    DEVICES.get_or_init(|| (0..card().devices).map(|_| OnceLock::new()).collect())
}

/// The device that this thread works with.
pub fn current() -> usize {
    CURRENT.get()
}

/// Makes a device this thread's; `false` where there is none of that number.
pub fn set_current(index: i32) -> bool {
    let is_known = (0..card().devices).contains(&index);
    if is_known {
        CURRENT.set(index as usize);
    }
    is_known
}

/// A device by its number; `None` where there is no such device, or no address space for it.
pub fn device(index: usize) -> Option<MutexGuard<'static, Device>> {
    let device = devices().get(index)?;
    let device = device.get_or_init(|| Device::new().map(Mutex::new));
    // A thread that panicked while it held the lock left counts that are still sums of what is live.
    Some(
        device
            .as_ref()?
            .lock()
            .unwrap_or_else(PoisonError::into_inner),
    )
}

pub fn current_device() -> Option<MutexGuard<'static, Device>> {
    device(current())
}

/// Which device an address is on.
pub fn device_of(address: u64) -> Option<usize> {
    devices().iter().position(|device| {
        let device = device.get().and_then(Option::as_ref);
        device.is_some_and(|device| {
            let device = device.lock().unwrap_or_else(PoisonError::into_inner);
            device.contains(address)
        })
    })
}

/// Copies as the card would, where that is small. Both addresses are memory of this process: the card's is reserved.
///
/// # Safety
/// Both ranges are valid for `bytes`, or one of them is the card's.
pub unsafe fn copy(to: u64, from: u64, bytes: u64) {
    let (to_card, from_card) = (device_of(to).is_some(), device_of(from).is_some());
    if to_card && !from_card {
        ledger().add(Entry::CopiedIn, bytes);
    }
    if from_card && !to_card {
        ledger().add(Entry::CopiedOut, bytes);
    }
    if bytes <= REAL_BYTES || !(to_card || from_card) {
        // SAFETY: by the caller's word, and addresses of the card are mapped. The ranges may overlap.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes as usize) };
    }
}

/// Fills as the card would, where that is small.
///
/// # Safety
/// The range is valid for `bytes`, or the card's.
pub unsafe fn fill(to: u64, value: u8, bytes: u64) {
    if bytes <= REAL_BYTES || device_of(to).is_none() {
        // SAFETY: by the caller's word, and addresses of the card are mapped.
        unsafe { std::ptr::write_bytes(to as *mut u8, value, bytes as usize) };
    }
}
