//! Nothing a file can hold or a user can type makes the crate panic, and what
//! is accepted always resolves to a config that reads back.

use std::path::Path;

use cinch_config::{Config, Format, SETTINGS, Scalar, Settings, Source, edit};

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
    load_as("run.json", text);
}

fn load_as(name: &str, text: &str) {
    let mut settings = Settings::new();
    match settings.load_text(Path::new(name), text) {
        Ok(()) => exercise(&settings),
        Err(error) => assert!(error.to_string().contains(name), "{text}: {error}"),
    }
}

/// Whatever is left of a file, editing it gives an error or a text in which the
/// value is set.
fn edit_damaged(name: &str, text: &str) {
    let path = Path::new(name);
    let format = Format::of(path, text);
    let key = vec!["training".to_owned(), "max_steps".to_owned()];
    let change = [(key, Scalar::Number("77".to_owned()))];
    match edit(path, format, text, &change) {
        Ok(edited) => assert_eq!(edit(path, format, &edited, &change).unwrap(), edited),
        Err(error) => assert!(error.to_string().contains(name), "{text}: {error}"),
    }
}

#[test]
fn damaged_files_of_every_format() {
    for name in [
        "yaml/own_sections.yaml",
        "yaml/anchors_and_merges.yaml",
        "yaml/comments_between.yaml",
        "json/comments.jsonc",
        "toml/dotted_keys.toml",
        "toml/strings.toml",
        "python/dataclass.py",
        "python/nested.py",
        "python/continuation.py",
    ] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/edit");
        let text = std::fs::read_to_string(folder.join(name)).unwrap();
        let name = format!("run.{}", name.rsplit('.').next().unwrap());
        for (index, c) in text.char_indices().step_by(3) {
            load_as(&name, &text[..index]);
            edit_damaged(&name, &text[index..]);
            for damage in [
                "", "{", "]", "\"", "'", ",", ":", "=", "\t", "é", "\\", "#", "\u{0}", "*a", "&a",
                "\r",
            ] {
                let rest = &text[index + c.len_utf8()..];
                let damaged = format!("{}{damage}{rest}", &text[..index]);
                load_as(&name, &damaged);
                edit_damaged(&name, &damaged);
            }
        }
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
    for setting in SETTINGS.iter() {
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

/// The parser puts the missing value behind the bracket.
#[test]
fn keys_alone_in_brackets() {
    for text in ["{e}", "training: {e}\n", "training: {a: 1, e}\n"] {
        load_as("run.yaml", text);
        edit_damaged("run.yaml", text);
    }
}
