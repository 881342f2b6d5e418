//! LLaMA, Mistral, Qwen2 and Qwen3 against transformers and peft: loss, every gradient, logits'
//! loss over packed documents, adapters, and steps of AdamW. The expected values are in
//! `fixtures/decoder`, with the scripts that made them.

use std::path::{Path, PathBuf};

use cinch_config::{Config, Settings, Source};
use cinch_data::NoProgress;
use cinch_engine::EngineOptions;
use cinch_graph::Target;
use cinch_step::StepPlan;
use cinch_train::checkpoint::load_weights;
use cinch_train::{Batch, Session, open_weights};
use cinch_weights::WeightFiles;

const BATCH: usize = 2;
const SEQ: usize = 24;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/decoder")
        .join(name)
}

fn config(model: &Path, own: &[(&str, &str)]) -> Config {
    let mut settings = Settings::new();
    let model = model.display().to_string();
    let (batch, seq) = (BATCH.to_string(), SEQ.to_string());
    let shared = [
        ("model.type", model.as_str()),
        ("vram.batch_size", &batch),
        ("vram.gradient_accumulation_steps", "1"),
        ("vram.max_seq_len", &seq),
        ("vram.precision", "fp32"),
        ("training.schedule", "constant"),
        ("training.warmup_steps", "0"),
        ("data.tokenizer", "bytes"),
    ];
    for (key, value) in shared.iter().chain(own) {
        let source = Source::Flag("test".to_owned());
        settings.set(key, value, source).unwrap();
    }
    settings.resolve().unwrap()
}

fn tensors(path: &Path) -> WeightFiles {
    load_weights(path).unwrap()
}

fn words(file: &WeightFiles, name: &str) -> Vec<[u8; 4]> {
    let tensor = file.tensor(name).unwrap();
    let mut bytes = vec![0; tensor.num_bytes() as usize];
    file.read(name, 0..tensor.rows(), &mut bytes).unwrap();
    bytes.as_chunks::<4>().0.to_vec()
}

fn floats(file: &WeightFiles, name: &str) -> Vec<f32> {
    words(file, name)
        .into_iter()
        .map(f32::from_le_bytes)
        .collect()
}

fn integers(file: &WeightFiles, name: &str) -> Vec<i32> {
    words(file, name)
        .into_iter()
        .map(i32::from_le_bytes)
        .collect()
}

fn distance(ours: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(ours.len(), expected.len());
    let square = |x: f32| f64::from(x) * f64::from(x);
    let difference: f64 = ours.iter().zip(expected).map(|(a, b)| square(a - b)).sum();
    let norm: f64 = expected.iter().map(|&b| square(b)).sum();
    (difference / norm.max(1e-30)).sqrt()
}

fn session(config: &Config, recomputed: usize, weights: &Path) -> Session {
    let plan = StepPlan::new(config, Target::Cpu, recomputed).unwrap();
    let options = EngineOptions {
        threads: Some(2),
        ..EngineOptions::default()
    };
    let mut session = Session::new(plan, options).unwrap();
    let files = open_weights(config, weights).unwrap();
    session.load_pretrained(&files, 1, &NoProgress).unwrap();
    session
}

fn batch(session: &Session, expected: &WeightFiles) -> Batch {
    let mut batch = Batch::of(&session.plan().training, BATCH, BATCH);
    for name in ["tokens", "targets", "positions", "starts"] {
        let values = batch.get_mut(name);
        if !values.is_empty() {
            values.copy_from_slice(&integers(expected, name));
        }
    }
    batch
}

/// The loss and the gradients there are in the file; how many were compared.
fn compare(session: &mut Session, expected: &WeightFiles, prefix: &str, what: &str) -> usize {
    let batch = batch(session, expected);
    session.accumulate_gradients(&batch, 0).unwrap();
    let loss = f64::from(floats(expected, "loss")[0]);
    let ours = session.loss().unwrap();
    assert!(
        (ours - loss).abs() <= 1e-5 * loss,
        "{what}: {ours} for {loss}"
    );
    let mut compared = 0;
    for (name, gradient) in session.gradients().unwrap() {
        let name = format!("gradient.{prefix}{name}");
        if expected.get(&name).is_some() {
            let error = distance(&gradient, &floats(expected, &name));
            assert!(error <= 1e-4, "{what}: {name}: {error:e}");
            compared += 1;
        }
    }
    compared
}

