//! cuFFT: plans and transforms. The size of a plan's work area cannot be asked for without a card: it is taken as the
//! size of the transformed data, and counted as an estimate.

use std::ffi::{c_int, c_longlong, c_void};

use super::host::put;
use super::ledger::{Entry, ledger};
use super::runtime::{SUCCESS, exported, nothing_to_do};

/// Complex numbers of single precision.
const ELEMENT_BYTES: usize = 8;

exported! {
    fn cufftCreate(plan: *mut c_int) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(plan, 1) };
        SUCCESS
    }

    fn cufftXtMakePlanMany(
        _plan: c_int, rank: c_int, sizes: *const c_longlong, _input_embed: *const c_longlong, _input_stride: c_longlong,
        _input_distance: c_longlong, _input_kind: c_int, _output_embed: *const c_longlong, _output_stride: c_longlong,
        _output_distance: c_longlong, _output_kind: c_int, batch: c_longlong, work_size: *mut usize,
    ) -> c_int {
        let mut count = batch.max(1) as usize;
        for index in 0..rank.clamp(0, 8) as usize {
            // SAFETY: the caller's array of `rank` sizes.
            count = count.saturating_mul(unsafe { sizes.add(index).read() }.max(1) as usize);
        }
        ledger().add(Entry::Estimates, 1);
        // SAFETY: as documented for this function.
        unsafe { put(work_size, count.saturating_mul(ELEMENT_BYTES)) };
        SUCCESS
    }

    fn cufftGetSize(_plan: c_int, work_size: *mut usize) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(work_size, 0) };
        SUCCESS
    }

    fn cufftSetStream(_plan: c_int, _stream: *mut c_void) -> c_int {
        SUCCESS
    }
}

nothing_to_do! { cufftDestroy cufftSetAutoAllocation cufftSetWorkArea cufftXtExec }
