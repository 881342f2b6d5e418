//! Guide 000: a Mamba language model whose scan runs step by step.

use cinch_architecture::{Architecture, Describe, Mamba, Model};

use super::{Gigabytes, Guide, GuideClaim, Trained, activations, percent, run, size};
use crate::TorchError;
use crate::eager::training::Precision;
use crate::model::Workload;

const HALF: Precision = Precision::AutocastFloat16;

fn sized(
    name: &str,
    batch: u64,
    length: u64,
    precision: Precision,
) -> Result<Workload, TorchError> {
    let family = <Mamba as Describe>::FAMILY;
    let model = Model::of_family(family, Some(name)).ok_or_else(|| TorchError::Beyond {
        problem: format!("{} has no size {name}", family.title),
    })?;
    Ok(run(model.architecture, batch, length, precision))
}

pub(super) fn claims() -> Result<Vec<GuideClaim>, TorchError> {
    let guide = Guide("000");
    let mut claims = Vec::new();
    for (name, claimed) in [("small", 0.2), ("medium", 0.6), ("large", 1.6)] {
        let bytes = sized(name, 1, 256, HALF)?.weights()?.bytes;
        let quote = format!("weights of the {name} model");
        claims.push(guide.bytes(
            &quote,
            Gigabytes(claimed, claimed),
            bytes,
            "four bytes a parameter",
        ));
    }
    for (batch, length, claimed) in [(1, 256, 0.1), (2, 512, 0.4), (4, 1024, 1.6)] {
        let bytes = activations(&sized("small", batch, length, HALF)?)?;
        claims.push(guide.bytes(
            &format!("activations at batch {batch}, length {length}, in fp16"),
            Gigabytes(claimed, claimed),
            bytes,
            "for the small model; the state of every timestep is kept for backward",
        ));
    }
    let example = sized("medium", 2, 512, HALF)?;
    let trained = Trained::of(&example)?;
    claims.push(guide.bytes(
        "optimizer states of the medium model",
        Gigabytes(1.2, 1.2),
        trained.moments,
        "twice the weights is the right rule, applied to the wrong weights",
    ));
    claims.push(guide.run(
        "total of the medium model at batch 2, length 512",
        Gigabytes(2.2, 2.2),
        &example,
        &format!(
            "the sum leaves out gradients ({}) and nearly all of the scan",
            size(trained.bytes as f64)
        ),
    )?);
    claims.push(half_precision(&guide)?);
    claims.push(chunks(&guide)?);
    Ok(claims)
}

fn half_precision(guide: &Guide) -> Result<GuideClaim, TorchError> {
    let whole = sized("small", 2, 512, Precision::Float32)?.predict()?;
    let half = sized("small", 2, 512, HALF)?.predict()?;
    let saved = whole.peak_allocated.saturating_sub(half.peak_allocated);
    Ok(guide.statement(
        "fp16 autocast, small model, batch 2, length 512",
        "about half the memory",
        format!(
            "saves {} of the tensors' peak",
            percent(saved, whole.peak_allocated)
        ),
        "wrong: the scan's exponentials stay in fp32, and so do weights, gradients and states",
    ))
}

/// What one more timestep costs, for every value of the state [B, T, d_inner, N] in every layer.
fn chunks(guide: &Guide) -> Result<GuideClaim, TorchError> {
    let (short, long) = (sized("small", 2, 256, HALF)?, sized("small", 2, 512, HALF)?);
    let more = activations(&long)? - activations(&short)?;
    let values = match &long.architecture {
        Architecture::Mamba(config) => {
            let inner = config.expansion * config.width;
            long.batch * (long.length - short.length) * inner * config.states * config.layers
        }
        _ => 1,
    };
    Ok(guide.statement(
        "scanning in chunks of 64 timesteps, cache cleared between them",
        "saves memory",
        format!(
            "another timestep makes backward hold {:.1} bytes more for every value of its state [B, d_inner, N], all of the layer counted",
            more as f64 / values as f64
        ),
        "saves nothing: autograd keeps each timestep's tensors whichever chunk they are in",
    ))
}
