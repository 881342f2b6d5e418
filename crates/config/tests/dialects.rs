//! Files of other programs, and cinch's own in every format: which settings
//! they give, what is left alone, and what is said about it.

use std::path::{Path, PathBuf};

use cinch_config::{
    Checkpointing, Config, Precision, Schedule, Settings, Source, StateFormat, config_files,
};

fn corpus(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/edit")
        .join(name)
}

fn loaded(files: &[&str], flags: &[(&str, &str)]) -> Settings {
    let mut settings = Settings::new();
    for file in files {
        settings.load_file(&corpus(file)).unwrap();
    }
    for (key, value) in flags {
        let source = Source::Flag("--model".to_owned());
        settings.set(key, value, source).unwrap();
    }
    settings
}

fn text(name: &str, text: &str, flags: &[(&str, &str)]) -> Result<(Config, Vec<String>), String> {
    let mut settings = Settings::new();
    settings
        .load_text(Path::new(name), text)
        .and_then(|()| {
            flags.iter().try_for_each(|(key, value)| {
                settings.set(key, value, Source::Flag("--model".to_owned()))
            })
        })
        .and_then(|()| settings.resolve())
        .map(|config| (config, settings.notes()))
        .map_err(|error| error.to_string())
}

const GPT2: &[(&str, &str)] = &[("model.type", "gpt2"), ("model.size", "tiny")];

#[test]
fn one_config_in_four_languages() {
    let json = text(
        "a.json",
        "{\"model\": {\"type\": \"gpt2\", \"size\": \"tiny\"}, \"vram\": {\"batch_size\": 2, \"precision\": \"bf16\"}, \"training\": {\"max_steps\": 3000, \"lr\": 1e-3}}",
        &[],
    );
    let json = json.unwrap().0;
    for (name, written) in [
        (
            "a.yaml",
            "model: {type: gpt2, size: tiny}\nvram:\n  batch_size: 2\n  precision: bf16\ntraining:\n  max_steps: 3_000\n  lr: 1e-3\n",
        ),
        (
            "a.toml",
            "vram.batch_size = 0x2\nvram.precision = 'bf16'\n[model]\ntype = \"gpt2\"\nsize = \"tiny\"\n[training]\nmax_steps = 3_000\nlr = 1e-3\n",
        ),
        (
            "a.py",
            "model = dict(type='gpt2', size='tiny')\nvram = {'batch_size': 2, \"precision\": 'bf16'}\nclass training:\n    max_steps: int = 3_000\n    lr = 1e-3\n",
        ),
        (
            "a.conf",
            "model: {type: gpt2, size: tiny}\nvram: {batch_size: 2, precision: bf16}\ntraining: {max_steps: 3000, lr: 0.001}\n",
        ),
    ] {
        assert_eq!(text(name, written, &[]).unwrap().0, json, "{name}");
    }
}

#[test]
fn an_empty_section_is_no_mistake() {
    let written = "vram:\n  # batch_size: 4\nmodel: {type: gpt2, size: tiny}\n";
    assert!(text("a.yaml", written, &[]).is_ok());
}

#[test]
fn unknown_keys_of_our_own_shape_stay_errors_in_every_format() {
    for (name, written) in [
        ("a.yaml", "vram:\n  batch_size: 1\n  batchsize: 2\n"),
        ("a.toml", "[vram]\nbatch_size = 1\nbatchsize = 2\n"),
    ] {
        assert_eq!(
            text(name, written, &[]).unwrap_err(),
            format!(
                "unknown key `vram.batchsize` in {name} line 3; did you mean `vram.batch_size`?"
            )
        );
    }
    assert_eq!(
        text("a.yaml", "vram:\n  batch_size: '4'\n", &[]).unwrap_err(),
        "a.yaml line 2 column 15: `vram.batch_size` is \"4\"; expected an integer from 1 to 1048576\nhint: remove the quotation marks"
    );
}

#[test]
fn guide_001() {
    let file = "yaml/guide001_low_memory.yaml";
    let error = loaded(&[file], &[]).resolve().unwrap_err().to_string();
    assert!(
        error.contains("is a config for gsa (line 12: `gsa`)"),
        "{error}"
    );
    let settings = loaded(&[file], &[("model.type", "mamba"), ("model.size", "small")]);
    let config = settings.resolve().unwrap();
    let batch = &config.batch;
    assert_eq!(
        (batch.batch_size, batch.accumulation, batch.seq_len),
        (2, 32, 1024)
    );
    assert_eq!(batch.precision, Precision::Bf16);
    assert_eq!(batch.checkpointing, Checkpointing::Full);
    assert_eq!(config.training.learning_rate, 3e-4);
    assert_eq!(config.training.min_learning_rate, 3e-5);
    assert_eq!(config.training.schedule, Schedule::Cosine);
    assert_eq!(config.training.eval_interval, 500);
    // Neither the shape nor the tokenizer of the other model.
    assert_eq!(
        (config.model.num_blocks(), config.data.tokenizer.as_str()),
        (8, "gpt2")
    );
    let notes = settings.notes();
    assert!(notes[0].contains("is a config for gsa (line 12: `gsa`): --model mamba takes over"));
    assert!(
        notes[1].contains(
            "read as a micro-batch config, has 22 keys without a setting here: model.vocab_size, "
        ),
        "{notes:?}"
    );
}

