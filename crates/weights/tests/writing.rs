//! Files that are written: read back by the format's own library, sharded, refused, or not there.

use std::fs;
use std::path::Path;

use cinch_weights::{
    Dtype, TensorSpec, TensorWriter, WeightError, WeightFiles, cut_shards, write_file, write_model,
};
use safetensors::SafeTensors;

const TENSORS: [TensorSpec<'_>; 5] = [
    spec("flags", Dtype::U8, &[3]),
    spec("half", Dtype::BF16, &[3, 2]),
    spec("quoted \"ñ\"", Dtype::F32, &[2, 2]),
    spec("empty", Dtype::F32, &[0, 4]),
    spec("scalar", Dtype::I64, &[]),
];

const fn spec<'a>(name: &'a str, dtype: Dtype, shape: &'a [usize]) -> TensorSpec<'a> {
    TensorSpec { name, dtype, shape }
}

/// Bytes that tell a tensor from the others.
fn bytes_of(tensor: &TensorSpec<'_>) -> Vec<u8> {
    let first = tensor.name.len() as u8;
    let count = tensor.num_bytes().unwrap() as usize;
    (0..count).map(|n| first.wrapping_add(n as u8)).collect()
}

/// In two pieces, as a caller that streams would.
fn put(tensor: &TensorSpec<'_>, out: &mut TensorWriter<'_>) -> Result<(), WeightError> {
    let bytes = bytes_of(tensor);
    let (first, second) = bytes.split_at(bytes.len() / 3);
    out.put(first)?;
    out.put(second)
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn the_safetensors_library_reads_what_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    write_file(&path, &TENSORS, &mut put).unwrap();
    let bytes = fs::read(&path).unwrap();
    let parsed = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(parsed.len(), TENSORS.len());
    for tensor in &TENSORS {
        let found = parsed.tensor(tensor.name).unwrap();
        assert_eq!(found.shape(), tensor.shape);
        assert_eq!(found.dtype(), tensor.dtype);
        assert_eq!(found.data(), bytes_of(tensor));
        let place = found.data().as_ptr() as usize - bytes.as_ptr() as usize;
        assert_eq!(place % (tensor.dtype.bitsize() / 8), 0, "{}", tensor.name);
    }
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
    let files = WeightFiles::open(&path).unwrap();
    assert_eq!(files.metadata().unwrap()["format"], "pt");
    assert_eq!(files.tensors().len(), TENSORS.len());
}

#[test]
fn shards_are_cut_as_transformers_cuts_them() {
    let shapes: [&[usize]; 5] = [&[4], &[4], &[30], &[2], &[8]];
    let names = ["a", "b", "c", "d", "e"];
    let tensors: Vec<TensorSpec<'_>> = names
        .iter()
        .zip(shapes)
        .map(|(name, shape)| spec(name, Dtype::F32, shape))
        .collect();
    let cut = |limit| -> Vec<String> {
        let shards = cut_shards(&tensors, limit).unwrap();
        let shards = shards.iter();
        shards
            .map(|shard| shard.iter().map(|tensor| tensor.name).collect())
            .collect()
    };
    assert_eq!(cut(40), ["ab", "c", "de"]);
    assert_eq!(cut(32), ["ab", "c", "d", "e"]);
    assert_eq!(cut(31), ["a", "b", "c", "d", "e"]);
    assert_eq!(cut(1000), ["abcde"]);
    assert_eq!(cut(0).len(), 5);
}

#[test]
fn a_sharded_model_is_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let shards = cut_shards(&TENSORS, 24).unwrap();
    let written = write_model(folder.path(), &shards, &mut put).unwrap();
    assert_eq!(
        names(folder.path()),
        [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json"
        ]
    );
    assert_eq!(written.len(), 3);
    let files = WeightFiles::open(folder.path()).unwrap();
    for tensor in &TENSORS {
        let found = files.tensor(tensor.name).unwrap();
        assert_eq!(
            (found.dtype, found.shape.as_slice()),
            (tensor.dtype, tensor.shape)
        );
        let mut bytes = vec![0; bytes_of(tensor).len()];
        files
            .read(tensor.name, 0..found.rows(), &mut bytes)
            .unwrap();
        assert_eq!(bytes, bytes_of(tensor));
    }
    let index = fs::read_to_string(folder.path().join("model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_str(&index).unwrap();
    assert_eq!(index["metadata"]["total_size"], 3 + 12 + 16 + 8);
    assert_eq!(index["metadata"]["total_parameters"], 3 + 6 + 4 + 1);

    let whole = tempfile::tempdir().unwrap();
    write_model(
        whole.path(),
        &cut_shards(&TENSORS, 1 << 20).unwrap(),
        &mut put,
    )
    .unwrap();
    assert_eq!(names(whole.path()), ["model.safetensors"]);
}

#[test]
fn what_fails_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let refusal = |tensors: &[TensorSpec<'_>], pieces: usize| {
        let mut contents = |_: &TensorSpec<'_>, out: &mut TensorWriter<'_>| {
            (0..pieces).try_for_each(|_| out.put(&[0; 4]))
        };
        write_file(&path, tensors, &mut contents)
            .unwrap_err()
            .to_string()
    };
    let tensor = spec("w", Dtype::F32, &[2]);
    assert!(refusal(&[tensor], 1).contains("takes 8 bytes, 4 were given"));
    assert!(refusal(&[tensor], 3).contains("takes 8 bytes, 12 were given"));
    assert!(refusal(&[tensor, tensor], 2).contains("two tensors have this name"));
    let reserved = spec("__metadata__", Dtype::F32, &[2]);
    assert!(refusal(&[reserved], 2).contains("keeps this name"));
    let huge = [usize::MAX, 3];
    assert!(refusal(&[spec("w", Dtype::F32, &huge)], 2).contains("not whole bytes"));
    assert!(names(folder.path()).is_empty());
    let absent = folder.path().join("absent/x.safetensors");
    let error = write_file(&absent, &[tensor], &mut put).unwrap_err();
    assert!(error.to_string().contains("absent"), "{error}");
}
