//! The eager replay: its requests against recorded ones, and what must hold for any run.

use std::collections::HashMap;

use cinch_architecture::Architecture;
use cinch_torch::convention::Convention;
use cinch_torch::eager::checkpoint::Checkpointing;
use cinch_torch::eager::optimizer::{Execution, Optimizer};
use cinch_torch::eager::training::Precision;
use cinch_torch::eager::{AllocationCategory, DType, Event};
use cinch_torch::model::Workload;
use cinch_torch::model::frozen::Frozen;
use cinch_torch::truth::{self, Case};

const PEAKS: &str = include_str!("fixtures/peaks.jsonl");
const LAYERS: &str = include_str!("fixtures/layers.jsonl");
const MAMBA: &str = include_str!("fixtures/mamba.jsonl");
const HELD_OUT: &str = include_str!("fixtures/held_out.jsonl");
const MISTRAL: &str = include_str!("fixtures/mistral.jsonl");
const AUTOCAST: &str = include_str!("fixtures/autocast.jsonl");
const QWEN3: &str = include_str!("fixtures/qwen3.jsonl");
const QLORA: &str = include_str!("fixtures/qlora.jsonl");
const OPTIMIZERS: &str = include_str!("fixtures/optimizers.jsonl");
const TRAINER: &str = include_str!("fixtures/trainer.jsonl");

macro_rules! trace {
    ($text:expr, $run:expr, $file:literal) => {
        (
            $text,
            $run,
            include_str!(concat!("fixtures/", $file, ".trace")),
        )
    };
}

