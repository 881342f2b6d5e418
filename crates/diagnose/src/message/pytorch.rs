//! PyTorch's allocators: the message of every version, on every kind of device, and the one of
//! `cudaMallocAsync`.

use super::{Accelerator, Event, Framework, Holder, Message, Text, count_after};
use crate::frame::Phase;
use crate::size::{after, before, number, place, size, unit};

/// The device whose allocator speaks, as the message begins.
const PREFIXES: [(&str, Accelerator); 9] = [
    ("cudaoutofmemory", Accelerator::Nvidia),
    ("hipoutofmemory", Accelerator::Amd),
    ("xpuoutofmemory", Accelerator::Intel),
    ("npuoutofmemory", Accelerator::Ascend),
    ("musaoutofmemory", Accelerator::Other),
    ("mluoutofmemory", Accelerator::Other),
    ("gcuoutofmemory", Accelerator::Other),
    ("hpuoutofmemory", Accelerator::Other),
    ("cudaoom", Accelerator::Nvidia),
];

pub fn read(text: &Text<'_>) -> Option<Message> {
    unified(text)
        .or_else(|| asynchronous(text))
        .or_else(|| caching(text))
        .or_else(|| named_alone(text))
        .or_else(|| failed_check(text))
}

/// The first line of a notebook's traceback: `OutOfMemoryError    Traceback (most recent call
/// last)`. The message at its end may be missing.
fn named_alone(text: &Text<'_>) -> Option<Message> {
    text.has("outofmemoryerrortraceback(mostrecentcalllast)")
        .then(|| Message::new(Framework::PyTorch, Event::Device))
}

/// Checks inside the allocator that fail only after a request was refused: the driver's library is
/// asked who holds the card, and a segment is taken apart.
fn failed_check(text: &Text<'_>) -> Option<Message> {
    let is_check = text.has("internalassertfailedat") && text.has("cudacachingallocator");
    if !is_check || !text.has_any(&["nvml_success==", "nvmlinit_v2", "!handles_"]) {
        return None;
    }
    let mut message = Message::new(Framework::PyTorch, Event::Device);
    message.remarks.push(
        "the allocator failed in a check of its own that it reaches only after the card refused memory, so that its usual message with figures is missing".to_owned(),
    );
    Some(message)
}

