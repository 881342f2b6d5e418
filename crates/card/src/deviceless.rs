//! cuDNN without a device, in a process of its own: answers the questions of `library/dnn_backend` from the user's own
//! libcudnn, in the mode that NVIDIA documents for ahead-of-time compilation (9.8 and later). A descriptor of the
//! device's properties, read from JSON, stands wherever a handle would.

#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io::{self, Read, Write};
use std::path::Path;

use crate::library::dnn_backend::{
    CREATE, DESTROY, FINALIZE, GET, PLAN_WORKSPACE, SET, element_bytes,
};
use crate::wave;

/// The variable with the card's properties in cuDNN's own JSON.
pub const DEVICE_VARIABLE: &str = "CINCH_CARD_CUDNN_DEVICE";

const RTLD_NOW: c_int = 2;
const NOT_INITIALIZED: c_int = 1001;
const BAD_PARAMETER: c_int = 2000;
/// Kinds of descriptors and the attribute that takes the device's properties.
const DEVICE_PROPERTIES: c_int = 38;
const PROPERTIES_JSON: c_int = 2702;
const PROPERTY_OF_KIND: [(c_int, c_int); 3] = [(2, 1307), (4, 204), (5, 407)];
/// A plan's description of itself.
const PLAN_JSON: c_int = 405;
const TYPE_DESCRIPTOR: c_int = 15;
const TYPE_CHAR: c_int = 24;

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

type Descriptor = *mut c_void;

type Create = unsafe extern "C" fn(c_int, *mut Descriptor) -> c_int;
type OfDescriptor = unsafe extern "C" fn(Descriptor) -> c_int;
type Set = unsafe extern "C" fn(Descriptor, c_int, c_int, i64, *const c_void) -> c_int;
type Get = unsafe extern "C" fn(Descriptor, c_int, c_int, i64, *mut i64, *mut c_void) -> c_int;

/// The functions of cuDNN that are called.
struct Functions {
    create: Create,
    destroy: OfDescriptor,
    set: Set,
    finalize: OfDescriptor,
    get: Get,
}

