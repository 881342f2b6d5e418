//! Who outweighs whom, and what is told about it.

use std::path::{Path, PathBuf};

use cinch_architecture::{Architecture, Describe, Gpt2, Number, trained_sizes};
use cinch_config::{
    Checkpointing, Config, Explained, Precision, Preset, SETTINGS, Schedule, Settings, Source,
    Value,
};

fn flag(name: &str) -> Source {
    Source::Flag(name.to_owned())
}

fn from_text(text: &str) -> Settings {
    let mut settings = Settings::new();
    settings.load_text(Path::new("run.json"), text).unwrap();
    settings
}

fn explained(settings: &Settings, key: &str) -> Explained {
    let listing = settings.explain();
    listing.into_iter().find(|one| one.key == key).unwrap()
}

fn batch_of(settings: &Settings) -> (usize, usize, bool) {
    let batch = settings.resolve().unwrap().batch;
    (batch.batch_size, batch.accumulation, batch.micro_is_free)
}

#[test]
fn each_layer_outweighs_the_one_below_whatever_the_order() {
    const KEY: &str = "training.learning_rate";
    let mut settings = Settings::new();
    settings.set(KEY, "0.5", flag("--lr")).unwrap();
    settings
        .load_environment([("CINCH_TRAINING_LEARNING_RATE", "0.4")])
        .unwrap();
    settings
        .load_text(
            Path::new("run.json"),
            "{\"training\":\n {\"learning_rate\": 0.3}}",
        )
        .unwrap();
    settings
        .apply_preset(Preset::training("fast").unwrap())
        .unwrap();
    let one = explained(&settings, KEY);
    assert_eq!((one.value, one.source), (Value::Float(0.5), flag("--lr")));
    let below: Vec<(String, String)> = one
        .overridden
        .iter()
        .map(|weaker| (weaker.value.to_string(), weaker.source.to_string()))
        .collect();
    let expected = [
        ("0.4", "environment CINCH_TRAINING_LEARNING_RATE"),
        ("0.3", "run.json line 2"),
        ("5e-4", "preset training fast"),
        ("3e-4", "default"),
    ];
    assert_eq!(
        below,
        expected.map(|(value, source)| (value.to_owned(), source.to_owned()))
    );
    assert_eq!(settings.resolve().unwrap().training.learning_rate, 0.5);
}

#[test]
fn the_same_flag_twice_and_a_second_file_change_the_value() {
    let mut settings = from_text("\"training\": {\"seed\": 1}");
    settings
        .load_text(Path::new("more.json"), "\"training\": {\"seed\": 2}")
        .unwrap();
    assert_eq!(settings.resolve().unwrap().training.seed, 2);
    settings.set("training.seed", "3", flag("--seed")).unwrap();
    settings.set("training.seed", "4", flag("--seed")).unwrap();
    assert_eq!(settings.resolve().unwrap().training.seed, 4);
}

#[test]
fn a_file_with_an_error_leaves_no_trace() {
    let mut settings = Settings::new();
    let text = "{\"training\": {\"seed\": 7, \"sed\": 8}}";
    assert!(settings.load_text(Path::new("run.json"), text).is_err());
    assert_eq!(
        settings.resolve().unwrap(),
        Settings::new().resolve().unwrap()
    );
    assert_eq!(settings.notes(), Vec::<String>::new());
}

#[test]
fn null_means_not_given() {
    let config = from_text("{\"vram\": {\"batch_size\": null, \"budget\": null}}")
        .resolve()
        .unwrap();
    assert_eq!(config, Settings::new().resolve().unwrap());
}

#[test]
fn with_nothing_said_it_is_mamba_small() {
    let config = Settings::new().resolve().unwrap();
    assert_eq!(
        (config.model.name(), config.model.size_name()),
        ("mamba", Some("small"))
    );
    assert_eq!(config.batch.seq_len, 1024);
    assert_eq!(config.batch.checkpointing, Checkpointing::Auto);
    assert_eq!(batch_of(&Settings::new()), (8, 2, true));
    assert_eq!(config.data.text_column, "text");
}

