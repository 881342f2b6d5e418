//! What a block was for, told from who allocated it and who freed it.
//!
//! PyTorch does not say; Python frames do. Autograd's backward runs on a thread of its own
//! without Python, so that in a recording with frames an event without any belongs to it. What
//! the forward allocates and the backward frees was saved for backward; what the backward
//! allocates and the optimizer's `zero_grad` frees is a gradient.

use serde::Serialize;

use crate::trace::{Frames, Program, StackId};

/// What a step was doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RecordedPhase {
    /// Models are built and moved to the device.
    Build,
    Forward,
    Backward,
    /// Parts of the forward that run again in the backward.
    Recompute,
    /// Gradient clipping, scaling and the optimizer's step.
    Optimizer,
    /// Neither of these: the user's loop, data, metrics.
    Loop,
    /// No frames were recorded at all.
    Unknown,
}

impl RecordedPhase {
    /// As a sentence has it: "in the …".
    pub fn name(self) -> &'static str {
        match self {
            Self::Build => "building of the model",
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Recompute => "recomputation of a checkpoint",
            Self::Optimizer => "optimizer's step",
            Self::Loop => "training loop",
            Self::Unknown => "code without recorded frames",
        }
    }
}

/// What a block was for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RecordedCategory {
    /// Allocated while models were built.
    Parameters,
    /// Alive before the recording began, and nothing says what for: mostly parameters, and
    /// states of the optimizer if steps had been made.
    BeforeRecording,
    Gradients,
    OptimizerStates,
    /// Of the forward, its repetition or the loss, freed by the backward, or kept when the recording ends before it could.
    Activations,
    /// Freed in the phase that allocated it.
    Temporaries,
    /// Allocated in a step and never freed: workspaces of libraries, caches.
    Workspaces,
    /// The user's loop: batches, losses, metrics.
    Loop,
    Unknown,
}

impl RecordedCategory {
    pub const ALL: [Self; 9] = [
        Self::Parameters,
        Self::BeforeRecording,
        Self::Gradients,
        Self::OptimizerStates,
        Self::Activations,
        Self::Temporaries,
        Self::Workspaces,
        Self::Loop,
        Self::Unknown,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Parameters => "parameters",
            Self::BeforeRecording => "from before the recording",
            Self::Gradients => "gradients",
            Self::OptimizerStates => "optimizer states",
            Self::Activations => "activations",
            Self::Temporaries => "temporaries",
            Self::Workspaces => "workspaces and caches",
            Self::Loop => "batch and loop",
            Self::Unknown => "unknown",
        }
    }
}

/// The phase of every stack.
pub(super) struct Phases {
    by_stack: Vec<RecordedPhase>,
    empty: RecordedPhase,
}

impl Phases {
    pub fn new(frames: &Frames) -> Self {
        let empty = if frames.num_stacks() > 1 {
            RecordedPhase::Backward
        } else {
            RecordedPhase::Unknown
        };
        let mut by_stack = vec![empty];
        by_stack.extend(
            (1..frames.num_stacks()).map(|index| phase(frames, StackId::from_index(index))),
        );
        Self { by_stack, empty }
    }

    pub fn get(&self, stack: StackId) -> RecordedPhase {
        self.by_stack
            .get(stack.index())
            .copied()
            .unwrap_or(self.empty)
    }
}

/// Modules of `torch.optim`, by their file's name: recordings may have no folders.
const OPTIMIZERS: [&str; 14] = [
    "adam.py",
    "adamw.py",
    "sgd.py",
    "adagrad.py",
    "adadelta.py",
    "adamax.py",
    "asgd.py",
    "nadam.py",
    "radam.py",
    "rmsprop.py",
    "rprop.py",
    "lbfgs.py",
    "optimizer.py",
    "clip_grad.py",
];

