//! Adapters: which modules they are put on, as peft decided (`fixtures/make_adapters.py`), and
//! their files, read and written.

use std::fs;
use std::path::{Path, PathBuf};

use cinch_weights::{
    Adapter, AdapterConfig, AdapterModule, AdapterParts, AdapterTensor, Bias, Dtype, Factor,
    Modules, Targets, TensorSpec, TensorWriter, WeightError, WeightFiles, write_adapter,
};
use serde_json::{Value, json};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn read(keys: &Value) -> Result<AdapterConfig, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adapter_config.json");
    fs::write(&path, keys.to_string()).unwrap();
    AdapterConfig::read(&path).map_err(|error| error.to_string())
}

fn names(names: &[&str]) -> Targets {
    let names = names.iter().map(|&name| name.to_owned());
    Targets::Modules(Modules::Names(names.collect()))
}

#[test]
fn modules_are_those_that_peft_adapts() {
    let text = fs::read_to_string(fixtures().join("targets.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&text).unwrap();
    assert!(cases.len() > 10);
    for case in cases {
        let config = read(&case["config"]).unwrap();
        let linear: Vec<String> = serde_json::from_value(case["linear"].clone()).unwrap();
        let adapted = config.adapted(&linear, case["head"].as_str()).unwrap();
        let adapted: Vec<Value> = adapted
            .iter()
            .map(|module| json!([module.name, module.rank, module.scale]))
            .collect();
        assert_eq!(json!(adapted), case["adapted"], "{}", case["config"]);
        // What is written means the same.
        assert_eq!(read(&config.to_json()).unwrap(), config);
    }
}

#[test]
fn a_target_that_matches_nothing_lists_what_there_is() {
    let linear = [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.up_proj",
        "lm_head",
    ];
    let refusal = |targets: Targets| {
        let config = AdapterConfig::new(8, 16.0, targets);
        config
            .adapted(&linear, Some("lm_head"))
            .unwrap_err()
            .to_string()
    };
    let message = refusal(names(&["q_proj", "proj"]));
    assert!(message.contains("target `proj`"), "{message}");
    assert!(
        message.contains("end in lm_head, q_proj, up_proj"),
        "{message}"
    );
    assert!(
        message.contains("model.layers.0.self_attn.q_proj"),
        "{message}"
    );
    let pattern = |text: &str| Targets::Modules(Modules::Pattern(text.to_owned()));
    assert!(refusal(pattern("q_proj")).contains("target `q_proj`"));
    let message = refusal(pattern("(q_proj"));
    assert!(message.contains("target_modules: `(q_proj`"), "{message}");
    // Everything is left out.
    let mut config = AdapterConfig::new(8, 16.0, Targets::AllLinear);
    config.exclude = Some(Modules::Pattern(".*".to_owned()));
    assert!(config.adapted(&linear, None).is_err());
}

/// What peft wrote for an adapter with every kind of exception.
#[test]
fn the_configuration_of_peft_is_read() {
    let config =
        AdapterConfig::read(&fixtures().join("merge/adapter/adapter_config.json")).unwrap();
    assert_eq!(config.rank, 4);
    assert_eq!(config.alpha, 6.0);
    assert_eq!(config.dropout, 0.0);
    assert!(config.use_rslora);
    assert_eq!(config.bias, Bias::LoraOnly);
    assert_eq!(config.base_model.as_deref(), Some("owner/base"));
    assert_eq!(config.task_type.as_deref(), Some("CAUSAL_LM"));
    assert_eq!(config.modules_to_save, ["lm_head"]);
    assert_eq!(config.rank_pattern, [("v_proj".to_owned(), 2)]);
    assert_eq!(config.alpha_pattern, [("down_proj".to_owned(), 3.0)]);
    assert_eq!(
        config.scale_of("model.layers.0.mlp.down_proj").unwrap(),
        1.5
    );
}

#[test]
fn what_would_mean_something_else_is_refused_by_name() {
    let with = |key: &str, value: Value| {
        let mut keys = json!({
            "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"],
        });
        keys[key] = value;
        read(&keys)
    };
    for (key, value) in [
        ("use_dora", json!(true)),
        ("lora_bias", json!(true)),
        ("fan_in_fan_out", json!(true)),
        ("init_lora_weights", json!("pissa_niter_4")),
        ("layer_replication", json!([[0, 2]])),
        ("target_parameters", json!(["experts"])),
        ("alora_invocation_tokens", json!([1])),
        ("peft_type", json!("IA3")),
        ("a_key_of_tomorrow", json!({ "x": 1 })),
    ] {
        let message = with(key, value).unwrap_err();
        assert!(
            message.contains(key) && message.contains("not supported"),
            "{message}"
        );
    }
    for (key, value) in [
        ("r", json!(0)),
        ("r", json!("8")),
        ("lora_alpha", Value::Null),
        ("lora_dropout", json!(1.0)),
        ("target_modules", json!([])),
        ("target_modules", json!([3])),
        ("bias", json!("some")),
        ("rank_pattern", json!([1])),
        ("rank_pattern", json!({ "q_proj": 0 })),
        ("peft_type", Value::Null),
    ] {
        let message = with(key, value).unwrap_err();
        assert!(message.contains(&format!("{key}: ")), "{message}");
    }
    for (key, value) in [
        ("init_lora_weights", json!("gaussian")),
        ("use_dora", json!(false)),
        ("qalora_group_size", json!(16)),
        ("a_key_of_tomorrow", json!(false)),
    ] {
        with(key, value).unwrap();
    }
}

#[test]
fn the_files_of_peft_are_opened() {
    let mut adapter = Adapter::open(&fixtures().join("merge/adapter")).unwrap();
    assert_eq!(adapter.modules.len(), 9);
    let place = |name: &str| {
        let mut modules = adapter.modules.iter();
        modules.position(|module| module.name == name).unwrap()
    };
    let v = place("model.layers.2.self_attn.v_proj");
    let module = &adapter.modules[v];
    assert_eq!((module.rank, module.inputs, module.outputs), (2, 16, 8));
    let mut factor = [f32::NAN; 16];
    adapter.read_f32(v, Factor::B, &mut factor).unwrap();
    assert!(factor.iter().all(|value| value.is_finite()));
    let replaced: Vec<&str> = adapter
        .replaced
        .iter()
        .map(|one| one.tensor.as_str())
        .collect();
    assert!(replaced.contains(&"lm_head.weight"), "{replaced:?}");
    assert!(
        replaced.contains(&"model.layers.0.self_attn.q_proj.bias"),
        "{replaced:?}"
    );

    let base = WeightFiles::open(&fixtures().join("merge/base")).unwrap();
    assert!(
        adapter.check_base(&base).unwrap().is_empty(),
        "both are called base"
    );
    // Another model of the same shape can only be told by its name.
    adapter.config.base_model = Some("owner/another".to_owned());
    let notes = adapter.check_base(&base).unwrap();
    assert!(notes[0].contains("names `owner/another`"), "{notes:?}");
}

fn module() -> AdapterModule {
    AdapterModule {
        name: "model.layers.0.mlp.up_proj".to_owned(),
        rank: 2,
        inputs: 3,
        outputs: 4,
    }
}

/// Trained whole beside the module.
const WHOLE: TensorSpec<'_> = TensorSpec {
    name: "lm_head.weight",
    dtype: Dtype::F32,
    shape: &[2, 3],
};

