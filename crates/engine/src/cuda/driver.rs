//! The driver: context, memory, streams, modules, graphs. Thin and owned, so that everything is
//! given back in the right order.

use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cinch_plan::Placement;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use super::command::LaunchShape;
use super::image;
use super::lowering::Card;
use crate::error::EngineError;

/// Whether a CUDA driver with at least one device is on this machine.
pub fn is_available() -> bool {
    // SAFETY: only looks for the library.
    let present = unsafe { sys::is_culib_present() };
    present && result::init().is_ok() && result::device::get_count().is_ok_and(|count| count > 0)
}

/// What the driver says of the first card, where there is one; opens no context.
pub fn card() -> Option<DeviceInfo> {
    if !is_available() {
        return None;
    }
    read_info(result::device::get(0).ok()?).ok()
}

/// How many cards the driver shows.
pub fn num_cards() -> usize {
    match is_available() {
        true => result::device::get_count().map_or(0, |count| count.max(0) as usize),
        false => 0,
    }
}

/// Free and total bytes of the first card.
pub fn memory() -> Result<(u64, u64), EngineError> {
    Context::new(0)?.memory()
}

pub(crate) fn failed(action: impl Into<String>) -> impl FnOnce(DriverError) -> EngineError {
    let action = action.into();
    move |error| EngineError::Cuda {
        action,
        problem: describe(&error),
    }
}

fn describe(error: &DriverError) -> String {
    let name = error.error_name().map(|text| text.to_string_lossy());
    let text = error.error_string().map(|text| text.to_string_lossy());
    match (name, text) {
        (Ok(name), Ok(text)) => format!("{name}, {text}"),
        _ => format!("{error:?}"),
    }
}

/// What the driver says of a card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    pub name: String,
    pub major: i32,
    pub minor: i32,
    pub multiprocessors: i32,
    pub total_bytes: u64,
    /// The CUDA version of the driver, as 1000 × major + 10 × minor.
    pub driver_version: i32,
}

impl DeviceInfo {
    /// The architecture that kernels are compiled for.
    pub fn architecture(&self) -> String {
        format!("sm_{}{}", self.major, self.minor)
    }

    /// Whether a kernel can be on the card before the one that precedes it has ended: the cards
    /// whose kernels know how to wait (`await_earlier`), and the drivers that keep it in recordings.
    fn starts_kernels_early(&self) -> bool {
        self.major >= 9 && self.driver_version >= 12_030
    }

    pub(crate) fn card(&self) -> Card {
        Card {
            is_hopper: (self.major, self.minor) == (9, 0),
            multiprocessors: self.multiprocessors.max(1) as usize,
            rank: 0,
        }
    }
}

/// A card with its primary context.
pub(crate) struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
    pub info: DeviceInfo,
}

// SAFETY: a context may be made current on any thread; every use goes through `bind`.
unsafe impl Send for Context {}
// SAFETY: as above; the driver serialises access to a context.
unsafe impl Sync for Context {}

impl Context {
    pub fn new(ordinal: usize) -> Result<Arc<Self>, EngineError> {
        if !is_available() {
            return Err(EngineError::NoDriver);
        }
        let count = result::device::get_count().map_err(failed("count the GPUs"))?;
        let device = result::device::get(ordinal as i32).map_err(|_| EngineError::NoDevice {
            ordinal,
            count: count as usize,
        })?;
        let info = read_info(device).map_err(failed("read the GPU's properties"))?;
        if info.major < 8 {
            let DeviceInfo {
                name, major, minor, ..
            } = info;
            return Err(EngineError::OldDevice { name, major, minor });
        }
        // SAFETY: the device comes from the driver.
        let context = unsafe { result::primary_ctx::retain(device) };
        let context = context.map_err(failed("create a context"))?;
        let context = Arc::new(Self {
            device,
            context,
            info,
        });
        context.bind()?;
        Ok(context)
    }

    /// Makes the context current on this thread.
    pub fn bind(&self) -> Result<(), EngineError> {
        // SAFETY: the context lives as long as `self`.
        unsafe { result::ctx::set_current(self.context) }.map_err(failed("enter the context"))
    }

    /// Free and total bytes of the card.
    pub fn memory(&self) -> Result<(u64, u64), EngineError> {
        let (free, total) = result::mem_get_info().map_err(failed("read the free memory"))?;
        Ok((free as u64, total as u64))
    }
}

