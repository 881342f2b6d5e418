//! Work on all cores without allocation, and views that let tasks write disjoint parts of
//! one buffer.

use std::marker::PhantomData;
use std::ops::AddAssign;

use rayon::prelude::*;

/// Runs `task(0..count)` on all cores. Which core runs which task is not fixed, so a task's
/// result may depend only on its number.
pub fn for_each(count: usize, task: impl Fn(usize) + Sync + Send) {
    if count == 1 {
        task(0);
    } else {
        (0..count).into_par_iter().with_max_len(1).for_each(task);
    }
}

/// A mutable slice that several tasks write at once, each its own part.
pub struct Shared<'a, T> {
    pointer: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: the pointer comes from a unique borrow of a slice of `T: Send`; the parts that tasks
// take are disjoint by the contract of `part`.
unsafe impl<T: Send> Send for Shared<'_, T> {}
// SAFETY: as above; `&Shared` gives access only through `part`.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<T> Clone for Shared<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub fn new(slice: &'a mut [T]) -> Self {
        Self {
            pointer: slice.as_mut_ptr(),
            len: slice.len(),
            slice: PhantomData,
        }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements `start..start + len`.
    ///
    /// # Safety
    /// No other part that overlaps this one may be in use at the same time.
    ///
    /// # Panics
    /// Where the range is not inside the slice.
    #[inline(always)]
    pub unsafe fn part(&self, start: usize, len: usize) -> &'a mut [T] {
        assert!(start <= self.len && len <= self.len - start);
        // SAFETY: in bounds by the assertion; disjoint by the caller's contract.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.add(start), len) }
    }
}

/// Whether a gradient buffer is written for the first time in a step or added to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accumulate {
    Overwrite,
    Add,
}

impl Accumulate {
    /// Writes or adds one number.
    #[inline(always)]
    pub fn put<F: AddAssign>(self, target: &mut F, value: F) {
        match self {
            Self::Overwrite => *target = value,
            Self::Add => *target += value,
        }
    }
}
