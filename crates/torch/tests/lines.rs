//! Every allocation is named by the line of the model that asks for it. Recorded runs say which line that is: the fixtures
//! and their form are described in `fixtures/make_lines.py`.

use std::collections::{BTreeMap, BTreeSet};

use cinch_torch::eager::{AllocationCategory, Event, Line};
use cinch_torch::model::Workload;
use cinch_torch::truth;

/// A recorded forward.
struct Recording {
    name: String,
    workload: Workload,
    step: usize,
    /// Sizes and lines; no line for what the training loop does.
    allocations: Vec<(u64, Option<String>)>,
}

fn read(text: &str) -> Recording {
    let (case, rest) = text.split_once('\n').unwrap();
    let case = &truth::parse(case, "fixture").unwrap()[0].case;
    let (step, rest) = rest.split_once('\n').unwrap();
    let allocations = rest.lines().map(|line| {
        let (size, line) = line.split_once(' ').unwrap();
        let line = (line != "-").then(|| line.to_owned());
        (size.parse().unwrap(), line)
    });
    Recording {
        name: case.name.clone(),
        workload: case.workload().unwrap(),
        step: step.strip_prefix("step ").unwrap().parse().unwrap(),
        allocations: allocations.collect(),
    }
}

/// Models of transformers.
fn transformers() -> Vec<Recording> {
    [
        include_str!("fixtures/gpt2-amp.lines"),
        include_str!("fixtures/gpt2-eager.lines"),
        include_str!("fixtures/qwen-amp.lines"),
        include_str!("fixtures/qwen-eager.lines"),
        include_str!("fixtures/qwen-lora.lines"),
        include_str!("fixtures/llama-fp32.lines"),
        include_str!("fixtures/mistral-2layer-b1-t4600-amp_bf16.lines"),
        include_str!("fixtures/mistral-2layer-b2-t600-w512-bf16-eager.lines"),
        include_str!("fixtures/qwen3-0.6b-2layer-b2-t512-amp_bf16.lines"),
        include_str!("fixtures/qwen3-0.6b-2layer-b2-t512-bf16-eager.lines"),
        include_str!("fixtures/bert-amp.lines"),
        include_str!("fixtures/hfmamba-2layer-b2-t64-bf16.lines"),
        include_str!("fixtures/rehearsed/phi3-mini-2layer-b2-t512-bf16-eager.lines"),
        include_str!("fixtures/rehearsed/phi4-mini-2layer-b2-t300-amp_bf16.lines"),
        include_str!("fixtures/rehearsed/gemma2-2b-2layer-b2-t512-bf16-eager.lines"),
        include_str!("fixtures/rehearsed/gemma3-270m-2layer-b2-t600-w512-bf16.lines"),
        include_str!("fixtures/rehearsed/roberta-2layer-b4-t128-bf16-eager.lines"),
        include_str!("fixtures/rehearsed/distilbert-2layer-b4-t128-bf16-eager.lines"),
        include_str!("fixtures/rehearsed/opt-125m-2layer-b4-t128-bf16-eager.lines"),
        include_str!("fixtures/rehearsed/opt-350m-2layer-b2-t100-fp32.lines"),
        include_str!("fixtures/rehearsed/pythia-70m-2layer-b4-t128-bf16-eager.lines"),
        include_str!("fixtures/rehearsed/pythia-70m-2layer-b4-t128-serial-bf16.lines"),
        include_str!("fixtures/rehearsed/t5-small-2layer-b4-t128-bf16-eager.lines"),
        include_str!("fixtures/rehearsed/t5-small-2layer-b4-t128-amp_bf16.lines"),
        include_str!("fixtures/rehearsed/flan-t5-small-2layer-b3-t77-amp_bf16.lines"),
        include_str!("fixtures/rehearsed/mt5-small-2layer-b1-t96-bf16.lines"),
        include_str!("fixtures/rehearsed/vit-base-2layer-b4-t197-bf16-eager.lines"),
        include_str!("fixtures/rehearsed/vit-base-2layer-b4-t197-dropout-bf16.lines"),
    ]
    .map(read)
    .into()
}

/// Systems whose code is a script.
fn scripts() -> Vec<Recording> {
    [
        include_str!("fixtures/mamba-amp.lines"),
        include_str!("fixtures/gsa-amp.lines"),
        include_str!("fixtures/mu-amp.lines"),
    ]
    .map(read)
    .into()
}

