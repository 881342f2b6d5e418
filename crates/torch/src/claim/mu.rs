//! Guide 003: a model with sixteen small attentions and a large one in every layer.

use cinch_architecture::{Architecture, Mu};

use super::{Gigabytes, Guide, GuideClaim, activations, percent, run};
use crate::TorchError;
use crate::eager::training::Precision;
use crate::eager::{AllocationCategory, Event};
use crate::model::Workload;

fn layered(layers: u64, batch: u64, length: u64, precision: Precision) -> Workload {
    let config = Mu {
        layers,
        ..Mu::default()
    };
    run(Architecture::Mu(config), batch, length, precision)
}

/// What the attentions of a layer make in forward.
struct Attentions {
    block_projections: u64,
    block_weights: u64,
    cross_projections: u64,
    cross_weights: u64,
}

impl Attentions {
    /// Reads the first forward of the first layer: each attention is some products, then one softmax. The blocks come
    /// first, each with three projections; the last attention, over all of them, has one for all three.
    fn of(workload: &Workload) -> Result<Attentions, TorchError> {
        let events = workload.events()?;
        let forward: Vec<&Event> = events
            .iter()
            .filter(|event| {
                event.scope.layer == Some(0) && event.category == AllocationCategory::Activation
            })
            .filter(|event| !event.is_free && matches!(event.op, "mm" | "addmm" | "_softmax"))
            .collect();
        let layer: Vec<&[&Event]> = forward
            .split_inclusive(|event| event.op == "_softmax")
            .collect();
        let heaviest = |attention: &[&Event]| {
            let softmax = attention.last().map_or(0, |event| event.bytes);
            let products = attention.iter().rev().skip(1).map(|event| event.bytes);
            (
                softmax,
                products.clone().max().unwrap_or(0),
                products.sum::<u64>(),
            )
        };
        // A layer's attention with the largest weights is the one over all blocks; those before it are the blocks'.
        let first = layer.first().map_or((0, 0, 0), |part| heaviest(part));
        let cross = layer
            .iter()
            .position(|part| heaviest(part).0 > first.0)
            .unwrap_or(0);
        let (cross_weights, cross_projections, _) =
            layer.get(cross).map_or((0, 0, 0), |part| heaviest(part));
        Ok(Attentions {
            block_projections: first.2 * cross as u64,
            block_weights: first.0 * cross as u64,
            cross_projections,
            cross_weights,
        })
    }
}

pub(super) fn claims() -> Result<Vec<GuideClaim>, TorchError> {
    let guide = Guide("003");
    let layers = Mu::default().layers;
    let large = layered(layers, 32, 512, Precision::Float32);
    let fixed = layered(layers, 4, 256, Precision::AutocastFloat16);
    let attentions = Attentions::of(&large)?;
    let one_layer =
        activations(&large)? - activations(&layered(layers - 1, 32, 512, Precision::Float32))?;
    let own_product = "its own product of the shapes, at four bytes a value, is this figure";
    let mut claims = vec![
        guide.bytes(
            "query, key and value of a layer's 16 block attentions, batch 32, length 512",
            Gigabytes(1.57, 1.57),
            attentions.block_projections,
            own_product,
        ),
        guide.bytes(
            "attention weights of a layer's 16 block attentions",
            Gigabytes(2.15, 2.15),
            attentions.block_weights,
            own_product,
        ),
        guide.bytes(
            "query, key and value of a layer's cross attention",
            Gigabytes(0.12, 0.12),
            attentions.cross_projections,
            own_product,
        ),
        guide.bytes(
            "attention weights of a layer's cross attention",
            Gigabytes(1.07, 1.07),
            attentions.cross_weights,
            own_product,
        ),
        guide.bytes(
            "a layer, batch 32, length 512",
            Gigabytes(5.71, 5.71),
            one_layer,
            "attention weights are kept after softmax, after dropout and as its mask, and all of it still is less",
        ),
        guide.run(
            "the model, batch 32, length 512, in fp32",
            Gigabytes(136.9, 136.9),
            &large,
            "24 times a layer that is too large",
        )?,
        guide.run(
            "the model, batch 4, length 256, in fp16",
            Gigabytes(4.3, 4.3),
            &fixed,
            "",
        )?,
    ];
    let (whole, half) = (
        fixed.predict()?,
        layered(layers / 2, 4, 256, Precision::AutocastFloat16).predict()?,
    );
    claims.push(guide.statement(
        "half the layers",
        "half the memory",
        format!(
            "{} of the tensors' peak remains",
            percent(half.peak_allocated, whole.peak_allocated)
        ),
        "less than half is saved: what is around the layers stays",
    ));
    claims.push(guide.statement(
        "del of block outputs in forward",
        "frees them at once",
        "0 bytes".into(),
        "wrong: autograd holds what backward needs, whatever Python calls it",
    ));
    claims.push(guide.statement(
        "batch 4 instead of 32",
        "the same gradients",
        "an effective batch of 4".into(),
        "wrong without accumulation: eight micro batches a step would make them the same",
    ));
    Ok(claims)
}
