//! What ranks exchange between their cards, by NCCL. The library is looked for when a run has
//! several ranks; one communicator serves the whole run. Its calls are put on the stream of the
//! step, and recorded with it.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;

use cinch_graph::DType;
use cinch_ranks::World;
use libloading::Library;

use super::command::{Exchange, ExchangeKind};
use super::driver::{Context, Stream};
use crate::error::EngineError;

/// The names under which it is installed.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// The oldest version with collectives in recorded graphs of CUDA 12 and with bf16: 2.18.
const OLDEST: c_int = 21_800;
/// The oldest one that lets ranks share a card: 2.30.
const OLDEST_SHARING: c_int = 23_000;
/// Set where ranks may share a card.
pub const SHARING_VARIABLE: &str = "NCCL_MULTI_RANK_GPU_ENABLE";

const ID_BYTES: usize = 128;
const SUM: c_int = 0;
const SUCCESS: c_int = 0;

#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; ID_BYTES]);

type Communicator = *mut c_void;
type StreamHandle = *mut c_void;

/// The functions that are called, as NCCL's documentation declares them.
struct Functions {
    get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init_rank: unsafe extern "C" fn(*mut Communicator, c_int, UniqueId, c_int) -> c_int,
    destroy: unsafe extern "C" fn(Communicator) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    last_error: unsafe extern "C" fn(Communicator) -> *const c_char,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    all_reduce: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        Communicator,
        StreamHandle,
    ) -> c_int,
    reduce: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        c_int,
        Communicator,
        StreamHandle,
    ) -> c_int,
    broadcast: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        Communicator,
        StreamHandle,
    ) -> c_int,
    /// Keeps them loaded.
    _library: Library,
}

impl Functions {
    fn load() -> Result<Self, EngineError> {
        let missing = EngineError::NoLibrary {
            library: "NCCL (libnccl.so.2)",
            purpose: "exchange between GPUs",
            package: "nvidia-nccl-cu13",
        };
        // SAFETY: what NCCL does when it is loaded is its own; it is meant to be loaded so.
        let library = NAMES
            .iter()
            .find_map(|name| unsafe { Library::new(*name) }.ok());
        let library = library.ok_or(missing)?;
        let failed = |error: libloading::Error| EngineError::Nccl {
            action: "be loaded".to_owned(),
            problem: error.to_string(),
        };
        // SAFETY: the types are those that NCCL declares for these names.
        unsafe {
            Ok(Self {
                get_version: *library.get(b"ncclGetVersion\0").map_err(failed)?,
                get_unique_id: *library.get(b"ncclGetUniqueId\0").map_err(failed)?,
                init_rank: *library.get(b"ncclCommInitRank\0").map_err(failed)?,
                destroy: *library.get(b"ncclCommDestroy\0").map_err(failed)?,
                error_string: *library.get(b"ncclGetErrorString\0").map_err(failed)?,
                last_error: *library.get(b"ncclGetLastError\0").map_err(failed)?,
                group_start: *library.get(b"ncclGroupStart\0").map_err(failed)?,
                group_end: *library.get(b"ncclGroupEnd\0").map_err(failed)?,
                all_reduce: *library.get(b"ncclAllReduce\0").map_err(failed)?,
                reduce: *library.get(b"ncclReduce\0").map_err(failed)?,
                broadcast: *library.get(b"ncclBroadcast\0").map_err(failed)?,
                _library: library,
            })
        }
    }

    fn version(&self) -> c_int {
        let mut version = 0;
        // SAFETY: the pointer is to a live integer.
        unsafe { (self.get_version)(&raw mut version) };
        version
    }

    /// What a code of a call means, and what NCCL adds to it.
    fn check(&self, action: &str, code: c_int) -> Result<(), EngineError> {
        if code == SUCCESS {
            return Ok(());
        }
        let text = |pointer: *const c_char| match pointer.is_null() {
            true => String::new(),
            // SAFETY: static text, or text that lives until the next call.
            false => unsafe { CStr::from_ptr(pointer) }
                .to_string_lossy()
                .into_owned(),
        };
        // SAFETY: any code is answered; no communicator is asked for the newest error of all.
        let (meaning, more) = unsafe {
            (
                text((self.error_string)(code)),
                text((self.last_error)(std::ptr::null_mut())),
            )
        };
        let more = more.trim();
        Err(EngineError::Nccl {
            action: action.to_owned(),
            problem: match more.is_empty() {
                true => meaning,
                false => format!("{meaning}: {more}"),
            },
        })
    }
}

/// `2.28.9` for 22809.
fn spelled(version: c_int) -> String {
    format!(
        "{}.{}.{}",
        version / 10_000,
        version / 100 % 100,
        version % 100
    )
}

/// Refuses a library that is too old for ranks on cards of their own, or on shared ones.
fn check_version(version: c_int, shares: bool) -> Result<(), EngineError> {
    let oldest = if shares { OLDEST_SHARING } else { OLDEST };
    if version >= oldest {
        return Ok(());
    }
    Err(EngineError::OldNccl {
        version: spelled(version),
        oldest: spelled(oldest),
    })
}

