//! The files that say how a sentence becomes a vector, from anywhere.

use std::fs;
use std::path::Path;

use cinch_architecture::Bert;
use cinch_train::SentenceForm;

use super::{Target, no_words};

pub const SENTENCES: Target = Target {
    name: "sentences",
    about: "what modules.json and the files that it names say of sentences",
    seeds,
    words: no_words,
    run,
};

/// Files of a folder, one after the other, in one input.
const FILES: [&str; 4] = [
    "modules.json",
    "1_Pooling/config.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
];
const BETWEEN: u8 = b'\0';

fn seeds() -> Vec<Vec<u8>> {
    let modules = r#"[{"path":"","type":"sentence_transformers.models.Transformer"},{"path":"1_Pooling","type":"sentence_transformers.models.Pooling"},{"path":"2_Normalize","type":"sentence_transformers.models.Normalize"}]"#;
    let folders = [
        [
            modules,
            r#"{"pooling_mode_cls_token":false,"pooling_mode_mean_tokens":true}"#,
            r#"{"max_seq_length":256,"do_lower_case":false}"#,
            r#"{"prompts":{"query":"query: "},"default_prompt_name":"query"}"#,
        ],
        [
            modules,
            r#"{"pooling_mode":["cls"],"include_prompt":true}"#,
            r#"{"max_seq_length":1e30}"#,
            r#"{"default_prompt_name":null}"#,
        ],
    ];
    let joined = folders.map(|files| files.map(str::as_bytes).join(&BETWEEN));
    joined.to_vec()
}

fn run(input: &[u8], folder: &Path) {
    fs::create_dir_all(folder.join("1_Pooling")).expect("the folder can be written");
    for (name, contents) in FILES.iter().zip(input.split(|&byte| byte == BETWEEN)) {
        fs::write(folder.join(name), contents).expect("the folder can be written");
    }
    let encoder = Bert::default();
    match SentenceForm::of(folder, &encoder) {
        Ok(form) => assert!((1..=encoder.positions as usize).contains(&form.longest)),
        Err(error) => assert!(error.to_string().contains(".json")),
    }
    // The next input may have fewer of them.
    for name in FILES {
        let _ = fs::remove_file(folder.join(name));
    }
}