#[test]
fn guide_002() {
    let file = "python/guide002_config.py";
    let error = loaded(&[file], &[]).resolve().unwrap_err().to_string();
    assert!(
        error.contains("is a config for qwen2 (line 16: `LORA_CONFIG`)"),
        "{error}"
    );
    let settings = loaded(
        &[file],
        &[("model.type", "gpt2"), ("model.max_seq_len", "2048")],
    );
    let config = settings.resolve().unwrap();
    let batch = &config.batch;
    assert_eq!(
        (batch.batch_size, batch.accumulation, batch.seq_len),
        (1, 16, 1536)
    );
    assert_eq!(
        (batch.precision, batch.states),
        (Precision::Fp16, StateFormat::Fp32)
    );
    assert_eq!(batch.checkpointing, Checkpointing::Full);
    assert_eq!(config.training.save_total_limit, 5);
    let listing = settings.explain();
    let sequence = listing
        .iter()
        .find(|one| one.key == "vram.max_seq_len")
        .unwrap();
    let place = sequence.source.to_string();
    assert!(place.ends_with("guide002_config.py line 13"), "{place}");
}

#[test]
fn guide_004() {
    let files = config_files(&corpus("guide004")).unwrap();
    assert_eq!(files.len(), 6);
    assert!(files[0].ends_with("guide004/config.yaml") && files[5].ends_with("05_stage.yaml"));
    assert_eq!(
        config_files(&corpus("guide004/config.yaml")).unwrap(),
        files
    );
    let mut settings = loaded(&[], GPT2);
    for file in &files {
        settings.load_file(file).unwrap();
    }
    let config = settings.resolve().unwrap();
    assert_eq!(
        (config.batch.batch_size, config.batch.accumulation),
        (45, 5)
    );
    assert_eq!(config.batch.precision, Precision::Fp16);
    assert_eq!(config.training.learning_rate, 2e-4);
    assert!(
        settings
            .notes()
            .iter()
            .any(|note| note.contains("n_positives, n_negatives"))
    );
}

#[test]
fn training_arguments() {
    let settings = loaded(&["json/training_arguments.json"], GPT2);
    let config = settings.resolve().unwrap();
    assert_eq!(
        (config.batch.batch_size, config.batch.accumulation),
        (1, 16)
    );
    assert_eq!(config.batch.precision, Precision::Fp16);
    assert_eq!(config.training.schedule, Schedule::Cosine);
    // -1 is "not set" there.
    assert_eq!(config.training.max_steps, 100_000);
    assert_eq!(config.output.output_dir, Path::new("out/run1"));
    let states = |word: &str| {
        let written = format!("gradient_accumulation_steps: 2\noptim: {word}\n");
        text("a.yaml", &written, GPT2).unwrap()
    };
    assert_eq!(
        states("paged_adamw_8bit").0.batch.states,
        StateFormat::EightBit
    );
    let (config, notes) = states("adafactor");
    assert_eq!(config.batch.states, StateFormat::Fp32);
    assert!(
        notes
            .iter()
            .any(|note| note.contains("1 key without a setting here: optim"))
    );
    assert_eq!(
        text("a.yaml", "bf16: true\nfp16: true\n", GPT2).unwrap_err(),
        "`bf16` (a.yaml line 1) means bf16, but `fp16` (a.yaml line 2) means fp16\nhint: keep one of them"
    );
    for (written, precision) in [
        ("bf16: false\nfp16: false\n", Precision::Fp32),
        ("bf16: true\nfp16: false\n", Precision::Bf16),
        (
            "trainer: {precision: 16, accumulate_grad_batches: 2}\n",
            Precision::Fp16,
        ),
        (
            "trainer: {precision: bf16-mixed, accumulate_grad_batches: 2}\n",
            Precision::Bf16,
        ),
        ("fp16: false\nmixed_precision: no\n", Precision::Fp32),
    ] {
        let config = text("a.yaml", written, GPT2).unwrap().0;
        assert_eq!(config.batch.precision, precision, "{written}");
    }
}

#[test]
fn python_says_what_it_cannot_know() {
    let written = "BATCH_SIZE = 4\nMAX_SEQ_LEN = 2 ** 6\nNAME = 'x'\n";
    let (config, notes) = text("c.py", written, GPT2).unwrap();
    assert_eq!(config.batch.batch_size, 4);
    assert!(notes.iter().any(|note| {
        note.contains(
            "read as constants of a program, has 2 keys without a setting here: MAX_SEQ_LEN, NAME",
        )
    }));
    assert_eq!(
        text("c.py", "BATCH_SIZE = 4\nBATCH_SIZE = 8\n", GPT2).unwrap_err(),
        "`BATCH_SIZE` stands twice in c.py, on lines 1 and 2\nhint: keep one of them"
    );
    assert_eq!(
        text("c.py", "BATCH_SIZE = 4\nCONFIG = {'batch_size': 8}\n", GPT2).unwrap_err(),
        "`BATCH_SIZE` (c.py line 1) means 4, but `CONFIG.batch_size` (c.py line 2) means 8\nhint: keep one of them"
    );
    assert_eq!(
        text("c.py", "BATCH_SIZE = 'many'\n", GPT2).unwrap_err(),
        "c.py line 1 column 14: `BATCH_SIZE` is \"many\"; expected an integer from 1 to 1048576"
    );
}
