//! Streams, events and graphs. Work is done when it is asked for, so that every event has happened.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::host::put;
use super::runtime::{INVALID_VALUE, SUCCESS, exported, failed, nothing_to_do};

/// Numbers for handles that nobody looks behind. They are spaced like pointers, because callers order and hash them.
pub fn new_handle() -> *mut c_void {
    static NEXT: AtomicU64 = AtomicU64::new(0x1000);
    NEXT.fetch_add(0x10, Ordering::Relaxed) as *mut c_void
}

/// PyTorch looks every 100 ms which collectives are done, in a thread of its own, and keeps their tensors until then. On a
/// card a step takes about as long; here the next one would begin before anybody has looked, or not, by chance. So
/// whoever waits for the card after a collective waits for one look.
const LOOK: Duration = Duration::from_millis(120);
/// Steps that are waited for: later ones are like these.
const MOST_LOOKS: u32 = 32;

static HAS_COLLECTIVES: AtomicBool = AtomicBool::new(false);
static LOOKS: AtomicU32 = AtomicU32::new(0);

/// Something is exchanged with other ranks.
pub fn begin_collective() {
    HAS_COLLECTIVES.store(true, Ordering::Relaxed);
}

/// The host waits for what it has asked for.
pub fn finish() -> c_int {
    if HAS_COLLECTIVES.swap(false, Ordering::Relaxed)
        && LOOKS.fetch_add(1, Ordering::Relaxed) < MOST_LOOKS
    {
        thread::sleep(LOOK);
    }
    SUCCESS
}

/// Nanoseconds since the first event.
fn now() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64 + 1
}

/// The stream that is being captured, plus one so that the default stream is told from none; and which capture it is.
static CAPTURED: AtomicU64 = AtomicU64::new(0);
static CAPTURE_ID: AtomicU64 = AtomicU64::new(0);

fn is_captured(stream: *mut c_void) -> bool {
    CAPTURED.load(Ordering::Relaxed) == stream as u64 + 1
}

/// # Safety
/// `event` is null or valid for a write.
pub unsafe fn create_event(event: *mut *mut c_void) -> c_int {
    let time = Box::into_raw(Box::new(AtomicU64::new(0)));
    // SAFETY: by the caller's word.
    unsafe { put(event, time.cast()) };
    SUCCESS
}

/// # Safety
/// `event` is one of `create_event` that was not destroyed, or null.
pub unsafe fn record(event: *mut c_void) -> c_int {
    // SAFETY: by the caller's word.
    match unsafe { event.cast::<AtomicU64>().as_ref() } {
        Some(time) => {
            time.store(now(), Ordering::Relaxed);
            SUCCESS
        }
        None => failed(INVALID_VALUE),
    }
}

