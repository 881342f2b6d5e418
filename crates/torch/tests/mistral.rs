//! Sliding windows: Mistral's predictions beside what an H200 measured, when a mask is made and for which layers, and the fields
//! that say so. Every request of two of the runs is compared in `eager.rs`, the lines of two others in `lines.rs`.

use cinch_architecture::{Architecture, Model};
use cinch_torch::eager::Event;
use cinch_torch::model::Workload;
use cinch_torch::truth;
use serde_json::{Value, json};

const MEASURED: &str = include_str!("fixtures/mistral.jsonl");

/// The least that the allocator gives. These runs lack one number that the construction of a model left behind in others.
const BLOCK: u64 = 512;

#[test]
fn every_measured_run_is_predicted() {
    let measured = truth::parse(MEASURED, "fixture").unwrap();
    assert_eq!(measured.len(), 8);
    let comparison = truth::compare(&measured).unwrap();
    for verdict in &comparison.verdicts {
        let allocated = verdict.allocated;
        let difference = allocated.predicted.abs_diff(allocated.measured.unwrap());
        assert!(difference <= BLOCK, "{}: {difference}", verdict.name);
        assert!(verdict.safe_bytes >= verdict.device.measured.unwrap());
    }
    assert_eq!(comparison.summary.reserved.worst, 0.0);
    assert!(comparison.summary.device.worst <= 0.005);
}

const LAYERS: u64 = 4;

/// A small model of a family, with fields of its own.
fn small(model: &str, fields: Value, length: u64, settings: &str) -> Workload {
    let mut arch = json!({"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
                          "num_key_value_heads": 2, "vocab_size": 101});
    if let (Value::Object(arch), Value::Object(fields)) = (&mut arch, fields) {
        arch.extend(fields);
    }
    let line = format!(
        r#"{{"case": {{"name": "small", "model": "{model}", "arch": {arch}, "batch": 3, "seq": {length}{settings}}}}}"#
    );
    let measurement = &truth::parse(&line, "test").unwrap()[0];
    measurement.case.workload().unwrap()
}

fn events(workload: &Workload) -> Vec<Event> {
    workload.trace().unwrap()
}

fn requests(workload: &Workload) -> Vec<(bool, u64)> {
    let events = events(workload);
    events
        .iter()
        .map(|event| (event.is_free, event.bytes))
        .collect()
}

/// How often two steps ask for this many bytes in this op.
fn count(workload: &Workload, op: &str, bytes: u64) -> u64 {
    events(workload)
        .iter()
        .filter(|event| !event.is_free && event.op == op && event.bytes == bytes)
        .count() as u64
}

/// A sequence that is shorter than the window is a plain causal one; one that fills it has a mask in every layer.
#[test]
fn a_mask_is_made_from_the_window_on() {
    const WINDOW: u64 = 40;
    for settings in ["", r#", "precision": "bf16""#] {
        let run = |window: Value, length| {
            small(
                "mistral-7b",
                json!({"sliding_window": window}),
                length,
                settings,
            )
        };
        let shorter = run(json!(WINDOW), WINDOW - 1);
        assert_eq!(requests(&shorter), requests(&run(json!(null), WINDOW - 1)));
        let filled = run(json!(WINDOW), WINDOW);
        let without = run(json!(null), WINDOW);
        let bytes = if settings.is_empty() { 4 } else { 2 };
        let bias = 3 * WINDOW * WINDOW * bytes;
        assert_eq!(count(&filled, "where", bias), 2 * LAYERS);
        assert_eq!(count(&without, "where", bias), 0);
    }
}

/// Eager attention has a mask anyway; that of a window takes more to make, and is as large.
#[test]
fn eager_attention_pays_for_the_window_only_while_the_mask_is_made() {
    let settings = r#", "attn": "eager", "precision": "bf16""#;
    let run = |window: Value| {
        small(
            "mistral-7b",
            json!({"sliding_window": window}),
            32,
            settings,
        )
    };
    let (windowed, plain) = (run(json!(8)), run(json!(null)));
    // Per step: the single true, the queries less the window, and two more matrices of booleans for each of two rules, less one.
    assert_eq!(
        events(&windowed).len(),
        events(&plain).len() + 2 * 2 * (1 + 1 + 3)
    );
    assert_eq!(
        windowed.predict().unwrap().peak_allocated,
        plain.predict().unwrap().peak_allocated
    );
}

