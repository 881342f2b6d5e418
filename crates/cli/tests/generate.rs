//! Generating and talking with the real program: speed is told apart from the text, and a
//! conversation works through pipes.

mod common;

use std::io::{Read, Write};
use std::process::Stdio;

use common::{Sandbox, signal};

/// What the program answers to the lines of a conversation: its standard output and error.
fn talk(sandbox: &Sandbox, line: &str, said: &str) -> (String, String) {
    let mut child = sandbox
        .command(line.split_whitespace())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut input = child.stdin.take().expect("a pipe");
    input.write_all(said.as_bytes()).expect("it reads");
    drop(input);
    let output = child.wait_with_output().expect("it ends");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{stderr}");
    (stdout, stderr)
}

fn trained() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox
        .train_tiny("--max-steps 20 --output-dir run")
        .succeeds();
    sandbox
}

#[test]
fn speed_is_told_beside_the_text() {
    let sandbox = trained();
    let ran = sandbox
        .cinch("generate run --max-tokens 30 --prompt fn --verbose")
        .succeeds();
    assert!(
        ran.stderr.contains(" tokens/s, the first after "),
        "{}",
        ran.stderr
    );
    assert!(ran.stderr.contains(" for 32 tokens"), "{}", ran.stderr);
    assert!(!ran.stdout.contains("tokens/s"), "{}", ran.stdout);
    let quiet = sandbox.cinch("generate run --max-tokens 30 --prompt fn --quiet");
    let quiet = quiet.succeeds();
    assert_eq!((quiet.stdout, quiet.stderr), (ran.stdout, String::new()));
    let json = sandbox
        .cinch("generate run --max-tokens 30 --prompt fn --json")
        .succeeds()
        .json();
    assert_eq!(json["context"], 32);
    for positive in [
        "seconds_to_first_token",
        "tokens_per_second",
        "weights_bytes",
        "cache_bytes",
    ] {
        let value = json[positive].as_f64();
        assert!(value.is_some_and(|value| value > 0.0), "{positive}: {json}");
    }
}

#[test]
fn a_run_without_adapters_has_none_to_merge() {
    let sandbox = trained();
    sandbox.cinch("merge run --to merged").fails(
        2,
        &[
            "run has trained all weights",
            "hint: `cinch export run --to",
        ],
    );
}

/// The model has 64 positions: what is written beyond them is from the newer half of what came
/// before. The token that ends a text is not among the likeliest few.
#[test]
fn a_text_may_outgrow_the_positions() {
    let sandbox = trained();
    let json = sandbox
        .cinch("generate run --max-tokens 150 --prompt fn --temperature 1 --top-k 5 --json")
        .succeeds()
        .json();
    assert_eq!(json["context"], 64);
    assert!(json["tokens"].as_u64().is_some_and(|tokens| tokens > 64));
}

#[test]
fn a_conversation_goes_through_pipes() {
    let sandbox = trained();
    let line = "generate run --chat --max-tokens 12";
    let (stdout, stderr) = talk(&sandbox, line, "hello\n\nand you?\n");
    assert!(stderr.contains("no chat template"), "{stderr}");
    // The empty line is no turn, and a pipe sees no prompt.
    assert_eq!(stderr.matches(" after ").count(), 2, "{stderr}");
    assert!(!stderr.contains("> "), "{stderr}");
    assert!(stdout.lines().count() >= 2, "{stdout}");
    // The first answer does not depend on what follows; the same conversation is the same.
    let (first, _) = talk(&sandbox, line, "hello\n");
    assert!(stdout.starts_with(&first), "{stdout} after {first}");
    let quiet = format!("{line} --quiet");
    let (again, nothing) = talk(&sandbox, &quiet, "hello\n\nand you?\n");
    assert_eq!((again, nothing), (stdout, String::new()));
}

