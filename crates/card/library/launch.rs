//! Kernels: registered by the code that nvcc generates, launched, counted, and not run.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::{Mutex, PoisonError};

use super::card::card;
use super::host::put;
use super::ledger::{Entry, ledger};
use super::memory;
use super::runtime::{OUT_OF_MEMORY, SUCCESS, exported, failed, nothing_to_do};
use super::stream::new_handle;

/// What `<<<…>>>` leaves for the generated stub to pick up: grid, block, shared memory and stream. The stub hands them
/// to the launch, which ignores them.
#[derive(Clone, Copy)]
struct Configuration {
    shared: usize,
    stream: *mut c_void,
}

thread_local! {
    static CONFIGURATION: Cell<Configuration> = const {
        Cell::new(Configuration { shared: 0, stream: std::ptr::null_mut() })
    };
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Dim3 {
    x: c_uint,
    y: c_uint,
    z: c_uint,
}

#[repr(C)]
pub struct FunctionAttributes {
    shared_size_bytes: usize,
    const_size_bytes: usize,
    local_size_bytes: usize,
    max_threads_per_block: c_int,
    num_registers: c_int,
    ptx_version: c_int,
    binary_version: c_int,
    cache_mode: c_int,
    max_dynamic_shared_size_bytes: c_int,
    preferred_carveout: c_int,
}

/// Registers of a kernel, where a caller asks: what most of PyTorch's have.
pub const NUM_REGISTERS: c_int = 32;

/// Blocks of a kernel that fit on a multiprocessor, as far as threads and shared memory decide it.
pub fn occupancy(block_size: c_int, shared: usize) -> c_int {
    let limits = card().limits();
    let by_threads = limits.threads_per_multiprocessor / block_size.max(1);
    let by_shared = match shared {
        0 => c_int::MAX,
        shared => limits.shared_per_multiprocessor / (shared.min(1 << 30) as c_int + 1024),
    };
    by_threads
        .min(by_shared)
        .min(limits.blocks_per_multiprocessor)
        .max(1)
}

/// How code serves a chip: machine code for its major number before what the driver compiles, newer before older. `None`
/// where it does not run there. Architectures are ten times their major number and their minor.
pub fn service(chip: c_int, architecture: c_int, is_source: bool) -> Option<(bool, c_int)> {
    let is_older = architecture <= chip;
    let runs = is_older && (is_source || architecture / 10 == chip / 10);
    runs.then_some((!is_source, architecture))
}

/// The best code that the program is said to have for this card.
static CODE: Mutex<Option<(bool, c_int)>> = Mutex::new(None);

fn chip() -> c_int {
    let card = card();
    card.major * 10 + card.minor
}

/// What a kernel was compiled for. CUB looks for its settings by this, and has those of the architectures that the
/// program was compiled for and no others: an RTX 4090 (8.9) runs code for 8.6.
fn architecture() -> c_int {
    let code = *CODE.lock().unwrap_or_else(PoisonError::into_inner);
    code.map_or_else(chip, |(_, architecture)| architecture)
}

fn launched() -> c_int {
    ledger().add(Entry::Launches, 1);
    SUCCESS
}

/// Addresses of device variables, made when they are first asked for.
static SYMBOLS: Mutex<BTreeMap<u64, u64>> = Mutex::new(BTreeMap::new());
const SYMBOL_BYTES: u64 = 4096;

exported! {
    fn __cudaRegisterFatBinary(_code: *mut c_void) -> *mut *mut c_void {
        // Generated code keeps this and hands it back; nothing is read through it.
        new_handle().cast()
    }

    fn __cudaPushCallConfiguration(_grid: Dim3, _block: Dim3, shared: usize, stream: *mut c_void) -> c_uint {
        CONFIGURATION.set(Configuration { shared, stream });
        0
    }

    fn __cudaPopCallConfiguration(grid: *mut Dim3, block: *mut Dim3, shared: *mut usize, stream: *mut *mut c_void) -> c_int {
        let configuration = CONFIGURATION.get();
        let one = Dim3 { x: 1, y: 1, z: 1 };
        // SAFETY: outputs of the generated stub.
        unsafe {
            put(grid, one);
            put(block, one);
            put(shared, configuration.shared);
            put(stream, configuration.stream);
        }
        SUCCESS
    }

    fn __cudaGetKernel(kernel: *mut *mut c_void, function: *const c_void) -> c_int {
        // SAFETY: output of the generated stub. The stub's address names its kernel.
        unsafe { put(kernel, function.cast_mut()) };
        SUCCESS
    }

    fn __cudaLaunchKernel() -> c_int {
        launched()
    }

    fn __cudaLaunchKernel_ptsz() -> c_int {
        launched()
    }

    fn cudaLaunchKernel() -> c_int {
        launched()
    }

    fn cudaLaunchKernelExC() -> c_int {
        launched()
    }

    fn cudaLaunchCooperativeKernel() -> c_int {
        launched()
    }

    /// Says that the program has code for an architecture, as machine code (0) or as PTX (1).
    fn cinch_card_has_code(architecture: c_int, is_source: c_int) -> c_int {
        let mut code = CODE.lock().unwrap_or_else(PoisonError::into_inner);
        *code = (*code).max(service(chip(), architecture, is_source != 0));
        c_int::from(code.is_some())
    }

    fn cudaFuncGetAttributes(attributes: *mut FunctionAttributes, _function: *const c_void) -> c_int {
        let architecture = architecture();
        let value = FunctionAttributes {
            shared_size_bytes: 0,
            const_size_bytes: 0,
            local_size_bytes: 0,
            max_threads_per_block: 1024,
            num_registers: NUM_REGISTERS,
            ptx_version: architecture,
            binary_version: architecture,
            cache_mode: 0,
            max_dynamic_shared_size_bytes: 48 << 10,
            preferred_carveout: -1,
        };
        // SAFETY: as documented for this function; the struct's later fields are left as they are.
        unsafe { put(attributes, value) };
        SUCCESS
    }

    fn cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks: *mut c_int, _function: *const c_void, block_size: c_int, shared: usize) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(blocks, occupancy(block_size, shared)) };
        SUCCESS
    }

    fn cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks: *mut c_int, _function: *const c_void, block_size: c_int, shared: usize, _flags: c_uint) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(blocks, occupancy(block_size, shared)) };
        SUCCESS
    }

    fn cudaOccupancyMaxActiveClusters(clusters: *mut c_int) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(clusters, card().multiprocessors) };
        SUCCESS
    }

    fn cudaGetSymbolAddress(address: *mut *mut c_void, symbol: *const c_void) -> c_int {
        let mut symbols = SYMBOLS.lock().unwrap_or_else(PoisonError::into_inner);
        let known = symbols.get(&(symbol as u64)).copied();
        let place = known.or_else(|| memory::current_device()?.allocate(SYMBOL_BYTES).ok());
        let Some(place) = place else {
            return failed(OUT_OF_MEMORY);
        };
        symbols.insert(symbol as u64, place);
        // SAFETY: as documented for this function.
        unsafe { put(address, place as *mut c_void) };
        SUCCESS
    }

    fn cudaGetFuncBySymbol(function: *mut *mut c_void, symbol: *const c_void) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(function, symbol.cast_mut()) };
        SUCCESS
    }
}

nothing_to_do! {
    __cudaRegisterFatBinaryEnd __cudaRegisterFunction __cudaRegisterVar __cudaUnregisterFatBinary __cudaInitModule
    __cudaRegisterManagedVar __cudaRegisterHostVar
    cudaFuncSetAttribute cudaFuncSetCacheConfig cudaFuncSetSharedMemConfig cudaMemcpyToSymbol cudaMemcpyToSymbolAsync
    cudaMemcpyFromSymbol cudaCtxResetPersistingL2Cache
}
