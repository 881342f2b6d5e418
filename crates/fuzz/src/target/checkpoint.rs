//! The files of a checkpoint, which may be somebody else's.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use cinch_config::{Settings, Source};
use cinch_train::State;
use cinch_train::checkpoint::{
    self, CHECKSUMS_FILE, MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, Store,
};
use sha2::{Digest, Sha256};

use super::{Target, contents, no_words};

pub const STATE: Target = Target {
    name: "state",
    about: "state.json, checksums.json and best.json of a checkpoint",
    seeds: states,
    words: no_words,
    run: read_state,
};

pub const SAFETENSORS: Target = Target {
    name: "safetensors",
    about: "weights in a safetensors file",
    seeds: weights,
    words: no_words,
    run: read_weights,
};

/// A state for each model that is trained, checksums, and a best.
fn states() -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> = ["mamba", "gpt2"].into_iter().filter_map(state).collect();
    let digest = |name: &str| {
        let entry =
            serde_json::json!({ "bytes": 0, "sha256": format!("{:x}", Sha256::digest(b"")) });
        (name.to_owned(), entry)
    };
    let files: BTreeMap<_, _> = [MODEL_FILE, OPTIMIZER_FILE, STATE_FILE].map(digest).into();
    seeds.push(
        serde_json::json!({ "files": files })
            .to_string()
            .into_bytes(),
    );
    seeds.push(br#"{"step": 3, "metric": 1.5}"#.to_vec());
    seeds
}

fn state(model: &str) -> Option<Vec<u8>> {
    let mut settings = Settings::new();
    for (key, value) in [("model.type", model), ("model.size", "tiny")] {
        let source = Source::Flag("--set".to_owned());
        settings.set(key, value, source).ok()?;
    }
    let state = State {
        format: State::FORMAT,
        step: 3,
        samples: 48,
        tokens: 1536,
        seed: 42,
        best_loss: Some(1.5),
        best_step: Some(3),
        first_loss: Some(5.0),
        evaluation_pending: false,
        stage: 1,
        stage_starts: vec![0, 2],
        evaluations_since_best: 1,
        top: vec![(3, 1.5)],
        clusters: None,
        corpus: "0123456789abcdef".to_owned(),
        of_ids: false,
        frozen: Some("fedcba9876543210".to_owned()),
        config: settings.resolve().ok()?,
        settings: BTreeMap::from([("model.type".to_owned(), model.to_owned())]),
    };
    serde_json::to_vec_pretty(&state.to_json().ok()?).ok()
}

fn read_state(input: &[u8], folder: &Path) {
    if let Ok(value) = serde_json::from_slice::<serde_json::Value>(input) {
        match State::from_json(Path::new(STATE_FILE), value) {
            Ok(state) => {
                let json = state.to_json().expect("a state can be written");
                let again = State::from_json(Path::new(STATE_FILE), json);
                let again = again.expect("what was written can be read");
                assert!(
                    again.differences(&state.config).is_empty(),
                    "it differs from itself"
                );
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
    // Beside checksums that hold it is read; as checksums it says what is read.
    let checkpoint = folder.join("checkpoints/step-00000003");
    fs::create_dir_all(&checkpoint).expect("the folder can be written");
    for name in [MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, CHECKSUMS_FILE] {
        fs::write(checkpoint.join(name), input).expect("the folder can be written");
    }
    fs::write(folder.join("checkpoints/best.json"), input).expect("the folder can be written");
    for error in [
        checkpoint::verify(&checkpoint).err(),
        checkpoint::load_state(&checkpoint).err(),
        checkpoint::load(&checkpoint).err(),
        Store::look(folder).and_then(|store| store.best()).err(),
        Store::look(folder).and_then(|store| store.list()).err(),
    ]
    .into_iter()
    .flatten()
    {
        assert!(!error.to_string().is_empty());
    }
}

/// The fixtures, with their data cut off where the header is all that matters.
fn weights() -> Vec<Vec<u8>> {
    let mut seeds = contents(&["crates/train/tests/fixtures"], &["safetensors"]);
    let header = br#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"b":{"dtype":"BF16","shape":[3],"data_offsets":[16,22]}}"#;
    let mut small = (header.len() as u64).to_le_bytes().to_vec();
    small.extend(header);
    small.extend([0; 22]);
    seeds.push(small);
    seeds
}

fn read_weights(input: &[u8], folder: &Path) {
    let path = folder.join(MODEL_FILE);
    fs::write(&path, input).expect("the folder can be written");
    match checkpoint::load_weights(&path) {
        Ok(file) => {
            for tensor in file.tensors() {
                let num_bits = tensor.num_elements() * tensor.dtype.bitsize();
                assert_eq!(num_bits as u64, tensor.num_bytes() * 8, "{}", tensor.name);
                let mut bytes = vec![0; tensor.num_bytes() as usize];
                file.read(&tensor.name, 0..tensor.rows(), &mut bytes)
                    .expect("the file is whole");
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
