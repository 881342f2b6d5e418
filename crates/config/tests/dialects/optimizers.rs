//! What cinch's own engine makes of optimizers, and of the rest that files say for PyTorch and
//! that bears on memory: followed, or told with what is done in its place.

use std::path::Path;

use cinch_config::{Config, Settings, Source, StateFormat};

use crate::{AXOLOTL, FACTORY};

const TUNE: &str = "model:\n  _component_: torchtune.models.llama3_2.llama3_2_1b\nbatch_size: 1\n";
const TRAINER: &str =
    "model_name_or_path: Qwen/Qwen2.5-0.5B\nper_device_train_batch_size: 1\nmax_length: 64\n";
const LIGHTNING: &str = "trainer: {max_epochs: 1, accumulate_grad_batches: 2}\n\
    model: {model_name: gpt2}\n";
const DEEPSPEED: &str = "train_micro_batch_size_per_gpu: 1\n";

fn read(name: &str, text: &str, flags: &[(&str, &str)]) -> (Settings, Config) {
    let mut settings = Settings::new();
    settings.load_text(Path::new(name), text).unwrap();
    for (key, value) in flags {
        settings
            .set(key, value, Source::Flag("--flag".to_owned()))
            .unwrap();
    }
    let config = settings.resolve().unwrap();
    (settings, config)
}

/// The keys that bear on memory and are not followed, with what is done in their place.
fn told(text: &str, flags: &[(&str, &str)]) -> Vec<String> {
    let (settings, config) = read("a.yaml", text, flags);
    let keys = settings.readings()[0].not_followed.iter();
    keys.filter_map(|key| Some(format!("{}: {}", key.key, key.instead?.told(&config)?)))
        .collect()
}

fn refused(text: &str) -> String {
    let mut settings = Settings::new();
    let loaded = settings.load_text(Path::new("a.yaml"), text);
    loaded.unwrap_err().to_string()
}

#[test]
fn states_in_eight_bits_are_followed() {
    for (file, key, words) in [
        (
            AXOLOTL,
            "optimizer",
            &[
                "adamw_bnb_8bit",
                "adamw_8bit",
                "paged_adamw_8bit",
                "adamw_torch_8bit",
                "ao_adamw_8bit",
            ][..],
        ),
        (
            FACTORY,
            "optim",
            &["adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"],
        ),
        (TRAINER, "optim", &["adamw_8bit", "adamw_torch_8bit"]),
        (
            TUNE,
            "optimizer._component_",
            &[
                "bitsandbytes.optim.PagedAdamW8bit",
                "bitsandbytes.optim.AdamW8bit",
                "torchao.prototype.low_bit_optim.AdamW8bit",
            ],
        ),
        (
            LIGHTNING,
            "optimizer.class_path",
            &["bitsandbytes.optim.AdamW8bit"],
        ),
        (
            LIGHTNING,
            "optimizer._target_",
            &["bitsandbytes.optim.PagedAdamW8bit"],
        ),
        (
            "model_name: gpt2\nbatch_size: 1\n",
            "optimizer",
            &["adamw_8bit", "AdamW_bnb_8bit"],
        ),
    ] {
        for word in words {
            let text = match key.split_once('.') {
                Some((section, key)) => format!("{file}{section}:\n  {key}: {word}\n"),
                None => format!("{file}{key}: {word}\n"),
            };
            let (settings, config) = read("a.yaml", &text, &[]);
            assert_eq!(config.batch.states, StateFormat::EightBit, "{text}");
            let explained = settings.explain();
            let states = explained
                .iter()
                .find(|one| one.key == "vram.optimizer_states");
            let source = states.unwrap().source.to_string();
            let line = text.lines().count();
            assert_eq!(source, format!("a.yaml line {line}"), "{text}");
        }
    }
    for word in ["adamw_torch", "paged_adamw_32bit", "sgd"] {
        let (_, config) = read("a.yaml", &format!("{AXOLOTL}optimizer: {word}\n"), &[]);
        assert_eq!(config.batch.states, StateFormat::Fp32, "{word}");
    }
}

