//! What the commands that measure have in common: a batch, a median, and the rates of the
//! processor that a prediction needs.

use cinch_device::{Card, find_detected};
use cinch_engine::{Engine, Executor, copy_rate, gemm_rate};
use cinch_model::input;
use cinch_step::StepPlan;
use cinch_train::Batch;

/// The square product that stands for the CPU's matrix rate: large enough to reach it.
pub const PRODUCT: usize = 1536;
const PRODUCT_RUNS: usize = 3;

/// Tokens that look random to the model; the arithmetic is the same for any.
pub fn synthetic_batch(plan: &StepPlan) -> Batch {
    let config = &plan.config;
    let (seq_len, vocabulary) = (config.batch.seq_len, config.model.vocab_size());
    let mut batch = Batch::of(&plan.longest().training, config.batch.effective_batch());
    // Rows are of one piece, also where they could hold several.
    let positions = batch.get_mut(input::POSITIONS).iter_mut();
    for (place, position) in positions.enumerate() {
        *position = (place % seq_len) as i32;
    }
    let [tokens, targets] = batch.get_disjoint_mut([input::TOKENS, input::TARGETS]);
    let mut state = 1_u32;
    for token in tokens.iter_mut().chain(targets) {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *token = ((state >> 8) as usize % vocabulary) as i32;
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

/// The rates of the CPU, measured now.
pub fn cpu_card(executor: &Executor, matrix_flops: Option<f64>) -> Card {
    let matrix_flops = matrix_flops.unwrap_or_else(|| {
        let mut product = gemm_rate::Product::new(PRODUCT);
        let rates = (0..PRODUCT_RUNS).map(|_| product.rate(executor));
        rates.fold(0.0, f64::max)
    });
    let bandwidth = copy_rate::copy_rate(executor);
    Card::cpu(executor.num_threads(), matrix_flops, bandwidth)
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
    fn the_median_is_in_the_middle() {
        assert_eq!(median(&[5.0, 1.0, 2.0]), 2.0);
        assert!(median(&[]).is_nan());
    }
}
