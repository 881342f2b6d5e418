//! `cinch bench`: a training step beside a matrix product, measured in the same run; of one
//! configuration, or of every system.

mod systems;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cinch_config::{Bytes, Config, Settings};
use cinch_device::Card;
use cinch_engine::{Engine, EngineOptions, cuda, gemm_rate};
use cinch_graph::Target;
use cinch_model::compute_type;
use cinch_step::Prediction;
use cinch_train::{Session, peak_resident_bytes};
use serde_json::json;

use super::profile::predicted_and_measured;
use super::{print, print_json};
use crate::args::BenchArguments;
use crate::device;
use crate::failure::usage;
use crate::measure::{self, median, synthetic_batch};
use crate::overhead::{self, Measured};
use crate::settings::for_the_engine;
use crate::table::{right, scaled};
use crate::unfollowed::before_figures;
use crate::voice;
use systems::SYSTEMS;

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
            Target::Cpu => Self::Cpu(gemm_rate::Product::new(Card::CPU_PRODUCT)),
            Target::Cuda => {
                let dtype = compute_type(config.batch.precision);
                Self::Cuda(cuda::matrix_rate(dtype, tf32)?)
            }
        })
    }

    fn rate(&mut self, engine: &Engine) -> f64 {
        match (self, engine.cpu()) {
            (Self::Cpu(product), Some(executor)) => measure::product_rate(product, executor),
            (Self::Cuda(rate), _) => *rate,
            (Self::Cpu(_), None) => f64::NAN,
        }
    }
}

/// What one configuration's steps took.
struct Bench {
    config: Config,
    device: String,
    device_used: Option<u64>,
    /// Of each step, in seconds.
    times: Vec<f64>,
    time: f64,
    /// Of the yardstick, in operations a second.
    rate: f64,
    share: f64,
    useful: f64,
    tokens: f64,
    arena: u64,
    resident: Option<u64>,
    prediction: Option<Prediction>,
    trace: BTreeMap<&'static str, Duration>,
}

pub fn run(arguments: &BenchArguments) -> anyhow::Result<()> {
    if arguments.steps == 0 {
        return Err(usage("--steps 0 measures nothing\nhint: 5 is the default"));
    }
    let target = device::train_target(arguments.device)?;
    if arguments.all {
        return run_all(arguments, target);
    }
    let settings = arguments.settings.settings()?;
    let bench = measure_settings(arguments, target, &settings)?;
    match arguments.json {
        true => print_json(&bench.as_json()),
        false => print(&bench.as_text(arguments)),
    }
}

/// Every system, one after the other.
fn run_all(arguments: &BenchArguments, target: Target) -> anyhow::Result<()> {
    let mut table = crate::table::new(&[
        "system",
        "batch",
        "step",
        "predicted",
        "of the product",
        "arena",
    ]);
    let mut all = Vec::new();
    for system in SYSTEMS {
        let settings = system.settings(&arguments.settings)?;
        voice::aside(Some(format!("measuring {}", system.name)));
        let bench = measure_settings(arguments, target, &settings)?;
        let batch = &bench.config.batch;
        let predicted = bench.prediction.as_ref();
        let predicted = predicted.map(|prediction| format!("{:.3} s", prediction.seconds));
        table.add_row([
            system.name.into(),
            right(format!("{} × {}", batch.effective_batch(), batch.seq_len)),
            right(format!("{:.3} s", bench.time)),
            right(predicted.unwrap_or_default()),
            right(format!("{:.1} %", 100.0 * bench.share)),
            right(Bytes::new(bench.arena).to_string()),
        ]);
        all.push(bench.as_json());
    }
    match arguments.json {
        true => print_json(&json!({ "systems": all })),
        false => print(&format!(
            "{table}\nof the product: useful work a second over the rate of a large matrix product, \
             measured between the steps\n"
        )),
    }
}

