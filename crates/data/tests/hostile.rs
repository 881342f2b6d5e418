//! Text and tokenizer files that nobody writes by accident: each ends in an answer, not in a
//! panic, an abort or a hang.

use std::fs::{self, File};
use std::path::Path;

use cinch_data::{
    Corpus, DataError, DataOptions, NoProgress, Source, Tokenizer, TokenizerSpec,
    exercise_tokenizer_json,
};

/// A tokenizer.json with those parts; the vocabulary is `?`, `a` and `b`.
fn json(normalizer: &str, pre_tokenizer: &str, decoder: &str) -> String {
    format!(
        r#"{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],
        "normalizer":{normalizer},"pre_tokenizer":{pre_tokenizer},"post_processor":null,
        "decoder":{decoder},
        "model":{{"type":"WordLevel","vocab":{{"?":0,"a":1,"b":2}},"unk_token":"?"}}}}"#
    )
}

fn load(json: &str) -> Result<Tokenizer, DataError> {
    Tokenizer::from_json_bytes(Path::new("models/tokenizer.json"), json.as_bytes())
}

/// The message of loading a file or of encoding a text with it, which names the file.
fn refusal(json: &str, text: &str) -> String {
    let error = match load(json) {
        Err(error) => error,
        Ok(tokenizer) => tokenizer.encode(text).unwrap_err(),
    };
    let message = error.to_string();
    assert!(message.contains("models/tokenizer.json"), "{message}");
    message
}

/// A rule that puts ten letters in the place of one, so often.
fn tenfold(times: usize) -> String {
    let rule = r#"{"type":"Replace","pattern":{"String":"a"},"content":"aaaaaaaaaa"}"#;
    vec![rule; times].join(",")
}

