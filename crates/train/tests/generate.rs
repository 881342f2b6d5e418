//! Generation with a cache against runs of the whole text through the graph that is trained, and
//! against transformers.

mod tiny;

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cinch_architecture::{Architecture, Gsa, HubFolders};
use cinch_engine::{Engine, EngineOptions};
use cinch_graph::op::{Op, Quantisation};
use cinch_graph::{DType, Graph, Storage, Target};
use cinch_model::{AdapterShape, Build, Purpose, build, input, linear_modules};
use cinch_plan::{Options, Placement, Plan};
use cinch_train::checkpoint::load_weights;
use cinch_train::{Generator, GeneratorOptions, Sampling, WeightPart, WeightSource};
use cinch_weights::WeightFiles;

const GREEDY: Sampling = Sampling {
    temperature: 0.0,
    top_k: 0,
    top_p: 1.0,
    repetition_penalty: 1.0,
    seed: 0,
};

/// Weights of any shape, a function of their name: large enough that logits differ, and, where the
/// name says so, as a model needs them.
#[derive(Default)]
struct Invented {
    numbers: HashMap<String, Vec<f32>>,
}

impl Invented {
    fn numbers(&mut self, part: WeightPart<'_>) -> &[f32] {
        let make = || {
            let count: usize = part.shape.iter().product();
            let width = *part.shape.last().unwrap_or(&1) as f32;
            let scale = match part.name {
                name if name.ends_with("norm.weight") || name.ends_with(".D") => 0.1,
                _ if part.shape.len() == 1 => 0.1,
                name if name.contains("embed") || name.contains("positions") => 1.0,
                _ => 2.0 / width.sqrt(),
            };
            let middle = match part.name {
                name if name.ends_with("norm.weight") || name.ends_with(".D") => 1.0,
                name if name.ends_with("A_log") => 0.5,
                _ => 0.0,
            };
            let seed = part.name.bytes().fold(7_u64, |seed, byte| {
                (seed ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
            });
            spread(count, seed)
                .map(|r| middle + scale * r)
                .collect::<Vec<f32>>()
        };
        self.numbers
            .entry(part.name.to_owned())
            .or_insert_with(make)
    }
}

/// Numbers over [−1, 1).
fn spread(count: usize, seed: u64) -> impl Iterator<Item = f32> {
    let mut state = seed | 1;
    (0..count).map(move |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    })
}

impl WeightSource for Invented {
    fn read(
        &mut self,
        part: WeightPart<'_>,
        rows: Range<usize>,
        dtype: DType,
        into: &mut [u8],
    ) -> Result<(), String> {
        let width: usize = part.shape[1..].iter().product();
        let numbers = &self.numbers(part)[rows.start * width..rows.end * width];
        if dtype == DType::Bf16 {
            for (to, number) in into.as_chunks_mut::<2>().0.iter_mut().zip(numbers) {
                // Of what is cut off, the larger half counts as one.
                let bits = number.to_bits() + 0x8000;
                *to = ((bits >> 16) as u16).to_ne_bytes();
            }
            return Ok(());
        }
        assert_eq!(dtype, DType::F32);
        for (to, number) in into.as_chunks_mut::<4>().0.iter_mut().zip(numbers) {
            *to = number.to_ne_bytes();
        }
        Ok(())
    }

    fn read_codes(
        &mut self,
        part: WeightPart<'_>,
        _: Quantisation,
        codes: &mut [u8],
        scales: &mut [Vec<u8>],
    ) -> Result<(), String> {
        let width = part.shape[1] as f32;
        for (code, r) in codes
            .iter_mut()
            .zip(spread(part.shape.iter().product(), 99))
        {
            *code = ((r * 100.0) as i8).cast_unsigned();
        }
        for scale in scales
            .iter_mut()
            .flat_map(|bytes| bytes.as_chunks_mut::<4>().0)
        {
            *scale = (2.0 / width.sqrt()).to_ne_bytes();
        }
        Ok(())
    }
}

