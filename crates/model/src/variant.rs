//! Variants of a configured model that a search needs: the settings that a model lets a planner
//! choose, and the same model with another number of blocks.
//!
//! They are declared here, because only this crate and the configuration know a model by name.

use cinch_config::ModelConfig;

/// A setting of a model that changes its memory and speed but not its result.
#[derive(Clone, Copy, Debug)]
pub struct Tunable {
    /// The key of the registry.
    pub key: &'static str,
    /// Values worth trying besides the configured one.
    pub candidates: &'static [usize],
    /// What a value means: "scan states every 64 steps".
    pub describe: fn(usize) -> String,
    pub get: fn(&ModelConfig) -> Option<usize>,
    pub set: fn(&mut ModelConfig, usize),
}

/// The tunable settings of all models; a model has those that [`Tunable::get`] finds in it.
pub fn tunables() -> &'static [Tunable] {
    TUNABLES
}

static TUNABLES: &[Tunable] = &[Tunable {
    key: "model.scan_chunk",
    // Fewer kept states against a backward that is cut into fewer parts: below 64 steps the
    // states outweigh everything else, beyond 256 they no longer count.
    candidates: &[64, 256],
    describe: |steps| format!("scan states every {steps} steps"),
    get: |model| match model {
        ModelConfig::Mamba(config) => Some(config.scan_chunk),
        ModelConfig::Gpt2(_) => None,
    },
    set: |model, steps| match model {
        ModelConfig::Mamba(config) => config.scan_chunk = steps,
        ModelConfig::Gpt2(_) => {}
    },
}];

/// The same model with another number of blocks.
pub fn with_num_blocks(model: &ModelConfig, blocks: usize) -> ModelConfig {
    let mut model = model.clone();
    match &mut model {
        ModelConfig::Mamba(config) => config.n_layers = blocks,
        ModelConfig::Gpt2(config) => config.n_layers = blocks,
    }
    model
}
