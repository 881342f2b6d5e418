//! cuBLAS and cuBLASLt: products that are not computed. Workspaces are PyTorch's own, which it sets by its own rules;
//! what the first handle takes of the card is counted.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use super::card::card;
use super::host::{self, put};
use super::memory;
use super::runtime::{SUCCESS, exported, nothing_to_do};
use super::stream::new_handle;

static HAS_HANDLE: AtomicBool = AtomicBool::new(false);

/// The first handle of the process loads the library's kernels.
pub fn first_handle() {
    if !HAS_HANDLE.swap(true, Ordering::Relaxed)
        && let Some(mut device) = memory::current_device()
    {
        device.context();
        device.take_outside(card().blas);
    }
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
pub struct Heuristic {
    algorithm: [u64; 8],
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

exported! {
    fn cublasCreate_v2(handle: *mut *mut c_void) -> c_int {
        first_handle();
        // SAFETY: as documented for this function.
        unsafe { put(handle, new_handle()) };
        SUCCESS
    }

    fn cublasLtCreate(handle: *mut *mut c_void) -> c_int {
        // SAFETY: the same contract.
        unsafe { cublasCreate_v2(handle) }
    }

    /// The real library's answer where the process has it; where this one stands in for it, that of CUDA 13.0's.
    fn cublasLtGetVersion() -> usize {
        type Get = unsafe extern "C" fn() -> usize;
        let found = [c"libcublasLt.so.13", c"libcublasLt.so.12"]
            .into_iter()
            .find_map(|name| host::function_of(name, c"cublasLtGetVersion"))
            .filter(|&function| function as usize != cublasLtGetVersion as Get as usize);
        match found {
            // SAFETY: the name belongs to this signature.
            Some(function) => unsafe { std::mem::transmute::<*mut c_void, Get>(function)() },
            None => 130_100,
        }
    }

    fn cublasGetMathMode(_handle: *mut c_void, mode: *mut c_int) -> c_int {
        // SAFETY: as documented for this function. 0 is the default mode.
        unsafe { put(mode, 0) };
        SUCCESS
    }

    fn cublasGetPointerMode_v2(_handle: *mut c_void, mode: *mut c_int) -> c_int {
        // SAFETY: as documented for this function. 0 is host pointers.
        unsafe { put(mode, 0) };
        SUCCESS
    }

    fn cublasGetStream_v2(_handle: *mut c_void, stream: *mut *mut c_void) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(stream, std::ptr::null_mut()) };
        SUCCESS
    }

    /// One algorithm, which needs no workspace of its own: PyTorch gives its own to every product.
    fn cublasLtMatmulAlgoGetHeuristic(
        _handle: *mut c_void, _operation: *mut c_void, _a: *mut c_void, _b: *mut c_void, _c: *mut c_void,
        _d: *mut c_void, _preference: *mut c_void, requested: c_int, results: *mut Heuristic, count: *mut c_int,
    ) -> c_int {
        let heuristic = Heuristic { algorithm: [1; 8], workspace: 0, state: 0, waves: 1.0, reserved: [0; 4] };
        // SAFETY: as documented for this function; there is room for at least one result where one is requested.
        unsafe {
            if requested > 0 {
                put(results, heuristic);
            }
            put(count, requested.min(1));
        }
        SUCCESS
    }

    fn cublasLtMatmulDescCreate(description: *mut *mut c_void, _compute: c_int, _scale: c_int) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(description, new_handle()) };
        SUCCESS
    }

    fn cublasLtMatrixLayoutCreate(layout: *mut *mut c_void, _kind: c_int, _rows: u64, _columns: u64, _leading: i64) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(layout, new_handle()) };
        SUCCESS
    }

    fn cublasLtMatmulPreferenceCreate(preference: *mut *mut c_void) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(preference, new_handle()) };
        SUCCESS
    }
}

