//! The words that make a line worth reading, found in one pass.
//!
//! Most lines of a log have none of them, and reading a gigabyte is mostly this pass.

use std::sync::LazyLock;

use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};

/// What a word announces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// Begins a message about memory.
    Failure,
    /// Part of one, or the only part that was kept of one.
    Figure,
    Traceback,
    /// A frame of a traceback: `File "…"`, `….py:12`, or `….py in`.
    Frame,
    /// Memory in a step line, by what is measured.
    Memory(Measure),
    Step,
    Loss,
    Length,
    /// A progress bar of tqdm.
    Progress,
    /// An evaluation begins.
    Evaluation,
    Setting(Known),
    /// A model's folder in the Hugging Face cache.
    CachedModel,
    /// Settings of the allocator.
    AllocConf,
    Program(&'static str),
}

/// What a step line measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Measure {
    Allocated,
    Reserved,
    Used,
    Host,
}

/// A setting that logs tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Known {
    Model,
    Batch,
    Accumulation,
    Length,
    Checkpointing,
    Optimizer,
    Bf16,
    Fp16,
    FourBit,
    EightBit,
    LoraRank,
    Attention,
    /// Parameters that are trained.
    Trainable,
}

impl Known {
    /// As Hugging Face's TrainingArguments and what people give beside them call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Model => "model_name_or_path",
            Self::Batch => "per_device_train_batch_size",
            Self::Accumulation => "gradient_accumulation_steps",
            Self::Length => "max_seq_length",
            Self::Checkpointing => "gradient_checkpointing",
            Self::Optimizer => "optim",
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
            Self::FourBit => "load_in_4bit",
            Self::EightBit => "load_in_8bit",
            Self::LoraRank => "lora_r",
            Self::Attention => "attn_implementation",
            Self::Trainable => "trainable_parameters",
        }
    }
}

