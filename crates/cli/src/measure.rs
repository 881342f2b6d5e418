//! What the commands that measure have in common: a batch, a median, and the rates of the
//! processor that a prediction needs.

use std::collections::BTreeMap;

use cinch_device::{Card, find_detected};
use cinch_engine::{Engine, Executor, copy_rate, gemm_rate, sigmoid_rate};
use cinch_model::input;
use cinch_step::StepPlan;
use cinch_train::Batch;

const PRODUCT_RUNS: usize = 5;

/// Full rows of tokens that look random to the model; the arithmetic is the same for any. Whatever
/// the graph reads has its ordinary content: targets count, texts fill their rows, all that can be
/// compared is, and rows are of one piece, also where they could hold several.
pub fn synthetic_batch(plan: &StepPlan) -> Batch {
    let config = &plan.config;
    let (seq_len, vocabulary) = (config.batch.seq_len, config.model.vocab_size());
    let sequences = config.batch.effective_batch();
    let mut batch = Batch::of_step(plan, sequences);
    let columns = batch.columns_mut();
    let widths: BTreeMap<String, usize> = columns
        .map(|(name, width, _)| (name.to_owned(), width))
        .collect();
    let mut state = 1_u32;
    for (name, width, values) in batch.columns_mut() {
        if let Some(texts) = input::texts_of_lengths(name) {
            let tokens = widths.get(&input::tokens_of(texts)).copied();
            values.fill((tokens.unwrap_or(0) / width.max(1)) as i32);
        } else if name == input::POSITIONS {
            for (place, position) in values.iter_mut().enumerate() {
                *position = (place % seq_len) as i32;
            }
        } else if name == input::COMPARED {
            values.fill(1);
        } else if name != input::STARTS {
            for token in values {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                *token = ((state >> 8) as usize % vocabulary) as i32;
            }
        }
    }
    batch
}

pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The rates of what runs: a GPU's from the table, the CPU's measured now (which takes memory
/// of its own for a moment), its products unless their rate was measured already. None for a GPU
/// that is not in the table.
pub fn card(engine: &Engine, matrix_flops: Option<f64>) -> Option<Card> {
    match engine {
        Engine::Cuda(executor) => {
            let info = executor.info();
            let found = find_detected(&info.name, Some(info.total_bytes))?;
            Some(Card {
                name: info.name.clone(),
                ..found.card()
            })
        }
        Engine::Cpu(executor) => Some(cpu_card(executor, matrix_flops)),
    }
}

/// The best of a few products: the first finds its operands far from the cores.
pub fn product_rate(product: &mut gemm_rate::Product, executor: &Executor) -> f64 {
    let rates = (0..PRODUCT_RUNS).map(|_| product.rate(executor));
    rates.fold(0.0, f64::max)
}

/// The rates of the CPU, measured now.
pub fn cpu_card(executor: &Executor, matrix_flops: Option<f64>) -> Card {
    let matrix_flops = matrix_flops
        .unwrap_or_else(|| product_rate(&mut gemm_rate::Product::new(Card::CPU_PRODUCT), executor));
    let sigmoids = sigmoid_rate::sigmoid_rate(executor);
    let bandwidth = copy_rate::copy_rate(executor, copy_rate::LARGE);
    let cached = copy_rate::copy_rate(executor, Card::CACHED_BYTES);
    Card {
        cache_bandwidth: Some(cached),
        ..Card::cpu(executor.num_threads(), matrix_flops, sigmoids, bandwidth)
    }
}

#[cfg(test)]
mod tests {
    use cinch_config::{Settings, Source};
    use cinch_graph::Target;

    use super::*;

    #[test]
    fn a_batch_has_tokens_of_the_vocabulary_and_all_targets() {
        let mut settings = Settings::new();
        for (key, value) in [
            ("model.size", "tiny"),
            ("model.vocab_size", "7"),
            ("vram.batch_size", "3"),
            ("vram.gradient_accumulation_steps", "1"),
            ("vram.max_seq_len", "50"),
        ] {
            let source = Source::Flag("--set".to_owned());
            settings.set(key, value, source).unwrap();
        }
        let plan = StepPlan::new(&settings.resolve().unwrap(), Target::Cpu, 0).unwrap();
        let batch = synthetic_batch(&plan);
        assert_eq!(batch.num_targets(), 150);
        let all = batch.tokens().iter().chain(batch.targets());
        assert!(all.clone().all(|token| (0..7).contains(token)));
        assert!((0..7).all(|token| all.clone().any(|&other| other == token)));
    }

    #[test]
    fn texts_fill_their_rows_and_all_are_compared() {
        let mut settings = Settings::new();
        for (key, value) in [
            ("model.type", "naics"),
            ("model.vocab_size", "11"),
            ("model.d_model", "8"),
            ("model.n_heads", "2"),
            ("model.n_layers", "1"),
            ("model.title_length", "5"),
            ("model.negatives", "3"),
            ("vram.batch_size", "2"),
            ("vram.gradient_accumulation_steps", "1"),
            ("vram.max_seq_len", "9"),
        ] {
            let source = Source::Flag("--set".to_owned());
            settings.set(key, value, source).unwrap();
        }
        let plan = StepPlan::new(&settings.resolve().unwrap(), Target::Cpu, 0).unwrap();
        let batch = synthetic_batch(&plan);
        let lengths = |channel: &str, chunk| {
            let texts = input::chunk_of(channel, chunk);
            batch.get(&input::lengths_of(&texts)).to_vec()
        };
        assert_eq!(lengths("title", 0), [5; 10]);
        assert_eq!(lengths("examples", 2), [9; 2]);
        assert_eq!(batch.get(input::COMPARED), [1; 8]);
        let tokens = batch.get(&input::tokens_of(&input::chunk_of("description", 1)));
        assert_eq!(tokens.len(), 4 * 9);
        assert!(tokens.iter().all(|token| (0..11).contains(token)));
        assert!(tokens.iter().any(|&token| token != tokens[0]));
    }

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(&[5.0, 1.0, 2.0]), 2.0);
        assert!(median(&[]).is_nan());
    }
}
