//! `cinch bench`: a training step beside a matrix product, measured in the same run.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cinch_config::{Bytes, Config};
use cinch_engine::{Engine, EngineOptions, cuda, gemm_rate};
use cinch_graph::Target;
use cinch_model::compute_type;
use cinch_train::{Session, peak_resident_bytes};
use serde_json::json;

use super::profile::predicted_and_measured;
use super::{print, print_json};
use crate::args::BenchArguments;
use crate::device;
use crate::failure::usage;
use crate::measure::{self, PRODUCT, median, synthetic_batch};
use crate::overhead::{self, Measured};
use crate::settings::for_the_engine;
use crate::table::{right, scaled};
use crate::voice;

/// A matrix product to hold the step against.
enum Yardstick {
    /// Measured between the steps, because other programs share the machine.
    Cpu(gemm_rate::Product),
    /// Measured once, before the arena takes the card's memory.
    Cuda(f64),
}

impl Yardstick {
    fn new(target: Target, config: &Config, tf32: bool) -> anyhow::Result<Self> {
        Ok(match target {
            Target::Cpu => Self::Cpu(gemm_rate::Product::new(PRODUCT)),
            Target::Cuda => {
                let dtype = compute_type(config.batch.precision);
                Self::Cuda(cuda::matrix_rate(dtype, tf32)?)
            }
        })
    }

    fn rate(&mut self, engine: &Engine) -> f64 {
        match (self, engine.cpu()) {
            (Self::Cpu(product), Some(executor)) => product.rate(executor),
            (Self::Cuda(rate), _) => *rate,
            (Self::Cpu(_), None) => f64::NAN,
        }
    }
}

pub fn run(arguments: &BenchArguments) -> anyhow::Result<()> {
    if arguments.steps == 0 {
        return Err(usage("--steps 0 measures nothing\nhint: 5 is the default"));
    }
    let target = device::train_target(arguments.device)?;
    let settings = arguments.settings.settings()?;
    voice::explain(&settings);
    let mut config = settings.resolve()?;
    for_the_engine(&arguments.settings, &config)?;
    if target == Target::Cpu {
        device::adapt_to_cpu(&mut config);
    }
    let plan = cinch_fit::plan(&config, overhead::machine(target))?;
    let config = plan.config.clone();
    let (useful, arena) = (plan.useful_flops() as f64, plan.arena_bytes());
    let sequences = config.batch.effective_batch();
    let mut yardstick = Yardstick::new(target, &config, arguments.tf32)?;
    let options = EngineOptions {
        threads: arguments.threads,
        tf32: arguments.tf32,
        deterministic: arguments.deterministic,
    };
    let mut session = Session::new(plan, options)?;
    session.initialize(config.training.seed)?;
    if let Some(measured) = Measured::read(session.engine())? {
        overhead::keep(&measured);
    }
    let batch = synthetic_batch(session.plan());

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
        let rate = yardstick.rate(session.engine());
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
    // After the peak was read: measuring a CPU's rates takes memory.
    let prediction = measure::card(session.engine(), Some(rate))
        .map(|card| session.plan().predict(&card, arguments.tf32));
    if arguments.json {
        return print_json(&json!({
            "model": config.model.name(),
            "size": config.model.size_name(),
            "batch_size": config.batch.batch_size,
            "accumulation": config.batch.accumulation,
            "seq_len": config.batch.seq_len,
            "device": session.engine().describe(),
            "device_used_bytes": device_used(session.engine()),
            "step_seconds": time,
            "predicted_seconds": prediction.as_ref().map(|prediction| prediction.seconds),
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
        "{} {}: batch {} × {}, {} tokens, {}\n\
         step            {:.3} s (median of {}; {:.0} tokens/s)\n\
         useful work     {}FLOP a step, {}FLOP/s\n\
         matrix product  {}FLOP/s (a large square one, in this run)\n\
         share           {:.1} % of the matrix product's rate\n\
         arena           {}\n",
        config.model.name(),
        config.model.size_name().unwrap_or("custom"),
        config.batch.batch_size,
        config.batch.accumulation,
        config.batch.seq_len,
        session.engine().describe(),
        time,
        times.len(),
        tokens / time,
        scaled(useful),
        scaled(useful / time),
        scaled(rate),
        100.0 * share,
        Bytes::new(arena),
    );
    text += &predicted_and_measured(prediction.as_ref(), time);
    if let Some(used) = device_used(session.engine()) {
        text += &format!(
            "device memory   {} in use by the driver's account\n",
            Bytes::new(used)
        );
    }
    if let Some(resident) = resident {
        text += &format!("peak resident   {}\n", Bytes::new(resident));
    }
    if arguments.trace {
        text += &by_op(&trace, arguments.steps);
    }
    print(&text)
}

/// What the driver says is in use on the whole card.
fn device_used(engine: &Engine) -> Option<u64> {
    engine.cuda()?.used_bytes().ok()
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