/// The logits after `text` from the graph of an evaluation, which has no cache.
fn whole_text_logits(
    model: &Architecture,
    adapters: Option<&AdapterShape>,
    weights: &mut dyn WeightSource,
    text: &[u32],
) -> Vec<f32> {
    let form = Build {
        adapters: adapters.cloned(),
        ..Build::plain(
            1,
            text.len(),
            DType::F32,
            Purpose::Evaluate { loss_chunk: None },
        )
    };
    let mut graph = build(model, &form).unwrap();
    let loss = graph.nodes.pop().unwrap();
    assert!(matches!(loss.op, Op::CrossEntropy(_)));
    graph.terms.clear();
    let position = graph.batch(input::POSITION, [1], DType::I32);
    let result = graph
        .logits("logits", loss.inputs[0], loss.inputs[1], position)
        .unwrap();
    let plan = Plan::new(&graph, Options::new(Target::Cpu));
    let mut engine = Engine::new(Target::Cpu, plan.arena_bytes, EngineOptions::default()).unwrap();
    fill(&mut engine, &graph, &plan, weights);
    let tokens: Vec<i32> = text.iter().map(|token| token.cast_signed()).collect();
    let place = |name: &str| plan.placement(graph.find(name).unwrap()).unwrap();
    engine.write(place(input::TOKENS), &tokens).unwrap();
    let last = [text.len() as i32 - 1];
    engine.write(place(input::POSITION), &last).unwrap();
    let part = engine
        .prepare(&graph, &plan, 0..graph.nodes.len(), true)
        .unwrap();
    engine.run(&graph, &plan, &part).unwrap();
    let bytes = engine.bytes(plan.placement(result).unwrap()).unwrap();
    let words = bytes.as_chunks::<4>().0;
    words.iter().map(|&word| f32::from_ne_bytes(word)).collect()
}

fn fill(engine: &mut Engine, graph: &Graph, plan: &Plan, weights: &mut dyn WeightSource) {
    for parameter in &graph.parameters {
        let place = plan.placement(parameter.master).unwrap();
        if let Storage::Quantised(quantisation) = parameter.storage {
            let part = WeightPart {
                name: &parameter.parts[0].name,
                shape: parameter.shape.dims(),
            };
            let places = parameter.code_scales.iter();
            let places: Vec<_> = places.map(|&id| plan.placement(id).unwrap()).collect();
            let mut scales: Vec<Vec<u8>> =
                places.iter().map(|p| vec![0; p.bytes as usize]).collect();
            let mut codes = vec![0; place.bytes as usize];
            weights
                .read_codes(part, quantisation, &mut codes, &mut scales)
                .unwrap();
            engine.write(place, &codes).unwrap();
            for (place, scales) in places.into_iter().zip(&scales) {
                engine.write(place, scales).unwrap();
            }
            continue;
        }
        let mut offset = place.offset;
        for part in &parameter.parts {
            let mut shape = parameter.shape.dims().to_vec();
            shape[0] = part.rows;
            let bytes = 4 * shape.iter().product::<usize>() as u64;
            let piece = Placement {
                offset,
                bytes,
                ..place
            };
            offset += bytes;
            let wanted = WeightPart {
                name: &part.name,
                shape: &shape,
            };
            let mut values = vec![0; bytes as usize];
            weights
                .read(wanted, 0..part.rows, DType::F32, &mut values)
                .unwrap();
            engine.write(piece, &values).unwrap();
        }
    }
}

fn options(context: usize) -> GeneratorOptions {
    GeneratorOptions {
        context,
        compute: DType::F32,
        adapters: None,
        target: Target::Cpu,
        engine: EngineOptions {
            threads: Some(2),
            ..EngineOptions::default()
        },
    }
}

