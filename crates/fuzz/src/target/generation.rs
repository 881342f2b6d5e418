//! A generation_config.json from anywhere.

use std::fs;
use std::path::Path;

use cinch_data::sample::generation_ends;

use super::{Target, no_words};

pub const GENERATION: Target = Target {
    name: "generation",
    about: "what generation_config.json says ends an answer",
    seeds,
    words: no_words,
    run,
};

fn seeds() -> Vec<Vec<u8>> {
    [
        r#"{"eos_token_id":[151645,151643],"bos_token_id":151643,"do_sample":true,"top_p":0.8}"#,
        r#"{"eos_token_id":2,"transformers_version":"4.40.0"}"#,
        r#"{"eos_token_id":null}"#,
        r#"{"eos_token_id":"</s>","pad_token_id":-1}"#,
        r#"{"eos_token_id":4294967296}"#,
    ]
    .map(|text| text.as_bytes().to_vec())
    .to_vec()
}

fn run(input: &[u8], folder: &Path) {
    fs::write(folder.join("generation_config.json"), input).expect("the folder can be written");
    match generation_ends(folder) {
        // An id or more for each that is written: two bytes at the least.
        Ok(ids) => assert!(2 * ids.len() <= input.len(), "{} ids", ids.len()),
        Err(error) => assert!(error.to_string().contains("generation_config.json")),
    }
}
