//! Kernels from source, by NVRTC, for the card at hand; kept on disk with a checksum, keyed by
//! source, options and version.

use std::ffi::{CString, c_char};
use std::io;
use std::path::{Path, PathBuf};

use cinch_files::{Refused, find_cache_folder, private_folder};
use cinch_graph::DType;
use cudarc::nvrtc::{result, sys};
use sha2::{Digest, Sha256};

use crate::error::EngineError;

/// What sources include, each before those that it includes itself.
const HEADERS: [(&str, &str); 9] = [
    (
        "#include \"attention.cuh\"",
        include_str!("kernels/attention.cuh"),
    ),
    (
        "#include \"hopper.cuh\"",
        include_str!("kernels/hopper.cuh"),
    ),
    (
        "#include \"cluster.cuh\"",
        include_str!("kernels/cluster.cuh"),
    ),
    ("#include \"scan.cuh\"", include_str!("kernels/scan.cuh")),
    (
        "#include \"selection.cuh\"",
        include_str!("kernels/selection.cuh"),
    ),
    (
        "#include \"sequence.cuh\"",
        include_str!("kernels/sequence.cuh"),
    ),
    (
        "#include \"matrix.cuh\"",
        include_str!("kernels/matrix.cuh"),
    ),
    (
        "#include \"pointwise.cuh\"",
        include_str!("kernels/pointwise.cuh"),
    ),
    (
        "#include \"common.cuh\"",
        include_str!("kernels/common.cuh"),
    ),
];

/// Every source, by the name that commands use.
pub const SOURCES: [(&str, &str); 43] = [
    ("activation", include_str!("kernels/activation.cu")),
    (
        "adapter_back_hopper",
        include_str!("kernels/adapter_back_hopper.cu"),
    ),
    (
        "adapter_back_tensor",
        include_str!("kernels/adapter_back_tensor.cu"),
    ),
    ("adapter_tensor", include_str!("kernels/adapter_tensor.cu")),
    ("attention_any", include_str!("kernels/attention_any.cu")),
    (
        "attention_backward",
        include_str!("kernels/attention_backward.cu"),
    ),
    (
        "attention_entropy",
        include_str!("kernels/attention_entropy.cu"),
    ),
    (
        "attention_entropy_narrow",
        include_str!("kernels/attention_entropy_narrow.cu"),
    ),
    (
        "attention_hopper",
        include_str!("kernels/attention_hopper.cu"),
    ),
    (
        "attention_hopper_backward",
        include_str!("kernels/attention_hopper_backward.cu"),
    ),
    (
        "attention_hopper_dealt",
        include_str!("kernels/attention_hopper_dealt.cu"),
    ),
    (
        "attention_hopper_short",
        include_str!("kernels/attention_hopper_short.cu"),
    ),
    (
        "attention_hopper_short_forward",
        include_str!("kernels/attention_hopper_short_forward.cu"),
    ),
    (
        "attention_entropy_tensor",
        include_str!("kernels/attention_entropy_tensor.cu"),
    ),
    (
        "attention_narrow",
        include_str!("kernels/attention_narrow.cu"),
    ),
    (
        "attention_narrow_tensor",
        include_str!("kernels/attention_narrow_tensor.cu"),
    ),
    (
        "attention_tensor",
        include_str!("kernels/attention_tensor.cu"),
    ),
    (
        "cached_attention",
        include_str!("kernels/cached_attention.cu"),
    ),
    (
        "cached_convolution",
        include_str!("kernels/cached_convolution.cu"),
    ),
    ("cached_scan", include_str!("kernels/cached_scan.cu")),
    (
        "cached_selection",
        include_str!("kernels/cached_selection.cu"),
    ),
    ("columns", include_str!("kernels/columns.cu")),
    ("column_sum", include_str!("kernels/column_sum.cu")),
    ("convolution", include_str!("kernels/convolution.cu")),
    ("cross_entropy", include_str!("kernels/cross_entropy.cu")),
    ("dequantise", include_str!("kernels/dequantise.cu")),
    ("dropout", include_str!("kernels/dropout.cu")),
    ("embedding", include_str!("kernels/embedding.cu")),
    (
        "gradient_narrow_tensor",
        include_str!("kernels/gradient_narrow_tensor.cu"),
    ),
    (
        "gradient_hopper",
        include_str!("kernels/gradient_hopper.cu"),
    ),
    ("indexer", include_str!("kernels/indexer.cu")),
    ("noise", include_str!("kernels/noise.cu")),
    ("norm", include_str!("kernels/norm.cu")),
    ("optimizer", include_str!("kernels/optimizer.cu")),
    ("product_hopper", include_str!("kernels/product_hopper.cu")),
    (
        "product_short_hopper",
        include_str!("kernels/product_short_hopper.cu"),
    ),
    (
        "product_turns_hopper",
        include_str!("kernels/product_turns_hopper.cu"),
    ),
    (
        "product_whole_hopper",
        include_str!("kernels/product_whole_hopper.cu"),
    ),
    (
        "projection_hopper",
        include_str!("kernels/projection_hopper.cu"),
    ),
    ("rotary", include_str!("kernels/rotary.cu")),
    ("scan", include_str!("kernels/scan.cu")),
    ("scan_backward", include_str!("kernels/scan_backward.cu")),
    ("split_hopper", include_str!("kernels/split_hopper.cu")),
];