fn assert_close(what: &str, ours: &[f32], expected: &[f32]) {
    assert_eq!(ours.len(), expected.len());
    let largest = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    for (ours, expected) in ours.iter().zip(expected) {
        let error = (ours - expected).abs();
        assert!(error <= 2e-5 * largest, "{what}: {ours} for {expected}");
    }
}

fn likeliest(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.map_or(0, |(index, _)| index as u32)
}

fn prompt(model: &Architecture, length: usize) -> Vec<u32> {
    let vocabulary = model.vocabulary() as f32;
    spread(length, 5)
        .map(|r| ((r + 1.0) / 2.0 * vocabulary) as u32)
        .collect()
}

/// Continues a prompt up to `length` tokens; the likeliest after each is that of the whole text.
fn continues_as_the_whole_text_does(
    what: &str,
    model: &Architecture,
    adapters: Option<AdapterShape>,
    weights: &mut dyn WeightSource,
    length: usize,
) {
    let options = GeneratorOptions {
        adapters: adapters.clone(),
        ..options(length)
    };
    let mut generator = Generator::new(model, weights, &options).unwrap();
    let mut text = prompt(model, 7);
    while text.len() < length {
        let expected = whole_text_logits(model, adapters.as_ref(), weights, &text);
        let at = format!("{what} after {} tokens", text.len());
        assert_close(&at, generator.logits(&text).unwrap(), &expected);
        let token = generator.next(&text, &GREEDY, 0).unwrap();
        assert_eq!(token, likeliest(&expected), "{at}");
        // Invented weights like to repeat themselves, which would hide what others leave behind.
        let away = 7 * text.len() as u32;
        text.push((token + away) % model.vocabulary() as u32);
    }
    // All at once, in runs of many tokens, gives what one after the other gave.
    let mut at_once = Generator::new(model, weights, &options).unwrap();
    let one_by_one = generator.logits(&text).unwrap();
    assert_close(what, at_once.logits(&text).unwrap(), one_by_one);
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/decoder")
        .join(name)
}

fn decoder(name: &str) -> Architecture {
    let folder = fixture(name);
    let found = cinch_architecture::find(&folder.to_string_lossy(), &HubFolders::default());
    found.unwrap().architecture
}

fn integers(file: &WeightFiles, name: &str) -> Vec<u32> {
    let tensor = file.tensor(name).unwrap();
    let mut bytes = vec![0; tensor.num_bytes() as usize];
    file.read(name, 0..tensor.rows(), &mut bytes).unwrap();
    let words = bytes.as_chunks::<4>().0;
    words.iter().map(|&word| u32::from_le_bytes(word)).collect()
}

#[test]
fn scans_and_attention_continue_as_the_whole_text_does() {
    for (what, settings) in [
        ("mamba", tiny::MAMBA),
        ("mamba with convolution", tiny::MAMBA_WITH_CONVOLUTION),
        ("gpt2", tiny::GPT2),
    ] {
        let model = tiny::config(settings, &[]).model;
        let mut weights = Invented::default();
        continues_as_the_whole_text_does(what, &model, None, &mut weights, 40);
    }
}

/// Few keys, so that most tokens see more than they select.
fn sparse(adaptive_keys: bool, layers: u64) -> Architecture {
    let counts = Gsa {
        layers,
        adaptive_keys,
        base_keys: 8,
        least_keys: 3,
        most_keys: 40,
        ..Gsa::default()
    };
    Architecture::Gsa(Gsa {
        vocabulary: 97,
        width: 32,
        heads: 4,
        key_heads: 2,
        inner: 48,
        indexer_heads: 3,
        indexer_width: 8,
        indexer_warmup: 0,
        ..counts
    })
}

/// The number of keys of a token is that of the last one of a text. With several layers, those
/// before it would be given other numbers by a longer text, which no cache can know; with one, the
/// last token is all that counts.
#[test]
fn sparse_attention_continues_as_the_whole_text_does() {
    for (what, model) in [
        ("a fixed number of keys", sparse(false, 3)),
        ("adaptive numbers of keys", sparse(true, 1)),
    ] {
        let mut weights = Invented::default();
        continues_as_the_whole_text_does(what, &model, None, &mut weights, 40);
    }
}