#[test]
fn the_demo() {
    let mut settings = Settings::new();
    settings.apply_preset(Preset::Demo).unwrap();
    let config = settings.resolve().unwrap();
    assert_eq!(
        (config.model.name(), config.model.size_name()),
        ("mamba", Some("tiny"))
    );
    assert_eq!(
        (config.model.vocab_size(), config.model.num_blocks()),
        (257, 4)
    );
    assert_eq!(config.model.get("model.dropout"), Some(Number::Real(0.0)));
    assert_eq!(batch_of(&settings), (8, 1, true));
    assert_eq!(
        (config.batch.seq_len, config.batch.precision),
        (256, Precision::Fp32)
    );
    assert_eq!(
        (config.training.learning_rate, config.training.max_steps),
        (3e-3, 150)
    );
    assert_eq!(
        (config.training.warmup_steps, config.training.eval_interval),
        (20, 50)
    );
    assert_eq!(
        (config.data.source, config.data.tokenizer.as_str()),
        (None, "bytes")
    );
    assert_eq!(config.output.output_dir, Path::new("runs/mamba-tiny"));
}

#[test]
fn every_size_of_every_model_resolves_to_its_own_name() {
    assert!(trained_sizes().count() > 0);
    for (family, size) in trained_sizes() {
        let mut settings = Settings::new();
        settings
            .set("model.type", family.name, flag("--model"))
            .unwrap();
        for name in std::iter::once(&size.name).chain(size.aliases) {
            settings.set("model.size", name, flag("--size")).unwrap();
            let config = settings.resolve().unwrap();
            assert_eq!(config.model, (size.shape)());
            assert_eq!(config.model.size_name(), Some(size.name));
            if let Some(positions) = config.model.positions() {
                assert_eq!(config.batch.seq_len as u64, positions);
            }
            assert_eq!(
                Config::from_json(&config.to_json().unwrap()).unwrap(),
                config
            );
        }
    }
}

#[test]
fn gpt2_has_its_own_defaults() {
    let mut settings = Settings::new();
    settings.set("model.type", "GPT2", flag("--model")).unwrap();
    let config = settings.resolve().unwrap();
    let Architecture::Gpt2(model) = &config.model else {
        panic!("not a GPT-2: {:?}", config.model);
    };
    assert_eq!((model.width, model.layers, model.heads), (768, 12, 12));
    assert_eq!((model.vocabulary, model.positions), (50257, 1024));
    assert_eq!((model.residual_dropout, model.norm_epsilon), (0.1, 1e-5));
    assert_eq!(config.output.output_dir, Path::new("runs/gpt2"));
    let foreign = SETTINGS
        .iter()
        .filter(|setting| !setting.belongs_to(Gpt2::FAMILY));
    for setting in foreign {
        assert!(settings.explain().iter().all(|one| one.key != setting.key));
    }
}

#[test]
fn a_file_that_speaks_of_heads_is_a_gpt2_config() {
    let settings = from_text("{\"model\": {\n \"n_embd\": 256,\n \"n_head\": 8}}");
    let config = settings.resolve().unwrap();
    assert_eq!(config.model.name(), "gpt2");
    let origin = explained(&settings, "model.type").source.to_string();
    assert_eq!(origin, "run.json line 3");
    // What two trained models have says nothing.
    let settings = from_text("{\"model\": {\"d_model\": 256}}");
    assert_eq!(settings.resolve().unwrap().model.name(), "mamba");
}

#[test]
fn every_vram_preset_holds_what_the_guide_says() {
    let expected = [
        ("8gb", 1, 16, 256, Checkpointing::Full, false),
        ("12gb", 2, 8, 512, Checkpointing::Full, false),
        ("16gb", 2, 8, 512, Checkpointing::Full, false),
        ("16gb-medium", 1, 16, 256, Checkpointing::Full, true),
        ("24gb", 4, 4, 1024, Checkpointing::None, false),
        ("32gb", 8, 2, 1024, Checkpointing::None, false),
        ("48gb", 12, 2, 2048, Checkpointing::None, false),
    ];
    for (name, batch_size, accumulation, seq_len, checkpointing, offload) in expected {
        let mut settings = Settings::new();
        settings
            .set("model.size", "medium", flag("--size"))
            .unwrap();
        settings.apply_preset(Preset::vram(name).unwrap()).unwrap();
        let batch = settings.resolve().unwrap().batch;
        assert_eq!(
            (batch.batch_size, batch.accumulation),
            (batch_size, accumulation)
        );
        assert_eq!(
            (batch.seq_len, batch.checkpointing),
            (seq_len, checkpointing)
        );
        assert_eq!((batch.offload, batch.precision), (offload, Precision::Fp16));
        assert!(batch.micro_is_free && batch.budget.is_none());
    }
    assert_eq!(Preset::all().count(), 1 + 7 + 3);
}