/// Whether kernels can be compiled here.
pub fn is_available() -> bool {
    // SAFETY: only looks for the library.
    unsafe { sys::is_culib_present() }
}

/// What a source is compiled for on a card of this architecture, in this precision; `None` where it
/// has nothing for it. Sources for the tensor cores alone are in 16 bits; those for Hopper use
/// instructions that only its own variant has.
pub fn target(file: &str, dtype: DType, architecture: &str) -> Option<String> {
    let is_half = matches!(dtype, DType::Bf16 | DType::F16);
    if file.contains("hopper") {
        let is_built = architecture == "sm_90" && is_half;
        return is_built.then(|| "sm_90a".to_owned());
    }
    let is_built = is_half || !file.ends_with("_tensor");
    is_built.then(|| architecture.to_owned())
}

/// What a source becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Output {
    MachineCode,
    /// As text, which can be read without a card.
    Ptx,
}

/// The machine code of a source, from the cache or compiled.
pub fn cubin(file: &'static str, dtype: DType, architecture: &str) -> Result<Vec<u8>, EngineError> {
    let (source, architecture) = found(file, dtype, architecture)?;
    let folder = kernels_folder().ok();
    compiled(
        file,
        source,
        dtype,
        &architecture,
        (Output::MachineCode, folder),
    )
}

/// The PTX of a source, from a folder or compiled.
pub fn ptx(
    file: &'static str,
    dtype: DType,
    architecture: &str,
    folder: &Path,
) -> Result<Vec<u8>, EngineError> {
    let (source, architecture) = found(file, dtype, architecture)?;
    let output = (Output::Ptx, Some(folder.to_owned()));
    compiled(file, source, dtype, &architecture, output)
}

/// What a source has for a card, by its name.
fn found(
    file: &'static str,
    dtype: DType,
    architecture: &str,
) -> Result<(&'static str, String), EngineError> {
    let fail = |log: String| EngineError::Compile {
        file,
        architecture: architecture.to_owned(),
        log,
    };
    let target = target(file, dtype, architecture)
        .ok_or_else(|| fail(format!("the source has nothing for {dtype} there")))?;
    let mut sources = SOURCES.iter();
    let source = sources.find(|(name, _)| *name == file);
    let (_, source) = source.ok_or_else(|| fail("there is no such source".to_owned()))?;
    Ok((source, target))
}

/// What a source that was made for one op is called in messages.
const GENERATED: &str = "expression";

/// The machine code of a source that was made for one op, from the cache or compiled.
pub fn generated_cubin(
    source: &str,
    dtype: DType,
    architecture: &str,
) -> Result<Vec<u8>, EngineError> {
    let output = (Output::MachineCode, kernels_folder().ok());
    compiled(GENERATED, source, dtype, architecture, output)
}

/// Its PTX, from a folder or compiled.
pub fn generated_ptx(
    source: &str,
    dtype: DType,
    architecture: &str,
    folder: &Path,
) -> Result<Vec<u8>, EngineError> {
    let output = (Output::Ptx, Some(folder.to_owned()));
    compiled(GENERATED, source, dtype, architecture, output)
}

fn compiled(
    file: &'static str,
    source: &str,
    dtype: DType,
    architecture: &str,
    (output, folder): (Output, Option<PathBuf>),
) -> Result<Vec<u8>, EngineError> {
    let source = HEADERS
        .iter()
        .fold(source.to_owned(), |source, (line, header)| {
            source.replace(line, header)
        });
    let options = options(dtype, architecture);
    if !is_available() {
        return Err(EngineError::NoLibrary {
            library: "NVRTC (libnvrtc)",
            purpose: "compile its kernels for this card",
            package: "nvidia-cuda-nvrtc",
        });
    }
    let path = folder.map(|folder| folder.join(key(&source, &options, output)));
    if let Some(cached) = path.as_deref().and_then(kept) {
        return Ok(cached);
    }
    let code = compile(file, &source, &options, (architecture, output))?;
    if let Some(path) = path {
        // A failure leaves the cache without this entry, which only costs time.
        let _ = keep(&path, &code);
    }
    Ok(code)
}

/// Where compiled kernels are kept: nowhere, if anybody else could put some there.
pub fn kernels_folder() -> Result<PathBuf, Refused> {
    let folder = find_cache_folder()?.join("kernels");
    private_folder(&folder)?;
    Ok(folder)
}

