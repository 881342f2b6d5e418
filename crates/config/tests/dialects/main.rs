//! Files of other programs, and cinch's own in every format: which settings
//! they give, what is left alone, and what is said about it.

mod adapters;
mod cases;
mod mistakes;
mod optimizers;

use std::path::{Path, PathBuf};

use cinch_config::{
    Checkpointing, Config, FrozenWeights, LoraTargets, Matters, Precision, Schedule, Settings,
    ShardedPart, Source, TooLong, TorchOptimizer, TorchPrecision, Value, config_files,
};

fn corpus(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/edit")
        .join(name)
}

fn loaded(files: &[&str], flags: &[(&str, &str)]) -> Settings {
    let mut settings = Settings::new();
    for file in files {
        settings.load_file(&corpus(file)).unwrap();
    }
    for (key, value) in flags {
        let source = Source::Flag("--model".to_owned());
        settings.set(key, value, source).unwrap();
    }
    settings
}

fn text(name: &str, text: &str, flags: &[(&str, &str)]) -> Result<Config, String> {
    let mut settings = Settings::new();
    settings
        .load_text(Path::new(name), text)
        .and_then(|()| {
            flags.iter().try_for_each(|(key, value)| {
                settings.set(key, value, Source::Flag("--model".to_owned()))
            })
        })
        .and_then(|()| settings.resolve())
        .map_err(|error| error.to_string())
}

const GPT2: &[(&str, &str)] = &[("model.type", "gpt2"), ("model.size", "tiny")];

#[test]
fn one_config_in_four_languages() {
    let json = text(
        "a.json",
        "{\"model\": {\"type\": \"gpt2\", \"size\": \"tiny\"}, \"vram\": {\"batch_size\": 2, \"precision\": \"bf16\"}, \"training\": {\"max_steps\": 3000, \"lr\": 1e-3}}",
        &[],
    );
    let json = json.unwrap();
    for (name, written) in [
        (
            "a.yaml",
            "model: {type: gpt2, size: tiny}\nvram:\n  batch_size: 2\n  precision: bf16\ntraining:\n  max_steps: 3_000\n  lr: 1e-3\n",
        ),
        (
            "a.toml",
            "vram.batch_size = 0x2\nvram.precision = 'bf16'\n[model]\ntype = \"gpt2\"\nsize = \"tiny\"\n[training]\nmax_steps = 3_000\nlr = 1e-3\n",
        ),
        (
            "a.py",
            "model = dict(type='gpt2', size='tiny')\nvram = {'batch_size': 2, \"precision\": 'bf16'}\nclass training:\n    max_steps: int = 3_000\n    lr = 1e-3\n",
        ),
        (
            "a.conf",
            "model: {type: gpt2, size: tiny}\nvram: {batch_size: 2, precision: bf16}\ntraining: {max_steps: 3000, lr: 0.001}\n",
        ),
    ] {
        assert_eq!(text(name, written, &[]).unwrap(), json, "{name}");
    }
}

#[test]
fn an_empty_section_is_no_mistake() {
    let written = "vram:\n  # batch_size: 4\nmodel: {type: gpt2, size: tiny}\n";
    assert!(text("a.yaml", written, &[]).is_ok());
}

#[test]
fn unknown_keys_of_our_own_shape_stay_errors_in_every_format() {
    for (name, written) in [
        ("a.yaml", "vram:\n  batch_size: 1\n  batchsize: 2\n"),
        ("a.toml", "[vram]\nbatch_size = 1\nbatchsize = 2\n"),
    ] {
        assert_eq!(
            text(name, written, &[]).unwrap_err(),
            format!(
                "unknown key `vram.batchsize` in {name} line 3; did you mean `vram.batch_size`?"
            )
        );
    }
    assert_eq!(
        text("a.yaml", "vram:\n  batch_size: '4'\n", &[]).unwrap_err(),
        "a.yaml line 2 column 15: `vram.batch_size` is \"4\"; expected an integer from 1 to 1048576\nhint: remove the quotation marks"
    );
}

