//! Mamba as transformers runs it: predictions beside what an H200 measured, and its configurations. Every request of three of
//! the runs is compared in `eager.rs`.

use cinch_architecture::{Architecture, ArchitectureError, Model, configured};
use cinch_torch::model::Workload;
use cinch_torch::truth::{self, Measurement};
use serde_json::{Map, Value, json};

const MEASURED: &str = include_str!("fixtures/mamba.jsonl");

/// The least that the allocator gives. These runs lack one number that the construction of a model left behind in all others.
const BLOCK: u64 = 512;

fn measured() -> Vec<Measurement> {
    truth::parse(MEASURED, "fixture").unwrap()
}

/// Whether the gradient scaler left out the optimizer's step: then there is no state, and the data decided that.
fn is_skipped(measurement: &Measurement) -> bool {
    let phases = &measurement.phases;
    phases["step0.optim"].allocated <= phases["step0.clip"].allocated
}

#[test]
fn every_measured_run_is_predicted() {
    let (skipped, whole): (Vec<_>, Vec<_>) = measured().into_iter().partition(is_skipped);
    assert_eq!((skipped.len(), whole.len()), (1, 5));
    let comparison = truth::compare(&whole).unwrap();
    for verdict in &comparison.verdicts {
        let allocated = verdict.allocated;
        let difference = allocated.predicted.abs_diff(allocated.measured.unwrap());
        assert!(difference <= BLOCK, "{}: {difference}", verdict.name);
        assert!(verdict.safe_bytes >= verdict.device.measured.unwrap());
    }
    let summary = comparison.summary;
    assert_eq!((summary.reserved.worst, summary.device.worst), (0.0, 0.0));
}

/// After every phase, not only at the peak; where the scaler skipped the step, until then.
#[test]
fn every_phase_holds_what_was_measured() {
    for measurement in measured() {
        let prediction = measurement.case.workload().unwrap().predict().unwrap();
        let phases = prediction.readings.iter().take_while(|reading| {
            !is_skipped(&measurement) || reading.phase.name() != "step0.optim"
        });
        let mut count = 0;
        for reading in phases {
            let phase = measurement.phases[&reading.phase.name()];
            let what = format!("{}, {:?}", measurement.case.name, reading.phase);
            assert!(
                reading.allocated.abs_diff(phase.allocated) <= BLOCK,
                "{what}"
            );
            assert!(
                reading.peak_allocated.abs_diff(phase.peak_allocated) <= BLOCK,
                "{what}"
            );
            assert_eq!(reading.reserved, phase.reserved, "{what}");
            assert_eq!(reading.peak_reserved, phase.peak_reserved, "{what}");
            count += 1;
        }
        assert_eq!(count, if is_skipped(&measurement) { 4 } else { 11 });
    }
}

/// A run that nobody measured, with every parameter counted.
fn weights(architecture: Architecture) -> u64 {
    let mut workload = run("mamba-130m", 1, 8);
    workload.architecture = architecture;
    let weights = workload.weights().unwrap();
    weights.trainable.iter().map(|(count, _)| count).sum()
}

fn run(model: &str, batch: u64, length: u64) -> Workload {
    let line = format!(
        r#"{{"case": {{"name": "x", "model": "{model}", "batch": {batch}, "seq": {length}}}}}"#
    );
    let measurement = &truth::parse(&line, "test").unwrap()[0];
    measurement.case.workload().unwrap()
}

/// The published sizes have the parameters that their model cards say.
#[test]
fn names_stand_for_the_published_sizes() {
    for (name, parameters) in [
        ("mamba-130m", 129_135_360),
        ("mamba-370m", 371_516_416),
        ("mamba-790m", 793_204_224),
        ("mamba-1.4b", 1_372_178_432),
        ("mamba-2.8b", 2_768_345_600),
    ] {
        let architecture = configured(name, &Map::new()).unwrap().architecture;
        assert_eq!(weights(architecture), parameters, "{name}");
    }
}

fn read(fields: Value) -> Result<Architecture, ArchitectureError> {
    let mut config = json!({"model_type": "mamba"});
    let (Value::Object(config_fields), Value::Object(fields)) = (&mut config, fields) else {
        panic!("two objects")
    };
    config_fields.extend(fields);
    Model::of_config(&config, "a model", "config.json").map(|model| model.architecture)
}

