//! A checkpoint belongs to a model, not to a device or a precision: masters and moments are the
//! same tensors in every plan, so a run may move between the CPU and a GPU.

mod tiny;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use cinch_config::{Config, Precision};
use cinch_data::NoProgress;
use cinch_engine::EngineOptions;
use cinch_graph::{DType, Target};
use cinch_step::StepPlan;
use cinch_train::checkpoint::{MODEL_FILE, Store, TensorView, WeightFiles, load};
use cinch_train::{Event, Resume, Run, State, TrainError, train};
use cinch_weights::Tensor;

/// Name, shape and type of everything of a parameter that a checkpoint holds.
fn saved_tensors(plan: &StepPlan) -> Vec<(String, Vec<usize>, DType)> {
    let graph = &plan.training;
    let ids = graph.parameters.iter().flat_map(|parameter| {
        let moments = parameter.moments.into_iter().flatten();
        [parameter.master].into_iter().chain(moments)
    });
    ids.map(|id| {
        let tensor = graph.tensor(id);
        let dims = tensor.ty.shape.dims().to_vec();
        (tensor.name.clone(), dims, tensor.ty.dtype)
    })
    .collect()
}

#[test]
fn every_device_and_precision_saves_the_same_tensors() {
    for model in tiny::MODELS {
        let mut config = tiny::config(model, &[]);
        let here = saved_tensors(&StepPlan::new(&config, Target::Cpu, 0).unwrap());
        assert!(here.iter().all(|(.., dtype)| *dtype == DType::F32));
        for precision in [Precision::Fp32, Precision::Bf16, Precision::Fp16] {
            config.batch.precision = precision;
            let plan = StepPlan::new(&config, Target::Cuda, 1).unwrap();
            assert_eq!(saved_tensors(&plan), here, "{precision:?} of {model:?}");
        }
    }
}

/// A model that reads bytes of the built-in text.
fn config(folder: &Path, steps: &str) -> Config {
    let output = folder.join("run");
    let cache = folder.join("cache");
    let own = [
        ("model.vocab_size", "257"),
        ("model.dropout", "0"),
        ("data.tokenizer", "bytes"),
        ("data.cache_dir", cache.to_str().unwrap()),
        ("output.output_dir", output.to_str().unwrap()),
        ("training.max_steps", steps),
        ("training.eval_interval", "1000"),
    ];
    tiny::config(tiny::MAMBA, &own)
}

fn run(config: &Config, resume: Resume) -> Result<u64, TrainError> {
    let run = Run {
        plan: StepPlan::new(config, Target::Cpu, 0).unwrap(),
        settings: BTreeMap::new(),
        resume,
        options: EngineOptions {
            threads: Some(1),
            ..EngineOptions::default()
        },
        stop: &AtomicBool::new(false),
        progress: &NoProgress,
        world: None,
    };
    train(run, &mut |_: Event<'_>| {}).map(|outcome| outcome.step)
}

/// The tensors of a file with their bytes.
fn contents(file: &WeightFiles) -> Vec<(&Tensor, Vec<u8>)> {
    let read = |tensor: &Tensor| {
        let mut bytes = vec![0; tensor.num_bytes() as usize];
        file.read(&tensor.name, 0..tensor.rows(), &mut bytes)
            .unwrap();
        bytes
    };
    let tensors = file.tensors().iter();
    tensors.map(|tensor| (tensor, read(tensor))).collect()
}

fn views<'a>(tensors: &'a [(&Tensor, Vec<u8>)]) -> Vec<TensorView<'a>> {
    let view = |(tensor, bytes): &'a (&Tensor, Vec<u8>)| TensorView {
        name: &tensor.name,
        shape: &tensor.shape,
        dtype: tensor.dtype,
        bytes,
    };
    tensors.iter().map(view).collect()
}

#[test]
fn a_run_that_was_saved_in_bf16_goes_on_here() {
    let folder = tempfile::tempdir().unwrap();
    let first = config(folder.path(), "2");
    assert_eq!(run(&first, Resume::Fresh).unwrap(), 2);

    // The checkpoint as a GPU would have left it: the same tensors, another precision and
    // another cut of the batch in its state.
    let store = Store::open(&first.output.output_dir).unwrap();
    let path = store.newest().unwrap().unwrap().path;
    let saved = load(&path).unwrap();
    let mut state = State::from_json(&path, saved.state.clone()).unwrap();
    state.config.batch.precision = Precision::Bf16;
    state.config.batch.batch_size *= 2;
    state.config.batch.accumulation = 1;
    let elsewhere = Store::open(folder.path().join("elsewhere")).unwrap();
    let [model, optimizer] = [&saved.model, &saved.optimizer].map(contents);
    let state = state.to_json().unwrap();
    let moved = elsewhere
        .save(2, &views(&model), &views(&optimizer), &state)
        .unwrap();

    let mut longer = config(folder.path(), "4");
    longer.output.output_dir = folder.path().join("elsewhere");
    assert_eq!(run(&longer, Resume::From(moved)).unwrap(), 4);
    let mut unmoved = longer.clone();
    unmoved
        .output
        .output_dir
        .clone_from(&first.output.output_dir);
    assert_eq!(run(&unmoved, Resume::From(path)).unwrap(), 4);
    let weights = |config: &Config| {
        let store = Store::open(&config.output.output_dir).unwrap();
        std::fs::read(store.path_of(4).join(MODEL_FILE)).unwrap()
    };
    assert!(weights(&longer) == weights(&unmoved));
}