#[test]
fn guide_001() {
    let settings = loaded(&["yaml/guide001_low_memory.yaml"], &[]);
    let config = settings.resolve().unwrap();
    assert_eq!(config.model.name(), "gsa");
    assert_eq!(
        (config.model.layers(), config.model.vocabulary()),
        (8, 151_936)
    );
    let batch = &config.batch;
    assert_eq!(
        (batch.batch_size, batch.accumulation, batch.seq_len),
        (2, 32, 1024)
    );
    assert_eq!(config.torch.precision, TorchPrecision::AmpBf16);
    assert_eq!(batch.precision, Precision::Bf16);
    assert_eq!(batch.checkpointing, Checkpointing::Full);
    // The whole batch of 256 takes four GPUs.
    assert_eq!(config.torch.ranks, Some(4));
    assert_eq!(config.training.learning_rate, 3e-4);
    assert_eq!(config.training.min_learning_rate, 3e-5);
    assert_eq!(config.training.schedule, Schedule::Cosine);
    assert_eq!(config.training.eval_interval, 500);
    let [reading] = settings.readings() else {
        panic!("{:?}", settings.readings());
    };
    assert_eq!(reading.dialect, "gated sparse attention");
    assert_eq!(reading.because_of, ["gsa"]);
    assert_eq!(reading.not_understood, []);
}

#[test]
fn guide_002() {
    let settings = loaded(&["python/guide002_config.py"], &[]);
    let config = settings.resolve().unwrap();
    assert_eq!(config.model_title(), "Qwen/Qwen2.5-7B-Instruct");
    let batch = &config.batch;
    assert_eq!(
        (batch.batch_size, batch.accumulation, batch.seq_len),
        (1, 16, 1536)
    );
    assert_eq!(config.torch.precision, TorchPrecision::AmpFp16);
    assert_eq!(config.torch.optimizer, Some(TorchOptimizer::Adamw));
    assert_eq!(batch.checkpointing, Checkpointing::Full);
    let lora = config.tuning.lora.as_ref().unwrap();
    assert_eq!((lora.rank, lora.dropout), (128, 0.05));
    let layers = ["q_proj", "k_proj", "v_proj", "o_proj"].map(str::to_owned);
    assert_eq!(lora.targets, LoraTargets::Names(layers.to_vec()));
    assert_eq!(config.training.save_total_limit, 5);
    let listing = settings.explain();
    let sequence = listing
        .iter()
        .find(|one| one.key == "vram.max_seq_len")
        .unwrap();
    let place = sequence.source.to_string();
    assert!(place.ends_with("guide002_config.py line 13"), "{place}");
}

#[test]
fn guide_004() {
    let files = config_files(&corpus("guide004")).unwrap();
    assert_eq!(files.len(), 6);
    assert!(files[0].ends_with("guide004/config.yaml") && files[5].ends_with("05_stage.yaml"));
    assert_eq!(
        config_files(&corpus("guide004/config.yaml")).unwrap(),
        files
    );
    let mut settings = Settings::new();
    settings.load_files(&files).unwrap();
    let config = settings.resolve().unwrap();
    assert_eq!(config.model.name(), "naics");
    assert_eq!(
        (config.batch.batch_size, config.batch.accumulation),
        (45, 5)
    );
    assert_eq!(config.torch.precision, TorchPrecision::AmpFp16);
    assert_eq!(config.training.learning_rate, 2e-4);
    // The stage with the most negatives decides.
    let negatives = settings
        .explain()
        .into_iter()
        .find(|one| one.key == "model.negatives")
        .unwrap();
    assert_eq!(negatives.value, Value::Unsigned(24));
    let place = negatives.source.to_string();
    assert!(place.contains("01_stage.yaml"), "{place}");
    let assumed = &settings.readings()[5].assumed;
    assert!(
        assumed.iter().any(|one| one.contains("takes most memory")),
        "{assumed:?}"
    );
}

