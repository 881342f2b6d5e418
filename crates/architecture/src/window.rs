//! Which layers of a decoder look back over a window only.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Windows {
    /// One mask for all layers (LLaMA, Mistral), of a window if there is one.
    Shared { window: Option<u64> },
    /// A mask for each kind of layer (Qwen2): the one without a window always, the other where
    /// layers use it.
    ByKind { sliding: Option<SlidingLayers> },
}

/// The layers from the first one on look back over a window only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlidingLayers {
    pub window: u64,
    pub first: u64,
}
