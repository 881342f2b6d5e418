//! The CUDA driver, as far as PyTorch, Triton and their like call it by name.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

use super::card::card;
use super::host::put;
use super::launch::{NUM_REGISTERS, occupancy};
use super::ledger::{Entry, ledger};
use super::memory;
use super::properties;
use super::runtime::{
    self, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, SUCCESS, exported, nothing_to_do,
};
use super::stream::{self, new_handle};

/// Of CUDA 13.0, which runs programs of every version before it.
pub const DRIVER_VERSION: c_int = 13000;
const NOT_FOUND: c_int = 500;
const INVALID_DEVICE: c_int = 101;

/// The primary context of a device is its number, counted from one.
fn context_of(device: usize) -> *mut c_void {
    (device + 1) as *mut c_void
}

fn launched() -> c_int {
    ledger().add(Entry::Launches, 1);
    SUCCESS
}

exported! {
    /// Private tables of the driver: there are none here.
    fn cuGetExportTable(table: *mut *const c_void, _id: *const c_void) -> c_int {
        // SAFETY: as the declaration says.
        unsafe { put(table, std::ptr::null()) };
        NOT_FOUND
    }

    fn cuDriverGetVersion(version: *mut c_int) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(version, DRIVER_VERSION) };
        SUCCESS
    }

    fn cuGetProcAddress_v2(name: *const c_char, function: *mut *mut c_void, _version: c_int, _flags: u64, status: *mut c_int) -> c_int {
        // SAFETY: the name is a C string.
        let found = runtime::driver_function(unsafe { CStr::from_ptr(name) });
        // SAFETY: as documented for this function; 0 is found, 1 is not found.
        unsafe {
            put(function, found.unwrap_or(std::ptr::null_mut()));
            put(status, c_int::from(found.is_none()));
        }
        match found {
            Some(_) => SUCCESS,
            None => NOT_FOUND,
        }
    }

    fn cuDeviceGetCount(count: *mut c_int) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(count, card().devices) };
        SUCCESS
    }

    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
        if !(0..card().devices).contains(&ordinal) {
            return INVALID_DEVICE;
        }
        // SAFETY: as documented for this function.
        unsafe { put(device, ordinal) };
        SUCCESS
    }

    fn cuDeviceGetName(text: *mut c_char, length: c_int, _device: c_int) -> c_int {
        let name = card().name.as_bytes();
        let length = (length.max(1) as usize - 1).min(name.len());
        // SAFETY: the buffer is longer than what is written by one byte, for the end of the string.
        unsafe {
            std::ptr::copy_nonoverlapping(name.as_ptr().cast(), text, length);
            text.add(length).write(0);
        }
        SUCCESS
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(bytes, card().memory as usize) };
        SUCCESS
    }

    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, _device: c_int) -> c_int {
        match properties::attribute(attribute) {
            Some(number) => {
                // SAFETY: as documented for this function.
                unsafe { put(value, number) };
                SUCCESS
            }
            None => INVALID_VALUE,
        }
    }

    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> c_int {
        let mut bytes = *b"cinch card\0\0\0\0\0\0";
        bytes[15] = device as u8;
        // SAFETY: as documented for this function.
        unsafe { put(uuid, bytes) };
        SUCCESS
    }

    fn cuDeviceComputeCapability(major: *mut c_int, minor: *mut c_int, _device: c_int) -> c_int {
        // SAFETY: as documented for this function.
        unsafe {
            put(major, card().major);
            put(minor, card().minor);
        }
        SUCCESS
    }

    fn cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int) -> c_int {
        let is_active = memory::device(device as usize).is_some_and(|device| device.has_context);
        // SAFETY: as documented for this function.
        unsafe {
            put(flags, 0);
            put(active, c_int::from(is_active));
        }
        SUCCESS
    }

    fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) -> c_int {
        let Some(mut memory) = memory::device(device as usize) else {
            return INVALID_DEVICE;
        };
        memory.context();
        // SAFETY: as documented for this function.
        unsafe { put(context, context_of(device as usize)) };
        SUCCESS
    }

    fn cuCtxGetCurrent(context: *mut *mut c_void) -> c_int {
        let device = memory::current();
        let is_active = memory::device(device).is_some_and(|device| device.has_context);
        let none = std::ptr::null_mut();
        // SAFETY: as documented for this function.
        unsafe { put(context, if is_active { context_of(device) } else { none }) };
        SUCCESS
    }

    fn cuCtxSetCurrent(context: *mut c_void) -> c_int {
        if !context.is_null() && !memory::set_current(context as usize as c_int - 1) {
            return INVALID_VALUE;
        }
        SUCCESS
    }

    fn cuCtxPushCurrent_v2(context: *mut c_void) -> c_int {
        // SAFETY: the same contract.
        unsafe { cuCtxSetCurrent(context) }
    }

    fn cuCtxPopCurrent_v2(context: *mut *mut c_void) -> c_int {
        // SAFETY: the same contract.
        unsafe { cuCtxGetCurrent(context) }
    }

    fn cuCtxPushCurrent(context: *mut c_void) -> c_int {
        // SAFETY: the same contract.
        unsafe { cuCtxSetCurrent(context) }
    }

    fn cuCtxPopCurrent(context: *mut *mut c_void) -> c_int {
        // SAFETY: the same contract.
        unsafe { cuCtxGetCurrent(context) }
    }

    fn cuCtxGetDevice(device: *mut c_int) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(device, memory::current() as c_int) };
        SUCCESS
    }

    fn cuCtxGetLimit(value: *mut usize, _limit: c_int) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(value, 1 << 20) };
        SUCCESS
    }

    fn cuGetErrorString(error: c_int, text: *mut *const c_char) -> c_int {
        let message = match error {
            SUCCESS => c"no error",
            INVALID_VALUE => c"invalid argument",
            OUT_OF_MEMORY => c"out of memory",
            INVALID_DEVICE => c"invalid device ordinal",
            NOT_FOUND => c"named symbol not found",
            NOT_SUPPORTED => c"operation not supported",
            _ => c"unknown error",
        };
        // SAFETY: as documented for this function.
        unsafe { put(text, message.as_ptr()) };
        SUCCESS
    }

    fn cuGetErrorName(error: c_int, text: *mut *const c_char) -> c_int {
        // SAFETY: the same contract.
        unsafe { cuGetErrorString(error, text) }
    }

    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int {
        // SAFETY: the same contract.
        unsafe { runtime::cudaMemGetInfo(free, total) }
    }

    fn cuMemAlloc_v2(address: *mut *mut c_void, bytes: usize) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { runtime::allocate(address, bytes) }
    }

    fn cuMemAllocManaged(address: *mut *mut c_void, bytes: usize, _flags: c_uint) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { runtime::allocate(address, bytes) }
    }

    fn cuMemFree_v2(address: u64) -> c_int {
        runtime::release(address)
    }

    fn cuMemFreeAsync(address: u64, _stream: *mut c_void) -> c_int {
        runtime::release(address)
    }

    fn cuMemHostAlloc(to: *mut *mut c_void, bytes: usize, _flags: c_uint) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { runtime::allocate_host(to, bytes) }
    }

    fn cuMemFreeHost(address: *mut c_void) -> c_int {
        runtime::release_host(address as u64)
    }

    fn cuMemsetD8Async(address: u64, value: u8, count: usize, _stream: *mut c_void) -> c_int {
        // SAFETY: the range is the card's.
        unsafe { memory::fill(address, value, count as u64) };
        SUCCESS
    }

    fn cuMemsetD32Async(address: u64, value: c_uint, count: usize, _stream: *mut c_void) -> c_int {
        let is_real = count as u64 * 4 <= memory::REAL_BYTES && memory::device_of(address).is_some();
        for index in 0..if is_real { count as u64 } else { 0 } {
            // SAFETY: the range is the card's, and mapped.
            unsafe { put((address + 4 * index) as *mut c_uint, value) };
        }
        SUCCESS
    }

    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, _stream: *mut c_void) -> c_int {
        // SAFETY: the caller's range and the card's.
        unsafe { memory::copy(to, from as u64, bytes as u64) };
        SUCCESS
    }

    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, _stream: *mut c_void) -> c_int {
        // SAFETY: the caller's range and the card's.
        unsafe { memory::copy(to as u64, from, bytes as u64) };
        SUCCESS
    }

    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) -> c_int {
        // SAFETY: the caller's range and the card's.
        unsafe { memory::copy(to, from as u64, bytes as u64) };
        SUCCESS
    }

    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) -> c_int {
        // SAFETY: the caller's range and the card's.
        unsafe { memory::copy(to as u64, from, bytes as u64) };
        SUCCESS
    }

    fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, _stream: *mut c_void) -> c_int {
        // SAFETY: ranges of the caller or of the card.
        unsafe { memory::copy(to, from, bytes as u64) };
        SUCCESS
    }

    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, _stream: *mut c_void) -> c_int {
        // SAFETY: ranges of the card.
        unsafe { memory::copy(to, from, bytes as u64) };
        SUCCESS
    }

    fn cuPointerGetAttribute(data: *mut c_void, attribute: c_int, address: u64) -> c_int {
        const CONTEXT: c_int = 1;
        const MEMORY_TYPE: c_int = 2;
        const DEVICE_POINTER: c_int = 3;
        const DEVICE_ORDINAL: c_int = 9;
        let Some(device) = memory::device_of(address) else {
            return INVALID_VALUE;
        };
        // SAFETY: the output has the documented type of its attribute. Device memory is type 2.
        unsafe {
            match attribute {
                CONTEXT => put(data.cast(), context_of(device)),
                MEMORY_TYPE => put(data.cast::<c_uint>(), 2),
                DEVICE_POINTER => put(data.cast(), address),
                DEVICE_ORDINAL => put(data.cast(), device as c_int),
                _ => put(data.cast::<c_uint>(), 0),
            }
        }
        SUCCESS
    }

    fn cuPointerGetAttributes(count: c_uint, attributes: *const c_int, data: *mut *mut c_void, address: u64) -> c_int {
        for index in 0..count as usize {
            // SAFETY: arrays of `count`.
            unsafe { cuPointerGetAttribute(data.add(index).read(), attributes.add(index).read(), address) };
        }
        SUCCESS
    }

    fn cuModuleLoadData(module: *mut *mut c_void, _image: *const c_void) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(module, new_handle()) };
        SUCCESS
    }

    fn cuModuleLoadDataEx(module: *mut *mut c_void, _image: *const c_void) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(module, new_handle()) };
        SUCCESS
    }

    fn cuModuleLoad(module: *mut *mut c_void, _file: *const c_char) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(module, new_handle()) };
        SUCCESS
    }

    fn cuModuleGetFunction(function: *mut *mut c_void, _module: *mut c_void, _name: *const c_char) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(function, new_handle()) };
        SUCCESS
    }

    fn cuModuleGetGlobal_v2(address: *mut *mut c_void, bytes: *mut usize, _module: *mut c_void, _name: *const c_char) -> c_int {
        const BYTES: usize = 4096;
        // SAFETY: as documented for this function.
        unsafe {
            put(bytes, BYTES);
            runtime::allocate(address, BYTES)
        }
    }

    fn cuModuleLoadFatBinary(module: *mut *mut c_void, _image: *const c_void) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(module, new_handle()) };
        SUCCESS
    }

    fn cuModuleGetLoadingMode(mode: *mut c_int) -> c_int {
        // SAFETY: as documented for this function. Kernels are loaded when they are first used.
        unsafe { put(mode, 2) };
        SUCCESS
    }

    fn cuLibraryLoadData(library: *mut *mut c_void, _code: *const c_void) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(library, new_handle()) };
        SUCCESS
    }

    fn cuLibraryLoadFromFile(library: *mut *mut c_void, _file: *const c_char) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(library, new_handle()) };
        SUCCESS
    }

    fn cuLibraryGetKernel(kernel: *mut *mut c_void, _library: *mut c_void, _name: *const c_char) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(kernel, new_handle()) };
        SUCCESS
    }

    fn cuKernelGetFunction(function: *mut *mut c_void, kernel: *mut c_void) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(function, kernel) };
        SUCCESS
    }

    fn cuLinkCreate_v2(_count: c_uint, _options: *mut c_int, _values: *mut *mut c_void, state: *mut *mut c_void) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(state, new_handle()) };
        SUCCESS
    }

    fn cuLinkCreate(count: c_uint, options: *mut c_int, values: *mut *mut c_void, state: *mut *mut c_void) -> c_int {
        // SAFETY: the same contract.
        unsafe { cuLinkCreate_v2(count, options, values, state) }
    }

    fn cuLinkComplete(_state: *mut c_void, code: *mut *mut c_void, bytes: *mut usize) -> c_int {
        // SAFETY: as documented for this function.
        unsafe {
            put(code, c"".as_ptr().cast_mut().cast());
            put(bytes, 1);
        }
        SUCCESS
    }

    fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, _function: *mut c_void) -> c_int {
        let chip = card().major * 10 + card().minor;
        let number = match attribute {
            0 => 1024,
            4 => NUM_REGISTERS,
            5 | 6 => chip,
            8 => card().limits().shared_per_block_opt_in,
            _ => 0,
        };
        // SAFETY: as documented for this function.
        unsafe { put(value, number) };
        SUCCESS
    }

    fn cuKernelGetAttribute(value: *mut c_int, attribute: c_int, kernel: *mut c_void, _device: c_int) -> c_int {
        // SAFETY: the same contract.
        unsafe { cuFuncGetAttribute(value, attribute, kernel) }
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: *mut c_int, _function: *mut c_void, block_size: c_int, shared: usize) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(blocks, occupancy(block_size, shared)) };
        SUCCESS
    }

    fn cuOccupancyMaxActiveClusters(clusters: *mut c_int) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(clusters, card().multiprocessors) };
        SUCCESS
    }

    fn cuOccupancyMaxPotentialClusterSize(size: *mut c_int) -> c_int {
        // SAFETY: as documented for this function. Eight blocks are what every card with clusters allows.
        unsafe { put(size, 8) };
        SUCCESS
    }

    fn cuLaunchKernel() -> c_int {
        launched()
    }

    fn cuLaunchKernelEx() -> c_int {
        launched()
    }

    fn cuLaunchCooperativeKernel() -> c_int {
        launched()
    }

    fn cuEventCreate(event: *mut *mut c_void, _flags: c_uint) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { stream::create_event(event) }
    }

    fn cuEventRecord(event: *mut c_void, _stream: *mut c_void) -> c_int {
        // SAFETY: the caller's event.
        unsafe { stream::record(event) }
    }

    fn cuEventDestroy_v2(event: *mut c_void) -> c_int {
        // SAFETY: the caller's event, destroyed once.
        unsafe { stream::cudaEventDestroy(event) }
    }

    fn cuStreamCreate(stream: *mut *mut c_void, _flags: c_uint) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(stream, new_handle()) };
        SUCCESS
    }

    fn cuStreamCreateWithPriority(stream: *mut *mut c_void, _flags: c_uint, _priority: c_int) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(stream, new_handle()) };
        SUCCESS
    }

    fn cuStreamIsCapturing(stream: *mut c_void, status: *mut c_int) -> c_int {
        // SAFETY: the same contract.
        unsafe { stream::cudaStreamIsCapturing(stream, status) }
    }

    fn cuStreamGetCtx(_stream: *mut c_void, context: *mut *mut c_void) -> c_int {
        // SAFETY: the same contract.
        unsafe { cuCtxGetCurrent(context) }
    }

    fn cuStreamWriteValue32_v2(_stream: *mut c_void, address: u64, value: u32, _flags: c_uint) -> c_int {
        if memory::device_of(address).is_some() {
            // SAFETY: an address of the card.
            unsafe { put(address as *mut u32, value) };
        }
        SUCCESS
    }

    fn cuGreenCtxCreate(_context: *mut *mut c_void, _description: *mut c_void, _device: c_int, _flags: c_ulonglong) -> c_int {
        NOT_SUPPORTED
    }
}

nothing_to_do! {
    cuInit cuCtxSynchronize cuCtxSetLimit cuCtxSetFlags cuModuleUnload cuLibraryUnload cuFuncSetAttribute
    cuKernelSetAttribute cuFuncSetCacheConfig cuLinkAddData cuLinkAddData_v2 cuLinkAddFile_v2 cuLinkDestroy cuTensorMapEncodeTiled
    cuTensorMapEncodeIm2col cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxSetFlags_v2 cuDevicePrimaryCtxReset_v2
    cuEventQuery cuEventSynchronize cuStreamSynchronize cuStreamQuery cuStreamWaitEvent cuStreamDestroy_v2
    cuCtxEnablePeerAccess cuMemPrefetchAsync cuMemAdvise cuProfilerStart cuProfilerStop
}
