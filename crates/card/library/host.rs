//! What is needed of the C library: address space, and looking up names.

use std::ffi::{CStr, c_char, c_int, c_void};

pub const PROT_READ_WRITE: c_int = 1 | 2;
const MAP_SHARED: c_int = 1;
const MAP_PRIVATE: c_int = 2;
const MAP_ANONYMOUS: c_int = 0x20;
const MAP_NORESERVE: c_int = 0x4000;
const MADV_DONTNEED: c_int = 4;
const MADV_NOHUGEPAGE: c_int = 15;
const RTLD_LAZY: c_int = 1;
const RTLD_NOLOAD: c_int = 4;

unsafe extern "C" {
    fn mmap(
        address: *mut c_void,
        length: usize,
        protection: c_int,
        flags: c_int,
        file: c_int,
        offset: i64,
    ) -> *mut c_void;
    fn munmap(address: *mut c_void, length: usize) -> c_int;
    fn madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int;
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

fn mapped(address: *mut c_void) -> Option<u64> {
    // `MAP_FAILED` is all ones.
    (address as usize != usize::MAX).then_some(address as u64)
}

/// Address space that costs nothing until it is written to, and then a page at a time.
pub fn reserve(length: u64) -> Option<u64> {
    let flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let start = mapped(unsafe {
        mmap(
            std::ptr::null_mut(),
            length as usize,
            PROT_READ_WRITE,
            flags,
            -1,
            0,
        )
    })?;
    // SAFETY: the range was mapped just now. Large pages would make a byte cost two megabytes.
    unsafe { madvise(start as *mut c_void, length as usize, MADV_NOHUGEPAGE) };
    Some(start)
}

/// Gives back the pages of a range and keeps the range; what is read from it afterwards is zero.
pub fn forget(start: u64, length: u64) {
    // SAFETY: callers pass a part of what `reserve` gave.
    unsafe { madvise(start as *mut c_void, length as usize, MADV_DONTNEED) };
}

pub fn unmap(start: u64, length: u64) {
    // SAFETY: callers pass what `reserve` gave, once.
    unsafe { munmap(start as *mut c_void, length as usize) };
}

/// A file of at least `length` bytes as memory that outlives this process in the file.
pub fn map_file(file: &std::fs::File, length: usize) -> Option<u64> {
    use std::os::fd::AsRawFd;
    // SAFETY: a new mapping; the file was made as long as this.
    mapped(unsafe {
        mmap(
            std::ptr::null_mut(),
            length,
            PROT_READ_WRITE,
            MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    })
}

/// A function of a library that the process has loaded already; nothing is loaded for it.
pub fn function_of(library: &CStr, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: both are C strings; `RTLD_NOLOAD` runs no initialiser.
    let handle = unsafe { dlopen(library.as_ptr(), RTLD_LAZY | RTLD_NOLOAD) };
    if handle.is_null() {
        return None;
    }
    // SAFETY: the handle is valid, the name a C string.
    let function = unsafe { dlsym(handle, name.as_ptr()) };
    (!function.is_null()).then_some(function)
}

/// A function by its name, as the process would find it first: this library's where it has one.
pub fn function(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: a null handle is `RTLD_DEFAULT`; the name is a C string.
    let function = unsafe { dlsym(std::ptr::null_mut(), name.as_ptr()) };
    (!function.is_null()).then_some(function)
}

/// The file that code at an address was loaded from.
pub fn path_of(address: *const c_void) -> Option<String> {
    #[repr(C)]
    struct Info {
        name: *const c_char,
        base: *mut c_void,
        symbol: *const c_char,
        address: *mut c_void,
    }
    unsafe extern "C" {
        fn dladdr(address: *const c_void, info: *mut Info) -> c_int;
    }
    let none = std::ptr::null();
    let mut info = Info {
        name: none,
        base: std::ptr::null_mut(),
        symbol: none,
        address: std::ptr::null_mut(),
    };
    // SAFETY: `dladdr` fills the struct where it returns non-zero.
    if unsafe { dladdr(address, &mut info) } == 0 || info.name.is_null() {
        return None;
    }
    // SAFETY: the name is a C string that lives as long as the library is loaded.
    let name = unsafe { CStr::from_ptr(info.name) };
    name.to_str().ok().map(str::to_owned)
}

/// Writes through a pointer that a caller may leave null.
///
/// # Safety
/// `pointer` is null or valid for a write of `T`.
pub unsafe fn put<T>(pointer: *mut T, value: T) {
    if !pointer.is_null() {
        // SAFETY: not null, and valid by the caller's word. C structs may be packed by their writer.
        unsafe { pointer.write_unaligned(value) };
    }
}
