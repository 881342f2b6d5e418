//! vLLM and SGLang, which take their memory at the start and say when that is not enough.

use super::{Event, Framework, Message, Text};
use crate::size::{after, before, number, size};

pub fn read(text: &Text<'_>) -> Option<Message> {
    startup(text).or_else(|| cache(text))
}

fn cache(text: &Text<'_>) -> Option<Message> {
    let whole = text.squeezed;
    if text.has("notenoughmemory") && text.has("--mem-fraction-static") {
        return Some(Message::new(Framework::Sglang, Event::CacheBlocks));
    }
    // The pool of requests or tokens, whose size was set at the start.
    let is_pool = text.has_any(&[
        "alloc_req_slotsrunsoutofmemory",
        "alloc_token_slotsrunsoutofmemory",
    ]);
    if is_pool || text.has_any(&["prefilloutofmemory.try", "decodeoutofmemory.try"]) {
        return Some(Message::new(Framework::Sglang, Event::Pool));
    }
    let says = text.has_any(&[
        "noavailablememoryforthecacheblocks",
        "largerthanthemaximumnumberoftokensthatcanbestoredinkvcache",
        "largerthantheavailablekvcachememory",
        "kvcacheisneeded",
    ]);
    if !says {
        return None;
    }
    let mut message = Message::new(Framework::Vllm, Event::CacheBlocks);
    message.numbers.tried = before(whole, "kvcacheisneeded");
    message.numbers.free = after(whole, "availablekvcachememory(").map(|found| found.0);
    Some(message)
}

/// `Free memory on device cuda:0 (a/b GiB) on startup is less than desired … (0.92, c GiB)`.
fn startup(text: &Text<'_>) -> Option<Message> {
    let whole = text.squeezed;
    if !whole.contains("onstartupislessthandesiredgpumemory") {
        return None;
    }
    let mut message = Message::new(Framework::Vllm, Event::Startup);
    let device =
        super::count_after(whole, "devicecuda:").or_else(|| super::count_after(whole, "cuda:"));
    message.device = device.and_then(|index| u32::try_from(index).ok());
    let rest = &whole[whole.find("freememoryondevice").unwrap_or(0)..];
    let numbers = &mut message.numbers;
    if let Some((_, pair)) = rest.split_once('(')
        && let Some((free, total)) = pair.split_once('/')
        && let (Some((free, _)), Some((total, unit))) = (number(free), number(total))
        && let Some((bytes, _)) = crate::size::unit(unit)
    {
        numbers.free = Some((free * bytes).round() as u64);
        numbers.total = Some((total * bytes).round() as u64);
    }
    numbers.limit = whole
        .find("utilization(")
        .and_then(|at| whole[at..].split_once(','))
        .and_then(|(_, wanted)| size(wanted))
        .map(|found| found.0);
    if let (Some(total), Some(free)) = (numbers.total, numbers.free) {
        numbers.other = Some(total.saturating_sub(free));
    }
    Some(message)
}
