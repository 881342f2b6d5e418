//! The functions of cuDNN that are called, as its library has them.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;

const RTLD_NOW: c_int = 2;

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

pub type Descriptor = *mut c_void;

pub type Create = unsafe extern "C" fn(c_int, *mut Descriptor) -> c_int;
pub type OfDescriptor = unsafe extern "C" fn(Descriptor) -> c_int;
pub type Set = unsafe extern "C" fn(Descriptor, c_int, c_int, i64, *const c_void) -> c_int;
pub type Get = unsafe extern "C" fn(Descriptor, c_int, c_int, i64, *mut i64, *mut c_void) -> c_int;

pub struct Functions {
    pub create: Create,
    pub destroy: OfDescriptor,
    pub set: Set,
    pub finalize: OfDescriptor,
    pub get: Get,
}

impl Functions {
    pub fn load(library: &Path) -> Option<Self> {
        let name = CString::new(library.to_str()?).ok()?;
        // SAFETY: a C string; cuDNN's initialisers run, which is what loading it means.
        let handle = unsafe { dlopen(name.as_ptr(), RTLD_NOW) };
        if handle.is_null() {
            return None;
        }
        let function = |name: &CStr| {
            // SAFETY: the handle is valid, the name a C string.
            let function = unsafe { dlsym(handle, name.as_ptr()) };
            (!function.is_null()).then_some(function)
        };
        // SAFETY: the names belong to these signatures in every version of cuDNN that has them.
        unsafe {
            Some(Self {
                create: std::mem::transmute::<*mut c_void, Create>(function(
                    c"cudnnBackendCreateDescriptor",
                )?),
                destroy: std::mem::transmute::<*mut c_void, OfDescriptor>(function(
                    c"cudnnBackendDestroyDescriptor",
                )?),
                set: std::mem::transmute::<*mut c_void, Set>(function(
                    c"cudnnBackendSetAttribute",
                )?),
                finalize: std::mem::transmute::<*mut c_void, OfDescriptor>(function(
                    c"cudnnBackendFinalize",
                )?),
                get: std::mem::transmute::<*mut c_void, Get>(function(
                    c"cudnnBackendGetAttribute",
                )?),
            })
        }
    }
}
