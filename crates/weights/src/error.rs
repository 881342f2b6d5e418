//! What can be wrong with files of weights, in words that name the file, the tensor, what was
//! expected, what was found and the way out.

use std::io;
use std::path::PathBuf;

use safetensors::Dtype;

/// The one error type of this crate.
#[derive(Debug, thiserror::Error)]
pub enum WeightError {
    #[error("cannot {action} `{}`: {source}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },

    #[error(
        "there is no model `{name}`: no file or folder has this name, and {}\n\
         hint: `hf download {name}` fetches a model of the hub; a path names a folder with model.safetensors",
        searched(caches)
    )]
    NotDownloaded { name: String, caches: Vec<PathBuf> },

    #[error("`{}` has no weights: {problem}\nhint: {hint}", path.display())]
    NoWeights {
        path: PathBuf,
        problem: String,
        hint: &'static str,
    },

    #[error(
        "`{}` is a Python pickle, which runs code when it is read, and is not opened\n\
         hint: convert it once with transformers: \
         AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW, safe_serialization=True)",
        path.display()
    )]
    Pickle { path: PathBuf },

    #[error("`{}` is not a safetensors file: {problem}", path.display())]
    NotSafetensors { path: PathBuf, problem: String },

    #[error(
        "`{}` is cut off: its header describes {expected} bytes, the file has {found}\n\
         hint: copy or download this file again",
        path.display()
    )]
    Truncated {
        path: PathBuf,
        expected: u64,
        found: u64,
    },

    #[error("`{}` is damaged: {problem}\nhint: copy or download this file again", path.display())]
    Damaged { path: PathBuf, problem: String },

    #[error("`{}` is not an index of shards: {problem}", path.display())]
    Index { path: PathBuf, problem: String },

    #[error(
        "`{}` names `{file}` for {num_tensors} tensor(s), and there is no such file in the folder\n\
         hint: the download is incomplete; fetch the missing file",
        index.display()
    )]
    MissingShard {
        index: PathBuf,
        file: String,
        num_tensors: usize,
    },

    #[error(
        "`{}` says that tensor `{tensor}` is in `{file}`, and that file does not have it\n\
         hint: index and files are of different uploads; fetch them again together",
        index.display()
    )]
    NotInShard {
        index: PathBuf,
        tensor: String,
        file: String,
    },

    #[error(
        "tensor `{tensor}` is in two files, `{}` and `{}`\n\
         hint: files of two uploads are mixed; fetch them again into an empty folder",
        first.display(), second.display()
    )]
    InTwoFiles {
        tensor: String,
        first: PathBuf,
        second: PathBuf,
    },

    #[error("`{}` has no tensor `{tensor}`{}", path.display(), absent(tensor, suggestion.as_deref()))]
    NoTensor {
        path: PathBuf,
        tensor: String,
        suggestion: Option<String>,
    },

    #[error("tensor `{tensor}` of `{}` has {found} {unit}, {start}..{end} were asked for", path.display())]
    OutOfRange {
        path: PathBuf,
        tensor: String,
        unit: &'static str,
        start: usize,
        end: usize,
        found: usize,
    },

    #[error(
        "tensor `{tensor}` of `{}`: the part that is read takes {expected} {unit}, the place for it has {found}",
        path.display()
    )]
    WrongLength {
        path: PathBuf,
        tensor: String,
        unit: &'static str,
        expected: usize,
        found: usize,
    },

    #[error(
        "tensor `{tensor}` of `{}` is stored as {found}, which is not converted to {wanted}\n\
         hint: {}", path.display(), conversion_hint(*found)
    )]
    NotConverted {
        path: PathBuf,
        tensor: String,
        found: Dtype,
        wanted: Dtype,
    },

    #[error("`{}`: {key}: {problem}", path.display())]
    AdapterConfig {
        path: PathBuf,
        key: String,
        problem: String,
    },

    #[error(
        "`{}` has {key} = {value}, which is not supported: {reason}\n\
         hint: merge this adapter with peft (`merge_and_unload`) and use the merged model",
        path.display()
    )]
    UnsupportedAdapter {
        path: PathBuf,
        key: String,
        value: String,
        reason: &'static str,
    },

    #[error("{key}: `{pattern}` is not a regular expression that can be used: {problem}")]
    Pattern {
        key: &'static str,
        pattern: String,
        problem: String,
    },

    #[error(
        "no module matches the target `{target}`\n\
         hint: linear modules of this model end in {}{}",
        ends.join(", "), for_example(example.as_deref())
    )]
    NoTarget {
        target: String,
        /// Last parts of the modules' names.
        ends: Vec<String>,
        example: Option<String>,
    },

    #[error(
        "the adapter `{}` cannot be added to `{}`: {problem}{}",
        adapter.display(), base.display(), named_base(named.as_deref())
    )]
    AnotherBase {
        adapter: PathBuf,
        base: PathBuf,
        /// The tensor with its shape here and there.
        problem: String,
        /// What the adapter says about its base.
        named: Option<String>,
    },

    #[error("there is already something at `{}`\nhint: name a new or an empty folder", path.display())]
    Taken { path: PathBuf },

    #[error("stopped; nothing was kept of `{}`", path.display())]
    Stopped { path: PathBuf },

    #[error("tensor `{tensor}` cannot be written: {problem}")]
    Unwritable { tensor: String, problem: String },

    #[error(
        "the disk is full: `{}` takes {needed} bytes; nothing of it was kept\n\
         hint: free some space, or name a folder on another disk",
        path.display()
    )]
    DiskFull {
        path: PathBuf,
        needed: u64,
        source: io::Error,
    },
}

impl WeightError {
    pub fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> WeightError {
        let path = path.into();
        move |source| WeightError::Io {
            action,
            path,
            source,
        }
    }
}

fn searched(caches: &[PathBuf]) -> String {
    if caches.is_empty() {
        return "the environment names no Hugging Face cache".to_owned();
    }
    let caches: Vec<String> = caches
        .iter()
        .map(|cache| format!("`{}`", cache.display()))
        .collect();
    format!("no download of this id is in {}", caches.join(", "))
}

/// What may be meant by a tensor that is not there.
fn absent(tensor: &str, suggestion: Option<&str>) -> String {
    match (tensor, suggestion) {
        ("lm_head.weight", None) => {
            "\nhint: where the embeddings are the head too, config.json has `\"tie_word_embeddings\": true`"
                .to_owned()
        }
        _ => meant(suggestion),
    }
}

fn meant(suggestion: Option<&str>) -> String {
    suggestion.map_or_else(String::new, |name| {
        format!("\nhint: did you mean `{name}`?")
    })
}

fn conversion_hint(found: Dtype) -> &'static str {
    match found {
        Dtype::U8 | Dtype::I8 | Dtype::I32 => {
            "these are codes of a quantised model; take the original in bf16 and let it be quantised here"
        }
        Dtype::F8_E4M3 | Dtype::F8_E5M2 => "take the upload of this model in bf16",
        _ => "fp32, bf16, fp16 and fp64 are converted; other types are read as they are",
    }
}

fn for_example(name: Option<&str>) -> String {
    name.map_or_else(String::new, |name| format!(", as in `{name}`"))
}

fn named_base(named: Option<&str>) -> String {
    named.map_or_else(String::new, |name| {
        format!("\nhint: its adapter_config.json names `{name}` as its base")
    })
}