#[test]
fn decoders_continue_as_the_whole_text_does() {
    for name in ["qwen2", "qwen3", "llama31", "tinyllama", "qwen2_window"] {
        let mut weights = Invented::default();
        continues_as_the_whole_text_does(name, &decoder(name), None, &mut weights, 30);
    }
}

/// A window of 7 and runs of 64 tokens have 70 slots, which longer texts use again.
#[test]
fn a_window_uses_its_slots_again() {
    let mut weights = Invented::default();
    continues_as_the_whole_text_does("mistral", &decoder("mistral"), None, &mut weights, 100);
}

#[test]
fn adapters_and_codes_generate_too() {
    let model = decoder("qwen2");
    for quantisation in [None, Some(Quantisation::Int8)] {
        let adapters = AdapterShape {
            rank: 4,
            scale: 2.0,
            dropout: 0.1,
            modules: Arc::new(linear_modules(&model).into_iter().collect()),
            whole: Arc::default(),
            quantisation,
        };
        let mut weights = Invented::default();
        let what = format!("qwen2 {quantisation:?}");
        continues_as_the_whole_text_does(&what, &model, Some(adapters), &mut weights, 24);
    }
}

#[test]
fn greedy_text_is_transformers() {
    for name in ["qwen2", "mistral"] {
        let weights = load_weights(&fixture(name).join("model.safetensors")).unwrap();
        let expected = load_weights(&fixture(name).join("generated.safetensors")).unwrap();
        let mut text = integers(&expected, "prompt");
        let generated = integers(&expected, "generated");
        let mut generator = Generator::new(&decoder(name), &mut &weights, &options(64)).unwrap();
        for (index, &token) in generated.iter().enumerate() {
            let ours = generator.next(&text, &GREEDY, index as u64).unwrap();
            assert_eq!(ours, token, "{name}, token {index}");
            text.push(ours);
        }
    }
}

/// What a model has read before does not change what it makes of a text: not another text with
/// the same beginning, not a longer one that is cut back.
#[test]
fn a_generator_can_turn_to_another_text() {
    let models = [
        tiny::config(tiny::MAMBA_WITH_CONVOLUTION, &[]).model,
        tiny::config(tiny::GPT2, &[]).model,
        decoder("mistral"),
        sparse(true, 2),
    ];
    for model in models {
        let mut weights = Invented::default();
        let long = prompt(&model, 30);
        let mut other = long[..20].to_vec();
        other[12] = (other[12] + 1) % model.vocabulary() as u32;
        let texts = [&long[..], &other, &long[..11], &long];
        let mut used = Generator::new(&model, &mut weights, &options(40)).unwrap();
        for text in texts {
            let mut fresh = Generator::new(&model, &mut weights, &options(40)).unwrap();
            let expected = fresh.logits(text).unwrap();
            assert_close(model.name(), used.logits(text).unwrap(), expected);
        }
    }
}

#[test]
fn a_text_beyond_the_context_loses_its_oldest_half() {
    let models = [
        tiny::config(tiny::MAMBA_WITH_CONVOLUTION, &[]).model,
        tiny::config(tiny::GPT2, &[]).model,
        decoder("qwen2"),
    ];
    const CONTEXT: usize = 16;
    for model in models {
        let mut weights = Invented::default();
        let mut generator = Generator::new(&model, &mut weights, &options(CONTEXT)).unwrap();
        let text = prompt(&model, 40);
        for length in 1..=text.len() {
            let left_out = length.saturating_sub(CONTEXT).div_ceil(8) * 8;
            let expected = whole_text_logits(&model, None, &mut weights, &text[left_out..length]);
            let at = format!("{} after {length} tokens", model.name());
            assert_close(&at, generator.logits(&text[..length]).unwrap(), &expected);
        }
    }
}

