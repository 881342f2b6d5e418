//! How embeddings are written.

use std::io::Write;

use cinch_weights::{Dtype, Layout, TensorSpec};
use serde_json::json;

use crate::args::{EmbedArguments, EmbeddingFormat};
use crate::failure::usage;
use crate::progress::shown;

/// The format that was asked for, or that the file's ending says.
pub fn format(arguments: &EmbedArguments) -> anyhow::Result<EmbeddingFormat> {
    if let Some(format) = arguments.format {
        return Ok(format);
    }
    let Some(path) = &arguments.output else {
        return Ok(EmbeddingFormat::Jsonl);
    };
    let ending = path.extension().and_then(|ending| ending.to_str());
    match ending {
        Some("npy") => Ok(EmbeddingFormat::Npy),
        Some("safetensors") => Ok(EmbeddingFormat::Safetensors),
        Some("jsonl") => Ok(EmbeddingFormat::Jsonl),
        _ => Err(usage(format!(
            "the ending of {} says no format\nhint: .npy, .safetensors or .jsonl, or --format",
            shown(path)
        ))),
    }
}

pub fn encoded(
    numbers: &[f32],
    [rows, width]: [usize; 2],
    format: EmbeddingFormat,
) -> anyhow::Result<Vec<u8>> {
    let bytes = numbers.iter().flat_map(|number| number.to_le_bytes());
    match format {
        EmbeddingFormat::Npy => {
            let mut out = npy_header(rows, width);
            out.extend(bytes);
            Ok(out)
        }
        EmbeddingFormat::Safetensors => {
            let tensor = TensorSpec {
                name: "embeddings",
                dtype: Dtype::F32,
                shape: &[rows, width],
            };
            let mut out = Vec::new();
            out.extend_from_slice(Layout::new(&[tensor])?.header());
            out.extend(bytes);
            Ok(out)
        }
        EmbeddingFormat::Jsonl => {
            let mut out = Vec::new();
            for row in numbers.chunks_exact(width.max(1)) {
                writeln!(out, "{}", json!({ "embedding": row }))?;
            }
            Ok(out)
        }
    }
}

/// Version 1.0 of NumPy's format: the magic word, and a dictionary that ends at a multiple of 64.
fn npy_header(rows: usize, width: usize) -> Vec<u8> {
    const ALIGNMENT: usize = 64;
    let fixed = b"\x93NUMPY\x01\x00".len() + size_of::<u16>();
    let mut dictionary =
        format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {width}), }}");
    let length = (fixed + dictionary.len() + 1).next_multiple_of(ALIGNMENT);
    while fixed + dictionary.len() + 1 < length {
        dictionary.push(' ');
    }
    dictionary.push('\n');
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    header.extend((dictionary.len() as u16).to_le_bytes());
    header.extend(dictionary.bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_data_of_npy_begins_aligned() {
        for (rows, width) in [(1, 1), (104, 34), (123_456, 1536)] {
            let header = npy_header(rows, width);
            assert_eq!(header.len() % 64, 0);
            let length = u16::from_le_bytes([header[8], header[9]]) as usize;
            assert_eq!(header.len(), 10 + length);
            assert_eq!(header.last(), Some(&b'\n'));
        }
    }
}
