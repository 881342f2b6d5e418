//! Sentence embeddings of the real all-MiniLM-L6-v2 against those of PyTorch. The weights are not in
//! the repository: `examples/embedder/fetch_minilm.py` fetches them. The expected values are in
//! `fixtures/minilm`, with the script that made them.

use std::path::Path;

use cinch_architecture::Architecture;
use cinch_config::{Settings, Source};
use cinch_data::{EncoderTokenizer, Tokenizer, TokenizerSpec};
use cinch_engine::EngineOptions;
use cinch_graph::{DType, Target};
use cinch_train::{Embedder, EmbedderOptions, SentenceForm, normalised};
use cinch_weights::WeightFiles;

const WIDTH: usize = 384;

#[test]
fn sentences_are_embedded_as_in_pytorch() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = here.join("../../target/minilm");
    if !folder.join("model.safetensors").is_file() {
        #[expect(clippy::print_stderr, reason = "why a test was left out")]
        {
            eprintln!(
                "left out: {} has no model; examples/embedder/fetch_minilm.py fetches it",
                folder.display()
            );
        }
        return;
    }
    let mut settings = Settings::new();
    let source = Source::Flag("test".to_owned());
    let name = folder.display().to_string();
    settings.set("model.type", &name, source).unwrap();
    let config = settings.resolve().unwrap();
    let Architecture::Bert(encoder) = &config.model else {
        panic!("{:?}", config.model);
    };
    let form = SentenceForm::of(&folder, encoder).unwrap();
    assert!(form.normalised);
    let files = WeightFiles::open(&folder).unwrap();
    let options = EmbedderOptions {
        texts: 4,
        compute: DType::F32,
        target: Target::Cpu,
        engine: EngineOptions::default(),
    };
    let mut embedder = Embedder::of_sentences(encoder, &form, &files, &options).unwrap();
    assert_eq!(embedder.width(), WIDTH);
    let Ok(spec) = config.data.tokenizer.parse::<TokenizerSpec>();
    let tokenizer = Tokenizer::load(&spec).unwrap();
    let tokenizer = EncoderTokenizer::new(&tokenizer);
    let fixtures = here.join("tests/fixtures/minilm");
    let sentences = std::fs::read_to_string(fixtures.join("sentences.txt")).unwrap();
    let tokens: Vec<Vec<Vec<i32>>> = sentences
        .lines()
        .map(|line| vec![tokenizer.encode(line, form.longest).unwrap().ids])
        .collect();
    let found = embedder
        .embed(tokens.iter().map(Vec::as_slice), &mut |_| {})
        .unwrap();
    let found = normalised(&found, WIDTH);

    let expected = WeightFiles::open(&fixtures.join("minilm.safetensors")).unwrap();
    let rows = tokens.len();
    assert_eq!(rows, 20);
    let mut wanted = vec![0.0; rows * WIDTH];
    expected
        .read_f32("embeddings", 0..rows, &mut wanted)
        .unwrap();
    let pairs = found.chunks_exact(WIDTH).zip(wanted.chunks_exact(WIDTH));
    for (sentence, (found, wanted)) in sentences.lines().zip(pairs) {
        let cosine: f64 = found
            .iter()
            .zip(wanted)
            .map(|(a, b)| f64::from(*a) * f64::from(*b))
            .sum();
        assert!(cosine >= 0.9999, "{cosine} for {sentence}");
    }
}
