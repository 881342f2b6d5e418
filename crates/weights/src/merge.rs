//! Merging an adapter into its base: a model folder that needs no adapter.
//!
//! Each adapted weight becomes `W + scale · B·A`, computed in f32 with one order of summation and
//! rounded once to the base's type (to nearest, ties to even). Everything else is copied.
//!
//! Memory: the two factors of one module in f32, and for a block of its rows the weights in f32
//! and in the base's type, 8 MiB or one row. Neither model nor tensor is held.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use safetensors::Dtype;

use crate::adapter::{Adapter, Factor};
use crate::companions::Companions;
use crate::error::WeightError;
use crate::half::{bf16_bits, f16_bits};
use crate::open::{Tensor, WeightFiles};
use crate::write::{TensorSpec, TensorWriter, WRITE_BUFFER, cut_shards, write_model_folder};

/// Elements of a block of rows.
const BLOCK_ELEMENTS: usize = 1 << 20;

/// The most that merging holds at once for factors of so many elements.
pub fn merging_bytes(a_elements: usize, b_elements: usize) -> u64 {
    let in_f32 = a_elements
        .saturating_add(b_elements)
        .saturating_add(2 * BLOCK_ELEMENTS)
        .saturating_mul(size_of::<f32>());
    (in_f32 as u64).saturating_add(WRITE_BUFFER as u64)
}

/// How far a merge is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergeProgress<'a> {
    /// The tensor that is being written.
    pub tensor: &'a str,
    pub bytes_done: u64,
    pub bytes_total: u64,
}

/// What a merge has made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Merged {
    /// Modules whose weights have changed.
    pub num_modules: usize,
    /// Files of weights, by name, and the index where there are several.
    pub files: Vec<PathBuf>,
    /// What the user should know: another base by name, no config.json.
    pub notes: Vec<String>,
}

/// Writes the folder of a model with an adapter merged into it, whole or not at all. There is
/// nothing at `to` yet but an empty folder at most.
///
/// The files are cut as the base's are, or at `shard_bytes`. `progress` is told of every block
/// and can stop the work; then nothing is kept. Where the adapter gives embeddings or head numbers
/// of their own and the base has one tensor for both, the merged model has two.
pub fn merge(
    base: &mut WeightFiles,
    adapter: &Adapter,
    to: &Path,
    shard_bytes: Option<u64>,
    progress: &mut dyn FnMut(MergeProgress<'_>) -> ControlFlow<()>,
) -> Result<Merged, WeightError> {
    let is_untied = adapter.untie(base);
    let base: &WeightFiles = base;
    let mut notes = adapter.check_base(base)?;
    if is_untied {
        notes.push(format!(
            "embeddings and head are one in `{}` and two in the merged model, because the adapter \
             changes them by themselves",
            base.folder().display()
        ));
    }
    let shards = match shard_bytes {
        Some(limit) => cut_shards(&specs(base.tensors()), limit)?,
        None => base
            .tensors()
            .chunk_by(|one, next| one.file == next.file)
            .map(specs)
            .collect(),
    };
    let mut merging = Merging::new(base, adapter, to, progress);
    let mut contents = |tensor: &TensorSpec<'_>, out: &mut TensorWriter<'_>| {
        merging.write(base.tensor(tensor.name)?, out)
    };
    let companions = Companions {
        from: base.folder(),
        is_untied,
    };
    let written = write_model_folder(to, &shards, companions, &mut contents)?;
    if !written.companions.contains(&"config.json") {
        notes.push(format!(
            "`{}` has no config.json, without which transformers does not load the merged model",
            base.folder().display()
        ));
    }
    Ok(Merged {
        num_modules: adapter.modules.len(),
        files: written.weights,
        notes,
    })
}

fn specs(tensors: &[Tensor]) -> Vec<TensorSpec<'_>> {
    tensors.iter().map(Tensor::spec).collect()
}

/// A merge while it goes on.
struct Merging<'a> {
    base: &'a WeightFiles,
    adapter: &'a Adapter,
    to: &'a Path,
    /// Places in the adapter's lists, by the names of the base's tensors.
    modules: HashMap<String, usize>,
    replaced: HashMap<&'a str, &'a str>,
    progress: &'a mut dyn FnMut(MergeProgress<'_>) -> ControlFlow<()>,
    bytes_done: u64,
}

