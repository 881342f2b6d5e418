//! Damaging saved checkpoints in every way a disk or a copy can, and checking the refusal.

use std::fs;

use cinch_weights::Dtype;
use serde_json::json;

use super::super::tensor_file::TensorView;
use super::*;

fn save(store: &Store, step: u64) -> PathBuf {
    let (weights, moments) = (vec![step as u8; 24], vec![0_u8; 8]);
    let tensor = |name, shape, bytes| TensorView {
        name,
        shape,
        dtype: Dtype::F32,
        bytes,
    };
    store
        .save(
            step,
            &[tensor("weight", &[2, 3], &weights)],
            &[tensor("weight.moment", &[2], &moments)],
            &json!({ "step": step, "note": "ok" }),
        )
        .unwrap()
}

/// A run with steps 10, 20 and 30.
fn run() -> (tempfile::TempDir, Store) {
    let run = tempfile::tempdir().unwrap();
    let store = Store::open(run.path()).unwrap();
    for step in [10, 20, 30] {
        save(&store, step);
    }
    (run, store)
}

#[test]
fn loading_gives_back_what_was_saved() {
    let (_run, store) = run();
    let loaded = load(&resolve(&store, None).unwrap()).unwrap();
    assert_eq!(loaded.path, store.path_of(30));
    assert_eq!(loaded.state, json!({ "step": 30, "note": "ok" }));
    let weight = loaded.model.get("weight").unwrap();
    assert_eq!(weight.shape, [2, 3]);
    assert_eq!(weight.dtype, Dtype::F32);
    let mut bytes = [0; 24];
    loaded.model.read("weight", 0..2, &mut bytes).unwrap();
    assert_eq!(bytes, [30; 24]);
    let states = loaded.optimizer.tensors();
    let names: Vec<&str> = states.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["weight.moment"]);
}

/// Damages step 30 in one way; the refusal must name everything needed to go on.
fn refusal(file: &str, damage: impl FnOnce(&Path)) -> String {
    let (_run, store) = run();
    let path = store.path_of(30);
    damage(&path.join(file));
    let message = load(&path).unwrap_err().to_string();
    assert_eq!(verify(&path).unwrap_err().to_string(), message);
    assert!(
        message.starts_with(&format!(
            "checkpoint {} is damaged: {file}: ",
            path.display()
        )),
        "{message}"
    );
    let hint = format!("--resume {}", store.path_of(20).display());
    assert!(message.contains(&hint), "{message}");
    message
}

#[test]
fn damage_is_refused_and_the_way_out_named() {
    let truncate = |path: &Path| {
        let length = fs::metadata(path).unwrap().len();
        let file = fs::OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(length - 1).unwrap();
    };
    let message = refusal(OPTIMIZER_FILE, truncate);
    assert!(message.contains("bytes, found"), "{message}");
    let message = refusal(MODEL_FILE, |path| fs::write(path, "").unwrap());
    assert!(message.contains("found 0"), "{message}");
    for file in [MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, CHECKSUMS_FILE] {
        let message = refusal(file, |path| fs::remove_file(path).unwrap());
        assert!(message.contains("missing"), "{message}");
    }
    let message = refusal(CHECKSUMS_FILE, truncate_to_half);
    assert!(message.contains("JSON"), "{message}");
    let message = refusal(CHECKSUMS_FILE, |path| fs::write(path, "[1]").unwrap());
    assert!(message.contains("JSON"), "{message}");
}

fn truncate_to_half(path: &Path) {
    let text = fs::read(path).unwrap();
    fs::write(path, &text[..text.len() / 2]).unwrap();
}

#[test]
fn every_single_flipped_bit_of_a_data_file_is_found() {
    let (_run, store) = run();
    let path = store.path_of(30);
    for name in [MODEL_FILE, OPTIMIZER_FILE, STATE_FILE] {
        let file = path.join(name);
        let intact = fs::read(&file).unwrap();
        for position in 0..intact.len() {
            let mut flipped = intact.clone();
            flipped[position] ^= 1 << (position % 8);
            fs::write(&file, &flipped).unwrap();
            let error = load(&path).unwrap_err();
            assert!(
                matches!(
                    &error,
                    CheckpointError::Damaged { file, damage: Damage::Checksum { expected, found }, .. }
                        if file == name && expected != found
                ),
                "{error}"
            );
        }
        fs::write(&file, &intact).unwrap();
    }
    load(&path).unwrap();
}

