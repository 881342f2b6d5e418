//! A folder goes in, windows come out: the cache, the split and the order of samples.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use cinch_data::{
    Corpus, DataError, DataOptions, NoProgress, Progress, Source, Tokenizer, TokenizerSpec, synth,
};
use cinch_graph::op::IGNORE_INDEX;

struct Setup {
    folder: tempfile::TempDir,
    cache: tempfile::TempDir,
}

impl Setup {
    fn new(files: &[(&str, &str)]) -> Self {
        let setup = Self {
            folder: tempfile::tempdir().unwrap(),
            cache: tempfile::tempdir().unwrap(),
        };
        for (name, text) in files {
            setup.write(name, text);
        }
        setup
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn options(&self, tokenizer: TokenizerSpec) -> DataOptions {
        DataOptions {
            source: Source::Folder(self.folder.path().to_path_buf()),
            tokenizer,
            cache_dir: Some(self.cache.path().to_path_buf()),
            ..DataOptions::default()
        }
    }

    fn prepare(&self, tokenizer: TokenizerSpec) -> Result<Corpus, DataError> {
        prepare(&self.options(tokenizer))
    }
}

fn prepare(options: &DataOptions) -> Result<Corpus, DataError> {
    let tokenizer = Tokenizer::load(&options.tokenizer).unwrap();
    Corpus::prepare(options, &tokenizer, &NoProgress)
}

/// All tokens of a corpus, read as one long window.
fn tokens(corpus: &Corpus) -> Vec<u32> {
    let len = corpus.num_tokens() as usize;
    let (train, _) = corpus.windows(len).unwrap().split(0.0, 0);
    let (mut tokens, mut targets) = (vec![0; len], vec![0; len]);
    train.fill_in_order(0, &mut tokens, &mut targets).unwrap();
    assert_eq!(
        tokens[1..],
        targets[..len - 1],
        "targets are the next tokens"
    );
    assert_eq!(targets[len - 1], IGNORE_INDEX);
    tokens.into_iter().map(|token| token as u32).collect()
}

#[test]
fn documents_are_joined_with_end_of_text_in_name_order() {
    let setup = Setup::new(&[
        ("b.txt", "hi"),
        ("a/z.jsonl", "{\"text\":\"x\"}\n{\"text\":\"y\"}\n"),
        ("c.txt", ""),
    ]);
    let corpus = setup.prepare(TokenizerSpec::Bytes).unwrap();
    assert_eq!(tokens(&corpus), [120, 256, 121, 256, 104, 105, 256]);
    assert_eq!(corpus.num_documents(), 3);
    assert!(!corpus.was_cached());
}

#[test]
fn splitting_a_large_file_changes_no_token() {
    // Several pieces, with whitespace of every kind around the places where it may be cut.
    let mut text = String::new();
    for line in 0..90_000 {
        text.push_str(&format!(
            "line {line}:\t it's  \n\n   x{line}\r\n \u{a0}漢字!? "
        ));
    }
    let setup = Setup::new(&[("a.txt", &text)]);
    let corpus = setup.prepare(TokenizerSpec::Gpt2).unwrap();
    let mut whole = tiktoken_rs::r50k_base_singleton().encode_ordinary(&text);
    whole.push(50_256);
    assert!(text.len() > 3 << 20);
    assert!(tokens(&corpus) == whole, "tokens differ");
}

#[test]
fn the_cache_is_used_again_and_follows_content_and_tokenizer() {
    let setup = Setup::new(&[("a.txt", "some text to read")]);
    let first = setup.prepare(TokenizerSpec::Bytes).unwrap();
    let second = setup.prepare(TokenizerSpec::Bytes).unwrap();
    assert!(!first.was_cached() && second.was_cached());
    assert_eq!(first.fingerprint(), second.fingerprint());
    assert_eq!(tokens(&first), tokens(&second));
    assert_eq!((first.num_documents(), second.num_documents()), (1, 1));

    let other_tokenizer = setup.prepare(TokenizerSpec::Gpt2).unwrap();
    assert!(!other_tokenizer.was_cached());
    assert_ne!(first.fingerprint(), other_tokenizer.fingerprint());

    // The same length and the same times, but other content.
    let path = setup.folder.path().join("a.txt");
    let modified = fs::metadata(&path).unwrap().modified().unwrap();
    setup.write("a.txt", "some text to feed");
    fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_modified(modified)
        .unwrap();
    let changed = setup.prepare(TokenizerSpec::Bytes).unwrap();
    assert!(!changed.was_cached());
    assert_ne!(first.fingerprint(), changed.fingerprint());

    // The same files elsewhere are the same corpus.
    let moved = Setup::new(&[("a.txt", "some text to read")]);
    let mut options = moved.options(TokenizerSpec::Bytes);
    options.cache_dir = Some(setup.cache.path().to_path_buf());
    assert!(prepare(&options).unwrap().was_cached());
}

#[test]
fn the_text_column_is_part_of_the_identity() {
    let setup = Setup::new(&[("a.jsonl", "{\"text\":\"one\",\"code\":\"two\"}")]);
    let mut options = setup.options(TokenizerSpec::Bytes);
    let text = prepare(&options).unwrap();
    options.text_column = "code".to_owned();
    let code = prepare(&options).unwrap();
    assert!(!code.was_cached());
    assert_eq!(tokens(&text)[..3], [111, 110, 101]);
    assert_eq!(tokens(&code)[..3], [116, 119, 111]);
}

#[test]
fn a_damaged_cache_is_rebuilt() {
    let setup = Setup::new(&[("a.txt", "some text to read")]);
    let expected = tokens(&setup.prepare(TokenizerSpec::Bytes).unwrap());
    let path = setup
        .prepare(TokenizerSpec::Bytes)
        .unwrap()
        .cache_path()
        .to_path_buf();
    let header = path.with_extension("json");
    let damages: [&dyn Fn(); 6] = [
        &|| fs::write(&path, b"short").unwrap(),
        &|| {
            let mut bytes = fs::read(&path).unwrap();
            bytes[3] ^= 1;
            fs::write(&path, bytes).unwrap();
        },
        &|| fs::remove_file(&path).unwrap(),
        &|| fs::write(&header, b"{\"format_version\":").unwrap(),
        &|| fs::write(&header, b"").unwrap(),
        &|| fs::remove_file(&header).unwrap(),
    ];
    for (index, damage) in damages.iter().enumerate() {
        damage();
        let rebuilt = setup.prepare(TokenizerSpec::Bytes).unwrap();
        assert!(!rebuilt.was_cached(), "damage {index}");
        assert_eq!(tokens(&rebuilt), expected, "damage {index}");
        assert!(
            setup.prepare(TokenizerSpec::Bytes).unwrap().was_cached(),
            "damage {index}"
        );
    }
    let left = fs::read_dir(setup.cache.path()).unwrap().count();
    assert_eq!(left, 2, "no temporary file stays behind");
}

#[test]
fn preparing_the_same_corpus_at_once_does_not_corrupt_it() {
    let text = "many words to read, again and again\n".repeat(20_000);
    let setup = Setup::new(&[("a.txt", &text)]);
    let results: Vec<Vec<u32>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| tokens(&setup.prepare(TokenizerSpec::Bytes).unwrap())))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    let expected: Vec<u32> = text.bytes().map(u32::from).chain([256]).collect();
    assert!(results.iter().all(|tokens| *tokens == expected));
}

