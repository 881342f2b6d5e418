//! The driver and libraries on the GPU, which say little; and errors of the GPU that are taken for
//! memory and are not.

use super::{Accelerator, Event, Framework, Message, Text};
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
    // The first is NCCL's alone.
    let is_memory = text.has("failedtocudacalloc") || is_nccl && text.has("failedtocudamalloc");
    if !(is_quoted || is_memory) {
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
    if text.has("erroroutofmemoryatline") && text.has("infile") {
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
        "vk_error_out_of_device_memory",
        "erroroutofdevicememory",
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
    let (framework, accelerator) = match *found {
        "vk_error_out_of_device_memory" | "erroroutofdevicememory" => {
            (Framework::Vulkan, Accelerator::Other)
        }
        found if found.starts_with("hip") => (Framework::PyTorch, Accelerator::Amd),
        found if found.starts_with("ur_") || found.starts_with("ze_") => {
            (Framework::PyTorch, Accelerator::Intel)
        }
        found if found.starts_with("acl_") => (Framework::PyTorch, Accelerator::Ascend),
        _ => (Framework::PyTorch, Accelerator::Nvidia),
    };
    let mut message = Message::new(framework, event);
    message.accelerator = accelerator;
    if is_pinned {
        message
            .remarks
            .push("pinned host memory was asked for, not the card's".to_owned());
    }
    Some(message)
}

/// What the driver says to a program that is newer than it.
pub const OLD_DRIVER: &str = "the driver is older than the CUDA that the program was built with, so that the GPU cannot be used at all";

/// What NCCL says of two ranks with one device.
pub const RANKS_ON_ONE_GPU: &str =
    "two ranks were given one GPU, and NCCL asks for one for each rank";

fn not_memory(text: &Text<'_>) -> Option<Message> {
    const IN_NCCL: &str =
        "a call of CUDA failed in NCCL for another reason, which stands in quotation marks";
    const OTHERS: [(&str, Framework, &str); 15] = [
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
            "driverversionisinsufficient",
            Framework::PyTorch,
            OLD_DRIVER,
        ),
        (
            "errornamedsymbolnotfoundatline",
            Framework::BitsAndBytes,
            "the library was not built for this card, or does not find its CUDA",
        ),
        // The one about memory was read before.
        ("cudafailure'", Framework::Nccl, IN_NCCL),
        ("ncclwarncudafailure", Framework::Nccl, IN_NCCL),
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
    // A full /dev/shm is memory.
    if text.has("unabletowritetofile</torch_") {
        return None;
    }
    let (_, framework, what) = OTHERS.iter().find(|(words, _, _)| text.has(words))?;
    if text.is_prose("cudaerror") {
        return None;
    }
    Some(Message::new(*framework, Event::NotMemory(what)))
}
