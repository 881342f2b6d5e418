//! Who asked for a block: the line of the user's own code, and the library's function below it.
//!
//! A stack of Python frames runs from the library's innermost function (`linear.py:134 forward`)
//! out to the script. What users can change is the innermost frame that is theirs: the first one
//! outside of Python's and of installed packages' folders.

use serde::Serialize;

use crate::trace::{Frame, Frames, StackId};

/// Folders kept of a path; what lies above them is the machine's, not the project's.
const NUM_FOLDERS: usize = 2;

/// Packages of PyTorch that allocate, to know a checkout of its sources, which lies in no
/// `site-packages`.
const PACKAGES_OF_TORCH: [&str; 11] = [
    "_dynamo",
    "_inductor",
    "amp",
    "autograd",
    "cuda",
    "distributed",
    "fx",
    "jit",
    "nn",
    "optim",
    "utils",
];

/// Functions that only pass a call on, and so say nothing of what was called.
const PASSED_ON: [&str; 8] = [
    "<lambda>",
    "_apply",
    "_call_impl",
    "_fn",
    "_wrapped_call_impl",
    "decorate_context",
    "inner",
    "wrapper",
];

/// The frames of a stack that say where a block comes from; all absent if none were recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize)]
pub struct Origin {
    /// The innermost line outside of any library, as `folder/train.py:33 main`.
    pub line: Option<String>,
    /// The library's innermost function, as `linear.py:134 forward`, past those that only pass
    /// a call on; absent if the line itself calls into PyTorch's core.
    pub op: Option<String>,
    /// Between the two, the innermost function of a library other than PyTorch, such as a model
    /// of transformers.
    pub model: Option<String>,
}

impl Origin {
    pub fn new(frames: &Frames, stack: StackId) -> Self {
        let mut origin = Self::default();
        let mut passing = None;
        for frame in frames.get(stack) {
            let owner = owner(frame.file);
            if owner == Owner::User {
                origin.line = Some(short_line(frame));
                break;
            }
            if origin.op.is_none() {
                if PASSED_ON.contains(&frame.function) {
                    passing.get_or_insert(frame);
                } else {
                    origin.op = Some(innermost(frame));
                }
            } else if owner == Owner::Package && origin.model.is_none() {
                origin.model = Some(innermost(frame));
            }
        }
        origin.op = origin.op.or_else(|| passing.map(innermost));
        origin
    }

