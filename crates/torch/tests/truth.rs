//! Predictions beside what an H200 measured.

use cinch_torch::truth::{self, Measurement, Summary, Verdict};

const PEAKS: &str = include_str!("fixtures/peaks.jsonl");
const LAYERS: &str = include_str!("fixtures/layers.jsonl");
const HELD_OUT: &str = include_str!("fixtures/held_out.jsonl");
const AUTOCAST: &str = include_str!("fixtures/autocast.jsonl");
const QWEN3: &str = include_str!("fixtures/qwen3.jsonl");
const QLORA: &str = include_str!("fixtures/qlora.jsonl");
const OPTIMIZERS: &str = include_str!("fixtures/optimizers.jsonl");
const TRAINER: &str = include_str!("fixtures/trainer.jsonl");

fn measured(text: &str) -> (Vec<Measurement>, Vec<Verdict>, Summary) {
    let measurements = truth::parse(text, "fixture").unwrap();
    let comparison = truth::compare(&measurements).unwrap();
    assert!(comparison.skipped.is_empty(), "{:?}", comparison.skipped);
    (measurements, comparison.verdicts, comparison.summary)
}

fn assert_within_the_bounds(verdicts: &[Verdict], summary: &Summary) {
    let bounds = [
        ("allocated", summary.allocated, 0.005, 0.02),
        ("reserved", summary.reserved, 0.015, 0.06),
        ("device", summary.device, 0.02, 0.06),
    ];
    for (what, spread, median, worst) in bounds {
        assert!(
            spread.median <= median && spread.worst <= worst,
            "{what}: {spread:?}"
        );
    }
    for verdict in verdicts {
        let measured = verdict.device.measured.unwrap();
        assert!(
            verdict.safe_bytes >= measured,
            "{}: {} < {measured}",
            verdict.name,
            verdict.safe_bytes
        );
    }
}

#[test]
fn every_measured_run_is_predicted_within_the_bounds() {
    let (measurements, verdicts, summary) = measured(PEAKS);
    assert_eq!(measurements.len(), 67, "68 runs, one of them compiled");
    assert_within_the_bounds(&verdicts, &summary);
    // Nearly all are exact to the byte; more than a few that are not means that a rule broke.
    let inexact = verdicts
        .iter()
        .filter(|v| v.allocated.error() != Some(0.0) || v.reserved.error() != Some(0.0));
    assert!(inexact.count() <= 8);
}

/// Runs chosen and measured after the rules were written, to find what they miss: other models, lengths, types, optimizers,
/// settings of the allocator, reentrant checkpointing, the Trainer. Their small tensors are one fewer than in the others,
/// which is most of what is left of the errors.
#[test]
fn held_out_runs_are_within_the_bounds() {
    let (_, verdicts, summary) = measured(HELD_OUT);
    assert_within_the_bounds(&verdicts, &summary);
    let exact = verdicts
        .iter()
        .filter(|verdict| verdict.reserved.error() == Some(0.0));
    assert!(exact.count() >= verdicts.len() - 12);
}

/// Reserved bytes and the card's use to the byte, but for so many runs whose addresses fell otherwise. Building such a model
/// leaves one number fewer behind than in the first measurements: a block of 512 bytes.
fn assert_exact(text: &str, runs: usize, others: usize) {
    let (_, verdicts, _) = measured(text);
    assert_eq!(verdicts.len(), runs);
    let mut inexact = 0;
    for verdict in verdicts {
        let name = &verdict.name;
        let more = verdict.allocated.measured.map(|bytes| bytes + 512);
        assert_eq!(Some(verdict.allocated.predicted), more, "{name}");
        let device = verdict.device.measured.map(|_| verdict.device);
        let errors = [Some(verdict.reserved), device].map(|both| both.and_then(|b| b.error()));
        let worst = errors
            .iter()
            .flatten()
            .fold(0.0, |most: f64, error| most.max(error.abs()));
        assert!(worst < 0.001, "{name}");
        inexact += usize::from(worst > 0.0);
    }
    assert_eq!(inexact, others);
}

/// Weights in half precision under autocast, full training and peft's adapters, with both kinds of checkpointing.
#[test]
fn half_precision_under_autocast_is_predicted_to_the_byte() {
    assert_exact(AUTOCAST, 28, 0);
}

#[test]
fn qwen3_is_predicted_to_the_byte() {
    assert_exact(QWEN3, 22, 1);
}

/// The Trainer's own loop: full training and adapters, quantised weights, accumulation, checkpointing, other optimizers.
#[test]
fn runs_of_the_trainer_are_predicted_to_the_byte() {
    let (_, verdicts, _) = measured(TRAINER);
    assert_eq!(verdicts.len(), 16);
    for verdict in verdicts {
        let more = |bytes| verdict.allocated.measured.map(|measured| measured + bytes);
        let allocated = Some(verdict.allocated.predicted);
        assert!(
            allocated == more(0) || allocated == more(512),
            "{verdict:?}"
        );
        assert_eq!(verdict.reserved.error(), Some(0.0), "{verdict:?}");
        if verdict.device.measured.is_some() {
            assert_eq!(verdict.device.error(), Some(0.0), "{verdict:?}");
        }
    }
}

