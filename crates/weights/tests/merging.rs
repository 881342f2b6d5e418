//! Merged models against those of peft: `fixtures/make_adapters.py` wrote them.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use cinch_weights::{
    Adapter, AdapterConfig, AdapterModule, AdapterParts, AdapterTensor, Dtype, Modules, Targets,
    TensorSpec, TensorWriter, WeightError, WeightFiles, merge, write_adapter, write_file,
};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/merge")
}

fn bits(files: &WeightFiles, name: &str) -> Vec<u16> {
    let tensor = files.tensor(name).unwrap();
    assert_eq!(tensor.dtype, Dtype::BF16, "{name}");
    let mut bits = vec![0; tensor.num_elements()];
    files.read_bf16(name, 0..tensor.rows(), &mut bits).unwrap();
    bits
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
fn a_merged_model_is_that_of_peft() {
    let mut base = WeightFiles::open(&fixtures().join("base")).unwrap();
    let adapter = Adapter::open(&fixtures().join("adapter")).unwrap();
    let expected = WeightFiles::open(&fixtures().join("expected.safetensors")).unwrap();
    let place = tempfile::tempdir().unwrap();
    for (number, shard_bytes) in [None, Some(6000), Some(1 << 30)].into_iter().enumerate() {
        let to = place.path().join(number.to_string());
        let mut last = 0;
        let mut total = 0;
        let mut progress = |progress: cinch_weights::MergeProgress<'_>| {
            assert!(progress.bytes_done > last, "{progress:?}");
            (last, total) = (progress.bytes_done, progress.bytes_total);
            ControlFlow::Continue(())
        };
        let done = merge(&mut base, &adapter, &to, shard_bytes, &mut progress).unwrap();
        assert_eq!((last, total), (base.num_bytes(), base.num_bytes()));
        assert_eq!(done.num_modules, 9);
        assert!(done.notes.is_empty(), "{:?}", done.notes);
        assert!(done.files.iter().all(|path| path.is_file()));

        let merged = WeightFiles::open(&to).unwrap();
        let files = merged.files().len();
        assert_eq!(files, [base.files().len(), 3, 1][number]);
        assert_eq!(merged.tensors().len(), expected.tensors().len());
        for tensor in expected.tensors() {
            let (found, wanted) = (bits(&merged, &tensor.name), bits(&expected, &tensor.name));
            assert_eq!(found, wanted, "{}", tensor.name);
        }
        for name in ["config.json", "generation_config.json"] {
            let [copy, original] = [to.join(name), fixtures().join("base").join(name)];
            assert_eq!(fs::read(copy).unwrap(), fs::read(original).unwrap());
        }
    }
    // The adapter changed something, so that the comparison is one.
    let changed = expected
        .tensors()
        .iter()
        .filter(|tensor| bits(&base, &tensor.name) != bits(&expected, &tensor.name));
    assert_eq!(changed.count(), 9 + 6 + 1);
}

/// A base of one matrix, and an adapter of rank 1 on it.
fn small(place: &Path, dtype: Dtype, rows: usize, columns: usize) -> (WeightFiles, Adapter) {
    let path = place.join("model.safetensors");
    let shape = [rows, columns];
    let spec = TensorSpec {
        name: "layer.up_proj.weight",
        dtype,
        shape: &shape,
    };
    let mut ones = |spec: &TensorSpec<'_>, out: &mut TensorWriter<'_>| {
        let one: &[u8] = match dtype {
            Dtype::F32 => &[0, 0, 0x80, 0x3f],
            Dtype::F16 => &[0, 0x3c],
            Dtype::BF16 => &[0x80, 0x3f],
            _ => &[1],
        };
        out.put(&one.repeat(spec.shape.iter().product()))
    };
    write_file(&path, &[spec], &mut ones).unwrap();

    let modules = Modules::Names(vec!["up_proj".to_owned()]);
    let config = AdapterConfig::new(1, 0.5, Targets::Modules(modules));
    let module = AdapterModule {
        name: "layer.up_proj".to_owned(),
        rank: 1,
        inputs: columns,
        outputs: rows,
    };
    // The product is row · column.
    let mut numbers = |tensor: AdapterTensor<'_>, out: &mut TensorWriter<'_>| {
        let AdapterTensor::Factor(module, factor) = tensor else {
            unreachable!("nothing is trained whole");
        };
        let count: usize = module.shape(factor).iter().product();
        (0..count).try_for_each(|n| out.put(&(n as f32).to_le_bytes()))
    };
    let parts = AdapterParts {
        modules: &[module],
        whole: &[],
        dtype: Dtype::F32,
    };
    let folder = place.join("adapter");
    write_adapter(&folder, &config, &parts, &mut numbers).unwrap();
    (
        WeightFiles::open(place).unwrap(),
        Adapter::open(&folder).unwrap(),
    )
}

