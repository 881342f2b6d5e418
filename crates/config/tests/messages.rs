//! What a user reads when something is wrong: the place, the key, the value,
//! the way out. Messages are compared whole.

use std::path::Path;

use cinch_config::{Settings, Source};

fn flag(name: &str) -> Source {
    Source::Flag(name.to_owned())
}

/// The message of loading `text` as run.json and resolving it with flags.
fn message(text: &str, flags: &[(&str, &str, &str)]) -> String {
    let mut settings = Settings::new();
    let outcome = settings
        .load_text(Path::new("run.json"), text)
        .and_then(|()| {
            flags
                .iter()
                .try_for_each(|(name, key, value)| settings.set(key, value, flag(name)))
        })
        .and_then(|()| settings.resolve());
    outcome.expect_err(text).to_string()
}

#[test]
fn unknown_keys() {
    assert_eq!(
        message("{\n \"vram\": {\n  \"batchsize\": 4}}", &[]),
        "unknown key `vram.batchsize` in run.json line 3; did you mean `vram.batch_size`?"
    );
    assert_eq!(
        message("{\"training\": {\"batch_size\": 4}}", &[]),
        "unknown key `training.batch_size` in run.json line 1; did you mean `vram.batch_size`?"
    );
    assert_eq!(
        message("\"max_steps\": 4", &[]),
        "run.json is of no program that is known here: none of its keys (max_steps) says anything about a model, a batch or a length\nhint: known are cinch's own files and those of torchtune, DeepSpeed, accelerate, axolotl, LLaMA-Factory, LLaMA-Factory (v1), gated sparse attention, text embedder (Lightning), MU block attention, Hugging Face TrainingArguments, Lightning, constants of a program"
    );
    assert_eq!(
        message("\"vram\": {\"batch_size\": 4}, \"max_steps\": 4", &[]),
        "unknown key `max_steps` in run.json line 1; did you mean `training.max_steps`?"
    );
    assert_eq!(
        message("\"output\": {\"colour\": 4}", &[]),
        "unknown key `output.colour` in run.json line 1\nhint: the keys of `output` are output_dir"
    );
    assert_eq!(
        message(
            "\"plugins\": {\"colour\": 4}, \"vram\": {\"batch_size\": 4}",
            &[]
        ),
        "unknown key `plugins.colour` in run.json line 1\nhint: the sections are model, vram, training, data, output, world, lora, pytorch"
    );
    assert_eq!(
        message("{}", &[("--set", "vram.bugdet", "8gb")]),
        "unknown key `vram.bugdet` (--set); did you mean `vram.budget`?"
    );
}

#[test]
fn wrong_values() {
    assert_eq!(
        message("{\"vram\": {\n  \"batch_size\": \"four\"}}", &[]),
        "run.json line 2 column 17: `vram.batch_size` is \"four\"; expected an integer from 1 to 1048576"
    );
    assert_eq!(
        message("\"vram\": {\"batch_size\": \"4\"}", &[]),
        "run.json line 1 column 24: `vram.batch_size` is \"4\"; expected an integer from 1 to 1048576\nhint: remove the quotation marks"
    );
    assert_eq!(
        message("\"vram\": {\"use_fp16\": \"fp16\"}", &[]),
        "run.json line 1 column 22: `vram.use_fp16` is \"fp16\"; expected true or false"
    );
    assert_eq!(
        message("\"model\": {\"dropout\": 1.0}", &[]),
        "run.json line 1 column 22: `model.dropout` is 1.0; expected a number from 0 to just below 1"
    );
    assert_eq!(
        message("\"model\": {\"d_model\": [512]}", &[]),
        "run.json line 1 column 22: `model.d_model` is [512]; expected an integer from 1 to 65536"
    );
    assert_eq!(
        message("\"output\": \"here\"", &[]),
        "run.json line 1 column 11: `output` is \"here\"; expected a section, {…}, with the keys output_dir"
    );
    assert_eq!(
        message("{}", &[("--vram", "vram.budget", "-8gb")]),
        "--vram: `vram.budget` is -8gb; expected a size such as \"8gb\", \"512mb\" or 24 (GiB)\nhint: a size cannot be negative"
    );
    assert_eq!(
        message("{}", &[("--lr", "training.learning_rate", "0")]),
        "--lr: `training.learning_rate` is 0; expected a number above 0"
    );
    assert_eq!(
        message("\"training\": {\"schedule\": \"cosin\"}", &[]),
        "run.json line 1 column 26: `training.schedule` is \"cosin\"; expected one of \"linear\", \"cosine\", \"constant\", \"onecycle\"\nhint: did you mean \"cosine\"?"
    );
    for (key, value) in [
        ("training.adam_beta1", "1"),
        ("training.adam_beta2", "-0.1"),
        ("training.label_smoothing", "1"),
        ("model.vocab_size", "1"),
        ("vram.batch_size", "0"),
        ("training.learning_rate", "nan"),
        ("training.max_steps", "0"),
        ("data.val_split", "1"),
        ("data.source", ""),
    ] {
        let text = message("{}", &[("--flag", key, value)]);
        assert!(text.contains("expected"), "{key} = {value}: {text}");
    }
}

