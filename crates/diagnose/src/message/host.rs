//! Host memory: what could not be allocated, and who was killed for it.

use super::{Event, Framework, Message, Text};
use crate::size::{after, before};

/// What the words of the allocator tell of the system.
pub const ON_WINDOWS: &str =
    "so it says on Windows, where the paging file bounds what all processes may ask for";

/// What stops a loader that keeps files open.
pub const OPEN_FILES: &str =
    "the process may not open more files: tensors that workers pass on are files";

/// What a worker that ended by such a signal tells.
pub const LOADER_CRASHED: &str =
    "a loader worker crashed in native code, of a decoder or another library";

pub fn read(text: &Text<'_>) -> Option<Message> {
    loader(text)
        .or_else(|| kernel(text))
        .or_else(|| watched(text))
        .or_else(|| allocation(text))
        .or_else(|| signal(text))
}

fn allocation(text: &Text<'_>) -> Option<Message> {
    let whole = text.squeezed;
    let figure = |words: &str| after(whole, words).map(|found| found.0);
    // The allocator of every version: "$ Torch: not enough memory: you tried to allocate 17GB.",
    // "posix_memalign(…) == 0. 12 vs 0", where 12 is the kernel's "cannot allocate".
    let is_refused = text.has_any(&["defaultcpuallocator", "alloc_cpu"])
        && text.has_any(&["can'tallocate", "notenoughmemory"]);
    let is_old = text.has("notenoughmemory:youtriedtoallocate")
        || text.has("posix_memalign(") && text.has("12vs0");
    if is_refused || is_old {
        let mut message = Message::new(Framework::PyTorch, Event::HostAllocation);
        message.numbers.tried = figure("youtriedtoallocate");
        // Where posix_memalign is not, the message names no error of the kernel.
        let is_windows = text.has("data.defaultcpuallocator:notenoughmemory");
        if is_windows {
            message.remarks.push(ON_WINDOWS.to_owned());
        }
        return Some(message);
    }
    if text.has("unabletoallocate") && text.has_any(&["foranarraywithshape", "arraymemoryerror"]) {
        let mut message = Message::new(Framework::NumPy, Event::HostAllocation);
        message.numbers.tried = figure("unabletoallocate");
        return Some(message);
    }
    let is_python =
        whole.starts_with("memoryerror") || text.has(":memoryerror:") || text.has("\nmemoryerror");
    let is_bad = text.has("std::bad_alloc")
        && text.has_any(&["terminatecalled", "what()", "memoryerror", "error:"]);
    let is_refused = text.has_any(&[
        "[errno12]cannotallocatememory",
        "oserror:[errno12]",
        "fork:cannotallocatememory",
        "oserror:cannotallocatememory",
        "unabletommap",
        "mmap:cannotallocatememory",
        "thepagingfileistoosmall",
    ]);
    let is_found = is_python && !text.is_prose("memoryerror") || is_bad || is_refused;
    is_found.then(|| {
        let mut message = Message::new(Framework::Python, Event::HostAllocation);
        if text.has("thepagingfileistoosmall") {
            message.remarks.push(ON_WINDOWS.to_owned());
        }
        message
    })
}

/// The kernel's own lines: `Out of memory: Killed process 123 (python) total-vm:…kB, anon-rss:…kB`.
fn kernel(text: &Text<'_>) -> Option<Message> {
    let whole = text.squeezed;
    let killed = whole
        .find("killedprocess")
        .or_else(|| whole.find("killprocess"));
    let is_group = text.has_any(&["memorycgroupoutofmemory", "constraint_memcg"]);
    let is_kernel =
        killed.is_some() && text.has("outofmemory") || text.has("oom-kill:constraint") || is_group;
    if !is_kernel {
        return None;
    }
    let mut message = Message::new(Framework::Linux, Event::HostKilled);
    let rest = &whole[killed.unwrap_or(0)..];
    let parts = ["anon-rss:", "file-rss:", "shmem-rss:"]
        .map(|words| after(rest, words).map(|found| found.0));
    if parts.iter().any(Option::is_some) {
        message.numbers.rss = Some(parts.iter().flatten().sum());
    }
    // The group's own report stands beside it: usage 16777216kB, limit 16777216kB.
    message.numbers.limit = after(whole, "limit")
        .map(|found| found.0)
        .filter(|_| whole.contains("usage"));
    if let Some(name) = rest
        .split_once('(')
        .and_then(|(_, after)| after.split_once(')'))
    {
        message
            .remarks
            .push(format!("the process was called {}", shortened(name.0)));
    }
    message.remarks.push(
        match is_group {
            true => "a limit of its group (container, job) was reached, not that of the machine",
            false => "the whole machine had no memory left",
        }
        .to_owned(),
    );
    Some(message)
}