#[test]
fn every_row_of_every_type_gets_its_product() {
    // More rows than a block has.
    for (dtype, rows, columns) in [
        (Dtype::F32, 1100, 1000),
        (Dtype::F16, 5, 7),
        (Dtype::BF16, 5, 7),
    ] {
        let place = tempfile::tempdir().unwrap();
        let (mut base, adapter) = small(place.path(), dtype, rows, columns);
        let to = place.path().join("merged");
        let done = merge(&mut base, &adapter, &to, None, &mut |_| {
            ControlFlow::Continue(())
        })
        .unwrap();
        assert!(done.notes[0].contains("no config.json"), "{:?}", done.notes);
        let merged = WeightFiles::open(&to).unwrap();
        assert_eq!(merged.tensors()[0].dtype, dtype);
        let mut values = vec![0.0; rows * columns];
        merged
            .read_f32("layer.up_proj.weight", 0..rows, &mut values)
            .unwrap();
        for (n, &value) in values.iter().enumerate() {
            let expected = 1.0 + 0.5 * (n / columns * (n % columns)) as f32;
            assert_eq!(value, expected, "{dtype} {n}");
        }
    }
}

#[test]
fn a_merge_that_does_not_end_leaves_nothing() {
    let place = tempfile::tempdir().unwrap();
    let (mut base, adapter) = small(place.path(), Dtype::BF16, 5, 7);
    let before = names(place.path());
    let to = place.path().join("merged");
    let stopped = merge(&mut base, &adapter, &to, None, &mut |_| {
        ControlFlow::Break(())
    });
    assert!(matches!(stopped, Err(WeightError::Stopped { .. })));
    assert_eq!(names(place.path()), before);

    fs::create_dir(&to).unwrap();
    fs::write(to.join("mine"), "x").unwrap();
    let mut go = |_: cinch_weights::MergeProgress<'_>| ControlFlow::Continue(());
    let taken = merge(&mut base, &adapter, &to, None, &mut go).unwrap_err();
    assert!(taken.to_string().contains("already something"), "{taken}");
    assert_eq!(names(&to), ["mine"]);
}

/// A quantised base has no weights that could be added to.
#[test]
fn a_base_of_codes_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let (mut base, adapter) = small(place.path(), Dtype::I8, 5, 7);
    let to = place.path().join("merged");
    let mut go = |_: cinch_weights::MergeProgress<'_>| ControlFlow::Continue(());
    let error = merge(&mut base, &adapter, &to, None, &mut go).unwrap_err();
    assert!(error.to_string().contains("stored as I8"), "{error}");
    assert!(!to.exists());
}