#[test]
fn training_arguments() {
    let settings = loaded(&["json/training_arguments.json"], GPT2);
    let config = settings.resolve().unwrap();
    assert_eq!(
        (config.batch.batch_size, config.batch.accumulation),
        (1, 16)
    );
    assert_eq!(config.torch.precision, TorchPrecision::AmpFp16);
    assert_eq!(config.batch.precision, Precision::Fp16);
    assert_eq!(config.training.schedule, Schedule::Cosine);
    // -1 is "not set" there.
    assert_eq!(config.training.max_steps, 100_000);
    assert_eq!(config.output.output_dir, Path::new("out/run1"));
    let optimizer = |word: &str| {
        let written = format!("num_train_epochs: 2\noptim: {word}\n");
        text("a.yaml", &written, GPT2).map(|config| config.torch.optimizer)
    };
    assert_eq!(
        optimizer("paged_adamw_8bit"),
        Ok(Some(TorchOptimizer::PagedAdamw8bit))
    );
    let refusal = optimizer("adafactor").unwrap_err();
    assert!(
        refusal.contains("a.yaml line 2") && refusal.contains("states of this optimizer"),
        "{refusal}"
    );
    for (written, precision) in [
        (
            "num_train_epochs: 1\nbf16: false\nfp16: false\n",
            TorchPrecision::Fp32,
        ),
        (
            "num_train_epochs: 1\nbf16: true\nfp16: false\n",
            TorchPrecision::AmpBf16,
        ),
        (
            "trainer: {precision: 16, accumulate_grad_batches: 2}\n",
            TorchPrecision::AmpFp16,
        ),
        (
            "trainer: {precision: bf16-mixed, accumulate_grad_batches: 2}\n",
            TorchPrecision::AmpBf16,
        ),
        (
            "num_train_epochs: 1\nfp16: false\nmixed_precision: no\n",
            TorchPrecision::Fp32,
        ),
    ] {
        let config = text("a.yaml", written, GPT2).unwrap();
        assert_eq!(config.torch.precision, precision, "{written}");
    }
}

#[test]
fn what_a_program_takes_by_default_is_not_stretched_by_ours() {
    let written = "num_train_epochs: 1\ngradient_accumulation_steps: 4\n";
    let batch = text("a.yaml", written, GPT2).unwrap().batch;
    assert_eq!((batch.batch_size, batch.accumulation), (8, 4));
    let written = "num_train_epochs: 1\nper_device_train_batch_size: 2\n";
    let batch = text("a.yaml", written, GPT2).unwrap().batch;
    assert_eq!((batch.batch_size, batch.accumulation), (2, 1));
}

#[test]
fn python_says_what_it_cannot_know() {
    let mut settings = Settings::new();
    let written = "BATCH_SIZE = 4\nMAX_SEQ_LEN = 2 ** 6\nNAME = 'x'\nUSE_FP16 = 'maybe'\n";
    settings.load_text(Path::new("c.py"), written).unwrap();
    let reading = &settings.readings()[0];
    let unread: Vec<&str> = reading
        .not_understood
        .iter()
        .map(|one| one.key.as_str())
        .collect();
    assert_eq!(unread, ["MAX_SEQ_LEN", "USE_FP16"]);
    assert_eq!(reading.num_harmless, 1);
    assert_eq!(
        text("c.py", "BATCH_SIZE = 4\nBATCH_SIZE = 8\n", GPT2).unwrap_err(),
        "`BATCH_SIZE` stands twice in c.py, on lines 1 and 2\nhint: keep one of them"
    );
    assert_eq!(
        text("c.py", "BATCH_SIZE = 4\nCONFIG = {'batch_size': 8}\n", GPT2).unwrap_err(),
        "`BATCH_SIZE` (c.py line 1) means 4, but `CONFIG.batch_size` (c.py line 2) means 8\nhint: keep one of them"
    );
}

/// The configuration of a YAML file, and the keys that training does not follow.
fn followed(written: &str) -> (Config, Vec<String>) {
    let mut settings = Settings::new();
    settings.load_text(Path::new("a.yaml"), written).unwrap();
    let told = settings.readings()[0].not_followed.iter();
    let told = told.map(|one| one.key.clone()).collect();
    (settings.resolve().unwrap(), told)
}