    /// The op and the library's model around it.
    pub fn library(&self) -> Option<String> {
        match (&self.op, &self.model) {
            (Some(op), Some(model)) => Some(format!("{op}, of {model}")),
            (op, model) => op.clone().or_else(|| model.clone()),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    User,
    Torch,
    /// Another installed package.
    Package,
    /// The standard library, or code that is in no file.
    Python,
}

fn owner(file: &str) -> Owner {
    // `<frozen runpy>`, `<string>`, generated code.
    if file.is_empty() || file.starts_with('<') {
        return Owner::Python;
    }
    let parts: Vec<&str> = components(file).collect();
    let folders = &parts[..parts.len().saturating_sub(1)];
    if let Some(place) = folders
        .iter()
        .rposition(|folder| matches!(*folder, "site-packages" | "dist-packages"))
    {
        return match parts.get(place + 1) {
            Some(&"torch") => Owner::Torch,
            _ => Owner::Package,
        };
    }
    let pairs = || parts.windows(2).map(|pair| (pair[0], pair[1]));
    if pairs().any(|(first, second)| first == "torch" && PACKAGES_OF_TORCH.contains(&second)) {
        return Owner::Torch;
    }
    let is_python = |folder: &str| {
        let version = folder.to_ascii_lowercase();
        let version = version.strip_prefix("python");
        version.is_some_and(|version| version.starts_with('3'))
    };
    // lib/python3.12/threading.py, and Python312\Lib\threading.py.
    let is_standard = pairs().any(|(first, second)| {
        matches!(first, "lib" | "lib64") && is_python(second) && second != parts[parts.len() - 1]
    }) || pairs().any(|(first, second)| is_python(first) && second == "Lib");
    match is_standard {
        true => Owner::Python,
        false => Owner::User,
    }
}

fn components(file: &str) -> impl DoubleEndedIterator<Item = &str> {
    file.split(['/', '\\']).filter(|part| !part.is_empty())
}

/// The file's name alone: a library's folders say less than its function.
fn innermost(frame: Frame<'_>) -> String {
    let file = components(frame.file).next_back().unwrap_or(frame.file);
    match file {
        "" => frame.function.to_owned(),
        file => format!("{file}:{} {}", frame.line, frame.function),
    }
}

fn short_line(frame: Frame<'_>) -> String {
    let parts: Vec<&str> = components(frame.file).collect();
    let path = match parts.len().checked_sub(NUM_FOLDERS + 1) {
        None | Some(0) => parts.join("/"),
        Some(first) => format!("…/{}", parts[first..].join("/")),
    };
    match frame.function {
        "<module>" => format!("{path}:{}", frame.line),
        function => format!("{path}:{} {function}", frame.line),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(lines: &[&str]) -> Origin {
        let mut frames = Frames::default();
        let stack: Vec<u32> = lines
            .iter()
            .map(|line| frames.frame_from_text(line))
            .collect();
        let stack = frames.stack(&stack);
        Origin::new(&frames, stack)
    }

    #[test]
    fn the_users_line_is_the_innermost_outside_of_libraries() {
        let found = origin(&[
            "/home/me/.venv/lib/python3.12/site-packages/torch/nn/functional.py:2567:linear",
            "/home/me/.venv/lib/python3.12/site-packages/torch/nn/modules/module.py:1790:_call_impl",
            "/home/me/.venv/lib/python3.12/site-packages/transformers/models/gpt2/modeling_gpt2.py:320:forward",
            "/home/me/.venv/lib/python3.12/site-packages/accelerate/utils/operations.py:800:forward",
            "/home/me/work/runs/project/src/train.py:88:training_step",
            "/home/me/work/runs/project/main.py:5:<module>",
        ]);
        assert_eq!(
            found.line.as_deref(),
            Some("…/project/src/train.py:88 training_step")
        );
        assert_eq!(
            found.library().as_deref(),
            Some("functional.py:2567 linear, of modeling_gpt2.py:320 forward")
        );
    }

    #[test]
    fn owners_are_told_by_folders() {
        for (file, expected) in [
            ("train.py", Owner::User),
            ("/home/me/torch/train.py", Owner::User),
            ("/home/python3/train.py", Owner::User),
            ("/srv/lib/model.py", Owner::User),
            ("C:\\me\\project\\train.py", Owner::User),
            ("/src/pytorch/torch/nn/modules/linear.py", Owner::Torch),
            (
                "/usr/lib/python3/dist-packages/torch/_tensor.py",
                Owner::Torch,
            ),
            (
                "C:\\Python312\\Lib\\site-packages\\torch\\_tensor.py",
                Owner::Torch,
            ),
            ("/opt/conda/lib/python3.11/threading.py", Owner::Python),
            ("C:\\Python312\\Lib\\threading.py", Owner::Python),
            ("<frozen runpy>", Owner::Python),
            ("", Owner::Python),
            (
                "/v/lib/python3.9/site-packages/peft/lora.py",
                Owner::Package,
            ),
        ] {
            assert_eq!(owner(file), expected, "{file}");
        }
    }

    #[test]
    fn functions_that_pass_calls_on_are_passed_over() {
        let module = |function| format!("/v/site-packages/torch/nn/modules/module.py:9:{function}");
        let passing = [module("<lambda>"), module("_apply")];
        let all = [&passing[0], &passing[1], &module("cuda"), "train.py:3:main"];
        assert_eq!(origin(&all).op.as_deref(), Some("module.py:9 cuda"));
        let only = [&passing[0], &passing[1], "train.py:3:main"];
        assert_eq!(origin(&only).op.as_deref(), Some("module.py:9 <lambda>"));
    }

    #[test]
    fn a_line_that_calls_the_core_itself_has_no_op() {
        let found = origin(&["/a/b/c/d/train.py:7:<module>"]);
        assert_eq!(found.line.as_deref(), Some("…/c/d/train.py:7"));
        assert_eq!(found.library(), None);
        assert_eq!(origin(&[]), Origin::default());
    }
}