fn measure_settings(
    arguments: &BenchArguments,
    target: Target,
    settings: &Settings,
) -> anyhow::Result<Bench> {
    voice::explain(settings);
    let mut config = settings.resolve()?;
    for_the_engine(&arguments.settings, settings, &config)?;
    for note in before_figures(settings, &config) {
        voice::aside(Some(note));
    }
    if target == Target::Cpu {
        device::adapt_to_cpu(&mut config);
    }
    let plan = cinch_fit::plan(&config, overhead::machine(target))?;
    let config = plan.config.clone();
    let (useful, arena) = (plan.useful_flops() as f64, plan.arena_bytes());
    let mut yardstick = Yardstick::new(target, &config, arguments.processor.tf32)?;
    let options = EngineOptions {
        threads: arguments.processor.threads,
        tf32: arguments.processor.tf32,
        device: 0,
        other_ranks: 0,
        deterministic: arguments.processor.deterministic,
    };
    let mut session = Session::new(plan, options)?;
    session.initialize(config.training.seed)?;
    if let Some(measured) = Measured::read(session.engine(), session.plan())? {
        overhead::keep(&measured);
    }
    let batch = synthetic_batch(session.plan());

    let mut times = Vec::new();
    let mut rates = Vec::new();
    let mut trace = BTreeMap::new();
    for step in 0..=arguments.steps as u64 {
        let start = Instant::now();
        if arguments.trace {
            session.train_step_traced(&batch, step, &mut |op, _, time| {
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
    let pairs = times.iter().zip(&rates);
    let shares: Vec<f64> = pairs.map(|(time, rate)| useful / time / rate).collect();
    let rate = median(&rates);
    let resident = peak_resident_bytes();
    // After the peak was read: measuring a CPU's rates takes memory.
    let prediction = measure::card(session.engine(), Some(rate))
        .map(|card| session.plan().predict(&card, arguments.processor.tf32));
    Ok(Bench {
        device: session.engine().describe(),
        device_used: device_used(session.engine()),
        time: median(&times),
        rate,
        share: median(&shares),
        useful,
        tokens: (config.batch.effective_batch() * config.batch.seq_len) as f64,
        arena,
        resident,
        prediction,
        trace,
        times,
        config,
    })
}

impl Bench {
    fn as_json(&self) -> serde_json::Value {
        let Config { model, batch, .. } = &self.config;
        json!({
            "model": model.name(),
            "size": model.size_name(),
            "batch_size": batch.batch_size,
            "accumulation": batch.accumulation,
            "seq_len": batch.seq_len,
            "device": self.device,
            "device_used_bytes": self.device_used,
            "step_seconds": self.time,
            "predicted_seconds": self.prediction.as_ref().map(|prediction| prediction.seconds),
            "step_seconds_all": self.times,
            "tokens_per_second": self.tokens / self.time,
            "useful_flops": self.useful,
            "gemm_flops_per_second": self.rate,
            "share_of_gemm": self.share,
            "arena_bytes": self.arena,
            "peak_resident_bytes": self.resident,
        })
    }

    fn as_text(&self, arguments: &BenchArguments) -> String {
        let Config { model, batch, .. } = &self.config;
        let mut text = format!(
            "{} {}: batch {} × {}, {} tokens, {}\n\
             step            {:.3} s (median of {}; {:.0} tokens/s)\n\
             useful work     {}FLOP a step, {}FLOP/s\n\
             matrix product  {}FLOP/s (a large square one, in this run)\n\
             share           {:.1} % of the matrix product's rate\n\
             arena           {}\n",
            model.name(),
            model.size_name().unwrap_or("custom"),
            batch.batch_size,
            batch.accumulation,
            batch.seq_len,
            self.device,
            self.time,
            self.times.len(),
            self.tokens / self.time,
            scaled(self.useful),
            scaled(self.useful / self.time),
            scaled(self.rate),
            100.0 * self.share,
            Bytes::new(self.arena),
        );
        text += &predicted_and_measured(self.prediction.as_ref(), self.time);
        if let Some(used) = self.device_used {
            let used = Bytes::new(used);
            text += &format!("device memory   {used} in use by the driver's account\n");
        }
        if let Some(resident) = self.resident {
            text += &format!("peak resident   {}\n", Bytes::new(resident));
        }
        if arguments.trace {
            text += &by_op(&self.trace, arguments.steps);
        }
        text
    }
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