const FAMILIES: [&str; 12] = [
    "qwen2",
    "qwen2_untied",
    "qwen2_window",
    "qwen3",
    "llama2",
    "llama31",
    "llama_linear",
    "llama_yarn",
    "llama_dynamic",
    "llama_bias",
    "tinyllama",
    "mistral",
];

#[test]
fn every_family_is_transformers() {
    for name in FAMILIES {
        let model = folder(name);
        let expected = tensors(&model.join("expected.safetensors"));
        for (file, recomputed) in [("config.json", 0), ("config.4.json", 2)] {
            let config = config(&model.join(file), &[]);
            let mut session = session(&config, recomputed, &model);
            let compared = compare(&mut session, &expected, "", name);
            let saved = session.weights().views().len();
            assert_eq!(compared, saved, "{name}");
        }
    }
}

#[test]
fn documents_that_share_a_row_do_not_see_each_other() {
    for name in ["qwen2", "mistral"] {
        let model = folder(name);
        let expected = tensors(&model.join("packed.safetensors"));
        let config = config(&model, &[("data.packing", "true")]);
        let mut session = session(&config, 1, &model);
        assert!(compare(&mut session, &expected, "", name) > 5, "{name}");
    }
}

/// The settings of the adapters in the fixtures.
fn adapters(name: &str) -> Vec<(&'static str, &'static str)> {
    match name {
        "qwen2_lora" | "qwen2_qlora" => vec![
            ("lora.rank", "4"),
            ("lora.alpha", "8"),
            (
                "lora.targets",
                "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
            ),
        ],
        "qwen2_lora_rs" => vec![
            ("lora.rank", "4"),
            ("lora.alpha", "8"),
            ("lora.rank_stabilised", "true"),
            ("lora.targets", "all-linear"),
        ],
        "qwen2_lora_whole" => vec![
            ("lora.rank", "2"),
            ("lora.alpha", "4"),
            ("lora.targets", "q_proj,down_proj"),
            ("lora.modules_to_save", "embed_tokens,lm_head"),
        ],
        "qwen2_lora_table" => vec![
            ("lora.rank", "2"),
            ("lora.alpha", "4"),
            ("lora.targets", "v_proj"),
            ("lora.modules_to_save", "embed_tokens"),
        ],
        "qwen2_untied_lora" => vec![
            ("lora.rank", "2"),
            ("lora.alpha", "4"),
            ("lora.targets", "o_proj"),
            ("lora.modules_to_save", "lm_head,norm"),
        ],
        _ => vec![
            ("lora.rank", "2"),
            ("lora.alpha", "3"),
            ("lora.targets", ".*(q|v)_proj"),
        ],
    }
}

/// Adapters of a file by peft's names, under ours.
fn load_adapter(session: &mut Session, folder: &Path) {
    session.load_adapter(folder).unwrap();
}

const PEFT: &str = "base_model.model.";

#[test]
fn adapters_are_pefts() {
    for name in ["qwen2_lora", "qwen2_lora_rs", "qwen2_lora_qv"] {
        let (base, own) = (folder("qwen2"), adapters(name));
        let expected = tensors(&folder(name).join("expected.safetensors"));
        for recomputed in [0, 2] {
            let config = config(&base, &own);
            let mut session = session(&config, recomputed, &base);
            load_adapter(&mut session, &folder(name));
            let compared = compare(&mut session, &expected, PEFT, name);
            assert_eq!(compared, session.weights().views().len(), "{name}");
        }
    }
}