/// A run of the fixtures and its recorded requests.
const TRACES: &[(&str, &str, &str)] = &[
    trace!(PEAKS, "gpt2-b4-t512-fp32", "gpt2-b4-t512-fp32"),
    trace!(PEAKS, "gpt2-b4-t512-amp_bf16", "gpt2-b4-t512-amp_bf16"),
    trace!(
        PEAKS,
        "qwen2.5-0.5b-2layer-b2-t512-bf16-trace", "qwen2.5-0.5b-2layer-b2-t512-bf16"
    ),
    trace!(
        PEAKS,
        "qwen2.5-0.5b-2layer-b2-t512-bf16-ckpt-trace", "qwen2.5-0.5b-2layer-b2-t512-bf16-ckpt"
    ),
    trace!(LAYERS, "grouped-fp32", "layer-grouped-fp32"),
    trace!(LAYERS, "grouped-t777", "layer-grouped-t777"),
    trace!(LAYERS, "grouped-eager", "layer-grouped-eager"),
    trace!(LAYERS, "t300-amp", "layer-t300-amp"),
    trace!(LAYERS, "t200-fp32", "layer-t200-fp32"),
    trace!(LAYERS, "t1000-bf16", "layer-t1000-bf16"),
    trace!(LAYERS, "wide-heads-fp32", "layer-wide-heads-fp32"),
    trace!(LAYERS, "narrow-heads-fp32", "layer-narrow-heads-fp32"),
    trace!(
        MAMBA,
        "hfmamba-2layer-b2-t64-fp32", "hfmamba-2layer-b2-t64-fp32"
    ),
    trace!(
        MAMBA,
        "hfmamba-2layer-b2-t64-amp_bf16", "hfmamba-2layer-b2-t64-amp_bf16"
    ),
    trace!(
        MAMBA,
        "hfmamba-2layer-b2-t64-bf16", "hfmamba-2layer-b2-t64-bf16"
    ),
    trace!(HELD_OUT, "gpt2-eager", "gpt2-eager"),
    trace!(
        HELD_OUT,
        "gpt2-b3-t300-amp_fp16-eager-ckpt", "gpt2-b3-t300-amp_fp16-eager-ckpt"
    ),
    trace!(
        HELD_OUT,
        "gpt2-b4-t512-amp_bf16-reentrant", "gpt2-b4-t512-amp_bf16-reentrant"
    ),
    trace!(HELD_OUT, "qwen-lora", "qwen-lora"),
    trace!(HELD_OUT, "bert-amp", "bert-amp"),
    trace!(
        HELD_OUT,
        "minilm-b32-t128-fp32-sgd", "minilm-b32-t128-fp32-sgd"
    ),
    trace!(HELD_OUT, "gsa-amp", "gsa-amp"),
    trace!(
        MISTRAL,
        "mistral-2layer-b2-t600-w512-fp32", "mistral-2layer-b2-t600-w512-fp32"
    ),
    trace!(
        MISTRAL,
        "mistral-2layer-b2-t777-w512-fp16", "mistral-2layer-b2-t777-w512-fp16"
    ),
    trace!(
        AUTOCAST,
        "qwen-2layer-bf16-auto-peft16-ckpt", "qwen-2layer-bf16-auto-peft16-ckpt"
    ),
    trace!(
        AUTOCAST,
        "qwen-2layer-bf16-auto-full-reentrant", "qwen-2layer-bf16-auto-full-reentrant"
    ),
    trace!(
        AUTOCAST,
        "qwen-2layer-fp16-auto-peft16", "qwen-2layer-fp16-auto-peft16"
    ),
    trace!(
        AUTOCAST,
        "qwen-2layer-bf16-peft16-ckpt", "qwen-2layer-bf16-peft16-ckpt"
    ),
    trace!(
        QWEN3,
        "qwen3-0.6b-2layer-b2-t512-bf16-ckpt", "qwen3-0.6b-2layer-b2-t512-bf16-ckpt"
    ),
    trace!(
        QWEN3,
        "qwen3-0.6b-2layer-b2-t512-amp_bf16", "qwen3-0.6b-2layer-b2-t512-amp_bf16"
    ),
    trace!(
        QLORA,
        "qwen-2layer-nf4dq-prep-ckpt", "qwen-2layer-nf4dq-prep-ckpt"
    ),
    trace!(
        QLORA,
        "qwen-2layer-nf4dq-auto-prep", "qwen-2layer-nf4dq-auto-prep"
    ),
    trace!(QLORA, "qwen-2layer-nf4", "qwen-2layer-nf4"),
    trace!(
        QLORA,
        "qwen-2layer-int8-auto-prep-ckpt", "qwen-2layer-int8-auto-prep-ckpt"
    ),
    trace!(
        OPTIMIZERS,
        "gpt2-2layer-b2-t64-fp32-adamw_8bit", "gpt2-2layer-b2-t64-fp32-adamw_8bit"
    ),
    trace!(
        OPTIMIZERS,
        "gpt2-2layer-b2-t64-fp32-paged_adamw_32bit", "gpt2-2layer-b2-t64-fp32-paged_adamw_32bit"
    ),
    trace!(
        OPTIMIZERS,
        "gpt2-2layer-b2-t64-fp32-lion_8bit", "gpt2-2layer-b2-t64-fp32-lion_8bit"
    ),
    trace!(
        OPTIMIZERS,
        "qwen-2layer-b2-t64-bf16-paged_adamw_8bit", "qwen-2layer-b2-t64-bf16-paged_adamw_8bit"
    ),
    trace!(
        OPTIMIZERS,
        "qwen-2layer-b2-t64-bf16-adafactor", "qwen-2layer-b2-t64-bf16-adafactor"
    ),
    trace!(
        TRAINER,
        "qwen-2layer-trainer-bf16-auto-peft16", "qwen-2layer-trainer-bf16-auto-peft16"
    ),
    trace!(
        TRAINER,
        "qwen-2layer-trainer-amp_bf16-accum2", "qwen-2layer-trainer-amp_bf16-accum2"
    ),
    trace!(
        TRAINER,
        "qwen-2layer-b2-t64-trainer-adamw_8bit", "qwen-2layer-b2-t64-trainer-adamw_8bit"
    ),
];

