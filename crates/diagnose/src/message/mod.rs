//! What a message about memory says, framework by framework.
//!
//! A message is matched by its words, never by a version, and without its spaces (see
//! [`crate::size`]), because terminals break lines anywhere.

mod cinch;
mod device;
mod host;
mod library;
mod pytorch;
mod serving;
mod xla;

pub use device::{OLD_DRIVER, RANKS_ON_ONE_GPU};
pub use host::{LOADER_CRASHED, ON_WINDOWS, OPEN_FILES};

use std::cell::OnceCell;

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use crate::frame::Phase;
use crate::size::{place, squeezed};

/// Who printed a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Framework {
    PyTorch,
    Jax,
    TensorFlow,
    Vllm,
    Triton,
    BitsAndBytes,
    Nccl,
    Sglang,
    Paddle,
    CuPy,
    OnnxRuntime,
    /// llama.cpp and what is built on it, whatever drives the GPU.
    LlamaCpp,
    /// A program that calls CUDA itself.
    Cuda,
    Vulkan,
    NumPy,
    Python,
    Linux,
    Slurm,
    Kubernetes,
    Ray,
    Cinch,
}

impl Framework {
    pub fn title(self) -> &'static str {
        match self {
            Self::PyTorch => "PyTorch",
            Self::Jax => "JAX",
            Self::TensorFlow => "TensorFlow",
            Self::Vllm => "vLLM",
            Self::Triton => "Triton",
            Self::BitsAndBytes => "bitsandbytes",
            Self::Nccl => "NCCL",
            Self::Sglang => "SGLang",
            Self::Paddle => "PaddlePaddle",
            Self::CuPy => "CuPy",
            Self::OnnxRuntime => "ONNX Runtime",
            Self::LlamaCpp => "llama.cpp",
            Self::Cuda => "a CUDA program",
            Self::Vulkan => "a Vulkan program",
            Self::NumPy => "NumPy",
            Self::Python => "Python",
            Self::Linux => "Linux",
            Self::Slurm => "Slurm",
            Self::Kubernetes => "Kubernetes",
            Self::Ray => "Ray",
            Self::Cinch => "cinch",
        }
    }
}

/// What kind of device a message is about, as far as it says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Accelerator {
    #[default]
    Nvidia,
    Amd,
    Intel,
    Ascend,
    Apple,
    Tpu,
    /// A GPU that is reached by Vulkan, or of another maker.
    Other,
}

impl Accelerator {
    /// In a sentence.
    pub fn noun(self) -> &'static str {
        match self {
            Self::Tpu => "TPU",
            Self::Ascend => "NPU",
            _ => "GPU",
        }
    }

    /// The command that lists the processes on the device, where its maker has one.
    pub fn holders(self) -> Option<&'static str> {
        match self {
            Self::Nvidia => {
                Some("nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv")
            }
            Self::Amd => Some("rocm-smi --showpids"),
            Self::Intel => Some("xpu-smi ps"),
            Self::Ascend => Some("npu-smi info"),
            Self::Apple | Self::Tpu | Self::Other => None,
        }
    }
}

/// What happened, before anything is concluded from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A framework's allocator could not get device memory.
    Device,
    /// A limit that somebody set was in the way.
    Rejected,
    /// The driver said no, without a figure.
    Driver,
    /// A library could not get its workspace.
    Library(&'static str),
    /// NCCL could not get its buffers.
    Collective,
    /// A request of more bytes than there are: the size itself is wrong.
    AbsurdSize,
    /// Memory of the GPU that vLLM may use is taken by weights.
    CacheBlocks,
    /// A server's pool for requests or tokens is full, while it runs.
    Pool,
    /// Less was free when a server started than it wants.
    Startup,
    /// Unified memory of a Mac.
    Unified,
    HostAllocation,
    /// The kernel, or what watches memory in its place, ended a process.
    HostKilled,
    /// Shared memory between loader workers.
    SharedMemory,
    /// A process ended by signal 9, and nothing says who sent it.
    KilledBySignal,
    /// cinch's own answer.
    DoesNotFit,
    /// It looks like memory and is something else: what.
    NotMemory(&'static str),
}

/// The figures of a message, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Numbers {
    pub tried: Option<u64>,
    pub total: Option<u64>,
    pub free: Option<u64>,
    pub allocated: Option<u64>,
    pub reserved: Option<u64>,
    pub reserved_unallocated: Option<u64>,
    /// The largest free piece.
    pub contiguous: Option<u64>,
    pub limit: Option<u64>,
    /// Of other processes, or of this one beside the framework on a Mac.
    pub other: Option<u64>,
    pub rss: Option<u64>,
    /// All of the card that this process holds.
    pub process: Option<u64>,
    /// What this process holds beside PyTorch's allocator.
    pub non_pytorch: Option<u64>,
    /// Of what is allocated, in private pools of CUDA graphs.
    pub private_pools: Option<u64>,
    /// All that the run needs, where that is known.
    pub needed: Option<u64>,
    /// What the planner or the replay computes for this run.
    pub predicted: Option<u64>,
}