fn save(folder: &Path, config: &AdapterConfig) -> Result<(), WeightError> {
    let mut numbers = |tensor: AdapterTensor<'_>, out: &mut TensorWriter<'_>| {
        let (first, count) = match tensor {
            AdapterTensor::Factor(module, factor) => {
                let first = if factor == Factor::A { 1.0 } else { 100.0 };
                (first, module.shape(factor).iter().product::<usize>())
            }
            AdapterTensor::Whole(_) => (1000.0, WHOLE.shape.iter().product()),
        };
        (0..count).try_for_each(|n| out.put(&(first + n as f32).to_le_bytes()))
    };
    let parts = AdapterParts {
        modules: &[module()],
        whole: &[WHOLE],
        dtype: Dtype::F32,
    };
    write_adapter(folder, config, &parts, &mut numbers)
}

#[test]
fn a_written_adapter_is_read_back() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("adapter");
    let mut config = AdapterConfig::new(2, 3.5, names(&["up_proj"]));
    config.base_model = Some("owner/other".to_owned());
    config.dropout = 0.05;
    save(&folder, &config).unwrap();
    let adapter = Adapter::open(&folder).unwrap();
    assert_eq!(adapter.config, config);
    assert_eq!(adapter.modules, [module()]);
    let mut b = [0.0; 8];
    adapter.read_f32(0, Factor::B, &mut b).unwrap();
    assert_eq!(b, [100.0, 101.0, 102.0, 103.0, 104.0, 105.0, 106.0, 107.0]);
    let names: Vec<&str> = adapter
        .files
        .tensors()
        .iter()
        .map(|one| one.name.as_str())
        .collect();
    assert_eq!(
        names,
        [
            "base_model.model.lm_head.weight",
            "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight",
            "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
        ]
    );
    let [whole] = adapter.replaced.as_slice() else {
        panic!("{:?}", adapter.replaced);
    };
    assert_eq!(whole.tensor, WHOLE.name);
    let mut numbers = [0.0; 6];
    adapter
        .files
        .read_f32(&whole.stored, 0..2, &mut numbers)
        .unwrap();
    assert_eq!(numbers, [1000.0, 1001.0, 1002.0, 1003.0, 1004.0, 1005.0]);
    // A folder with something in it stays as it is.
    let again = save(&folder, &config);
    assert!(matches!(again, Err(WeightError::Taken { .. })));

    let base = WeightFiles::open(&fixtures().join("merge/base")).unwrap();
    let message = adapter.check_base(&base).unwrap_err().to_string();
    assert!(
        message.contains("`model.layers.0.mlp.up_proj.weight` of [4, 3]"),
        "{message}"
    );
    assert!(message.contains("the base has [24, 16]"), "{message}");
    assert!(
        message.contains("names `owner/other` as its base"),
        "{message}"
    );
}

