//! Tensors as the copy engine of Hopper cards takes them, encoded by the driver.

use cinch_graph::DType;
use cudarc::driver::sys;

use super::command::{MatrixMapAt, TensorMapAt};
use super::driver::failed;
use crate::error::EngineError;

/// Columns that one copy brings: 128 bytes.
const BOX_SIDE: u32 = 64;

/// Encodes [batch, rows, heads, columns] at `base`, in 16-bit elements; a copy brings 64 columns, or
/// all of 32, of 64 rows of one head. Rows beyond the end come as zeroes.
pub fn encode(at: &TensorMapAt, base: u64, dtype: DType) -> Result<sys::CUtensorMap, EngineError> {
    let element = dtype.size();
    let row = at.row_stride as u64 * element;
    let sizes = [at.columns, at.heads, at.rows, at.batch].map(|size| size as u64);
    // From one head, row and sequence to the next.
    let strides = [at.columns as u64 * element, row, row * at.rows as u64];
    tiled(
        base + at.address,
        sizes,
        &strides,
        [BOX_SIDE.min(at.columns as u32), 1, BOX_SIDE, 1],
        dtype,
    )
}

/// Encodes a matrix at `base`.
pub fn encode_matrix(
    at: &MatrixMapAt,
    base: u64,
    dtype: DType,
) -> Result<sys::CUtensorMap, EngineError> {
    let sizes = [at.columns, at.rows].map(|size| size as u64);
    let strides = [at.row_stride as u64 * dtype.size()];
    let sides = [at.box_columns as u32, at.box_rows as u32];
    tiled(base + at.address, sizes, &strides, sides, dtype)
}

/// In shared memory the 16-byte pieces of a row, which has 128, 64 or 32 bytes, are permuted as the
/// matrix units want them.
fn tiled<const RANK: usize>(
    address: u64,
    sizes: [u64; RANK],
    strides: &[u64],
    sides: [u32; RANK],
    dtype: DType,
) -> Result<sys::CUtensorMap, EngineError> {
    debug_assert_eq!(strides.len() + 1, RANK);
    let steps = [1; RANK];
    let kind = match dtype {
        DType::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        _ => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    };
    let swizzle = match sides[0] {
        BOX_SIDE => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        16 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
        _ => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
    };
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    // SAFETY: the arrays have as many entries as the rank says, strides one less; the driver only
    // writes the map.
    let encoded = unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut map,
            kind,
            sizes.len() as u32,
            address as *mut _,
            sizes.as_ptr(),
            strides.as_ptr(),
            sides.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    encoded
        .result()
        .map_err(failed("describe a tensor to the copy engine"))?;
    Ok(map)
}