fn shortened(name: &str) -> String {
    name.chars().take(40).collect()
}

/// Slurm, Kubernetes and Ray, which watch memory themselves.
fn watched(text: &Text<'_>) -> Option<Message> {
    let whole = text.squeezed;
    let is_slurm = text.has("slurmstepd") || text.has("srun:error");
    if is_slurm
        && text.has_any(&[
            "oom_kill",
            "oom-kill",
            "exceededjobmemorylimit",
            "exceededstepmemorylimit",
            "out-of-memory",
            "outofmemory",
        ])
    {
        let mut message = Message::new(Framework::Slurm, Event::HostKilled);
        // Step 1.0 exceeded memory limit (17825792 > 16777216), being killed.
        message.numbers.limit =
            before(whole, "memorylimit").or_else(|| after(whole, ">").map(|found| found.0));
        return Some(message);
    }
    if text.has("oomkilled") {
        return Some(Message::new(Framework::Kubernetes, Event::HostKilled));
    }
    if text.has("rayoutofmemoryerror") {
        // More than 95% of the memory on node n3 is used (61.1 / 62.5 GB).
        let mut message = Message::new(Framework::Ray, Event::HostKilled);
        let rest = whole.split_once("isused(").map(|(_, rest)| rest);
        message.numbers.total = rest.and_then(|rest| after(rest, "/")).map(|found| found.0);
        return Some(message);
    }
    if text.has_any(&[
        "killedduetomemorypressure",
        "noderunninglowonmemory",
        "ray.exceptions.outofmemoryerror",
        "exceedsthememoryusagethreshold",
    ]) {
        let mut message = Message::new(Framework::Ray, Event::HostKilled);
        message.numbers.rss = after(whole, "memoryused=").map(|found| found.0);
        let node = whole.find("wasrunningwas").map(|at| &whole[at..]);
        message.numbers.total = node.and_then(|node| after(node, "/")).map(|found| found.0);
        return Some(message);
    }
    None
}

fn loader(text: &Text<'_>) -> Option<Message> {
    // A tensor on its way between processes is a file in /dev/shm.
    if text.has("unabletowritetofile</torch_") {
        return Some(Message::new(Framework::PyTorch, Event::SharedMemory));
    }
    if text.has("failedtoextend/dev/shm/nccl") {
        let mut message = Message::new(Framework::Nccl, Event::SharedMemory);
        let rest = text
            .squeezed
            .split_once("/dev/shm/nccl")
            .map(|(_, rest)| rest);
        message.numbers.tried = rest.and_then(|rest| after(rest, "to")).map(|found| found.0);
        return Some(message);
    }
    if text.has("toomanyopenfiles") {
        return Some(Message::new(
            Framework::PyTorch,
            Event::NotMemory(OPEN_FILES),
        ));
    }
    let is_loader = text.has("dataloaderworker") || text.has("encounteredinworker");
    if !is_loader {
        return None;
    }
    if text.has_any(&["buserror", "outofsharedmemory", "insufficientsharedmemory"]) {
        return Some(Message::new(Framework::PyTorch, Event::SharedMemory));
    }
    // A signal that is no kill by the kernel: a decoder or a library failed.
    let crashed = [
        "segmentationfault",
        "aborted",
        "floatingpointexception",
        "illegalinstruction",
    ]
    .iter()
    .any(|signal| text.has(&format!("killedbysignal:{signal}")));
    if crashed {
        return Some(Message::new(
            Framework::PyTorch,
            Event::NotMemory(LOADER_CRASHED),
        ));
    }
    text.has("killedbysignal:killed").then(|| {
        let mut message = Message::new(Framework::PyTorch, Event::HostKilled);
        message
            .remarks
            .push("a worker of the DataLoader was killed".to_owned());
        message
    })
}

/// Signal 9 and nothing more.
fn signal(text: &Text<'_>) -> Option<Message> {
    let words = [
        "exitcode137",
        "code137",
        "status137",
        "exitcode:-9",
        "exitcode-9",
        "exitcode=-9",
        "returncode=-9",
        "returncode-9",
        "(exitcode:137)",
        "exited137",
        "diedwith<signals.sigkill:9>",
        "signal9(sigkill)",
        "exitsignal:sigkill",
        "killedbysignal9",
        "killedbysigkill",
        "(sigkill)",
    ];
    let line = text.lines.lines().next().unwrap_or_default();
    // As shells say it: "Killed", "run.sh: line 3: 123 Killed  python train.py", "[1]+  Killed".
    let is_shell = line.trim() == "Killed"
        || line.contains(" Killed ")
            && (line.contains(": line ") || line.trim_start().starts_with('['));
    (is_shell || text.has_any(&words))
        .then(|| Message::new(Framework::Linux, Event::KilledBySignal))
}