#[test]
fn the_effective_batch_is_kept_when_half_of_it_is_stated() {
    let given = |text: &str| batch_of(&from_text(text));
    assert_eq!(given("\"vram\": {\"batch_size\": 4}"), (4, 4, false));
    assert_eq!(
        given("\"vram\": {\"gradient_accumulation_steps\": 16}"),
        (1, 16, false)
    );
    assert_eq!(given("\"vram\": {\"batch_size\": 64}"), (64, 1, false));
    assert_eq!(
        given("\"vram\": {\"batch_size\": 3, \"accumulation\": 5}"),
        (3, 5, false)
    );
    assert_eq!(
        given("\"vram\": {\"budget\": 48, \"batch_size\": 4}"),
        (4, 4, false)
    );

    let uneven = from_text("\"vram\": {\"batch_size\": 3}");
    assert_eq!(batch_of(&uneven), (3, 5, false));
    assert!(
        uneven.notes()[0].contains("the effective batch is 15"),
        "{:?}",
        uneven.notes()
    );

    let mut preset = Settings::new();
    preset.apply_preset(Preset::vram("8gb").unwrap()).unwrap();
    preset
        .set("vram.batch_size", "4", flag("--batch-size"))
        .unwrap();
    assert_eq!(batch_of(&preset), (4, 4, false));
}

#[test]
fn the_effective_batch_is_the_same_on_every_card() {
    for budget in ["4gb", "8gb", "40", "48gb", "80 GiB"] {
        let mut settings = Settings::new();
        settings.set("vram.budget", budget, flag("--vram")).unwrap();
        assert_eq!(batch_of(&settings), (8, 2, true), "{budget}");
    }
}

#[test]
fn sequences_follow_positions() {
    let lengths = |text: &str| {
        let config = from_text(text).resolve().unwrap();
        (config.model.positions(), config.batch.seq_len)
    };
    assert_eq!(
        lengths("\"vram\": {\"max_seq_len\": 128}"),
        (Some(1024), 128)
    );
    assert_eq!(
        lengths("\"model\": {\"max_seq_len\": 4096}"),
        (Some(4096), 4096)
    );
    let stated = from_text("\"vram\": {\"max_seq_len\": 2048}");
    let refusal = stated.resolve().unwrap_err().to_string();
    assert!(
        refusal.contains("lower vram.max_seq_len to 1024"),
        "{refusal}"
    );
    let mut long = Settings::new();
    long.apply_preset(Preset::vram("48gb").unwrap()).unwrap();
    assert_eq!(long.resolve().unwrap().batch.seq_len, 1024);
    assert!(
        long.notes()[0].starts_with(
            "`vram.max_seq_len` = 2048 (preset vram 48gb) is longer than the model's 1024 positions"
        ),
        "{:?}",
        long.notes()
    );
    let one = explained(&long, "vram.max_seq_len");
    assert_eq!(
        (one.value.to_string(), one.source.to_string()),
        ("1024".to_owned(), "follows model.max_seq_len".to_owned())
    );
}

#[test]
fn passes_that_are_typed_outweigh_the_steps_of_a_file() {
    let mut settings = from_text("\"training\": {\"max_steps\": 900, \"warmup_steps\": 400}");
    let config = settings.clone().resolve().unwrap();
    assert_eq!(
        (config.training.epochs, config.training.max_steps),
        (None, 900)
    );
    let flag = Source::Flag("--epochs".to_owned());
    settings.set("training.epochs", "3", flag).unwrap();
    let config = settings.clone().resolve().unwrap();
    assert_eq!(config.training.epochs, Some(3.0));
    // Of two that are typed, steps are the more exact.
    let flag = Source::Flag("--max-steps".to_owned());
    settings.set("training.max_steps", "500", flag).unwrap();
    assert_eq!(settings.resolve().unwrap().training.epochs, None);
}

