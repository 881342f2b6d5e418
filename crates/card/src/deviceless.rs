//! cuDNN without a device, in a process of its own: answers the questions of `library/dnn_backend` from the user's own
//! libcudnn, in the mode that NVIDIA documents for ahead-of-time compilation (9.8 and later). A descriptor of the
//! device's properties, read from JSON, stands wherever a handle would.

#![allow(unsafe_code)]

mod functions;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_int};
use std::io::{self, Read, Write};
use std::path::Path;

use crate::library::dnn_backend::{
    CREATE, DESTROY, EXECUTION_PLAN, FINALIZE, GET, PLAN_WORKSPACE, SET, element_bytes,
};
use crate::wave;
use functions::{Descriptor, Functions};

/// The variable with the card's properties in cuDNN's own JSON.
pub const DEVICE_VARIABLE: &str = "CINCH_CARD_CUDNN_DEVICE";

const NOT_INITIALIZED: c_int = 1001;
const BAD_PARAMETER: c_int = 2000;
/// Kinds of descriptors and the attribute that takes the device's properties.
const DEVICE_PROPERTIES: c_int = 38;
const PROPERTIES_JSON: c_int = 2702;
const PROPERTY_OF_KIND: [(c_int, c_int); 3] = [(2, 1307), (4, 204), (5, 407)];
/// A plan's description of itself.
const PLAN_JSON: c_int = 405;
/// A plan's configuration, the engine and the workspace of that, and what an engine says of its behaviour.
const PLAN_CONFIGURATION: c_int = 401;
const CONFIGURATION_ENGINE: c_int = 300;
const CONFIGURATION_WORKSPACE: c_int = 303;
const ENGINE_BEHAVIOUR: c_int = 1305;
const ENGINE: c_int = 2;
const COMPILES_AT_RUN_TIME: c_int = 0;
const TYPE_INT64: c_int = 3;
const TYPE_DESCRIPTOR: c_int = 15;
const TYPE_BEHAVIOUR: c_int = 19;
const TYPE_CHAR: c_int = 24;

/// cuDNN and the card it is asked about.
struct Deviceless {
    functions: Functions,
    properties: Descriptor,
    /// Which descriptors there are, and of which kind. Nothing else is followed.
    kinds: BTreeMap<u64, c_int>,
    /// Workspaces of plans that cuDNN would compile for seconds when they are finalised. Their configurations have told
    /// them before, and only a plan that is asked for something else is finalised.
    uncompiled: BTreeMap<u64, i64>,
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
                uncompiled: BTreeMap::new(),
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
                self.uncompiled.remove(&descriptor);
                // SAFETY: a descriptor that was created and not destroyed.
                Answer::status(unsafe { (self.functions.destroy)(pointer) })
            }
            SET if self.holds(kind, count, &question.array) => {
                // SAFETY: `holds` has made sure of the array's length, and of the descriptors in it.
                let status = unsafe {
                    (self.functions.set)(pointer, name, kind, count, question.array.as_ptr().cast())
                };
                if status == 0 && descriptor_kind == EXECUTION_PLAN && name == PLAN_CONFIGURATION {
                    self.note_uncompiled(descriptor, &question.array);
                }
                Answer::status(status)
            }
            FINALIZE if self.uncompiled.contains_key(&descriptor) => Answer::status(0),
            FINALIZE => Answer::status(self.finalize(pointer, descriptor_kind)),
            GET => {
                if let Some(workspace) = self.uncompiled.remove(&descriptor) {
                    if name == PLAN_WORKSPACE && kind == TYPE_INT64 && question.array.len() == 8 {
                        self.uncompiled.insert(descriptor, workspace);
                        return Answer {
                            status: 0,
                            number: 1,
                            array: workspace.to_le_bytes().to_vec(),
                        };
                    }
                    let status = self.finalize(pointer, descriptor_kind);
                    if status != 0 {
                        return Answer::status(status);
                    }
                }
                self.get(pointer, name, kind, count, &question.array)
            }
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

    /// Notes a plan whose engine says that it compiles at run time, with the workspace that its configuration tells. These
    /// engines are none of those whose workspace hangs on a card's waves.
    fn note_uncompiled(&mut self, plan: u64, configuration: &[u8]) {
        self.uncompiled.remove(&plan);
        let Ok(configuration) = configuration.try_into().map(u64::from_le_bytes) else {
            return;
        };
        let configuration = configuration as Descriptor;
        if self.compiles_at_run_time(configuration)
            && let [Some(workspace)] =
                self.numbers(configuration, CONFIGURATION_WORKSPACE, TYPE_INT64, [0_i64])
        {
            self.uncompiled.insert(plan, workspace);
        }
    }

    fn compiles_at_run_time(&self, configuration: Descriptor) -> bool {
        let mut engine = std::ptr::null_mut();
        // SAFETY: a kind of descriptor that cuDNN has.
        if unsafe { (self.functions.create)(ENGINE, &mut engine) } != 0 {
            return false;
        }
        let [filled] = self.numbers(
            configuration,
            CONFIGURATION_ENGINE,
            TYPE_DESCRIPTOR,
            [engine],
        );
        let behaviour = match filled {
            Some(engine) => {
                self.numbers(engine, ENGINE_BEHAVIOUR, TYPE_BEHAVIOUR, [-1; MOST_NOTES])
            }
            None => [None; MOST_NOTES],
        };
        // SAFETY: the descriptor was created above, and nothing else has it.
        unsafe { (self.functions.destroy)(engine) };
        behaviour.contains(&Some(COMPILES_AT_RUN_TIME))
    }

    /// What a descriptor has under a name, up to `N` of it.
    fn numbers<T: Copy, const N: usize>(
        &self,
        descriptor: Descriptor,
        name: c_int,
        kind: c_int,
        mut array: [T; N],
    ) -> [Option<T>; N] {
        debug_assert_eq!(size_of::<T>(), element_bytes(kind));
        let mut number = 0;
        let pointer = array.as_mut_ptr().cast();
        // SAFETY: the array holds N elements of that kind.
        let status =
            unsafe { (self.functions.get)(descriptor, name, kind, N as i64, &mut number, pointer) };
        let found = if status == 0 { number } else { 0 };
        let mut index = 0;
        array.map(|value| {
            index += 1;
            (index <= found).then_some(value)
        })
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

/// More notes than an engine has: there are six of them.
const MOST_NOTES: usize = 16;

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