nothing_to_do! {
    cublasLtDestroy cublasLtMatmul cublasLtMatmulDescDestroy cublasLtMatmulDescSetAttribute
    cublasLtMatmulPreferenceDestroy cublasLtMatmulPreferenceSetAttribute cublasLtMatrixLayoutDestroy
    cublasLtMatrixLayoutSetAttribute cublasLtMatrixTransform cublasLtMatrixTransformDescDestroy
    cublasLtMatrixTransformDescSetAttribute
    cublasCaxpy_v2 cublasCcopy_v2 cublasCdotc_v2 cublasCdotu_v2 cublasCgelsBatched cublasCgemmBatched
    cublasCgemmStridedBatched cublasCgemm_v2 cublasCgemv_v2 cublasCgeqrfBatched cublasCgerc_v2 cublasCgeru_v2
    cublasCgetrfBatched cublasCgetrsBatched cublasChemm_v2 cublasChemv_v2 cublasCher2_v2 cublasCher2k_v2
    cublasCher_v2 cublasCherk_v2 cublasCrot_v2 cublasCrotg_v2 cublasCscal_v2 cublasCsrot_v2 cublasCsscal_v2
    cublasCswap_v2 cublasCsymm_v2 cublasCsymv_v2 cublasCsyr2_v2 cublasCsyr2k_v2 cublasCsyr_v2 cublasCsyrk_v2
    cublasCtrmm_v2 cublasCtrmv_v2 cublasCtrsmBatched cublasCtrsm_v2 cublasCtrsv_v2 cublasDasum_v2 cublasDaxpy_v2
    cublasDcopy_v2 cublasDdot_v2 cublasDestroy_v2 cublasDgelsBatched cublasDgemmBatched cublasDgemmGroupedBatched
    cublasDgemmStridedBatched cublasDgemm_v2 cublasDgemv_v2 cublasDgeqrfBatched cublasDger_v2 cublasDgetrfBatched
    cublasDgetrsBatched cublasDnrm2_v2 cublasDotEx cublasDrot_v2 cublasDrotg_v2 cublasDrotm_v2 cublasDrotmg_v2
    cublasDscal_v2 cublasDswap_v2 cublasDsymm_v2 cublasDsymv_v2 cublasDsyr2_v2 cublasDsyr2k_v2 cublasDsyr_v2
    cublasDsyrk_v2 cublasDtrmm_v2 cublasDtrmv_v2 cublasDtrsmBatched cublasDtrsm_v2 cublasDtrsv_v2 cublasDzasum_v2
    cublasDznrm2_v2 cublasGemmBatchedEx cublasGemmEx cublasGemmGroupedBatchedEx cublasGemmStridedBatchedEx
    cublasGetMatrixAsync cublasGetVectorAsync cublasHgemm cublasHgemmBatched cublasHgemmStridedBatched
    cublasIcamax_v2 cublasIcamin_v2 cublasIdamax_v2 cublasIdamin_v2 cublasIsamax_v2 cublasIsamin_v2 cublasIzamax_v2
    cublasIzamin_v2 cublasLoggerConfigure cublasSasum_v2 cublasSaxpy_v2 cublasScasum_v2 cublasScnrm2_v2
    cublasScopy_v2 cublasSdot_v2 cublasSetAtomicsMode cublasSetEmulationStrategy cublasSetMathMode
    cublasSetMatrixAsync cublasSetPointerMode_v2 cublasSetSmCountTarget cublasSetStream_v2 cublasSetVectorAsync
    cublasSetWorkspace_v2 cublasSgelsBatched cublasSgemmBatched cublasSgemmEx cublasSgemmGroupedBatched
    cublasSgemmStridedBatched cublasSgemm_v2 cublasSgemv_v2 cublasSgeqrfBatched cublasSger_v2 cublasSgetrfBatched
    cublasSgetrsBatched cublasSnrm2_v2 cublasSrot_v2 cublasSrotg_v2 cublasSrotm_v2 cublasSrotmg_v2 cublasSscal_v2
    cublasSswap_v2 cublasSsymm_v2 cublasSsymv_v2 cublasSsyr2_v2 cublasSsyr2k_v2 cublasSsyr_v2 cublasSsyrk_v2
    cublasStrmm_v2 cublasStrmv_v2 cublasStrsmBatched cublasStrsm_v2 cublasStrsv_v2 cublasZaxpy_v2 cublasZcopy_v2
    cublasZdotc_v2 cublasZdotu_v2 cublasZdrot_v2 cublasZdscal_v2 cublasZgelsBatched cublasZgemmBatched
    cublasZgemmStridedBatched cublasZgemm_v2 cublasZgemv_v2 cublasZgeqrfBatched cublasZgerc_v2 cublasZgeru_v2
    cublasZgetrfBatched cublasZgetrsBatched cublasZhemm_v2 cublasZhemv_v2 cublasZher2_v2 cublasZher2k_v2
    cublasZher_v2 cublasZherk_v2 cublasZrot_v2 cublasZrotg_v2 cublasZscal_v2 cublasZswap_v2 cublasZsymm_v2
    cublasZsymv_v2 cublasZsyr2_v2 cublasZsyr2k_v2 cublasZsyr_v2 cublasZsyrk_v2 cublasZtrmm_v2 cublasZtrmv_v2
    cublasZtrsmBatched cublasZtrsm_v2 cublasZtrsv_v2
}
