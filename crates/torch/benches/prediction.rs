//! How long a prediction takes, as the best of several runs: `cargo bench -p cinch-torch --bench prediction`.
//!
//! Runs of the measured sizes, and the per-timestep Mamba loop at 2048 steps.
#![expect(clippy::print_stdout, reason = "its output is its purpose")]

use std::time::Instant;

use cinch_torch::truth;

const RUNS: usize = 5;

const CASES: &str = concat!(
    r#"{"case": {"name": "GPT-2 b4 t512", "model": "gpt2", "batch": 4, "seq": 512}}"#,
    "\n",
    r#"{"case": {"name": "Qwen2.5-7B LoRA b2 t2048", "model": "qwen2.5-7b", "batch": 2, "seq": 2048, "precision": "bf16", "#,
    r#""ckpt": true, "lora": {"r": 128, "dropout": 0.05, "targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "#,
    r#""up_proj", "down_proj"]}}}"#,
    "\n",
    r#"{"case": {"name": "MU b32 t512", "family": "mu", "batch": 32, "seq": 512, "precision": "amp_fp16"}}"#,
    "\n",
    r#"{"case": {"name": "Mamba small t2048", "family": "mamba", "size": "small", "batch": 1, "seq": 2048, "precision": "amp_fp16"}}"#,
    "\n",
    r#"{"case": {"name": "Mamba medium t2048", "family": "mamba", "size": "medium", "batch": 1, "seq": 2048, "precision": "amp_fp16"}}"#,
    "\n",
    r#"{"case": {"name": "Mamba large t2048", "family": "mamba", "size": "large", "batch": 1, "seq": 2048, "precision": "amp_fp16"}}"#,
);

fn main() {
    for measurement in truth::parse(CASES, "bench").expect("lines in the format of measured runs") {
        let workload = measurement.case.workload().expect("known settings");
        let mut best = f64::INFINITY;
        for _ in 0..RUNS {
            let start = Instant::now();
            let prediction = workload.predict().expect("a run that can be predicted");
            best = best.min(start.elapsed().as_secs_f64());
            assert!(prediction.peak_reserved > 0, "a run takes memory");
        }
        println!("{:<26} {:>8.1} ms", measurement.case.name, best * 1e3);
    }
}
