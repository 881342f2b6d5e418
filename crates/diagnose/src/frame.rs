//! Where in a program memory ran out, from the functions of its traceback.

use memchr::{memchr, memchr2, memmem, memrchr};
use serde::Serialize;

/// A function of a traceback.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The end of the path.
    pub file: String,
    pub line: u32,
    pub function: String,
}

/// What a run was doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    Loading,
    Setup,
    Forward,
    /// Logits and their loss.
    Loss,
    /// Logits of preference or reward training.
    PreferenceLogits,
    Backward,
    OptimizerStep,
    Evaluation,
    /// Evaluation, while its outputs are gathered.
    EvaluationOutputs,
    Generation,
    Saving,
    Resuming,
    Merging,
    /// `nn.DataParallel`, which gathers on its first GPU.
    DataParallel,
    PinnedMemory,
}

impl Phase {
    /// In a sentence.
    pub fn said(self) -> &'static str {
        match self {
            Self::Loading => "while the model was loaded",
            Self::Setup => "while ranks were set up",
            Self::Forward => "in the forward pass",
            Self::Loss => "at the logits and their loss",
            Self::PreferenceLogits => "at the logits of preference training",
            Self::Backward => "in the backward pass",
            Self::OptimizerStep => "in the optimizer's step",
            Self::Evaluation => "in evaluation",
            Self::EvaluationOutputs => "in evaluation, while outputs were gathered for metrics",
            Self::Generation => "while text was generated",
            Self::Saving => "while a checkpoint was saved",
            Self::Resuming => "while a checkpoint was loaded to resume",
            Self::Merging => "while adapters were merged",
            Self::DataParallel => "under DataParallel, whose first GPU holds all outputs",
            Self::PinnedMemory => "while batches were copied to pinned memory",
        }
    }

    /// Whether memory here is beside that of a usual step.
    pub fn is_beside_the_step(self) -> bool {
        matches!(
            self,
            Self::Evaluation
                | Self::EvaluationOutputs
                | Self::Generation
                | Self::Saving
                | Self::Resuming
                | Self::Merging
                | Self::OptimizerStep
        )
    }
}

/// A program that answers or draws, and trains nothing: settings of training are none of its.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Server {
    Vllm,
    Sglang,
    Comfy,
    Diffusers,
}

/// Which of them the frames lie in.
pub fn server(frames: &[Frame]) -> Option<Server> {
    const FOLDERS: [(&str, Server); 7] = [
        ("packages/vllm/", Server::Vllm),
        ("vllm/v1/", Server::Vllm),
        ("vllm/worker/", Server::Vllm),
        ("vllm/model_executor/", Server::Vllm),
        ("sglang/srt/", Server::Sglang),
        ("ComfyUI/", Server::Comfy),
        ("diffusers/pipelines/", Server::Diffusers),
    ];
    let lies_in = |folder: &str| frames.iter().any(|frame| frame.is_in(folder));
    let mut folders = FOLDERS.iter();
    let found = folders.find(|(folder, _)| lies_in(folder));
    found.map(|(_, server)| *server)
}

/// Letters of a path and of a function that are kept.
const LONGEST_NAME: usize = 64;

/// A frame as it stands in a line.
#[derive(Clone, Copy, Debug)]
pub struct Spelled<'a> {
    pub file: &'a [u8],
    /// 0 where it is not told.
    pub line: u32,
    pub function: &'a [u8],
}

impl<'a> Spelled<'a> {
    /// A frame in the spelling of Python, IPython, notebooks or rich.
    pub fn read(line: &'a [u8]) -> Option<Self> {
        let line = line.trim_ascii();
        let (file, number, function) = match line.strip_prefix(b"File \"") {
            Some(rest) => {
                let (file, rest) = cut(rest, memchr(b'"', rest)?, 1);
                let rest = rest.strip_prefix(b",").unwrap_or(rest).trim_ascii_start();
                let rest = rest.strip_prefix(b"line")?;
                let (number, function) = cut(rest, memchr(b',', rest)?, 1);
                (
                    file,
                    number,
                    function.trim_ascii_start().strip_prefix(b"in")?,
                )
            }
            None => after_path(line.strip_prefix(b"File ").unwrap_or(line))?,
        };
        let number = match number {
            b"" => 0,
            number => std::str::from_utf8(number.trim_ascii())
                .ok()?
                .parse()
                .ok()?,
        };
        // IPython names the class and the arguments too.
        let function = function.trim_ascii();
        let end = memchr(b'(', function).unwrap_or(function.len());
        let function = &function[..end];
        let start = memrchr(b'.', function).map_or(0, |at| at + 1);
        Some(Self {
            file,
            line: number,
            function: function[start..].trim_ascii(),
        })
    }
}