/// Eight bits, paged, Lion and Adafactor, the card's use with managed memory included. The rounding of two small runs depends
/// on which block a state found.
#[test]
fn other_optimizers_are_predicted_to_the_byte() {
    let (_, verdicts, _) = measured(OPTIMIZERS);
    assert_eq!(verdicts.len(), 19);
    for verdict in verdicts {
        assert!(
            verdict.allocated.error().unwrap().abs() < 0.0002,
            "{verdict:?}"
        );
        assert_eq!(verdict.reserved.error(), Some(0.0), "{verdict:?}");
        if verdict.device.measured.is_some() {
            assert_eq!(verdict.device.error(), Some(0.0), "{verdict:?}");
        }
    }
}

/// Four bits: to the byte but for one run whose addresses fell otherwise. Eight bits: LLaMA's random weights give outliers,
/// whose columns are multiplied apart; only the data can tell.
#[test]
fn adapters_on_quantised_weights_are_predicted() {
    let (_, verdicts, _) = measured(QLORA);
    assert_eq!(verdicts.len(), 32);
    let mut inexact = Vec::new();
    for verdict in &verdicts {
        let [allocated, reserved] = [verdict.allocated, verdict.reserved].map(|both| {
            let error = both.error();
            error.unwrap()
        });
        if verdict.name.contains("int8") {
            assert!(
                allocated.abs() < 0.005 && reserved.abs() < 0.09,
                "{verdict:?}"
            );
            continue;
        }
        assert_eq!(allocated, 0.0, "{verdict:?}");
        assert!(reserved.abs() < 0.012, "{verdict:?}");
        if reserved != 0.0 {
            inexact.push(&verdict.name);
        }
    }
    assert!(inexact.len() <= 1, "{inexact:?}");
}

/// What PyTorch could not do under a cap, the replay cannot do either.
#[test]
fn runs_that_ran_out_of_memory_are_foretold() {
    let failed = HELD_OUT.lines().filter(|line| line.contains("\"error\""));
    let failed: Vec<String> = failed
        .map(|line| line.replace("\"error\"", "\"ended\""))
        .collect();
    assert_eq!(failed.len(), 3);
    for measurement in truth::parse(&failed.join("\n"), "fixture").unwrap() {
        let prediction = measurement.case.workload().unwrap().predict().unwrap();
        assert!(
            prediction.out_of_memory.is_some(),
            "{}",
            measurement.case.name
        );
    }
}

/// Python's JSON has numbers that JSON does not have; a run of an unknown model does not hide the others.
#[test]
fn odd_lines_do_not_hide_the_others() {
    let text = r#"{"case": {"name": "NaN \" -Infinity", "model": "gpt2", "batch": 1, "seq": 8}, "loss": NaN, "x": [-Infinity]}
        {"case": {"name": "mine", "model": "gpt5", "batch": 1, "seq": 8}}
        {"case": {"name": "failed", "batch": 1, "seq": 8}, "error": "timeout"}"#;
    let (measurements, skipped) = truth::read(text, "mine.jsonl").unwrap();
    assert_eq!(measurements[0].case.name, "NaN \" -Infinity");
    assert_eq!(skipped[0].name, "failed");
    let comparison = truth::compare(&measurements).unwrap();
    assert_eq!(comparison.verdicts.len(), 1);
    assert_eq!(comparison.skipped[0].name, "mine");
    assert!(comparison.skipped[0].reason.contains("gpt5"));
}

/// Runs measured after the rules were written, at sizes that the others do not have.
#[test]
fn single_layers_are_predicted_to_the_byte() {
    let (_, verdicts, summary) = measured(LAYERS);
    assert_eq!(verdicts.len(), 8);
    assert_eq!(
        (summary.allocated.worst, summary.reserved.worst),
        (0.0, 0.0)
    );
}

/// Not only the peak: what tensors hold after every phase of both steps. Rounding aside, because that depends on which
/// block a request found.
#[test]
fn every_phase_holds_what_was_measured() {
    for text in [PEAKS, LAYERS] {
        for measurement in truth::parse(text, "fixture").unwrap() {
            let case = &measurement.case;
            let prediction = case.workload().unwrap().predict().unwrap();
            // A scaler that skipped the first step left the optimizer's state to the second: the data decided that.
            let skipped = |phases: &Measurement| {
                case.precision.as_deref() == Some("amp_fp16")
                    && phases.phases["step0.optim"].allocated
                        <= phases.phases["step0.clip"].allocated
            };
            if skipped(&measurement) {
                continue;
            }
            for reading in &prediction.readings {
                if let Some(phase) = measurement.phases.get(&reading.phase.name()) {
                    assert_eq!(
                        Some(reading.requested),
                        phase.requested,
                        "{}, {:?}",
                        case.name,
                        reading.phase
                    );
                }
            }
        }
    }
}