#[test]
fn files_that_do_not_belong_together_are_refused() {
    let place = tempfile::tempdir().unwrap();
    let refusal = |folder: &Path| Adapter::open(folder).unwrap_err().to_string();
    assert!(refusal(place.path()).contains("holds no adapter_config.json"));
    let folder = place.path().join("adapter");
    let config = AdapterConfig::new(2, 4.0, names(&["up_proj"]));
    save(&folder, &config).unwrap();
    let other = AdapterConfig::new(3, 4.0, names(&["up_proj"]));
    let text = other.to_json().to_string();
    fs::write(folder.join("adapter_config.json"), text).unwrap();
    let message = refusal(&folder);
    assert!(
        message.contains("gives rank 3") && message.contains("[2, 3]"),
        "{message}"
    );
    fs::rename(
        folder.join("adapter_model.safetensors"),
        folder.join("adapter_model.bin"),
    )
    .unwrap();
    assert!(refusal(&folder).contains("pickle"));
}

#[test]
fn tensors_that_are_not_of_lora_are_refused_by_name() {
    let place = tempfile::tempdir().unwrap();
    let config = AdapterConfig::new(2, 4.0, names(&["up_proj"]));
    let text = config.to_json().to_string();
    fs::write(place.path().join("adapter_config.json"), text).unwrap();
    for (name, reason) in [
        (
            "model.up_proj.lora_A.weight",
            "begin with base_model.model.",
        ),
        ("base_model.model.embed.lora_embedding_A", "embeddings"),
        (
            "base_model.model.up_proj.lora_magnitude_vector",
            "only lora_A and lora_B",
        ),
        ("base_model.model.up_proj.lora_B.bias", "only the weight"),
        (
            "base_model.model.up_proj.lora_B.weight",
            "only one of lora_A and lora_B",
        ),
    ] {
        let bytes = [0; 16];
        let view = safetensors::tensor::TensorView::new(Dtype::F32, vec![2, 2], &bytes).unwrap();
        let file = safetensors::serialize([(name, view)], None).unwrap();
        fs::write(place.path().join("adapter_model.safetensors"), file).unwrap();
        let message = Adapter::open(place.path()).unwrap_err().to_string();
        assert!(message.contains(reason), "{message}");
    }
}