/// `X.py:12, in f` and `X.py:12 in f`; or `X.py in f` and `[X.py](ADDRESS) in f` of older
/// notebooks, which tell the line elsewhere.
fn after_path(line: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let (file, rest) = cut(line, memmem::find(line, b".py")?, 3);
    if let Some(rest) = rest.strip_prefix(b":") {
        let (number, function) = cut(rest, memchr2(b',', b' ', rest)?, 1);
        let function = function.trim_ascii_start().strip_prefix(b"in ")?;
        return (!number.is_empty()).then_some((file, number, function));
    }
    let (file, rest) = match rest.strip_prefix(b"](") {
        Some(address) => (
            file.strip_prefix(b"[")?,
            cut(address, memchr(b')', address)?, 1).1,
        ),
        None => (file, rest),
    };
    let function = rest.strip_prefix(b" in ")?;
    let is_path = !file.contains(&b' ') && file.iter().any(|byte| matches!(byte, b'/' | b'\\'));
    let is_call = memchr(b'(', function).is_some();
    (is_path && is_call).then_some((file, b"", function))
}

/// The text before a place, and the text after what is there.
fn cut(text: &[u8], at: usize, length: usize) -> (&[u8], &[u8]) {
    (&text[..at], &text[at + length..])
}

impl Frame {
    pub fn new(spelled: Spelled<'_>) -> Self {
        let tail = |name: &[u8]| {
            let text = String::from_utf8_lossy(name);
            let skipped = text.chars().count().saturating_sub(LONGEST_NAME);
            text.chars().skip(skipped).collect::<String>()
        };
        Self {
            file: tail(spelled.file).replace('\\', "/"),
            line: spelled.line,
            function: tail(spelled.function),
        }
    }

    fn is_in(&self, folder: &str) -> bool {
        self.file.contains(folder)
    }
}

#[rustfmt::skip]
const MERGING: &[&str] = &["merge_and_unload", "_unload_and_optionally_merge", "merge_adapter", "get_delta_weight", "unload_and_merge"];
#[rustfmt::skip]
const RESUMING: &[&str] = &["load_state_dict", "_load_optimizer_and_scheduler", "_load_from_checkpoint", "load_checkpoint", "load_optimizer_state_dict", "_load_scheduler", "load_fsdp_optimizer", "restore_training_state", "_restore_modules_and_callbacks", "resume_end", "resume_training", "load_training_state", "optimizer_from_checkpoint", "_load_zero_checkpoint"];
#[rustfmt::skip]
const SAVING: &[&str] = &["save_checkpoint", "_save_checkpoint", "save_model", "save_pretrained", "_save", "_save_optimizer_and_scheduler", "save_state", "dump_checkpoint", "save_fsdp_model", "save_fsdp_optimizer", "state_dict", "get_state_dict", "_zero3_consolidated_16bit_state_dict", "full_optim_state_dict", "_full_pre_state_dict_hook", "save_16bit_model", "save_adapter"];
#[rustfmt::skip]
const OUTPUTS: &[&str] = &["nested_concat", "torch_pad_and_concatenate", "nested_gather", "nested_detach", "gather_for_metrics", "pad_across_processes", "_pad_across_processes", "gather_function", "preprocess_logits_for_metrics", "compute_metrics", "atleast_1d"];
#[rustfmt::skip]
const EVALUATION: &[&str] = &["evaluate", "evaluation_loop", "prediction_loop", "prediction_step", "_evaluate", "evaluation_step", "validation_step", "validate", "_run_validation", "run_evaluation", "eval_step", "eval_epoch", "_on_evaluation_model_eval", "predict_step", "evaluate_model", "run_eval", "predict"];
#[rustfmt::skip]
const PREFERENCE: &[&str] = &["concatenated_forward", "dpo_loss", "get_batch_logps", "get_batch_loss_metrics", "_get_per_token_logps", "_get_per_token_logps_and_entropies", "grpo_accumulated_loss", "selective_log_softmax", "get_batch_samples", "_generate_and_score_completions", "compute_reference_log_probs", "grpo_loss", "kto_loss", "orpo_loss", "compute_log_probs", "compute_log_prob"];
#[rustfmt::skip]
const LOSS: &[&str] = &["cross_entropy", "ForCausalLMLoss", "fixed_cross_entropy", "log_softmax", "cross_entropy_loss", "loss_function", "fused_linear_cross_entropy_forward"];
const BACKWARD: &[&str] = &[
    "backward",
    "_engine_run_backward",
    "run_backward",
    "apply_backward",
];
#[rustfmt::skip]
const GENERATION: &[&str] = &["generate", "_sample", "sample", "greedy_search", "beam_search", "_beam_search", "_greedy_search"];
#[rustfmt::skip]
const LOADING: &[&str] = &["from_pretrained", "_load_pretrained_model", "load_model", "_load_state_dict_into_meta_model", "load_checkpoint_in_model", "dispatch_model", "set_module_tensor_to_device", "caching_allocator_warmup", "load_weights", "prepare_model_for_kbit_training", "quantize_4bit", "create_quantized_param", "_materialize_copy", "initialize_model"];

