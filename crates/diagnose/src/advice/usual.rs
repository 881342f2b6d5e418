//! What mostly helps where nothing is known of the run: its savings are not computed.

use cinch_config::remedy::RemedyKind;

use super::Case;
use crate::failure::Fix;
use crate::frame::Phase;
use crate::message::{Accelerator, Framework};
use crate::spelling::{Spelling, Values};
use crate::words::Known;

pub fn fixes(case: &Case<'_>) -> Vec<Fix> {
    let told = case.told;
    let value = |known| told.settings.get(&known).map(|(value, _)| value.as_str());
    let framework = case.incident.message.framework;
    if framework == Framework::Jax {
        return vec![
            Fix::new("a smaller batch, and more of them for one update", ""),
            Fix::new("recompute activations", "jax.checkpoint(layer)"),
            Fix::new(
                "let outputs take over their inputs' memory",
                "jax.jit(step, donate_argnums=(0,))",
            ),
        ];
    }
    if framework == Framework::TensorFlow {
        let mut fixes = vec![Fix::new("a smaller batch", "model.fit(…, batch_size=8)")];
        if case.incident.message.accelerator != Accelerator::Tpu {
            fixes.push(Fix::new(
                "take memory as it is needed, where the card is shared",
                "tf.config.experimental.set_memory_growth(gpu, True)",
            ));
        }
        return fixes;
    }
    if framework == Framework::LlamaCpp {
        return vec![
            Fix::new("fewer layers on the card", "llama-server -m MODEL -ngl 20"),
            Fix::new(
                "a shorter context, whose keys and values take memory from the start",
                "llama-server -m MODEL -c 8192",
            ),
            Fix::new(
                "keys and values in eight bits",
                "llama-server -m MODEL -fa on -ctk q8_0 -ctv q8_0",
            ),
        ];
    }
    // Servers have said all; of other libraries no setting is known.
    if !case.is_torch() {
        return match framework {
            Framework::Vllm | Framework::Sglang | Framework::Cinch => Vec::new(),
            _ => vec![Fix::new("a smaller batch, or a smaller input", "")],
        };
    }
    // What only generates has no gradients to accumulate.
    let trains = case.incident.steps > 0 || value(Known::Batch).is_some();
    if case.incident.phase == Some(Phase::Generation) && !trains {
        return vec![Fix::new(
            "weights in two bytes each, or quantised",
            "from_pretrained(…, dtype=torch.bfloat16)",
        )];
    }
    let spelling = Spelling::of(&told.programs);
    let lines = |kind| spelling.lines(kind, Values::default()).unwrap_or_default();
    let mut fixes = Vec::new();
    let batch: Option<u64> = value(Known::Batch).and_then(|text| text.parse().ok());
    let accumulation: u64 = value(Known::Accumulation)
        .and_then(|text| text.parse().ok())
        .unwrap_or(1);
    match batch {
        Some(1) => {}
        Some(batch) => {
            let half = (1..=batch / 2)
                .rev()
                .find(|half| batch.saturating_mul(accumulation) % half == 0)
                .unwrap_or(1);
            fixes.push(Fix::new(
                "half the micro batch and twice the accumulation: the same effective batch",
                &spelling.micro_batch(Some((half, batch.saturating_mul(accumulation) / half))),
            ));
        }
        None => fixes.push(Fix::new(
            "half the micro batch and twice the accumulation: the same effective batch",
            &spelling.micro_batch(None),
        )),
    }
    if value(Known::Checkpointing) != Some("true") {
        fixes.push(Fix::new(
            "recompute activations in the backward pass",
            &lines(RemedyKind::Recomputation),
        ));
    }
    if value(Known::Bf16) != Some("true") && value(Known::Fp16) != Some("true") {
        fixes.push(Fix::new("compute in bf16", &lines(RemedyKind::Bf16)));
    }
    let is_told = value(Known::Model).is_some();
    fixes.push(Fix::new(
        "let cinch compute what each setting saves for your run",
        match is_told {
            true => "cinch diagnose LOG --batch-size N --seq-len N",
            false => "cinch diagnose LOG --config FILE",
        },
    ));
    fixes
}