fn read_info(device: sys::CUdevice) -> Result<DeviceInfo, DriverError> {
    use sys::CUdevice_attribute as Attribute;
    // SAFETY: the device comes from the driver.
    let attribute = |which| unsafe { result::device::get_attribute(device, which) };
    let mut driver_version = 0;
    // SAFETY: the pointer is to a live integer.
    unsafe { sys::cuDriverGetVersion(&raw mut driver_version) }.result()?;
    Ok(DeviceInfo {
        name: result::device::get_name(device)?,
        major: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        minor: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        // SAFETY: the device comes from the driver.
        total_bytes: unsafe { result::device::total_mem(device)? } as u64,
        driver_version,
    })
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained in `new`. A failure while shutting down has nobody to be told to.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// Device memory, cleared.
pub(crate) struct DeviceMemory {
    context: Arc<Context>,
    pub address: u64,
    pub bytes: u64,
}

impl DeviceMemory {
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<Self, EngineError> {
        // SAFETY: a plain allocation in the current context.
        let address = unsafe { result::malloc_sync(bytes as usize) };
        let Ok(address) = address else {
            let (free, total) = context.memory()?;
            return Err(EngineError::DeviceMemory {
                free,
                total,
                needed: bytes,
            });
        };
        // Owned before it is cleared, so that it is freed where that fails.
        let memory = Self {
            context: Arc::clone(context),
            address,
            bytes,
        };
        // SAFETY: the range was just allocated.
        unsafe { result::memset_d8_sync(address, 0, bytes as usize) }
            .map_err(failed("clear the arena"))?;
        Ok(memory)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: allocated in `new`, freed once.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Pinned host memory that kernels read and write where it is.
pub(crate) struct HostMemory {
    context: Arc<Context>,
    start: *mut u8,
    pub bytes: u64,
}

// SAFETY: pinned memory belongs to the context, not to a thread; it is reached only through
// `&self` and `&mut self`.
unsafe impl Send for HostMemory {}

impl HostMemory {
    /// Zeroed memory of that size; none at all for zero bytes.
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<Option<Self>, EngineError> {
        if bytes == 0 {
            return Ok(None);
        }
        // SAFETY: a plain pinned allocation, freed in `Drop`.
        let start = unsafe { result::malloc_host(bytes as usize, sys::CU_MEMHOSTALLOC_DEVICEMAP) };
        let start = start.map_err(|_| EngineError::PinnedMemory { bytes })?;
        let start = start.cast::<u8>();
        // SAFETY: the range was just allocated.
        unsafe { std::ptr::write_bytes(start, 0, bytes as usize) };
        Ok(Some(Self {
            context: Arc::clone(context),
            start,
            bytes,
        }))
    }

    /// Where the device sees it: at the same address as the host.
    pub fn address(&self) -> u64 {
        self.start.addr() as u64
    }

    /// The start of a place, for what the device copies.
    pub fn address_of(&self, place: Placement) -> *mut u8 {
        assert!(place.end() <= self.bytes, "a tensor outside host memory");
        // SAFETY: inside the allocation by the assertion.
        unsafe { self.start.add(place.offset as usize) }
    }

    /// The bytes of a place.
    ///
    /// # Safety
    /// Nothing on the device may write them while the view is in use.
    pub unsafe fn view(&self, place: Placement) -> &[u8] {
        assert!(place.end() <= self.bytes, "a tensor outside host memory");
        // SAFETY: inside the allocation, which is initialised; not written by the contract.
        unsafe {
            let start = self.start.add(place.offset as usize);
            std::slice::from_raw_parts(start, place.bytes as usize)
        }
    }

    /// The same, to be written.
    ///
    /// # Safety
    /// Nothing on the device may read or write them while the view is in use.
    pub unsafe fn view_mut(&mut self, place: Placement) -> &mut [u8] {
        assert!(place.end() <= self.bytes, "a tensor outside host memory");
        // SAFETY: as in `view`, and exclusive by `&mut self` and the contract.
        unsafe {
            let start = self.start.add(place.offset as usize);
            std::slice::from_raw_parts_mut(start, place.bytes as usize)
        }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: allocated in `new`, freed once.
            let _ = unsafe { result::free_host(self.start.cast()) };
        }
    }
}

/// An ordered queue of device work.
pub(crate) struct Stream {
    pub context: Arc<Context>,
    pub handle: sys::CUstream,
    /// What was put on it last is a kernel, before whose end the next one may come onto the card.
    ends_with_kernel: AtomicBool,
}

// SAFETY: streams may be used from any thread with their context current.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for Stream {}

impl Stream {
    pub fn new(context: &Arc<Context>) -> Result<Self, EngineError> {
        let kind = result::stream::StreamKind::NonBlocking;
        let handle = result::stream::create(kind).map_err(failed("create a stream"))?;
        Ok(Self {
            context: Arc::clone(context),
            handle,
            ends_with_kernel: AtomicBool::new(false),
        })
    }

    /// Says whether what was put on it last is a kernel.
    pub fn set_ends_with_kernel(&self, does: bool) {
        self.ends_with_kernel.store(does, Ordering::Relaxed);
    }

    /// Puts one of our kernels on it: each waits by itself for those before it.
    ///
    /// # Safety
    /// The arguments are what the kernel takes, and what they point at is live when it runs.
    pub unsafe fn launch(
        &self,
        function: sys::CUfunction,
        shape: &LaunchShape,
        arguments: &mut [*mut c_void],
    ) -> Result<(), DriverError> {
        let follows = self.ends_with_kernel.swap(true, Ordering::Relaxed);
        let info = &self.context.info;
        let comes_early =
            follows && info.starts_kernels_early() && stays_even(info, function, shape)?;
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue {
                programmaticStreamSerializationAllowed: 1,
            },
        };
        let [grid_x, grid_y, grid_z] = shape.grid;
        let [block_x, block_y, block_z] = shape.block;
        let launch = sys::CUlaunchConfig {
            gridDimX: grid_x,
            gridDimY: grid_y,
            gridDimZ: grid_z,
            blockDimX: block_x,
            blockDimY: block_y,
            blockDimZ: block_z,
            sharedMemBytes: shape.shared_bytes,
            hStream: self.handle,
            attrs: &raw mut early,
            numAttrs: u32::from(comes_early),
        };
        // SAFETY: the caller's promise; the driver copies attributes and arguments.
        let launched = unsafe {
            sys::cuLaunchKernelEx(
                &raw const launch,
                function,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        launched.result()
    }

    pub fn synchronize(&self) -> Result<(), EngineError> {
        // SAFETY: the stream lives as long as `self`.
        unsafe { result::stream::synchronize(self.handle) }.map_err(failed("finish the step"))
    }
}

/// Whether a launch is spread over the card as evenly where other blocks have not ended.
fn stays_even(
    info: &DeviceInfo,
    function: sys::CUfunction,
    shape: &LaunchShape,
) -> Result<bool, DriverError> {
    let count = |sides: [u32; 3]| sides.iter().map(|&side| u64::from(side)).product::<u64>();
    let (mut at_once, threads) = (0, count(shape.block) as i32);
    // SAFETY: the function is loaded, and the number is live.
    unsafe {
        sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
            &raw mut at_once,
            function,
            threads,
            shape.shared_bytes as usize,
        )
    }
    .result()?;
    let multiprocessors = info.card().multiprocessors as u64;
    Ok(is_even(
        count(shape.grid),
        multiprocessors,
        u64::from(at_once.unsigned_abs()),
    ))
}

/// Blocks that come early go where there is room: to as many on one multiprocessor as it holds at
/// once, while others have none. That is no more than what an even share is for the fullest.
fn is_even(blocks: u64, multiprocessors: u64, at_once: u64) -> bool {
    at_once <= blocks.div_ceil(multiprocessors)
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: created in `new`, destroyed once.
            let _ = unsafe { result::stream::destroy(self.handle) };
        }
    }
}