/// Of tied embeddings and head peft trains a copy of either, and leaves the other.
#[test]
fn modules_that_are_trained_whole_are_pefts() {
    for (name, base) in [
        ("qwen2_lora_whole", "qwen2"),
        ("qwen2_lora_table", "qwen2"),
        ("qwen2_untied_lora", "qwen2_untied"),
    ] {
        let (base, own) = (folder(base), adapters(name));
        let expected = tensors(&folder(name).join("expected.safetensors"));
        for recomputed in [0, 2] {
            let config = config(&base, &own);
            let mut session = session(&config, recomputed, &base);
            load_adapter(&mut session, &folder(name));
            let compared = compare(&mut session, &expected, PEFT, name);
            assert_eq!(compared, session.weights().views().len(), "{name}");
        }
    }
}

/// What an adapter has besides is told by its name.
#[test]
fn what_is_not_trained_beside_adapters_is_refused_by_name() {
    let base = folder("qwen2");
    let own = [
        ("lora.rank", "2"),
        ("lora.alpha", "4"),
        ("lora.targets", "v_proj"),
    ];
    let refusal = |own: &[(&str, &str)], adapter: &Path| {
        let mut session = session(&config(&base, own), 0, &base);
        session.load_adapter(adapter).unwrap_err().to_string()
    };
    let whole = refusal(&own, &folder("qwen2_lora_table"));
    for part in ["`model.embed_tokens.weight`", "--lora-modules-to-save"] {
        assert!(whole.contains(part), "{whole}");
    }
    let place = tempfile::tempdir().unwrap();
    let from = folder("qwen2_lora_table");
    let name = "adapter_model.safetensors";
    std::fs::copy(from.join(name), place.path().join(name)).unwrap();
    let name = "adapter_config.json";
    let text = std::fs::read_to_string(from.join(name)).unwrap();
    let text = text.replace(r#""bias": "none""#, r#""bias": "all""#);
    std::fs::write(place.path().join(name), text).unwrap();
    let biases = refusal(&adapters("qwen2_lora_table"), place.path());
    for part in ["adapter_config.json", "bias = all", "merge"] {
        assert!(biases.contains(part), "{biases}");
    }
}

#[test]
fn adapters_on_four_bit_weights_are_pefts() {
    let base = folder("qwen2");
    let mut own = adapters("qwen2_qlora");
    own.extend([
        ("lora.quantization", "4bit"),
        ("lora.double_quantization", "true"),
    ]);
    let expected = tensors(&folder("qwen2_qlora").join("expected.safetensors"));
    for recomputed in [0, 2] {
        let config = config(&base, &own);
        let mut session = session(&config, recomputed, &base);
        load_adapter(&mut session, &folder("qwen2_lora"));
        let compared = compare(&mut session, &expected, PEFT, "qlora");
        assert_eq!(compared, session.weights().views().len());
    }
}

#[test]
fn ten_steps_of_adapters_are_pefts() {
    let base = folder("qwen2");
    let mut own = adapters("qwen2_lora");
    own.extend([
        ("training.learning_rate", "1e-2"),
        ("training.adam_beta2", "0.999"),
        ("training.weight_decay", "0.01"),
        ("training.max_grad_norm", "0"),
    ]);
    let expected = tensors(&folder("qwen2_lora").join("training.safetensors"));
    let data = tensors(&folder("qwen2_lora").join("expected.safetensors"));
    let mut session = session(&config(&base, &own), 0, &base);
    load_adapter(&mut session, &folder("qwen2_lora"));
    let batch = batch(&session, &data);
    for (step, &loss) in floats(&expected, "losses").iter().enumerate() {
        let ours = session.train_step(&batch, step as u64).unwrap().loss;
        assert!(
            (ours - f64::from(loss)).abs() <= 1e-4 * f64::from(loss),
            "step {step}: {ours} for {loss}"
        );
    }
    for weight in session.weights().views() {
        let bytes = weight.bytes.to_vec().unwrap();
        let words = bytes.as_chunks::<4>().0;
        let ours: Vec<f32> = words.iter().map(|&word| f32::from_le_bytes(word)).collect();
        let theirs = floats(&expected, &format!("final.{PEFT}{}", weight.name));
        let error = distance(&ours, &theirs);
        assert!(error <= 1e-3, "{} after the steps: {error:e}", weight.name);
    }
}