/// What the run was doing, by its frames, the outermost first.
pub fn phase(frames: &[Frame]) -> Option<Phase> {
    let has = |names: &[&str]| {
        frames
            .iter()
            .any(|frame| names.contains(&frame.function.as_str()))
    };
    let has_in = |folder: &str, names: &[&str]| {
        frames.iter().any(|frame| {
            frame.is_in(folder) && (names.is_empty() || names.contains(&frame.function.as_str()))
        })
    };
    let found = if has(MERGING) {
        Phase::Merging
    } else if has_in("parallel/data_parallel.py", &[])
        || has_in("parallel/parallel_apply.py", &["_worker"])
        || has_in("parallel/scatter_gather.py", &["gather"])
    {
        Phase::DataParallel
    } else if has_in("_utils/pin_memory.py", &[]) {
        Phase::PinnedMemory
    } else if has(LOADING) {
        Phase::Loading
    } else if has(RESUMING) || has_in("torch/serialization.py", &["load"]) {
        Phase::Resuming
    } else if has(SAVING) || has_in("torch/serialization.py", &["save"]) {
        Phase::Saving
    } else if has(PREFERENCE) {
        Phase::PreferenceLogits
    } else if has(EVALUATION) || has(OUTPUTS) {
        match has(OUTPUTS) {
            true => Phase::EvaluationOutputs,
            false => Phase::Evaluation,
        }
    } else if has(GENERATION) {
        Phase::Generation
    } else if has_in("torch/optim/", &[])
        || has_in("bitsandbytes/optim", &[])
        || has_in("runtime/zero/stage", &["step"])
        || has_in("optimizer.py", &["step"])
    {
        Phase::OptimizerStep
    } else if has(BACKWARD) {
        Phase::Backward
    } else if has_in("parallel/distributed.py", &["__init__", "_ddp_init_helper"])
        || has_in("distributed/utils.py", &[])
        || has_in("fully_sharded_data_parallel.py", &["__init__"])
    {
        Phase::Setup
    } else if has(LOSS) {
        Phase::Loss
    } else if has(&[
        "forward",
        "_call_impl",
        "_wrapped_call_impl",
        "training_step",
        "compute_loss",
    ]) {
        Phase::Forward
    } else if has_in("nn/modules/module.py", &["to", "_apply", "cuda", "convert"]) {
        Phase::Loading
    } else {
        return None;
    };
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_read_in_every_spelling() {
        for (line, file, function) in [
            (
                "  File \"/a/trainer.py\", line 12, in evaluation_loop",
                "/a/trainer.py",
                "evaluation_loop",
            ),
            (
                "File /a/trainer.py:12, in Trainer.evaluate(self, x)",
                "/a/trainer",
                "evaluate",
            ),
            ("/a/trainer.py:12 in evaluate", "/a/trainer", "evaluate"),
            ("/a/trainer.py:12, in evaluate", "/a/trainer", "evaluate"),
            (
                "  File \"C:\\a\\b.py\", line 12, in <module>",
                "C:/a/b.py",
                "<module>",
            ),
        ] {
            let frame = Frame::new(Spelled::read(line.as_bytes()).expect(line));
            assert_eq!(
                (frame.file.as_str(), frame.line, frame.function.as_str()),
                (file, 12, function)
            );
        }
        for line in [
            "/a/trainer.py in evaluate(self, x)",
            "[/a/trainer.py](https://localhost:8080/#) in evaluate(self, x)",
        ] {
            let frame = Frame::new(Spelled::read(line.as_bytes()).expect(line));
            assert_eq!(
                (frame.file.as_str(), frame.line, frame.function.as_str()),
                ("/a/trainer", 0, "evaluate")
            );
        }
        for line in [
            "look at trainer.py in the folder",
            "see /a/b.py in f(x)",
            "File \"x",
            "x.py:12",
            "File \"x\", line y, in z",
            "File \"x\", line 99999999999, in z",
        ] {
            assert!(Spelled::read(line.as_bytes()).is_none(), "{line}");
        }
    }

    #[test]
    fn the_innermost_reason_of_a_phase_wins() {
        let frames = |names: &[(&str, &str)]| -> Vec<Frame> {
            let frame = |(file, function): &(&str, &str)| Frame {
                file: (*file).to_owned(),
                line: 1,
                function: (*function).to_owned(),
            };
            names.iter().map(frame).collect()
        };
        let told = |names: &[(&str, &str)]| phase(&frames(names));
        assert_eq!(
            told(&[
                ("trainer.py", "_maybe_log_save_evaluate"),
                ("trainer.py", "evaluate"),
                ("m.py", "forward")
            ]),
            Some(Phase::Evaluation)
        );
        assert_eq!(
            told(&[("trainer.py", "evaluation_loop"), ("u.py", "nested_concat")]),
            Some(Phase::EvaluationOutputs)
        );
        assert_eq!(
            told(&[
                ("t.py", "training_step"),
                ("a/torch/_tensor.py", "backward")
            ]),
            Some(Phase::Backward)
        );
        assert_eq!(
            told(&[("a/torch/optim/adamw.py", "step")]),
            Some(Phase::OptimizerStep)
        );
        assert_eq!(told(&[("x.py", "main")]), None);
    }
}