/// The best of a few runs, against four times what is wanted of one core: 50 ms, and 1 s for a loop of 2048 timesteps in
/// Python. A debug build is not what anyone waits for.
#[test]
#[cfg_attr(debug_assertions, ignore = "times an optimised build")]
fn predictions_take_milliseconds() {
    const LOOP: &str = r#"{"case": {"name": "loop", "family": "mamba", "size": "medium", "batch": 1, "seq": 2048}}"#;
    // One of several: other programs have the cores too.
    let is_within = |measurement: &Measurement, limit: f64| {
        let mut times = (0..10).map(|_| {
            let verdict = truth::judge(measurement).unwrap();
            verdict.milliseconds
        });
        assert!(
            times.any(|milliseconds| milliseconds < limit),
            "{} takes more than {limit} ms",
            measurement.case.name
        );
    };
    for measurement in truth::parse(PEAKS, "fixture").unwrap() {
        if measurement.case.family != "mamba" {
            is_within(&measurement, 200.0);
        }
    }
    is_within(&truth::parse(LOOP, "test").unwrap()[0], 4000.0);
}

#[test]
fn wrong_lines_are_named() {
    let problem = |line: &str| match truth::parse(line, "my.jsonl") {
        Err(error) => error.to_string(),
        Ok(measurements) => measurements[0].case.workload().unwrap_err().to_string(),
    };
    assert!(problem("{").starts_with("my.jsonl, line 1"));
    assert!(problem(r#"{"case": {"name": "x", "batch": 1}}"#).contains("seq"));
    let case = |fields: &str| {
        problem(&format!(
            r#"{{"case": {{"name": "x", "batch": 1, "seq": 8{fields}}}}}"#
        ))
    };
    assert!(case(r#", "model": "gpt5""#).contains("gpt5"));
    assert!(case(r#", "model": "gpt2", "precision": "fp7""#).contains("precision is fp7"));
    assert!(case(r#", "model": "gpt2", "optimizer": "shampoo""#).contains("adamw_fused"));
    assert!(case(r#", "model": "gpt2", "arch": {"n_head": 7}"#).contains("divisor"));
    assert!(
        case(r#", "model": "gpt2", "arch": {"activation_function": "xielu"}"#)
            .contains("activation_function is \"xielu\"")
    );
    assert!(case(r#", "model": "tinyllama", "arch": {"hidden_act": 7}"#).contains("silu"));
    assert!(
        case(r#", "model": "gpt2", "arch": {"add_cross_attention": true}"#)
            .contains("add_cross_attention is true, and should be false")
    );
    assert!(case(r#", "model": "gpt2", "arch": {"n_layer": 1000000000000}"#).contains("n_layer"));
    assert!(case(r#", "model": "gpt2", "alloc_conf": "nonsense:1""#).contains("nonsense"));
    assert!(case(r#", "family": "mamba", "size": "huge""#).contains("huge"));
    assert!(case(r#", "family": "naics""#).contains("n_negatives"));
    assert!(case(r#", "model": "gpt2", "arch": {"n_head": 4096}"#).contains("1024"));
}

/// Sizes that no machine has end in an error or in a number, never in a panic or an endless run.
#[test]
fn absurd_sizes_are_survived() {
    let run = |fields: &str| {
        let line = format!(r#"{{"case": {{"name": "x", "model": "gpt2", {fields}}}}}"#);
        truth::parse(&line, "test").unwrap()[0]
            .case
            .workload()
            .and_then(|workload| workload.predict())
    };
    for fields in [
        r#""batch": 0, "seq": 8"#,
        r#""batch": 1, "seq": 1"#,
        r#""batch": 1, "seq": 2048"#,
        r#""batch": 18446744073709551615, "seq": 1024"#,
        r#""batch": 1, "seq": 8, "accum": 0"#,
        r#""family": "mamba", "size": "large", "batch": 1, "seq": 1000000"#,
        r#""family": "naics", "n_negatives": 18446744073709551615, "batch": 1, "seq": 8"#,
        r#""family": "mu", "batch": 1048576, "seq": 1048576"#,
    ] {
        assert!(run(fields).is_err(), "{fields}");
    }
    for fields in [
        r#""batch": 262144, "seq": 1024"#,
        r#""batch": 1, "seq": 2"#,
        r#""family": "gsa", "batch": 1, "seq": 2"#,
        r#""family": "mu", "batch": 131072, "seq": 512"#,
        r#""batch": 2, "seq": 8, "accum": 4000000000"#,
    ] {
        assert!(run(fields).unwrap().peak_reserved > 0, "{fields}");
    }
}