#[test]
fn errors_name_what_is_wrong() {
    let message = |setup: &Setup| setup.prepare(TokenizerSpec::Bytes).unwrap_err().to_string();
    let text = message(&Setup::new(&[("a.txt", ""), ("b.md", "")]));
    assert!(
        text.contains("holds no text") && text.contains("2 file(s)"),
        "{text}"
    );
    let text = message(&Setup::new(&[("a.bin", "x")]));
    assert!(text.contains("1 skipped"), "{text}");

    let mut options = Setup::new(&[]).options(TokenizerSpec::Bytes);
    options.source = Source::Folder(PathBuf::from("/no/such/folder"));
    let text = prepare(&options).unwrap_err().to_string();
    assert!(
        text.contains("/no/such/folder") && text.contains("does not exist"),
        "{text}"
    );

    let setup = Setup::new(&[("ok.txt", "fine")]);
    fs::write(setup.folder.path().join("bad.txt"), b"abc\xFFdef").unwrap();
    let text = message(&setup);
    assert!(
        text.contains("bad.txt") && text.contains("offset 3"),
        "{text}"
    );
    assert_eq!(fs::read_dir(setup.cache.path()).unwrap().count(), 0);
}

#[test]
fn an_unusable_cache_folder_is_named() {
    let setup = Setup::new(&[("a.txt", "text")]);
    setup.write("file", "in the way");
    let mut options = setup.options(TokenizerSpec::Bytes);
    options.cache_dir = Some(setup.folder.path().join("file/below"));
    let text = prepare(&options).unwrap_err().to_string();
    assert!(
        text.contains("file/below") && text.contains("--cache-dir"),
        "{text}"
    );
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_told_plainly() {
    let source = std::io::Error::from(std::io::ErrorKind::StorageFull);
    let text = DataError::CacheWrite {
        folder: PathBuf::from("/cache"),
        source,
    }
    .to_string();
    assert!(
        text.contains("disk is full") && text.contains("--cache-dir"),
        "{text}"
    );
}

#[test]
fn progress_adds_up_to_the_bytes_read() {
    #[derive(Default)]
    struct Sum {
        total: AtomicU64,
        done: AtomicU64,
    }
    impl Progress for Sum {
        fn begin(&self, _what: &str, total_bytes: u64) {
            self.total.fetch_add(total_bytes, Ordering::Relaxed);
        }
        fn advance(&self, bytes: u64) {
            self.done.fetch_add(bytes, Ordering::Relaxed);
        }
        fn end(&self) {}
    }
    let text = "words and words\n".repeat(200_000);
    let setup = Setup::new(&[("a.txt", &text), ("b.jsonl", "{\"text\":\"x\"}\n")]);
    let options = setup.options(TokenizerSpec::Bytes);
    let sum = Sum::default();
    Corpus::prepare(
        &options,
        &Tokenizer::load(&TokenizerSpec::Bytes).unwrap(),
        &sum,
    )
    .unwrap();
    // Read once to identify, once to tokenise.
    assert_eq!(
        sum.total.load(Ordering::Relaxed),
        2 * (text.len() as u64 + 13)
    );
    assert_eq!(
        sum.done.load(Ordering::Relaxed),
        sum.total.load(Ordering::Relaxed)
    );
}

#[test]
fn interrupted_work_leaves_nothing_behind() {
    /// Interrupts once that many bytes are done.
    struct Until {
        limit: u64,
        done: AtomicU64,
    }
    impl Progress for Until {
        fn begin(&self, _what: &str, _total_bytes: u64) {}
        fn advance(&self, bytes: u64) {
            self.done.fetch_add(bytes, Ordering::Relaxed);
        }
        fn end(&self) {}
        fn is_interrupted(&self) -> bool {
            self.done.load(Ordering::Relaxed) >= self.limit
        }
    }
    let text = "words and words\n".repeat(200_000);
    let setup = Setup::new(&[("a.txt", &text)]);
    let options = setup.options(TokenizerSpec::Bytes);
    let tokenizer = Tokenizer::load(&TokenizerSpec::Bytes).unwrap();
    // At once, while the file is identified, and while it is tokenised.
    for limit in [0, 1 << 20, text.len() as u64 + 1] {
        let done = AtomicU64::new(0);
        let result = Corpus::prepare(&options, &tokenizer, &Until { limit, done });
        assert!(matches!(result, Err(DataError::Interrupted)), "{limit}");
        assert_eq!(fs::read_dir(setup.cache.path()).unwrap().count(), 0);
    }
    setup.prepare(TokenizerSpec::Bytes).unwrap();
}

/// A corpus of the numbers 0..n as bytes, so that each window is known by its first token.
fn counted(n: u8) -> (Setup, Corpus) {
    let text: String = (0..n).map(char::from).collect();
    let setup = Setup::new(&[("a.txt", &text)]);
    let corpus = setup.prepare(TokenizerSpec::Bytes).unwrap();
    (setup, corpus)
}

#[test]
fn windows_tile_the_corpus() {
    // 101 tokens: 10 windows of 10 inputs, each with the token after it as last target.
    let (_setup, corpus) = counted(100);
    let windows = corpus.windows(10).unwrap();
    assert_eq!(windows.len(), 10);
    let (train, validation) = windows.split(0.3, 1);
    assert_eq!((train.len(), validation.len()), (7, 3));
    let mut starts = BTreeSet::new();
    for split in [&train, &validation] {
        for index in 0..split.len() {
            let (mut tokens, mut targets) = ([0; 10], [0; 10]);
            split
                .fill_in_order(index, &mut tokens, &mut targets)
                .unwrap();
            let start = tokens[0];
            assert!(tokens.iter().copied().eq(start..start + 10));
            let last = if start == 90 { 256 } else { start + 10 };
            assert!(targets[..9].iter().copied().eq(start + 1..start + 10));
            assert_eq!(targets[9], last);
            assert!(starts.insert(start), "no window twice");
        }
    }
    assert!(starts.into_iter().eq((0..100).step_by(10)));
    assert!(matches!(
        corpus.windows(0),
        Err(DataError::ZeroSequenceLength)
    ));
}

#[test]
fn each_epoch_visits_every_window_once_in_its_own_order() {
    let (_setup, corpus) = counted(120);
    let (train, _) = corpus.windows(4).unwrap().split(0.0, 0);
    let epoch = |number: u64, seed: u64| -> Vec<i32> {
        let samples = number * train.len()..(number + 1) * train.len();
        samples
            .map(|sample| {
                let (mut tokens, mut targets) = ([0; 4], [0; 4]);
                train.fill(sample, seed, &mut tokens, &mut targets).unwrap();
                tokens[0]
            })
            .collect()
    };
    let orders = [epoch(0, 9), epoch(1, 9), epoch(0, 10), epoch(1_000_000, 9)];
    for order in &orders {
        let sorted: BTreeSet<i32> = order.iter().copied().collect();
        assert!(sorted.into_iter().eq((0..120).step_by(4)));
    }
    for (index, order) in orders.iter().enumerate() {
        assert!(orders[index + 1..].iter().all(|other| other != order));
    }
    assert_eq!(
        orders[0],
        epoch(0, 9),
        "the order is a function of seed and sample number"
    );
}

#[test]
fn splits_are_never_empty_when_there_is_enough() {
    let (_setup, corpus) = counted(100);
    let lens = |seq_len: usize, fraction: f64| {
        let (train, validation) = corpus.windows(seq_len).unwrap().split(fraction, 3);
        (train.len(), validation.len())
    };
    assert_eq!(lens(10, 0.0), (10, 0));
    assert_eq!(lens(10, 0.0001), (9, 1));
    assert_eq!(lens(10, 5.0), (1, 9));
    assert_eq!(lens(10, f64::NAN), (10, 0));
    assert_eq!(lens(50, 0.1), (1, 1));
    assert_eq!(lens(100, 0.5), (1, 0));
}

#[test]
fn a_corpus_shorter_than_a_window_is_padded_and_masked() {
    let setup = Setup::new(&[("a.txt", "ab")]);
    let (train, validation) = setup
        .prepare(TokenizerSpec::Bytes)
        .unwrap()
        .windows(5)
        .unwrap()
        .split(0.5, 0);
    let (mut tokens, mut targets) = ([0; 5], [0; 5]);
    train.fill(17, 0, &mut tokens, &mut targets).unwrap();
    assert_eq!(tokens, [97, 98, 256, 256, 256]);
    assert_eq!(targets, [98, 256, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX]);
    validation.fill(3, 0, &mut tokens, &mut targets).unwrap();
    assert_eq!(
        targets, [IGNORE_INDEX; 5],
        "an empty part counts for nothing"
    );
}

#[test]
fn the_embedded_text_needs_no_file() {
    let cache = tempfile::tempdir().unwrap();
    let options = DataOptions {
        cache_dir: Some(cache.path().to_path_buf()),
        ..DataOptions::default()
    };
    let corpus = prepare(&options).unwrap();
    assert!(corpus.num_tokens() > 60_000, "{}", corpus.num_tokens());
    assert!(corpus.num_documents() > 70);
    assert!(prepare(&options).unwrap().was_cached());
}

#[test]
fn a_generated_folder_can_be_read() {
    let folder = tempfile::tempdir().unwrap();
    let options = synth::SynthOptions {
        folder: folder.path().join("data"),
        num_files: 20,
        seed: 1,
        languages: Vec::new(),
        approx_bytes_per_file: 2000,
        overwrite: false,
    };
    let report = synth::generate(&options, &NoProgress).unwrap();
    let corpus = prepare(&DataOptions {
        source: Source::Folder(options.folder),
        tokenizer: TokenizerSpec::Bytes,
        cache_dir: Some(folder.path().join("cache")),
        ..DataOptions::default()
    })
    .unwrap();
    assert_eq!(corpus.num_documents(), 20);
    assert_eq!(corpus.num_tokens(), report.num_bytes + 20);
    assert!(Path::new(corpus.cache_path()).exists());
}
