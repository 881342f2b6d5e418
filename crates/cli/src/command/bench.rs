//! `cinch bench`: a training step beside a matrix product, measured in the same run.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cinch_config::Bytes;
use cinch_engine::gemm_rate;
use cinch_graph::Target;
use cinch_train::{Batch, Session, peak_resident_bytes};
use serde_json::json;

use super::{print, print_json};
use crate::args::BenchArguments;
use crate::device;
use crate::failure::usage;
use crate::table::{right, scaled};

/// The square product that the step is held against: large enough to reach the full rate.
const PRODUCT: usize = 1536;

pub fn run(arguments: &BenchArguments) -> anyhow::Result<()> {
    if arguments.steps == 0 {
        return Err(usage("--steps 0 measures nothing\nhint: 5 is the default"));
    }
    let settings = arguments.settings.settings()?;
    let mut config = settings.resolve()?;
    device::adapt_to_cpu(&mut config);
    let plan = cinch_fit::plan(&config, Target::Cpu)?;
    let config = plan.config.clone();
    let (useful, arena) = (plan.useful_flops() as f64, plan.arena_bytes());
    let (vocabulary, sequences) = (config.model.vocab_size(), config.batch.effective_batch());
    let mut session = Session::new(plan, arguments.threads)?;
    session.initialize(config.training.seed);
    let batch = synthetic(sequences, config.batch.seq_len, vocabulary);

    let mut product = gemm_rate::Product::new(PRODUCT);
    let mut times = Vec::new();
    let mut rates = Vec::new();
    let mut trace = BTreeMap::new();
    for step in 0..=arguments.steps as u64 {
        let start = Instant::now();
        if arguments.trace {
            session.train_step_traced(&batch, step, &mut |op, time| {
                *trace.entry(op).or_insert(Duration::ZERO) += time;
            })?;
        } else {
            session.train_step(&batch, step)?;
        }
        let time = start.elapsed().as_secs_f64();
        let rate = product.rate(session.executor());
        // The first step touches the memory for the first time.
        if step > 0 {
            times.push(time);
            rates.push(rate);
        } else {
            trace.clear();
        }
    }
    let shares: Vec<f64> = times
        .iter()
        .zip(&rates)
        .map(|(time, rate)| useful / time / rate)
        .collect();
    let (time, rate, share) = (median(&times), median(&rates), median(&shares));
    let tokens = (sequences * config.batch.seq_len) as f64;
    let resident = peak_resident_bytes();
    if arguments.json {
        return print_json(&json!({
            "model": config.model.name(),
            "size": config.model.size(),
            "batch_size": config.batch.batch_size,
            "accumulation": config.batch.accumulation,
            "seq_len": config.batch.seq_len,
            "threads": session.num_threads(),
            "step_seconds": time,
            "step_seconds_all": times,
            "tokens_per_second": tokens / time,
            "useful_flops": useful,
            "gemm_flops_per_second": rate,
            "share_of_gemm": share,
            "arena_bytes": arena,
            "peak_resident_bytes": resident,
        }));
    }
    let mut text = format!(
        "{} {}: batch {} × {}, {} tokens, {} threads\n\
         step            {:.3} s (median of {}; {:.0} tokens/s)\n\
         useful work     {}FLOP a step, {}FLOP/s\n\
         matrix product  {}FLOP/s ({PRODUCT}³, between the steps)\n\
         share           {:.1} % of the matrix product's rate\n\
         arena           {}\n",
        config.model.name(),
        config.model.size().unwrap_or("custom"),
        config.batch.batch_size,
        config.batch.accumulation,
        config.batch.seq_len,
        session.num_threads(),
        time,
        times.len(),
        tokens / time,
        scaled(useful),
        scaled(useful / time),
        scaled(rate),
        100.0 * share,
        Bytes::new(arena),
    );
    if let Some(resident) = resident {
        text += &format!("peak resident   {}\n", Bytes::new(resident));
    }
    if arguments.trace {
        text += &by_op(&trace, arguments.steps);
    }
    print(&text)
}

/// Tokens that look random to the model; the arithmetic is the same for any.
fn synthetic(sequences: usize, seq_len: usize, vocabulary: usize) -> Batch {
    let mut batch = Batch::new(sequences, seq_len);
    let mut state = 1_u32;
    for token in batch.tokens.iter_mut().chain(&mut batch.targets) {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *token = ((state >> 8) as usize % vocabulary) as i32;
    }
    batch
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

fn by_op(trace: &BTreeMap<&'static str, Duration>, steps: usize) -> String {
    let total: Duration = trace.values().sum();
    let mut rows: Vec<_> = trace.iter().collect();
    rows.sort_by_key(|(_, time)| std::cmp::Reverse(**time));
    let mut table = crate::table::new(&["op", "ms a step", "share"]);
    for (op, time) in rows {
        let milliseconds = time.as_secs_f64() * 1e3 / steps as f64;
        let share = 100.0 * time.as_secs_f64() / total.as_secs_f64();
        table.add_row([
            (*op).into(),
            right(format!("{milliseconds:.2}")),
            right(format!("{share:.1} %")),
        ]);
    }
    table.to_string()
}
