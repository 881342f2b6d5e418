//! Fine-tuning data from files to rows: tokens against transformers, and every refusal.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use cinch_data::sample::{
    Limited, Moment, SampleOptions, Samples, Templating, TextUnit, TokenizerConfig, TooLong,
};
use cinch_data::{DataError, NoProgress, Progress, Tokenizer, TokenizerSpec};
use serde_json::{Value, json};
use tempfile::TempDir;

const END: i32 = 256;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

fn bytes() -> Tokenizer {
    Tokenizer::load(&TokenizerSpec::Bytes).unwrap()
}

fn written(name: &str, content: &str) -> (TempDir, SampleOptions) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, content).unwrap();
    let options = SampleOptions {
        paths: vec![path],
        ..SampleOptions::default()
    };
    (folder, options)
}

fn config(template: &str) -> TokenizerConfig {
    let config = json!({"chat_template": template, "eos_token": {"content": "<|endoftext|>"}});
    let path = Path::new("tokenizer_config.json");
    TokenizerConfig::new(path, &config.to_string(), None, Moment(0)).unwrap()
}

/// Tokens as text, and the learned part of it.
fn texts(samples: &Samples, index: usize) -> (String, String) {
    let sample = samples.sample(index);
    let text = |ids: Vec<u32>| bytes().decode(&ids);
    let all = sample.tokens.iter().map(|id| *id as u32);
    let learned = (0..sample.tokens.len()).filter(|place| sample.is_counted(*place));
    (
        text(all.collect()),
        text(learned.map(|place| sample.tokens[place] as u32).collect()),
    )
}

fn read(name: &str, content: &str, template: Option<&str>) -> Result<Samples, DataError> {
    let (_folder, options) = written(name, content);
    let config = template.map(config);
    Samples::prepare(&options, &bytes(), config.as_ref(), &NoProgress)
}

const TEMPLATE: &str = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}|{% endfor %}{% if add_generation_prompt %}<a>{% endif %}";