fn case(fields: &str) -> Workload {
    let line = format!(r#"{{"case": {{"name": "made up", {fields}}}}}"#);
    let measurement = &truth::parse(&line, "test").unwrap()[0];
    measurement.case.workload().unwrap()
}

/// What the forward of a step asks for, from its batch on.
fn forward(events: &[Event], step: usize) -> Vec<Event> {
    let allocations: Vec<Event> = events
        .iter()
        .filter(|event| !event.is_free)
        .copied()
        .collect();
    let batches = (0..allocations.len()).filter(|&at| {
        let is_batch = |at: usize| allocations[at].category == AllocationCategory::Batch;
        is_batch(at) && (at == 0 || !is_batch(at - 1))
    });
    let start = batches.into_iter().nth(step).unwrap();
    allocations[start..]
        .iter()
        .take_while(|event| event.category != AllocationCategory::Backward)
        .copied()
        .collect()
}

fn is_source(line: &Line) -> bool {
    matches!(line, Line::Source { .. })
}

/// Lines of transformers' files are those that PyTorch recorded, allocation by allocation.
#[test]
fn lines_are_the_recorded_ones() {
    for recording in transformers() {
        let name = &recording.name;
        let events = forward(&recording.workload.trace().unwrap(), recording.step);
        assert_eq!(events.len(), recording.allocations.len(), "{name}");
        for (at, (event, (bytes, line))) in events.iter().zip(&recording.allocations).enumerate() {
            let replayed = event.line.unwrap();
            assert_eq!(event.bytes, *bytes, "{name}: allocation {at}, {replayed}");
            let known = is_source(replayed).then(|| replayed.to_string());
            assert_eq!(known, *line, "{name}: allocation {at} of {bytes} bytes");
        }
    }
}

/// A statement of a script's system stands for one line of the script, and for no other.
#[test]
fn statements_follow_the_lines_of_the_scripts() {
    for recording in scripts() {
        let name = &recording.name;
        let events = forward(&recording.workload.trace().unwrap(), recording.step);
        assert!(events.len() >= recording.allocations.len(), "{name}");
        let mut lines: BTreeMap<&Line, &Option<String>> = BTreeMap::new();
        for (at, (event, (bytes, line))) in events.iter().zip(&recording.allocations).enumerate() {
            let statement = event.line.unwrap();
            assert_eq!(event.bytes, *bytes, "{name}: allocation {at}, {statement}");
            let known = lines.entry(statement).or_insert(line);
            assert_eq!(*known, line, "{name}: allocation {at}, {statement}");
        }
        let recorded: BTreeSet<_> = recording.allocations.iter().map(|(_, line)| line).collect();
        assert!(lines.len() >= recorded.len(), "{name}");
    }
}

/// Statements of the training loop.
const LOOP: [&str; 7] = [
    "batch = next(loader)",
    "loss = model(batch)",
    "loss = loss / accumulation",
    "loss.backward()",
    "scaler.unscale_(optimizer)",
    "clip_grad_norm_(parameters)",
    "optimizer.step()",
];

/// The settings that no recording has.
fn others() -> Vec<Workload> {
    [
        r#""model": "mistral-7b", "arch": {"num_hidden_layers": 1}, "batch": 1, "seq": 32"#,
        r#""model": "mistral-7b", "arch": {"num_hidden_layers": 1}, "batch": 1, "seq": 32, "attn": "eager""#,
        r#""model": "tinyllama", "arch": {"num_hidden_layers": 1}, "batch": 1, "seq": 32, "attn": "eager", "precision": "amp_fp16""#,
        r#""family": "hf-mlm", "model": "bert-base", "arch": {"num_hidden_layers": 1}, "batch": 1, "seq": 32, "attn": "eager""#,
        r#""family": "naics", "n_negatives": 2, "batch": 2, "seq": 32, "precision": "amp_bf16""#,
        r#""family": "gsa", "batch": 1, "seq": 32, "ckpt": true"#,
    ]
    .map(case)
    .into()
}

/// Nothing in a forward falls back to the training loop's own statement, and backward belongs to lines of the forward, those
/// included that only make views.
#[test]
fn every_model_names_its_lines() {
    let recorded = transformers().into_iter().chain(scripts());
    for workload in recorded.map(|recording| recording.workload).chain(others()) {
        let events = workload.trace().unwrap();
        for event in forward(&events, 0) {
            let line = *event.line.unwrap();
            assert_ne!(line, Line::Statement("loss = model(batch)"), "{event:?}");
        }
        let (mut of_model, mut of_loop) = (0, 0);
        for event in events.iter().filter(|event| !event.is_free) {
            let line = *event.line.unwrap();
            if event.category == AllocationCategory::Backward {
                match LOOP.map(Line::Statement).contains(&line) {
                    true => of_loop += 1,
                    false => of_model += 1,
                }
            }
        }
        // The loss's own gradient and that of its division, in each step, and the scaler's product.
        assert!(
            (4..=6).contains(&of_loop) && of_model > 100,
            "{of_loop}, {of_model}"
        );
    }
}

/// A layer that is run again asks from the same lines, in the same order.
#[test]
fn recomputation_has_the_lines_of_the_forward() {
    for checkpointing in [true, false] {
        let fields = format!(
            r#""model": "gpt2", "arch": {{"n_layer": 1}}, "batch": 2, "seq": 64, "ckpt": {checkpointing}"#
        );
        let events = case(&fields).trace().unwrap();
        let in_layer = |event: &&Event| {
            event.scope.layer.is_some() && event.category == AllocationCategory::Activation
        };
        let place = |event: &Event| (event.bytes, *event.line.unwrap());
        let first = forward(&events, 0);
        let once: Vec<_> = first.iter().filter(in_layer).map(place).collect();
        let all: Vec<_> = events
            .iter()
            .filter(|event| !event.is_free)
            .filter(in_layer)
            .map(place)
            .collect();
        let again = &all[once.len()..];
        if checkpointing {
            // The run ends with the last tensor that backward needs: not all of the layer.
            let count = once.iter().zip(again).take_while(|(a, b)| a == b).count();
            assert!(count > once.len() / 2, "{count} of {}", once.len());
        } else {
            assert_eq!(again, once, "the second step");
        }
    }
}