/// A point in a stream's work that other work can wait for.
pub(crate) struct Event {
    context: Arc<Context>,
    pub handle: sys::CUevent,
}

// SAFETY: events belong to a context, not to a thread.
unsafe impl Send for Event {}

impl Event {
    /// The context must be current.
    pub fn new(context: &Arc<Context>, flags: sys::CUevent_flags) -> Result<Self, EngineError> {
        let handle = result::event::create(flags).map_err(failed("create an event"))?;
        Ok(Self {
            context: Arc::clone(context),
            handle,
        })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: created in `new`, destroyed once. A failure has nobody to be told to.
            let _ = unsafe { result::event::destroy(self.handle) };
        }
    }
}

/// A loaded module and its functions. It is never unloaded: the context's end does that, and
/// functions stay valid till then.
pub(crate) struct Module {
    handle: sys::CUmodule,
}

// SAFETY: modules belong to a context, not to a thread.
unsafe impl Send for Module {}

/// Dynamic shared memory that a kernel has without asking for more.
const SHARED_DEFAULT: u32 = 48 << 10;

impl Module {
    pub fn load(cubin: &[u8]) -> Result<Self, EngineError> {
        image::check(cubin).map_err(|problem| EngineError::Cuda {
            action: "load a module".to_owned(),
            problem,
        })?;
        // SAFETY: the image's tables and contents lie within its bytes, which outlive the call.
        let handle = unsafe { result::module::load_data(cubin.as_ptr().cast::<c_void>()) };
        handle
            .map(|handle| Self { handle })
            .map_err(failed("load a module"))
    }

