//! PyTorch's question whether a dispatch mode is on. Its composite ops take other ways where one is, and allocate more:
//! `linear` adds its bias into a new tensor instead of in place. The mode that follows values changes no result, so that
//! it does not count there; one of the script's own does, as it would without a rehearsal. PyTorch's Python side asks
//! the same function in order to call the mode, and hears of all.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_int, c_void};
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};

use super::host;
use super::runtime::exported;

thread_local! {
    /// How many of the modes that are on in this thread follow values.
    static FOLLOWING: Cell<c_int> = const { Cell::new(0) };
}

/// Where the composite ops are.
const OPS: &str = "libtorch_cpu.so";

/// PyTorch's own answers: whether a mode is on, and how many.
struct Own {
    is_enabled: unsafe extern "C" fn() -> bool,
    count: unsafe extern "C" fn() -> i64,
}

const IS_ENABLED: &CStr = c"_ZN3c104impl21dispatch_mode_enabledEv";
const COUNT: &CStr = c"_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv";

fn own() -> Option<&'static Own> {
    static OWN: OnceLock<Option<Own>> = OnceLock::new();
    let find = || {
        let is_enabled = host::function_of(c"libc10.so", IS_ENABLED)?;
        let count = host::function_of(c"libc10.so", COUNT)?;
        // SAFETY: the mangled names say that they take nothing; their results are a bool and a 64-bit integer.
        unsafe {
            Some(Own {
                is_enabled: std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> bool>(
                    is_enabled,
                ),
                count: std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> i64>(count),
            })
        }
    };
    OWN.get_or_init(find).as_ref()
}

/// Whether modes are on besides those that follow values.
pub fn others_are_on(is_enabled: bool, count: i64, following: c_int) -> bool {
    is_enabled && count > i64::from(following)
}

/// Whether code at an address is that of the composite ops. There are some hundred places that ask.
fn is_of_ops(address: usize) -> bool {
    static KNOWN: Mutex<BTreeMap<usize, bool>> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    *known.entry(address).or_insert_with(|| {
        let file = host::path_of(address as *const c_void);
        let name = file.as_deref().and_then(|file| Path::new(file).file_name());
        name.is_some_and(|name| name == OPS)
    })
}

/// The answer to the code at an address.
extern "C" fn answer(caller: usize) -> bool {
    let Some(own) = own() else {
        return false;
    };
    // SAFETY: it takes nothing and looks at this thread's state.
    let is_enabled = unsafe { (own.is_enabled)() };
    let following = FOLLOWING.get();
    if !is_enabled || following == 0 || !is_of_ops(caller) {
        return is_enabled;
    }
    // SAFETY: the same.
    others_are_on(is_enabled, unsafe { (own.count)() }, following)
}

/// `c10::impl::dispatch_mode_enabled`, with the caller's address as an argument.
///
/// # Safety
/// As any function without arguments.
#[cfg(target_arch = "x86_64")]
#[cfg_attr(exported, unsafe(no_mangle))]
#[allow(non_snake_case, unsafe_code)]
#[unsafe(naked)]
pub unsafe extern "C" fn _ZN3c104impl21dispatch_mode_enabledEv() -> bool {
    std::arch::naked_asm!("mov rdi, [rsp]", "jmp {answer}", answer = sym answer)
}

/// `c10::impl::dispatch_mode_enabled`, with the caller's address as an argument.
///
/// # Safety
/// As any function without arguments.
#[cfg(target_arch = "aarch64")]
#[cfg_attr(exported, unsafe(no_mangle))]
#[allow(non_snake_case, unsafe_code)]
#[unsafe(naked)]
pub unsafe extern "C" fn _ZN3c104impl21dispatch_mode_enabledEv() -> bool {
    std::arch::naked_asm!("mov x0, x30", "b {answer}", answer = sym answer)
}

exported! {
    /// Says that a mode that follows values was put on (1) or taken off (-1) in this thread.
    fn cinch_card_following(change: c_int) -> c_int {
        FOLLOWING.set((FOLLOWING.get() + change).max(0));
        FOLLOWING.get()
    }
}