#[test]
fn an_unstated_warmup_gives_way_to_a_short_run() {
    let settings = from_text("\"training\": {\"max_steps\": 500}");
    assert_eq!(settings.resolve().unwrap().training.warmup_steps, 50);
    // Nobody chose the 2000 of the default; whoever chose a preset is told.
    assert_eq!(settings.notes(), Vec::<String>::new());
    let mut careful = Settings::new();
    careful
        .apply_preset(Preset::training("careful").unwrap())
        .unwrap();
    let steps = flag("--max-steps");
    careful.set("training.max_steps", "500", steps).unwrap();
    assert_eq!(
        careful.notes(),
        [
            "`training.warmup_steps` = 5000 (preset training careful) is longer than the run of 500 steps: shortened to 50"
        ]
    );
}

#[test]
fn a_flag_that_shortens_the_run_shortens_the_warmup_of_a_file() {
    let mut settings = from_text("\"training\": {\"max_steps\": 9000, \"warmup_steps\": 2000}");
    let flag = Source::Flag("--max-steps".to_owned());
    settings.set("training.max_steps", "100", flag).unwrap();
    assert_eq!(settings.resolve().unwrap().training.warmup_steps, 10);
    assert!(
        settings.notes()[0].contains("is longer than the run of 100 steps: shortened to 10"),
        "{:?}",
        settings.notes()
    );
}

/// Stages of a run have shares of their own, and a run that goes on for longer another one.
#[test]
fn a_share_of_warmup_stays_a_share() {
    let settings = from_text("\"training\": {\"max_steps\": 40, \"warmup_ratio\": 0.25}");
    let training = settings.resolve().unwrap().training;
    assert_eq!(
        (training.warmup_steps, training.warmup_ratio),
        (10, Some(0.25))
    );
    assert_eq!(training.warmup_of(8), 2);
    let stated =
        from_text("\"training\": {\"max_steps\": 40, \"warmup_ratio\": 0.25, \"warmup_steps\": 3}");
    let training = stated.resolve().unwrap().training;
    assert_eq!((training.warmup_steps, training.warmup_ratio), (3, None));
}

#[test]
fn switches_and_words_mean_the_same() {
    let batch = |text: &str| from_text(text).resolve().unwrap().batch;
    assert_eq!(
        batch("\"vram\": {\"use_fp16\": false}").precision,
        Precision::Fp32
    );
    assert_eq!(
        batch("\"vram\": {\"use_fp16\": true, \"precision\": \"fp16\"}").precision,
        Precision::Fp16
    );
    assert_eq!(
        batch("\"vram\": {\"use_gradient_checkpointing\": false}").checkpointing,
        Checkpointing::None
    );
    assert_eq!(
        batch("\"vram\": {\"checkpointing\": 3}").checkpointing,
        Checkpointing::Blocks(3)
    );
    assert_eq!(
        batch("\"vram\": {\"checkpointing\": 0}").checkpointing,
        Checkpointing::None
    );
    assert_eq!(
        batch("\"vram\": {\"checkpointing\": \"Auto\"}").checkpointing,
        Checkpointing::Auto
    );
    // A flag outweighs the file even when they use different names.
    let mut settings = from_text("\"vram\": {\"use_fp16\": true}");
    settings
        .set("vram.precision", "bf16", flag("--precision"))
        .unwrap();
    assert_eq!(settings.resolve().unwrap().batch.precision, Precision::Bf16);
}

#[test]
fn every_word_reaches_its_variant() {
    for name in Precision::NAMES {
        let mut settings = Settings::new();
        settings
            .set("vram.precision", name, flag("--precision"))
            .unwrap();
        assert_eq!(settings.resolve().unwrap().batch.precision.name(), name);
    }
    for name in Schedule::NAMES {
        let mut settings = Settings::new();
        settings
            .set("training.schedule", name, flag("--schedule"))
            .unwrap();
        assert_eq!(settings.resolve().unwrap().training.schedule.name(), name);
    }
}

