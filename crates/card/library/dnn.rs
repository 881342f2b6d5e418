//! cuDNN's handle and batch norm. Descriptors of tensors, filters and the like stay cuDNN's own, which needs no card
//! for them; convolutions are in `dnn_backend`.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use super::card::card;
use super::host::{self, put};
use super::memory;
use super::runtime::{SUCCESS, exported, nothing_to_do};
use super::stream::new_handle;

/// PyTorch asks for this mode where channels are the last dimension.
const PERSISTENT: c_int = 2;
const FLOAT: c_int = 0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    Forward,
    Backward,
}

/// What a batch norm with channels last takes besides. Places are summed in groups, each with two sums for every
/// channel of single precision; the forward pass then sums 128 groups at a time. Of 11,229 sizes of an H200 all but 4 %
/// are met within 8 KiB or 2 %, and those are small. In the other order of dimensions the H200 took nothing for any of
/// 11,229, nor did it where the number of channels is odd.
pub fn batch_norm_bytes(pass: Pass, is_single: bool, places: usize, channels: usize) -> usize {
    if !channels.is_multiple_of(8) {
        return 0;
    }
    let of_a_group = match (pass, is_single) {
        (Pass::Backward, _) => 96,
        (Pass::Forward, true) => 64,
        (Pass::Forward, false) => 160,
    };
    let groups = places.div_ceil(of_a_group);
    let more = match pass {
        Pass::Forward => groups.div_ceil(128),
        Pass::Backward => 0,
    };
    (groups + more) * channels.next_multiple_of(64) * 2 * size_of::<f32>() + 1100
}

/// The workspace for a tensor that a descriptor of cuDNN's describes.
fn of_batch_norm(mode: c_int, x: *mut c_void, pass: Pass) -> usize {
    const MOST: usize = 8;
    type Get = unsafe extern "C" fn(
        *mut c_void,
        c_int,
        *mut c_int,
        *mut c_int,
        *mut c_int,
        *mut c_int,
    ) -> c_int;
    let function = host::function_of(c"libcudnn.so.9", c"cudnnGetTensorNdDescriptor");
    let Some(function) = function.filter(|_| mode == PERSISTENT && !x.is_null()) else {
        return 0;
    };
    // SAFETY: the name belongs to this signature in every version of cuDNN.
    let get: Get = unsafe { std::mem::transmute(function) };
    let (mut kind, mut count) = (0, 0);
    let (mut dims, mut strides) = ([0; MOST], [0; MOST]);
    // SAFETY: the caller's descriptor, and arrays of as many as are asked for.
    let status = unsafe {
        get(
            x,
            MOST as c_int,
            &mut kind,
            &mut count,
            dims.as_mut_ptr(),
            strides.as_mut_ptr(),
        )
    };
    let known = &dims[..count.clamp(0, MOST as c_int) as usize];
    if status != SUCCESS || known.len() < 2 {
        return 0;
    }
    let size = |dim: c_int| dim.max(0) as usize;
    let places = known.iter().skip(2).fold(size(known[0]), |places, &dim| {
        places.saturating_mul(size(dim))
    });
    batch_norm_bytes(pass, kind == FLOAT, places, size(known[1]))
}

static HAS_HANDLE: AtomicBool = AtomicBool::new(false);
exported! {
    fn cudnnCreate(handle: *mut *mut c_void) -> c_int {
        if !HAS_HANDLE.swap(true, Ordering::Relaxed)
            && let Some(mut device) = memory::current_device()
        {
            device.context();
            device.take_outside(card().dnn);
        }
        // SAFETY: as documented for this function.
        unsafe { put(handle, new_handle()) };
        SUCCESS
    }

    fn cudnnGetStream(_handle: *mut c_void, stream: *mut *mut c_void) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(stream, std::ptr::null_mut()) };
        SUCCESS
    }

    fn cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
        _handle: *mut c_void, mode: c_int, _operations: c_int, x: *mut c_void, _z: *mut c_void, _y: *mut c_void,
        _statistics: *mut c_void, _activation: *mut c_void, bytes: *mut usize,
    ) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(bytes, of_batch_norm(mode, x, Pass::Forward)) };
        SUCCESS
    }

    fn cudnnGetBatchNormalizationBackwardExWorkspaceSize(
        _handle: *mut c_void, mode: c_int, _operations: c_int, x: *mut c_void, _y: *mut c_void, _dy: *mut c_void,
        _dz: *mut c_void, _dx: *mut c_void, _statistics: *mut c_void, _activation: *mut c_void, bytes: *mut usize,
    ) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(bytes, of_batch_norm(mode, x, Pass::Backward)) };
        SUCCESS
    }

    fn cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
        _handle: *mut c_void, _mode: c_int, _operations: c_int, _activation: *mut c_void, _x: *mut c_void, bytes: *mut usize,
    ) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(bytes, 0) };
        SUCCESS
    }
}

nothing_to_do! {
    cudnnDestroy cudnnSetStream cudnnBatchNormalizationForwardInference cudnnBatchNormalizationForwardTrainingEx
    cudnnBatchNormalizationBackwardEx cudnnRNNForward cudnnRNNBackwardData_v8 cudnnRNNBackwardWeights_v8
    cudnnPoolingForward cudnnSpatialTfGridGeneratorForward
    cudnnSpatialTfGridGeneratorBackward cudnnSpatialTfSamplerForward cudnnSpatialTfSamplerBackward cudnnCTCLoss
    cudnnCTCLoss_v8
}
