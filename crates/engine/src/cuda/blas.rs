//! Matrix products through cuBLASLt. The library is column-major: a row-major `C = A·B` is its
//! `Cᵀ = Bᵀ·Aᵀ`, with the same bytes.

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::MaybeUninit;

use cinch_graph::DType;
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;

use super::command::{MatrixAt, Product};
use super::driver::Stream;
use super::timing::{Trials, fastest};
use crate::engine::EngineOptions;
use crate::error::EngineError;

/// What decides which algorithm is best, and which may be used: everything but the addresses, of
/// which only the alignment counts. An algorithm must not get less workspace than it was chosen
/// for, so its size counts too.
pub(crate) type Key = (
    usize,
    usize,
    usize,
    [(usize, DType, bool, u32); 3],
    bool,
    bool,
    u64,
);

/// Algorithms that are timed for a product. The narrow products of adapters have their best one
/// far down the list, because few of those before cut the inner dimension.
const CANDIDATES: usize = 24;

/// The library's handle and the products prepared so far.
pub(crate) struct Blas {
    // Dropped in this order: what was made with the handle before the handle.
    ready: HashMap<Key, Ready>,
    handle: Handle,
    tf32: bool,
    /// How many of the library's suggestions are timed. With one, its first is taken: the same
    /// every time.
    candidates: usize,
}

// SAFETY: the handle and descriptors may be used from any thread, one at a time.
unsafe impl Send for Blas {}

