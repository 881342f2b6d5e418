//! Adapters, and what is trained whole beside them, in other programs' files.

use super::*;

/// axolotl trains the weights where `adapter` is empty, whatever a file has left of `lora_*`.
#[test]
fn a_rank_without_an_adapter_is_none_for_axolotl() {
    let rest = "lora_r: 64\nlora_alpha: 32\nlora_target_linear: true\n";
    for adapter in ["adapter:\n", ""] {
        let (config, _) = followed(&format!("{AXOLOTL}{adapter}{rest}"));
        assert_eq!(config.tuning.lora, None, "{adapter}");
    }
    let (config, _) = followed(&format!("{AXOLOTL}adapter: lora\n{rest}"));
    assert_eq!(config.tuning.lora.unwrap().rank, 64);
    // Who types a rank means it.
    let written = format!("{AXOLOTL}adapter:\n{rest}");
    let config = text("a.yaml", &written, &[("lora.rank", "4")]).unwrap();
    assert_eq!(config.tuning.lora.unwrap().rank, 4);
}

/// axolotl, LLaMA-Factory and TRL have a key each for what is trained whole beside adapters.
#[test]
fn modules_that_are_saved_whole_are_read_in_every_spelling() {
    let trl = "model_name_or_path: Qwen/Qwen2.5-0.5B\nper_device_train_batch_size: 1\nmax_length: 64\n\
               use_peft: true\nlora_r: 8\n";
    let axolotl = format!("{AXOLOTL}adapter: lora\nlora_r: 8\nlora_target_linear: true\n");
    let both: &[&str] = &["embed_tokens", "lm_head"];
    for (file, more, expected) in [
        (
            axolotl.as_str(),
            "lora_modules_to_save: [embed_tokens, lm_head]",
            both,
        ),
        (
            &axolotl,
            "lora_modules_to_save:\n  - embed_tokens\n  - lm_head",
            both,
        ),
        (&axolotl, "lora_modules_to_save:", &[]),
        (FACTORY, "additional_target: embed_tokens,lm_head", both),
        (trl, "lora_modules_to_save: [lm_head]", &both[1..]),
        (trl, "modules_to_save: [lm_head]", &both[1..]),
        (trl, "modules_to_save: '[embed_tokens, \"lm_head\"]'", both),
        (trl, "modules_to_save: '[]'", &[]),
    ] {
        let (config, told) = followed(&format!("{file}{more}\n"));
        let lora = config.tuning.lora.unwrap();
        assert_eq!(lora.modules_to_save, expected, "{more}");
        assert_eq!(told, [""; 0], "{more}");
    }
}

/// LLaMA-Factory raises what is trained to fp32, unless it is asked for pure bf16.
#[test]
fn modules_that_are_saved_whole_are_raised_where_the_program_does() {
    let of = |written: String| followed(&written).0.torch.whole_in_float32;
    let factory = format!("{FACTORY}additional_target: embed_tokens\n");
    assert!(of(format!("{factory}bf16: true\n")));
    assert!(of(factory.clone()));
    assert!(!of(format!("{factory}pure_bf16: true\n")));
    let axolotl = format!("{AXOLOTL}adapter: lora\nlora_r: 8\nlora_target_linear: true\n");
    assert!(!of(format!(
        "{axolotl}bf16: true\nlora_modules_to_save: [embed_tokens]\n"
    )));
}

/// What peft can do beside adapters and is not computed is refused by its key; what is switched
/// off is not.
#[test]
fn keys_of_peft_that_make_another_run_are_refused() {
    let trl = "model_name_or_path: Qwen/Qwen2.5-0.5B\nper_device_train_batch_size: 1\nmax_length: 64\n\
               use_peft: true\nlora_r: 8\n";
    let axolotl = format!("{AXOLOTL}adapter: lora\nlora_r: 8\nlora_target_linear: true\n");
    for (file, line) in [
        (axolotl.as_str(), "peft_trainable_token_indices: [1, 2]"),
        (&axolotl, "peft_ensure_weight_tying: true"),
        (&axolotl, "peft_layer_replication: [[0, 4], [2, 5]]"),
        (trl, "trainable_token_indices: [1]"),
        (trl, "lora: {trainable_token_indices: [1]}"),
        (trl, "lora: {ensure_weight_tying: true}"),
        (trl, "peft: {ensure_weight_tying: true}"),
        (trl, "lora: {bias: all}"),
        (trl, "lora_bias: lora_only"),
        (trl, "lora: {layers_to_transform: [0]}"),
        (trl, "lora_target_parameters: [mlp.experts]"),
    ] {
        let error = text("a.yaml", &format!("{file}{line}\n"), &[]).unwrap_err();
        let error = error.to_string();
        let key = line.split([':', '{']).map(str::trim);
        let key = key
            .filter(|part| !part.is_empty())
            .nth(usize::from(line.contains('{')));
        assert!(error.contains(key.unwrap()), "{line}: {error}");
        assert!(error.contains("not computed"), "{line}: {error}");
    }
    for (file, line) in [
        (axolotl.as_str(), "peft_ensure_weight_tying: false"),
        (&axolotl, "peft_trainable_token_indices:"),
        (trl, "lora: {bias: none, trainable_token_indices: null}"),
        (trl, "lora_bias: none"),
    ] {
        let (_, told) = followed(&format!("{file}{line}\n"));
        assert_eq!(told, [""; 0], "{line}");
    }
    let (config, _) = followed(&format!("{axolotl}peft_autocast_adapter_dtype: false\n"));
    assert!(!config.tuning.lora.unwrap().in_float32);
}

/// Without the switch TRL trains all weights, whatever rank is written.
#[test]
fn trl_s_rank_without_its_switch_is_refused() {
    let file = "model_name_or_path: Qwen/Qwen2.5-0.5B\ndataset_name: trl-lib/Capybara\n\
                per_device_train_batch_size: 1\nmax_length: 64\nlora_r: 8\n";
    let error = text("a.yaml", file, &[]).unwrap_err().to_string();
    assert!(
        error.contains("lora_r") && error.contains("use_peft"),
        "{error}"
    );
    let (config, _) = followed(&format!("{file}use_peft: true\n"));
    assert!(config.tuning.lora.is_some());
    let (config, _) = followed(&format!("{file}use_peft: false\n"));
    assert!(config.tuning.lora.is_none());
}

/// Which version of TRL runs is not in its file, and from 0.22 on a silent file means something else.
#[test]
fn what_trl_switches_on_by_itself_is_told() {
    let file = "model_name_or_path: Qwen/Qwen2.5-0.5B\ndataset_name: trl-lib/Capybara\n\
                per_device_train_batch_size: 1\nmax_length: 64\nuse_peft: true\n";
    let folder = tempfile::tempdir().unwrap();
    let told = |more: &str| {
        let path = folder.path().join("a.yaml");
        std::fs::write(&path, format!("{file}{more}")).unwrap();
        let settings = loaded(&[path.to_str().unwrap()], &[]);
        let assumed = &settings.readings()[0].assumed;
        let trl = assumed.iter().find(|sentence| sentence.contains("TRL"));
        trl.cloned().unwrap_or_default()
    };
    assert!(told("").starts_with("bf16 and gradient_checkpointing off"));
    assert!(told("fp16: true\n").starts_with("gradient_checkpointing off"));
    assert!(told("gradient_checkpointing: false\n").starts_with("bf16 off"));
    assert_eq!(told("bf16: false\ngradient_checkpointing: true\n"), "");
}
