//! Tensors on the way into a safetensors file, from where they lie: a save must not hold a second
//! copy of the weights. What lies in host memory is written from there; anything else comes in
//! pieces, one of which is in host memory at a time.

use std::fmt::Debug;
use std::io::Write;
use std::path::Path;

use cinch_weights::{Dtype, TensorSpec, WeightError};

use super::error::{CheckpointError, IoContext};

/// What takes the bytes of a tensor, one piece after the other.
pub type TakePiece<'a> = dyn FnMut(&[u8]) -> Result<(), CheckpointError> + 'a;

/// The bytes of a tensor, wherever they are: row-major elements, little-endian.
pub trait TensorBytes: Debug {
    fn num_bytes(&self) -> u64;

    /// Gives all of them, in order, in pieces of any size.
    fn give(&self, take: &mut TakePiece<'_>) -> Result<(), CheckpointError>;
}

impl dyn TensorBytes + '_ {
    /// A copy of all of them.
    pub fn to_vec(&self) -> Result<Vec<u8>, CheckpointError> {
        let mut all = Vec::new();
        self.give(&mut |piece| {
            all.extend_from_slice(piece);
            Ok(())
        })?;
        Ok(all)
    }
}

impl TensorBytes for Vec<u8> {
    fn num_bytes(&self) -> u64 {
        self.len() as u64
    }

    fn give(&self, take: &mut TakePiece<'_>) -> Result<(), CheckpointError> {
        take(self)
    }
}

/// A named tensor.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    pub name: &'a str,
    pub shape: &'a [usize],
    pub dtype: Dtype,
    pub bytes: &'a dyn TensorBytes,
}

/// What one of several ranks writes of a tensor.
#[derive(Clone, Copy, Debug)]
pub struct TensorPart<'a> {
    pub name: &'a str,
    /// Of the whole tensor.
    pub shape: &'a [usize],
    pub dtype: Dtype,
    /// Where the part begins in the whole.
    pub first_byte: u64,
    /// None where another rank writes all of it.
    pub bytes: Option<&'a dyn TensorBytes>,
}

/// A safetensors file of which this rank writes some parts. The header and the place of every
/// tensor follow from names and shapes, which all ranks know.
#[derive(Debug)]
pub(super) struct SharedLayout<'a> {
    layout: cinch_weights::Layout,
    /// With their offsets in the file.
    parts: Vec<(u64, &'a TensorPart<'a>)>,
}

impl<'a> SharedLayout<'a> {
    pub(super) fn new(tensors: &'a [TensorPart<'a>]) -> Result<Self, WeightError> {
        let spec = |tensor: &'a TensorPart<'a>| TensorSpec {
            name: tensor.name,
            dtype: tensor.dtype,
            shape: tensor.shape,
        };
        let specs: Vec<TensorSpec<'_>> = tensors.iter().map(spec).collect();
        let layout = cinch_weights::Layout::new(&specs)?;
        let mut offset = layout.header().len() as u64;
        let mut parts = Vec::with_capacity(tensors.len());
        for &place in layout.order() {
            parts.push((offset + tensors[place].first_byte, &tensors[place]));
            offset += specs[place].num_bytes()?;
        }
        Ok(Self { layout, parts })
    }

    /// Length of the whole file.
    pub(super) fn num_bytes(&self) -> u64 {
        self.layout.num_bytes()
    }

    pub(super) fn header(&self) -> &[u8] {
        self.layout.header()
    }

    /// Writes this rank's parts where they belong.
    pub(super) fn write_parts(
        &self,
        mut write_at: impl FnMut(&[u8], u64) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        for (offset, part) in &self.parts {
            let Some(bytes) = part.bytes else { continue };
            let mut at = *offset;
            bytes.give(&mut |piece| {
                write_at(piece, at)?;
                at += piece.len() as u64;
                Ok(())
            })?;
        }
        Ok(())
    }
}

/// A safetensors file before it is written: the header, and the tensors in the file's order.
#[derive(Debug)]
pub(super) struct Layout<'a> {
    layout: cinch_weights::Layout,
    tensors: Vec<&'a TensorView<'a>>,
}

impl<'a> Layout<'a> {
    pub(super) fn new(tensors: &'a [TensorView<'a>]) -> Result<Self, WeightError> {
        let mut specs = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            let spec = TensorSpec {
                name: tensor.name,
                dtype: tensor.dtype,
                shape: tensor.shape,
            };
            let (expected, found) = (spec.num_bytes()?, tensor.bytes.num_bytes());
            if expected != found {
                return Err(WeightError::Unwritable {
                    tensor: tensor.name.to_owned(),
                    problem: format!("its shape takes {expected} bytes, {found} were given"),
                });
            }
            specs.push(spec);
        }
        let layout = cinch_weights::Layout::new(&specs)?;
        let order = layout.order().iter();
        Ok(Self {
            tensors: order.map(|&place| &tensors[place]).collect(),
            layout,
        })
    }

    /// Length of the whole file.
    pub(super) fn num_bytes(&self) -> u64 {
        self.layout.num_bytes()
    }

    /// Writes the file; `path` is what a failure names.
    pub(super) fn write_to(
        &self,
        out: &mut impl Write,
        path: &Path,
    ) -> Result<(), CheckpointError> {
        out.write_all(self.layout.header()).at("write", path)?;
        for tensor in &self.tensors {
            tensor
                .bytes
                .give(&mut |piece| out.write_all(piece).at("write", path))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back_in_the_order_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights.safetensors");
        let bytes = vec![1_u8, 2, 3, 4, 5, 6, 7, 8];
        let tensors = [
            view("a", &[2, 2], Dtype::F16, &bytes),
            view("b", &[2], Dtype::F32, &bytes),
        ];
        let layout = Layout::new(&tensors).unwrap();
        let mut out = Vec::new();
        layout.write_to(&mut out, &path).unwrap();
        assert_eq!(out.len() as u64, layout.num_bytes());
        std::fs::write(&path, out).unwrap();
        let files = cinch_weights::WeightFiles::open(&path).unwrap();
        let names: Vec<&str> = files
            .tensors()
            .iter()
            .map(|one| one.name.as_str())
            .collect();
        assert_eq!(names, ["b", "a"]);
        for tensor in &tensors {
            let found = files.tensor(tensor.name).unwrap();
            assert_eq!((found.dtype, &*found.shape), (tensor.dtype, tensor.shape));
            let mut read = [0; 8];
            files.read(tensor.name, 0..2, &mut read).unwrap();
            assert_eq!(read, *bytes);
        }
    }

    #[test]
    fn inconsistent_tensors_are_refused() {
        let bytes = vec![0_u8; 8];
        let refusal = |tensors: &[TensorView<'_>]| Layout::new(tensors).unwrap_err().to_string();
        let message = refusal(&[view("w", &[3], Dtype::F32, &bytes)]);
        assert!(
            message.contains("takes 12 bytes, 8 were given"),
            "{message}"
        );
        let twice = view("w", &[2], Dtype::F32, &bytes);
        assert!(refusal(&[twice, twice]).contains("two tensors have this name"));
        let huge = [usize::MAX, 3];
        refusal(&[view("overflow", &huge, Dtype::F32, &bytes)]);
    }

    fn view<'a>(
        name: &'a str,
        shape: &'a [usize],
        dtype: Dtype,
        bytes: &'a Vec<u8>,
    ) -> TensorView<'a> {
        TensorView {
            name,
            shape,
            dtype,
            bytes,
        }
    }
}
