//! Saving, replacing, pruning and running out of disk, on real folders.

use safetensors::{Dtype, SafeTensors};
use serde_json::json;

use super::super::{load, verify};
use super::*;

/// Weights and states that differ from seed to seed.
struct Tensors {
    weights: Vec<u8>,
    moments: Vec<u8>,
}

impl Tensors {
    fn new(seed: u32) -> Self {
        let floats = |count: u32, scale: f32| -> Vec<u8> {
            (0..count)
                .flat_map(|index| ((index * 7 + seed) as f32 * scale).to_le_bytes())
                .collect()
        };
        Self {
            weights: floats(3 * 1000, 0.5),
            moments: floats(400_000, -0.25),
        }
    }

    fn model(&self) -> [TensorView<'_>; 1] {
        [TensorView {
            name: "embedding.weight",
            shape: &[3, 1000],
            dtype: Dtype::F32,
            bytes: &self.weights,
        }]
    }

    fn optimizer(&self) -> [TensorView<'_>; 1] {
        [TensorView {
            name: "embedding.weight.moment",
            shape: &[400_000],
            dtype: Dtype::F32,
            bytes: &self.moments,
        }]
    }

    fn save(&self, store: &Store, step: u64) -> Result<PathBuf, CheckpointError> {
        store.save(
            step,
            &self.model(),
            &self.optimizer(),
            &json!({ "step": step }),
        )
    }
}

fn names_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn steps(store: &Store) -> Vec<u64> {
    store
        .list()
        .unwrap()
        .iter()
        .map(|entry| entry.step)
        .collect()
}

#[test]
fn nothing_is_created_before_the_first_save() {
    let run = tempfile::tempdir().unwrap();
    let store = Store::open(run.path()).unwrap();
    assert!(!store.folder().exists());
    assert!(store.list().unwrap().is_empty());
    assert!(store.best().unwrap().is_none());
    assert!(store.prune(1).unwrap().is_empty());
}

#[test]
fn a_run_folder_whose_checkpoints_are_a_file_is_refused_at_once() {
    let run = tempfile::tempdir().unwrap();
    fs::write(run.path().join("checkpoints"), "").unwrap();
    let message = Store::open(run.path()).unwrap_err().to_string();
    assert!(message.contains("checkpoints"), "{message}");
}

#[test]
fn a_saved_checkpoint_is_whole_and_others_can_read_it() {
    let run = tempfile::tempdir().unwrap();
    // Two missing levels: the run folder itself may not exist yet.
    let store = Store::open(run.path().join("runs/first")).unwrap();
    let tensors = Tensors::new(1);
    let path = tensors.save(&store, 123).unwrap();
    assert_eq!(
        path,
        run.path().join("runs/first/checkpoints/step-00000123")
    );
    assert_eq!(names_in(store.folder()), ["step-00000123"]);
    assert_eq!(
        names_in(&path),
        [
            "checksums.json",
            "model.safetensors",
            "optimizer.safetensors",
            "state.json"
        ]
    );
    let model = fs::read(path.join(MODEL_FILE)).unwrap();
    let parsed = SafeTensors::deserialize(&model).unwrap();
    let embedding = parsed.tensor("embedding.weight").unwrap();
    assert_eq!(embedding.data(), tensors.weights);
    assert_eq!(embedding.shape(), [3, 1000]);
    verify(&path).unwrap();

    let (model, optimizer) = (tensors.model(), tensors.optimizer());
    let contents = Contents {
        model: Layout::new(&model).unwrap(),
        optimizer: Layout::new(&optimizer).unwrap(),
        state: fs::read(path.join(STATE_FILE)).unwrap(),
    };
    let on_disk: u64 = names_in(&path)
        .iter()
        .map(|name| fs::metadata(path.join(name)).unwrap().len())
        .sum();
    assert_eq!(contents.num_bytes(), on_disk);
}