#[test]
fn what_is_said_of_states_themselves_outweighs_an_optimizer() {
    let text = format!("{AXOLOTL}optimizer: adamw_bnb_8bit\n");
    for (key, value, states) in [
        ("vram.optimizer_states", "fp32", StateFormat::Fp32),
        ("vram.optimizer_states", "weights", StateFormat::Weights),
        ("pytorch.optimizer", "adamw", StateFormat::Fp32),
    ] {
        let (_, config) = read("a.yaml", &text, &[(key, value)]);
        assert_eq!(config.batch.states, states, "{key} {value}");
    }
    let mut settings = Settings::new();
    settings.load_text(Path::new("a.yaml"), &text).unwrap();
    let own = "vram: {optimizer_states: fp32}\n";
    settings.load_text(Path::new("own.yaml"), own).unwrap();
    let states = settings.resolve().unwrap().batch.states;
    assert_eq!(states, StateFormat::Fp32);
}

/// The replay does not know torchao's, and a prediction is refused as before.
#[test]
fn states_that_are_not_replayed_are_no_prediction() {
    for text in [
        format!("{AXOLOTL}optimizer: adamw_torch_8bit\n"),
        format!("{TUNE}optimizer:\n  _component_: torchao.optim.AdamW8bit\n"),
    ] {
        let (settings, _) = read("a.yaml", &text, &[]);
        let error = settings.refuse_not_predicted().unwrap_err().to_string();
        assert!(error.contains("states of this optimizer"), "{error}");
    }
    for text in [
        format!("{AXOLOTL}optimizer: adamw_torch_4bit\n"),
        format!("{AXOLOTL}optimizer: muon\n"),
        format!("{FACTORY}optim: adafactor\n"),
        format!("{TUNE}optimizer:\n  _component_: torch.optim.Adagrad\n"),
        format!("{LIGHTNING}optimizer:\n  class_path: torch.optim.Adagrad\n"),
    ] {
        let error = refused(&text);
        assert!(error.contains("states of this optimizer"), "{error}");
    }
}

#[test]
fn an_optimizer_in_whose_place_adamw_runs_is_told() {
    let sgd = format!("{AXOLOTL}optimizer: sgd\n");
    assert_eq!(
        told(&sgd, &[]),
        ["optimizer: it is AdamW here, with fp32 states"]
    );
    assert_eq!(
        told(&sgd, &[("vram.optimizer_states", "8bit")]),
        ["optimizer: it is AdamW here, with 8bit states"]
    );
    let paged = format!("{AXOLOTL}optimizer: paged_adamw_8bit\n");
    assert_eq!(
        told(&paged, &[]),
        [
            "optimizer: optimizer states stay on the device here; --offload keeps them in host memory"
        ]
    );
    assert_eq!(told(&paged, &[("vram.use_cpu_offload", "true")]), [""; 0]);
    for word in ["adamw_torch_fused", "adamw_bnb_8bit"] {
        let text = format!("{AXOLOTL}optimizer: {word}\n");
        assert_eq!(told(&text, &[]), [""; 0], "{word}");
    }
    // A word that the script itself makes something of.
    let (settings, _) = read(
        "a.yaml",
        "model_name: gpt2\nbatch_size: 1\noptimizer: lion\n",
        &[],
    );
    assert_eq!(settings.readings()[0].not_understood[0].key, "optimizer");
}

#[test]
fn what_files_keep_elsewhere_and_a_run_here_does_not_is_told() {
    let model = ("model.type", "gpt2");
    for (text, key, part, flag) in [
        (
            format!("{AXOLOTL}activation_offloading: true\n"),
            "activation_offloading",
            "--offload-activations",
            ("vram.offload_activations", "2"),
        ),
        (
            format!("{TUNE}enable_activation_offloading: true\n"),
            "enable_activation_offloading",
            "--offload-activations",
            ("vram.offload_activations", "2"),
        ),
        (
            format!("{TUNE}optimizer_in_bwd: true\n"),
            "optimizer_in_bwd",
            "--update-in-backward",
            ("vram.update_in_backward", "true"),
        ),
        (
            format!(
                "{DEEPSPEED}zero_optimization: {{stage: 2, offload_optimizer: {{device: cpu}}}}\n"
            ),
            "zero_optimization.offload_optimizer.device",
            "--offload",
            ("vram.use_cpu_offload", "true"),
        ),
        (
            "distributed_type: DEEPSPEED\ncompute_environment: LOCAL_MACHINE\n\
             deepspeed_config: {zero_stage: 2, offload_optimizer_device: cpu}\n"
                .to_owned(),
            "deepspeed_config.offload_optimizer_device",
            "--offload",
            ("vram.use_cpu_offload", "true"),
        ),
    ] {
        let flags = match text.contains("base_model") || text.contains("_component_") {
            true => vec![],
            false => vec![model],
        };
        let lines = told(&text, &flags);
        let [line] = lines.as_slice() else {
            panic!("{text}: {lines:?}");
        };
        assert!(line.starts_with(key) && line.contains(part), "{line}");
        let followed = [flags, vec![flag]].concat();
        assert_eq!(told(&text, &followed), [""; 0], "{text}");
    }
}

