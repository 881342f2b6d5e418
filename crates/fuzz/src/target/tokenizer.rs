//! A tokenizer.json from anywhere.

use std::fs;
use std::path::{Path, PathBuf};

use cinch_data::{Tokenizer, TokenizerSpec};

use super::{Target, no_words};

pub const TOKENIZER: Target = Target {
    name: "tokenizer",
    about: "a Hugging Face tokenizer.json, and text through it",
    seeds,
    words: no_words,
    run,
};

/// Small files of each kind that the library knows.
fn seeds() -> Vec<Vec<u8>> {
    let special = r#"{"id":3,"content":"</s>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}"#;
    let parts = [
        (
            r#"{"type":"WordLevel","vocab":{"?":0,"a":1,"b":2},"unk_token":"?"}"#,
            r#"{"type":"WhitespaceSplit"}"#,
            "null",
            "null",
        ),
        (
            r###"{"type":"WordPiece","unk_token":"?","continuing_subword_prefix":"##","max_input_chars_per_word":100,"vocab":{"?":0,"a":1,"##b":2}}"###,
            r#"{"type":"BertPreTokenizer"}"#,
            r#"{"type":"BertNormalizer","clean_text":true,"handle_chinese_chars":true,"strip_accents":null,"lowercase":true}"#,
            r###"{"type":"WordPiece","prefix":"##","cleanup":true}"###,
        ),
        (
            r#"{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,"vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]}"#,
            r#"{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":"\\p{L}+|\\s+(?!\\S)"},"behavior":"Isolated","invert":false},{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false}]}"#,
            r#"{"type":"Sequence","normalizers":[{"type":"NFKC"},{"type":"Replace","pattern":{"String":"  "},"content":"▁"},{"type":"Prepend","prepend":"▁"}]}"#,
            r#"{"type":"Sequence","decoders":[{"type":"ByteFallback"},{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0}]}"#,
        ),
        (
            r#"{"type":"Unigram","unk_id":0,"vocab":[["?",0.0],["a",-1.5],["▁b",-2.0]],"byte_fallback":false}"#,
            r#"{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true}"#,
            r#"{"type":"Strip","strip_left":true,"strip_right":true}"#,
            r#"{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true}"#,
        ),
    ];
    parts
        .iter()
        .map(|(model, pre_tokenizer, normalizer, decoder)| {
            format!(
                "{{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,\"added_tokens\":[{special}],\
                 \"normalizer\":{normalizer},\"pre_tokenizer\":{pre_tokenizer},\"post_processor\":null,\
                 \"decoder\":{decoder},\"model\":{model}}}"
            )
            .into_bytes()
        })
        .collect()
}

const TEXTS: [&str; 5] = [
    "",
    "a b ab",
    "  a\n\tb </s> ",
    "naïve 漢字 👍 \u{0}\u{fffd}",
    "?##▁",
];

fn run(input: &[u8], folder: &Path) {
    let path = folder.join("tokenizer.json");
    fs::write(&path, input).expect("the folder can be written");
    if let Some((id, vocab_size)) = read(path) {
        assert!((id as usize) < vocab_size, "an id without a row: {id}");
    }
}

/// The largest id of some texts, and the size of the vocabulary.
fn read(path: PathBuf) -> Option<(u32, usize)> {
    let tokenizer = Tokenizer::load(&TokenizerSpec::File(path)).ok()?;
    let mut largest = None;
    for text in TEXTS {
        if let Ok(ids) = tokenizer.encode(text) {
            largest = largest.max(ids.iter().max().copied());
            tokenizer.decode(&ids);
        }
    }
    let ids: Vec<u32> = (0..8).chain([u32::MAX]).collect();
    tokenizer.decode(&ids);
    largest.map(|id| (id, tokenizer.vocab_size()))
}