#[test]
fn two_names_that_disagree() {
    assert_eq!(
        message(
            "\"vram\": {\"use_fp16\": true,\n\"precision\": \"bf16\"}",
            &[]
        ),
        "`vram.use_fp16` (run.json line 1) means fp16, but `vram.precision` (run.json line 2) means bf16\nhint: keep one of them"
    );
    assert_eq!(
        message(
            "\"vram\": {\"checkpointing\": 4,\n\"use_gradient_checkpointing\": false}",
            &[]
        ),
        "`vram.checkpointing` (run.json line 1) means 4, but `vram.use_gradient_checkpointing` (run.json line 2) means none\nhint: keep one of them"
    );
    assert_eq!(
        message(
            "{}",
            &[
                ("--fp16", "vram.use_fp16", "true"),
                ("--precision", "vram.precision", "fp32")
            ]
        ),
        "`vram.use_fp16` (--fp16) means fp16, but `vram.precision` (--precision) means fp32\nhint: keep one of them"
    );
    assert_eq!(
        message("\"vram\": {\"batch_size\": 1}, \"vram.batch_size\": 2", &[]),
        "`vram.batch_size` (run.json line 1) means 1, but `vram.batch_size` (run.json line 1) means 2\nhint: keep one of them"
    );
}

#[test]
fn configs_of_another_model() {
    let mamba = [("--model", "model.type", "mamba")];
    assert_eq!(
        message("{\"model\": {\n\"n_heads\": 8}}", &mamba),
        "`model.n_heads` (run.json line 2) is a setting of gpt2 or gsa or mu or naics, but the model is mamba (--model)\nhint: set model.type to gpt2 or gsa or mu or naics, or leave model.n_heads out"
    );
    assert_eq!(
        message(
            "{\"model\": {\"d_state\": 8}}",
            &[("--model", "model.type", "gpt2")]
        ),
        "`model.d_state` (run.json line 1) is a setting of mamba, but the model is gpt2 (--model)\nhint: set model.type to mamba, or leave model.d_state out"
    );
    assert_eq!(
        message("{\"model\": {\"type\": \"mamba\",\n\"n_heads\": 8}}", &[]),
        "`model.n_heads` (run.json line 2) is a setting of gpt2 or gsa or mu or naics, but the model is mamba (run.json line 1)\nhint: set model.type to gpt2 or gsa or mu or naics, or leave model.n_heads out"
    );
    assert_eq!(
        message("{}", &[("--n-heads", "model.n_heads", "8")]),
        "`model.n_heads` (--n-heads) is a setting of gpt2 or gsa or mu or naics, but the model is mamba (default)\nhint: set model.type to gpt2 or gsa or mu or naics, or leave model.n_heads out"
    );
    let both = message("\"model\": {\"n_heads\": 8, \"d_state\": 16}", &[]);
    assert!(both.contains("is a setting of gpt2 or gsa"), "{both}");
}

