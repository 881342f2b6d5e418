//! Guide 004: an embedder of four channels, and a script that estimates its memory.

use cinch_architecture::{Architecture, Naics};

use super::{Gigabytes, Guide, GuideClaim, Trained, activations, percent, run};
use crate::TorchError;
use crate::eager::checkpoint::Checkpointing;
use crate::eager::context::Libraries;
use crate::eager::training::Precision;
use crate::holdings::Holdings;
use crate::model::Workload;
use crate::overhead::H200;

const LENGTH: u64 = 512;

fn stage(batch: u64, config: Naics) -> Workload {
    let architecture = Architecture::Naics(config);
    Workload {
        checkpoints: Checkpointing::NonReentrant,
        ..run(architecture, batch, LENGTH, Precision::AutocastFloat16)
    }
}

pub(super) fn claims() -> Result<Vec<GuideClaim>, TorchError> {
    let guide = Guide("004");
    let reason = "its attention is not multiplied by the layers, and its coefficients come from no measurement";
    let mut claims = Vec::new();
    for (batch, negatives, claimed, card) in [
        (45, 24, 19.8, "a 24 GB card"),
        (64, 24, 26.5, "a 32 GB card"),
        (82, 24, 33.9, "a 40 GB card"),
        (128, 24, 51.5, "an 80 GB card"),
        (128, 8, 21.4, "an 80 GB card, later stages"),
    ] {
        claims.push(guide.run(
            &format!("batch {batch} with {negatives} negatives, for {card}"),
            Gigabytes(claimed, claimed),
            &stage(batch, Naics::new(negatives)),
            reason,
        )?);
    }
    let typical = stage(45, Naics::new(24));
    let (trained, weights) = (Trained::of(&typical)?, typical.weights()?.bytes);
    let holdings = Holdings::of(&typical)?;
    claims.extend([
        guide.bytes(
            "parameters",
            Gigabytes(0.2, 0.2),
            weights,
            "mixed precision keeps the weights in fp32",
        ),
        guide.bytes(
            "optimizer states",
            Gigabytes(0.8, 0.8),
            trained.moments,
            "frozen weights have none",
        ),
        guide.bytes(
            "gradients",
            Gigabytes(0.2, 0.2),
            trained.bytes,
            "frozen weights have none",
        ),
        guide.bytes(
            "activations",
            Gigabytes(17.5, 17.5),
            holdings.activations,
            "every anchor, positive and negative goes through four encoders",
        ),
        guide.bytes("the batch", Gigabytes(0.037, 0.037), holdings.batch, ""),
        guide.bytes(
            "context and framework",
            Gigabytes(1.5, 1.5),
            H200.bytes(Libraries::default()),
            "on an H200",
        ),
    ]);
    claims.push(guide.statement(
        "parameters that are trained",
        "about 1 %",
        format!("{} of the weights", percent(trained.bytes, weights)),
        "too low: the experts and the projections are trained whole",
    ));
    claims.push(checkpointing(&guide)?);
    Ok(claims)
}

fn checkpointing(guide: &Guide) -> Result<GuideClaim, TorchError> {
    let with = |checkpoints| {
        activations(&Workload {
            checkpoints,
            ..stage(45, Naics::new(24))
        })
    };
    let (kept, recomputed) = (
        with(Checkpointing::Off)?,
        with(Checkpointing::NonReentrant)?,
    );
    Ok(guide.statement(
        "gradient checkpointing",
        "saves about 75 % of the activations",
        format!("saves {}", percent(kept.saturating_sub(recomputed), kept)),
        "nearly right: layers are recomputed one at a time, and only their inputs stay",
    ))
}