#[test]
fn tokens_and_turns_are_those_of_transformers() {
    let cases: Value =
        serde_json::from_str(&std::fs::read_to_string(fixture("tokens.json")).unwrap()).unwrap();
    let mut num_turns = 0;
    for case in cases.as_array().unwrap() {
        let name = case["tokenizer"].as_str().unwrap();
        let file = fixture(&format!("{name}.json"));
        let tokenizer = Tokenizer::load(&TokenizerSpec::File(file)).unwrap();
        let mut folder = json!({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"});
        let record = match case["template"].as_str() {
            Some(template) => {
                let source = fixture(&format!("chat/{template}.jinja"));
                folder["chat_template"] = std::fs::read_to_string(source).unwrap().into();
                case["record"].to_string()
            }
            None => json!({"text": case["text"]}).to_string(),
        };
        let path = Path::new("tokenizer_config.json");
        let config = TokenizerConfig::new(path, &folder.to_string(), None, Moment(0)).unwrap();
        let (_folder, options) = written("a.jsonl", &record);
        let samples = Samples::prepare(&options, &tokenizer, Some(&config), &NoProgress).unwrap();
        let sample = samples.sample(0);
        let ids: Vec<i32> = serde_json::from_value(case["ids"].clone()).unwrap();
        let Some(mask) = case["mask"].as_array() else {
            // A text is ended, which transformers leaves to its trainers.
            assert_eq!(sample.tokens[..ids.len()], ids, "{name}");
            assert_eq!(sample.tokens.len(), ids.len() + 1);
            continue;
        };
        assert_eq!(sample.tokens, ids, "{name} {}", case["template"]);
        let counted: Vec<i64> = (0..ids.len())
            .map(|place| i64::from(sample.is_counted(place)))
            .collect();
        let mask: Vec<i64> = mask.iter().map(|bit| bit.as_i64().unwrap()).collect();
        assert_eq!(counted, mask, "{name} {}", case["template"]);
        num_turns += 1;
    }
    assert!(num_turns > 20, "{num_turns}");
}

#[test]
fn a_token_ends_where_a_turn_begins() {
    let spec = TokenizerSpec::File(fixture("byte_level.json"));
    let tokenizer = Tokenizer::load(&spec).unwrap();
    // These two letters are one token in this vocabulary.
    assert_eq!(tokenizer.encode("en").unwrap().len(), 1);
    let template = "{% for m in messages %}{{ m.role }}: e{{ m.content }}{% endfor %}{% if add_generation_prompt %}assistant: e{% endif %}";
    let config = json!({"chat_template": template, "eos_token": "</s>"}).to_string();
    let config = TokenizerConfig::new(Path::new("c.json"), &config, None, Moment(0)).unwrap();
    let record = json!({"messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "n</s>"}
    ]});
    let (_folder, options) = written("a.jsonl", &record.to_string());
    let samples = Samples::prepare(&options, &tokenizer, Some(&config), &NoProgress).unwrap();
    let sample = samples.sample(0);
    let prompt = tokenizer.encode("user: eaassistant: e").unwrap();
    let ids: Vec<u32> = sample.tokens.iter().map(|id| *id as u32).collect();
    assert_eq!(ids[..prompt.len()], prompt);
    assert_eq!(ids.len(), prompt.len() + 2, "`n` and the end of text");
    let counted: Vec<bool> = (0..ids.len())
        .map(|place| sample.is_counted(place))
        .collect();
    assert!(!counted[..prompt.len()].contains(&true) && counted[prompt.len()..] == [true, true]);
}

#[test]
fn a_completion_gets_no_space_that_it_does_not_have() {
    let spec = TokenizerSpec::File(fixture("sentence_piece.json"));
    let tokenizer = Tokenizer::load(&spec).unwrap();
    for (prompt, completion) in [
        ("Q: a\nA:", " the"),
        ("Q: a\nA:\n", "the"),
        ("ü", "ß\n\nthe"),
    ] {
        let record = json!({"prompt": prompt, "completion": completion}).to_string();
        let (_folder, options) = written("a.jsonl", &record);
        let samples = Samples::prepare(&options, &tokenizer, None, &NoProgress).unwrap();
        let ids: Vec<u32> = samples
            .sample(0)
            .tokens
            .iter()
            .map(|id| *id as u32)
            .collect();
        let text = tokenizer.decode(&ids[1..ids.len() - 1]);
        assert_eq!(text, format!("{prompt}{completion}"));
        // Beginning and end of text are around it.
        assert_eq!(tokenizer.decode(&ids[..1]), "<s>");
        assert_eq!(Some(ids[ids.len() - 1]), tokenizer.end_of_text());
    }
}

#[test]
fn every_kind_is_read_and_said() {
    let graph = "(w / want-01\n  :ARG0 (b / boy))";
    for (name, content, template, kind, text, learned) in [
        (
            "a.jsonl",
            r#"{"prompt":"ab","completion":"cd"}"#.to_owned(),
            Some(TEMPLATE),
            "pairs (`prompt`, `completion`)",
            "abcd<|endoftext|>",
            "cd<|endoftext|>",
        ),
        (
            "a.json",
            r#"[{"instruction":"ab","input":"x","output":"cd","system":"s"}]"#.to_owned(),
            None,
            "pairs (`instruction`, `input`, `output`)",
            "s\n\nab\nx\n\ncd<|endoftext|>",
            "cd<|endoftext|>",
        ),
        (
            "a.json",
            r#"[{"instruction":"ab","input":"","output":"cd","system":"s","history":[["p","q"]]}]"#
                .to_owned(),
            Some(TEMPLATE),
            "pairs (`instruction`, `input`, `output`)",
            "<s>s|<u>p|<a>q|<u>ab|<a>cd|",
            "cd|",
        ),
        (
            "a.jsonl",
            r#"{"question":"ab","answer":"cd"}"#.to_owned(),
            Some(TEMPLATE),
            "pairs (`question`, `answer`)",
            "<u>ab|<a>cd|",
            "cd|",
        ),
        (
            "a.jsonl",
            r#"{"conversations":[{"from":"human","value":"ab"},{"from":"gpt","value":"cd"}]}"#
                .to_owned(),
            Some(TEMPLATE),
            "conversations (`conversations`)",
            "<u>ab|<a>cd|",
            "cd|",
        ),
        (
            "a.ndjson",
            r#"{"text":"ab"}"#.to_owned(),
            None,
            "texts (`text`)",
            "ab<|endoftext|>",
            "ab<|endoftext|>",
        ),
        (
            "a.txt",
            "ab\n".to_owned(),
            None,
            "lines of text",
            "ab<|endoftext|>",
            "ab<|endoftext|>",
        ),
        (
            "a.txt",
            format!("# ::id 1\n#::snt A boy.\n{graph}\n\n"),
            None,
            "sentences with graphs (`#::snt`)",
            "A boy.\n\n(w / want-01\n  :ARG0 (b / boy))<|endoftext|>",
            "(w / want-01\n  :ARG0 (b / boy))<|endoftext|>",
        ),
    ] {
        let samples = read(name, &content, template).unwrap();
        assert_eq!(samples.len(), 1, "{content}");
        assert_eq!(samples.files()[0].kind.to_string(), kind);
        assert_eq!(samples.files()[0].num_samples, 1);
        assert_eq!(texts(&samples, 0), (text.to_owned(), learned.to_owned()));
    }
}

#[test]
fn settings_decide_what_is_rendered_and_learned() {
    let (_folder, mut options) = written("a.jsonl", r#"{"prompt":"ab","completion":"cd"}"#);
    let config = config(TEMPLATE);
    let mut learned = |change: &dyn Fn(&mut SampleOptions)| {
        change(&mut options);
        let samples = Samples::prepare(&options, &bytes(), Some(&config), &NoProgress).unwrap();
        texts(&samples, 0).1
    };
    assert_eq!(
        learned(&|options| options.templating = Templating::Always),
        "cd|"
    );
    assert_eq!(
        learned(&|options| options.train_on_inputs = true),
        "<u>ab|<a>cd|"
    );
    assert_eq!(
        learned(&|options| options.templating = Templating::Never),
        "abcd<|endoftext|>"
    );
    let (_folder, mut options) = written("a.txt", "ab\n\ncd\n");
    options.text_unit = TextUnit::File;
    let samples = Samples::prepare(&options, &bytes(), None, &NoProgress).unwrap();
    assert_eq!(texts(&samples, 0).0, "ab\n\ncd\n<|endoftext|>");
}

#[test]
fn refusals_name_the_file_and_the_line() {
    let good = r#"{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}"#;
    let refusing = "{% for m in messages %}\n{% if m.role == 'critic' %}{{ raise_exception('No critics.') }}{% endif %}\n{{ m.role }}{{ m.content }}{% endfor %}";
    let critic = good.replace("user", "critic");
    for (content, template, words) in [
        (
            format!("{good}\n{{\"messages\":"),
            Some(TEMPLATE),
            vec!["line 2", "not JSON"],
        ),
        (
            format!("{good}\n[1]"),
            Some(TEMPLATE),
            vec!["line 2", "a list, not an object"],
        ),
        (
            format!("{good}\n\n{{\"prompt\":\"a\",\"completion\":\"b\"}}"),
            Some(TEMPLATE),
            vec![
                "line 3",
                "no `messages`",
                "belongs to pairs",
                "holds conversations",
            ],
        ),
        (
            good.to_owned(),
            None,
            vec!["line 1", "needs a chat template", "hint:"],
        ),
        (
            format!("{good}\n{critic}"),
            Some(refusing),
            vec![
                "a.jsonl` line 2",
                "No critics.",
                "tokenizer_config.json",
                "line 2 of it",
            ],
        ),
        (
            "{\"title\":\"a\"}".to_owned(),
            None,
            vec!["line 1", "`title`", "hint:"],
        ),
        (
            "{\"prompt\":\"\",\"completion\":\"\"}".to_owned(),
            None,
            vec!["line 1", "no token to learn"],
        ),
        (
            "{\"instruction\":\"a\",\"output\":\"b\",\"history\":[[\"a\",\"b\"]]}".to_owned(),
            None,
            vec!["line 1", "needs a chat template"],
        ),
        (String::new(), None, vec!["no samples", "a.jsonl"]),
    ] {
        let message = read("a.jsonl", &content, template).unwrap_err().to_string();
        for word in words {
            assert!(message.contains(word), "{content}\n{message}");
        }
    }
    let message = read("a.txt", "#::snt A\n(a / b\n\n", None)
        .unwrap_err()
        .to_string();
    assert!(message.contains("a.txt` line 1"), "{message}");
}

#[test]
fn templates_that_cannot_be_used_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let read = |config: Value, file: Option<&str>| {
        std::fs::write(
            folder.path().join("tokenizer_config.json"),
            config.to_string(),
        )
        .unwrap();
        let path = folder.path().join("chat_template.jinja");
        match file {
            Some(source) => std::fs::write(path, source).unwrap(),
            None => drop(std::fs::remove_file(path)),
        }
        TokenizerConfig::from_folder(folder.path(), Moment(0))
    };
    let error = |config, file| read(config, file).unwrap_err().to_string();
    let message = error(json!({"chat_template": "a\n{% if %}"}), None);
    assert!(
        message.contains("tokenizer_config.json") && message.contains("line 2"),
        "{message}"
    );
    let message = error(json!({}), Some("{{"));
    assert!(message.contains("chat_template.jinja"), "{message}");
    assert!(error(json!({"chat_template": 3}), None).contains("`chat_template`"));
    assert!(error(json!({"bos_token": []}), None).contains("`bos_token`"));
    assert!(error(json!([]), None).contains("tokenizer_config.json"));

    let named = json!({"chat_template": [
        {"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}
    ]});
    let config = read(named.clone(), None).unwrap();
    let render = |config: &TokenizerConfig, has_tools| {
        let conversation = cinch_data::sample::Conversation {
            messages: Vec::new(),
            tools: None,
        };
        let template = config.template(has_tools).unwrap();
        config
            .render(template, &conversation, 0, false)
            .unwrap()
            .text
    };
    assert_eq!(
        (render(&config, false), render(&config, true)),
        ("d".into(), "t".into())
    );
    let with_file = read(named, Some("file")).unwrap();
    assert_eq!(render(&with_file, false), "file");
    assert_ne!(config.fingerprint(), with_file.fingerprint());
    assert!(read(json!({}), None).unwrap().template(false).is_none());
    let empty = tempfile::tempdir().unwrap();
    let none = TokenizerConfig::from_folder(empty.path(), Moment(0)).unwrap();
    assert!(none.template(false).is_none() && none.token("eos_token").is_none());

    let unknown = read(json!({"eos_token": "<nowhere>"}), None).unwrap();
    let (_folder, options) = written("a.jsonl", r#"{"text":"a"}"#);
    let error = Samples::prepare(&options, &bytes(), Some(&unknown), &NoProgress).unwrap_err();
    assert!(error.to_string().contains("`<nowhere>`"), "{error}");
}

#[test]
fn a_template_that_never_ends_is_stopped() {
    let template = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}";
    let good = r#"{"messages":[{"role":"assistant","content":"b"}]}"#;
    let message = read("a.jsonl", good, Some(template))
        .unwrap_err()
        .to_string();
    assert!(message.contains("instructions"), "{message}");
}

fn lengths_of(samples: &Samples) -> Vec<usize> {
    (0..samples.len())
        .map(|index| samples.sample(index).tokens.len())
        .collect()
}

#[test]
fn long_samples_are_dealt_with_as_asked_and_said() {
    // With the end of text: 5, 9 and 10 tokens; of the last, nothing is learned before the 9th.
    let content = "{\"prompt\":\"ab\",\"completion\":\"cd\"}\n{\"prompt\":\"ab\",\"completion\":\"cdefgh\"}\n{\"prompt\":\"abcdefgh\",\"completion\":\"i\"}\n";
    let samples = || read("a.jsonl", content, None).unwrap();
    assert_eq!(lengths_of(&samples()), [5, 9, 10]);
    assert_eq!(samples().num_counted(), 3 + 7 + 2);
    let report = samples().lengths();
    assert_eq!((report.shortest, report.median, report.longest), (5, 9, 10));
    assert_eq!(report.longer_than(8), 2);

    let (cut, said) = samples().limit(8, TooLong::Truncate).unwrap();
    assert_eq!(lengths_of(&cut), [5, 8]);
    assert_eq!(texts(&cut, 1), ("abcdefgh".to_owned(), "cdefgh".to_owned()));
    let expected = Limited {
        limit: 8,
        num_truncated: 1,
        num_dropped: 0,
        num_emptied: 1,
        num_tokens_lost: 11,
    };
    assert_eq!(said, expected);
    let text = said.to_string();
    assert!(
        text.contains("1 cut at the end") && text.contains("nothing to learn"),
        "{text}"
    );
    assert_eq!(cut.files()[0].num_samples, 2);

    let (kept, said) = samples().limit(8, TooLong::Drop).unwrap();
    assert_eq!(lengths_of(&kept), [5]);
    assert_eq!((said.num_dropped, said.num_tokens_lost), (2, 19));
    let message = samples().limit(8, TooLong::Error).unwrap_err().to_string();
    assert!(
        message.contains("line 2") && message.contains("9 tokens"),
        "{message}"
    );
    let (all, said) = samples().limit(10, TooLong::Error).unwrap();
    assert_eq!(all.fingerprint(), samples().fingerprint());
    assert_eq!(said.to_string(), "no sample is longer than 10 tokens");
    assert!(matches!(
        samples().limit(2, TooLong::Drop),
        Err(DataError::NoSampleShortEnough {
            limit: 2,
            shortest: 5
        })
    ));
}

#[test]
fn samples_do_not_depend_on_threads_or_batches_and_say_their_size() {
    let lines: String = (0..500)
        .map(|index| json!({"prompt": format!("{index}:"), "completion": "x".repeat(index)}))
        .map(|record| format!("{record}\n"))
        .collect();
    let (_folder, options) = written("a.jsonl", &lines);
    let prepare = |threads| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        pool.install(|| Samples::prepare(&options, &bytes(), None, &NoProgress).unwrap())
    };
    let (one, many) = (prepare(1), prepare(4));
    assert_eq!(one.fingerprint(), many.fingerprint());
    let num_tokens = one.lengths().num_tokens as usize;
    let bits = num_tokens.div_ceil(64) * 8;
    assert_eq!(one.host_bytes(), 4 * num_tokens + 501 * 8 + bits + 500 * 8);
    let mut fewer = options.clone();
    fewer.max_samples = Some(7);
    let some = Samples::prepare(&fewer, &bytes(), None, &NoProgress).unwrap();
    assert_eq!(lengths_of(&some), lengths_of(&one)[..7]);
    assert_ne!(some.fingerprint(), one.fingerprint());
}

#[test]
fn several_files_keep_their_kinds_and_lines() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("b.txt"), "one\n\ntwo\n").unwrap();
    std::fs::write(folder.path().join("a.json"), "[\n{\"text\":\"zero\"}]").unwrap();
    let options = SampleOptions {
        paths: vec![folder.path().to_path_buf()],
        ..SampleOptions::default()
    };
    let samples = Samples::prepare(&options, &bytes(), None, &NoProgress).unwrap();
    let kinds: Vec<String> = samples
        .files()
        .iter()
        .map(|file| file.kind.to_string())
        .collect();
    assert_eq!(kinds, ["texts (`text`)", "lines of text"]);
    let origin = |index| {
        let (path, line) = samples.origin(index);
        (path.file_name().unwrap().to_owned(), line)
    };
    assert_eq!(origin(0), ("a.json".into(), 2));
    assert_eq!(origin(2), ("b.txt".into(), 3));
    assert_eq!(samples.sample(2).tokens.last(), Some(&END));
}

