//! Sampling text from a checkpoint's weights.
//!
//! The model is planned once per length of context, rounded up to a power of two; all of those
//! plans share one arena with the weights at its start. It runs in single precision on either
//! executor, so that a text depends on the weights and the seed alone.

use cinch_architecture::Architecture;
use cinch_engine::{Engine, EngineOptions, Part};
use cinch_graph::{DType, Graph, Target};
use cinch_model::{Build, Purpose, build, input};
use cinch_plan::{Options, Plan};

use crate::checkpoint::WeightFiles;
use crate::error::TrainError;
use crate::initialize::mix;
use crate::session::{copy_parameter, placement};

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the likeliest token.
    pub temperature: f64,
    /// Only the likeliest so many; 0 for all.
    pub top_k: usize,
    /// Only the likeliest that together have this probability.
    pub top_p: f64,
    /// Divides the odds of tokens that occurred already; 1 for none.
    pub repetition_penalty: f64,
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.8,
            top_k: 50,
            top_p: 0.95,
            repetition_penalty: 1.0,
            seed: 42,
        }
    }
}

/// The shortest context that is planned for.
const SHORTEST: usize = 32;

/// The model for one length of context.
struct Program {
    length: usize,
    graph: Graph,
    plan: Plan,
    part: Part,
}

pub struct Generator {
    engine: Engine,
    /// Shortest first.
    programs: Vec<Program>,
    max_seq_len: usize,
    logits: Vec<f32>,
}

impl Generator {
    /// Plans contexts up to `longest` tokens (at most the model's positions) and loads the
    /// weights.
    pub fn new(
        model: &Architecture,
        weights: &WeightFiles,
        longest: usize,
        target: Target,
        options: EngineOptions,
    ) -> Result<Self, TrainError> {
        let max_seq_len = model.positions().map_or(longest, |most| most as usize);
        let longest = longest.clamp(1, max_seq_len);
        let mut plans = Vec::new();
        let mut length = SHORTEST.min(max_seq_len);
        loop {
            let form = Build::plain(1, length, DType::F32, Purpose::Generate);
            let graph = build(model, &form).map_err(cinch_step::StepError::from)?;
            let plan = Plan::new(&graph, Options::new(target));
            plans.push((length, graph, plan));
            if length >= longest {
                break;
            }
            length = (length * 2).min(max_seq_len);
        }
        let arena = plans.iter().map(|(_, _, plan)| plan.arena_bytes).max();
        let mut engine = Engine::new(target, arena.unwrap_or(0), options)?;
        let mut programs = Vec::new();
        for (length, graph, plan) in plans {
            let part = engine.prepare(&graph, &plan, 0..graph.nodes.len(), true)?;
            programs.push(Program {
                length,
                graph,
                plan,
                part,
            });
        }
        // Weights come first in every plan, so those of one are those of all.
        if let Some(Program { graph, plan, .. }) = programs.first() {
            for parameter in &graph.parameters {
                let place = placement(plan, parameter.master);
                let copied = engine.write_with(place, |bytes: &mut [u8]| {
                    copy_parameter(graph, parameter, weights, bytes)
                })?;
                copied.map_err(|problem| TrainError::OtherModel {
                    path: "the checkpoint".into(),
                    problem,
                })?;
            }
        }
        Ok(Self {
            engine,
            programs,
            max_seq_len,
            logits: Vec::new(),
        })
    }

    /// The longest context the model sees; older tokens are left out.
    pub fn max_seq_len(&self) -> usize {
        self.max_seq_len
    }

    /// The token after `context`, which is not empty; `index` tells the draws of one text
    /// apart.
    pub fn next(
        &mut self,
        context: &[u32],
        sampling: &Sampling,
        index: u64,
    ) -> Result<u32, TrainError> {
        let longest = self.programs.last().map_or(1, |program| program.length);
        let visible = &context[context.len().saturating_sub(longest)..];
        self.run(visible)?;
        penalize(&mut self.logits, visible, sampling.repetition_penalty);
        let draw = mix(sampling.seed ^ mix(index)) >> 11;
        let uniform = draw as f64 / (1_u64 << 53) as f64;
        Ok(choose(&self.logits, sampling, uniform))
    }

