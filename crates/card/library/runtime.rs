//! The CUDA runtime: devices, memory, copies, errors.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, PoisonError};

use super::card::card;
use super::host::{self, put};
use super::memory;
use super::properties;
use super::stream;

pub const SUCCESS: c_int = 0;
pub const INVALID_VALUE: c_int = 1;
pub const OUT_OF_MEMORY: c_int = 2;
pub const NOT_SUPPORTED: c_int = 801;
const INVALID_DEVICE: c_int = 101;

thread_local! {
    static LAST_ERROR: Cell<c_int> = const { Cell::new(SUCCESS) };
}

/// Remembers an error for `cudaGetLastError`, as every call of the runtime does.
pub fn failed(error: c_int) -> c_int {
    LAST_ERROR.set(error);
    error
}

/// Defines functions under their C names: exported where this is the library, plain Rust where it is tested.
macro_rules! exported {
    ($($(#[$meta:meta])* fn $name:ident($($argument:ident: $kind:ty),* $(,)?) -> $result:ty $body:block)*) => {
        $(
            $(#[$meta])*
            ///
            /// # Safety
            /// As NVIDIA documents this function; output pointers may be null.
            #[cfg_attr(exported, unsafe(no_mangle))]
            #[allow(non_snake_case, unsafe_code)]
            pub unsafe extern "C" fn $name($($argument: $kind),*) -> $result $body
        )*
    };
}

/// Defines functions that have nothing to do on a card that computes nothing. Arguments stay with the caller, as the
/// platform's calling convention has it.
macro_rules! nothing_to_do {
    ($($name:ident)*) => {
        $(
            #[cfg_attr(exported, unsafe(no_mangle))]
            #[allow(non_snake_case, unsafe_code)]
            pub extern "C" fn $name() -> ::std::ffi::c_int {
                0
            }
        )*
    };
}

pub(super) use {exported, nothing_to_do};

/// Pinned and registered host memory: where it begins and how long it is; mapped here or by the caller.
static PINNED: Mutex<BTreeMap<u64, (u64, bool)>> = Mutex::new(BTreeMap::new());

fn pinned() -> std::sync::MutexGuard<'static, BTreeMap<u64, (u64, bool)>> {
    PINNED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_pinned(address: u64) -> bool {
    let pinned = pinned();
    let before = pinned.range(..=address).next_back();
    before.is_some_and(|(&start, &(length, _))| address < start + length)
}

/// # Safety
/// `to` is null or valid for a write.
pub unsafe fn allocate(to: *mut *mut c_void, bytes: usize) -> c_int {
    let Some(mut device) = memory::current_device() else {
        return failed(OUT_OF_MEMORY);
    };
    match device.allocate(bytes as u64) {
        Ok(address) => {
            // SAFETY: by the caller's word.
            unsafe { put(to, address as *mut c_void) };
            SUCCESS
        }
        Err(memory::Full) => failed(OUT_OF_MEMORY),
    }
}

pub fn release(address: u64) -> c_int {
    if address == 0 {
        return SUCCESS;
    }
    let device = memory::device_of(address).and_then(memory::device);
    match device.is_some_and(|mut device| device.release(address)) {
        true => SUCCESS,
        false => failed(INVALID_VALUE),
    }
}

/// Host memory of a call that wants it pinned.
///
/// # Safety
/// `to` is null or valid for a write.
pub unsafe fn allocate_host(to: *mut *mut c_void, bytes: usize) -> c_int {
    let length = (bytes.max(1) as u64).next_multiple_of(4096);
    match host::reserve(length) {
        Some(address) => {
            pinned().insert(address, (length, true));
            // SAFETY: by the caller's word.
            unsafe { put(to, address as *mut c_void) };
            SUCCESS
        }
        None => failed(OUT_OF_MEMORY),
    }
}

pub fn release_host(address: u64) -> c_int {
    match pinned().remove(&address) {
        Some((length, true)) => host::unmap(address, length),
        Some((_, false)) => {}
        None if address != 0 => return failed(INVALID_VALUE),
        None => {}
    }
    SUCCESS
}

pub fn register_host(address: u64, bytes: u64) -> c_int {
    pinned().insert(address, (bytes, false));
    SUCCESS
}

/// A function of the driver by its name, in the newest form that this library has.
pub fn driver_function(name: &CStr) -> Option<*mut c_void> {
    let name = name.to_str().ok()?;
    if !name.starts_with("cu") {
        return None;
    }
    ["_v3", "_v2", ""].iter().find_map(|version| {
        let name = CString::new(format!("{name}{version}")).ok()?;
        host::function(&name)
    })
}

#[repr(C)]
pub struct PointerAttributes {
    pub kind: c_int,
    pub device: c_int,
    pub device_pointer: *mut c_void,
    pub host_pointer: *mut c_void,
}

exported! {
    fn cudaGetDeviceCount(count: *mut c_int) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(count, card().devices) };
        SUCCESS
    }

    fn cudaGetDevice(device: *mut c_int) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(device, memory::current() as c_int) };
        SUCCESS
    }

    fn cudaSetDevice(device: c_int) -> c_int {
        match memory::set_current(device) {
            true => {
                if let Some(mut device) = memory::current_device() {
                    device.context();
                }
                SUCCESS
            }
            false => failed(INVALID_DEVICE),
        }
    }

    /// CUDA 13's layout under the plain name.
    fn cudaGetDeviceProperties(properties: *mut u8, _device: c_int) -> c_int {
        let bytes = properties::bytes(13);
        // SAFETY: the caller's struct has the length of its version's layout.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), properties, bytes.len()) };
        SUCCESS
    }

    /// CUDA 12's layout.
    fn cudaGetDeviceProperties_v2(properties: *mut u8, _device: c_int) -> c_int {
        let bytes = properties::bytes(12);
        // SAFETY: the caller's struct has the length of its version's layout.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), properties, bytes.len()) };
        SUCCESS
    }

    fn cudaDeviceGetAttribute(value: *mut c_int, attribute: c_int, _device: c_int) -> c_int {
        match properties::attribute(attribute) {
            Some(number) => {
                // SAFETY: as documented for this function.
                unsafe { put(value, number) };
                SUCCESS
            }
            None => failed(INVALID_VALUE),
        }
    }

    fn cudaDeviceGetPCIBusId(text: *mut c_char, length: c_int, device: c_int) -> c_int {
        let name = format!("0000:{:02x}:00.0\0", device + 1);
        if length < name.len() as c_int {
            return failed(INVALID_VALUE);
        }
        // SAFETY: the buffer has `length` bytes, which is enough.
        unsafe { std::ptr::copy_nonoverlapping(name.as_ptr().cast(), text, name.len()) };
        SUCCESS
    }

    fn cudaDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(can, c_int::from(device != peer)) };
        SUCCESS
    }

    fn cudaDeviceGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> c_int {
        // SAFETY: as documented for this function.
        unsafe {
            put(least, 0);
            put(greatest, -5);
        }
        SUCCESS
    }

    fn cudaDriverGetVersion(version: *mut c_int) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(version, super::driver::DRIVER_VERSION) };
        SUCCESS
    }

    fn cudaMalloc(to: *mut *mut c_void, bytes: usize) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { allocate(to, bytes) }
    }

    /// Managed memory is counted as if it were all on the card.
    fn cudaMallocManaged(to: *mut *mut c_void, bytes: usize, _flags: c_uint) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { allocate(to, bytes) }
    }

    fn cudaFree(address: *mut c_void) -> c_int {
        release(address as u64)
    }

    fn cudaFreeAsync(address: *mut c_void, _stream: *mut c_void) -> c_int {
        release(address as u64)
    }

    fn cudaMemGetInfo(free: *mut usize, total: *mut usize) -> c_int {
        let Some(mut device) = memory::current_device() else {
            return failed(OUT_OF_MEMORY);
        };
        device.context();
        // SAFETY: as documented for this function.
        unsafe {
            put(free, device.free_bytes() as usize);
            put(total, card().memory as usize);
        }
        SUCCESS
    }

    fn cudaHostAlloc(to: *mut *mut c_void, bytes: usize, _flags: c_uint) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { allocate_host(to, bytes) }
    }

    fn cudaMallocHost(to: *mut *mut c_void, bytes: usize) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { allocate_host(to, bytes) }
    }

    fn cudaFreeHost(address: *mut c_void) -> c_int {
        release_host(address as u64)
    }

    fn cudaHostRegister(address: *mut c_void, bytes: usize, _flags: c_uint) -> c_int {
        register_host(address as u64, bytes as u64)
    }

    fn cudaHostUnregister(address: *mut c_void) -> c_int {
        release_host(address as u64)
    }

    fn cudaHostGetDevicePointer(to: *mut *mut c_void, address: *mut c_void, _flags: c_uint) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(to, address) };
        SUCCESS
    }

    fn cudaPointerGetAttributes(attributes: *mut PointerAttributes, address: *const c_void) -> c_int {
        const UNREGISTERED: c_int = 0;
        const HOST: c_int = 1;
        const DEVICE: c_int = 2;
        let pointer = address.cast_mut();
        let none = std::ptr::null_mut();
        let (kind, device, device_pointer, host_pointer) = match memory::device_of(address as u64) {
            Some(device) => (DEVICE, device as c_int, pointer, none),
            None if is_pinned(address as u64) => (HOST, memory::current() as c_int, pointer, pointer),
            None => (UNREGISTERED, -1, none, pointer),
        };
        // SAFETY: as documented for this function.
        unsafe { put(attributes, PointerAttributes { kind, device, device_pointer, host_pointer }) };
        SUCCESS
    }

    fn cudaMemcpy(to: *mut c_void, from: *const c_void, bytes: usize, _kind: c_int) -> c_int {
        // SAFETY: both ranges are the caller's or the card's.
        unsafe { memory::copy(to as u64, from as u64, bytes as u64) };
        SUCCESS
    }

    fn cudaMemcpyAsync(to: *mut c_void, from: *const c_void, bytes: usize, _kind: c_int, _stream: *mut c_void) -> c_int {
        // SAFETY: both ranges are the caller's or the card's.
        unsafe { memory::copy(to as u64, from as u64, bytes as u64) };
        SUCCESS
    }

    fn cudaMemcpyPeerAsync(to: *mut c_void, _to_device: c_int, from: *const c_void, _from_device: c_int, bytes: usize, _stream: *mut c_void) -> c_int {
        // SAFETY: both ranges are the card's.
        unsafe { memory::copy(to as u64, from as u64, bytes as u64) };
        SUCCESS
    }

    fn cudaMemcpy2DAsync(to: *mut c_void, to_pitch: usize, from: *const c_void, from_pitch: usize, width: usize, height: usize, _kind: c_int, _stream: *mut c_void) -> c_int {
        if width.saturating_mul(height) as u64 <= memory::REAL_BYTES {
            for row in 0..height {
                // SAFETY: rows of the caller's matrices, or the card's.
                unsafe { memory::copy(to as u64 + (row * to_pitch) as u64, from as u64 + (row * from_pitch) as u64, width as u64) };
            }
        }
        SUCCESS
    }

    fn cudaMemset(to: *mut c_void, value: c_int, bytes: usize) -> c_int {
        // SAFETY: the range is the card's.
        unsafe { memory::fill(to as u64, value as u8, bytes as u64) };
        SUCCESS
    }

    fn cudaMemsetAsync(to: *mut c_void, value: c_int, bytes: usize, _stream: *mut c_void) -> c_int {
        // SAFETY: the range is the card's.
        unsafe { memory::fill(to as u64, value as u8, bytes as u64) };
        SUCCESS
    }

    fn cudaDeviceSynchronize() -> c_int {
        stream::finish()
    }

    fn cudaGetLastError() -> c_int {
        LAST_ERROR.replace(SUCCESS)
    }

    fn cudaPeekAtLastError() -> c_int {
        LAST_ERROR.get()
    }

    fn cudaGetDriverEntryPointByVersion(name: *const c_char, function: *mut *mut c_void, _version: c_uint, _flags: u64, status: *mut c_int) -> c_int {
        // SAFETY: the name is a C string.
        let found = driver_function(unsafe { CStr::from_ptr(name) });
        // SAFETY: as documented for this function; 0 is found, 1 is not found.
        unsafe {
            put(function, found.unwrap_or(std::ptr::null_mut()));
            put(status, c_int::from(found.is_none()));
        }
        SUCCESS
    }

    fn cudaGetDriverEntryPoint(name: *const c_char, function: *mut *mut c_void, flags: u64, status: *mut c_int) -> c_int {
        // SAFETY: the same contract.
        unsafe { cudaGetDriverEntryPointByVersion(name, function, 0, flags, status) }
    }

    /// Memory of another process: there is none that could be shared.
    fn cudaIpcGetMemHandle(_handle: *mut c_void, _address: *mut c_void) -> c_int {
        failed(NOT_SUPPORTED)
    }

    fn cudaIpcOpenMemHandle(_address: *mut *mut c_void) -> c_int {
        failed(NOT_SUPPORTED)
    }

    fn cudaIpcGetEventHandle(_handle: *mut c_void) -> c_int {
        failed(NOT_SUPPORTED)
    }

    fn cudaIpcOpenEventHandle(_event: *mut *mut c_void) -> c_int {
        failed(NOT_SUPPORTED)
    }
}

nothing_to_do! {
    cudaDeviceEnablePeerAccess cudaDeviceReset cudaDeviceSetLimit
    cudaIpcCloseMemHandle cudaProfilerStart cudaProfilerStop
    cudaMemPrefetchAsync cudaMemAdvise cudaDeviceSetCacheConfig cudaDeviceSetSharedMemConfig cudaSetDeviceFlags
}
