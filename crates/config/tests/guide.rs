//! Every JSON block of the memory guide loads as it is printed there: whole
//! files, files with keys left out, comments, and fragments without braces.

use std::path::{Path, PathBuf};

use cinch_architecture::{Architecture, Mamba};
use cinch_config::{Checkpointing, Config, Precision, Preset, Schedule, Settings, Source};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

fn load(name: &str) -> Settings {
    let mut settings = Settings::new();
    settings.load_file(&fixture(name)).unwrap();
    settings
}

fn resolve(name: &str) -> Config {
    load(name).resolve().unwrap()
}

fn mamba(config: &Config) -> &Mamba {
    match &config.model {
        Architecture::Mamba(model) => model,
        other => panic!("the guide is about Mamba, not {}", other.name()),
    }
}

#[test]
fn the_safe_16gb_config() {
    let config = resolve("config_16gb_safe.json");
    assert_eq!(
        *mamba(&config),
        Mamba {
            width: 512,
            layers: 8,
            states: 16,
            expansion: 2,
            convolution: 0,
            dropout: 0.1,
            positions: 256,
            vocabulary: 50257,
            scan_chunk: 64,
        }
    );
    assert_eq!(config.model.size_name(), Some("small"));
    assert_eq!(
        (config.batch.batch_size, config.batch.accumulation),
        (1, 16)
    );
    assert_eq!(config.batch.effective_batch(), 16);
    assert_eq!(config.batch.seq_len, 256);
    assert_eq!(config.batch.precision, Precision::Fp16);
    assert_eq!(config.batch.checkpointing, Checkpointing::Full);
    assert!(!config.batch.offload && !config.batch.micro_is_free);
    assert_eq!(config.batch.budget, None);
    let training = &config.training;
    assert_eq!(training.learning_rate, 0.0003);
    assert_eq!(training.weight_decay, 0.1);
    assert_eq!((training.max_steps, training.warmup_steps), (100_000, 2000));
    assert_eq!(
        (training.eval_interval, training.save_interval),
        (1000, 5000)
    );
    assert_eq!(training.logging_steps, 10);
    assert_eq!((training.adam_beta1, training.adam_beta2), (0.9, 0.95));
    assert_eq!(training.adam_epsilon, 1e-8);
    assert_eq!(
        (training.max_grad_norm, training.label_smoothing),
        (1.0, 0.0)
    );
    assert_eq!(training.schedule, Schedule::Linear);
    assert_eq!(
        (training.min_learning_rate, training.save_total_limit),
        (0.0, 3)
    );
    assert_eq!(config.data.source, None);
    assert_eq!(config.data.tokenizer, "gpt2");
    assert_eq!(config.data.val_split, 0.05);
    assert_eq!(config.output.output_dir, Path::new("runs/mamba-small"));
}

#[test]
fn the_balanced_config_fills_what_it_leaves_out() {
    let settings = load("config_balanced_16gb.json");
    let config = settings.resolve().unwrap();
    assert_eq!((config.batch.batch_size, config.batch.accumulation), (2, 8));
    assert_eq!(config.batch.seq_len, 512);
    assert_eq!(config.training.max_grad_norm, 1.0);
    assert_eq!(config.training.adam_beta2, 0.95);
    assert_eq!(settings.notes(), Vec::<String>::new());
}

#[test]
fn a_commented_partial_file() {
    let config = resolve("reduced_sequence.json");
    assert_eq!(config.model.positions(), Some(128));
    assert_eq!(config.batch.seq_len, 128);
    // The guide always reaches 16 sequences per step, and so does a lone batch size.
    assert_eq!(
        (config.batch.batch_size, config.batch.accumulation),
        (1, 16)
    );
    assert_eq!(mamba(&config).width, 512);
}

#[test]
fn fragments_without_braces() {
    assert_eq!(
        resolve("gradient_checkpointing.json").batch.checkpointing,
        Checkpointing::Full
    );
    assert_eq!(
        resolve("mixed_precision.json").batch.precision,
        Precision::Fp16
    );
    let offloaded = resolve("cpu_offload.json");
    assert!(offloaded.batch.offload && offloaded.batch.micro_is_free);
    let short = resolve("sequence_too_long.json");
    assert_eq!(
        (short.model.positions(), short.batch.seq_len),
        (Some(256), 256)
    );
    let small_batch = resolve("batch_too_large.json").batch;
    assert_eq!((small_batch.batch_size, small_batch.accumulation), (1, 16));
    let reduced = resolve("reduced_model.json");
    assert_eq!((mamba(&reduced).width, mamba(&reduced).layers), (256, 4));
    assert_eq!(reduced.model.size_name(), None);
    assert_eq!(reduced.output.output_dir, Path::new("runs/mamba-custom"));
}

#[test]
fn no_fixture_is_left_untested_and_all_survive_a_round_trip() {
    let mut count = 0;
    for entry in std::fs::read_dir(fixture("")).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            continue;
        }
        let mut settings = Settings::new();
        settings.load_file(&path).unwrap();
        let config = settings.resolve().unwrap();
        let json = config.to_json().unwrap();
        assert_eq!(
            Config::from_json(&json).unwrap(),
            config,
            "{}",
            path.display()
        );
        count += 1;
    }
    assert_eq!(count, 9);
}

#[test]
fn commands_of_the_guide() {
    // --model_size small --vram 8gb --data_dir your_data
    let mut settings = Settings::new();
    let flag = |name: &str| Source::Flag(name.to_owned());
    settings
        .set("model.size", "small", flag("--model_size"))
        .unwrap();
    settings.set("vram.budget", "8gb", flag("--vram")).unwrap();
    settings
        .set("data.source", "your_data", flag("--data_dir"))
        .unwrap();
    let config = settings.resolve().unwrap();
    assert_eq!(config.batch.budget.unwrap().get(), 8 << 30);
    assert_eq!((config.batch.batch_size, config.batch.accumulation), (8, 2));
    assert!(config.batch.micro_is_free);
    assert_eq!(config.batch.seq_len, 1024);
    assert_eq!(config.data.source.as_deref(), Some(Path::new("your_data")));
    // --config your_config.json --data_dir data --training_preset fast: the file
    // states its own steps, so the preset only fills what the file leaves open.
    let mut settings = load("batch_too_large.json");
    settings
        .apply_preset(Preset::training("fast").unwrap())
        .unwrap();
    let training = settings.resolve().unwrap().training;
    assert_eq!((training.learning_rate, training.max_steps), (5e-4, 50_000));
    assert_eq!((training.warmup_steps, training.eval_interval), (1000, 500));
    assert_eq!(training.save_interval, 2500);
    let mut settings = load("config_16gb_safe.json");
    settings
        .apply_preset(Preset::training("fast").unwrap())
        .unwrap();
    assert_eq!(settings.resolve().unwrap().training.max_steps, 100_000);
}