#[derive(Default)]
struct Stops {
    calls: AtomicUsize,
    bytes: AtomicUsize,
    after: usize,
}

impl Progress for Stops {
    fn begin(&self, _what: &str, total_bytes: u64) {
        assert!(total_bytes > 0);
    }
    fn advance(&self, bytes: u64) {
        self.bytes.fetch_add(bytes as usize, Ordering::Relaxed);
    }
    fn end(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
    }
    fn is_interrupted(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) >= self.after
    }
}

#[test]
fn preparing_can_be_interrupted_and_tells_its_progress() {
    let content = "{\"text\":\"a\"}\n".repeat(100);
    let (_folder, options) = written("a.jsonl", &content);
    let stops = Stops {
        after: 50,
        ..Stops::default()
    };
    assert!(matches!(
        Samples::prepare(&options, &bytes(), None, &stops),
        Err(DataError::Interrupted)
    ));
    let all = Stops {
        after: usize::MAX,
        ..Stops::default()
    };
    Samples::prepare(&options, &bytes(), None, &all).unwrap();
    assert_eq!(all.bytes.load(Ordering::Relaxed), content.len());
    assert_eq!(all.calls.load(Ordering::Relaxed), 1);
}

/// A file with one byte changed, taken out or doubled, by a number.
fn damaged(content: &[u8], number: u64) -> Vec<u8> {
    let mixed = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let place = (mixed >> 33) as usize % content.len();
    let mut bytes = content.to_vec();
    match number % 4 {
        0 => bytes[place] ^= 1 << (mixed % 8),
        1 => drop(bytes.remove(place)),
        2 => bytes.insert(place, bytes[place]),
        _ => bytes.truncate(place),
    }
    bytes
}