#[test]
fn a_line_that_is_not_text_is_told_with_the_way_out() {
    let sandbox = trained();
    let mut child = sandbox
        .command(["generate", "run", "--chat", "--max-tokens", "4"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut input = child.stdin.take().expect("a pipe");
    input.write_all(b"caf\xe9\n").expect("it reads");
    drop(input);
    let output = child.wait_with_output().expect("it ends");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("standard input is not UTF-8"), "{stderr}");
    assert!(stderr.contains("iconv"), "{stderr}");
}

/// Ctrl-C during an answer ends that answer, and the conversation goes on to its end.
#[test]
#[cfg(unix)]
fn an_answer_can_be_cut_off() {
    let sandbox = trained();
    let line = "generate run --chat --max-tokens 100000000 --top-k 20";
    let mut child = sandbox
        .command(line.split_whitespace())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut input = child.stdin.take().expect("a pipe");
    input.write_all(b"hello\n").expect("it reads");
    // The end of the text is not among the 20 likeliest bytes: the answer goes on until it is cut.
    let mut first = [0];
    let out = child.stdout.as_mut().expect("a pipe");
    out.read_exact(&mut first).expect("an answer begins");
    signal(&child, "INT");
    drop(input);
    let output = child.wait_with_output().expect("it ends");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(stderr.contains(", the first after "), "{stderr}");
    assert!(output.stdout.ends_with(b"\n"));
}

#[test]
fn what_cannot_be_is_refused() {
    let sandbox = trained();
    for (line, problem) in [
        ("--context 0", "--context 0"),
        ("--chat --json", "--json"),
        ("--chat --prompt a", "--prompt"),
        ("--precision bf16 --device cpu", "--precision bf16"),
    ] {
        let ran = sandbox.cinch(&format!("generate run {line}"));
        assert_eq!(ran.code, Some(2), "{line}: {}", ran.stderr);
        assert!(ran.stderr.contains(problem), "{line}: {}", ran.stderr);
    }
}

/// A tokenizer of a few words. What ends turns is neither its `eos_token` nor a usual name.
const WORDS: &str = r#"{
    "added_tokens": [
        {"id": 0, "content": "<s>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false},
        {"id": 1, "content": "<|stop|>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false},
        {"id": 2, "content": "<|turn|>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false}
    ],
    "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "decoder": null,
    "post_processor": null,
    "model": {"type": "WordLevel", "unk_token": "<s>", "vocab": {
        "<s>": 0, "<|stop|>": 1, "<|turn|>": 2, "user": 3, "assistant": 4, "sky": 5, "blue": 6,
        "rose": 7, "red": 8, "brief": 9, "system": 10
    }}
}"#;

const TEMPLATE: &str = "{% for m in messages %}{{ m.role }} {{ m.content }} <|turn|> {% endfor %}\
                        {% if add_generation_prompt %}assistant {% endif %}";

/// A base model that is taught to talk ends its answers as its template does.
#[test]
fn an_answer_ends_where_it_was_taught_to() {
    let sandbox = Sandbox::new();
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let config = std::fs::read_to_string(format!("{root}/examples/finetune/base/config.json"));
    sandbox.write("base/config.json", config.unwrap());
    sandbox.write("base/tokenizer.json", WORDS);
    let said = serde_json::json!({"eos_token": "<|stop|>", "chat_template": TEMPLATE});
    sandbox.write("base/tokenizer_config.json", said.to_string());
    let talk_of = |what: &str, is: &str| {
        let message = |role: &str, text: &str| serde_json::json!({"role": role, "content": text});
        let messages = [
            message("system", "brief"),
            message("user", what),
            message("assistant", is),
        ];
        serde_json::json!({ "messages": messages }).to_string()
    };
    let samples = [talk_of("sky", "blue"), talk_of("rose", "red")].join("\n");
    sandbox.write("talks.jsonl", samples);
    let line = "train --model base --data-dir talks.jsonl --batch-size 2 --grad-accum 1 --seq-len 16 \
                --max-steps 40 --warmup-steps 1 --lr 3e-3 --val-split 0 --output-dir run";
    sandbox.cinch(line).succeeds();
    for subject in ["run", "model"] {
        if subject == "model" {
            sandbox.cinch("export run --to model").succeeds();
        }
        let line =
            format!("generate {subject} --chat --system brief --temperature 0 --max-tokens 9");
        let answers = ["sky\n", "rose\n"].map(|said| talk(&sandbox, &line, said).0);
        assert_eq!(answers, ["blue\n", "red\n"], "{subject}");
    }
    // A prompt that was rendered beforehand.
    let prompt = "system brief <|turn|> user rose <|turn|> assistant";
    let asked = [
        "generate",
        "model",
        "--temperature",
        "0",
        "--max-tokens",
        "9",
        "--prompt",
        prompt,
    ];
    let json = sandbox
        .run(asked.into_iter().chain(["--json"]))
        .succeeds()
        .json();
    assert_eq!(
        (&json["text"], &json["tokens"]),
        (&"red".into(), &1.into()),
        "{json}"
    );
}