#[test]
fn models_that_are_not_known() {
    let text = message("\"model\": {\"type\": \"nobody/knows-it\"}", &[]);
    assert!(
        text.contains("nobody/knows-it") && text.contains("(run.json line 1)"),
        "{text}"
    );
    assert!(
        text.contains("cinch trace") && text.contains("config.json"),
        "{text}"
    );
    assert_eq!(
        message(
            "\"model\": {\"type\": \"Qwen/Qwen2.5-7B\", \"size\": \"small\"}",
            &[]
        ),
        "`model.size` (run.json line 1) says nothing of Qwen/Qwen2.5-7B, whose shape its name or file gives\nhint: leave it out, or name a family that has sizes: mamba, gpt2, gsa"
    );
    assert_eq!(
        message(
            "\"per_device_train_batch_size\": 2, \"bf16\": true, \"max_steps\": 9",
            &[]
        ),
        "run.json names no model\nhint: say which with --model: a hub id, a folder, or the path of a config.json"
    );
}

#[test]
fn settings_that_do_not_go_together() {
    assert_eq!(
        message(
            "{\"model\": {\"max_seq_len\": 128},\n\"vram\": {\"max_seq_len\": 256}}",
            &[]
        ),
        "`vram.max_seq_len` = 256 (run.json line 2) does not go with `model.max_seq_len` = 128 (run.json line 1): a training sequence cannot be longer than the model's positions\nhint: raise model.max_seq_len, or lower vram.max_seq_len to 128"
    );
    assert_eq!(
        message(
            "\"training\": {\"max_steps\": 100}",
            &[("--warmup-steps", "training.warmup_steps", "200")]
        ),
        "`training.warmup_steps` = 200 (--warmup-steps) does not go with `training.max_steps` = 100 (run.json line 1): warm-up cannot be longer than the run\nhint: set training.warmup_steps to 100 or less, or raise training.max_steps"
    );
    assert_eq!(
        message("\"model\": {\"type\": \"gpt2\", \"d_model\": 256}", &[]),
        "`model.n_heads` = 12 (preset gpt2 gpt2) does not go with `model.d_model` = 256 (run.json line 1): the heads share the width evenly\nhint: set model.n_heads to a divisor of 256, such as 8"
    );
    // Its width is that of its matrix.
    assert_eq!(
        message("{\"model\": {\"type\": \"mu\", \"n_heads\": 12}}", &[]),
        "`model.n_heads` = 12 (run.json line 1) does not go with `model.d_model` = 64 (preset mu mu): the heads share the width evenly\nhint: set model.n_heads to a divisor of 64, such as 8"
    );
    assert_eq!(
        message("\"vram\": {\"checkpointing\": 9}", &[]),
        "`vram.checkpointing` = 9 (run.json line 1) does not go with `model.n_layers` = 8 (preset mamba small): no more blocks can be recomputed than there are\nhint: write \"full\" for all 8"
    );
    assert_eq!(
        message("\"vram\": {\"offload_activations\": 9}", &[]),
        "`vram.offload_activations` = 9 (run.json line 1) does not go with `model.n_layers` = 8 (preset mamba small): no more blocks can have activations in host memory than there are\nhint: write 8 for all"
    );
    assert_eq!(
        message(
            "\"training\": {\"learning_rate\": 1e-4, \"min_learning_rate\": 1e-3}",
            &[]
        ),
        "`training.min_learning_rate` = 0.001 (run.json line 1) does not go with `training.learning_rate` = 1e-4 (run.json line 1): the schedule falls from the peak to the minimum\nhint: lower training.min_learning_rate; 0 is the default"
    );
    assert_eq!(
        message(
            "\"model\": {\"size\": \"tiny\"}",
            &[("--tokenizer", "data.tokenizer", "gpt2")]
        ),
        "`model.vocab_size` = 257 (preset mamba tiny) does not go with `data.tokenizer` = gpt2 (--tokenizer): the tokenizer has tokens beyond the model's vocabulary\nhint: set model.vocab_size to 50257 or more"
    );
}

