//! Checkpoints: what a killed run needs to go on as if it had never stopped.
//!
//! One folder per save, `<run>/checkpoints/step-00000123/`, with four files:
//!
//! | file | holds |
//! |---|---|
//! | `model.safetensors` | the weights, readable by any safetensors reader |
//! | `optimizer.safetensors` | the optimizer's states |
//! | `state.json` | step, schedule, random state, data position, config |
//! | `checksums.json` | SHA-256 and length of the other three |
//!
//! A folder with that name is complete: it is written under a `.partial-…` name, every file and
//! the folder itself are forced to the disk, and only then does one rename give it its name.
//! A removal goes the other way round, through a `.trash-…` name. A process killed at any moment
//! therefore leaves a whole checkpoint or none.
//!
//! Several ranks write one checkpoint together, each its parts of the same files (`shared.rs`): what
//! comes out does not tell how many there were, and loads on any number.
//!
//! Saving takes no host memory for tensors but a write buffer and, where they lie on a GPU, one
//! piece of [`PIECE_BYTES`](cinch_weights::PIECE_BYTES); loading takes as much.

mod checksums;
mod error;
mod folder;
mod load;
mod shared;
mod store;
mod tensor_file;

pub use cinch_weights::{Dtype, WeightFiles};
pub use error::{CheckpointError, Damage};
pub use folder::step_name as folder_name;
pub use load::{Loaded, load, load_state, load_weights, resolve, verify};
pub use store::{Best, Entry, Store};
pub use tensor_file::{TakePiece, TensorBytes, TensorPart, TensorView};

/// The weights.
pub const MODEL_FILE: &str = "model.safetensors";
/// The optimizer's states.
pub const OPTIMIZER_FILE: &str = "optimizer.safetensors";
/// Everything else that the run needs to go on.
pub const STATE_FILE: &str = "state.json";
/// Length and SHA-256 of the other files.
pub const CHECKSUMS_FILE: &str = "checksums.json";