#[test]
fn damaged_files_are_read_or_refused_with_their_name() {
    let chat =
        r#"{"messages":[{"role":"user","content":"a\né"},{"role":"assistant","content":"b"}]}"#;
    let config = config(TEMPLATE);
    let folder = tempfile::tempdir().unwrap();
    let mut num_refused = 0;
    for (name, content) in [
        ("a.jsonl", format!("{chat}\n{chat}\n")),
        ("a.json", format!("[\n{chat},\n{chat}]\n")),
        (
            "b.json",
            "[{\"instruction\": \"a\", \"input\": \"[\", \"output\": \"\\\"]\"}]".to_owned(),
        ),
        (
            "a.amr",
            "# ::id 1\n# ::snt A.\n(a / b\n  :c \"d\")\n\n# ::snt E.\n(e / f)\n".to_owned(),
        ),
    ] {
        let path = folder.path().join(name);
        let options = SampleOptions {
            paths: vec![path.clone()],
            ..SampleOptions::default()
        };
        for number in 0..200 {
            std::fs::write(&path, damaged(content.as_bytes(), number)).unwrap();
            if let Err(error) = Samples::prepare(&options, &bytes(), Some(&config), &NoProgress) {
                assert!(error.to_string().contains(name), "{error}");
                num_refused += 1;
            }
        }
    }
    assert!(num_refused > 200, "{num_refused}");
}
