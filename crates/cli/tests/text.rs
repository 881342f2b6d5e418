//! Text and tokenizers that would take all memory or all time, and what a killed command leaves.
#![cfg(unix)]

mod common;

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::{Ran, Sandbox, signal, tiny};

/// Far longer than any of this takes; reached only where something hangs.
const DEADLINE: Duration = Duration::from_secs(60);

/// Waits for something that a running program does.
fn wait_until(child: &mut Child, what: &str, is_done: impl Fn() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !is_done() {
        let ended = child.try_wait().expect("a child can be asked");
        assert!(ended.is_none(), "it ended before {what}: {ended:?}");
        if Instant::now() > deadline {
            // One that never ends by itself must not outlive the test.
            child.kill().expect("a child of ours can be killed");
            panic!("not even now: {what}");
        }
        sleep(Duration::from_millis(2));
    }
}

/// The end of a program, which comes before the deadline.
fn end_of(sandbox: &Sandbox, mut child: Child) -> Ran {
    let deadline = Instant::now() + DEADLINE;
    while child.try_wait().expect("a child can be asked").is_none() {
        if Instant::now() > deadline {
            child.kill().expect("a child of ours can be killed");
            panic!("it does not end");
        }
        sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().expect("it has ended");
    Ran::new(&sandbox.command([]), &output)
}

/// The unfinished files in a cache.
fn num_unfinished(cache: &Path) -> usize {
    fs::read_dir(cache).map_or(0, |entries| {
        entries
            .flatten()
            .filter(|entry| entry.file_name().to_string_lossy().starts_with(".partial-"))
            .count()
    })
}

/// Runs the program where it has so much address space and one thread to tokenise.
fn run_within(sandbox: &Sandbox, mebibytes: u64, line: &str) -> Ran {
    let program = sandbox.command([]);
    let mut command = Command::new("sh");
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let limited = format!("ulimit -v {}; exec \"$0\" {line}", mebibytes << 10);
    command
        .arg("-c")
        .arg(limited)
        .arg(program.get_program())
        .env("RAYON_NUM_THREADS", "1")
        .env("MALLOC_ARENA_MAX", "1")
        .current_dir(sandbox.path())
        .stdin(Stdio::null());
    let output = command.output().expect("a shell starts");
    Ran::new(&command, &output)
}

#[test]
fn a_word_of_any_length_takes_little_memory() {
    let sandbox = Sandbox::new();
    sandbox.write("word.txt", "a".repeat(32 << 20));
    run_within(
        &sandbox,
        1024,
        "data prepare word.txt --tokenizer gpt2 --cache-dir cache",
    )
    .succeeds()
    .prints(&["8,388,609 tokens in 1 documents"])
    .says(&["cut at 127 places", "256 KiB"]);
}

#[test]
fn a_line_of_any_length_takes_little_memory() {
    let sandbox = Sandbox::new();
    let line = format!(
        "{{\"text\":\"ok\"}}\n{{\"text\":\"{}\"}}\n",
        "a ".repeat(50 << 20)
    );
    sandbox.write("lines.jsonl", line);
    run_within(
        &sandbox,
        512,
        "data prepare lines.jsonl --tokenizer bytes --cache-dir cache",
    )
    .fails(2, &["lines.jsonl", "line 2", "64 MiB", "hint:"]);
    assert_eq!(num_unfinished(&sandbox.join("cache")), 0);
}

#[test]
fn a_folder_of_a_thousand_levels_is_refused() {
    let sandbox = Sandbox::new();
    let deep = format!("deep/{}", "d/".repeat(1500));
    sandbox.write(&format!("{deep}a.txt"), "text");
    sandbox
        .cinch("data prepare deep --tokenizer bytes --cache-dir cache")
        .fails(2, &["256 folders", "hint:"]);
}

#[test]
fn a_tokenizer_that_breaks_the_library_is_an_error() {
    let sandbox = Sandbox::new();
    sandbox.write("text.txt", "some text");
    let parts = [
        r#""normalizer":{"type":"Precompiled","precompiled_charsmap":"AAAA"}"#.to_owned(),
        r#""normalizer":{"type":"Precompiled","precompiled_charsmap":"BAAAAAD///9h"}"#.to_owned(),
        r#""pre_tokenizer":{"type":"FixedLength","length":0}"#.to_owned(),
        format!(
            r#""normalizer":{{"type":"Sequence","normalizers":[{}]}}"#,
            [r#"{"type":"Replace","pattern":{"Regex":"."},"content":"eeeeeeeeeeeeeeee"}"#; 12]
                .join(",")
        ),
    ];
    for part in parts {
        let json = format!(
            r#"{{"version":"1.0",{part},"model":{{"type":"WordLevel","vocab":{{"?":0,"some":1}},"unk_token":"?"}}}}"#
        );
        sandbox.write("tokenizer.json", json);
        let ran = run_within(
            &sandbox,
            2048,
            "data prepare text.txt --tokenizer tokenizer.json --cache-dir cache",
        );
        assert!(matches!(ran.code, Some(1 | 2)), "{part}: {:?}", ran.code);
        let code = ran.code.unwrap_or_default();
        ran.fails(code, &["tokenizer.json"]);
    }
}

/// A tokenizer that takes years for a long word: it looks for each beginning of what is left.
const ENDLESS: &str = r####"{"version":"1.0","model":{"type":"WordPiece","unk_token":"?",
    "continuing_subword_prefix":"##","max_input_chars_per_word":1000000000,
    "vocab":{"?":0,"a":1,"##a":2}}}"####;

