//! An encoder alone: its vectors against PyTorch's, and what the files of sentence-transformers say
//! of them. The model and the expected values are in `fixtures/sentences`, with the script that made
//! them.

use std::fs;
use std::path::{Path, PathBuf};

use cinch_architecture::{Architecture, Bert};
use cinch_config::{Settings, Source};
use cinch_data::{EncoderTokenizer, Tokenizer, TokenizerSpec};
use cinch_engine::EngineOptions;
use cinch_graph::{DType, Target};
use cinch_model::Pooling;
use cinch_train::{Embedder, EmbedderOptions, SentenceForm};
use cinch_weights::WeightFiles;

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/sentences")
}

fn encoder() -> Bert {
    let mut settings = Settings::new();
    let name = fixture().display().to_string();
    let source = Source::Flag("test".to_owned());
    settings.set("model.type", &name, source).unwrap();
    match settings.resolve().unwrap().model {
        Architecture::Bert(encoder) => encoder,
        other => panic!("{other:?}"),
    }
}

/// What the encoder makes of the fixture's texts, `at_once` of them.
fn embedded(pooling: Pooling, at_once: usize, target: Target) -> Vec<f32> {
    let folder = fixture();
    let encoder = encoder();
    let form = SentenceForm {
        pooling,
        ..SentenceForm::of(&folder, &encoder).unwrap()
    };
    let files = WeightFiles::open(&folder).unwrap();
    let options = EmbedderOptions {
        texts: at_once,
        compute: DType::F32,
        target,
        engine: EngineOptions::default(),
    };
    let mut embedder = Embedder::of_sentences(&encoder, &form, &files, &options).unwrap();
    let tokenizer = TokenizerSpec::File(folder.join("tokenizer.json"));
    let tokenizer = Tokenizer::load(&tokenizer).unwrap();
    let tokenizer = EncoderTokenizer::new(&tokenizer);
    let texts = fs::read_to_string(folder.join("texts.txt")).unwrap();
    let read = |text: &str| vec![tokenizer.encode(text, form.longest).unwrap().ids];
    let tokens: Vec<Vec<Vec<i32>>> = texts.lines().map(read).collect();
    let mut shares = Vec::new();
    let found = embedder.embed(tokens.iter().map(Vec::as_slice), &mut |share| {
        shares.push(share);
    });
    assert!(shares.is_sorted(), "{shares:?}");
    assert_eq!(shares.last(), Some(&1.0));
    found.unwrap()
}

fn is_as_in_pytorch(target: Target) {
    let expected = WeightFiles::open(&fixture().join("expected.safetensors")).unwrap();
    for (pooling, name) in [(Pooling::Mean, "average"), (Pooling::First, "first")] {
        let tensor = expected.tensor(name).unwrap();
        let rows = tensor.rows();
        let mut wanted = vec![0.0; rows * tensor.row_elements()];
        expected.read_f32(name, 0..rows, &mut wanted).unwrap();
        for at_once in [1, 4, 16] {
            let found = embedded(pooling, at_once, target);
            assert_eq!(found.len(), wanted.len());
            for (index, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
                let close = (found - wanted).abs() < 1e-4;
                assert!(close, "{name} {at_once} {index}: {found} for {wanted}");
            }
        }
    }
}

/// Texts of all lengths, so that some share a run and some fill one.
#[test]
fn vectors_are_those_of_pytorch() {
    is_as_in_pytorch(Target::Cpu);
}

#[test]
#[ignore = "needs a GPU"]
fn vectors_on_a_gpu_are_those_of_pytorch() {
    is_as_in_pytorch(Target::Cuda);
}

/// A model's folder, with the files that say how sentences become vectors.
struct Folder(tempfile::TempDir);

const ENCODER: &str = r#"{"path": "", "type": "sentence_transformers.models.Transformer"}"#;
const POOLING: &str = r#"{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}"#;
const NORMALIZE: &str = r#"{"path": "2", "type": "sentence_transformers.models.Normalize"}"#;

impl Folder {
    fn new(modules: &[&str], pooling: &str) -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        folder.file("modules.json", &format!("[{}]", modules.join(",")));
        folder.file("1_Pooling/config.json", pooling);
        folder
    }

    fn file(&self, name: &str, contents: &str) {
        let path = self.0.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, contents).unwrap();
    }

    fn form(&self) -> Result<SentenceForm, String> {
        SentenceForm::of(self.0.path(), &encoder()).map_err(|error| error.to_string())
    }

    #[track_caller]
    fn is_refused(&self, parts: &[&str]) {
        let problem = self.form().unwrap_err();
        for part in parts.iter().chain(&["hint:", "sentence-transformers"]) {
            assert!(problem.contains(part), "no {part:?} in {problem}");
        }
    }
}