/// Tensors of `[1, 2], [3, 4]` in a folder with a configuration.
fn tables(place: &Path, names: &[&str], config: &str) -> WeightFiles {
    let specs: Vec<TensorSpec<'_>> = names.iter().map(|name| table(name)).collect();
    let mut numbers = |_: &TensorSpec<'_>, out: &mut TensorWriter<'_>| {
        [1_f32, 2.0, 3.0, 4.0]
            .iter()
            .try_for_each(|x| out.put(&x.to_le_bytes()))
    };
    write_file(&place.join("model.safetensors"), &specs, &mut numbers).unwrap();
    fs::write(place.join("config.json"), config).unwrap();
    WeightFiles::open(place).unwrap()
}

fn table(name: &str) -> TensorSpec<'_> {
    TensorSpec {
        name,
        dtype: Dtype::F32,
        shape: &[2, 2],
    }
}

/// An adapter whose tensors have one number each: factors 1, and what is held whole as it is told.
fn written(
    place: &Path,
    config: &AdapterConfig,
    modules: &[AdapterModule],
    whole: &[(TensorSpec<'_>, f32)],
) -> Adapter {
    let specs: Vec<TensorSpec<'_>> = whole.iter().map(|(spec, _)| *spec).collect();
    let parts = AdapterParts {
        modules,
        whole: &specs,
        dtype: Dtype::F32,
    };
    let mut numbers = |tensor: AdapterTensor<'_>, out: &mut TensorWriter<'_>| {
        let (elements, number) = match tensor {
            AdapterTensor::Factor(module, factor) => (module.shape(factor).iter().product(), 1.0),
            AdapterTensor::Whole(name) => {
                let (spec, number) = whole.iter().find(|(spec, _)| spec.name == name).unwrap();
                (spec.shape.iter().product::<usize>(), *number)
            }
        };
        out.put(&number.to_le_bytes().repeat(elements))
    };
    let folder = place.join("adapter");
    write_adapter(&folder, config, &parts, &mut numbers).unwrap();
    Adapter::open(&folder).unwrap()
}

fn all_linear() -> AdapterConfig {
    AdapterConfig::new(1, 1.0, Targets::AllLinear)
}

/// An adapter that has nines for one tensor.
fn nines(place: &Path, tensor: &str, task: &str) -> Adapter {
    let mut config = all_linear();
    config.modules_to_save = vec![tensor.trim_end_matches(".weight").to_owned()];
    config.task_type = Some(task.to_owned());
    written(place, &config, &[], &[(table(tensor), 9.0)])
}

/// The merged model in a folder beside the others, with what is to be said of it.
fn merged(
    place: &Path,
    base: &mut WeightFiles,
    adapter: &Adapter,
) -> Result<(WeightFiles, Vec<String>), WeightError> {
    let to = place.join("merged");
    let done = merge(base, adapter, &to, None, &mut |_| ControlFlow::Continue(()))?;
    Ok((WeightFiles::open(&to)?, done.notes))
}

/// The four numbers of a table.
fn numbers(files: &WeightFiles, name: &str) -> [f32; 4] {
    let mut numbers = [0.0; 4];
    files.read_f32(name, 0..2, &mut numbers).unwrap();
    numbers
}

const EMBEDDINGS: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// Files of a tied model may hold the head besides, as those of Qwen3-0.6B do.
#[test]
fn what_was_one_tensor_becomes_two_where_the_adapter_changes_one_of_them() {
    let config = r#"{"tie_word_embeddings": true, "hidden_size": 2}"#;
    for stored in [&[EMBEDDINGS][..], &[EMBEDDINGS, HEAD]] {
        for changed in [HEAD, EMBEDDINGS] {
            let place = tempfile::tempdir().unwrap();
            let mut base = tables(place.path(), stored, config);
            let adapter = nines(place.path(), changed, "CAUSAL_LM");
            let (merged, notes) = merged(place.path(), &mut base, &adapter).unwrap();
            let mut said = notes.iter();
            assert!(
                said.any(|note| note.contains("two in the merged")),
                "{notes:?}"
            );
            for tensor in [HEAD, EMBEDDINGS] {
                let expected = match tensor == changed {
                    true => [9.0; 4],
                    false => [1.0, 2.0, 3.0, 4.0],
                };
                assert_eq!(numbers(&merged, tensor), expected, "{tensor}");
            }
            let config = fs::read(merged.folder().join("config.json")).unwrap();
            let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
            assert_eq!(
                config,
                serde_json::json!({"tie_word_embeddings": false, "hidden_size": 2})
            );
        }
    }
}

/// OPT's embeddings have another name than those of LLaMA, and are its head too.
#[test]
fn embeddings_that_would_reach_the_head_besides_are_refused() {
    let name = "model.decoder.embed_tokens.weight";
    let outcome = |stored: &[&str], config: &str, task: &str| {
        let place = tempfile::tempdir().unwrap();
        let mut base = tables(place.path(), stored, config);
        let adapter = nines(place.path(), name, task);
        merged(place.path(), &mut base, &adapter).map(|_| ())
    };
    let tied = r#"{"vocab_size": 2}"#;
    let error = outcome(&[name], tied, "CAUSAL_LM").unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains(name) && error.contains("its head"),
        "{error}"
    );
    let untied = r#"{"vocab_size": 2, "tie_word_embeddings": false}"#;
    outcome(&[name], untied, "CAUSAL_LM").unwrap();
    outcome(&[name, "embed_out.weight"], tied, "CAUSAL_LM").unwrap();
    outcome(&[name], tied, "FEATURE_EXTRACTION").unwrap();
    let positions = r#"{"vocab_size": 3}"#;
    outcome(&[name], positions, "CAUSAL_LM").unwrap();
}

/// With `save_embedding_layers` peft writes what is trained whole twice, and what it was before.
#[test]
fn what_an_adapter_holds_again_is_passed_over() {
    let place = tempfile::tempdir().unwrap();
    let config = r#"{"tie_word_embeddings": false}"#;
    let mut base = tables(place.path(), &[EMBEDDINGS, HEAD], config);
    let whole = [
        (table(HEAD), 9.0),
        (table("lm_head.modules_to_save.weight"), 9.0),
        (table("lm_head.original_module.weight"), 1.0),
    ];
    let adapter = written(place.path(), &all_linear(), &[], &whole);
    assert_eq!(adapter.replaced.len(), 1, "{:?}", adapter.replaced);
    let (merged, _) = merged(place.path(), &mut base, &adapter).unwrap();
    assert_eq!(numbers(&merged, HEAD), [9.0; 4]);
}

#[test]
fn added_tokens_are_told() {
    let place = tempfile::tempdir().unwrap();
    let config = r#"{"tie_word_embeddings": false}"#;
    let mut base = tables(place.path(), &[EMBEDDINGS, HEAD], config);
    let longer = TensorSpec {
        shape: &[3, 2],
        ..table(HEAD)
    };
    let adapter = written(place.path(), &all_linear(), &[], &[(longer, 9.0)]);
    let error = merged(place.path(), &mut base, &adapter).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("resize_token_embeddings(3)"), "{error}");
}

/// peft saves the embeddings or head below an adapter on them, and loads them in the base's place.
#[test]
fn what_lies_below_an_adapter_comes_from_its_file() {
    let place = tempfile::tempdir().unwrap();
    let config = r#"{"tie_word_embeddings": false}"#;
    let mut base = tables(place.path(), &[EMBEDDINGS, HEAD], config);
    let module = AdapterModule {
        name: "lm_head".to_owned(),
        rank: 1,
        inputs: 2,
        outputs: 2,
    };
    let names = Targets::Modules(Modules::Names(vec!["lm_head".to_owned()]));
    let config = AdapterConfig::new(1, 1.0, names);
    let below = (table("lm_head.base_layer.weight"), 9.0);
    let adapter = written(place.path(), &config, &[module], &[below]);
    let (merged, _) = merged(place.path(), &mut base, &adapter).unwrap();
    assert_eq!(numbers(&merged, HEAD), [10.0; 4]);
}