#[rustfmt::skip]
const WORDS: &[(&str, Word)] = {
    use Known as K;
    use Measure as M;
    use Word as W;
    &[
        ("out of memory", W::Failure),
        ("allocation on device", W::Failure),
        ("would exceed allowed memory", W::Failure),
        ("cuda oom", W::Failure),
        ("_status_alloc_failed", W::Failure),
        ("miopenstatusallocfailed", W::Failure),
        ("cufft_alloc_failed", W::Failure),
        ("cublas_status_not_initialized", W::Failure),
        ("cudaerrormemoryallocation", W::Failure),
        ("error_out_of_memory", W::Failure),
        ("error_outofmemory", W::Failure),
        ("erroroutofmemory", W::Failure),
        ("error_out_of_device_memory", W::Failure),
        ("resource_exhausted", W::Failure),
        ("resource exhausted", W::Failure),
        ("oom when allocating tensor", W::Failure),
        ("ran out of memory", W::Failure),
        ("no available memory for the cache blocks", W::Failure),
        ("on startup is less than desired gpu memory", W::Failure),
        ("tokens that can be stored in kv cache", W::Failure),
        ("kv cache is needed", W::Failure),
        ("out of resource", W::Failure),
        ("defaultcpuallocator", W::Failure),
        ("unable to allocate", W::Failure),
        ("memoryerror", W::Failure),
        ("bad_alloc", W::Failure),
        ("cannot allocate memory", W::Failure),
        ("paging file is too small", W::Failure),
        ("mem-fraction-static", W::Failure),
        ("unable to mmap", W::Failure),
        ("unable to write to file </torch_", W::Failure),
        ("too many open files", W::Failure),
        ("posix_memalign", W::Failure),
        ("not enough memory: you tried", W::Failure),
        ("failed to extend /dev/shm/", W::Failure),
        ("internal assert failed at", W::Failure),
        ("driver version is insufficient", W::Failure),
        ("named symbol not found", W::Failure),
        ("cuda failure", W::Failure),
        ("runs out of memory", W::Failure),
        ("exceeds the memory usage threshold", W::Failure),
        ("of the memory on node", W::Failure),
        ("erroroutofdevicememory", W::Failure),
        ("device memory allocation of size", W::Failure),
        // The first line of a notebook's traceback, in two columns.
        ("outofmemoryerror  ", W::Failure),
        ("oom-kill", W::Failure),
        ("oom_kill", W::Failure),
        ("oomkilled", W::Failure),
        ("killed", W::Failure),
        ("exceeded job memory limit", W::Failure),
        ("exceeded step memory limit", W::Failure),
        ("exit code 137", W::Failure),
        ("code 137", W::Failure),
        ("code: 137", W::Failure),
        ("status 137", W::Failure),
        ("exited 137", W::Failure),
        ("exitcode: -9", W::Failure),
        ("exitcode -9", W::Failure),
        ("exitcode=-9", W::Failure),
        ("exitcode  : -9", W::Failure),
        ("exit code -9", W::Failure),
        ("return code = -9", W::Failure),
        ("return code -9", W::Failure),
        ("sigkill", W::Failure),
        ("dataloader worker", W::Failure),
        ("bus error encountered in worker", W::Failure),
        ("node running low on memory", W::Failure),
        ("does not fit: needs", W::Failure),
        ("to be safe, and the budget is", W::Failure),
        ("illegal memory access", W::Failure),
        ("device-side assert triggered", W::Failure),
        ("misaligned address", W::Failure),
        ("watchdog caught collective", W::Failure),
        ("duplicate gpu detected", W::Failure),
        ("no space left on device", W::Failure),
        ("unspecified launch failure", W::Failure),
        ("no kernel image is available", W::Failure),
        ("preemptively rejected", W::Figure),
        ("tried to allocate", W::Figure),
        ("failed to cuda calloc", W::Figure),
        ("failed to allocate", W::Figure),
        ("cudamalloc failed", W::Figure),
        ("outofmemoryerror: out of memory allocating", W::Failure),
        ("traceback (most recent call last)", W::Traceback),
        ("file \"", W::Frame),
        (".py:", W::Frame),
        (".py in ", W::Frame),
        (".py](", W::Frame),
        ("max_memory_allocated", W::Memory(M::Allocated)),
        ("memory_allocated", W::Memory(M::Allocated)),
        ("memory allocated", W::Memory(M::Allocated)),
        ("memory/max_allocated", W::Memory(M::Allocated)),
        ("memory/max_alloc", W::Memory(M::Allocated)),
        ("memory/max_active", W::Memory(M::Used)),
        ("memory/max_mem_active", W::Memory(M::Used)),
        ("memory/max_mem_allocated", W::Memory(M::Allocated)),
        ("memory/device_mem_reserved", W::Memory(M::Reserved)),
        ("memory/device_reserved", W::Memory(M::Reserved)),
        ("max_alloc", W::Memory(M::Allocated)),
        ("dev_reserved", W::Memory(M::Reserved)),
        ("max_active", W::Memory(M::Used)),
        ("peak_memory_alloc", W::Memory(M::Allocated)),
        ("peak_memory_active", W::Memory(M::Used)),
        ("peak_memory_reserved", W::Memory(M::Reserved)),
        ("max_memory_reserved", W::Memory(M::Reserved)),
        ("memory_reserved", W::Memory(M::Reserved)),
        ("memory reserved", W::Memory(M::Reserved)),
        ("reserved memory", W::Memory(M::Reserved)),
        ("allocated memory", W::Memory(M::Allocated)),
        ("memallocated", W::Memory(M::Allocated)),
        ("allocated", W::Memory(M::Allocated)),
        ("alloc", W::Memory(M::Allocated)),
        ("reserved", W::Memory(M::Reserved)),
        ("max_mem", W::Memory(M::Used)),
        ("max mem", W::Memory(M::Used)),
        ("gpu_mem", W::Memory(M::Used)),
        ("gpu mem", W::Memory(M::Used)),
        ("gpu_memory", W::Memory(M::Used)),
        ("gpu memory", W::Memory(M::Used)),
        ("cuda_mem", W::Memory(M::Used)),
        ("cuda memory", W::Memory(M::Used)),
        ("mem_usage", W::Memory(M::Used)),
        ("memory_usage", W::Memory(M::Used)),
        ("memory usage", W::Memory(M::Used)),
        ("peak_mem", W::Memory(M::Used)),
        ("peak memory", W::Memory(M::Used)),
        ("memory", W::Memory(M::Used)),
        ("mem", W::Memory(M::Used)),
        ("vram", W::Memory(M::Used)),
        ("rss", W::Memory(M::Host)),
        ("cpu virtual memory", W::Memory(M::Host)),
        ("step", W::Step),
        ("global_step", W::Step),
        ("iter", W::Step),
        ("iteration", W::Step),
        ("loss", W::Loss),
        ("train_loss", W::Loss),
        ("seq_len", W::Length),
        ("seqlen", W::Length),
        ("max_len", W::Length),
        ("tokens_in_batch", W::Length),
        ("batch_tokens", W::Length),
        ("input_length", W::Length),
        ("sample_len", W::Length),
        ("it/s", W::Progress),
        ("s/it", W::Progress),
        ("instantaneous batch size per device", W::Setting(K::Batch)),
        ("batch size per device", W::Setting(K::Batch)),
        ("per_device_train_batch_size", W::Setting(K::Batch)),
        ("micro_batch_size", W::Setting(K::Batch)),
        ("gradient accumulation steps", W::Setting(K::Accumulation)),
        ("gradient_accumulation_steps", W::Setting(K::Accumulation)),
        ("accumulate_grad_batches", W::Setting(K::Accumulation)),
        ("sequence_len", W::Setting(K::Length)),
        ("max_seq_length", W::Setting(K::Length)),
        ("max_seq_len", W::Setting(K::Length)),
        ("model_max_length", W::Setting(K::Length)),
        ("cutoff_len", W::Setting(K::Length)),
        ("gradient_checkpointing", W::Setting(K::Checkpointing)),
        ("optim", W::Setting(K::Optimizer)),
        ("optimizer", W::Setting(K::Optimizer)),
        ("bf16", W::Setting(K::Bf16)),
        ("fp16", W::Setting(K::Fp16)),
        ("load_in_4bit", W::Setting(K::FourBit)),
        ("load_in_8bit", W::Setting(K::EightBit)),
        ("lora_r", W::Setting(K::LoraRank)),
        ("lora_rank", W::Setting(K::LoraRank)),
        ("attn_implementation", W::Setting(K::Attention)),
        ("number of trainable parameters", W::Setting(K::Trainable)),
        ("trainable parameters", W::Setting(K::Trainable)),
        ("trainable params", W::Setting(K::Trainable)),
        ("model_name_or_path", W::Setting(K::Model)),
        ("base_model", W::Setting(K::Model)),
        ("_name_or_path", W::Setting(K::Model)),
        ("running evaluation", W::Evaluation),
        ("using bfloat16 automatic mixed precision", W::Setting(K::Bf16)),
        ("using 16bit automatic mixed precision", W::Setting(K::Fp16)),
        ("models--", W::CachedModel),
        ("alloc_conf", W::AllocConf),
        ("axolotl", W::Program("axolotl")),
        ("llamafactory", W::Program("LLaMA-Factory")),
        ("lightning", W::Program("Lightning")),
        ("***** running training *****", W::Program("transformers")),
        ("deepspeed", W::Program("DeepSpeed")),
        ("comfyui", W::Program("ComfyUI")),
    ]
};