/// This rank's place in the communicator of the run.
pub(crate) struct Nccl {
    communicator: Communicator,
    functions: Functions,
    rank: usize,
    /// Outlives the communicator.
    _context: Arc<Context>,
}

impl Nccl {
    /// Meets the other ranks, which do the same at the same time.
    pub fn connect(context: &Arc<Context>, world: &mut World) -> Result<Self, EngineError> {
        context.bind()?;
        let functions = Functions::load()?;
        let shares = std::env::var(SHARING_VARIABLE).is_ok_and(|value| value == "1");
        check_version(functions.version(), shares)?;
        let mut id = UniqueId([0; ID_BYTES]);
        if world.is_first() {
            // SAFETY: the pointer is to a live identity.
            let code = unsafe { (functions.get_unique_id)(&raw mut id) };
            functions.check("name a communicator", code)?;
        }
        let spelled: String = id.0.iter().map(|byte| format!("{byte:02x}")).collect();
        let named = world.spread(&spelled)?;
        for (byte, digits) in id.0.iter_mut().zip(named.as_bytes().chunks(2)) {
            let digits = std::str::from_utf8(digits).unwrap_or_default();
            *byte = u8::from_str_radix(digits, 16).unwrap_or_default();
        }
        let mut communicator = std::ptr::null_mut();
        let (ranks, rank) = (world.num_ranks() as c_int, world.rank() as c_int);
        // SAFETY: the pointer is live, the identity is that of rank 0, and the context is current.
        let code = unsafe { (functions.init_rank)(&raw mut communicator, ranks, id, rank) };
        functions.check("connect the ranks", code)?;
        Ok(Self {
            communicator,
            functions,
            rank: world.rank(),
            _context: Arc::clone(context),
        })
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Puts exchanges on the stream, all at once. Every rank does the same.
    pub fn exchange(
        &self,
        exchanges: &[Exchange],
        arena: u64,
        stream: &Stream,
    ) -> Result<(), EngineError> {
        // SAFETY: takes nothing.
        let code = unsafe { (self.functions.group_start)() };
        self.functions.check("begin", code)?;
        let begun = exchanges
            .iter()
            .try_for_each(|exchange| self.begin(exchange, arena, stream));
        // SAFETY: takes nothing; what was begun is ended also after an error.
        let code = unsafe { (self.functions.group_end)() };
        begun.and_then(|()| self.functions.check("exchange between ranks", code))
    }

    fn begin(&self, exchange: &Exchange, arena: u64, stream: &Stream) -> Result<(), EngineError> {
        let Self {
            communicator,
            functions,
            ..
        } = self;
        let from = (arena + exchange.from) as *const c_void;
        let to = (arena + exchange.to) as *mut c_void;
        let (count, stream) = (exchange.elements, stream.handle.cast::<c_void>());
        let dtype = data_type(exchange.dtype);
        // SAFETY: both places are inside the arena by the plan, which `check` holds against it;
        // every rank has the same plan; communicator and stream are live.
        let code = unsafe {
            match exchange.kind {
                ExchangeKind::Sum => {
                    (functions.all_reduce)(from, to, count, dtype, SUM, *communicator, stream)
                }
                ExchangeKind::SumAt(root) => {
                    let root = root as c_int;
                    (functions.reduce)(from, to, count, dtype, SUM, root, *communicator, stream)
                }
                ExchangeKind::From(root) => {
                    let root = root as c_int;
                    (functions.broadcast)(from, to, count, dtype, root, *communicator, stream)
                }
            }
        };
        functions.check("exchange between ranks", code)
    }
}

impl Drop for Nccl {
    /// A failure has nobody to be told to.
    fn drop(&mut self) {
        // SAFETY: made by `connect`, and not used any more.
        unsafe { (self.functions.destroy)(self.communicator) };
    }
}

/// NCCL's number for a type.
fn data_type(dtype: DType) -> c_int {
    match dtype {
        DType::U8 => 1,
        DType::I32 => 2,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::Bf16 => 9,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_spelled_as_people_know_them() {
        assert_eq!(spelled(22_809), "2.28.9");
        assert_eq!(spelled(OLDEST_SHARING), "2.30.0");
    }

    /// Where it is not installed, the error says what to install.
    #[test]
    fn a_library_that_is_too_old_is_refused_with_both_versions() {
        assert!(check_version(OLDEST, false).is_ok());
        assert!(check_version(OLDEST_SHARING, true).is_ok());
        let told = check_version(OLDEST - 1, false).unwrap_err().to_string();
        assert!(told.contains(&spelled(OLDEST - 1)) && told.contains(&spelled(OLDEST)));
        let told = check_version(22_809, true).unwrap_err().to_string();
        assert!(told.contains("2.28.9 is too old") && told.contains(&spelled(OLDEST_SHARING)));
        assert!(check_version(22_809, false).is_ok());
    }

    #[test]
    fn a_missing_library_is_named() {
        match Functions::load() {
            Ok(functions) => assert!(functions.version() > 0),
            Err(error) => assert!(error.to_string().contains("libnccl.so.2"), "{error}"),
        }
    }
}
