//! What a configuration says becomes the run that is replayed.

use cinch_config::{Settings, Source};
use cinch_torch::configured::Configured;
use cinch_torch::eager::optimizer::Optimizer;
use cinch_torch::eager::training::Precision;
use cinch_torch::model::adapter::LoraLibrary;
use cinch_torch::model::frozen::Frozen;

fn configured(values: &[(&str, &str)]) -> Result<Configured, Box<dyn std::error::Error>> {
    let mut settings = Settings::new();
    let given = [
        ("model.type", "qwen2.5-0.5b"),
        ("vram.batch_size", "1"),
        ("lora.rank", "8"),
    ];
    for (key, value) in given.iter().chain(values) {
        settings.set(key, value, Source::Flag("--flag".to_owned()))?;
    }
    Ok(Configured::of(&settings.resolve()?, "", None)?)
}

#[test]
fn quantised_weights_and_paged_states_are_taken_over() {
    let run = configured(&[
        ("lora.quantization", "4bit"),
        ("lora.double_quantization", "true"),
        ("pytorch.precision", "bf16_amp"),
        ("pytorch.optimizer", "paged_adamw_8bit"),
    ])
    .unwrap();
    let workload = &run.workload;
    assert_eq!(workload.frozen, Frozen::FourBit { double: true });
    assert!(workload.prepared);
    assert_eq!(workload.recipe.precision, Precision::BFloat16UnderAutocast);
    assert_eq!(
        workload.recipe.optimizer,
        Optimizer::PagedAdam { eight_bit: true }
    );
    assert_eq!(
        workload.lora.as_ref().map(|lora| lora.library),
        Some(LoraLibrary::Peft)
    );
    assert!(
        run.assumed
            .iter()
            .any(|sentence| sentence.contains("prepare_model_for_kbit_training"))
    );
    let four = workload.predict().unwrap();
    let eight = configured(&[("lora.quantization", "8bit")]).unwrap();
    assert_eq!(eight.workload.frozen, Frozen::EightBit);
    let plain = configured(&[]).unwrap();
    assert_eq!(plain.workload.frozen, Frozen::InTheirType);
    assert!(!plain.workload.prepared);
    assert!(four.peak_reserved > 0);
}