impl Functions {
    fn load(library: &Path) -> Option<Self> {
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

/// cuDNN and the card it is asked about.
struct Deviceless {
    functions: Functions,
    properties: Descriptor,
    /// Which descriptors there are, and of which kind. Nothing else is followed.
    kinds: BTreeMap<u64, c_int>,
}

struct Answer {
    status: c_int,
    number: i64,
    array: Vec<u8>,
}

impl Answer {
    fn status(status: c_int) -> Self {
        Self {
            status,
            number: 0,
            array: Vec::new(),
        }
    }

    fn write(&self, output: &mut impl Write) -> io::Result<()> {
        output.write_all(&(self.array.len() as u32).to_le_bytes())?;
        output.write_all(&self.status.to_le_bytes())?;
        output.write_all(&self.number.to_le_bytes())?;
        output.write_all(&self.array)?;
        output.flush()
    }
}

impl Deviceless {
    fn new(library: &Path, device: &str) -> Result<Self, c_int> {
        let functions = Functions::load(library).ok_or(NOT_INITIALIZED)?;
        let json = CString::new(device).map_err(|_| BAD_PARAMETER)?;
        let json = json.as_bytes_with_nul();
        let mut properties = std::ptr::null_mut();
        // SAFETY: as NVIDIA documents them; the array has the length that is said.
        let statuses = unsafe {
            [
                (functions.create)(DEVICE_PROPERTIES, &mut properties),
                (functions.set)(
                    properties,
                    PROPERTIES_JSON,
                    TYPE_CHAR,
                    json.len() as i64,
                    json.as_ptr().cast(),
                ),
                (functions.finalize)(properties),
            ]
        };
        match statuses.into_iter().find(|&status| status != 0) {
            Some(status) => Err(status),
            None => Ok(Self {
                functions,
                properties,
                kinds: BTreeMap::new(),
            }),
        }
    }

    fn answer(&mut self, question: &Question) -> Answer {
        let &[first, name, kind, count] = &question.numbers;
        let (name, kind) = (name as c_int, kind as c_int);
        if question.operation == CREATE {
            return self.create(first as c_int);
        }
        let descriptor = first as u64;
        let Some(&descriptor_kind) = self.kinds.get(&descriptor) else {
            return Answer::status(BAD_PARAMETER);
        };
        let pointer = descriptor as Descriptor;
        match question.operation {
            DESTROY => {
                self.kinds.remove(&descriptor);
                // SAFETY: a descriptor that was created and not destroyed.
                Answer::status(unsafe { (self.functions.destroy)(pointer) })
            }
            SET if self.holds(kind, count, &question.array) => {
                // SAFETY: `holds` has made sure of the array's length, and of the descriptors in it.
                Answer::status(unsafe {
                    (self.functions.set)(pointer, name, kind, count, question.array.as_ptr().cast())
                })
            }
            FINALIZE => Answer::status(self.finalize(pointer, descriptor_kind)),
            GET => self.get(pointer, name, kind, count, &question.array),
            _ => Answer::status(BAD_PARAMETER),
        }
    }

    fn create(&mut self, kind: c_int) -> Answer {
        let mut descriptor = std::ptr::null_mut();
        // SAFETY: cuDNN refuses a kind that it does not know.
        let status = unsafe { (self.functions.create)(kind, &mut descriptor) };
        if status == 0 {
            self.kinds.insert(descriptor as u64, kind);
        }
        Answer {
            status,
            number: descriptor as i64,
            array: Vec::new(),
        }
    }

    /// Whether an array has as many elements as is said, and names only descriptors that exist.
    fn holds(&self, kind: c_int, count: i64, array: &[u8]) -> bool {
        let length = usize::try_from(count)
            .ok()
            .and_then(|count| count.checked_mul(element_bytes(kind)));
        length == Some(array.len())
            && (kind != TYPE_DESCRIPTOR
                || array.chunks_exact(8).all(|bytes| {
                    let address = bytes.try_into().map(u64::from_le_bytes);
                    address.is_ok_and(|address| self.kinds.contains_key(&address))
                }))
    }

    fn finalize(&self, descriptor: Descriptor, kind: c_int) -> c_int {
        let property = PROPERTY_OF_KIND.iter().find(|&&(of, _)| of == kind);
        if let Some(&(_, attribute)) = property {
            let array = std::ptr::from_ref(&self.properties).cast();
            // SAFETY: one descriptor, which lives as long as the process.
            let status =
                unsafe { (self.functions.set)(descriptor, attribute, TYPE_DESCRIPTOR, 1, array) };
            if status != 0 {
                return status;
            }
        }
        // SAFETY: a descriptor that was created and not destroyed.
        unsafe { (self.functions.finalize)(descriptor) }
    }

    fn get(
        &self,
        descriptor: Descriptor,
        name: c_int,
        kind: c_int,
        requested: i64,
        given: &[u8],
    ) -> Answer {
        if !given.is_empty() && !self.holds(kind, requested, given) {
            return Answer::status(BAD_PARAMETER);
        }
        let mut array = given.to_vec();
        let mut number = 0;
        let pointer = match array.is_empty() {
            true => std::ptr::null_mut(),
            false => array.as_mut_ptr().cast(),
        };
        // SAFETY: the array holds `requested` elements, or there is none.
        let status = unsafe {
            (self.functions.get)(descriptor, name, kind, requested, &mut number, pointer)
        };
        if name == PLAN_WORKSPACE
            && status == 0
            && let Ok(bytes) = <[u8; 8]>::try_from(array.as_slice())
            && let Some(plan) = self.plan_description(descriptor)
        {
            let without_card = u64::from_le_bytes(bytes);
            array = wave::workspace(&plan, without_card).to_le_bytes().to_vec();
        }
        Answer {
            status,
            number,
            array,
        }
    }

    fn plan_description(&self, plan: Descriptor) -> Option<String> {
        let ask = |requested: i64, array: &mut [u8]| {
            let mut number = 0;
            let pointer = match array.is_empty() {
                true => std::ptr::null_mut(),
                false => array.as_mut_ptr().cast(),
            };
            // SAFETY: the array holds `requested` characters, or there is none.
            let status = unsafe {
                (self.functions.get)(plan, PLAN_JSON, TYPE_CHAR, requested, &mut number, pointer)
            };
            (status == 0).then_some(number)
        };
        let length =
            ask(0, &mut []).filter(|length| (1..=i64::from(MAX_BYTES)).contains(length))?;
        let mut text = vec![0; length as usize];
        ask(length, &mut text)?;
        let text = CStr::from_bytes_until_nul(&text).map_or(text.as_slice(), CStr::to_bytes);
        String::from_utf8(text.to_vec()).ok()
    }
}

/// A question as `library/dnn_backend` writes it: numbers that are missing are zero.
struct Question {
    operation: u32,
    numbers: [i64; 4],
    array: Vec<u8>,
}

/// Longest question that is read.
const MAX_BYTES: u32 = 16 << 20;

impl Question {
    /// `None` at the end of the input.
    fn read(input: &mut impl Read) -> io::Result<Option<Self>> {
        let mut length = [0; 4];
        match input.read_exact(&mut length) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            result => result?,
        }
        let length = u32::from_le_bytes(length);
        if !(4..=MAX_BYTES).contains(&length) {
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        }
        let mut bytes = vec![0; length as usize];
        input.read_exact(&mut bytes)?;
        let (operation, rest) = bytes.split_at(4);
        let operation = u32::from_le_bytes(operation.try_into().unwrap_or_default());
        let count = match operation {
            SET | GET => 4,
            _ => 1,
        };
        let (head, array) = rest.split_at((8 * count).min(rest.len()));
        let mut numbers = [0; 4];
        for (number, bytes) in numbers.iter_mut().zip(head.chunks_exact(8)) {
            *number = i64::from_le_bytes(bytes.try_into().unwrap_or_default());
        }
        Ok(Some(Self {
            operation,
            numbers,
            array: array.to_vec(),
        }))
    }
}

/// Answers questions until there are no more. The first answer, before any question, says whether there will be any.
pub fn serve(
    library: &Path,
    device: &str,
    mut input: impl Read,
    mut output: impl Write,
) -> io::Result<()> {
    let mut deviceless = match Deviceless::new(library, device) {
        Ok(deviceless) => deviceless,
        Err(status) => return Answer::status(status).write(&mut output),
    };
    Answer::status(0).write(&mut output)?;
    while let Some(question) = Question::read(&mut input)? {
        deviceless.answer(&question).write(&mut output)?;
    }
    Ok(())
}
