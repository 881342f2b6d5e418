//! The text embedder against PyTorch: loss and every gradient, however texts are cut into chunks
//! and whichever encoders are recomputed. The expected values are in `fixtures/embedder`, with the
//! script that made them.

use std::path::{Path, PathBuf};

use cinch_config::{Config, Settings, Source};
use cinch_data::NoProgress;
use cinch_engine::EngineOptions;
use cinch_graph::Target;
use cinch_step::StepPlan;
use cinch_train::checkpoint::load_weights;
use cinch_train::{Batch, Session};
use cinch_weights::WeightFiles;

const BATCH: usize = 3;
const TEXTS: usize = 5;

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/embedder/embedder.safetensors")
}

fn config(own: &[(&str, &str)]) -> Config {
    let mut settings = Settings::new();
    let shared = [
        ("model.type", "naics"),
        ("model.vocab_size", "40"),
        ("model.max_seq_len", "12"),
        ("model.d_model", "16"),
        ("model.d_ffn", "24"),
        ("model.n_layers", "2"),
        ("model.n_heads", "2"),
        ("model.adapter_rank", "2"),
        ("model.adapter_alpha", "4"),
        ("model.adapter_dropout", "0"),
        ("model.expert_dropout", "0"),
        ("model.dropout", "0"),
        ("model.n_experts", "4"),
        ("model.top_k", "2"),
        ("model.d_expert", "20"),
        ("model.negatives", "3"),
        ("model.title_length", "5"),
        ("model.temperature", "0.5"),
        ("model.curvature", "1.5"),
        ("vram.batch_size", "3"),
        ("vram.gradient_accumulation_steps", "1"),
        ("vram.max_seq_len", "8"),
        ("training.schedule", "constant"),
        ("training.warmup_steps", "0"),
    ];
    for (key, value) in shared.iter().chain(own) {
        let source = Source::Flag("test".to_owned());
        settings.set(key, value, source).unwrap();
    }
    settings.resolve().unwrap()
}

fn session(config: &Config, recomputed: usize) -> Session {
    let plan = StepPlan::new(config, Target::Cpu, recomputed).unwrap();
    let options = EngineOptions {
        threads: Some(2),
        ..EngineOptions::default()
    };
    let mut session = Session::new(plan, options).unwrap();
    let files = WeightFiles::open(&fixture()).unwrap();
    session.load_pretrained(&files, 1, &NoProgress).unwrap();
    session.load_by_name(&files).unwrap();
    session
}

fn words(file: &WeightFiles, name: &str) -> Vec<[u8; 4]> {
    let tensor = file.tensor(name).unwrap();
    let mut bytes = vec![0; tensor.num_bytes() as usize];
    file.read(name, 0..tensor.rows(), &mut bytes).unwrap();
    bytes.as_chunks::<4>().0.to_vec()
}

fn floats(file: &WeightFiles, name: &str) -> Vec<f32> {
    let words = words(file, name).into_iter();
    words.map(f32::from_le_bytes).collect()
}

fn integers(file: &WeightFiles, name: &str) -> Vec<i32> {
    let words = words(file, name).into_iter();
    words.map(i32::from_le_bytes).collect()
}

fn distance(ours: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(ours.len(), expected.len());
    let square = |x: f32| f64::from(x) * f64::from(x);
    let difference: f64 = ours.iter().zip(expected).map(|(a, b)| square(a - b)).sum();
    let norm: f64 = expected.iter().map(|&b| square(b)).sum();
    (difference / norm.max(1e-30)).sqrt()
}

fn batch(session: &Session, expected: &WeightFiles, chunk: usize) -> Batch {
    let graph = &session.plan().training;
    let mut batch = Batch::of(graph, BATCH, BATCH);
    let compared = integers(expected, "compared");
    batch.get_mut("compared").copy_from_slice(&compared);
    for channel in ["title", "description", "excluded", "examples"] {
        for index in 0..TEXTS.div_ceil(chunk) {
            for kind in ["tokens", "lengths"] {
                let name = format!("{channel}.{index}.{kind}");
                let values = integers(expected, &format!("chunk{chunk}.{name}"));
                batch.get_mut(&name).copy_from_slice(&values);
            }
        }
    }
    batch
}

#[test]
fn loss_and_gradients_are_those_of_pytorch() {
    let expected = load_weights(&fixture()).unwrap();
    let loss = f64::from(floats(&expected, "loss")[0]);
    for (chunk, recomputed) in [(TEXTS, 0), (2, 0), (2, 5), (2, 12)] {
        let config = config(&[("model.text_chunk", &chunk.to_string())]);
        assert_eq!(config.model.num_blocks(), 4 * TEXTS.div_ceil(chunk));
        let mut session = session(&config, recomputed);
        let batch = batch(&session, &expected, chunk);
        session.accumulate_gradients(&batch, 0).unwrap();
        let ours = session.loss().unwrap();
        assert!((ours - loss).abs() <= 1e-5 * loss, "{ours} for {loss}");
        let mut compared = 0;
        for (name, gradient) in session.gradients().unwrap() {
            let expected = floats(&expected, &format!("gradient.{name}"));
            let error = distance(&gradient, &expected);
            assert!(error <= 1e-3, "chunks of {chunk}: {name}: {error:e}");
            compared += 1;
        }
        // Two adapters on six layers twice in four encoders, and twelve layers with a bias.
        assert_eq!(compared, 4 * 2 * 6 * 2 + 2 * (1 + 4 * 2 + 2));
    }
}

/// Chunks and recomputation leave every bit of the gradients that they do not sum otherwise.
#[test]
fn recomputation_changes_no_bit() {
    let expected = load_weights(&fixture()).unwrap();
    let config = config(&[("model.text_chunk", "2"), ("model.dropout", "0.1")]);
    let gradients = |recomputed: usize| {
        let mut session = session(&config, recomputed);
        let batch = batch(&session, &expected, 2);
        session.accumulate_gradients(&batch, 3).unwrap();
        let gradients = session.gradients().unwrap().into_iter();
        let bits = gradients.map(|(_, values)| values.into_iter().map(f32::to_bits).collect());
        bits.collect::<Vec<Vec<u32>>>()
    };
    let kept = gradients(0);
    for recomputed in [1, 7, 12] {
        assert_eq!(gradients(recomputed), kept, "{recomputed} blocks");
    }
}

#[test]
fn the_published_model_has_its_parameters() {
    let mut settings = Settings::new();
    for (key, value) in [
        ("model.type", "naics"),
        ("model.text_chunk", "13"),
        ("vram.batch_size", "1"),
        ("vram.gradient_accumulation_steps", "1"),
    ] {
        let source = Source::Flag("test".to_owned());
        settings.set(key, value, source).unwrap();
    }
    let config = settings.resolve().unwrap();
    let plan = StepPlan::new(&config, Target::Cpu, 0).unwrap();
    assert_eq!(plan.training.num_parameters(), 105_542_277);
    assert_eq!(config.model.parameters(), 105_542_277);
    assert_eq!(plan.training.num_trainable(), 14_689_413);
}