#[test]
fn a_broken_charsmap_is_an_error() {
    let with = |charsmap: &str| {
        let normalizer = format!(r#"{{"type":"Precompiled","precompiled_charsmap":"{charsmap}"}}"#);
        json(&normalizer, "null", "null")
    };
    // No base64; a trie of 4 GiB; bytes that are no text; a trie that leads out of itself.
    for charsmap in ["!", "", "////fwAA", "AAAAAP//"] {
        refusal(&with(charsmap), "a");
    }
    let leads_out = with("BAAAAAD///9h");
    assert!(refusal(&leads_out, "abc").contains("its rules fail"));
    refusal(
        &json(
            r#"{"type":"Precompiled","precompiled_charsmap":7}"#,
            "null",
            "null",
        ),
        "a",
    );
}

#[test]
fn replacements_of_replacements_are_refused_before_they_are_made() {
    // 10^40 letters, were they made.
    let normalizer = format!(r#"{{"type":"Sequence","normalizers":[{}]}}"#, tenfold(40));
    let message = refusal(&json(&normalizer, "null", "null"), "a");
    assert!(message.contains("normalizer"), "{message}");
    // Each of them in a list of its own.
    let nested = (0..10).fold(tenfold(4), |inner, _| {
        format!(r#"{{"type":"Sequence","normalizers":[{inner},{inner}]}}"#)
    });
    refusal(&json(&nested, "null", "null"), "a");
    // Between added tokens a text is normalised part by part: the parts count together.
    let long = format!(
        r#"{{"type":"Replace","pattern":{{"String":"a"}},"content":"{}"}}"#,
        "b".repeat(1 << 20)
    );
    let parts = json(&long, "null", "null").replace(
        r#""added_tokens":[]"#,
        r#""added_tokens":[{"id":9,"content":",","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":false}]"#,
    );
    refusal(&parts, &"a,".repeat(2000));
    // What grows a little is not refused.
    let little = format!(r#"{{"type":"Sequence","normalizers":[{}]}}"#, tenfold(2));
    let tokenizer = load(&json(&little, "null", "null")).unwrap();
    assert_eq!(tokenizer.encode("a b").unwrap(), [0]);
}

#[test]
fn a_decoder_that_grows_without_bound_gives_no_text() {
    let decoder = format!(r#"{{"type":"Sequence","decoders":[{}]}}"#, tenfold(40));
    let tokenizer = load(&json("null", "null", &decoder)).unwrap();
    assert_eq!(tokenizer.decode(&[1, 1]), "\u{FFFD}");
    // The library takes more characters off a token than it has.
    let strip = r#"{"type":"Strip","content":"a","start":0,"stop":9}"#;
    let tokenizer = load(&json("null", "null", strip)).unwrap();
    assert_eq!(tokenizer.decode(&[1]), "\u{FFFD}");
}

#[test]
fn rules_that_panic_in_the_library_are_errors() {
    let empty = json("null", r#"{"type":"FixedLength","length":0}"#, "null");
    let message = refusal(&empty, "a b");
    assert!(message.contains("its rules fail"), "{message}");
}

#[test]
fn a_pattern_that_backtracks_forever_ends() {
    let pattern = |pattern: &str| {
        let split = format!(
            r#"{{"type":"Split","pattern":{{"Regex":"{pattern}"}},"behavior":"Isolated","invert":false}}"#
        );
        json("null", &split, "null")
    };
    // The look-ahead makes the engine backtrack, which it gives up after a million steps.
    let tokenizer = load(&pattern("(?=(a+)+$)(a|aa)+$")).unwrap();
    let text = format!("{}b", "a".repeat(5000));
    assert!(tokenizer.encode(&text).is_ok());
    refusal(&pattern("("), "a");
    for large in ["a{1000}{1000}{1000}", "(?:(?=a){1000}){1000}", "(?<=a+)b"] {
        exercise_tokenizer_json(pattern(large).as_bytes(), "aaa");
    }
}

#[test]
fn a_template_does_not_repeat_the_text() {
    let a = r#"{"Sequence":{"id":"A","type_id":0}}"#;
    let single = vec![a; 1000].join(",");
    let template = format!(
        r#""post_processor":{{"type":"TemplateProcessing","single":[{single}],"pair":[{a},{a}],"special_tokens":{{}}}}"#
    );
    let repeating = json("null", r#"{"type":"WhitespaceSplit"}"#, "null")
        .replace(r#""post_processor":null"#, &template);
    let tokenizer = load(&repeating).unwrap();
    assert_eq!(tokenizer.encode("a b").unwrap(), [1, 2]);
}

#[test]
fn files_and_tokens_beyond_the_limits_are_named() {
    let long = json("null", "null", "null").replace("\"b\"", &format!("\"{}\"", "b".repeat(5000)));
    assert!(refusal(&long, "a").contains("5000 bytes"));
    let large = format!("{}{}", json("null", "null", "null"), " ".repeat(64 << 20));
    assert!(refusal(&large, "a").contains("64 MiB"));
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    refusal(&json(&deep, "null", "null"), "a");
    refusal(&deep, "a");
}

#[cfg(unix)]
#[test]
fn a_tokenizer_that_is_no_file_is_not_waited_for() {
    let error = Tokenizer::load(&TokenizerSpec::File("/dev/zero".into())).unwrap_err();
    assert!(error.to_string().contains("not a regular file"), "{error}");
}

#[test]
fn any_bytes_are_answered() {
    assert_eq!(exercise_tokenizer_json(b"\xFF\0", "a"), None);
    let whole = json("null", r#"{"type":"WhitespaceSplit"}"#, "null");
    assert_eq!(exercise_tokenizer_json(whole.as_bytes(), "a b"), Some(2));
    // Every beginning of a file, and every byte of it changed.
    for end in 0..whole.len() {
        exercise_tokenizer_json(&whole.as_bytes()[..end], "a b");
        let mut changed = whole.clone().into_bytes();
        changed[end] ^= 2;
        exercise_tokenizer_json(&changed, "a b");
    }
}

fn prepared(source: &Path, cache: &Path, spec: TokenizerSpec) -> Result<Corpus, DataError> {
    let options = DataOptions {
        source: Source::File(source.to_path_buf()),
        tokenizer: spec,
        cache_dir: Some(cache.to_path_buf()),
        ..DataOptions::default()
    };
    let tokenizer = Tokenizer::load(&options.tokenizer)?;
    Corpus::prepare(&options, &tokenizer, &NoProgress)
}

#[test]
fn a_word_beyond_a_piece_is_cut_and_told() {
    let folder = tempfile::tempdir().unwrap();
    let (path, cache) = (folder.path().join("a.txt"), folder.path().join("cache"));
    let word = "a".repeat((768 << 10) + 5);
    fs::write(&path, format!("{word} b")).unwrap();
    let corpus = prepared(&path, &cache, TokenizerSpec::Gpt2).unwrap();
    // Three cuts inside the word; the last part and `b` are one piece.
    assert_eq!(corpus.num_cuts(), 3);
    let note = corpus.cut_note().unwrap();
    assert!(
        note.contains("3 places") && note.contains("256 KiB"),
        "{note}"
    );
    let again = prepared(&path, &cache, TokenizerSpec::Gpt2).unwrap();
    assert!(again.was_cached());
    assert_eq!(again.num_cuts(), 3);
    // The ids are those of `encode`, which cuts at the same places.
    let gpt2 = Tokenizer::load(&TokenizerSpec::Gpt2).unwrap();
    let ids = gpt2.encode(&format!("{word} b")).unwrap();
    assert_eq!(ids.len() as u64 + 1, corpus.num_tokens());
    assert_eq!(gpt2.decode(&ids), format!("{word} b"));
    let bytes = prepared(&path, &cache, TokenizerSpec::Bytes).unwrap();
    assert_eq!((bytes.num_cuts(), bytes.cut_note()), (0, None));
}

#[test]
fn text_without_white_space_is_cut_where_no_token_changes() {
    let folder = tempfile::tempdir().unwrap();
    let (path, cache) = (folder.path().join("a.txt"), folder.path().join("cache"));
    // As minified code: longer than a piece.
    fs::write(&path, "f(x1){return'ab'+y_2;}".repeat(30_000)).unwrap();
    let corpus = prepared(&path, &cache, TokenizerSpec::Gpt2).unwrap();
    assert_eq!(corpus.num_cuts(), 0);
}

#[test]
fn a_tokenizer_file_cuts_unseen_only_where_its_rules_allow() {
    let folder = tempfile::tempdir().unwrap();
    let (path, cache) = (folder.path().join("a.txt"), folder.path().join("cache"));
    let text = "a b ".repeat(100_000);
    fs::write(&path, &text).unwrap();
    let tokenizer = folder.path().join("tokenizer.json");
    let spec = TokenizerSpec::File(tokenizer.clone());
    for (pre_tokenizer, num_cuts) in [
        (r#"{"type":"WhitespaceSplit"}"#, 0),
        (
            r#"{"type":"Sequence","pretokenizers":[{"type":"WhitespaceSplit"}]}"#,
            1,
        ),
    ] {
        fs::write(&tokenizer, json("null", pre_tokenizer, "null")).unwrap();
        let corpus = prepared(&path, &cache, spec.clone()).unwrap();
        assert_eq!(corpus.num_cuts(), num_cuts, "{pre_tokenizer}");
        assert_eq!(corpus.num_tokens(), 200_000);
    }
}

/// Where the file is mapped, this ends the process with SIGBUS.
#[test]
fn a_cache_that_is_cut_off_while_it_is_used_is_an_error_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let (path, cache) = (folder.path().join("a.txt"), folder.path().join("cache"));
    fs::write(&path, "abcdefgh".repeat(10_000)).unwrap();
    let corpus = prepared(&path, &cache, TokenizerSpec::Bytes).unwrap();
    let (train, _) = corpus.windows(16).unwrap().split(0.0, 0);
    let (mut tokens, mut targets) = ([0; 16], [0; 16]);
    let file = File::options()
        .write(true)
        .open(corpus.cache_path())
        .unwrap();
    file.set_len(4096).unwrap();
    let mut failures = 0;
    for index in 0..train.len() {
        if let Err(error) = train.fill_in_order(index, &mut tokens, &mut targets) {
            let message = error.to_string();
            let name = corpus.cache_path().display().to_string();
            assert!(
                message.contains(&name) && message.contains("cut off"),
                "{message}"
            );
            failures += 1;
        }
    }
    // 2048 ids are left, in 127 whole windows that have a next token.
    assert_eq!(failures, train.len() - 127);
    // The next one makes it anew.
    let again = prepared(&path, &cache, TokenizerSpec::Bytes).unwrap();
    assert!(!again.was_cached());
    // Ids that were overwritten are noticed before they index anything.
    fs::write(corpus.cache_path(), vec![0xFF; 160_002]).unwrap();
    let (train, _) = again.windows(16).unwrap().split(0.0, 0);
    let error = train.fill(0, 0, &mut tokens, &mut targets).unwrap_err();
    assert!(error.to_string().contains("65535"), "{error}");
}

#[test]
fn what_a_killed_command_left_in_the_cache_is_cleared() {
    let folder = tempfile::tempdir().unwrap();
    let (path, cache) = (folder.path().join("a.txt"), folder.path().join("cache"));
    fs::write(&path, "some text").unwrap();
    fs::create_dir(&cache).unwrap();
    let left = ".partial-0123456789abcdef0123456789abcdef.tokens-0-4000000";
    let others = [".partial-notes.tokens-0-4000000", ".partial-mine", "mine"];
    for name in others.iter().chain([&left]) {
        fs::write(cache.join(name), "x").unwrap();
    }
    prepared(&path, &cache, TokenizerSpec::Bytes).unwrap();
    assert!(!cache.join(left).exists());
    for name in others {
        assert!(cache.join(name).exists(), "{name}");
    }
}
