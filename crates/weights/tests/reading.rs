//! Model folders as they are found: whole, sharded, cut off, mixed up, or of another format.

use std::fs;
use std::path::{Path, PathBuf};

use cinch_architecture::HubFolders;
use cinch_weights::{
    Dtype, WeightError, WeightFiles, bf16_bits, bf16_value, f16_bits, find_folder,
};
use safetensors::tensor::TensorView;
use serde_json::json;
use tempfile::TempDir;

/// Writes a file by the format's own library.
fn write(path: &Path, tensors: &[(&str, Dtype, &[usize], Vec<u8>)]) {
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (
            *name,
            TensorView::new(*dtype, shape.to_vec(), bytes).unwrap(),
        )
    });
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

fn floats(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

fn bf16(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|&value| bf16_bits(value).to_le_bytes())
        .collect()
}

fn index(folder: &Path, map: &[(&str, &str)]) {
    let map: serde_json::Map<_, _> = map
        .iter()
        .map(|(tensor, file)| ((*tensor).to_owned(), json!(file)))
        .collect();
    let text = json!({ "metadata": { "total_size": 0 }, "weight_map": map }).to_string();
    fs::write(folder.join("model.safetensors.index.json"), text).unwrap();
}

/// Two shards: `a` and `b` in the first, `c` in the second.
fn sharded() -> (TempDir, [PathBuf; 2]) {
    let folder = tempfile::tempdir().unwrap();
    let shards = [1, 2].map(|n| {
        folder
            .path()
            .join(format!("model-0000{n}-of-00002.safetensors"))
    });
    let rows: Vec<f32> = (0..6).map(|n| n as f32 + 0.5).collect();
    write(
        &shards[0],
        &[
            ("a", Dtype::F32, &[3, 2], floats(&rows)),
            ("b", Dtype::BF16, &[6], bf16(&rows)),
        ],
    );
    write(&shards[1], &[("c", Dtype::U8, &[], vec![7])]);
    index(
        folder.path(),
        &[
            ("a", "model-00001-of-00002.safetensors"),
            ("b", "model-00001-of-00002.safetensors"),
            ("c", "model-00002-of-00002.safetensors"),
        ],
    );
    (folder, shards)
}

fn refusal(path: &Path) -> String {
    WeightFiles::open(path).unwrap_err().to_string()
}

#[test]
fn shards_are_one_set_of_tensors() {
    let (folder, shards) = sharded();
    let files = WeightFiles::open(folder.path()).unwrap();
    assert_eq!(files.tensors().len(), 3);
    assert_eq!(files.num_bytes(), 24 + 12 + 1);
    assert_eq!(files.files().collect::<Vec<_>>(), shards);
    let a = files.tensor("a").unwrap();
    assert_eq!((a.dtype, a.shape.as_slice()), (Dtype::F32, &[3, 2][..]));
    assert_eq!((a.rows(), a.row_elements(), a.num_elements()), (3, 2, 6));
    assert_eq!(files.file_of(a), shards[0]);

    let mut rows = [0.0; 4];
    files.read_f32("a", 1..3, &mut rows).unwrap();
    assert_eq!(rows, [2.5, 3.5, 4.5, 5.5]);
    files.read_f32("b", 0..4, &mut rows).unwrap();
    assert_eq!(rows, [0.5, 1.5, 2.5, 3.5]);
    files.read_elements_f32("a", 1..5, &mut rows).unwrap();
    assert_eq!(rows, [1.5, 2.5, 3.5, 4.5]);
    let mut raw = [0];
    files.read("c", 0..1, &mut raw).unwrap();
    assert_eq!(raw, [7]);
    let mut bits = [0; 2];
    files.read_f16("a", 2..3, &mut bits).unwrap();
    assert_eq!(bits, [4.5, 5.5].map(f16_bits));
    files.read_bf16("a", 2..3, &mut bits).unwrap();
    assert_eq!(bits.map(bf16_value), [4.5, 5.5]);
    let mut bytes = [0; 8];
    files.read_as("b", 4..6, Dtype::F32, &mut bytes).unwrap();
    assert_eq!(bytes.to_vec(), floats(&[4.5, 5.5]));
    files
        .read_as("b", 4..6, Dtype::BF16, &mut bytes[..4])
        .unwrap();
    assert_eq!(bytes[..4], bf16(&[4.5, 5.5]));
    // The index alone and a shard alone can be named too.
    let named = folder.path().join("model.safetensors.index.json");
    assert_eq!(WeightFiles::open(&named).unwrap().tensors().len(), 3);
    assert_eq!(WeightFiles::open(&shards[1]).unwrap().tensors().len(), 1);
}

