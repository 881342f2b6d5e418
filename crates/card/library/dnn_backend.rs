//! cuDNN's graphs: the six `cudnnBackend` functions, handed on to cuDNN itself in a process of its own, where it runs in
//! its documented mode without a device. Which engine is chosen and which workspace it needs is therefore cuDNN's answer.
//!
//! Calls go through a pipe in the form that `question` writes. Where no such process can be had (cuDNN before 9.8), a
//! graph gets one engine without a workspace, and is counted as not asked for.

use std::ffi::{OsString, c_int, c_void};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use super::host::{self, put};
use super::ledger::{Entry, ledger};
use super::runtime::{SUCCESS, exported};
use super::stream::new_handle;

/// The program that asks cuDNN, and its first argument.
pub const PROGRAM: &str = "CINCH_CARD_CUDNN";
pub const ARGUMENT: &str = "__cudnn";

pub const CREATE: u32 = 1;
pub const DESTROY: u32 = 2;
pub const SET: u32 = 3;
pub const FINALIZE: u32 = 4;
pub const GET: u32 = 5;

const INTERNAL_ERROR: c_int = 4000;
const VARIANT_PACK: c_int = 16;
pub const EXECUTION_PLAN: c_int = 5;
/// Forward, of the filter, of the data.
const CONVOLUTIONS: [c_int; 3] = [10, 11, 12];
const TYPE_HANDLE: c_int = 0;
const TYPE_DESCRIPTOR: c_int = 15;
const HEURISTIC_RESULTS: c_int = 202;
pub const PLAN_WORKSPACE: c_int = 402;

/// Descriptors of the other process are pointers of its; those of this one are small numbers.
const FIRST_POINTER: u64 = 1 << 32;

/// Bytes of an element of an attribute, by `cudnnBackendAttributeType_t`.
pub fn element_bytes(kind: c_int) -> usize {
    match kind {
        0 | 3 | 5 | 6 | 15 => 8,
        2 | 24 => 1,
        26 => 16,
        _ => 4,
    }
}

