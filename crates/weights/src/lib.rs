//! Files of models and adapters: what is in them, in which type and shape, and how it gets into
//! memory and back to a disk. Nothing here knows a graph, a plan or a device.
//!
//! [`WeightFiles`] opens a model folder (one safetensors file, or shards with their index), checks
//! every header and reads tensors by rows, in their own type, converted, or quantised.
//! [`write_model_folder`] and [`write_adapter`] write tensor by tensor, whole folders or none.
//! [`Adapter`] is one of peft's, [`AdapterConfig::adapted`] says which modules it is put on, and
//! [`merge`] makes one model of it and its base.
//!
//! ```no_run
//! use cinch_weights::WeightFiles;
//! use std::path::Path;
//!
//! # fn main() -> Result<(), cinch_weights::WeightError> {
//! let files = WeightFiles::open(Path::new("models/tiny"))?;
//! let embedding = files.tensor("model.embed_tokens.weight")?;
//! let mut row = vec![0.0; embedding.row_elements()];
//! files.read_f32("model.embed_tokens.weight", 5..6, &mut row)?;
//! # Ok(())
//! # }
//! ```

mod adapter;
mod companions;
mod error;
mod find;
mod half;
mod header;
mod merge;
mod open;
mod quantize;
mod read;
mod write;

pub use adapter::{
    ADAPTER_CONFIG_FILE, ADAPTER_FILE, AdaptedModule, Adapter, AdapterConfig, AdapterContents,
    AdapterModule, AdapterParts, AdapterTensor, Bias, Factor, Modules, Replaced, Targets,
    write_adapter, write_adapter_files,
};
pub use companions::Companions;
pub use error::WeightError;
pub use find::find_folder;
pub use half::{bf16_bits, bf16_value, f16_bits, f16_value};
pub use merge::{MergeProgress, Merged, merge, merging_bytes};
pub use open::{Tensor, WeightFiles};
pub use quantize::{
    DYNAMIC_MAP, NF4_MAP, Nf4, Nf4Layout, Nf4Parts, dequantize_int8, dequantize_nf4,
    dequantize_scales, quantize_int8, quantize_nf4, quantize_nf4_bf16, quantize_scales,
    scale_offset,
};
pub use read::PIECE_BYTES;
pub use safetensors::Dtype;
pub use write::{
    Contents, Layout, TensorSpec, TensorWriter, WRITE_BUFFER, WrittenFolder, cut_shards,
    write_file, write_model, write_model_folder,
};