/// More than one piece of work, and pieces that end inside.
#[test]
fn large_tensors_are_converted_piece_by_piece() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let (rows, columns) = (301, 1003);
    let values: Vec<f32> = (0..rows * columns)
        .map(|n| (n % 8191) as f32 - 4000.0)
        .collect();
    write(
        &path,
        &[
            ("odd", Dtype::U8, &[1], vec![1]),
            ("w", Dtype::BF16, &[rows, columns], bf16(&values)),
        ],
    );
    let files = WeightFiles::open(folder.path()).unwrap();
    let mut read = vec![0.0; (rows - 1) * columns];
    files.read_f32("w", 1..rows, &mut read).unwrap();
    let expected: Vec<f32> = values[columns..]
        .iter()
        .map(|&value| bf16_value(bf16_bits(value)))
        .collect();
    assert_eq!(read, expected);
    let mut raw = vec![0; rows * columns * 2];
    files.read("w", 0..rows, &mut raw).unwrap();
    assert_eq!(raw, bf16(&values));
}

#[test]
fn a_shard_that_is_cut_off_is_named_with_its_lengths() {
    let (folder, shards) = sharded();
    let whole = fs::read(&shards[0]).unwrap();
    fs::write(&shards[0], &whole[..whole.len() - 5]).unwrap();
    let message = refusal(folder.path());
    assert!(message.contains("model-00001-of-00002"), "{message}");
    let lengths = format!("{} bytes, the file has {}", whole.len(), whole.len() - 5);
    assert!(message.contains(&lengths), "{message}");
    for cut in [0, 5, 8, 20] {
        fs::write(&shards[0], &whole[..cut]).unwrap();
        let message = refusal(folder.path());
        assert!(message.contains("model-00001-of-00002"), "{message}");
    }
    let longer = [whole.as_slice(), b"xyz"].concat();
    fs::write(&shards[0], longer).unwrap();
    assert!(refusal(folder.path()).contains("is damaged"));
}

#[test]
fn a_file_that_shrinks_while_it_is_read_is_an_error() {
    let (folder, shards) = sharded();
    let files = WeightFiles::open(folder.path()).unwrap();
    let length = fs::metadata(&shards[0]).unwrap().len();
    let file = fs::OpenOptions::new().write(true).open(&shards[0]).unwrap();
    file.set_len(length - 40).unwrap();
    let mut rows = [0.0; 6];
    let error = files.read_f32("a", 0..3, &mut rows).unwrap_err();
    let both = files.read_f32("b", 0..6, &mut rows).unwrap_err();
    for error in [error, both] {
        assert!(matches!(error, WeightError::Truncated { .. }), "{error}");
    }
}

#[test]
fn index_and_files_must_agree() {
    let (folder, shards) = sharded();
    index(folder.path(), &[("a", "absent.safetensors")]);
    let message = refusal(folder.path());
    assert!(
        message.contains("names `absent.safetensors` for 1 tensor"),
        "{message}"
    );

    index(folder.path(), &[("z", "model-00001-of-00002.safetensors")]);
    let message = refusal(folder.path());
    assert!(
        message.contains("tensor `z` is in `model-00001-of"),
        "{message}"
    );

    // Named for one file, and in another.
    index(
        folder.path(),
        &[
            ("a", "model-00002-of-00002.safetensors"),
            ("b", "model-00001-of-00002.safetensors"),
        ],
    );
    let message = refusal(folder.path());
    assert!(message.contains("does not have it"), "{message}");

    fs::copy(&shards[0], &shards[1]).unwrap();
    let message = refusal(folder.path());
    assert!(message.contains("is in two files"), "{message}");

    index(folder.path(), &[("a", "../elsewhere.safetensors")]);
    assert!(refusal(folder.path()).contains("not the name of a file beside it"));
    fs::write(folder.path().join("model.safetensors.index.json"), "{}").unwrap();
    assert!(refusal(folder.path()).contains("weight_map"));
}

/// A file of a header and some bytes, right or wrong.
fn crafted(header: &str, data: usize) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    fs::write(&path, bytes).unwrap();
    refusal(&path)
}