#[test]
fn a_folder_without_modules_gives_averages_of_length_one() {
    let form = SentenceForm::of(&fixture(), &encoder()).unwrap();
    assert_eq!((form.pooling, form.normalised), (Pooling::Mean, true));
    assert_eq!((form.longest, form.is_said), (64, false));
}

#[test]
fn pooling_and_length_are_what_the_modules_say() {
    let old = r#"{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}"#;
    let cases = [
        (
            &[ENCODER, POOLING, NORMALIZE][..],
            old,
            Pooling::First,
            true,
        ),
        (&[ENCODER, POOLING], old, Pooling::First, false),
        (
            &[ENCODER, POOLING],
            r#"{"pooling_mode": "cls"}"#,
            Pooling::First,
            false,
        ),
        (
            &[ENCODER, POOLING],
            r#"{"pooling_mode": ["mean"]}"#,
            Pooling::Mean,
            false,
        ),
        (
            &[ENCODER, POOLING],
            r#"{"embedding_dimension": 16}"#,
            Pooling::Mean,
            false,
        ),
    ];
    for (modules, pooling, expected, normalised) in cases {
        let form = Folder::new(modules, pooling).form().unwrap();
        assert_eq!(
            (form.pooling, form.normalised),
            (expected, normalised),
            "{pooling}"
        );
        assert!(form.is_said);
    }
}

#[test]
fn a_sentence_is_read_as_the_files_say() {
    let folder = Folder::new(&[ENCODER, POOLING], "{}");
    folder.file("tokenizer_config.json", r#"{"model_max_length": 1e30}"#);
    assert_eq!(folder.form().unwrap().longest, 64);
    folder.file("tokenizer_config.json", r#"{"model_max_length": 40}"#);
    assert_eq!(folder.form().unwrap().longest, 40);
    let reading = r#"{"max_seq_length": 48, "do_lower_case": true}"#;
    folder.file("sentence_bert_config.json", reading);
    let settings = r#"{"prompts": {"query": "Find: "}, "default_prompt_name": "query"}"#;
    folder.file("config_sentence_transformers.json", settings);
    let form = folder.form().unwrap();
    assert_eq!(form.longest, 48);
    assert_eq!(form.prepared("Soy BEANS"), "find: soy beans");
    assert_eq!(form.prepared("oil \t"), "find: oil");
    // A prompt that is there for those who ask for it.
    let settings = r#"{"prompts": {"query": "Find: "}, "default_prompt_name": null}"#;
    folder.file("config_sentence_transformers.json", settings);
    assert_eq!(folder.form().unwrap().prepared("Oil"), "oil");
}

#[test]
fn what_is_not_computed_is_refused_by_name() {
    let dense = r#"{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}"#;
    let refused = |modules: &[&str], pooling: &str, parts: &[&str]| {
        Folder::new(modules, pooling).is_refused(parts);
    };
    let usual = [ENCODER, POOLING];
    refused(
        &[ENCODER, POOLING, dense],
        "{}",
        &["modules.json", "module 2", "Dense"],
    );
    refused(
        &[ENCODER],
        "{}",
        &["modules.json", "no module makes one vector"],
    );
    refused(
        &usual,
        r#"{"pooling_mode_max_tokens": true}"#,
        &["pooling_mode_max_tokens"],
    );
    let both = r#"{"pooling_mode": ["cls", "mean"]}"#;
    refused(
        &usual,
        both,
        &["1_Pooling/config.json", "\"cls\"", "\"mean\""],
    );
    refused(
        &usual,
        r#"{"pooling_mode_cls_token": 1}"#,
        &["is 1", "true or false"],
    );
    refused(&usual, "{", &["1_Pooling/config.json", "EOF"]);
    let outside = r#"{"path": "../1_Pooling", "type": "sentence_transformers.models.Pooling"}"#;
    refused(
        &[ENCODER, outside],
        "{}",
        &["modules.json", "out of the folder"],
    );
    let missing = r#"{"path": "3", "type": "sentence_transformers.models.Pooling"}"#;
    refused(&[ENCODER, missing], "{}", &["3/config.json", "not there"]);

    let folder = Folder::new(&usual, r#"{"include_prompt": false}"#);
    let settings = r#"{"prompts": {"query": "Find: "}, "default_prompt_name": "query"}"#;
    folder.file("config_sentence_transformers.json", settings);
    folder.is_refused(&["1_Pooling/config.json", "include_prompt"]);
    let settings = r#"{"prompts": {}, "default_prompt_name": "query"}"#;
    folder.file("config_sentence_transformers.json", settings);
    folder.is_refused(&[
        "config_sentence_transformers.json",
        "default_prompt_name",
        "query",
    ]);
    let folder = Folder::new(&usual, "{}");
    folder.file("sentence_bert_config.json", r#"{"max_seq_length": "long"}"#);
    folder.is_refused(&["sentence_bert_config.json", "max_seq_length", "\"long\""]);
}