/// Each field changes the number of parameters by what it stands for.
#[test]
fn a_configuration_is_read_field_by_field() {
    let (width, layers, states, kernel) = (64, 3, 4, 4);
    let count = |vocabulary: u64, inner: u64, rank: u64| {
        let convolution = inner * kernel + inner;
        let scan = inner * (rank + 2 * states) + rank * inner + inner + inner * states + inner;
        let projections = width * 2 * inner + inner * width;
        vocabulary * width + layers * (width + convolution + scan + projections) + width
    };
    let small = |fields: Value| {
        let mut config = json!({"hidden_size": width, "num_hidden_layers": layers, "vocab_size": 100, "state_size": states});
        if let (Value::Object(config), Value::Object(fields)) = (&mut config, fields) {
            config.extend(fields);
        }
        weights(read(config).unwrap())
    };
    let plain = count(100, 128, 4);
    assert_eq!(small(json!({})), plain);
    assert_eq!(small(json!({"time_step_rank": "auto"})), plain);
    assert_eq!(small(json!({"time_step_rank": 7})), count(100, 128, 7));
    assert_eq!(small(json!({"expand": 3})), count(100, 192, 4));
    assert_eq!(
        small(json!({"expand": 3, "intermediate_size": 80})),
        count(100, 80, 4)
    );
    assert_eq!(small(json!({"vocab_size": 77})), count(77, 128, 4));
    assert_eq!(small(json!({"use_conv_bias": false})), plain - layers * 128);
    assert_eq!(
        small(json!({"use_bias": true})),
        plain + layers * (256 + width)
    );
    assert_eq!(small(json!({"conv_kernel": 1})), plain - layers * 128 * 3);
    assert_eq!(
        small(json!({"tie_word_embeddings": false})),
        plain + 100 * width
    );
    assert_eq!(small(json!({"residual_in_fp32": false})), plain);
}

/// What the fields change besides parameters runs to its end and leaves nothing behind.
#[test]
fn every_variant_runs() {
    let mut peaks = Vec::new();
    for fields in [
        json!({}),
        json!({"residual_in_fp32": false}),
        json!({"use_bias": true, "use_conv_bias": false, "tie_word_embeddings": false}),
        json!({"conv_kernel": 1, "state_size": 1, "time_step_rank": 1}),
    ] {
        for precision in ["fp32", "amp_bf16", "amp_fp16", "bf16", "fp16"] {
            for adapters in [
                "",
                r#", "lora": {"r": 4, "targets": ["in_proj", "x_proj", "dt_proj"]}"#,
            ] {
                for checkpointing in [false, true] {
                    let mut arch =
                        json!({"hidden_size": 48, "num_hidden_layers": 2, "vocab_size": 101});
                    if let (Value::Object(arch), Value::Object(fields)) = (&mut arch, &fields) {
                        arch.extend(fields.clone());
                    }
                    let line = format!(
                        r#"{{"case": {{"name": "x", "model": "mamba-130m", "arch": {arch}, "batch": 2, "seq": 16,
                            "precision": "{precision}", "ckpt": {checkpointing}{adapters}}}}}"#
                    );
                    let line = line.replace('\n', " ");
                    let case = &truth::parse(&line, "test").unwrap()[0].case;
                    let prediction = case.workload().unwrap().predict().unwrap();
                    let ends: Vec<u64> = prediction
                        .readings
                        .iter()
                        .filter(|reading| reading.phase.name().ends_with("end"))
                        .map(|reading| reading.requested)
                        .collect();
                    assert_eq!(ends[0], ends[1], "{line}");
                    peaks.push(prediction.peak_allocated);
                }
            }
        }
    }
    assert!(peaks.iter().all(|peak| *peak > 0));
}

#[test]
fn wrong_fields_are_named() {
    for (fields, wanted) in [
        (json!({"hidden_size": 0}), "hidden_size is 0"),
        (json!({"state_size": "many"}), "state_size"),
        (json!({"state_size": 4096}), "1024"),
        (json!({"time_step_rank": "half"}), "auto"),
        (json!({"time_step_rank": -1}), "time_step_rank is -1"),
        (json!({"expand": 1 << 20, "hidden_size": 1 << 20}), "expand"),
        (json!({"expand": 1.5}), "expand is 1.5"),
        (json!({"use_bias": 1}), "true or false"),
        (
            json!({"num_hidden_layers": 1u64 << 40}),
            "num_hidden_layers",
        ),
        (json!({"conv_kernel": []}), "conv_kernel"),
    ] {
        let problem = read(fields).unwrap_err().to_string();
        assert!(problem.contains(wanted), "{problem}");
    }
}

/// A loop is as long as the sequence in every layer: too long a one is refused, not tried.
#[test]
fn endless_loops_and_absurd_sizes_are_refused() {
    assert!(run("mamba-130m", 1, 1 << 15).predict().is_err());
    let mut deep = run("mamba-130m", 1, 1 << 14);
    deep.architecture = read(json!({"num_hidden_layers": 4096})).unwrap();
    let problem = deep.predict().unwrap_err().to_string();
    assert!(problem.contains("timesteps"), "{problem}");
    // As are sizes that no card has, before they are multiplied out; what is left ends in a number.
    let wide = |batch: u64, states: u64| {
        let mut wide = run("mamba-130m", batch, 4);
        wide.architecture = read(
            json!({"hidden_size": 1 << 18, "intermediate_size": 1 << 20, "state_size": states,
                                        "num_hidden_layers": 64, "vocab_size": 1 << 20}),
        )
        .unwrap();
        wide
    };
    assert!(wide(1 << 26, 1024).predict().is_err());
    let largest = wide(1 << 16, 1024);
    assert!(largest.predict().unwrap().out_of_memory.is_some());
    assert!(largest.profile().unwrap().peak.bytes > 1 << 50);
}