/// What a file of the cache begins with: a digest of the machine code that follows.
const DIGEST_BYTES: usize = 32;

fn keep(path: &Path, code: &[u8]) -> io::Result<()> {
    let digest: [u8; DIGEST_BYTES] = Sha256::digest(code).into();
    cinch_files::replace(path, &[&digest, code].concat())
}

/// The code that was kept; none where it is not there or not what was written.
fn kept(path: &Path) -> Option<Vec<u8>> {
    let file = cinch_files::read_regular(path, cinch_files::MAX_READ).ok()?;
    let (digest, code) = file.split_at_checked(DIGEST_BYTES)?;
    (Sha256::digest(code).as_slice() == digest).then(|| code.to_vec())
}

fn options(dtype: DType, architecture: &str) -> Vec<String> {
    let real = match dtype {
        DType::Bf16 => "REAL_BF16",
        DType::F16 => "REAL_F16",
        _ => "REAL_F32",
    };
    vec![
        format!("--gpu-architecture={architecture}"),
        format!("-D{real}"),
        "--std=c++17".to_owned(),
    ]
}

fn key(source: &str, options: &[String], output: Output) -> String {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both pointers are to live integers. A failure leaves zeros, which is a key as well.
    let _ = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    let mut hash = Sha256::new();
    hash.update(source);
    hash.update(options.join("\n"));
    hash.update(format!("{major}.{minor}"));
    let digest = hash.finalize();
    let name: String = digest[..16]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    name + match output {
        Output::MachineCode => ".cubin",
        Output::Ptx => ".ptx",
    }
}

fn compile(
    file: &'static str,
    source: &str,
    options: &[String],
    (architecture, output): (&str, Output),
) -> Result<Vec<u8>, EngineError> {
    let fail = |log: String| EngineError::Compile {
        file,
        architecture: architecture.to_owned(),
        log,
    };
    let text = CString::new(source).map_err(|error| fail(error.to_string()))?;
    let name = CString::new(format!("{file}.cu")).map_err(|error| fail(error.to_string()))?;
    let program =
        result::create_program(&text, Some(&name)).map_err(|error| fail(format!("{error:?}")))?;
    // SAFETY: the program was just created and is destroyed at the end.
    let compiled = unsafe { result::compile_program(program, options) };
    let outcome = match compiled {
        Ok(()) => match output {
            Output::MachineCode => read_cubin(program),
            Output::Ptx => read_ptx(program),
        }
        .map_err(|error| fail(format!("{error:?}"))),
        Err(_) => Err(fail(read_log(program))),
    };
    // SAFETY: created above, destroyed once. A leak is the worst that can come of a failure.
    let _ = unsafe { result::destroy_program(program) };
    outcome
}

fn read_cubin(program: sys::nvrtcProgram) -> Result<Vec<u8>, result::NvrtcError> {
    let mut size = 0;
    // SAFETY: the program is compiled and `size` is live.
    unsafe { sys::nvrtcGetCUBINSize(program, &raw mut size) }.result()?;
    let mut cubin = vec![0_u8; size];
    // SAFETY: the buffer has the size that was asked for.
    unsafe { sys::nvrtcGetCUBIN(program, cubin.as_mut_ptr().cast::<c_char>()) }.result()?;
    Ok(cubin)
}

fn read_ptx(program: sys::nvrtcProgram) -> Result<Vec<u8>, result::NvrtcError> {
    // SAFETY: the program is compiled.
    let text = unsafe { result::get_ptx(program) }?;
    let bytes = text.iter().map(|&c| c.cast_unsigned());
    Ok(bytes.take_while(|&byte| byte != 0).collect())
}

fn read_log(program: sys::nvrtcProgram) -> String {
    // SAFETY: the program is live.
    let log = unsafe { result::get_program_log(program) }.unwrap_or_default();
    let bytes: Vec<u8> = log.iter().map(|&c| c.cast_unsigned()).collect();
    String::from_utf8_lossy(&bytes)
        .trim_end_matches('\0')
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kept_kernel_that_was_changed_counts_as_absent() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kernel.cubin");
        assert_eq!(kept(&path), None);
        let cubin: Vec<u8> = (0..200).collect();
        keep(&path, &cubin).unwrap();
        assert_eq!(kept(&path), Some(cubin.clone()));
        let whole = std::fs::read(&path).unwrap();
        for cut in 0..whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            assert_eq!(kept(&path), None, "{cut} bytes");
            let mut changed = whole.clone();
            changed[cut] ^= 1;
            std::fs::write(&path, &changed).unwrap();
            assert_eq!(kept(&path), None, "byte {cut}");
        }
        // Machine code without a digest, as it was kept once.
        std::fs::write(&path, &cubin).unwrap();
        assert_eq!(kept(&path), None);
    }
}