#[test]
fn masters_that_a_program_does_not_have_are_told() {
    let full = format!("{AXOLOTL}bf16: auto\n");
    assert_eq!(
        told(&full, &[]),
        [
            "bf16: what is trained has fp32 masters here; --master-weights false --optimizer-states weights trains without"
        ]
    );
    let eight = format!("{full}optimizer: adamw_bnb_8bit\n");
    let lines = told(&eight, &[]);
    assert!(!lines[0].contains("--optimizer-states"), "{lines:?}");
    assert_eq!(
        told(&full, &[("training.master_weights", "false")]),
        [""; 0]
    );
    assert_eq!(told(&full, &[("vram.precision", "fp32")]), [""; 0]);
    // Adapters are in fp32 there too, but not what is trained whole beside them.
    let lora = format!("{full}adapter: lora\nlora_r: 8\nlora_target_linear: true\n");
    assert_eq!(told(&lora, &[]), [""; 0]);
    let whole = format!("{lora}lora_modules_to_save: [lm_head]\n");
    assert_eq!(told(&whole, &[]).len(), 1);
    // Who divides states keeps masters; LLaMA-Factory raises what is trained.
    assert_eq!(told(&full, &[("world.shard", "zero2")]), [""; 0]);
    let factory = FACTORY.replace("lora\n", "full\n");
    assert_eq!(told(&format!("{factory}bf16: true\n"), &[]), [""; 0]);
    assert_eq!(told(&format!("{factory}pure_bf16: true\n"), &[]).len(), 1);
    assert_eq!(told(&format!("{TUNE}dtype: bf16\n"), &[]).len(), 1);
    assert_eq!(told(&format!("{TUNE}dtype: fp32\n"), &[]), [""; 0]);
}

/// FSDP is switched on with words, which say how much of the run is divided, and where it lies.
#[test]
fn the_words_of_fsdp_are_read() {
    for (words, sharding) in [
        ("full_shard auto_wrap", "fsdp"),
        ("[full_shard, auto_wrap]", "fsdp"),
        ("shard_grad_op auto_wrap", "zero2"),
        ("no_shard", "ddp"),
    ] {
        for file in [AXOLOTL, TRAINER, FACTORY] {
            let (_, config) = read("a.yaml", &format!("{file}fsdp: {words}\n"), &[]);
            assert_eq!(config.torch.sharding.name(), sharding, "{words}");
        }
    }
    for text in [
        format!("{TRAINER}fsdp: full_shard offload\n"),
        format!("{AXOLOTL}fsdp: [full_shard, offload]\n"),
        format!("{TRAINER}fsdp: full_shard\nfsdp_config: {{offload_params: true}}\n"),
    ] {
        let error = refused(&text);
        assert!(error.contains("parameters in host memory"), "{error}");
    }
    let text =
        format!("{TRAINER}fsdp: full_shard\nfsdp_config: {{activation_checkpointing: true}}\n");
    let (_, config) = read("a.yaml", &text, &[]);
    assert_eq!(
        config.batch.checkpointing,
        cinch_config::Checkpointing::Full
    );
}

#[test]
fn arguments_of_an_optimizer_are_told() {
    let (settings, _) = read(
        "a.yaml",
        &format!("{TRAINER}optim_args: \"betas=(0.9, 0.99)\"\n"),
        &[],
    );
    let key = &settings.readings()[0].not_followed[0];
    assert_eq!((key.key.as_str(), key.instead), ("optim_args", None));
}