fn automaton(words: impl Iterator<Item = &'static str>) -> AhoCorasick {
    let built = AhoCorasick::builder()
        .ascii_case_insensitive(true)
        .match_kind(MatchKind::LeftmostLongest)
        .kind(Some(AhoCorasickKind::DFA))
        .build(words);
    // The words are constants and few: only their number could be too large.
    built.unwrap_or_else(|error| unreachable!("{error}"))
}

static ALL: LazyLock<AhoCorasick> =
    LazyLock::new(|| automaton(WORDS.iter().map(|(word, _)| *word)));

static FAILURES: LazyLock<AhoCorasick> = LazyLock::new(|| {
    let long =
        |word: &&(&str, Word)| matches!(word.1, Word::Failure | Word::Figure) && word.0.len() > 9;
    automaton(WORDS.iter().filter(long).map(|(word, _)| *word))
});

/// What paths tell: folders of programs and of cached models.
static PATHS: LazyLock<(Vec<Word>, AhoCorasick)> = LazyLock::new(|| {
    let is_of_path = |kind: Word| matches!(kind, Word::Program(_) | Word::CachedModel);
    let found = || WORDS.iter().filter(|(_, kind)| is_of_path(*kind));
    (
        found().map(|(_, kind)| *kind).collect(),
        automaton(found().map(|(word, _)| *word)),
    )
});