/// Descriptors and the chosen algorithm of one shape.
struct Ready {
    description: Description,
    first: Layout,
    second: Layout,
    output: Layout,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// A thing of the library's that its owner gives back, on every way out. A failure to do so has
/// nobody to be told to.
macro_rules! owned {
    ($($(#[$meta:meta])* $name:ident($raw:ty): $destroy:path;)*) => {
        $(
            $(#[$meta])*
            struct $name($raw);

            impl Drop for $name {
                fn drop(&mut self) {
                    // SAFETY: created by the library, handed to this owner alone, destroyed once.
                    let _ = unsafe { $destroy(self.0) };
                }
            }
        )*
    };
}

owned! {
    Handle(sys::cublasLtHandle_t): result::destroy_handle;
    /// How the operands are multiplied.
    Description(sys::cublasLtMatmulDesc_t): result::destroy_matmul_desc;
    /// How an operand lies in memory.
    Layout(sys::cublasLtMatrixLayout_t): result::destroy_matrix_layout;
    /// What an algorithm may use.
    Preference(sys::cublasLtMatmulPreference_t): result::destroy_matmul_pref;
}

fn failed(action: String) -> impl FnOnce(CublasError) -> EngineError {
    move |error| EngineError::Cuda {
        action,
        problem: format!("{error:?}"),
    }
}

fn describe(product: &Product) -> String {
    format!(
        "multiply {}×{}×{} ({} by {} into {})",
        product.m, product.n, product.k, product.a.dtype, product.b.dtype, product.c.dtype
    )
}

fn data_type(dtype: DType) -> sys::cudaDataType {
    match dtype {
        DType::Bf16 => sys::cudaDataType::CUDA_R_16BF,
        DType::F16 => sys::cudaDataType::CUDA_R_16F,
        DType::F64 => sys::cudaDataType::CUDA_R_64F,
        DType::F32 | DType::I32 | DType::U8 => sys::cudaDataType::CUDA_R_32F,
    }
}

impl Blas {
    pub fn new(options: EngineOptions) -> Result<Self, EngineError> {
        // SAFETY: only looks for the library.
        if !unsafe { sys::is_culib_present() } {
            return Err(EngineError::NoLibrary {
                library: "cuBLASLt (libcublasLt)",
                purpose: "multiply matrices",
                package: "nvidia-cublas",
            });
        }
        let handle = result::create_handle().map_err(failed("start cuBLASLt".to_owned()))?;
        Ok(Self {
            ready: HashMap::new(),
            handle: Handle(handle),
            tf32: options.tf32,
            candidates: if options.deterministic { 1 } else { CANDIDATES },
        })
    }

    /// Whether what is fastest is found out by trying.
    pub fn is_timed(&self) -> bool {
        self.candidates > 1
    }

    /// Whether a product's algorithm was chosen.
    pub fn is_ready(&self, product: &Product) -> bool {
        self.ready.contains_key(&key(product))
    }

    /// Chooses the algorithm of a product, so that recording it later does nothing else. To time
    /// them it is computed, on whatever is in its operands.
    pub fn prepare(
        &mut self,
        product: &Product,
        base: u64,
        stream: &Stream,
    ) -> Result<(), EngineError> {
        let key = key(product);
        let (mut ready, candidates) = suggest(&self.handle, product, self.tf32, self.candidates)
            .map_err(failed(describe(product)))?;
        if candidates.len() > 1 {
            let mut trials = Trials::new(stream)?;
            let chosen = fastest(candidates.len(), |candidate, runs| {
                ready.algorithm = candidates[candidate];
                trials.time(candidate, runs, || {
                    self.issue(&ready, product, base, stream)
                })
            })?;
            ready.algorithm = candidates[chosen];
        } else {
            // Once for real: the library loads its kernel with the first use, which is not
            // allowed while a stream is being recorded.
            self.issue(&ready, product, base, stream)
                .and_then(|()| stream.synchronize())?;
        }
        self.ready.insert(key, ready);
        Ok(())
    }

    /// Puts a prepared product on the stream.
    pub fn run(&self, product: &Product, base: u64, stream: &Stream) -> Result<(), EngineError> {
        let Some(ready) = self.ready.get(&key(product)) else {
            return Err(EngineError::Cuda {
                action: describe(product),
                problem: "it was not prepared".to_owned(),
            });
        };
        self.issue(ready, product, base, stream)?;
        stream.set_ends_with_kernel(true);
        Ok(())
    }

    fn issue(
        &self,
        ready: &Ready,
        product: &Product,
        base: u64,
        stream: &Stream,
    ) -> Result<(), EngineError> {
        let at = |address: u64| (base + address) as *mut c_void;
        let (alpha, beta) = (
            product.scale,
            if product.accumulate { 1.0_f32 } else { 0.0 },
        );
        if let Some(bias) = product.bias {
            let pointer = at(bias.copied);
            let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
            // SAFETY: the attribute is a pointer, and one is given.
            unsafe { set(&ready.description, attribute, &pointer) }
                .map_err(failed(describe(product)))?;
        }
        // SAFETY: descriptors are live; addresses are inside the arena by the plan.
        unsafe {
            result::matmul(
                self.handle.0,
                ready.description.0,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                at(product.b.address),
                ready.first.0,
                at(product.a.address),
                ready.second.0,
                at(product.c.address),
                ready.output.0,
                at(product.c.address),
                ready.output.0,
                &raw const ready.algorithm,
                at(product.workspace),
                product.workspace_bytes as usize,
                stream.handle.cast(),
            )
        }
        .map_err(failed(describe(product)))
    }
}

pub(crate) fn key(product: &Product) -> Key {
    let part = |m: &MatrixAt| (m.row_stride, m.dtype, m.transposed, alignment(m.address));
    (
        product.m,
        product.n,
        product.k,
        [part(&product.a), part(&product.b), part(&product.c)],
        product.accumulate,
        product.bias.is_some(),
        product.workspace_bytes,
    )
}

/// # Safety
/// The attribute's value must be a `T`.
unsafe fn set<T>(
    description: &Description,
    attribute: sys::cublasLtMatmulDescAttributes_t,
    value: &T,
) -> Result<(), CublasError> {
    // SAFETY: descriptor and value are live, and the value has the size that is given.
    unsafe {
        result::set_matmul_desc_attribute(
            description.0,
            attribute,
            std::ptr::from_ref(value).cast(),
            size_of::<T>(),
        )
    }
}

/// A matrix as the library sees it: the stored rows are its columns.
fn layout(matrix: &MatrixAt, (rows, columns): (usize, usize)) -> Result<Layout, CublasError> {
    let layout = result::create_matrix_layout(
        data_type(matrix.dtype),
        columns as u64,
        rows as u64,
        matrix.row_stride as i64,
    )?;
    Ok(Layout(layout))
}

/// What an address is a multiple of, as far as it matters: a column block of a packed tensor may
/// start at any element.
fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(8)
}

/// A product's descriptors, and up to `count` algorithms for it, best first by the library's
/// reckoning.
fn suggest(
    handle: &Handle,
    product: &Product,
    tf32: bool,
    count: usize,
) -> Result<(Ready, Vec<sys::cublasLtMatmulAlgo_t>), CublasError> {
    use sys::cublasLtMatmulDescAttributes_t as Attribute;
    let single = product.a.dtype == DType::F32;
    let compute = if single && tf32 {
        sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32
    } else {
        sys::cublasComputeType_t::CUBLAS_COMPUTE_32F
    };
    let description = result::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F)?;
    let description = Description(description);
    // The library's CUBLAS_OP_N and CUBLAS_OP_T, which the bindings leave out.
    let operation = i32::from;
    let (m, n, k) = (product.m, product.n, product.k);
    // SAFETY: each attribute is given the type that the library documents for it.
    unsafe {
        set(
            &description,
            Attribute::CUBLASLT_MATMUL_DESC_TRANSA,
            &operation(product.b.transposed),
        )?;
        set(
            &description,
            Attribute::CUBLASLT_MATMUL_DESC_TRANSB,
            &operation(product.a.transposed),
        )?;
        if product.bias.is_some() {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            set(
                &description,
                Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE,
                &epilogue,
            )?;
            let kind = data_type(product.c.dtype);
            set(
                &description,
                Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
                &kind,
            )?;
        }
    }
    let stored = |transposed: bool, rows: usize, columns: usize| {
        if transposed {
            (columns, rows)
        } else {
            (rows, columns)
        }
    };
    let first = layout(&product.b, stored(product.b.transposed, k, n))?;
    let second = layout(&product.a, stored(product.a.transposed, m, k))?;
    let output = layout(&product.c, (m, n))?;
    let preference = Preference(result::create_matmul_pref()?);
    let limit = product.workspace_bytes as usize;
    let attributes = [
        sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
        sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
        sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
    ];
    let addresses = [
        product.b.address,
        product.a.address,
        product.c.address,
        product.c.address,
    ];
    let mut results = vec![MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::uninit(); count];
    let mut found = 0;
    // SAFETY: the attributes are a size and 32-bit alignments; all descriptors are live; there is
    // room for as many results as are asked for.
    let status = unsafe {
        result::set_matmul_pref_attribute(
            preference.0,
            sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            (&raw const limit).cast(),
            size_of::<usize>(),
        )?;
        for (attribute, address) in attributes.into_iter().zip(addresses) {
            let value = alignment(address);
            result::set_matmul_pref_attribute(
                preference.0,
                attribute,
                (&raw const value).cast(),
                size_of::<u32>(),
            )?;
        }
        sys::cublasLtMatmulAlgoGetHeuristic(
            handle.0,
            description.0,
            first.0,
            second.0,
            output.0,
            output.0,
            preference.0,
            count as i32,
            results.as_mut_ptr().cast(),
            &raw mut found,
        )
    };
    status.result()?;
    let found = usize::try_from(found).unwrap_or(0).min(count);
    let mut candidates = Vec::with_capacity(found);
    for result in &results[..found] {
        // SAFETY: the library filled the first `found` results.
        let result = unsafe { result.assume_init_ref() };
        if result.state.result().is_ok() {
            candidates.push(result.algo);
        }
    }
    let Some(&algorithm) = candidates.first() else {
        return Err(CublasError(
            sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
        ));
    };
    let ready = Ready {
        description,
        first,
        second,
        output,
        algorithm,
    };
    Ok((ready, candidates))
}