exported! {
    fn cudaEventCreate(event: *mut *mut c_void) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { create_event(event) }
    }

    fn cudaEventCreateWithFlags(event: *mut *mut c_void, _flags: c_uint) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { create_event(event) }
    }

    fn cudaEventDestroy(event: *mut c_void) -> c_int {
        if !event.is_null() {
            // SAFETY: an event of `create_event`, destroyed once.
            drop(unsafe { Box::from_raw(event.cast::<AtomicU64>()) });
        }
        SUCCESS
    }

    fn cudaEventRecord(event: *mut c_void, _stream: *mut c_void) -> c_int {
        // SAFETY: the caller's event.
        unsafe { record(event) }
    }

    fn cudaEventRecordWithFlags(event: *mut c_void, _stream: *mut c_void, _flags: c_uint) -> c_int {
        // SAFETY: the caller's event.
        unsafe { record(event) }
    }

    /// The time between the two calls on this machine: nothing ran on the card.
    fn cudaEventElapsedTime(milliseconds: *mut f32, start: *mut c_void, end: *mut c_void) -> c_int {
        // SAFETY: the caller's events.
        let time = |event: *mut c_void| unsafe { event.cast::<AtomicU64>().as_ref() }.map(|time| time.load(Ordering::Relaxed));
        let (Some(start), Some(end)) = (time(start), time(end)) else {
            return failed(INVALID_VALUE);
        };
        // SAFETY: as documented for this function.
        unsafe { put(milliseconds, end.saturating_sub(start).max(1) as f32 / 1e6) };
        SUCCESS
    }

    fn cudaStreamCreate(stream: *mut *mut c_void) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(stream, new_handle()) };
        SUCCESS
    }

    fn cudaStreamCreateWithFlags(stream: *mut *mut c_void, _flags: c_uint) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(stream, new_handle()) };
        SUCCESS
    }

    fn cudaStreamCreateWithPriority(stream: *mut *mut c_void, _flags: c_uint, _priority: c_int) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(stream, new_handle()) };
        SUCCESS
    }

    fn cudaStreamGetPriority(_stream: *mut c_void, priority: *mut c_int) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(priority, 0) };
        SUCCESS
    }

    fn cudaStreamIsCapturing(stream: *mut c_void, status: *mut c_int) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(status, c_int::from(is_captured(stream))) };
        SUCCESS
    }

    fn cudaStreamGetCaptureInfo(stream: *mut c_void, status: *mut c_int, id: *mut u64) -> c_int {
        let is_captured = is_captured(stream);
        // SAFETY: as documented for this function; the outputs after these are optional and left alone.
        unsafe {
            put(status, c_int::from(is_captured));
            if is_captured {
                put(id, CAPTURE_ID.load(Ordering::Relaxed));
            }
        }
        SUCCESS
    }

    fn cudaStreamGetCaptureInfo_v2(stream: *mut c_void, status: *mut c_int, id: *mut u64) -> c_int {
        // SAFETY: the same contract.
        unsafe { cudaStreamGetCaptureInfo(stream, status, id) }
    }

    fn cudaStreamBeginCapture(stream: *mut c_void, _mode: c_int) -> c_int {
        CAPTURED.store(stream as u64 + 1, Ordering::Relaxed);
        CAPTURE_ID.fetch_add(1, Ordering::Relaxed);
        SUCCESS
    }

    fn cudaStreamEndCapture(_stream: *mut c_void, graph: *mut *mut c_void) -> c_int {
        CAPTURED.store(0, Ordering::Relaxed);
        // SAFETY: as documented for this function.
        unsafe { put(graph, new_handle()) };
        SUCCESS
    }

    fn cudaGraphInstantiateWithFlags(executable: *mut *mut c_void, _graph: *mut c_void, _flags: u64) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(executable, new_handle()) };
        SUCCESS
    }

    fn cudaGraphGetNodes(_graph: *mut c_void, _nodes: *mut c_void, count: *mut usize) -> c_int {
        // SAFETY: as documented for this function. A capture records nothing; one node stands for it, because callers
        // warn of an empty graph.
        unsafe { put(count, 1) };
        SUCCESS
    }

    fn cudaStreamSynchronize(_stream: *mut c_void) -> c_int {
        finish()
    }

    fn cudaEventSynchronize(_event: *mut c_void) -> c_int {
        finish()
    }

    fn cudaLaunchHostFunc(_stream: *mut c_void, function: Option<extern "C" fn(*mut c_void)>, data: *mut c_void) -> c_int {
        if let Some(function) = function {
            function(data);
        }
        SUCCESS
    }

    fn cudaStreamAddCallback(stream: *mut c_void, function: Option<extern "C" fn(*mut c_void, c_int, *mut c_void)>, data: *mut c_void, _flags: c_uint) -> c_int {
        if let Some(function) = function {
            function(stream, SUCCESS, data);
        }
        SUCCESS
    }
}

nothing_to_do! {
    cudaEventQuery cudaStreamDestroy cudaStreamQuery cudaStreamWaitEvent
    cudaThreadExchangeStreamCaptureMode cudaGraphDebugDotPrint cudaGraphDestroy cudaGraphExecDestroy cudaGraphLaunch
    cudaGraphNodeGetDependencies cudaStreamSetAttribute cudaStreamGetAttribute cudaGraphUpload
    cudaStreamUpdateCaptureDependencies cudaStreamUpdateCaptureDependencies_v2
}