    /// Fills `logits` with those of the last position of `context`.
    fn run(&mut self, context: &[u32]) -> Result<(), TrainError> {
        let fits = |program: &&Program| program.length >= context.len();
        let Some(program) = self.programs.iter().find(fits) else {
            return Ok(());
        };
        let (graph, plan) = (&program.graph, &program.plan);
        if let Some(tokens) = graph.find(input::TOKENS) {
            let mut values = vec![0_i32; program.length];
            for (value, &token) in values.iter_mut().zip(context) {
                *value = token.cast_signed();
            }
            self.engine.write(placement(plan, tokens), &values)?;
        }
        if let Some(position) = graph.find(input::POSITION) {
            let last = [context.len() as i32 - 1];
            self.engine.write(placement(plan, position), &last)?;
        }
        self.engine.run(graph, plan, &program.part)?;
        if let Some(result) = graph.result {
            let bytes = self.engine.bytes(placement(plan, result))?;
            let words = bytes.as_chunks::<4>().0;
            self.logits.clear();
            let values = words.iter().map(|&word| f32::from_ne_bytes(word));
            self.logits.extend(values);
        }
        Ok(())
    }
}

/// Divides positive and multiplies negative logits of tokens that were seen.
fn penalize(logits: &mut [f32], seen: &[u32], penalty: f64) {
    if penalty == 1.0 {
        return;
    }
    let mut done = std::collections::HashSet::new();
    for &token in seen {
        if let Some(logit) = logits.get_mut(token as usize)
            && done.insert(token)
        {
            let factor = if *logit > 0.0 { 1.0 / penalty } else { penalty };
            *logit = (f64::from(*logit) * factor) as f32;
        }
    }
}

/// The token that `uniform` in [0, 1) falls on among those that the settings leave.
fn choose(logits: &[f32], sampling: &Sampling, uniform: f64) -> u32 {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let logit = |token: u32| logits[token as usize];
    let by_likelihood = |a: &u32, b: &u32| logit(*b).total_cmp(&logit(*a)).then(a.cmp(b));
    let keep = match sampling.top_k {
        _ if sampling.temperature <= 0.0 => 1,
        0 => order.len(),
        k => k.min(order.len()),
    };
    if keep < order.len() {
        order.select_nth_unstable_by(keep, by_likelihood);
        order.truncate(keep);
    }
    order.sort_unstable_by(by_likelihood);
    let Some(&likeliest) = order.first() else {
        return 0;
    };
    if sampling.temperature <= 0.0 {
        return likeliest;
    }
    let top = f64::from(logit(likeliest));
    let weight = |token: u32| ((f64::from(logit(token)) - top) / sampling.temperature).exp();
    let total: f64 = order.iter().map(|&token| weight(token)).sum();
    let mut reached = 0.0;
    let mut kept = 0;
    while kept < order.len() && (kept == 0 || reached < sampling.top_p * total) {
        reached += weight(order[kept]);
        kept += 1;
    }
    let mut target = uniform * reached;
    for &token in &order[..kept] {
        target -= weight(token);
        if target < 0.0 {
            return token;
        }
    }
    order[kept - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampling(temperature: f64, top_k: usize, top_p: f64) -> Sampling {
        Sampling {
            temperature,
            top_k,
            top_p,
            ..Sampling::default()
        }
    }

    #[test]
    fn the_settings_leave_what_they_should() {
        let logits = [1.0, 3.0, 2.0, -1.0];
        let drawn = |s: &Sampling| -> Vec<u32> {
            let draws = (0..1000).map(|i| choose(&logits, s, f64::from(i) / 1000.0));
            let mut drawn: Vec<u32> = draws.collect();
            drawn.sort_unstable();
            drawn.dedup();
            drawn
        };
        assert_eq!(drawn(&sampling(0.0, 0, 1.0)), [1]);
        assert_eq!(drawn(&sampling(1.0, 2, 1.0)), [1, 2]);
        assert_eq!(drawn(&sampling(1.0, 0, 1.0)), [0, 1, 2, 3]);
        assert_eq!(drawn(&sampling(1.0, 0, 0.8)), [1, 2]);
        assert_eq!(drawn(&sampling(1.0, 0, 0.0)), [1]);
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let logits = [0.0, (2.0_f32).ln()];
        let draws =
            (0..3000).map(|i| choose(&logits, &sampling(1.0, 0, 1.0), f64::from(i) / 3000.0));
        let ones: u32 = draws.sum();
        assert!((ones as i32 - 2000).abs() <= 1, "{ones}");
    }

    #[test]
    fn a_penalty_lowers_what_was_seen() {
        let mut logits = [2.0, -2.0, 1.0];
        penalize(&mut logits, &[0, 1, 0], 2.0);
        assert_eq!(logits, [1.0, -4.0, 1.0]);
    }
}
