//! Settings with which a PyTorch run fits, where no single change is enough.

use cinch_config::remedy::{Effect, RemedyKind};
use cinch_diagnose::{Priced, Together};
use cinch_torch::choose::{Limits, Permissions, choose};
use cinch_torch::eager::optimizer::Optimizer;
use cinch_torch::eager::training::Precision;
use cinch_torch::model::Workload;
use cinch_torch::overhead::Overhead;

use super::wording::Wording;

/// Whether a change that leaves the result as it is fits by itself.
pub fn is_enough(priced: &[Priced], room: u64) -> bool {
    priced
        .iter()
        .any(|priced| priced.kind.effect() == Effect::KeepsResult && priced.safe <= room)
}

/// The changes with which the run fits: first those that leave its result as it is.
pub fn together(
    workload: &Workload,
    overhead: Overhead,
    room: u64,
    wording: &Wording<'_>,
) -> Option<Together> {
    let effective_batch = workload
        .batch
        .checked_mul(u64::from(workload.recipe.accumulation))?;
    let keeping = Permissions::default();
    let changing = Permissions {
        optimizer_8bit: true,
        precision: true,
        ..keeping
    };
    let chosen = [keeping, changing].into_iter().find_map(|may| {
        let limits = Limits {
            budget_bytes: room,
            overhead,
            effective_batch,
            may,
            division: None,
        };
        choose(workload, &limits).ok()
    })?;
    let kinds = [
        RemedyKind::MicroBatch,
        RemedyKind::Recomputation,
        RemedyKind::EightBitStates,
        RemedyKind::FusedOptimizer,
        RemedyKind::Bf16,
        RemedyKind::Bf16Weights,
        RemedyKind::ExpandableSegments,
    ];
    let changed: Vec<RemedyKind> = kinds
        .into_iter()
        .filter(|kind| differs(*kind, workload, &chosen.workload))
        .collect();
    Some(Together {
        command: wording.lines(workload, &chosen.workload, &changed),
        changes: chosen.changes,
        leaves: chosen.device_bytes,
    })
}

/// Whether two runs differ in what a change sets.
fn differs(kind: RemedyKind, before: &Workload, after: &Workload) -> bool {
    let is_eight_bit = after.recipe.optimizer == Optimizer::Adam8Bit;
    let other_optimizer = before.recipe.optimizer != after.recipe.optimizer;
    let other_precision = before.recipe.precision != after.recipe.precision;
    let in_bf16 = after.recipe.precision == Precision::BFloat16;
    match kind {
        RemedyKind::MicroBatch => before.batch != after.batch,
        RemedyKind::Recomputation => before.checkpoints != after.checkpoints,
        RemedyKind::EightBitStates => other_optimizer && is_eight_bit,
        RemedyKind::FusedOptimizer => other_optimizer && !is_eight_bit,
        RemedyKind::Bf16 => other_precision && !in_bf16,
        RemedyKind::Bf16Weights => other_precision && in_bf16,
        RemedyKind::ExpandableSegments => {
            before.allocator.expandable_segments != after.allocator.expandable_segments
        }
        _ => false,
    }
}