const AXOLOTL: &str =
    "base_model: NousResearch/Llama-3.2-1B\nmicro_batch_size: 1\nsequence_len: 64\n";
const FACTORY: &str =
    "model_name_or_path: Qwen/Qwen2.5-0.5B\nstage: sft\nfinetuning_type: lora\ncutoff_len: 64\n";

#[test]
fn what_a_run_learns_from_follows_the_file() {
    let (config, told) = followed(&format!(
        "{AXOLOTL}num_epochs: 2\nval_set_size: 0.1\ntrain_on_inputs: true\nsample_packing: true\n\
         adapter: lora\nlora_r: 8\npeft_use_rslora: true\nexcess_length_strategy: raise\n\
         chat_template: tokenizer_default\nneftune_noise_alpha:\nsave_total_limit: 4\n"
    ));
    assert_eq!(config.training.epochs, Some(2.0));
    assert_eq!(config.training.save_total_limit, 4);
    let data = &config.data;
    assert_eq!((data.val_split, data.packing), (0.1, true));
    assert!(data.train_on_inputs);
    assert_eq!(data.too_long, TooLong::Error);
    assert!(config.tuning.lora.unwrap().rank_stabilised);
    assert_eq!(told, [""; 0]);

    let (config, told) = followed(&format!(
        "{FACTORY}num_train_epochs: 2.0\nval_size: 0.2\nmax_samples: 70\ntrain_on_prompt: true\n\
         neat_packing: true\nuse_rslora: true\n"
    ));
    assert_eq!(config.training.epochs, Some(2.0));
    let data = &config.data;
    assert_eq!((data.val_split, data.packing), (0.2, true));
    assert_eq!(data.max_samples, Some(70));
    assert!(data.train_on_inputs);
    assert!(config.tuning.lora.unwrap().rank_stabilised);
    assert_eq!(told, [""; 0]);

    let (config, _) = followed(
        "model_name_or_path: Qwen/Qwen2.5-0.5B\nper_device_train_batch_size: 1\nmax_length: 64\n\
         packing: true\nuse_peft: true\nlora_r: 8\nuse_rslora: true\n",
    );
    assert!(config.data.packing);
    assert!(config.tuning.lora.unwrap().rank_stabilised);

    let written = "trainer: {max_epochs: 4, accumulate_grad_batches: 2}\n";
    let config = text("a.yaml", written, GPT2).unwrap();
    assert_eq!(config.training.epochs, Some(4.0));
}

#[test]
fn what_a_silent_file_learns_from_is_as_its_program_has_it() {
    let (config, _) = followed(AXOLOTL);
    let training = &config.training;
    assert_eq!((training.epochs, training.weight_decay), (Some(1.0), 0.0));
    assert_eq!(
        (training.schedule, training.adam_beta2),
        (Schedule::Cosine, 0.999)
    );
    assert_eq!(config.data.val_split, 0.0);
    for written in [
        FACTORY,
        "model_name_or_path: Qwen/Qwen2.5-0.5B\nper_device_train_batch_size: 1\nmax_seq_length: 64\n",
    ] {
        let (config, _) = followed(written);
        let training = &config.training;
        assert_eq!((training.epochs, training.weight_decay), (Some(3.0), 0.0));
        assert_eq!((training.warmup_steps, training.learning_rate), (0, 5e-5));
        assert_eq!(training.adam_beta2, 0.999);
        // Steps that are stated outweigh passes that are not.
        let (config, _) = followed(&format!("{written}max_steps: 7\n"));
        let training = &config.training;
        assert_eq!((training.epochs, training.max_steps), (None, 7));
    }
}

