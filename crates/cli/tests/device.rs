//! `--device` on a machine without a GPU: what needs one says so, what does not works.

mod common;

use std::fs;

use common::{Sandbox, metrics};

/// What the answer has to say: what is missing, and two ways to go on.
const NO_GPU: [&str; 4] = [
    "no CUDA driver was found",
    "hint: ",
    "--device cpu",
    "`cinch plan --device cuda`",
];

#[test]
fn what_runs_on_a_gpu_says_that_there_is_none() {
    let sandbox = Sandbox::new();
    sandbox
        .train_tiny("--max-steps 2 --output-dir run")
        .succeeds();
    for line in [
        "train --device cuda",
        "train --device cuda --precision bf16 --model-size small",
        "train --device cuda --resume run",
        "bench --device cuda --model-size tiny --steps 1",
        "profile --device cuda --model-size tiny",
        "generate run --device cuda --prompt a",
    ] {
        let answer = sandbox.cinch(line).fails(1, &NO_GPU);
        assert!(answer.stdout.is_empty(), "{line}: {}", answer.stdout);
    }
    let left: Vec<_> = fs::read_dir(sandbox.path())
        .expect("the current folder")
        .map(|entry| entry.expect("a name").file_name())
        .collect();
    assert_eq!(left, ["run"], "nothing is left behind");
}

#[test]
fn auto_trains_on_the_cpu() {
    let sandbox = Sandbox::new();
    let line = "--max-steps 3 --save-steps 3 --precision bf16";
    for device in ["auto", "cpu"] {
        sandbox
            .train_tiny(&format!(
                "{line} --device {device} --output-dir {device} --log-steps 1"
            ))
            .succeeds()
            .prints(&["bf16 is for GPUs: on the CPU this runs in fp32"])
            .says(&["training steps 1 to 3 on ", "1 thread"]);
        sandbox
            .cinch(&format!(
                "generate {device} --device {device} --prompt a --max-tokens 3 --threads 1"
            ))
            .succeeds();
    }
    let losses = |run: &str| -> Vec<_> {
        let lines = metrics(&sandbox.join(run)).into_iter();
        lines.filter_map(|line| line.get("loss").cloned()).collect()
    };
    assert!(!losses("auto").is_empty());
    assert_eq!(losses("auto"), losses("cpu"));
}

#[test]
fn a_plan_for_a_gpu_needs_none() {
    let sandbox = Sandbox::new();
    for model in ["mamba", "gpt2"] {
        for precision in ["fp32", "bf16", "fp16"] {
            let line = format!(
                "plan --model {model} --device cuda --precision {precision} \
                 --seq-len 1024 --vram 80gb --json"
            );
            let plan = sandbox.cinch(&line).succeeds().json();
            assert_eq!(plan["device"], "cuda", "{line}");
            assert_eq!(plan["fits"], true, "{line}");
            let bytes = |key: &str| plan["memory"][key].as_u64();
            assert!(bytes("arena_bytes") > Some(0), "{line}");
            // The context and what it loads, by the built-in figure.
            assert!(bytes("overhead_bytes") > Some(0), "{line}");
        }
    }
}
