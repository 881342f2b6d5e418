//! NCCL: one rank of many, whose collectives move nothing. What a communicator takes of the card is counted.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::card::card;
use super::host::put;
use super::ledger::{Entry, ledger};
use super::memory;
use super::runtime::{self, SUCCESS, exported, nothing_to_do};
use super::stream::{begin_collective, new_handle};

const INVALID_ARGUMENT: c_int = 4;
const OUT_OF_DEVICE_MEMORY: c_int = 1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId {
    bytes: [u8; 128],
}

#[derive(Clone, Copy)]
struct Communicator {
    rank: c_int,
    num_ranks: c_int,
    device: c_int,
}

static COMMUNICATORS: Mutex<BTreeMap<u64, Communicator>> = Mutex::new(BTreeMap::new());

fn communicators() -> MutexGuard<'static, BTreeMap<u64, Communicator>> {
    COMMUNICATORS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// # Safety
/// `handle` is null or valid for a write.
unsafe fn create(handle: *mut *mut c_void, num_ranks: c_int, rank: c_int) -> c_int {
    let number = new_handle();
    let device = memory::current() as c_int;
    let is_first = {
        let mut communicators = communicators();
        communicators.insert(
            number as u64,
            Communicator {
                rank,
                num_ranks,
                device,
            },
        );
        communicators.len() == 1
    };
    ledger().add(Entry::Communicators, 1);
    // The first communicator was measured; those of the same process after it share its kernels and most buffers.
    if is_first && let Some(mut device) = memory::current_device() {
        device.context();
        device.take_outside(card().nccl);
    }
    // SAFETY: by the caller's word.
    unsafe { put(handle, number) };
    SUCCESS
}

/// Bytes of an element, by `ncclDataType_t`.
fn element_bytes(kind: c_int) -> u64 {
    match kind {
        2 | 3 | 7 => 4,
        4 | 5 | 8 => 8,
        6 | 9 => 2,
        _ => 1,
    }
}

fn communicator(handle: *mut c_void) -> Option<Communicator> {
    communicators().get(&(handle as u64)).copied()
}