#[test]
fn what_training_does_not_follow_is_told() {
    let (config, told) = followed(&format!(
        "{AXOLOTL}optimizer: sgd\nwarmup_ratio: 0.1\n\
         chat_template: chatml\nspecial_tokens: {{pad_token: a, eos_token: b}}\nloraplus_lr_ratio: 16\n\
         loss_watchdog_threshold: 5.0\n"
    ));
    let mut told = told;
    told.sort();
    assert_eq!(
        told,
        [
            "chat_template",
            "loraplus_lr_ratio",
            "optimizer",
            "special_tokens.eos_token",
        ]
    );
    assert_eq!(config.data.val_split, 0.0);
    let (_, told) = followed(&format!("{FACTORY}template: qwen\n"));
    assert_eq!(told, ["template"]);
}

/// `lr=2e-5` and `--lr $lr` are one value, and two commands may say the same.
#[test]
fn what_a_script_says_alike_is_no_contradiction() {
    let script = "per_device_train_batch_size=4\n\
                  python a.py --model_name_or_path Qwen/Qwen2.5-0.5B --max_seq_length 64 \\\n    \
                  --per_device_train_batch_size ${per_device_train_batch_size}\n\
                  python b.py --model_name_or_path Qwen/Qwen2.5-0.5B --num_train_epochs 1\n";
    let config = text("run.sh", script, &[]).unwrap();
    assert_eq!(config.batch.batch_size, 4);
    let other = script.replacen("2.5-0.5B", "2.5-1.5B", 1);
    let error = text("run.sh", &other, &[]).unwrap_err();
    assert!(
        error.contains("stands twice in run.sh, on lines 2 and 4"),
        "{error}"
    );
}

/// `--deepspeed` without a value is a switch; what DeepSpeed is told stands in a file of another
/// flag, or in the script.
#[test]
fn deepspeed_as_a_switch_names_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let config = "{\"zero_optimization\": {\"stage\": 3}, \"bf16\": {\"enabled\": true}}";
    std::fs::write(folder.path().join("ds.json"), config).unwrap();
    let read = |flags: &str| {
        let script = format!(
            "deepspeed --num_gpus 4 main.py --model_name_or_path Qwen/Qwen2.5-0.5B \\\n    \
             --per_device_train_batch_size 2 --max_seq_len 64 {flags}\n"
        );
        let path = folder.path().join("run.sh");
        std::fs::write(&path, script).unwrap();
        let mut settings = Settings::new();
        let read = settings.load_file(&path).and_then(|()| settings.resolve());
        read.map_err(|error| error.to_string())
    };
    for flags in [
        "--deepspeed --deepspeed_config ds.json",
        "--deepspeed_config ds.json --deepspeed",
        "--deepspeed ds.json",
    ] {
        let world = read(flags).unwrap().batch.world;
        assert_eq!((world.shard, world.ranks), (ShardedPart::Weights, 4));
    }
    assert!(read("--deepspeed False").is_ok());
    for (flags, part) in [
        ("--deepspeed", "it names no file"),
        (
            "--deepspeed_config my.json",
            "`deepspeed_config: my.json` names a file",
        ),
    ] {
        let error = read(flags).unwrap_err();
        assert!(
            error.contains("run.sh line 2") && error.contains(part),
            "{error}"
        );
    }
}

/// The word is peft's name of a head, or a script's of a way to train.
#[test]
fn a_task_is_refused_for_what_it_is() {
    let read = |task: &str| {
        let written = format!("num_train_epochs: 1\ntask_type: {task}\n");
        text("a.yaml", &written, GPT2).map(|_| ())
    };
    for task in ["CAUSAL_LM", "sft", "pretrain"] {
        read(task).unwrap();
    }
    for (task, why) in [
        ("SEQ_CLS", "another head"),
        ("dpo", "not training on preferences"),
        ("riddles", "this task is not known"),
    ] {
        let error = read(task).unwrap_err();
        assert!(
            error.contains("a.yaml line 2") && error.contains(why),
            "{error}"
        );
    }
}