/// The fp32 kernel reads the bias eight numbers at a time: rows of another length are copied into longer ones, and the first bias
/// goes before the kernel runs.
#[test]
fn rows_of_odd_length_are_padded() {
    let run = |length: u64| small("mistral-7b", json!({"sliding_window": 8}), length, "");
    let bias = |length: u64, row: u64| 3 * length * row * 4;
    for (length, row) in [(33, 40), (36, 40), (39, 40)] {
        let padded = run(length);
        let copies = count(&padded, "constant_pad_nd", bias(length, row));
        assert_eq!(copies, 2 * LAYERS, "{length}");
        let events = events(&padded);
        let copied = events
            .iter()
            .position(|event| event.op == "constant_pad_nd" && event.bytes == bias(length, row))
            .unwrap();
        assert!(events[copied + 1].is_free && events[copied + 1].op == "where");
        assert_eq!(events[copied + 1].bytes, bias(length, length));
    }
    assert_eq!(count(&run(40), "constant_pad_nd", bias(40, 40)), 0);
}

/// Qwen2's windows are off by default; where they are on, the first layers still see everything.
#[test]
fn late_layers_of_qwen_use_the_window() {
    let run = |fields: Value| small("qwen2.5-0.5b", fields, 48, r#", "precision": "bf16""#);
    let plain = run(json!({}));
    for off in [
        json!({"sliding_window": 16, "max_window_layers": 0}),
        json!({"use_sliding_window": true, "sliding_window": 16, "max_window_layers": LAYERS}),
        json!({"use_sliding_window": true, "sliding_window": 16}),
        json!({"use_sliding_window": true, "sliding_window": null, "max_window_layers": 0}),
    ] {
        assert_eq!(requests(&run(off)), requests(&plain));
    }
    let bias = 3 * 48 * 48 * 2;
    for first in 0..=LAYERS {
        let fields =
            json!({"use_sliding_window": true, "sliding_window": 16, "max_window_layers": first});
        assert_eq!(count(&run(fields), "where", bias), 2 * (LAYERS - first));
    }
}

#[test]
fn wrong_fields_are_named() {
    let sliding = json!(["full_attention", "sliding_attention"]);
    for (family, fields, wanted) in [
        (
            "mistral",
            json!({"sliding_window": 0}),
            "sliding_window is 0",
        ),
        (
            "mistral",
            json!({"sliding_window": "wide"}),
            "or null for none",
        ),
        (
            "mistral",
            json!({"sliding_window": -1}),
            "sliding_window is -1",
        ),
        (
            "qwen2",
            json!({"sliding_window": 1.5}),
            "sliding_window is 1.5",
        ),
        (
            "qwen2",
            json!({"use_sliding_window": "yes"}),
            "use_sliding_window",
        ),
        (
            "qwen2",
            json!({"max_window_layers": -1}),
            "max_window_layers is -1",
        ),
        ("qwen2", json!({"layer_types": sliding}), "layer_types[1]"),
        (
            "mistral",
            json!({"layer_types": sliding, "num_hidden_layers": 2}),
            "layer_types[1]",
        ),
        (
            "mistral",
            json!({"layer_types": sliding, "num_hidden_layers": 3}),
            "a list of 3",
        ),
        (
            "mistral",
            json!({"layer_types": ["chunked_attention"], "num_hidden_layers": 1}),
            "layer_types[0]",
        ),
    ] {
        let mut config = json!({"model_type": family});
        if let (Value::Object(config), Value::Object(fields)) = (&mut config, fields) {
            config.extend(fields);
        }
        let problem = Model::of_config(&config, "a model", "config.json")
            .unwrap_err()
            .to_string();
        assert!(problem.contains(wanted), "{problem}");
    }
    let agreed = json!({"model_type": "qwen2", "num_hidden_layers": 2, "layer_types": sliding,
                        "use_sliding_window": true, "max_window_layers": 1});
    assert!(Model::of_config(&agreed, "a model", "config.json").is_ok());
}

#[test]
fn kinds_of_layers_that_are_all_alike_are_a_window_or_none() {
    let window = |kind: &str| {
        let config = json!({"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": 16,
                            "layer_types": [kind, kind]});
        let model = Model::of_config(&config, "a model", "config.json").unwrap();
        match model.architecture {
            Architecture::Mistral(mistral) => mistral.0.window(0),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(window("sliding_attention"), Some(16));
    assert_eq!(window("full_attention"), None);
}