#[test]
fn a_piece_that_never_ends_can_be_interrupted() {
    let sandbox = Sandbox::new();
    sandbox.write("data/word.txt", "a".repeat(200_000));
    sandbox.write("endless.json", ENDLESS);
    for line in [
        "data prepare data --tokenizer endless.json --cache-dir cache",
        "train --model-size tiny --tokenizer endless.json --data-dir data --cache-dir cache \
         --max-steps 5 --output-dir run",
    ] {
        let mut child = sandbox.start(line.split_whitespace());
        let cache = sandbox.join("cache");
        wait_until(&mut child, "it tokenises", || num_unfinished(&cache) > 0);
        signal(&child, "INT");
        end_of(&sandbox, child)
            .exits(130)
            .says(&["stopped while the data was prepared"]);
        assert_eq!(num_unfinished(&cache), 0, "what was begun is removed");
    }
}

#[test]
fn what_a_killed_command_left_is_cleared_by_the_next_one() {
    let sandbox = Sandbox::new();
    sandbox.write("data/word.txt", "a".repeat(200_000));
    sandbox.write("small.txt", "some text");
    sandbox.write("endless.json", ENDLESS);
    let cache = sandbox.join("cache");
    let endless = "data prepare data --tokenizer endless.json --cache-dir cache";
    let mut killed = sandbox.start(endless.split_whitespace());
    wait_until(&mut killed, "it tokenises", || num_unfinished(&cache) == 1);
    killed.kill().expect("a child of ours can be killed");
    killed.wait().expect("it ends");
    assert_eq!(num_unfinished(&cache), 1);

    // What is being written stays, what nobody writes any more goes.
    let mut running = sandbox.start(endless.split_whitespace());
    let own = running.id().to_string();
    wait_until(&mut running, "the old one is gone", || {
        num_unfinished(&cache) == 1 && writer_in(&cache) == own
    });
    sandbox
        .cinch("data prepare small.txt --tokenizer bytes --cache-dir cache")
        .succeeds();
    assert_eq!(num_unfinished(&cache), 1);
    running.kill().expect("a child of ours can be killed");
    running.wait().expect("it ends");
    sandbox
        .cinch("data prepare small.txt --tokenizer bytes --cache-dir cache")
        .succeeds();
    assert_eq!(num_unfinished(&cache), 0);
}

/// The process in the name of an unfinished file, or nothing.
fn writer_in(cache: &Path) -> String {
    let names = fs::read_dir(cache).into_iter().flatten().flatten();
    names
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .find(|name| name.starts_with(".partial-"))
        .and_then(|name| name.rsplit('-').next().map(str::to_owned))
        .unwrap_or_default()
}

#[test]
fn a_cache_that_is_cut_off_under_a_run_ends_it_with_an_error() {
    let sandbox = Sandbox::new();
    let line = "--max-steps 100000 --save-steps 100000 --eval-steps 0 --log-steps 1 \
                --cache-dir cache --output-dir run";
    let mut child = sandbox.start(tiny(line));
    let metrics = sandbox.join("run/metrics.jsonl");
    wait_until(&mut child, "a step", || {
        fs::read_to_string(&metrics).is_ok_and(|text| text.lines().count() > 2)
    });
    let tokens = fs::read_dir(sandbox.join("cache"))
        .expect("a cache")
        .map(|entry| entry.expect("a file").path())
        .find(|path| path.extension().is_some_and(|ending| ending == "tokens"))
        .expect("tokens");
    let file = File::options().write(true).open(&tokens).expect("a file");
    file.set_len(0).expect("a file can be cut off");
    let name = tokens.file_name().expect("a name").to_string_lossy();
    end_of(&sandbox, child).fails(1, &["token cache", &name, "cut off", "hint:"]);
}