fn phase(frames: &Frames, stack: StackId) -> RecordedPhase {
    let mut is_forward = false;
    let mut is_build = false;
    let mut is_backward = false;
    for frame in frames.get(stack) {
        let file = frame.file.rsplit(['/', '\\']).next().unwrap_or(frame.file);
        let in_optimizers = frame.file.contains("/optim/")
            || frame.file.contains("\\optim\\")
            || frame.file.contains("bitsandbytes/optim")
            || file == "grad_scaler.py"
            || OPTIMIZERS.contains(&file);
        if in_optimizers {
            return RecordedPhase::Optimizer;
        }
        match (file, frame.function) {
            // The checkpointed function runs below these only when backward asks for it.
            ("checkpoint.py", "unpack_hook" | "recompute_fn" | "backward") => {
                return RecordedPhase::Recompute;
            }
            ("graph.py", "_engine_run_backward")
            | ("_tensor.py", "backward")
            | ("__init__.py", "backward" | "_make_grads") => is_backward = true,
            ("module.py", "_call_impl" | "_wrapped_call_impl") | (_, "forward") => {
                is_forward = true;
            }
            ("module.py", "_apply" | "convert" | "to" | "cuda" | "to_empty")
            | (_, "__init__" | "reset_parameters" | "from_pretrained" | "from_config") => {
                is_build = true;
            }
            _ => {}
        }
    }
    if is_forward {
        RecordedPhase::Forward
    } else if is_backward {
        RecordedPhase::Backward
    } else if is_build {
        RecordedPhase::Build
    } else {
        RecordedPhase::Loop
    }
}

/// The category of every allocation of a program.
pub(super) fn categories(program: &Program, phases: &Phases) -> Vec<RecordedCategory> {
    let count = program.num_allocations() as u32;
    let lives = |allocation| {
        let born = phases.get(program.stack(allocation));
        let freed = program
            .free_stack(allocation)
            .map(|stack| phases.get(stack));
        (born, freed)
    };
    // If gradients are released once in a while, what lives longer than one release is none.
    let is_gradient = |allocation| {
        let (born, freed) = lives(allocation);
        born == RecordedPhase::Backward
            && matches!(freed, Some(RecordedPhase::Optimizer | RecordedPhase::Loop))
    };
    // A recording may end inside a step, as it does when memory runs out: what the forward of that step saved was never
    // freed. Steps end with the optimizer.
    let last_step = (0..count)
        .rev()
        .find(|&allocation| lives(allocation).0 == RecordedPhase::Optimizer);
    let is_finished = |allocation| last_step.is_some_and(|last| allocation < last);
    let last_released = (0..count).rev().find(|&allocation| is_gradient(allocation));
    (0..count)
        .map(|allocation| {
            let (born, freed) = lives(allocation);
            let survivor = (allocation as usize) < program.num_survivors();
            if survivor && program.stack(allocation) == StackId::EMPTY {
                return RecordedCategory::BeforeRecording;
            }
            match (born, freed) {
                (RecordedPhase::Unknown, _) => RecordedCategory::Unknown,
                (RecordedPhase::Build, _) => RecordedCategory::Parameters,
                (RecordedPhase::Optimizer, Some(RecordedPhase::Optimizer)) => {
                    RecordedCategory::Temporaries
                }
                (RecordedPhase::Optimizer, _) => RecordedCategory::OptimizerStates,
                // The loss is often computed outside of any module.
                (
                    RecordedPhase::Forward | RecordedPhase::Recompute | RecordedPhase::Loop,
                    Some(RecordedPhase::Backward | RecordedPhase::Recompute),
                ) => RecordedCategory::Activations,
                (RecordedPhase::Loop, _) => RecordedCategory::Loop,
                (RecordedPhase::Forward | RecordedPhase::Recompute, Some(_)) => {
                    RecordedCategory::Temporaries
                }
                (RecordedPhase::Forward | RecordedPhase::Recompute, None)
                    if is_finished(allocation) =>
                {
                    RecordedCategory::Workspaces
                }
                (RecordedPhase::Forward | RecordedPhase::Recompute, None) => {
                    RecordedCategory::Activations
                }
                (
                    RecordedPhase::Backward,
                    Some(RecordedPhase::Optimizer | RecordedPhase::Loop | RecordedPhase::Build),
                ) => RecordedCategory::Gradients,
                (RecordedPhase::Backward, Some(_)) => RecordedCategory::Temporaries,
                (RecordedPhase::Backward, None)
                    if last_released.is_some_and(|last| allocation < last) =>
                {
                    RecordedCategory::Workspaces
                }
                (RecordedPhase::Backward, None) => RecordedCategory::Gradients,
            }
        })
        .collect()
}