fn caching(text: &Text<'_>) -> Option<Message> {
    let whole = text.squeezed;
    if whole.contains("triedtoallocatemorethan1ebmemory") {
        return Some(Message::new(Framework::PyTorch, Event::AbsurdSize));
    }
    let prefix = PREFIXES
        .iter()
        .find_map(|(prefix, kind)| Some((prefix, whole.find(prefix)?, *kind)));
    let tried = after(whole, "triedtoallocate").map(|found| found.0);
    // A story, not a message: "tried to allocate 51+ GB (OOM!)".
    let is_told = tried.is_some() && whole.contains("oom");
    let (rest, is_error) = match prefix {
        Some((prefix, at, _)) => {
            let is_error = whole[..at].ends_with(':') || whole[..at].ends_with("error");
            (&whole[at + prefix.len()..], is_error)
        }
        None if is_told => (whole, true),
        None => return None,
    };
    let says_more = tried.is_some()
        || rest.starts_with(".triedtoallocate")
        || rest.contains("hasatotalcap")
        || rest.starts_with("after");
    if !says_more && (!is_error || text.is_prose("outofmemory")) {
        let is_short = rest.is_empty() || rest == "." || rest == "!";
        if !is_short || text.is_prose("outofmemory") {
            return None;
        }
    }
    if tried.is_none() && text.is_prose("outofmemory") {
        return None;
    }
    let mut message = Message::new(Framework::PyTorch, Event::Device);
    message.accelerator = prefix.map(|(_, _, kind)| kind).unwrap_or_default();
    // FSDP warns and goes on, with a checkpoint that lacks the tensor.
    if text.has("failedtoclone()tensor") && text.has("state_dict") {
        message.phase = Some(Phase::Saving);
        message
            .remarks
            .push("FSDP warns of it and goes on: the checkpoint lacks this tensor".to_owned());
    }
    message.device = count_after(rest, "gpu")
        .or_else(|| count_after(rest, "(gpu"))
        .and_then(|index| u32::try_from(index).ok());
    let numbers = &mut message.numbers;
    numbers.tried = tried;
    numbers.total = after(rest, "totalcapacityof")
        .or_else(|| after(rest, "totalcapactyof"))
        .map(|found| found.0)
        .or_else(|| before(rest, "totalcapacity"));
    numbers.free = before(rest, "isfree").or_else(|| before(rest, "free;"));
    numbers.allocated = before(rest, "isallocatedbypytorch")
        .or_else(|| before(rest, "alreadyallocated"))
        .or_else(|| {
            after(rest, "after")
                .map(|found| found.0)
                .filter(|_| whole.contains("oomafter"))
        });
    numbers.reserved_unallocated = before(rest, "isreservedbypytorchbutunallocated");
    numbers.reserved = before(rest, "reservedintotalbypytorch").or_else(|| before(rest, "cached)"));
    numbers.private_pools = before(rest, "allocatedinprivatepools");
    numbers.limit = before(rest, "allowed;");
    match (
        numbers.allocated,
        numbers.reserved,
        numbers.reserved_unallocated,
    ) {
        (Some(allocated), None, Some(idle)) => numbers.reserved = Some(allocated + idle),
        (Some(allocated), Some(reserved), None) => {
            // Of one that said "cached", that is what is idle.
            match rest.contains("cached)") {
                true => {
                    numbers.reserved_unallocated = Some(reserved);
                    numbers.reserved = Some(allocated + reserved);
                }
                false => numbers.reserved_unallocated = Some(reserved.saturating_sub(allocated)),
            }
        }
        _ => {}
    }
    holders(rest, &mut message);
    if whole.contains("preemptivelyrejected") || whole.contains("per_process_memory_fractionlimit")
    {
        message.event = Event::Rejected;
        let numbers = &mut message.numbers;
        numbers.tried = numbers
            .tried
            .or_else(|| after(whole, "requestedsize:").map(|found| found.0));
        numbers.limit = numbers
            .limit
            .or_else(|| after(whole, "limit:").map(|found| found.0))
            .or_else(|| after(whole, "memory_limit=").map(|found| found.0));
    }
    Some(message)
}

/// Who holds the card. In a container the process does not find itself in the driver's list, so
/// that its own line reads like that of a stranger: it is the one that holds a little more than
/// the allocator does.
fn holders(text: &str, message: &mut Message) {
    let numbers = &mut message.numbers;
    // In some containers the driver tells 0 for every process: less than the allocator holds
    // is no reading.
    let own = after(text, "thisprocesshas")
        .map(|found| found.0)
        .filter(|own| *own > 0 || numbers.reserved.unwrap_or(0) == 0);
    numbers.process = own;
    let own_is_untold = own.is_none()
        && place(text, "thisprocesshas")
            .is_some_and(|at| is_untold(&text[at + "thisprocesshas".len()..]));
    let mut holders = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find("process") {
        let is_own = rest[..at].ends_with("this");
        rest = &rest[at + "process".len()..];
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let Some(said) = rest[digits..].strip_prefix("has") else {
            continue;
        };
        if is_own {
            continue;
        }
        let bytes = match size(said) {
            Some((bytes, _)) => bytes,
            None if is_untold(said) => 0,
            None => continue,
        };
        let process = rest[..digits].parse().unwrap_or(0);
        holders.push(Holder { process, bytes });
        // More than a card can have is not a list of processes.
        if holders.len() == 256 {
            break;
        }
    }
    let num_untold = holders.iter().filter(|holder| holder.bytes == 0).count();
    if own_is_untold || num_untold > 0 {
        const WHERE: &str = "as under WSL and in some containers";
        message.remarks.push(match num_untold {
            0 | 1 => format!("the driver does not tell what processes hold, {WHERE}"),
            num => format!("{num} other processes are on the card; the driver does not tell what they hold, {WHERE}"),
        });
    }
    if own.is_none() && !own_is_untold {
        let reserved = numbers.reserved.unwrap_or(0);
        let itself = holders
            .iter()
            .enumerate()
            .filter(|(_, holder)| holder.bytes.saturating_add(1 << 25) >= reserved)
            .min_by_key(|(_, holder)| holder.bytes.saturating_sub(reserved))
            .map(|(index, _)| index);
        // Without figures of PyTorch's, only a process alone can be itself.
        let is_known = numbers.reserved.is_some() || holders.len() == 1;
        if let Some(index) = itself.filter(|_| is_known) {
            numbers.process = Some(holders.remove(index).bytes);
        }
    }
    holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
    if holders.iter().any(|holder| holder.bytes > 0) {
        let total = holders
            .iter()
            .fold(0_u64, |sum, holder| sum.saturating_add(holder.bytes));
        numbers.other = Some(total);
    }
    numbers.non_pytorch = numbers
        .process
        .zip(numbers.reserved)
        .map(|(process, reserved)| process.saturating_sub(reserved));
    message.holders = holders;
}

