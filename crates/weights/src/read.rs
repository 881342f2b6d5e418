//! Reading parts of tensors, as they are or converted, several parts at once.
//!
//! Work is cut into pieces of a fixed size; each thread holds one piece of the file at most,
//! whatever the tensor's size. Conversion goes through f32, which has every value of the narrower
//! types; to a narrower type it rounds to nearest, ties to even.

use std::fs::File;
use std::io;
use std::ops::Range;

use rayon::prelude::*;
use safetensors::Dtype;

use crate::error::WeightError;
use crate::half::{bf16_bits, bf16_value, f16_bits, f16_value};
use crate::open::{OpenFile, Tensor, WeightFiles};

/// Bytes that are copied at once between files and memory that no file is read into, such as a
/// GPU's: enough for several threads to read, little beside a model.
pub const PIECE_BYTES: usize = 16 << 20;
/// Bytes that one thread reads at once without conversion: enough to keep a disk busy.
const RAW_PIECE: usize = 4 << 20;
/// Elements that one thread converts at once: a piece that stays in its core's cache.
pub(crate) const CONVERTED_PIECE: usize = 64 << 10;

/// Fills `into` from a place of the file, without moving a cursor that threads would share.
#[cfg(unix)]
pub(crate) fn read_exact_at(file: &File, into: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, into, offset)
}

