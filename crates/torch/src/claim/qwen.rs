//! Guide 002: Qwen2.5-7B with adapters of rank 128.

use cinch_architecture::configured;
use serde_json::Map;

use super::{Gigabytes, Guide, GuideClaim, Trained, activations, run, size};
use crate::TorchError;
use crate::allocator::AllocatorConfig;
use crate::change::Change;
use crate::eager::checkpoint::Checkpointing;
use crate::eager::training::Precision;
use crate::model::Workload;

const RANK: u64 = 128;

/// The base in half precision, adapters in fp32 on every linear layer, checkpointed.
fn tuned(batch: u64, length: u64) -> Result<Workload, TorchError> {
    let architecture = configured("qwen2.5-7b", &Map::new())?.architecture;
    let base = run(architecture, batch, length, Precision::BFloat16);
    let mut tuned = Change::Adapters.apply(&base).unwrap_or(base);
    tuned.checkpoints = Checkpointing::NonReentrant;
    if let Some(lora) = &mut tuned.lora {
        lora.rank = RANK;
        lora.dropout = 0.05;
    }
    Ok(tuned)
}

pub(super) fn claims() -> Result<Vec<GuideClaim>, TorchError> {
    let guide = Guide("002");
    let (before, after) = (tuned(2, 2048)?, tuned(1, 1536)?);
    let trained = Trained::of(&before)?;
    let base = before.weights()?.bytes - trained.bytes;
    let whole = Workload {
        checkpoints: Checkpointing::Off,
        ..after.clone()
    };
    let mut claims = vec![
        guide.statement(
            "parameters trained at rank 128",
            "239 M",
            format!("{} M", trained.values / 1_000_000),
            "too low: it is the figure of a smaller model",
        ),
        guide.bytes(
            "the base model in half precision",
            Gigabytes(14.0, 14.0),
            base,
            "",
        ),
        guide.bytes(
            "adapters",
            Gigabytes(0.5, 0.5),
            trained.bytes,
            "peft makes them in fp32",
        ),
        guide.bytes(
            "gradients at batch 2",
            Gigabytes(2.5, 2.5),
            trained.bytes,
            "one fp32 value for each trained parameter, whatever the batch",
        ),
        guide.bytes(
            "optimizer states at batch 2",
            Gigabytes(1.5, 1.5),
            trained.moments,
            "two fp32 moments for each trained parameter",
        ),
        guide.bytes(
            "activations at batch 2, length 2048",
            Gigabytes(5.0, 5.0),
            activations(&before)?,
            "most of it is the loss: logits over the whole vocabulary, in half precision and in fp32, and their gradient",
        ),
        guide.run(
            "total at batch 2, length 2048",
            Gigabytes(25.0, 25.0),
            &before,
            "",
        )?,
        guide.run(
            "total at batch 1, length 1536, where 18 GB free are said to be enough",
            Gigabytes(18.0, 20.0),
            &after,
            "a card of 24 GB is not enough with the allocator's defaults",
        )?,
        guide.saving(
            "length 1536 instead of 2048, at batch 2",
            Gigabytes(1.5, 2.0),
            &before,
            &tuned(2, 1536)?,
            "",
        )?,
        guide.saving(
            "batch 1 instead of 2, at length 1536",
            Gigabytes(2.0, 3.0),
            &tuned(2, 1536)?,
            &after,
            "",
        )?,
        guide.saving(
            "gradient checkpointing at batch 1, length 1536",
            Gigabytes(1.0, 2.0),
            &whole,
            &after,
            "by far the largest saving, and listed among the small ones",
        )?,
    ];
    claims.push(allocator(&guide, &after)?);
    claims.push(guide.bytes(
        "gradients and states saved by the smaller batch",
        Gigabytes(1.0, 1.0),
        trained.bytes - Trained::of(&after)?.bytes,
        "their size depends on the parameters alone",
    ));
    Ok(claims)
}

/// The guide's two settings together, and the one of them that helps.
fn allocator(guide: &Guide, run: &Workload) -> Result<GuideClaim, TorchError> {
    let reserved = |settings: &str| {
        let workload = Workload {
            allocator: AllocatorConfig::parse(settings)?,
            ..run.clone()
        };
        Ok::<_, TorchError>(workload.predict()?.peak_reserved)
    };
    let (plain, expandable) = (reserved("")?, reserved("expandable_segments:True")?);
    let both = reserved("max_split_size_mb:128,expandable_segments:True")?;
    let verdict = if both < plain {
        "it saves, in what is reserved"
    } else {
        "wrong: blocks that may not be split undo what expandable segments save"
    };
    Ok(guide.statement(
        "max_split_size_mb:128 with expandable_segments:True, at batch 1, length 1536",
        "saves 0.5 to 1 GB",
        format!(
            "reserved: {} by default, {} with both, {} with expandable segments alone",
            size(plain as f64),
            size(both as f64),
            size(expandable as f64)
        ),
        verdict,
    ))
}