impl Numbers {
    /// Every figure by its name: those that each failure has, and those that only some do.
    pub fn named(&self) -> [(&'static str, Option<u64>, bool); 15] {
        [
            ("tried_bytes", self.tried, true),
            ("total_bytes", self.total, true),
            ("free_bytes", self.free, true),
            ("allocated_bytes", self.allocated, true),
            ("reserved_bytes", self.reserved, true),
            (
                "reserved_unallocated_bytes",
                self.reserved_unallocated,
                true,
            ),
            ("limit_bytes", self.limit, true),
            ("other_bytes", self.other, true),
            ("rss_bytes", self.rss, true),
            ("contiguous_bytes", self.contiguous, false),
            ("process_bytes", self.process, false),
            ("non_pytorch_bytes", self.non_pytorch, false),
            ("private_pools_bytes", self.private_pools, false),
            ("needed_bytes", self.needed, false),
            ("predicted_bytes", self.predicted, false),
        ]
    }

    pub fn is_empty(&self) -> bool {
        self.named().iter().all(|(_, value, _)| value.is_none())
    }
}

impl Serialize for Numbers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (name, value, always) in self.named() {
            if always || value.is_some() {
                map.serialize_entry(name, &value)?;
            }
        }
        map.end()
    }
}

/// A process that holds memory of the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    pub process: u64,
    /// 0 where the driver does not tell.
    pub bytes: u64,
}

/// A change that cinch itself printed with what the run takes then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnChange {
    pub change: String,
    pub saves: u64,
}

/// A message as it was understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub framework: Framework,
    pub event: Event,
    pub numbers: Numbers,
    pub accelerator: Accelerator,
    /// The number of the device, where the message has it.
    pub device: Option<u32>,
    /// What the run was doing, where the message itself says so.
    pub phase: Option<Phase>,
    /// Other processes on the card, the largest first.
    pub holders: Vec<Holder>,
    pub own_changes: Vec<OwnChange>,
    /// More that the message says, in words.
    pub remarks: Vec<String>,
}

impl Message {
    pub(crate) fn new(framework: Framework, event: Event) -> Self {
        Self {
            framework,
            event,
            numbers: Numbers::default(),
            accelerator: Accelerator::default(),
            device: None,
            phase: None,
            holders: Vec::new(),
            own_changes: Vec::new(),
            remarks: Vec::new(),
        }
    }

    /// Reads a message with the lines after it that may belong to it; nothing where it is only
    /// about memory, as a hint or a comment is.
    pub fn read(text: &str) -> Option<Message> {
        let squeezed = squeezed(text);
        let readers: [fn(&Text<'_>) -> Option<Message>; 7] = [
            cinch::read,
            serving::read,
            library::read,
            pytorch::read,
            xla::read,
            device::read,
            host::read,
        ];
        let text = Text {
            lines: text,
            squeezed: &squeezed,
            first: OnceCell::new(),
        };
        readers.iter().find_map(|read| read(&text))
    }

    /// Whether somebody else is known to hold memory of the card.
    pub fn names_a_holder(&self) -> bool {
        self.holders.iter().any(|holder| holder.bytes > 0)
    }

    /// Whether nothing in it is a figure, and it says less than another message of the same
    /// failure may.
    pub fn is_bare(&self) -> bool {
        self.numbers.is_empty()
    }
}

/// A message as it was printed, and without spaces.
struct Text<'a> {
    lines: &'a str,
    squeezed: &'a str,
    /// Its first line without spaces, where somebody has asked for it.
    first: OnceCell<String>,
}

impl Text<'_> {
    fn has(&self, words: &str) -> bool {
        place(self.squeezed, words).is_some()
    }

    fn has_any(&self, words: &[&str]) -> bool {
        words.iter().any(|words| self.has(words))
    }

    /// Whether what stands before some words makes a hint, a comment or code of them.
    fn is_prose(&self, words: &str) -> bool {
        let first = self
            .first
            .get_or_init(|| squeezed(self.lines.lines().next().unwrap_or_default()));
        let before = match place(first, words) {
            Some(at) => &first[..at],
            None => first.as_str(),
        };
        const HINTS: [&str; 28] = [
            "ifyou",
            "avoid",
            "prevent",
            "incaseof",
            "resolve",
            "maycause",
            "mightcause",
            "cancause",
            "couldcause",
            "willcause",
            "leadto",
            "leadsto",
            "resultin",
            "causing",
            "causes",
            "except",
            "whenyou",
            "helps",
            "guide",
            "troubleshoot",
            "likely",
            "raise",
            "#",
            "assert",
            "catch",
            "torunout",
            "without",
            "mayrun",
        ];
        HINTS.iter().any(|hint| place(before, hint).is_some())
    }
}

/// The whole number after some words.
fn count_after(text: &str, words: &str) -> Option<u64> {
    let rest = &text[place(text, words)? + words.len()..];
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    rest[..digits].parse().ok()
}