#[cfg(windows)]
pub(crate) fn read_exact_at(file: &File, mut into: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !into.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, into, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => {
                into = &mut into[read..];
                offset += read as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

impl OpenFile {
    fn read(&self, into: &mut [u8], offset: u64) -> Result<(), WeightError> {
        read_exact_at(&self.file, into, offset).map_err(|error| {
            let length = self.file.metadata().map(|found| found.len());
            match length {
                // Lengths were right when the file was opened.
                Ok(found) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    WeightError::Truncated {
                        path: self.path.clone(),
                        expected: offset + into.len() as u64,
                        found,
                    }
                }
                _ => WeightError::io("read", &self.path)(error),
            }
        })
    }
}

impl WeightFiles {
    /// Reads rows of a tensor as they are in the file. `into` has the length of these rows.
    pub fn read(&self, name: &str, rows: Range<usize>, into: &mut [u8]) -> Result<(), WeightError> {
        let elements = self.elements_of(self.tensor(name)?, &rows)?;
        self.read_elements(name, elements, into)
    }

    /// Reads elements of a tensor, counted row-major, as they are in the file.
    pub fn read_elements(
        &self,
        name: &str,
        elements: Range<usize>,
        into: &mut [u8],
    ) -> Result<(), WeightError> {
        let tensor = self.tensor(name)?;
        let num_elements = tensor.num_elements();
        if elements.start > elements.end || elements.end > num_elements {
            return Err(self.out_of_range(tensor, "elements", &elements, num_elements));
        }
        let bits = tensor.dtype.bitsize();
        let (start, end) = (elements.start * bits, elements.end * bits);
        if start % 8 != 0 || end % 8 != 0 {
            let unit = "elements of whole bytes";
            return Err(self.out_of_range(tensor, unit, &elements, num_elements));
        }
        self.check_length(tensor, "bytes", (end - start) / 8, into.len())?;
        let file = &self.files[tensor.file];
        let begin = tensor.offset + start as u64 / 8;
        into.par_chunks_mut(RAW_PIECE)
            .enumerate()
            .try_for_each(|(number, piece)| file.read(piece, begin + (number * RAW_PIECE) as u64))
    }

    /// Reads rows of a tensor as f32.
    pub fn read_f32(
        &self,
        name: &str,
        rows: Range<usize>,
        into: &mut [f32],
    ) -> Result<(), WeightError> {
        let elements = self.elements_of(self.tensor(name)?, &rows)?;
        self.read_elements_f32(name, elements, into)
    }

    /// Reads rows of a tensor as the bits of bf16 numbers.
    pub fn read_bf16(
        &self,
        name: &str,
        rows: Range<usize>,
        into: &mut [u16],
    ) -> Result<(), WeightError> {
        let tensor = self.tensor(name)?;
        let elements = self.elements_of(tensor, &rows)?;
        self.convert(tensor, elements, Dtype::BF16, into, bf16_bits)
    }

    /// Reads rows of a tensor as the bits of f16 numbers.
    pub fn read_f16(
        &self,
        name: &str,
        rows: Range<usize>,
        into: &mut [u16],
    ) -> Result<(), WeightError> {
        let tensor = self.tensor(name)?;
        let elements = self.elements_of(tensor, &rows)?;
        self.convert(tensor, elements, Dtype::F16, into, f16_bits)
    }

    /// Reads elements of a tensor, counted row-major, as f32: for what is cut without regard to
    /// rows, such as the blocks of a quantised tensor.
    pub fn read_elements_f32(
        &self,
        name: &str,
        elements: Range<usize>,
        into: &mut [f32],
    ) -> Result<(), WeightError> {
        self.convert(self.tensor(name)?, elements, Dtype::F32, into, |value| {
            value
        })
    }

    /// Reads rows of a tensor into bytes of another type: F32, BF16, F16, or the tensor's own.
    pub fn read_as(
        &self,
        name: &str,
        rows: Range<usize>,
        wanted: Dtype,
        into: &mut [u8],
    ) -> Result<(), WeightError> {
        let elements = self.elements_of(self.tensor(name)?, &rows)?;
        self.read_elements_as(name, elements, wanted, into)
    }

    /// As [`Self::read_as`], elements counted row-major.
    pub fn read_elements_as(
        &self,
        name: &str,
        elements: Range<usize>,
        wanted: Dtype,
        into: &mut [u8],
    ) -> Result<(), WeightError> {
        let tensor = self.tensor(name)?;
        if tensor.dtype == wanted {
            return self.read_elements(name, elements, into);
        }
        let expected = elements.len() * wanted.bitsize() / 8;
        self.check_length(tensor, "bytes", expected, into.len())?;
        match wanted {
            Dtype::F32 => {
                let (into, _) = into.as_chunks_mut();
                self.convert(tensor, elements, wanted, into, f32::to_le_bytes)
            }
            Dtype::BF16 => {
                let (into, _) = into.as_chunks_mut();
                let encode = |value| bf16_bits(value).to_le_bytes();
                self.convert(tensor, elements, wanted, into, encode)
            }
            Dtype::F16 => {
                let (into, _) = into.as_chunks_mut();
                let encode = |value| f16_bits(value).to_le_bytes();
                self.convert(tensor, elements, wanted, into, encode)
            }
            _ => Err(self.not_converted(tensor, wanted)),
        }
    }

    fn convert<T: Send>(
        &self,
        tensor: &Tensor,
        elements: Range<usize>,
        wanted: Dtype,
        into: &mut [T],
        encode: impl Fn(f32) -> T + Sync,
    ) -> Result<(), WeightError> {
        match tensor.dtype {
            Dtype::F32 => self.decode(tensor, elements, into, |b| encode(f32::from_le_bytes(b))),
            Dtype::F64 => self.decode(tensor, elements, into, |b| {
                encode(f64::from_le_bytes(b) as f32)
            }),
            Dtype::BF16 => self.decode(tensor, elements, into, |b| {
                encode(bf16_value(u16::from_le_bytes(b)))
            }),
            Dtype::F16 => self.decode(tensor, elements, into, |b| {
                encode(f16_value(u16::from_le_bytes(b)))
            }),
            _ => Err(self.not_converted(tensor, wanted)),
        }
    }

    fn decode<const BYTES: usize, T: Send>(
        &self,
        tensor: &Tensor,
        elements: Range<usize>,
        into: &mut [T],
        decode: impl Fn([u8; BYTES]) -> T + Sync,
    ) -> Result<(), WeightError> {
        let num_elements = tensor.num_elements();
        if elements.start > elements.end || elements.end > num_elements {
            return Err(self.out_of_range(tensor, "elements", &elements, num_elements));
        }
        self.check_length(tensor, "elements", elements.len(), into.len())?;
        let file = &self.files[tensor.file];
        let begin = tensor.offset + (elements.start * BYTES) as u64;
        let work = |scratch: &mut Vec<u8>, (number, piece): (usize, &mut [T])| {
            scratch.resize(piece.len() * BYTES, 0);
            let offset = begin + (number * CONVERTED_PIECE * BYTES) as u64;
            file.read(scratch, offset)?;
            let (stored, _) = scratch.as_chunks();
            for (out, &bytes) in piece.iter_mut().zip(stored) {
                *out = decode(bytes);
            }
            Ok(())
        };
        into.par_chunks_mut(CONVERTED_PIECE)
            .enumerate()
            .try_for_each_init(Vec::new, work)
    }

    fn elements_of(
        &self,
        tensor: &Tensor,
        rows: &Range<usize>,
    ) -> Result<Range<usize>, WeightError> {
        if rows.start > rows.end || rows.end > tensor.rows() {
            return Err(self.out_of_range(tensor, "rows", rows, tensor.rows()));
        }
        let row = tensor.row_elements();
        Ok(rows.start * row..rows.end * row)
    }

    fn out_of_range(
        &self,
        tensor: &Tensor,
        unit: &'static str,
        asked: &Range<usize>,
        found: usize,
    ) -> WeightError {
        WeightError::OutOfRange {
            path: self.file_of(tensor).to_owned(),
            tensor: tensor.name.clone(),
            unit,
            start: asked.start,
            end: asked.end,
            found,
        }
    }

    pub(crate) fn check_length(
        &self,
        tensor: &Tensor,
        unit: &'static str,
        expected: usize,
        found: usize,
    ) -> Result<(), WeightError> {
        if expected == found {
            return Ok(());
        }
        Err(WeightError::WrongLength {
            path: self.file_of(tensor).to_owned(),
            tensor: tensor.name.clone(),
            unit,
            expected,
            found,
        })
    }

    pub(crate) fn not_converted(&self, tensor: &Tensor, wanted: Dtype) -> WeightError {
        WeightError::NotConverted {
            path: self.file_of(tensor).to_owned(),
            tensor: tensor.name.clone(),
            found: tensor.dtype,
            wanted,
        }
    }
}
