//! The allocator of the fuzzer: it counts what lives and refuses what is beyond a bound.
//!
//! A refused allocation ends the process, which the watching process tells as a find. So a
//! length in a file that is believed is found at once, on a machine of any size.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicIsize, Ordering::Relaxed};

struct Counting;

static LIVE: AtomicIsize = AtomicIsize::new(0);
static LIMIT: AtomicIsize = AtomicIsize::new(isize::MAX);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allows `bytes` more than there are now, for as long as `work` takes.
pub fn bounded<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
    let bytes = isize::try_from(bytes).unwrap_or(isize::MAX);
    LIMIT.store(LIVE.load(Relaxed).saturating_add(bytes), Relaxed);
    let result = work();
    LIMIT.store(isize::MAX, Relaxed);
    result
}

/// Counts an allocation and says whether it may be made.
fn take(bytes: usize) -> bool {
    // A layout is never larger than isize::MAX.
    let bytes = bytes.cast_signed();
    let live = LIVE.fetch_add(bytes, Relaxed).saturating_add(bytes);
    let fits = live <= LIMIT.load(Relaxed);
    if !fits {
        give_back(bytes);
    }
    fits
}

fn give_back(bytes: isize) {
    LIVE.fetch_sub(bytes, Relaxed);
}

#[expect(
    unsafe_code,
    reason = "an allocator is one; everything is passed on to the system's"
)]
// SAFETY: the system's allocator does the work; a null pointer is a refusal that the trait allows.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match take(layout.size()) {
            // SAFETY: the caller keeps the contract, which is the same.
            true => unsafe { System.alloc(layout) },
            false => std::ptr::null_mut(),
        }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        give_back(layout.size().cast_signed());
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !take(size) {
            return std::ptr::null_mut();
        }
        give_back(layout.size().cast_signed());
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}