#[test]
fn headers_that_lie_are_refused() {
    let tensor = |name: &str, shape: &str, place: &str| {
        format!(r#""{name}":{{"dtype":"F32","shape":{shape},"data_offsets":{place}}}"#)
    };
    let of = |tensors: &[String]| format!("{{{}}}", tensors.join(","));
    for (tensors, data, expected) in [
        (
            vec![tensor("w", "[2]", "[0,12]")],
            12,
            "takes 8 bytes, its place is 0..12",
        ),
        (vec![tensor("w", "[2]", "[8,0]")], 8, "takes 8 bytes"),
        (
            vec![tensor("v", "[2]", "[0,8]"), tensor("w", "[2]", "[4,12]")],
            12,
            "`v` and `w` overlap",
        ),
        (
            vec![tensor("v", "[2]", "[0,8]"), tensor("w", "[2]", "[12,20]")],
            20,
            "bytes 8..12 of its data, before `w`",
        ),
        (vec![tensor("w", "[2]", "[4,12]")], 12, "bytes 0..4"),
        (vec![tensor("w", "[2]", "[0,8]")], 9, "is damaged"),
        (
            vec![tensor("w", "[9223372036854775807,3]", "[0,8]")],
            8,
            "not whole bytes",
        ),
        (vec![tensor("w", "[-1]", "[0,8]")], 8, "tensor `w`"),
        (
            vec![tensor("w", "[2]", "[0,8]").replace("F32", "Q4")],
            8,
            "Q4",
        ),
        (vec![r#""__metadata__":3"#.to_owned()], 0, "__metadata__"),
    ] {
        let message = crafted(&of(&tensors), data);
        assert!(message.contains(expected), "{message}");
    }
    assert!(crafted("[]", 0).contains("not JSON"));
    assert!(crafted("\u{0}", 0).contains("not JSON"));
}

/// An extent of zero makes the others free, also where they could not be multiplied.
#[test]
fn an_empty_tensor_may_have_any_other_extent() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let header = format!(
        r#"{{"w":{{"dtype":"F32","shape":[0,{0},{0}],"data_offsets":[0,0]}}}}"#,
        usize::MAX
    );
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    fs::write(&path, bytes).unwrap();
    let files = WeightFiles::open(&path).unwrap();
    assert_eq!(files.tensor("w").unwrap().row_elements(), 0);
    files.read_f32("w", 0..0, &mut []).unwrap();
}

#[test]
fn a_length_that_cannot_be_is_not_allocated() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    fs::write(&path, [0xff; 64]).unwrap();
    assert!(refusal(&path).contains("100000000 is the limit"));
    fs::write(&path, "version https://git-lfs.github.com/spec/v1\n").unwrap();
    assert!(refusal(&path).contains("git lfs pull"));
}

#[test]
fn other_formats_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    assert!(refusal(folder.path()).contains("neither model.safetensors nor"));
    fs::write(at("consolidated.safetensors"), "").unwrap();
    assert!(refusal(folder.path()).contains("only consolidated.safetensors"));
    fs::write(at("adapter_config.json"), "{}").unwrap();
    assert!(refusal(folder.path()).contains("folder of an adapter"));
    fs::write(at("pytorch_model.bin"), "").unwrap();
    let message = refusal(folder.path());
    assert!(message.contains("pytorch_model.bin"), "{message}");
    assert!(message.contains("safe_serialization"), "{message}");
    assert!(refusal(&at("x.pt")).contains("pickle"));
    assert!(refusal(&at("absent.safetensors")).contains("cannot open"));
}

#[test]
fn wrong_requests_name_what_there_is() {
    let (folder, _shards) = sharded();
    let files = WeightFiles::open(folder.path()).unwrap();
    let mut rows = [0.0; 6];
    let mut message = |name, range| {
        files
            .read_f32(name, range, &mut rows)
            .unwrap_err()
            .to_string()
    };
    assert!(message("d", 0..1).contains("did you mean"));
    assert!(message("a", 2..4).contains("has 3 rows, 2..4"));
    assert!(message("a", 0..2).contains("takes 4 elements, the place for it has 6"));
    assert!(message("c", 0..1).contains("stored as U8"));
    let mut bytes = [0; 6];
    let error = files.read("a", 0..1, &mut bytes).unwrap_err().to_string();
    assert!(error.contains("takes 8 bytes"), "{error}");
    let error = files
        .read_as("a", 0..1, Dtype::I64, &mut [0; 16])
        .unwrap_err();
    assert!(matches!(error, WeightError::NotConverted { .. }));
}

#[test]
fn a_hub_id_is_found_in_the_local_cache() {
    let cache = tempfile::tempdir().unwrap();
    let model = cache.path().join("models--owner--tiny");
    for revision in ["aaa", "bbb"] {
        let folder = model.join("snapshots").join(revision);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("config.json"), "{}").unwrap();
    }
    fs::create_dir_all(model.join("refs")).unwrap();
    fs::write(model.join("refs/main"), "bbb\n").unwrap();
    let folders = HubFolders {
        caches: vec![cache.path().to_owned()],
        beside: Some(model.clone()),
    };
    let found = |name: &str, holds: &str| find_folder(name, holds, &folders);
    let snapshot = model.join("snapshots/bbb");
    assert_eq!(found("owner/tiny", "config.json").unwrap(), snapshot);
    assert_eq!(found("refs", "config.json").unwrap(), model.join("refs"));
    let message = found("owner/tiny", "adapter_config.json")
        .unwrap_err()
        .to_string();
    assert!(message.contains("hf download owner/tiny"), "{message}");
    assert!(found("", "config.json").is_err());
}