    pub fn function(&self, name: &str, shared_bytes: u32) -> Result<sys::CUfunction, EngineError> {
        let c_name = CString::new(name).map_err(|error| EngineError::Cuda {
            action: format!("find the kernel {name}"),
            problem: error.to_string(),
        })?;
        // SAFETY: the module is loaded and stays so.
        let function = unsafe { result::module::get_function(self.handle, c_name) }
            .map_err(failed(format!("find the kernel {name}")))?;
        if shared_bytes > SHARED_DEFAULT {
            let attribute =
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let raise = || {
                // SAFETY: the function was just found.
                let allowed =
                    unsafe { result::function::get_function_attribute(function, attribute) }?;
                // Other launches may need more than this one.
                let limit = allowed.max(shared_bytes.cast_signed());
                // SAFETY: as above.
                unsafe { result::function::set_function_attribute(function, attribute, limit) }
            };
            raise().map_err(failed(format!("raise the shared memory of {name}")))?;
        }
        Ok(function)
    }
}

/// A captured sequence of commands, ready to be replayed.
pub(crate) struct Replay {
    exec: sys::CUgraphExec,
    /// Dropped after what was made of it.
    _recording: Recording,
}

// SAFETY: graphs belong to a context, not to a thread.
unsafe impl Send for Replay {}

/// The commands as they were recorded.
struct Recording(sys::CUgraph);

impl Drop for Recording {
    fn drop(&mut self) {
        // SAFETY: recorded in `Replay::capture`, destroyed once.
        let _ = unsafe { result::graph::destroy(self.0) };
    }
}

impl Replay {
    /// Records what `work` puts on the stream.
    pub fn capture(
        stream: &Stream,
        work: impl FnOnce() -> Result<(), EngineError>,
    ) -> Result<Self, EngineError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // What is before the recording is no part of it.
        stream.set_ends_with_kernel(false);
        // SAFETY: the stream is live.
        unsafe { result::stream::begin_capture(stream.handle, mode) }
            .map_err(failed("start recording"))?;
        let worked = work();
        // SAFETY: the capture was begun above; it has to end even if the work failed.
        let graph = unsafe { result::stream::end_capture(stream.handle) };
        stream.set_ends_with_kernel(false);
        // A recording that was cut off by an error may have no graph.
        let recording = graph.map(|graph| (!graph.is_null()).then(|| Recording(graph)));
        worked?;
        let recording = recording.map_err(failed("end recording"))?;
        let recording = recording.ok_or_else(|| EngineError::Cuda {
            action: "end recording".to_owned(),
            problem: "the driver gave no graph".to_owned(),
        })?;
        let flags = sys::CUgraphInstantiate_flags(0);
        // SAFETY: the graph was just recorded.
        let exec = unsafe { result::graph::instantiate(recording.0, flags) }
            .map_err(failed("prepare the recorded step"))?;
        Ok(Self {
            exec,
            _recording: recording,
        })
    }

    pub fn launch(&self, stream: &Stream) -> Result<(), EngineError> {
        stream.set_ends_with_kernel(false);
        // SAFETY: graph and stream are live.
        unsafe { result::graph::launch(self.exec, stream.handle) }
            .map_err(failed("replay the step"))
    }
}

impl Drop for Replay {
    fn drop(&mut self) {
        // SAFETY: created in `capture`, destroyed once.
        let _ = unsafe { result::graph::exec_destroy(self.exec) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_come_early_are_not_crowded() {
        // Of 264 places, 256 blocks leave eight: no multiprocessor can have more than two.
        assert!(is_even(256, 132, 2));
        // Four could meet on one, and half of the card would have none.
        assert!(!is_even(256, 132, 4));
        assert!(is_even(529, 132, 5));
        assert!(is_even(100, 132, 1));
        assert!(!is_even(100, 132, 2));
    }
}