/// A word in a line, and where it begins and ends.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    pub word: Word,
    pub start: usize,
    pub end: usize,
}

/// The words of a line, the longest where several begin at one place.
pub fn words_of(line: &[u8]) -> impl Iterator<Item = Found> {
    ALL.find_iter(line).map(|found| Found {
        word: WORDS[found.pattern().as_usize()].1,
        start: found.start(),
        end: found.end(),
    })
}

/// The words of a path, of which there are few: most lines of a traceback are paths.
pub fn paths_of(line: &[u8]) -> impl Iterator<Item = Found> {
    let (kinds, automaton) = &*PATHS;
    automaton.find_iter(line).map(|found| Found {
        word: kinds[found.pattern().as_usize()],
        start: found.start(),
        end: found.end(),
    })
}

/// Whether a message about memory begins somewhere in a text.
pub fn announces(text: &[u8]) -> bool {
    FAILURES.is_match(text)
}

/// Bytes on either side of a break that a word may lie across.
const SEAM: usize = 44;

/// Pairs of letters that stand in the words above: most breaks between lines have others around
/// them, and need no search.
static PAIRS: LazyLock<Vec<bool>> = LazyLock::new(|| {
    let mut pairs = vec![false; 1 << 16];
    for (word, kind) in WORDS {
        if matches!(kind, Word::Failure | Word::Figure) {
            let letters: Vec<u8> = word.bytes().map(|byte| byte.to_ascii_lowercase()).collect();
            letters
                .windows(2)
                .for_each(|pair| pairs[place(pair)] = true);
        }
    }
    pairs
});

fn place(pair: &[u8]) -> usize {
    let [a, b] = [pair[0], pair[1]].map(|byte| usize::from(byte.to_ascii_lowercase()));
    a << 8 | b
}

/// Whether a message begins across the break between two lines.
pub fn breaks_a_word(before: &[u8], after: &[u8], scratch: &mut Vec<u8>) -> bool {
    let (before, after) = (before.trim_ascii_end(), after.trim_ascii_start());
    if before.len() < 2 || after.len() < 2 {
        return false;
    }
    if !PAIRS[place(&before[before.len() - 2..])] || !PAIRS[place(&after[..2])] {
        return false;
    }
    let tail = &before[before.len().saturating_sub(SEAM)..];
    let head = &after[..after.len().min(SEAM)];
    [&b""[..], b" "].iter().any(|between| {
        scratch.clear();
        scratch.extend_from_slice(tail);
        scratch.extend_from_slice(between);
        scratch.extend_from_slice(head);
        // What stands in one line alone was read there.
        let is_across = |start, end| start < tail.len() && end > tail.len() + between.len();
        let mut found = FAILURES.find_iter(scratch.as_slice());
        found.any(|found| is_across(found.start(), found.end()))
    })
}