/// A question as bytes: what is asked, numbers, and an array; with its length before it.
pub fn question(operation: u32, numbers: &[i64], array: &[u8]) -> Vec<u8> {
    let length = 4 + 8 * numbers.len() + array.len();
    let mut bytes = Vec::with_capacity(length + 4);
    bytes.extend_from_slice(&(length as u32).to_le_bytes());
    bytes.extend_from_slice(&operation.to_le_bytes());
    for number in numbers {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    bytes.extend_from_slice(array);
    bytes
}

struct Helper {
    _child: Child,
    input: ChildStdin,
    output: ChildStdout,
}

/// `None` until it is needed; then the process, or that there is none.
static HELPER: Mutex<Option<Option<Helper>>> = Mutex::new(None);

/// An answer: a status, a number and an array.
struct Answer {
    status: c_int,
    number: i64,
    array: Vec<u8>,
}

impl Helper {
    fn start() -> Option<Self> {
        let program = std::env::var_os(PROGRAM)?;
        let library = library_path()?;
        let mut child = Command::new(program)
            .arg(ARGUMENT)
            .arg(&library)
            .env_remove("LD_PRELOAD")
            .env("LD_LIBRARY_PATH", search_path(&library))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .ok()?;
        let (input, output) = (child.stdin.take()?, child.stdout.take()?);
        let mut helper = Self {
            _child: child,
            input,
            output,
        };
        // The first answer says whether cuDNN could be loaded and knows the card.
        let answer = helper.answer()?;
        (answer.status == SUCCESS).then_some(helper)
    }

    fn answer(&mut self) -> Option<Answer> {
        let mut head = [0; 16];
        self.output.read_exact(&mut head).ok()?;
        let length = u32::from_le_bytes(head[..4].try_into().ok()?) as usize;
        let mut array = vec![0; length];
        self.output.read_exact(&mut array).ok()?;
        Some(Answer {
            status: c_int::from_le_bytes(head[4..8].try_into().ok()?),
            number: i64::from_le_bytes(head[8..].try_into().ok()?),
            array,
        })
    }

    fn ask(&mut self, bytes: &[u8]) -> Option<Answer> {
        self.input.write_all(bytes).ok()?;
        self.answer()
    }
}

/// A folder beside this library, in which it has cuBLAS's names too.
pub const STAND_INS: &str = "cudnn";

/// Where cuDNN finds what it loads by name: this library for the driver and for cuBLAS, without which it takes its
/// engines of matrix products for unsupported, and the run-time compiler in the folders of the other packages.
fn search_path(library: &str) -> OsString {
    let mut folders: Vec<PathBuf> = Vec::new();
    let this = host::path_of(search_path as fn(&str) -> OsString as *const c_void);
    if let Some(folder) = this.as_ref().and_then(|path| Path::new(path).parent()) {
        folders.extend([folder.join(STAND_INS), folder.to_owned()]);
    }
    let packages = Path::new(library).ancestors().nth(3);
    let packages = packages.and_then(|packages| packages.read_dir().ok());
    for package in packages.into_iter().flatten().flatten() {
        folders.push(package.path().join("lib"));
    }
    let before = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    folders.extend(std::env::split_paths(&before));
    std::env::join_paths(folders).unwrap_or(before)
}

/// Where the process has its cuDNN from.
fn library_path() -> Option<String> {
    host::path_of(host::function_of(c"libcudnn.so.9", c"cudnnGetVersion")?)
}

/// Asks the other process; `None` where there is none.
fn ask(bytes: &[u8]) -> Option<Answer> {
    let mut helper = HELPER.lock().unwrap_or_else(PoisonError::into_inner);
    let process = helper.get_or_insert_with(Helper::start).as_mut()?;
    match process.ask(bytes) {
        Some(answer) => Some(answer),
        None => {
            // It has ended: nothing more can be asked.
            *helper = Some(None);
            None
        }
    }
}

fn is_local(descriptor: *mut c_void) -> bool {
    (descriptor as u64) < FIRST_POINTER
}

exported! {
    fn cudnnBackendCreateDescriptor(kind: c_int, descriptor: *mut *mut c_void) -> c_int {
        let asked = match kind {
            VARIANT_PACK => None,
            _ => ask(&question(CREATE, &[kind.into()], &[])),
        };
        if kind == EXECUTION_PLAN {
            ledger().add(if asked.is_some() { Entry::AskedPlans } else { Entry::UnaskedPlans }, 1);
        }
        if CONVOLUTIONS.contains(&kind) {
            ledger().add(Entry::Convolutions, 1);
        }
        let (status, pointer) = match asked {
            Some(answer) => (answer.status, answer.number as u64 as *mut c_void),
            None => (SUCCESS, new_handle()),
        };
        // SAFETY: as documented for this function.
        unsafe { put(descriptor, pointer) };
        status
    }

    fn cudnnBackendDestroyDescriptor(descriptor: *mut c_void) -> c_int {
        if !is_local(descriptor) {
            ask(&question(DESTROY, &[descriptor as i64], &[]));
        }
        SUCCESS
    }

    fn cudnnBackendSetAttribute(descriptor: *mut c_void, name: c_int, kind: c_int, count: i64, array: *const u8) -> c_int {
        // A handle is this process's; the device's properties stand in for it there.
        if is_local(descriptor) || kind == TYPE_HANDLE {
            return SUCCESS;
        }
        let length = count.max(0) as usize * element_bytes(kind);
        let array: &[u8] = match array.is_null() {
            true => &[],
            // SAFETY: `count` elements of that type, as documented for this function.
            false => unsafe { std::slice::from_raw_parts(array, length) },
        };
        let asked = ask(&question(SET, &[descriptor as i64, name.into(), kind.into(), count], array));
        asked.map_or(INTERNAL_ERROR, |answer| answer.status)
    }

    fn cudnnBackendFinalize(descriptor: *mut c_void) -> c_int {
        if is_local(descriptor) {
            return SUCCESS;
        }
        let asked = ask(&question(FINALIZE, &[descriptor as i64], &[]));
        asked.map_or(INTERNAL_ERROR, |answer| answer.status)
    }

    fn cudnnBackendGetAttribute(descriptor: *mut c_void, name: c_int, kind: c_int, requested: i64, count: *mut i64, array: *mut u8) -> c_int {
        let length = if array.is_null() { 0 } else { requested.max(0) as usize * element_bytes(kind) };
        if is_local(descriptor) {
            // One engine, and a workspace of nothing.
            let found = i64::from(matches!(name, HEURISTIC_RESULTS | PLAN_WORKSPACE));
            // SAFETY: as documented for this function.
            unsafe {
                if name == PLAN_WORKSPACE && length >= 8 {
                    std::ptr::write_bytes(array, 0, 8);
                }
                put(count, found);
            }
            return SUCCESS;
        }
        // Descriptors are filled in place: the caller made them. Other arrays may be shorter than what is requested, as
        // long as what is there fits: nothing is read from them, and no more is written.
        let mut given = vec![0; length];
        if kind == TYPE_DESCRIPTOR && length > 0 {
            // SAFETY: an array of `requested` descriptors, as documented for this function.
            unsafe { std::ptr::copy_nonoverlapping(array, given.as_mut_ptr(), length) };
        }
        let Some(answer) = ask(&question(GET, &[descriptor as i64, name.into(), kind.into(), requested], &given)) else {
            return INTERNAL_ERROR;
        };
        let found = answer.number.clamp(0, requested.max(0)) as usize * element_bytes(kind);
        let written = found.min(length).min(answer.array.len());
        // SAFETY: as documented for this function, and no more than the array holds.
        unsafe {
            std::ptr::copy_nonoverlapping(answer.array.as_ptr(), array, written);
            put(count, answer.number);
        }
        answer.status
    }

    fn cudnnBackendExecute(_handle: *mut c_void, _plan: *mut c_void, _pack: *mut c_void) -> c_int {
        ledger().add(Entry::Launches, 1);
        SUCCESS
    }
}