#[test]
fn a_damaged_older_checkpoint_is_not_offered() {
    let (_run, store) = run();
    for step in [20, 30] {
        fs::write(store.path_of(step).join(STATE_FILE), "{}").unwrap();
    }
    let message = load(&store.path_of(30)).unwrap_err().to_string();
    let hint = format!("--resume {}", store.path_of(10).display());
    assert!(message.ends_with(&hint), "{message}");
    let message = {
        fs::write(store.path_of(10).join(STATE_FILE), "{}").unwrap();
        load(&store.path_of(30)).unwrap_err().to_string()
    };
    assert!(
        message.contains("no older checkpoint beside it is intact"),
        "{message}"
    );
}

#[test]
fn files_that_match_their_checksums_can_still_be_malformed() {
    let (_run, store) = run();
    let path = store.path_of(30);
    for (name, word) in [(STATE_FILE, "JSON"), (MODEL_FILE, "safetensors")] {
        let intact = fs::read(path.join(name)).unwrap();
        fs::write(path.join(name), "{ not this").unwrap();
        let original = fs::read(path.join(CHECKSUMS_FILE)).unwrap();
        rewrite_checksum(&path, name);
        let message = load(&path).unwrap_err().to_string();
        assert!(
            message.contains(word) && message.contains(name),
            "{message}"
        );
        fs::write(path.join(name), intact).unwrap();
        fs::write(path.join(CHECKSUMS_FILE), original).unwrap();
    }
}

fn rewrite_checksum(path: &Path, name: &str) {
    use super::super::checksums::Hashed;
    use std::io::Write as _;
    let mut checksums = Checksums::read(path).unwrap();
    let mut hashed = Hashed::new(std::io::sink());
    hashed
        .write_all(&fs::read(path.join(name)).unwrap())
        .unwrap();
    let (_, digest) = hashed.finish().unwrap();
    checksums.files.insert(name.to_owned(), digest);
    let text = serde_json::to_vec(&checksums).unwrap();
    fs::write(path.join(CHECKSUMS_FILE), text).unwrap();
}

#[test]
fn resolving_accepts_a_run_a_checkpoint_or_nothing() {
    let (run, store) = run();
    let newest = store.path_of(30);
    let older = store.path_of(10);
    assert_eq!(resolve(&store, None).unwrap(), newest);
    assert_eq!(resolve(&store, Some(&older)).unwrap(), older);
    assert_eq!(resolve(&store, Some(run.path())).unwrap(), newest);
    assert_eq!(resolve(&store, Some(store.folder())).unwrap(), newest);

    let wrong = run.path().join("nowhere");
    let message = resolve(&store, Some(&wrong)).unwrap_err().to_string();
    assert!(message.contains("does not exist"), "{message}");
    let file = older.join(STATE_FILE);
    assert!(matches!(
        resolve(&store, Some(&file)),
        Err(CheckpointError::NotACheckpoint { .. })
    ));
    let empty = Store::open(&wrong).unwrap();
    assert!(matches!(
        resolve(&empty, None),
        Err(CheckpointError::NoCheckpoint { .. })
    ));
}

#[test]
fn an_incomplete_newest_checkpoint_is_refused_and_not_skipped() {
    let (run, store) = run();
    fs::remove_file(store.path_of(30).join(MODEL_FILE)).unwrap();
    assert_eq!(store.newest().unwrap().unwrap().step, 20);
    for what in [None, Some(run.path())] {
        let message = resolve(&store, what).unwrap_err().to_string();
        let hint = format!("--resume {}", store.path_of(20).display());
        assert!(message.ends_with(&hint), "{message}");
    }
}

#[test]
fn weights_load_from_a_checkpoint_or_a_bare_file() {
    let (run, store) = run();
    let path = store.path_of(10);
    // The optimizer's damage does not concern the weights.
    fs::write(path.join(OPTIMIZER_FILE), "").unwrap();
    for source in [path.clone(), path.join(MODEL_FILE)] {
        let weights = load_weights(&source).unwrap();
        let mut bytes = [0; 24];
        weights.read("weight", 0..2, &mut bytes).unwrap();
        assert_eq!(bytes, [10; 24]);
    }
    let text = run.path().join("text.safetensors");
    fs::write(&text, "no tensors here").unwrap();
    let message = load_weights(&text).unwrap_err().to_string();
    assert!(message.contains("text.safetensors"), "{message}");
    fs::write(&text, "").unwrap();
    assert!(load_weights(&text).is_err());
    fs::write(path.join(MODEL_FILE), "").unwrap();
    assert!(matches!(
        load_weights(&path),
        Err(CheckpointError::Damaged { .. })
    ));
}
