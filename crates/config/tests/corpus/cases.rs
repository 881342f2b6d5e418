//! What is changed in each file of the corpus, and what the text must become.
//!
//! Keys are separated by `/`. The third column occurs once in the file and is
//! what the change replaces by the fourth: the whole file must come out as that
//! replacement makes it, byte for byte.

use Value::{Bool as B, Null, Number as N, Text as T};

#[derive(Clone, Copy, Debug)]
pub enum Value {
    Number(&'static str),
    Text(&'static str),
    Bool(bool),
    Null,
}

pub type Change = (&'static str, Value, &'static str, &'static str);

#[rustfmt::skip]
pub const CASES: &[(&str, &[Change])] = &[
    // ------------------------------------------------------------ YAML
    ("yaml/guide001_low_memory.yaml", &[
        ("training/micro_batch_size", N("4"), "micro_batch_size: 2 ", "micro_batch_size: 4 "),
        ("training/gradient_accumulation_steps", N("16"), "steps: 32 ", "steps: 16 "),
        ("training/precision", T("fp16"), "precision: bf16", "precision: fp16"),
        ("training/gradient_checkpointing", B(false), "checkpointing: true", "checkpointing: false"),
        ("training/learning_rate", N("1e-4"), " learning_rate: 3.0e-4", " learning_rate: 1.0e-4"),
        ("gsa/k_base", N("256"), "k_base: 512", "k_base: 256"),
        ("training/compile", B(true), "multiplier: 10\n", "multiplier: 10\n  compile: true\n"),
    ]),
    ("guide004/config.yaml", &[
        ("data_loader/batch_size", N("22"), "batch_size: 45 ", "batch_size: 22 "),
        ("training/trainer/accumulate_grad_batches", N("10"), "batches: 5 ", "batches: 10 "),
        ("training/trainer/precision", T("bf16-mixed"), "\"16-mixed\"", "\"bf16-mixed\""),
        ("model/lora/r", N("16"), "{r: 8,", "{r: 16,"),
        ("model/lora/bias", T("none"), "dropout: 0.1}", "dropout: 0.1, bias: none}"),
        ("data_loader/tokenization/padding", T("longest"), "padding: max_length ", "padding: longest "),
    ]),
    ("guide004/text_curriculum/01_stage.yaml", &[
        ("n_negatives", N("16"), "n_negatives: 24", "n_negatives: 16"),
        ("n_positives", N("8"), "n_positives: 32 ", "n_positives: 8 "),
    ]),
    ("guide004/text_curriculum/02_stage.yaml", &[
        ("n_negatives", N("12"), "n_negatives: 8", "n_negatives: 12"),
    ]),
    ("guide004/text_curriculum/03_stage.yaml", &[
        ("n_negatives", N("12"), "n_negatives: 8", "n_negatives: 12"),
        ("n_hard", N("2"), "_negatives: 8", "_negatives: 8\nn_hard: 2"),
    ]),
    ("guide004/text_curriculum/04_stage.yaml", &[
        ("distance_margin", N("2.5"), "margin: 2.0", "margin: 2.5"),
    ]),
    ("guide004/text_curriculum/05_stage.yaml", &[
        ("name", T("last"), "\"05_stage\"", "\"last\""),
    ]),
    ("yaml/own_sections.yaml", &[
        ("vram/batch_size", N("1"), "batch_size: 4 ", "batch_size: 1 "),
        ("vram/precision", T("bf16"), "precision: fp32\n", "precision: bf16\n"),
        ("training/max_steps", N("20000"), "1_000", "20_000"),
        ("model/dropout", N("0.1"), "n_heads: 8\n", "n_heads: 8\n    dropout: 0.1\n"),
        ("output/output_dir", T("runs/a"), "max_steps: 1_000\n", "max_steps: 1_000\noutput:\n    output_dir: runs/a\n"),
    ]),
    ("yaml/anchors_and_merges.yaml", &[
        ("finetune/batch_size", N("1"), "batch_size: 2 ", "batch_size: 1 "),
        ("train/max_seq_len", N("256"), "max_seq_len: *seq", "max_seq_len: 256"),
        ("train/log_every", N("5"), "log_every: 10", "log_every: 5"),
        ("finetune/workers", N("0"), "max_seq_len: 512\n", "max_seq_len: 512\n  workers: 0\n"),
    ]),
    ("yaml/flow_maps.yaml", &[
        ("vram/batch_size", N("16"), "{batch_size: 4,", "{batch_size: 16,"),
        ("vram/precision", T("bf16"), "precision: fp16}", "precision: bf16}"),
        ("model/dropout", N("0"), "dropout: 0.1\n", "dropout: 0\n"),
        ("model/n_heads", N("8"), "dropout: 0.1", "dropout: 0.1,\n  n_heads: 8"),
        ("training/seed", N("3"), "max_steps: 10 }", "max_steps: 10, seed: 3 }"),
        ("empty/now", B(false), "empty: {}", "empty: {now: false}"),
        ("run/seed", Null, "seed: 7,", "seed: null,"),
    ]),
    ("yaml/quoted_numbers.yaml", &[
        ("env/BATCH_SIZE", N("2"), "\"8\"", "\"2\""),
        ("env/ACCUMULATION", N("16"), "'4'", "'16'"),
        ("env/USE_BF16", B(false), "\"True\"", "\"False\""),
        ("quoted key", N("9"), "\"quoted key\": 1", "\"quoted key\": 9"),
        ("single", T("two words"), "'single': 2", "'single': \"two words\""),
        ("trainer/max_epochs", N("3"), "\"max_steps\": 100\n", "\"max_steps\": 100\n  \"max_epochs\": 3\n"),
    ]),
    ("yaml/windows.yaml", &[
        ("vram/batch_size", N("4"), "batch_size: 2 #", "batch_size: 4 #"),
        ("vram/precision", T("bf16"), "steps: 8\r\n", "steps: 8\r\n  precision: bf16\r\n"),
        ("output/output_dir", T("runs\\gpt2"), "runs\\mamba", "\"runs\\\\gpt2\""),
        ("data/val_split", N("0.1"), "runs\\mamba\r\n", "runs\\mamba\r\ndata:\r\n  val_split: 0.1\r\n"),
    ]),
    ("yaml/byte_order_mark.yaml", &[
        ("vram/batch_size", N("8"), "batch_size: 16", "batch_size: 8"),
        ("vram/precision", T("fp32"), "precision: bf16", "precision: fp32"),
    ]),
    ("yaml/no_final_newline.yaml", &[
        ("loader/workers", N("4"), "workers: 0", "workers: 4"),
        ("training/lr", N("1e-4"), "lr: 0.001", "lr: 1.0e-4"),
        ("loader/pin", B(true), "batch: 32\n  workers: 0", "batch: 32\n  workers: 0\n  pin: true"),
    ]),
    ("yaml/comments_between.yaml", &[
        ("vram/batch_size", N("2"), "    4   \n", "    2   \n"),
        ("vram/precision", T("bf16"), "precision:   fp16      #", "precision:   bf16      #"),
        ("vram/checkpointing", T("none"), "checkpointing :  full", "checkpointing :  none"),
        ("vram/loss_chunk", N("64"), "loss_chunk:\n", "loss_chunk: 64\n"),
        ("vram/use_cpu_offload", B(true), "offload: no", "offload: yes"),
        ("training/max_steps", N("511"), "0x100", "0x1ff"),
    ]),
    ("yaml/multi_line_strings.yaml", &[
        ("batch_size", N("1"), "batch_size: 3", "batch_size: 1"),
    ]),
    ("yaml/deep.yaml", &[
        ("experiment/stages/pretrain/data/loader/train/batch_size", N("8"), "batch_size: 64", "batch_size: 8"),
        ("experiment/stages/pretrain/data/loader/train/shuffle", B(false), "shuffle: yes", "shuffle: no"),
        ("experiment/stages/pretrain/trainer/limits/steps", N("10"), "steps: 1000,", "steps: 10,"),
        ("experiment/stages/pretrain/trainer/devices", N("2"), "hours: 2.5}\n", "hours: 2.5}\n            devices: 2\n"),
        ("experiment/stages/pretrain/data/loader/eval/shuffle", B(false), "batch_size: 128\n", "batch_size: 128\n                  shuffle: false\n"),
    ]),
    ("yaml/hydra.yaml", &[
        ("trainer/precision", T("16-mixed"), "bf16-mixed", "16-mixed"),
        ("trainer/accumulate_grad_batches", N("4"), "batches: 1", "batches: 4"),
        ("trainer/gradient_clip_val", N("1.0"), ".5", "1.0"),
        ("trainer/enable_checkpointing", B(false), "True", "False"),
        ("trainer/devices", N("1"), "devices: -1", "devices: 1"),
        ("trainer/logger", B(false), "patience: 3\n", "patience: 3\n  logger: false\n"),
    ]),
    ("yaml/flat_snippet.yaml", &[
        ("micro_batch_size", N("3"), "micro_batch_size: 2 ", "micro_batch_size: 3 "),
        ("max_seq_len", N("1536"), "1024 ", "1536 "),
    ]),
    ("yaml/tags_and_nulls.yaml", &[
        ("batch", N("8"), "!!int 4", "!!int 8"),
        ("resume", T("last"), "resume: ~", "resume: last"),
        ("limit", N("5"), "limit: Null", "limit: 5"),
        ("empty", N("1"), "empty:\n", "empty: 1\n"),
        ("on_gpu", B(false), "on_gpu: On", "on_gpu: Off"),
        ("count", N("11"), "count: 10 #", "count: 11 #"),
        ("unicode", T("größer"), "größe 模型 🚀", "größer"),
    ]),
    ("yaml/compose_like.yml", &[
        ("services/small/batch", N("4"), "batch: 2", "batch: 4"),
        ("services/large/environment/BATCH", N("8"), "BATCH: 16", "BATCH: 8"),
        ("services/large/environment/OMP_NUM_THREADS", N("1"), "BATCH: 16\n", "BATCH: 16\n            OMP_NUM_THREADS: 1\n"),
        ("version", N("4"), "\"3.9\"", "\"4\""),
    ]),
    // ------------------------------------------------------------ JSON
    ("json/guide000_16gb_safe.json", &[
        ("vram/batch_size", N("4"), "\"batch_size\": 1,", "\"batch_size\": 4,"),
        ("vram/use_fp16", B(false), "\"use_fp16\": true", "\"use_fp16\": false"),
        ("training/learning_rate", N("1e-4"), "0.0003", "1e-4"),
    ]),
    ("json/guide000_balanced_16gb.json", &[
        ("vram/gradient_accumulation_steps", N("4"), "steps\": 8", "steps\": 4"),
        ("vram/loss_chunk", N("128"), "offload\": false\n", "offload\": false,\n    \"loss_chunk\": 128\n"),
    ]),
    ("json/guide000_snippet.json", &[
        ("vram/use_gradient_checkpointing", B(false), "true", "false"),
        ("vram/batch_size", N("2"), "true\n", "true,\n  \"batch_size\": 2\n"),
        ("training/seed", N("1"), "true\n}", "true\n},\n\"training\": {\n  \"seed\": 1\n}"),
    ]),
    ("json/own_sections.json", &[
        ("vram/batch_size", N("2"), "\"batch_size\": 1,", "\"batch_size\": 2,"),
        ("training/max_steps", N("2000"), "1e3", "2000"),
        ("training/adam_epsilon", N("1e-6"), "1e-08", "1e-6"),
        ("model/dropout", N("0.1"), "\"n_heads\": 8}", "\"n_heads\": 8, \"dropout\": 0.1}"),
        ("data/val_split", N("0.1"), "1e3\n  }\n", "1e3\n  },\n  \"data\": {\n    \"val_split\": 0.1\n  }\n"),
    ]),
    ("json/comments.jsonc", &[
        ("vram/batch_size", N("1"), "*/ 2,", "*/ 1,"),
        ("vram/gradient_accumulation_steps", N("16"), "steps\": 8 ", "steps\": 16 "),
        ("vram/precision", T("bf16"), ": 8 // no comma here\n", ": 8, // no comma here\n    \"precision\": \"bf16\"\n"),
        ("training/lr", N("0.1"), "\"seed\": 7,", "\"seed\": 7,\n    \"lr\": 0.1,"),
        ("model/size", T("medium"), "\"small\"", "\"medium\""),
    ]),
    ("json/minified.json", &[
        ("vram/batch_size", N("16"), "\"batch_size\":4", "\"batch_size\":16"),
        ("vram/precision", T("bf16"), "\"fp16\"", "\"bf16\""),
        ("vram/loss_chunk", N("8"), "\"fp16\"", "\"fp16\",\"loss_chunk\":8"),
        ("data/val_split", N("0.2"), "{}", "{\"val_split\": 0.2}"),
    ]),
    ("json/tabs.json", &[
        ("vram/batch_size", N("1"), ":\t4,", ":\t1,"),
        ("vram/precision", T("bf16"), ":\t256\n", ":\t256,\n\t\t\"precision\":\t\"bf16\"\n"),
        ("training/seed", N("2"), "10\n", "10,\n\t\t\"seed\": 2\n"),
    ]),
    ("json/windows.json", &[
        ("vram/batch_size", N("8"), "\"batch_size\": 2", "\"batch_size\": 8"),
        ("vram/loss_chunk", N("32"), "\"bf16\"\r\n", "\"bf16\",\r\n        \"loss_chunk\": 32\r\n"),
        ("output/output_dir", T("a\\b"), "\"runs\\\\mamba\"", "\"a\\\\b\""),
    ]),
    ("json/byte_order_mark.json", &[
        ("vram/batch_size", N("1"), "\"batch_size\": 2", "\"batch_size\": 1"),
        ("vram/precision", T("fp32"), ": 64}", ": 64, \"precision\": \"fp32\"}"),
    ]),
    ("json/bare_snippet.json", &[
        ("vram/batch_size", N("2"), ": 1\n", ": 2\n"),
        ("vram/use_fp16", B(false), "true", "false"),
    ]),
    ("json/training_arguments.json", &[
        ("per_device_train_batch_size", N("4"), "train_batch_size\": 1,", "train_batch_size\": 4,"),
        ("bf16", B(true), "\"bf16\": false", "\"bf16\": true"),
        ("fp16", B(false), "\"fp16\": true", "\"fp16\": false"),
        ("optim", T("adamw_bnb_8bit"), "adamw_torch", "adamw_bnb_8bit"),
        ("tf32", B(true), "[\"tensorboard\"]\n", "[\"tensorboard\"],\n  \"tf32\": true\n"),
    ]),
    ("json/deepspeed.json", &[
        ("train_micro_batch_size_per_gpu", N("1"), "per_gpu\": 4", "per_gpu\": 1"),
        ("fp16/enabled", B(false), "\"enabled\": true", "\"enabled\": false"),
        ("zero_optimization/offload_optimizer/device", T("cpu"), "\"none\"", "\"cpu\""),
        ("zero_optimization/reduce_bucket_size", N("1000000"), "5e8", "1000000"),
        ("optimizer/params/lr", N("1e-5"), "3e-5", "1e-5"),
    ]),
    ("json/quoted_numbers.json", &[
        ("env/BATCH", N("16"), "\"8\"", "\"16\""),
        ("env/FP16", B(false), "\"true\"", "\"false\""),
        ("env/RATE", N("3e-4"), "\"1e-4\"", "\"3e-4\""),
        ("escaped \"key\"/a.b", N("3"), "\"a.b\": 1", "\"a.b\": 3"),
        ("escaped \"key\"/", N("4"), "\"\": 2", "\"\": 4"),
    ]),
    ("json/unusual_indents.json", &[
        ("a", N("9"), "\"a\" : 1 ,", "\"a\" : 9 ,"),
        ("b/c", N("7"), "\"c\":2", "\"c\":7"),
        ("b/e", N("1"), "null", "1"),
        ("f", B(true), "false", "true"),
    ]),
    ("json/deep.json", &[
        ("stages/pretrain/loader/train/batch_size", N("8"), ": 64", ": 8"),
        ("stages/pretrain/loader/eval/shuffle", B(true), "128\n", "128,\n                    \"shuffle\": true\n"),
        ("stages/pretrain/trainer/devices", N("2"), "            }\n        }\n    },\n    \"empty", "            },\n            \"trainer\": {\n                \"devices\": 2\n            }\n        }\n    },\n    \"empty"),
        ("empty/x", N("1"), "\"empty\": {\n", "\"empty\": {\n        \"x\": 1\n"),
        ("sections/y", N("2"), "\"sections\": {}", "\"sections\": {\"y\": 2}"),
    ]),
    ("json/no_final_newline.json", &[
        ("vram/batch_size", N("2"), "4", "2"),
        ("vram/max_seq_len", N("32"), "4\n", "4,\n    \"max_seq_len\": 32\n"),
    ]),
    // ------------------------------------------------------------ TOML
    ("toml/own_sections.toml", &[
        ("vram/batch_size", N("1"), "batch_size = 4 ", "batch_size = 1 "),
        ("vram/precision", T("bf16"), "\"fp32\"", "\"bf16\""),
        ("training/max_steps", N("20000"), "1_000", "20_000"),
        ("vram/loss_chunk", N("64"), "\"fp32\"\n", "\"fp32\"\nloss_chunk = 64\n"),
        ("output/output_dir", T("runs/a"), "max_steps = 1_000\n", "max_steps = 1_000\n\n[output]\noutput_dir = \"runs/a\"\n"),
    ]),
    ("toml/dotted_keys.toml", &[
        ("vram/batch_size", N("2"), "batch_size = 4", "batch_size = 2"),
        ("vram/precision", T("bf16"), "'fp16'", "'bf16'"),
        ("training/max_steps", N("20"), "max_steps = 10", "max_steps = 20"),
        ("vram/loss_chunk", N("8"), "string\n", "string\nvram.loss_chunk = 8\n"),
        ("model/shape/depth", N("12"), "depth = 8", "depth = 12"),
        ("model/shape/heads", N("4"), "shape.depth = 8\n", "shape.depth = 8\nshape.heads = 4\n"),
    ]),
    ("toml/inline_tables.toml", &[
        ("vram/batch_size", N("8"), "batch_size = 2", "batch_size = 8"),
        ("vram/loss_chunk", N("8"), "\"bf16\" }", "\"bf16\", loss_chunk = 8 }"),
        ("model/size", T("medium"), "\"small\"", "\"medium\""),
        ("model/dropout", N("0.1"), "size=\"small\"", "size=\"small\", dropout=0.1"),
        ("training/seed", N("1"), "training = {}", "training = { seed = 1 }"),
        ("extra/nested/a/c", N("32"), "0x1F", "0x20"),
        ("extra/nested/a/b", N("2"), "b = 1", "b = 2"),
    ]),
    ("toml/numbers.toml", &[
        ("numbers/hex", N("255"), "0xDEAD_BEEF", "0xFF"),
        ("numbers/small_hex", N("255"), "0x1a", "0xff"),
        ("numbers/grouped", N("2500000"), "1_000_000", "2_500_000"),
        ("numbers/exponent", N("3e-4"), "1e-4", "3e-4"),
        ("numbers/plus", N("8"), "+7", "8"),
        ("numbers/negative", N("17"), "-17", "17"),
        ("numbers/octal", N("8"), "0o755", "8"),
    ]),
    ("toml/strings.toml", &[
        ("vram/batch_size", N("1"), "batch_size = 3", "batch_size = 1"),
        ("text/basic", T("tab\there"), "\"a \\\"quoted\\\" word\"", "\"tab\\there\""),
        ("text/literal", T("D:\\x"), "'C:\\runs'", "'D:\\x'"),
        ("text/quoted key", N("2"), "\"quoted key\" = 1", "\"quoted key\" = 2"),
        ("text/single", B(true), "'single' = 2", "'single' = true"),
    ]),
    ("toml/windows.toml", &[
        ("vram/batch_size", N("1"), "batch_size = 2 #", "batch_size = 1 #"),
        ("vram/precision", T("bf16"), "max_seq_len = 64\r\n", "max_seq_len = 64\r\nprecision = \"bf16\"\r\n"),
        ("data/val_split", N("0.1"), "max_steps = 100\r\n", "max_steps = 100\r\n\r\n[data]\r\nval_split = 0.1\r\n"),
    ]),
    ("toml/tables_of_tables.toml", &[
        ("train/loader/batch", N("8"), "batch = 16", "batch = 8"),
        ("train/loader/sampler/seed", N("2"), "seed = 1", "seed = 2"),
        ("train/loader/pin", B(true), "workers = 2\n", "workers = 2\npin = true\n"),
        ("eval/batch", N("4"), "batch = 32", "batch = 4"),
        ("test/batch", N("4"), "[eval]\nbatch = 32", "[eval]\nbatch = 32\n\n[test]\nbatch = 4"),
    ]),
    ("toml/pyproject.toml", &[
        ("tool/trainer/batch-size", N("4"), "batch-size = 8", "batch-size = 4"),
        ("tool/trainer/learning.rate", N("0.2"), "= 0.1\n", "= 0.2\n"),
        ("tool/trainer/env/THREADS", N("2"), "env]\n", "env]\nTHREADS = 2\n"),
        ("project/version", T("0.2.0"), "\"0.1.0\"", "\"0.2.0\""),
        ("tool/new/x", N("1"), "line-length = 100\n", "line-length = 100\n\n[tool.new]\nx = 1\n"),
    ]),
    ("toml/byte_order_mark.toml", &[
        ("vram/batch_size", N("4"), "batch_size = 2", "batch_size = 4"),
        ("vram/loss_chunk", N("4"), "\"fp32\"\n", "\"fp32\"\n    loss_chunk = 4\n"),
    ]),
    // ------------------------------------------------------------ Python
    ("python/guide002_config.py", &[
        ("MAX_SEQ_LENGTH", N("1024"), "LENGTH = 1536 ", "LENGTH = 1024 "),
        ("TRAINING_CONFIG/per_device_train_batch_size", N("2"), "batch_size\": 1, ", "batch_size\": 2, "),
        ("TRAINING_CONFIG/gradient_accumulation_steps", N("8"), "steps\": 16, ", "steps\": 8, "),
        ("TRAINING_CONFIG/fp16", B(false), "\"fp16\": True", "\"fp16\": False"),
        ("LORA_CONFIG/r", N("64"), "\"r\": 128", "\"r\": 64"),
        ("TRAINING_CONFIG/bf16", B(true), "\"adamw_torch\",\n", "\"adamw_torch\",\n    \"bf16\": True,\n"),
        ("BATCH_SIZE", N("1"), "from 2048\n", "from 2048\nBATCH_SIZE = 1\n"),
    ]),
    ("python/guide003_config.py", &[
        ("Config/batch_size", N("8"), "batch_size = 4 ", "batch_size = 8 "),
        ("Config/max_seq_len", N("512"), "max_seq_len = 256 ", "max_seq_len = 512 "),
        ("Config/use_fp16", B(false), "use_fp16 = True", "use_fp16 = False"),
        ("Config/grad_accum", N("2"), "use_fp16 = True\n", "use_fp16 = True\n    grad_accum = 2\n"),
    ]),
    ("python/constants.py", &[
        ("BATCH_SIZE", N("2"), "BATCH_SIZE = 8\n", "BATCH_SIZE = 2\n"),
        ("MAX_SEQ_LENGTH", N("1024"), "LENGTH=512", "LENGTH=1024"),
        ("LEARNING_RATE", N("1e-4"), "3e-4", "1e-4"),
        ("USE_BF16", B(true), "False", "True"),
        ("SEED", N("1"), "USE_BF16 = False\n", "USE_BF16 = False\nSEED = 1\n"),
    ]),
    ("python/dataclass.py", &[
        ("TrainConfig/batch_size", N("4"), "batch_size: int = 2", "batch_size: int = 4"),
        ("TrainConfig/grad_accum", N("4"), "default=8", "default=4"),
        ("TrainConfig/seq_len", N("2048"), "1_024", "2_048"),
        ("TrainConfig/fp16", B(false), "bool = True", "bool = False"),
        ("EvalConfig/batch_size", N("1"), "batch_size: int = 16", "batch_size: int = 1"),
        ("EvalConfig/precision", T("bf16"), "int = 16\n", "int = 16\n    precision: str = \"bf16\"\n"),
        ("EvalConfig/margin", N("0.5"), "int = 16\n", "int = 16\n    margin: float = 0.5\n"),
    ]),
    ("python/dict_call.py", &[
        ("config/batch_size", N("2"), "batch_size=1,", "batch_size=2,"),
        ("config/accumulation_steps", N("8"), "steps = 16,", "steps = 8,"),
        ("config/optimizer/lr", N("1e-4"), "lr=3e-4", "lr=1e-4"),
        ("config/precision", T("fp16"), "'bf16'", "'fp16'"),
        ("config/seed", N("1"), "'bf16'\n", "'bf16',\n    seed=1\n"),
        ("config/optimizer/fused", B(true), "(0.9, 0.95))", "(0.9, 0.95), fused=True)"),
        ("empty/x", N("1"), "empty = dict()", "empty = dict(x=1)"),
    ]),
    ("python/training_arguments.py", &[
        ("TrainingArguments/per_device_train_batch_size", N("4"), "batch_size=2", "batch_size=4"),
        ("TrainingArguments/bf16", B(false), "bf16=True", "bf16=False"),
        ("TrainingArguments/learning_rate", N("1e-5"), "2e-5", "1e-5"),
        ("TrainingArguments/gradient_checkpointing", B(true), "\"adamw_torch\",\n", "\"adamw_torch\",\n    gradient_checkpointing=True,\n"),
    ]),
    ("python/nested.py", &[
        ("CONFIG/training/batch_size", N("8"), "'batch_size': 4,", "'batch_size': 8,"),
        ("CONFIG/training/optimizer/lr", N("1e-4"), "'lr': 1e-3", "'lr': 1e-4"),
        ("CONFIG/training/schedule/warmup", N("200"), "0x64", "0xc8"),
        ("CONFIG/training/schedule/decay", N("5"), "None", "5"),
        ("CONFIG/model/heads", N("12"), "'layers': 12}", "'layers': 12, 'heads': 12}"),
        ("DEFAULTS/x", N("1"), "DEFAULTS = {}", "DEFAULTS = {\"x\": 1}"),
    ]),
    ("python/continuation.py", &[
        ("BATCH_SIZE", N("8"), "    4\n", "    8\n"),
        ("STEPS", N("500"), "    1000\n", "    500\n"),
        ("CLIP", N("0.5"), "CLIP = 1.0", "CLIP = 0.5"),
        ("RATE", N("1e-4"), "RATE = 1e-3", "RATE = 1e-4"),
    ]),
    ("python/windows.py", &[
        ("BATCH_SIZE", N("4"), "BATCH_SIZE = 2", "BATCH_SIZE = 4"),
        ("TRAINING/fp16", B(false), "True", "False"),
        ("TRAINING/seed", N("1"), "10\r\n", "10,\r\n    \"seed\": 1\r\n"),
        ("SEQ", N("64"), "BATCH_SIZE = 2\r\n", "BATCH_SIZE = 2\r\nSEQ = 64\r\n"),
    ]),
    ("python/tabs_no_newline.py", &[
        ("A/batch_size", N("2"), "batch_size = 1", "batch_size = 2"),
        ("A/B/width", T("y"), "'x'", "'y'"),
        ("last", N("4"), "last = 3", "last = 4"),
        ("next", N("4"), "last = 3", "last = 3\nnext = 4"),
        ("A/B/height", N("1"), "'x'\n", "'x'\n\t\theight = 1\n"),
    ]),
    ("python/conditional.py", &[
        ("STEPS", N("10"), "STEPS = 100", "STEPS = 10"),
    ]),
    ("python/mixed_quotes.py", &[
        ("SETTINGS/single", T("it's"), "'a'", "'it\\'s'"),
        ("SETTINGS/double", T("b"), "\"it's\"", "\"b\""),
        ("SETTINGS/number in text", N("4"), "'8'", "'4'"),
        ("SETTINGS/nested/deep/er", B(false), "True", "False"),
        ("SETTINGS/trailing", N("3"), "-1", "3"),
        ("SETTINGS/added", N("6"), "= 5", "= 6"),
        ("cfg/batch_size", N("2"), "batch_size = 6", "batch_size = 2"),
    ]),
    ("python/byte_order_mark.py", &[
        ("batch_size", N("4"), "batch_size = 2 ", "batch_size = 4 "),
        ("größe", N("3"), "größe = 1", "größe = 3"),
        ("modell", T("großes"), "\"模型\"", "\"großes\""),
    ]),
    ("python/lightning_module.py", &[
        ("HPARAMS/batch_size", N("8"), "\"batch_size\": 16", "\"batch_size\": 8"),
        ("TRAINER/precision", T("bf16-mixed"), "\"16-mixed\"", "\"bf16-mixed\""),
        ("TRAINER/accumulate_grad_batches", N("4"), "batches=2", "batches=4"),
        ("Model/batch_size", N("4"), "batch_size = 16", "batch_size = 4"),
        ("TRAINER/benchmark", B(true), "devices=1)", "devices=1, benchmark=True)"),
    ]),
];
