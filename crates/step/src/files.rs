//! What files take of the host's memory on their way. Saving, resuming and merging use nothing of
//! a GPU: tensors are read where they lie, in pieces, and each piece is written before the next.

use cinch_graph::{Graph, Parameter, Storage, Target};
use cinch_weights::{PIECE_BYTES, WRITE_BUFFER, merging_bytes};
use serde::Serialize;

/// The most that each kind of work with files holds at once, headers and names aside. None of
/// them is done while another is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct FileMemory {
    /// A checkpoint, or an adapter, on its way to the disk.
    pub saving: u64,
    /// A checkpoint or a model on its way into the arena.
    pub loading: u64,
    /// `cinch merge`, a process of its own; 0 where there are no adapters.
    pub merging: u64,
}

impl FileMemory {
    pub(crate) fn of(training: &Graph, target: Target) -> Self {
        let trained = || training.parameters.iter().filter(|p| p.is_trained());
        let saved = trained().flat_map(|p| [p.master].into_iter().chain(p.states()));
        let largest = saved.map(|id| training.ty(id).bytes()).max().unwrap_or(0);
        Self {
            saving: through_host(largest, target).saturating_add(WRITE_BUFFER as u64),
            loading: training
                .parameters
                .iter()
                .map(|parameter| loading_bytes(training, parameter, target))
                .max()
                .unwrap_or(0),
            merging: merging(training),
        }
    }

    /// What a run needs of it.
    pub fn of_run(&self) -> u64 {
        self.saving.max(self.loading)
    }
}

/// What a tensor takes in host memory while it is copied: nothing where it lies there.
fn through_host(bytes: u64, target: Target) -> u64 {
    match target {
        Target::Cpu => 0,
        Target::Cuda => bytes.min(PIECE_BYTES as u64),
    }
}

fn loading_bytes(training: &Graph, parameter: &Parameter, target: Target) -> u64 {
    let bytes = training.ty(parameter.master).bytes();
    match parameter.storage {
        // Codes and scales of one matrix, and the scales as they were found.
        Storage::Quantised(_) => {
            let scales = parameter.code_scales.iter();
            let scales = scales.map(|&id| training.ty(id).bytes()).sum::<u64>();
            let blocks = parameter.shape.elements() / cinch_graph::op::Quantisation::NF4_BLOCK;
            bytes
                .saturating_add(scales)
                .saturating_add(size_of::<f32>() as u64 * blocks as u64)
        }
        Storage::Trained | Storage::TrainedAsRead | Storage::Frozen => through_host(bytes, target),
    }
}

/// The largest factors of each kind bound those of any module.
fn merging(training: &Graph) -> u64 {
    let largest = |ending: &str| {
        let named = |p: &&Parameter| p.parts.iter().any(|part| part.name.ends_with(ending));
        let factors = training.parameters.iter().filter(named);
        // Modules that share one factor here have one each in the files.
        let bytes = |p: &Parameter| p.parts.iter().map(|part| part.rows).max().unwrap_or(0);
        factors
            .map(|p| bytes(p).saturating_mul(p.shape.width()))
            .max()
    };
    match (largest(".lora_A.weight"), largest(".lora_B.weight")) {
        (Some(a), Some(b)) => merging_bytes(a, b),
        _ => 0,
    }
}