exported! {
    /// Every rank is taken to send what this one sends.
    fn ncclAllGather(from: *const c_void, to: *mut c_void, count: usize, kind: c_int, handle: *mut c_void, _stream: *mut c_void) -> c_int {
        begin_collective();
        let bytes = count as u64 * element_bytes(kind);
        for rank in 0..communicator(handle).map_or(0, |whole| whole.num_ranks as u64) {
            // SAFETY: as documented for this function, on the card.
            unsafe { memory::copy(to as u64 + rank * bytes, from as u64, bytes) };
        }
        SUCCESS
    }

    /// The sum over ranks is left as this rank's value.
    fn ncclAllReduce(from: *const c_void, to: *mut c_void, count: usize, kind: c_int, _operation: c_int, _handle: *mut c_void, _stream: *mut c_void) -> c_int {
        begin_collective();
        // SAFETY: as documented for this function, on the card.
        unsafe { memory::copy(to as u64, from as u64, count as u64 * element_bytes(kind)) };
        SUCCESS
    }

    fn ncclReduce(from: *const c_void, to: *mut c_void, count: usize, kind: c_int) -> c_int {
        begin_collective();
        // SAFETY: as documented for this function, on the card.
        unsafe { memory::copy(to as u64, from as u64, count as u64 * element_bytes(kind)) };
        SUCCESS
    }

    fn ncclReduceScatter(from: *const c_void, to: *mut c_void, count: usize, kind: c_int, _operation: c_int, handle: *mut c_void, _stream: *mut c_void) -> c_int {
        begin_collective();
        let bytes = count as u64 * element_bytes(kind);
        let rank = communicator(handle).map_or(0, |part| part.rank.max(0) as u64);
        // SAFETY: as documented for this function, on the card.
        unsafe { memory::copy(to as u64, from as u64 + rank * bytes, bytes) };
        SUCCESS
    }

    fn ncclBroadcast(from: *const c_void, to: *mut c_void, count: usize, kind: c_int) -> c_int {
        begin_collective();
        // SAFETY: as documented for this function, on the card.
        unsafe { memory::copy(to as u64, from as u64, count as u64 * element_bytes(kind)) };
        SUCCESS
    }

    fn ncclGetUniqueId(id: *mut UniqueId) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(id, UniqueId { bytes: [1; 128] }) };
        SUCCESS
    }

    fn ncclCommInitRank(handle: *mut *mut c_void, num_ranks: c_int, _id: UniqueId, rank: c_int) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { create(handle, num_ranks, rank) }
    }

    fn ncclCommInitRankConfig(handle: *mut *mut c_void, num_ranks: c_int, _id: UniqueId, rank: c_int, _config: *mut c_void) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { create(handle, num_ranks, rank) }
    }

    fn ncclCommInitRankScalable(handle: *mut *mut c_void, num_ranks: c_int, rank: c_int, _num_ids: c_int, _ids: *mut UniqueId, _config: *mut c_void) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { create(handle, num_ranks, rank) }
    }

    /// A part of a communicator. How many other ranks name this colour cannot be known: it is taken as a whole.
    fn ncclCommSplit(handle: *mut c_void, _colour: c_int, key: c_int, part: *mut *mut c_void, _config: *mut c_void) -> c_int {
        let Some(whole) = communicators().get(&(handle as u64)).copied() else {
            return INVALID_ARGUMENT;
        };
        // SAFETY: as documented for this function.
        unsafe { create(part, whole.num_ranks, key.clamp(0, whole.num_ranks - 1)) }
    }

    fn ncclCommDestroy(handle: *mut c_void) -> c_int {
        communicators().remove(&(handle as u64));
        SUCCESS
    }

    fn ncclCommAbort(handle: *mut c_void) -> c_int {
        communicators().remove(&(handle as u64));
        SUCCESS
    }

    fn ncclCommCount(handle: *mut c_void, count: *mut c_int) -> c_int {
        // SAFETY: as documented for this function.
        communicator(handle).map_or(INVALID_ARGUMENT, |communicator| unsafe {
            put(count, communicator.num_ranks);
            SUCCESS
        })
    }

    fn ncclCommUserRank(handle: *mut c_void, rank: *mut c_int) -> c_int {
        // SAFETY: as documented for this function.
        communicator(handle).map_or(INVALID_ARGUMENT, |communicator| unsafe {
            put(rank, communicator.rank);
            SUCCESS
        })
    }

    fn ncclCommCuDevice(handle: *mut c_void, device: *mut c_int) -> c_int {
        // SAFETY: as documented for this function.
        communicator(handle).map_or(INVALID_ARGUMENT, |communicator| unsafe {
            put(device, communicator.device);
            SUCCESS
        })
    }

    fn ncclCommGetAsyncError(_handle: *mut c_void, state: *mut c_int) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(state, SUCCESS) };
        SUCCESS
    }

    fn ncclMemAlloc(address: *mut *mut c_void, bytes: usize) -> c_int {
        // SAFETY: as documented for this function.
        match unsafe { runtime::allocate(address, bytes) } {
            SUCCESS => SUCCESS,
            _ => OUT_OF_DEVICE_MEMORY,
        }
    }

    fn ncclMemFree(address: *mut c_void) -> c_int {
        runtime::release(address as u64)
    }

    fn ncclRedOpCreatePreMulSum(operation: *mut c_int) -> c_int {
        // SAFETY: as documented for this function. The number is none of the built-in operations.
        unsafe { put(operation, 16) };
        SUCCESS
    }

    fn ncclCommRegister(_handle: *mut c_void, _buffer: *mut c_void, _bytes: usize, registration: *mut *mut c_void) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(registration, new_handle()) };
        SUCCESS
    }
}

nothing_to_do! {
    ncclAlltoAll ncclBcast ncclCommDeregister ncclCommFinalize ncclGather
    ncclGroupEnd ncclGroupSimulateEnd ncclGroupStart ncclRecv ncclRedOpDestroy ncclScatter
    ncclSend
}
