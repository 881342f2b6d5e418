//! Families whose runs were rehearsed (`cinch rehearse`): PyTorch itself ran, on a card that is not there, and what its
//! allocator was asked for lies in `fixtures/rehearsed`, made by `fixtures/rehearse_cases.py`. Rehearsals of Qwen3 give the
//! requests that were recorded on an H200, byte for byte. `cards.jsonl` has other cards, from a V100 to an RTX 5090.

use std::collections::HashMap;

use cinch_torch::model::Workload;
use cinch_torch::truth;
use serde_json::Value;

macro_rules! family {
    ($name:literal) => {
        (
            $name,
            include_str!(concat!("fixtures/rehearsed/", $name, ".jsonl")),
        )
    };
}

const FAMILIES: &[(&str, &str)] = &[
    family!("phi3"),
    family!("gemma2"),
    family!("gemma3"),
    family!("roberta"),
    family!("distilbert"),
    family!("opt"),
    family!("gpt_neox"),
    family!("t5"),
    family!("vit"),
    family!("liger"),
    family!("modules_to_save"),
    family!("cards"),
];

/// Number and FNV-1a of the requests, as the script writes them: frees that follow each other are sorted under autocast.
fn digest(workload: &Workload) -> (u64, String) {
    let sorts = workload.recipe.precision.autocast().is_some();
    let mut numbers = HashMap::new();
    let (mut lines, mut frees) = (Vec::new(), Vec::new());
    let flush = |frees: &mut Vec<usize>, lines: &mut Vec<String>| {
        frees.sort_unstable();
        lines.extend(frees.drain(..).map(|number| format!("f {number}")));
    };
    for event in workload.trace().unwrap() {
        if event.is_free {
            frees.push(numbers[&event.id]);
            if !sorts {
                flush(&mut frees, &mut lines);
            }
        } else {
            flush(&mut frees, &mut lines);
            numbers.insert(event.id, numbers.len());
            lines.push(format!("a {}", event.bytes));
        }
    }
    flush(&mut frees, &mut lines);
    let mut value: u64 = 0xCBF2_9CE4_8422_2325;
    for byte in lines.join("\n").bytes() {
        value = (value ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
    }
    (lines.len() as u64, format!("{value:016x}"))
}

/// Every request of two steps, in order; the peaks of both counters; the number of parameters. Building a decoder leaves one
/// number fewer behind than in the first measurements: a block of 512 bytes.
#[test]
fn rehearsed_runs_are_replayed_event_for_event() {
    for (family, text) in FAMILIES {
        let measurements = truth::parse(text, family).unwrap();
        assert!(measurements.len() >= 8, "{family}");
        for (measurement, line) in measurements.iter().zip(text.lines()) {
            let rehearsed: Value = serde_json::from_str(line).unwrap();
            let (case, workload) = (&measurement.case, measurement.case.workload().unwrap());
            let name = &case.name;
            let (requests, digest) = digest(&workload);
            assert_eq!(rehearsed["requests"], requests, "{name}");
            assert_eq!(
                rehearsed["digest"], digest,
                "{name}: `diff` of a new recording with the replay's says where"
            );
            let prediction = workload.predict().unwrap();
            assert_eq!(
                Some(prediction.peak_reserved),
                measurement.peak_reserved,
                "{name}"
            );
            let more = prediction.peak_allocated - measurement.peak_allocated.unwrap();
            assert!(more == 0 || more == 512, "{name}: {more}");
            if case.lora.is_none() {
                assert_eq!(
                    rehearsed["params"],
                    workload.architecture.parameters(),
                    "{name}"
                );
            }
        }
    }
}
