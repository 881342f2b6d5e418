//! Tensors joined and cut apart: a copy for each part.

use cinch_graph::op::{Concat, Split};

use super::activation::elementwise;
use crate::cuda::command::{Argument, Kernel};
use crate::cuda::lowering::Lowering;

/// Columns of a matrix, in bytes.
#[derive(Clone, Copy)]
struct Columns {
    /// Nothing for zeros.
    address: Option<u64>,
    /// From one row to the next.
    stride: u64,
}

fn copy(x: &mut Lowering<'_>, rows: usize, width: u64, from: Columns, to: Columns) {
    let to_address = to.address.unwrap_or(0);
    let sizes = [width, from.stride, to.stride, to_address];
    let unit = [(16, "copy_columns_16"), (4, "copy_columns_4")]
        .into_iter()
        .find(|(unit, _)| {
            let all = sizes.iter().chain(&from.address);
            all.into_iter().all(|size| size.is_multiple_of(*unit))
        });
    let (unit, function) = unit.unwrap_or((2, "copy_columns_2"));
    let count = |bytes: u64| Argument::U32((bytes / unit) as u32);
    let arguments = vec![
        from.address.map_or(Argument::Null, Argument::Address),
        Argument::Address(to_address),
        Argument::U32(rows as u32),
        count(width),
        count(from.stride),
        count(to.stride),
    ];
    let kernel = Kernel {
        file: "columns",
        function,
    };
    let shape = elementwise(rows * (width / unit) as usize, 1);
    x.launch(kernel, shape, arguments);
}

pub fn concat(x: &mut Lowering<'_>, op: &Concat) {
    let ty = x.output_type(0);
    let (rows, width) = op.joined.pieces(&ty.shape);
    let stride = width as u64 * ty.dtype.size();
    let whole: usize = op.parts.iter().map(|(size, _)| size).sum();
    let (mut offset, mut input) = (0, 0);
    for &(size, is_there) in &op.parts {
        let bytes = stride * size as u64 / whole.max(1) as u64;
        let from = Columns {
            address: is_there.then(|| x.input(input)),
            stride: bytes,
        };
        input += usize::from(is_there);
        let to = Columns {
            address: Some(x.output(0) + offset),
            stride,
        };
        copy(x, rows, bytes, from, to);
        offset += bytes;
    }
}

pub fn split(x: &mut Lowering<'_>, op: &Split) {
    let ty = x.input_type(0);
    let (rows, width) = op.joined.pieces(&ty.shape);
    let stride = width as u64 * ty.dtype.size();
    let mut offset = 0;
    for output in 0..op.parts.len() {
        let (_, width) = op.joined.pieces(&x.output_type(output).shape);
        let bytes = width as u64 * ty.dtype.size();
        let from = Columns {
            address: Some(x.input(0) + offset),
            stride,
        };
        let to = Columns {
            address: Some(x.output(output)),
            stride: bytes,
        };
        copy(x, rows, bytes, from, to);
        offset += bytes;
    }
}
