//! Nothing a file can hold or a user can type makes the crate panic, and what
//! is accepted always resolves to a config that reads back.

use std::path::Path;

use cinch_config::{Config, SETTINGS, Settings, Source};

/// Goes through everything a command would call.
fn exercise(settings: &Settings) {
    let listing = settings.explain();
    assert!(!listing.is_empty());
    settings.notes();
    match settings.resolve() {
        Ok(config) => {
            let json = config.to_json().unwrap();
            assert_eq!(Config::from_json(&json).unwrap(), config);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

fn load(text: &str) {
    let mut settings = Settings::new();
    match settings.load_text(Path::new("run.json"), text) {
        Ok(()) => exercise(&settings),
        Err(error) => assert!(error.to_string().contains("run.json"), "{text}: {error}"),
    }
}

#[test]
fn damaged_files() {
    let text = include_str!("fixtures/config_16gb_safe.json");
    for (index, _) in text.char_indices() {
        load(&text[..index]);
        load(&text[index..]);
        for damage in [
            "", "{", "}", "\"", ",", ":", "0", "-", "é", "\\", "//", "\u{0}",
        ] {
            load(&format!("{}{damage}{}", &text[..index], &text[index + 1..]));
        }
    }
}

#[test]
fn odd_values_for_every_setting() {
    let odd = [
        "",
        " ",
        "0",
        "1",
        "2",
        "-1",
        "0.5",
        "1e5",
        "1e400",
        "-0",
        "nan",
        "inf",
        "true",
        "none",
        "full",
        "gpt2",
        "mamba",
        "tiny",
        "bytes",
        "8gb",
        "18446744073709551615",
        "1048576",
        "65536",
        "16777216",
        "4096",
        "281474976710656",
        "\u{0}",
        "é",
        "{}",
        "null",
    ];
    for setting in SETTINGS {
        let names =
            std::iter::once(setting.key).chain(setting.aliases.iter().map(|alias| alias.key));
        for key in names {
            for value in odd {
                let mut settings = Settings::new();
                if settings
                    .set(key, value, Source::Flag("--flag".to_owned()))
                    .is_ok()
                {
                    exercise(&settings);
                }
                let (section, leaf) = key.split_once('.').unwrap();
                load(&format!("{{\"{section}\": {{\"{leaf}\": {value}}}}}"));
                load(&format!("\"{section}\": {{\"{leaf}\": \"{value}\"}}"));
            }
        }
    }
}