/// Whether a size stands for none: 0, or 2^64 bytes.
fn is_untold(text: &str) -> bool {
    let is_whole = number(text).is_some_and(|(_, rest)| unit(rest).is_some());
    is_whole && size(text).is_none_or(|found| found.0 == 0)
}

/// `backend:cudaMallocAsync`.
fn asynchronous(text: &Text<'_>) -> Option<Message> {
    let whole = text.squeezed;
    let Some(at) = whole.find("wouldexceedallowedmemory") else {
        return shortened(text);
    };
    if text.is_prose("wouldexceed") {
        return None;
    }
    let mut message = Message::new(Framework::PyTorch, Event::Device);
    message.device =
        count_after(whole, "allocationondevice").and_then(|index| u32::try_from(index).ok());
    let rest = &whole[at..];
    let figure = |words: &str| after(rest, words).map(|found| found.0);
    let numbers = &mut message.numbers;
    numbers.allocated = figure("currentlyallocated:");
    numbers.tried = figure("requested:");
    numbers.total = figure("devicelimit:");
    numbers.free = figure("free(accordingtocuda):");
    numbers.limit = figure("memoryfraction):").or_else(|| figure("pytorchlimit:"));
    message
        .remarks
        .push("the allocator is cudaMallocAsync's, of the driver".to_owned());
    if let (Some(limit), Some(total)) = (numbers.limit, numbers.total)
        && limit < total
    {
        message.event = Event::Rejected;
    }
    Some(message)
}

/// The same where a program shows only the first words of it, as ComfyUI does.
fn shortened(text: &Text<'_>) -> Option<Message> {
    let is_error = text.has_any(&[
        "outofmemoryerror:allocationondevice",
        "exceptionmessage:**allocationondevice",
        "exceptionduringprocessing!!!allocationondevice",
    ]);
    is_error.then(|| {
        let mut message = Message::new(Framework::PyTorch, Event::Device);
        message
            .remarks
            .push("the program shows only the beginning of the message".to_owned());
        message
    })
}

/// Apple's GPUs, which share the host's memory.
fn unified(text: &Text<'_>) -> Option<Message> {
    let whole = text.squeezed;
    let at = whole.find("mpsbackendoutofmemory")?;
    let rest = &whole[at..];
    let figure = |words: &str| after(rest, words).map(|found| found.0);
    let mut message = Message::new(Framework::PyTorch, Event::Unified);
    message.accelerator = Accelerator::Apple;
    let numbers = &mut message.numbers;
    numbers.allocated = figure("mpsallocated:");
    numbers.other = figure("otherallocations:");
    numbers.limit = figure("maxallowed:");
    numbers.tried = figure("triedtoallocate");
    if message.is_bare() && text.is_prose("mpsbackend") {
        return None;
    }
    Some(message)
}