#[test]
fn saving_the_same_step_again_writes_nothing() {
    let run = tempfile::tempdir().unwrap();
    let store = Store::open(run.path()).unwrap();
    let tensors = Tensors::new(1);
    let path = tensors.save(&store, 5).unwrap();
    let before = fs::metadata(path.join(MODEL_FILE))
        .unwrap()
        .modified()
        .unwrap();
    // A store that cannot create files: a second write would fail.
    let read_only = Store {
        create_file: |_| Err(io::Error::other("no file may be written")),
        ..store.clone()
    };
    assert_eq!(tensors.save(&read_only, 5).unwrap(), path);
    assert_eq!(names_in(store.folder()), ["step-00000005"]);
    let after = fs::metadata(path.join(MODEL_FILE))
        .unwrap()
        .modified()
        .unwrap();
    assert_eq!(before, after);
}

#[test]
fn another_or_damaged_checkpoint_of_the_same_step_is_kept_aside() {
    let run = tempfile::tempdir().unwrap();
    let store = Store::open(run.path()).unwrap();
    Tensors::new(1).save(&store, 5).unwrap();
    store.mark_best(5, 1.0).unwrap();
    Tensors::new(2).save(&store, 5).unwrap();
    assert_eq!(
        names_in(store.folder()),
        ["aside-step-00000005-1", "step-00000005"]
    );
    assert!(
        store.best().unwrap().is_none(),
        "the mark belonged to the other weights"
    );
    let kept = fs::read(
        store
            .folder()
            .join("aside-step-00000005-1")
            .join(MODEL_FILE),
    )
    .unwrap();
    let parsed = SafeTensors::deserialize(&kept).unwrap();
    assert_eq!(
        parsed.tensor("embedding.weight").unwrap().data(),
        Tensors::new(1).weights
    );

    let path = store.path_of(5);
    fs::remove_file(path.join(STATE_FILE)).unwrap();
    Tensors::new(2).save(&store, 5).unwrap();
    verify(&path).unwrap();
    assert_eq!(
        names_in(store.folder()),
        [
            "aside-step-00000005-1",
            "aside-step-00000005-2",
            "step-00000005"
        ]
    );
}

#[test]
fn later_checkpoints_step_aside_for_a_run_resumed_earlier() {
    let run = tempfile::tempdir().unwrap();
    let store = Store::open(run.path()).unwrap();
    for step in [10, 20, 30] {
        Tensors::new(step as u32).save(&store, step).unwrap();
    }
    store.mark_best(10, 0.5).unwrap();
    assert_eq!(store.set_aside_after(10).unwrap().len(), 2);
    assert_eq!(steps(&store), [10]);
    assert_eq!(store.best().unwrap().unwrap().step, 10);
}

#[test]
fn pruning_spares_the_best_and_the_newest() {
    let run = tempfile::tempdir().unwrap();
    let store = Store::open(run.path()).unwrap();
    let tensors = Tensors::new(3);
    for step in [1, 2, 3, 4, 5] {
        tensors.save(&store, step).unwrap();
    }
    store.mark_best(2, 0.125).unwrap();
    // A folder that lost a file counts neither as kept nor as removable.
    fs::create_dir(store.path_of(99)).unwrap();
    let removed: Vec<u64> = store
        .prune(2)
        .unwrap()
        .iter()
        .map(|entry| entry.step)
        .collect();
    assert_eq!(removed, [1, 3]);
    assert_eq!(steps(&store), [2, 4, 5]);
    store.prune(0).unwrap();
    assert_eq!(steps(&store), [2, 5]);
    assert_eq!(
        names_in(store.folder()),
        [
            "best.json",
            "step-00000002",
            "step-00000005",
            "step-00000099"
        ]
    );
    let best = store.best().unwrap().unwrap();
    assert_eq!((best.step, best.metric), (2, 0.125));
    assert_eq!(best.path, store.path_of(2));
}