fn case(text: &str, name: &str) -> Case {
    let measurements = truth::parse(text, "fixture").unwrap();
    measurements
        .into_iter()
        .map(|measurement| measurement.case)
        .find(|case| case.name == name)
        .unwrap()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Request {
    Allocate(u64),
    /// The number of the allocation, counted from the start of the steps.
    Free(u64),
}

fn recorded(trace: &str) -> Vec<Request> {
    let before = trace.lines().filter(|line| line.starts_with("p ")).count() as u64;
    let number = |line: &str| line.split(' ').nth(1).unwrap().parse::<u64>().unwrap();
    trace
        .lines()
        .filter_map(|line| match line.split(' ').next() {
            Some("a") => Some(Request::Allocate(number(line))),
            Some("f") => Some(Request::Free(number(line) - before)),
            _ => None,
        })
        .collect()
}

fn predicted(events: &[Event]) -> Vec<Request> {
    let mut numbers = HashMap::new();
    let mut requests = Vec::new();
    for event in events {
        if event.is_free {
            requests.push(Request::Free(numbers[&event.id]));
        } else {
            numbers.insert(event.id, numbers.len() as u64);
            requests.push(Request::Allocate(event.bytes));
        }
    }
    requests
}

/// Sizes and order of all requests, each free with the allocation it belongs to. The one thing that may differ: leaving
/// autocast frees its cached casts in the order of a hash table of addresses.
#[test]
fn requests_match_the_recorded_ones_event_for_event() {
    for &(text, name, trace) in TRACES {
        let case = case(text, name);
        let workload = case.workload().unwrap();
        let uses_autocast = workload.recipe.precision.autocast().is_some();
        let (recorded, predicted) = (recorded(trace), predicted(&workload.trace().unwrap()));
        assert_eq!(recorded.len(), predicted.len(), "{name}");
        let mut at = 0;
        while at < recorded.len() {
            if recorded[at] == predicted[at] {
                at += 1;
                continue;
            }
            assert!(
                uses_autocast,
                "{name}, event {at}: {:?}, predicted {:?}",
                recorded[at], predicted[at]
            );
            let length = |requests: &[Request]| {
                requests[at..]
                    .iter()
                    .take_while(|request| matches!(request, Request::Free(_)))
                    .count()
            };
            let end = at + length(&recorded);
            assert!(
                end > at && end == at + length(&predicted),
                "{name}, event {at}"
            );
            let sorted = |requests: &[Request]| {
                let mut run = requests[at..end].to_vec();
                run.sort_unstable();
                run
            };
            assert_eq!(sorted(&recorded), sorted(&predicted), "{name}, event {at}");
            at = end;
        }
    }
}

fn small(model: &str, fields: &str) -> Workload {
    let line = format!(
        r#"{{"case": {{"name": "small", "model": "{model}", {fields}, "batch": 2, "seq": 24}}}}"#
    );
    truth::parse(&line.replace('\n', " "), "test").unwrap()[0]
        .case
        .workload()
        .unwrap()
}

fn models() -> Vec<Workload> {
    let gpt2 = r#""arch": {"n_layer": 3, "n_embd": 48, "n_head": 4, "vocab_size": 101}"#;
    let qwen = r#""arch": {"num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4,
                  "num_key_value_heads": 2, "vocab_size": 101}"#;
    let bert = r#""family": "hf-mlm", "arch": {"num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 80,
                  "num_attention_heads": 4, "vocab_size": 101}"#;
    let opt = r#""arch": {"num_hidden_layers": 3, "hidden_size": 48, "ffn_dim": 80, "num_attention_heads": 4,
                 "vocab_size": 101, "word_embed_proj_dim": 32}"#;
    let distilbert = r#""family": "hf-mlm", "arch": {"n_layers": 3, "dim": 48, "hidden_dim": 80, "n_heads": 4,
                        "vocab_size": 101}"#;
    let t5 = r#""family": "hf-seq2seq", "arch": {"num_layers": 3, "num_decoder_layers": 2, "d_model": 48, "d_ff": 80, "d_kv": 8,
                "num_heads": 4, "vocab_size": 101}"#;
    let vit = r#""family": "hf-image", "arch": {"num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 80,
                 "num_attention_heads": 4, "image_size": [20, 92], "patch_size": [20, 4]}"#;
    let mamba = r#""arch": {"num_hidden_layers": 3, "hidden_size": 48, "state_size": 4, "vocab_size": 101}"#;
    let arch = r#""num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
                  "num_key_value_heads": 2, "vocab_size": 101, "sliding_window": 16"#;
    let mistral = format!(r#""arch": {{{arch}}}"#);
    let late = format!(r#""arch": {{{arch}, "use_sliding_window": true, "max_window_layers": 2}}"#);
    vec![
        small("gpt2", gpt2),
        small("qwen2.5-0.5b", qwen),
        small("bert-base", bert),
        small("mamba-130m", mamba),
        small("mistral-7b", &mistral),
        small("mistral-7b", &format!(r#"{mistral}, "attn": "eager""#)),
        small("qwen2.5-0.5b", &late),
        small("qwen2.5-0.5b", &format!(r#"{late}, "attn": "eager""#)),
        small("microsoft/Phi-4-mini-instruct", &mistral),
        small("google/gemma-3-270m", &mistral),
        small("facebook/opt-350m", opt),
        small("EleutherAI/pythia-70m", &mistral),
        small("FacebookAI/roberta-base", bert),
        small("distilbert-base-uncased", distilbert),
        small("google/flan-t5-small", t5),
        small("google-t5/t5-small", &format!(r#"{t5}, "attn": "eager""#)),
        small("google/vit-base-patch16-224", vit),
    ]
}

/// T5 is not computed with weights in fp16, nor with reentrant checkpoints, and says so.
fn is_refused(workload: &Workload) -> bool {
    let refused = matches!(workload.architecture, Architecture::T5(_))
        && (workload.checkpoints == Checkpointing::Reentrant
            || workload.recipe.precision.weights() == DType::Float16);
    if refused {
        let problem = workload.predict().unwrap_err().to_string();
        assert!(problem.contains("T5"), "{problem}");
    }
    refused
}

/// After a step nothing is left but what was there before it, once the optimizer has its state: under every way to train.
#[test]
fn a_step_leaves_nothing_behind() {
    let precisions = [
        Precision::Float32,
        Precision::AutocastBFloat16,
        Precision::AutocastFloat16,
        Precision::BFloat16,
        Precision::Float16,
        Precision::BFloat16UnderAutocast,
        Precision::Float16UnderAutocast,
    ];
    let optimizers = [
        Optimizer::Adam(Execution::Foreach),
        Optimizer::Adam(Execution::Fused),
        Optimizer::Adam(Execution::Loop),
        Optimizer::Adam8Bit,
        Optimizer::PagedAdam { eight_bit: true },
        Optimizer::Lion8Bit,
        Optimizer::Adafactor,
        Optimizer::Sgd {
            momentum: true,
            execution: Execution::Foreach,
        },
    ];
    for mut workload in models() {
        for checkpoints in [
            Checkpointing::Off,
            Checkpointing::NonReentrant,
            Checkpointing::Reentrant,
        ] {
            for precision in precisions {
                for optimizer in optimizers {
                    workload.checkpoints = checkpoints;
                    workload.recipe.precision = precision;
                    workload.recipe.optimizer = optimizer;
                    workload.recipe.accumulation = 2;
                    if is_refused(&workload) {
                        continue;
                    }
                    let readings = workload.predict().unwrap().readings;
                    let ends: Vec<u64> = readings
                        .iter()
                        .filter(|reading| reading.phase.name().ends_with("end"))
                        .map(|reading| reading.requested)
                        .collect();
                    assert_eq!(ends[0], ends[1], "{workload:?}");
                }
            }
        }
    }
}

/// The same for the Trainer, which any model can be given to.
#[test]
fn a_step_of_the_trainer_leaves_nothing_behind() {
    for mut workload in models() {
        workload.recipe = Convention::Trainer.recipe(workload.recipe);
        for precision in [Precision::Float32, Precision::AutocastFloat16] {
            workload.recipe.precision = precision;
            workload.recipe.accumulation = 3;
            let readings = workload.predict().unwrap().readings;
            let ends: Vec<u64> = readings
                .iter()
                .filter(|reading| reading.phase.name().ends_with("end"))
                .map(|reading| reading.requested)
                .collect();
            assert_eq!(ends[0], ends[1], "{workload:?}");
        }
    }
}

/// The same for weights in few bits, under every kind of checkpointing, and they hold less than weights in their type.
#[test]
fn quantised_weights_are_smaller_and_leave_nothing_behind() {
    let mut workload = small(
        "qwen2.5-0.5b",
        r#""arch": {"num_hidden_layers": 2}, "precision": "bf16", "lora": {"r": 4, "targets": ["q_proj"], "library": "peft"}"#,
    );
    let plain = workload.weights().unwrap().bytes;
    for frozen in [
        Frozen::FourBit { double: false },
        Frozen::FourBit { double: true },
        Frozen::EightBit,
    ] {
        workload.frozen = frozen;
        assert!(workload.weights().unwrap().bytes < plain);
        for checkpoints in [
            Checkpointing::Off,
            Checkpointing::NonReentrant,
            Checkpointing::Reentrant,
        ] {
            workload.checkpoints = checkpoints;
            workload.recipe.accumulation = 2;
            let readings = workload.predict().unwrap().readings;
            let ends: Vec<u64> = readings
                .iter()
                .filter(|reading| reading.phase.name().ends_with("end"))
                .map(|reading| reading.requested)
                .collect();
            assert_eq!(ends[0], ends[1], "{workload:?}");
        }
    }
    workload.lora = None;
    assert!(
        workload
            .predict()
            .unwrap_err()
            .to_string()
            .contains("frozen")
    );
}

/// Both kinds of checkpointing give every parameter its gradient and keep less than the plain run.
#[test]
fn checkpointing_keeps_less_and_loses_no_gradient() {
    for mut workload in models() {
        workload.batch = 16;
        let mut run = |checkpoints| {
            workload.checkpoints = checkpoints;
            if is_refused(&workload) {
                return None;
            }
            let readings = workload.predict().unwrap().readings;
            let at = |name: &str| {
                *readings
                    .iter()
                    .find(|reading| reading.phase.name() == name)
                    .unwrap()
            };
            // What is kept, and what `zero_grad` lets go.
            let gradients = at("step1.clip").requested - at("step1.end").requested;
            Some((at("step1.forward").requested, gradients))
        };
        let plain = run(Checkpointing::Off).unwrap();
        for checkpoints in [Checkpointing::NonReentrant, Checkpointing::Reentrant] {
            let Some((kept, gradients)) = run(checkpoints) else {
                continue;
            };
            assert!(kept < plain.0, "{checkpoints:?}");
            assert_eq!(gradients, plain.1, "{checkpoints:?}");
        }
    }
}

/// Gradients that are accumulated are added in place: more micro batches cost nothing after the second.
#[test]
fn accumulation_costs_the_gradients_once() {
    for mut workload in models() {
        let mut peak = |accumulation| {
            workload.recipe.accumulation = accumulation;
            workload.predict().unwrap().peak_allocated
        };
        assert_eq!(peak(2), peak(5));
    }
}

/// Each activation keeps what its formula needs, counted by hand in tensors of the inner width. The next layer keeps the result
/// in any case. `gelu_new` is seven ops, of which `x³` keeps x, `tanh` its result, and the last product both factors.
#[test]
fn activations_keep_what_their_formulas_need() {
    let held = |activation: &str| {
        let fields = format!(
            r#""arch": {{"n_layer": 3, "n_embd": 48, "n_head": 4, "activation_function": "{activation}"}}"#
        );
        let readings = small("gpt2", &fields).predict().unwrap().readings;
        let forward = readings
            .iter()
            .find(|reading| reading.phase.name() == "step0.forward");
        forward.unwrap().requested
    };
    // Batch, length, inner width, fp32, layers.
    let tensors = |number: u64| number * 2 * 24 * (4 * 48) * 4 * 3;
    let relu = held("relu");
    for (activation, more) in [
        ("tanh", 0),
        ("sigmoid", 0),
        ("gelu", 1),
        ("gelu_pytorch_tanh", 1),
        ("silu", 1),
        ("quick_gelu", 2),
        ("gelu_new", 4),
    ] {
        assert_eq!(held(activation), relu + tensors(more), "{activation}");
    }
}

/// Ended early or not: a run above the ceiling is none, one at it is the same as without.
#[test]
fn a_ceiling_only_ends_what_is_above_it() {
    for workload in models() {
        let whole = workload.predict().unwrap();
        let within = |most| workload.predict_within(most).unwrap();
        let at_the_ceiling = within(whole.peak_allocated).unwrap();
        assert_eq!(at_the_ceiling.peak_reserved, whole.peak_reserved);
        assert_eq!(at_the_ceiling.readings.len(), whole.readings.len());
        assert!(within(whole.peak_allocated - 1).is_none());
    }
}

#[test]
fn the_profile_adds_up() {
    for workload in models() {
        let profile = workload.profile().unwrap();
        assert_eq!(
            profile.alive.iter().map(|alive| alive.bytes).sum::<u64>(),
            profile.peak.bytes
        );
        assert_eq!(
            profile.course.iter().map(|point| point.bytes).max(),
            Some(profile.peak.bytes)
        );
        let parameters: u64 = profile
            .alive
            .iter()
            .filter(|alive| alive.category == AllocationCategory::Parameter)
            .map(|alive| alive.bytes)
            .sum();
        assert!(parameters > 0 && parameters < profile.peak.bytes);
    }
}

/// Under a limit the allocator gives segments back before it gives up: what is reserved falls to what is needed, and below
/// that the run ends with the request that found nothing.
#[test]
fn a_limit_is_met_or_said_to_be_too_low() {
    let mut workload = small("gpt2", r#""arch": {"n_layer": 2}"#);
    (workload.batch, workload.length) = (8, 256);
    let free = workload.predict().unwrap();
    assert_eq!(free.out_of_memory, None);
    assert!(free.peak_reserved > free.peak_allocated);
    workload.memory_limit = Some(free.peak_reserved - (2 << 20));
    let tight = workload.predict().unwrap();
    assert_eq!(tight.out_of_memory, None);
    assert!(tight.peak_reserved < free.peak_reserved);
    workload.memory_limit = Some(free.peak_allocated / 2);
    let short = workload.predict().unwrap();
    assert!(short.out_of_memory.is_some());
    assert!(short.peak_reserved <= free.peak_allocated / 2);
}