impl<'a> Merging<'a> {
    fn new(
        base: &'a WeightFiles,
        adapter: &'a Adapter,
        to: &'a Path,
        progress: &'a mut dyn FnMut(MergeProgress<'_>) -> ControlFlow<()>,
    ) -> Merging<'a> {
        let modules = adapter.modules.iter().enumerate();
        let replaced = adapter.replaced.iter();
        Merging {
            base,
            adapter,
            to,
            modules: modules
                .map(|(place, module)| (module.weight(), place))
                .collect(),
            replaced: replaced
                .map(|replaced| (replaced.tensor.as_str(), replaced.stored.as_str()))
                .collect(),
            progress,
            bytes_done: 0,
        }
    }

    fn write(&mut self, tensor: &Tensor, out: &mut TensorWriter<'_>) -> Result<(), WeightError> {
        if let Some(&place) = self.modules.get(&tensor.name) {
            return self.write_merged(tensor, place, out);
        }
        let (files, stored) = self.source(tensor);
        let mut bytes = Vec::new();
        for rows in blocks(tensor) {
            bytes.resize(
                rows.len() * tensor.row_elements() * tensor.dtype.bitsize() / 8,
                0,
            );
            files.read_as(stored, rows, tensor.dtype, &mut bytes)?;
            self.put(tensor, &bytes, out)?;
        }
        Ok(())
    }

    /// Where a tensor's numbers are: in the adapter, where it has them whole, else in the base.
    fn source<'t>(&self, tensor: &'t Tensor) -> (&'a WeightFiles, &'t str)
    where
        'a: 't,
    {
        match self.replaced.get(tensor.name.as_str()) {
            Some(&stored) => (&self.adapter.files, stored),
            None => (self.base, tensor.name.as_str()),
        }
    }

    fn write_merged(
        &mut self,
        tensor: &Tensor,
        place: usize,
        out: &mut TensorWriter<'_>,
    ) -> Result<(), WeightError> {
        let module = &self.adapter.modules[place];
        let scale = self.adapter.config.scale_of(&module.name)? as f32;
        let (rank, inputs) = (module.rank, module.inputs);
        let mut a = vec![0.0; rank * inputs];
        let mut b = vec![0.0; module.outputs * rank];
        self.adapter.read_f32(place, Factor::A, &mut a)?;
        self.adapter.read_f32(place, Factor::B, &mut b)?;
        let (files, stored) = self.source(tensor);
        let mut weights = Vec::new();
        let mut bytes = Vec::new();
        for rows in blocks(tensor) {
            weights.resize(rows.len() * inputs, 0.0);
            files.read_f32(stored, rows.clone(), &mut weights)?;
            let b = &b[rows.start * rank..rows.end * rank];
            add_product(&mut weights, &a, b, inputs, rank, scale);
            encode(&weights, tensor.dtype, &mut bytes)
                .ok_or_else(|| self.base.not_converted(tensor, tensor.dtype))?;
            self.put(tensor, &bytes, out)?;
        }
        Ok(())
    }

    fn put(
        &mut self,
        tensor: &Tensor,
        bytes: &[u8],
        out: &mut TensorWriter<'_>,
    ) -> Result<(), WeightError> {
        out.put(bytes)?;
        self.bytes_done += bytes.len() as u64;
        let progress = MergeProgress {
            tensor: &tensor.name,
            bytes_done: self.bytes_done,
            bytes_total: self.base.num_bytes(),
        };
        match (self.progress)(progress) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(WeightError::Stopped {
                path: self.to.to_owned(),
            }),
        }
    }
}

/// The rows of a tensor, block by block.
fn blocks(tensor: &Tensor) -> impl Iterator<Item = std::ops::Range<usize>> {
    let rows = tensor.rows();
    let step = (BLOCK_ELEMENTS / tensor.row_elements().max(1)).max(1);
    (0..rows)
        .step_by(step)
        .map(move |start| start..(start + step).min(rows))
}

/// Adds scale · B·A to rows of W: W is [rows, inputs], A [rank, inputs], B [rows, rank]. Sums run
/// over the rank from its first, so that neither blocks nor threads change a result.
fn add_product(w: &mut [f32], a: &[f32], b: &[f32], inputs: usize, rank: usize, scale: f32) {
    if inputs == 0 {
        return;
    }
    let row = |sum: &mut Vec<f32>, (w, b): (&mut [f32], &[f32])| {
        sum.clear();
        sum.resize(inputs, 0.0);
        for (a, &factor) in a.chunks_exact(inputs).zip(b) {
            for (sum, &value) in sum.iter_mut().zip(a) {
                *sum += factor * value;
            }
        }
        for (w, &sum) in w.iter_mut().zip(sum.iter()) {
            *w += scale * sum;
        }
    };
    w.par_chunks_mut(inputs)
        .zip(b.par_chunks(rank))
        .for_each_init(Vec::new, row);
}

/// Values as bytes of a type, if it is one that is written.
fn encode(values: &[f32], dtype: Dtype, bytes: &mut Vec<u8>) -> Option<()> {
    bytes.clear();
    bytes.resize(values.len() * dtype.bitsize() / 8, 0);
    match dtype {
        Dtype::F32 => fill(values, bytes, f32::to_le_bytes),
        Dtype::BF16 => fill(values, bytes, |value| bf16_bits(value).to_le_bytes()),
        Dtype::F16 => fill(values, bytes, |value| f16_bits(value).to_le_bytes()),
        _ => return None,
    }
    Some(())
}

fn fill<const BYTES: usize>(values: &[f32], bytes: &mut [u8], encode: impl Fn(f32) -> [u8; BYTES]) {
    let (places, _) = bytes.as_chunks_mut();
    for (&value, place) in values.iter().zip(places) {
        *place = encode(value);
    }
}