#[test]
fn the_best_mark_is_checked() {
    let run = tempfile::tempdir().unwrap();
    let store = Store::open(run.path()).unwrap();
    Tensors::new(1).save(&store, 1).unwrap();
    assert!(matches!(
        store.mark_best(1, f64::NAN),
        Err(CheckpointError::MetricNotFinite { .. })
    ));
    assert!(matches!(
        store.mark_best(2, 1.0),
        Err(CheckpointError::BestWithoutCheckpoint { step: 2, .. })
    ));
    fs::write(store.folder().join(BEST_FILE), "{\"step\": 1").unwrap();
    assert!(matches!(
        store.best(),
        Err(CheckpointError::BestFile { .. })
    ));
    assert!(store.prune(1).is_err(), "the best could be removed");
    let aside = store.set_aside_damaged_best().unwrap().unwrap();
    assert_eq!(fs::read(&aside).unwrap(), b"{\"step\": 1");
    assert!(store.best().unwrap().is_none());
    store.mark_best(1, 1.0).unwrap();
    assert_eq!(store.set_aside_damaged_best().unwrap(), None);
}

/// `/dev/full` is the kernel's own full disk: opening works, every write answers ENOSPC.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_explained_and_leaves_the_previous_checkpoint() {
    let run = tempfile::tempdir().unwrap();
    let store = Store::open(run.path()).unwrap();
    let full = Store {
        create_file: |path| {
            if path.ends_with(OPTIMIZER_FILE) {
                fs::OpenOptions::new().write(true).open("/dev/full")
            } else {
                File::create_new(path)
            }
        },
        ..store.clone()
    };
    let message = Tensors::new(1).save(&full, 10).unwrap_err().to_string();
    assert!(
        message.contains("there is no earlier checkpoint"),
        "{message}"
    );

    let previous = Tensors::new(1).save(&store, 10).unwrap();
    // The damaged folder of the step being saved must survive a save that fails.
    fs::create_dir(store.path_of(20)).unwrap();
    let error = Tensors::new(2).save(&full, 20).unwrap_err();
    let message = error.to_string();
    let CheckpointError::DiskFull {
        needed,
        free,
        previous: named,
        source,
        ..
    } = error
    else {
        panic!("expected a full disk, got {message}");
    };
    assert_eq!(source.raw_os_error(), Some(28));
    let tensor_bytes = 4 * (3000 + 400_000);
    assert!(needed > tensor_bytes && needed < tensor_bytes + 2000);
    assert!(free.is_some());
    assert_eq!(named.as_deref(), Some(previous.as_path()));
    for part in [
        "the disk is full",
        "step-00000020",
        &format!("needs {needed} bytes"),
        "are free",
        previous.to_str().unwrap(),
    ] {
        assert!(message.contains(part), "`{part}` is missing in: {message}");
    }
    assert_eq!(
        names_in(store.folder()),
        ["step-00000010", "step-00000020"],
        "the partial folder must be gone"
    );
    verify(&previous).unwrap();
}

#[test]
fn every_number_of_the_state_comes_back_bit_for_bit() {
    let run = tempfile::tempdir().unwrap();
    let store = Store::open(run.path()).unwrap();
    // A multiplicative sequence over all exponents; nearest-decimal parsing is easy to get wrong
    // by one unit in the last place.
    let mut bits = 0x9e37_79b9_7f4a_7c15_u64;
    let mut floats = vec![0.1, 5e-324, f64::MAX, -0.0];
    while floats.len() < 2000 {
        bits = bits
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let float = f64::from_bits(bits);
        if float.is_finite() {
            floats.push(float);
        }
    }
    let state = json!({ "seed": u64::MAX, "floats": floats });
    let path = store.save(1, &[], &[], &state).unwrap();
    let loaded = load(&path).unwrap();
    assert_eq!(loaded.state["seed"].as_u64(), Some(u64::MAX));
    for (expected, found) in floats
        .iter()
        .zip(loaded.state["floats"].as_array().unwrap())
    {
        assert_eq!(found.as_f64().map(f64::to_bits), Some(expected.to_bits()));
    }
}