/// With one cycle, which is what a silent file has, it is the plain cosine.
#[test]
fn schedules_by_other_names_are_the_same() {
    for (word, schedule) in [
        ("one_cycle", Schedule::OneCycle),
        ("cosine_with_restarts", Schedule::Cosine),
    ] {
        let (config, told) = followed(&format!("{AXOLOTL}lr_scheduler: {word}\n"));
        assert_eq!((config.training.schedule, told.len()), (schedule, 0));
    }
    let (_, told) = followed(&format!(
        "{AXOLOTL}lr_scheduler: cosine_with_restarts\nlr_scheduler_kwargs: {{num_cycles: 3}}\n"
    ));
    assert_eq!(told, ["lr_scheduler_kwargs.num_cycles"]);
}

#[test]
fn samples_are_held_out_by_their_share() {
    let read = |written: &str| {
        let mut settings = Settings::new();
        settings.load_text(Path::new("a.yaml"), written).unwrap();
        let told = settings.readings()[0].not_followed.len();
        let refused = settings.refuse_mistakes(Matters::Training);
        (told, refused.map_err(|error| error.to_string()))
    };
    // A program's own name for a part of its data.
    let trainer = "model_name_or_path: Qwen/Qwen2.5-0.5B\nnum_train_epochs: 1\n";
    let named = read(&format!("{trainer}validation_split: validation\n"));
    assert_eq!(named, (1, Ok(())));
    let (_, error) = read(&format!("{FACTORY}val_size: 500\n"));
    let error = error.unwrap_err();
    for part in [
        "line 5",
        "`val_size` is 500",
        "how many they are is not read",
        "--val-split",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
}

#[test]
fn a_stage_of_another_script_makes_it_none_of_llama_factorys() {
    let dialect = |stage: &str| {
        let script = format!(
            "STAGE={stage}\npython run.py --model_name_or_path Qwen/Qwen2.5-0.5B \\\n  \
             --per_device_train_batch_size 2 --num_train_epochs 1 --stage $STAGE\n"
        );
        let mut settings = Settings::new();
        settings.load_text(Path::new("run.sh"), &script).unwrap();
        settings.readings()[0].dialect
    };
    assert_eq!(dialect("sft"), "LLaMA-Factory");
    assert_eq!(dialect("one_stage"), "Hugging Face TrainingArguments");
}

/// Weights of four bits take a quarter: scripts have a word of their own for them.
#[test]
fn scripts_made_from_qlora_are_read() {
    let read = |flags: &str| {
        let script = format!(
            "python qlora.py --model_name_or_path Qwen/Qwen2.5-0.5B --max_seq_length 64 \\\n  \
             --per_device_train_batch_size 2 --num_train_epochs 1 --lora_r 8 {flags}\n"
        );
        text("run.sh", &script, &[])
    };
    let tuning = read("--bits 4 --double_quant --lora_modules all")
        .unwrap()
        .tuning;
    assert_eq!(tuning.frozen, FrozenWeights::FourBit);
    assert!(tuning.double_quantization);
    assert_eq!(tuning.lora.unwrap().targets, LoraTargets::AllLinear);
    assert_eq!(
        read("--bits 16").unwrap().tuning.frozen,
        FrozenWeights::InTheirType
    );
    for (flag, frozen, has_adapters) in [
        ("--q_lora True", FrozenWeights::FourBit, true),
        ("--q_lora False", FrozenWeights::InTheirType, true),
        ("--train_mode qlora", FrozenWeights::FourBit, true),
        ("--train_mode lora", FrozenWeights::InTheirType, true),
        ("--train_mode full", FrozenWeights::InTheirType, false),
    ] {
        let tuning = read(flag).unwrap().tuning;
        let found = (tuning.frozen, tuning.lora.is_some());
        assert_eq!(found, (frozen, has_adapters), "{flag}");
    }
    // Firefly's own rank, where a file is silent.
    let written = "model_name_or_path: Qwen/Qwen2.5-0.5B\nper_device_train_batch_size: 1\n\
                   max_seq_length: 64\ntrain_mode: qlora\n";
    let tuning = text("a.yaml", written, &[]).unwrap().tuning;
    assert_eq!(tuning.lora.unwrap().rank, 64);
    let error = read("--spectrum_config_path a.yaml").unwrap_err();
    assert!(error.contains("a part of the weights"), "{error}");
}

/// A seed that a script draws, or a folder that it is given, is no mistake: any will do.
#[test]
fn a_seed_that_is_drawn_is_told_and_not_refused() {
    let read = |flags: &str| {
        let mut settings = Settings::new();
        let script = format!(
            "python a.py --model_name_or_path Qwen/Qwen2.5-0.5B --num_train_epochs 1 {flags}\n"
        );
        settings.load_text(Path::new("run.sh"), &script).unwrap();
        settings
    };
    for (key, flags) in [
        ("seed", "--seed $RANDOM"),
        ("output_dir", "--output_dir $1/a"),
        ("save_steps", "--save_steps $EVERY"),
    ] {
        let settings = read(flags);
        settings.refuse_mistakes(Matters::Training).unwrap();
        assert_eq!(settings.readings()[0].not_followed[0].key, key);
    }
    // A rate that nobody gave is one.
    for flags in ["--seed often", "--learning_rate $LR"] {
        assert!(read(flags).refuse_mistakes(Matters::Training).is_err());
    }
}

/// `model = load(MODEL_ID)` is an expression, and the model is known all the same.
#[test]
fn what_is_computed_from_what_another_key_says_is_no_mistake() {
    let read = |name: &str| {
        let script = format!(
            "{name} = \"Qwen/Qwen2.5-0.5B\"\nmodel = load({name})\nbatch_size = 2\nmax_length = 64\n"
        );
        let mut settings = Settings::new();
        settings.load_text(Path::new("a.py"), &script).unwrap();
        let refused = settings.refuse_mistakes(Matters::Training);
        refused.map_err(|error| error.to_string())
    };
    read("MODEL_ID").unwrap();
    let error = read("NAME").unwrap_err();
    assert!(
        error.contains("a.py line 2") && error.contains("`model` is an expression"),
        "{error}"
    );
}

/// transformers takes a share of the run for them, and none where nothing is done by steps.
#[test]
fn steps_as_a_share_of_the_run_are_told_and_not_refused() {
    let read = |written: &str| {
        let mut settings = Settings::new();
        let written = format!("{FACTORY}{written}");
        settings.load_text(Path::new("a.yaml"), &written).unwrap();
        settings
    };
    for (key, value) in [
        ("logging_steps", "0.1"),
        ("eval_steps", "0.05"),
        ("save_steps", "'0.25'"),
        ("logging_steps", "0"),
    ] {
        let settings = read(&format!("{key}: {value}\n"));
        settings.refuse_mistakes(Matters::Training).unwrap();
        assert_eq!(settings.readings()[0].not_followed[0].key, key);
    }
    for value in ["often", "1.5"] {
        let settings = read(&format!("eval_steps: {value}\n"));
        assert!(settings.refuse_mistakes(Matters::Training).is_err());
    }
}

#[test]
fn a_warm_up_is_a_share_of_the_run_where_no_steps_are_stated() {
    let warmup = |written: &str| {
        let (config, told) = followed(&format!("{FACTORY}{written}"));
        assert_eq!(told, Vec::<String>::new());
        config.training.warmup_of(250)
    };
    assert_eq!(warmup("warmup_ratio: 0.1\n"), 25);
    // In part of a step, the whole of it.
    assert_eq!(warmup("warmup_ratio: 0.01\n"), 3);
    assert_eq!(warmup("warmup_steps: 5\nwarmup_ratio: 0.1\n"), 5);
    assert_eq!(warmup("warmup_steps: 0\nwarmup_ratio: 0.1\n"), 25);
    // As newer versions have it.
    assert_eq!(warmup("warmup_steps: 0.04\n"), 10);
    assert_eq!(warmup(""), 0);
    let (config, _) = followed(AXOLOTL);
    assert_eq!(config.training.warmup_of(1000), 30);
    let (config, _) = followed(&format!("{AXOLOTL}warmup_ratio: 0.1\nmax_steps: 50\n"));
    assert_eq!(config.training.warmup_steps, 5);
}
