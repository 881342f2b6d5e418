//! Files far larger and deeper than anybody writes: they are read in a time that grows with their
//! size, and refused by a sentence where they are too deep.

use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use cinch_config::{Document, Settings};

/// Ends a reading that takes a time of the square of the size: that would be hours.
const HANG: Duration = Duration::from_secs(300);
const MANY: usize = 300_000;
const DEEP: usize = 100_000;
/// As `config` has it, written out because messages state it.
const MAX_DEPTH: usize = 64;

/// What a reading comes to, on a stack as small as any thread's.
fn read(name: &'static str, text: String) -> Result<usize, String> {
    let (sender, receiver) = mpsc::channel();
    let reader = move || {
        let mut settings = Settings::new();
        let path = Path::new(name);
        let outcome = Document::read(path, &text)
            .and_then(|document| {
                settings.load_document(&document)?;
                Ok(document.entries.len())
            })
            .map_err(|error| error.to_string());
        sender.send(outcome).unwrap();
    };
    std::thread::Builder::new()
        .stack_size(2 << 20)
        .spawn(reader)
        .unwrap();
    receiver
        .recv_timeout(HANG)
        .unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn each(number: usize, one: impl Fn(usize) -> String) -> String {
    (0..number).map(one).collect()
}

#[test]
fn every_format_takes_many_keys() {
    let json = each(MANY, |i| format!(", \"k{i}\": {i}"));
    let flow = each(MANY, |i| format!(", k{i}: {i}"));
    let block = each(MANY, |i| format!("k{i}: {i}\n"));
    let lines = each(MANY, |i| format!("k{i} = {i}\n"));
    let flags = each(MANY, |i| format!(" --k{i} {i}"));
    for (name, text) in [
        ("flat.json", format!("{{\"batch_size\": 4{json}}}")),
        ("flow.yaml", format!("{{batch_size: 4{flow}}}")),
        ("block.yaml", format!("batch_size: 4\n{block}")),
        (
            "axolotl.yaml",
            format!("base_model: gpt2\nmicro_batch_size: 4\nsequence_len: 512\n{block}"),
        ),
        ("flat.toml", format!("batch_size = 4\n{lines}")),
        ("flat.py", format!("batch_size = 4\n{lines}")),
        (
            "flags.sh",
            format!("python train.py --batch_size 4{flags}\n"),
        ),
    ] {
        let entries = read(name, text).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(entries > MANY, "{name}: {entries}");
    }
}

/// Keys that need more than a look: sections, repeated values, variables, names that are followed.
#[test]
fn what_refers_to_other_places_takes_no_longer() {
    let many = MANY / 3;
    for (name, text) in [
        (
            "tables.toml",
            "per_device_train_batch_size = 4\n".to_owned()
                + &each(many, |i| format!("[k{i}.s]\na = {i}\n")),
        ),
        (
            "sections.json",
            "{\"per_device_train_batch_size\": 4".to_owned()
                + &each(many, |i| format!(", \"k{i}\": {{\"a\": 1}}"))
                + "}",
        ),
        (
            "merged.yaml",
            "per_device_train_batch_size: 4\nbase: &base {a: 1}\n".to_owned()
                + &each(many, |i| format!("k{i}: {{<<: *base}}\n")),
        ),
        (
            "keys.yaml",
            "{per_device_train_batch_size: 4".to_owned() + &each(many, |i| format!(", k{i}")) + "}",
        ),
        (
            "dictionaries.py",
            "per_device_train_batch_size = 4\n".to_owned()
                + &each(many, |i| {
                    format!("k{i} = {{}}\nif x:\n    y{i} = 1\ny{i} = 2\n")
                }),
        ),
        (
            "calls.py",
            "per_device_train_batch_size = 4\nclass c:\n    pass\n".to_owned()
                + &each(many, |i| format!("c.k{i} = {i}\nLoraConfig(a{i}=c.k{i})\n")),
        ),
        (
            "variables.sh",
            each(many, |i| format!("K{i}=1\nK{i}=2\nrun --k{i} $K{i}\n"))
                + "run --per_device_train_batch_size 4\n",
        ),
    ] {
        let entries = read(name, text).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(entries > many, "{name}: {entries}");
    }
}

#[test]
fn what_is_too_deep_is_refused_by_its_depth() {
    let limit = format!("nested more than {MAX_DEPTH} levels deep");
    let around = |open: &str, close: &str| open.repeat(DEEP) + "1" + &close.repeat(DEEP);
    let dots = "a.".repeat(DEEP);
    let indented = each(MAX_DEPTH * 2, |i| format!("{}a:\n", " ".repeat(i)));
    let merged = each(DEEP, |i| format!("a{}: &a{} {{<<: *a{i}}}\n", i + 1, i + 1));
    for (name, text) in [
        (
            "lists.json",
            format!("{{\"batch_size\": {}}}", around("[", "]")),
        ),
        ("sections.json", around("{\"a\":", "}")),
        ("lists.yaml", format!("batch_size: {}", around("[", "]"))),
        ("sections.yaml", around("{a: ", "}")),
        ("dashes.yaml", format!("a:\n  {}1", "- ".repeat(DEEP))),
        ("indented.yaml", indented),
        ("merged.yaml", format!("a0: &a0 {{}}\n{merged}")),
        ("lists.toml", format!("a = {}", around("[", "]"))),
        ("sections.toml", format!("a = {}", around("{a=", "}"))),
        ("dots.toml", format!("{dots}a = 1")),
        ("header.toml", format!("[{dots}a]\nb = 1")),
        ("lists.py", format!("a = {}", around("[", "]"))),
        ("brackets.py", format!("a = {}", around("(", ")"))),
        ("dictionaries.py", format!("a = {}", around("{'a':", "}"))),
        ("calls.py", format!("a = {}", around("dict(a=", ")"))),
    ] {
        let message = read(name, text).expect_err(name);
        assert!(message.contains(&limit), "{name}: {message}");
        assert!(message.contains(name), "{name}: {message}");
    }
    // A shell script has no sections, and what the shell would compute is one word.
    for text in [around("$(", ")"), around("[", "]"), around("{", "}")] {
        read("nested.sh", format!("run --batch_size 4 --a {text}")).unwrap();
    }
}

#[test]
fn the_depth_that_is_stated_is_the_depth_that_is_taken() {
    let lists = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
    // The file itself is the first level where it has brackets.
    for (name, before, after, around) in [
        ("a.json", "{\"batch_size\": 4, \"a\": ", "}", 1),
        ("a.yaml", "batch_size: 4\na: ", "\n", 1),
        ("a.toml", "batch_size = 4\na = ", "\n", 1),
        ("a.py", "batch_size = 4\na = ", "\n", 0),
    ] {
        let text = |depth: usize| format!("{before}{}{after}", lists(depth));
        assert!(read(name, text(MAX_DEPTH - around)).is_ok(), "{name}");
        assert!(read(name, text(MAX_DEPTH - around + 1)).is_err(), "{name}");
    }
}

/// Aliases and names that would fill any memory.
#[test]
fn a_small_file_does_not_become_a_large_one() {
    let nine = |i: usize| vec![format!("*a{i}"); 9].join(", ");
    let keys = |i: usize| each(9, |j| format!("k{j}: *a{i}, "));
    let aliases = each(20, |i| format!("a{}: &a{} {{{}}}\n", i + 1, i + 1, keys(i)));
    let merges = each(20, |i| {
        format!("a{}: &a{} {{<<: [{}]}}\n", i + 1, i + 1, nine(i))
    });
    for (name, text) in [("aliases.yaml", aliases), ("merges.yaml", merges)] {
        let message = read(name, format!("a0: &a0 {{x: 1}}\n{text}")).expect_err(name);
        assert!(
            message.contains("repeat more than 100000 values"),
            "{message}"
        );
    }
    let long = "n".repeat(1 << 20);
    let values = each(MANY, |i| format!("\"k{i}\": 1, "));
    let lines = each(MANY, |i| format!("k{i} = 1\n"));
    for (name, text) in [
        ("long.json", format!("{{\"{long}\": {{{values}}}}}")),
        ("long.yaml", format!("? {long}\n: {{{values}}}\n")),
        ("long.toml", format!("[{long}]\n{lines}")),
    ] {
        let message = read(name, text).expect_err(name);
        assert!(message.contains("longer than 1024 bytes"), "{message}");
    }
    // Python's names are of a program, and a section of such a name is not read.
    let text = format!("batch_size = 4\n{long} = {{{values}}}\n");
    assert_eq!(read("long.py", text), Ok(2));
}
