//! Libraries beside the large frameworks, each with words of its own: PaddlePaddle, CuPy, ONNX
//! Runtime, llama.cpp, and programs that call CUDA themselves (TensorRT-LLM).

use super::{Accelerator, Event, Framework, Message, Text, count_after};
use crate::size::{after, before, place};

pub fn read(text: &Text<'_>) -> Option<Message> {
    paddle(text)
        .or_else(|| cupy(text))
        .or_else(|| onnx(text))
        .or_else(|| llama_cpp(text))
        .or_else(|| plain_cuda(text))
}

/// `Cannot allocate 1.25GB memory on GPU 0, 15.70GB memory has been allocated and available memory
/// is only 64.0MB`.
fn paddle(text: &Text<'_>) -> Option<Message> {
    let whole = text.squeezed;
    let rest = &whole[place(whole, "outofmemoryerrorongpu")?..];
    let mut message = Message::new(Framework::Paddle, Event::Device);
    message.device = count_after(rest, "errorongpu").and_then(|index| u32::try_from(index).ok());
    message.numbers.tried = after(rest, "cannotallocate").map(|found| found.0);
    message.numbers.allocated = before(rest, "memoryhasbeenallocated");
    message.numbers.free = after(rest, "availablememoryisonly").map(|found| found.0);
    Some(message)
}

/// `Out of memory allocating 8,589,934,592 bytes (allocated so far: 17,179,869,184 bytes)`.
fn cupy(text: &Text<'_>) -> Option<Message> {
    let whole = text.squeezed;
    let rest = &whole[place(whole, "cupy.cuda.memory.outofmemoryerror")?..];
    let mut message = Message::new(Framework::CuPy, Event::Device);
    message.numbers.tried = grouped(rest, "outofmemoryallocating");
    message.numbers.allocated = grouped(rest, "allocatedsofar:");
    message.numbers.limit = grouped(rest, "limitsetto:");
    Some(message)
}

/// A number with commas after some words.
fn grouped(text: &str, words: &str) -> Option<u64> {
    let rest = &text[place(text, words)? + words.len()..];
    let end = rest
        .find(|letter: char| !letter.is_ascii_digit() && letter != ',')
        .unwrap_or(rest.len());
    rest[..end].replace(',', "").parse().ok()
}

fn onnx(text: &Text<'_>) -> Option<Message> {
    let words = "failedtoallocatememoryforrequestedbufferofsize";
    let mut message = Message::new(Framework::OnnxRuntime, Event::Device);
    message.numbers.tried = Some(count_after(text.squeezed, words)?);
    Some(message)
}

/// `allocating 9216.00 MiB on device 0: cudaMalloc failed: out of memory`, the exact bytes in the
/// line after it; `CUDA error: out of memory` with ggml's own function; and Vulkan's words.
fn llama_cpp(text: &Text<'_>) -> Option<Message> {
    let whole = text.squeezed;
    if !text.has_any(&["ggml", "llama_", "llamarunner"]) {
        return None;
    }
    let is_cuda = text.has_any(&["cudamallocfailed:outofmemory", "cudaerror:outofmemory"]);
    let is_vulkan = text.has_any(&["devicememoryallocationofsize", "erroroutofdevicememory"]);
    if !is_cuda && !is_vulkan {
        return None;
    }
    let mut message = Message::new(Framework::LlamaCpp, Event::Device);
    message.accelerator = match () {
        () if is_vulkan => Accelerator::Other,
        () if text.has("rocm") => Accelerator::Amd,
        () => Accelerator::Nvidia,
    };
    message.numbers.tried = count_after(whole, "bufferofsize")
        .or_else(|| count_after(whole, "devicememoryallocationofsize"))
        .or_else(|| after(whole, "allocating").map(|found| found.0));
    message.device = count_after(whole, "ondevice")
        .or_else(|| count_after(whole, "currentdevice:"))
        .and_then(|index| u32::try_from(index).ok());
    Some(message)
}

/// `cudaMalloc failed: out of memory`, `CUDA runtime error in ::cudaMallocAsync(…): out of memory`.
fn plain_cuda(text: &Text<'_>) -> Option<Message> {
    let whole = text.squeezed;
    let is_failed = text.has("cudamallocfailed:outofmemory");
    let is_error = text.has("cudaruntimeerrorin::cudamalloc")
        && text.has_any(&["):outofmemory", "]:outofmemory"]);
    if !is_failed && !is_error {
        return None;
    }
    let mut message = Message::new(Framework::Cuda, Event::Device);
    message.numbers.tried = after(whole, "allocating").map(|found| found.0);
    message.device = count_after(whole, "ondevice").and_then(|index| u32::try_from(index).ok());
    Some(message)
}
