//! The driver and libraries on the GPU, which say little; and errors of the GPU that are taken for
//! memory and are not.

use super::{Event, Framework, Message, Text};
use crate::size::after;

pub fn read(text: &Text<'_>) -> Option<Message> {
    collective(text)
        .or_else(|| library(text))
        .or_else(|| driver(text))
        .or_else(|| not_memory(text))
}

fn collective(text: &Text<'_>) -> Option<Message> {
    // The quotation marks are NCCL's own.
    let is_quoted = text.has("cudafailure") && text.has("'outofmemory'");
    let is_nccl = text.has_any(&[
        "ncclwarn",
        "ncclerror",
        "ncclunhandledcudaerror",
        "rcclwarn",
    ]);
    let is_memory = text.has_any(&["failedtocudacalloc", "failedtocudamalloc"]);
    if !(is_quoted || is_nccl && is_memory) {
        return None;
    }
    let mut message = Message::new(Framework::Nccl, Event::Collective);
    let whole = text.squeezed;
    message.numbers.tried = [
        "failedtocudacallocasync",
        "failedtocudacalloc",
        "failedtocudamalloc",
    ]
    .iter()
    .find_map(|words| after(whole, words))
    .map(|found| found.0);
    Some(message)
}

fn library(text: &Text<'_>) -> Option<Message> {
    const STATES: [(&str, &str); 9] = [
        ("cublas_status_alloc_failed", "cuBLAS"),
        ("cublas_status_not_initialized", "cuBLAS"),
        ("cudnn_status_alloc_failed", "cuDNN"),
        (
            "cudnn_status_internal_error_device_allocation_failed",
            "cuDNN",
        ),
        ("cusolver_status_alloc_failed", "cuSOLVER"),
        ("cusparse_status_alloc_failed", "cuSPARSE"),
        ("cufft_alloc_failed", "cuFFT"),
        ("hipblas_status_alloc_failed", "hipBLAS"),
        ("miopenstatusallocfailed", "MIOpen"),
    ];
    if text.has("erroroutofmemoryatline") && text.has(".cu") {
        return Some(Message::new(
            Framework::BitsAndBytes,
            Event::Library("bitsandbytes"),
        ));
    }
    let (_, name) = STATES.iter().find(|(state, _)| text.has(state))?;
    let mut message = Message::new(Framework::PyTorch, Event::Library(name));
    if text.has("not_initialized") {
        message.remarks.push(
            "the library could not be started, which mostly means that no memory was left for its handle".to_owned(),
        );
    }
    Some(message)
}

fn driver(text: &Text<'_>) -> Option<Message> {
    let words = [
        "cudaerror:outofmemory",
        "hiperror:outofmemory",
        "cudaerror(2):outofmemory",
        "cuda_error_out_of_memory",
        "cudaerrormemoryallocation",
        "hiperroroutofmemory",
        "cudaruntimeerror(2):outofmemory",
        "cudaruntimeerror:outofmemory",
        "cudadriverror:outofmemory",
        "cudadrivererror:outofmemory",
        "ur_result_error_out_of_device_memory",
        "ze_result_error_out_of_device_memory",
        "acl_error_rt_memory_allocation",
    ];
    let found = words.iter().find(|words| text.has(words))?;
    if text.is_prose(found) {
        return None;
    }
    let is_pinned = text.has_any(&[
        "cudahostalloc",
        "pin_memory",
        "cachinghostallocator",
        "cudahostregister",
    ]);
    let event = match is_pinned {
        true => Event::HostAllocation,
        false => Event::Driver,
    };
    let mut message = Message::new(Framework::PyTorch, event);
    if is_pinned {
        message
            .remarks
            .push("pinned host memory was asked for, not the card's".to_owned());
    }
    Some(message)
}

/// What NCCL says of two ranks with one device.
pub const RANKS_ON_ONE_GPU: &str =
    "two ranks were given one GPU, and NCCL asks for one for each rank";

fn not_memory(text: &Text<'_>) -> Option<Message> {
    const OTHERS: [(&str, Framework, &str); 11] = [
        (
            "outofresource:sharedmemory",
            Framework::Triton,
            "a kernel's shared memory on the chip, which is not the card's memory: smaller blocks or fewer stages",
        ),
        (
            "outofresource:threads",
            Framework::Triton,
            "a kernel asked for more threads than a block may have",
        ),
        (
            "outofresource:tensormemory",
            Framework::Triton,
            "a kernel's tensor memory on the chip, which is not the card's memory: smaller blocks or fewer stages",
        ),
        (
            "anillegalmemoryaccesswasencountered",
            Framework::PyTorch,
            "a kernel read or wrote outside its tensors: a wrong index or a fault of a kernel, not a lack of memory",
        ),
        (
            "device-sideasserttriggered",
            Framework::PyTorch,
            "an index was outside its range, mostly a token or a label outside the vocabulary",
        ),
        (
            "misalignedaddress",
            Framework::PyTorch,
            "a kernel was given a pointer that is not aligned",
        ),
        (
            "watchdogcaughtcollectiveoperationtimeout",
            Framework::Nccl,
            "a collective operation waited for a rank that did not come",
        ),
        ("duplicategpudetected", Framework::Nccl, RANKS_ON_ONE_GPU),
        (
            "nospaceleftondevice",
            Framework::Linux,
            "a disk or a file system is full",
        ),
        (
            "unspecifiedlaunchfailure",
            Framework::PyTorch,
            "a kernel failed while it ran",
        ),
        (
            "nokernelimageisavailable",
            Framework::PyTorch,
            "the program was not built for this card",
        ),
    ];
    let (_, framework, what) = OTHERS.iter().find(|(words, _, _)| text.has(words))?;
    if text.is_prose("cudaerror") {
        return None;
    }
    Some(Message::new(*framework, Event::NotMemory(what)))
}