#[test]
fn the_environment_ignores_strangers() {
    let mut settings = Settings::new();
    settings
        .load_environment([
            ("PATH", "/bin"),
            ("CINCH_CACHE", "/tmp"),
            ("CINCH_LOG", "debug"),
            ("CINCH_VRAM_USE_FP16", "yes"),
            ("CINCH_TRAINING_SEED", ""),
            ("CINCH_OUTPUT_OUTPUT_DIR", "elsewhere"),
        ])
        .unwrap();
    let config = settings.resolve().unwrap();
    assert_eq!(config.batch.precision, Precision::Fp16);
    assert_eq!(config.training.seed, 42);
    assert_eq!(config.output.output_dir, PathBuf::from("elsewhere"));
}

#[test]
fn a_size_outweighed_by_a_file_is_told() {
    let mut settings = from_text("\"model\": {\"d_model\": 640}");
    settings
        .set("model.size", "medium", flag("--model-size"))
        .unwrap();
    let config = settings.resolve().unwrap();
    assert_eq!(
        (config.model.size_name(), config.model.num_blocks()),
        (None, 12)
    );
    assert_eq!(
        settings.notes()[0],
        "`model.size` = medium (--model-size) is not the shape that is built: `model.d_model` = 640 (run.json line 1) outweighs it"
    );
}

#[test]
fn a_shape_stated_beside_its_size_is_meant() {
    let settings = from_text("\"model\": {\"size\": \"tiny\", \"d_conv\": 4}");
    let notes = settings.notes();
    assert!(
        notes.iter().all(|note| !note.contains("outweighs")),
        "{notes:#?}"
    );
}

#[test]
fn what_a_file_leaves_to_defaults_is_no_note() {
    let settings = from_text("\"training\": {\"max_steps\": 3000, \"warmup_steps\": 5}");
    assert_eq!(settings.notes(), Vec::<String>::new());
    let mut settings = settings;
    settings
        .set("training.max_steps", "3", flag("--max-steps"))
        .unwrap();
    let notes = settings.notes();
    assert_eq!(notes.len(), 1, "{notes:#?}");
    assert!(notes[0].contains("shortened"), "{notes:#?}");
}

#[test]
fn floats_survive_a_checkpoint_to_the_last_bit() {
    let mut settings = Settings::new();
    let awkward = 0.1_f64 + 0.2;
    settings
        .set("training.learning_rate", &awkward.to_string(), flag("--lr"))
        .unwrap();
    settings
        .set(
            "training.adam_epsilon",
            "4.940656458412465e-310",
            flag("--eps"),
        )
        .unwrap();
    settings
        .set("training.seed", "18446744073709551615", flag("--seed"))
        .unwrap();
    let config = settings.resolve().unwrap();
    let back = Config::from_json(&config.to_json().unwrap()).unwrap();
    assert_eq!(back.training.learning_rate.to_bits(), awkward.to_bits());
    assert_eq!(back, config);
}

#[test]
fn origins_can_be_written_as_json() {
    let settings = from_text("\"vram\": {\"batch_size\": 4}");
    let one = serde_json::to_value(explained(&settings, "vram.batch_size")).unwrap();
    assert_eq!(one["value"], 4);
    assert_eq!(one["source"]["file"]["line"], 1);
}

/// A model or a program that evaluates by epochs does so until somebody says steps.
#[test]
fn steps_between_evaluations_outweigh_epochs_that_nobody_said() {
    let evaluates = |own: &[(&str, &str)]| {
        let mut settings = Settings::new();
        for (key, value) in own {
            settings.set(key, value, flag("--flag")).unwrap();
        }
        let training = settings.resolve().unwrap().training;
        (training.eval_epochs, training.eval_interval)
    };
    let mu = ("model.type", "mu");
    let steps = ("training.eval_interval", "50");
    let epochs = ("training.eval_epochs", "2");
    assert_eq!(evaluates(&[mu]), (Some(1.0), 1000));
    assert_eq!(evaluates(&[mu, steps]), (None, 50));
    assert_eq!(evaluates(&[mu, epochs]), (Some(2.0), 1000));
    assert_eq!(evaluates(&[mu, epochs, steps]), (Some(2.0), 50));
    assert_eq!(evaluates(&[steps]), (None, 50));
}
