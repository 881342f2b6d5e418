//! Chat templates against transformers: `fixtures/make_chat.py` wrote what these must render.

use std::path::{Path, PathBuf};

use cinch_data::sample::{Conversation, Moment, TokenizerConfig};
use serde_json::Value;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat")
}

fn cases() -> Vec<(String, Value)> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(fixtures())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "json"))
        .collect();
    paths.sort();
    paths
        .into_iter()
        .map(|path| {
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            let text = std::fs::read_to_string(path).unwrap();
            (name, serde_json::from_str(&text).unwrap())
        })
        .collect()
}

fn conversation(case: &Value) -> Conversation {
    let messages = case["messages"].as_array().unwrap();
    Conversation {
        messages: messages
            .iter()
            .map(|message| message.as_object().unwrap().clone())
            .collect(),
        tools: Some(case["tools"].clone()).filter(|tools| !tools.is_null()),
    }
}

/// transformers counts characters, Rust bytes.
fn byte_spans(text: &str, spans: &Value) -> Vec<std::ops::Range<usize>> {
    let byte = |index: &Value| {
        let index = index.as_u64().unwrap() as usize;
        text.char_indices()
            .map(|(byte, _)| byte)
            .chain([text.len()])
            .nth(index)
            .unwrap()
    };
    let spans = spans.as_array().unwrap();
    spans.iter().map(|s| byte(&s[0])..byte(&s[1])).collect()
}

#[test]
fn templates_render_as_in_transformers() {
    let mut differences = Vec::new();
    let mut num_compared = 0;
    for (name, file) in cases() {
        let mut config = file["tokens"].clone();
        let source = std::fs::read_to_string(fixtures().join(format!("{name}.jinja"))).unwrap();
        config["chat_template"] = source.into();
        let moment = Moment(file["moment"].as_u64().unwrap());
        let path = Path::new("tokenizer_config.json");
        let config = match TokenizerConfig::new(path, &config.to_string(), None, moment) {
            Ok(config) => config,
            Err(error) => {
                differences.push(format!("{name}: {error}"));
                continue;
            }
        };
        for (index, case) in file["cases"].as_array().unwrap().iter().enumerate() {
            num_compared += 1;
            let conversation = conversation(case);
            let template = config.template(conversation.tools.is_some()).unwrap();
            let prompt = case["add_generation_prompt"].as_bool().unwrap();
            let number = conversation.messages.len();
            match config.render(template, &conversation, number, prompt) {
                Ok(rendered) => match case["text"].as_str() {
                    Some(text) if text == rendered.text => {
                        let expected = byte_spans(text, &case["generated"]);
                        if expected != rendered.generated {
                            differences.push(format!(
                                "{name} {index}: spans {:?} instead of {expected:?}",
                                rendered.generated
                            ));
                        }
                    }
                    expected => differences.push(format!(
                        "{name} {index}: {:?}\n  instead of {expected:?} {}",
                        rendered.text, case["error"]
                    )),
                },
                Err(problem) => match case["error"].as_str() {
                    // Where the template refuses in its own words, they must be passed on.
                    Some(error) if error.starts_with("TemplateError: ") => {
                        if !error.ends_with(&problem.problem) {
                            differences.push(format!("{name} {index}: {problem:?} for {error}"));
                        }
                    }
                    Some(_) => {}
                    None => differences.push(format!("{name} {index}: {problem:?}")),
                },
            }
        }
    }
    assert!(num_compared > 0);
    assert!(
        differences.is_empty(),
        "{} of {num_compared} differ:\n{}",
        differences.len(),
        differences.join("\n")
    );
}