#[test]
fn threads_do_not_change_the_text() {
    let model = tiny::config(tiny::MAMBA_WITH_CONVOLUTION, &[]).model;
    let logits = |threads| {
        let options = GeneratorOptions {
            engine: EngineOptions {
                threads: Some(threads),
                ..EngineOptions::default()
            },
            ..options(40)
        };
        let mut generator = Generator::new(&model, &mut Invented::default(), &options).unwrap();
        generator.logits(&prompt(&model, 23)).unwrap().to_vec()
    };
    assert_eq!(logits(1), logits(3));
}

#[test]
fn weights_of_another_shape_are_refused_by_name() {
    let weights = load_weights(&fixture("mistral").join("model.safetensors")).unwrap();
    let error = Generator::new(&decoder("qwen2"), &mut &weights, &options(8));
    let error = error.err().unwrap().to_string();
    assert!(error.contains("model.embed_tokens.weight"), "{error}");
}

/// Weights and cache have one place, and the cache is as large as the context.
#[test]
fn the_cache_is_part_of_the_plan() {
    let model = decoder("qwen2");
    let bytes = |context| {
        let mut weights = Invented::default();
        let generator = Generator::new(&model, &mut weights, &options(context)).unwrap();
        generator.memory()
    };
    let (short, long) = (bytes(32), bytes(128));
    assert_eq!(short.weights, long.weights);
    // Keys and values of two layers with two heads of 16 columns, in single precision.
    assert_eq!(short.cache, 2 * 2 * 32 * 2 * 16 * 4);
    assert_eq!(long.cache, 4 * short.cache);
}

/// Both executors, over a prompt in several runs and then token by token; in bf16 within what its
/// roundings come to over the layers.
#[test]
#[ignore = "needs a GPU"]
fn a_gpu_reads_as_the_cpu_does() {
    let models = [
        tiny::config(tiny::MAMBA_WITH_CONVOLUTION, &[]).model,
        tiny::config(tiny::GPT2, &[]).model,
        decoder("qwen2"),
        decoder("qwen3"),
        decoder("mistral"),
    ];
    for model in models {
        let text = prompt(&model, 40);
        for (compute, tolerance) in [(DType::F32, 1e-4), (DType::Bf16, 0.12)] {
            assert_gpu_reads_as_the_cpu_does(&model, &text, compute, tolerance);
        }
    }
    // In 16 bits, a score close to another may select another key; and so may, in any precision,
    // those of a token that comes twice, which runs of other lengths round differently.
    let text: Vec<u32> = (0..40).map(|place| (5 + 37 * place) % 97).collect();
    for adaptive in [false, true] {
        assert_gpu_reads_as_the_cpu_does(&sparse(adaptive, 2), &text, DType::F32, 1e-4);
    }
}

fn assert_gpu_reads_as_the_cpu_does(
    model: &Architecture,
    text: &[u32],
    compute: DType,
    tolerance: f64,
) {
    let mut weights = Invented::default();
    let on_gpu = GeneratorOptions {
        target: Target::Cuda,
        compute,
        ..options(40)
    };
    let mut cpu = Generator::new(model, &mut weights, &options(40)).unwrap();
    let mut gpu = Generator::new(model, &mut weights, &on_gpu).unwrap();
    for length in 27..=text.len() {
        let expected = cpu.logits(&text[..length]).unwrap();
        let ours = gpu.logits(&text[..length]).unwrap();
        let square = |x: f32| f64::from(x) * f64::from(x);
        let norm: f64 = expected.iter().map(|&x| square(x)).sum();
        let pairs = ours.iter().zip(expected);
        let difference: f64 = pairs.map(|(a, b)| square(a - b)).sum();
        let error = (difference / norm).sqrt();
        let what = format!("{} in {compute} after {length} tokens", model.name());
        assert!(error <= tolerance, "{what}: {error:e}");
    }
}