#[test]
fn unknown_sizes() {
    assert_eq!(
        message("{}", &[("--size", "model.size", "smal")]),
        "mamba has no size \"smal\" (--size); did you mean \"small\"?\nhint: sizes of mamba are tiny, small, medium-lite, medium-plus, medium-x, medium, medium-extra, large-lite, large-plus, large, xlarge, xxlarge"
    );
    assert_eq!(
        message(
            "\"model\": {\"type\": \"gpt2\", \"size\": \"colossal\"}",
            &[]
        ),
        "gpt2 has no size \"colossal\" (run.json line 1)\nhint: sizes of gpt2 are tiny, gpt2, medium, large, xl"
    );
}

#[test]
fn misspelt_variables() {
    let unknown = |name: &str| {
        let error = Settings::new().load_environment([(name, "1")]).unwrap_err();
        error.to_string()
    };
    assert_eq!(
        unknown("CINCH_TRAINING_SED"),
        "unknown environment variable CINCH_TRAINING_SED; did you mean `CINCH_TRAINING_SEED`?"
    );
    assert_eq!(
        unknown("CINCH_TRAINIG_SEED"),
        "unknown environment variable CINCH_TRAINIG_SEED; did you mean `CINCH_TRAINING_SEED`?"
    );
    assert!(unknown("CINCH_VRAM_FROBNICATE").contains("hint: unset it"));
    let wrong = Settings::new().load_environment([("CINCH_TRAINING_SEED", "x")]);
    assert_eq!(
        wrong.unwrap_err().to_string(),
        "environment CINCH_TRAINING_SEED: `training.seed` is x; expected an integer, 0 or more"
    );
}

#[test]
fn files_that_cannot_be_read() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let load = |name: &str, bytes: Option<&[u8]>| {
        let path = folder.join(name);
        if let Some(bytes) = bytes {
            std::fs::write(&path, bytes).unwrap();
        }
        let text = Settings::new().load_file(&path).unwrap_err().to_string();
        text.replace(&folder.display().to_string(), "DIR")
    };
    assert_eq!(
        load("absent.json", None),
        "DIR/absent.json does not exist\nhint: --config takes the path of a JSON, YAML, TOML or Python file, --config-path also a folder of them, seen from the current folder"
    );
    assert_eq!(
        load("", None),
        "DIR/ is a folder, not a config file\nhint: name the file inside it"
    );
    assert_eq!(
        load("latin1.json", Some(b"{\"a\": \"\xe9\"}")),
        "DIR/latin1.json is not UTF-8 text: the byte at offset 7 is no character\nhint: save the file as UTF-8"
    );
    assert_eq!(
        load("empty.json", Some(b"\n")),
        "DIR/empty.json is empty\nhint: the smallest config is {}"
    );
    assert_eq!(
        load(
            "run.yaml",
            Some(b"vram:\n  batch_size: 1\n precision: bf16\n")
        ),
        "DIR/run.yaml line 3 column 2: while parsing a block mapping, did not find expected key\nhint: keys of one section begin in the same column, are indented by spaces, and a colon is followed by a space"
    );
    assert_eq!(
        load("run.toml", Some(b"[vram]\nbatch_size = four\n")),
        "DIR/run.toml line 2 column 14: invalid boolean, expected `false`\nhint: texts need quotation marks, and sections are written [model] on a line of their own"
    );
    assert_eq!(
        load("run.py", Some(b"BATCH_SIZE = (4\n")),
        "DIR/run.py line 1 column 14: `(` is never closed\nhint: only constants, dictionaries and class attributes are read, but brackets and quotation marks must be closed"
    );
    assert_eq!(
        load("comment.toml", Some(b"# nothing\n")),
        "DIR/comment.toml is empty\nhint: the smallest config is [model]"
    );
}
