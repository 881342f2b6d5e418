//! Mistakes in other programs' files: what is refused for them, and where.

use super::*;

/// The smallest files of the three models that have programs of their own.
const SPARSE: &str = "\
model:
  d_model: 64
  n_layers: 2
gsa:
  k_base: 16
training:
  learning_rate: 1e-3
  lr_scheduler: cosine
  micro_batch_size: 2
  gradient_accumulation_steps: 4
  global_batch_size: 8
  max_seq_len: 64
";
const EMBEDDER: &str = "\
data_loader:
  batch_size: 4
model:
  lora:
    r: 8
loss:
  curvature: 1.0
training:
  trainer:
    accumulate_grad_batches: 2
";
const STAGE: &str = "anchor_level: [2, 3]\npositive_relation: [child]\nn_negatives: 24\n";
const BLOCKS: &str = "class MUConfig:\n    n_layers = 2\n    batch_size = 4\n";

/// A run of cinch's own is refused for a value that nobody can mean and for a slip of the pen, by
/// file, line, key and way out; nothing is trained in its place.
#[test]
fn mistakes_are_refused_by_cinchs_own_engine() {
    for (name, file, [was, is], parts) in [
        (
            "a.yaml",
            SPARSE,
            ["learning_rate: 1e-3", "learning_rate: -1"],
            &["a.yaml line 7 column 18", "learning_rate` is -1", "--lr"][..],
        ),
        (
            "a.yaml",
            SPARSE,
            ["lr_scheduler: cosine", "lr_scheduler: magic"],
            &["line 8", "\"magic\"", "\"cosine\"", "--schedule"],
        ),
        (
            "a.yaml",
            SPARSE,
            ["d_model: 64", "d_mdoel: 64"],
            &["`model.d_mdoel`", "line 2", "did you mean `model.d_model`"],
        ),
        (
            "a.yaml",
            SPARSE,
            ["d_model: 64", "d_model: ${width}"],
            &["line 2", "${width}", "--set model.d_model"],
        ),
        (
            "a.yaml",
            SPARSE,
            ["k_base: 16", "k_bse: 16"],
            &["`gsa.k_bse`", "did you mean `gsa.k_base`"],
        ),
        (
            "a.yaml",
            SPARSE,
            ["global_batch_size: 8", "global_batch_size: 0"],
            &["line 11", "global_batch_size` is 0", "1 or more"],
        ),
        (
            "a.yaml",
            SPARSE,
            ["  micro_batch_size: 2\n", ""],
            &["global_batch_size` is 8", "micro_batch_size beside it"],
        ),
        (
            "a.yaml",
            EMBEDDER,
            ["batches: 2", "batch: 2"],
            &["did you mean `training.trainer.accumulate_grad_batches`"],
        ),
        (
            "a.yaml",
            EMBEDDER,
            ["lora:\n    r: 8", "lora: 8"],
            &["line 4", "`model.lora` is 8", "a section"],
        ),
        (
            "01_stage.yaml",
            STAGE,
            ["anchor_level", "anchor_levels"],
            &["01_stage.yaml line 1", "did you mean `anchor_level`"],
        ),
        (
            "01_stage.yaml",
            STAGE,
            ["[child]", "{child: 1}"],
            &["line 2", "`positive_relation.child` is 1"],
        ),
        (
            "config.py",
            BLOCKS,
            ["n_layers", "n_layer"],
            &["`MUConfig.n_layer`", "did you mean `n_layers`"],
        ),
        (
            "config.py",
            BLOCKS,
            ["n_layers = 2", "n_layers = 2 * 6"],
            &["config.py line 2", "an expression", "--set model.n_layers"],
        ),
    ] {
        let read = |file: &str| {
            let mut settings = Settings::new();
            settings.load_text(Path::new(name), file).unwrap();
            settings
        };
        let right = read(file);
        right.refuse_mistakes(Matters::Training).unwrap();
        assert!(file.contains(was), "{was}");
        let wrong = read(&file.replace(was, is));
        let error = wrong.refuse_mistakes(Matters::Training);
        let error = error.unwrap_err().to_string();
        for part in parts {
            assert!(error.contains(part), "{part}: {error}");
        }
    }
}

/// What is asked of memory alone does not depend on a rate, and what is said besides stands.
#[test]
fn a_mistake_that_does_not_matter_is_not_refused() {
    let file = SPARSE.replace("lr_scheduler: cosine", "lr_scheduler: magic");
    let mut settings = Settings::new();
    settings.load_text(Path::new("a.yaml"), &file).unwrap();
    settings.refuse_mistakes(Matters::Memory).unwrap();
    assert!(settings.refuse_mistakes(Matters::Training).is_err());
    let flag = Source::Flag("--schedule".to_owned());
    settings.set("training.schedule", "linear", flag).unwrap();
    settings.refuse_mistakes(Matters::Training).unwrap();
}

/// Numbers that no program takes are refused whoever runs it, and slips are told before a figure.
#[test]
fn mistakes_in_a_model_are_not_planned_around() {
    for (file, [was, is], part) in [
        (SPARSE, ["d_model: 64", "d_model: big"], "is \"big\""),
        (SPARSE, ["d_model: 64", "d_model: -1"], "is -1"),
        (EMBEDDER, ["curvature: 1.0", "curvature: -1"], "is -1"),
        (
            SPARSE,
            ["d_model: 64", "d_model: 64\n  max_position_embeddings: 63"],
            "the model has 63 positions",
        ),
    ] {
        let read = Settings::new().load_text(Path::new("a.yaml"), &file.replace(was, is));
        let error = read.unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    let mut settings = Settings::new();
    let slip = SPARSE.replace("d_model", "d_mdoel");
    settings.load_text(Path::new("a.yaml"), &slip).unwrap();
    let told = &settings.readings()[0].not_understood;
    assert_eq!(told[0].key, "model.d_mdoel");
}
