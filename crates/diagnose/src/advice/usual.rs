//! What mostly helps where nothing is known of the run: its savings are not computed.

use cinch_config::remedy::RemedyKind;

use super::Case;
use crate::failure::Fix;
use crate::message::Framework;
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
        return vec![
            Fix::new("a smaller batch", "model.fit(…, batch_size=8)"),
            Fix::new(
                "take memory as it is needed, where the card is shared",
                "tf.config.experimental.set_memory_growth(gpu, True)",
            ),
        ];
    }
    // Servers have said all; of other libraries no setting is known.
    let is_torch = matches!(
        framework,
        Framework::PyTorch | Framework::BitsAndBytes | Framework::Nccl | Framework::Triton
    );
    if !is_torch {
        return match framework {
            Framework::Vllm | Framework::Sglang | Framework::Cinch => Vec::new(),
            _ => vec![Fix::new("a smaller batch, or a smaller input", "")],
        };
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
