//! The driver's virtual memory management: addresses, memory, and which memory is at which address. PyTorch's expandable
//! segments are made of it. Only memory counts; every address of a device can be written to anyway.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_ulonglong, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::host::{self, put};
use super::memory;
use super::runtime::{
    INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, SUCCESS, exported, nothing_to_do,
};
use super::stream::new_handle;

const GRANULARITY: usize = 2 << 20;

/// Memory of `cuMemCreate`: on which device, how much, and how many hold it (its handle and its mappings).
struct Piece {
    device: usize,
    bytes: u64,
    holders: u32,
}

#[derive(Default)]
struct Pieces {
    pieces: BTreeMap<u64, Piece>,
    /// Which memory is at an address.
    mapped: BTreeMap<u64, (u64, u64)>,
}

static PIECES: Mutex<Option<Pieces>> = Mutex::new(None);

fn pieces() -> MutexGuard<'static, Option<Pieces>> {
    PIECES.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pieces {
    fn drop_holder(&mut self, handle: u64) -> c_int {
        let Some(piece) = self.pieces.get_mut(&handle) else {
            return INVALID_VALUE;
        };
        piece.holders -= 1;
        if piece.holders == 0 {
            let (device, bytes) = (piece.device, piece.bytes);
            self.pieces.remove(&handle);
            if let Some(mut device) = memory::device(device) {
                device.give(bytes);
            }
        }
        SUCCESS
    }
}

/// The part of `CUmemAllocationProp` that is read: `type`, `requestedHandleTypes`, `location.type`, `location.id`.
#[repr(C)]
pub struct AllocationProperties {
    kind: c_int,
    handle_types: c_int,
    location_kind: c_int,
    location: c_int,
}

/// The whole of it: what follows are a handle of another system and flags.
#[repr(C)]
pub struct FullProperties {
    read: AllocationProperties,
    rest: [u64; 2],
}

const PINNED: c_int = 1;
const LOCATION_DEVICE: c_int = 1;

exported! {
    fn cuMemGetAllocationGranularity(granularity: *mut usize, _properties: *const c_void, _option: c_int) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(granularity, GRANULARITY) };
        SUCCESS
    }

    fn cuMemAddressReserve(address: *mut u64, bytes: usize, _alignment: usize, _hint: u64, _flags: c_ulonglong) -> c_int {
        let range = memory::current_device().and_then(|mut device| device.reserve_range(bytes as u64));
        match range {
            Some(start) => {
                // SAFETY: as documented for this function.
                unsafe { put(address, start) };
                SUCCESS
            }
            None => OUT_OF_MEMORY,
        }
    }

    fn cuMemCreate(handle: *mut u64, bytes: usize, properties: *const AllocationProperties, _flags: c_ulonglong) -> c_int {
        // SAFETY: null, or the caller's struct.
        let device = match unsafe { properties.as_ref() } {
            Some(properties) if properties.location_kind == LOCATION_DEVICE => properties.location as usize,
            // Memory of the host is not the card's.
            _ => return NOT_SUPPORTED,
        };
        let taken = memory::device(device).map(|mut device| device.take(bytes as u64));
        if !matches!(taken, Some(Ok(()))) {
            return OUT_OF_MEMORY;
        }
        let number = new_handle() as u64;
        let piece = Piece { device, bytes: bytes as u64, holders: 1 };
        pieces().get_or_insert_default().pieces.insert(number, piece);
        // SAFETY: as documented for this function.
        unsafe { put(handle, number) };
        SUCCESS
    }

    fn cuMemRelease(handle: u64) -> c_int {
        pieces().get_or_insert_default().drop_holder(handle)
    }

    fn cuMemMap(address: u64, bytes: usize, _offset: usize, handle: u64, _flags: c_ulonglong) -> c_int {
        let mut guard = pieces();
        let pieces = guard.get_or_insert_default();
        let Some(piece) = pieces.pieces.get_mut(&handle) else {
            return INVALID_VALUE;
        };
        piece.holders += 1;
        pieces.mapped.insert(address, (bytes as u64, handle));
        SUCCESS
    }

    /// Unmaps every mapping that begins in the range.
    fn cuMemUnmap(address: u64, bytes: usize) -> c_int {
        let mut guard = pieces();
        let pieces = guard.get_or_insert_default();
        let inside: Vec<(u64, u64, u64)> = pieces
            .mapped
            .range(address..address.saturating_add(bytes as u64))
            .map(|(&start, &(length, handle))| (start, length, handle))
            .collect();
        if inside.is_empty() {
            return INVALID_VALUE;
        }
        for (start, length, handle) in inside {
            pieces.mapped.remove(&start);
            pieces.drop_holder(handle);
            host::forget(start, length);
        }
        SUCCESS
    }

    /// The memory at an address; its handle is held once more.
    fn cuMemRetainAllocationHandle(handle: *mut u64, address: *const c_void) -> c_int {
        let mut guard = pieces();
        let pieces = guard.get_or_insert_default();
        let address = address as u64;
        let before = pieces.mapped.range(..=address).next_back();
        let found = before.filter(|&(&start, &(length, _))| address - start < length);
        let Some((_, &(_, number))) = found else {
            return INVALID_VALUE;
        };
        let Some(piece) = pieces.pieces.get_mut(&number) else {
            return INVALID_VALUE;
        };
        piece.holders += 1;
        // SAFETY: as documented for this function.
        unsafe { put(handle, number) };
        SUCCESS
    }

    fn cuMemGetAllocationPropertiesFromHandle(properties: *mut FullProperties, handle: u64) -> c_int {
        let mut guard = pieces();
        let Some(piece) = guard.get_or_insert_default().pieces.get(&handle) else {
            return INVALID_VALUE;
        };
        let read = AllocationProperties { kind: PINNED, handle_types: 0, location_kind: LOCATION_DEVICE, location: piece.device as c_int };
        // SAFETY: as documented for this function.
        unsafe { put(properties, FullProperties { read, rest: [0; 2] }) };
        SUCCESS
    }
}

/// Memory of other processes, memory of several cards, and parts of a card's multiprocessors.
macro_rules! not_supported {
    ($($name:ident)*) => {
        $(
            #[cfg_attr(exported, unsafe(no_mangle))]
            #[allow(non_snake_case, unsafe_code)]
            pub extern "C" fn $name() -> c_int {
                NOT_SUPPORTED
            }
        )*
    };
}

not_supported! {
    cuMemExportToShareableHandle cuMemImportFromShareableHandle cuMulticastCreate cuMulticastAddDevice cuMulticastBindMem
    cuMulticastBindAddr cuMulticastUnbind cuMulticastGetGranularity cuGreenCtxDestroy cuGreenCtxStreamCreate
    cuCtxFromGreenCtx cuDeviceGetDevResource cuDevSmResourceSplitByCount cuDevResourceGenerateDesc
}

nothing_to_do! { cuMemAddressFree cuMemSetAccess }
