//! JAX and TensorFlow, which share XLA and its allocators.

use super::{Accelerator, Event, Framework, Message, Text, count_after};
use crate::size::{after, before};

pub fn read(text: &Text<'_>) -> Option<Message> {
    tensor(text)
        .or_else(|| exhausted(text))
        .or_else(|| from_device(text))
}

/// Which of the two it is: TensorFlow says so.
fn framework(text: &Text<'_>) -> Framework {
    match text.has_any(&[
        "tensorflow",
        "/job:",
        "resourceexhaustederror",
        "graphexecution",
    ]) && !text.has("jax")
    {
        true => Framework::TensorFlow,
        false => Framework::Jax,
    }
}

/// `OOM when allocating tensor with shape[32,1024] and type float on /job:…/device:GPU:0`.
fn tensor(text: &Text<'_>) -> Option<Message> {
    let whole = text.squeezed;
    let rest = &whole[whole.find("oomwhenallocatingtensorwithshape[")?..];
    let on_host = rest.contains("device:cpu") || rest.contains("byallocatorcpu");
    let event = match on_host {
        true => Event::HostAllocation,
        false => Event::Device,
    };
    let mut message = Message::new(Framework::TensorFlow, event);
    message.device = count_after(rest, "device:gpu:").and_then(|index| u32::try_from(index).ok());
    let inside = rest
        .split_once('[')
        .and_then(|(_, after)| after.split_once(']'));
    let is_typed = rest.contains("]andtype");
    if !is_typed {
        message
            .remarks
            .push("the tensor's type is not told, and taken for float".to_owned());
    }
    message.numbers.tried = inside.and_then(|(shape, after)| {
        let mut bytes = match is_typed {
            true => width(&after[after.find("type")? + "type".len()..])?,
            false => 4,
        };
        for size in shape.split(',') {
            bytes = bytes.checked_mul(size.parse().ok()?)?;
        }
        Some(bytes)
    });
    let figure = |words: &str| {
        after(rest, words)
            .map(|found| found.0)
            .or_else(|| count_after(rest, words))
    };
    message.numbers.limit = figure("limit:");
    message.numbers.allocated = figure("inuse:");
    Some(message)
}

/// Bytes of an element of one of TensorFlow's types.
fn width(kind: &str) -> Option<u64> {
    const TYPES: [(&str, u64); 12] = [
        ("double", 8),
        ("float16", 2),
        ("float", 4),
        ("bfloat16", 2),
        ("half", 2),
        ("int64", 8),
        ("int32", 4),
        ("int16", 2),
        ("int8", 1),
        ("uint8", 1),
        ("bool", 1),
        ("complex64", 8),
    ];
    let mut types = TYPES.iter();
    types
        .find(|(name, _)| kind.starts_with(name))
        .map(|(_, bytes)| *bytes)
}

fn exhausted(text: &Text<'_>) -> Option<Message> {
    let whole = text.squeezed;
    let is_exhausted = text.has_any(&["resource_exhausted", "resourceexhausted"]);
    if is_exhausted && text.has_any(&["receivedmessagelargerthanmax", "sentmessagelargerthanmax"]) {
        return Some(Message::new(
            Framework::Python,
            Event::NotMemory("a message was larger than gRPC's limit"),
        ));
    }
    if is_exhausted && text.has_any(&["quota", "ratelimit", "toomanyrequests"]) {
        return Some(Message::new(
            Framework::Python,
            Event::NotMemory("a service's quota was used up"),
        ));
    }
    if text.has("ranoutofmemoryinmemoryspacevmem") {
        return Some(Message::new(
            Framework::Jax,
            Event::NotMemory(
                "a kernel's memory on the chip of a TPU, which is not the device's memory: smaller blocks",
            ),
        ));
    }
    if text.has("thisisnotafailure") || text.has("notafailure,butmaymean") {
        return None;
    }
    let tried = [
        "outofmemorywhiletryingtoallocate",
        "outofmemoryallocating",
        "outofmemorytryingtoallocate",
        "failedtoallocaterequestfor",
        "attemptingtoreserve",
        "attemptingtoallocate",
    ]
    .iter()
    .find_map(|words| after(whole, words))
    .map(|found| found.0);
    let is_tpu = whole.contains("ranoutofmemoryinmemoryspace");
    let ran_out = whole.contains("ranoutofmemorytryingtoallocate");
    if tried.is_none() && !is_tpu && !(is_exhausted && whole.contains("outofmemory")) {
        return None;
    }
    if !is_exhausted && !is_tpu && !ran_out {
        return None;
    }
    let mut message = Message::new(framework(text), Event::Device);
    message.device =
        count_after(whole, "deviceordinal").and_then(|index| u32::try_from(index).ok());
    let numbers = &mut message.numbers;
    numbers.tried = tried;
    numbers.needed = after(whole, "totalallocation:").map(|found| found.0);
    if is_tpu {
        numbers.needed = after(whole, "used").map(|found| found.0);
        numbers.total = after(whole, "of")
            .map(|found| found.0)
            .filter(|_| whole.contains("hbm"));
        numbers.tried = None;
    }
    numbers.free = before(whole, "free").filter(|_| whole.contains("thereare"));
    // A TPU gives a program one piece: "There are 6.78G free, 0B reserved, and 3.33G reservable."
    numbers.contiguous = before(whole, "reservable");
    numbers.total = numbers
        .total
        .or_else(|| after(whole, "hbmcapacity").map(|found| found.0));
    if is_tpu || whole.contains("hbm") || numbers.contiguous.is_some() {
        message.accelerator = Accelerator::Tpu;
    }
    Some(message)
}

/// `failed to allocate 890.06M (933298432 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY`.
fn from_device(text: &Text<'_>) -> Option<Message> {
    let whole = text.squeezed;
    let is_driver = text.has_any(&[
        "cuda_error_out_of_memory",
        "hip_error_outofmemory",
        "hiperroroutofmemory",
    ]);
    let at = whole.find("failedtoallocate").filter(|_| is_driver)?;
    let rest = &whole[at..];
    let mut message = Message::new(framework(text), Event::Device);
    message.numbers.tried = after(rest, "(")
        .or_else(|| after(rest, "failedtoallocate"))
        .map(|found| found.0);
    Some(message)
}
