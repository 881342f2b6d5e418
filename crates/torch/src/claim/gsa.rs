//! Guide 001: a language model with gated sparse attention.

use cinch_architecture::{Architecture, Gsa};

use super::{Gigabytes, Guide, GuideClaim, Trained, activations, percent, run, size};
use crate::TorchError;
use crate::eager::checkpoint::Checkpointing;
use crate::eager::training::Precision;
use crate::model::Workload;

/// The card that the guide speaks of, in GB.
const CARD: f64 = 44.0;
/// What it expects of a run with micro batch 2.
const TWO: Gigabytes = Gigabytes(38.0, 40.0);

fn checkpointed(config: Gsa, batch: u64, length: u64, precision: Precision) -> Workload {
    Workload {
        checkpoints: Checkpointing::NonReentrant,
        ..run(Architecture::Gsa(config), batch, length, precision)
    }
}

pub(super) fn claims() -> Result<Vec<GuideClaim>, TorchError> {
    let guide = Guide("001");
    let published = |batch, length| {
        let config = Gsa::default();
        checkpointed(config, batch, length, Precision::AutocastBFloat16)
    };
    let (one, two) = (published(1, 1024), published(2, 1024));
    let trained = Trained::of(&one)?;
    let gathered = "keys and values are gathered for every query, [B, T, K, heads, width]";
    let mut claims = vec![
        guide.bytes(
            "weights",
            Gigabytes(7.0, 8.0),
            one.weights()?.bytes,
            &format!("{} M parameters, not 512 M", trained.values / 1_000_000),
        ),
        guide.bytes(
            "AdamW's states",
            Gigabytes(14.0, 16.0),
            trained.moments,
            "two fp32 moments for each parameter",
        ),
        guide.bytes(
            "activations of a micro batch of 1 at length 1024",
            Gigabytes(12.0, 15.0),
            activations(&one)?,
            gathered,
        ),
        guide.run(
            "a run with micro batch 1, length 1024",
            Gigabytes(35.0, 35.0),
            &one,
            "the states are a fraction of what is claimed",
        )?,
        guide.run(
            "a run with micro batch 2, length 1024",
            TWO,
            &two,
            "activations double, and are nearly all there is",
        )?,
        guide.run(
            "a run with micro batch 8, length 2048",
            Gigabytes(51.0, 51.0),
            &published(8, 2048),
            "the number is of one request that failed, not of the step",
        )?,
    ];
    let fp16 = checkpointed(Gsa::default(), 2, 1024, Precision::AutocastFloat16).predict()?;
    let bf16 = two.predict()?;
    claims.push(guide.statement(
        "fp16 with a gradient scaler instead of bf16",
        "slightly less memory",
        format!(
            "{} against {} in tensors",
            size(fp16.peak_allocated as f64),
            size(bf16.peak_allocated as f64)
        ),
        "no difference: both types have two bytes, and the scaler adds two numbers",
    ));
    let fewer_keys = Gsa {
        most_keys: Gsa::default().most_keys / 2,
        ..Gsa::default()
    };
    let fewer = checkpointed(fewer_keys, 2, 1024, Precision::AutocastBFloat16).predict()?;
    let saved = bf16.peak_allocated.saturating_sub(fewer.peak_allocated);
    claims.push(guide.statement(
        "k_max 512 instead of 1024",
        "saves memory",
        format!(
            "saves {} of the tensors' peak",
            percent(saved, bf16.peak_allocated)
        ),
        "right: what is gathered is halved",
    ));
    claims.push(guide.statement(
        "38 to 40 GB of a 44 GB card",
        "60 to 70 % of the card",
        format!(
            "{:.0} to {:.0} %",
            100.0 * TWO.0 / CARD,
            100.0 * TWO.1 / CARD
        ),
        "wrong by its own numbers",
    ));
    Ok(claims)
}
