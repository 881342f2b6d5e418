//! The one allocation: everything a step touches lives in it, or in a second one where the plan
//! keeps some of it in host memory.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use cinch_plan::Placement;

use crate::error::EngineError;

/// Start of the arena: a huge page, so that the kernel can back it with few of them.
const ALIGNMENT: usize = 2 << 20;

/// A zeroed piece of host memory of fixed size.
pub struct Arena {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the arena owns its memory; access goes through `Arena`'s methods, whose contracts
// rule out overlapping writes.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

/// Element types whose memory may be read as bytes and filled with any.
///
/// # Safety
/// Any bits are a value of the type, it has no padding, and its alignment is at most its size,
/// which is a power of two up to 64.
pub unsafe trait Element: Copy + 'static {}
// SAFETY: a plain number of four bytes.
unsafe impl Element for f32 {}
// SAFETY: a plain number of eight bytes.
unsafe impl Element for f64 {}
// SAFETY: a plain number of four bytes.
unsafe impl Element for i32 {}
// SAFETY: a plain number of one byte.
unsafe impl Element for u8 {}

impl Arena {
    pub fn new(bytes: u64) -> Result<Self, EngineError> {
        let fail = || EngineError::OutOfMemory { bytes };
        let size = usize::try_from(bytes.max(1)).map_err(|_| fail())?;
        let layout = Layout::from_size_align(size, ALIGNMENT).map_err(|_| fail())?;
        // SAFETY: the size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(fail)?;
        Ok(Self { start, layout })
    }

    pub fn len(&self) -> usize {
        self.layout.size()
    }

    pub fn is_empty(&self) -> bool {
        false
    }

    fn pointer<T: Element>(&self, place: Placement) -> *mut T {
        assert!(
            place.end() <= self.len() as u64 && place.offset.is_multiple_of(size_of::<T>() as u64),
            "a tensor outside the arena"
        );
        // SAFETY: inside the allocation by the assertion, whose sum saturates.
        unsafe { self.start.as_ptr().add(place.offset as usize).cast() }
    }

    /// A tensor's elements.
    ///
    /// # Safety
    /// No mutable view of an overlapping range may be in use.
    pub unsafe fn view<T: Element>(&self, place: Placement) -> &[T] {
        let len = place.bytes as usize / size_of::<T>();
        // SAFETY: in bounds and aligned by `pointer`; initialised because the arena was zeroed,
        // and a value whatever was written since, by the contract of `Element`; not written
        // meanwhile by the caller's contract.
        unsafe { std::slice::from_raw_parts(self.pointer(place), len) }
    }

    /// A tensor's elements, to be written.
    ///
    /// # Safety
    /// No other view of an overlapping range may be in use.
    #[expect(clippy::mut_from_ref, reason = "the plan keeps live tensors apart")]
    pub unsafe fn view_mut<T: Element>(&self, place: Placement) -> &mut [T] {
        let len = place.bytes as usize / size_of::<T>();
        // SAFETY: as in `view`, and exclusive by the caller's contract.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(place), len) }
    }

    /// A tensor's elements while nothing runs.
    pub fn read<T: Element>(&self, place: Placement) -> &[T] {
        // SAFETY: a mutable view is handed out only through `&mut self` or inside a run, which
        // holds `&mut self` as well.
        unsafe { self.view(place) }
    }

    /// A tensor's elements, to be filled while nothing runs.
    pub fn write<T: Element>(&mut self, place: Placement) -> &mut [T] {
        // SAFETY: `&mut self` excludes every other view.
        unsafe { self.view_mut(place) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}
